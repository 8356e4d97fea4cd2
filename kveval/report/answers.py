"""The answers that models wrote, and the tokens that count: how answers ended, their scores by place, key tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from kveval.capacity import format_tokens
from kveval.report.cells import Arm

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "MAX_BANDS",
    "Ending",
    "KeyTokens",
    "PositionScore",
    "cut_sentences",
    "endings_of",
    "key_token_sentences",
    "key_tokens_of",
    "positions_of",
    "thinking_problems",
]

MAX_BANDS = 12
"""Most bands of equal width into which the places in an answer are sorted."""


@dataclass(frozen=True)
class Ending:
    """How the `n` answers that one arm wrote in one cell ended.

    `at_length` of them were cut at the most tokens that they may have (`max_new_tokens`; None if none was cut), and
    `thinking` were cut there before the answer had begun; these have no score.
    """

    arm: Arm
    task: str
    context_length: int
    n: int
    at_length: int
    thinking: int
    max_new_tokens: int | None


@dataclass(frozen=True)
class PositionScore:
    """Mean score, from 0 to 1, of the places `first` to `last` (from 1) in the answers of `n` samples."""

    arm: Arm
    task: str
    context_length: int
    first: int
    last: int
    value: float
    n: int


@dataclass(frozen=True)
class KeyTokens:
    """Key tokens of all `n` samples of a cell together, and how many of the samples have none."""

    task: str
    context_length: int
    tokens: int
    n: int
    without: int


def endings_of(records: pd.DataFrame, arms: Sequence[Arm], tasks: Sequence[str]) -> tuple[Ending, ...]:
    """Endings by task, length and arm, over the ok samples whose answers were written."""
    written = records[(records["status"] == "ok") & records["finish_reason"].notna()]
    found = []
    for (task, length, scheme, role), of in written.groupby(["task", "context_length", "scheme", "role"]):
        if Arm(scheme, role) not in arms:
            continue
        reasons, tokens = of["finish_reason"], of["n_generated_tokens"]
        at_length, thinking = (int((reasons == reason).sum()) for reason in ("length", "thinking"))
        budget = int(tokens[reasons != "stop"].max()) if at_length + thinking else None
        found.append(Ending(Arm(scheme, role), str(task), int(length), len(of), at_length, thinking, budget))
    return tuple(sorted(found, key=lambda e: (tasks.index(e.task), e.context_length, arms.index(e.arm))))


def thinking_problems(endings: Iterable[Ending]) -> tuple[str, ...]:
    """A sentence for every cell in which the baseline or a scheme was cut while it still thought."""
    return tuple(
        f"{task} at {format_tokens(length)} tokens: {_counts(cell, [e.thinking for e in cell])} were still thinking at "
        f"max_new_tokens ({_budget(cell)}) and have no score; raise it. The task score is over the other samples alone."
        for (task, length), cell in _judged(endings)
        if any(e.thinking for e in cell)
    )


def cut_sentences(endings: Iterable[Ending]) -> tuple[str, ...]:
    """A sentence for every cell in which answers of the baseline or a scheme were cut at their length."""
    return tuple(
        f"{task} at {format_tokens(length)} tokens: {_counts(cell, [e.at_length for e in cell])} reached "
        f"max_new_tokens ({_budget(cell)}) and were scored as far as they went; where that is too early, raise it or "
        "name a `stop`."
        for (task, length), cell in _judged(endings)
        if any(e.at_length for e in cell)
    )


def _judged(endings: Iterable[Ending]) -> list[tuple[tuple[str, int], list[Ending]]]:
    """The baseline's and the schemes' endings, by cell."""
    judged = (e for e in endings if e.arm.role in ("baseline", "scheme"))
    return [(cell, list(of)) for cell, of in groupby(judged, key=lambda e: (e.task, e.context_length))]


def _counts(cell: Sequence[Ending], cut: Sequence[int]) -> str:
    """As "3 of 16 answers of bf16 and 9 of 16 of k8v4"; of several schemes, of the one with the most."""
    pairs = list(zip(cell, cut, strict=True))
    schemes = [(e, count) for e, count in pairs if e.arm.role == "scheme"]
    parts = [f"{count} of {e.n} answers of {e.arm.scheme}" for e, count in pairs if e.arm.role == "baseline"]
    if schemes:
        worst, most = max(schemes, key=lambda pair: pair[1])
        whose = f"{most} of {worst.n} of {worst.arm.scheme}"
        if len(schemes) > 1:
            same = all(count == most for _, count in schemes)
            whose = f"{most} of {worst.n} of each format" if same else f"up to {whose}"
        parts.append(whose)
    return " and ".join(parts)


def _budget(cut: Iterable[Ending]) -> int:
    return max(e.max_new_tokens or 0 for e in cut)


def positions_of(records: pd.DataFrame, arms: Sequence[Arm], tasks: Sequence[str]) -> tuple[PositionScore, ...]:
    """Scores by place in the answer, in bands of equal width over the longest answer of the task and length."""
    scored = records[(records["status"] == "ok") & records["position_scores"].notna()]
    found: list[PositionScore] = []
    for (task, length), cell in scored.groupby(["task", "context_length"]):
        places = max(map(len, cell["position_scores"]))
        width = max(1, -(-places // MAX_BANDS))
        for (scheme, role), of in cell.groupby(["scheme", "role"]):
            arm = Arm(scheme, role)
            for first in range(0, places if arm in arms else 0, width):
                parts = [scores[first : first + width] for scores in of["position_scores"] if len(scores) > first]
                if parts:
                    value, last = float(np.concatenate(parts).mean()), min(first + width, places)
                    found.append(PositionScore(arm, str(task), int(length), first + 1, last, value, len(parts)))
    return tuple(sorted(found, key=lambda p: (tasks.index(p.task), p.context_length, arms.index(p.arm), p.first)))


def key_tokens_of(records: pd.DataFrame, tasks: Sequence[str]) -> tuple[KeyTokens, ...]:
    """Key tokens of the cells that score them alone; they are the baseline's, and those of all arms."""
    keyed = records[(records["status"] == "ok") & (records["role"] == "baseline") & records["key_tokens"].notna()]
    found = [
        KeyTokens(str(task), int(length), int(counts.sum()), len(counts), int((counts == 0).sum()))
        for (task, length), counts in keyed.groupby(["task", "context_length"])["key_tokens"]
    ]
    return tuple(sorted(found, key=lambda k: (tasks.index(k.task), k.context_length)))


def key_token_sentences(cells: Iterable[KeyTokens]) -> tuple[str, ...]:
    """What each such cell's NLL and KL are over."""
    found = []
    for cell in cells:
        where = f"{cell.task} at {format_tokens(cell.context_length)} tokens"
        samples = f"{cell.n} sample{'s' * (cell.n != 1)}"
        if not cell.tokens:
            found.append(
                f"{where} is non-discriminative: no token of its {samples} needs the far context, so there is nothing "
                "that a cache could lose."
            )
            continue
        none = f" ({cell.without} of them have none)" if cell.without else ""
        tokens = f"{cell.tokens:,} key token{'s' * (cell.tokens != 1)}"
        found.append(f"{where}: NLL, KL and flips are over the {tokens} of {samples} alone{none}.")
    return tuple(found)
