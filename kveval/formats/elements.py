"""Element codecs: float32 values to packed codes and back, exactly as engines and hardware round.

Every codec clamps to the element's finite range before it rounds: casts overflow differently on each
torch (NaN above 464 for e4m3 in one, saturation in another). Ties go to the even code, as the
hardware's `cvt.rn` does.

Packed bytes hold 8 / bits codes each, the first element in the low bits.
"""

from __future__ import annotations

import itertools
from functools import cache

import torch
from torch import Tensor

from kveval.formats.spec import ELEMENTS

__all__ = ["decode", "encode", "pack", "unpack"]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the eight e2m1 codes (OCP Microscaling Formats v1.0, section 5.3.3)."""


def encode(element: str, values: Tensor, *, levels: str = "symmetric") -> Tensor:
    """Round scaled values to codes and pack them.

    Args:
        element: Name in `ELEMENTS`.
        values: float32 [..., D], already divided by its scale; finite.
        levels: For integers, "symmetric" (two's complement, -max..max) or "unsigned" (0..2^bits-1).

    Returns:
        uint8 [..., ceil(D * bits / 8)].
    """
    info = ELEMENTS[element]
    if info.kind == "wide":
        return values.clamp(-info.max, info.max).to(torch.bfloat16).contiguous().view(torch.uint8)
    if element in _FLOAT8:
        return values.clamp(-info.max, info.max).to(_FLOAT8[element]).view(torch.uint8)
    if element == "e2m1":
        codes = _e2m1_codes(values)
    elif levels == "unsigned":
        codes = values.round().clamp(0, 2**info.bits - 1).to(torch.uint8)
    else:
        signed = values.round().clamp(-info.max, info.max).to(torch.int8)
        codes = signed.view(torch.uint8) & (2**info.bits - 1)
    return pack(codes, info.bits)


def decode(element: str, packed: Tensor, head_dim: int, *, levels: str = "symmetric") -> Tensor:
    """The inverse of `encode`: uint8 [..., bytes] to float32 [..., head_dim], not yet scaled."""
    if ELEMENTS[element].kind == "wide":
        return packed.view(torch.bfloat16).float()
    table = _table(element, levels, str(packed.device))
    values = table.index_select(0, packed.reshape(-1).int())
    return values.view(*packed.shape[:-1], -1)[..., :head_dim]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [..., D] of `bits` each, low bits first, into uint8 [..., ceil(D * bits / 8)]."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    if short := -codes.shape[-1] % per_byte:
        codes = torch.nn.functional.pad(codes, (0, short))
    codes = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed = codes[..., 0].clone()
    for i in range(1, per_byte):
        packed |= codes[..., i] << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [..., n] to uint8 [..., n * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2) if bits < 8 else packed


_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _e2m1_codes(values: Tensor) -> Tensor:
    """Nearest e2m1 code.

    A midpoint goes to the even code: where that is the upper one, the threshold is the float just below the
    midpoint, so that the midpoint itself counts as above it.
    """
    midpoints = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES)])
    thresholds = midpoints.clone()
    thresholds[1::2] = torch.nextafter(midpoints[1::2], torch.zeros(3))
    codes = torch.bucketize(values.abs().contiguous(), thresholds.to(values.device), out_int32=True).to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


@cache
def _table(element: str, levels: str, device: str) -> Tensor:
    """float32 [256, 8 / bits]: what each byte decodes to."""
    info = ELEMENTS[element]
    every_byte = torch.arange(256, dtype=torch.uint8)
    if element in _FLOAT8:
        return every_byte.view(_FLOAT8[element]).float()[:, None].to(device)
    codes = unpack(every_byte[:, None], info.bits).int()
    if element == "e2m1":
        magnitude = torch.tensor(E2M1_VALUES)[codes & 7]
        return torch.where(codes >= 8, -magnitude, magnitude).to(device)
    if levels == "symmetric":
        codes = torch.where(codes >= 2 ** (info.bits - 1), codes - 2**info.bits, codes)
    return codes.float().to(device)
