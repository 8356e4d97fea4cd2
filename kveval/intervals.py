"""Confidence bounds and p-values of a mean loss over clustered samples: arrays in, numbers out.

Legend: N = samples, G = clusters. `loss_N[i]` is how much worse the scheme is on sample i.

Two families, because one formula does not serve both:

- Unbounded losses (NLL, KL): the mean with a cluster-robust standard error and Student's t with
  G - 1 degrees of freedom (Liang & Zeger 1986, small-sample factor G / (G - 1)). With one sample in
  every cluster this is the ordinary paired t interval.
- Losses in [-1, 1] (match scores, flips): Tango's score interval of a paired difference (Tango 1998,
  Statistics in Medicine 17:891), combined with the exact binomial bound wherever all change goes one
  way. The t interval is not used here: at a 5-point margin and 60 samples it lets 19 % of schemes
  pass that lose exactly the margin, this interval 5 % (tests/test_stats.py holds it to that).
  Clusters enter as an effective number of samples (Korn & Graubard 1998, Survey Methodology 24:193).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

__all__ = ["MIN_CHANGED_CLUSTERS", "LossDistribution", "bca_interval", "cluster_standard_error", "fit_loss"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MIN_CHANGED_CLUSTERS = 10
"""Below this many clusters with any change the design effect can't be estimated, so each cluster counts
as one observation (its samples might always change together)."""


@dataclass(frozen=True)
class LossDistribution:
    """What the samples say about the mean loss: bounds at any level, p-values at any margin.

    `kind`: "t", "score", "point" (every loss equal and unbounded: no spread to estimate) or "undefined"
    (fewer than two clusters). `se` is the cluster-robust standard error, in the loss's unit.
    `worse` and `better` are the sums of positive and of negative losses, rescaled to `n_effective`
    observations (score only). `df` is infinite where no variance was estimated.
    """

    kind: Literal["t", "score", "point", "undefined"]
    method: str
    value: float
    se: float
    df: float
    worse: float = 0.0
    better: float = 0.0
    n_effective: float = 0.0

    def p_noninferior(self, margin: float) -> float:
        """One-sided p-value of "the loss is `margin` or more"; small means it is below the margin."""
        if self.kind == "t":
            return _t_cdf((self.value - margin) / self.se, self.df)
        if self.kind == "score":
            return max(_t_cdf(self._score(margin), self.df), self._exact_tail(margin, upper=False))
        return 0.0 if self.kind == "point" and self.value <= margin else 1.0

    def p_inferior(self, margin: float) -> float:
        """One-sided p-value of "the loss is `margin` or less"; small means it is above the margin."""
        if self.kind == "t":
            return _t_cdf((margin - self.value) / self.se, self.df)
        if self.kind == "score":
            return max(_t_cdf(-self._score(margin), self.df), self._exact_tail(margin, upper=True))
        return 0.0 if self.kind == "point" and self.value > margin else 1.0

    def upper(self, tail: float) -> float | None:
        """The bound that the mean loss exceeds with probability at most `tail` (0 < tail < 0.5)."""
        if self.kind == "t":
            return self.value + float(stats.t.ppf(1.0 - tail, self.df)) * self.se
        if self.kind == "point":
            return self.value
        if self.kind == "undefined":
            return None
        top = 1.0 - 1e-12
        if self.value >= top or self.p_noninferior(top) > tail:
            return 1.0
        return float(optimize.brentq(lambda m: self.p_noninferior(m) - tail, self.value, top, xtol=1e-13))

    def lower(self, tail: float) -> float | None:
        """The bound that the mean loss stays under with probability at most `tail` (0 < tail < 0.5)."""
        if self.kind == "t":
            return self.value - float(stats.t.ppf(1.0 - tail, self.df)) * self.se
        if self.kind == "point":
            return self.value
        if self.kind == "undefined":
            return None
        bottom = -1.0 + 1e-12
        if self.value <= bottom or self.p_inferior(bottom) > tail:
            return -1.0
        return float(optimize.brentq(lambda m: self.p_inferior(m) - tail, bottom, self.value, xtol=1e-13))

    def _score(self, margin: float) -> float:
        """Tango's score statistic at a true loss of `margin` (his equations 6 to 10)."""
        n, gap = self.n_effective, self.worse - self.better
        a = 2.0 * n
        b = -(self.worse + self.better) + (2.0 * n - gap) * margin
        c = -self.better * margin * (1.0 - margin)
        root = math.sqrt(max(b * b - 4.0 * a * c, 0.0))
        p_better = (root - b) / (2.0 * a)  # the constrained maximum-likelihood share of "better" pairs
        variance = n * (2.0 * p_better + margin * (1.0 - margin))
        distance = gap - n * margin
        if variance <= 0.0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / math.sqrt(variance)

    def _exact_tail(self, margin: float, *, upper: bool) -> float:
        """Exact binomial p-value where all change goes one way, else 0 (the score alone decides).

        With nothing better, loss = share of worse pairs, so `margin` > 0 is a binomial proportion; with
        nothing worse and `margin` < 0 the same holds mirrored. Fractional counts use the beta form.
        """
        if self.better == 0.0 and margin > 0.0:
            count, share, tail_up = self.worse, margin, upper
        elif self.worse == 0.0 and margin < 0.0:
            count, share, tail_up = self.better, -margin, not upper
        else:
            return 0.0
        n = self.n_effective
        if tail_up:  # P(X >= count)
            return float(special.betainc(count, n - count + 1.0, share)) if count > 0.0 else 1.0
        return float(special.betaincc(count + 1.0, n - count, share)) if count < n else 1.0


def _t_cdf(x: float, df: float) -> float:
    """Student's t below `x`; the normal where `df` is infinite (scipy.special: a bound takes many calls)."""
    return float(special.stdtr(df, x) if math.isfinite(df) else special.ndtr(x))


def cluster_standard_error(values_N: FloatArray, clusters_N: IntArray) -> float:
    """Cluster-robust standard error of the mean, with the factor G / (G - 1). Needs two clusters or more."""
    sums_G = np.bincount(clusters_N, weights=values_N - values_N.mean())
    groups = len(sums_G)
    if groups < 2:
        raise ValueError("a standard error needs at least two clusters")
    return float(np.sqrt(groups / (groups - 1) * np.square(sums_G).sum()) / len(values_N))


def fit_loss(loss_N: FloatArray, clusters_N: IntArray, *, bounded: bool) -> LossDistribution:
    """The distribution of the mean of `loss_N`.

    Args:
        loss_N: losses, one per sample, at least one; within [-1, 1] when `bounded`.
        clusters_N: cluster codes 0..G-1, every code used.
        bounded: whether the metric is a fraction (score family) or unbounded (t family).
    """
    n, groups = len(loss_N), int(clusters_N.max()) + 1
    value = float(loss_N.mean())
    if groups < 2:
        reason = "one sample" if n == 1 else "one cluster"
        return LossDistribution("undefined", f"undefined ({reason})", value, math.nan, math.nan)
    same = bool((loss_N == loss_N[0]).all())
    se = 0.0 if same else cluster_standard_error(loss_N, clusters_N)
    if bounded:
        return _fit_score(loss_N, clusters_N, value, se)
    if se == 0.0:
        return LossDistribution("point", "no spread (every cluster agrees)", value, 0.0, math.inf)
    name = "paired t" if groups == n else "cluster-robust t"
    return LossDistribution("t", name, value, se, groups - 1.0)


def _fit_score(loss_N: FloatArray, clusters_N: IntArray, value: float, se: float) -> LossDistribution:
    n, groups = len(loss_N), int(clusters_N.max()) + 1
    whole = bool(np.isin(loss_N, (-1.0, 0.0, 1.0)).all())
    worse, better = float(loss_N[loss_N > 0].sum()), float(-loss_N[loss_N < 0].sum())
    changed = int((np.bincount(clusters_N, weights=np.abs(loss_N)) > 0).sum())
    if whole and groups == n:
        n_effective, df, name = float(n), math.inf, "score (Tango) with exact one-way bound"
    elif changed < MIN_CHANGED_CLUSTERS or se == 0.0:
        n_effective, df, name = float(groups), math.inf, "score (Tango), each cluster as one observation"
    else:
        independent = ((worse + better) / n - value**2) / (n - 1)  # variance of the mean if all were 0/1 and apart
        effect = se**2 / independent if independent > 0.0 else n / groups
        # Clusters that happen to look spread out are not evidence of more than N samples; fractions are.
        effect = max(effect, 1.0) if whole else effect
        n_effective, df, name = n / effect, groups - 1.0, "score (Tango) at the effective sample size"
    scale = n_effective / n
    return LossDistribution("score", name, value, se, df, worse * scale, better * scale, n_effective)


def bca_interval(
    loss_N: FloatArray, clusters_N: IntArray, *, confidence: float, resamples: int = 9999, seed: int = 0
) -> tuple[float, float] | None:
    """Two-sided BCa bootstrap interval of the mean, resampling whole clusters (scipy.stats.bootstrap).

    Returns None where it does not exist: fewer than two clusters, or no spread to resample.
    """
    sums_G = np.bincount(clusters_N, weights=loss_N)
    sizes_G = np.bincount(clusters_N).astype(np.float64)
    if len(sums_G) < 2 or bool(np.isclose(sums_G / sizes_G, loss_N.mean(), rtol=1e-12, atol=0.0).all()):
        return None

    def mean(sums: FloatArray, sizes: FloatArray, axis: int = -1) -> FloatArray:
        return np.asarray(sums.sum(axis=axis) / sizes.sum(axis=axis))

    result = stats.bootstrap(
        (sums_G, sizes_G), mean, paired=True, vectorized=True, n_resamples=resamples, batch=1000,
        confidence_level=confidence, method="BCa", rng=np.random.default_rng(seed),
    )  # fmt: skip
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    return None if math.isnan(low) or math.isnan(high) else (low, high)
