"""The host side of kernels/decode.cu: what it can read, how it is compiled for a case, and its launch.

Shape legend: B batch, H KV heads, Hq query heads, Lq queries, D head size. A column is a (query, query head) pair; the
Hq / H * Lq columns of a KV head share its keys and values.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kveval.errors import UnsupportedError
from kveval.formats.spec import TensorFormat
from kveval.kernels import formats
from kveval.kernels.compiler import Variant
from kveval.kernels.launcher import launcher
from kveval.kernels.structs import FLOATS, THREADS

__all__ = ["HEAD_DIMS", "Tuning", "Work", "decode_cuda", "misfit", "shared_bytes", "tuning", "variant", "work"]

HEAD_DIMS = (64, 128, 192, 256)
"""Head sizes whose rows the lanes of a warp share evenly."""

LARGEST_COLUMNS = {64: 16, 128: 16, 192: 8, 256: 8}
"""Columns that a block's registers hold, by head size."""

WIDE_ROW = 300
"""Bytes of a row from which a stage holds 16 tokens, not 32."""

IN_FLIGHT = 100 * 1024
"""Bytes that a multiprocessor's rings hold at least, where they fit."""

MOST_STAGES = 4
LOG2_E = 1.4426950408889634
ALIGNMENT = 16
"""Bytes to which rows of a head and of its scales begin and end; copies take as many at a time."""

EVEN_SPLIT = 0.9
"""Part of the blocks that may run at once which is enough if every head then gets as many."""


class Plane(ctypes.Structure):
    """Payload or scales: address and strides in bytes."""

    _fields_ = (("data", ctypes.c_uint64), ("batch_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


class DecodeParams(ctypes.Structure):
    """The kernel's argument, as in decode.cu."""

    _fields_ = (
        *((name, Plane) for name in ("key", "value", "key_scale", "value_scale")),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "key_global", "value_global", "query", "out", "lse", "partial", "counters", "bounds", "sinks",
            )
        ),
        *((name, ctypes.c_int64) for name in ("query_batch", "query_head", "query_row")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "key_global_batch", "key_global_head", "value_global_batch", "value_global_head", "batch", "kv_heads",
                "group", "queries", "length", "position", "window", "first", "tiles", "query_is_half", "out_type",
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("share", ctypes.c_uint32),
        ("longer", ctypes.c_uint32),
        ("two", ctypes.c_uint32),
    )  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """How a block is built.

    Attributes:
        tokens: Of a stage: 16 or 32.
        stages: Of each warp's ring.
        warps: Of a block.
        blocks: Per multiprocessor.
    """

    tokens: int
    stages: int
    warps: int
    blocks: int


@dataclass(frozen=True)
class Work:
    """How one call is cut up.

    Attributes:
        first: First row of the first tile.
        tiles: Per head.
        splits: Blocks that share each head; 0: all blocks share all heads.
        share: Tiles of a block.
        longer: How many of the first blocks (of a head, if `splits`) have one tile more.
        grid: Blocks that share the tiles (of a head, if `splits`), blocks that share the columns, heads (1 without
            `splits`).
    """

    first: int
    tiles: int
    splits: int
    share: int
    longer: int
    grid: tuple[int, int, int]


def misfit(key: TensorFormat, value: TensorFormat, head_dim_k: int, head_dim_v: int) -> str:
    """Why decode attention can't read a layer stored so; "" if it can. The transform does not count."""
    if head_dim_k != head_dim_v:
        return f"keys have {head_dim_k} numbers per head and values {head_dim_v}; the decode kernel takes equal ones"
    if head_dim_k not in HEAD_DIMS:
        return f"the decode kernel takes heads of {', '.join(map(str, HEAD_DIMS))}, not {head_dim_k}"
    for fmt in (key, value):
        if reason := formats.misfit(fmt, head_dim_k):
            return reason
        group = fmt.group_size or head_dim_k
        if fmt.scale_dtype == "e4m3":
            if fmt.element != "e2m1" or group != 16:
                return "the decode kernel takes e4m3 scales with e2m1 elements in groups of 16 alone"
        elif group % 32:
            return f"the decode kernel takes groups of a multiple of 32, not {group}"
        if fmt.rule.stored == 2 and fmt.scale_dtype == "fp32":
            return "the decode kernel takes zero points in bf16 or fp16, not fp32"
    return ""


def tuning(row: int, head_dim: int, columns: int, shared_limit: int) -> Tuning:
    """The block for rows of `row` bytes (keys and values, payload and scales) and so many columns.

    Found by measurement on an H200 (kernels/README.md): 12 warps where their registers suffice, and enough stages for
    `IN_FLIGHT` bytes. `shared_limit` is the shared memory that a block may have, in bytes.
    """
    tokens = 16 if row > WIDE_ROW else 32
    warps = 8 if head_dim * max(columns, 8) > 1024 or row > 220 else 12
    while True:
        stage = warps * (tokens * row + 8)
        room = shared_limit - warps * 4 * (head_dim + 2) * columns - 256
        stages = min(MOST_STAGES, max(2, -(-IN_FLIGHT // stage)), room // stage)
        if stages >= 2:
            return Tuning(tokens, stages, warps, 1)
        if tokens == 32:
            tokens = 16
        else:
            warps //= 2


def shared_bytes(shape: Tuning, row_bytes: int, head_dim: int, columns: int) -> int:
    """Dynamic shared memory of a block: rings, their barriers, the warps' results, a flag."""
    rings = shape.warps * shape.stages * (shape.tokens * row_bytes + 8)
    return -(-rings // 128) * 128 + shape.warps * 4 * (head_dim * columns + 2 * columns) + 16


def work(
    shape: Tuning, column_blocks: int, heads: int, *, length: int, position: int, queries: int, window: int,
    splits: int, multiprocessors: int,
) -> Work:  # fmt: skip
    """Cut a call up: `heads` (sequences times KV heads) of `length` rows.

    `splits` blocks share a head if it is not 0; else as many blocks run as fit at once, but none with less than a tile
    for every other warp. Where that leaves few multiprocessors idle, every head gets as many blocks: one with the end
    of a head and the beginning of another would end later than the rest.
    """
    first = max(0, position - window + 1) // shape.tokens * shape.tokens if window else 0
    last = min(length, position + queries)
    tiles = max(1, -(-(last - first) // shape.tokens))
    blocks = min(multiprocessors * shape.blocks, max(heads, 2 * heads * tiles // shape.warps), heads * tiles)
    if not splits and blocks // heads * heads >= EVEN_SPLIT * blocks:
        splits = blocks // heads
    if splits:
        splits = min(splits, tiles)
        return Work(first, tiles, splits, *divmod(tiles, splits), grid=(splits, column_blocks, heads))
    return Work(first, tiles, 0, *divmod(heads * tiles, blocks), grid=(blocks, column_blocks, 1))


def columns_of(head_dim: int, columns_in_all: int) -> int:
    """Columns of a block: the least that hold all, up to what registers hold."""
    return next(
        (c for c in (2, 4, 8, 16) if c >= columns_in_all and c <= LARGEST_COLUMNS[head_dim]), LARGEST_COLUMNS[head_dim]
    )


@cache
def variant(
    kfmt: str, vfmt: str, head_dim: int, columns: int, shape: Tuning, *, one_head: bool, softcap: bool,
    loads_only: bool = False,
) -> Variant:  # fmt: skip
    """The kernel for two `format_key`s.

    `one_head`: each head has blocks of its own. `loads_only`: everything is read and nothing is computed.
    """
    role = [
        pair
        for prefix, key in (("K_", kfmt), ("V_", vfmt))
        for pair in formats.macros(key, head_dim, tensor_scale=False, prefix=prefix)
        if pair[0][2:] in ("ELEMENT", "SCALE", "GROUP", "ZERO")
    ]
    own = {
        "HEAD_DIM": head_dim, "COLUMNS": columns, "TOKENS": shape.tokens, "STAGES": shape.stages, "WARPS": shape.warps,
        "BLOCKS": shape.blocks, "ONE_HEAD": int(one_head), "SOFTCAP": int(softcap), "LOADS_ONLY": int(loads_only),
    }  # fmt: skip
    return Variant("decode.cu", "decode", (*own.items(), *role), fast_math=True)


def decode_cuda(
    query: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None, vg: Tensor | None,
    bounds: Tensor | None, sinks: Tensor | None, kfmt: str, vfmt: str, length: int, position: int, window: int,
    scaling: float, softcap: float, out_dtype: torch.dtype, splits: int, *, shape: Tuning | None = None,
    loads_only: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `kveval.kernels.ops.decode`.

    For benchmarks: `shape` replaces the tuning; with `loads_only` everything is read, nothing computed, and the result
    means nothing.

    Raises:
        UnsupportedError: for formats, dtypes and layouts that the kernel does not take.
    """
    batch, query_heads, queries, head_dim = query.shape
    heads = kq.shape[1]
    if query.numel() == 0:
        return (
            query.new_empty(batch, queries, query_heads, head_dim, dtype=out_dtype),
            query.new_empty(batch, query_heads, queries, dtype=torch.float32),
        )
    _check(query, kq, ks, vq, vs, kfmt, vfmt, out_dtype)
    bounds, sinks = (None if t is None else t.contiguous() for t in (bounds, sinks))
    if query.stride(3) != 1 or any(s % 8 for s in query.stride()[:3]) or query.data_ptr() % ALIGNMENT:
        query = query.contiguous()
    group = query_heads // heads
    columns = columns_of(head_dim, group * queries)
    widths = [q.shape[3] + (0 if s is None else s.shape[3]) for q, s in ((kq, ks), (vq, vs))]
    run = launcher()
    device = query.device
    shape = shape or tuning(sum(widths), head_dim, columns, run.shared_limit(device))
    cut = work(
        shape, -(-group * queries // columns), batch * heads, length=length, position=position, queries=queries,
        window=window, splits=splits, multiprocessors=run.multiprocessors(device),
    )  # fmt: skip
    out = query.new_empty(batch, queries, query_heads, head_dim, dtype=out_dtype)
    lse = query.new_empty(batch, query_heads, queries, dtype=torch.float32)
    part = columns * (head_dim + 2)
    partial = query.new_empty(2 * math.prod(cut.grid) * part, dtype=torch.float32)
    counters = _counters(device, batch * heads * cut.grid[1])
    params = DecodeParams(
        key=_plane(kq), value=_plane(vq), key_scale=_plane(ks), value_scale=_plane(vs), key_global=_address(kg),
        value_global=_address(vg), query=query.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(),
        partial=partial.data_ptr(), counters=counters.data_ptr(), bounds=_address(bounds), sinks=_address(sinks),
        query_batch=query.stride(0), query_head=query.stride(1), query_row=query.stride(2),
        batch=batch, kv_heads=heads, group=group, queries=queries, length=length, position=position, window=window,
        first=cut.first, tiles=cut.tiles, query_is_half=query.dtype == torch.float16, out_type=FLOATS[out_dtype],
        scale=scaling * LOG2_E, softcap=softcap * LOG2_E, share=cut.share, longer=cut.longer, two=2,
    )  # fmt: skip
    for name, scale in (("key", kg), ("value", vg)):
        if scale is not None:
            setattr(params, f"{name}_global_batch", scale.stride(0) if scale.shape[0] > 1 else 0)
            setattr(params, f"{name}_global_head", scale.stride(1) if scale.shape[1] > 1 else 0)
    run.launch(
        variant(
            kfmt, vfmt, head_dim, columns, shape, one_head=cut.splits > 0, softcap=bool(softcap), loads_only=loads_only
        ),
        grid=cut.grid,
        block=THREADS * shape.warps,
        shared_bytes=shared_bytes(shape, sum(widths), head_dim, columns),
        params=params,
        device=device,
    )
    return out, lse


def _check(
    query: Tensor, kq: Tensor, ks: Tensor | None, vq: Tensor, vs: Tensor | None, kfmt: str, vfmt: str,
    out_dtype: torch.dtype,
) -> None:  # fmt: skip
    key, value = formats.format_of(kfmt), formats.format_of(vfmt)
    if reason := misfit(key, value, query.shape[3], formats.stored_width(value, vq.shape[3])):
        raise UnsupportedError(f"{reason}.", remedy="Attend with `attention: dequant`.")
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"the decode kernel takes queries in bf16 or fp16, not {query.dtype}.",
            remedy="Load the model in bfloat16, or attend with `attention: dequant`.",
        )
    if key.element == "bf16" and query.dtype != torch.bfloat16:
        raise UnsupportedError(
            "keys stored in bf16 are multiplied with queries in bf16, not fp16.",
            remedy="Load the model in bfloat16, or attend with `attention: dequant`.",
        )
    if out_dtype not in FLOATS:
        raise UnsupportedError(
            f"the decode kernel gives bf16, fp16 or fp32, not {out_dtype}.", remedy="Ask for one of these."
        )
    for plane in (kq, ks, vq, vs):
        if plane is None:
            continue
        rows = plane.stride(3) == 1 and plane.stride(2) == plane.shape[3]
        if not rows or any(s % ALIGNMENT for s in plane.stride()[:2]) or plane.data_ptr() % ALIGNMENT:
            raise UnsupportedError(
                f"a packed plane of strides {plane.stride()} has rows apart, or heads that begin off a multiple of "
                f"{ALIGNMENT} bytes.",
                remedy="Allocate a multiple of 16 tokens and keep the rows of a head together.",
            )


def _plane(tensor: Tensor | None) -> Plane:
    return Plane() if tensor is None else Plane(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass
class _Ring:
    """int32 zeros of a device, handed out in turn; a launch leaves those that it got as zeros."""

    zeros: Tensor
    next: int = 0


_rings: dict[torch.device, _Ring] = {}
COUNTERS = 2**20
"""Far more than all launches that run at one time use, on any stream or in any graph: none meets another's."""


def _counters(device: torch.device, count: int) -> Tensor:
    """`count` zeros for one launch."""
    ring = _rings.get(device)
    if ring is None or ring.zeros.numel() < count:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Filled anew with every replay, and the graph's own: of no use to others.
            return torch.zeros(count, dtype=torch.int32, device=device)
        ring = _rings[device] = _Ring(torch.zeros(max(COUNTERS, count), dtype=torch.int32, device=device))
    if ring.next + count > ring.zeros.numel():
        ring.next = 0
    ring.next += count
    return ring.zeros[ring.next - count : ring.next]
