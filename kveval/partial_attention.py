"""Attention to a sequence in parts: each part gives its output and the logarithm of its softmax's sum, which add up.

Shape legend: B batch, Hq query heads, Lq queries, D head size of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PartialAttention", "Scores"]


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys become weights.

    Attributes:
        scaling: Factor on them.
        softcap: Scores s become softcap * tanh(s / softcap) before the mask; None: they stay.
        sinks: [Hq]: one more score in the softmax's sum of every query, with no value behind it, neither scaled nor
            capped; or None.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether they are scaled alone."""
        return self.softcap is None and self.sinks is None


class PartialAttention:
    """Attention to the parts of a sequence that were added so far; float32, or the query's dtype if that is wider.

    With o_i and l_i the output and the log of the softmax's sum of part i, l = log(sum of exp(l_i)) and
    o = sum of exp(l_i - l) o_i.

    Args:
        query: [B, Hq, Lq, any].
        width: D.
        sinks: [Hq]: one more score in the sum of every query, with no value behind it; or None.
    """

    def __init__(self, query: Tensor, width: int, sinks: Tensor | None = None) -> None:
        batch, heads, queries, _ = query.shape
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self._out = query.new_zeros(batch, queries, heads, width, dtype=self.dtype)
        self._lse = query.new_full((batch, heads, queries), -torch.inf, dtype=self.dtype)
        if sinks is not None:
            self._lse = sinks.to(self.dtype).view(1, -1, 1).expand(batch, -1, queries).clone()

    def add(self, out: Tensor, lse: Tensor, *, first: int = 0) -> None:
        """Add a part that the queries from `first` on attend to.

        Args:
            out: [B, Lq - first, Hq, D]; 0 where a query attends to nothing.
            lse: [B, Hq, Lq - first]; -inf there.
            first: The first query.
        """
        before, lse = self._lse[:, :, first:], lse.to(self.dtype)
        both = torch.logaddexp(before, lse)
        # Where nothing is attended yet, -inf - -inf would be NaN.
        finite = both.clamp(min=torch.finfo(self.dtype).min)
        kept, new = ((x - finite).exp().transpose(1, 2)[..., None] for x in (before, lse))
        rows = self._out[:, first:]
        rows.mul_(kept).add_(out * new)
        before.copy_(both)

    def result(self, dtype: torch.dtype) -> Tensor:
        """`dtype` [B, Lq, Hq, D] contiguous; 0 where a query attends to nothing."""
        return self._out.to(dtype)
