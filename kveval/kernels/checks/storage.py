"""Checks of append and dequantize: to the byte what the reference stores and reads.

Shape legend: B batch, H KV heads, t new tokens, T capacity, D head size, P payload bytes and S scale bytes of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from kveval.formats.codec import Codec, Frozen
from kveval.formats.spec import TensorFormat, get_scheme, scheme_names
from kveval.kernels.append import append_cuda
from kveval.kernels.checks.cases import constants, plain, poisoned_memory
from kveval.kernels.checks.measure import Measured, different
from kveval.kernels.checks.trials import Check, Sizes, Trial
from kveval.kernels.dequantize import dequantize_cuda
from kveval.kernels.formats import format_key, misfit, tensor_scale

__all__ = ["STORAGE_CHECKS"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNTOUCHED = 0xA5
BATCH, HEADS = 2, 3
STARTS = (3, 8)
"""First rows that keys and values are written to."""


def stored_formats(head_dim: int) -> dict[str, TensorFormat]:
    """The formats of presets that append and dequantize take, one of each that stores other bytes, by a user's name."""
    found: dict[str, TensorFormat] = {}
    seen = set()
    for name, role in product(scheme_names(), ("key", "value")):
        fmt = plain(getattr(get_scheme(name), role))
        identity = (format_key(fmt), fmt.scale_rule, fmt.granularity, fmt.global_divisor)
        if not misfit(fmt, head_dim) and identity not in seen:
            seen.add(identity)
            found[f"{name} {role}s"] = fmt
    return found


@dataclass(frozen=True)
class Role:
    """Keys or values: what is written, and where to. Planes are uint8 [B, H, T, P] and [B, H, T, S]."""

    x: Tensor
    q: Tensor
    s: Tensor | None
    g: Tensor | None
    start: int
    fmt: TensorFormat

    @classmethod
    def of(cls, fmt: TensorFormat, x: Tensor, g: Tensor | None, start: int) -> Role:
        """With planes that hold a pattern."""

        def plane(width: int) -> Tensor:
            shape = (*x.shape[:2], start + x.shape[2] + 5, width)
            return torch.full(shape, UNTOUCHED, dtype=torch.uint8, device=x.device)

        scale_bytes = fmt.scale_bytes(x.shape[3])
        codes = plane(fmt.payload_bytes(x.shape[3]))
        return cls(x, codes, plane(scale_bytes) if scale_bytes else None, g, start, fmt)

    def expecting(self, codec: Codec, frozen: Frozen) -> Role:
        """What the planes should be afterwards."""
        payload, scale = codec.encode(self.x, frozen)
        rows = slice(self.start, self.start + self.x.shape[2])
        q, s = self.q.clone(), None if self.s is None else self.s.clone()
        q[:, :, rows] = payload
        if s is not None and scale is not None:
            s[:, :, rows] = scale
        return replace(self, q=q, s=s)

    def compare(self, expected: Role, name: str) -> list[Measured]:
        """Codes and scales, written rows and all others."""
        found = [different(f"codes of {name}", self.q, expected.q)]
        if self.s is not None and expected.s is not None:
            found.append(different(f"scales of {name}", *(_one_zero(self.fmt, s) for s in (self.s, expected.s))))
        return found


def _one_zero(fmt: TensorFormat, scales: Tensor) -> Tensor:
    """Scales and zero points with one zero: a minimum of 0 and -0 is either, by the order in which torch compares."""
    if fmt.rule.stored < 2:
        return scales
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[fmt.scale_dtype or ""]
    return scales.contiguous().view(kind) + 0.0


def store(k: Role, v: Role) -> Tensor:
    """Append both; int32 [2], what the kernel says of NaN and infinity."""
    nonfinite = torch.zeros(2, dtype=torch.int32, device=k.x.device)
    append_cuda(
        k.x, v.x, k.q, k.s, k.g, v.q, v.s, v.g, nonfinite, k.start, v.start, format_key(k.fmt), format_key(v.fmt)
    )  # fmt: skip
    return nonfinite


def tensors(tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """`dtype` [B, H, tokens, D]: ten random tensors of many sizes, and ten that are hard to store."""
    draw = torch.Generator(device).manual_seed(seed)
    shape = (BATCH, HEADS, tokens, head_dim)
    limit = min(torch.finfo(dtype).max, 3e38) * 0.9

    def normal() -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    found = {}
    for i in range(10):
        x = normal() * 10.0 ** ((i - 5) / (2 if dtype == torch.float16 else 1))
        x[..., ::17] *= 30
        found[f"random {i}"] = x
    x = normal()
    coin = normal() < 0
    outlier, one_token, alternating = x.clone(), torch.zeros_like(x), x.abs()
    outlier[..., 5] = 3e4
    one_token[:, :, tokens // 2] = x[:, :, tokens // 2]
    alternating[..., ::2] *= -1
    ramp = torch.arange(tokens * head_dim, device=device).view(tokens, head_dim).expand(shape)
    found |= {
        "zeros of both signs": torch.where(coin, 0.0, -0.0),
        "constant": torch.full_like(x, -1.3),
        "outlier channel": outlier,
        "one token": one_token,
        "alternating": alternating,
        "subnormal": x * (1e-6 if dtype == torch.float16 else 1e-40),
        "largest": torch.where(coin, limit, -limit),
        "wide": x * torch.logspace(-8, 4, head_dim, device=device),
        "offset": x * 0.01 + 90,
        "midpoints": (ramp % 512 - 256) / 4.0,
    }
    return {name: y.clamp(-limit, limit).to(dtype) for name, y in found.items()}


@dataclass(frozen=True)
class Stored:
    """One format at one head size and dtype: a probe of the kernels that store and read it."""

    fmt: TensorFormat
    head_dim: int
    dtype: torch.dtype

    @property
    def codec(self) -> Codec:
        """The reference."""
        return Codec(self.fmt, self.head_dim, constants(self.fmt, HEADS))

    def roles(self, x: Tensor, y: Tensor) -> tuple[tuple[Role, Role], tuple[Frozen, Frozen]]:
        """`x` as keys and `y`, as a transposed view, as values. What is frozen suits the first half of their tokens."""
        codec = self.codec
        frozen = [codec.freeze(t[:, :, : max(1, t.shape[2] // 2)]) for t in (x, y)]
        scales = [tensor_scale(codec, f, x.device) for f in frozen]
        view = y.transpose(1, 2).contiguous().transpose(1, 2)
        k, v = (Role.of(self.fmt, t, g, start) for t, g, start in zip((x, view), scales, STARTS, strict=True))
        return (k, v), (frozen[0], frozen[1])

    def touch(self) -> None:
        """See `Probe`."""
        x = torch.empty(BATCH, HEADS, 4, self.head_dim, dtype=self.dtype, device="meta")
        scaled = tensor_scale(self.codec, self.codec.freeze(torch.ones(1, 1, 1, 8)), torch.device("cpu")) is not None
        g = torch.empty(1, 1, device="meta") if scaled else None
        k, v = Role.of(self.fmt, x, g, 0), Role.of(self.fmt, x, g, 0)
        store(k, v)
        dequantize_cuda(k.q, k.s, k.g, format_key(self.fmt), self.head_dim, 0, 4, self.dtype)


def cases(sizes: Sizes) -> Iterator[tuple[str, Stored]]:
    """Every format in all dtypes at some head sizes, and in one, by turns, at others."""
    every, some = sizes.storage_dims
    for turn, head_dim in enumerate((*every, *some)):
        for i, (name, fmt) in enumerate(list(stored_formats(head_dim).items())[:: sizes.storage_step]):
            for dtype in DTYPES if head_dim in every else (DTYPES[(i + turn) % 3],):
                yield f"{name}, head {head_dim}, {str(dtype)[6:]}", Stored(fmt, head_dim, dtype)


def append(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """Stored bytes are the reference's, and no others are touched."""
    seed = sizes.seeds("append")
    for name, stored in cases(sizes):

        def run(stored: Stored = stored, own: int = seed()) -> list[Measured]:
            found: list[Measured] = []
            every = tensors(sizes.storage_tokens, stored.head_dim, stored.dtype, device, own)
            labels = list(every)
            for i, label in enumerate(labels):
                (k, v), (k_frozen, v_frozen) = stored.roles(every[label], every[labels[i - 7]])
                expected = k.expecting(stored.codec, k_frozen), v.expecting(stored.codec, v_frozen)
                flags = store(k, v)
                found += k.compare(expected[0], f"keys, {label}")
                found += v.compare(expected[1], f"values, {labels[i - 7]}")
                found.append(different(f"finite, {label}", flags, torch.zeros_like(flags)))
            return found

        yield Trial(name, run, (stored,))


def nonfinite(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """NaN and infinity are reported, of the role that has them."""
    seed = sizes.seeds("nonfinite")
    for name, stored in cases(sizes):

        def run(stored: Stored = stored, own: int = seed()) -> list[Measured]:
            found = []
            x = tensors(sizes.storage_tokens, stored.head_dim, stored.dtype, device, own)["random 5"]
            for bad, role in product((torch.nan, torch.inf, -torch.inf), (0, 1)):
                (k, v), _ = stored.roles(x, x)
                spoiled = (k, v)[role].x.clone()
                spoiled[1, 2, -1, -1] = bad
                sides = [replace(side, x=spoiled) if i == role else side for i, side in enumerate((k, v))]
                expected = torch.tensor([1 - role, role], dtype=torch.int32, device=device)
                found.append(different(f"{bad} in {('keys', 'values')[role]}", store(sides[0], sides[1]), expected))
            return found

        yield Trial(name, run, (stored,))


def dequantize(device: torch.device, sizes: Sizes) -> Iterator[Trial]:
    """What is read is what the reference reads, in every row that is asked for."""
    seed = sizes.seeds("dequantize")
    for name, stored in cases(sizes):

        def run(stored: Stored = stored, own: int = seed()) -> list[Measured]:
            found = []
            every = tensors(sizes.storage_tokens, stored.head_dim, torch.float32, device, own)
            for label, x in every.items():
                codec = stored.codec
                frozen = codec.freeze(x)
                payload, scale = codec.encode(x, frozen)
                g = tensor_scale(codec, frozen, device)
                for start, end in ((0, x.shape[2]), (3, x.shape[2] - 1)):
                    part = None if scale is None else scale[:, :, start:end]
                    expected = codec.decode(payload[:, :, start:end].contiguous(), part, frozen, stored.dtype)
                    with poisoned_memory():
                        out = dequantize_cuda(
                            payload, scale, g, format_key(stored.fmt), stored.head_dim, start, end, stored.dtype
                        )
                    found.append(different(f"{label}, rows {start} to {end}", out, expected))
            return found

        yield Trial(name, run, (stored,))


STORAGE_CHECKS: dict[str, Check] = {"append": append, "append: NaN and infinity": nonfinite, "dequantize": dequantize}
"""By what they check."""
