"""One declared endpoint against one arm: the step that the gate and its controls share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kveval.errors import ConfigError
from kveval.power import needed_pairs, zero_event_pairs
from kveval.records import Role
from kveval.stats import Comparison, Competence, compare, competence, get_metric, holm, with_tokens_to_score

if TYPE_CHECKING:
    import pandas as pd

    from kveval.config import GateConfig, GateEndpoint

__all__ = [
    "EndpointResult",
    "EndpointStatus",
    "Expected",
    "expected_samples",
    "format_against",
    "judge_endpoints",
]

EndpointStatus = Literal["PASS", "FAIL", "INCONCLUSIVE", "INCOMPLETE", "NON_DISCRIMINATIVE"]

Expected = Mapping[tuple[str, int], int]
"""(task, context length) -> samples that every arm should have."""


@dataclass(frozen=True)
class EndpointResult:
    """The judgement of one endpoint. `message` is a sentence a person can act on.

    `p_noninferior` is the one-sided p-value of "the loss is the margin or more", `p_inferior` of "the loss
    is the margin or less", `p_inferior_holm` the latter after Holm over the declared endpoints. They are
    None where there is no comparison. `samples_needed` is per arm, for inconclusive endpoints.
    """

    metric: str
    task: str
    context_length: int
    margin: float
    status: EndpointStatus
    message: str
    n_expected: int | None = None
    comparison: Comparison | None = None
    competence: Competence = "ok"
    p_noninferior: float | None = None
    p_inferior: float | None = None
    p_inferior_holm: float | None = None
    samples_needed: int | None = None


def expected_samples(
    records: pd.DataFrame, expected: Expected | None, task: str, context_length: int, metric: str
) -> tuple[int, int]:
    """Samples each arm should have, and how many of them have nothing that `metric` could score.

    As many as planned, else every sample id that any arm of the cell has.
    """
    cell = records[(records["task"] == task) & (records["context_length"] == context_length)]
    found = cell["sample_id"].nunique() if expected is None else expected.get((task, context_length), 0)
    scored = with_tokens_to_score(cell, get_metric(metric))
    return int(found), cell.drop(scored.index)["sample_id"].nunique()


def judge_endpoints(
    records: pd.DataFrame,
    gate: GateConfig,
    *,
    scheme: str,
    role: Role = "scheme",
    expected: Expected | None = None,
) -> tuple[EndpointResult, ...]:
    """Apply the gate's endpoints to one arm.

    PASS if the one-sided upper bound of the loss is at most the margin. FAIL if the loss is above the margin
    at the gate's confidence after Holm over the declared endpoints: a FAIL says "at least one of these is
    too bad", and with many endpoints one of them crosses an unadjusted line by chance. A PASS says "all of
    them are good enough", an intersection-union test, whose level is that of each single test (Berger
    1982), so its bounds are not adjusted. Nothing is rounded before it is compared.

    Raises:
        ConfigError: an endpoint is declared twice (which would make Holm count it twice).
    """
    _refuse_repeats(gate)
    drafts = []
    for end in gate.endpoints:
        result = compare(
            records, scheme=scheme, role=role, metric=end.metric, task=end.task,
            context_length=end.context_length, confidence=gate.confidence,
        )  # fmt: skip
        drafts.append((end, result))
    # An endpoint that could not be tested is still one of those declared, and counts with p = 1.
    raw = [c.distribution.p_inferior(end.margin) if c.distribution else 1.0 for end, c in drafts]
    return tuple(
        _judge(records, end, comparison, adjusted, gate.confidence, expected)
        for (end, comparison), adjusted in zip(drafts, holm(raw), strict=True)
    )


def format_against(value: float, other: float) -> str:
    """`value` with as many digits as it takes to tell it from `other` (four at least)."""
    for digits in range(4, 18):
        text = f"{value:.{digits}g}"
        if value == other or text != f"{other:.{digits}g}":
            return text
    return repr(value)


def _refuse_repeats(gate: GateConfig) -> None:
    keys = [(e.metric, e.task, e.context_length) for e in gate.endpoints]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(
                f"the gate declares {key[0]} on {key[1]} at {key[2]:,} tokens {keys.count(key)} times.",
                remedy="Keep one margin for each metric, task and context length.",
            )


def _judge(
    records: pd.DataFrame,
    end: GateEndpoint,
    comparison: Comparison,
    p_holm: float,
    confidence: float,
    expected: Expected | None,
) -> EndpointResult:
    asked, empty = expected_samples(records, expected, end.task, end.context_length, end.metric)
    planned = asked - empty
    fit = comparison.distribution
    room = competence(records, metric=end.metric, task=end.task, context_length=end.context_length)
    if empty and not planned:
        status: EndpointStatus = "NON_DISCRIMINATIVE"
        message = "no answer has a key token here, so there is nothing to score; ask for longer contexts or answers."
    else:
        status, message = _status(end, comparison, planned, room, p_holm, confidence)
    needed = _samples_needed(end, comparison, confidence) if status == "INCONCLUSIVE" else None
    if status == "INCONCLUSIVE":
        message += _more_samples(end, comparison, needed)
    return EndpointResult(
        metric=end.metric, task=end.task, context_length=end.context_length, margin=end.margin,
        status=status, message=message, n_expected=planned, comparison=comparison, competence=room,
        p_noninferior=fit.p_noninferior(end.margin) if fit else None,
        p_inferior=fit.p_inferior(end.margin) if fit else None,
        p_inferior_holm=p_holm if fit else None,
        samples_needed=needed,
    )  # fmt: skip


def _status(
    end: GateEndpoint,
    comparison: Comparison,
    planned: int,
    room: Competence,
    p_holm: float,
    confidence: float,
) -> tuple[EndpointStatus, str]:
    missing = max(planned - comparison.n_pairs, comparison.n_missing_scheme, comparison.n_missing_baseline)
    if planned == 0:
        return (
            "INCOMPLETE",
            f"there are no records of {end.task} at {end.context_length:,} tokens; run the sweep.",
        )
    if missing > 0:
        return "INCOMPLETE", _missing_message(comparison, planned)
    if comparison.lower is None or comparison.upper is None:
        return "INCONCLUSIVE", f"the bound is undefined: {'; '.join(comparison.notes)}."
    upper, lower = comparison.upper, comparison.lower
    unit = _unit(end)
    top, bottom = format_against(upper, end.margin), format_against(lower, end.margin)
    if room == "floor":
        return "NON_DISCRIMINATIVE", (
            "the baseline is at the floor here, so there is nothing to lose and nothing is shown; "
            "make the task easier or gate another cell."
        )
    if lower > end.margin and p_holm <= 1.0 - confidence:
        return "FAIL", f"the loss is at least {bottom}{unit}, above the margin of {end.margin:g}{unit}."
    if room == "ceiling":
        return "NON_DISCRIMINATIVE", (
            f"the baseline is right on every sample, so the task is too easy to decide (the loss may be "
            f"up to {top}{unit}, n={comparison.n_pairs}); make it harder, or gate answer_nll on this cell."
        )
    if upper <= end.margin:
        return "PASS", f"the loss is at most {top}{unit}, within the margin of {end.margin:g}{unit}."
    if lower > end.margin:
        return "INCONCLUSIVE", (
            f"the loss is at least {bottom}{unit} taken alone, above the margin of {end.margin:g}{unit}, but "
            f"not after Holm's correction over all declared endpoints."
        )
    return "INCONCLUSIVE", (
        f"the loss is between {bottom}{unit} and {top}{unit}: the margin {end.margin:g}{unit} is undecided."
    )


def _missing_message(comparison: Comparison, planned: int) -> str:
    short = planned - comparison.n_pairs
    text = f"{max(short, 0)} of {planned} samples are missing or errored in {comparison.scheme} or the baseline"
    worst = comparison.worst_case
    if worst is not None and worst.value is not None and comparison.loss.value is not None:
        text += f" (loss {comparison.loss.value:.4g} on complete pairs, {worst.value:.4g} in the worst case)"
    return f"{text}; run the sweep again to fill them in."


def _unit(end: GateEndpoint) -> str:
    unit = get_metric(end.metric).unit
    return "" if unit == "fraction" else f" {unit}"


def _samples_needed(end: GateEndpoint, comparison: Comparison, confidence: float) -> int | None:
    """Samples that would decide with power 80 % if the observed loss (at least 0) were the true one."""
    fit = comparison.distribution
    if fit is None or fit.kind == "undefined":
        return None
    n, groups = comparison.n_pairs, comparison.loss.n_clusters
    gap = abs(end.margin - max(fit.value, 0.0))
    if gap == 0.0:
        return None
    needed = needed_pairs(gap, fit.se**2 * n, confidence=confidence)
    if get_metric(end.metric).unit == "fraction" and end.margin < 1.0:
        needed = max(needed, math.ceil(zero_event_pairs(end.margin, confidence=confidence) * n / groups))
    return max(needed, n + 1)


def _more_samples(end: GateEndpoint, comparison: Comparison, needed: int | None) -> str:
    value = comparison.loss.value
    if needed is None:
        return " Add samples from more clusters (haystacks or documents)."
    lean = "show a FAIL" if value is not None and value > end.margin else "decide"
    return f" About {needed:,} samples would {lean} (now {comparison.n_pairs:,}, same spread, power 80 %)."
