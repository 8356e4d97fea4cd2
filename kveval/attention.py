"""The attention and mask functions that kveval registers with transformers.

`ATTENTION` reads packed keys and values. By kernels it attends to the packed bytes themselves (see packed_attention.py,
and prefill_attention.py for the chunks of a prompt). Everywhere else it decodes them first, on every call, and keeps
nothing: plain attention then runs through torch's scaled dot product attention; models that cap their scores or give
every head an attention sink run through a float32 softmax, in blocks of queries.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kveval import packed_attention, prefill_attention
from kveval.errors import UnsupportedError
from kveval.kernel_use import refuse_packed
from kveval.masks import CausalMask, causal_mask
from kveval.packed_kv import PackedKV
from kveval.partial_attention import Scores

__all__ = [
    "ATTENTION",
    "ATTENTION_PATH",
    "FLOAT32_PATH",
    "PACKED_PATH",
    "PREFILL_PATH",
    "REFERENCE_PATH",
    "cache_argument",
    "path_text",
    "recorded_paths",
    "use_packed_attention",
]

ATTENTION = "kveval"
"""Name under which the functions are registered; transformers gives names with "sdpa" or "flash" a meaning."""

ATTENTION_PATH = "dequantize + torch sdpa"
"""What records say of how plain attention ran."""

FLOAT32_PATH = "dequantize + float32 softmax"
"""What records say of how attention with capped scores or attention sinks ran."""

PACKED_PATH = "packed kernels"
"""What records say of attention that read packed bytes by kernels."""

REFERENCE_PATH = "packed reference"
"""Of attention that read them by the kernels' torch reference."""

PREFILL_PATH = "packed prefill"
"""Of a prompt's chunk whose attention decoded packed bytes block by block."""

SCORE_BYTES = 2**28
"""Most bytes of float32 scores that the float32 path holds at a time (one query always fits, whatever it takes)."""

# What transformers' models hand to an attention function that changes scores or picks keys in a way not computed here.
_UNKNOWN_MODIFIERS = ("position_bias", "sinks", "indices", "block_indices")

_paths: ContextVar[dict[int | None, str] | None] = ContextVar("kveval_attention_paths", default=None)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over packed or plain keys and values.

    Args:
        module: The attention module.
        query: [B, Hq, Lq, D].
        key: [B, H, Lk, D], Hq a multiple of H; a `PackedKV` is read here, packed or decoded.
        value: [B, H, Lk, Dv].
        attention_mask: None (plain causal), a `CausalMask`, or bool [B, 1 or Hq, Lq, Lk], True where attended. A row
            that attends to nothing gives 0.
        dropout: Must be 0: kveval measures inference.
        scaling: Factor on the scores; D**-0.5 if None.
        is_causal: Overrides the module's own flag.
        softcap: Scores s become softcap * tanh(s / softcap) before the mask (Gemma 2).
        s_aux: [Hq], an attention sink per query head: one more score in the softmax's sum, with no value behind it
            (GPT-OSS). It is neither scaled nor capped.
        kwargs: Anything else that the model passes.

    Returns:
        ([B, Lq, Hq, Dv] contiguous, None).

    Raises:
        UnsupportedError: for score modifiers and masks that are not computed here, and for packed reads that were asked
            for and can't be had.
    """
    for name in _UNKNOWN_MODIFIERS:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"this model's attention uses {name}, which the packed path does not compute.",
                remedy="Use a model without it.",
            )
    if dropout:
        raise UnsupportedError("attention dropout is on.", remedy="Call model.eval().")
    for handle in (key, value):
        if isinstance(handle, PackedKV):
            handle.check_padding(attention_mask)
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    _refuse_unknown_mask(attention_mask, causal, queries=query.shape[2], keys=key.shape[2])
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    out, reason = _packed(module, query, key, value, attention_mask, scores, causal=causal)
    if out is not None:
        return out, None
    key = key.dequantize() if isinstance(key, PackedKV) else key
    value = value.dequantize() if isinstance(value, PackedKV) else value
    mask = attention_mask.whole() if isinstance(attention_mask, CausalMask) else attention_mask
    causal = causal and mask is None and query.shape[2] > 1
    path = ATTENTION_PATH if scores.plain else FLOAT32_PATH
    _record_path(module, f"{path} (no kernel: {reason})" if reason else path)
    attend = _sdpa if scores.plain else _float32_softmax
    out = attend(query, key, value, mask, scores, causal=causal)
    return out.transpose(1, 2).contiguous(), None


def _packed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores, *, causal: bool
) -> tuple[Tensor | None, str]:
    """Attention that reads packed bytes.

    Returns:
        ([B, Lq, Hq, Dv] contiguous, ""); or None, and what a record has to say of why not.

    Raises:
        UnsupportedError: packed bytes were to be read, and can't be.
    """
    if not isinstance(key, PackedKV) or not isinstance(value, PackedKV):
        return None, "keys and values came unpacked" if _on_gpu(query) else ""
    use = key.use
    if use.mode == "dequant" or (use.mode == "auto" and not _on_gpu(query)):
        return None, ""
    problem = packed_attention.misfit(query, key, mask, scores, causal=causal)
    mask = cast(CausalMask | None, mask)
    many = query.shape[2] > packed_attention.MOST_QUERIES
    if not problem and (many or key.shared):
        misfit = prefill_attention.misfit(query, key, value, mask, scores)
        if not misfit:
            _record_path(module, PREFILL_PATH)
            return prefill_attention.attend(query, key, value, scaling=scores.scaling), ""
        # Calls of a few queries each read all tokens again and again: right, and no choice to make unasked.
        problem = misfit if many and use.mode == "auto" else ""
    problem = problem or use.problem
    if not problem:
        _record_path(module, PACKED_PATH if _on_gpu(query) else REFERENCE_PATH)
        return packed_attention.attend(query, key, value, mask, scores), ""
    if use.mode == "packed":
        raise refuse_packed(use.where, problem)
    return None, problem


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores, *, causal: bool) -> Tensor:
    """[B, Hq, Lq, Dv] from torch's kernels."""
    grouped = key.shape[1] != query.shape[1]
    if grouped and mask is not None and query.is_cuda:
        # torch's fused CUDA kernels take a mask or grouped heads, not both.
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        grouped = False
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scores.scaling, enable_gqa=grouped
    )
    if mask is not None:
        out = torch.where(mask.any(-1, keepdim=True), out, 0.0)
    return out


def _float32_softmax(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores, *, causal: bool
) -> Tensor:
    """[B, Hq, Lq, Dv] in the query's dtype, every sum and product in float32 or wider, a block of queries at a time.

    A head's weights are exp(s - m) / (sum of exp(s - m) + exp(sink - m)) with m the largest of its scores and its
    sink; without a sink the last term is absent.
    """
    (batch, query_heads, queries, width), (heads, keys) = query.shape, key.shape[1:3]
    group = query_heads // heads
    # The query heads of a KV head become rows of one product, so that keys and values are not repeated.
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = (query.to(wide) * scores.scaling).reshape(batch, heads, group, queries, width)
    transposed, value = key.to(wide).mT, value.to(wide)
    sinks = None if scores.sinks is None else scores.sinks.to(wide).reshape(heads, group, 1, 1)
    out = query.new_empty(batch, query_heads, queries, value.shape[-1])
    positions = torch.arange(keys, device=query.device)
    rows = max(1, SCORE_BYTES // (wide.itemsize * batch * query_heads * keys))
    for start in range(0, queries, rows):
        block = grouped[:, :, :, start : start + rows]
        size = block.shape[3]
        products = (block.flatten(2, 3) @ transposed).view(batch, heads, group, size, keys)
        if scores.softcap is not None:
            products.div_(scores.softcap).tanh_().mul_(scores.softcap)
        if causal:
            products.masked_fill_(positions > positions[start : start + size, None], -torch.inf)
        elif mask is not None:
            allowed = mask[:, :, start : start + size]
            by_head = (heads, group) if allowed.shape[1] == query_heads else (1, 1)
            products.masked_fill_(~allowed.reshape(-1, *by_head, size, keys), -torch.inf)
        weights = _weights(products, sinks).flatten(2, 3)
        out[:, :, start : start + size] = (weights @ value).reshape(batch, query_heads, size, -1)
    return out


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension (in place), with `sinks` in its sum; a row of -inf alone gives 0."""
    largest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    # Where nothing is attended, -inf - -inf would be NaN.
    largest = largest.clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - largest).exp()
    return weights.div_(total.clamp(min=torch.finfo(scores.dtype).tiny))


@contextmanager
def recorded_paths() -> Iterator[Mapping[int | None, str]]:
    """Record which path the attention of every layer takes while the context is open.

    Yields:
        {layer index: a path}, filled as layers run; None for a module without an index. A path is one of this module's,
        and the reason follows in brackets where a GPU decoded first because no kernel fits.
    """
    paths: dict[int | None, str] = {}
    token = _paths.set(paths)
    try:
        yield paths
    finally:
        _paths.reset(token)


def path_text(paths: Mapping[int | None, str]) -> str:
    """What a record says of `recorded_paths`: the path, or each path with its layers where they differ."""
    layers: dict[str, list[str]] = {}
    for index, path in paths.items():
        layers.setdefault(path, []).append("?" if index is None else str(index))
    if len(layers) == 1:
        return next(iter(layers))
    return "; ".join(f"{path} (layers {', '.join(indices)})" for path, indices in sorted(layers.items()))


def _record_path(module: nn.Module, path: str) -> None:
    paths = _paths.get()
    if paths is not None:
        paths[getattr(module, "layer_idx", None)] = path


def _refuse_unknown_mask(mask: Tensor | None, causal: bool, *, queries: int, keys: int) -> None:
    """An additive mask would be read as its opposite; torch aligns a maskless causal pattern to the first key."""
    if mask is not None and mask.dtype != torch.bool:
        raise UnsupportedError(
            f"attention got a mask of {mask.dtype}; the packed path takes boolean masks.",
            remedy="Pass a two-dimensional attention_mask, or a boolean one.",
        )
    if mask is None and causal and 1 < queries < keys:
        raise UnsupportedError(
            f"{queries} queries over {keys} keys came without a mask.",
            remedy="Use a model that makes its masks through transformers.",
        )


def use_packed_attention(model: Any) -> None:
    """Make `model` (a transformers causal LM) attend through `attention`. Registering twice is harmless."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, causal_mask)
    model.set_attn_implementation(ATTENTION)


def cache_argument(model: Any) -> str:
    """Name of the argument through which `model`'s forward takes a cache.

    transformers renamed `past_key_values` to `cache`, and a forward may swallow the wrong name without a word.

    Raises:
        UnsupportedError: if the forward takes neither.
    """
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedError(
        f"{type(model).__name__}'s forward takes no cache.", remedy="Use a causal LM from transformers."
    )
