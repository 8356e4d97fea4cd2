"""Several needles with different keys; some are asked for, each in a question of its own."""

import random
from typing import Literal

from pydantic import Field, model_validator

from kveval.haystack import Haystack, build_samples, depth_of
from kveval.magic import MagicParams, magic_haystack
from kveval.tasks import Sample, TaskContext

VERSION = 1
MAX_NEW_TOKENS = 128


class Params(MagicParams):
    """`keys`: needles per haystack. `queries`: how many of them are asked for, one prefill for all.

    `haystack`: what lies around them, the `filler` or nothing but other needles. `key_type`, `value_type`, `digits`:
    what a needle looks like.
    """

    keys: int = Field(4, ge=1, le=1000)
    queries: int = Field(1, ge=1)
    haystack: Literal["filler", "needles"] = "filler"

    @model_validator(mode="after")
    def _asks_what_is_there(self) -> "Params":
        if self.queries > self.keys:
            raise ValueError(f"queries ({self.queries}) can't exceed keys ({self.keys})")
        if self.haystack == "needles" and "filler" in self.model_fields_set:
            raise ValueError("filler has no place in haystack: needles, where all text is needles")
        return self


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """The asked needles' depths spread evenly over all samples; the others lie anywhere."""

    def describe(number: int, rng: random.Random) -> Haystack:
        first = number * params.queries
        depths = [depth_of(ctx, "niah_multikey", first + i) for i in range(params.queries)]
        depths += [rng.random() for _ in range(params.keys - params.queries)]
        alone = params.haystack == "needles"
        return magic_haystack(rng, depths, params=params, asked=params.queries, needles_only=alone)

    return build_samples(ctx, "niah_multikey", filler=params.filler, queries=params.queries, describe=describe)
