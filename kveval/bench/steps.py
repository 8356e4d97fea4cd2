"""Timing of what a token asks of the cache in all layers: append and attention, without the rest of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kveval.bench.caches import append_misfit, make_caches, random_query
from kveval.bench.decode import BASELINE
from kveval.bench.record import Spread, StepRow
from kveval.bench.shapes import Case
from kveval.bench.timers import Round, Timer
from kveval.formats.spec import KVScheme

__all__ = ["measure_steps"]

PAIR = 2
"""Consecutive steps that are timed together at least: not one reads what the one before left in the L2 cache."""


def measure_steps(case: Case, schemes: Sequence[KVScheme], timer: Timer, *, replays: int, seed: int) -> list[StepRow]:
    """Times the cache's part of one token: every layer's append, then its attention over all tokens.

    The layers take turns on as many caches as the memory of a few layers holds, which exceed the L2 cache.
    """
    fitting = [scheme for scheme in schemes if not append_misfit(scheme, case.shape.head_dim)]
    generator = torch.Generator().manual_seed(seed)
    steps = {scheme.name: _steps(scheme, case, timer.device, generator) for scheme in fitting}
    eager = timer.milliseconds({name: calls[0] for name, calls in steps.items()}, replays)
    graph = timer.microseconds(steps, replays) if timer.device.type == "cuda" else {}
    return [
        StepRow(
            shape=case.shape.name,
            batch=case.batch,
            length=case.length,
            scheme=name,
            layers=case.shape.layers,
            eager_ms=Spread.of(eager[name]),
            graph_ms=Spread.of(us / 1e3 for us in graph[name]) if graph else None,
            eager_speedup_to_bf16=Spread.ratio(eager[BASELINE], eager[name]),
            graph_speedup_to_bf16=Spread.ratio(graph[BASELINE], graph[name]) if graph else None,
        )
        for name in steps
    ]


def _steps(scheme: KVScheme, case: Case, device: torch.device, generator: torch.Generator) -> Round:
    """Steps that go on where the one before left off among the caches."""
    shape, layers = case.shape, case.shape.layers
    caches = make_caches(scheme, case, device, generator)
    query = random_query(case, device, generator)
    k, v = (
        torch.randn(case.batch, 1, shape.kv_heads, shape.head_dim, generator=generator)
        .to(device, torch.bfloat16)
        .transpose(1, 2)
        for _ in range(2)
    )
    nonfinite = torch.zeros(2, dtype=torch.int32, device=device)
    calls = [(cache.append(k, v, nonfinite, case.length - 1), cache.decode(query)) for cache in caches]
    count = max(PAIR, -(-len(caches) // layers))
    return [_step([calls[(at * layers + i) % len(calls)] for i in range(layers)]) for at in range(count)]


def _step(layers: Sequence[tuple[Callable[[], object], Callable[[], object]]]) -> Callable[[], None]:
    def step() -> None:
        for append, attend in layers:
            append()
            attend()

    return step
