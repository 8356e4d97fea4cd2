"""lm-evaluation-harness on the stored cache: it equals lm-eval's own model on BF16, and it really reads the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import typer
from tiny_models import RoundingCache
from tiny_tokenizer import tiny_tokenizer
from typer.testing import CliRunner

from kveval.backends.hf import HFBackend
from kveval.errors import ConfigError, LengthError, TaskError, UnknownNameError, UnsupportedError
from kveval.models import LoadedModel, logits_in_float32

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from kveval import cli_lm_eval  # noqa: E402
from kveval.config import ModelConfig, SweepConfig  # noqa: E402
from kveval.content import content_dir  # noqa: E402
from kveval.formats.spec import get_scheme  # noqa: E402
from kveval.integrations.lm_eval import KvevalLM  # noqa: E402
from kveval.integrations.lm_eval_run import LMEvalAsked, _index, run_lm_eval, task_manager  # noqa: E402
from kveval.prompting import PromptTemplate  # noqa: E402
from kveval.run import run_sweep  # noqa: E402
from kveval.store import read_records  # noqa: E402
from kveval.tasks import TaskContext, load_task  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # lm-eval's own dependencies, on import and when a data set is made.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

LIMIT = 160
"""Most tokens of a sequence, far below the tiny model's own limit."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def network(tokenizer: Any) -> Any:
    return tiny_models._built("llama", torch.float32, head_dim=16, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def backend(tokenizer) -> HFBackend:
    model = network(tokenizer)
    logits_in_float32(model)
    return HFBackend(LoadedModel(model=model, tokenizer=tokenizer, info=None, device=torch.device("cpu")))


def ours(backend: HFBackend, scheme: str = "bf16", **changes: Any) -> KvevalLM:
    return KvevalLM(backend, scheme, **{"prefill_chunk": 16, "max_length": LIMIT, **changes})


class RoundedHFLM(HFLM):
    """lm-eval's own model with keys and values rounded to bfloat16: what the BF16 scheme stores."""

    def _cache(self) -> dict[str, Any]:
        return {tiny_models.cache_argument(self.model): RoundingCache(config=self.model.config)}

    def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
        with torch.no_grad():
            return self.model(inps, use_cache=True, **self._cache()).logits

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        return super()._model_generate(context, max_length, stop, **kwargs, **self._cache())


@pytest.fixture(scope="module")
def theirs(tokenizer) -> HFLM:
    return RoundedHFLM(pretrained=network(tokenizer), tokenizer=tokenizer, batch_size=1, max_length=LIMIT, device="cpu")


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


CONTEXT = "The sky is blue. The grass is green. One of the special magic numbers for amber-falcon is: 12."
PAIRS = [
    (CONTEXT, " The"),
    (CONTEXT, " You will be asked about it"),
    (CONTEXT, " You"),
    ("", "The sun shines"),
    ("The road", " home"),
    (CONTEXT + " And again ", "then"),
    ("What", " which variables hold that value, handed on from one to the next?"),
]
TEXTS = [("The sun shines on the hills.",), ("Over the hills, " * 30,), ("x",)]
EVALS = [(CONTEXT, {"until": ["zzz"], "max_gen_toks": 24}), ("The sky", {"until": [], "max_gen_toks": 12})]


def test_bf16_scores_continuations_as_lm_eval_does(backend, theirs):
    asked = requests("loglikelihood", *PAIRS)
    mine, reference = ours(backend).loglikelihood(asked), theirs.loglikelihood(asked)
    assert [score for score, _ in mine] == pytest.approx([score for score, _ in reference], abs=1e-4)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in reference]


def test_greedy_continuations_are_known_as_such(backend, theirs):
    (written,) = theirs.generate_until(requests("generate_until", (CONTEXT, {"until": [], "max_gen_toks": 6})))
    asked = requests("loglikelihood", (CONTEXT, written), (CONTEXT, written + " sky"))
    model = ours(backend)
    model.tok_encode(CONTEXT + written)
    assert [greedy for _, greedy in model.loglikelihood(asked)] == [greedy for _, greedy in theirs.loglikelihood(asked)]


def test_bf16_scores_rolling_texts_as_lm_eval_does(backend, theirs):
    asked = requests("loglikelihood_rolling", *TEXTS)
    model = ours(backend)
    lengths = [len(model.tok_encode(text)) for (text,) in TEXTS]
    assert max(lengths) > LIMIT, "one text must need more than one window"
    mine = model.loglikelihood_rolling(asked)
    assert mine == pytest.approx(theirs.loglikelihood_rolling(asked), abs=1e-3)
    assert model.usage.positions == sum(lengths), "every token is scored once"


def test_bf16_writes_what_lm_eval_writes(backend, theirs):
    asked = requests("generate_until", *EVALS)
    mine = ours(backend).generate_until(asked)
    assert mine == theirs.generate_until(asked)
    assert all(mine)


@pytest.mark.parametrize("scheme", ["int4_g64", "crush"])
def test_a_lossy_scheme_changes_every_kind_of_answer(backend, scheme):
    """One forward over everything would give BF16's figures exactly: the cache would not have been read."""
    for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", TEXTS)):
        asked = requests(kind, *arguments)
        wide, narrow = (getattr(ours(backend, name), kind)(asked) for name in ("bf16", scheme))
        for a, b in zip(wide, narrow, strict=True):
            (a, b) = (a[0], b[0]) if isinstance(a, tuple) else (a, b)
            assert abs(a - b) > 1e-3, kind
    asked = requests("generate_until", *EVALS)
    assert ours(backend, scheme).generate_until(asked) != ours(backend).generate_until(asked)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_chunks_change_nothing_that_is_stored_token_by_token(backend, chunk):
    for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", TEXTS)):
        asked = requests(kind, *arguments)
        a, b = (getattr(ours(backend, "int4_g64", prefill_chunk=n), kind)(asked) for n in (16, chunk))
        flat = [[x[0] if isinstance(x, tuple) else x for x in scores] for scores in (a, b)]
        assert flat[0] == pytest.approx(flat[1], abs=1e-2)


def test_a_shared_context_is_prefilled_once(backend, monkeypatch):
    fed: list[int] = []
    forward = HFBackend.forward
    monkeypatch.setattr(
        HFBackend,
        "forward",
        lambda self, ids, cache, *, keep: fed.append(len(ids)) or forward(self, ids, cache, keep=keep),
    )
    model = ours(backend, prefill_chunk=1000)
    context = len(model.tok_encode(CONTEXT))
    two = [(CONTEXT, " You will"), (CONTEXT, " One of the")]
    model.loglikelihood(requests("loglikelihood", *two))
    assert fed[0] == context - 1
    assert len(fed) == 3
    assert model.usage.prefills == 1
    fed.clear()
    model.loglikelihood(requests("loglikelihood", *((CONTEXT, f" {word}") for word in ("the", "sun", "sky", "road"))))
    assert fed == [context - 1, 1], "four answers of one token take one forward"
    assert model.usage.packed_reads > 0


def test_too_long_requests_are_refused(backend):
    model = ours(backend)
    long = "The sky is blue. " * 40
    tokens = len(model.tok_encode(long.rstrip()))
    with pytest.raises(LengthError, match=rf"context of {tokens} tokens .* limit is {LIMIT}"):
        model.loglikelihood(requests("loglikelihood", (long.rstrip(), " The")))
    with pytest.raises(LengthError, match="max_gen_toks"):
        model.generate_until(requests("generate_until", ("The sky", {"until": [], "max_gen_toks": LIMIT})))


def test_the_limit_itself_fits(backend):
    model = ours(backend)
    context = CONTEXT
    room = LIMIT - len(model.tok_encode(context))
    assert model.generate_until(requests("generate_until", (context, {"until": [], "max_gen_toks": room})))[0]
    with pytest.raises(LengthError):
        model.generate_until(requests("generate_until", (context, {"until": [], "max_gen_toks": room + 1})))


def test_until_ends_the_text_and_is_left_out(backend):
    (whole,) = ours(backend).generate_until(requests("generate_until", (CONTEXT, {"until": [], "max_gen_toks": 24})))
    end = whole[6:9]
    model = ours(backend)
    (cut,) = model.generate_until(requests("generate_until", (CONTEXT, {"until": ["@@", end], "max_gen_toks": 24})))
    assert cut == whole[: whole.index(end)]
    assert model.usage.positions < 24


@pytest.mark.parametrize(
    "kwargs",
    [{"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}, {"num_beams": 4}, {"repetition_penalty": 1.1}],
)
def test_anything_but_greedy_decoding_is_refused(backend, kwargs):
    with pytest.raises(UnsupportedError):
        ours(backend).generate_until(requests("generate_until", (CONTEXT, {"until": ["."], **kwargs})))


def test_chat_template_as_lm_eval_has_it(backend, theirs):
    model = ours(backend)
    turns = [{"role": "user", "content": "The sky?"}, {"role": "assistant", "content": "It is"}]
    assert model.apply_chat_template(turns[:1]) == theirs.apply_chat_template(turns[:1])
    assert model.apply_chat_template(turns, False) == theirs.apply_chat_template(turns, False)
    assert model.tokenizer_name == theirs.tokenizer_name
    assert model.chat_template(True) == theirs.chat_template(True)
    text = model.apply_chat_template(turns[:1])
    assert model.tok_encode(text) == theirs.tok_encode(text)
    assert model.tok_encode(text).count(model.prefix_token_id) == 1
    assert model.tok_encode("The sky") == theirs.tok_encode("The sky")


# --- whole runs -----------------------------------------------------------------------------------------

TASKS = {
    "toy_choice": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "toy_write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "toy_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    docs = [
        {
            "question": f"{'We walk home. ' * (i % 4)}The {a} is {b}. What is the {a}?",
            "choices": ["blue", "green", "yellow"],
            "label": i % 3,
        }
        for i, (a, b) in enumerate([("sky", "blue"), ("grass", "green"), ("sun", "yellow"), ("road", "blue")] * 2)
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, text in TASKS.items():
        head = (
            f"task: {name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: '{folder}/docs.jsonl'}}}}\n"
        )
        (folder / f"{name}.yaml").write_text(head + text + "metadata: {version: 1}\n")
    return folder


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    network(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def asked(saved: str, toys: Path, **changes: Any) -> LMEvalAsked:
    fields = {
        "model": ModelConfig(id=saved, device="cpu"),
        "schemes": ("int4_g64",),
        "tasks": tuple(TASKS),
        "include_path": toys,
        **changes,
    }
    return LMEvalAsked(**fields)


@pytest.fixture(scope="module")
def result(saved, toys):
    return run_lm_eval(asked(saved, toys), say=lambda _: None)


def test_a_run_pairs_every_sample_with_the_baseline(result):
    rows = {(row.task, row.metric, row.scheme): row for row in result.rows}
    for task, metric in (
        ("toy_choice", "acc"),
        ("toy_choice", "nll"),
        ("toy_write", "exact_match"),
        ("toy_text", "nll"),
    ):
        wide, narrow = rows[task, metric, "bf16"], rows[task, metric, "int4_g64"]
        assert (wide.difference, wide.pairs) == (None, 0)
        assert narrow.pairs == 8
        assert narrow.difference == pytest.approx(narrow.value - wide.value)
        assert narrow.low <= narrow.difference <= narrow.high
    assert rows["toy_choice", "nll", "int4_g64"].difference != 0
    assert rows["toy_text", "word_perplexity", "int4_g64"].pairs == 0
    assert rows["toy_text", "word_perplexity", "int4_g64"].difference != 0


def test_a_run_says_what_ran(result, tmp_path):
    result.write(tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["versions"]["lm-eval"] == lm_eval.__version__
    assert set(written["schemes"]) == {"bf16", "int4_g64"}
    for name, facts in written["schemes"].items():
        assert facts["usage"]["packed_reads"] > 0
        assert facts["prefill_chunk"] == 2048
        assert facts["scheme"] == json.loads(json.dumps(get_scheme(name).identity()))
    lines = (tmp_path / "samples" / "int4_g64" / "toy_write.jsonl").read_text().splitlines()
    assert len(lines) == 8
    narrow, wide = (written["schemes"][name]["usage"]["cache_bytes"] for name in ("int4_g64", "bf16"))
    assert narrow * 8 == wide * 3, "4 bits and a scale and zero for each head of 16, against 16 bits"


def test_unknown_tasks_suggest(saved, toys, monkeypatch):
    # lm-eval's own thousands of tasks take 6 to 13 s to index.
    whole = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **options: whole(**{**options, "include_defaults": False}))
    _index.cache_clear()
    with pytest.raises(UnknownNameError, match=r"unknown lm-eval task 'toy_choise'[\s\S]*toy_choice"):
        run_lm_eval(asked(saved, toys, tasks=("toy_choise",)), say=lambda _: None)


def test_a_folder_that_is_none(saved, tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        run_lm_eval(asked(saved, tmp_path / "absent"), say=lambda _: None)


# --- a task of a sweep ----------------------------------------------------------------------------------


def sweep_task(toys: Path, name: str, **params: Any) -> Any:
    return load_task(f"lm_eval:{name}", {"include_path": str(toys), **params})


def context(tokenizer: Any, length: int = 128, n: int = 4, mode: str = "auto", **changes: Any) -> TaskContext:
    return TaskContext(tokenizer, PromptTemplate.from_tokenizer(tokenizer, mode), length, n, 7, **changes)


def test_choices_feed_the_right_one(toys, tokenizer):
    task = sweep_task(toys, "toy_choice")
    docs = [json.loads(line) for line in (toys / "docs.jsonl").read_text().splitlines()]
    samples = task.samples(context(tokenizer, n=8, mode="none"))
    assert sorted(sample.metadata["doc_id"] for sample in samples) == list(range(8))
    for sample in samples:
        doc = docs[sample.metadata["doc_id"]]
        assert tokenizer.decode(sample.prompt_ids) == f"<|bos|>Question: {doc['question']}\nAnswer:"
        assert tokenizer.decode(sample.answer_ids) == f" {doc['choices'][doc['label']]}"
        assert sample.references == (doc["choices"][doc["label"]],)
    with pytest.raises(UnsupportedError, match="mode: generate"):
        task.samples(context(tokenizer, max_new_tokens=8))


def test_prompts_are_lm_evals_own(toys, tokenizer, backend):
    """The same tokens as lm-eval gives its models, with and without the chat template."""
    (sample,) = sweep_task(toys, "toy_choice", num_fewshot=0).samples(context(tokenizer, n=1))
    doc = json.loads((toys / "docs.jsonl").read_text().splitlines()[sample.metadata["doc_id"]])
    model = ours(backend)
    text = model.apply_chat_template([{"role": "user", "content": f"Question: {doc['question']}\nAnswer:"}])
    assert list(sample.prompt_ids) == model.tok_encode(text)


def test_fewshot_examples_are_there_and_are_not_the_question(toys, tokenizer):
    for mode in ("none", "auto"):
        for sample in sweep_task(toys, "toy_write", num_fewshot=2).samples(context(tokenizer, 400, mode=mode)):
            assert tokenizer.decode(sample.prompt_ids).count("What is the") == 3
            assert sample.prompt_ids.count(tokenizer.bos_token_id) == 1


def test_buckets_hold_what_is_longer_than_the_next_shorter_length(toys, tokenizer):
    task = sweep_task(toys, "toy_choice")
    whole = task.samples(context(tokenizer, n=8, mode="none"))
    lengths = sorted(len(s.prompt_ids) + len(s.answer_ids) for s in whole)
    middle = lengths[3]
    assert middle < lengths[-1], "the toy documents must differ in length"
    short = [n for n in lengths if n <= middle]
    found = task.samples(context(tokenizer, middle, n=len(short), mode="none"))
    assert max(len(s.prompt_ids) + len(s.answer_ids) for s in found) == middle
    above = task.samples(context(tokenizer, 128, n=8 - len(short), mode="none", shorter=middle))
    assert min(len(s.prompt_ids) + len(s.answer_ids) for s in above) > middle
    with pytest.raises(TaskError, match=rf"has {8 - len(short)} documents of {middle + 1} to 128 tokens"):
        task.samples(context(tokenizer, 128, n=8, mode="none", shorter=middle))


def test_the_number_of_samples_changes_no_sample(toys, tokenizer):
    task = sweep_task(toys, "toy_choice", num_fewshot=1)
    few, many = (task.samples(context(tokenizer, 400, n=n)) for n in (3, 8))
    assert few == many[:3]
    again = sweep_task(toys, "toy_choice", num_fewshot=1)
    assert again.samples(context(tokenizer, 400, n=8)) == many
    assert again.identity() == task.identity()


def test_what_the_model_writes_is_scored_by_the_tasks_metric(toys, tokenizer):
    task = sweep_task(toys, "toy_write")
    assert (task.max_new_tokens, task.stop) == (8, (".",))
    sample = task.samples(context(tokenizer, max_new_tokens=8, stop=(".",)))[0]
    assert sample.max_new_tokens == 8
    assert task.score_text(sample, sample.references[0]).task_score == 1
    assert task.score_text(sample, "nothing").task_score == 0


def test_identity_follows_documents_and_not_folders(toys, tmp_path):
    before = sweep_task(toys, "toy_choice").identity()
    for path in toys.glob("toy_choice.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    assert sweep_task(tmp_path, "toy_choice").identity() == before
    (tmp_path / "other.jsonl").write_text((toys / "docs.jsonl").read_text().replace("blue", "red"))
    text = (toys / "toy_choice.yaml").read_text().replace(f"{toys}/docs.jsonl", f"{tmp_path}/other.jsonl")
    (tmp_path / "toy_choice.yaml").write_text(text)
    _index.cache_clear()
    assert sweep_task(tmp_path, "toy_choice").identity()["source"] != before["source"]


def test_rolling_tasks_have_no_place_in_a_sweep(toys):
    with pytest.raises(UnsupportedError, match=r"kveval lm-eval"):
        sweep_task(toys, "toy_text")


def test_a_sweep_over_lm_eval_tasks(saved, toys, tmp_path):
    include = {"include_path": str(toys)}
    tasks = [
        {"name": "lm_eval:toy_choice", "label": "choice", **include},
        {"name": "lm_eval:toy_write", "label": "write", "mode": "generate", **include},
    ]
    fields = {
        "name": "toys",
        "model": {"id": saved, "device": "cpu", "chat_template": "none"},
        "schemes": ["int4_g64"],
        "tasks": tasks,
        "context_lengths": [128],
        "samples": 4,
        "decode_tokens": 0,
        "controls": {"aa_chunk": 16},
    }
    summary = run_sweep(SweepConfig.model_validate(fields), tmp_path / "run")
    assert summary.errors == 0
    records = read_records(tmp_path / "run")
    counts = records.groupby(["task", "scheme"]).size()
    assert counts.eq(4).all()
    narrow = records[records["scheme"] == "int4_g64"]
    assert (narrow["kl"] > 0).all()
    assert narrow[narrow["task"] == "write"]["task_score"].notna().all()


# --- kveval's tasks in lm-eval --------------------------------------------------------------------------

FAMILIES = ("niah_multikey", "variable_tracking", "passkey_chain")


@pytest.fixture(scope="module")
def own_tasks(saved) -> dict[str, Any]:
    metadata = {"pretrained": saved, "context_length": 600, "samples": 3}
    names = [f"kveval_{family}" for family in FAMILIES]
    return task_manager(names, None, metadata).load(names)["tasks"]


@pytest.mark.parametrize("family", FAMILIES)
def test_own_documents_fit_and_can_be_answered(own_tasks, tokenizer, family):
    task = own_tasks[f"kveval_{family}"]
    docs = list(task.eval_docs)
    assert len(docs) == 3
    for doc in docs:
        assert 560 <= doc["length"] <= 600
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": doc["input"]}], tokenize=False, add_generation_prompt=True
        )
        tokens = len(tokenizer(chat + doc["gen_prefix"], add_special_tokens=False)["input_ids"])
        assert tokens + task.config.generation_kwargs["max_gen_toks"] <= 600
        for reference in doc["outputs"]:
            assert family == "passkey_chain" or reference in doc["input"]
        right = task.process_results(doc, [", ".join(doc["outputs"])])
        assert set(right) == {entry["metric"] for entry in task.config.metric_list}
        assert (right["string_match_all"], right["text_f1"]) == (1.0, 1.0)
        assert set(task.process_results(doc, [""]).values()) == {0.0}


def test_own_documents_need_a_tokenizer_and_one_length(saved):
    name = "kveval_niah_multikey"
    with pytest.raises(ConfigError, match="no tokenizer is named"):
        task_manager([name], None, {}).load([name])
    fixed = f"{name}_16k"
    with pytest.raises(ConfigError, match="16384 tokens can't be made with context_length 600"):
        task_manager([fixed], None, {"pretrained": saved, "context_length": 600}).load([fixed])


def test_the_command_line_of_lm_eval_finds_them(own_tasks):
    names = {path.stem for path in (content_dir("tasks") / "lm_eval").glob("kveval_*.yaml")}
    assert names == {f"kveval_{family}{length}" for family in FAMILIES for length in ("", "_16k", "_32k")}


# --- the command ----------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(cli_lm_eval.lm_eval)
    return CliRunner().invoke(app, arguments)


def test_the_command_prints_differences(saved, toys, tmp_path):
    options = ("--model", saved, "--tasks", "toy_choice", "--include-path", str(toys), "--device", "cpu")
    done = command(*options, "--scheme", "int4_g64", "--limit", "3", "--out", str(tmp_path / "out"), "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert {row["scheme"] for row in shown["rows"]} == {"bf16", "int4_g64"}
    assert {row["samples"] for row in shown["rows"]} == {3}
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == shown
    again = command(*options, "--out", str(tmp_path / "out"))
    assert isinstance(again.exception, ConfigError)
    alone = command(*options, "--scheme", "int4_g64", "--limit", "3", "--no-compare")
    assert "toy_choice acc" in alone.stdout
    assert "bf16" not in alone.stdout


def test_without_lm_eval_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr("kveval.integrations.find_spec", lambda name: None)
    done = command("--model", "m", "--tasks", "t")
    assert isinstance(done.exception, ConfigError)
    assert "pip install 'kveval[lm-eval]'" in str(done.exception)
