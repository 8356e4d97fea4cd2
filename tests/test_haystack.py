from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from kveval.errors import LengthError
from kveval.haystack import (
    DEPTH_BUCKETS,
    Haystack,
    Needle,
    Question,
    build_samples,
    depth_of,
    numbers,
)
from kveval.magic import MagicParams, magic_haystack
from kveval.prompting import PromptTemplate, shared_prefix
from kveval.tasks import TaskContext
from kveval.words import ADJECTIVES, NOUNS, word_pairs

PROMPT = PromptTemplate.from_tokenizer(tiny_tokenizer())
NOISE_UNIT = 45  # tokens of the longest noise sentence, generously


def context(length: int = 512, samples: int = 4, seed: int = 0) -> TaskContext:
    return TaskContext(PROMPT.tokenizer, PROMPT, length, samples, seed)


def haystack(*depths: float, questions: int = 1) -> Haystack:
    needles = tuple(Needle(f"Needle number {i} is here.", depth) for i, depth in enumerate(depths))
    asked = tuple(
        Question(f"What is {'so ' * i}hidden?", "It is", f"{i}" * (i + 1), needles=(i,)) for i in range(questions)
    )
    return Haystack("Remember the text.", needles, asked)


def build(ctx, described, *, queries=1, filler="noise"):
    return build_samples(ctx, "demo", filler=filler, queries=queries, describe=lambda number, rng: described)


def find(ids: tuple[int, ...], part: tuple[int, ...]) -> list[int]:
    return [i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part]


HEAD = len(PROMPT.head_ids + PROMPT.encode("Remember the text.\n\nText:"))


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.integers(320, 900),
    st.integers(0, 2**32),
)
def test_needles_are_whole_once_and_near_their_depth(depths, length, seed):
    (sample,) = build(context(length, samples=1, seed=seed), haystack(*depths))
    assert len(sample.prompt_ids) + len(sample.answer_ids) == length
    tail = PROMPT.tail("\n\nWhat is hidden?", "It is ")
    room = length - HEAD - len(tail) - len(sample.answer_ids)
    assert sample.prompt_ids[HEAD + room :] == tail
    for i, asked in enumerate(depths):
        needle = PROMPT.encode(f" Needle number {i} is here.")
        (start,) = find(sample.prompt_ids, needle)
        realized = (start - HEAD) / room
        # A boundary is at most a unit away; needles asked for the same place stand side by side.
        assert abs(realized - asked) <= (NOISE_UNIT + len(depths) * len(needle)) / room
        if i == 0:
            assert sample.depth == realized


def test_needles_stand_between_sentences():
    (sample,) = build(context(1000, samples=1), haystack(0.0, 0.4, 1.0))
    text = PROMPT.tokenizer.decode(sample.prompt_ids)
    before = re.findall(r"(\S+) Needle number", text)
    assert len(before) == 3
    assert all(word == "Text:" or word.endswith(".") for word in before)
    assert "Text: Needle number 0 is here. " in text


def test_questions_share_all_but_the_last_filler_tokens():
    described = haystack(0.1, 0.5, 1.0, questions=3)
    samples = build(context(512, samples=3), described, queries=3)
    assert len({s.cluster for s in samples}) == 1
    tails = [len(PROMPT.tail_and_answer(f"\n\n{q.text}", q.answer_prefix, q.answer)[0]) for q in described.questions]
    rooms = [512 - HEAD - tail - len(s.answer_ids) for tail, s in zip(tails, samples, strict=True)]
    for first, second in pairwise(samples):
        assert shared_prefix(first.prompt_ids, second.prompt_ids) >= HEAD + min(rooms)
    assert [len(s.prompt_ids) + len(s.answer_ids) for s in samples] == [512] * 3


def test_the_number_of_samples_changes_no_sample():
    def make(n):
        return build_samples(
            context(samples=n),
            "demo",
            filler="noise",
            queries=3,
            describe=lambda number, rng: magic_haystack(rng, [0.2, 0.5, 0.8], asked=3),
        )

    assert make(4) == make(9)[:4]
    assert [s.cluster for s in make(4)] == ["demo-00000"] * 3 + ["demo-00001"]
    assert [s.index for s in make(4)] == [0, 1, 2, 3]


def test_seed_and_index_change_the_sample():
    def make(seed):
        return build_samples(
            context(samples=3, seed=seed),
            "demo",
            filler="noise",
            queries=1,
            describe=lambda number, rng: magic_haystack(rng, [0.5]),
        )

    questions = [s.metadata["question"] for seed in (0, 1) for s in make(seed)]
    assert len(set(questions)) == 6


def test_length_error_names_the_exact_minimum():
    described = haystack(0.5, 0.9)
    with pytest.raises(LengthError, match=r"task 'demo' needs at least \d+ tokens; .* of 10 ") as caught:
        build(context(10, samples=1), described)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    (sample,) = build(context(least, samples=1), described)
    assert len(sample.prompt_ids) + len(sample.answer_ids) == least
    with pytest.raises(LengthError):
        build(context(least - 1, samples=1), described)


def test_depths_are_spread_evenly_for_every_count():
    depths = [depth_of(context(), "demo", i) for i in range(4 * DEPTH_BUCKETS)]
    for start in range(0, len(depths), DEPTH_BUCKETS):
        block = depths[start : start + DEPTH_BUCKETS]
        assert sorted(int(d * DEPTH_BUCKETS) for d in block) == list(range(DEPTH_BUCKETS))
        assert sorted(int(d * 4) for d in block[:4]) == [0, 1, 2, 3]
    assert depths != [depth_of(context(seed=1), "demo", i) for i in range(4 * DEPTH_BUCKETS)]


def test_filler_wraps_are_recorded(tmp_path):
    (tmp_path / "short.txt").write_text("The sun shines. The grass is green.")
    (sample,) = build(context(512, samples=1), haystack(0.5), filler=f"file:{tmp_path}/short.txt")
    assert sample.metadata["filler_wraps"] > 5
    (sample,) = build(context(300, samples=1), haystack(0.5), filler="python-docs")
    assert sample.metadata["filler_wraps"] == 0


@pytest.mark.parametrize(
    "text",
    ["早上好。" * 50, "x" * 3000, "مرحبا بك. " * 40, "<|end|> <|user|>. Go on. " * 20, "One\r\ntwo.\r\n\r\nThree."],
)
def test_odd_filler_is_filled_exactly_without_special_tokens(text, tmp_path):
    (tmp_path / "odd.txt").write_bytes(text.encode())
    ctx = context(700, samples=2)
    clean = build(ctx, haystack(0.3))
    for sample, other in zip(build(ctx, haystack(0.3), filler=f"file:{tmp_path}/odd.txt"), clean, strict=True):
        special = [i for i in sample.prompt_ids if i < 5]
        assert special == [i for i in other.prompt_ids if i < 5] == [1, 2, 4, 3]
        assert len(find(sample.prompt_ids, PROMPT.encode(" Needle number 0 is here."))) == 1


def test_code_filler_keeps_lines(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    return 1\n\nclass A:\n    x = 2\n")
    (sample,) = build(context(300, samples=1), haystack(0.5), filler=f"file:{tmp_path}/a.py")
    assert "\nNeedle number 0 is here.\n" in PROMPT.tokenizer.decode(sample.prompt_ids)


def test_raw_prompt_has_bos_once():
    raw = PromptTemplate.from_tokenizer(tiny_tokenizer(), "none")
    ctx = replace(context(samples=1), prompt=raw)
    (sample,) = build(ctx, haystack(0.5))
    assert [i for i in sample.prompt_ids if i < 5] == [1]
    assert sample.prompt_ids[0] == 1


def test_magic_haystack_asks_for_its_own_needles():
    described = magic_haystack(random.Random(0), [0.1, 0.2, 0.3], asked=2, params=MagicParams(digits=5))
    assert len(described.needles) == 3
    for needle, question in zip(described.needles, described.questions, strict=False):
        key = re.search(r"numbers for (\S+) is: (\d{5})\.$", needle.text)
        assert question.answer == key[2]
        assert key[1] in question.text
        assert question.answer_prefix.endswith(f"{key[1]} is:")


def test_words_and_numbers_do_not_repeat():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) >= 60
    assert len(set(NOUNS)) == len(NOUNS) >= 60
    pairs = word_pairs(random.Random(0), 500)
    assert len(set(pairs)) == 500
    assert len({pair.split("-")[1] for pair in pairs[:60]}) == 60
    found = numbers(random.Random(0), 100, 4)
    assert len(set(found)) == 100
    assert all(len(n) == 4 for n in found)
