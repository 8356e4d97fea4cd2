"""Compiles what a benchmark will launch, all of it at once, before the first thing is timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kveval.kernels.compiler import Variant, architecture, compile_kernel
from kveval.kernels.launcher import Launcher, launcher, use_launcher

__all__ = ["compile_ahead", "variants_of"]


class _Collecting:
    """Notes which kernels would be launched, and launches none."""

    def __init__(self, inner: Launcher) -> None:
        self.variants: dict[Variant, None] = {}
        self._inner = inner

    def launch(self, variant: Variant, **how: Any) -> None:
        self.variants[variant] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def variants_of(calls: Iterable[Callable[[], object]]) -> list[Variant]:
    """The kernels that `calls` would launch; none is launched, so what they return is undefined."""
    collecting = _Collecting(launcher())
    with use_launcher(collecting):
        for call in calls:
            call()
    return list(collecting.variants)


def compile_ahead(calls: Iterable[Callable[[], object]], device: torch.device) -> int:
    """Compiles the kernels that `calls` would launch on an NVIDIA GPU, on all cores; returns how many there are.

    Raises:
        KernelError: one does not compile.
    """
    variants = variants_of(calls)
    arch = architecture(torch.cuda.get_device_capability(device))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda variant: compile_kernel(variant, arch), variants))
    return len(variants)
