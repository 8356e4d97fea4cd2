"""Layer geometry: against live caches of tiny models, against published figures, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest

from kveval.errors import ModelError, UnsupportedError
from kveval.geometry import LayerGeometry, geometry_from_config, text_config

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARING = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding")]
LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 4,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7, "num_key_value_heads": 1},
    "phi3": {"sliding_window": 8},
    "gpt_oss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma3n_text": {
        "head_dim": 8,
        "sliding_window": 8,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": SHARING,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 4,
        "activation_sparsity_pattern": None,
    },
    "falcon": {"multi_query": True, "alibi": False, "bias": False},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "num_key_value_heads": None},
    "deepseek_v2": {**LATENT, "n_routed_experts": 2, "num_experts_per_tok": 1},
    "deepseek_v3": LATENT,
    "llama4_text": {
        "head_dim": 16,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 32,
        "moe_layers": [],
    },
    "qwen3_next": {**LINEAR, "num_experts": 2, "num_experts_per_tok": 1},
    "qwen3_5_text": LINEAR,
}


def shape(layer: LayerGeometry) -> tuple[str, int, int, int, int | None, int | None]:
    return (
        layer.kind,
        layer.kv_heads,
        layer.head_dim_k,
        layer.head_dim_v,
        layer.window,
        layer.shared_with,
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_widths_equal_those_of_a_live_cache(model_type: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SMALL, **MODELS[model_type]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        out = model(torch.tensor([[5, 6, 7]]), use_cache=True)
    live = out["cache"] if "cache" in out else out["past_key_values"]
    stored = [layer for layer in geometry_from_config(config.to_dict()) if layer.stores_kv]
    kept = [layer for layer in live.layers if getattr(layer, "keys", None) is not None]
    assert len(stored) == len(kept)
    for mine, theirs in zip(stored, kept, strict=True):
        assert (1, mine.kv_heads, 3, mine.head_dim_k) == tuple(theirs.keys.shape)
        assert (1, mine.kv_heads, 3, mine.head_dim_v) == tuple(theirs.values.shape)
        window = getattr(theirs, "sliding_window", None)
        assert mine.window == (None if window is None else int(window))
        assert mine.elements_per_token * 3 == theirs.keys.numel() + theirs.values.numel()


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "cohere2", "llama4_text"])
def test_config_without_layer_types_gives_what_transformers_infers(model_type: str) -> None:
    from transformers import AutoConfig

    full = AutoConfig.for_model(model_type).to_dict()
    assert "layer_types" in full
    old = {key: value for key, value in full.items() if key != "layer_types"}
    assert geometry_from_config(old) == geometry_from_config(full)


def test_llama_3_8b_costs_131072_bytes_per_token_in_bf16() -> None:
    layers = geometry_from_config(LLAMA_3_8B)
    assert {shape(layer) for layer in layers} == {("full", 8, 128, 128, None, None)}
    assert sum(layer.elements_per_token for layer in layers) * 2 == 131_072


def test_heads_default_to_query_heads() -> None:
    config = {**LLAMA_3_8B, "num_key_value_heads": None}
    assert geometry_from_config(config)[0].kv_heads == 32


def test_qwen_hub_config_names_a_window_that_it_does_not_use() -> None:
    config = {**LLAMA_3_8B, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072}
    assert {layer.kind for layer in geometry_from_config(config)} == {"full"}


def test_qwen_keeps_its_first_layers_full() -> None:
    config = {**LLAMA_3_8B, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 30}
    layers = geometry_from_config(config)
    assert [layer.window for layer in layers] == [None] * 30 + [64] * 2


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3"])
def test_mla_keeps_one_latent_and_one_rope_vector(model_type: str) -> None:
    config = {
        **LLAMA_3_8B,
        "model_type": model_type,
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    layers = geometry_from_config(config)
    assert {shape(layer) for layer in layers} == {("mla", 1, 512, 64, None, None)}
    assert sum(layer.elements_per_token for layer in layers) == 576 * 61


def test_sparse_attention_also_caches_its_indexer_keys() -> None:
    config = {
        **LLAMA_3_8B,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "layer_types": ["deepseek_sparse_attention"] * 32,
    }
    layer = geometry_from_config(config)[0]
    assert shape(layer) == ("mla", 1, 512, 64, None, None)
    assert layer.indexer_dim == 128


def test_linear_layers_keep_no_kv() -> None:
    config = {
        **LLAMA_3_8B,
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "head_dim": 256,
        "num_key_value_heads": 2,
    }
    layers = geometry_from_config(config)
    assert [layer.kind for layer in layers] == (["linear"] * 3 + ["full"]) * 2
    assert [layer.elements_per_token for layer in layers] == [0, 0, 0, 1024] * 2


def test_layers_without_attention_keep_nothing() -> None:
    config = {**LLAMA_3_8B, "layers_block_type": ["mamba", "moe", "attention", "mlp"]}
    del config["num_hidden_layers"]
    assert [layer.kind for layer in geometry_from_config(config)] == ["linear", "none", "full", "none"]


def test_shared_layers_point_at_the_last_owner_of_their_kind() -> None:
    config = {
        **LLAMA_3_8B,
        "num_hidden_layers": 5,
        "layer_types": SHARING,
        "sliding_window": 16,
        "num_kv_shared_layers": 2,
    }
    layers = geometry_from_config(config)
    assert [layer.shared_with for layer in layers] == [None, None, None, 1, 2]
    assert [layer.stores_kv for layer in layers] == [True, True, True, False, False]
    assert layers[3].elements_per_token == 0
    assert layers[4].window == 16


def test_chunked_attention_keeps_one_chunk() -> None:
    types = ["chunked_attention"] * 3 + ["full_attention"]
    config = {**LLAMA_3_8B, "num_hidden_layers": 4, "layer_types": types, "attention_chunk_size": 8192}
    layers = geometry_from_config(config)
    assert [(layer.kind, layer.window, layer.chunked) for layer in layers] == [
        *[("sliding", 8192, True)] * 3,
        ("full", None, False),
    ]


def test_llama4_attends_in_chunks_where_it_has_rotary_positions() -> None:
    config = {**LLAMA_3_8B, "model_type": "llama4_text", "num_hidden_layers": 5, "attention_chunk_size": 8192}
    windows = [8192, 8192, 8192, None, 8192]
    assert [layer.window for layer in geometry_from_config(config)] == windows
    assert [layer.window for layer in geometry_from_config({**config, "no_rope_layers": []})] == windows
    listed = {**config, "no_rope_layers": [0, 1, 0, 1, 1]}
    assert [layer.window for layer in geometry_from_config(listed)] == [None, 8192, None, 8192, 8192]
    every_second = {**config, "no_rope_layer_interval": 2}
    assert [layer.chunked for layer in geometry_from_config(every_second)] == [True, False, True, False, True]
    unchunked = {**config, "attention_chunk_size": None}
    assert {layer.kind for layer in geometry_from_config(unchunked)} == {"full"}


def test_gemma4_full_layers_have_heads_of_their_own() -> None:
    config = {
        **LLAMA_3_8B,
        "model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 512,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    }
    assert [shape(layer) for layer in geometry_from_config(config)] == [
        ("sliding", 8, 256, 256, 512, None),
        ("full", 2, 512, 512, None, None),
    ]
    saved = {**config, "per_layer_config": {"01": {"head_dim": 128}}}
    assert geometry_from_config(saved)[1].head_dim_k == 128


def test_multimodal_configs_nest_the_language_model() -> None:
    nested = {"model_type": "gemma3", "text_config": LLAMA_3_8B, "vision_config": {"hidden_size": 1}}
    assert text_config(nested) == LLAMA_3_8B
    assert geometry_from_config(nested) == geometry_from_config(LLAMA_3_8B)


def without(*keys: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA_3_8B, **more}.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without("num_hidden_layers"), "no `num_hidden_layers` or `n_layer` or `n_layers`"),
        (without("hidden_size"), "no `hidden_size` or `n_embd` or `d_model`"),
        (without("num_attention_heads"), "no `num_attention_heads` or `n_head` or `n_heads`"),
        (without(kv_lora_rank=512), "no `qk_rope_head_dim`"),
        (without(layer_types=["sliding_attention"] * 32), "no `sliding_window`"),
        (without(layer_types=["full_attention"] * 3), "3 layer types for 32 layers"),
        (without(hidden_size=4097), "hidden size 4097 is no multiple of 32 heads"),
        (without(num_hidden_layers=0), "num_hidden_layers or n_layer or n_layers is 0"),
        (without(use_sliding_window=True, sliding_window=8), "no `max_window_layers`"),
        (without(model_type="gemma4_text"), "no `global_head_dim`"),
        (
            without(model_type="llama4_text", attention_chunk_size=8, no_rope_layers=[1]),
            "lists 1 `no_rope_layers` for 32",
        ),
        (without(num_kv_shared_layers=32), "no earlier layer is of type 'full_attention'"),
    ],
)
def test_a_missing_or_contradictory_key_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        geometry_from_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(is_encoder_decoder=True), "encoder-decoder"),
        (without(layer_types=["hybrid"] * 32), "layer of type 'hybrid'"),
        (without(mamba_d_state=16, attn_layer_period=8), "attn_layer_period, mamba_d_state but no"),
        (without(attention_chunk_size=8192), "attention_chunk_size but no `layer_types`"),
        (without(n_recurrent_loops=2), "n_recurrent_loops: layers and caches don't match"),
        (without(sliding_window=8, sliding_window_pattern="LLLG"), "'LLLG'"),
    ],
)
def test_unknown_families_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        geometry_from_config(config)


def test_needs_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    code = "import sys, kveval.geometry; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
