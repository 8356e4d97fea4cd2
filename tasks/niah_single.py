"""One needle in a haystack. Easy on purpose: for heat maps over depth and length, not for gates."""

import random

from kveval.haystack import Haystack, build_samples, depth_of
from kveval.magic import MagicParams, magic_haystack
from kveval.tasks import Sample, TaskContext

VERSION = 1
MAX_NEW_TOKENS = 128


class Params(MagicParams):
    """What the needle looks like and lies in: `filler`, `key_type`, `value_type`, `digits`."""


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """One haystack with one needle and one question per sample; depths spread evenly."""

    def describe(number: int, rng: random.Random) -> Haystack:
        return magic_haystack(rng, [depth_of(ctx, "niah_single", number)], params=params)

    return build_samples(ctx, "niah_single", filler=params.filler, queries=1, describe=describe)
