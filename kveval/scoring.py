"""From logits of the answer's positions to per-sample scores. Pure functions of tensors.

Shape legend: N scored positions (the answer's tokens), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kveval.errors import MeasurementError

__all__ = ["KEY_GAIN", "KEY_LOSS", "AnswerScore", "key_tokens", "log_probabilities", "score_answer"]

KEY_GAIN = KEY_LOSS = 2.0
"""Nats. A token is a key token if the far context takes more than the first off its loss, to less than the second
(Fang et al. 2024, "What is wrong with perplexity for long-context language modeling?", arXiv:2410.23771)."""


@dataclass(frozen=True)
class AnswerScore:
    """How well one answer was predicted.

    Attributes:
        token_nll: Negative log-likelihood of each scored answer token, in nats. Empty where a task scores key tokens
            alone and the answer has none.
        exact_match: Every argmax is the answer's token: greedy decoding would write exactly the answer.
        first_token_match: The first argmax is the answer's first token.
        accepted_tokens: How many tokens of the answer greedy decoding would write before its first other token.
        kl: Mean over positions of KL(baseline || this), in nats; None without a baseline, or a scored token.
        top1_flips: Fraction of positions whose argmax differs from the baseline's; None as `kl`.
    """

    token_nll: tuple[float, ...]
    exact_match: bool
    first_token_match: bool
    accepted_tokens: int
    kl: float | None
    top1_flips: float | None

    @property
    def answer_nll_sum(self) -> float:
        """Sum over the answer's tokens, in nats."""
        return sum(self.token_nll)

    @property
    def answer_nll(self) -> float | None:
        """Mean over the scored tokens, in nats per token; None without one."""
        return self.answer_nll_sum / len(self.token_nll) if self.token_nll else None


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """float32 [N, V] log-probabilities.

    Raises:
        MeasurementError: if the logits are not finite, or not float32 (a 16-bit head hides effects of 1e-4 nats).
    """
    if logits_NV.dtype != torch.float32:
        raise MeasurementError(f"scored logits are {logits_NV.dtype}, not float32.")
    if not torch.isfinite(logits_NV).all():
        raise MeasurementError("scored logits hold NaN or infinity.", remedy="Check the model's dtype and weights.")
    return logits_NV.log_softmax(-1)


def _kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """KL(p || q) per position from float64 log-probabilities.

    They were rounded to float32, so each row sums to 1 within 1e-7 only. `q - p`, which adds up to 0 for true
    probabilities, takes that out: small divergences stay right and positive.
    """
    p, q = p_NV.exp(), q_NV.exp()
    return (p * (p_NV - q_NV) + q - p).sum(-1)


def key_tokens(short_NV: Tensor, full_NV: Tensor, answer_ids: Tensor) -> Tensor:
    """int64 positions in the answer of its key tokens: see `KEY_GAIN`.

    Args:
        short_NV: The baseline's log-probabilities of the answer behind the prompt without its far context.
        full_NV: The same behind the full prompt.
        answer_ids: int64 [N].
    """
    short, full = (-x.gather(1, answer_ids[:, None])[:, 0] for x in (short_NV, full_NV))
    return ((short - full > KEY_GAIN) & (full < KEY_LOSS)).nonzero()[:, 0]


def score_answer(
    log_probs_NV: Tensor, answer_ids: Tensor, baseline_NV: Tensor | None, *, only: Tensor | None = None
) -> AnswerScore:
    """Score an answer that was fed to the model token by token, whatever the model would have written.

    Args:
        log_probs_NV: What the model predicted at each position of the answer.
        answer_ids: int64 [N].
        baseline_NV: The same from the baseline.
        only: int64 positions that are scored; None: all.
    """
    if only is not None:
        log_probs_NV, answer_ids = log_probs_NV[only], answer_ids[only]
        baseline_NV = None if baseline_NV is None else baseline_NV[only]
    right = log_probs_NV.argmax(-1)
    kl = flips = None
    if baseline_NV is not None and len(answer_ids):
        kl = float(_kl(baseline_NV.double(), log_probs_NV.double()).mean())
        flips = float((right != baseline_NV.argmax(-1)).float().mean())
    matches = right == answer_ids
    return AnswerScore(
        token_nll=tuple((-log_probs_NV.gather(1, answer_ids[:, None])[:, 0]).tolist()),
        exact_match=bool(matches.all()),
        first_token_match=bool(matches[:1].all()),
        accepted_tokens=int(matches.cumprod(0).sum()),
        kl=kl,
        top1_flips=flips,
    )
