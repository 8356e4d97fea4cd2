"""The exchange rate: what a narrower cache costs in quality for each session that it adds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from kveval.capacity import Sessions, format_tokens
from kveval.records import METRICS, Metric

__all__ = [
    "ExchangeRate",
    "exchange_rate",
    "format_interval",
    "format_loss",
    "interval_decimals",
]


class LossEstimate(Protocol):
    """The part of `kveval.stats.Estimate` that is read here."""

    @property
    def value(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def defined(self) -> bool: ...


class LossComparison(Protocol):
    """The part of `kveval.stats.Comparison` that is read here."""

    @property
    def scheme(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def context_length(self) -> int: ...
    @property
    def loss(self) -> LossEstimate: ...


@dataclass(frozen=True)
class ExchangeRate:
    """Quality lost against sessions gained, for one scheme, task, metric and length.

    Attributes:
        gain: Whole sessions over whole sessions of the baseline; None when the baseline fits none.
        bytes_gain: The same before flooring: the ratio of a session's bytes.
        loss_per_extra_session: Loss, in the metric's unit, per session gained; None when none is gained.
        loss_per_doubling: Loss per doubling of sessions, from `bytes_gain` (flooring would make it jump).
        sentence: All of it in words.
    """

    scheme: str
    task: str
    metric: str
    context_length: int
    sessions: int
    baseline_sessions: int
    gain: float | None
    bytes_gain: float | None
    loss: LossEstimate
    loss_per_extra_session: float | None
    loss_per_doubling: float | None
    sentence: str


def exchange_rate(
    comparison: LossComparison,
    *,
    scheme: Sessions,
    baseline: Sessions,
    decode_speedup: float | None = None,
) -> ExchangeRate:
    """What `comparison`'s loss buys: sessions under the scheme against sessions under the baseline.

    `decode_speedup` (baseline's seconds per token over the scheme's) is added to the sentence if given.
    """
    extra = scheme.floored - baseline.floored
    gain = scheme.floored / baseline.floored if baseline.floored else None
    bytes_gain = scheme.fractional / baseline.fractional if baseline.fractional else None
    value = comparison.loss.value
    per_session = value / extra if value is not None and extra > 0 else None
    doublings = math.log2(bytes_gain) if bytes_gain and bytes_gain > 1 else None
    per_doubling = value / doublings if value is not None and doublings else None
    times = f" ({gain:.1f}x)" if gain is not None else ""
    instead = f"{baseline.floored:,}" if baseline.floored else "none"
    sentence = (
        f"{comparison.scheme} at {format_tokens(comparison.context_length)} tokens: "
        f"{scheme.floored:,} session{'' if scheme.floored == 1 else 's'} instead of {instead}{times}; "
        f"{format_loss(comparison.loss, METRICS[comparison.metric], task=comparison.task)}"
    )
    if decode_speedup is not None:
        sentence += f"; decode {decode_speedup:.1f}x as fast"
    return ExchangeRate(
        comparison.scheme,
        comparison.task,
        comparison.metric,
        comparison.context_length,
        scheme.floored,
        baseline.floored,
        gain,
        bytes_gain,
        comparison.loss,
        per_session,
        per_doubling,
        sentence,
    )


def format_loss(loss: LossEstimate, metric: Metric, *, task: str = "") -> str:
    """A loss in words, with its interval and what the interval leaves open.

    Fractions are told in points (hundredths). Two significant digits of the interval's half width decide
    how many decimals are shown; nothing is compared after rounding.
    """
    scale, unit = (100.0, "points") if metric.unit == "fraction" else (1.0, metric.unit)
    where = f" on {task}" if task else ""
    what = f"{unit} of {metric.label}{where}"
    if loss.value is None:
        return f"cost in {metric.label}{where} unknown: no complete pairs"
    if not loss.defined or loss.low is None or loss.high is None:
        return f"costs {loss.value * scale:.3g} {what} (no interval: too few independent samples)"
    value, low, high = (x * scale for x in (loss.value, loss.low, loss.high))
    if high < 0:
        return f"better by {format_interval(-value, -high, -low)} {what}"
    if low > 0:
        return f"costs {format_interval(value, low, high)} {what}"
    if low == high:
        return f"costs 0 {what} (the same in every sample)"
    bound = f"{high:.{interval_decimals(high - low)}f}"
    open_question = f"indistinguishable from zero at this n; could be as large as {bound}"
    return f"costs {format_interval(value, low, high)} {what} ({open_question})"


def format_interval(value: float, low: float, high: float) -> str:
    """An interval as "0.40 ± 0.30", or as "0.40 (0.05 to 0.90)" when it is lopsided."""
    digits, half = interval_decimals(high - low), (high - low) / 2
    shown = round(value, digits) + 0.0  # never "-0.00"
    if abs((high - value) - half) <= 0.05 * half:
        return f"{shown:.{digits}f} ± {half:.{digits}f}"
    return f"{shown:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def interval_decimals(width: float) -> int:
    """Decimals that show two significant digits of half an interval's width."""
    if width <= 0:
        return 3
    return min(6, max(0, 1 - math.floor(math.log10(width / 2))))
