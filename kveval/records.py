"""The flat row that a sweep writes per (cell, sample), and the words used in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

__all__ = [
    "ADDED",
    "METRICS",
    "READABLE",
    "SCHEMA_VERSION",
    "TIMING_FIELDS",
    "FinishReason",
    "Metric",
    "Record",
    "Role",
]

SCHEMA_VERSION = 3
"""Of plans, manifests and records."""

READABLE = (2, SCHEMA_VERSION)
"""Schema versions whose runs can be reported and gated."""

FinishReason = Literal["stop", "length", "thinking"]
"""Why a written answer ended: by an end token or a stop string, at `max_new_tokens`, or there while still thinking."""

Role = Literal["baseline", "scheme", "aa", "crush"]
"""What an arm is for: the BF16 baseline, a scheme under test, or one of the two controls."""


@dataclass(frozen=True)
class Metric:
    """A column of `Record` that can be compared, with the direction in which it is worse.

    `loss` is always "how much worse the scheme is": a rise for `higher_is_worse`, a drop otherwise.
    `against_baseline` metrics are already a distance from the baseline (the baseline's own value is 0).
    `family` decides the estimator: "binary" (0/1 per sample) or "continuous".
    `of` is what is judged: a whole answer that the model was fed ("answer"), its tokens one by one ("tokens", which
    running text has too), or the text that the model wrote ("text").
    """

    name: str
    label: str
    unit: str
    higher_is_worse: bool
    family: Literal["binary", "continuous"]
    against_baseline: bool = False
    of: Literal["answer", "tokens", "text"] = "answer"


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("answer_nll", "answer NLL", "nats/token", True, "continuous", of="tokens"),
        Metric("exact_match", "exact match", "fraction", False, "binary"),
        Metric("first_token_match", "first token match", "fraction", False, "binary"),
        Metric("accepted_prefix", "accepted prefix", "fraction", False, "continuous"),
        Metric("task_score", "task score", "fraction", False, "continuous", of="text"),
        Metric("text_f1", "F1 of words", "fraction", False, "continuous", of="text"),
        Metric("text_exact_match", "exact text", "fraction", False, "binary", of="text"),
        Metric("edit_similarity", "edit similarity", "fraction", False, "continuous", of="text"),
        Metric("kl", "KL from baseline", "nats/token", True, "continuous", against_baseline=True, of="tokens"),
        Metric("top1_flips", "top-1 flips", "fraction", True, "continuous", against_baseline=True, of="tokens"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One scored sample in one cell. Every field is a column; missing is None, never 0.

    `answer_nll` is the mean over the answer's tokens, in nats; `answer_nll_sum` their sum.
    `kl` is the mean over scored positions of KL(baseline || scheme); `top1_flips` the fraction of
    scored positions whose argmax differs from the baseline's. Both are 0 on the baseline itself.
    `accepted_prefix` is the share of the answer's tokens that greedy decoding would write before its first other
    token. Where the task scores key tokens alone, `key_tokens` counts them, and all of these are over them.
    `task_score`, `text_f1`, `text_exact_match`, `edit_similarity` and `position_scores` (right or wrong by place in
    the answer) judge `generated_text`, which the model wrote greedily; they are None where it was not asked to, and
    where it was still thinking when its `n_generated_tokens` were used up.
    Bytes are one sequence's in the live cache at `cache_tokens` tokens; `batch` sequences ran together, filled up to
    the longest. Seconds are wall clock, of a batch this sample's share.
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
    accepted_prefix: float | None = None
    key_tokens: int | None = None
    task_score: float | None = None
    text_f1: float | None = None
    text_exact_match: float | None = None
    edit_similarity: float | None = None
    position_scores: list[float] | None = None
    generated_text: str | None = None
    n_generated_tokens: int | None = None
    finish_reason: FinishReason | None = None
    batch: int | None = None

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


ADDED = (
    "accepted_prefix", "key_tokens", "task_score", "text_f1", "text_exact_match", "edit_similarity",
    "position_scores", "generated_text", "n_generated_tokens", "finish_reason", "batch",
)  # fmt: skip
"""Columns that records of schema 2 lack; they are None there."""

TIMING_FIELDS = ("prefill_s", "score_s", "decode_s_per_token")
"""Columns that differ between two runs of the same sweep."""
