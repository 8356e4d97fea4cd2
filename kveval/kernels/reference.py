"""What every kernel computes, in torch operations: the implementation of the ops on a CPU.

Shape legend: B batch, H KV heads, Hq query heads, G query heads of a KV head, Lq queries, t new tokens, T capacity,
N tokens of a block, D head size of keys, Dv of values, P payload bytes and S scale bytes of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kveval.formats.codec import NOTHING_FROZEN, Frozen
from kveval.kernels.formats import format_of, kernel_codec, stored_width

__all__ = ["append", "decode", "dequantize"]

BLOCK_NUMBERS = 2**24
"""Most float32 numbers of a block of scores or of decoded tokens that `decode` holds at a time."""


def append(
    k: Tensor, v: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None,
    vg: Tensor | None, nonfinite: Tensor, kpos: int, vpos: int, kfmt: str, vfmt: str,
) -> None:  # fmt: skip
    """See `kveval.kernels.ops.append`."""
    for role, (x, q, s, g, start, key) in enumerate(((k, kq, ks, kg, kpos, kfmt), (v, vq, vs, vg, vpos, vfmt))):
        if x.shape[2] == 0:
            continue
        rows = slice(start, start + x.shape[2])
        if not torch.isfinite(x).all():
            nonfinite[role] = 1
        payload, scale = kernel_codec(key, x.shape[3]).encode(x, _frozen(g))
        q[:, :, rows] = payload
        if s is not None and scale is not None:
            s[:, :, rows] = scale


def dequantize(
    q: Tensor, s: Tensor | None, g: Tensor | None, fmt: str, head_dim: int, start: int, end: int, dtype: torch.dtype
) -> Tensor:
    """See `kveval.kernels.ops.dequantize`."""
    if start == end:
        return q.new_empty(*q.shape[:2], 0, head_dim, dtype=dtype)
    scale = None if s is None else s[:, :, start:end]
    out = kernel_codec(fmt, head_dim).decode(q[:, :, start:end].contiguous(), scale, _frozen(g), dtype)
    # A format that is stored as it is decodes to a view of its bytes.
    return out.clone(memory_format=torch.contiguous_format)


class _Running(NamedTuple):
    """Softmax over the tokens so far, of every query row: its largest score, sum of weights, and weighted values."""

    largest: Tensor
    total: Tensor
    values: Tensor


def decode(
    query: Tensor, kq: Tensor, ks: Tensor | None, kg: Tensor | None, vq: Tensor, vs: Tensor | None, vg: Tensor | None,
    bounds: Tensor | None, sinks: Tensor | None, kfmt: str, vfmt: str, length: int, position: int, window: int,
    scaling: float, softcap: float, out_dtype: torch.dtype, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `kveval.kernels.ops.decode`. All arithmetic is float32, or float64 for a float64 query."""
    (batch, query_heads, queries, width), heads = query.shape, kq.shape[1]
    group = query_heads // heads
    wide = torch.promote_types(query.dtype, torch.float32)
    # The query heads of a KV head become rows of one product, so that keys and values are not repeated.
    q_BHRD = (query.to(wide) * scaling).reshape(batch, heads, group * queries, width)
    value_width = stored_width(format_of(vfmt), vq.shape[3])
    rows = (batch, heads, group * queries)
    run = _Running(
        q_BHRD.new_full(rows, -torch.inf), q_BHRD.new_zeros(rows), q_BHRD.new_zeros(*rows, value_width)
    )  # fmt: skip
    if sinks is not None:
        sink = sinks.to(wide).view(1, heads, group, 1).expand(batch, -1, -1, queries).flatten(2)
        run = run._replace(largest=sink.clone(), total=torch.ones_like(run.total))
    for start, end in _blocks(q_BHRD, max(width, value_width), length, position, window, queries):
        k_BHND = dequantize(kq, ks, kg, kfmt, width, start, end, torch.float32).to(wide)
        v_BHND = dequantize(vq, vs, vg, vfmt, value_width, start, end, torch.float32).to(wide)
        scores = q_BHRD @ k_BHND.mT
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores = torch.unflatten(scores, 2, (group, queries))
        allowed = _allowed(bounds, start, end, length, position, window, queries, query.device)
        # Rows that nothing attends to may hold anything, NaN too, and 0 * NaN is NaN.
        scores = torch.where(allowed[:, None, None], scores, -torch.inf).flatten(2, 3)
        v_BHND = torch.where(allowed.any(1)[:, None, :, None], v_BHND, 0.0)
        run = _joined(run, scores, v_BHND)
    out = run.values / torch.where(run.total == 0, 1.0, run.total)[..., None]
    lse = run.largest + run.total.log()
    out = torch.unflatten(out, 2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out.to(out_dtype).contiguous(), torch.unflatten(lse, 2, (group, queries)).flatten(1, 2).float()


def _joined(run: _Running, scores_BHRN: Tensor, v_BHND: Tensor) -> _Running:
    """`run` with another block of tokens."""
    largest = torch.maximum(run.largest, scores_BHRN.amax(-1))
    # Where nothing is attended yet, -inf - -inf would be NaN.
    finite = largest.clamp(min=torch.finfo(largest.dtype).min)
    weights = (scores_BHRN - finite[..., None]).exp()
    before = (run.largest - finite).exp()
    values = run.values * before[..., None] + weights @ v_BHND
    return _Running(largest, run.total * before + weights.sum(-1), values)


def block_size(batch: int, heads: int, rows: int, width: int) -> int:
    """Tokens that `decode` takes at a time, for `rows` query rows of a KV head and heads of `width`."""
    return max(64, BLOCK_NUMBERS // max(1, batch * heads * max(rows, width)))


def _blocks(
    q_BHRD: Tensor, width: int, length: int, position: int, window: int, queries: int
) -> Iterator[tuple[int, int]]:
    """(start, end) of the blocks of tokens that some query may attend to."""
    batch, heads, rows, _ = q_BHRD.shape
    size = block_size(batch, heads, rows, width)
    first = max(0, position - window + 1) if window else 0
    last = min(length, position + queries)
    for start in range(first, last, size):
        yield start, min(start + size, last)


def _allowed(
    bounds: Tensor | None, start: int, end: int, length: int, position: int, window: int, queries: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Mask [B or 1, Lq, N]: whether a query attends to a row, of those from `start` to `end`."""
    row = torch.arange(start, end, device=device)
    at = position + torch.arange(queries, device=device)[:, None]
    allowed = ((row <= at) & (row < length))[None]
    if window:
        allowed = allowed & (row > at - window)
    if bounds is not None:
        allowed = allowed & ((row >= bounds[:, :1]) & (row < bounds[:, 1:]))[:, None]
    return allowed


def _frozen(g: Tensor | None) -> Frozen:
    return NOTHING_FROZEN if g is None else Frozen(g[:, :, None, None])
