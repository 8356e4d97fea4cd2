"""Timing of append: one new token of one layer, encoded and stored, beside a BF16 copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kveval.bench.caches import append_misfit, make_caches
from kveval.bench.record import AppendRow, LeftOut, ShapeRow, Spread
from kveval.bench.shapes import Case
from kveval.bench.timers import Round, Timer
from kveval.formats.spec import KVScheme
from kveval.kernels.launcher import Launcher, Variant, launcher, use_launcher

__all__ = ["count_launches", "measure_append"]

ROWS = 1024
"""Tokens of the cache that is written to, at a new position by every call."""

CALLS = 64
COPY = "bf16 copy"


class Appended(NamedTuple):
    """What was found of one shape and batch."""

    rows: list[AppendRow]
    left_out: list[LeftOut]


def measure_append(
    shape: ShapeRow, batch: int, schemes: Sequence[KVScheme], timer: Timer, *, replays: int, seed: int
) -> Appended:
    """Times storing one token of `batch` sequences, keys and values, for every scheme with a kernel for it."""
    case, device = Case(shape, batch, ROWS), timer.device
    generator = torch.Generator().manual_seed(seed)
    # As a model makes them: [B, 1, H, D], seen with heads before tokens.
    k, v = (
        torch.randn(batch, 1, shape.kv_heads, shape.head_dim, generator=generator)
        .to(device, torch.bfloat16)
        .transpose(1, 2)
        for _ in range(2)
    )
    nonfinite = torch.zeros(2, dtype=torch.int32, device=device)
    rounds: dict[str, Round] = {COPY: _copies(case, k, v)}
    left = []
    for scheme in schemes:
        if reason := append_misfit(scheme, shape.head_dim):
            left.append(LeftOut(f"append of {scheme.name} at {shape.name}", reason))
            continue
        (cache, *_) = make_caches(scheme, case, device, generator)
        rounds[scheme.name] = [cache.append(k, v, nonfinite, i % ROWS) for i in range(CALLS)]
    us = timer.microseconds(rounds, replays)
    rows = [
        AppendRow(
            shape=shape.name,
            batch=batch,
            scheme=name,
            us=Spread.of(own),
            copy_us=Spread.of(us[COPY]),
            times_copy=Spread.ratio(own, us[COPY]),
            launches=count_launches(rounds[name][0]) if device.type == "cuda" else None,
        )
        for name, own in us.items()
        if name != COPY
    ]
    return Appended(rows, left)


def _copies(case: Case, k: torch.Tensor, v: torch.Tensor) -> Round:
    shape = (case.batch, case.shape.kv_heads, ROWS, case.shape.head_dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=k.device) for _ in range(2))
    rows = torch.arange(CALLS, device=k.device)[:, None]

    def copy(row: torch.Tensor) -> None:
        keys.index_copy_(2, row, k)
        values.index_copy_(2, row, v)

    return [partial(copy, row) for row in rows]


def count_launches(call: Callable[[], object]) -> int:
    """Kernels of ours that `call` launches."""
    counting = _Counting(launcher())
    with use_launcher(counting):
        call()
    return counting.launches


class _Counting:
    """Hands on every launch and counts it."""

    def __init__(self, inner: Launcher) -> None:
        self.launches = 0
        self._inner = inner

    def launch(self, variant: Variant, **how: Any) -> None:
        self.launches += 1
        self._inner.launch(variant, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
