"""Random models small enough to run in milliseconds, and the ways of running them on a cache.

Weights are large enough that attention prefers some tokens clearly; that is what shows a wrong cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kveval.attention import cache_argument, use_packed_attention
from kveval.models import LoadedModel, logits_in_float32

VOCABULARY = 97
WINDOW = 8
"""Sliding window of `tiny_gemma3`, in tokens."""

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_llama(dtype: torch.dtype = torch.float32, *, head_dim: int = 16) -> Any:
    """Two layers of full attention, four query heads on two KV heads."""
    return _built(LlamaForCausalLM, LlamaConfig(**_SHARED, num_hidden_layers=2, head_dim=head_dim), dtype)


def tiny_qwen2(dtype: torch.dtype = torch.float32) -> Any:
    """The same with biases on queries, keys and values; the keys' bias is the large one, as in real models."""
    model = _built(Qwen2ForCausalLM, Qwen2Config(**_SHARED, num_hidden_layers=2), dtype)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=2.0)
        torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=0.3)
        torch.nn.init.normal_(layer.self_attn.v_proj.bias, std=0.3)
    return model


def tiny_gemma3(dtype: torch.dtype = torch.float32) -> Any:
    """Sliding, full, sliding: two of three layers see the last `WINDOW` tokens only."""
    config = Gemma3TextConfig(
        **_SHARED,
        num_hidden_layers=3,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return _built(Gemma3ForCausalLM, config, dtype)


BUILDERS = {"llama": tiny_llama, "qwen2": tiny_qwen2, "gemma3": tiny_gemma3}


def _built(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return kind(config).to(dtype).eval().requires_grad_(False)


def packed(model: Any) -> Any:
    """`model`, attending through kveval."""
    use_packed_attention(model)
    return model


def loaded(model: Any, tokenizer: Any = None) -> LoadedModel:
    """`model` as `kveval.models.load` would hand it over: float32 logits, on the CPU."""
    logits_in_float32(model)
    return LoadedModel(model=model, tokenizer=tokenizer, info=None, device=torch.device("cpu"))  # type: ignore[arg-type]


def tokens(length: int, *, seed: int = 0, batch: int = 1) -> Tensor:
    """int64 [batch, length], none of them the padding token."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: Any, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    """float32 [B, T, V]: one forward over `ids` [B, T], after what `cache` holds."""
    return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **kwargs).logits.float()


def in_chunks(model: Any, ids: Tensor, cache: Any, chunk: int) -> Tensor:
    """float32 [B, T, V]: `ids` in forwards of `chunk` tokens."""
    return torch.cat([logits_of(model, part, cache) for part in ids.split(chunk, dim=1)], dim=1)


def generated(model: Any, ids: Tensor, cache: Any, *, new_tokens: int = 8, **kwargs: Any) -> Any:
    """What `model.generate` returns for greedy decoding (or as `kwargs` say), with its scores."""
    return model.generate(
        ids,
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{"attention_mask": torch.ones_like(ids), cache_argument(model): cache, **kwargs},
    )
