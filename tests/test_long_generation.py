"""long_generation: the steps can be followed, they fit any context, and each line is scored by itself."""

from __future__ import annotations

import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from kveval.errors import LengthError
from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, TaskContext, load_task

TOKENIZER = tiny_tokenizer()
PROMPT = PromptTemplate.from_tokenizer(TOKENIZER)
TASK = load_task("long_generation", {"steps": 12, "boxes": 4})


def make(length: int = 1000, n: int = 3, seed: int = 0, max_new_tokens: int | None = None) -> list[Sample]:
    return TASK.samples(TaskContext(TOKENIZER, PROMPT, length, n, seed, max_new_tokens=max_new_tokens))


@pytest.mark.parametrize("length", [700, 1000, 5000])
def test_the_answer_follows_from_the_steps(length: int) -> None:
    for sample in make(length):
        assert len(sample.prompt_ids) + len(sample.answer_ids) == length
        text = TOKENIZER.decode(sample.prompt_ids)
        held = dict(re.findall(r"([A-D]) holds (\w+)", text))
        steps = re.findall(r"Step (\d+): swap ([A-D]) and ([A-D])\.", text)
        assert [int(number) for number, _, _ in steps] == list(range(1, 13))
        assert len(set(held.values())) == 4
        lines = []
        for number, a, b in steps:
            held[a], held[b] = held[b], held[a]
            lines.append(f"{number}. {a} {held[a]}, {b} {held[b]}")
        assert "1. " + TOKENIZER.decode(sample.answer_ids).strip() == "\n".join(lines)
        assert text.endswith(("1.", "1. "))
        assert sample.references == (TOKENIZER.decode(sample.answer_ids).strip(),)


def test_steps_are_spread_over_the_text() -> None:
    for sample in make(5000):
        text = TOKENIZER.decode(sample.prompt_ids)
        places = [match.start() / len(text) for match in re.finditer("Step ", text)]
        assert places == sorted(places)
        assert all(abs(place - (step + 1) / 13) < 0.06 for step, place in enumerate(places))
        assert sample.depth is None


def test_room_is_kept_for_what_the_model_writes() -> None:
    for sample in make(1500, max_new_tokens=400):
        assert len(sample.prompt_ids) + 400 == 1500
    with pytest.raises(LengthError, match="max_new_tokens: 50"):
        make(1500, max_new_tokens=50)


def test_the_number_of_samples_changes_none_and_the_seed_all() -> None:
    assert make(n=2) == make(n=5)[:2]
    assert not {s.id for s in make()} & {s.id for s in make(seed=1)}


def test_lines_are_scored_by_their_place() -> None:
    (sample,) = make(n=1)
    right = sample.references[0]
    lines = right.split("\n")

    def scores(text: str) -> tuple[float, tuple[float, ...] | None]:
        found = TASK.score_text(sample, text)
        return found.task_score, found.position_scores

    assert scores(right) == (1, (1.0,) * 12)
    assert scores(f" {right}\n13. A more, B lines") == (1, (1.0,) * 12)
    assert scores("1. " + right) == (1, (1.0,) * 12)
    assert scores("") == (0, (0.0,) * 12)
    wrong = [*lines[:4], "5. A nothing, B nothing", *lines[5:]]
    assert scores("\n".join(wrong)) == (11 / 12, (1.0,) * 4 + (0.0,) + (1.0,) * 7)
    assert scores("\n".join(lines[:6])) == (0.5, (1.0,) * 6 + (0.0,) * 6)
    # A line that is left out costs itself alone; one that is written again doesn't mend the first.
    assert scores("\n".join(lines[:2] + lines[3:]))[1] == (1.0, 1.0, 0.0, *(1.0,) * 9)
    assert scores("\n".join(wrong + lines[4:5]))[1] == (1.0,) * 4 + (0.0,) + (1.0,) * 7


def test_a_line_in_front_of_the_answer_is_its_first_line() -> None:
    (sample,) = make(n=1)
    found = TASK.score_text(sample, "Sure, here is what they hold:\n" + sample.references[0])
    assert found.position_scores == (0.0,) + (1.0,) * 11
