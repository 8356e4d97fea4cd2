"""The ops `kveval::append`, `kveval::dequantize` and `kveval::decode`: torch on a CPU, kernels on an NVIDIA GPU.

Shape legend: B batch, H KV heads, Hq query heads, Lq queries, t new tokens, T capacity, D head size of keys, Dv of
values, P payload bytes and S scale bytes of a token. Packed tensors are uint8; a tensor-level scale is float32
[B or 1, H or 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kveval.errors import UnsupportedError
from kveval.kernels import reference
from kveval.kernels.formats import format_of, kernel_codec, stored_width, takes_tensor_scale

__all__ = ["append", "decode", "dequantize"]

_library = torch.library.Library("kveval", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "append(Tensor k, Tensor v, Tensor(a!) kq, Tensor(b!)? ks, Tensor? kg, Tensor(c!) vq, Tensor(d!)? vs, Tensor? vg, "
    "Tensor(e!) nonfinite, int kpos, int vpos, str kfmt, str vfmt) -> ()"
)
_library.define(  # type: ignore[no-untyped-call]
    "dequantize(Tensor q, Tensor? s, Tensor? g, str fmt, int head_dim, int start, int end, ScalarType dtype) -> Tensor"
)
_library.define(  # type: ignore[no-untyped-call]
    "decode(Tensor query, Tensor kq, Tensor? ks, Tensor? kg, Tensor vq, Tensor? vs, Tensor? vg, Tensor? bounds, "
    "Tensor? sinks, str kfmt, str vfmt, int length, int position, int window, float scaling, float softcap, "
    "ScalarType out_dtype, int splits) -> (Tensor out, Tensor lse)"
)


def append(
    k: Tensor, v: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None,
    vg: Tensor | None, nonfinite: Tensor, kpos: int, vpos: int, kfmt: str, vfmt: str,
) -> None:  # fmt: skip
    """Encode new keys and values and store them, in one launch.

    Args:
        k: bf16, fp16 or fp32 [B, H, t, D], any strides whose last is 1; t may be 0.
        v: [B, H, t, Dv] of the same dtype; its t may be another.
        kq: uint8 [B, H, T, P], written from row `kpos`.
        ks: uint8 [B, H, T, S], written likewise; None where the format stores no scales.
        kg: Tensor-level scale; None where there is none or it is 1.
        vq: As `kq`, of values, from row `vpos`.
        vs: As `ks`.
        vg: As `kg`.
        nonfinite: int32 [2]; 1 is written to the first if `k` has NaN or infinity, to the second if `v` has. What is
            stored of such numbers is undefined.
        kpos: First row of new keys.
        vpos: First row of new values.
        kfmt: `format_key` of how keys are stored.
        vfmt: Of how values are.

    Raises:
        UnsupportedError: for shapes, dtypes and formats that do not go together.
    """
    torch.ops.kveval.append.default(k, v, kq, ks, kg, vq, vs, vg, nonfinite, kpos, vpos, kfmt, vfmt)


def dequantize(
    q: Tensor, s: Tensor | None, g: Tensor | None, fmt: str, head_dim: int, start: int, end: int, dtype: torch.dtype
) -> Tensor:
    """Decode rows `start` to `end`.

    Args:
        q: uint8 [B, H, T, P].
        s: uint8 [B, H, T, S], or None.
        g: Tensor-level scale, or None.
        fmt: `format_key` of how they are stored.
        head_dim: D.
        start: First row.
        end: The row after the last.
        dtype: bf16, fp16 or fp32.

    Returns:
        `dtype` [B, H, end - start, D] contiguous.

    Raises:
        UnsupportedError: for shapes, dtypes and formats that do not go together.
    """
    out: Tensor = torch.ops.kveval.dequantize.default(q, s, g, fmt, head_dim, start, end, dtype)
    return out


def decode(
    query: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None, vg: Tensor | None,
    bounds: Tensor | None, sinks: Tensor | None, kfmt: str, vfmt: str, length: int, position: int, window: int,
    scaling: float, softcap: float, out_dtype: torch.dtype, splits: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of a few queries over packed keys and values.

    Query i stands at row `position + i`, which may lie beyond `length`: the rows are then an older part of its
    sequence. It attends to row j if start <= j < min(length, end), j <= position + i, and j > position + i - window if
    there is a window; start and end are those of its sequence in `bounds`.

    Args:
        query: [B, Hq, Lq, D], Hq a multiple of H; bf16 or fp16 on a GPU.
        kq: uint8 [B, H, T, P].
        ks: uint8 [B, H, T, S], or None.
        kg: Tensor-level scale, or None.
        vq: As `kq`, of values.
        vs: As `ks`.
        vg: As `kg`.
        bounds: int32 [B, 2], first row and the row after the last of each sequence; None: all rows.
        sinks: float32 [Hq], one more score in the softmax's sum, with no value behind it, neither scaled nor capped.
        kfmt: `format_key` of how keys are stored.
        vfmt: Of how values are.
        length: Rows that are stored.
        position: Row of the first query.
        window: Rows that a query sees, its own included; 0: all.
        scaling: Factor on the scores.
        softcap: Scores s become softcap * tanh(s / softcap); 0: they stay.
        out_dtype: Of the result.
        splits: Blocks among which the rows of a KV head are split on a GPU; 0: chosen.

    Returns:
        (`out_dtype` [B, Lq, Hq, Dv] contiguous; float32 [B, Hq, Lq], the natural logarithm of the softmax's sum). A
        query that attends to no row gives 0, and -inf, or its sink where it has one.

    Raises:
        UnsupportedError: for shapes, dtypes and formats that do not go together.
    """
    out: tuple[Tensor, Tensor] = torch.ops.kveval.decode.default(
        query, kq, ks, kg, vq, vs, vg, bounds, sinks, kfmt, vfmt, length, position, window, scaling, softcap, out_dtype,
        splits,
    )  # fmt: skip
    return out


# ---- checks, the same on every device. They run at every call: nothing is worked out that is not needed.

_MOST = 2**31 - 2**16
"""Rows are counted in 32 bits."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class _Layout(NamedTuple):
    """What a format makes of a token of one head."""

    unit: int
    payload: int
    scales: int
    takes_tensor_scale: bool


@cache
def _layout(key: str, head_dim: int) -> _Layout:
    fmt = kernel_codec(key, head_dim).format
    return _Layout(fmt.unit, fmt.payload_bytes(head_dim), fmt.scale_bytes(head_dim), takes_tensor_scale(fmt))


def _refusal(message: str) -> UnsupportedError:
    return UnsupportedError(message, remedy="Let kveval.kv_cache build and fill the cache.")


def _check_packed(
    name: str, q: Tensor, s: Tensor | None, g: Tensor | None, key: str, head_dim: int, start: int, end: int
) -> None:
    """Refuse packed tensors that the format of `key` does not make, or that lack rows `start` to `end`."""
    layout = _layout(key, head_dim)
    batch, heads, capacity, payload = q.shape
    if layout.unit != 1:
        raise _refusal(f"{name}: this format encodes {layout.unit} tokens together; ops take formats of one.")
    if payload != layout.payload or q.dtype != torch.uint8:
        raise _refusal(f"{name}: codes of a token take {layout.payload} bytes, not {payload} of {q.dtype}.")
    if not 0 <= start <= end <= capacity:
        raise _refusal(f"{name}: rows {start} to {end} of {capacity}.")
    if s is None:
        if layout.scales:
            raise _refusal(f"{name}: this format stores scales, and got none.")
    elif s.shape != (batch, heads, capacity, layout.scales) or s.dtype != torch.uint8:
        expected = (batch, heads, capacity, layout.scales)
        raise _refusal(f"{name}: scales are uint8 {expected}, not {s.dtype} {tuple(s.shape)}.")
    if g is not None:
        if not layout.takes_tensor_scale:
            raise _refusal(f"{name}: this format has no scale for the whole tensor.")
        if g.ndim != 2 or g.shape[0] not in (1, batch) or g.shape[1] not in (1, heads) or g.dtype != torch.float32:
            raise _refusal(
                f"{name}: a tensor's scale is float32 [B or 1, H or 1], not {g.dtype} {tuple(g.shape)}."
            )  # fmt: skip


def _check_append(
    k: Tensor, v: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None,
    vg: Tensor | None, nonfinite: Tensor, kpos: int, vpos: int, kfmt: str, vfmt: str,
) -> None:  # fmt: skip
    if k.dtype not in _FLOATS or v.dtype != k.dtype:
        raise _refusal(f"append got keys of {k.dtype} and values of {v.dtype}.")
    if nonfinite.dtype != torch.int32 or nonfinite.shape != (2,) or nonfinite.stride(0) != 1:
        raise _refusal("append: nonfinite is int32 [2].")
    for name, x, q, s, g, start, key in (("keys", k, kq, ks, kg, kpos, kfmt), ("values", v, vq, vs, vg, vpos, vfmt)):
        batch, heads, tokens, head_dim = x.shape
        if q.shape[0] != batch or q.shape[1] != heads:
            raise _refusal(f"{name}: {tuple(x.shape)} does not fit a cache of {tuple(q.shape)}.")
        if x.stride(3) != 1:
            raise _refusal(f"{name}: the numbers of a head are not side by side.")
        _check_packed(name, q, s, g, key, head_dim, start, start + tokens)
    if k.shape[:2] != v.shape[:2]:
        raise _refusal(f"append: keys {tuple(k.shape)} and values {tuple(v.shape)} are of other sequences or heads.")
    _check_devices(k, v, kq, ks, kg, vq, vs, vg, nonfinite)


def _check_dequantize(
    q: Tensor, s: Tensor | None, g: Tensor | None, fmt: str, head_dim: int, start: int, end: int, dtype: torch.dtype
) -> None:
    if dtype not in _FLOATS:
        raise _refusal(f"dequantize: no result of {dtype}.")
    _check_packed("dequantize", q, s, g, fmt, head_dim, start, end)


def _check_decode(
    query: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None, vg: Tensor | None,
    bounds: Tensor | None, sinks: Tensor | None, kfmt: str, vfmt: str, length: int, position: int, window: int,
    scaling: float, softcap: float, out_dtype: torch.dtype, splits: int,
) -> None:  # fmt: skip
    if query.ndim != 4 or kq.ndim != 4 or vq.ndim != 4 or not kq.shape[1]:
        raise _refusal("decode: queries, keys and values have four dimensions, and at least one head.")
    batch, query_heads, _, width = query.shape
    heads = kq.shape[1]
    _check_devices(query, kq, ks, kg, vq, vs, vg, bounds, sinks)
    if kq.shape[0] != batch or vq.shape[:2] != kq.shape[:2] or query_heads % heads:
        raise _refusal(
            f"decode: queries {tuple(query.shape)} do not fit keys {tuple(kq.shape)} and values {tuple(vq.shape)}."
        )
    _check_packed("keys", kq, ks, kg, kfmt, width, 0, length)
    _check_packed("values", vq, vs, vg, vfmt, stored_width(format_of(vfmt), vq.shape[3]), 0, length)
    if bounds is not None and (bounds.dtype != torch.int32 or bounds.shape != (batch, 2)):
        raise _refusal("decode: bounds are int32 [B, 2].")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (query_heads,)):
        raise _refusal("decode: sinks are float32 [Hq].")
    if not all(0 <= number < _MOST for number in (length, position, window, splits)):
        raise _refusal(f"decode: length, position, window and splits lie between 0 and {_MOST:,}.")
    if not (0 < scaling < math.inf and 0 <= softcap < math.inf):
        raise _refusal(f"decode: a scaling of {scaling} or a softcap of {softcap}.")
    if out_dtype not in _FLOATS and out_dtype != torch.float64:
        raise _refusal(f"decode: no result of {out_dtype}.")


def _check_devices(first: Tensor, *others: Tensor | None) -> None:
    for other in others:
        if other is not None and other.device != first.device:
            raise _refusal(f"tensors on {first.device} and on {other.device}.")


# ---- implementations


def _append_cpu(*args: Any) -> None:
    _check_append(*args)
    reference.append(*args)


def _append_cuda(*args: Any) -> None:
    from kveval.kernels.append import append_cuda

    _check_append(*args)
    append_cuda(*args)


def _append_meta(*args: Any) -> None:
    """Writes nothing: what it changes has no shape to infer."""


def _dequantize_cpu(*args: Any) -> Tensor:
    _check_dequantize(*args)
    return reference.dequantize(*args)


def _dequantize_cuda(*args: Any) -> Tensor:
    from kveval.kernels.dequantize import dequantize_cuda

    _check_dequantize(*args)
    return dequantize_cuda(*args)


def _dequantize_meta(
    q: Tensor, s: Tensor | None, g: Tensor | None, fmt: str, head_dim: int, start: int, end: int, dtype: torch.dtype
) -> Tensor:
    return q.new_empty(*q.shape[:2], end - start, head_dim, dtype=dtype)


def _decode_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    _check_decode(*args)
    return reference.decode(*args)


def _decode_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    from kveval.kernels.decode import decode_cuda

    _check_decode(*args)
    return decode_cuda(*args)


def _decode_meta(
    query: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None, vg: Tensor | None,
    bounds: Tensor | None, sinks: Tensor | None, kfmt: str, vfmt: str, length: int, position: int, window: int,
    scaling: float, softcap: float, out_dtype: torch.dtype, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, query_heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, query_heads, stored_width(format_of(vfmt), vq.shape[3]), dtype=out_dtype)
    return out, query.new_empty(batch, query_heads, queries, dtype=torch.float32)


_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "append": {"CPU": _append_cpu, "CUDA": _append_cuda, "Meta": _append_meta},
    "dequantize": {"CPU": _dequantize_cpu, "CUDA": _dequantize_cuda, "Meta": _dequantize_meta},
    "decode": {"CPU": _decode_cpu, "CUDA": _decode_cuda, "Meta": _decode_meta},
}
for _name, _by_device in _IMPLEMENTATIONS.items():
    for _device, _function in _by_device.items():
        _library.impl(_name, _function, _device)  # type: ignore[no-untyped-call]
