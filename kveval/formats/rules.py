"""Scale rules: from groups of values to codes and the numbers stored beside them.

A rule is a function `(x_N, q) -> (codes_N, stored)`: `x_N` float32 [..., N] holds one group per row, `codes_N` are
uint8 of that shape and `stored` is a list of one or two numbers per group, uint8 [..., bytes]: the scale, and the zero
point if there is one. Reading is the same for all: `scale * value of the code + zero point`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kveval.formats import elements
from kveval.formats.arithmetic import or_one, over, reciprocal, total
from kveval.formats.element_types import get_element
from kveval.formats.spec import TensorFormat

__all__ = ["RULES", "Quantizer", "Rule"]

_SCALE_TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}
_E8M0_BIAS, _E8M0_MAX_CODE = 127, 254


@dataclass(frozen=True)
class Quantizer:
    """What a rule needs of its format: the element's numbers, and how a scale is stored.

    `global_scale` is the second-level scale, float32 [B, 1, 1, 1], or None.
    """

    format: TensorFormat
    global_scale: Tensor | None = None

    def nearest(self, values: Tensor) -> Tensor:
        """Codes of the element's nearest numbers."""
        return elements.nearest(self.format.element, values)

    def values(self, codes: Tensor) -> Tensor:
        """float32: what the element's codes stand for."""
        return elements.look_up(self.format.element, codes)

    @property
    def levels(self) -> tuple[float, ...]:
        """The element's values, in code order."""
        return get_element(self.format.element).values

    @property
    def max(self) -> float:
        """The element's largest magnitude."""
        return get_element(self.format.element).max

    def store(self, number: Tensor) -> Tensor:
        """Bytes of a scale or zero point [...] in its stored type: uint8 [..., size]. Saturates, never overflows."""
        if self.global_scale is not None:
            number = number / self.global_scale
        dtype = _SCALE_TYPES[self.format.scale_dtype or ""]
        limit = 448.0 if dtype == torch.float8_e4m3fn else torch.finfo(dtype).max
        return number.clamp(-limit, limit).to(dtype)[..., None].contiguous().view(torch.uint8)

    def load(self, stored: Tensor) -> Tensor:
        """float32 [...] from stored bytes uint8 [..., size]."""
        if self.format.scale_dtype == "e8m0":
            bits = stored[..., 0].to(torch.int32) << 23
            # Code 0 is 2^-127, which float32 holds only as a subnormal.
            return torch.where(bits == 0, 0x00400000, bits).view(torch.float32)
        scale = stored.contiguous().view(_SCALE_TYPES[self.format.scale_dtype or ""])[..., 0].float()
        return scale if self.global_scale is None else scale * self.global_scale


Stored = list[Tensor]
Rule = Callable[[Tensor, Quantizer], tuple[Tensor, Stored]]


def amax(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """Scale = amax / max; code = nearest(x / scale), with the scale as it reads back."""
    return _scaled(x_N, q, q.store(over(_peak(x_N), q.max)))


def mx_floor(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """Scale = 2^(floor(log2 amax) - floor(log2 max)): OCP Microscaling Formats 1.0, section 6.3.

    Taken from the exponent field of the float; torch's cast to e8m0 rounds to nearest, which is another rule.
    """
    exponent = (_peak(x_N).contiguous().view(torch.int32) >> 23) & 0xFF
    largest = math.floor(math.log2(q.max))
    return _scaled(x_N, q, (exponent - largest).clamp(0, _E8M0_MAX_CODE).to(torch.uint8)[..., None])


def minmax(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """Scale = (max - min) / (levels - 1), zero = min; code = nearest((x - zero) / scale), both as they read back.

    A constant group has scale 0 and is exact up to the rounding of its zero point.
    """
    # Plus zero: of 0 and -0, amin returns the one that its order of looking finds, and the stored signs would differ.
    low, high = x_N.amin(-1) + 0.0, x_N.amax(-1)
    step, zero = q.store(over(high - low, q.max)), q.store(low)
    codes = q.nearest((x_N - q.load(zero)[..., None]).div_(or_one(q.load(step))[..., None]))
    return codes, [step, zero]


def four_over_six(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """Scale = amax / 6 or amax / 4, whichever has the smaller squared error: Four Over Six, arXiv 2512.02010.

    Scaling to 4 leaves the coarse step between 4 and 6 unused. A tie takes 6.
    """
    peak = _peak(x_N)
    tries = []
    for top in (6.0, 4.0):
        codes, (scale,) = _scaled(x_N, q, q.store(over(peak, top)))
        error = total((q.values(codes) * q.load(scale)[..., None] - x_N).square())
        tries.append((codes, scale, error))
    (codes6, scale6, error6), (codes4, scale4, error4) = tries
    four = (error4 < error6)[..., None]
    return torch.where(four, codes4, codes6), [torch.where(four, scale4, scale6)]


def rms(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """Scale = |x| / sqrt(D), so that a rotated vector has the unit normal distribution its levels are made for.

    TurboQuant (arXiv 2504.19874) stores the norm |x|; the two differ by the constant sqrt(D).
    """
    return _scaled(x_N, q, q.store(over(total(x_N.square()), x_N.shape[-1]).sqrt()))


def ggml_q8_0(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """quantize_row_q8_0_ref: d = amax / 127, code = round half away from zero(x * (1 / d)), d unrounded."""
    d = over(_peak(x_N), 127.0)
    scaled = x_N * reciprocal(d)[..., None]
    size = scaled.abs()
    whole = size.floor()
    # Not floor(size + 0.5): just below a half, that sum rounds up.
    rounded = torch.copysign(whole + (2 * (size - whole)).floor(), scaled)
    return q.nearest(rounded), [q.store(d)]


def ggml_extreme(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """quantize_row_q4_0_ref, q5_0: d = (value of largest magnitude) / lowest; code = trunc(x / d + 0.5 - lowest)."""
    lowest = q.levels[0]
    d = over(_extreme(x_N), lowest)
    codes = torch.trunc(x_N * reciprocal(d)[..., None] + (0.5 - lowest))
    return codes.clamp(0, len(q.levels) - 1).to(torch.uint8), [q.store(d)]


def ggml_minmax(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """quantize_row_q4_1_ref, q5_1: d = (max - min) / (levels - 1); code = trunc((x - min) / d + 0.5), d unrounded."""
    low, high = x_N.amin(-1) + 0.0, x_N.amax(-1)
    d = over(high - low, q.max)
    codes = torch.trunc((x_N - low[..., None]) * reciprocal(d)[..., None] + 0.5)
    return codes.clamp(0, q.max).to(torch.uint8), [q.store(d), q.store(low)]


def ggml_iq4_nl(x_N: Tensor, q: Quantizer) -> tuple[Tensor, Stored]:
    """quantize_row_iq4_nl_ref: codes with the extreme at the lowest level; d = sum(w v x) / sum(w v v), w = x^2.

    Sums run in the order of the elements, as there; another order rounds differently. A block below 1e-15 is zero.
    Values beyond what an fp16 scale reaches are cut first, or their cubes would overflow.
    """
    reach = q.max * torch.finfo(torch.float16).max
    x_N = x_N.clamp(-reach, reach)
    codes = q.nearest(x_N * reciprocal(over(_extreme(x_N), q.levels[0]))[..., None])
    v_N = q.values(codes)
    weighted = x_N.square() * v_N
    with_x = torch.zeros_like(x_N[..., 0])
    with_v = torch.zeros_like(x_N[..., 0])
    for j in range(x_N.shape[-1]):
        with_x = with_x + weighted[..., j] * x_N[..., j]
        with_v = with_v + weighted[..., j] * v_N[..., j]
    fitted = torch.where(_peak(x_N) < 1e-15, 0.0, with_x / or_one(with_v))
    return codes, [q.store(fitted)]


def _extreme(x_N: Tensor) -> Tensor:
    """The value of largest magnitude with its sign; the first of equals."""
    at_peak = x_N.abs() == _peak(x_N)[..., None]
    return torch.where(at_peak & (at_peak.cumsum(-1) == 1), x_N, 0.0).sum(-1)


def _peak(x_N: Tensor) -> Tensor:
    return x_N.abs().amax(-1)


def _scaled(x_N: Tensor, q: Quantizer, stored: Tensor) -> tuple[Tensor, Stored]:
    """Codes for a stored scale. A scale of zero, stored for values too small for it, decodes to zero."""
    return q.nearest(x_N / or_one(q.load(stored))[..., None]), [stored]


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        amax, mx_floor, minmax, four_over_six, rms, ggml_q8_0, ggml_extreme, ggml_minmax, ggml_iq4_nl,
    )
}  # fmt: skip
"""Rules that store a number per group, by the name formats give them (`kveval.formats.spec.SCALE_RULES`)."""
