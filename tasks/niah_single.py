"""One needle in a haystack. Easy on purpose: for heat maps over depth and length, not for gates."""

import random

from pydantic import Field

from kveval.corpora import CorpusName
from kveval.haystack import Haystack, build_samples, depth_of, magic_haystack
from kveval.tasks import Sample, TaskContext, TaskParams

VERSION = 1


class Params(TaskParams):
    """`filler`: the text around the needle. `digits`: length of the number to find."""

    filler: CorpusName = "noise"
    digits: int = Field(7, ge=4, le=18)


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """One haystack with one needle and one question per sample; depths spread evenly."""

    def describe(number: int, rng: random.Random) -> Haystack:
        return magic_haystack(rng, [depth_of(ctx, "niah_single", number)], digits=params.digits)

    return build_samples(ctx, "niah_single", filler=params.filler, queries=1, describe=describe)
