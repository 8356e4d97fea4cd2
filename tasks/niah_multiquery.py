"""Several needles with different keys; one question asks for the values of some of them together."""

import random
from dataclasses import replace

from pydantic import Field, model_validator

from kveval.haystack import Haystack, Needle, build_samples, depth_of
from kveval.magic import MagicParams
from kveval.tasks import Sample, TaskContext

VERSION = 1
MAX_NEW_TOKENS = 128


class Params(MagicParams):
    """`keys`: needles in the haystack. `asked`: how many of them the one question asks for.

    `filler`, `key_type`, `value_type`, `digits`: as in the other needle tasks.
    """

    keys: int = Field(4, ge=1, le=1000)
    asked: int = Field(4, ge=1, le=100)

    @model_validator(mode="after")
    def _asks_what_is_there(self) -> "Params":
        if self.asked > self.keys:
            raise ValueError(f"asked ({self.asked}) can't exceed keys ({self.keys})")
        return self


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """Depths of the asked needles spread evenly, the others anywhere; the answer follows the question's order."""

    def describe(number: int, rng: random.Random) -> Haystack:
        first = number * params.asked
        depths = [depth_of(ctx, "niah_multiquery", first + i) for i in range(params.asked)]
        depths += [rng.random() for _ in range(params.keys - params.asked)]
        keys, values = params.draw(rng, params.keys, params.keys)
        found = zip(keys, values, depths, strict=True)
        return Haystack(
            instruction=params.instruction("some"),
            needles=tuple(Needle(params.needle(key, value), depth) for key, value, depth in found),
            questions=(params.question(keys[: params.asked], values[: params.asked], range(params.asked)),),
        )

    made = build_samples(ctx, "niah_multiquery", filler=params.filler, queries=1, describe=describe)
    # The answer has no one place; those of all asked needles are in `metadata`.
    return [replace(sample, depth=None) for sample in made]
