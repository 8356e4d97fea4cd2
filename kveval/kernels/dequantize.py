"""Launches kernels/dequantize.cu."""

from __future__ import annotations

import ctypes
from functools import cache

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

__all__ = ["dequantize_cuda", "dequantize_variant"]

BLOCK = 256
"""Most threads of a block."""


class _Params(ctypes.Structure):
    _fields_ = (
        *rows_fields("codes"), *rows_fields("scales"), *rows_fields("output"), *tensor_scale_fields("tensor_scale"),
        ("heads", ctypes.c_uint32), ("tokens", ctypes.c_uint32), ("tiles", ctypes.c_uint32),
    )  # fmt: skip


@cache
def dequantize_variant(fmt: str, head_dim: int, *, scaled: bool, dtype: torch.dtype) -> Variant:
    """The kernel of this format.

    Args:
        fmt: `format_key` of how the rows are stored.
        head_dim: D.
        scaled: Whether there is a tensor-level scale.
        dtype: Of the result.

    Raises:
        UnsupportedError: if kernels lack the format.
    """
    check_fits(fmt, head_dim)
    described = macros(fmt, head_dim, tensor_scale=scaled, prefix="STORED_")
    return Variant("dequantize.cu", "dequantize", (("OUTPUT", FLOATS[dtype]), *described))


def dequantize_cuda(
    q: Tensor, s: Tensor | None, g: Tensor | None, fmt: str, head_dim: int, start: int, end: int, dtype: torch.dtype
) -> Tensor:
    """See `kveval.kernels.ops.dequantize`, which checks shapes and dtypes. One launch, or none for an empty result."""
    batch, heads = q.shape[:2]
    tokens = end - start
    out = torch.empty(batch, heads, tokens, head_dim, dtype=dtype, device=q.device)
    if out.numel() == 0:
        return out
    variant = dequantize_variant(fmt, head_dim, scaled=g is not None, dtype=dtype)
    of_codes, of_scales = alignments(fmt)
    threads = tokens * head_dim // LANE
    block = min(BLOCK, -(-threads // THREADS) * THREADS)
    tiles = -(-threads // block)
    params = _Params(
        *packed(q, of_codes, start), *packed(s, of_scales, start), *rows(out), *tensor_scale(g), heads, tokens, tiles
    )  # fmt: skip
    grid = (tiles * batch * heads, 1, 1)
    launcher().launch(variant, grid=grid, block=block, shared_bytes=0, params=params, device=q.device)
    return out
