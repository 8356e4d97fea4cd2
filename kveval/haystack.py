"""Haystacks: filler text with needles in it, filled to the exact token.

A task describes each `Haystack` (needles with depths, questions); `build_samples` does the rest:

    head | Text: filler needle filler ... needle filler (cut) | question 1, answer prefix | answer 1
                                                        (cut) | question 2, answer prefix | answer 2

Questions of one haystack share everything up to the last few filler tokens, which are cut so that
prompt and answer together have exactly the context length. The shared part is prefilled once.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kveval.corpora import Corpus, load_corpus
from kveval.errors import LengthError
from kveval.tasks import Sample, TaskContext, make_sample, seeded_random

__all__ = [
    "DEPTH_BUCKETS",
    "Haystack",
    "Needle",
    "Question",
    "build_samples",
    "depth_of",
    "numbers",
]

DEPTH_BUCKETS = 8
"""Depths are spread evenly over this many equal parts of the context. A power of two."""

_ENCODED_AT_ONCE = 512
"""Filler units given to the tokenizer in one call."""


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, and where it is asked to start (0 start of the context, 1 end)."""

    text: str
    depth: float


@dataclass(frozen=True)
class Question:
    """What is asked about a haystack.

    Attributes:
        text: The question, in the user's turn after the context.
        answer_prefix: Opening words of the reply, given to the model.
        answer: The reply's continuation, after a space.
        references: What a written reply must hold; the answer itself unless given.
        needles: Indices of the needles that the answer needs; the first one's depth is the sample's.
        metadata: Plain JSON data for the sample.
    """

    text: str
    answer_prefix: str
    answer: str
    needles: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Haystack:
    """Needles in filler, with the questions about them. `instruction` stands before the text.

    `filler` is the haystack's own text between the needles; None: the task's.
    """

    instruction: str
    needles: tuple[Needle, ...]
    questions: tuple[Question, ...]
    filler: Corpus | None = None


def depth_of(ctx: TaskContext, task: str, index: int) -> float:
    """The depth asked of question `index`, in [0, 1).

    Any 8 questions in a row from a multiple of 8 cover all eight depth buckets, and the first 4 of
    them all quarters: the base-2 van der Corput sequence with a random digital shift per 8. Inside a
    bucket the depth is uniform.
    """
    block, place = divmod(index, DEPTH_BUCKETS)
    shift = seeded_random(ctx, task, block, "depth-shift").randrange(DEPTH_BUCKETS)
    bits = DEPTH_BUCKETS.bit_length() - 1
    bucket = int(f"{place:0{bits}b}"[::-1], 2) ^ shift
    return (bucket + seeded_random(ctx, task, index, "depth").random()) / DEPTH_BUCKETS


def build_samples(
    ctx: TaskContext,
    task: str,
    *,
    filler: str | None,
    queries: int,
    describe: Callable[[int, random.Random], Haystack],
) -> list[Sample]:
    """Exactly `ctx.samples` samples from ceil(samples / queries) haystacks.

    Args:
        ctx: What to make samples for.
        task: The task's name: seeds the randomness and names the task in errors.
        filler: Name of the text source between the needles; None if every haystack brings its own.
        queries: Questions per haystack, as many as `describe` gives.
        describe: Haystack number and its own random generator -> `Haystack`. It must not depend on
            the number of samples or the context length.

    Raises:
        LengthError: the context length can't hold the needles and the question.
    """
    corpus = None if filler is None else load_corpus(filler)
    samples: list[Sample] = []
    least = 0
    for number in range(-(-ctx.samples // queries)):
        haystack = describe(number, seeded_random(ctx, task, number))
        own = haystack.filler or corpus
        assert own is not None, "a task without a text source gives each haystack its own"
        plan = _Plan.of(ctx, haystack, own)
        least = max(least, plan.minimum)
        if ctx.context_length < least:
            continue  # no sample will be; the error is to name what all of them need
        stream = _Stream.of(ctx, plan, seeded_random(ctx, task, number, "filler"))
        for place in range(min(queries, ctx.samples - len(samples))):
            samples.append(_sample(ctx, task, number, place, plan, stream))
    if ctx.context_length < least:
        raise LengthError(
            f"task {task!r} needs at least {least} tokens; a context length of {ctx.context_length} "
            "can't hold its needles and its question.",
            remedy=f"Ask for context lengths of {least} or more, or for fewer needles.",
        )
    return samples


@dataclass(frozen=True)
class _Plan:
    """A haystack in tokens, before the filler: everything whose length is known."""

    haystack: Haystack
    corpus: Corpus
    head: tuple[int, ...]
    needles: tuple[tuple[int, ...], ...]
    tails: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    minimum: int

    @classmethod
    def of(cls, ctx: TaskContext, haystack: Haystack, corpus: Corpus) -> _Plan:
        prompt = ctx.prompt
        head = prompt.head_ids + prompt.encode(f"{haystack.instruction}\n\nText:")
        needles = prompt.encode_many([corpus.joiner + needle.text for needle in haystack.needles])
        tails = tuple(prompt.tail_and_answer(f"\n\n{q.text}", q.answer_prefix, q.answer) for q in haystack.questions)
        longest = max(len(tail) + ctx.answer_room(len(answer)) for tail, answer in tails)
        # One filler token, so that even the shortest haystack is more than its needles.
        minimum = len(head) + sum(map(len, needles)) + longest + 1
        return cls(haystack, corpus, head, tuple(needles), tails, minimum)

    def room(self, ctx: TaskContext, question: int) -> int:
        """Context tokens that question number `question` leaves."""
        tail, answer = self.tails[question]
        return ctx.context_length - len(self.head) - len(tail) - ctx.answer_room(len(answer))


@dataclass(frozen=True)
class _Stream:
    """The context in tokens, long enough for the question with the most room."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    wraps: int

    @classmethod
    def of(cls, ctx: TaskContext, plan: _Plan, rng: random.Random) -> _Stream:
        rooms = [plan.room(ctx, question) for question in range(len(plan.tails))]
        needle_tokens = sum(map(len, plan.needles))
        units, wraps = _filler(ctx, plan.corpus, max(rooms) - needle_tokens, rng)
        before = _places(plan, [len(unit) for unit in units], min(rooms))
        ids: list[int] = []
        starts = [0] * len(plan.needles)
        for position, unit in enumerate([*units, ()]):
            for i in before.get(position, ()):
                starts[i] = len(ids)
                ids.extend(plan.needles[i])
            ids.extend(unit)
        return cls(tuple(ids), tuple(starts), wraps)


def _places(plan: _Plan, unit_tokens: Sequence[int], room: int) -> dict[int, list[int]]:
    """Which needles stand before which filler unit: at the boundary nearest to each asked depth.

    All needles end within `room` tokens, where the question with the least room ends its context.
    """
    spare = room - sum(map(len, plan.needles))
    edges = [edge for edge in accumulate(unit_tokens, initial=0) if edge <= spare]
    order = sorted(range(len(plan.needles)), key=lambda i: (plan.haystack.needles[i].depth, i))
    before: dict[int, list[int]] = {}
    position = earlier = 0
    for i in order:
        target = plan.haystack.needles[i].depth * room - earlier
        position = max(position, _nearest(edges, target))
        before.setdefault(position, []).append(i)
        earlier += len(plan.needles[i])
    return before


def _sample(ctx: TaskContext, task: str, number: int, place: int, plan: _Plan, stream: _Stream) -> Sample:
    question = plan.haystack.questions[place]
    tail, answer = plan.tails[place]
    room = plan.room(ctx, place)
    depths = [stream.starts[i] / room for i in question.needles]
    index = number * len(plan.haystack.questions) + place
    return make_sample(
        ctx,
        index,
        plan.head + stream.ids[:room] + tail,
        answer,
        cluster=f"{task}-{number:05d}",
        depth=depths[0],
        metadata={
            "question": question.text,
            "answer": question.answer,
            "depths": depths,
            "filler_wraps": stream.wraps,
            **question.metadata,
        },
        references=question.references or (question.answer,),
    )


def _filler(ctx: TaskContext, corpus: Corpus, tokens: int, rng: random.Random) -> tuple[list[tuple[int, ...]], int]:
    """Consecutive units with at least `tokens` tokens, from a random place, and how often it wrapped.

    Filler may start over at the end of its source (noise always does); the wraps are recorded.
    """
    sentences = corpus.sentences
    first = rng.randrange(len(sentences))
    units: list[tuple[int, ...]] = []
    total = 0
    for unit in _encoded(ctx, corpus, first):
        if total >= tokens:
            break
        units.append(unit)
        total += len(unit)
    return units, (first + max(len(units) - 1, 0)) // len(sentences)


def _encoded(ctx: TaskContext, corpus: Corpus, first: int) -> Iterator[tuple[int, ...]]:
    """Tokens of the corpus's units from number `first` on, without end."""
    sentences = corpus.sentences
    at_once = min(_ENCODED_AT_ONCE, len(sentences))
    while True:
        texts = [sentences[(first + i) % len(sentences)] for i in range(at_once)]
        yield from ctx.prompt.encode_many([corpus.joiner + text for text in texts])
        first = (first + at_once) % len(sentences)


def _nearest(edges: Sequence[int], target: float) -> int:
    """Index of the edge nearest to `target`; the earlier one of two equally near. `edges` ascends."""
    right = bisect_left(edges, target)
    if right == 0:
        return 0
    if right == len(edges) or target - edges[right - 1] <= edges[right] - target:
        return right - 1
    return right


def numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """`count` different numbers of exactly `digits` digits, uniform."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
