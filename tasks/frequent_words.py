"""Aggregation: which made-up words occur most often in a text whose word counts follow a zeta distribution?

As in RULER's frequent-words task (Hsieh et al. 2024, arXiv:2404.06654), the most frequent "word" is dots, which don't
count; the next ones are asked for.
"""

from dataclasses import dataclass
from itertools import count, pairwise, takewhile

from pydantic import Field

from kveval.errors import LengthError
from kveval.tasks import Sample, TaskContext, TaskParams, make_sample, seeded_random
from kveval.words import made_up_words

VERSION = 1
MAX_NEW_TOKENS = 50
NAME = "frequent_words"
DOTS = " ..."


class Params(TaskParams):
    """`asked`: how many of the most frequent words. `alpha`: the word of rank k occurs in proportion to k^-alpha."""

    asked: int = Field(3, ge=1, le=10)
    alpha: float = Field(2.0, ge=1.2, le=5)

    def counts(self, top: int) -> list[int]:
        """How often the words of rank 2, 3, ... occur if the dots, of rank 1, occur `top` times."""
        return list(takewhile(bool, (int(top / rank**self.alpha) for rank in count(2))))

    def decided(self, top: int) -> bool:
        """Whether no two of the asked words, nor the last one and the next, occur equally often."""
        counts = [top, *self.counts(top)][: self.asked + 2]
        return len(counts) == self.asked + 2 and all(more > fewer for more, fewer in pairwise(counts))


@dataclass(frozen=True)
class Plan:
    """A sample before its text. `words` are its words from rank 2 on, more than can be used."""

    head: tuple[int, ...]
    tail: tuple[int, ...]
    answer: tuple[int, ...]
    words: list[str]
    tokens: list[tuple[int, ...]]
    dots: tuple[int, ...]
    question: str

    def size(self, params: Params, top: int) -> int:
        """Tokens of the text in which the dots occur `top` times."""
        counts = params.counts(top)
        words = sum(times * len(ids) for times, ids in zip(counts, self.tokens, strict=False))
        return words + top * len(self.dots)


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """One text and one question per sample."""
    top = next(top for top in count(1) if params.decided(top))
    made: list[Sample] = []
    least = 0
    for index in range(ctx.samples):
        plan = _plan(params, ctx, index)
        around = len(plan.head) + len(plan.tail) + ctx.answer_room(len(plan.answer))
        least = max(least, around + plan.size(params, top))
        if least <= ctx.context_length:
            made.append(_sample(params, ctx, index, plan))
    if ctx.context_length < least:
        raise LengthError(
            f"task {NAME!r} needs at least {least} tokens; in a context length of {ctx.context_length} "
            "some of the most frequent words would occur equally often.",
            remedy=f"Ask for context lengths of {least} or more, or for fewer `asked` words.",
        )
    return made


def _plan(params: Params, ctx: TaskContext, index: int) -> Plan:
    words = made_up_words(seeded_random(ctx, NAME, index), params.asked + 1 + len(params.counts(ctx.context_length)))
    asked = words[: params.asked]
    what = "word" if params.asked == 1 else f"{params.asked} words"
    question = f"Leave the dots aside. Which {what} occur{'s' * (params.asked == 1)} most often in the text above?"
    prefix = "The most frequent word is:" if params.asked == 1 else f"The {params.asked} most frequent words are:"
    tail, answer = ctx.prompt.tail_and_answer(f"\n\n{question}", prefix, ", ".join(asked))
    head = ctx.prompt.head_ids + ctx.prompt.encode(
        "Here is a text in code. Keep count of how often each of its words occurs; dots are no words.\n\nText:"
    )
    *tokens, dots = ctx.prompt.encode_many([*(f" {word}" for word in words), DOTS])
    return Plan(head, tail, answer, words, tokens, dots, question)


def _sample(params: Params, ctx: TaskContext, index: int, plan: Plan) -> Sample:
    room = ctx.context_length - len(plan.head) - len(plan.tail) - ctx.answer_room(len(plan.answer))
    low, high = 1, room
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan.size(params, middle) <= room else (low, middle - 1)
    top = next(top for top in range(low, 0, -1) if params.decided(top))
    counts = params.counts(top)
    pieces = [ids for ids, times in zip(plan.tokens, counts, strict=False) for _ in range(times)]
    # Dots fill what is left, to the token: they aren't asked for, and stay the most frequent.
    left = room - sum(map(len, pieces))
    whole, cut = divmod(left, len(plan.dots))
    pieces += [plan.dots] * whole
    seeded_random(ctx, NAME, index, "text").shuffle(pieces)
    pieces.append(plan.dots[:cut])
    return make_sample(
        ctx,
        index,
        plan.head + tuple(i for piece in pieces for i in piece) + plan.tail,
        plan.answer,
        cluster=f"{NAME}-{index:05d}",
        metadata={
            "question": plan.question,
            "answer": ", ".join(plan.words[: params.asked]),
            "counts": counts[: params.asked + 1],
        },
        references=tuple(plan.words[: params.asked]),
    )
