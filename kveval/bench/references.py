"""Attention of others over the same tokens in BF16, in the form that is fastest: what a caller could have instead."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kveval.bench.caches import Cache
from kveval.bench.timers import Round, Timer

__all__ = ["FLASHINFER", "SDPA", "fastest_sdpa", "flashinfer_round"]

SDPA, FLASHINFER = "torch sdpa", "flashinfer"

TRIALS = 3
"""Replays by which the fastest form is found; it is then timed again beside the kernels."""

PAGE = 16
"""Tokens of FlashInfer's pages."""

WORKSPACE = 128 * 2**20


def fastest_sdpa(caches: Sequence[Cache], query: Tensor, timer: Timer) -> tuple[str, Round]:
    """Torch's attention over BF16 caches: the name of its fastest form, and its calls.

    `enable_gqa` hands it grouped heads. `heads as queries` makes the query heads of a KV head so many queries.
    `expanded` repeats keys and values for every query head beforehand, which takes that many times the memory; it is
    tried where there is room, and the repeating itself is not timed.
    """
    forms = {"enable_gqa": [_grouped(cache, query) for cache in caches]}
    if query.shape[1] > caches[0].case.shape.kv_heads:
        forms["heads as queries"] = [_as_queries(cache, query) for cache in caches]
        if _has_room(caches, query, timer.device):
            forms["expanded"] = [_expanded(cache, query) for cache in caches]
    times = timer.microseconds(forms, TRIALS)
    best = min(forms, key=lambda form: statistics.median(times[form]))
    return best, forms[best]


def _tensors(cache: Cache) -> tuple[Tensor, Tensor]:
    """BF16 [B, H, length, D] keys and values, as views of their bytes."""
    rows = slice(0, cache.case.length)
    return cache.key.codes.view(torch.bfloat16)[:, :, rows], cache.value.codes.view(torch.bfloat16)[:, :, rows]


def _grouped(cache: Cache, query: Tensor) -> Any:
    k, v = _tensors(cache)
    return lambda: scaled_dot_product_attention(query, k, v, enable_gqa=True)


def _as_queries(cache: Cache, query: Tensor) -> Any:
    k, v = _tensors(cache)
    folded = query.reshape(k.shape[0], k.shape[1], -1, k.shape[3])
    return lambda: scaled_dot_product_attention(folded, k, v)


def _expanded(cache: Cache, query: Tensor) -> Any:
    k, v = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in _tensors(cache))
    return lambda: scaled_dot_product_attention(query, k, v)


def _has_room(caches: Sequence[Cache], query: Tensor, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    group = query.shape[1] // caches[0].case.shape.kv_heads
    return 2 * group * sum(cache.bytes_read for cache in caches) < torch.cuda.mem_get_info(device)[0]


def flashinfer_round(caches: Sequence[Cache], query: Tensor) -> tuple[Round | None, Mapping[str, str]]:
    """FlashInfer's paged decode over BF16 caches; else None and why not.

    Returns:
        (calls or None, {"form": what was called} or {"reason": why it can't be timed}).
    """
    if not query.is_cuda:
        return None, {"reason": "FlashInfer needs a GPU."}
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        return None, {"reason": f"FlashInfer can't be imported ({error})."}
    try:
        calls = _paged(flashinfer, caches, query)
        calls[0]()
    except (RuntimeError, OSError, ValueError, TypeError, AttributeError) as error:  # it compiles when first called
        return None, {"reason": f"FlashInfer {flashinfer.__version__} failed: {type(error).__name__}: {error}"}
    return calls, {"form": f"batch decode over pages of {PAGE}, FlashInfer {flashinfer.__version__}"}


def _paged(flashinfer: Any, caches: Sequence[Cache], query: Tensor) -> Round:
    case, device = caches[0].case, query.device
    shape, pages = case.shape, case.capacity // PAGE
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * pages
    numbers = torch.arange(case.batch * pages, dtype=torch.int32, device=device)
    last = torch.full((case.batch,), case.length - (pages - 1) * PAGE, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=device), "HND", use_tensor_cores=True
    )
    wrapper.plan(
        starts, numbers, last, shape.query_heads, shape.kv_heads, shape.head_dim, PAGE,
        q_data_type=query.dtype, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    folded = query[:, :, 0].contiguous()
    pairs = [tuple(_pages(plane.codes.view(torch.bfloat16)) for plane in (c.key, c.value)) for c in caches]
    return [partial(wrapper.run, folded, pair) for pair in pairs]


def _pages(x: Tensor) -> Tensor:
    """[B, H, T, D] as pages [B T / PAGE, H, PAGE, D]."""
    batch, heads, tokens, width = x.shape
    return x.reshape(batch, heads, tokens // PAGE, PAGE, width).transpose(1, 2).reshape(-1, heads, PAGE, width)
