"""Checks of the kernels against exact arithmetic: what they are, and how they are run.

A check is a function `(device, sizes)` that yields trials; `run_check` runs them. On a GPU
scripts/check_kernels_on_gpu.py runs them all; tests run them on the CPU, where an emulator stands for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kveval.errors import KvevalError
from kveval.kernels.checks.attention import SHAPE_CHECKS
from kveval.kernels.checks.invariance import INVARIANCE_CHECKS
from kveval.kernels.checks.record import Result
from kveval.kernels.checks.storage import STORAGE_CHECKS
from kveval.kernels.checks.trials import FULL, SMALL, Check, Probe, Sizes

__all__ = ["CHECKS", "FULL", "SMALL", "Check", "Result", "Sizes", "probes", "run_check"]

CHECKS: dict[str, Check] = {**STORAGE_CHECKS, **SHAPE_CHECKS, **INVARIANCE_CHECKS}
"""All, by what they check."""


def run_check(name: str, device: torch.device, sizes: Sizes) -> Iterator[Result]:
    """Every comparison of one check. A case that fails or can't be tried does not stop the others."""
    for trial in CHECKS[name](device, sizes):
        try:
            measured = trial.run()
        except (KvevalError, RuntimeError) as error:  # RuntimeError: the GPU's faults, as torch reports them
            yield Result(name, trial.case, "run", float("nan"), 0.0, f"{type(error).__name__}: {error}")
            continue
        for m in measured:
            yield Result(name, trial.case, m.what, m.error, m.limit)


def probes(name: str, device: torch.device, sizes: Sizes) -> list[Probe]:
    """What calls each kernel that a check needs, without data."""
    return [probe for trial in CHECKS[name](device, sizes) for probe in trial.probes]
