"""The rows of a report's tables, in words: the terminal and the HTML page show the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.capacity import format_tokens
from kveval.exchange_rate import format_interval
from kveval.records import METRICS
from kveval.report.cells import DETAIL_METRICS, Arm, undecidable
from kveval.report.model import ReportData
from kveval.stats import MIN_CLUSTERS, Comparison, few_clusters_note

if TYPE_CHECKING:
    from kveval.gate import Verdict

__all__ = [
    "BRIEF",
    "UNDECIDABLE",
    "AnswerRow",
    "CellRow",
    "Loss",
    "SummaryRow",
    "answer_rows",
    "cell_rows",
    "few_clusters",
    "gate_notes",
    "loss_text",
    "summary_rows",
]

UNDECIDABLE = "undecidable at this n"
"""Stands for a loss in points whose interval is wider than 50 points either way."""

AT_FLOOR = "baseline at floor"
"""Stands for a loss where the baseline scores nothing that could be lost."""

BRIEF = {UNDECIDABLE: "undecidable", AT_FLOOR: "at floor"}
"""Shorter words for tables that have no room."""


@dataclass(frozen=True)
class Loss:
    """A loss in words. `clear` is "worse" or "better" where the interval does not cover zero, else ""."""

    text: str
    clear: str


@dataclass(frozen=True)
class CellRow:
    """One scheme in one cell."""

    scheme: str
    role: str
    task: str
    context: str
    answer_nll: Loss
    exact_match: Loss
    task_score: Loss
    kl: str
    top1_flips: str
    flips: str
    n: str


@dataclass(frozen=True)
class AnswerRow:
    """One scheme in one cell, judged by more than one measure of its answers.

    `score` is the mean task score in percent; `details` are the losses in `kveval.report.cells.DETAIL_METRICS`.
    """

    scheme: str
    role: str
    task: str
    context: str
    score: str
    task_score: Loss
    details: tuple[Loss, ...]
    n: str


@dataclass(frozen=True)
class SummaryRow:
    """One scheme at the longest context: what it gains, and what it costs on the task that it hurts most."""

    scheme: str
    gated: bool
    sessions: str
    gain: str
    worst_task: str
    kl: str
    answer_nll: Loss
    exact_match: Loss
    task_score: Loss
    per_doubling: str
    bytes_per_token: str
    of_baseline: str


def loss_text(comparison: Comparison | None, room: str = "ok") -> Loss:
    """A loss with its interval; fractions in points.

    In its place stands that the baseline is at the floor, or that the interval leaves everything open.
    """
    if comparison is None or comparison.loss.value is None:
        return Loss("–", "")
    if room == "floor":
        return Loss(AT_FLOOR, "")
    if undecidable(comparison):
        return Loss(UNDECIDABLE, "")
    factor = 100.0 if METRICS[comparison.metric].unit == "fraction" else 1.0
    loss = comparison.loss
    if loss.value is None or loss.low is None or loss.high is None:
        return Loss(f"{factor * (loss.value or 0.0):.3g} (no interval)", "")
    text = format_interval(factor * loss.value, factor * loss.low, factor * loss.high)
    clear = "worse" if loss.low > 0 else "better" if loss.high < 0 else ""
    return Loss(text, clear)


def _figure(comparison: Comparison | None) -> str:
    """A distance from the baseline to three digits, fractions in points."""
    if comparison is None or comparison.loss.value is None:
        return "–"
    factor = 100.0 if METRICS[comparison.metric].unit == "fraction" else 1.0
    return f"{factor * comparison.loss.value:.3g}"


def few_clusters(comparisons: Iterable[Comparison]) -> str:
    """One sentence on intervals that rest on too few clusters to be relied on; "" where none does."""
    counts = sorted({c.loss.n_clusters for c in comparisons if c.n_pairs and c.loss.n_clusters < MIN_CLUSTERS})
    if not counts:
        return ""
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return (
        f"Intervals rest on {many} cluster{'s' * (counts[-1] > 1)} of samples (the samples of one document or haystack "
        f"are one cluster). They can be relied on from about {MIN_CLUSTERS} clusters on: take more samples before "
        "deciding on these figures."
    )


def gate_notes(verdict: Verdict) -> list[str]:
    """The verdict's notes as full sentences; those on few clusters become one for all endpoints."""
    judged = [end.comparison for end in verdict.endpoints if end.comparison is not None]
    few = {few_clusters_note(c.loss.n_clusters) for c in judged}
    notes = [n[0].upper() + n[1:] for n in verdict.notes if not any(n.endswith(f": {note}.") for note in few)]
    return [*notes, *filter(None, [few_clusters(judged)])]


def _ordered_cells(data: ReportData) -> list[tuple[Arm, str, int]]:
    """Every cell of every scheme, the largest answer-NLL loss first, those without one last; then both controls."""
    order = [*data.ranked("answer_nll"), *(c for c in data.comparisons if c.role == "scheme")]
    for role in ("aa", "crush"):
        order += [c for c in data.comparisons if c.role == role]
    return list(dict.fromkeys((Arm(c.scheme, c.role), c.task, c.context_length) for c in order))


def _task_score(data: ReportData, arm: Arm, task: str, context_length: int) -> Loss:
    room = data.competence.get((task, context_length, "task_score"), "ok")
    return loss_text(data.comparison(arm, task, context_length, "task_score"), room)


def cell_rows(data: ReportData) -> list[CellRow]:
    """Every cell of every scheme, the largest answer-NLL loss first; then both controls."""
    rows = []
    for arm, task, length in _ordered_cells(data):
        of = {m: data.comparison(arm, task, length, m) for m in ("answer_nll", "exact_match", "kl", "top1_flips")}
        exact, room = of["exact_match"], data.competence.get((task, length, "exact_match"), "ok")
        told = exact is not None and exact.n_pairs > 0 and room != "floor"
        flips = f"{exact.discordant_worse} / {exact.discordant_better}" if exact and told else "–"
        rows.append(
            CellRow(
                scheme=arm.scheme,
                role=arm.role,
                task=task,
                context=format_tokens(length),
                answer_nll=loss_text(of["answer_nll"]),
                exact_match=loss_text(exact, room),
                task_score=_task_score(data, arm, task, length),
                kl=_figure(of["kl"]),
                top1_flips=_figure(of["top1_flips"]),
                flips=flips,
                n=_samples(of["answer_nll"] or data.comparison(arm, task, length, "task_score")),
            )
        )
    return rows


def _samples(comparison: Comparison | None) -> str:
    """Pairs, their clusters where these are fewer, and what is missing."""
    if comparison is None:
        return "–"
    clusters = "" if comparison.loss.n_clusters == comparison.n_pairs else f" in {comparison.loss.n_clusters}"
    missing = comparison.n_missing_scheme + comparison.n_missing_baseline
    return f"{comparison.n_pairs}{clusters}{f', {missing} missing' if missing else ''}"


def answer_rows(data: ReportData) -> list[AnswerRow]:
    """The cells that have any of the measures in an `AnswerRow`, in the order of `cell_rows`."""
    scores = {(m.arm, m.task, m.context_length): m.estimate.value for m in data.means if m.metric == "task_score"}
    rows = []
    for arm, task, length in _ordered_cells(data):
        details = [data.comparison(arm, task, length, m) for m in DETAIL_METRICS]
        score = scores.get((arm, task, length))
        if score is None and not any(details):
            continue
        rooms = [data.competence.get((task, length, m), "ok") for m in DETAIL_METRICS]
        rows.append(
            AnswerRow(
                scheme=arm.scheme,
                role=arm.role,
                task=task,
                context=format_tokens(length),
                score="–" if score is None else f"{100 * score:.3g}",
                task_score=_task_score(data, arm, task, length),
                details=tuple(loss_text(c, room) for c, room in zip(details, rooms, strict=True)),
                n=_samples(data.comparison(arm, task, length, "task_score") or next(filter(None, details))),
            )
        )
    return rows


def summary_rows(data: ReportData) -> list[SummaryRow]:
    """One row per scheme, in the plan's order."""
    longest = data.context_lengths[-1]
    worst: dict[str, Comparison] = {}
    for c in data.ranked("answer_nll"):
        if c.context_length == longest:
            worst.setdefault(c.scheme, c)
    rows = []
    for arm in data.of_role("scheme"):
        if arm.scheme not in worst:
            continue
        c = worst[arm.scheme]
        rates = [r for r in data.exchange if (r.scheme, r.task, r.context_length) == (c.scheme, c.task, longest)]
        rate = next(r for r in rates if r.metric == "answer_nll")
        stored = next((s for s in data.storage if (s.arm, s.context_length) == (arm, longest)), None)
        room = data.competence.get((c.task, longest, "exact_match"), "ok")
        rows.append(
            SummaryRow(
                scheme=arm.scheme,
                gated=arm.scheme == data.gate_scheme,
                sessions=f"{rate.sessions:,}",
                gain=f"{rate.gain:.2f}x" if rate.gain is not None else "–",
                worst_task=c.task,
                kl=_figure(data.comparison(arm, c.task, longest, "kl")),
                answer_nll=loss_text(c),
                exact_match=loss_text(data.comparison(arm, c.task, longest, "exact_match"), room),
                task_score=_task_score(data, arm, c.task, longest),
                per_doubling=f"{rate.loss_per_doubling:.3g}" if rate.loss_per_doubling is not None else "–",
                bytes_per_token=f"{stored.stored:,.0f}" if stored else "–",
                of_baseline=f"{stored.of_baseline:.0%}" if stored and stored.of_baseline else "–",
            )
        )
    return rows
