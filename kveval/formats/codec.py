"""Tensors to stored bytes and back, for any `TensorFormat`. This is the reference that kernels must match bit for bit.

Shape legend: B batch, H KV heads, T tokens, D head size, P payload bytes, S scale bytes, G groups, N elements
of a group. All arithmetic is float32; everything that is stored is uint8, except frozen constants (float32).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kveval.formats import elements
from kveval.formats.spec import TensorFormat

__all__ = ["Codec"]

_FLOAT_SCALES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}
_E4M3_MAX = 448.0
_E8M0_MAX_CODE = 254


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes one role of one layer."""

    format: TensorFormat
    head_dim: int

    def constant(self, x_BHTD: Tensor) -> Tensor | None:
        """The frozen second-level scale taken from a sequence's first write; float32 [B, 1, 1, 1], or None.

        A first write of zeros, or of values so small that their scale rounds to zero, gives 1.0: any scale stores
        them as zeros, and later values still find a usable one.
        """
        fmt = self.format
        if fmt.append_invariant:
            return None
        divisor = fmt.global_divisor or fmt.info.max
        amax = x_BHTD.float().abs().amax((1, 2, 3), keepdim=True)
        return _or_one(_over(amax, divisor))

    def encode(self, x_BHTD: Tensor, constant: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Codes uint8 [B, H, T, P] and scales uint8 [B, H, T, S] (None where the format stores none).

        Values beyond a frozen scale's range saturate; they never become NaN or infinity.
        """
        fmt, x = self.format, x_BHTD.float()
        if fmt.scale_rule == "none":
            return elements.encode(fmt.element, x), None
        if fmt.scale_rule in ("fixed", "first_write_amax"):
            scaled = _over(x, fmt.fixed_scale) if constant is None else x / constant
            return elements.encode(fmt.element, scaled), None
        x_GN = self._grouped(x)
        if fmt.scale_rule == "minmax":
            return self._encode_minmax(x_GN)
        stored = self._amax_scale(x_GN.abs().amax(-1), constant)
        step = self._load_scale(stored, constant)
        codes = elements.encode(fmt.element, self._flat(x_GN / _or_one(step)[..., None]))
        return codes, stored

    def decode(self, payload: Tensor, scale: Tensor | None, constant: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`dtype` [B, H, T, D] from codes, scales and the frozen constant."""
        fmt = self.format
        if fmt.scale_rule == "none":
            return payload.view(torch.bfloat16).to(dtype)
        levels = "unsigned" if fmt.scale_rule == "minmax" else "symmetric"
        x = elements.decode(fmt.element, payload, self.head_dim, levels=levels)
        if scale is None:
            step = fmt.fixed_scale if constant is None else constant
            return (x if isinstance(step, float) and step == 1.0 else x * step).to(dtype)
        x_GN = self._grouped(x)
        if fmt.scale_rule == "minmax":
            step, zero = self._load_scale(scale, None).chunk(2, dim=-1)
            return self._flat(torch.addcmul(zero[..., None], x_GN, step[..., None])).to(dtype)
        return self._flat(x_GN * self._load_scale(scale, constant)[..., None]).to(dtype)

    def _grouped(self, x: Tensor) -> Tensor:
        """[..., D] to [..., G, N].

        A short last group is filled with its own last element, which changes neither its amplitude nor its
        minimum and maximum.
        """
        size = self.format.group_size or self.head_dim
        if short := -self.head_dim % size:
            x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1)
        return x.reshape(*x.shape[:-1], -1, size)

    def _flat(self, x_GN: Tensor) -> Tensor:
        return x_GN.flatten(-2)[..., : self.head_dim]

    def _encode_minmax(self, x_GN: Tensor) -> tuple[Tensor, Tensor]:
        """Codes round((x - zero) / step), with the step and zero point as they read back from storage.

        A constant group has step 0 and is exact up to the rounding of its zero point. A group's range has to fit
        float32: beyond 3.4e38 it decodes to infinity, which the scored logits show.
        """
        info = self.format.info
        low, high = x_GN.amin(-1), x_GN.amax(-1)
        stored = self._store_scale(torch.cat([_over(high - low, 2**info.bits - 1), low], dim=-1))
        step, zero = self._load_scale(stored, None).chunk(2, dim=-1)
        scaled = (x_GN - zero[..., None]) / _or_one(step)[..., None]
        return elements.encode(self.format.element, self._flat(scaled), levels="unsigned"), stored

    def _amax_scale(self, amax: Tensor, constant: Tensor | None) -> Tensor:
        """Stored scales uint8 [..., S] for group amplitudes [..., G]."""
        fmt = self.format
        if fmt.scale_dtype == "e8m0":
            # OCP floor rule 2^(floor(log2 amax) - emax), on the float's own exponent field; torch's cast rounds.
            exponent = (amax.contiguous().view(torch.int32) >> 23) & 0xFF
            largest = int(torch.log2(torch.tensor(fmt.info.max)).floor())
            return (exponent - largest).clamp(0, _E8M0_MAX_CODE).to(torch.uint8)
        scale = _over(amax, fmt.info.max)
        if constant is not None:
            scale = scale / constant
        return self._store_scale(scale)

    def _store_scale(self, scale: Tensor) -> Tensor:
        dtype = _FLOAT_SCALES[self.format.scale_dtype or ""]
        limit = _E4M3_MAX if dtype == torch.float8_e4m3fn else torch.finfo(dtype).max
        return scale.clamp(-limit, limit).to(dtype).contiguous().view(torch.uint8)

    def _load_scale(self, stored: Tensor, constant: Tensor | None) -> Tensor:
        """float32 [..., G] (or [..., 2G] for step and zero point) from stored bytes."""
        if self.format.scale_dtype == "e8m0":
            bits = stored.to(torch.int32) << 23
            # Code 0 is 2^-127, which float32 holds only as a subnormal.
            return torch.where(bits == 0, 0x00400000, bits).view(torch.float32)
        scale = stored.view(_FLOAT_SCALES[self.format.scale_dtype or ""]).float()
        return scale if constant is None else scale * constant


def _over(x: Tensor, number: float) -> Tensor:
    """`x / number`, correctly rounded on every device.

    torch multiplies a CUDA tensor by the reciprocal of a Python number (or of a tensor on the CPU), which can be one
    unit in the last place off: another scale, other bytes.
    """
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _or_one(step: Tensor) -> Tensor:
    """`step` with zeros replaced by 1, to divide by: what is divided there decodes to zero anyway."""
    return torch.where(step == 0, 1.0, step)
