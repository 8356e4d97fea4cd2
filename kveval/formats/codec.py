"""Tensors to stored bytes and back, for any `TensorFormat`. This is the reference that kernels must match bit for bit.

Shape legend: B batch, H KV heads, T tokens, D head size, P payload bytes, U units of tokens, S scale bytes of a unit,
G groups, N elements of a group. All arithmetic is float32; everything that is stored is uint8, except what is frozen at
the first write (float32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kveval.errors import UnsupportedError
from kveval.formats import elements
from kveval.formats.arithmetic import or_one, over, total
from kveval.formats.packing import pack
from kveval.formats.rules import RULES, Quantizer
from kveval.formats.spec import SCALE_SIZES, TensorFormat
from kveval.formats.transforms import rotate

__all__ = ["NOTHING_FROZEN", "Codec", "Frozen"]


@dataclass(frozen=True)
class Frozen:
    """What a sequence's first write decides for all later ones.

    Attributes:
        scale: float32 [B, 1, 1, 1]: the scale of a per-tensor format, or the second-level scale; or None.
        mean: float32 [B, H, 1, D]: what `mean_shift` subtracts; or None.
    """

    scale: Tensor | None = None
    mean: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there."""
        return tuple(t for t in (self.scale, self.mean) if t is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> Frozen:
        """Apply `change` to every tensor."""
        return Frozen(*(None if (t := getattr(self, f.name)) is None else change(t) for f in fields(self)))


NOTHING_FROZEN = Frozen()


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes one role of one layer.

    Attributes:
        format: The format.
        head_dim: D.
        scales: Calibrated scales, one or one per KV head, which stand in for the format's constant.
    """

    format: TensorFormat
    head_dim: int
    scales: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.format.scale_rule == "static" and self.scales is None:
            raise UnsupportedError(
                "this format stores with calibrated scales and has none.",
                remedy="`kveval calibrate` makes them; then write {name: ..., extends: ..., scales: scales.json}.",
            )

    def freeze(self, x_BHTD: Tensor) -> Frozen:
        """What the first write `x_BHTD` of a sequence decides for all later ones.

        A first write of zeros, or of values so small that their scale rounds to zero, gives a scale of 1.0: any scale
        stores them as zeros, and later values still find a usable one.
        """
        fmt = self.format
        if not fmt.freezes:
            return NOTHING_FROZEN
        x = x_BHTD.float()
        mean = _mean_over_tokens(x) if fmt.transform == "mean_shift" else None
        if not fmt.freezes_scale:
            return Frozen(mean=mean)
        amax = self._transformed(x, Frozen(mean=mean)).abs().amax((1, 2, 3), keepdim=True)
        return Frozen(or_one(over(amax, fmt.global_divisor or fmt.info.max)), mean)

    def encode(self, x_BHTD: Tensor, frozen: Frozen = NOTHING_FROZEN) -> tuple[Tensor, Tensor | None]:
        """Codes uint8 [B, H, T, P] and scales uint8 [B, H, U, S] (None where the format stores none).

        T is a multiple of the format's unit. Values beyond a frozen scale's range saturate; they never become NaN or
        infinity.
        """
        fmt = self.format
        if not fmt.lossy:
            return _bf16_bytes(x_BHTD), None
        x = self._transformed(x_BHTD.float(), frozen)
        if not fmt.rule.stored:
            codes = elements.nearest(fmt.element, x / self._tensor_scale(frozen, x.device))
            return pack(codes, fmt.info.bits, fmt.packing), None
        codes_GN, stored = RULES[fmt.scale_rule](self._grouped(x), Quantizer(fmt, frozen.scale))
        return pack(self._flat(codes_GN), fmt.info.bits, fmt.packing), torch.stack(stored, -2).flatten(3)

    def decode(
        self, payload: Tensor, scale: Tensor | None, frozen: Frozen = NOTHING_FROZEN, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """`dtype` [B, H, T, D] from codes, scales and what was frozen."""
        fmt = self.format
        if not fmt.lossy:
            return payload.view(torch.bfloat16).to(dtype)
        x = elements.decode(fmt.element, payload, self.head_dim, packing=fmt.packing)
        if scale is None:
            step = self._tensor_scale(frozen, x.device)
            x = x if isinstance(step, float) and step == 1.0 else x * step
        else:
            x = self._unscaled(x, scale, frozen)
        if fmt.transform == "hadamard":
            x = rotate(x)
        return (x if frozen.mean is None else x + frozen.mean).to(dtype)

    def _unscaled(self, x_BHTD: Tensor, scale: Tensor, frozen: Frozen) -> Tensor:
        fmt = self.format
        stored = torch.unflatten(scale, -1, (-1, fmt.rule.stored, SCALE_SIZES[fmt.scale_dtype or ""]))
        step, *zero = (Quantizer(fmt, frozen.scale).load(part)[..., None] for part in stored.unbind(-2))
        x_GN = self._grouped(x_BHTD)
        return self._flat(torch.addcmul(zero[0], x_GN, step) if zero else x_GN * step)

    def _transformed(self, x: Tensor, frozen: Frozen) -> Tensor:
        if frozen.mean is not None:
            x = x - frozen.mean
        return rotate(x) if self.format.transform == "hadamard" else x

    def _tensor_scale(self, frozen: Frozen, device: torch.device) -> Tensor | float:
        """The scale of a format that stores none: the constant, the calibrated ones [1, H, 1, 1], or the frozen one."""
        if frozen.scale is not None:
            return frozen.scale
        numbers = self.scales or (self.format.fixed_scale,)
        # A tensor on the device, not a Python number: see `arithmetic.over`.
        return 1.0 if numbers == (1.0,) else torch.tensor(numbers, device=device).view(1, -1, 1, 1)

    def _grouped(self, x_BHTD: Tensor) -> Tensor:
        """[B, H, T, D] to [B, H, U, G, N].

        A short last group is filled with what changes none of the numbers that a rule takes from it: its own last
        element where minimum and maximum count, else zeros.
        """
        fmt = self.format
        if fmt.unit > 1:
            return torch.unflatten(x_BHTD, 2, (-1, fmt.unit)).transpose(-1, -2)
        size = fmt.group_size or self.head_dim
        if short := -self.head_dim % size:
            last = x_BHTD[..., -1:] if fmt.rule.stored == 2 else x_BHTD.new_zeros(1)
            x_BHTD = torch.cat([x_BHTD, last.expand(*x_BHTD.shape[:-1], short)], dim=-1)
        return torch.unflatten(x_BHTD, -1, (-1, size))

    def _flat(self, x_GN: Tensor) -> Tensor:
        """The inverse of `_grouped`."""
        if self.format.unit > 1:
            return x_GN.transpose(-1, -2).flatten(2, 3)
        return x_GN.flatten(-2)[..., : self.head_dim]


def _mean_over_tokens(x_BHTD: Tensor) -> Tensor:
    """float32 [B, H, 1, D]. Summed in float64, which the largest float32 values can't overflow."""
    mean_BHD = over(total(x_BHTD.double().transpose(2, 3)), x_BHTD.shape[2])
    return mean_BHD.float()[:, :, None]


def _bf16_bytes(x: Tensor) -> Tensor:
    limit = torch.finfo(torch.bfloat16).max
    return x.float().clamp(-limit, limit).to(torch.bfloat16).contiguous().view(torch.uint8)
