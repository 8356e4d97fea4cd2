"""What `kveval doctor` finds: versions, hardware, models, whether the packed path and the kernels work here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kveval import env
from kveval.attention import cache_argument, path_text, recorded_paths, use_packed_attention
from kveval.bench.shapes import SHAPES
from kveval.cache import QuantizedCache
from kveval.config import ModelConfig
from kveval.errors import KvevalError
from kveval.formats.scales import StaticScales
from kveval.formats.spec import KVScheme, TensorFormat, get_scheme, scheme_names
from kveval.geometry import LayerGeometry
from kveval.kernels.support import examine_kernels
from kveval.models import known_models, resolve
from kveval.native_note import NativePaths
from kveval.native_path import native_paths

__all__ = ["examine"]

LAYERS = 32
"""Layers of the tiny model where a scheme names layers; one is enough for the others."""

TIMED = SHAPES["llama-8b"]
"""The attention on which widening is measured."""


def examine() -> dict[str, Any]:
    """What is here: all as plain data.

    Returns:
        `env`: versions and hardware; `models`: whether each is here, by name; `schemes`: how each is stored and read;
        `kernels`: see `examine_kernels`; `native`: a `NativePaths` of those that work, with heads of 128.
    """
    models = {name: resolve(ModelConfig(id=name)).is_present for name in known_models()}
    schemes = [_scheme(name) for name in scheme_names()]
    native = _native(row["scheme"] for row in schemes if row["works"])
    return {
        "env": env.collect(),
        "models": models,
        "schemes": schemes,
        "kernels": examine_kernels(),
        "native": native.to_dict(),
    }


def _native(names: Iterable[str]) -> NativePaths:
    """How schemes would run on this machine's first GPU or its CPU, in the dtype that models are loaded in there."""
    on_gpu = torch.cuda.is_available()
    # One head: schemes whose scales are calibrated per head then take as many as those of a whole layer.
    layer = LayerGeometry(kind="full", kv_heads=1, head_dim_k=TIMED.head_dim, head_dim_v=TIMED.head_dim)
    return native_paths(
        [_with_unit_scales(get_scheme(name), LAYERS) for name in names],
        [layer] * LAYERS,
        device=torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        shape=TIMED,
    )


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
