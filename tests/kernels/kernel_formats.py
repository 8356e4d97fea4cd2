"""The formats that the append and dequantize kernels take, and tensors that are hard to store."""

from __future__ import annotations

import torch
from torch import Tensor

from kveval.formats.codec import Codec, Frozen
from kveval.formats.spec import TensorFormat, get_scheme, scheme_names
from kveval.kernels.formats import format_key, misfit, takes_tensor_scale

__all__ = ["FORMATS", "HEAD_DIMS", "NOT_IN_A_PRESET", "border_rows", "canonical", "global_scale", "hard_rows"]

HEAD_DIMS = (64, 80, 96, 128, 256)

_GROUP = {"granularity": "per_group"}
_ROW = {"granularity": "per_token"}
NOT_IN_A_PRESET = {
    name: TensorFormat(**fields)
    for name, fields in {
        "e5m2 rows, fp16": {"element": "e5m2", **_ROW, "scale_rule": "amax", "scale_dtype": "fp16"},
        "e5m2 blocks, e8m0": {
            "element": "e5m2", **_GROUP, "group_size": 16, "scale_rule": "mx_floor", "scale_dtype": "e8m0",
        },
        "int8 groups, bf16": {
            "element": "int8", **_GROUP, "group_size": 32, "scale_rule": "amax", "scale_dtype": "bf16",
        },
        "int8 blocks, e8m0": {
            "element": "int8", **_GROUP, "group_size": 16, "scale_rule": "mx_floor", "scale_dtype": "e8m0",
        },
        "uint8 groups of 8, fp32": {
            "element": "uint8", **_GROUP, "group_size": 8, "scale_rule": "minmax", "scale_dtype": "fp32",
        },
        "uint4 groups of 4, fp16": {
            "element": "uint4", **_GROUP, "group_size": 4, "scale_rule": "minmax", "scale_dtype": "fp16",
        },
        "e2m1 groups of 2, e4m3": {
            "element": "e2m1", **_GROUP, "group_size": 2, "scale_rule": "amax", "scale_dtype": "e4m3",
        },
        "e2m1 rows, fp32": {"element": "e2m1", **_ROW, "scale_rule": "amax", "scale_dtype": "fp32"},
        "4 over 6 in 8": {
            "element": "e2m1", **_GROUP, "group_size": 8, "scale_rule": "four_over_six", "scale_dtype": "fp16",
        },
        "4 over 6 in 32": {
            "element": "e2m1", **_GROUP, "group_size": 32, "scale_rule": "four_over_six", "scale_dtype": "e4m3",
            "global_divisor": 1536,
        },
        "e4m3 blocks, e4m3": {
            "element": "e4m3", **_GROUP, "group_size": 16, "scale_rule": "amax", "scale_dtype": "e4m3",
            "global_divisor": 2e5,
        },
    }.items()
}  # fmt: skip


def _distinct() -> dict[str, TensorFormat]:
    sides = {f"{name}.{role}": getattr(get_scheme(name), role) for name in scheme_names() for role in ("key", "value")}
    first: dict[str, str] = {}
    for side, fmt in sides.items():
        if not misfit(fmt, 128):
            first.setdefault(format_key(fmt), side)
    return {side: sides[side] for side in first.values()} | NOT_IN_A_PRESET


FORMATS: dict[str, TensorFormat] = _distinct()
"""One of every kind that kernels tell apart: of the presets, and beyond them."""


def hard_rows(batch: int, heads: int, head_dim: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """[B, H, 24, D]: plain rows, and rows of zeros, outliers, subnormals, huge values, constants and ties."""
    draw = torch.Generator().manual_seed(seed)
    plain = torch.randn(batch, heads, 24, head_dim, generator=draw)
    x = plain.clone()
    coin = torch.rand(batch, heads, head_dim, generator=draw) < 0.5
    huge = torch.tensor(6e4 if dtype == torch.float16 else 1e38)
    x[:, :, 4] = 0.0
    x[:, :, 5] = -0.0
    x[:, :, 6] = torch.where(coin, 0.0, -0.0)
    x[:, :, 7] = torch.where(coin, -0.0, plain[:, :, 7].abs())
    x[:, :, 8] = 0.0
    x[:, :, 8, 7 % head_dim] = -300.0
    x[:, :, 9, head_dim // 2] = 3e4
    x[:, :, 10] *= 1e-7 if dtype == torch.float16 else 1e-40
    x[:, :, 11] = 1.4e-45
    x[:, :, 12] = huge * plain[:, :, 12].sign()
    x[:, :, 13] = huge * plain[:, :, 13].tanh()
    x[:, :, 14] = 0.7
    x[:, :, 15] = -1.3
    x[:, :, 16] = torch.randint(-96, 97, (batch, heads, head_dim), generator=draw) / 16
    x[:, :, 17] = torch.randint(-12, 13, (batch, heads, head_dim), generator=draw) / 4
    x[:, :, 18] *= torch.logspace(-8, 4, head_dim)
    x[:, :, 19] = x[:, :, 19] * 0.01 + 90
    x[:, :, 20] = plain[:, :, 20].abs()
    x[:, :, 21] = -plain[:, :, 21].abs()
    x[:, :, 22] *= 448
    x[:, :, 23] *= 1e-3
    return x.to(dtype)


def border_rows(codec: Codec, frozen: Frozen, batch: int, heads: int) -> Tensor:
    """float32 [B, H, 64, D]: pairs of rows a rounding apart, between which what is stored changes.

    Found by halving the way between two random rows, with an eye on the scales for most and on the codes for others.
    Another order of operations, or a reciprocal in place of a division, puts the borders elsewhere.
    """
    draw = torch.Generator().manual_seed(2)
    low, high = torch.randn(2, batch, heads, 32, codec.head_dim, generator=draw)
    ends = [low, high]
    for rows, part in ((slice(0, 24), 1), (slice(24, 32), 0)):
        a, b = low[:, :, rows], high[:, :, rows]
        near, far = torch.zeros(*a.shape[:3], 1), torch.ones(*a.shape[:3], 1)
        stored = codec.encode(a, frozen)[part]
        for _ in range(40 if stored is not None else 0):
            middle = (near + far) / 2
            found = codec.encode(a + (b - a) * middle, frozen)[part]
            assert found is not None
            # One group, or one byte of codes, decides for the row.
            size = (
                codec.format.scale_bytes(codec.head_dim) // max(1, codec.format.groups(codec.head_dim)) if part else 1
            )
            same = (found[..., :size] == stored[..., :size]).all(-1, keepdim=True)
            near, far = torch.where(same, middle, near), torch.where(same, far, middle)
        for end, at in zip(ends, (near, far), strict=True):
            end[:, :, rows] = a + (b - a) * at
    return torch.cat(ends, dim=2)


def global_scale(fmt: TensorFormat, batch: int, heads: int, *, per: str) -> Tensor | None:
    """A tensor-level scale [B or 1, H or 1], as `per` says, that is no power of two; None if the format has none."""
    if not takes_tensor_scale(fmt) or per == "none":
        return None
    shape = {"batch": (batch, 1), "head": (1, heads), "both": (batch, heads), "one": (1, 1)}[per]
    count = shape[0] * shape[1]
    return (torch.arange(1, count + 1) * 0.0137).reshape(shape)


def canonical(fmt: TensorFormat, scale: Tensor) -> Tensor:
    """Stored scales with one zero: a minimum of 0 and -0 is either, which torch decides by the order of its loop."""
    if fmt.rule.stored < 2:
        return scale
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[fmt.scale_dtype or ""]
    return (scale.contiguous().view(kind) + 0.0).view(torch.uint8)
