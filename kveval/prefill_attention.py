"""Attention of a prompt's chunk to packed bytes: the tokens before it are decoded block by block, never all at once.

Torch's flash attention runs on every block and on the chunk itself, and what they give is added up.

Shape legend: B batch, H KV heads, Hq query heads, Lq queries, Lk tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kveval.masks import CausalMask
from kveval.packed_kv import PackedKV
from kveval.partial_attention import PartialAttention, Scores
from kveval.row_stores import RowStores

__all__ = ["BLOCK", "attend", "misfit"]

BLOCK = 8192
"""Tokens that are decoded at a time."""

LARGEST_HEAD = 256
"""Of torch's flash attention on a GPU; there a head size is also a multiple of 8."""


def misfit(query: Tensor, key: PackedKV, value: PackedKV, mask: CausalMask | None, scores: Scores) -> str:
    """Why a chunk of a prompt can't be attended to in blocks; "" if it can."""
    if not scores.plain:
        return "a prompt with capped scores or attention sinks"
    if mask is not None and mask.window:
        return "a prompt with a sliding window"
    padded = mask is not None and mask.padding is not None
    if padded or any(isinstance(handle.store, RowStores) for handle in (key, value)):
        return "a prompt in a batch with left padding"
    if not all(handle.store.kernels for handle in (key, value)):
        return "a format that kernels do not decode"
    head_dim = query.shape[3]
    if value.shape[3] != head_dim:
        return f"keys of {head_dim} and values of {value.shape[3]} numbers per head"
    if query.is_cuda and (head_dim % 8 or head_dim > LARGEST_HEAD):
        return f"heads of {head_dim}"
    if query.is_cuda and query.dtype not in (torch.bfloat16, torch.float16):
        return f"a model in {query.dtype}"
    return ""


def attend(query: Tensor, key: PackedKV, value: PackedKV, *, scaling: float) -> Tensor:
    """Causal attention of the last Lq tokens.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, H, Lk, D].
        value: [B, H, Lk, D].
        scaling: Factor on the scores.

    Returns:
        [B, Lq, Hq, D] contiguous, in the query's dtype.
    """
    before, total = key.shape[2] - query.shape[2], key.shape[2]
    own = _flash(query, key.rows(before, total), value.rows(before, total), scaling=scaling, causal=True)
    if before == 0:
        return own[0].contiguous()
    merged = PartialAttention(query, value.shape[3])
    merged.add(*own)
    for start, stop in _blocks(key.shared, before):
        merged.add(*_flash(query, key.rows(start, stop), value.rows(start, stop), scaling=scaling, causal=False))
    return merged.result(query.dtype)


def _blocks(shared: int, before: int) -> Iterator[tuple[int, int]]:
    """Ranges of the tokens before the chunk, none of which holds both shared tokens and others."""
    for first, last in ((0, shared), (shared, before)):
        for start in range(first, last, BLOCK):
            yield start, min(start + BLOCK, last)


def _flash(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(output [B, Lq, Hq, D], log of the softmax's sum [B, Hq, Lq]); `causal` is for as many tokens as queries.

    Keys and values of fewer rows are shared: each by as many rows of queries, which lie side by side.
    """
    aten, forks, queries = torch.ops.aten, len(query) // len(key), query.shape[2]
    query = query.reshape(len(key), forks, *query.shape[1:]).transpose(1, 2).flatten(2, 3)
    if query.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scaling)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scaling)
    out, lse = (x.unflatten(2, (forks, queries)).transpose(1, 2).flatten(0, 1) for x in (out, lse))
    return out.transpose(1, 2), lse
