from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from stat_records import AA, BASELINE, CRUSH, failed, frame, sweep

from kveval.config import GateConfig, GateEndpoint
from kveval.controls import ControlResult, check_controls, noise_floor
from kveval.records import Record

GATE = GateConfig(
    scheme="s",
    endpoints=(
        GateEndpoint(metric="answer_nll", task="niah", context_length=2048, margin=0.1),
        GateEndpoint(metric="exact_match", task="niah", context_length=2048, margin=0.05),
    ),
)


def control(rows: list[Record], name: str, gate: GateConfig | None = GATE, **options: Any) -> ControlResult:
    """The one result of that name."""
    (found,) = [c for c in check_controls(frame(rows), gate, **options) if c.name == name]
    return found


def change(rows: list[Record], scheme: str, edit: Callable[[Record], Record]) -> list[Record]:
    return [edit(row) if row.scheme == scheme else row for row in rows]


@pytest.mark.parametrize("gate", [GATE, None])
def test_a_sound_sweep_passes_every_control(gate: GateConfig | None) -> None:
    results = check_controls(frame(sweep()), gate)
    assert [c.name for c in results if not c.ok] == []
    names = ["A/A clean", "A/A moves", "bytes", "competence", "crush caught", "errors", "exact zero"]
    assert sorted(c.name for c in results) == [*names, "packed reads"]


@pytest.mark.parametrize("gate", [GATE, None])
def test_a_dirty_aa_is_invalid(gate: GateConfig | None) -> None:
    found = control(sweep(aa=1.5), "A/A clean", gate)
    assert (found.ok, found.severity, found.scheme) == (False, "invalid", AA)
    assert "noise" in found.detail


def test_an_aa_that_a_small_gate_cant_clear_is_a_warning() -> None:
    found = control(sweep(n=20), "A/A clean")
    assert (found.ok, found.severity, found.blocks) == (False, "warning", False)


def test_aa_flips_count_without_a_gate() -> None:
    rows = change(sweep(), AA, lambda r: replace(r, top1_flips=0.3))
    assert "top1_flips" in control(rows, "A/A clean", None).detail
    assert control(change(rows, AA, lambda r: replace(r, top1_flips=0.2)), "A/A clean", None).ok


@pytest.mark.parametrize("gate", [GATE, None])
def test_crush_that_does_no_harm_is_invalid(gate: GateConfig | None) -> None:
    def harmless(row: Record) -> Record:
        return replace(row, exact_match=float(row.sample_index % 10 != 9), top1_flips=0.0)

    rows = change(sweep(crush=0.0), CRUSH, harmless)
    found = control(rows, "crush caught", gate)
    assert (found.ok, found.severity, found.scheme) == (False, "invalid", CRUSH)


def test_without_a_gate_every_task_must_catch_crush_somewhere() -> None:
    blind = sweep(task="easy", crush=0.0, length=512)
    found = control([*sweep(), *blind], "crush caught", None)
    assert (found.ok, "easy" in found.detail, "niah" in found.detail) == (False, True, False)
    assert control([*sweep(), *blind, *sweep(task="easy", length=1024)], "crush caught", None).ok


@pytest.mark.parametrize("gate", [GATE, None])
@pytest.mark.parametrize("arm", [AA, CRUSH])
def test_a_missing_control_arm_is_incomplete(gate: GateConfig | None, arm: str) -> None:
    rows = [r for r in sweep() if r.scheme != arm]
    name = "A/A clean" if arm == AA else "crush caught"
    found = control(rows, name, gate)
    assert (found.ok, found.severity, found.blocks) == (False, "incomplete", True)
    assert "no " + ("A/A" if arm == AA else "crush") in found.detail


def test_a_control_arm_that_lacks_samples_is_incomplete() -> None:
    rows = sweep()
    short = [failed(r) if r.scheme in (AA, CRUSH) and r.sample_index == 3 else r for r in rows]
    assert control(short, "A/A clean").severity == "incomplete"
    assert control(short, "crush caught").severity == "incomplete"
    assert not control(short, "crush caught").ok
    assert "out of memory" in " ".join(c.detail for c in check_controls(frame(short), GATE) if c.name == "errors")


def test_an_aa_that_changes_nothing_is_told() -> None:
    rows = sweep()
    levels = {r.sample_id: r.answer_nll for r in rows if r.scheme == BASELINE}
    still = change(rows, AA, lambda r: replace(r, answer_nll=levels[r.sample_id], kl=0.0))
    found = control(still, "A/A moves")
    assert (found.ok, found.severity) == (False, "warning")
    assert control(still, "A/A clean").ok


def exact(rows: list[Record], scheme: str) -> list[Record]:
    levels = {r.sample_id: r.answer_nll for r in rows if r.scheme == BASELINE}
    return change(rows, scheme, lambda r: replace(r, answer_nll=levels[r.sample_id], kl=0.0))


def test_an_exact_zero_of_a_lossy_scheme_is_invalid() -> None:
    rows = exact(sweep(), "s")
    found = control(rows, "exact zero")
    assert (found.ok, found.severity, found.scheme) == (False, "invalid", "s")
    assert control(rows, "exact zero", lossless=("bf16", "s")).ok
    kl_only = change(rows, "s", lambda r: replace(r, kl=1e-9 if r.sample_index == 0 else 0.0))
    assert control(kl_only, "exact zero").ok


def test_an_exact_zero_in_one_cell_is_a_warning() -> None:
    rows = [*sweep(), *exact(sweep(length=512), "s")]
    found = control(rows, "exact zero")
    assert (found.ok, found.severity) == (False, "warning")
    assert "512 tokens" in found.detail


def test_a_baseline_at_its_floor_is_told_per_cell() -> None:
    rows = change(sweep(), BASELINE, lambda r: replace(r, exact_match=0.0))
    found = control(rows, "competence")
    assert (found.ok, found.severity) == (False, "warning")
    assert (
        found.detail
        == "the baseline is at the floor for exact_match on niah at 2,048 tokens; it can't decide the gate."
    )


@pytest.mark.parametrize(("score", "room"), [(0.0, "floor"), (1.0, "ceiling")])
def test_a_task_score_that_can_show_nothing_is_told(score: float, room: str) -> None:
    rows = [replace(r, task_score=score) for r in sweep()]
    assert f"at the {room} for task_score on niah" in control(rows, "competence", None).detail
    endpoint = GateEndpoint(metric="task_score", task="niah", context_length=2048, margin=0.05)
    found = control(rows, "competence", GateConfig(scheme="s", endpoints=(endpoint,)))
    assert (found.ok, found.severity) == (False, "warning")
    assert f"at the {room} for task_score" in found.detail


def test_written_answers_are_judged_by_their_score_alone() -> None:
    rows = [replace(r, exact_match=0.0, task_score=0.5 * (r.sample_index % 3)) for r in sweep()]
    assert control(rows, "competence", None).ok


def keyless(rows: list[Record]) -> list[Record]:
    nothing: dict[str, Any] = dict.fromkeys(("answer_nll", "exact_match", "kl", "top1_flips"))
    return [replace(r, key_tokens=0, **nothing) for r in rows]


def test_a_task_without_key_tokens_is_told_and_voids_nothing() -> None:
    rows = [*sweep(), *keyless(sweep(task="long_ppl"))]
    assert control(rows, "crush caught", None).ok
    found = control(rows, "competence", None)
    assert (found.severity, found.blocks) == ("warning", False)
    assert found.detail.startswith("no sample of long_ppl at 2,048 tokens has a key token")
    assert not control(keyless(sweep()), "crush caught", None).ok
    assert control([*rows, *sweep(task="long_ppl", length=512)], "crush caught", None).ok
    blind = [*rows, *sweep(task="long_ppl", length=512, crush=0.0)]
    assert "long_ppl" in control(blind, "crush caught", None).detail


@pytest.mark.parametrize("stored", [999, None])
def test_bytes_that_do_not_match_are_invalid(stored: int | None) -> None:
    rows = change(sweep(), "s", lambda r: replace(r, stored_bytes=stored) if r.sample_index == 7 else r)
    found = control(rows, "bytes")
    assert (found.ok, found.severity, found.scheme) == (False, "invalid", "s")
    assert "1 records are wrong" in found.detail


@pytest.mark.parametrize("reads", [0, None])
def test_a_score_without_a_packed_read_is_invalid(reads: int | None) -> None:
    rows = change(sweep(), "s", lambda r: replace(r, packed_reads=reads) if r.sample_index == 7 else r)
    found = control(rows, "packed reads")
    assert (found.ok, found.severity, found.scheme) == (False, "invalid", "s")


def test_no_records_are_no_clean_bill() -> None:
    for gate in (GATE, None):
        results = check_controls(frame([]), gate)
        assert {c.name for c in results if c.blocks} >= {"A/A clean", "crush caught", "bytes", "packed reads"}


def test_the_noise_floor_is_the_aa_arms_distance() -> None:
    found = noise_floor(frame(sweep(aa=0.25)), task="niah", context_length=2048, metric="answer_nll")
    assert found is not None
    assert found.loss.value == pytest.approx(0.25, abs=0.001)
    no_arm = [r for r in sweep() if r.scheme != AA]
    assert noise_floor(frame(no_arm), task="niah", context_length=2048, metric="answer_nll") is None
