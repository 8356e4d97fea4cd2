"""What every storage format must hold: `check_contract(fmt)` runs all of it, for a preset or for anybody's own format.

The reference below is numpy in float64. It takes the format's data (`TensorFormat`, the table of its element) and
nothing else of kveval, so that a reader and a writer that are wrong together don't agree with it.

Shape legend: B batch, H KV heads, T tokens, D head size, G scales of one (batch, head), N elements that share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.codec import Codec, Frozen
from kveval.formats.layout import RoleFormat
from kveval.formats.spec import TensorFormat
from kveval.storage import PackedStore

Floats = NDArray[np.float64]

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 576)

SCALE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "e4m3": 1, "e8m0": 1}


@dataclass(frozen=True)
class Rounding:
    """How far a stored number may be from the number: relatively, absolutely (subnormals), and where it is cut."""

    relative: float
    absolute: float
    largest: float


ROUNDING = {
    "fp32": Rounding(2.0**-24, 2.0**-150, (2 - 2.0**-23) * 2.0**127),
    "bf16": Rounding(2.0**-8, 2.0**-134, (2 - 2.0**-7) * 2.0**127),
    "fp16": Rounding(2.0**-11, 2.0**-25, 65504.0),
    "e4m3": Rounding(2.0**-4, 2.0**-10, 448.0),
    # The floor rule gives a power of two; between 2^-127 and 2^127 nothing is rounded.
    "e8m0": Rounding(0.0, 0.0, 2.0**127),
}

SLACK = 1e-5
"""Relative room for float32 arithmetic, in which hundreds of roundings of 2^-24 may add up."""


def numbers(*shape: int, seed: int = 0, magnitude: float = 1.0) -> Tensor:
    """Random bfloat16-representable values with a few larger channels and an offset, as keys have."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    x[..., ::17] *= 6
    x[..., 5::23] += 3 * magnitude
    return x.bfloat16().float()


def tokens_for(fmt: TensorFormat, at_least: int) -> int:
    """The fewest tokens that make whole units."""
    return -(-at_least // fmt.unit) * fmt.unit


def can_store(fmt: TensorFormat, head_dim: int) -> bool:
    """Whether the format takes this head size; those of llama.cpp need a multiple of 32."""
    try:
        fmt.check(head_dim)
    except UnsupportedError:
        return False
    return True


@dataclass(frozen=True)
class Written:
    """A tensor [B, H, T, D] and what a codec made of it."""

    format: TensorFormat
    x: Tensor
    codec: Codec
    frozen: Frozen
    payload: Tensor
    scale: Tensor | None

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.codec.decode(self.payload, self.scale, self.frozen, dtype)

    def same_bytes(self, other: Written) -> bool:
        """Whether codes and scales are the same."""
        if self.scale is None or other.scale is None:
            return self.scale is other.scale and torch.equal(self.payload, other.payload)
        return torch.equal(self.payload, other.payload) and torch.equal(self.scale, other.scale)

    @cached_property
    def levels(self) -> Floats:
        """What each code stands for; NaN where nothing."""
        return np.array(self.format.info.values, np.float64)

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """[B, H, T, D]"""
        return unpacked(self.payload.numpy(), self.format.info.bits, self.x.shape[-1], self.format.packing)

    @cached_property
    def target(self) -> Floats:
        """[B, H, T, D]: the values that are encoded, after the transform."""
        x = self.x.double().numpy()
        if self.frozen.mean is not None:
            x = x - self.frozen.mean.double().numpy()
        return rotated(x) if self.format.transform == "hadamard" else x

    @cached_property
    def step_and_zero(self) -> tuple[Floats, Floats]:
        """The stored scale and zero point of every element, broadcastable to [B, H, T, D]."""
        fmt, (tokens, head_dim) = self.format, self.x.shape[2:]
        frozen = np.ones((1, 1, 1, 1)) if self.frozen.scale is None else self.frozen.scale.double().numpy()
        if self.scale is None:
            scales = np.float32(self.codec.scales or [fmt.fixed_scale]).astype(np.float64)
            constant = frozen if self.frozen.scale is not None else scales.reshape(1, -1, 1, 1)
            return constant, np.zeros((1, 1, 1, 1))
        stored = stored_numbers(fmt.scale_dtype or "", self.scale.numpy())
        stored = stored.reshape(*stored.shape[:2], -1, fmt.rule.stored)
        of = group_of(fmt, tokens, head_dim)
        step = stored[..., 0][..., of] * frozen
        return step, stored[..., 1][..., of] if fmt.rule.stored == 2 else np.zeros_like(step)

    @cached_property
    def stored(self) -> Floats:
        """[B, H, T, D]: what the stored bytes say, before the transform is undone."""
        step, zero = self.step_and_zero
        return self.levels[self.codes] * step + zero


def write(fmt: TensorFormat, x: Tensor, frozen: Frozen | None = None) -> Written:
    """`x` [B, H, T, D] written at once, as a sequence's first write unless it gets what was frozen before."""
    scales = None
    if fmt.scale_rule == "static":
        scales = tuple(0.02 * (head + 2) for head in range(x.shape[1] if fmt.granularity == "per_head" else 1))
    codec = Codec(fmt, x.shape[-1], scales)
    frozen = codec.freeze(x) if frozen is None else frozen
    return Written(fmt, x, codec, frozen, *codec.encode(x, frozen))


# The reference: bytes to numbers.


def unpacked(payload: NDArray[np.uint8], bits: int, head_dim: int, packing: str) -> NDArray[np.int64]:
    """[..., D] codes, from a stream of bits (bit i is bit i % 8 of byte i // 8) or from llama.cpp's blocks."""
    if packing == "ggml" and bits < 8:
        blocks = payload.reshape(*payload.shape[:-1], -1, 4 * bits)
        nibbles = blocks[..., -16:].astype(np.int64)
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
        if bits == 5:
            codes += np.unpackbits(blocks[..., :4], axis=-1, bitorder="little").astype(np.int64) << 4
        return codes.reshape(*payload.shape[:-1], head_dim)
    stream = np.unpackbits(payload, axis=-1, bitorder="little")[..., : head_dim * bits]
    return (stream.reshape(*payload.shape[:-1], head_dim, bits).astype(np.int64) << np.arange(bits)).sum(-1)


def stored_numbers(dtype: str, raw: NDArray[np.uint8]) -> Floats:
    """float64 [..., n] from bytes [..., n * size], by each type's definition."""
    raw = np.ascontiguousarray(raw)
    if dtype == "bf16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "e8m0":
        return 2.0 ** (raw.astype(np.float64) - 127)
    if dtype == "e4m3":
        exponent, fraction = (raw >> 3 & 15).astype(np.float64), (raw & 7) / 8
        magnitude = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)
        magnitude[raw & 127 == 127] = np.nan
        return np.where(raw < 128, magnitude, -magnitude)
    return raw.view({"fp32": "<f4", "fp16": "<f2"}[dtype]).astype(np.float64)


def rotated(x: Floats) -> Floats:
    """Times the orthonormal Hadamard matrix: entry (i, j) is (-1)^(number of bits that i and j share) / sqrt(n)."""
    size = x.shape[-1] & -x.shape[-1]
    shared = np.arange(size)[:, None] & np.arange(size)
    signs = np.array([(-1.0) ** bin(i).count("1") for i in range(size)])[shared]
    return (x.reshape(*x.shape[:-1], -1, size) @ signs / math.sqrt(size)).reshape(x.shape)


def group_of(fmt: TensorFormat, tokens: int, head_dim: int) -> NDArray[np.int64]:
    """[T, D]: which of the scales of its (batch, head) an element has, in the order in which they are stored."""
    t, d = np.mgrid[:tokens, :head_dim]
    size = fmt.group_size or 1
    if fmt.granularity == "per_group":
        return t * -(-head_dim // size) + d // size
    if fmt.granularity == "per_channel":
        return t // size * head_dim + d
    return t if fmt.granularity == "per_token" else np.zeros_like(t)


def grouped(fmt: TensorFormat, x: Floats) -> Floats:
    """[B, H, G, N] in the order of `group_of`; NaN fills a short group."""
    of = group_of(fmt, *x.shape[2:]).ravel()
    order = np.argsort(of, kind="stable")
    within = np.arange(len(of)) - np.searchsorted(of[order], of[order])
    out = np.full((*x.shape[:2], of.max() + 1, within.max() + 1), np.nan)
    out[:, :, of[order], within] = x.reshape(*x.shape[:2], -1)[:, :, order]
    return out


# The reference: how far a value may move, from the format's definition alone.


def distance(levels: Floats, u: Floats) -> Floats:
    """The most that rounding to the nearest level moves a value in the gap of `u`; beyond the ends, the way to them."""
    levels = np.sort(levels[np.isfinite(levels)])
    half_gaps = np.append(np.insert(np.diff(levels) / 2, 0, 0.0), 0.0)
    gap = half_gaps[np.searchsorted(levels, u)]
    return np.maximum(gap, np.maximum(u - levels[-1], levels[0] - u))


def ideal_scales(w: Written) -> list[tuple[Floats, Floats]]:
    """The (scale, zero point) [B, H, G] that the rule asks for, before rounding; several if it may choose."""
    levels, rule = w.levels[np.isfinite(w.levels)], w.format.scale_rule
    x = grouped(w.format, w.target)
    low, high, amax = np.nanmin(x, -1), np.nanmax(x, -1), np.nanmax(np.abs(x), -1)
    none, largest = np.zeros_like(low), np.abs(levels).max()
    first_largest = np.nanargmax(np.abs(x), -1)[..., None]
    extreme = np.take_along_axis(x, first_largest, -1)[..., 0]
    if rule in ("minmax", "ggml_minmax"):
        return [((high - low) / largest, low)]
    if rule == "mx_floor":
        exponent = np.frexp(amax)[1] - np.frexp(largest)[1]
        return [(2.0 ** np.clip(exponent.astype(float), -127, 127), none)]
    if rule == "four_over_six":
        return [(amax / 6, none), (amax / 4, none)]
    if rule == "rms":
        return [(np.sqrt(np.nanmean(x**2, -1)), none)]
    if rule == "ggml_extreme":
        return [(extreme / w.levels[0], none)]
    if rule == "ggml_iq4_nl":
        return [(extreme / w.levels[0], none)]
    assert rule in ("amax", "ggml_q8_0"), f"the contract doesn't know scale_rule {rule}"
    return [(amax / largest, none)]


def fitted(w: Written) -> Floats:
    """[B, H, G]: iq4_nl's scale, by least squares weighted with x^2, for the codes of its first guess; ties go up."""
    x = grouped(w.format, w.target)
    ((guess, _),) = ideal_scales(w)
    # In float32, as the rule is defined: what is a tie there decides a code, and with it the scale.
    u = np.float32(x) * (1 / np.float32(np.where(guess == 0, 1, guess)))[..., None]
    downwards = w.levels[::-1]
    v = downwards[np.abs(u[..., None] - downwards).argmin(-1)]
    below = np.nansum(x**2 * v**2, -1)
    return np.nansum(x**3 * v, -1) / np.where(below == 0, 1, below)


def moved_by_storing(w: Written, scale: Floats, zero: Floats) -> tuple[Floats, Floats]:
    """How far a scale and a zero point may move when they are stored."""
    rounding = ROUNDING[w.format.scale_dtype or ""]
    second = np.ones((1, 1, 1)) if w.frozen.scale is None else w.frozen.scale[..., 0].double().numpy()

    def moved(number: Floats, unit: Floats) -> Floats:
        size = np.abs(number)
        rounded = np.maximum(rounding.relative * size, rounding.absolute * unit)
        return rounded + np.maximum(0, size - rounding.largest * unit)

    return moved(scale, second), moved(zero, np.ones((1, 1, 1)))


def error_bound(w: Written) -> Floats:
    """[B, H, T, D]: the most that an encoded value may move."""
    if not w.format.lossy:
        return np.zeros(w.x.shape)
    if not w.format.rule.stored:
        step, _ = w.step_and_zero
        return step * distance(w.levels, w.target / step)
    of = group_of(w.format, *w.x.shape[2:])
    bounds = [_bound_of(w, scale, zero, of) for scale, zero in ideal_scales(w)]
    return np.maximum.reduce(bounds)


def _bound_of(w: Written, scale: Floats, zero: Floats, of: NDArray[np.int64]) -> Floats:
    y, (scale_moved, zero_moved) = w.target, moved_by_storing(w, scale, zero)
    s, z, ds, dz = (part[..., of] for part in (scale, zero, scale_moved, zero_moved))
    if w.format.scale_rule.startswith("ggml"):
        # Codes come from the numbers before they are rounded, or fitted.
        if w.format.scale_rule == "ggml_iq4_nl":
            fit = fitted(w)
            ds = np.abs(fit - scale)[..., of] + moved_by_storing(w, fit, zero)[0][..., of]
        u = (y - z) / np.where(s == 0, 1, s)
        nearest = distance(w.levels, u)
        return np.abs(s) * nearest + (np.abs(u) + nearest) * ds + dz
    corners = []
    for end in (s - ds, s, s + ds):
        for start in (z - dz, z, z + dz):
            u = (y - start) / np.where(end > 0, end, 1)
            corners.append(np.where(end > 0, end * distance(w.levels, u), np.abs(y - start)))
    return np.maximum.reduce(corners) * (1 + 2 * ROUNDING[w.format.scale_dtype or ""].relative)


def amplitude(w: Written) -> Floats:
    """[B, H, T, 1]: the largest magnitude of a vector, which float32 arithmetic is accurate to."""
    amax = np.maximum(np.abs(w.target), np.abs(w.x.double().numpy())).max(-1, keepdims=True)
    zero = np.abs(w.step_and_zero[1]).max(-1, keepdims=True) if w.format.lossy else 0
    return np.maximum(amax, zero)


# The clauses. Each takes a format and a head size that it can store.


def check_bytes_are_the_formula(fmt: TensorFormat, head_dim: int) -> None:
    """Payload, scales and constants take the bytes that the definition says, and the format says so."""
    tokens = tokens_for(fmt, 3)
    w = write(fmt, numbers(2, 3, tokens, head_dim))
    payload = math.ceil(head_dim * (16 if fmt.element == "bf16" else fmt.info.bits) / 8)
    per_unit = {
        "per_token": 1, "per_group": math.ceil(head_dim / (fmt.group_size or 1)), "per_channel": head_dim,
    }.get(fmt.granularity, 0)  # fmt: skip
    scales = per_unit * fmt.rule.stored * SCALE_BYTES.get(fmt.scale_dtype or "", 0)
    assert (fmt.payload_bytes(head_dim), fmt.scale_bytes(head_dim)) == (payload, scales)
    assert fmt.unit_bytes(head_dim) == fmt.unit * payload + scales
    assert fmt.bits_per_element(head_dim) == pytest.approx(8 * (payload + scales / fmt.unit) / head_dim)
    assert w.payload.dtype == torch.uint8
    assert w.payload.shape == (2, 3, tokens, payload)
    assert (w.scale is None) == (scales == 0)
    if w.scale is not None:
        assert w.scale.dtype == torch.uint8
        assert w.scale.shape == (2, 3, tokens // fmt.unit, scales)
    frozen = sum(t[0].nbytes for t in w.frozen.tensors())
    assert frozen == fmt.constant_bytes(head_dim, 3)
    assert all(t.dtype == torch.float32 for t in w.frozen.tensors())
    assert (frozen > 0) == fmt.freezes == (not fmt.append_invariant)


def check_decoding_says_what_the_bytes_say(fmt: TensorFormat, head_dim: int) -> None:
    """Reading is `scale * value of the code + zero point`, less the transform, in float32, then rounded once."""
    w = write(fmt, numbers(2, 2, tokens_for(fmt, 3), head_dim, seed=1))
    got = w.decode()
    if fmt.lossy:
        assert np.isfinite(w.stored).all(), "a code was written that stands for no number"
        expected = rotated(w.stored) if fmt.transform == "hadamard" else w.stored
        if w.frozen.mean is not None:
            expected = expected + w.frozen.mean.double().numpy()
        room = np.abs(expected) * 2.0**-22 + amplitude(w) * 2.0**-21
        assert (np.abs(got.double().numpy() - expected) <= room).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = w.decode(dtype)
        assert narrow.dtype == dtype
        assert narrow.shape == w.x.shape
        assert torch.equal(narrow, got.to(dtype))


def check_codes_are_the_nearest(fmt: TensorFormat, head_dim: int) -> None:
    """Every element has the nearest code that its stored scale and zero point offer.

    llama.cpp's rules promise less: their codes are nearest for the numbers before these are rounded to fp16 (or, in
    iq4_nl, fitted), so the stored ones may be off by what that moves a level, for both levels in question.
    """
    if not fmt.lossy:
        return
    for magnitude in (0.01, 1.0, 30.0):
        w = write(fmt, numbers(2, 2, tokens_for(fmt, 3), head_dim, seed=2, magnitude=magnitude))
        step, zero = w.step_and_zero
        levels = w.levels[np.isfinite(w.levels)]
        nearest = np.full(w.x.shape, np.inf)
        for level in levels:
            nearest = np.minimum(nearest, np.abs(w.target - (level * step + zero)))
        allowed = nearest + amplitude(w) * 2.0**-20
        if fmt.scale_rule.startswith("ggml"):
            ((scale, start),) = ideal_scales(w)
            of = group_of(fmt, *w.x.shape[2:])
            moved = np.abs(levels).max() * np.abs(step - scale[..., of]) + np.abs(zero - start[..., of])
            allowed = allowed + 2 * moved
        error = np.abs(w.target - w.stored)
        assert (error <= allowed).all(), f"{(error > allowed).sum()} of {error.size} codes are not the nearest"


def check_error_is_bounded(fmt: TensorFormat, head_dim: int) -> None:
    """No value moves further than the definition allows, worked out in float64 from the values that were written."""
    for x in _kinds_of_blocks(fmt, head_dim):
        w = write(fmt, x)
        if not fmt.lossy:
            assert torch.equal(w.decode(), x)
            continue
        bound = error_bound(w)
        excess = np.abs(w.stored - w.target) - bound * (1 + SLACK) - amplitude(w) * 2.0**-20
        assert (excess <= 0).all(), f"a value is {excess.max()} beyond its bound in a tensor up to {x.abs().max()}"


def _kinds_of_blocks(fmt: TensorFormat, head_dim: int) -> Iterator[Tensor]:
    """Values of three magnitudes, constants, one channel that dwarfs all others, vectors of one non-zero value."""
    shape = (1, 2, tokens_for(fmt, 3), head_dim)
    plain = numbers(*shape, seed=3)
    outlier = plain.clone()
    outlier[..., head_dim // 3] *= 256
    lonely = torch.zeros(shape)
    lonely[..., -1] = -0.0625
    yield from (plain, plain / 1024, plain * 256, outlier, lonely)
    yield from (torch.full(shape, value).bfloat16().float() for value in (0.001, -3.0, 448.0, 1e5))


def check_chunks_give_the_same_bytes(fmt: TensorFormat, head_dim: int) -> None:
    """One unit at a time, seven at a time and all at once give the same bytes, once the first write is made."""
    unit = fmt.unit
    total, first = 23 if unit == 1 else 5 * unit, 4 if unit == 1 else unit
    x = numbers(2, 2, total, head_dim, seed=5)
    whole = write(fmt, x, write(fmt, x[:, :, :first]).frozen)
    if not fmt.freezes:
        assert whole.same_bytes(write(fmt, x)), "the first write counts although the format doesn't say so"
    for chunk in (unit, 7 * unit if unit == 1 else 2 * unit):
        starts = [0, *range(first, total, chunk)] if fmt.freezes else [*range(0, total, chunk)]
        pieces = [write(fmt, x[:, :, a:b], whole.frozen) for a, b in zip(starts, [*starts[1:], total], strict=True)]
        assert torch.equal(torch.cat([p.payload for p in pieces], 2), whole.payload)
        if whole.scale is not None:
            assert torch.equal(torch.cat([p.scale for p in pieces if p.scale is not None], 2), whole.scale)
        assert torch.equal(torch.cat([p.decode() for p in pieces], 2), whole.decode())


def check_what_is_frozen_comes_from_the_first_write(fmt: TensorFormat, head_dim: int) -> None:
    """Where a format says that it freezes something, another first write gives other bytes; others freeze nothing."""
    half = fmt.unit * 4
    x = numbers(2, 2, 2 * half, head_dim, seed=6)
    x[:, :, half:] = x[:, :, half:] * 8 + 1
    first, both = write(fmt, x[:, :, :half]), write(fmt, x)
    if not fmt.freezes:
        assert not first.frozen.tensors()
        return
    again = write(fmt, x, first.frozen)
    assert not again.same_bytes(both)
    start = first.x.double().numpy()
    if first.frozen.mean is not None:
        assert first.frozen.mean.shape == (2, 2, 1, head_dim)
        np.testing.assert_allclose(first.frozen.mean.numpy(), start.mean(2, keepdims=True), rtol=1e-6, atol=1e-7)
    if first.frozen.scale is not None:
        assert first.frozen.scale.shape == (2, 1, 1, 1)
        amax = np.abs(first.target).max((1, 2, 3), keepdims=True)
        divisor = fmt.global_divisor or np.nanmax(np.abs(first.levels))
        np.testing.assert_allclose(first.frozen.scale.numpy(), amax / divisor, rtol=1e-6)


def check_later_values_saturate(fmt: TensorFormat, head_dim: int) -> None:
    """Values far beyond what was frozen are cut, with their sign; they never become NaN or infinity."""
    if not fmt.freezes:
        return
    first = numbers(1, 2, tokens_for(fmt, 4), head_dim, seed=7)
    for growth in (40.0, 1e6, 1e30):
        later = write(fmt, first * growth, write(fmt, first).frozen)
        assert torch.isfinite(later.decode()).all()
        assert np.isfinite(later.stored).all()
        if later.frozen.scale is not None:
            assert (np.sign(later.stored) * np.sign(later.target) >= 0).all()
            assert (np.abs(later.stored) <= np.abs(later.target).max() * 1.07).all()
            if later.scale is not None:
                assert later.scale.max() == 0x7E  # 448, the largest e4m3


def check_rows_do_not_meet(fmt: TensorFormat, head_dim: int) -> None:
    """A row of a batch has the bytes, and reads the values, that it has alone."""
    x = numbers(3, 2, tokens_for(fmt, 5), head_dim, seed=8) * torch.tensor([1.0, 100.0, 0.01])[:, None, None, None]
    batch, read = write(fmt, x), write(fmt, x).decode()
    for row in range(3):
        alone = write(fmt, x[row : row + 1])
        assert torch.equal(batch.payload[row : row + 1], alone.payload)
        if batch.scale is not None:
            assert alone.scale is not None
            assert torch.equal(batch.scale[row : row + 1], alone.scale)
        for whole, one in zip(batch.frozen.tensors(), alone.frozen.tensors(), strict=True):
            assert torch.equal(whole[row : row + 1], one)
        assert torch.equal(read[row : row + 1], alone.decode())


def check_strides_do_not_show(fmt: TensorFormat, head_dim: int) -> None:
    """A view (transposed, of every other channel, of every other token, one row for all) has the bytes of its copy."""
    tokens = tokens_for(fmt, 5)
    wide = numbers(2, tokens, 3, 2 * head_dim, seed=9)
    views = (
        wide[..., :head_dim].transpose(1, 2),
        wide.transpose(1, 2)[..., ::2],
        numbers(2, 3, 2 * tokens, head_dim, seed=9)[:, :, ::2],
        numbers(1, 1, tokens, head_dim, seed=9).expand(2, 3, -1, -1),
    )
    for view in views:
        assert not view.is_contiguous()
        strided, plain = write(fmt, view), write(fmt, view.contiguous())
        assert strided.same_bytes(plain)
        for a, b in zip(strided.frozen.tensors(), plain.frozen.tensors(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(strided.decode(), plain.decode())


def check_zeros_stay_zeros(fmt: TensorFormat, head_dim: int) -> None:
    """0 and -0 read as 0, where the element has a zero or the scale follows the values; what is frozen stays usable."""
    for value in (0.0, -0.0):
        w = write(fmt, torch.full((1, 2, tokens_for(fmt, 3), head_dim), value))
        if fmt.rule.stored or not fmt.lossy or 0 in w.levels:
            assert (w.decode() == 0).all()
        if w.frozen.scale is not None:
            assert w.frozen.scale.tolist() == [[[[1.0]]]]


def check_extremes_stay_finite(fmt: TensorFormat, head_dim: int) -> None:
    """From the smallest float32 to 1e38: finite, frozen scales above 0, and nothing grows beyond its tensor.

    Rotated values are larger than the values, by up to sqrt(D), so their formats are tried up to 1e36 only.
    """
    # 1.4e-45 and 1e-42 are subnormal in float32, and so small that dividing them by a scale's divisor gives zero.
    magnitudes = [1.4e-45, 1e-42, 9.2e-41, 1e-38, 1e-30, 448.0, 464.0, 6e4, 1e5, 1e20, 1e36]
    for magnitude in magnitudes if fmt.transform == "hadamard" else [*magnitudes, 1e38]:
        x = torch.full((1, 2, tokens_for(fmt, 4), head_dim), magnitude)
        alternating = x.clone()
        alternating[..., ::2] *= -1
        lonely = torch.zeros_like(x)
        lonely[:, :, 1, 3] = -magnitude
        for kind in (x, -x, alternating, lonely):
            w = write(fmt, kind)
            assert torch.isfinite(w.decode()).all(), f"{magnitude} became NaN or infinity"
            assert all(torch.isfinite(t).all() for t in w.frozen.tensors())
            assert w.frozen.scale is None or (w.frozen.scale > 0).all()
            if not fmt.lossy:
                continue
            amax = np.abs(w.target).max()
            # The widest gap below the largest level is a quarter of it, and a scale may be rounded up.
            limit = amax * 1.25
            if fmt.rule.stored:
                rounding = ROUNDING[fmt.scale_dtype or ""]
                limit += 2 * rounding.absolute
                if fmt.rule.stored == 2 and amax > rounding.largest:
                    # The zero point is cut, and the step is not.
                    limit += amax
            else:
                # A constant scale has a smallest number, to which half of it may grow.
                limit = max(limit, np.abs(w.levels[w.levels != 0]).min() * w.step_and_zero[0].max())
            assert np.abs(w.stored).max() <= limit, f"{magnitude} grew to {np.abs(w.stored).max()}"


def check_outliers_stay_in_their_group(fmt: TensorFormat, head_dim: int) -> None:
    """What a large value does to its neighbours ends where its group ends, unless something else joins the groups."""
    if fmt.granularity not in ("per_group", "per_channel", "per_token") or fmt.freezes or fmt.transform != "none":
        return
    tokens = tokens_for(fmt, 4)
    plain = numbers(1, 2, tokens, head_dim, seed=10)
    spiked = plain.clone()
    spiked[:, :, 1, 37] = 3e4
    of = group_of(fmt, tokens, head_dim)
    elsewhere = torch.from_numpy(of != of[1, 37])
    assert elsewhere.any()
    assert torch.equal(write(fmt, plain).decode()[:, :, elsewhere], write(fmt, spiked).decode()[:, :, elsewhere])


def check_short_groups_are_groups_of_their_own(fmt: TensorFormat, head_dim: int) -> None:
    """What fills up a short last group takes no part: its elements are stored as a head of just these would be."""
    size = fmt.group_size or 1
    if fmt.granularity != "per_group" or fmt.transform == "hadamard" or not (short := head_dim % size):
        return
    for seed in range(8):
        w = write(fmt, numbers(2, 2, 16, head_dim, seed=seed))
        last = Frozen(w.frozen.scale, None if w.frozen.mean is None else w.frozen.mean[..., -short:])
        alone = write(fmt, w.x[..., -short:], last)
        assert torch.equal(w.decode()[..., -short:], alone.decode())
        assert w.scale is not None
        assert alone.scale is not None
        assert torch.equal(w.scale[..., -alone.scale.shape[-1] :], alone.scale)


def check_bf16_keeps_every_bit_and_others_lose(fmt: TensorFormat, head_dim: int) -> None:
    """A lossy format that loses nothing measures nothing."""
    x = numbers(1, 2, tokens_for(fmt, 4), head_dim, seed=11)
    lost = (write(fmt, x).decode() != x).float().mean()
    assert lost > 0.2 if fmt.lossy else lost == 0


def check_non_finite_values_are_refused(fmt: TensorFormat, head_dim: int) -> None:
    """NaN and infinity stop at the store, which names its layer, and leave it as it was."""
    x = numbers(2, 2, tokens_for(fmt, 4), head_dim, seed=12)
    scales = write(fmt, x).codec.scales
    for bad in (math.nan, math.inf, -math.inf):
        store = PackedStore(RoleFormat(fmt, scales=scales), head_dim, where="keys of layer 3")
        store.append(x)
        before = {name: part.clone() for name, part in store.parts().items()}
        broken = x.clone()
        broken[1, 0, -1, 7] = bad
        with pytest.raises(MeasurementError, match="keys of layer 3 got NaN or infinity"):
            store.append(broken)
        assert store.total == x.shape[2]
        after = store.parts()
        assert before.keys() == after.keys()
        assert all(torch.equal(part, after[name]) for name, part in before.items())


def check_rewriting_moves_nothing(fmt: TensorFormat, head_dim: int) -> None:
    """Reading and writing back (a move between caches, with what was frozen) gives the same values, bit for bit.

    Exceptions: a float32 scale shows that a transform and its inverse round, so the last bits may change. `rms` keeps
    its codes, but its scale follows the norm of the levels, which is not quite that of the values: up to 10 % of the
    largest value of a vector. And formats that don't find their scale again (see `reproduces_its_scale`), as 8-bit
    integers with e4m3 scales; of them nothing is promised here but the error bound of a write.
    """
    once = write(fmt, numbers(2, 2, tokens_for(fmt, 6), head_dim, seed=13))
    again = write(fmt, once.decode(), once.frozen)
    if fmt.scale_rule == "rms":
        assert torch.equal(again.payload, once.payload)
        moved = np.abs(again.stored - once.stored) / amplitude(once)
        assert 0 < moved.max() < 0.1
    elif reproduces_its_scale(fmt):
        if fmt.transform == "none":
            assert again.same_bytes(once)
        else:
            # A zero may lose its sign.
            assert (again.levels[again.codes] == once.levels[once.codes]).all()
        if fmt.transform == "none" or fmt.scale_dtype != "fp32":
            assert torch.equal(again.decode(), once.decode())
        else:
            assert (np.abs(again.stored - once.stored) <= amplitude(once) * 2.0**-20).all()


def reproduces_its_scale(fmt: TensorFormat) -> bool:
    """Whether the ends of a range read back as ends from which the same scale is found.

    Rounding the scale (and a zero point as large as the range) moves them by well below a level, and a scale for the
    largest magnitude, whatever its sign, finds a level of that magnitude on both sides.
    """
    if not fmt.rule.stored:
        return True
    levels = sorted(fmt.info.numbers)
    moved = ROUNDING[fmt.scale_dtype or ""].relative * levels[-1] * fmt.rule.stored
    both_ends = levels[0] == -levels[-1] or fmt.rule.stored == 2 or fmt.scale_rule.startswith("ggml")
    return both_ends and moved < (levels[-1] - levels[-2]) / 4


def check_plain_data_and_back(fmt: TensorFormat, head_dim: int) -> None:
    """A format is data: it survives JSON, and an equal format writes equal bytes."""
    twin = TensorFormat.model_validate_json(fmt.model_dump_json())
    assert twin == fmt
    x = numbers(1, 2, tokens_for(fmt, 2), head_dim)
    assert write(twin, x).same_bytes(write(fmt, x))


Clause = Callable[[TensorFormat, int], None]

CONTRACT: tuple[Clause, ...] = tuple(value for name, value in list(globals().items()) if name.startswith("check_"))


def check_contract(fmt: TensorFormat, head_dim: int = 64) -> None:
    """Run every clause on a format.

    Raises:
        AssertionError: if the format or the codec breaks one; the note names it.
    """
    for clause in CONTRACT:
        try:
            clause(fmt, head_dim)
        except AssertionError as error:
            error.add_note(f"{clause.__name__}, head size {head_dim}, of {fmt!r}")
            raise
