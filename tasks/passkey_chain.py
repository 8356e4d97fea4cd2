"""Multi-hop retrieval: each needle names the next key, and the answer writes the chain out."""

import random
from itertools import pairwise

from pydantic import Field

from kveval.corpora import CorpusName
from kveval.haystack import Haystack, Needle, Question, build_samples, depth_of, numbers
from kveval.tasks import Sample, TaskContext, TaskParams

VERSION = 1


class Params(TaskParams):
    """`hops`: needles to follow. `queries`: chains per haystack, each asked for on its own.

    `digits`: digits of a passkey.
    """

    hops: int = Field(2, ge=1, le=10_000)
    queries: int = Field(1, ge=1, le=100)
    filler: CorpusName = "noise"
    digits: int = Field(5, ge=4, le=18)


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """A chain's first needle has an evenly spread depth; the others lie anywhere, in any order."""

    def describe(number: int, rng: random.Random) -> Haystack:
        length = params.hops + 1
        keys = numbers(rng, params.queries * length, params.digits)
        needles: list[Needle] = []
        questions: list[Question] = []
        for query in range(params.queries):
            chain = keys[query * length : (query + 1) * length]
            depths = [depth_of(ctx, "passkey_chain", number * params.queries + query)]
            depths += [rng.random() for _ in range(params.hops - 1)]
            own = tuple(range(len(needles), len(needles) + params.hops))
            needles += [Needle(line, depth) for line, depth in zip(_links(chain), depths, strict=True)]
            questions.append(_question(chain, own))
        return Haystack(
            instruction="In the following text, each passkey leads to the next one. Remember them all.",
            needles=tuple(needles),
            questions=tuple(questions),
        )

    return build_samples(ctx, "passkey_chain", filler=params.filler, queries=params.queries, describe=describe)


def _links(chain: list[str]) -> list[str]:
    return [f"The passkey {a} leads to {b}." for a, b in pairwise(chain)]


def _question(chain: list[str], needles: tuple[int, ...]) -> Question:
    """The answer repeats the links as a numbered list, so that each hop is a look-up of its own."""
    hops = "1 step" if len(needles) == 1 else f"{len(needles)} steps"
    steps = "\n".join(f"{number}. {link}" for number, link in enumerate(_links(chain), 1))
    start = f"1. The passkey {chain[0]} leads to"
    return Question(
        f"Start from the passkey {chain[0]} and follow the text above for {hops}. Which passkeys do you pass?",
        f"Here {'is' if len(needles) == 1 else 'are'} the {hops}:\n{start}",
        steps.removeprefix(start).strip().removesuffix("."),
        needles=needles,
    )
