"""Checks of decode attention at all shapes and masks. All data is random, all bytes that nothing may read are NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from kveval.kernels.checks.cases import Case
from kveval.kernels.checks.measure import Measured, Yardstick, different
from kveval.kernels.checks.trials import Check, Draw, Sizes, Trial, plain_trial

__all__ = ["SHAPE_CHECKS"]

BF16, FP16 = torch.bfloat16, torch.float16


def accuracy(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Every preset, near its limit or far below."""
    seed = sizes.seeds("accuracy")
    for scheme, length in product(sizes.every(), sizes.lengths):
        case = Case(scheme=scheme, heads=sizes.heads, splits=sizes.splits, length=length, seed=seed())
        yield plain_trial(device, replace(case, batch=2))
        yield plain_trial(device, replace(case, query_size=6.0, growing=length > 1))


def unused_slots(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """What lies in rows that no query attends to changes nothing."""
    seed = sizes.seeds("unused_slots")
    for scheme in sizes.every():
        case = Case(
            scheme=scheme, heads=sizes.heads, splits=sizes.splits, batch=2, length=150, bounds=((0, 150), (71, 149)),
            window=90, seed=seed(),
        )  # fmt: skip

        def run(case: Case = case) -> list[Measured]:
            cache = case.make(device)
            out, lse = case.attend(cache)
            other_out, other_lse = case.attend(case.make(device, fill=0))
            return [
                # Two results of NaN are equal too.
                *Yardstick.of(case, cache).measure(out, lse),
                different("bits of out", out, other_out),
                different("bits of lse", lse, other_lse),
            ]

        yield Trial(str(case), run, (case,))


def bounds(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Sequences of unequal lengths in one batch, of none at all, and left padding longer than a tile."""
    seed = sizes.seeds("bounds")
    batches = (
        ((0, 0), (0, 61), (0, 0), (0, 50)),
        ((37, 61), (0, 61), (60, 61), (33, 50)),
        ((5, 300), (70, 300), (299, 300), (160, 300)),
        ((300, 300), (513, 700), (100, 100), (0, 700)),
    )
    for scheme, rows, splits in product(sizes.few, batches, (0, 1, 3, 7)):
        length = max(end for _, end in rows)
        yield plain_trial(
            device, Case(scheme=scheme, batch=4, length=length, bounds=rows, splits=splits, seed=seed())
        )  # fmt: skip
    case = Case(scheme=sizes.few[0], batch=2, length=40, bounds=((0, 0), (40, 40)), seed=seed())

    def nothing() -> list[Measured]:
        out, lse = case.attend(case.make(device))
        return [
            different("0 where nothing is attended", out, torch.zeros_like(out)),
            different("lse -inf", lse, torch.full_like(lse, -torch.inf)),
        ]

    yield Trial(f"{case}, empty", nothing, (case,))


def groups(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Query heads of a KV head."""
    seed = sizes.seeds("groups")
    for turn, group in enumerate(sizes.groups):
        for scheme in sizes.schemes(turn):
            yield plain_trial(
                device,
                Case(scheme=scheme, heads=sizes.heads, splits=sizes.splits, group=group, length=333, seed=seed()),
            )


def lengths(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Lengths around a tile, a head's size, and all tiles of the 8, 12 or 16 warps of a block."""
    seed = sizes.seeds("lengths")
    near = {n + d for n in (16, 32, 128, 256, 384, 512, 1024) for d in (-1, 0, 1)}
    for scheme, length in product(sizes.few, sorted({1, 2, *near})):
        yield plain_trial(device, Case(scheme=scheme, heads=sizes.heads, batch=2, length=length, seed=seed()))


def head_dims(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Head sizes, each with masks that cut tiles."""
    seed = sizes.seeds("head_dims")
    for turn, head_dim in enumerate(sizes.head_dims):
        for scheme in sizes.schemes(turn):
            base = Case(scheme=scheme, heads=sizes.heads, splits=sizes.splits, batch=2, head_dim=head_dim, seed=seed())
            for length in (1, head_dim - 1, head_dim, head_dim + 1):
                yield plain_trial(device, replace(base, length=length))
            yield plain_trial(device, replace(base, length=700, bounds=((3, 700), (41, 650)), window=300, sinks=True))


def queries(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Several queries at once, each of which sees one row more; also where rows are hidden from all."""
    seed = sizes.seeds("queries")
    for turn, n in enumerate(sizes.queries):
        for scheme in sizes.schemes(turn):
            base = Case(scheme=scheme, heads=sizes.heads, splits=sizes.splits, batch=2, queries=n, seed=seed())
            yield plain_trial(device, replace(base, length=n))
            yield plain_trial(device, replace(base, length=300))
            yield plain_trial(device, replace(base, length=300, position=40))
            yield plain_trial(device, replace(base, length=150, position=170, window=60))
            yield plain_trial(device, replace(base, length=150, position=400, window=60))
            yield plain_trial(device, replace(base, length=130, position=100, bounds=((100, 110), (120, 130))))


def windows(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Sliding windows of one row, of a tile, and longer than what is stored."""
    seed = sizes.seeds("windows")
    for scheme, window in product(sizes.few, (1, 31, 32, 33, 500, 5000)):
        yield plain_trial(device, Case(scheme=scheme, heads=sizes.heads, length=900, window=window, seed=seed()))


def extras(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Capped scores, sinks, and the dtypes of queries and results."""
    seed = sizes.seeds("extras")
    for scheme in sizes.schemes(0):
        for cap, sinks, size in product((0.5, 30.0), (False, True), (1.0, 20.0)):
            case = Case(scheme=scheme, heads=sizes.heads, softcap=cap, sinks=sinks, query_size=size, seed=seed())
            yield plain_trial(device, case)
    for scheme in sizes.few:
        base = Case(scheme=scheme, heads=sizes.heads, batch=2, sinks=True, length=77, seed=seed())
        yield plain_trial(device, base)
        yield plain_trial(device, replace(base, bounds=((0, 0), (20, 77))))
        for query, out in product((BF16, FP16), (BF16, FP16, torch.float32)):
            if query == BF16 or base.formats[0].element != "bf16":
                yield plain_trial(device, replace(base, sinks=False, query_dtype=query, out_dtype=out))


def random_cases(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Everything at once, drawn at random."""
    seed = sizes.seeds("random")
    for turn in range(sizes.random):
        draw = Draw(seed())
        length, batch = draw.between(1, 900), draw.between(1, 3)
        starts = [draw.between(0, length) for _ in range(batch)]
        rows = tuple((start, draw.between(start, length)) for start in starts)
        case = Case(
            scheme=sizes.few[turn % len(sizes.few)],
            heads=draw.between(1, sizes.heads),
            batch=batch,
            length=length,
            # Where every number of columns takes a kernel that is to be compiled, only those of four.
            group=draw.between(3, 4) if sizes.rotate else draw.between(1, 16),
            queries=1 if sizes.rotate else draw.pick((1, 1, 2, 5)),
            position=draw.pick((None, draw.between(0, length + 50))),
            window=draw.pick((0, draw.between(1, 1000))),
            bounds=draw.pick((None, rows)),
            sinks=draw.pick((False, True)),
            splits=draw.between(0, 40),
            query_size=draw.pick((0.01, 1.0, 8.0)),
            value_size=draw.pick((1e-3, 1.0, 50.0)),
            growing=length > 1 and draw.pick((True, False, False, False)),
            padded=draw.pick((False, True)),
            seed=seed(),
        )
        yield plain_trial(device, case)


SHAPE_CHECKS: dict[str, Check] = {
    "accuracy": accuracy,
    "unused slots": unused_slots,
    "bounds": bounds,
    "groups": groups,
    "lengths": lengths,
    "head sizes": head_dims,
    "queries": queries,
    "windows": windows,
    "softcap, sinks, dtypes": extras,
    "random": random_cases,
}
"""By what they check."""
