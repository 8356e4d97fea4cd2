"""Needles "One of the special magic <type> for <key> is: <value>.", and haystacks with questions about them.

The sentence and the kinds of keys and values are those of RULER's needle tasks (Hsieh et al. 2024, arXiv:2404.06654).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field, model_validator

from kveval.corpora import Corpus, CorpusName
from kveval.haystack import Haystack, Needle, Question, numbers
from kveval.tasks import TaskParams
from kveval.words import uuids, word_pairs

__all__ = ["MagicParams", "listed", "magic_haystack"]

FILLER_NEEDLES = 4096
"""Needles of a haystack made of nothing else, some 90,000 tokens or more; a longer context repeats them."""


class MagicParams(TaskParams):
    """What needles look like and lie in.

    `filler`: the text around them. `key_type`: adjective-noun pairs ("word") or uuids. `value_type`: numbers of
    `digits` digits, uuids or adjective-noun pairs ("word").
    """

    filler: CorpusName = "noise"
    key_type: Literal["word", "uuid"] = "word"
    value_type: Literal["number", "uuid", "word"] = "number"
    digits: int = Field(7, ge=4, le=18)

    @model_validator(mode="after")
    def _digits_are_of_numbers(self) -> MagicParams:
        if self.value_type != "number" and "digits" in self.model_fields_set:
            raise ValueError(f"digits is for value_type: number; the values are of type {self.value_type}")
        return self

    def draw(self, rng: random.Random, keys: int, values: int) -> tuple[list[str], list[str]]:
        """Different keys and different values; no word pair or uuid is both."""
        if self.key_type == self.value_type:
            drawn = _draw(self.key_type, rng, keys + values, self.digits)
            return drawn[:keys], drawn[keys:]
        return _draw(self.key_type, rng, keys, self.digits), _draw(self.value_type, rng, values, self.digits)

    def needle(self, key: str, value: str) -> str:
        """The sentence that hides a value."""
        return f"One of the special magic {self.value_type}s for {key} is: {value}."

    def instruction(self, asked: str) -> str:
        """What stands before the text; `asked` says how many of the values will be asked for, in words."""
        return (
            f"Some special magic {self.value_type}s are hidden in the following text. Remember them: "
            f"you will be asked about {asked} of them."
        )

    def question(self, keys: Sequence[str], values: Sequence[str], needles: Iterable[int]) -> Question:
        """One question about all values of `keys`; singular if there is one value to give."""
        about = listed(keys)
        one = len(values) == 1
        what = self.value_type if one else f"{self.value_type}s"
        return Question(
            f"What {'is' if one else 'are all'} the special magic {what} for {about} in the text above?",
            f"The special magic {what} for {about} {'is' if one else 'are'}:",
            ", ".join(values),
            needles=tuple(needles),
            references=tuple(values),
        )


def magic_haystack(
    rng: random.Random,
    depths: Sequence[float],
    *,
    params: MagicParams | None = None,
    asked: int = 1,
    needles_only: bool = False,
) -> Haystack:
    """A needle with a key of its own at each depth, the first `asked` asked for in a question each.

    Args:
        rng: The haystack's generator.
        depths: One per needle.
        params: What the needles look like; numbers of 7 digits unless given.
        asked: How many of the needles get a question of their own.
        needles_only: Whether all other text is needles too, instead of filler.
    """
    params = params or MagicParams()
    count = len(depths) + (FILLER_NEEDLES if needles_only else 0)
    keys, values = params.draw(rng, count, count)
    lines = [params.needle(key, value) for key, value in zip(keys, values, strict=True)]
    return Haystack(
        instruction=params.instruction("one"),
        needles=tuple(Needle(line, depth) for line, depth in zip(lines, depths, strict=False)),
        questions=tuple(params.question([keys[i]], [values[i]], [i]) for i in range(asked)),
        filler=Corpus("needles", tuple(lines[len(depths) :])) if needles_only else None,
    )


def listed(names: Sequence[str]) -> str:
    """The names as a sentence lists them: "a", "a and b", "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _draw(kind: str, rng: random.Random, count: int, digits: int) -> list[str]:
    if kind == "number":
        return numbers(rng, count, digits)
    return uuids(rng, count) if kind == "uuid" else word_pairs(rng, count)
