"""Paired estimates from records: how much worse a scheme is than the baseline, and how surely.

Samples are paired by (task, context length, sample id), never by row order. A sample that failed, is
absent or has no value counts as missing and is reported; nothing is dropped silently. Samples of one
cluster (one haystack, one document) are not independent, so intervals are over clusters. How bounds are
computed is in `kveval.intervals`.

`records` is a pandas DataFrame with the columns of `kveval.records.Record`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from kveval.errors import StoreError, UnknownNameError
from kveval.intervals import MIN_CHANGED_CLUSTERS, LossDistribution, bca_interval, fit_loss
from kveval.records import METRICS, Metric, Role

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "MIN_CLUSTERS",
    "UNIFORM_NLL",
    "Comparison",
    "Competence",
    "Estimate",
    "compare",
    "competence",
    "few_clusters_note",
    "get_metric",
    "holm",
    "mean_estimate",
    "with_tokens_to_score",
]

FloatArray = npt.NDArray[np.float64]

MIN_CLUSTERS = 40
"""Cluster-robust intervals are trusted from about this many clusters on; below, a note says so."""

UNIFORM_NLL = math.log(32_000)
"""Nats per token of a uniform guess over 32,000 tokens, used as the floor when the vocabulary is unknown."""

_ROW_COLUMNS = ("role", "scheme", "sample_id", "cluster", "status")

Competence = Literal["ok", "floor", "ceiling"]


@dataclass(frozen=True)
class Estimate:
    """A mean and its two-sided interval, in the metric's unit.

    `value` is None when there is no sample at all; `low` and `high` are None when `defined` is False (one
    sample or one cluster carries no information about spread). `method` names the interval.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    n_clusters: int
    method: str
    defined: bool


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline on one metric of one cell.

    `loss` is how much worse the arm is (negative: better), with a two-sided interval at `confidence` for
    reports. `lower` and `upper` are one-sided bounds, each at `confidence`, for decisions. `discordant_*`
    count samples whose binary score changed (None for other metrics). `p_value` is two-sided against "no
    difference"; None where that question has no meaning. `worst_case` (binary metrics with missing
    samples) counts every missing sample against the arm.
    """

    task: str
    context_length: int
    scheme: str
    role: Role
    metric: str
    confidence: float
    loss: Estimate
    lower: float | None
    upper: float | None
    n_pairs: int
    n_missing_scheme: int
    n_missing_baseline: int
    discordant_worse: int | None
    discordant_better: int | None
    p_value: float | None
    p_method: str
    exact_zero: bool
    worst_case: Estimate | None
    notes: tuple[str, ...]
    distribution: LossDistribution | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class _Cell:
    """One metric of one (task, context length). None: the sample errored. NaN: it has no value."""

    clusters: dict[str, str]
    arms: dict[tuple[str, str], dict[str, float | None]]

    def arm(self, role: Role, scheme: str) -> dict[str, float | None]:
        return self.arms.get((role, scheme), {})

    def baseline(self) -> dict[str, float | None]:
        return next((arm for (role, _), arm in self.arms.items() if role == "baseline"), {})


@dataclass(frozen=True)
class _Pairs:
    """Losses of the samples that both arms have (shape N), and what is missing. M = known sample ids."""

    loss: FloatArray
    clusters: npt.NDArray[np.int64]
    n_missing_scheme: int
    n_missing_baseline: int
    worst: FloatArray
    """Shape M: losses with every missing value set against the arm (binary metrics only)."""
    worst_clusters: npt.NDArray[np.int64]


def get_metric(name: str, *, where: str = "") -> Metric:
    """The metric of that name. Raises UnknownNameError with suggestions."""
    if name not in METRICS:
        raise UnknownNameError("metric", name, METRICS, where=where)
    return METRICS[name]


def compare(
    records: pd.DataFrame,
    *,
    scheme: str,
    role: Role = "scheme",
    metric: str,
    task: str,
    context_length: int,
    confidence: float = 0.95,
    bootstrap: bool = False,
) -> Comparison:
    """Compare one arm with the baseline on the samples of one cell.

    Args:
        records: rows of every arm.
        scheme: name of the arm's scheme.
        role: what the arm is for ("scheme", "aa" or "crush").
        metric: a key of `METRICS`; one that is `against_baseline` is itself the loss.
        task: the task's label.
        context_length: in tokens.
        confidence: of the two-sided interval and of each one-sided bound.
        bootstrap: report the BCa bootstrap interval (over clusters, seeded) for a continuous metric. The
            one-sided bounds, and so every decision, keep the method of `kveval.intervals`.

    Raises:
        StoreError: a sample id twice in one arm, a sample in two clusters, or missing columns.
        UnknownNameError: no such metric.
    """
    kind = get_metric(metric)
    pairs = _pair(records, kind, scheme, role, task, context_length)
    n, binary = len(pairs.loss), kind.family == "binary"
    fit = fit_loss(pairs.loss, pairs.clusters, bounded=_is_fraction(kind)) if n else None
    loss = _loss_estimate(pairs, fit, confidence, bootstrap=bootstrap and not binary)
    p_value, p_method = _two_sided_p(pairs, fit, kind)
    missing = pairs.n_missing_scheme + pairs.n_missing_baseline
    return Comparison(
        task=task,
        context_length=context_length,
        scheme=scheme,
        role=role,
        metric=metric,
        confidence=confidence,
        loss=loss,
        lower=fit.lower(1.0 - confidence) if fit else None,
        upper=fit.upper(1.0 - confidence) if fit else None,
        n_pairs=n,
        n_missing_scheme=pairs.n_missing_scheme,
        n_missing_baseline=pairs.n_missing_baseline,
        discordant_worse=int((pairs.loss > 0).sum()) if binary else None,
        discordant_better=int((pairs.loss < 0).sum()) if binary else None,
        p_value=p_value,
        p_method=p_method,
        exact_zero=n > 0 and bool((pairs.loss == 0.0).all()),
        worst_case=_worst_case(pairs, confidence) if binary and missing else None,
        notes=_notes(pairs, fit, kind, confidence),
        distribution=fit,
    )


def mean_estimate(
    records: pd.DataFrame,
    *,
    scheme: str,
    role: Role = "scheme",
    metric: str,
    task: str,
    context_length: int,
    confidence: float = 0.95,
) -> Estimate:
    """Mean of `metric` over the ok samples of one cell, with a two-sided interval over clusters.

    Fractions get an exact (Clopper-Pearson) interval where samples are independent or where fewer than
    `MIN_CHANGED_CLUSTERS` clusters are off 0, or off 1 (each cluster then counts as one observation);
    else a cluster-robust t interval, cut at 0 and 1. Other metrics get the t interval.
    """
    kind = get_metric(metric)
    cell = _read_cell(records, kind, task, context_length)
    values, clusters = _finite(cell.arm(role, scheme)), cell.clusters
    if not values:
        return Estimate(None, None, None, 0, 0, "undefined (no samples)", False)
    x_N = np.array(list(values.values()))
    codes_N = _codes([clusters[s] for s in values])
    n, groups = len(x_N), int(codes_N.max()) + 1
    value = float(x_N.mean())
    fit = fit_loss(x_N, codes_N, bounded=False)
    if fit.kind == "undefined":
        return Estimate(value, None, None, n, groups, fit.method, False)
    tail = (1.0 - confidence) / 2.0
    low, high = _known(fit.lower(tail)), _known(fit.upper(tail))
    if not _is_fraction(kind):
        return Estimate(value, low, high, n, groups, fit.method, True)
    off_zero = int((np.bincount(codes_N, weights=x_N) > 0).sum())
    off_one = int((np.bincount(codes_N, weights=1.0 - x_N) > 0).sum())
    alone = groups == n and bool(np.isin(x_N, (0.0, 1.0)).all())
    if not alone and fit.se > 0.0 and min(off_zero, off_one) >= MIN_CHANGED_CLUSTERS:
        return Estimate(value, max(low, 0.0), min(high, 1.0), n, groups, fit.method, True)
    hits = value * groups
    low = float(stats.beta.ppf(tail, hits, groups - hits + 1.0)) if hits > 0.0 else 0.0
    high = float(stats.beta.ppf(1.0 - tail, hits + 1.0, groups - hits)) if hits < groups else 1.0
    method = "exact (Clopper-Pearson)" + ("" if alone else ", each cluster as one observation")
    return Estimate(value, low, high, n, groups, method, True)


def competence(
    records: pd.DataFrame, *, metric: str, task: str, context_length: int, vocab_size: int | None = None
) -> Competence:
    """Whether the baseline leaves room to see damage in this cell.

    Scores from 0 to 1: "floor" if the baseline never scores (0 against 0 is not lossless), "ceiling" if it
    always does in full. Other metrics: "floor" if the baseline's mean answer NLL is no better than a uniform guess
    over `vocab_size` tokens (`UNIFORM_NLL` when unknown), since there is then no knowledge to lose.
    A cell without baseline values is "ok" here; that it is incomplete is reported elsewhere.
    """
    kind = get_metric(metric)
    is_score = _is_fraction(kind) and not kind.against_baseline
    judged = kind if is_score else METRICS["answer_nll"]
    values = list(_finite(_read_cell(records, judged, task, context_length).baseline()).values())
    if not values:
        return "ok"
    mean = math.fsum(values) / len(values)
    if is_score:
        return "floor" if mean == 0.0 else "ceiling" if mean == 1.0 else "ok"
    floor = math.log(vocab_size) if vocab_size else UNIFORM_NLL
    return "floor" if mean >= floor else "ok"


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's adjusted p-values (Holm 1979), in the order given.

    They bound the chance of any false claim among all of them. Claims that hold only together (all of
    them must be true, as in a PASS) need no such adjustment; see `kveval.gate`.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(order), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = highest
    return tuple(adjusted)


def few_clusters_note(clusters: int) -> str:
    """The note on an interval over fewer than `MIN_CLUSTERS` clusters."""
    return f"only {clusters} clusters: intervals are approximate below about {MIN_CLUSTERS}"


def _is_fraction(metric: Metric) -> bool:
    return metric.unit == "fraction"


def _known(bound: float | None) -> float:
    assert bound is not None, "a defined distribution has bounds"
    return bound


def with_tokens_to_score(records: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """The rows that can have a value: where a task scores key tokens alone, an answer may have none.

    Which tokens are key was found on the baseline, and is the same in every arm: leaving such samples out favours none.
    """
    if metric.of != "tokens" or "key_tokens" not in records.columns:
        return records
    return records[records["key_tokens"] != 0]


def _read_cell(records: pd.DataFrame, metric: Metric, task: str, context_length: int) -> _Cell:
    """The rows of one (task, context length) of every arm.

    Raises:
        StoreError: missing columns, a sample id twice in one arm, or a sample in two clusters.
    """
    columns = [*_ROW_COLUMNS, metric.name]
    absent = [c for c in ("task", "context_length", *columns) if c not in records.columns]
    if absent:
        raise StoreError(
            f"the records lack the column{'s' * (len(absent) > 1)} {', '.join(absent)}.",
            remedy="Read them with kveval.store.read_records from a run folder of this kveval version.",
        )
    chosen = (records["context_length"] == context_length) & (records["task"] == task)
    rows = with_tokens_to_score(records[chosen], metric)[columns]
    cell = _Cell({}, {})
    values = rows[metric.name].astype("float64").tolist()
    keys = zip(*(rows[c].tolist() for c in _ROW_COLUMNS), strict=True)
    for (role, scheme, sample, cluster, status), value in zip(keys, values, strict=True):
        arm = cell.arms.setdefault((role, scheme), {})
        if sample in arm:
            raise StoreError(
                f"sample {sample!r} occurs more than once in task {task!r} at {context_length:,} tokens, "
                f"scheme {scheme!r}.",
                remedy="The run folder mixes two runs or is damaged. Run the sweep again into a new folder.",
            )
        if cell.clusters.setdefault(sample, cluster) != cluster:
            raise StoreError(
                f"sample {sample!r} is in different clusters in different arms.",
                remedy="The arms did not see the same samples. Run the sweep again into a new folder.",
            )
        arm[sample] = value if status == "ok" else None
    return cell


def _finite(arm: Mapping[str, float | None]) -> dict[str, float]:
    """Sample id -> value of the ok samples that have one."""
    return {sample: x for sample, x in arm.items() if x is not None and math.isfinite(x)}


def _codes(clusters: Sequence[str]) -> npt.NDArray[np.int64]:
    return np.unique(np.array(clusters, dtype=object).astype(str), return_inverse=True)[1].astype(np.int64)


def _pair(records: pd.DataFrame, metric: Metric, scheme: str, role: Role, task: str, context_length: int) -> _Pairs:
    cell = _read_cell(records, metric, task, context_length)
    clusters, arm, base = cell.clusters, _finite(cell.arm(role, scheme)), _finite(cell.baseline())
    if metric.against_baseline:
        base = {sample: 0.0 for sample, value in cell.baseline().items() if value is not None}
    sign = 1.0 if metric.higher_is_worse else -1.0
    both = [s for s in clusters if s in arm and s in base]
    # The worst value of a binary score: the arm fails where it is unknown, the baseline succeeds.
    bad, good = (1.0, 0.0) if metric.higher_is_worse else (0.0, 1.0)
    worst = [sign * (arm.get(s, bad) - base.get(s, good)) for s in clusters]
    return _Pairs(
        loss=np.array([sign * (arm[s] - base[s]) for s in both], dtype=np.float64),
        clusters=_codes([clusters[s] for s in both]),
        n_missing_scheme=len(clusters) - len(arm),
        n_missing_baseline=len(clusters) - len(base),
        worst=np.array(worst, dtype=np.float64),
        worst_clusters=_codes(list(clusters.values())),
    )


def _loss_estimate(pairs: _Pairs, fit: LossDistribution | None, confidence: float, *, bootstrap: bool) -> Estimate:
    n = len(pairs.loss)
    if fit is None:
        return Estimate(None, None, None, 0, 0, "undefined (no pairs)", False)
    groups = int(pairs.clusters.max()) + 1
    if fit.kind == "undefined":
        return Estimate(fit.value, None, None, n, groups, fit.method, False)
    if bootstrap:
        ends = bca_interval(pairs.loss, pairs.clusters, confidence=confidence)
        if ends is not None:
            return Estimate(fit.value, *ends, n, groups, "BCa bootstrap over clusters", True)
    tail = (1.0 - confidence) / 2.0
    return Estimate(fit.value, fit.lower(tail), fit.upper(tail), n, groups, fit.method, True)


def _worst_case(pairs: _Pairs, confidence: float) -> Estimate:
    fit = fit_loss(pairs.worst, pairs.worst_clusters, bounded=True)
    whole = _Pairs(pairs.worst, pairs.worst_clusters, 0, 0, pairs.worst, pairs.worst_clusters)
    return _loss_estimate(whole, fit, confidence, bootstrap=False)


def _two_sided_p(pairs: _Pairs, fit: LossDistribution | None, metric: Metric) -> tuple[float | None, str]:
    """Two-sided p-value of "no difference", and the name of the test."""
    if fit is None or metric.against_baseline:
        return None, "none"
    if metric.family == "continuous":
        if fit.kind != "t":
            return (1.0, fit.method) if fit.kind == "point" and fit.value == 0.0 else (None, "none")
        return min(1.0, 2.0 * min(fit.p_inferior(0.0), fit.p_noninferior(0.0))), fit.method
    net_G = np.bincount(pairs.clusters, weights=pairs.loss)
    worse, better = int((net_G > 0).sum()), int((net_G < 0).sum())
    name = "exact McNemar" if len(net_G) == len(pairs.loss) else "exact sign test over clusters"
    return (float(stats.binomtest(worse, worse + better).pvalue) if worse + better else 1.0), name


def _notes(pairs: _Pairs, fit: LossDistribution | None, metric: Metric, confidence: float) -> tuple[str, ...]:
    notes: list[str] = []
    total = len(pairs.worst)
    if pairs.n_missing_scheme or pairs.n_missing_baseline:
        notes.append(
            f"of {total} samples, {pairs.n_missing_scheme} are missing in the scheme and "
            f"{pairs.n_missing_baseline} in the baseline; the estimate uses {len(pairs.loss)} complete pairs"
        )
    if fit is None:
        return (*notes, "no sample has a value in both arms")
    groups = int(pairs.clusters.max()) + 1
    if fit.kind == "undefined":
        what = "one sample" if len(pairs.loss) == 1 else "one cluster"
        notes.append(f"there is only {what}, so the spread, and any bound, is undefined")
        return tuple(notes)
    if groups < MIN_CLUSTERS:
        notes.append(few_clusters_note(groups))
    if fit.kind == "point":
        notes.append(f"all {len(pairs.loss)} differences are {fit.value:g}; the spread can't be estimated")
    elif fit.kind == "score" and not pairs.loss.any():
        bound = 1.0 - (1.0 - confidence) ** (1.0 / groups)
        notes.append(f"no change in {groups} clusters; a loss up to {bound:.3g} is possible (rule of three)")
    if metric.family == "binary":
        worse, better = int((pairs.loss > 0).sum()), int((pairs.loss < 0).sum())
        if worse and better:
            notes.append(f"{worse} samples got worse and {better} got better; the mean cancels them")
    return tuple(notes)
