"""code_identifier and code_completion: what they ask, where it stands, and what they make of odd sources."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_texts import write_code
from tiny_tokenizer import tiny_tokenizer

from kveval.corpora import load_corpus
from kveval.errors import LengthError, TaskError
from kveval.haystack import DEPTH_BUCKETS, depth_of
from kveval.prompting import PromptTemplate
from kveval.source_files import definitions, source_text, statements
from kveval.tasks import Sample, TaskContext, load_task

TOKENIZER = tiny_tokenizer()
PROMPT = PromptTemplate.from_tokenizer(TOKENIZER)
TASKS = ("code_identifier", "code_completion")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_code(tmp_path_factory.mktemp("code"))


def context(length: int, n: int = 4, seed: int = 0, **more: Any) -> TaskContext:
    return TaskContext(TOKENIZER, PROMPT, length, n, seed, **more)


def make(name: str, corpus: str, length: int, n: int = 4, seed: int = 0, **more: Any) -> list[Sample]:
    return load_task(name, {"corpus": corpus}).samples(context(length, n, seed, **more))


def text_of(sample: Sample) -> str:
    return str(TOKENIZER.decode(sample.prompt_ids[len(PROMPT.bos_ids) :]))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [256, 512, 4096])
def test_exact_lengths_fed_and_written(name: str, length: int, code: str) -> None:
    for sample in make(name, code, length):
        assert len(sample.prompt_ids) + len(sample.answer_ids) == length
        json.dumps(dict(sample.metadata))
    room = 100
    for sample in make(name, code, length, max_new_tokens=room):
        assert len(sample.prompt_ids) + room == length
        assert sample.references


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_does_not_depend_on_their_number_but_on_the_seed(name: str, code: str) -> None:
    assert make(name, code, 600, n=3) == make(name, code, 600, n=9)[:3]
    assert not {s.id for s in make(name, code, 600)} & {s.id for s in make(name, code, 600, seed=1)}


@pytest.mark.parametrize("name", TASKS)
def test_plain_text_behind_bos(name: str, code: str) -> None:
    for sample in make(name, code, 512):
        assert [i for i in sample.prompt_ids if i < 5] == list(PROMPT.bos_ids)
        assert sample.prompt_ids[: len(PROMPT.bos_ids)] == PROMPT.bos_ids


@pytest.mark.parametrize("name", TASKS)
def test_the_least_length_is_exact(name: str, code: str) -> None:
    with pytest.raises(LengthError, match=rf"{name}.*at least \d+ tokens.*\b20\b") as caught:
        make(name, code, 20)
    found = re.search(r"at least (\d+) tokens", str(caught.value))
    assert found
    assert len(make(name, code, int(found[1]))) == 4
    with pytest.raises(LengthError):
        make(name, code, int(found[1]) - 1)


@pytest.mark.parametrize("name", TASKS)
def test_a_source_that_is_too_short_is_told(name: str, tmp_path: Path) -> None:
    small = write_code(tmp_path, files=1, functions=3)
    with pytest.raises(TaskError, match=rf"too short.*{name} never repeats text[\s\S]*file:<folder>"):
        make(name, small, 4096, n=1)
    with pytest.raises(TaskError, match=r"has only \d definitions|has only \d places"):
        make(name, small, 256, n=9)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    "text", ["No Python here. Only words, and more words.", "早上好。你吃了吗？", "مرحبا بك. كيف حالك؟", "x\x00y"]
)
def test_text_that_is_no_python_is_told(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(text, encoding="utf-8")
    with pytest.raises(TaskError, match=r"has only 0 (definitions|places)[\s\S]*Name more Python files"):
        make(name, f"file:{tmp_path}/words.py", 512)


@pytest.mark.parametrize("name", TASKS)
def test_the_window_is_running_text_of_the_files(name: str, code: str) -> None:
    ring = source_text(load_corpus(code)).text
    for sample in make(name, code, 1500, n=8):
        files, _, tail = text_of(sample).partition("\n\n# The function whose")
        assert files in ring + ring
        assert bool(tail) == (name == "code_identifier")


@pytest.mark.parametrize("length", [1500, 6000])
def test_the_name_and_its_clue_stand_once_in_the_files_at_the_asked_depth(length: int, code: str) -> None:
    buckets = []
    for sample in make("code_identifier", code, length, n=DEPTH_BUCKETS):
        (name,) = sample.references
        text = text_of(sample) + TOKENIZER.decode(sample.answer_ids)
        files, call = text.split("\n\n# The function whose docstring begins with ")
        assert (files.count(name), text.count(name)) == (1, 2)
        assert (files.count(sample.metadata["clue"]), call.count(sample.metadata["clue"])) == (1, 1)
        assert call.endswith(f":\nresult = {name}")
        assert files.endswith("\n")
        assert f'def {name}(road):\n    """{sample.metadata["clue"]}"""' in files
        tokens = len(PROMPT.encode(files))
        assert sample.depth == pytest.approx(len(PROMPT.encode(files[: files.index(f"def {name}")])) / tokens, abs=0.01)
        asked = depth_of(context(length), "code_identifier", sample.index)
        assert sample.depth == pytest.approx(asked, abs=150 / length)
        buckets.append(int(asked * DEPTH_BUCKETS))
    assert sorted(buckets) == list(range(DEPTH_BUCKETS))


def test_no_definition_is_asked_for_twice(code: str) -> None:
    names = [sample.references for sample in make("code_identifier", code, 400, n=60)]
    assert len(set(names)) == 60


def test_a_name_that_is_used_in_the_window_is_not_asked_for(tmp_path: Path) -> None:
    pattern = write_code(tmp_path, files=2, functions=4)
    names = [d.name for text in load_corpus(pattern).documents for d in definitions(text)]
    (tmp_path / "part_2.py").write_text("\n".join(f"use({name})" for name in names[1:]) + "\n")
    # A window of the whole text holds the calls; one around the first definition doesn't have to.
    size = len(PROMPT.encode(source_text(load_corpus(pattern)).text))
    (sample,) = make("code_identifier", pattern, size - 100, n=1)
    assert sample.references == (names[0],)


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_the_answer_is_the_next_lines(lines: int, code: str) -> None:
    ring = source_text(load_corpus(code)).text
    task = load_task("code_completion", {"corpus": code, "lines": lines})
    for sample in task.samples(context(1500, n=6)):
        (reference,) = sample.references
        start = sample.metadata["start_char"]
        assert ring.startswith(reference, start)
        assert ring[start - 1] == "\n"
        assert ring[start + len(reference)] == "\n"
        assert reference.count("\n") == lines - 1
        before = text_of(sample)
        assert (ring + ring[:start]).removesuffix("\n").endswith(before.removesuffix("\n"))
        assert TOKENIZER.decode(sample.answer_ids) == sample.metadata["carried"] + reference


def test_completions_are_scored_by_their_lines(code: str) -> None:
    task = load_task("code_completion", {"corpus": code, "lines": 2})
    for sample in task.samples(context(600, max_new_tokens=100)):
        right = sample.metadata["carried"] + sample.references[0]
        assert task.score_text(sample, right).task_score == 1
        assert task.score_text(sample, f"{right}\nand more\n").task_score == 1
        assert task.score_text(sample, right.partition("\n")[0]).task_score < 0.9
        assert task.score_text(sample, "").task_score == 0


def test_identifiers_are_scored_where_the_model_writes_on(code: str) -> None:
    task = load_task("code_identifier", {"corpus": code})
    (sample,) = task.samples(context(600, n=1, max_new_tokens=100))
    assert task.score_text(sample, f" {sample.references[0]}(road)").task_score == 1
    assert task.score_text(sample, " something_else(road)").task_score == 0


def test_names_of_files_are_part_of_the_identity(tmp_path: Path) -> None:
    pattern = write_code(tmp_path, files=3)
    before = load_task("code_identifier", {"corpus": pattern}).identity()
    (tmp_path / "part_1.py").rename(tmp_path / "part_1b.py")
    after = load_task("code_identifier", {"corpus": pattern}).identity()
    assert before["params"]["corpus"] == after["params"]["corpus"]
    assert before != after


SHAPES = '''"""A file."""
MOST_SIDES = "as many as you like"
SHORT_ONE = 1

class RoundThing:
    """What rolls down the hill."""

    @property
    def far_edge(self):
        """Where the rolling ends."""

    async def roll_down(self):
        """Set the wheel in motion.

        More words.
        """

    def __rolled_back__(self):
        """A thing of Python's own."""

def named_in_clue():
    """Something named in its clue."""

def used_twice():
    """This one occurs elsewhere."""

used_twice()

def escaped_words():
    """A tab\\tis no clue at all."""
'''


def test_definitions_of_a_file() -> None:
    found = {d.name: d for d in definitions(SHAPES)}
    assert {name: d.kind for name, d in found.items()} == {
        "MOST_SIDES": "constant",
        "RoundThing": "class",
        "far_edge": "method",
        "roll_down": "method",
    }
    assert found["MOST_SIDES"].clue == '"as many as you like"'
    assert found["roll_down"].clue == "Set the wheel in motion."
    for definition in found.values():
        shown = SHAPES[definition.start : definition.end]
        assert definition.name in shown.partition("\n")[0]
        assert shown.endswith("\n")
        assert definition.clue in shown


@pytest.mark.parametrize("before", ["# 早上好 مرحبا 🙂\n", "\x0c\n", "'''\n\n\x0b\u2028'''\n", "x = 'é'; y = 1\n"])
def test_lines_are_counted_as_python_counts_them(before: str) -> None:
    moved = definitions(before + SHAPES)
    assert [(d.name, d.start - len(before)) for d in moved] == [(d.name, d.start) for d in definitions(SHAPES)]


def test_a_file_of_another_python_has_no_definitions() -> None:
    for text in ("print 'hello'\n", "x\x00", "(" * 10_000):
        assert definitions(text) == ()
        assert statements(text, 1) == ()


def test_statements_are_code_inside_functions() -> None:
    text = (
        "import os\n\n\ndef one(a):\n    '''Doc of it.\n\n    first_word = 1\n    '''\n    import math as mathematics\n"
        "    value = math.floor(a)\n\n    blank_before = value\n    second = value + a\n    # a comment is here\n"
        "    x = 1\n    return value + second\n\nleft_out = one(1) + one(2)\n"
    )
    found = [text[start:end] for start, end in statements(text, 1)]
    assert found == ["    value = math.floor(a)", "    second = value + a", "    return value + second"]
    assert [text[start:end] for start, end in statements(text, 2)] == [
        "    second = value + a\n    # a comment is here"
    ]


def test_odd_sources_give_exact_samples(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    pattern = write_code(tmp_path / "sub", files=3)
    plain = (tmp_path / "sub" / "part_0.py").read_text()
    (tmp_path / "sub" / "part_0.py").write_bytes(plain.replace("\n", "\r\n").encode())
    (tmp_path / "sub" / "__init__.py").write_text("")
    (tmp_path / "sub" / "part_1.py").write_text("TABLE = [" + "12, " * 4000 + "]\n")
    (tmp_path / "sub" / "words.py").write_text("早上好 = '你吃了吗？'\n# مرحبا بك\n" * 50, encoding="utf-8")
    assert "\r" not in source_text(load_corpus(pattern)).text
    assert "# file: part_2.py\n" in source_text(load_corpus(pattern)).text
    for name in TASKS:
        for sample in make(name, pattern, 3000, n=12):
            assert len(sample.prompt_ids) + len(sample.answer_ids) == 3000
