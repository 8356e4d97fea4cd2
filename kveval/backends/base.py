"""What a backend is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kveval.generation import Generated
from kveval.plan import Arm
from kveval.scoring import AnswerScore
from kveval.storage import StoredBytes
from kveval.tasks import Sample

__all__ = ["Backend", "Effective", "Output", "Reference"]


@dataclass(frozen=True)
class Effective:
    """What really ran, as opposed to what was asked for.

    `batch` sequences were fed together, filled up to the longest, `cache_tokens`; bytes are one sequence's.
    `packed_reads` counts the tokens decoded from packed bytes by the scoring forward alone, summed over layers
    and over keys and values. `billed` is the formula's figure for `stored.stored`, in bytes.
    """

    attention_path: str
    compute_dtype: str
    cache_tokens: int
    packed_reads: int
    stored: StoredBytes
    billed: int
    batch: int


@dataclass(frozen=True)
class Reference:
    """What the baseline leaves of a sample for the other arms.

    `log_probs` are those of its answer's positions, float32 [N, V]; `key_tokens` the positions (int64) that count, or
    None where all do.
    """

    log_probs: Any
    key_tokens: Any | None = None


@dataclass(frozen=True)
class Output:
    """One sample scored on one arm. `reference` is for later arms to compare with.

    `prefill_s` is this sample's share of a prefill that its cluster shares; `decode_s_per_token` is None where
    decoding was not timed. `generated` is what the model wrote, None where it was not asked to.
    """

    sample_id: str
    score: AnswerScore
    effective: Effective
    prefill_s: float
    score_s: float
    decode_s_per_token: float | None
    reference: Reference
    generated: Generated | None = None


class Backend(Protocol):
    """Runs samples. One instance holds one model."""

    def score(
        self,
        clusters: Sequence[Sequence[Sample]],
        arm: Arm,
        baseline: Mapping[str, Reference],
        *,
        decode_tokens: int = 0,
    ) -> Iterator[Output]:
        """Score every sample of some clusters on one arm; outputs come as they are scored, not in the clusters' order.

        Args:
            clusters: The sequences to run as one batch, each with its samples, which share a haystack or document.
                Of more than one, all have as many samples, and no sample is to be written.
            arm: How to run them.
            baseline: `Output.reference` of the baseline by sample id; empty for the baseline itself.
            decode_tokens: Time this many one-token forwards with the last scored sample; 0 for none. Clusters that
                are timed run alone.
        """
        ...
