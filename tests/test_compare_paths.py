"""Two runs of one sweep are compared sample by sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from kveval.python_file import load_python_file
from kveval.store import read_records

ROOT = Path(__file__).parents[1]
compare_paths = load_python_file(ROOT / "scripts" / "compare_paths.py")


def test_differences_are_of_samples_and_beside_those_of_aa() -> None:
    packed = read_records(ROOT / "results" / "qwen2.5-coder-0.5b-32k-h200")
    dequant = packed.copy()
    chosen = (dequant["scheme"] == "k8v4") & (dequant["task"] == "niah_multikey") & (dequant["context_length"] == 4096)
    signs = [0.25 if i % 2 else -0.25 for i in range(chosen.sum())]
    dequant.loc[chosen, "answer_nll"] += signs
    dequant.loc[chosen, "exact_match"] = 1 - dequant.loc[chosen, "exact_match"]
    rows = {(r["task"], r["context_length"], r["scheme"]): r for r in compare_paths.compare(packed, dequant)}
    moved = rows["niah_multikey", 4096, "k8v4"]
    assert moved["mean_abs_nll"] == pytest.approx(0.25)
    assert (moved["mean_nll"], moved["low"] < 0 < moved["high"]) == (pytest.approx(0, abs=1e-12), True)
    assert moved["exact_match_differs"] == moved["samples"] == 12
    assert 0 < moved["aa_mean_abs_nll"] < 0.01
    assert rows["niah_multikey", 4096, "bf16"]["mean_abs_nll"] == 0
    assert not any("A/A" in key[2] or key[2] == "crush" for key in rows)


def test_runs_without_common_samples_are_refused() -> None:
    packed = read_records(ROOT / "results" / "qwen2.5-coder-0.5b-32k-h200")
    other = read_records(ROOT / "results" / "smollm2-135m-h200")
    with pytest.raises(ValueError, match="no samples in common"):
        compare_paths.compare(packed, other)
