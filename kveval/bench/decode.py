"""Timing of decode attention: every scheme of a case beside BF16, torch and FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kveval.bench.caches import Cache, decode_misfit, make_caches, random_query, rounds_of
from kveval.bench.record import DecodeRow, LeftOut, ReferenceRow, Spread
from kveval.bench.references import FLASHINFER, SDPA, fastest_sdpa, flashinfer_round
from kveval.bench.shapes import Case
from kveval.bench.timers import Round, Timer
from kveval.errors import MeasurementError
from kveval.formats.spec import KVScheme

__all__ = ["Decoded", "fitting", "measure_decode"]

BASELINE = "bf16"


class Decoded(NamedTuple):
    """What was found of one case."""

    rows: list[DecodeRow]
    references: list[ReferenceRow]
    left_out: list[LeftOut]


def fitting(schemes: Sequence[KVScheme], head_dim: int, shape: str) -> tuple[list[KVScheme], list[LeftOut]]:
    """Those that the decode kernel reads, and why it does not read the others."""
    reasons = {scheme.name: decode_misfit(scheme, head_dim) for scheme in schemes}
    left = [LeftOut(f"{name} at {shape}", reason) for name, reason in reasons.items() if reason]
    return [scheme for scheme in schemes if not reasons[scheme.name]], left


def measure_decode(
    case: Case, schemes: Sequence[KVScheme], timer: Timer, *, replays: int, copy_gb_per_s: float, seed: int
) -> Decoded:
    """Times one query per sequence over a layer's cache.

    Args:
        case: Shape, batch and length.
        schemes: That the kernel reads, BF16 among them.
        timer: Takes the time.
        replays: Samples of each.
        copy_gb_per_s: Bandwidth of a copy, which rates are held against.
        seed: Of the random tokens.

    Raises:
        MeasurementError: attention gave NaN or infinity.
    """
    generator = torch.Generator().manual_seed(seed)
    query = random_query(case, timer.device, generator)
    caches = {scheme.name: make_caches(scheme, case, timer.device, generator) for scheme in schemes}
    for name, of in caches.items():
        _require_finite(name, case, of[0], query)
    rounds: dict[str, Round] = {name: rounds_of(of, query) for name, of in caches.items()}
    forms = {}
    forms[SDPA], rounds[SDPA] = fastest_sdpa(caches[BASELINE], query, timer)
    paged, said = flashinfer_round(caches[BASELINE], query)
    left = [] if paged else [LeftOut(FLASHINFER, said["reason"])]
    if paged:
        forms[FLASHINFER], rounds[FLASHINFER] = said["form"], paged
    if timer.device.type == "cuda":
        rounds |= {_loads(name): rounds_of(of, query, loads_only=True) for name, of in caches.items()}
    us = timer.microseconds(rounds, replays)
    query_bytes = query.numel() * query.element_size()
    rows = [
        _row(case, name, of[0].bytes_read + query_bytes, us, copy_gb_per_s=copy_gb_per_s) for name, of in caches.items()
    ]
    nbytes = caches[BASELINE][0].bytes_read + query_bytes
    references = [
        ReferenceRow(
            case.shape.name, case.batch, case.length, name, form, nbytes, Spread.of(us[name]),
            Spread.rate(nbytes, us[name]),
        )
        for name, form in forms.items()
    ]  # fmt: skip
    return Decoded(rows, references, left)


def _loads(name: str) -> str:
    return f"{name}, loads alone"


def _row(case: Case, name: str, nbytes: int, us: dict[str, list[float]], *, copy_gb_per_s: float) -> DecodeRow:
    own, loads = us[name], us.get(_loads(name))
    return DecodeRow(
        shape=case.shape.name,
        batch=case.batch,
        length=case.length,
        scheme=name,
        bytes_read=nbytes,
        us=Spread.of(own),
        gb_per_s=Spread.rate(nbytes, own),
        of_copy=Spread.of(nbytes / t / 1e3 / copy_gb_per_s for t in own),
        speedup_to_bf16=Spread.ratio(us[BASELINE], own),
        speedup_to_sdpa=Spread.ratio(us[SDPA], own),
        speedup_to_flashinfer=Spread.ratio(us[FLASHINFER], own) if FLASHINFER in us else None,
        loads_us=Spread.of(loads) if loads else None,
        widening=Spread.of(1 - a / b for a, b in zip(loads, own, strict=True)) if loads else None,
    )


def _require_finite(name: str, case: Case, cache: Cache, query: Tensor) -> None:
    out, _ = cache.decode(query)()
    if not torch.isfinite(out).all():
        raise MeasurementError(f"attention over {name} ({case}) gave NaN or infinity; its time would mean nothing.")
