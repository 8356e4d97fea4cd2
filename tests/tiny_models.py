"""Random models small enough to run in milliseconds, and the ways of running them on a cache.

Weights are large enough that attention prefers some tokens clearly; that is what shows a wrong cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kveval.attention import cache_argument, use_packed_attention
from kveval.models import LoadedModel, logits_in_float32

VOCABULARY = 97
WINDOW = 8
"""Sliding window (or attention chunk) of every tiny model that has one, in tokens."""

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
_SLIDING_FULL = ["sliding_attention", "full_attention"]
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    **_MOE,
}


def tiny_llama(dtype: torch.dtype = torch.float32, *, head_dim: int = 16) -> Any:
    """Two layers of full attention, four query heads on two KV heads."""
    return _built("llama", dtype, head_dim=head_dim)


def tiny_qwen2(dtype: torch.dtype = torch.float32) -> Any:
    """The same with biases on queries, keys and values; the keys' bias is the large one, as in real models."""
    model = _built("qwen2", dtype)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=2.0)
        torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=0.3)
        torch.nn.init.normal_(layer.self_attn.v_proj.bias, std=0.3)
    return model


def tiny_qwen3(dtype: torch.dtype = torch.float32) -> Any:
    """Full attention with normalised queries and keys."""
    return _built("qwen3", dtype, head_dim=16)


def tiny_phi3(dtype: torch.dtype = torch.float32) -> Any:
    """Heads of size 96, which is no power of two, and one projection for queries, keys and values."""
    return _built("phi3", dtype, hidden_size=384)


def tiny_mistral(dtype: torch.dtype = torch.float32) -> Any:
    """Every layer sees the last `WINDOW` tokens only."""
    return _built("mistral", dtype, head_dim=16, sliding_window=WINDOW)


def tiny_gemma2(dtype: torch.dtype = torch.float32) -> Any:
    """Sliding and full layers in turn; attention scores are capped at 2, far below what they reach."""
    return _built(
        "gemma2",
        dtype,
        layer_types=_SLIDING_FULL,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
    )


def tiny_gemma3(dtype: torch.dtype = torch.float32, *, head_dim: int = 16) -> Any:
    """Sliding, full, sliding: two of three layers see the last `WINDOW` tokens only."""
    return _built(
        "gemma3_text",
        dtype,
        layer_types=[*_SLIDING_FULL, "sliding_attention"],
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        sliding_window=WINDOW,
    )


def tiny_gemma3n(dtype: torch.dtype = torch.float32) -> Any:
    """The last two of six layers read the keys and values of layers 2 (sliding) and 3 (full)."""
    return _built(
        "gemma3n_text",
        dtype,
        layer_types=_SLIDING_FULL * 3,
        num_kv_shared_layers=2,
        head_dim=16,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=None,
    )


def tiny_gpt_oss(dtype: torch.dtype = torch.float32) -> Any:
    """Sliding and full layers in turn, with attention sinks that take a good part of the weight."""
    model = _built(
        "gpt_oss",
        dtype,
        layer_types=_SLIDING_FULL,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0, std=1.0)
    return model


def tiny_llama4(dtype: torch.dtype = torch.float32) -> Any:
    """Chunked, full, chunked: a chunked layer sees the `WINDOW` tokens of its chunk only."""
    return _built(
        "llama4_text",
        dtype,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        head_dim=16,
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=64,
        moe_layers=[],
        num_local_experts=2,
        floor_scale=4,
    )


def tiny_qwen3_next(dtype: torch.dtype = torch.float32) -> Any:
    """Linear, full, linear attention, with experts."""
    return _built(
        "qwen3_next", dtype, **_LINEAR, **_MOE, num_experts=4, shared_expert_intermediate_size=32, mlp_only_layers=[0]
    )


def tiny_qwen3_5(dtype: torch.dtype = torch.float32) -> Any:
    """Linear, full, linear attention."""
    return _built("qwen3_5_text", dtype, **_LINEAR)


def tiny_deepseek_v2(dtype: torch.dtype = torch.float32) -> Any:
    """Two layers that cache one latent and one rope vector per token instead of keys and values."""
    return _built("deepseek_v2", dtype, **_LATENT)


def tiny_deepseek_v3(dtype: torch.dtype = torch.float32) -> Any:
    """The same with the router and the rotary layout of DeepSeek V3."""
    return _built("deepseek_v3", dtype, **_LATENT)


BUILDERS = {"llama": tiny_llama, "qwen2": tiny_qwen2, "gemma3": tiny_gemma3}
"""The three that most tests run on."""

ALL_BUILDERS: dict[str, Callable[..., Any]] = {
    **BUILDERS,
    "qwen3": tiny_qwen3,
    "phi3": tiny_phi3,
    "mistral": tiny_mistral,
    "gemma2": tiny_gemma2,
    "gemma3n": tiny_gemma3n,
    "gpt_oss": tiny_gpt_oss,
    "llama4": tiny_llama4,
    "qwen3_next": tiny_qwen3_next,
    "qwen3_5": tiny_qwen3_5,
    "deepseek_v2": tiny_deepseek_v2,
    "deepseek_v3": tiny_deepseek_v3,
}
"""One model for every kind of layer and of attention that kveval knows."""


def _built(model_type: str, dtype: torch.dtype, **config: Any) -> Any:
    layers = len(config.get("layer_types", "12"))
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **{**_SHARED, "num_hidden_layers": layers, **config})
    made._experts_implementation = "eager"  # the others know no float64
    return AutoModelForCausalLM.from_config(made).to(dtype).eval().requires_grad_(False)


def packed(model: Any) -> Any:
    """`model`, attending through kveval."""
    use_packed_attention(model)
    return model


def loaded(model: Any, tokenizer: Any = None) -> LoadedModel:
    """`model` as `kveval.models.load` would hand it over: float32 logits, on the CPU."""
    logits_in_float32(model)
    return LoadedModel(model=model, tokenizer=tokenizer, info=None, device=torch.device("cpu"))  # type: ignore[arg-type]


class RoundingCache(DynamicCache):
    """transformers' own cache, fed with keys and values rounded to bfloat16: what the BF16 scheme has to equal."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rounded = (x.bfloat16().to(x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


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
