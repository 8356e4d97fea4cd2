"""The records of the last runs on a GPU belong to the kernels as they are now, and say that they are right and fast.

Both are made on a machine with the GPU and committed:

    python scripts/check_kernels_on_gpu.py --out results/gpu/kernels.json
    kveval bench --what decode --shapes llama-8b --lengths 128k --batches 1,4 --out ...

The record of the second becomes results/gpu/bench_decode.json.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kveval.bench.record import Bench, DecodeRow, read_bench
from kveval.files import read_json
from kveval.kernels.checks import CHECKS
from kveval.kernels.checks.record import SCHEMA_VERSION
from kveval.kernels.compiler import sources_digest

ROOT = Path(__file__).parents[2]
CHECKED, TIMED = ROOT / "results" / "gpu" / "kernels.json", ROOT / "results" / "gpu" / "bench_decode.json"
README = ROOT / "kernels" / "README.md"
SHAPE, LENGTH = "llama-8b", 131072


class Aim(NamedTuple):
    """What decode attention should reach for a scheme: figures of a field of `DecodeRow`, by batch."""

    scheme: str
    field: str
    figures: dict[int, float]


AIMS = (
    Aim("bf16", "of_copy", {1: 0.95, 4: 1.00}),
    Aim("fp8_per_token_head", "speedup_to_bf16", {1: 1.80, 4: 1.88}),
    Aim("k8v4", "speedup_to_bf16", {1: 2.25, 4: 2.40}),
    Aim("int4_g64", "speedup_to_bf16", {1: 3.0, 4: 3.3}),
    Aim("nvfp4", "speedup_to_bf16", {1: 2.9, 4: 3.3}),
)
"""Four query heads of each of eight KV heads of 128 numbers, 128K tokens, one layer, on an H200."""


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    assert CHECKED.exists(), f"{CHECKED} is missing: run scripts/check_kernels_on_gpu.py on a GPU and commit it"
    return read_json(CHECKED, remedy="Run scripts/check_kernels_on_gpu.py again.")


@pytest.fixture(scope="module")
def timed() -> Bench:
    assert TIMED.exists(), f"{TIMED} is missing: run `kveval bench` on a GPU and commit its record"
    return read_bench(TIMED)


def test_checked_kernels_are_those_at_hand(checked: dict[str, Any]) -> None:
    assert checked["schema_version"] == SCHEMA_VERSION
    assert checked["kernel_hash"] == sources_digest(), "the kernels changed since they were checked on a GPU"
    assert all(checked[field] for field in ("gpu", "driver", "nvrtc", "env"))
    assert isinstance(checked["seed"], int)


def test_every_check_was_run_and_passed(checked: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in checked["checks"]}
    assert list(rows) == list(CHECKS)
    assert not {name: row["failures"] for name, row in rows.items() if row["failures"]}
    for name, row in rows.items():
        assert row["comparisons"] >= row["cases"] > 0, name
        assert row["worst_ratio"] is not None, name
        assert row["worst_ratio"] <= 1.0, name


def test_timed_kernels_are_those_at_hand(timed: Bench) -> None:
    assert timed.kernel_hash == sources_digest(), "the kernels changed since they were timed on a GPU"
    assert timed.caveat == ""
    assert "H200" in timed.device, "the aims are those of an H200"
    assert timed.driver
    assert timed.nvrtc


def row_of(timed: Bench, scheme: str, batch: int) -> DecodeRow:
    wanted = (SHAPE, batch, LENGTH, scheme)
    rows = [row for row in timed.decode if (row.shape, row.batch, row.length, row.scheme) == wanted]
    assert len(rows) == 1, f"{TIMED.name} has {len(rows)} rows of {wanted}"
    return rows[0]


def exceptions() -> dict[tuple[str, int], float]:
    """What kernels/README.md says is reached instead of an aim, and why, in its table "Aims not met"."""
    _, _, section = README.read_text(encoding="utf-8").partition("\n## Aims not met\n")
    table = section.partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| (.+) \|$", table, re.MULTILINE)
    aims = {(aim.scheme, batch): figure for aim in AIMS for batch, figure in aim.figures.items()}
    for scheme, batch, figure, _, why in rows:
        assert aims[scheme, int(batch)] == float(figure), f"{README}: {scheme} at batch {batch} has another aim"
        assert len(why.split()) >= 8, f"{README}: {scheme} at batch {batch}: why?"
    return {(scheme, int(batch)): float(reached) for scheme, batch, _, reached, _ in rows}


@pytest.mark.parametrize(
    ("aim", "batch"),
    [pytest.param(aim, batch, id=f"{aim.scheme}-batch{batch}") for aim in AIMS for batch in aim.figures],
)
def test_aims(timed: Bench, aim: Aim, batch: int) -> None:
    reached = getattr(row_of(timed, aim.scheme, batch), aim.field).median
    excepted = exceptions().get((aim.scheme, batch))
    if excepted is None:
        assert reached >= aim.figures[batch]
        return
    assert reached < aim.figures[batch], f"{README} says that this is not reached; it is"
    assert abs(reached - excepted) <= 0.01 * reached, f"{README} says {excepted}, the record {reached:.3f}"


def test_times_are_of_many_launches(timed: Bench) -> None:
    for aim in AIMS:
        for batch in aim.figures:
            row = row_of(timed, aim.scheme, batch)
            assert row.us.n >= 5
            # Replays that differ by more say nothing.
            assert row.us.max <= 1.25 * row.us.median
            assert row.us.min <= row.us.median <= row.us.max
