"""Multi-hop tracing: a value is handed from variable to variable; name every one that holds it."""

import random
import string

from pydantic import Field

from kveval.corpora import CorpusName
from kveval.haystack import Haystack, Needle, Question, build_samples, numbers
from kveval.tasks import Sample, TaskContext, TaskParams

VERSION = 1
MAX_NEW_TOKENS = 40  # RULER has 30, which is short for five names where a tokenizer spells them letter by letter


class Params(TaskParams):
    """`hops`: assignments after the first. `chains`: chains in the text, one of them asked for."""

    hops: int = Field(4, ge=1, le=64)
    chains: int = Field(1, ge=1, le=100)
    filler: CorpusName = "noise"


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """One haystack and one question per sample, behind a worked example with names of its own."""

    def describe(number: int, rng: random.Random) -> Haystack:
        length = params.hops + 1
        names = _names(rng, (params.chains + 1) * length)
        chains = [names[i : i + length] for i in range(0, len(names), length)]
        values = numbers(rng, len(chains), 5)
        shown, value = chains.pop(), values.pop()
        example = " ".join([*_lines(shown, value), _question(value), _prefix(value, length), _answer(shown)])
        needles = [
            Needle(line, depth)
            for chain, start in zip(chains, values, strict=True)
            for line, depth in zip(_lines(chain, start), sorted(rng.random() for _ in chain), strict=True)
        ]
        asked = Question(
            _question(values[0]),
            _prefix(values[0], length),
            _answer(chains[0]),
            needles=tuple(range(length)),
            references=tuple(chains[0]),
        )
        return Haystack(
            instruction=f"Track the variables in the following text. Example: {example}",
            needles=tuple(needles),
            questions=(asked,),
        )

    return build_samples(ctx, "variable_tracking", filler=params.filler, queries=1, describe=describe)


def _names(rng: random.Random, count: int) -> list[str]:
    """Different five-letter names, so that no name gives another away."""
    names: list[str] = []
    while len(names) < count:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    return names


def _lines(chain: list[str], value: str) -> list[str]:
    steps = zip(chain[1:], chain, strict=False)
    return [f"VAR {chain[0]} = {value}.", *(f"VAR {name} = VAR {source}." for name, source in steps)]


def _question(value: str) -> str:
    return f"Question: which variables hold the value {value}, handed on from one to the next?"


def _prefix(value: str, count: int) -> str:
    return f"Answer: the {count} variables that hold {value} are:"


def _answer(chain: list[str]) -> str:
    return ", ".join(chain)
