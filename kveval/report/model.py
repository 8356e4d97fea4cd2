"""Everything a report shows, computed once: a pure function of records, plan and verdict.

Tables, plots and the HTML page only lay out what stands here; statistics come from `kveval.stats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kveval.capacity import Sessions, format_tokens
from kveval.errors import StoreError
from kveval.exchange_rate import ExchangeRate, exchange_rate, format_loss
from kveval.records import METRICS, Role
from kveval.report.answers import (
    Ending,
    KeyTokens,
    PositionScore,
    cut_sentences,
    endings_of,
    key_token_sentences,
    key_tokens_of,
    positions_of,
    thinking_problems,
)
from kveval.report.cells import (
    LOSS_METRICS,
    Arm,
    Mean,
    Needle,
    Storage,
    Timing,
    arms_of,
    estimate_cells,
    needles_of,
    storage_of,
    timings_of,
    undecidable,
)
from kveval.stats import Comparison

if TYPE_CHECKING:
    import pandas as pd

    from kveval.controls import ControlResult
    from kveval.gate import Verdict
    from kveval.layer_note import LayerErrors
    from kveval.native_note import NativePaths

__all__ = ["ReportData", "build_report"]

Tone = Literal["good", "bad", "unsure", "void", "plain"]


@dataclass(frozen=True)
class ReportData:
    """What a report shows.

    Attributes:
        headline: The first line: the verdict in plain words, or why there is none.
        tone: How the headline is to be coloured.
        sentences: One exchange rate in words per scheme, at the longest context, on its worst task.
        arms, tasks, context_lengths: What was measured, in the plan's order.
        means: Per cell and metric of `LOSS_METRICS` that has a value in the cell, every arm.
        comparisons: Per cell and metric of `TABLE_METRICS` that has a value there, of schemes and of both controls.
        exchange: Per scheme, task, length and metric of `LOSS_METRICS`.
        competence: (task, length, metric) -> "ok", "floor" or "ceiling", where the metric has a value.
        margins: (metric, task, length) -> margin that the gate declared for `gate_scheme`.
        by_kernels: Whether times are those of kernels that read packed bytes (else of the reference path, which
            unpacks with plain PyTorch and whose times say nothing about serving).
        problems: Sentences about what is missing or errored; empty when all is there.
        notes: Sentences that a reader needs to understand figures, and that are no cause for alarm.
        endings: How the answers that the model wrote ended, per arm and cell.
        positions: Scores by place in the answer that the model wrote.
        key_tokens: Per cell of a task that scores key tokens alone, how many there are.
        layers: What storage does in each layer; None where the run did not measure it.
        native: How each scheme is stored, read and multiplied on the run's machine; None where that is not recorded.
        attention_paths: By scheme, the ways in which its samples were attended to.
    """

    name: str
    headline: str
    tone: Tone
    sentences: tuple[str, ...]
    model: str
    arms: tuple[Arm, ...]
    tasks: tuple[str, ...]
    context_lengths: tuple[int, ...]
    confidence: float
    means: tuple[Mean, ...]
    comparisons: tuple[Comparison, ...]
    exchange: tuple[ExchangeRate, ...]
    competence: Mapping[tuple[str, int, str], str]
    needles: tuple[Needle, ...]
    timings: tuple[Timing, ...]
    storage: tuple[Storage, ...]
    sessions: Mapping[tuple[str, int], Sessions]
    gate_scheme: str | None
    margins: Mapping[tuple[str, str, int], float]
    verdict: Verdict | None
    controls: tuple[ControlResult, ...]
    by_kernels: bool
    problems: tuple[str, ...]
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    layers: LayerErrors | None = None
    native: NativePaths | None = None
    attention_paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    endings: tuple[Ending, ...] = ()
    positions: tuple[PositionScore, ...] = ()
    key_tokens: tuple[KeyTokens, ...] = ()

    def of_role(self, *roles: Role) -> tuple[Arm, ...]:
        """The arms in any of `roles`."""
        return tuple(arm for arm in self.arms if arm.role in roles)

    @property
    def key_sentences(self) -> tuple[str, ...]:
        """What stands right under the headline: the gated scheme's rate, or all; none if a control failed."""
        if self.tone == "void":
            return ()
        return self.sentences[:1] if self.gate_scheme else self.sentences

    @property
    def baseline(self) -> str:
        """Name of the baseline's scheme."""
        return str(self.config["baseline"])

    def comparison(self, arm: Arm, task: str, context_length: int, metric: str) -> Comparison | None:
        """The comparison of one arm in one cell, if that cell was measured."""
        wanted = (arm.scheme, arm.role, task, context_length, metric)
        for c in self.comparisons:
            if (c.scheme, c.role, c.task, c.context_length, c.metric) == wanted:
                return c
        return None

    def ranked(self, metric: str) -> list[Comparison]:
        """Comparisons of the schemes in `metric`, worst first; cells without a value come last."""
        rows = [c for c in self.comparisons if c.metric == metric and c.role == "scheme"]
        return sorted(rows, key=lambda c: -np.inf if c.loss.value is None else c.loss.value, reverse=True)

    def lengths_of(self, task: str) -> tuple[int, ...]:
        """The context lengths that `task` was run at."""
        run = {length for of, length, _ in self.competence if of == task}
        return tuple(n for n in self.context_lengths if n in run)

    def has(self, metric: str) -> bool:
        """Whether any cell has a value of `metric`."""
        return any(of == metric for _, _, of in self.competence)

    def decidable(self, metric: str) -> bool:
        """Whether any scheme's loss of `metric` is known well enough to be drawn (see `undecidable`)."""
        return any(c.loss.value is not None and not undecidable(c) for c in self.ranked(metric))

    def discriminates(self, metric: str, task: str) -> bool:
        """Whether the baseline is off the floor at any length, so that a loss of `metric` could show."""
        return any(self.competence.get((task, length, metric), "floor") != "floor" for length in self.context_lengths)


def build_report(
    records: pd.DataFrame,
    plan: Mapping[str, Any],
    *,
    sessions: Mapping[tuple[str, int], Sessions],
    controls: Sequence[ControlResult],
    verdict: Verdict | None = None,
    env: Mapping[str, Any] | None = None,
    layers: LayerErrors | None = None,
    native: NativePaths | None = None,
) -> ReportData:
    """Compute a report.

    Args:
        records: One row per (cell, sample), with the columns of `kveval.records.Record`.
        plan: The run's plan as stored: "config" is the resolved sweep, "model" what is known of the model.
        sessions: (scheme, context length) -> sessions, the baseline's included.
        controls: The controls' results.
        verdict: The gate's, when one was declared.
        env: Versions and hardware that the run recorded.
        layers: The error by layer, where the run measured it.
        native: How the schemes ran on the machine, where the run recorded it.

    Raises:
        StoreError: there are no records.
    """
    if records.empty:
        raise StoreError("the run has no records yet.", remedy="Run `kveval run` on its config first.")
    config = plan["config"]
    gate = config.get("gate")
    confidence = float(gate["confidence"]) if gate else 0.95
    arms = arms_of(records, config)
    tasks = _in_order(records["task"], (t["label"] for t in config["tasks"]))
    lengths = tuple(sorted(int(n) for n in records["context_length"].unique()))
    means, comparisons, rooms = estimate_cells(records, arms, tasks, lengths, confidence)
    timings = timings_of(records, arms, lengths)
    by_kernels = _by_kernels(records)
    endings, key_tokens = endings_of(records, arms, tasks), key_tokens_of(records, tasks)
    data = ReportData(
        name=config["name"],
        headline="",
        tone="plain",
        sentences=(),
        model=_model(plan["model"]),
        arms=arms,
        tasks=tasks,
        context_lengths=lengths,
        confidence=confidence,
        means=means,
        comparisons=comparisons,
        exchange=_exchange(comparisons, sessions, config["baseline"], timings if by_kernels else ()),
        competence=rooms,
        needles=needles_of(records, arms),
        timings=timings,
        storage=storage_of(records, arms, lengths),
        sessions=sessions,
        gate_scheme=gate["scheme"] if gate else None,
        margins={(e["metric"], e["task"], e["context_length"]): e["margin"] for e in gate["endpoints"]} if gate else {},
        verdict=verdict,
        controls=tuple(controls),
        by_kernels=by_kernels,
        problems=(*_problems(records, comparisons), *thinking_problems(endings)),
        config=config,
        env=env or {},
        layers=layers,
        native=native,
        attention_paths=_attention_paths(records),
        notes=(*key_token_sentences(key_tokens), *cut_sentences(endings)),
        endings=endings,
        positions=positions_of(records, arms, tasks),
        key_tokens=key_tokens,
    )
    headline, tone = _headline(data)
    return replace(data, headline=headline, tone=tone, sentences=_sentences(data))


def _by_kernels(records: pd.DataFrame) -> bool:
    """Whether baseline and schemes were attended to by a kernel rather than through decoded tensors or on a CPU."""
    paths = records.loc[records["role"].isin(["baseline", "scheme"]), "attention_path"].dropna()
    return not paths.empty and not paths.str.contains("dequantize|reference").any()


def _attention_paths(records: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """The paths that the records of each scheme name."""
    known = records[records["role"].isin(["baseline", "scheme"]) & records["attention_path"].notna()]
    return {str(scheme): tuple(of["attention_path"].unique()) for scheme, of in known.groupby("scheme", sort=False)}


def _in_order(column: pd.Series[Any], listed: Iterable[str]) -> tuple[str, ...]:
    found = list(dict.fromkeys(column))
    order = [label for label in listed if label in found]
    return (*order, *(label for label in found if label not in order))


def _model(model: Mapping[str, Any]) -> str:
    revision = f", revision {model['revision']}" if model["revision"] else ""
    weights = model["weights_digest"][:12]
    return f"{model['id']}{revision}, weights {weights}, computed in {model['compute_dtype']}"


def _exchange(
    comparisons: Iterable[Comparison],
    sessions: Mapping[tuple[str, int], Sessions],
    baseline: str,
    timings: Iterable[Timing],
) -> tuple[ExchangeRate, ...]:
    seconds = {(t.arm.scheme, t.context_length): t.median for t in timings}
    rates = []
    for c in comparisons:
        if c.role != "scheme" or c.metric not in LOSS_METRICS:
            continue
        own, wide = (seconds.get((name, c.context_length)) for name in (c.scheme, baseline))
        rates.append(
            exchange_rate(
                c,
                scheme=sessions[c.scheme, c.context_length],
                baseline=sessions[baseline, c.context_length],
                decode_speedup=wide / own if wide and own else None,
            )
        )
    return tuple(rates)


def _problems(records: pd.DataFrame, comparisons: Iterable[Comparison]) -> tuple[str, ...]:
    found = []
    errored = records[records["status"] != "ok"]
    if len(errored):
        first = errored.iloc[0]
        found.append(
            f"{len(errored):,} of {len(records):,} samples errored; the first, {first['scheme']} on "
            f"{first['task']} at {format_tokens(int(first['context_length']))} tokens: {first['error']}"
        )
    short = {
        (c.scheme, c.task, c.context_length): c.n_missing_scheme + c.n_missing_baseline
        for c in comparisons
        if c.metric == "answer_nll" and c.n_missing_scheme + c.n_missing_baseline
    }
    if short:
        (scheme, task, length), missing = max(short.items(), key=lambda item: item[1])
        found.append(
            f"{len(short)} cell{'s lack' if len(short) > 1 else ' lacks'} samples; "
            f"most of all {scheme} on {task} at {format_tokens(length)} "
            f"tokens ({missing} missing). Estimates use the pairs that are there."
        )
    return tuple(found)


def _headline(data: ReportData) -> tuple[str, Tone]:
    if data.verdict is not None:
        tones: dict[str, Tone] = {"PASS": "good", "FAIL": "bad", "INVALID": "void"}
        return data.verdict.first_line, tones.get(str(data.verdict.status), "unsure")
    broken = [c for c in data.controls if c.blocks]
    if broken:
        return (
            f"Don't decide on these figures, a control failed: {broken[0].name}: {broken[0].detail}",
            "void",
        )
    longest = format_tokens(data.context_lengths[-1])
    return f"No gate was declared: measurements up to {longest} tokens, no verdict.", "plain"


def _sentences(data: ReportData) -> tuple[str, ...]:
    """Per scheme, the gate's first: its exchange rate at the longest context, on the task it hurts most.

    Where the model wrote the answers, what the task's score loses is told as well.
    """
    longest = data.context_lengths[-1]
    lines: dict[str, str] = {}
    for comparison in data.ranked("answer_nll"):
        if comparison.context_length != longest or comparison.scheme in lines:
            continue
        for rate in data.exchange:
            if (rate.scheme, rate.task, rate.metric) == (
                comparison.scheme,
                comparison.task,
                "answer_nll",
            ) and (rate.context_length == longest):
                lines[rate.scheme] = rate.sentence + _score_lost(data, comparison)
    names = [arm.scheme for arm in data.of_role("scheme") if arm.scheme in lines]
    names.sort(key=lambda name: name != data.gate_scheme)
    return tuple(lines[name] for name in names)


def _score_lost(data: ReportData, worst: Comparison) -> str:
    """What the cell of `worst` loses in its task's score, if it has one that can show a loss."""
    cell = (worst.task, worst.context_length)
    of = data.comparison(Arm(worst.scheme, "scheme"), *cell, "task_score")
    if of is None or of.loss.value is None or data.competence[*cell, "task_score"] == "floor" or undecidable(of):
        return ""
    return f"; {format_loss(of.loss, METRICS['task_score'])}"
