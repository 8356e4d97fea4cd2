"""The contract of every bundled task, and of the loader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_texts import write_book, write_code
from tiny_tokenizer import tiny_tokenizer

from kveval.errors import ConfigError, LengthError, TaskError, UnknownNameError
from kveval.haystack import depth_of
from kveval.identity import digest
from kveval.prompting import PromptTemplate, shared_prefix
from kveval.tasks import Sample, TaskContext, known_tasks, load_task

# Small enough for 256 tokens of the tiny tokenizer, but for `LEAST`.
SMALL: dict[str, dict[str, Any]] = {
    "niah_single": {},
    "niah_multikey": {"keys": 3, "queries": 2},
    "variable_tracking": {"hops": 1},
    "passkey_chain": {"hops": 2},
    "near_duplicate_keys": {"mates": 2},
    "perplexity": {"scored_tokens": 64},
    "long_ppl": {"scored_tokens": 64, "short_window": 32},
    "code_identifier": {},
    "code_completion": {"lines": 1},
    "long_generation": {"steps": 3, "boxes": 3},
    "niah_multivalue": {"values": 3},
    "niah_multiquery": {"keys": 3, "asked": 2},
    "common_words": {"common": 1, "repeats": 2, "others": 1},
    "frequent_words": {"asked": 1},
    "qa_single": {},
    "qa_multi_hop": {},
}
LEAST = {"common_words": 384, "qa_multi_hop": 361}
"""Made-up words and names are spelled in bytes."""
PLAIN = ("perplexity", "long_ppl", "code_identifier", "code_completion")
"""Tasks whose prompts are plain text behind BOS."""
OWN_TESTS = ("traffic",)
"""Tasks whose samples are a user's: not of exact length, not different for every seed."""
# Raise a task's VERSION when one of these has to change.
GOLDEN = {
    ("niah_single", 1): "d442196d563378f4",
    ("niah_multikey", 1): "f28d207a8dc4cb65",
    ("variable_tracking", 1): "8e9dbaeca451c832",
    ("passkey_chain", 1): "27f9a47a1349cf99",
    ("near_duplicate_keys", 1): "6d7c89a2a5172cb8",
    ("perplexity", 1): "0778b03177ccc241",
    ("long_ppl", 1): "0d6537821417ddd7",
    ("code_identifier", 1): "96999e9a3efaa3c5",
    ("code_completion", 1): "b25c8f7926196301",
    ("long_generation", 1): "67846ef8a00e75e9",
    ("niah_multivalue", 1): "96a7affa000ec3ea",
    ("niah_multiquery", 1): "7bb2dba86cb17fcb",
    ("common_words", 1): "72e38712d31f837e",
    ("frequent_words", 1): "ef6dbd6e0a1046c3",
    ("qa_single", 1): "0dfafa5adf527b40",
    ("qa_multi_hop", 1): "8e339aa7b7d71f4f",
}


def tokenizers() -> dict[str, Any]:
    """The tiny tokenizer with and without a chat template, and the demo model's own if it is here."""
    return {"tiny-chat": tiny_tokenizer(), "tiny-raw": tiny_tokenizer(None), "smollm2-135m": _smollm2()}


def _smollm2() -> Any:
    cache = os.environ.get("KVEVAL_CACHE")
    folder = Path(cache or "", "models", "smollm2-135m")
    if not cache or not (folder / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def loaded():
    return tokenizers()


@pytest.fixture(params=["tiny-chat", "tiny-raw", "smollm2-135m"])
def prompt(request, loaded):
    if loaded[request.param] is None:
        pytest.skip(f"{request.param} is not in KVEVAL_CACHE; fetch it with `kveval models fetch`")
    return PromptTemplate.from_tokenizer(loaded[request.param])


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> str:
    """A made-up text; made-up code lies beside it."""
    return write_texts(tmp_path_factory.mktemp("texts"))


def write_texts(folder: Path) -> str:
    write_book(folder / "book.txt")
    (folder / "code").mkdir()
    write_code(folder / "code", files=16)
    return f"file:{folder}/book.txt"


def small(name: str, book: str) -> Any:
    code = book.replace("book.txt", "code/*.py")
    corpus = {name: {"corpus": code if name.startswith("code") else book} for name in PLAIN}
    return load_task(name, SMALL[name] | corpus.get(name, {}))


def make(name: str, prompt: PromptTemplate, book: str, length: int = 512, n: int = 4, seed: int = 7) -> list[Sample]:
    return small(name, book).samples(TaskContext(prompt.tokenizer, prompt, length, n, seed))


def fingerprint(samples: list[Sample]) -> str:
    return digest("samples", [[s.id, s.prompt_ids, s.answer_ids, s.depth, s.cluster] for s in samples])


@pytest.fixture(params=SMALL)
def name(request):
    return request.param


def test_every_bundled_task_is_in_the_contract():
    assert set(known_tasks()) == {*SMALL, *OWN_TESTS}


@pytest.mark.parametrize("length", [256, 512, 1000, 4096])
def test_exact_length_unique_ids_and_order(name, prompt, book, length):
    length = max(length, LEAST.get(name, 0))
    samples = make(name, prompt, book, length, n=5)
    assert [len(s.prompt_ids) + len(s.answer_ids) for s in samples] == [length] * 5
    assert [s.context_length for s in samples] == [length] * 5
    assert [s.index for s in samples] == list(range(5))
    assert len({s.id for s in samples}) == 5
    json.dumps([dict(s.metadata) for s in samples], allow_nan=False)


def test_the_number_of_samples_changes_no_sample(name, prompt, book):
    assert make(name, prompt, book, n=3) == make(name, prompt, book, n=16)[:3]


def test_seed_changes_the_samples(name, prompt, book):
    ids = [s.id for seed in (0, 1) for s in make(name, prompt, book, seed=seed)]
    assert len(set(ids)) == 8


def test_no_special_token_in_the_text(name, prompt, book):
    special = {i for i, token in prompt.tokenizer.added_tokens_decoder.items() if token.special}
    around = prompt.bos_ids if name in PLAIN else prompt.head_ids + prompt.tail("", "")
    for sample in make(name, prompt, book):
        assert [i for i in sample.prompt_ids if i in special] == [i for i in around if i in special]
        assert not special.intersection(sample.answer_ids)


def test_golden_digest_per_version(name, loaded, book):
    prompt = PromptTemplate.from_tokenizer(loaded["tiny-chat"])
    task = small(name, book)
    found = fingerprint(make(name, prompt, book))
    assert found == GOLDEN[name, task.version], f"samples of {name} changed: raise its VERSION"


def test_two_processes_with_other_hash_seeds_agree(tmp_path, loaded):
    book = write_texts(tmp_path)
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from test_tasks import *\n"
        "p = PromptTemplate.from_tokenizer(tiny_tokenizer())\n"
        "print({n: fingerprint(make(n, p, sys.argv[3])) for n in SMALL})"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, str(here), str(here.parent), book]
    running = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in running)
    assert first == second
    assert first.count(":") == len(SMALL)


@pytest.mark.parametrize("name", ["niah_single", "niah_multikey"])
def test_the_asked_needle_is_there_once_at_the_asked_depth(name, prompt, book):
    per_haystack = SMALL[name].get("queries", 1)
    for sample in make(name, prompt, book, length=4096, n=8):
        text = prompt.tokenizer.decode(sample.prompt_ids)
        key = re.search(r"magic number for (\S+) in the text", text)[1]
        assert text.count(f"One of the special magic numbers for {key} is: {sample.metadata['answer']}.") == 1
        assert text.count(sample.metadata["answer"]) == 1
        assert sample.depth == pytest.approx(
            depth_of(TaskContext(None, prompt, 4096, 8, 7), name, sample.index), abs=0.03
        )
        assert prompt.tokenizer.decode(sample.answer_ids).strip() == sample.metadata["answer"]
        assert sample.cluster == f"{name}-{sample.index // per_haystack:05d}"


def test_queries_of_a_haystack_share_its_prefix(prompt, book):
    samples = make("niah_multikey", prompt, book, length=1000)
    assert shared_prefix(samples[0].prompt_ids, samples[1].prompt_ids) > 850
    assert samples[1].cluster != samples[2].cluster


def test_passkey_chain_can_be_followed(prompt, book):
    for sample in make("passkey_chain", prompt, book, length=1000):
        text = prompt.tokenizer.decode(sample.prompt_ids)
        links = dict(re.findall(r"The passkey (\d+) leads to (\d+)\.", text))
        key = re.search(r"Start from the passkey (\d+)", text)[1]
        first, second = links[key], links[links[key]]
        assert (
            prompt.tokenizer.decode(sample.answer_ids).strip() == f"{first}.\n2. The passkey {first} leads to {second}"
        )
        assert len(sample.metadata["depths"]) == 2
        assert sample.depth == sample.metadata["depths"][0]


def test_passkey_chain_with_one_hop_reads_well(prompt):
    ctx = TaskContext(prompt.tokenizer, prompt, 512, 1, 0)
    (sample,) = load_task("passkey_chain", {"hops": 1}).samples(ctx)
    assert re.search(r"for 1 step\.[\s\S]*Here is the 1 step:\n1\. ", prompt.tokenizer.decode(sample.prompt_ids))


def test_variable_tracking_can_be_followed(prompt):
    task = load_task("variable_tracking", {"hops": 3, "chains": 2})
    for sample in task.samples(TaskContext(prompt.tokenizer, prompt, 2000, 3, 0)):
        text = prompt.tokenizer.decode(sample.prompt_ids)
        example, context = text.split("\n\nText:")
        value = re.search(r"which variables hold the value (\d{5})", context)[1]
        name = re.search(rf"VAR (\w+) = {value}\.", context)[1]
        chain = [name]
        while step := re.search(rf"VAR (\w+) = VAR {chain[-1]}\.", context):
            chain.append(step[1])
        assert prompt.tokenizer.decode(sample.answer_ids).strip() == ", ".join(chain)
        assert len(chain) == 4
        assert sample.metadata["depths"] == sorted(sample.metadata["depths"])
        assert value not in example


def test_perplexity_lengths_nest(prompt, book):
    short, long = (make("perplexity", prompt, book, length) for length in (300, 1000))
    for a, b in zip(short, long, strict=True):
        assert (a.prompt_ids + a.answer_ids) == (b.prompt_ids + b.answer_ids)[:300]
        assert len(a.answer_ids) == 64
        assert (a.cluster, a.depth) == (b.cluster, None)
    assert len({a.cluster for a in short}) == 4
    assert short[0].prompt_ids[: len(prompt.bos_ids)] == prompt.bos_ids


def test_perplexity_never_repeats_text(prompt, tmp_path):
    (tmp_path / "tiny.txt").write_text("Only a few words.")
    task = load_task("perplexity", {"corpus": f"file:{tmp_path}/tiny.txt"})
    with pytest.raises(TaskError, match=r"has only .* perplexity never repeats text"):
        task.samples(TaskContext(prompt.tokenizer, prompt, 512, 1, 0))
    with pytest.raises(TaskError, match="too short for 9 different passages"):
        load_task("perplexity", {"corpus": f"file:{tmp_path}/tiny.txt", "scored_tokens": 1}).samples(
            TaskContext(prompt.tokenizer, prompt, 4, 9, 0)
        )


def test_length_error_names_task_length_and_minimum(name, prompt, book):
    with pytest.raises(LengthError, match=rf"{name}.*at least \d+ tokens.*\b10\b") as caught:
        make(name, prompt, book, length=10)
    least = int(re.search(r"at least (\d+) tokens", str(caught.value))[1])
    assert len(make(name, prompt, book, length=least)) == 4
    with pytest.raises(LengthError):
        make(name, prompt, book, length=least - 1)


# --- the loader ---------------------------------------------------------------------------------------


def test_unknown_task_and_parameter_suggest():
    with pytest.raises(UnknownNameError, match=r"tasks\[0\]: unknown task 'niah_multkey'[\s\S]*'niah_multikey'"):
        load_task("niah_multkey", where="tasks[0]")
    with pytest.raises(
        UnknownNameError, match=r"tasks\[0\]: task 'niah_multikey': unknown parameter 'key'[\s\S]*'keys'"
    ):
        load_task("niah_multikey", {"key": 3}, where="tasks[0]")


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("niah_multikey", {"keys": 0}, r"task 'niah_multikey': keys: .*greater than or equal to 1 \(got 0\)"),
        ("niah_multikey", {"keys": 2, "queries": 3}, r"queries \(3\) can't exceed keys \(2\)"),
        ("niah_single", {"filler": "pros"}, "unknown text source 'pros'"),
        ("perplexity", {"scored_tokens": "many"}, "scored_tokens"),
    ],
)
def test_wrong_parameters(name, params, message):
    with pytest.raises(ConfigError, match=message):
        load_task(name, params)


def test_identity_holds_the_texts_digest_and_no_path(book, tmp_path):
    identity = load_task("perplexity", {"corpus": book}).identity()
    assert identity["params"]["corpus"]["name"] == "file:book.txt"
    assert "source" not in identity
    write_book(tmp_path / "book.txt")
    again = load_task("perplexity", {"corpus": f"file:{tmp_path}/book.txt"}, label="mine")
    assert again.identity() == identity
    assert (again.name, again.label) == ("perplexity", "mine")
    (tmp_path / "book.txt").write_text("Something else.")
    assert again.identity() != identity


OWN = """
from __future__ import annotations
from kveval.tasks import Sample, TaskContext, TaskParams, make_sample
VERSION = 3
class Params(TaskParams):
    word: str = "sun"
def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    ids = ctx.prompt.encode((params.word + " ") * ctx.context_length)[: ctx.context_length]
    return [make_sample(ctx, i, ids[:-1], ids[-1:], cluster=f"{i}") for i in range(ctx.samples)]
"""


@pytest.fixture
def own(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_a_users_own_file(own, prompt):
    task = load_task(str(own), {"word": "sky"})
    assert (task.name, task.version) == ("mine", 3)
    samples = task.samples(TaskContext(prompt.tokenizer, prompt, 8, 2, 0))
    assert [len(s.prompt_ids) for s in samples] == [7, 7]
    before = task.identity()
    own.write_text(OWN + "# edited\n")
    assert load_task(str(own), {"word": "sky"}).identity() != before


def test_relative_path(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    assert load_task("mine.py").name == "mine"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("range(ctx.samples)", "range(1)"), "1 samples instead of 2"),
        (("ids[:-1], ids[-1:]", "ids[:-2], ids[-1:]"), "sample 0 has 7 tokens"),
        (("ctx, i,", "ctx, 0,"), "sample ids repeat"),
        (("ctx, i,", "ctx, i + 1,"), "sample 0 carries the index 1"),
        (("ids[:-1], ids[-1:]", "ids, ()"), "empty prompt or answer"),
    ],
)
def test_a_task_that_breaks_the_protocol_is_told(own, prompt, edit, message):
    own.write_text(OWN.replace(*edit))
    with pytest.raises(TaskError, match=message):
        load_task(str(own)).samples(TaskContext(prompt.tokenizer, prompt, 8, 2, 0))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('STOP = "END"', r"STOP is 'END'"),
        ('STOP = ("",)', "STOP is"),
        ("MAX_NEW_TOKENS = 0", "MAX_NEW_TOKENS is 0"),
        ("VERSION = '1'", "VERSION is '1'"),
        ("Params = int", "Params is no class of parameters"),
        ("score = 3", "score is no function"),
    ],
)
def test_names_that_a_file_defines_wrongly(own, line, message):
    own.write_text(own.read_text() + f"\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        load_task(str(own))


@pytest.mark.parametrize("made", ["None", "iter([])", "[1]", "3"])
def test_samples_that_are_no_samples(own, prompt, made):
    own.write_text(own.read_text() + f"\ndef samples(params, ctx):\n    return {made}\n")
    with pytest.raises(TaskError, match="not a list of Sample"):
        load_task(str(own)).samples(TaskContext(prompt.tokenizer, prompt, 64, 1, 0))


def test_clusters_must_be_contiguous(own, prompt):
    own.write_text(OWN.replace('f"{i}"', 'f"{i % 2}"'))
    with pytest.raises(TaskError, match="cluster '0' is not contiguous"):
        load_task(str(own)).samples(TaskContext(prompt.tokenizer, prompt, 8, 3, 0))


def test_broken_files(own, tmp_path):
    with pytest.raises(ConfigError, match="no task file"):
        load_task(str(tmp_path / "absent.py"))
    own.write_text("VERSION = 1\n")
    with pytest.raises(ConfigError, match=r"mine\.py defines no Params, samples"):
        load_task(str(own))
    own.write_text("VERSION = 1\ndef (")
    with pytest.raises(ConfigError, match=r"mine\.py line 2: invalid syntax"):
        load_task(str(own))
