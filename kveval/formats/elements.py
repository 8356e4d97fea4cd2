"""From scaled float32 values to the codes of an element, and from packed codes back to what they stand for.

Values beyond an element's range take its end; nothing overflows. (Casts of torch do: above 464 e4m3 becomes NaN in one
version and saturates in another, so values are clamped first.)
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kveval.formats.element_types import Element, get_element
from kveval.formats.packing import unpack

__all__ = ["decode", "look_up", "nearest"]

_CASTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Elements that torch rounds to, half to even, as `cvt.rn` does."""


def nearest(name: str, values: Tensor) -> Tensor:
    """uint8 codes of the nearest numbers that the element holds, in the shape of `values` (float32, finite)."""
    element = get_element(name)
    if name in _CASTS:
        return values.clamp(-element.max, element.max).to(_CASTS[name]).view(torch.uint8)
    if _is_ramp(element):
        first, low = element.values[0], min(element.numbers)
        steps = values.round().clamp_(low, max(element.numbers))
        if first == low:
            return (steps.sub_(low) if low else steps).to(torch.uint8)
        twos_complement = steps.to(torch.int8).view(torch.uint8)
        return twos_complement if element.bits == 8 else twos_complement & (2**element.bits - 1)
    thresholds, codes = _thresholds(name, str(values.device))
    if _is_sign_magnitude(element):
        sign = torch.signbit(values).to(torch.uint8) << (element.bits - 1)
        return torch.bucketize(values.abs().contiguous(), thresholds, out_int32=True).to(torch.uint8) | sign
    return codes[torch.bucketize(values.contiguous(), thresholds, out_int32=True)]


def decode(name: str, packed: Tensor, head_dim: int, *, packing: str = "sequential") -> Tensor:
    """float32 [..., head_dim], not yet scaled, from packed codes uint8 [..., bytes]."""
    element = get_element(name)
    if packing == "sequential" and 8 % element.bits == 0:
        values = _byte_table(name, str(packed.device)).index_select(0, packed.reshape(-1).int())
        return values.view(*packed.shape[:-1], -1)[..., :head_dim]
    return look_up(name, unpack(packed, element.bits, head_dim, packing))


def look_up(name: str, codes: Tensor) -> Tensor:
    """float32: what each of the codes (uint8, one to a byte) stands for."""
    return _code_table(name, str(codes.device)).index_select(0, codes.reshape(-1).int()).view(codes.shape)


@cache
def _is_ramp(element: Element) -> bool:
    """Whether it holds consecutive integers in order (two's complement wraps around) and rounds them as torch does."""
    count, first = len(element.values), element.values[0]
    numbers = sorted(element.numbers)
    consecutive = numbers == [numbers[0] + i for i in range(len(numbers))] and first % 1 == 0
    in_order = all(v != v or (v - first) % count == code for code, v in enumerate(element.values))
    # torch rounds to the even number, `ties` says the even code.
    return consecutive and in_order and element.ties == "even" and first % 2 == 0


@cache
def _is_sign_magnitude(element: Element) -> bool:
    """Whether the codes' upper half mirrors the lower half, so that a negative zero has a code of its own."""
    low, high = element.values[: len(element.values) // 2], element.values[len(element.values) // 2 :]
    return min(low) == 0 and high == tuple(-v for v in low) and element.ties == "even"


@cache
def _thresholds(name: str, device: str) -> tuple[Tensor, Tensor]:
    """float32 [n - 1] upper bounds of each level in ascending order, and uint8 [n] their codes.

    A float32 is above a threshold exactly if it is above the midpoint of its neighbours, or on the midpoint and the
    tie goes up.
    """
    element = get_element(name)
    codes = [c for c, v in enumerate(element.values) if v == v]
    if _is_sign_magnitude(element):
        codes = codes[: len(codes) // 2]
    codes.sort(key=lambda c: element.values[c])
    bounds = []
    for low, high in itertools.pairwise(codes):
        middle = (element.values[low] + element.values[high]) / 2
        bound = float(np.float32(middle))
        tie_goes_up = element.ties == "upper" or high % 2 == 0
        if bound > middle or (bound == middle and tie_goes_up):
            bound = float(np.nextafter(np.float32(bound), np.float32(-np.inf)))
        bounds.append(bound)
    return (
        torch.tensor(bounds, dtype=torch.float32, device=device),
        torch.tensor(codes, dtype=torch.uint8, device=device),
    )


@cache
def _code_table(name: str, device: str) -> Tensor:
    """float32 [2^bits]: what each code stands for."""
    return torch.tensor(get_element(name).values, dtype=torch.float32, device=device)


@cache
def _byte_table(name: str, device: str) -> Tensor:
    """float32 [256, 8 / bits]: what each byte of sequential codes stands for."""
    every_byte = torch.arange(256, dtype=torch.uint8)[:, None]
    bits = get_element(name).bits
    return _code_table(name, "cpu")[unpack(every_byte, bits, 8 // bits).int()].to(device)
