"""What happens to a vector before it is encoded, and its inverse when it is read."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(x: Tensor) -> Tensor:
    """float32 [..., D] times an orthonormal Hadamard matrix, block-diagonal if D is no power of two.

    The blocks have the largest power of two that divides D (96: three blocks of 32). The matrix (Sylvester's, over
    sqrt(size)) is symmetric, so this is its own inverse. Rotating keys and queries alike keeps their products (QuaRot,
    arXiv 2404.00456). Written as sums and differences of pairs, it rounds alike on every device.
    """
    size = x.shape[-1] & -x.shape[-1]
    step = 1
    while step < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, step)
        first, second = pairs.unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).reshape(x.shape)
        step *= 2
    rotated: Tensor = x * size**-0.5
    return rotated
