"""Launches kernels/append.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kveval.kernels.compiler import Variant
from kveval.kernels.formats import LANE, alignments, macros
from kveval.kernels.launcher import launcher
from kveval.kernels.structs import (
    FLOATS,
    THREADS,
    check_fits,
    packed,
    rows,
    rows_fields,
    tensor_scale,
    tensor_scale_fields,
)

__all__ = ["append_cuda", "append_variant"]

BLOCK = 128
"""Most threads of a block."""


def _role_fields(role: str) -> list[tuple[str, type[Any]]]:
    parts = (*rows_fields("input"), *rows_fields("codes"), *rows_fields("scales"), *tensor_scale_fields("tensor_scale"))
    numbers = ((name, ctypes.c_uint32) for name in ("tokens", "tiles", "aligned", "unused"))
    return [(f"{role}_{name}", kind) for name, kind in (*parts, *numbers)]


class _Params(ctypes.Structure):
    _fields_ = (
        *_role_fields("key"), *_role_fields("value"), ("nonfinite", ctypes.c_uint64), ("heads", ctypes.c_uint32),
        ("pairs", ctypes.c_uint32),
    )  # fmt: skip


@cache
def append_variant(
    kfmt: str, vfmt: str, key_dim: int, value_dim: int, *, key_scaled: bool, value_scaled: bool, dtype: torch.dtype
) -> Variant:
    """The kernel of these formats.

    Args:
        kfmt: `format_key` of how keys are stored.
        vfmt: Of how values are.
        key_dim: Head size of keys.
        value_dim: Of values.
        key_scaled: Whether keys have a tensor-level scale.
        value_scaled: Whether values have.
        dtype: Of both.

    Raises:
        UnsupportedError: if kernels lack one of the formats.
    """
    check_fits(kfmt, key_dim)
    check_fits(vfmt, value_dim)
    key = macros(kfmt, key_dim, tensor_scale=key_scaled, prefix="K_")
    value = macros(vfmt, value_dim, tensor_scale=value_scaled, prefix="V_")
    return Variant("append.cu", "append", (("INPUT", FLOATS[dtype]), *key, *value))


@cache
def _lanes(head_dim: int) -> int:
    """Lanes among which a vector is spread."""
    chunks = head_dim // LANE
    return int(min(THREADS, 1 << (chunks - 1).bit_length()))


def append_cuda(
    k: Tensor, v: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None,
    vg: Tensor | None, nonfinite: Tensor, kpos: int, vpos: int, kfmt: str, vfmt: str,
) -> None:  # fmt: skip
    """See `kveval.kernels.ops.append`, which checks shapes and dtypes. One launch; none where there are no tokens."""
    batch, heads = k.shape[:2]
    threads = max(k.shape[2] * _lanes(k.shape[3]), v.shape[2] * _lanes(v.shape[3]))
    if threads == 0 or batch * heads == 0:
        return
    variant = append_variant(
        kfmt, vfmt, k.shape[3], v.shape[3], key_scaled=kg is not None, value_scaled=vg is not None, dtype=k.dtype
    )
    block = min(BLOCK, -(-threads // THREADS) * THREADS)
    key_tiles, value_tiles = (-(-x.shape[2] // (block // _lanes(x.shape[3]))) for x in (k, v))
    params = _Params(
        *_role(k, kq, ks, kg, kpos, kfmt, key_tiles), *_role(v, vq, vs, vg, vpos, vfmt, value_tiles),
        nonfinite.data_ptr(), heads, batch * heads,
    )  # fmt: skip
    grid = (max(key_tiles, value_tiles) * batch * heads, 2, 1)
    launcher().launch(variant, grid=grid, block=block, shared_bytes=0, params=params, device=k.device)


def _role(
    x: Tensor, q: Tensor, s: Tensor | None, g: Tensor | None, start: int, key: str, tiles: int
) -> tuple[int, ...]:  # fmt: skip
    of_codes, of_scales = alignments(key)
    data, batch, head, token = source = rows(x)
    aligned = (data | batch | head | token) % 16 == 0
    codes, scales = packed(q, of_codes, start), packed(s, of_scales, start)
    return (*source, *codes, *scales, *tensor_scale(g), x.shape[2], tiles, aligned, 0)
