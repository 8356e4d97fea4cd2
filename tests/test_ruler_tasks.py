"""The tasks of the RULER family: each is solved by a program that reads nothing but the prompt."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tiny_tokenizer import tiny_tokenizer

from kveval.errors import ConfigError, LengthError, TaskError, UnknownNameError
from kveval.haystack import depth_of
from kveval.prompting import PromptTemplate, shared_prefix
from kveval.tasks import Sample, TaskContext, load_task

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
REAL = ("smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m")


# --- programs that solve the tasks ------------------------------------------------------------------------


def solve_needles(text: str) -> list[str]:
    asked = re.search(r"What (?:is|are all) the special magic (?:\w+?)s? for (.+) in the text above\?", text)
    assert asked
    keys = re.split(r", | and ", asked[1])
    return [v for k in keys for v in re.findall(rf"One of the special magic \w+s for {k} is: (\S+)\.(?=\s)", text)]


def solve_variables(text: str) -> list[str]:
    context = text.split("Text:")[1]
    value = re.search(r"which variables hold the value (\d{5})", context)
    assert value
    found = re.findall(rf"VAR (\w+) = {value[1]}\.", context)
    assert len(found) == 1
    while step := re.findall(rf"VAR (\w+) = VAR {found[-1]}\.", context):
        found += step
    return found


def entries(text: str) -> list[str]:
    """The words of the numbered list, without an entry that is cut at its end."""
    listed = text.split("Text:")[1].split("\n\n")[0]
    found = re.findall(r"(\d+)\. ([a-z]{6})(?= |$)", listed)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [word for _, word in found]


def solve_common(text: str) -> list[str]:
    context = text.split("Text:")[1]
    number = re.search(r"Which (\d+) words? occur|Which (word) occurs", context)
    assert number
    counts = Counter(entries(text)).most_common()
    wanted = int(number[1] or 1)
    assert counts[wanted - 1][1] > counts[wanted][1]
    return [word for word, _ in counts[:wanted]]


def solve_frequent(text: str) -> list[str]:
    context = text.split("Text:")[1]
    number = re.search(r"Which (?:(\d+) words|word) occurs? most", context)
    assert number
    words = context.split("\n\n")[0].split()
    counts = Counter(word for word in words if word.isalpha()).most_common()
    wanted = int(number[1] or 1)
    times = [words.count("..."), *(times for _, times in counts[: wanted + 1])]
    assert all(more > fewer for more, fewer in pairwise(times))
    return [word for word, _ in counts[:wanted]]


NAME = r"([A-Z][a-z]{5}(?: [A-Z][a-z]{5})?)"
FACTS = {
    "birthplace": f"{NAME} was born in {NAME} and",
    "home": rf"{NAME} was born in \S+ and now has a home in {NAME}\.",
    "teacher": f"The teacher of {NAME} was {NAME},",
    "employer": rf"the employer of {NAME} is {NAME}\.",
    "region": f"{NAME} is a town in the region of {NAME},",
    "river": rf"{NAME} is a town in the region of \S+, on the river {NAME}\.",
    "mayor": rf"The mayor of {NAME} is {NAME}\.",
    "seat": rf"{NAME} is a company with its seat in {NAME}\.",
    "founder": f"The founder of {NAME} was {NAME},",
    "director": rf"The founder of {NAME} was .{{6,13}}, and its director today is {NAME}\.",
    "capital": f"{NAME} is a region with {NAME} as its capital",
    "governor": rf"The governor of {NAME} is {NAME}\.",
}


def solve_documents(text: str) -> list[str]:
    question = re.search(rf"Question: What is the name of the (.+) of {NAME}\?", text)
    assert question
    name = question[2]
    for relation in reversed(question[1].split(" of the ")):
        found = {other for subject, other in re.findall(FACTS[relation], text) if subject == name}
        assert len(found) == 1, (relation, name, found)
        (name,) = found
    return [name]


class Case(NamedTuple):
    """A task with parameters that fit 512 tokens of the tiny tokenizer."""

    name: str
    params: dict[str, Any]
    solve: Callable[[str], list[str]]


def needles(kind: str, **params: Any) -> Case:
    return Case(f"niah_{kind}", params, solve_needles)


CASES = [
    needles("single"),
    needles("single", filler="prose"),
    needles("single", filler="prose", value_type="uuid"),
    needles("single", key_type="uuid", value_type="word"),
    needles("single", value_type="word"),
    needles("multikey", filler="prose", keys=3),
    needles("multikey", keys=1, haystack="needles"),
    needles("multikey", keys=2, queries=2, haystack="needles", key_type="uuid", value_type="uuid"),
    needles("multivalue"),
    needles("multivalue", filler="prose", values=1),
    needles("multiquery"),
    needles("multiquery", keys=5, asked=2, value_type="word"),
    Case("variable_tracking", {"hops": 1, "chains": 2}, solve_variables),
    Case("common_words", {"common": 1, "repeats": 3, "others": 2}, solve_common),
    Case("common_words", {"common": 2, "repeats": 3, "others": 1}, solve_common),
    Case("frequent_words", {}, solve_frequent),
    Case("frequent_words", {"asked": 1}, solve_frequent),
    Case("qa_single", {}, solve_documents),
    Case("qa_multi_hop", {}, solve_documents),
    Case("qa_multi_hop", {"hops": 3, "queries": 2}, solve_documents),
]
RULER = [
    needles("single"),
    needles("single", filler="prose"),
    needles("single", filler="prose", value_type="uuid"),
    needles("multikey", filler="prose"),
    needles("multikey", keys=1, haystack="needles"),
    needles("multikey", keys=1, haystack="needles", key_type="uuid", value_type="uuid"),
    needles("multivalue", filler="prose"),
    needles("multiquery", filler="prose"),
    Case("variable_tracking", {}, solve_variables),
    Case("common_words", {}, solve_common),
    Case("frequent_words", {}, solve_frequent),
    Case("qa_single", {}, solve_documents),
    Case("qa_multi_hop", {}, solve_documents),
]


def shown(case: Case) -> str:
    return "-".join([case.name, *(f"{k}={v}" for k, v in case.params.items())])


def context(tokenizer: Any, length: int, n: int, *, seed: int = 7, new_tokens: int | None = None) -> TaskContext:
    return TaskContext(tokenizer, PromptTemplate.from_tokenizer(tokenizer), length, n, seed, new_tokens)


def make(case: Case, tokenizer: Any, length: int, n: int = 4, **other: Any) -> list[Sample]:
    return load_task(case.name, case.params).samples(context(tokenizer, length, n, **other))


def check_solved(case: Case, tokenizer: Any, samples: list[Sample]) -> None:
    task = load_task(case.name, case.params)
    for sample in samples:
        solved = case.solve(tokenizer.decode(sample.prompt_ids))
        assert sorted(solved) == sorted(sample.references)
        oracle = tokenizer.decode(sample.answer_ids)
        assert oracle.strip() == sample.metadata["answer"] == ", ".join(sample.references)
        assert task.score_text(sample, oracle).task_score == 1
        assert task.score_text(sample, "").task_score == 0
        assert task.score_text(sample, f"Well: {' '.join(solved).upper()}.").task_score == 1


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest) -> Any:
    folder = Path(os.environ.get("KVEVAL_CACHE", ""), "models", request.param)
    if not os.environ.get("KVEVAL_CACHE") or not (folder / "tokenizer.json").is_file():
        pytest.skip(f"{request.param} is not in KVEVAL_CACHE; fetch it with `kveval models fetch`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=CASES, ids=shown)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


# --- what holds for all of them ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [520, 1500])
def test_a_program_solves_it_and_the_oracle_scores_1(case: Case, tiny: Any, length: int) -> None:
    if case.params.get("hops") == 3:
        length += 700
    check_solved(case, tiny, make(case, tiny, length, n=6))


@pytest.mark.parametrize("new_tokens", [None, 150])
def test_exact_length_in_both_modes(case: Case, tiny: Any, new_tokens: int | None) -> None:
    for sample in make(case, tiny, 1300, n=3, new_tokens=new_tokens):
        assert len(sample.prompt_ids) + (new_tokens or len(sample.answer_ids)) == 1300
        assert sample.context_length == 1300


def test_sample_i_is_the_same_whatever_n_and_another_with_another_seed(case: Case, tiny: Any) -> None:
    few, many = make(case, tiny, 1300, n=3), make(case, tiny, 1300, n=9)
    assert few == many[:3]
    assert len({sample.id for sample in many}) == 9
    assert {s.id for s in few}.isdisjoint(s.id for s in make(case, tiny, 1300, n=3, seed=8))


def test_length_error_names_the_exact_minimum(case: Case, tiny: Any) -> None:
    with pytest.raises(LengthError, match=rf"{case.name}.*at least \d+ tokens") as caught:
        make(case, tiny, 20)
    named = re.search(r"at least (\d+) tokens", str(caught.value))
    assert named
    least = int(named[1])
    check_solved(case, tiny, make(case, tiny, least))
    with pytest.raises(LengthError):
        make(case, tiny, least - 1)


@pytest.mark.parametrize("ruler", RULER, ids=shown)
@pytest.mark.parametrize("length", [1024, 4096])
def test_real_tokenizers_at_the_lengths_of_the_config(ruler: Case, real: Any, length: int) -> None:
    budget = load_task(ruler.name).max_new_tokens
    samples = make(ruler, real, length, n=3, new_tokens=budget)
    assert [len(sample.prompt_ids) for sample in samples] == [length - budget] * 3
    check_solved(ruler, real, samples)


@pytest.mark.slow
@pytest.mark.parametrize("ruler", RULER, ids=shown)
def test_real_tokenizers_at_32k(ruler: Case, real: Any) -> None:
    samples = make(ruler, real, 32768, n=1)
    assert len(samples[0].prompt_ids) + len(samples[0].answer_ids) == 32768
    check_solved(ruler, real, samples)


def test_two_processes_with_other_hash_seeds_agree() -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from test_ruler_tasks import *\n"
        "t = tiny_tokenizer()\n"
        "print([s.id for case in CASES for s in make(case, t, 1300, n=2)])"
    )
    here = Path(__file__).parent
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(here), str(here.parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in running)
    assert first == second
    assert first.count("-") == 2 * len(CASES)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("niah_single", 128),
        ("niah_multikey", 128),
        ("niah_multivalue", 128),
        ("niah_multiquery", 128),
        ("variable_tracking", 40),
        ("common_words", 120),
        ("frequent_words", 50),
        ("qa_single", 32),
        ("qa_multi_hop", 32),
    ],
)
def test_budgets(name: str, budget: int) -> None:
    assert load_task(name).max_new_tokens == budget


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("niah_single", {"value_type": "uuid", "digits": 5}, "digits is for value_type: number"),
        ("niah_single", {"key_type": "number"}, "key_type"),
        ("niah_multikey", {"haystack": "needles", "filler": "noise"}, "filler has no place in haystack: needles"),
        ("niah_multiquery", {"keys": 2, "asked": 3}, r"asked \(3\) can't exceed keys \(2\)"),
        ("common_words", {"repeats": 3}, "give both repeats and others"),
        ("common_words", {"repeats": 3, "others": 3}, r"repeats \(3\) must exceed others \(3\)"),
        ("frequent_words", {"alpha": 1}, "alpha"),
        ("qa_single", {"context": "passage"}, "context: made-up facts have no columns"),
        ("qa_single", {"rows": "questions.jsonl"}, "unknown source of rows 'questions.jsonl'"),
        ("qa_multi_hop", {"rows": "file:a.jsonl", "hops": 2}, "hops is for made-up facts"),
        ("qa_multi_hop", {"hops": 4}, "hops"),
    ],
)
def test_wrong_parameters(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(name, params)


# --- needles ----------------------------------------------------------------------------------------------


def test_a_haystack_of_needles_holds_nothing_else(tiny: Any) -> None:
    case = needles("multikey", keys=1, haystack="needles", key_type="uuid", value_type="uuid")
    for sample in make(case, tiny, 4000):
        text = tiny.decode(sample.prompt_ids).split("Text:")[1].split("\n\n")[0]
        pairs = re.findall(rf"One of the special magic uuids for ({UUID}) is: ({UUID})\. ?", text)
        assert len(pairs) > 20
        assert len({key for key, _ in pairs}) == len({value for _, value in pairs}) == len(pairs)
        rest = re.sub(rf"One of the special magic uuids for {UUID} is: {UUID}\. ?", "", text)
        assert len(rest) < len("One of the special magic uuids for  is: . ") + 2 * 36


def test_multivalue_lists_the_values_in_the_order_of_the_text(tiny: Any) -> None:
    for sample in make(needles("multivalue"), tiny, 2000, n=4):
        assert solve_needles(tiny.decode(sample.prompt_ids)) == list(sample.references)
        depths = sample.metadata["depths"]
        assert depths == sorted(depths)
        assert [int(depth * 4.0001) for depth in depths] == [0, 1, 2, 3]
        assert sample.depth is None


def test_multiquery_answers_in_the_order_of_the_question(tiny: Any) -> None:
    orders = []
    for sample in make(needles("multiquery", keys=6, asked=4), tiny, 2000, n=8):
        text = tiny.decode(sample.prompt_ids)
        assert solve_needles(text) == list(sample.references)
        assert text.count("One of the special magic") == 6
        assert sample.depth is None
        places = [text.index(f"is: {value}.") for value in sample.references]
        orders.append(places == sorted(places))
        depths = sample.metadata["depths"]
        assert [sorted(depths).index(depth) for depth in depths] == [sorted(places).index(p) for p in places]
    assert not all(orders)


def test_wording_is_singular_for_one_value(tiny: Any) -> None:
    (one,) = make(needles("multivalue", values=1), tiny, 600, n=1)
    text = tiny.decode(one.prompt_ids)
    assert re.search(r"What is the special magic number for (\S+) in the text above\?", text)
    assert re.search(r"The special magic number for \S+ is: ?$", text)
    (more,) = make(needles("multivalue", values=2), tiny, 600, n=1)
    assert re.search(r"The special magic numbers for \S+ are: ?$", tiny.decode(more.prompt_ids))


# --- words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "repeats", "others"), [(4095, 6, 1), (5600, 30, 3)])
def test_words_occur_as_often_as_they_should(tiny: Any, length: int, repeats: int, others: int) -> None:
    for sample in make(Case("common_words", {}, solve_common), tiny, length, n=2):
        words = entries(tiny.decode(sample.prompt_ids))
        counts = Counter(words)
        assert [counts.pop(word) for word in sample.references] == [repeats] * 10
        fewer = sum(times != others for times in counts.values())
        assert max(counts.values()) <= others
        assert fewer <= 1  # the last one, where the list ends
        assert sample.metadata["words"] == len(words)
        firsts = [words.index(word) for word in sample.references]
        assert firsts == sorted(firsts)


def test_the_worked_example_is_right_and_has_words_of_its_own(tiny: Any) -> None:
    answers = []
    for sample in make(Case("common_words", {}, solve_common), tiny, 4000, n=2):
        example, listed = tiny.decode(sample.prompt_ids).split("Text:")
        words = re.findall(r"\d+\. ([a-z]{6})", example)
        counts = Counter(words)
        answer = re.search(r"The 10 most frequent words are: (.+)", example)
        assert answer
        assert [word for word in counts if counts[word] == 3] == answer[1].split(", ")
        assert sorted(counts.values()) == [1] * 10 + [3] * 10
        assert not any(word in listed for word in counts)
        answers.append(answer[1])
    assert answers[0] != answers[1]


def test_counts_of_frequent_words_follow_the_zeta_law(tiny: Any) -> None:
    (sample,) = make(Case("frequent_words", {}, solve_frequent), tiny, 30_000, n=1)
    words = tiny.decode(sample.prompt_ids).split("Text:")[1].split("\n\n")[0].split()
    counts = [times for _, times in Counter(words).most_common()]
    assert counts[1:5] == sample.metadata["counts"]
    for rank in (2, 3, 4, 5, 10):
        assert counts[rank - 1] == pytest.approx(counts[0] / rank**2, abs=1)


# --- documents --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qa_single", "qa_multi_hop"])
def test_every_needed_document_is_whole_and_spread_evenly(tiny: Any, name: str) -> None:
    samples = make(Case(name, {}, solve_documents), tiny, 6000, n=16)
    for hop in range(len(samples[0].metadata["depths"])):
        found = [sample.metadata["depths"][hop] for sample in samples]
        asked = [depth_of(context(tiny, 6000, 16), f"{name}-{hop}" if hop else name, i) for i in range(16)]
        assert found == pytest.approx(asked, abs=0.05)
        assert sorted(int(depth * 8) for depth in asked) == sorted([*range(8)] * 2)
    assert [sample.depth for sample in samples] == [sample.metadata["depths"][0] for sample in samples]


def test_questions_about_the_same_documents_share_the_prefix(tiny: Any) -> None:
    samples = make(Case("qa_single", {"queries": 3}, solve_documents), tiny, 2000, n=5)
    assert len({sample.metadata["question"] for sample in samples}) == 5
    assert shared_prefix(samples[0].prompt_ids, samples[2].prompt_ids) > 1800
    assert [sample.cluster[-5:] for sample in samples] == ["00000"] * 3 + ["00001"] * 2


def squad(tmp_path: Path, count: int = 12) -> str:
    rows = [
        {
            "question": f"Where is ball {i}?",
            "answers": {"text": [f"in box {i}", f"Box {i}."], "answer_start": [0, 3]},
            "context": f"Ball {i} is in box {i}.\n\nBox {i} is closed.",
        }
        for i in range(count)
    ]
    path = tmp_path / "squad.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return f"file:{path}"


def test_own_rows_are_asked_once_each_among_the_contexts_of_the_others(tiny: Any, tmp_path: Path) -> None:
    task = load_task("qa_single", {"rows": squad(tmp_path)})
    samples = task.samples(context(tiny, 500, 12))
    assert len({sample.metadata["question"] for sample in samples}) == 12
    for sample in samples:
        text = tiny.decode(sample.prompt_ids)
        number = re.search(r"Question: Where is ball (\d+)\?", text)
        assert number
        assert text.count(f"\n\nBall {number[1]} is in box {number[1]}.\nBox {number[1]} is closed.\n\n") == 1
        assert sample.references == (f"in box {number[1]}", f"Box {number[1]}.")
        assert tiny.decode(sample.answer_ids).strip() == sample.references[0]
        assert task.score_text(sample, sample.references[1]).task_score == 1
        assert text.count(" is closed.") > 3
    assert task.samples(context(tiny, 500, 3)) == samples[:3]
    with pytest.raises(TaskError, match=r"13 questions are needed, and .* has 12"):
        task.samples(context(tiny, 500, 13))


def test_rows_with_titles_and_supporting_facts(tiny: Any, tmp_path: Path) -> None:
    rows = [
        {
            "q": f"What is in the box of Ann {i}?",
            "a": f"a ring {i}",
            "c": {
                "title": [f"Ann {i}", f"Bob {i}", f"Box {i}"],
                "sentences": [[f"Ann {i} has box {i}."], [f"Bob {i} has nothing."], [f"Box {i} is red.", " A ring."]],
            },
            "supporting_facts": {"title": [f"Box {i}", f"Ann {i}"], "sent_id": [1, 0]},
        }
        for i in range(4)
    ]
    path = tmp_path / "hotpot.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    params = {"rows": f"file:{path}", "question": "q", "answers": "a", "context": "c", "supporting": "supporting_facts"}
    for sample in load_task("qa_multi_hop", params).samples(context(tiny, 500, 4)):
        text = tiny.decode(sample.prompt_ids)
        number = re.search(r"the box of Ann (\d)\?", text)
        assert number
        ann, box = f"\n\nAnn {number[1]}\nAnn {number[1]} has box", f"\n\nBox {number[1]}\nBox {number[1]} is red. A"
        assert text.count(ann) == text.count(box) == 1
        assert len(sample.metadata["depths"]) == 2
        assert (text.index(ann) < text.index(box)) == (sample.metadata["depths"][0] < sample.metadata["depths"][1])
    with pytest.raises(TaskError, match=r"question 0 of .* needs 2 documents"):
        load_task("qa_single", params).samples(context(tiny, 500, 4))


def test_rows_of_a_dataset(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"question": f"Who is {i}?", "answers": f"number {i}", "context": f"This is {i}."} for i in range(9)]

    class DatasetsError(Exception):
        pass

    fake = SimpleNamespace(load_dataset=load, exceptions=SimpleNamespace(DatasetsError=DatasetsError))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    task = load_task("qa_single", {"rows": "datasets:me/qa-of-the-ruler-test:en:test[:9]"})
    assert len(task.samples(context(tiny, 400, 9))) == 9
    assert asked == [("me/qa-of-the-ruler-test", "en", "test[:9]")]
    with pytest.raises(TaskError, match="too many parts"):
        load_task("qa_single", {"rows": "datasets:a:b:c:d"}).samples(context(tiny, 400, 1))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"pip install 'kveval\[datasets\]'"):
        load_task("qa_single", {"rows": "datasets:me/absent"}).samples(context(tiny, 400, 1))


def test_identity_holds_the_rows_content_and_no_path(tmp_path: Path) -> None:
    rows = squad(tmp_path)
    before = load_task("qa_single", {"rows": rows}).identity()
    assert before["params"]["rows"]["name"] == "file:squad.jsonl"
    assert str(tmp_path) not in json.dumps(before)
    path = Path(rows.removeprefix("file:"))
    path.write_text(path.read_text().replace("box 3", "box three"))
    assert load_task("qa_single", {"rows": rows}).identity() != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad\.jsonl:1: not JSON"),
        ("[1]", r"bad\.jsonl:1: not an object"),
        ('{"question": "a?"}', r"bad\.jsonl:1: no column 'answers'; there are question"),
        ('{"question": "", "answers": "a", "context": "b"}', r"bad\.jsonl:1, column 'question': no text, but ''"),
        ('{"question": "a?", "answers": [], "context": "b"}', r"column 'answers': neither text nor a list"),
        ('{"question": "a?", "answers": 3, "context": "b"}', r"column 'answers': neither text nor a list.* 3"),
        ('{"question": "a?", "answers": "a", "context": ["b", "c"]}', "needs 2 documents"),
        ('{"question": "a?", "answers": "a", "context": "b"}', "no documents but those that the questions need"),
        ("", r"bad\.jsonl has no rows"),
    ],
)
def test_bad_rows_are_named(tiny: Any, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    task = load_task("qa_single", {"rows": f"file:{tmp_path}/bad.jsonl"})
    with pytest.raises(TaskError, match=message):
        task.samples(context(tiny, 400, 1))


def test_absent_rows_are_named() -> None:
    with pytest.raises(TaskError, match=r"no file 'absent\.jsonl'"):
        load_task("qa_single", {"rows": "file:absent.jsonl"}).identity()
    with pytest.raises(UnknownNameError, match="file:<path>"):
        load_task("qa_single", {"rows": "absent"})
