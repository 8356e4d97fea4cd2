"""Several needles with different keys; some are asked for, each in a question of its own."""

import random

from pydantic import Field, model_validator

from kveval.corpora import CorpusName
from kveval.haystack import Haystack, build_samples, depth_of, magic_haystack
from kveval.tasks import Sample, TaskContext, TaskParams

VERSION = 1


class Params(TaskParams):
    """`keys`: needles per haystack. `queries`: how many of them are asked for, one prefill for all."""

    keys: int = Field(4, ge=1, le=1000)
    queries: int = Field(1, ge=1)
    filler: CorpusName = "noise"
    digits: int = Field(7, ge=4, le=18)

    @model_validator(mode="after")
    def _asks_what_is_there(self) -> "Params":
        if self.queries > self.keys:
            raise ValueError(f"queries ({self.queries}) can't exceed keys ({self.keys})")
        return self


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """The asked needles' depths spread evenly over all samples; the others lie anywhere."""

    def describe(number: int, rng: random.Random) -> Haystack:
        first = number * params.queries
        depths = [depth_of(ctx, "niah_multikey", first + i) for i in range(params.queries)]
        depths += [rng.random() for _ in range(params.keys - params.queries)]
        return magic_haystack(rng, depths, asked=params.queries, digits=params.digits)

    return build_samples(ctx, "niah_multikey", filler=params.filler, queries=params.queries, describe=describe)
