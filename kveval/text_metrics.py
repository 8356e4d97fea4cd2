"""How right a written answer is: pure functions of the text and the reference answers, each from 0 to 1.

`string_match_all` and `string_match_part` are RULER's scores (Hsieh et al. 2024, arXiv:2404.06654): recall of
substrings. They reward an answer that lists everything, so exact match and a precision-aware F1 are reported beside
them.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import cast

from kveval.errors import ConfigError, MeasurementError, UnknownNameError
from kveval.python_file import call_own, load_python_file

__all__ = [
    "TEXT_METRICS",
    "TextMetric",
    "edit_similarity",
    "line_match",
    "string_match_all",
    "string_match_part",
    "text_exact_match",
    "text_f1",
    "text_metric",
]

TextMetric = Callable[[str, Sequence[str]], float]
"""(text, references) -> score from 0 to 1."""

_CONTROL = re.compile(r"[\x00-\x1f]")
_WORD = re.compile(r"\w+")


def string_match_all(text: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the text, whatever their case; control characters count as newlines."""
    found = _plain(text)
    return sum(_plain(reference) in found for reference in references) / len(references)


def string_match_part(text: str, references: Sequence[str]) -> float:
    """1 if any reference occurs in the text, whatever its case; else 0."""
    found = _plain(text)
    return float(any(_plain(reference) in found for reference in references))


def text_exact_match(text: str, references: Sequence[str]) -> float:
    """1 if the text is a reference, or all joined by commas, but for case, white space and a final full stop."""
    return float(_squeezed(text) in map(_squeezed, _alone_and_together(references)))


def text_f1(text: str, references: Sequence[str]) -> float:
    """Best F1 of words (runs of letters, digits and underscores, whatever their case) with a reference.

    An answer that lists every value in the text loses precision. All references together are tried too.
    """
    return max(_f1(_words(text), _words(candidate)) for candidate in _alone_and_together(references))


def edit_similarity(text: str, references: Sequence[str]) -> float:
    """Best similarity with a reference (Ratcliff and Obershelp): 2 M / T, where M of T characters in both match.

    They match in blocks, the longest first. White space at both ends of either is left out. All references joined by
    commas are tried too.
    """
    return max(
        SequenceMatcher(None, text.strip(), candidate.strip(), autojunk=False).ratio()
        for candidate in _alone_and_together(references)
    )


def line_match(text: str, references: Sequence[str]) -> float:
    """1 if the first line of the text is a reference's first line, but for white space at their ends; else 0."""
    return float(_first_line(text) in map(_first_line, references))


TEXT_METRICS: dict[str, TextMetric] = {
    metric.__name__: metric
    for metric in (string_match_all, string_match_part, text_exact_match, text_f1, edit_similarity, line_match)
}


def text_metric(name: str, *, where: str = "") -> TextMetric:
    """The metric that a config names: one of `TEXT_METRICS`, or `file.py:function` of the user's own.

    Raises:
        UnknownNameError: no such metric, with suggestions.
        ConfigError: the file can't be loaded, or has no such function.
    """
    if name in TEXT_METRICS:
        return TEXT_METRICS[name]
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise UnknownNameError("text metric", name, [*TEXT_METRICS, "file.py:function"], where=where)
    return _own(str(Path(file).expanduser().resolve()), function, where)


@lru_cache(maxsize=32)
def _own(file: str, function: str, where: str) -> TextMetric:
    module = load_python_file(Path(file), where)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(
            f"{where + ': ' if where else ''}{Path(file).name} has no function {function!r}.",
            remedy="Define it as function(text, references) -> a number from 0 to 1.",
        )
    try:
        inspect.signature(found).bind("", [])
    except TypeError as error:
        raise ConfigError(
            f"{where + ': ' if where else ''}{Path(file).name}:{function} can't be called with a text and references "
            f"({error}).",
            remedy="Define it as function(text, references) -> a number from 0 to 1.",
        ) from error

    def checked(text: str, references: Sequence[str]) -> float:
        score = call_own(f"{Path(file).name}:{function}", found, text, references)
        if isinstance(score, bool):
            score = float(score)
        if not isinstance(score, (int, float)) or not 0 <= score <= 1:
            raise MeasurementError(
                f"{Path(file).name}:{function} gave {score!r}.", remedy="A metric gives a number from 0 to 1."
            )
        return float(score)

    return cast(TextMetric, checked)


def _alone_and_together(references: Sequence[str]) -> list[str]:
    """Several references are alternatives in one task, and parts of one answer in another."""
    return [*references, ", ".join(references)]


def _plain(text: str) -> str:
    return _CONTROL.sub("\n", text).strip().lower()


def _squeezed(text: str) -> str:
    return " ".join(text.split()).lower().removesuffix(".")


def _words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text.lower()))


def _f1(got: Counter[str], right: Counter[str]) -> float:
    common = (got & right).total()
    return 2 * common / (got.total() + right.total()) if common else 0.0


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""
