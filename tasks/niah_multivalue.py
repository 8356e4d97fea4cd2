"""Several needles with one key; one question asks for all their values."""

import random
from dataclasses import replace

from pydantic import Field

from kveval.haystack import Haystack, Needle, build_samples, depth_of
from kveval.magic import MagicParams
from kveval.tasks import Sample, TaskContext

VERSION = 1
MAX_NEW_TOKENS = 128


class Params(MagicParams):
    """`values`: values of the key. `filler`, `key_type`, `value_type`, `digits`: as in the other needle tasks."""

    values: int = Field(4, ge=1, le=100)


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """Depths of all needles spread evenly; the answer lists the values in the order of the text."""

    def describe(number: int, rng: random.Random) -> Haystack:
        first = number * params.values
        depths = sorted(depth_of(ctx, "niah_multivalue", first + i) for i in range(params.values))
        (key,), values = params.draw(rng, 1, params.values)
        return Haystack(
            instruction=params.instruction("some"),
            needles=tuple(
                Needle(params.needle(key, value), depth) for value, depth in zip(values, depths, strict=True)
            ),
            questions=(params.question([key], values, range(params.values)),),
        )

    made = build_samples(ctx, "niah_multivalue", filler=params.filler, queries=1, describe=describe)
    # The answer has no one place; those of all values are in `metadata`.
    return [replace(sample, depth=None) for sample in made]
