"""State tracking over a long answer: items change boxes step by step, and the model writes down every step.

What a box holds after some steps is nowhere but in the lines that the model wrote itself, so errors of a cache that
holds generated tokens add up. Scored by line.
"""

import random
import re
import string
from dataclasses import replace

from pydantic import Field

from kveval.corpora import CorpusName
from kveval.haystack import Haystack, Needle, Question, build_samples
from kveval.tasks import Sample, TaskContext, TaskParams
from kveval.words import NOUNS

VERSION = 1
NAME = "long_generation"
MAX_NEW_TOKENS = 1024
STOP = ("\n\n",)


class Params(TaskParams):
    """`steps`: lines of the answer. `boxes`: boxes with one item each. `filler`: the text around the steps."""

    steps: int = Field(48, ge=2, le=10_000)
    boxes: int = Field(6, ge=2, le=26)
    filler: CorpusName = "noise"


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """One haystack and one question per sample; the steps stand in their order, evenly spread over the text."""

    def describe(number: int, rng: random.Random) -> Haystack:
        names = string.ascii_uppercase[: params.boxes]
        held = dict(zip(names, rng.sample(NOUNS, params.boxes), strict=True))
        lines = ["At the start, " + ", ".join(f"{name} holds {item}" for name, item in held.items()) + "."]
        answer = []
        for step in range(1, params.steps + 1):
            a, b = rng.sample(names, 2)
            held[a], held[b] = held[b], held[a]
            lines.append(f"Step {step}: swap {a} and {b}.")
            answer.append(f"{step}. {a} {held[a]}, {b} {held[b]}")
        asked = Question(
            "What do the boxes hold after each step?",
            "1.",
            "\n".join(answer).removeprefix("1. "),
            needles=tuple(range(len(lines))),
        )
        return Haystack(
            instruction="Each step swaps what two boxes hold. Follow the steps.",
            needles=tuple(Needle(line, place / len(lines)) for place, line in enumerate(lines)),
            questions=(asked,),
        )

    made = build_samples(ctx, NAME, filler=params.filler, queries=1, describe=describe)
    return [replace(sample, depth=None) for sample in made]


def score(params: Params, sample: Sample, text: str) -> dict[str, float]:
    """Share of right lines."""
    return {"task_score": sum(position_scores(params, sample, text)) / params.steps}


def position_scores(params: Params, sample: Sample, text: str) -> list[float]:
    """1 or 0 for each line of the answer: whether the line with the same number says the same."""
    written = _steps(text)
    return [float(written.get(step) == what) for step, what in _steps(sample.references[0]).items()]


def _steps(text: str) -> dict[int, str]:
    """What each numbered line says; the first line's number is in the prompt, and a number counts once."""
    found: dict[int, str] = {}
    for number, what in re.findall(r"^[ \t]*(?:(\d+)\.)?[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE):
        step = int(number or 1)
        if step not in found and (number or not found):
            found[step] = what
    return found
