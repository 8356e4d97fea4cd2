"""Float32 operations that give the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["or_one", "over", "reciprocal", "total"]


def over(x: Tensor, number: float) -> Tensor:
    """`x / number`, correctly rounded.

    torch multiplies a CUDA tensor by the reciprocal of a Python number (or of a tensor on the CPU), which can be one
    unit in the last place off: another scale, other bytes.
    """
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def or_one(step: Tensor) -> Tensor:
    """`step` with zeros replaced by 1, to divide by: what is divided there decodes to zero anyway."""
    return torch.where(step == 0, 1.0, step)


def reciprocal(step: Tensor) -> Tensor:
    """1 / step; 0 where the step is 0."""
    return torch.where(step == 0, 0.0, 1.0 / or_one(step))


def total(x: Tensor) -> Tensor:
    """The sum over the last dimension, by halves: `sum` adds up in an order that depends on device and shape."""
    while (count := x.shape[-1]) > 1:
        half = count // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([pairs, x[..., -1:]], dim=-1) if count % 2 else pairs
    return x[..., 0]
