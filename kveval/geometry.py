"""What each layer of a model keeps per token, read from a `config.json` dict without torch or transformers.

Capacity planning needs no model, only the shapes of the cached tensors, so this module works on plain
data. It refuses what it does not know (a layer kind, a missing key) instead of guessing a width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kveval.errors import ModelError, UnsupportedError

__all__ = ["LayerGeometry", "LayerKind", "geometry_from_config", "text_config"]

LayerKind = Literal["full", "sliding", "linear", "mla", "none"]
"""full: every token; sliding: the last `window` tokens; linear: a recurrent state and no KV;
mla: one latent and one rope vector per token; none: a layer without attention (MLP or experts only)."""


@dataclass(frozen=True, kw_only=True)
class LayerGeometry:
    """The two tensors that one layer caches, each of shape (batch, kv_heads, tokens, width).

    Attributes:
        kind: What decides how many tokens are kept.
        kv_heads: Heads stored (not query heads). 1 for mla, 0 for linear and none.
        head_dim_k: Width of the first tensor: keys, or the latent (`kv_lora_rank`) for mla.
        head_dim_v: Width of the second tensor: values, or the rope part (`qk_rope_head_dim`) for mla.
        window: Tokens kept by a sliding layer (its chunk size for chunked attention); an mla layer may
            slide too. None: every token.
        chunked: The window does not slide: a token attends to its own chunk of `window` tokens only.
        shared_with: Index of the layer whose cache this one reads. Such a layer stores nothing itself.
        indexer_dim: Width of the key of a sparse-attention indexer, cached per token beside the two
            tensors and never quantized by kveval; 0 where there is none.
    """

    kind: LayerKind
    kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    window: int | None = None
    chunked: bool = False
    shared_with: int | None = None
    indexer_dim: int = 0

    @property
    def stores_kv(self) -> bool:
        """True if the layer has a KV cache of its own."""
        return self.kv_heads > 0 and self.shared_with is None

    @property
    def elements_per_token(self) -> int:
        """Elements of both tensors for one stored token; 0 for a layer that stores nothing."""
        return self.kv_heads * (self.head_dim_k + self.head_dim_v) if self.stores_kv else 0


# Layer names as configs write them, the old ones included, and what such a layer keeps.
_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
    "moe": "none",
    "mlp": "none",
}
_INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})

# One full layer after every n - 1 sliding ones, for configs written before `layer_types` existed.
_WINDOW_PATTERN = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "gpt_oss": 2, "cohere2": 4}

# Keys of models whose layers differ in ways that the general keys below do not show.
_OPAQUE_KEYS = (
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "hybrid_override_pattern",
    "linear_attn_config",
    "mamba_d_state",
    "mamba_n_heads",
    "ssm_cfg",
    "state_size",
)

# Keys of models in which layers and caches do not match one to one, `layer_types` or not.
_UNMATCHED_KEYS = ("cla_share_factor", "n_recurrent_loops")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model (multimodal configs nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def geometry_from_config(config: Mapping[str, Any]) -> tuple[LayerGeometry, ...]:
    """Geometry of every layer, from `config.json` or `PreTrainedConfig.to_dict()`.

    Multi-token-prediction layers are not counted: they take no part in ordinary decoding.

    Raises:
        ModelError: a needed key is missing or contradicts another; the message names it.
        UnsupportedError: a layer kind, or a family of models, whose cache kveval does not know.
    """
    text = text_config(config)
    name = str(text.get("model_type", "unknown"))
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise UnsupportedError(
            f"model type {name!r} is an encoder-decoder model; kveval measures causal language models.",
            remedy="Name a decoder-only model.",
        )
    unmatched = [key for key in _UNMATCHED_KEYS if text.get(key) not in (None, 1)]
    if unmatched:
        raise UnsupportedError(
            f"model type {name!r} has {', '.join(unmatched)}: layers and caches don't match one to one.",
            remedy="Use a model whose layers each keep one cache.",
        )
    types = _layer_types(text, name)
    overrides = {int(i): dict(v) for i, v in (text.get("per_layer_config") or {}).items()}
    layers = [
        _layer(kind, {**text, **_global_heads(text, kind), **overrides.get(i, {})}, name)
        for i, kind in enumerate(types)
    ]
    return _share(layers, types, int(text.get("num_kv_shared_layers") or 0), name)


def _layer(layer_type: str, config: Mapping[str, Any], name: str) -> LayerGeometry:
    if layer_type not in _KINDS:
        raise UnsupportedError(
            f"model type {name!r}: kveval does not know what a layer of type {layer_type!r} caches.",
            remedy=f"Known layer types: {', '.join(sorted(_KINDS))}.",
        )
    kind = _KINDS[layer_type]
    if kind in ("linear", "none"):
        return LayerGeometry(kind=kind)
    indexer = _need(config, name, "index_head_dim") if layer_type in _INDEXED else 0
    window = None
    if kind == "sliding":
        window_key = "attention_chunk_size" if layer_type == "chunked_attention" else "sliding_window"
        window = _need(config, name, window_key)
    if config.get("kv_lora_rank"):
        return LayerGeometry(
            kind="mla",
            kv_heads=1,
            head_dim_k=_need(config, name, "kv_lora_rank"),
            head_dim_v=_need(config, name, "qk_rope_head_dim"),
            window=window,
            indexer_dim=indexer,
        )
    head_dim = _head_dim(config, name)
    return LayerGeometry(
        kind=kind,
        kv_heads=_kv_heads(config, name),
        head_dim_k=head_dim,
        head_dim_v=int(config.get("v_head_dim") or head_dim),
        window=window,
        chunked=layer_type == "chunked_attention",
        indexer_dim=indexer,
    )


def _layer_types(config: Mapping[str, Any], name: str) -> list[str]:
    """One type per layer: as written, or inferred the way the model families themselves do it."""
    written = config.get("layer_types") or config.get("layers_block_type")
    if written is not None:
        count = _first(config, "num_hidden_layers", "n_layer", "n_layers")
        if count is not None and count != len(written):
            raise ModelError(
                f"model type {name!r}: config lists {len(written)} layer types for {count} layers.",
                remedy="Mend `layer_types` or `num_hidden_layers` in config.json.",
            )
        return [str(t) for t in written]
    n = _need(config, name, "num_hidden_layers", "n_layer", "n_layers")
    interval = config.get("full_attention_interval")
    if interval:
        return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n)]
    if name == "llama4_text":
        return _llama4_layer_types(config, name, n)
    opaque = [key for key in _OPAQUE_KEYS if config.get(key) is not None]
    if opaque:
        raise UnsupportedError(
            f"model type {name!r} has {', '.join(opaque)} but no `layer_types` to tell its layers apart.",
            remedy="Add `layer_types` to config.json, one entry per layer.",
        )
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * n
    if config.get("use_sliding_window"):  # the Qwen family: the first max_window_layers stay full
        first = _need(config, name, "max_window_layers", zero=True)
        return ["full_attention" if i < first else "sliding_attention" for i in range(n)]
    pattern = _first(config, "sliding_window_pattern", "_sliding_window_pattern") or _WINDOW_PATTERN.get(name)
    if pattern is None:  # the Mistral family: a window means every layer
        return ["sliding_attention"] * n
    if not isinstance(pattern, int):
        raise UnsupportedError(
            f"model type {name!r}: `sliding_window_pattern` is {pattern!r}; kveval reads whole numbers.",
            remedy="Add `layer_types` to config.json, one entry per layer.",
        )
    return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(n)]


def _llama4_layer_types(config: Mapping[str, Any], name: str, layers: int) -> list[str]:
    """Llama 4: layers with rotary positions attend in chunks, those without (every fourth by default) to everything."""
    if not config.get("attention_chunk_size"):
        return ["full_attention"] * layers
    interval = _first(config, "no_rope_layer_interval") or 4
    rotary = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(rotary) != layers:
        raise ModelError(
            f"model type {name!r}: config lists {len(rotary)} `no_rope_layers` for {layers} layers.",
            remedy="Mend `no_rope_layers` or `num_hidden_layers` in config.json.",
        )
    return ["chunked_attention" if has_rope else "full_attention" for has_rope in rotary]


def _global_heads(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Gemma 4: full layers have their own head width, and their own heads where keys double as values."""
    gemma4 = str(config.get("model_type", "")).startswith("gemma4")
    if layer_type != "full_attention" or not gemma4 or config.get("per_layer_config"):
        return {}
    heads: dict[str, Any] = {"head_dim": _need(config, "gemma4", "global_head_dim")}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        heads["num_key_value_heads"] = config["num_global_key_value_heads"]
    return heads


def _share(layers: list[LayerGeometry], types: Sequence[str], shared: int, name: str) -> tuple[LayerGeometry, ...]:
    """Point each of the last `shared` layers at the last earlier layer of its type (Gemma 3n)."""
    first = len(layers) - shared
    out = layers[:first]
    for layer, layer_type in zip(layers[first:], types[first:], strict=True):
        owners = [i for i in range(first) if types[i] == layer_type]
        if not owners:
            raise ModelError(
                f"model type {name!r}: {shared} layers share a cache, but no earlier layer is of type {layer_type!r}.",
                remedy="Mend `num_kv_shared_layers` or `layer_types` in config.json.",
            )
        fields = {**vars(layer), "shared_with": owners[-1]}
        out.append(LayerGeometry(**fields))
    return tuple(out)


def _kv_heads(config: Mapping[str, Any], name: str) -> int:
    # Falcon and GPT-BigCode: multi-query attention keeps a single head, whatever num_kv_heads says.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    attn_config = config.get("attn_config") or {}
    grouped = _first(config, "num_key_value_heads", "num_kv_heads") or attn_config.get("kv_n_heads")
    return int(grouped) if grouped else _query_heads(config, name)


def _query_heads(config: Mapping[str, Any], name: str) -> int:
    return _need(config, name, "num_attention_heads", "n_head", "n_heads")


def _head_dim(config: Mapping[str, Any], name: str) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden, heads = _need(config, name, "hidden_size", "n_embd", "d_model"), _query_heads(config, name)
    if hidden % heads:
        raise ModelError(
            f"model type {name!r}: no `head_dim`, and hidden size {hidden} is no multiple of {heads} heads.",
            remedy="Add `head_dim` to config.json.",
        )
    return hidden // heads


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _need(config: Mapping[str, Any], name: str, *keys: str, zero: bool = False) -> int:
    """The first of `keys` present, as a positive whole number (`zero` admits 0)."""
    value = _first(config, *keys)
    if value is None:
        raise ModelError(
            f"model type {name!r}: config has no {' or '.join(f'`{key}`' for key in keys)}.",
            remedy="Add it to config.json.",
        )
    if not isinstance(value, int) or value < (0 if zero else 1):
        raise ModelError(
            f"model type {name!r}: {' or '.join(keys)} is {value!r}, not a positive whole number.",
            remedy="Mend config.json.",
        )
    return value
