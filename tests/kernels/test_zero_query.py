"""Queries of zeros, where fast arithmetic takes subnormal numbers for 0, as a GPU does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from emulator.emulator import EmulatorLauncher
from kveval.kernels.checks.cases import Case
from kveval.kernels.decode import decode_cuda
from kveval.kernels.launcher import use_launcher

cpu = torch.device("cpu")
with use_launcher(EmulatorLauncher(Path(sys.argv[1]))):
    for size in (0.0, 1e-38, 1e-30):
        for length in (317, 320):
            case = Case(scheme="fp8_per_token_head", head_dim=64, heads=2, length=length, query_size=size)
            cache = case.make(cpu)
            expected, _ = case.expected(cache)
            assert torch.set_flush_denormal(True)
            out, _ = decode_cuda(*case.arguments(cache, out_dtype=torch.float32, splits=0))
            torch.set_flush_denormal(False)
            error = (out - expected).norm() / expected.norm()
            assert error < 1e-3, (size, length, float(error))
"""


def test_a_query_of_zeros_gives_the_mean_of_the_values(kernel_builds: Path) -> None:
    """The scores' factor must not be subnormal: 0 times a masked score is NaN. In a process of its own: the mode stays
    in contexts that the emulator keeps."""
    import torch

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't take subnormal numbers for 0")
    torch.set_flush_denormal(False)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(kernel_builds)], capture_output=True, text=True, cwd=Path(__file__).parent,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
