"""One call of decode attention on random data: what is stored, what is asked, and the call itself.

Shape legend: B batch, H KV heads, Hq query heads, Lq queries, T capacity, N stored tokens, D head size, P payload bytes
and S scale bytes of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic

from kveval.formats.codec import Codec
from kveval.formats.spec import TensorFormat, get_scheme, scheme_names
from kveval.kernels import decode, reference
from kveval.kernels.formats import format_key, tensor_scale

__all__ = ["POISON", "Cache", "Case", "Planes", "covered_schemes", "plain", "poisoned_memory", "store"]

POISON = 0xFF
"""What fills bytes that nothing may read: NaN as e4m3, e5m2, e8m0, fp16, bf16 and fp32."""

SLACK = 48
"""Tokens of a cache behind its last one."""


@cache
def covered_schemes(head_dim: int) -> tuple[str, ...]:
    """Presets that decode attention reads, one for each pair of formats; transforms do not count."""
    first: dict[tuple[str, str], str] = {}
    for name in scheme_names():
        scheme = get_scheme(name)
        if not decode.misfit(scheme.key, scheme.value, head_dim, head_dim):
            first.setdefault((format_key(scheme.key), format_key(scheme.value)), name)
    return tuple(first.values())


def plain(fmt: TensorFormat) -> TensorFormat:
    """The format without its transform, which happens outside of kernels."""
    return fmt.model_copy(update={"transform": "none"})


def constants(fmt: TensorFormat, heads: int) -> tuple[float, ...] | None:
    """Scales per head, where the format is calibrated: none a power of two."""
    return tuple(0.03 + 0.007 * h for h in range(heads)) if fmt.scale_rule == "static" else None


@dataclass(frozen=True)
class Planes:
    """Keys or values as stored: codes uint8 [B, H, T, P], scales uint8 [B, H, T, S], a scale of the tensor; or None."""

    q: Tensor
    s: Tensor | None
    g: Tensor | None

    def spoil(self, unread_BN: Tensor, fill: int = POISON) -> None:
        """Fill rows [B, T] that nothing may read."""
        for plane in (self.q, self.s):
            if plane is not None:
                plane.masked_fill_(unread_BN[:, None, :, None], fill)


@dataclass(frozen=True)
class Cache:
    """A layer's stored keys and values, and the query that asks."""

    query: Tensor
    key: Planes
    value: Planes
    bounds: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is stored, how large its numbers are, and what is asked.

    Attributes:
        scheme: Preset; its transforms are left out.
        head_dim: D.
        batch: B.
        heads: H.
        group: Query heads of a KV head.
        queries: Lq.
        length: N.
        position: Row of the first query; None: the queries are the last rows.
        window: Rows that a query sees, or 0.
        softcap: Or 0.
        sinks: Whether every query head has a sink.
        bounds: First row and the row after the last of every sequence, or None.
        splits: Blocks per KV head, or 0.
        query_dtype: bf16 or fp16.
        out_dtype: Of the result.
        query_size: Standard deviation of queries.
        key_size: Of keys.
        value_size: Of values.
        outlier: Factor on the values of one token.
        growing: Whether scores and values grow along the sequence, so that the softmax's reference moves all the way.
        padded: Whether heads and sequences lie further apart than they have to.
        seed: Of the data.
    """

    scheme: str
    head_dim: int = 128
    batch: int = 1
    heads: int = 2
    group: int = 4
    queries: int = 1
    length: int = 200
    position: int | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    bounds: tuple[tuple[int, int], ...] | None = None
    splits: int = 0
    query_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.float32
    query_size: float = 1.0
    key_size: float = 1.0
    value_size: float = 1.0
    outlier: float = 1.0
    growing: bool = False
    padded: bool = False
    seed: int = 0

    def __str__(self) -> str:
        changed = (f for f in fields(self) if f.name not in ("scheme", "seed") and getattr(self, f.name) != f.default)
        return " ".join([self.scheme, *(f"{f.name}={_short(getattr(self, f.name))}" for f in changed)])

    @property
    def at(self) -> int:
        """Row of the first query."""
        return max(0, self.length - self.queries) if self.position is None else self.position

    @property
    def formats(self) -> tuple[TensorFormat, TensorFormat]:
        """Of keys and of values."""
        scheme = get_scheme(self.scheme)
        return plain(scheme.key), plain(scheme.value)

    @property
    def capacity(self) -> int:
        """T: a multiple of 16, with room behind the last token."""
        return -(-self.length // 16) * 16 + SLACK

    def allowed(self, device: torch.device) -> Tensor:
        """Mask bool [B, Lq, N]: whether a query attends to a row."""
        row = torch.arange(self.length, device=device)
        at = self.at + torch.arange(self.queries, device=device)[:, None]
        mask = (row <= at).expand(self.batch, -1, -1)
        if self.window:
            mask = mask & (row > at - self.window)
        if self.bounds is not None:
            start, end = torch.tensor(self.bounds, device=device)[..., None, None].unbind(1)
            mask = mask & (row >= start) & (row < end)
        return mask

    def make(self, device: torch.device, *, fill: int = POISON) -> Cache:
        """Random data; every row that no query attends to is filled with `fill`."""
        draw = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=device)

        shape = (self.batch, self.heads, self.length, self.head_dim)
        k, v = normal(*shape) * self.key_size, normal(*shape) * self.value_size
        if self.length:
            v[:, :, self.length // 2] *= self.outlier
        if self.growing:
            k *= torch.linspace(0.05, 12, self.length, device=device)[:, None]
            v *= torch.logspace(-3, 2, self.length, device=device)[:, None]
        query = (normal(self.batch, self.heads * self.group, self.queries, self.head_dim) * self.query_size).to(
            self.query_dtype
        )
        # Sinks that bf16 holds exactly, for torch's attention takes them as a bias in its precision.
        sinks = normal(self.heads * self.group).bfloat16().float() if self.sinks else None
        bounds = None if self.bounds is None else torch.tensor(self.bounds, dtype=torch.int32, device=device)
        key, value = (
            store(fmt, x, self.capacity, fill=fill, padded=self.padded)
            for fmt, x in zip(self.formats, (k, v), strict=True)
        )
        unread = torch.ones(self.batch, self.capacity, dtype=torch.bool, device=device)
        unread[:, : self.length] = ~self.allowed(device).any(1)
        key.spoil(unread, fill)
        value.spoil(unread, fill)
        return Cache(query, key, value, bounds, sinks)

    def arguments(self, cache: Cache, *, out_dtype: torch.dtype, splits: int) -> tuple[Any, ...]:
        """Of decode attention."""
        kfmt, vfmt = map(format_key, self.formats)
        return (
            cache.query, cache.key.q, cache.key.s, cache.key.g, cache.value.q, cache.value.s, cache.value.g,
            cache.bounds, cache.sinks, kfmt, vfmt, self.length, self.at, self.window, self.scaling, self.softcap,
            out_dtype, splits,
        )  # fmt: skip

    @property
    def scaling(self) -> float:
        """Factor on the scores: that of scores of unit variance for keys of any size."""
        return float(self.head_dim**-0.5 / self.key_size)

    def attend(self, cache: Cache, *, splits: int | None = None) -> tuple[Tensor, Tensor]:
        """The kernel's result and log-sum-exp, in memory that held NaN before."""
        with poisoned_memory():
            return decode.decode_cuda(
                *self.arguments(cache, out_dtype=self.out_dtype, splits=self.splits if splits is None else splits)
            )

    def expected(self, cache: Cache) -> tuple[Tensor, Tensor]:
        """float64 result and log-sum-exp of exact attention to what the cache decodes to."""
        wide = replace(cache, query=cache.query.double())
        out, lse = reference.decode(*self.arguments(wide, out_dtype=torch.float64, splits=0))
        return out, lse.double()

    def touch(self) -> None:
        """The call on tensors without memory: a launcher learns which kernel it needs."""
        meta = torch.device("meta")
        shape = (self.batch, self.heads, self.capacity)

        def planes(fmt: TensorFormat) -> Planes:
            scale_bytes = fmt.scale_bytes(self.head_dim)
            return Planes(
                torch.empty(*shape, fmt.payload_bytes(self.head_dim), dtype=torch.uint8, device=meta),
                torch.empty(*shape, scale_bytes, dtype=torch.uint8, device=meta) if scale_bytes else None,
                None,
            )

        query = torch.empty(
            self.batch, self.heads * self.group, self.queries, self.head_dim, dtype=self.query_dtype, device=meta
        )
        key, value = map(planes, self.formats)
        self.attend(Cache(query, key, value, None, None))


def store(fmt: TensorFormat, x_BHND: Tensor, capacity: int, *, fill: int = POISON, padded: bool = False) -> Planes:
    """`x_BHND` encoded into planes of `capacity` rows, the rest of which holds `fill`.

    `padded` planes are part of larger ones: one sequence, two heads and 32 rows more.
    """
    codec = Codec(fmt, x_BHND.shape[3], constants(fmt, x_BHND.shape[1]))
    frozen = codec.freeze(x_BHND)
    payload, scale = codec.encode(x_BHND, frozen)

    def plane(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        batch, heads, rows, width = part.shape
        around = (batch + 1, heads + 2, capacity + 32) if padded else (batch, heads, capacity)
        whole = torch.full((*around, width), fill, dtype=torch.uint8, device=part.device)
        inner = whole[-batch:, -heads:, :capacity]
        inner[:, :, :rows] = part
        return inner

    codes = plane(payload)
    assert codes is not None
    return Planes(codes, plane(scale), tensor_scale(codec, frozen, x_BHND.device))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that torch allocates holds NaN, so that what a kernel does not write is seen."""
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]


def _short(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")
