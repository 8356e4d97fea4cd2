from __future__ import annotations

from typing import Any

import pytest

from kveval.config import GateEndpoint
from kveval.errors import UnknownNameError
from kveval.power import ASSUMED_SD, advice, assess, detectable_margin, needed_pairs, zero_event_pairs
from kveval.records import METRICS


def endpoint(**fields: Any) -> GateEndpoint:
    return GateEndpoint(**{"metric": "exact_match", "task": "niah", "context_length": 2048, "margin": 0.02, **fields})


@pytest.mark.parametrize(
    ("discordance", "one_point", "two_points", "five_points"),
    [(0.02, 1237, 310, 50), (0.06, 3710, 928, 149), (0.12, 7420, 1855, 297)],
)
def test_the_planning_table(discordance: float, one_point: int, two_points: int, five_points: int) -> None:
    found = [needed_pairs(margin, discordance) for margin in (0.01, 0.02, 0.05)]
    assert found == [one_point, two_points, five_points]


def test_the_detectable_margin_is_the_inverse() -> None:
    assert detectable_margin(928, 0.06) == pytest.approx(0.02, rel=1e-3)
    assert detectable_margin(50, 0.06) == pytest.approx(0.0861, abs=1e-4)


def test_not_one_change_still_needs_samples() -> None:
    assert [zero_event_pairs(m) for m in (0.01, 0.02, 0.05)] == [299, 149, 59]
    found = assess(endpoint(margin=0.05), 58, 58, discordance=0.0)
    assert (found.needed, found.decidable) == (59, False)
    assert assess(endpoint(margin=0.05), 59, 59, discordance=0.0).decidable


def test_advice_names_what_is_needed() -> None:
    text = advice(endpoint(), 50, 50)
    where = "exact_match on niah at 2,048 tokens: "
    assert text.startswith(f"{where}n=50 cannot decide margin 0.02 (needs 928 pairs at 6 % discordance)")
    assert "about 0.086" in text
    assert advice(endpoint(), 928, 928) == (f"{where}n=928 can decide margin 0.02 (needs 928 pairs at 6 % discordance)")
    nll = assess(endpoint(metric="answer_nll", margin=0.1), 16, 16, sd=0.2).text
    assert nll == (
        "n=16 cannot decide margin 0.1 (needs 27 pairs at a standard deviation of 0.2 nats/token); "
        "the smallest margin it can decide is about 0.13"
    )


def test_scores_of_text_can_be_planned_before_any_is_known() -> None:
    assert {m.name for m in METRICS.values() if m.family == "continuous"} == set(ASSUMED_SD)
    found = assess(endpoint(metric="task_score", margin=0.05), 64, 64)
    assert not found.decidable
    assert found.text.startswith("n=64 cannot decide margin 0.05 (needs 225 pairs at a standard deviation of 0.3")
    assert found.text.endswith("answer_nll on the same cell usually needs fewer")
    assert assess(endpoint(metric="task_score", margin=0.05), 225, 225).decidable


def test_clusters_count() -> None:
    apart = assess(endpoint(metric="answer_nll", margin=0.05), 110, 110, sd=0.2)
    together = assess(endpoint(metric="answer_nll", margin=0.05), 100, 20, sd=0.2, correlation=0.25)
    assert (apart.needed, apart.decidable) == (101, True)  # t with 100 degrees of freedom, not 99 by the normal
    assert together.n_effective == pytest.approx(100 / 2)  # design effect 1 + 4 x 0.25
    assert (together.needed, together.decidable) == (206, False)
    binary = assess(endpoint(margin=0.05), 200, 50, discordance=0.0)
    assert binary.needed == 59 * 4
    assert binary.detectable == pytest.approx(1 - 0.05 ** (1 / 50))


def test_one_cluster_decides_nothing() -> None:
    found = assess(endpoint(metric="answer_nll", margin=10.0), 64, 1)
    assert not found.decidable
    assert "one cluster carries no information" in found.text


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="margin"):
        needed_pairs(0.0, 0.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        zero_event_pairs(1.0)
    with pytest.raises(ValueError, match="above 0"):
        detectable_margin(0, 0.1)
    with pytest.raises(ValueError, match="clusters"):
        assess(endpoint(), 4, 5)
    with pytest.raises(UnknownNameError, match="exact_match"):
        assess(endpoint(metric="exact"), 5, 5)
