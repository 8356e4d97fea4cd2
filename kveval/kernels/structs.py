"""Parts of parameter structs, as kernels/vectors.cuh declares them, and their values from tensors.

A launch is a few microseconds: the parts are flat, so that one struct is filled by one call.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kveval.errors import UnsupportedError
from kveval.kernels.formats import format_of, misfit

__all__ = ["FLOATS", "THREADS", "check_fits", "packed", "rows", "rows_fields", "tensor_scale", "tensor_scale_fields"]

FLOATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Numbers of the dtypes of activations."""

THREADS = 32
"""Of a warp."""

Fields = tuple[tuple[str, type[ctypes.c_int64] | type[ctypes.c_uint64]], ...]


def _fields(name: str, *strides: str) -> Fields:
    return (name, ctypes.c_uint64), *((f"{name}_{stride}", ctypes.c_int64) for stride in strides)


def rows_fields(name: str) -> Fields:
    """`Rows`: a tensor [B, H, T, ...] whose rows are contiguous; strides in bytes."""
    return _fields(name, "batch", "head", "token")


def tensor_scale_fields(name: str) -> Fields:
    """`TensorScale`: float32 [B or 1, H or 1]; strides in bytes, 0 where there is one for all."""
    return _fields(name, "batch", "head")


def rows(x: Tensor) -> tuple[int, int, int, int]:
    """The `Rows` of activations [B, H, T, D]."""
    size = x.element_size()
    batch, head, token, _ = x.stride()
    return x.data_ptr(), size * batch, size * head, size * token


def packed(x: Tensor | None, alignment: int, start: int) -> tuple[int, int, int, int]:
    """The `Rows` of codes or scales, uint8 [B, H, T, ...], from row `start` on; None is never read.

    Raises:
        UnsupportedError: rows are not contiguous, or not aligned to `alignment` bytes.
    """
    if x is None:
        return 0, 0, 0, 0
    batch, head, token, unit = x.stride()
    data = x.data_ptr() + start * token
    if (data | batch | head | token) % alignment or unit != 1:
        raise UnsupportedError(
            f"kernels need rows that are contiguous and aligned to {alignment} bytes; these have strides {x.stride()}.",
            remedy="Give them memory of their own: tensor.clone().",
        )
    return data, batch, head, token


def tensor_scale(g: Tensor | None) -> tuple[int, int, int]:
    """The `TensorScale` of a tensor-level scale; None is never read."""
    if g is None:
        return 0, 0, 0
    (batches, heads), (batch, head) = g.shape, g.stride()
    return g.data_ptr(), 4 * batch if batches > 1 else 0, 4 * head if heads > 1 else 0


def check_fits(key: str, head_dim: int) -> None:
    """Refuse a format that kernels don't have.

    Raises:
        UnsupportedError: says why.
    """
    if reason := misfit(format_of(key), head_dim):
        raise UnsupportedError(f"{reason}.", remedy="Keep this layer's cache on the path through torch.")
