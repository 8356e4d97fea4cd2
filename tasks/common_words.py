"""Aggregation: which words of a long numbered list occur most often?

The counts are those of RULER's common-words task (Hsieh et al. 2024, arXiv:2404.06654).
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from pydantic import Field, model_validator

from kveval.errors import LengthError
from kveval.tasks import Sample, TaskContext, TaskParams, make_sample, seeded_random
from kveval.words import made_up_words

VERSION = 1
MAX_NEW_TOKENS = 120
NAME = "common_words"

SHORT = 4096
"""Below this many tokens, words are repeated less, so that they fit."""

ENCODED_AT_ONCE = 512
"""Texts given to the tokenizer in one call."""

EXAMPLE = (3, 1, 10)
"""How often the worked example has a common word and another one, and how many other ones it has."""


class Params(TaskParams):
    """`common`: words that occur often, all asked for. `repeats`: how often each; `others`: how often any other word.

    Unless given, these are 30 and 3, or 6 and 1 in a context of less than 4096 tokens.
    """

    common: int = Field(10, ge=1, le=100)
    repeats: int | None = Field(None, ge=2)
    others: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _common_words_are_common(self) -> "Params":
        if (self.repeats is None) != (self.others is None):
            raise ValueError("give both repeats and others, or neither")
        if self.repeats is not None and self.others is not None and self.repeats <= self.others:
            raise ValueError(f"repeats ({self.repeats}) must exceed others ({self.others})")
        return self

    def counts(self, context_length: int) -> tuple[int, int]:
        """How often a common word and any other word occur."""
        if self.repeats is not None and self.others is not None:
            return self.repeats, self.others
        return (6, 1) if context_length < SHORT else (30, 3)


class Listing(NamedTuple):
    """A shuffled list of words, numbered from 1, with its common words in the order in which they first occur."""

    words: list[str]
    common: list[str]

    @property
    def text(self) -> str:
        """The list as it is read."""
        return "".join(f" {number}. {word}" for number, word in enumerate(self.words, 1))


@dataclass(frozen=True)
class Plan:
    """A sample before its list: the words that it takes, in the order in which they are taken."""

    head: tuple[int, ...]
    tail: tuple[int, ...]
    answer: tuple[int, ...]
    common: list[str]
    others: list[str]
    question: str


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """One list and one question per sample, behind a worked example with words of its own."""
    made: list[Sample] = []
    least = 0
    for index in range(ctx.samples):
        plan = _plan(params, ctx, index)
        least = max(least, _least(params, ctx, plan))
        if least <= ctx.context_length:
            made.append(_sample(params, ctx, index, plan))
    if ctx.context_length < least:
        raise LengthError(
            f"task {NAME!r} needs at least {least} tokens; a context length of {ctx.context_length} "
            "can't hold its words as often as they have to occur.",
            remedy=f"Ask for context lengths of {least} or more, or for fewer `common` words or `repeats`.",
        )
    return made


def _plan(params: Params, ctx: TaskContext, index: int) -> Plan:
    rng = seeded_random(ctx, NAME, index)
    # An entry is two tokens or more, so these are enough.
    words = made_up_words(rng, 2 * params.common + EXAMPLE[2] + 1 + ctx.context_length // 2)
    shown, common, words = words[: params.common], words[params.common : 2 * params.common], words[2 * params.common :]
    example = _shuffled(rng, shown, EXAMPLE[0], [word for word in words[: EXAMPLE[2]] for _ in range(EXAMPLE[1])])
    question, prefix = _question(params.common)
    instruction = (
        "Here is a numbered list of words. Some words occur in it more often than the others; keep count of them. "
        f"Example:{example.text}\n{question}\n{prefix} {', '.join(example.common)}"
    )
    tail, answer = ctx.prompt.tail_and_answer(f"\n\n{question}", prefix, ", ".join(common))
    head = ctx.prompt.head_ids + ctx.prompt.encode(f"{instruction}\n\nText:")
    return Plan(head, tail, answer, common, words[EXAMPLE[2] :], question)


def _question(common: int) -> tuple[str, str]:
    """The question and the opening words of its answer."""
    if common == 1:
        return "Which word occurs most often in the list above?", "The most frequent word is:"
    return f"Which {common} words occur most often in the list above?", f"The {common} most frequent words are:"


def _shuffled(rng: random.Random, common: list[str], repeats: int, rest: list[str]) -> Listing:
    """The common words `repeats` times each and the rest, shuffled so that `common` is the order of first occurrence.

    Which common word is which doesn't matter to a shuffle: they are named when they turn up.
    """
    places: list[int | str] = [number for number in range(len(common)) for _ in range(repeats)]
    places += rest
    rng.shuffle(places)
    names: dict[int, str] = {}
    words = [
        place if isinstance(place, str) else names.setdefault(place, common[min(len(names), len(common) - 1)])
        for place in places
    ]
    return Listing(words, common)


def _least(params: Params, ctx: TaskContext, plan: Plan) -> int:
    """Context length that holds the common words and one other word, each as often as it has to occur."""
    repeats, others = params.counts(ctx.context_length)
    numbers = [f" {number}." for number in range(1, params.common * repeats + others + 1)]
    words = [f" {word}" for word in [*plan.common, plan.others[0]]]
    *common, other = map(len, ctx.prompt.encode_many(words))
    listed = sum(map(len, ctx.prompt.encode_many(numbers))) + repeats * sum(common) + others * other
    return len(plan.head) + listed + len(plan.tail) + ctx.answer_room(len(plan.answer))


def _sample(params: Params, ctx: TaskContext, index: int, plan: Plan) -> Sample:
    repeats, others = params.counts(ctx.context_length)
    room = ctx.context_length - len(plan.head) - len(plan.tail) - ctx.answer_room(len(plan.answer))
    numbers = _encoded(ctx, (f" {number}." for number in count(1)))
    ids_of_number = list(islice(numbers, params.common * repeats))
    ids_of = dict(zip(plan.common, ctx.prompt.encode_many([f" {word}" for word in plan.common]), strict=True))
    used = sum(map(len, ids_of_number)) + repeats * sum(map(len, ids_of.values()))
    rest: list[str] = []
    vocabulary = zip(plan.others, _encoded(ctx, (f" {word}" for word in plan.others)), strict=True)
    for word, ids in (entry for entry in vocabulary for _ in range(others)):
        ids_of_number.append(next(numbers))
        ids_of[word] = ids
        rest.append(word)
        used += len(ids_of_number[-1]) + len(ids)
        if used > room:
            break
    # The entry that no longer fits comes last, cut to the exact token.
    listing = _shuffled(seeded_random(ctx, NAME, index, "list"), plan.common, repeats, rest[:-1])
    words = [*listing.words, rest[-1]]
    listed = [i for number, word in zip(ids_of_number, words, strict=True) for i in (*number, *ids_of[word])]
    return make_sample(
        ctx,
        index,
        plan.head + tuple(listed[:room]) + plan.tail,
        plan.answer,
        cluster=f"{NAME}-{index:05d}",
        metadata={"question": plan.question, "answer": ", ".join(plan.common), "words": len(listing.words)},
        references=tuple(plan.common),
    )


def _encoded(ctx: TaskContext, texts: Iterable[str]) -> Iterator[tuple[int, ...]]:
    """Tokens of each text, encoded as they are asked for."""
    rest = iter(texts)
    while block := list(islice(rest, ENCODED_AT_ONCE)):
        yield from ctx.prompt.encode_many(block)
