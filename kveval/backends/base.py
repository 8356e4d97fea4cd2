"""What a backend is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kveval.plan import Arm
from kveval.scoring import AnswerScore
from kveval.storage import StoredBytes
from kveval.tasks import Sample

__all__ = ["Backend", "Effective", "Output"]


@dataclass(frozen=True)
class Effective:
    """What really ran, as opposed to what was asked for.

    `packed_reads` counts the tokens decoded from packed bytes by the scoring forward alone, summed over layers
    and over keys and values. `billed` is the formula's figure for `stored.stored`, in bytes.
    """

    attention_path: str
    compute_dtype: str
    cache_tokens: int
    packed_reads: int
    stored: StoredBytes
    billed: int


@dataclass(frozen=True)
class Output:
    """One sample scored on one arm. `baseline` is the arm's own log-probabilities, for later arms to compare with.

    `prefill_s` is this sample's share of a prefill that its cluster shares; `decode_s_per_token` is None where
    decoding was not timed.
    """

    sample_id: str
    score: AnswerScore
    effective: Effective
    prefill_s: float
    score_s: float
    decode_s_per_token: float | None
    log_probs: Any


class Backend(Protocol):
    """Runs samples. One instance holds one model."""

    def score(
        self, cluster: Sequence[Sample], arm: Arm, baseline: Mapping[str, Any], *, decode_tokens: int = 0
    ) -> Iterator[Output]:
        """Score every sample of a cluster on one arm; outputs come as they are scored, not in the cluster's order.

        Args:
            cluster: Samples that share a haystack or document.
            arm: How to run them.
            baseline: `Output.log_probs` of the baseline by sample id; empty for the baseline itself.
            decode_tokens: Time this many one-token forwards with the last scored sample; 0 for none.
        """
        ...
