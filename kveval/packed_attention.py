"""Attention that reads packed bytes: one call of the decode op for every part of a sequence that is stored alike.

A layer's tokens are parts in order: first tokens and last tokens in BF16 where the scheme keeps some so, encoded ones
between them, and the raw tokens of the current forward where they are read raw. What each part gives is added up.

Shape legend: B batch, H KV heads, Hq query heads, Lq queries, Lk tokens, D head size of keys, Dv of values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kveval.formats.transforms import rotate
from kveval.kernels import ops
from kveval.masks import CausalMask
from kveval.packed_kv import PackedKV
from kveval.packed_state import Segment
from kveval.partial_attention import PartialAttention, Scores

__all__ = ["MOST_QUERIES", "attend", "misfit"]

MOST_QUERIES = 64
"""Queries of one call of the op; more than that are a prompt, whose blocks are better decoded once."""


def misfit(query: Tensor, key: PackedKV, mask: Tensor | None, scores: Scores, *, causal: bool) -> str:
    """Why a call of attention can't read packed bytes, beyond what the layer's formats say; "" if it can."""
    if query.requires_grad and torch.is_grad_enabled():
        return "gradients are on, and packed bytes have none"
    if mask is not None and not isinstance(mask, CausalMask):
        return "its mask is neither causal nor a sliding window over rows that are padded on the left"
    if mask is None and not causal and query.shape[2] > 1:
        return "its attention is not causal"
    if scores.softcap is not None and key.use.keys_lack_mean:
        return "its scores are capped, and its keys are stored without their mean"
    return ""


def attend(query: Tensor, key: PackedKV, value: PackedKV, mask: CausalMask | None, scores: Scores) -> Tensor:
    """Attention of the last Lq tokens; see `kveval.attention.attention` for the arguments.

    Returns:
        [B, Lq, Hq, Dv] contiguous, in the query's dtype.
    """
    rows = list(zip(key.segments(), value.segments(), strict=True))
    before, found = key.shape[2] - query.shape[2], []
    for row, (keys, values) in enumerate(rows):
        call = _Call(list(_aligned(keys, values)), mask, row if len(rows) > 1 else None, scores)
        own = query if len(rows) == 1 else query[row : row + 1]
        some = [
            call.attend(part, before + MOST_QUERIES * i, value.shape[3])
            for i, part in enumerate(torch.split(own, MOST_QUERIES, dim=2))
        ]
        found.append(_joined(some, dim=1))
    return _joined(found, dim=0)


def _joined(parts: list[Tensor], *, dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True)
class _Call:
    """What all queries of some rows of a batch share: all rows, or row `row`."""

    parts: list[tuple[Segment, Segment]]
    mask: CausalMask | None
    row: int | None
    scores: Scores

    def attend(self, query: Tensor, position: int, width: int) -> Tensor:
        """[B, Lq, Hq, Dv] of queries [B, Hq, Lq, D], the first of which stands at `position`; Dv is `width`."""
        sinks = None if self.scores.sinks is None else self.scores.sinks.float()
        if len(self.parts) == 1:
            ((key, value),) = self.parts
            as_it_is = not value.rotated and value.mean is None and key.start <= position
            # A mean taken from all keys shifts all scores of a query alike, which only a sink would notice.
            if as_it_is and (key.mean is None or sinks is None):
                return self._decode(query, key, value, position, sinks, query.dtype)[0]
        merged = PartialAttention(query, width, sinks)
        for key, value in self.parts:
            first = max(0, key.start - position)
            if first < query.shape[2]:
                some = query[:, :, first:]
                out, lse = self._decode(some, key, value, position + first, None, merged.dtype)
                merged.add(*self._restored(some, key, value, out, lse), first=first)
        return merged.result(query.dtype)

    def _decode(
        self, query: Tensor, key: Segment, value: Segment, position: int, sinks: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Attention to one part by the op, which sees keys and values as they are stored."""
        if key.rotated:
            query = rotate(query.to(torch.promote_types(query.dtype, torch.float32))).to(query.dtype)
        mask, bounds = self.mask, None
        if mask is not None:
            bounds = mask.bounds(key.start, key.tokens)
        if bounds is not None and self.row is not None:
            bounds = bounds[self.row : self.row + 1]
        return ops.decode(
            query, key.payload, key.scale, key.tensor_scale, value.payload, value.scale, value.tensor_scale, bounds,
            sinks, key.key, value.key, key.tokens, position - key.start, 0 if mask is None else mask.window,
            self.scores.scaling, self.scores.softcap or 0.0, dtype,
        )  # fmt: skip

    def _restored(self, query: Tensor, key: Segment, value: Segment, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Output and logarithm of the sum as they are of the keys and values before they were transformed."""
        if value.rotated:
            out = rotate(out)
        if value.mean is not None:
            out = out + _per_query_head(value.mean, query).transpose(1, 2)
        if key.mean is not None:
            lse = lse + self.scores.scaling * (query.to(out.dtype) * _per_query_head(key.mean, query)).sum(-1)
        return out, lse


def _per_query_head(mean_BH1D: Tensor, query: Tensor) -> Tensor:
    """[B, Hq, 1, D]."""
    return mean_BH1D.repeat_interleave(query.shape[1] // mean_BH1D.shape[1], dim=1)


def _aligned(keys: Sequence[Segment], values: Sequence[Segment]) -> Iterator[tuple[Segment, Segment]]:
    """Pairs of parts of the same tokens: keys and values may change their format at different ones."""
    borders = sorted({at for part in (*keys, *values) for at in (part.start, part.stop)})
    for start, stop in itertools.pairwise(borders):
        key, value = (next(p for p in parts if p.start <= start < p.stop) for parts in (keys, values))
        yield key.cut(start, stop), value.cut(start, stop)
