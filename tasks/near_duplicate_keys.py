"""Nothing but records, whose 6-digit keys come in families that share four digits; some records are asked for."""

import random
from collections.abc import Iterator
from itertools import islice

from pydantic import Field

from kveval.corpora import Corpus
from kveval.haystack import Haystack, Needle, Question, build_samples, depth_of, numbers
from kveval.tasks import Sample, TaskContext, TaskParams

VERSION = 1

DIGITS = 6
VARIED = 2
"""Digits of a key in which the members of a family differ."""

TOGETHER = 8
"""Families whose records are mixed."""

RECORDS = 4096
"""Records of the filler, some 80,000 tokens; a longer context repeats them."""


class Params(TaskParams):
    """`mates`: other records of the asked one's family, all of them in the text. `queries`: records asked for.

    `digits`: digits of a record's code.
    """

    mates: int = Field(3, ge=1, le=30)
    queries: int = Field(1, ge=1, le=100)
    digits: int = Field(5, ge=4, le=18)


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """The asked records' depths spread evenly over all samples; the rest of their families lies anywhere."""

    def describe(number: int, rng: random.Random) -> Haystack:
        families = _families(rng, params.mates + 1)
        asked = [next(families) for _ in range(params.queries)]
        keys = [key for family in asked for key in family]
        rest = [key for block in _blocks(families) for key in rng.sample(block, len(block))]
        codes = numbers(rng, len(keys) + len(rest), params.digits)
        of = dict(zip([*keys, *rest], codes, strict=True))
        depths = []
        for query in range(params.queries):
            depths += [depth_of(ctx, "near_duplicate_keys", number * params.queries + query)]
            depths += [rng.random() for _ in range(params.mates)]
        first = [query * (params.mates + 1) for query in range(params.queries)]
        return Haystack(
            instruction="The following text lists records with their codes. Remember them: "
            "you will be asked for one of the codes.",
            needles=tuple(Needle(_record(key, of[key]), depth) for key, depth in zip(keys, depths, strict=True)),
            questions=tuple(
                Question(
                    f"What is the code of record {keys[i]} in the text above?",
                    f"The code of record {keys[i]} is",
                    of[keys[i]],
                    needles=(i,),
                )
                for i in first
            ),
            filler=Corpus("records", tuple(_record(key, of[key]) for key in rest)),
        )

    return build_samples(ctx, "near_duplicate_keys", filler=None, queries=params.queries, describe=describe)


def _families(rng: random.Random, size: int) -> Iterator[list[str]]:
    """Families of `size` keys, no key twice, about `RECORDS` keys in all."""
    used: set[str] = set()
    while len(used) < RECORDS:
        base = [rng.randrange(10) for _ in range(DIGITS)]
        varied = sorted(rng.sample(range(DIGITS), VARIED))
        family = []
        for ending in rng.sample(range(10**VARIED), size):
            digits = list(base)
            for place, digit in zip(varied, f"{ending:0{VARIED}d}", strict=True):
                digits[place] = int(digit)
            family.append("".join(map(str, digits)))
        if used.isdisjoint(family):
            used.update(family)
            yield family


def _blocks(families: Iterator[list[str]]) -> Iterator[list[str]]:
    """Keys of `TOGETHER` families at a time: near one another, so that short texts hold whole families as well."""
    while block := [key for family in islice(families, TOGETHER) for key in family]:
        yield block


def _record(key: str, code: str) -> str:
    return f"The code of record {key} is {code}."
