from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from stat_records import failed, frame, record, two_arms

from kveval.errors import StoreError, UnknownNameError
from kveval.intervals import bca_interval, cluster_standard_error, fit_loss
from kveval.records import Record
from kveval.stats import Comparison, compare, competence, holm, mean_estimate


def compared(rows: list[Record], metric: str = "answer_nll", **options: Any) -> Comparison:
    return compare(frame(rows), scheme="s", metric=metric, task="niah", context_length=2048, **options)


def binary(worse: int, better: int, n: int, **fields: Any) -> list[Record]:
    """`worse` pairs 1 -> 0, `better` pairs 0 -> 1, the rest 1 -> 1."""
    base = [1.0] * worse + [0.0] * better + [1.0] * (n - worse - better)
    scheme = [0.0] * worse + [1.0] * (n - worse)
    return two_arms("exact_match", base, scheme, **fields)


def fit_counts(worse: int, better: int, n: int) -> Any:
    return fit_loss(np.repeat([1.0, -1.0, 0.0], [worse, better, n - worse - better]), np.arange(n), bounded=True)


# Continuous


def test_single_sample_clusters_give_the_paired_t_interval_of_scipy() -> None:
    rng = np.random.default_rng(1)
    base, scheme = rng.normal(1.0, 0.3, 30), rng.normal(1.1, 0.3, 30)
    found = compared(two_arms("answer_nll", base.tolist(), scheme.tolist()), confidence=0.9)
    right = scipy_stats.ttest_rel(scheme, base)
    interval = right.confidence_interval(0.9)
    assert found.loss.value == pytest.approx((scheme - base).mean())
    assert (found.loss.low, found.loss.high) == pytest.approx((interval.low, interval.high))
    assert found.p_value == pytest.approx(right.pvalue)
    upper = scipy_stats.ttest_rel(scheme, base, alternative="less").confidence_interval(0.9).high
    lower = scipy_stats.ttest_rel(scheme, base, alternative="greater").confidence_interval(0.9).low
    assert (found.lower, found.upper) == pytest.approx((lower, upper))
    assert found.loss.method == "paired t"


def test_the_cluster_robust_error_is_that_of_the_cluster_means_when_clusters_are_equal() -> None:
    values = np.random.default_rng(2).normal(size=40)
    clusters = np.repeat(np.arange(10), 4)
    means = values.reshape(10, 4).mean(axis=1)
    assert cluster_standard_error(values, clusters) == pytest.approx(scipy_stats.sem(means))
    found = compared(two_arms("answer_nll", [0.0] * 40, values.tolist(), size=4))
    assert (found.loss.n, found.loss.n_clusters) == (40, 10)
    assert found.loss.method == "cluster-robust t"
    half = scipy_stats.t.ppf(0.975, 9) * scipy_stats.sem(means)
    assert found.loss.high == pytest.approx(values.mean() + half)
    assert "only 10 clusters" in " ".join(found.notes)


def test_copies_of_a_sample_in_one_cluster_add_no_information() -> None:
    values = np.random.default_rng(3).normal(size=50)
    once = compared(two_arms("answer_nll", [0.0] * 50, values.tolist()))
    copied = compared(two_arms("answer_nll", [0.0] * 500, np.repeat(values, 10).tolist(), size=10))
    assert copied.upper == pytest.approx(once.upper)


def test_a_metric_against_the_baseline_is_the_loss_itself() -> None:
    found = compared(two_arms("kl", [0.0, 0.0, 0.0], [0.1, 0.2, 0.6]), metric="kl")
    assert found.loss.value == pytest.approx(0.3)
    assert found.p_value is None


@pytest.mark.parametrize(("size", "n"), [(1, 1), (5, 5)])
def test_one_sample_or_one_cluster_is_undefined(n: int, size: int) -> None:
    for metric in ("answer_nll", "exact_match"):
        found = compared(two_arms(metric, [1.0] * n, [0.0] * n, size=size), metric=metric)
        assert not found.loss.defined
        assert (found.loss.low, found.loss.high, found.lower, found.upper) == (None,) * 4
        assert found.loss.value == (-1.0 if metric == "answer_nll" else 1.0)
        assert "undefined" in " ".join(found.notes)


def test_no_pairs_is_undefined_and_counts_what_is_missing() -> None:
    found = compare(
        frame(two_arms("answer_nll", [1.0] * 4, [1.0] * 4)),
        scheme="other", metric="answer_nll", task="niah", context_length=2048,
    )  # fmt: skip
    assert (found.n_pairs, found.n_missing_scheme, found.n_missing_baseline) == (0, 4, 0)
    assert (found.loss.value, found.loss.defined, found.exact_zero) == (None, False, False)


def test_equal_differences_say_that_there_is_no_spread() -> None:
    found = compared(two_arms("answer_nll", [0.5] * 50, [0.75] * 50))
    assert (found.loss.low, found.loss.high, found.lower, found.upper) == (0.25,) * 4
    assert "spread can't be estimated" in " ".join(found.notes)
    assert not found.exact_zero


def test_exact_zero_is_seen() -> None:
    assert compared(two_arms("answer_nll", [0.5] * 9, [0.5] * 9)).exact_zero
    assert not compared(two_arms("answer_nll", [0.5] * 9, [0.5] * 8 + [0.5000001])).exact_zero


def test_bca_resamples_clusters_and_names_itself() -> None:
    values = np.random.default_rng(4).lognormal(size=60)
    rows = two_arms("answer_nll", [0.0] * 60, values.tolist())
    found = compared(rows, bootstrap=True)
    right = scipy_stats.bootstrap(
        (values,), np.mean, method="BCa", n_resamples=9999, rng=np.random.default_rng(7)
    ).confidence_interval
    assert found.loss.method == "BCa bootstrap over clusters"
    assert (found.loss.low, found.loss.high) == pytest.approx((right.low, right.high), rel=0.02)
    assert found.upper == compared(rows).upper  # decisions do not depend on it
    wide = bca_interval(np.repeat(values, 4), np.repeat(np.arange(60), 4), confidence=0.95)
    assert wide == pytest.approx((right.low, right.high), rel=0.02)
    assert bca_interval(np.ones(8), np.arange(8), confidence=0.95) is None


# Binary


def test_mcnemar_is_exact_and_equal_accuracy_is_not_no_change() -> None:
    found = compared(binary(30, 30, 200), "exact_match")
    assert (found.loss.value, found.discordant_worse, found.discordant_better) == (0.0, 30, 30)
    assert not found.exact_zero
    assert "30 samples got worse and 30 got better" in " ".join(found.notes)
    one_sided = compared(binary(9, 1, 50), "exact_match")
    assert one_sided.p_value == pytest.approx(2 * (1 + 10) / 2**10)
    assert one_sided.p_method == "exact McNemar"


def test_many_samples_of_few_clusters_are_no_proof() -> None:
    """Five haystacks of 20 questions, each lost as a whole: five observations, not 100."""
    found = compared(binary(100, 0, 100, size=20), "exact_match")
    assert found.p_value == pytest.approx(2 * 0.5**5)
    assert found.p_method == "exact sign test over clusters"
    alone = compared(binary(5, 0, 5), "exact_match")
    assert found.lower == pytest.approx(alone.lower)


@pytest.mark.parametrize("n", [10, 50, 100])
def test_no_change_gives_the_rule_of_three(n: int) -> None:
    found = compared(binary(0, 0, n), "exact_match")
    assert found.upper == pytest.approx(1 - 0.05 ** (1 / n), abs=1e-9)
    assert found.lower == pytest.approx(-(1 - 0.05 ** (1 / n)), abs=1e-9)
    assert "rule of three" in " ".join(found.notes)
    clustered = compared(binary(0, 0, 4 * n, size=4), "exact_match")
    assert clustered.upper == pytest.approx(found.upper)


def test_the_two_sided_interval_is_tangos() -> None:
    """Bounds are where his score statistic, computed here by brute force, equals the normal quantile."""
    fit = fit_counts(9, 3, 60)

    def likelihood(p_better: np.ndarray, margin: float) -> np.ndarray:
        return 9 * np.log(p_better + margin) + 3 * np.log(p_better) + 48 * np.log(1 - 2 * p_better - margin)

    for margin, sign in ((fit.upper(0.025), -1), (fit.lower(0.025), 1)):
        grid = np.linspace(max(0.0, -margin), (1 - margin) / 2, 400_002)[1:-1]
        p_better = grid[np.argmax(likelihood(grid, margin))]
        score = (6 - 60 * margin) / math.sqrt(60 * (2 * p_better + margin * (1 - margin)))
        assert score == pytest.approx(sign * scipy_stats.norm.ppf(0.975), abs=1e-4)


def test_all_lost_is_a_proven_loss() -> None:
    found = compared(binary(50, 0, 50), "exact_match")
    assert found.upper == 1.0
    z2 = scipy_stats.norm.ppf(0.95) ** 2
    assert found.lower == pytest.approx((50 - z2) / (50 + z2))


@settings(max_examples=40)
@given(st.integers(2, 80), st.data())
def test_bounds_enclose_the_value_mirror_and_move_with_the_data(n: int, data: st.DataObject) -> None:
    worse = data.draw(st.integers(0, n))
    better = data.draw(st.integers(0, n - worse))
    fit, mirrored = fit_counts(worse, better, n), fit_counts(better, worse, n)
    upper, lower = fit.upper(0.05), fit.lower(0.05)
    assert -1 <= lower <= fit.value <= upper <= 1
    assert mirrored.upper(0.05) == pytest.approx(-lower, abs=1e-9)
    assert fit.upper(0.01) >= upper
    if 1e-9 < upper < 1 - 1e-9:
        assert fit.p_noninferior(upper) == pytest.approx(0.05, abs=1e-6)
    if worse + better < n:
        assert fit_counts(worse + 1, better, n).upper(0.05) >= upper - 1e-9


def false_rates(n: int, margin: float, discordance: float) -> tuple[float, float]:
    """Exact chance, over all tables, that a loss of exactly `margin` is found below it, and above it."""
    p_worse, p_better = (discordance + margin) / 2, (discordance - margin) / 2
    passed = failed_ = 0.0
    for worse in range(n + 1):
        for better in range(n + 1 - worse):
            chance = scipy_stats.multinomial.pmf(
                [worse, better, n - worse - better], n, [p_worse, p_better, 1 - discordance]
            )
            if chance > 1e-6:
                fit = fit_counts(worse, better, n)
                passed += chance * (fit.p_noninferior(margin) <= 0.05)
                failed_ += chance * (fit.p_inferior(margin) <= 0.05)
    return passed, failed_


@pytest.mark.parametrize(
    ("n", "margin", "discordance"),
    [(60, 0.05, 0.05), (52, 0.05, 0.05), (60, 0.05, 0.06), (40, 0.1, 0.2), (30, 0.1, 0.1)],
)
def test_a_loss_of_exactly_the_margin_rarely_passes(n: int, margin: float, discordance: float) -> None:
    """The plain t interval passes 19 % of the first case; the score's own discreteness may reach 5.5 %."""
    passed, failed_ = false_rates(n, margin, discordance)
    assert passed <= 0.055
    assert failed_ <= 0.075  # the same bound from below; a FAIL also needs Holm


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_clustered_flips_keep_their_level(shared: float) -> None:
    """60 haystacks of 4 questions. `shared` is the chance that a haystack's questions change together."""
    rng = np.random.default_rng(11)
    margin, runs, passed = 0.1, 400, 0
    clusters = np.repeat(np.arange(60), 4)
    for _ in range(runs):
        together = np.repeat(rng.random(60) < shared, 4)
        draws = np.where(together, np.repeat(rng.random(60), 4), rng.random(240))
        loss = np.where(draws < 0.13, 1.0, np.where(draws > 0.97, -1.0, 0.0))  # true mean 0.10
        passed += fit_loss(loss, clusters, bounded=True).p_noninferior(margin) <= 0.05
    assert passed / runs <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / runs)


def test_fractional_flips_use_their_small_spread() -> None:
    rng = np.random.default_rng(12)
    flips = rng.binomial(64, 0.1, 100) / 64
    fit = fit_loss(flips, np.arange(100), bounded=True)
    width = fit.upper(0.05) - fit.value
    assert width == pytest.approx(1.66 * scipy_stats.sem(flips), rel=0.1)


# Missing, damaged


def test_missing_samples_are_counted_and_the_worst_case_is_given() -> None:
    rows = two_arms("exact_match", [1.0] * 18 + [None, None], [None] + [1.0] * 19)
    found = compared(rows, "exact_match")
    assert (found.n_pairs, found.n_missing_scheme, found.n_missing_baseline) == (17, 1, 2)
    assert found.loss.value == 0.0
    # The scheme's missing sample is lost (1 - 0); the baseline's two, held by the scheme, were right (1 - 1).
    assert found.worst_case is not None
    assert found.worst_case.value == pytest.approx(1 / 20)
    assert found.worst_case.n == 20
    assert "of 20 samples, 1 are missing in the scheme and 2 in the baseline" in found.notes[0]
    assert compared(two_arms("exact_match", [1.0] * 4, [1.0] * 4), "exact_match").worst_case is None


def test_an_absent_row_and_a_nan_are_missing_too() -> None:
    rows = two_arms("answer_nll", [0.5] * 10, [0.6] * 9)
    assert compared(rows).n_missing_scheme == 1
    rows = two_arms("answer_nll", [0.5] * 10, [0.6] * 9 + [math.nan])
    assert (compared(rows).n_missing_scheme, compared(rows).n_pairs) == (1, 9)


def test_a_sample_twice_or_in_two_clusters_is_an_error() -> None:
    rows = two_arms("answer_nll", [0.5] * 4, [0.6] * 4)
    with pytest.raises(StoreError, match="occurs more than once"):
        compared([*rows, rows[-1]])
    with pytest.raises(StoreError, match="different clusters"):
        compared([*rows[:-1], record("s", 3, cluster="elsewhere")])
    with pytest.raises(StoreError, match="lack the column"):
        compare(pd.DataFrame(), scheme="s", metric="kl", task="t", context_length=1)
    with pytest.raises(UnknownNameError, match="exact_match"):
        compared(rows, "exact_mach")


def test_pairs_are_matched_by_id_and_cells_kept_apart() -> None:
    other = two_arms("answer_nll", [0.0] * 6, [9.0] * 6, length=512)
    here = two_arms("answer_nll", [1.0, 2.0, 3.0], [1.1, 2.1, 3.4])
    assert compared([*other, *here]).loss.value == pytest.approx(0.2)


# Means and competence


def mean_of(rows: list[Record], metric: str) -> Any:
    return mean_estimate(frame(rows), scheme="s", metric=metric, task="niah", context_length=2048)


def test_means_of_binary_scores_are_exact() -> None:
    found = mean_of(binary(3, 0, 20), "exact_match")
    right = scipy_stats.binomtest(17, 20).proportion_ci(0.95)
    assert found.value == pytest.approx(17 / 20)
    assert (found.low, found.high) == pytest.approx((right.low, right.high))
    whole = mean_of(binary(0, 0, 20), "exact_match")
    assert (whole.high, whole.low) == (1.0, pytest.approx(0.025 ** (1 / 20)))


def test_means_of_clusters_and_of_continuous_metrics() -> None:
    found = mean_of(binary(2, 0, 40, size=2), "exact_match")
    right = scipy_stats.binomtest(19, 20).proportion_ci(0.95)
    assert (found.n, found.n_clusters) == (40, 20)
    assert (found.low, found.high) == pytest.approx((right.low, right.high))
    values = np.random.default_rng(6).normal(2.0, 0.1, 25)
    nll = mean_of(two_arms("answer_nll", [0.0] * 25, values.tolist()), "answer_nll")
    interval = scipy_stats.ttest_1samp(values, 0.0).confidence_interval()
    assert (nll.low, nll.high) == pytest.approx((interval.low, interval.high))
    mixed = np.random.default_rng(7).random(80)
    flips = mean_of(two_arms("top1_flips", [0.0] * 80, mixed.tolist(), size=2), "top1_flips")
    assert flips.method == "cluster-robust t"
    assert 0.0 < flips.low < mixed.mean() < flips.high < 1.0


def test_means_of_nothing_and_of_one_are_undefined() -> None:
    assert mean_of([record("bf16", 0)], "answer_nll").value is None
    one = mean_of([record("s", 0)], "answer_nll")
    assert (one.value, one.low, one.high, one.defined) == (0.5, None, None, False)
    assert mean_of([failed(record("s", 0))], "answer_nll").n == 0


@pytest.mark.parametrize(
    ("values", "room"), [([0.0] * 5, "floor"), ([1.0] * 5, "ceiling"), ([0.0, 1.0, 1.0], "ok"), ([], "ok")]
)
def test_competence_of_binary_scores(values: list[float], room: str) -> None:
    rows = two_arms("exact_match", values, [1.0])
    assert competence(frame(rows), metric="exact_match", task="niah", context_length=2048) == room


def test_competence_of_likelihoods_is_against_a_uniform_guess() -> None:
    rows = frame(two_arms("answer_nll", [6.0] * 5, [0.1] * 5))
    cell = {"task": "niah", "context_length": 2048}
    assert competence(rows, metric="answer_nll", **cell) == "ok"
    assert competence(rows, metric="kl", vocab_size=256, **cell) == "floor"  # ln 256 = 5.55
    assert competence(rows, metric="answer_nll", vocab_size=512, **cell) == "ok"  # ln 512 = 6.24


# Holm


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([]) == ()
    assert holm([0.7, 0.9]) == (1.0, 1.0)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_helps_and_keeps_the_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(a >= p for a, p in zip(adjusted, p_values, strict=True))
    assert [adjusted[i] for i in np.argsort(p_values)] == sorted(adjusted)
    assert min(adjusted) == pytest.approx(min(1.0, len(p_values) * min(p_values)))
