"""Scores against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from kveval.errors import MeasurementError
from kveval.scoring import AnswerScore, log_probabilities, score_answer


def logits(positions: int, vocabulary: int, *, seed: int = 0, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@given(
    positions=st.integers(1, 6),
    vocabulary=st.integers(2, 300),
    seed=st.integers(0, 10_000),
    spread=st.floats(0.01, 30),
    noise=st.floats(0, 3),
)
def test_every_figure_equals_float64(positions: int, vocabulary: int, seed: int, spread: float, noise: float) -> None:
    base = logits(positions, vocabulary, seed=seed, spread=spread)
    other = base + noise * logits(positions, vocabulary, seed=seed + 1, spread=1.0)
    answer = torch.randint(vocabulary, (positions,), generator=torch.Generator().manual_seed(seed))
    got = score_answer(log_probabilities(other), answer, log_probabilities(base))

    p, q = (log_softmax(x.double().numpy(), axis=-1) for x in (base, other))
    nll = -q[np.arange(positions), answer.numpy()]
    assert got.token_nll == pytest.approx(nll, rel=1e-5, abs=2e-5)
    assert got.answer_nll_sum == pytest.approx(nll.sum(), rel=1e-5, abs=1e-4)
    assert got.answer_nll == pytest.approx(nll.mean(), rel=1e-5, abs=1e-4)
    assert got.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-4, abs=2e-6)
    assert got.top1_flips == pytest.approx((p.argmax(-1) != q.argmax(-1)).mean())
    hits = q.argmax(-1) == answer.numpy()
    assert (got.exact_match, got.first_token_match) == (hits.all(), hits[0])


def test_known_values() -> None:
    uniform = log_probabilities(torch.zeros(2, 4))
    skewed = log_probabilities(torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]]).log())
    got = score_answer(skewed, torch.tensor([0, 1]), uniform)
    assert got.token_nll == pytest.approx((-math.log(0.7), -math.log(0.1)))
    assert got.answer_nll_sum == pytest.approx(-math.log(0.07))
    assert got.answer_nll == pytest.approx(-math.log(0.07) / 2)
    assert got.kl == pytest.approx(0.25 * (math.log(0.25 / 0.7) + 3 * math.log(0.25 / 0.1)))
    assert (got.exact_match, got.first_token_match) == (False, True)
    assert score_answer(skewed, torch.tensor([0, 3]), uniform).exact_match


def test_kl_is_from_the_baseline_to_the_scheme() -> None:
    baseline = log_probabilities(torch.tensor([[0.9, 0.1]]).log())
    scheme = log_probabilities(torch.tensor([[0.5, 0.5]]).log())
    kl = score_answer(scheme, torch.tensor([0]), baseline).kl
    assert kl == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))


@pytest.mark.parametrize("noise", [1e-5, 1e-4, 1e-3])
def test_a_small_kl_is_right_and_never_negative(noise: float) -> None:
    """Float32 log-probabilities sum to 1 within 1e-7 only; that must not swamp a divergence of 1e-10."""
    for seed in range(5):
        base = logits(3, 5000, seed=seed, spread=1.0)
        other = base + noise * logits(3, 5000, seed=seed + 50, spread=1.0)
        p, q = (log_softmax(x.double().numpy(), axis=-1) for x in (base, other))
        right = (np.exp(p) * (p - q)).sum(-1).mean()
        got = score_answer(log_probabilities(other), torch.arange(3), log_probabilities(base)).kl
        assert got == pytest.approx(right, rel=0.02)


def test_the_baseline_against_itself_is_exactly_zero() -> None:
    log_probs = log_probabilities(logits(5, 1000))
    got = score_answer(log_probs, torch.arange(5), log_probs.clone())
    assert (got.kl, got.top1_flips) == (0.0, 0.0)


def test_without_a_baseline_nothing_is_compared() -> None:
    got = score_answer(log_probabilities(logits(3, 10)), torch.arange(3), None)
    assert (got.kl, got.top1_flips) == (None, None)


def test_flips_are_counted_per_position() -> None:
    base, other = torch.eye(4)[[0, 1, 2, 3]], torch.eye(4)[[0, 1, 3, 2]]
    got = score_answer(log_probabilities(other), torch.tensor([0, 1, 2, 3]), log_probabilities(base))
    assert got.top1_flips == 0.5
    assert (got.exact_match, got.first_token_match) == (False, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_only_float32_logits_are_scored(dtype: torch.dtype) -> None:
    with pytest.raises(MeasurementError, match=f"scored logits are {dtype}, not float32"):
        log_probabilities(torch.zeros(1, 4, dtype=dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    bad = torch.zeros(2, 4)
    bad[1, 2] = value
    with pytest.raises(MeasurementError, match="NaN or infinity"):
        log_probabilities(bad)


def test_large_logits_stay_finite() -> None:
    log_probs = log_probabilities(torch.tensor([[1e30, -1e30], [0.0, 200.0]]))
    got = score_answer(log_probs, torch.tensor([0, 0]), log_probs)
    assert got.token_nll == (0.0, 200.0)
    assert got.kl == 0.0


def test_a_score_is_plain_data() -> None:
    score = AnswerScore((1.0, 2.0, 4.5), False, True, 1, None, None)
    assert (score.answer_nll_sum, score.answer_nll) == (7.5, 2.5)
