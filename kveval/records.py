"""The flat row that a sweep writes per (cell, sample), and the words used in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

__all__ = ["METRICS", "SCHEMA_VERSION", "TIMING_FIELDS", "Metric", "Record", "Role"]

SCHEMA_VERSION = 2
"""Of plans, manifests and records."""

Role = Literal["baseline", "scheme", "aa", "crush"]
"""What an arm is for: the BF16 baseline, a scheme under test, or one of the two controls."""


@dataclass(frozen=True)
class Metric:
    """A column of `Record` that can be compared, with the direction in which it is worse.

    `loss` is always "how much worse the scheme is": a rise for `higher_is_worse`, a drop otherwise.
    `against_baseline` metrics are already a distance from the baseline (the baseline's own value is 0).
    `family` decides the estimator: "binary" (0/1 per sample) or "continuous".
    """

    name: str
    label: str
    unit: str
    higher_is_worse: bool
    family: Literal["binary", "continuous"]
    against_baseline: bool = False


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("answer_nll", "answer NLL", "nats/token", True, "continuous"),
        Metric("exact_match", "exact match", "fraction", False, "binary"),
        Metric("first_token_match", "first token match", "fraction", False, "binary"),
        Metric("kl", "KL from baseline", "nats/token", True, "continuous", against_baseline=True),
        Metric("top1_flips", "top-1 flips", "fraction", True, "continuous", against_baseline=True),
    )
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One scored sample in one cell. Every field is a column; missing is None, never 0.

    `answer_nll` is the mean over the answer's tokens, in nats; `answer_nll_sum` their sum.
    `kl` is the mean over scored positions of KL(baseline || scheme); `top1_flips` the fraction of
    scored positions whose argmax differs from the baseline's. Both are 0 on the baseline itself.
    Bytes are those of the live cache at `cache_tokens` tokens. Seconds are wall clock.
    """

    schema_version: int = SCHEMA_VERSION
    cell_id: str
    sample_id: str
    sample_index: int
    cluster: str
    task: str
    task_version: int
    scheme: str
    role: Role
    context_length: int
    depth: float | None
    status: Literal["ok", "error"]
    error: str | None = None
    n_prompt_tokens: int = 0
    n_answer_tokens: int = 0
    answer_nll: float | None = None
    answer_nll_sum: float | None = None
    exact_match: float | None = None
    first_token_match: float | None = None
    kl: float | None = None
    top1_flips: float | None = None
    token_nll: list[float] | None = None
    stored_bytes: int | None = None
    payload_bytes: int | None = None
    scale_bytes: int | None = None
    constant_bytes: int | None = None
    padding_bytes: int | None = None
    wide_layer_bytes: int | None = None
    wide_token_bytes: int | None = None
    undo_bytes: int | None = None
    billed_bytes: int | None = None
    cache_tokens: int | None = None
    packed_reads: int | None = None
    attention_path: str | None = None
    prefill_chunk: int | None = None
    reads: str | None = None
    compute_dtype: str | None = None
    prefill_s: float | None = None
    score_s: float | None = None
    decode_s_per_token: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in the order of the columns."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """The inverse of `to_dict`. Raises TypeError on unknown or missing columns."""
        return cls(**data)

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(f.name for f in fields(cls))


TIMING_FIELDS = ("prefill_s", "score_s", "decode_s_per_token")
"""Columns that differ between two runs of the same sweep."""
