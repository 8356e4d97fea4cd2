"""Which formats a layer takes, and which of its tokens stay BF16: everything that decides a cache's bytes. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kveval.errors import ConfigError, UnsupportedError
from kveval.formats.scales import StaticScales
from kveval.formats.spec import KVScheme, Selector, TensorFormat
from kveval.geometry import LayerGeometry

__all__ = ["BF16", "LayerFormat", "RoleFormat", "layer_formats", "misfit", "select_layers"]

BF16 = TensorFormat(element="bf16")

Role = Literal["key", "value"]

_SELECTORS = 'Write an index (3), a range ("4-7"), "first:2", "last:2", "full", "sliding" or "mla".'


@dataclass(frozen=True)
class RoleFormat:
    """How keys (or values) of one layer are stored, by token.

    The first `sink_tokens` and a tail stay BF16; what lies between is encoded in whole units.

    Attributes:
        format: Of the encoded tokens.
        sink_tokens: First tokens that stay BF16.
        residual_length: See `KVScheme.residual_length`.
        scales: Calibrated scales, one or one per KV head; None: the format needs none.
    """

    format: TensorFormat
    sink_tokens: int = 0
    residual_length: int = 0
    scales: tuple[float, ...] | None = None

    @property
    def step(self) -> int:
        """Tokens that leave the tail together."""
        unit = self.format.unit
        return max(unit, self.residual_length) if unit > 1 else 1

    @property
    def longest_tail(self) -> int:
        """Most tokens that wait in the tail."""
        return self.step - 1 if self.format.unit > 1 else self.residual_length

    def encoded_tokens(self, total: int) -> int:
        """How many of `total` stored tokens are encoded; a function of the total alone."""
        beyond = max(0, total - self.sink_tokens)
        if self.format.unit > 1:
            return beyond // self.step * self.step
        return max(0, beyond - self.residual_length)

    def nbytes(self, total: int, *, head_dim: int, kv_heads: int, dropped: int = 0) -> int:
        """Bytes that `total` tokens of one sequence take, without the `dropped` oldest encoded ones."""
        if total == 0:
            return 0
        encoded = self.encoded_tokens(total)
        units = (encoded - dropped) // self.format.unit
        wide = total - encoded
        constant = self.format.constant_bytes(head_dim, kv_heads)
        return constant + kv_heads * (units * self.format.unit_bytes(head_dim) + wide * BF16.unit_bytes(head_dim))


@dataclass(frozen=True)
class LayerFormat:
    """How one layer that has a cache of its own is stored."""

    key: RoleFormat
    value: RoleFormat

    @property
    def lossy(self) -> bool:
        """Whether it loses anything against BF16 storage."""
        return self.key.format.lossy or self.value.format.lossy

    def nbytes(self, total: int, shape: LayerGeometry, *, dropped: int = 0) -> int:
        """Bytes that `total` tokens of one sequence take in a layer of this shape."""
        return self.key.nbytes(
            total, head_dim=shape.head_dim_k, kv_heads=shape.kv_heads, dropped=dropped
        ) + self.value.nbytes(total, head_dim=shape.head_dim_v, kv_heads=shape.kv_heads, dropped=dropped)


def layer_formats(scheme: KVScheme, layers: Sequence[LayerGeometry]) -> tuple[LayerFormat | None, ...]:
    """The format of every layer; None for layers that store no keys and values of their own.

    In MLA layers the latent is stored in the key format and the rope part stays BF16, as engines do.

    Raises:
        ConfigError: if a selector names a layer that isn't there, or calibrated scales lack a layer.
        UnsupportedError: if a format can't store a layer's head size.
    """
    skipped = select_layers(scheme.skip_layers, layers, where="skip_layers")
    overrides = [(o, select_layers(o.layers, layers, where="layers")) for o in scheme.layers]
    found: list[LayerFormat | None] = []
    for i, shape in enumerate(layers):
        if not shape.stores_kv:
            found.append(None)
            continue
        key, value = scheme.key, scheme.value
        for override, chosen in overrides:
            if i in chosen:
                key, value = override.key or key, override.value or value
        if i in skipped or (shape.window is not None and scheme.sliding == "bf16"):
            key = value = BF16
        if shape.kind == "mla":
            value = BF16
        found.append(
            LayerFormat(
                key=_role(scheme, key, "key", i, shape, shape.head_dim_k),
                value=_role(scheme, value, "value", i, shape, shape.head_dim_v),
            )
        )
    return tuple(found)


def misfit(scheme: KVScheme, layers: Sequence[LayerGeometry]) -> str:
    """Why a scheme can't store a model's layers; empty if it can."""
    try:
        layer_formats(scheme, layers)
    except (ConfigError, UnsupportedError) as error:
        return error.message
    return ""


def _role(
    scheme: KVScheme, fmt: TensorFormat, role: Role, index: int, shape: LayerGeometry, head_dim: int
) -> RoleFormat:
    fmt.check(head_dim)
    if not fmt.lossy:
        return RoleFormat(fmt)
    scales = _scales(scheme, fmt, role, index, shape)
    if shape.window is not None:
        return RoleFormat(fmt, scales=scales)
    return RoleFormat(fmt, scheme.sink_tokens, scheme.residual_length, scales)


def _scales(
    scheme: KVScheme, fmt: TensorFormat, role: Role, index: int, shape: LayerGeometry
) -> tuple[float, ...] | None:
    if not fmt.takes_scales:
        return None
    if not isinstance(scheme.scales, StaticScales):
        return None
    by_layer = scheme.scales.key if role == "key" else scheme.scales.value
    if index not in by_layer:
        raise ConfigError(
            f"the scales of {scheme.scales.source} have no {role} scale for layer {index}.",
            remedy="Calibrate on this model.",
        )
    numbers = by_layer[index]
    heads = shape.kv_heads if fmt.granularity == "per_head" else 1
    if len(numbers) != heads:
        raise ConfigError(
            f"the scales of {scheme.scales.source} have {len(numbers)} {role} scales for layer {index}; "
            f"{fmt.granularity} takes {heads}.",
            remedy="Calibrate with this scheme on this model.",
        )
    return numbers


def select_layers(selectors: Iterable[Selector], layers: Sequence[LayerGeometry], *, where: str) -> frozenset[int]:
    """Indices of the layers that `selectors` name; see `LayerOverride.layers`.

    Raises:
        ConfigError: if a selector is not understood or names no layer of the model.
    """
    return frozenset(i for selector in selectors for i in _select(selector, layers, where))


def _select(selector: Selector, layers: Sequence[LayerGeometry], where: str) -> list[int]:
    storing = [i for i, layer in enumerate(layers) if layer.stores_kv]
    text = str(selector).strip()
    if match := re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", text):
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < len(layers):
            raise ConfigError(
                f"{where}: {text!r} is no layer or ascending range of layers 0 to {len(layers) - 1}.", remedy=_SELECTORS
            )
        chosen = [i for i in range(first, last + 1) if i in storing]
    elif match := re.fullmatch(r"(first|last):(\d+)", text):
        count = int(match[2])
        if not 0 < count <= len(storing):
            raise ConfigError(
                f"{where}: {text!r} asks for {count} of {len(storing)} layers with keys and values.", remedy=_SELECTORS
            )
        chosen = storing[:count] if match[1] == "first" else storing[-count:]
    elif text in ("full", "sliding", "mla"):
        chosen = [i for i in storing if layers[i].kind == text]
    else:
        raise ConfigError(f"{where}: {text!r} names no layers.", remedy=_SELECTORS)
    if not chosen:
        raise ConfigError(
            f"{where}: no layer of this model that stores keys and values is {text!r}.", remedy=_SELECTORS
        )
    return chosen
