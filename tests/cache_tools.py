"""Schemes and known tokens for caches without a model: what most tests of storage start from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig

from kveval.cache import QuantizedCache
from kveval.formats.layout import LayerFormat, RoleFormat, layer_formats
from kveval.formats.spec import KVScheme, build_scheme, get_scheme, scheme_names
from kveval.geometry import geometry_from_config
from kveval.storage import PackedStore

HEADS = 2
HEAD_DIM = 32
WINDOW = 8

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "hidden_size": 64}
FULL: dict[str, Any] = LlamaConfig(num_hidden_layers=2, **_HEADS).to_dict()
"""Two layers of full attention; heads of 32, which every format can store."""
SLIDING: dict[str, Any] = Gemma3TextConfig(
    num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=WINDOW,
    **_HEADS,
).to_dict()
"""Sliding, full, sliding, with a window of `WINDOW`."""

OPTIONS: dict[str, dict[str, Any]] = {
    "sinks": {"extends": "int4_g32", "sink_tokens": 4},
    "residual": {"extends": "int8_per_token_head", "residual_length": 40},
    "sinks_residual": {"extends": "nvfp4", "sink_tokens": 4, "residual_length": 32},
    "kivi_sinks": {"extends": "kivi4", "sink_tokens": 5, "residual_length": 64},
    "kivi_no_residual": {"extends": "kivi2", "residual_length": 0},
    "skipped": {"extends": "int4_g64", "skip_layers": ["first:1"]},
    "mixed": {"extends": "k8v4", "layers": [{"layers": ["last:1"], "key": "kivi4", "value": "int4_g32"}]},
    "sliding": {"extends": "int4_g32", "sliding": "quantized"},
    "sliding_nvfp4": {"extends": "nvfp4", "sliding": "quantized"},
    "sliding_kivi": {"extends": "kivi4", "sliding": "quantized", "residual_length": 32},
    "blocks_of_1": {"extends": "nvfp4", "block_size": 1},
    "blocks_of_48": {"extends": "kivi4", "block_size": 48, "residual_length": 64},
}
"""What a scheme can say beyond its two formats."""

SCHEMES = (*scheme_names(), *OPTIONS)


@functools.cache
def scheme(name: str) -> KVScheme:
    """A preset, with scales of 0.01 and 0.02 for the heads of up to three layers if it needs some; or an option."""
    if name in OPTIONS:
        return build_scheme(name, OPTIONS[name])
    preset = get_scheme(name)
    if not preset.needs_scales:
        return preset
    by_layer = {i: [0.01, 0.02] for i in range(3)}
    return build_scheme(name, {"extends": name, "scales": {"source": "test", "key": by_layer, "value": by_layer}})


@functools.cache
def _layers(name: str) -> tuple[LayerFormat, ...]:
    found = layer_formats(scheme(name), geometry_from_config(SLIDING))
    assert None not in found
    return found  # type: ignore[return-value]


LOSSY = tuple(name for name in SCHEMES if scheme(name).lossy)
INVARIANT = tuple(name for name in SCHEMES if scheme(name).append_invariant)
FREEZING = tuple(name for name in SCHEMES if not scheme(name).append_invariant)


def new_cache(name: str, config: dict[str, Any] = FULL, **kwargs: Any) -> QuantizedCache:
    return QuantizedCache(config, scheme(name), **kwargs)


@functools.cache
def _numbers(index: int, role: str, batch: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * index + "kv".index(role))
    # Channels of different size and offset, as keys have.
    x = torch.randn(batch, 512, HEADS, HEAD_DIM, generator=generator)
    return x * torch.linspace(0.2, 3, HEAD_DIM) + torch.linspace(-2, 2, HEAD_DIM)


def numbers(
    start: int, stop: int, *, index: int = 0, role: str = "k", batch: int = 2, seed: int = 0, factor: float = 1.0
) -> Tensor:
    """float32 [batch, HEADS, stop - start, HEAD_DIM]: tokens start..stop of a fixed sequence, as a transposed view."""
    return (_numbers(index, role, batch, seed)[:, start:stop] * factor).transpose(1, 2)


def fill(cache: QuantizedCache, start: int, stop: int, **kwargs: Any) -> None:
    """Update every layer with tokens start..stop of its fixed sequence (see `numbers`)."""
    for index in range(len(cache.layers)):
        k, v = (numbers(start, stop, index=index, role=role, **kwargs) for role in "kv")
        cache.update(k, v, index)


def filled(name: str, *stops: int, config: dict[str, Any] = FULL, **kwargs: Any) -> QuantizedCache:
    """A cache with tokens 0..stops[-1], written in pieces that end at `stops`."""
    cache = new_cache(name, config)
    for start, stop in itertools.pairwise((0, *stops)):
        fill(cache, start, stop, **kwargs)
    return cache


def stores(cache: QuantizedCache) -> list[PackedStore]:
    """Every store of a cache without padded rows."""
    found = [store for layer in cache.packed_layers for store in layer.stores()]
    assert all(isinstance(store, PackedStore) for store in found)
    return found  # type: ignore[return-value]


def assert_same_store(one: PackedStore, other: PackedStore) -> None:
    """Equal bytes, scales, frozen numbers and wide tokens, from equally many tokens."""
    assert (one.total, one.dropped) == (other.total, other.dropped)
    parts, expected = one.parts(), other.parts()
    assert parts.keys() == expected.keys()
    for part, tensor in parts.items():
        assert torch.equal(tensor, expected[part]), part
    assert one.billed_bytes() == other.billed_bytes()


def assert_same(one: QuantizedCache, other: QuantizedCache) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    for a, b in zip(stores(one), stores(other), strict=True):
        assert_same_store(a, b)


def _roles() -> Iterator[tuple[str, RoleFormat]]:
    """Every different way in which some layer of some scheme stores one role."""
    seen: set[RoleFormat] = set()
    shapes = geometry_from_config(SLIDING)
    for name in SCHEMES:
        for i, fmt in enumerate(_layers(name)):
            for label, role in (("keys", fmt.key), ("values", fmt.value)):
                if role not in seen:
                    seen.add(role)
                    yield f"{name}-{label}-{shapes[i].kind}", role


ROLES: dict[str, RoleFormat] = dict(_roles())


def _kind(role: RoleFormat) -> tuple[Any, ...]:
    """What a store sees of a role; two of one kind differ in their arithmetic alone."""
    fmt = role.format
    frozen_scale = fmt.global_divisor is not None or fmt.scale_rule == "first_write_amax"
    tokens = (fmt.unit, role.residual_length, role.sink_tokens)
    return (*tokens, fmt.lossy, fmt.rule.stored, frozen_scale, fmt.transform == "mean_shift", bool(role.scales))


KINDS = tuple({_kind(role): name for name, role in reversed(ROLES.items())}.values())[::-1]
"""Names of `ROLES`, one of each kind: enough for operations that treat codes as bytes."""

DIFFERENT = tuple(
    {tuple((_kind(f.key), _kind(f.value)) for f in _layers(name)): name for name in reversed(SCHEMES)}.values()
)[::-1]
"""Names of `SCHEMES`, one for each way of storing layers: for tests that run a model."""
