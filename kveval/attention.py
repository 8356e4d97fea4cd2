"""The attention and mask functions that kveval registers with transformers.

`ATTENTION` reads packed keys and values and runs torch's scaled dot product attention on what it decoded. It is
the exact path on every device: the bytes are decoded on every call, nothing is kept.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kveval.errors import UnsupportedError
from kveval.storage import PackedKV

__all__ = ["ATTENTION", "ATTENTION_PATH", "cache_argument", "use_packed_attention"]

ATTENTION = "kveval"
"""Name under which the functions are registered; transformers gives names with "sdpa" or "flash" a meaning."""

ATTENTION_PATH = "dequantize + torch sdpa"
"""What records say of how attention ran."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over packed or plain keys and values.

    Args:
        module: The attention module.
        query: [B, Hq, Lq, D].
        key: [B, H, Lk, D], Hq a multiple of H; a `PackedKV` is decoded here.
        value: [B, H, Lk, Dv].
        attention_mask: None (plain causal) or bool [B, 1, Lq, Lk], True where attended. A row that attends to
            nothing gives 0.
        dropout: Must be 0: kveval measures inference.
        scaling: Factor on the scores; D**-0.5 if None.
        is_causal: Overrides the module's own flag.
        kwargs: Anything else that the model passes.

    Returns:
        ([B, Lq, Hq, Dv] contiguous, None).

    Raises:
        UnsupportedError: for score modifiers and masks that this path does not compute.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"this model's attention uses {name}, which the packed path does not compute.",
                remedy="Use a model without it.",
            )
    if dropout:
        raise UnsupportedError("attention dropout is on.", remedy="Call model.eval().")
    key = key.dequantize() if isinstance(key, PackedKV) else key
    value = value.dequantize() if isinstance(value, PackedKV) else value
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    _refuse_unknown_mask(attention_mask, causal, queries=query.shape[2], keys=key.shape[2])
    grouped = key.shape[1] != query.shape[1]
    if grouped and attention_mask is not None and query.is_cuda:
        # torch's fused CUDA kernels take a mask or grouped heads, not both.
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        grouped = False
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal and attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=grouped,
    )
    if attention_mask is not None:
        out = torch.where(attention_mask.any(-1, keepdim=True), out, 0.0)
    return out.transpose(1, 2).contiguous(), None


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
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
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
