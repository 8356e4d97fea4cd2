"""What was measured in each cell of a run, as plain rows: means, comparisons, needles, times and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kveval.records import METRICS, Role
from kveval.stats import Comparison, Estimate, compare, competence, mean_estimate

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "DEPTH_BUCKETS",
    "DETAIL_METRICS",
    "LOSS_METRICS",
    "TABLE_METRICS",
    "Arm",
    "Mean",
    "Needle",
    "Storage",
    "Timing",
    "arms_of",
    "estimate_cells",
    "needles_of",
    "storage_of",
    "timings_of",
    "undecidable",
]

DEPTH_BUCKETS = 5
"""Bands of equal height into which needle depths are sorted."""

LOSS_METRICS = ("answer_nll", "exact_match", "task_score")
"""Metrics that are drawn and ranked."""

DETAIL_METRICS = ("text_f1", "edit_similarity", "accepted_prefix")
"""Metrics of answers that stand in a table of their own."""

TABLE_METRICS = (*LOSS_METRICS, "kl", "top1_flips", *DETAIL_METRICS)
"""Metrics that are compared with the baseline."""

_ESTIMATE_COLUMNS = ("task", "context_length", "scheme", "role", "sample_id", "cluster", "status", "key_tokens")


@dataclass(frozen=True)
class Arm:
    """One scheme in one role. `baseline`, then A/A, the schemes as the config lists them, crush last."""

    scheme: str
    role: Role


@dataclass(frozen=True)
class Mean:
    """The mean of a metric in one arm of one cell, in the metric's unit."""

    arm: Arm
    task: str
    context_length: int
    metric: str
    estimate: Estimate


@dataclass(frozen=True)
class Needle:
    """Mean of `metric`, from 0 to 1, over `n` samples whose needle lies in one band of depths (0 = the start)."""

    arm: Arm
    task: str
    context_length: int
    bucket: int
    metric: str
    value: float
    n: int


@dataclass(frozen=True)
class Timing:
    """Seconds per decoded token of one arm: median and quartiles over `n` samples."""

    arm: Arm
    context_length: int
    median: float
    low: float
    high: float
    n: int


STORED_PARTS = ("payload", "scale", "constant", "padding", "wide_layer", "wide_token")
"""Parts of a cache; a record has them in bytes."""


@dataclass(frozen=True)
class Storage:
    """Bytes per cached token of one arm at one length, each the median over samples of the live cache."""

    arm: Arm
    context_length: int
    stored: float
    payload: float
    scale: float
    constant: float
    padding: float
    wide_layer: float
    wide_token: float
    of_baseline: float | None


def arms_of(records: pd.DataFrame, config: Mapping[str, Any]) -> tuple[Arm, ...]:
    """The arms that have records, in the order of `Arm`."""
    found = {Arm(s, cast(Role, r)) for s, r in records[["scheme", "role"]].drop_duplicates().itertuples(index=False)}
    listed = [s["name"] for s in config["schemes"]]
    roles = ("baseline", "aa", "scheme", "crush")

    def place(arm: Arm) -> tuple[int, int, str]:
        at = listed.index(arm.scheme) if arm.scheme in listed else len(listed)
        return roles.index(arm.role), at, arm.scheme

    return tuple(sorted(found, key=place))


def estimate_cells(
    records: pd.DataFrame,
    arms: Sequence[Arm],
    tasks: Sequence[str],
    lengths: Sequence[int],
    confidence: float,
) -> tuple[tuple[Mean, ...], tuple[Comparison, ...], dict[tuple[str, int, str], str]]:
    """Means, comparisons and competence (by task, length, metric) of every cell, in each metric that has a value there.

    A sample without a key token has no tokens to judge: it is not missing from what is judged by the token.
    """
    means: list[Mean] = []
    comparisons: list[Comparison] = []
    rooms: dict[tuple[str, int, str], str] = {}
    narrow = records[[*_ESTIMATE_COLUMNS, *TABLE_METRICS]]
    text = [c for c in _ESTIMATE_COLUMNS if c not in ("context_length", "key_tokens")]
    narrow = narrow.astype(dict.fromkeys(text, object))  # searched twice as fast as pandas' own strings
    for task in tasks:
        for length in lengths:
            # Every estimate searches the frame that it is given, so it is given no more than it needs.
            whole = narrow[(narrow["task"] == task) & (narrow["context_length"] == length)]
            keyed = whole[whole["key_tokens"] != 0]
            measured = whole.loc[whole["status"] == "ok", list(TABLE_METRICS)].notna().any()
            for metric in (m for m in TABLE_METRICS if measured[m]):
                cell = keyed if METRICS[metric].of == "tokens" else whole
                rooms[task, length, metric] = competence(cell, metric=metric, task=task, context_length=length)
                for arm in arms:
                    about: dict[str, Any] = {
                        "scheme": arm.scheme,
                        "role": arm.role,
                        "metric": metric,
                        "task": task,
                        "context_length": length,
                        "confidence": confidence,
                    }
                    if metric in LOSS_METRICS:
                        means.append(Mean(arm, task, length, metric, mean_estimate(cell, **about)))
                    if arm.role != "baseline":
                        comparisons.append(compare(cell, **about))
    return tuple(means), tuple(comparisons), rooms


def needles_of(records: pd.DataFrame, arms: Sequence[Arm]) -> tuple[Needle, ...]:
    """Scores by depth, over the ok samples that have one: the task score where answers were written, else matches."""
    deep = records[(records["status"] == "ok") & records["depth"].notna()]
    needles: list[Needle] = []
    for task, of in deep.groupby("task", sort=True):
        metric = "task_score" if of["task_score"].notna().any() else "exact_match"
        ok = of[of[metric].notna()]
        bucket = (ok["depth"].astype(float) * DEPTH_BUCKETS).astype(int).clip(0, DEPTH_BUCKETS - 1)
        keys = ["scheme", "role", "context_length", "bucket"]
        grouped = ok.assign(bucket=bucket)[[*keys, metric]].groupby(keys, sort=True)[metric]
        needles += [
            Needle(Arm(scheme, role), str(task), int(length), int(band), metric, float(values.mean()), len(values))
            for (scheme, role, length, band), values in grouped
            if Arm(scheme, role) in arms
        ]
    return tuple(needles)


def timings_of(records: pd.DataFrame, arms: Sequence[Arm], lengths: Sequence[int]) -> tuple[Timing, ...]:
    """Decode times, over the ok samples that have one."""
    rows = []
    for arm in arms:
        for length in lengths:
            seconds = _measured(records, arm, length)["decode_s_per_token"].dropna().astype(float)
            if len(seconds):
                low, median, high = (float(q) for q in seconds.quantile([0.25, 0.5, 0.75]))
                rows.append(Timing(arm, length, median, low, high, len(seconds)))
    return tuple(rows)


def storage_of(records: pd.DataFrame, arms: Sequence[Arm], lengths: Sequence[int]) -> tuple[Storage, ...]:
    """Bytes per cached token, over the ok samples whose cache was counted."""
    columns = [f"{part}_bytes" for part in ("stored", *STORED_PARTS)]
    rows: list[Storage] = []
    wide: dict[int, float] = {}
    for arm in arms:
        for length in lengths:
            live = _measured(records, arm, length).dropna(subset=["stored_bytes", "cache_tokens"])
            if live.empty:
                continue
            per_token = live[columns].astype(float).div(live["cache_tokens"].astype(float), axis=0).median()
            stored, *parts = (float(x) for x in per_token.fillna(0.0))
            by_part = dict(zip(STORED_PARTS, parts, strict=True))
            if arm.role == "baseline":
                wide[length] = stored
            share = stored / wide[length] if wide.get(length) else None
            rows.append(Storage(arm, length, stored, **by_part, of_baseline=share))
    return tuple(rows)


def undecidable(comparison: Comparison) -> bool:
    """Whether a loss that is a fraction is known to no better than 50 points either way, or not at all.

    Losses lie between -100 and 100 points, so such an interval always covers zero.
    """
    if METRICS[comparison.metric].unit != "fraction":
        return False
    low, high = comparison.loss.low, comparison.loss.high
    return low is None or high is None or high - low > 1.0


def _measured(records: pd.DataFrame, arm: Arm, length: int) -> pd.DataFrame:
    return records[
        (records["scheme"] == arm.scheme)
        & (records["role"] == arm.role)
        & (records["context_length"] == length)
        & (records["status"] == "ok")
    ]
