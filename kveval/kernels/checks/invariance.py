"""Checks of what should not change decode attention's result: another split of the work, scale, place or length.

All data is random, all bytes that nothing may read are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from kveval.kernels import decode, reference
from kveval.kernels.append import append_cuda
from kveval.kernels.checks.cases import POISON, Cache, Case, Planes
from kveval.kernels.checks.measure import Measured, Yardstick, different, merged
from kveval.kernels.checks.trials import Check, Sizes, Trial, plain_trial
from kveval.kernels.formats import format_key

__all__ = ["INVARIANCE_CHECKS"]

FP16 = torch.float16


def splits(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """However many blocks share a head."""
    seed = sizes.seeds("splits")
    shapes = ((sizes.heads, 2, 90), (sizes.heads, 2, 1100), (1, 1, 9000))
    for scheme, (heads, batch, length) in product(sizes.few, shapes):
        case = Case(scheme=scheme, heads=heads, batch=batch, length=length, seed=seed())

        def run(case: Case = case) -> list[Measured]:
            cache = case.make(device)
            yardstick = Yardstick.of(case, cache)
            one, _ = case.attend(cache, splits=1)
            found = []
            for n in (1, 2, 3, 7, 32, 150, 0):
                out, lse = case.attend(cache, splits=n)
                found += yardstick.measure(out, lse, note=f", {n} splits")
                found.append(yardstick.agree(f"{n} splits and one", out, one))
            return found

        yield Trial(str(case), run, (case, replace(case, splits=3)))


def chunks(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Token by token gives what one chunk gives, over the same cache."""
    seed = sizes.seeds("chunks")
    for turn, ((first, last), window) in enumerate(product(((95, 130), (191, 194)), (0, 50))):
        for scheme in sizes.schemes(turn):
            chunk = Case(
                scheme=scheme, heads=sizes.heads, splits=sizes.splits, queries=last - first + 1, length=last,
                window=window, seed=seed(),
            )  # fmt: skip
            steps = tuple(replace(chunk, queries=1, length=n) for n in range(first, last + 1))

            def run(chunk: Case = chunk, steps: tuple[Case, ...] = steps) -> list[Measured]:
                cache = chunk.make(device)
                yardstick = Yardstick.of(chunk, cache)
                out, lse = chunk.attend(cache)
                singles = [
                    step.attend(replace(cache, query=cache.query[:, :, i : i + 1])) for i, step in enumerate(steps)
                ]
                stepped = torch.cat([o for o, _ in singles], dim=1), torch.cat([x for _, x in singles], dim=2)
                return [
                    *yardstick.measure(out, lse),
                    *yardstick.measure(*stepped, note=", token by token"),
                    yardstick.agree("chunk and tokens", out, stepped[0]),
                ]

            yield Trial(f"{chunk}, and one by one", run, (chunk, steps[0]))


def equivariance(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Keys times 2^a with scores over 2^a, and values times 2^b: the result is times 2^b, to the bit.

    Where the format stores other codes for scaled numbers (a constant scale, say), it is compared with what is then
    stored.
    """
    seed = sizes.seeds("equivariance")
    shifts = ((5, 3), (-40, 30)) if sizes.rotate else ((5, 3), (-6, -4), (20, -20), (-40, 30))
    for scheme, (a, b) in product(sizes.every(), shifts):
        case = Case(scheme=scheme, heads=sizes.heads, splits=sizes.splits, batch=2, length=170, seed=seed())
        scaled = replace(case, key_size=2.0**a, value_size=2.0**b)

        def run(case: Case = case, scaled: Case = scaled, a: int = a, b: int = b) -> list[Measured]:
            cache, other = case.make(device), scaled.make(device)
            out, lse = scaled.attend(other)
            found = Yardstick.of(scaled, other).measure(out, lse)
            if _is_multiple(_decoded(case, cache), _decoded(scaled, other), (2.0**a, 2.0**b)):
                plain_out, plain_lse = case.attend(cache)
                found += [different("bits of out", out / 2.0**b, plain_out), different("bits of lse", lse, plain_lse)]
            return found

        yield Trial(f"{scheme} K*2^{a} V*2^{b}", run, (case,))


def magnitudes(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Queries and values far from 1."""
    seed = sizes.seeds("magnitudes")
    for scheme in sizes.few:
        base = Case(scheme=scheme, heads=sizes.heads, batch=2, length=600, seed=seed())
        for changed in (
            {"query_size": 1e5}, {"query_size": 1e-6}, {"query_size": 30.0, "splits": 7}, {"value_size": 1e-4},
            {"value_size": 1e-4, "query_size": 10.0}, {"outlier": 1e4}, {"outlier": 1e4, "query_size": 5.0},
            {"growing": True, "splits": 3}, {"query_size": 0.0}, {"query_size": 1e-38},
        ):  # fmt: skip
            yield plain_trial(device, replace(base, **changed))
        if base.formats[0].element != "bf16":
            yield plain_trial(device, replace(base, query_dtype=FP16, query_size=1e4))
            yield plain_trial(device, replace(base, query_dtype=FP16, query_size=1e-6))


def strides(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Heads and sequences further apart than they have to be, and queries that are a transposed view."""
    seed = sizes.seeds("strides")
    for scheme in sizes.few:
        case = Case(scheme=scheme, heads=3, batch=3, length=170, padded=True, seed=seed())
        yield plain_trial(device, case)

        def run(case: Case = case) -> list[Measured]:
            cache = case.make(device)
            yardstick = Yardstick.of(case, cache)
            view = cache.query.transpose(1, 2).contiguous().transpose(1, 2)
            apart = torch.full((*view.shape[:3], view.shape[3] + 3), torch.nan, dtype=view.dtype, device=device)
            apart[..., :-3] = view
            found = []
            for name, query in (("transposed", view), ("rows apart", apart[..., :-3])):
                found += yardstick.measure(*case.attend(replace(cache, query=query)), note=f", {name}")
            return found

        yield Trial(f"{case}, query views", run, (case,))


def long(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """The error does not grow with the length."""
    seed = sizes.seeds("long")
    for scheme in sizes.few:
        near, far = (Case(scheme=scheme, heads=sizes.heads, length=n, seed=seed()) for n in sizes.long)

        def run(near: Case = near, far: Case = far) -> list[Measured]:
            errors = []
            for case in (near, far):
                cache = case.make(device)
                errors.append(Yardstick.of(case, cache).measure(*case.attend(cache)))
            limit = 2 * errors[0][0].error
            return [*errors[1], Measured(f"out at {near.length} twice", errors[1][0].error, limit)]

        yield Trial(str(far), run, (near, far))


def repeats(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """The same call gives the same bits."""
    seed = sizes.seeds("repeats")
    for scheme, splits in product(sizes.few, (0, 7)):
        case = Case(scheme=scheme, heads=sizes.heads, batch=2, length=777, splits=splits, seed=seed())

        def run(case: Case = case) -> list[Measured]:
            cache = case.make(device)
            (out, lse), *others = [case.attend(cache) for _ in range(4)]
            again = [m for o, x in others for m in (different("bits of out", o, out), different("bits of lse", x, lse))]
            # Results of NaN are equal too.
            return [*Yardstick.of(case, cache).measure(out, lse), *again]

        yield Trial(str(case), run, (case,))


def graphs(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """A CUDA graph replays what a call does, on the data that is then in memory."""
    if device.type != "cuda":
        return
    seed = sizes.seeds("graphs")
    for scheme, splits in product(sizes.few, (0, 7)):
        case = Case(scheme=scheme, heads=sizes.heads, batch=2, length=777, splits=splits, seed=seed())

        def run(case: Case = case) -> list[Measured]:
            cache, other = case.make(device), replace(case, seed=case.seed + 2**41).make(device)
            case.attend(cache)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, lse = case.attend(cache)
            found = []
            for name, data in (("first", cache), ("same data", cache), ("new data", other)):
                _overwrite(cache, data)
                graph.replay()
                eager_out, eager_lse = case.attend(cache)
                found += Yardstick.of(case, cache).measure(out, lse, note=f", {name}")
                found += [
                    different(f"bits of out, {name}", out, eager_out),
                    different(f"bits of lse, {name}", lse, eager_lse),
                ]
            return found

        yield Trial(str(case), run, (case,))


def back_to_back(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Launches that follow each other at once, each of which needs the result of the one before, lose nothing.

    Every step attends, asks with what came out, and appends it as keys and values. On a GPU all steps are one graph,
    which leaves no time between them; what it computes must be what the steps give when each is waited for.
    """
    seed = sizes.seeds("back_to_back")
    steps = 12
    lengths = (200, sizes.long[0])
    for scheme, length in ((scheme, n) for turn, n in enumerate(lengths) for scheme in sizes.schemes(turn)):
        case = Case(
            scheme=scheme, heads=sizes.heads, batch=2, length=length, out_dtype=torch.bfloat16, query_size=8.0,
            seed=seed(),
        )  # fmt: skip

        def run(case: Case = case) -> list[Measured]:
            start, waited, chained = (case.make(device) for _ in range(3))
            expected = _chain(case, waited, steps, wait=True)
            if device.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = _chain(case, chained, steps)
                for _ in range(3):
                    _overwrite(chained, start)
                    graph.replay()
            else:
                found = _chain(case, chained, steps)
            pairs = [(chained.key.q, waited.key.q), (chained.value.q, waited.value.q), (found, expected)]
            return [
                Measured("numbers that are not finite", float((~expected.isfinite()).sum()), 0.0),
                *(different(what, *pair) for what, pair in zip(("keys", "values", "out"), pairs, strict=True)),
            ]

        yield Trial(str(case), run, (case,))


def tails(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """First and last tokens in BF16, attended to apart and merged by log-sum-exp, give what one attention would."""
    seed = sizes.seeds("tails")
    first, last = 4, 65
    for scheme, n in product(sizes.few, (1, 7)):
        part_of = {"heads": sizes.heads, "splits": sizes.splits, "queries": n, "seed": seed()}
        middle = Case(scheme=scheme, length=300, position=300 + last - n, **part_of)  # type: ignore[arg-type]
        sink = Case(scheme="bf16", length=first, position=first + middle.at, **part_of)  # type: ignore[arg-type]
        tail = Case(scheme="bf16", length=last, **part_of)  # type: ignore[arg-type]

        def run(cases: tuple[Case, ...] = (sink, middle, tail)) -> list[Measured]:
            query = cases[0].make(device).query
            caches = [replace(replace(c, seed=c.seed + i).make(device), query=query) for i, c in enumerate(cases)]
            parts = list(zip(cases, caches, strict=True))
            return Yardstick.of_parts(parts).measure(*merged([case.attend(cache) for case, cache in parts]))

        yield Trial(f"{middle} between BF16", run, (sink, middle, tail))


def giant(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Heads that begin, and rows that lie, beyond 2^31 bytes of their plane."""
    if not sizes.giant:
        return
    seed = sizes.seeds("giant")
    for scheme in sizes.few:
        case = Case(scheme=scheme, length=3000, seed=seed())

        def run(case: Case = case) -> list[Measured]:
            cache = case.make(device)
            far = replace(cache, key=_heads_apart(cache.key, sizes.giant), value=_heads_apart(cache.value, sizes.giant))
            return Yardstick.of(case, cache).measure(*case.attend(far))

        yield Trial(f"{case}, heads {sizes.giant} bytes apart", run, (case,))
    case = Case(scheme="bf16", heads=1, length=sizes.giant // 256, seed=seed())
    yield plain_trial(device, case)
    yield plain_trial(device, replace(case, window=2000))


def _chain(case: Case, cache: Cache, steps: int, *, wait: bool = False) -> Tensor:
    """What the last of `steps` tokens gives; memory is not filled between launches, which would keep them apart."""
    query, device = cache.query, cache.query.device
    nonfinite = torch.zeros(2, dtype=torch.int32, device=device)
    key, value = cache.key, cache.value
    kfmt, vfmt = map(format_key, case.formats)
    for step in range(steps):
        now = replace(case, length=case.length + step, position=case.length + step - 1)
        arguments = now.arguments(replace(cache, query=query), out_dtype=case.out_dtype, splits=case.splits)
        out, _ = decode.decode_cuda(*arguments)
        query = out.transpose(1, 2)
        x = query[:, : case.heads]
        append_cuda(
            x, x, key.q, key.s, key.g, value.q, value.s, value.g, nonfinite, now.length, now.length, kfmt, vfmt
        )  # fmt: skip
        if wait and device.type == "cuda":
            torch.cuda.synchronize(device)
    return query


def _decoded(case: Case, cache: Cache) -> tuple[Tensor, ...]:
    """Keys and values float32 [B, H, N, D] as stored."""
    return tuple(
        reference.dequantize(side.q, side.s, side.g, format_key(fmt), case.head_dim, 0, case.length, torch.float32)
        for side, fmt in zip((cache.key, cache.value), case.formats, strict=True)
    )


def _is_multiple(ones: tuple[Tensor, ...], others: tuple[Tensor, ...], by: tuple[float, ...]) -> bool:
    return all(torch.equal(one * factor, other) for one, other, factor in zip(ones, others, by, strict=True))


def _overwrite(cache: Cache, data: Cache) -> None:
    """Put `data` where a graph reads."""
    pairs = [(cache.query, data.query)]
    for here, there in ((cache.key, data.key), (cache.value, data.value)):
        pairs += [
            (a, b) for a, b in zip((here.q, here.s, here.g), (there.q, there.s, there.g), strict=True)
            if a is not None and b is not None
        ]  # fmt: skip
    for a, b in pairs:
        a.copy_(b)


def _heads_apart(planes: Planes, stride: int) -> Planes:
    """A copy whose heads begin `stride` bytes apart."""

    def moved(plane: Tensor | None) -> Tensor | None:
        if plane is None:
            return None
        batch, heads, _, width = plane.shape
        memory = torch.full((batch * heads * stride,), POISON, dtype=torch.uint8, device=plane.device)
        apart = memory.as_strided(plane.shape, (heads * stride, stride, width, 1))
        return apart.copy_(plane)

    codes = moved(planes.q)
    assert codes is not None
    return Planes(codes, moved(planes.s), planes.g)


INVARIANCE_CHECKS: dict[str, Check] = {
    "splits": splits,
    "chunks": chunks,
    "scale equivariance": equivariance,
    "magnitudes": magnitudes,
    "strides": strides,
    "long": long,
    "repeats": repeats,
    "graphs": graphs,
    "back to back": back_to_back,
    "tails": tails,
    "giant": giant,
}
"""By what they check."""
