"""Decode attention: the kernel in the emulator, held against exact attention, and the host side of its launch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator.emulator import EmulatorLauncher
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kveval.errors import UnsupportedError
from kveval.formats.spec import TensorFormat, get_scheme
from kveval.kernels import decode
from kveval.kernels.checks import SMALL, run_check
from kveval.kernels.checks.attention import SHAPE_CHECKS
from kveval.kernels.checks.cases import Cache, Case, Planes, covered_schemes
from kveval.kernels.checks.invariance import INVARIANCE_CHECKS
from kveval.kernels.checks.measure import Yardstick
from kveval.kernels.decode import (
    HEAD_DIMS,
    LARGEST_COLUMNS,
    Tuning,
    columns_of,
    decode_cuda,
    misfit,
    shared_bytes,
    tuning,
    work,
)
from kveval.kernels.formats import format_key
from kveval.kernels.launcher import use_launcher

CPU = torch.device("cpu")
SHARED_MEMORY = (227 * 1024, 163 * 1024, 99 * 1024)
"""Most that a block can have, of compute capability 9.0, 8.0 and 8.9."""
NAMES = [name for name in (*SHAPE_CHECKS, *INVARIANCE_CHECKS) if name not in ("graphs", "giant")]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_check_passes(emulator: EmulatorLauncher, name: str) -> None:
    emulator.seed = 1 + NAMES.index(name)
    results = list(run_check(name, CPU, replace(SMALL, seed=emulator.seed)))
    assert results
    failed = [f"{r.case}, {r.what}: {r.error:.3g}, limit {r.limit:.3g} {r.message}" for r in results if not r.passed]
    assert not failed


@pytest.mark.parametrize("scheme", SMALL.few)
def test_the_order_of_blocks_changes_no_bit(emulator: EmulatorLauncher, scheme: str) -> None:
    """Whichever block is the last to finish a head combines it."""
    for splits, heads in ((0, 3), (2, 2), (7, 2)):
        case = Case(scheme=scheme, heads=heads, length=600, splits=splits)
        cache = case.make(CPU)
        results = []
        for seed in range(6):
            emulator.seed = seed
            results.append(case.attend(cache))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "scheme"), [(80, "fp8_per_token_head"), (80, "nvfp4"), (89, "k8v4")])
def test_gpus_before_hopper(kernel_builds: Path, architecture: int, scheme: str) -> None:
    """They have no bulk copies, and the oldest convert no e4m3."""
    base = Case(scheme=scheme, splits=2, batch=2, length=500)
    cases = [
        base,
        replace(base, length=1),
        replace(base, length=1500),
        replace(base, bounds=((0, 0), (61, 450)), sinks=True),
        replace(base, window=90, query_size=6.0, growing=True),
    ]
    with use_launcher(EmulatorLauncher(kernel_builds, architecture=architecture, seed=3)):
        for case in cases:
            cache = case.make(CPU)
            measured = Yardstick.of(case, cache).measure(*case.attend(cache))
            assert all(m.error <= m.limit for m in measured), (case, measured)


class Guarded(TorchDispatchMode):
    """Inside, memory that is asked for has bytes around it that must stay as they are."""

    GUARD, PATTERN = 4096, 0x5C

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        allocates = {torch.ops.aten.new_empty.default: 1, torch.ops.aten.zeros.default: 0}
        if func not in allocates:
            return func(*args, **kwargs)
        dtype, size = kwargs["dtype"], args[allocates[func]]
        whole = torch.full((math.prod(size) * dtype.itemsize + 2 * self.GUARD,), self.PATTERN, dtype=torch.uint8)
        self.given.append(whole)
        inner = whole[self.GUARD : -self.GUARD]
        inner.fill_(0 if func is torch.ops.aten.zeros.default else 0xFF)
        return inner.view(dtype).view(size)

    def broken(self) -> bool:
        around = [part for whole in self.given for part in (whole[: self.GUARD], whole[-self.GUARD :])]
        return not all((part == self.PATTERN).all() for part in around)


def test_nothing_is_written_outside(emulator: EmulatorLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Case(scheme="nvfp4", heads=2, batch=2, length=333)
    cases = [
        replace(base, splits=splits, queries=queries, out_dtype=out)
        for splits, queries, out in itertools.product((1, 7, 40), (1, 7), (torch.bfloat16, torch.float32))
    ]
    counters: list[Tensor] = []

    def own_counters(device: torch.device, count: int) -> Tensor:
        counters.append(torch.zeros(count, dtype=torch.int32, device=device))
        return counters[-1]

    monkeypatch.setattr(decode, "_counters", own_counters)
    for case in [*cases, replace(base, heads=3, batch=1, length=600)]:
        cache = case.make(CPU)
        arguments = case.arguments(cache, out_dtype=case.out_dtype, splits=case.splits)
        with Guarded() as guard:
            out, lse = decode_cuda(*arguments)
        # The result and its log-sum-exp, the blocks' parts, and the counters.
        assert len(guard.given) == 4
        assert not guard.broken(), case
        assert not counters.pop().any(), "counters are zero again"
        assert all(m.error <= m.limit for m in Yardstick.of(case, cache).measure(out, lse)), case


def test_heads_and_rows_beyond_32_bits(emulator: EmulatorLauncher, tmp_path: Path) -> None:
    """Planes in files full of holes."""

    def far_apart(plane: Tensor | None, name: str) -> Tensor | None:
        if plane is None:
            return None
        _, heads, rows, width = plane.shape
        stride = 2**32 + 4096
        size = (heads - 1) * stride + rows * width
        memory = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.uint8)
        return memory.as_strided(plane.shape, (heads * stride, stride, width, 1)).copy_(plane)

    case = Case(scheme="fp8_per_token_head", length=200, splits=2)
    cache = case.make(CPU)
    sides = {}
    for role, planes in (("key", cache.key), ("value", cache.value)):
        q, s = far_apart(planes.q, f"{role} codes"), far_apart(planes.s, f"{role} scales")
        assert q is not None
        sides[role] = Planes(q, s, planes.g)
    far = case.attend(replace(cache, **sides))
    assert all(torch.equal(a, b) for a, b in zip(far, case.attend(cache), strict=True))


# ---- what is refused


def attend(cache: Cache, case: Case, **changed: Any) -> None:
    arguments = list(case.arguments(cache, out_dtype=torch.float32, splits=0))
    names = ["query", "kq", "ks", "kg", "vq", "vs", "vg", "bounds", "sinks", "kfmt", "vfmt"]
    for name, value in changed.items():
        arguments[names.index(name)] = value
    decode_cuda(*arguments)


def test_layouts_that_copies_cannot_take(emulator: EmulatorLauncher) -> None:
    case = Case(scheme="nvfp4", length=20)
    cache = case.make(CPU)
    q = cache.key.q
    odd = torch.zeros(2 * 5128, dtype=torch.uint8).as_strided(q.shape, (2 * 5128, 5128, 64, 1))
    for wrong in (q.transpose(2, 3).contiguous().transpose(2, 3), torch.cat([q, q], 3)[..., : q.shape[3]], odd):
        with pytest.raises(UnsupportedError, match="rows apart, or heads that begin off a multiple of 16"):
            attend(cache, case, kq=wrong)
    off = torch.zeros(q.numel() + 16, dtype=torch.uint8)[8 : 8 + q.numel()].view(q.shape)
    with pytest.raises(UnsupportedError, match="a multiple of 16"):
        attend(cache, case, vq=off)
    assert not emulator.launches


def test_dtypes_that_are_not_multiplied(emulator: EmulatorLauncher) -> None:
    for scheme, dtype, message in (
        ("nvfp4", torch.float32, "queries in bf16 or fp16, not torch.float32"),
        ("bf16", torch.float16, "keys stored in bf16"),
        ("k16v8", torch.float16, "keys stored in bf16"),
    ):
        case = Case(scheme=scheme, length=20)
        cache = case.make(CPU)
        with pytest.raises(UnsupportedError, match=message):
            attend(cache, case, query=cache.query.to(dtype))
    assert not emulator.launches


def test_a_format_without_a_kernel_is_refused(emulator: EmulatorLauncher) -> None:
    case = Case(scheme="nvfp4", length=20)
    with pytest.raises(UnsupportedError, match="no element e1m2") as refused:
        attend(case.make(CPU), case, vfmt=format_key(get_scheme("e1m2_g32").value))
    assert "dequant" in refused.value.remedy


@pytest.mark.parametrize(
    ("changed", "dims", "message"),
    [
        ({}, (128, 64), "keys have 128 numbers per head and values 64"),
        ({}, (96, 96), "heads of 64, 128, 192, 256, not 96"),
        ({"group_size": 16, "scale_dtype": "bf16", "scale_rule": "amax"}, (128, 128), "a multiple of 32, not 16"),
        ({"group_size": 32, "scale_dtype": "e4m3", "scale_rule": "amax"}, (128, 128), "in groups of 16 alone"),
        ({"group_size": 64, "scale_dtype": "fp32", "scale_rule": "minmax"}, (128, 128), "zero points in bf16 or fp16"),
    ],
)
def test_what_does_not_fit(changed: dict[str, Any], dims: tuple[int, int], message: str) -> None:
    element = "uint4" if changed.get("scale_rule") == "minmax" else "e2m1"
    fmt = get_scheme("nvfp4").key
    if changed:
        fmt = TensorFormat(element=element, granularity="per_group", **changed)
    assert message in misfit(fmt, fmt, *dims)
    assert misfit(get_scheme("nvfp4").key, get_scheme("bf16").value, 128, 128) == ""


def test_presets_with_a_kernel() -> None:
    covered = set(covered_schemes(128))
    assert covered.isdisjoint({"kivi4", "kivi2", "q8_0", "q4_0", "iq4_nl", "e1m2_g32"})
    assert len(covered) >= 17


# ---- how a call is cut up


def shapes() -> Iterator[tuple[int, int, int, int]]:
    """Row bytes, head size, columns and shared memory of all that can be asked for."""
    for name in covered_schemes(128):
        for head_dim, columns, limit in itertools.product(HEAD_DIMS, (2, 4, 8, 16), SHARED_MEMORY):
            scheme = get_scheme(name)
            if columns <= LARGEST_COLUMNS[head_dim] and not misfit(scheme.key, scheme.value, head_dim, head_dim):
                row = sum(f.payload_bytes(head_dim) + f.scale_bytes(head_dim) for f in (scheme.key, scheme.value))
                yield row, head_dim, columns, limit


def test_every_block_fits_its_multiprocessor() -> None:
    for row, head_dim, columns, limit in set(shapes()):
        shape = tuning(row, head_dim, columns, limit)
        assert shape.tokens in (16, 32)
        assert shape.stages >= 2
        assert 1 <= shape.warps <= 16
        assert shared_bytes(shape, row, head_dim, columns) * shape.blocks <= limit, (row, head_dim, columns, limit)
        # Stages begin at multiples of 16 bytes, and so does each of their four parts.
        assert shape.tokens * row % 16 == 0


def test_columns_hold_what_is_asked_or_the_most() -> None:
    for head_dim, wanted in itertools.product(HEAD_DIMS, range(1, 200)):
        columns = columns_of(head_dim, wanted)
        assert columns in (2, 4, 8, 16)
        assert columns <= LARGEST_COLUMNS[head_dim]
        assert columns >= min(wanted, LARGEST_COLUMNS[head_dim])
        assert columns == 2 or columns // 2 < wanted


def test_every_tile_belongs_to_one_block() -> None:
    draw = torch.Generator().manual_seed(0)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    for _ in range(2000):
        shape = Tuning(tokens=16 * between(1, 2), stages=2, warps=4 * between(1, 4), blocks=between(1, 2))
        heads, length, queries = between(1, 40), between(0, 3000), between(1, 64)
        position, window = between(0, length + 100), between(0, 1) * between(1, 500)
        asked, multiprocessors = between(0, 1) * between(1, 50), between(1, 150)
        cut = work(
            shape, 3, heads, length=length, position=position, queries=queries, window=window, splits=asked,
            multiprocessors=multiprocessors,
        )  # fmt: skip
        blocks = cut.grid[0] * cut.grid[2]
        assert cut.grid[1] == 3
        assert cut.first % shape.tokens == 0
        assert cut.first <= max(0, position - window + 1 if window else 0)
        assert cut.first + cut.tiles * shape.tokens >= min(length, position + queries)
        if cut.splits:
            assert blocks == heads * cut.splits
            assert cut.splits * cut.share + cut.longer == cut.tiles
            assert cut.longer < cut.splits <= cut.tiles
        else:
            assert blocks * cut.share + cut.longer == heads * cut.tiles
            assert cut.longer < blocks <= multiprocessors * shape.blocks
        if asked:
            assert cut.splits == min(asked, cut.tiles)
        assert cut.share >= 1


def test_a_window_far_behind_reads_only_its_rows(emulator: EmulatorLauncher) -> None:
    cut = work(
        Tuning(32, 2, 16, 1), 1, 8, length=131072, position=131071, queries=1, window=100, splits=0, multiprocessors=132
    )
    assert cut.first >= 131071 - 100 - 32
    assert cut.tiles <= 5


def test_kernels_of_other_sizes_are_other_kernels() -> None:
    key = format_key(get_scheme("nvfp4").key)
    shape = Tuning(32, 2, 16, 1)
    made = {
        decode.variant(key, key, d, c, shape, one_head=o, softcap=s)
        for d, c, o, s in itertools.product((64, 128), (2, 4), (False, True), (False, True))
    }
    assert len(made) == 16
