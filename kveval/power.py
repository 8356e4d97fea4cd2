"""How many samples a margin needs, before anything is run.

Normal approximation for a one-sided test when the true loss is 0:
n = (z_confidence + z_power)^2 * variance / margin^2, with variance = the share of discordant pairs for a
binary score (Chow, Shao & Wang, Sample Size Calculations in Clinical Research, chapter 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from scipy import stats

from kveval.stats import get_metric

__all__ = [
    "ASSUMED_CORRELATION",
    "ASSUMED_DISCORDANCE",
    "ASSUMED_SD",
    "PowerAssessment",
    "advice",
    "assess",
    "detectable_margin",
    "needed_pairs",
    "zero_event_pairs",
]

ASSUMED_DISCORDANCE = 0.06
"""Share of pairs that change either way; the middle row of the planning table."""

ASSUMED_SD: Mapping[str, float] = {
    "answer_nll": 0.10,
    "kl": 0.05,
    "top1_flips": 0.10,
    "accepted_prefix": 0.30,
    "task_score": 0.30,
    "text_f1": 0.30,
    "edit_similarity": 0.30,
}
"""Standard deviation of one paired difference, in the metric's unit. Planning figures only: pass what a
pilot run showed (`Comparison.distribution.se * sqrt(n)`) where there is one.

That of a score of whole answers, from 0 to 1, is as if 9 % of them changed from wrong to right or back: partly right
answers change more often, and by less."""

ASSUMED_CORRELATION = 0.2
"""Correlation between the losses of one cluster's samples: design effect 1 + (m - 1) * correlation."""


class Endpoint(Protocol):
    """The part of a declared gate endpoint that planning needs (`kveval.config.GateEndpoint` fits)."""

    @property
    def metric(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def context_length(self) -> int: ...
    @property
    def margin(self) -> float: ...


@dataclass(frozen=True)
class PowerAssessment:
    """Whether an endpoint can be decided with the samples planned.

    `n_effective` is the planned samples divided by the design effect; `needed` and `detectable` (the
    smallest margin that can be decided) are for the same clusters and the assumed spread.
    """

    n_samples: int
    n_clusters: int
    n_effective: float
    needed: int
    detectable: float
    decidable: bool
    text: str


def needed_pairs(margin: float, variance: float, *, confidence: float = 0.95, power: float = 0.8) -> int:
    """Pairs needed to show a loss below `margin` when the true loss is 0.

    Args:
        margin: largest acceptable loss, in the metric's unit, above 0.
        variance: of one paired difference; for a binary score the share of discordant pairs.
        confidence: of the one-sided bound.
        power: chance of deciding.
    """
    if margin <= 0.0 or variance < 0.0:
        raise ValueError("the margin must be above 0 and the variance not below 0")
    return max(2, math.ceil(_z_sum(confidence, power) ** 2 * variance / margin**2))


def detectable_margin(n: float, variance: float, *, confidence: float = 0.95, power: float = 0.8) -> float:
    """The smallest margin that `n` independent pairs can decide when the true loss is 0."""
    if n <= 0:
        raise ValueError("n must be above 0")
    return _z_sum(confidence, power) * math.sqrt(variance / n)


def zero_event_pairs(margin: float, *, confidence: float = 0.95) -> int:
    """Independent pairs needed to put the bound below `margin` when not one pair changes (rule of three)."""
    if not 0.0 < margin < 1.0:
        raise ValueError("the margin of a fraction must be between 0 and 1")
    return math.ceil(math.log(1.0 - confidence) / math.log1p(-margin))


def assess(
    endpoint: Endpoint,
    n_samples: int,
    n_clusters: int,
    *,
    discordance: float = ASSUMED_DISCORDANCE,
    sd: float | None = None,
    correlation: float = ASSUMED_CORRELATION,
    confidence: float = 0.95,
    power: float = 0.8,
) -> PowerAssessment:
    """Judge one declared endpoint against the samples planned.

    Args:
        endpoint: metric, task, context_length, margin.
        n_samples: planned per cell.
        n_clusters: haystacks or documents that they share out between them.
        discordance: assumed share of changed pairs (binary metrics).
        sd: assumed standard deviation of one difference (other metrics); default `ASSUMED_SD`.
        correlation: assumed, between samples of one cluster.
        confidence: of the one-sided bound.
        power: chance of deciding.
    """
    metric = get_metric(endpoint.metric, where="gate endpoint")
    if not 1 <= n_clusters <= n_samples:
        raise ValueError("clusters must be between 1 and the number of samples")
    effect = 1.0 + (n_samples / n_clusters - 1.0) * correlation
    if metric.family == "binary":
        variance, spread = discordance, f"{100 * discordance:g} % discordance"
        least = zero_event_pairs(endpoint.margin, confidence=confidence)
        # Until many clusters change, a cluster counts as one observation (kveval.intervals).
        least_samples = math.ceil(least * n_samples / n_clusters)
        floor = 1.0 - (1.0 - confidence) ** (1.0 / n_clusters)
    else:
        sd = ASSUMED_SD[metric.name] if sd is None else sd
        variance, spread = sd**2, f"a standard deviation of {sd:g} {metric.unit}"
        least_samples, floor = 2, 0.0
    pairs = needed_pairs(endpoint.margin, variance, confidence=confidence, power=power)
    needed = max(math.ceil(pairs * effect), least_samples)
    n_effective = n_samples / effect
    detectable = max(detectable_margin(n_effective, variance, confidence=confidence, power=power), floor)
    if metric.family != "binary" and n_clusters >= 2:
        # The gate's own bound is Student's t over clusters; with few of them it is far wider than the normal's.
        detectable *= _t_sum(confidence, power, n_clusters) / _z_sum(confidence, power)
        sd_effective = math.sqrt(variance * effect)
        while _t_sum(confidence, power, max(2, needed * n_clusters // n_samples)) * sd_effective > (
            endpoint.margin * math.sqrt(needed)
        ):
            needed += 1
    decidable = n_samples >= needed and n_clusters >= 2
    text = _text(endpoint, n_samples, n_clusters, needed, detectable, decidable, spread)
    return PowerAssessment(n_samples, n_clusters, n_effective, needed, detectable, decidable, text)


def advice(
    endpoint: Endpoint,
    n_samples: int,
    n_clusters: int,
    *,
    discordance: float = ASSUMED_DISCORDANCE,
    sd: float | None = None,
    confidence: float = 0.95,
) -> str:
    """One line: the endpoint, then such as "n=50 cannot decide margin 0.02 (needs 928 pairs at ...)"."""
    text = assess(endpoint, n_samples, n_clusters, discordance=discordance, sd=sd, confidence=confidence).text
    return f"{endpoint.metric} on {endpoint.task} at {endpoint.context_length:,} tokens: {text}"


def _t_sum(confidence: float, power: float, clusters: int) -> float:
    return float(stats.t.ppf(confidence, clusters - 1) + stats.t.ppf(power, clusters - 1))


def _z_sum(confidence: float, power: float) -> float:
    return float(stats.norm.ppf(confidence) + stats.norm.ppf(power))


def _text(
    endpoint: Endpoint, n: int, clusters: int, needed: int, detectable: float, decidable: bool, spread: str
) -> str:
    inside = f" in {clusters} clusters" if clusters != n else ""
    if decidable:
        return f"n={n}{inside} can decide margin {endpoint.margin:g} (needs {needed:,} pairs at {spread})"
    hint = (
        f"n={n}{inside} cannot decide margin {endpoint.margin:g} (needs {needed:,} pairs at {spread}); "
        f"the smallest margin it can decide is about {detectable:.2g}"
    )
    if clusters < 2:
        return f"{hint}; one cluster carries no information about spread, so no margin can be decided"
    if get_metric(endpoint.metric).of != "tokens":
        return f"{hint}; answer_nll on the same cell usually needs fewer"
    return hint
