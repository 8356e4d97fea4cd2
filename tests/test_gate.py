from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from stat_records import AA, BASELINE, CRUSH, failed, frame, record, sweep

from kveval.config import GateConfig, GateEndpoint
from kveval.endpoints import format_against, judge_endpoints
from kveval.errors import ConfigError, ExitCode, StoreError
from kveval.gate import Verdict, check_declared, decide, gate_digest
from kveval.records import Record


def end(
    metric: str = "answer_nll", task: str = "niah", context_length: int = 2048, margin: float = 0.1
) -> GateEndpoint:
    return GateEndpoint(metric=metric, task=task, context_length=context_length, margin=margin)


def gate(*endpoints: GateEndpoint, **fields: Any) -> GateConfig:
    return GateConfig(**{"scheme": "s", "endpoints": endpoints or (end(), end("exact_match", margin=0.05)), **fields})


def verdict(rows: list[Record], *endpoints: GateEndpoint, **options: Any) -> Verdict:
    return decide(frame(rows), gate(*endpoints), **options)


def as_scheme(rows: list[Record], control: str) -> list[Record]:
    """The sweep with the scheme's rows replaced by copies of a control's: the control, gated as a scheme."""
    copies = [replace(r, scheme="s", role="scheme", cell_id="copy") for r in rows if r.scheme == control]
    return [r for r in rows if r.scheme != "s"] + copies


def test_a_good_scheme_passes() -> None:
    found = verdict(sweep(loss=0.01))
    assert (found.status, found.exit_code) == ("PASS", ExitCode.PASS)
    assert [e.status for e in found.endpoints] == ["PASS", "PASS"]
    assert found.first_line == "PASS: s is within the declared margins (all 2 endpoints hold, 95% sure)."
    assert "Not tested beyond 2,048 tokens." in found.notes
    assert found.blocking == ()


def test_crush_fails_as_a_scheme() -> None:
    found = verdict(as_scheme(sweep(), CRUSH))
    assert (found.status, found.exit_code) == ("FAIL", ExitCode.FAIL)
    assert {e.status for e in found.endpoints} == {"FAIL"}
    assert found.first_line.startswith("FAIL: s, answer_nll on niah at 2,048 tokens: the loss is at least 4 nats/token")


def test_one_dead_cell_among_fifty_fails() -> None:
    rows, ends = [], []
    for task in (f"t{i:02}" for i in range(50)):
        dead = task == "t37"
        rows += sweep(n=30, loss=2.0 if dead else 0.0, flips=99 if dead else 0, task=task, seed=int(task[1:]))
        ends.append(end("exact_match", task, margin=0.1))
    found = verdict(rows, *ends)
    assert (found.status, [e.task for e in found.endpoints if e.status == "FAIL"]) == ("FAIL", ["t37"])
    assert sum(e.status == "PASS" for e in found.endpoints) == 49


def test_equal_accuracy_with_thirty_flips_each_way_is_not_called_no_change() -> None:
    rows = sweep(n=200)
    base = {r.sample_id: float(r.sample_index % 2) for r in rows}
    swapped = {f"niah-2048-{i}": float(1 - i % 2) for i in range(60)}
    rows = [
        replace(r, exact_match=base[r.sample_id]) if r.scheme in (BASELINE, AA)
        else replace(r, exact_match=swapped.get(r.sample_id, base[r.sample_id])) if r.scheme == "s" else r
        for r in rows
    ]  # fmt: skip
    found = verdict(rows, end("exact_match", margin=0.05))
    (only,) = found.endpoints
    assert only.comparison is not None
    assert (only.comparison.loss.value, only.comparison.discordant_worse) == (0.0, 30)
    assert found.status == "INCONCLUSIVE"
    assert any("30 samples got worse and 30 got better" in note for note in found.notes)


def test_too_few_samples_are_inconclusive_and_say_how_many_are_needed() -> None:
    rows = sweep(n=50, flips=1)
    found = verdict(rows, end("exact_match", margin=0.05), end())
    worst = found.endpoints[0]
    assert (found.status, found.exit_code, worst.status) == ("INCONCLUSIVE", 11, "INCONCLUSIVE")
    # One discordant pair: variance 49/2500 x 50/49 per pair, 0.03 left of the margin.
    z = 1.6448536 + 0.8416212
    assert worst.samples_needed == math.ceil(z**2 * 0.02 / 0.03**2)
    assert f"About {worst.samples_needed} samples would decide (now 50" in worst.message


def test_inconclusive_passes_only_where_that_was_declared() -> None:
    found = decide(frame(sweep(n=30)), gate(end("exact_match", margin=0.01), end(), on_inconclusive="pass"))
    assert (found.status, found.exit_code) == ("INCONCLUSIVE", 0)
    assert "so the exit code is 0" in found.first_line


def test_nothing_is_rounded_before_it_is_compared() -> None:
    rows = sweep(loss=0.05)
    found = verdict(rows, end())
    assert found.endpoints[0].comparison is not None
    upper = found.endpoints[0].comparison.upper
    assert upper is not None
    assert verdict(rows, end(margin=upper)).status == "PASS"
    missed = verdict(rows, end(margin=math.nextafter(upper, 0.0)))
    assert missed.status == "INCONCLUSIVE"
    assert format_against(0.0500004, 0.05) == "0.0500004"
    assert format_against(0.25, 0.05) == "0.25"


@pytest.mark.parametrize("arm", [BASELINE, "s", AA, CRUSH])
def test_an_errored_or_missing_sample_is_incomplete_in_any_arm(arm: str) -> None:
    rows = sweep()
    errored = [failed(r) if r.scheme == arm and r.sample_index == 5 else r for r in rows]
    absent = [r for r in rows if r.scheme != arm or r.sample_index != 5]
    for case in (errored, absent):
        found = verdict(case)
        assert (found.status, found.exit_code) == ("INCOMPLETE", ExitCode.INCOMPLETE)
    assert verdict([r for r in rows if r.scheme != arm]).status == "INCOMPLETE"


def test_missing_samples_show_the_worst_case() -> None:
    rows = [failed(r) if r.scheme == "s" and r.sample_index < 12 else r for r in sweep()]
    worst = verdict(rows).endpoints[1]
    assert worst.message.startswith("12 of 120 samples are missing or errored in s or the baseline")
    assert "loss 0 on complete pairs, 0.09167 in the worst case" in worst.message  # 11 of 12 were right before


def test_planned_samples_that_no_arm_has_are_missed() -> None:
    rows = sweep(n=120)
    assert verdict(rows, expected={("niah", 2048): 120}).status == "PASS"
    assert verdict(rows, expected={("niah", 2048): 128}).status == "INCOMPLETE"
    assert verdict(rows, expected={}).status == "INCOMPLETE"
    assert verdict(rows, end(context_length=131072)).status == "INCOMPLETE"
    assert verdict([]).status == "INCOMPLETE"


def test_an_unfinished_run_is_incomplete() -> None:
    table = frame(sweep())
    table.attrs["complete"] = False
    found = decide(table, gate())
    assert found.status == "INCOMPLETE"
    assert "run finished" in found.first_line


def test_a_repeated_sample_is_an_error() -> None:
    rows = sweep()
    with pytest.raises(StoreError, match="more than once"):
        verdict([*rows, rows[2]])


def test_a_failed_control_makes_the_verdict_invalid_whatever_the_endpoints_say() -> None:
    dirty = verdict(sweep(aa=1.5, loss=3.0))
    assert (dirty.status, dirty.exit_code) == ("INVALID", ExitCode.INVALID)
    assert "A/A clean" in dirty.first_line
    blind = verdict(sweep(crush=0.0), end())
    assert blind.status == "INVALID"
    assert "no power to see damage" in blind.first_line
    assert [e.status for e in blind.endpoints] == ["PASS"]
    rows = sweep()
    levels = {r.sample_id: r.answer_nll for r in rows if r.scheme == BASELINE}
    unread = [replace(r, answer_nll=levels[r.sample_id], kl=0.0) if r.scheme == "s" else r for r in rows]
    assert "exact zero" in verdict(unread).first_line
    assert verdict(unread).status == "INVALID"
    both = [failed(r) if r.scheme == "s" and r.sample_index == 1 else r for r in sweep(aa=1.5)]
    assert verdict(both).status == "INVALID"  # precedence over INCOMPLETE


def test_a_fault_of_another_scheme_does_not_void_the_gate() -> None:
    other = [replace(r, scheme="other", stored_bytes=1) for r in sweep() if r.scheme == "s"]
    found = verdict([*sweep(), *other])
    assert found.status == "PASS"
    assert any("other: 120 records are wrong" in note for note in found.notes)


def test_one_cluster_is_never_a_pass() -> None:
    rows = [replace(r, cluster="one haystack") for r in sweep(loss=-1.0)]
    found = verdict(rows, end())
    assert found.endpoints[0].status == "INCONCLUSIVE"
    assert "one cluster" in found.endpoints[0].message
    assert found.status == "INVALID"  # nor can crush be caught


def test_a_baseline_at_its_floor_decides_nothing() -> None:
    rows = [replace(r, exact_match=0.0) for r in sweep()]
    found = verdict(rows)
    assert [e.status for e in found.endpoints] == ["PASS", "NON_DISCRIMINATIVE"]
    assert (found.status, found.exit_code) == ("INCONCLUSIVE", 11)


def test_a_baseline_at_its_ceiling_can_fail_but_not_pass() -> None:
    def perfect(rows: list[Record]) -> list[Record]:
        return [replace(r, exact_match=1.0) if r.scheme in (BASELINE, AA) else r for r in rows]

    kept = [replace(r, exact_match=1.0) if r.scheme == "s" else r for r in perfect(sweep())]
    found = verdict(kept)
    assert (found.status, found.endpoints[1].status) == ("INCONCLUSIVE", "NON_DISCRIMINATIVE")
    assert "could still be up to 0.02466" in found.endpoints[1].message or "up to 0.02466" in found.endpoints[1].message
    lost = verdict(as_scheme(perfect(sweep()), CRUSH))
    assert (lost.status, lost.endpoints[1].status) == ("FAIL", "FAIL")


def test_a_minimum_gain_is_part_of_the_gate() -> None:
    wanted = gate(end(), min_sessions_gain=1.5)
    table = frame(sweep())
    assert decide(table, wanted, sessions_gain={2048: 1.5}).status == "PASS"
    poor = decide(table, wanted, sessions_gain={2048: 1.4999999})
    assert (poor.status, poor.endpoints[-1].metric) == ("FAIL", "sessions_gain")
    assert "only 1.4999999 times the sessions, 1.5 demanded" in poor.first_line
    assert decide(table, wanted).status == "INCOMPLETE"
    assert decide(table, wanted, sessions_gain={512: 9.0}).status == "INCOMPLETE"


def test_a_fail_survives_holm_or_is_inconclusive() -> None:
    """The same borderline loss fails alone; among twenty declared endpoints it isn't proof."""
    rows = sweep(task="t0", loss=0.104, seed=2)
    alone = verdict(rows, end(task="t0"))
    p = alone.endpoints[0].p_inferior
    assert p is not None
    assert 0.0025 < p < 0.05
    assert alone.status == "FAIL"
    for i in range(1, 20):
        rows += sweep(n=20, task=f"t{i}", seed=i)
    found = verdict(rows, *(end(task=f"t{i}") for i in range(20)))
    first = found.endpoints[0]
    assert first.p_inferior_holm == pytest.approx(20 * p)
    assert (first.status, found.status) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert "Holm" in first.message


def test_a_gate_with_an_endpoint_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 times"):
        verdict(sweep(), end(), end(margin=0.2))


def test_the_digest_pins_the_gate() -> None:
    declared = gate()
    assert gate_digest(declared) == gate_digest(gate())
    assert gate_digest(declared) != gate_digest(gate(end(margin=0.11), end("exact_match", margin=0.05)))
    assert check_declared(declared, gate_digest(declared), allow_post_hoc=False) is False
    assert check_declared(declared, None, allow_post_hoc=True) is True
    for digest in (None, "0" * 16):
        with pytest.raises(ConfigError, match="before the run"):
            check_declared(declared, digest, allow_post_hoc=False)
    marked = verdict(sweep(), post_hoc=True)
    assert marked.post_hoc
    assert marked.first_line.startswith("PASS (post hoc")


def false_pass_rate(metric: str, margin: float, *, runs: int, size: int, seed: int) -> float:
    """Share of runs in which a scheme whose true loss is exactly the margin passes. 60 clusters of `size`."""
    rng, passed, n = np.random.default_rng(seed), 0, 60 * size
    declared = gate(end(metric, margin=margin))
    hits = np.array([float(i % 10 != 9) for i in range(n)])
    rows = [
        record(scheme, i, cluster=f"c{i // size}", exact_match=hits[i]) for scheme in (BASELINE, "s") for i in range(n)
    ]
    table = pd.DataFrame([vars(row) for row in rows])
    for _ in range(runs):
        if metric == "answer_nll":
            shared = np.repeat(rng.normal(0.0, 0.2, 60), size)
            table.loc[n:, metric] = 0.5 + margin + shared + rng.normal(0.0, 0.2, n)
        else:
            table.loc[n:, metric] = np.where(rng.random(n) < margin / 0.9, 0.0, hits)
        (only,) = judge_endpoints(table, declared, scheme="s")
        passed += only.status == "PASS"
    return passed / runs


@pytest.mark.parametrize(
    ("metric", "margin", "size"), [("answer_nll", 0.1, 1), ("answer_nll", 0.1, 3), ("exact_match", 0.1, 1)]
)
def test_a_scheme_at_the_margin_passes_at_most_five_percent_of_the_time(metric: str, margin: float, size: int) -> None:
    runs = 150
    rate = false_pass_rate(metric, margin, runs=runs, size=size, seed=8)
    assert rate <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / runs)


def keyed(rows: list[Record], *without: int) -> list[Record]:
    """The sweep as of a task that scores key tokens alone: the samples of these indices have none."""
    empty = {"key_tokens": 0, "answer_nll": None, "kl": None, "top1_flips": None}
    return [replace(r, **(empty if r.sample_index in without else {"key_tokens": 9})) for r in rows]


def test_answers_without_key_tokens_are_not_missing() -> None:
    full, rows = sweep(loss=0.01), keyed(sweep(loss=0.01), 3, 7)
    expected = {("niah", 2048): len({r.sample_id for r in rows})}
    found = verdict(rows, end(), expected=expected)
    assert found.status == "PASS"
    (endpoint,) = found.endpoints
    assert endpoint.n_expected == endpoint.comparison.n_pairs == expected["niah", 2048] - 2
    alone = verdict([r for r in full if r.sample_index not in (3, 7)], end())
    assert endpoint.comparison.loss.value == pytest.approx(alone.endpoints[0].comparison.loss.value)
    lost = [r for r in rows if (r.scheme, r.sample_index) != ("s", 5)]
    assert verdict(lost, end(), expected=expected).status == "INCOMPLETE"


def test_a_cell_without_any_key_token_decides_nothing() -> None:
    rows = sweep(loss=0.01)
    found = verdict(keyed(rows, *range(len(rows))), end())
    assert [e.status for e in found.endpoints] == ["NON_DISCRIMINATIVE"]
    assert "no answer has a key token" in found.endpoints[0].message
