"""Controls: whether a sweep could have seen damage, and whether its cache was really read.

Pure functions of the records. What each control means is in its function's docstring; a failed one voids
the verdict ("invalid"), says that samples are lacking ("incomplete") or is only told ("warning").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from kveval.endpoints import Expected, judge_endpoints
from kveval.records import METRICS
from kveval.stats import Comparison, compare, competence

if TYPE_CHECKING:
    import pandas as pd

    from kveval.config import GateConfig

__all__ = ["AA_LIMIT", "ControlResult", "check_controls", "noise_floor"]

AA_LIMIT = 0.25
"""Without a gate, A/A is clean if its loss is at most this share of the crush control's in the same cell."""

Severity = Literal["invalid", "incomplete", "warning"]
Cell = tuple[str, int]


@dataclass(frozen=True)
class ControlResult:
    """One control. `severity` is what it means when `ok` is False.

    `scheme` names the arm that failed where the control is about one arm; None if it is about the sweep.
    """

    name: str
    ok: bool
    detail: str
    severity: Severity = "invalid"
    scheme: str | None = None

    @property
    def blocks(self) -> bool:
        """Whether a gate can't be decided because of this."""
        return not self.ok and self.severity != "warning"


def check_controls(
    records: pd.DataFrame,
    gate: GateConfig | None = None,
    *,
    expected: Expected | None = None,
    confidence: float = 0.95,
    lossless: Collection[str] = ("bf16",),
) -> list[ControlResult]:
    """Run every control.

    Args:
        records: every arm's rows.
        gate: the declared gate; A/A and crush are then judged by it. Without one, documented rules apply.
        expected: planned samples per (task, context length).
        confidence: of the bounds used without a gate.
        lossless: schemes that store exactly what they are given, for which a zero difference is right.
    """
    if gate is not None:
        judged = [_aa_by_gate(records, gate, expected), _crush_by_gate(records, gate, expected)]
        cells = [(e.metric, e.task, e.context_length) for e in gate.endpoints]
    else:
        judged = [_aa_by_rule(records, confidence), _crush_by_rule(records, confidence)]
        cells = [(_answer_metric(records, cell), *cell) for cell in _cells(records)]
    return [
        *judged,
        _aa_moves(records),
        *_exact_zero(records, lossless),
        *_competence(records, cells, declared=gate is not None),
        *_stored_is_billed(records),
        *_packed_reads(records),
        *_errors(records),
    ]


def noise_floor(
    records: pd.DataFrame, *, task: str, context_length: int, metric: str, confidence: float = 0.95
) -> Comparison | None:
    """How far the A/A arm is from the baseline in one cell; None if the sweep has no A/A arm."""
    name = _arm_name(records, "aa")
    if name is None:
        return None
    return compare(
        records,
        scheme=name,
        role="aa",
        metric=metric,
        task=task,
        context_length=context_length,
        confidence=confidence,
    )


def _aa_by_gate(records: pd.DataFrame, gate: GateConfig, expected: Expected | None) -> ControlResult:
    """The declared gate, applied to the baseline against itself, must not reject it.

    A FAIL means the margin is inside the noise. An endpoint too small to decide is a warning: the scheme's
    own endpoint then says how many samples are needed.
    """
    name = _arm_name(records, "aa")
    if name is None:
        return _absent("A/A clean", "A/A")
    ends = judge_endpoints(records, gate, scheme=name, role="aa", expected=expected)
    for status in ("FAIL", "INCOMPLETE", "INCONCLUSIVE", "NON_DISCRIMINATIVE"):
        hit = next((e for e in ends if e.status == status), None)
        if hit is None:
            continue
        where = f"{hit.metric} on {hit.task} at {hit.context_length:,} tokens: {hit.message}"
        if status == "FAIL":
            text = f"the gate rejects the baseline against itself: its margin is inside the noise. {where}"
            return ControlResult("A/A clean", False, text, "invalid", name)
        if status == "INCOMPLETE":
            return ControlResult("A/A clean", False, f"the A/A arm lacks samples. {where}", "incomplete", name)
        return ControlResult("A/A clean", False, f"the gate can't clear the A/A arm. {where}", "warning", name)
    return ControlResult("A/A clean", True, "the declared gate passes the baseline against itself.", scheme=name)


def _crush_by_gate(records: pd.DataFrame, gate: GateConfig, expected: Expected | None) -> ControlResult:
    """The declared gate must reject crush on at least one endpoint."""
    name = _arm_name(records, "crush")
    if name is None:
        return _absent("crush caught", "crush")
    ends = judge_endpoints(records, gate, scheme=name, role="crush", expected=expected)
    caught = [e for e in ends if e.status == "FAIL"]
    if caught:
        text = f"the declared gate rejects crush on {len(caught)} of {len(ends)} endpoints."
        return ControlResult("crush caught", True, text, scheme=name)
    lacking = next((e for e in ends if e.status == "INCOMPLETE"), None)
    if lacking is not None:
        return ControlResult(
            "crush caught", False, f"the crush arm lacks samples: {lacking.message}", "incomplete", name
        )
    text = (
        "the declared gate does not reject crush, a format that must fail, so this evaluation has no power "
        "to see damage. Use more samples, another task or a continuous metric such as answer_nll."
    )
    return ControlResult("crush caught", False, text, "invalid", name)


def _aa_by_rule(records: pd.DataFrame, confidence: float) -> ControlResult:
    """Without a gate: A/A is small against crush in every cell where crush does harm.

    Its mean answer-NLL difference (either way) and its top-1 flips are each at most `AA_LIMIT` of crush's.
    """
    aa, crush = _arm_name(records, "aa"), _arm_name(records, "crush")
    if aa is None or crush is None:
        return _absent("A/A clean", "A/A" if aa is None else "crush")
    judged = 0
    for metric in ("answer_nll", "top1_flips"):
        for cell in _cells(records):
            noise = _loss(records, aa, "aa", metric, cell, confidence).loss.value
            harm = _loss(records, crush, "crush", metric, cell, confidence).loss.value
            if noise is None or harm is None or harm <= 0.0:
                continue
            judged += 1
            if abs(noise) > AA_LIMIT * harm:
                unit = METRICS[metric].unit
                text = (
                    f"the baseline differs from itself by {noise:.3g} {unit} of {metric} on {_where(cell)}, "
                    f"more than {AA_LIMIT:.0%} of what crush loses ({harm:.3g}); the noise hides damage."
                )
                return ControlResult("A/A clean", False, text, "invalid", aa)
    if judged == 0:
        text = "crush does no harm in any cell, so there is nothing to hold the noise against."
        return ControlResult("A/A clean", False, text, "invalid", aa)
    text = f"the baseline's distance from itself is at most {AA_LIMIT:.0%} of crush's loss in every cell."
    return ControlResult("A/A clean", True, text, scheme=aa)


def _crush_by_rule(records: pd.DataFrame, confidence: float) -> ControlResult:
    """Without a gate: every task has a cell in which crush stands clear of the A/A arm.

    That is, the lower bound of its answer-NLL loss is above the upper bound of the A/A arm's. A task without any key
    token has nothing that could be lost, which `_competence` tells.
    """
    aa, crush = _arm_name(records, "aa"), _arm_name(records, "crush")
    if aa is None or crush is None:
        return _absent("crush caught", "A/A" if aa is None else "crush")
    caught = set()
    for cell in _cells(records):
        noise = _loss(records, aa, "aa", "answer_nll", cell, confidence).upper
        harm = _loss(records, crush, "crush", "answer_nll", cell, confidence).lower
        if noise is not None and harm is not None and harm > noise:
            caught.add(cell[0])
    keyless = set(_keyless(records))
    tasks = {cell[0] for cell in _cells(records) if cell not in keyless} or {cell[0] for cell in keyless}
    blind = sorted(tasks - caught)
    if blind:
        text = f"crush, which must fail, is not told from noise on {', '.join(blind)}: damage is not seen."
        return ControlResult("crush caught", False, text, "invalid", crush)
    return ControlResult("crush caught", True, "crush is told from noise on every task.", scheme=crush)


def _aa_moves(records: pd.DataFrame) -> ControlResult:
    """An A/A arm that equals the baseline bit for bit changed no rounding, so the noise floor is unknown."""
    name = _arm_name(records, "aa")
    if name is None:
        return _absent("A/A moves", "A/A")
    still = all(_is_exact_zero(records, name, "aa", cell) is not False for cell in _cells(records))
    if still:
        text = "A/A equals the baseline bit for bit: the noise floor is unknown; use another prefill chunk."
        return ControlResult("A/A moves", False, text, "warning", name)
    return ControlResult("A/A moves", True, "the A/A arm differs from the baseline by rounding.", scheme=name)


def _exact_zero(records: pd.DataFrame, lossless: Collection[str]) -> list[ControlResult]:
    """A lossy scheme whose every answer-NLL difference and KL is exactly 0 was not read: invalid.

    In a single cell it is a warning, since a BF16 window can hold a whole short context.
    """
    found = []
    for name, role in _lossy_arms(records, lossless):
        zero = {cell: _is_exact_zero(records, name, role, cell) for cell in _cells(records)}
        known = {cell: z for cell, z in zero.items() if z is not None}
        if known and all(known.values()):
            text = f"{name} is lossy, yet its every difference is exactly 0: the stored cache was not read."
            found.append(ControlResult("exact zero", False, text, "invalid", name))
        elif any(known.values()):
            where = ", ".join(_where(cell) for cell, z in known.items() if z)
            text = f"{name} differs by exactly 0 on {where}; right only if its BF16 window holds it all."
            found.append(ControlResult("exact zero", False, text, "warning", name))
    return found or [ControlResult("exact zero", True, "every lossy scheme changes the logits.")]


def _competence(records: pd.DataFrame, cells: list[tuple[str, str, int]], *, declared: bool) -> list[ControlResult]:
    """The baseline of every judged cell is off its floor and ceiling."""
    found = []
    for metric, task, length in cells:
        room = competence(records, metric=metric, task=task, context_length=length)
        if room != "ok":
            effect = "it can't decide the gate" if declared else "it says little about loss"
            text = f"the baseline is at the {room} for {metric} on {_where((task, length))}; {effect}."
            found.append(ControlResult("competence", False, text, "warning"))
    for cell in _keyless(records):
        text = f"no sample of {_where(cell)} has a key token: nothing there needs the far context, so nothing is shown."
        found.append(ControlResult("competence", False, text, "warning"))
    return found or [ControlResult("competence", True, "the baseline leaves room to lose in every judged cell.")]


def _stored_is_billed(records: pd.DataFrame) -> list[ControlResult]:
    """Bytes counted on the live cache equal the bytes that capacity figures bill, in every ok record."""

    def bad(ok: pd.DataFrame) -> pd.Series:
        # A missing count is NaN, which equals nothing, and so is wrong too.
        return ok["stored_bytes"].astype("float64") != ok["billed_bytes"].astype("float64")

    def detail(rows: pd.DataFrame) -> str:
        first = rows.iloc[0]
        return f"{first['stored_bytes']} bytes stored and {first['billed_bytes']} billed"

    return _per_arm(records, "bytes", bad, detail, "stored bytes equal billed bytes in every record.")


def _packed_reads(records: pd.DataFrame) -> list[ControlResult]:
    """Every score was computed by reading the packed cache."""

    def bad(ok: pd.DataFrame) -> pd.Series:
        return ~(ok["packed_reads"].astype("float64") > 0)

    def detail(rows: pd.DataFrame) -> str:
        return f"{rows.iloc[0]['packed_reads']} packed reads"

    return _per_arm(records, "packed reads", bad, detail, "every score was computed from the packed cache.")


def _per_arm(
    records: pd.DataFrame,
    name: str,
    bad: Callable[[pd.DataFrame], pd.Series],
    detail: Callable[[pd.DataFrame], str],
    fine: str,
) -> list[ControlResult]:
    ok = records[records["status"] == "ok"]
    wrong = ok[np.asarray(bad(ok), dtype=bool)]
    if len(ok) == 0:
        return [ControlResult(name, False, "there is no ok record to check.", "incomplete")]
    if len(wrong) == 0:
        return [ControlResult(name, True, fine)]
    found = []
    for scheme, rows in wrong.groupby("scheme", sort=True):
        first = rows.iloc[0]
        cell = (str(first["task"]), int(first["context_length"]))
        place = f"{_where(cell)}, sample {first['sample_id']}"
        text = f"{scheme}: {len(rows)} records are wrong; the first, {place}, has {detail(rows)}."
        found.append(ControlResult(name, False, text, "invalid", str(scheme)))
    return found


def _errors(records: pd.DataFrame) -> list[ControlResult]:
    """Errored samples. A warning here; an endpoint that lacks one of them is incomplete by itself."""
    wrong = records[records["status"] != "ok"]
    if len(wrong) == 0:
        return [ControlResult("errors", True, "no sample failed.")]
    found = []
    for scheme, rows in wrong.groupby("scheme", sort=True):
        text = f"{scheme}: {len(rows)} samples failed; the first says: {rows.iloc[0]['error']}"
        found.append(ControlResult("errors", False, text, "warning", str(scheme)))
    return found


def _absent(control: str, arm: str) -> ControlResult:
    text = f"the sweep has no {arm} arm, so nothing shows that it could see damage; run it with its controls."
    return ControlResult(control, False, text, "incomplete")


def _arm_name(records: pd.DataFrame, role: str) -> str | None:
    names = records.loc[records["role"] == role, "scheme"].unique()
    return str(names[0]) if len(names) else None


def _cells(records: pd.DataFrame) -> list[Cell]:
    unique = records[["task", "context_length"]].drop_duplicates()
    return sorted((str(t), int(n)) for t, n in zip(unique["task"], unique["context_length"], strict=True))


def _answer_metric(records: pd.DataFrame, cell: Cell) -> str:
    """What a cell's answers are judged by: the task's own score where the model wrote them, else whether they match."""
    here = (records["task"] == cell[0]) & (records["context_length"] == cell[1])
    return "task_score" if records.loc[here, "task_score"].notna().any() else "exact_match"


def _keyless(records: pd.DataFrame) -> list[Cell]:
    """Cells of tasks that score key tokens alone in which the baseline found none."""
    scored = records[(records["role"] == "baseline") & (records["status"] == "ok") & records["key_tokens"].notna()]
    counts = scored.groupby(["task", "context_length"])["key_tokens"].sum()
    return sorted((str(task), int(length)) for (task, length), count in counts.items() if count == 0)


def _lossy_arms(records: pd.DataFrame, lossless: Collection[str]) -> Iterator[tuple[str, Literal["scheme", "crush"]]]:
    roles: tuple[Literal["scheme", "crush"], ...] = ("scheme", "crush")
    for role in roles:
        for name in sorted(records.loc[records["role"] == role, "scheme"].unique()):
            if name not in lossless:
                yield str(name), role


def _loss(
    records: pd.DataFrame,
    name: str,
    role: Literal["scheme", "aa", "crush"],
    metric: str,
    cell: Cell,
    confidence: float,
) -> Comparison:
    return compare(
        records,
        scheme=name,
        role=role,
        metric=metric,
        task=cell[0],
        context_length=cell[1],
        confidence=confidence,
    )


def _is_exact_zero(records: pd.DataFrame, name: str, role: Literal["scheme", "aa", "crush"], cell: Cell) -> bool | None:
    """Whether every answer-NLL difference and KL of a cell is exactly 0; None if there is neither."""
    seen = False
    for metric in ("kl", "answer_nll"):
        found = _loss(records, name, role, metric, cell, 0.95)
        if found.n_pairs and not found.exact_zero:
            return False
        seen = seen or found.n_pairs > 0
    return True if seen else None


def _where(cell: Cell) -> str:
    return f"{cell[0]} at {cell[1]:,} tokens"
