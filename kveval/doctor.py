"""What `kveval doctor` finds: versions, hardware, models, and whether the packed path works here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kveval import env
from kveval.attention import cache_argument, path_text, recorded_paths, use_packed_attention
from kveval.cache import QuantizedCache
from kveval.config import ModelConfig
from kveval.errors import KvevalError
from kveval.formats.scales import StaticScales
from kveval.formats.spec import KVScheme, TensorFormat, get_scheme, scheme_names
from kveval.models import known_models, resolve

__all__ = ["examine"]

LAYERS = 32
"""Layers of the tiny model where a scheme names layers; one is enough for the others."""


def examine() -> dict[str, Any]:
    """Versions and hardware (`env`), models by name (`models`), per scheme how it is stored and read (`schemes`)."""
    models = {name: resolve(ModelConfig(id=name)).is_present for name in known_models()}
    return {"env": env.collect(), "models": models, "schemes": [_scheme(name) for name in scheme_names()]}


def _scheme(name: str) -> dict[str, Any]:
    """Runs a tiny random model through the scheme and says what happened."""
    found: dict[str, Any] = {"scheme": name, "keys": "", "values": "", "bytes_per_token_and_head_of_128": None}
    try:
        scheme = get_scheme(name)
        found["keys"], found["values"] = _stored_as(scheme.key), _stored_as(scheme.value)
        found["bytes_per_token_and_head_of_128"] = float(scheme.key.token_bytes(128) + scheme.value.token_bytes(128))
        read_through, problem = _try(scheme)
    except KvevalError as error:
        # A package's broken format is a finding; the others are still examined.
        read_through, problem = "", error.message
    return {**found, "read_through": read_through, "works": not problem, "problem": problem}


def _stored_as(fmt: TensorFormat) -> str:
    """Element and what shares a scale, in short."""
    if not fmt.lossy:
        return fmt.element
    return " ".join(map(str, filter(None, (fmt.element, fmt.granularity, fmt.group_size))))


@torch.inference_mode()
def _try(scheme: KVScheme) -> tuple[str, str]:
    """How the scheme was read, and what went wrong ('' if nothing did)."""
    torch.manual_seed(0)
    # Enough for every side to encode some: what waits in a window or a group stays BF16.
    tokens = 64 + scheme.sink_tokens + scheme.residual_length + max(scheme.key.unit, scheme.value.unit)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
        num_hidden_layers=LAYERS if scheme.layers or scheme.skip_layers else 1, max_position_embeddings=tokens,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.eval()
    use_packed_attention(model)
    cache = QuantizedCache(config, _with_unit_scales(scheme, config.num_hidden_layers))
    with recorded_paths() as paths:
        model(torch.arange(tokens)[None] % 64, use_cache=True, **{cache_argument(model): cache})
    stored, billed = cache.stored_bytes(), cache.billed_bytes()
    if stored.stored != billed:
        return path_text(paths), f"{stored.stored} bytes are stored, {billed} billed"
    if cache.tokens_read() != cache.tokens_owed(tokens):
        return path_text(paths), "attention did not read every stored token"
    if not stored.payload:
        return path_text(paths), "nothing was encoded"
    return path_text(paths), ""


def _with_unit_scales(scheme: KVScheme, layers: int) -> KVScheme:
    """The scheme with scales of 1.0 where it can't store without calibrated ones."""
    if not scheme.needs_scales or isinstance(scheme.scales, StaticScales):
        return scheme
    ones = dict.fromkeys(range(layers), (1.0,))
    return scheme.model_copy(update={"scales": StaticScales(source="kveval doctor", key=ones, value=ones)})
