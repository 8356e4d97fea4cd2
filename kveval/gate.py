"""The gate: a declared promise, held against the records of a sweep. Pure, no input or output.

The gate is a non-inferiority test per endpoint (metric, task, context length); a global mean would hide
one dead cell. One `Verdict` makes the text, the JSON, the JUnit file and the exit code.

Multiplicity. An overall PASS needs every endpoint to be non-inferior: an intersection-union test. It is
wrong only if some endpoint that truly loses its margin passes its own test, which happens with
probability 1 - confidence at most, so its bounds are not adjusted. A FAIL is a claim that at least one
endpoint is too bad; that is a union of claims, so it uses Holm's adjusted p-values.

Precedence: INVALID, INCOMPLETE, FAIL, INCONCLUSIVE, PASS. A measurement that can't be trusted has no
result, not even a bad one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kveval.controls import ControlResult, check_controls
from kveval.endpoints import EndpointResult, Expected, format_against, judge_endpoints
from kveval.errors import ConfigError, ExitCode
from kveval.identity import digest

if TYPE_CHECKING:
    import pandas as pd

    from kveval.config import GateConfig

__all__ = [
    "GAIN_METRIC",
    "EndpointResult",
    "Status",
    "Verdict",
    "check_declared",
    "decide",
    "gate_digest",
]

Status = Literal["PASS", "FAIL", "INCONCLUSIVE", "INCOMPLETE", "INVALID"]

GAIN_METRIC = "sessions_gain"
"""Name of the endpoint made by `min_sessions_gain`: sessions per GPU relative to the baseline."""


@dataclass(frozen=True)
class Verdict:
    """What the gate says, why, and the exit code that goes with it.

    `controls` are all controls of the sweep; only those that concern the sweep as a whole, the control
    arms or the gated scheme count towards `status`. `first_line` is one sentence in plain words.
    """

    status: Status
    scheme: str
    confidence: float
    endpoints: tuple[EndpointResult, ...]
    controls: tuple[ControlResult, ...]
    blocking: tuple[ControlResult, ...]
    exit_code: ExitCode
    on_inconclusive: Literal["fail", "pass"]
    post_hoc: bool
    gate_digest: str
    first_line: str
    notes: tuple[str, ...]


def gate_digest(gate: GateConfig) -> str:
    """Digest of the declared gate; stored with the plan so that a later change shows."""
    return digest("gate", gate.model_dump(mode="json"))


def check_declared(gate: GateConfig, declared_digest: str | None, *, allow_post_hoc: bool) -> bool:
    """Whether the gate is post hoc, that is, not the one declared before the samples existed.

    Args:
        gate: the gate to be used now.
        declared_digest: what the plan stored; None if the sweep was planned without a gate.
        allow_post_hoc: the user accepts a verdict that is marked post hoc.

    Raises:
        ConfigError: the gate was changed after the run and `allow_post_hoc` is False.
    """
    if gate_digest(gate) == declared_digest:
        return False
    if not allow_post_hoc:
        what = "was not declared" if declared_digest is None else "is not the one that was declared"
        raise ConfigError(
            f"this gate {what} before the run: margins chosen after seeing results prove nothing.",
            remedy="Use the declared gate, run the sweep again, or pass --post-hoc to have it marked.",
        )
    return True


def decide(
    records: pd.DataFrame,
    gate: GateConfig,
    *,
    sessions_gain: Mapping[int, float] | None = None,
    expected: Expected | None = None,
    post_hoc: bool = False,
    lossless: Collection[str] = ("bf16",),
) -> Verdict:
    """Hold the records against the gate.

    Args:
        records: every arm's rows (columns of `kveval.records.Record`).
        gate: the declared gate.
        sessions_gain: context length -> sessions per GPU of the scheme divided by the baseline's; needed if
            the gate demands a minimum gain.
        expected: planned samples per (task, context length). Without it, every sample id that any arm of a
            cell has is expected of all of them.
        post_hoc: mark the verdict as given on a gate that was not declared before the run.
        lossless: schemes for which an exact zero difference is right.

    Raises:
        ConfigError: an endpoint is declared twice.
        StoreError: the records are damaged (a sample twice, missing columns).
        UnknownNameError: an unknown metric.
    """
    quality = judge_endpoints(records, gate, scheme=gate.scheme, expected=expected)
    endpoints = quality + _judge_gain(gate, sessions_gain)
    controls = tuple(check_controls(records, gate, expected=expected, lossless=lossless))
    if records.attrs.get("complete") is False:
        text = "the run was not finished; run the sweep again to resume it."
        controls += (ControlResult("run finished", False, text, "incomplete"),)
    blocking = tuple(c for c in controls if c.blocks and _concerns(c, records, gate))
    status = _overall(endpoints, blocking)
    return Verdict(
        status=status,
        scheme=gate.scheme,
        confidence=gate.confidence,
        endpoints=endpoints,
        controls=controls,
        blocking=blocking,
        exit_code=_exit_code(status, gate),
        on_inconclusive=gate.on_inconclusive,
        post_hoc=post_hoc,
        gate_digest=gate_digest(gate),
        first_line=_first_line(status, gate, endpoints, blocking, post_hoc=post_hoc),
        notes=_notes(gate, quality, controls, blocking),
    )


def _judge_gain(gate: GateConfig, sessions_gain: Mapping[int, float] | None) -> tuple[EndpointResult, ...]:
    """A format that costs quality and buys nothing is rejected, at every context length of the gate."""
    least = gate.min_sessions_gain
    if least is None:
        return ()
    results = []
    for length in sorted({e.context_length for e in gate.endpoints}):
        gain = (sessions_gain or {}).get(length)
        status: Literal["PASS", "FAIL", "INCOMPLETE"]
        if gain is None:
            status, text = (
                "INCOMPLETE",
                "the sessions per GPU are not known here; set `capacity.gpu` in the config.",
            )
        elif gain >= least:
            status, text = (
                "PASS",
                f"{format_against(gain, least)} times the sessions, at least {least:g} demanded.",
            )
        else:
            status, text = (
                "FAIL",
                f"only {format_against(gain, least)} times the sessions, {least:g} demanded.",
            )
        results.append(EndpointResult(GAIN_METRIC, "capacity", length, least, status, text))
    return tuple(results)


def _concerns(control: ControlResult, records: pd.DataFrame, gate: GateConfig) -> bool:
    """A control counts unless it is about another scheme than the gated one."""
    if control.scheme is None or control.scheme == gate.scheme:
        return True
    others = records.loc[(records["role"] == "scheme") & (records["scheme"] != gate.scheme), "scheme"]
    return control.scheme not in set(others)


def _overall(endpoints: tuple[EndpointResult, ...], blocking: tuple[ControlResult, ...]) -> Status:
    found = {e.status for e in endpoints}
    if any(c.severity == "invalid" for c in blocking):
        return "INVALID"
    if blocking or "INCOMPLETE" in found:
        return "INCOMPLETE"
    if "FAIL" in found:
        return "FAIL"
    # A cell that can't show damage is no evidence of quality, and a PASS needs evidence on every endpoint.
    if found != {"PASS"}:
        return "INCONCLUSIVE"
    return "PASS"


def _exit_code(status: Status, gate: GateConfig) -> ExitCode:
    if status == "INCONCLUSIVE" and gate.on_inconclusive == "pass":
        return ExitCode.PASS
    return ExitCode[status]


def _first_line(
    status: Status,
    gate: GateConfig,
    endpoints: tuple[EndpointResult, ...],
    blocking: tuple[ControlResult, ...],
    *,
    post_hoc: bool,
) -> str:
    label = f"{status} (post hoc: the gate was not declared before the run)" if post_hoc else status
    if status == "PASS":
        count = f"all {len(endpoints)} endpoints hold" if len(endpoints) > 1 else "the endpoint holds"
        return f"{label}: {gate.scheme} is within the declared margins ({count}, {gate.confidence:.0%} sure)."
    first = next((c for c in blocking if status != "INVALID" or c.severity == "invalid"), None)
    if first is not None:
        more = f" ({len(blocking) - 1} more controls failed.)" if len(blocking) > 1 else ""
        return f"{label}: {first.name}: {first.detail}{more}"
    order = {"INCOMPLETE": ("INCOMPLETE",), "FAIL": ("FAIL",)}.get(status, ("INCONCLUSIVE", "NON_DISCRIMINATIVE"))
    hits = [e for e in endpoints if e.status in order]
    first_end = hits[0]
    more = f" ({len(hits) - 1} more such endpoints.)" if len(hits) > 1 else ""
    where = f"{first_end.metric} on {first_end.task} at {first_end.context_length:,} tokens"
    if status == "INCONCLUSIVE" and gate.on_inconclusive == "pass":
        more += " The gate lets inconclusive results pass (on_inconclusive: pass), so the exit code is 0."
    return f"{label}: {gate.scheme}, {where}: {first_end.message}{more}"


def _notes(
    gate: GateConfig,
    quality: tuple[EndpointResult, ...],
    controls: tuple[ControlResult, ...],
    blocking: tuple[ControlResult, ...],
) -> tuple[str, ...]:
    longest = max(e.context_length for e in gate.endpoints)
    notes = [f"Not tested beyond {longest:,} tokens."]
    for end in quality:
        if end.comparison is not None:
            where = f"{end.metric} on {end.task} at {end.context_length:,} tokens"
            notes += [f"{where}: {note}." for note in end.comparison.notes]
    notes += [f"{c.name}: {c.detail}" for c in controls if not c.ok and c not in blocking]
    return tuple(notes)
