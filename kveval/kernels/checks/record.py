"""What checks found, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["SCHEMA_VERSION", "Result", "summary"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
        name: Of the check.
        case: What was tried.
        what: Which part of its result was compared.
        error: How far from what is expected; NaN where the case did not come to an end.
        limit: How far it may be.
        message: Why it did not come to an end.
    """

    name: str
    case: str
    what: str
    error: float
    limit: float
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within its limit."""
        return self.error <= self.limit

    @property
    def ratio(self) -> float:
        """Error over limit; infinity where there is none, or no error could be taken."""
        if math.isnan(self.error):
            return math.inf
        if self.limit:
            return self.error / self.limit
        return 0.0 if self.error == 0 else math.inf


def summary(name: str, results: Iterable[Result]) -> dict[str, Any]:
    """Of one check: cases, comparisons, the one that came closest to its limit, and all that failed.

    What has no finite number is None: JSON has none for it.
    """
    known = list(results)
    worst = max(known, key=lambda r: r.ratio, default=None)
    return {
        "name": name,
        "cases": len({r.case for r in known}),
        "comparisons": len(known),
        "worst_ratio": None if worst is None else _finite(worst.ratio),
        "worst": None if worst is None else _row(worst),
        "failures": [_row(r) for r in known if not r.passed],
    }


def _row(result: Result) -> dict[str, Any]:
    row = {"case": result.case, "what": result.what, "error": _finite(result.error), "limit": _finite(result.limit)}
    return {**row, "message": result.message} if result.message else row


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
