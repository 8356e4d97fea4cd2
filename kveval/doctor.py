"""What `kveval doctor` finds: versions, hardware, models, and whether the packed path works here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kveval import env
from kveval.attention import ATTENTION_PATH, cache_argument, use_packed_attention
from kveval.cache import QuantizedCache
from kveval.config import ModelConfig
from kveval.formats.spec import get_scheme, scheme_names
from kveval.models import known_models, resolve

__all__ = ["examine"]


def examine() -> dict[str, Any]:
    """Versions and hardware (`env`), models by name (`models`), per scheme how it is stored and read (`schemes`)."""
    models = {name: resolve(ModelConfig(id=name)).is_present for name in known_models()}
    return {"env": env.collect(), "models": models, "schemes": [_scheme(name) for name in scheme_names()]}


@torch.inference_mode()
def _scheme(name: str) -> dict[str, Any]:
    """Runs a tiny random model through the scheme and says what happened."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.eval()
    use_packed_attention(model)
    cache = QuantizedCache(config, name)
    model(torch.arange(32)[None], use_cache=True, **{cache_argument(model): cache})
    scheme = get_scheme(name)
    return {
        "scheme": name,
        "keys": f"{scheme.key.element} {scheme.key.granularity}",
        "values": f"{scheme.value.element} {scheme.value.granularity}",
        "bytes_per_token_and_head_of_128": scheme.layer_bytes_per_token(head_dim_k=128, head_dim_v=128, kv_heads=1),
        "read_through": ATTENTION_PATH,
        "works": cache.tokens_read() == 64 and cache.stored_bytes().stored == cache.billed_bytes(32),
    }
