"""Packed caches of random tokens, and the calls that work on them.

Shape legend: B batch, H KV heads, Hq query heads, T tokens allocated, D head size, N caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from kveval.bench.shapes import Case
from kveval.bench.timers import Round
from kveval.formats.codec import Codec
from kveval.formats.spec import KVScheme, TensorFormat
from kveval.kernels import formats, ops
from kveval.kernels.decode import decode_cuda, misfit

__all__ = [
    "Cache",
    "Plane",
    "append_misfit",
    "decode_misfit",
    "hollow_cache",
    "make_caches",
    "random_query",
    "rounds_of",
]

L2_TIMES = 4
"""How many times over the caches of one scheme fill the L2 cache, so that none is still in it when it is read again."""

MOST_CACHES = 1024
PAGE_VECTORS = 2**13
"""Vectors that are drawn and encoded; longer caches repeat them."""


@dataclass(frozen=True)
class Plane:
    """Keys or values: codes [N B, H, T, P], scales [N B, H, T, S] or None, one scale for the tensor or None."""

    key: str
    codes: Tensor
    scales: Tensor | None
    tensor_scale: Tensor | None

    def part(self, start: int, count: int) -> Plane:
        """`count` sequences from `start` on."""
        rows = slice(start, start + count)
        return Plane(self.key, self.codes[rows], None if self.scales is None else self.scales[rows], self.tensor_scale)

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As ops take them."""
        return self.codes, self.scales, self.tensor_scale

    @property
    def vector_bytes(self) -> int:
        """Codes and scales of one token and head."""
        return self.codes.shape[3] + (0 if self.scales is None else self.scales.shape[3])


@dataclass(frozen=True)
class Cache:
    """The keys and values of one layer for a case, filled to its length."""

    case: Case
    key: Plane
    value: Plane

    @property
    def bytes_read(self) -> int:
        """Of keys and values that attention over all tokens needs."""
        shape = self.case.shape
        vector = self.key.vector_bytes + self.value.vector_bytes
        return self.case.batch * shape.kv_heads * self.case.length * vector

    def decode(self, query: Tensor, *, loads_only: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
        """Attention of `query` [B, Hq, 1, D] over all tokens. `loads_only`: the kernel without its arithmetic."""
        case = self.case
        args: Any = (
            query, *self.key.tensors, *self.value.tensors, None, None, self.key.key, self.value.key, case.length,
            case.length - 1, 0, case.shape.head_dim**-0.5, 0.0, query.dtype, 0,
        )  # fmt: skip
        if loads_only:
            return lambda: decode_cuda(*args, loads_only=True)
        return lambda: ops.decode(*args)

    def append(self, k: Tensor, v: Tensor, nonfinite: Tensor, position: int) -> Callable[[], None]:
        """Storing `k`, `v` [B, H, 1, D] in row `position`."""
        return lambda: ops.append(
            k, v, *self.key.tensors, *self.value.tensors, nonfinite, position, position, self.key.key, self.value.key
        )


def decode_misfit(scheme: KVScheme, head_dim: int) -> str:
    """Why no kernel attends to caches of this scheme; "" if one does."""
    return misfit(scheme.key, scheme.value, head_dim, head_dim)


def append_misfit(scheme: KVScheme, head_dim: int) -> str:
    """Why no kernel stores tokens in this scheme; "" if one does."""
    return next(filter(None, (formats.misfit(fmt, head_dim) for fmt in (scheme.key, scheme.value))), "")


def make_caches(
    scheme: KVScheme, case: Case, device: torch.device, generator: torch.Generator, *, least: int = 1
) -> list[Cache]:
    """Caches of random tokens that together exceed the L2 cache several times.

    The codes are those of normally distributed keys and values, so bits, scales and scores are spread as real ones are.

    Args:
        scheme: Whose formats keys and values take; its transforms, sinks and tails are left out.
        case: Shape, batch and length.
        device: Where they lie.
        generator: A generator of the CPU.
        least: Fewest caches.
    """
    count = max(least, _count(scheme, case, device))
    key, value = (_plane(fmt, case, count, device, generator) for fmt in (scheme.key, scheme.value))
    starts = range(0, count * case.batch, case.batch)
    return [Cache(case, key.part(at, case.batch), value.part(at, case.batch)) for at in starts]


def _count(scheme: KVScheme, case: Case, device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    shape = case.shape
    vector = scheme.key.token_bytes(shape.head_dim) + scheme.value.token_bytes(shape.head_dim)
    one = case.batch * shape.kv_heads * case.length * float(vector)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_CACHES, max(2, int(L2_TIMES * l2 / one) + 1))


def _plane(fmt: TensorFormat, case: Case, count: int, device: torch.device, generator: torch.Generator) -> Plane:
    shape, capacity = case.shape, case.capacity
    fmt = fmt.model_copy(update={"transform": "none"})
    tokens = min(capacity, max(16, PAGE_VECTORS // shape.kv_heads))
    x = torch.randn(1, shape.kv_heads, tokens, shape.head_dim, generator=generator).to(device)
    scales = None
    if fmt.scale_rule == "static":
        heads = shape.kv_heads if fmt.granularity == "per_head" else 1
        scales = (float(x.abs().amax()) / fmt.info.max,) * heads
    codec = Codec(fmt, shape.head_dim, scales)
    frozen = codec.freeze(x)
    codes, stored = codec.encode(x, frozen)
    return Plane(
        formats.format_key(fmt),
        _repeated(codes, count * case.batch, capacity),
        None if stored is None else _repeated(stored, count * case.batch, capacity),
        formats.tensor_scale(codec, frozen, device),
    )


def _repeated(page: Tensor, rows: int, capacity: int) -> Tensor:
    """`page` [1, H, t, P] over and over, as [rows, H, capacity, P]."""
    out = page.new_empty(rows, page.shape[1], capacity, page.shape[3])
    for start in range(0, capacity, page.shape[2]):
        part = out[:, :, start : start + page.shape[2]]
        part.copy_(page[:, :, : part.shape[2]].expand_as(part))
    return out


def hollow_cache(scheme: KVScheme, case: Case, device: torch.device) -> Cache:
    """A cache of a case's shape with nothing in it, in memory that all sequences and heads share.

    Which kernels a case takes can be found with it; none may run on it.
    """

    def hollow(plane: Plane) -> Plane:
        codes, scales = (None if t is None else _hollow(t, case) for t in (plane.codes, plane.scales))
        assert codes is not None
        return replace(plane, codes=codes, scales=scales)

    (small, *_) = make_caches(scheme, Case(case.shape, 1, 16), device, torch.Generator())
    return Cache(case, hollow(small.key), hollow(small.value))


def _hollow(like: Tensor, case: Case) -> Tensor:
    one = like.new_empty(1, 1, case.capacity, like.shape[3])
    return one.expand(case.batch, case.shape.kv_heads, -1, -1)


def random_query(case: Case, device: torch.device, generator: torch.Generator) -> Tensor:
    """bfloat16 [B, Hq, 1, D]."""
    shape = case.shape
    query = torch.randn(case.batch, shape.query_heads, 1, shape.head_dim, generator=generator)
    return query.to(device, torch.bfloat16)


def rounds_of(caches: list[Cache], query: Tensor, *, loads_only: bool = False) -> Round:
    """One call per cache."""
    return cast(Round, [cache.decode(query, loads_only=loads_only) for cache in caches])
