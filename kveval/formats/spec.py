"""What a storage format is, as data: element, granularity, scale and transform of keys and of values.

Nothing here imports torch: configs, capacity and plans read formats without it. The arithmetic that turns tensors
into bytes and back is in `kveval.formats.codec`; which layer and which token a scheme's formats apply to is in
`kveval.formats.layout`.

Sizes are in bytes. D is the head size, H the number of KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import Any, Literal, Self, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kveval.errors import ConfigError, UnknownNameError, UnsupportedError
from kveval.formats.element_types import Element, get_element
from kveval.formats.scales import StaticScales
from kveval.registry import load_plugin, plugin_names, refuse_claims

__all__ = [
    "SCALE_RULES",
    "SCALE_SIZES",
    "KVScheme",
    "LayerOverride",
    "TensorFormat",
    "build_scheme",
    "get_scheme",
    "scheme_names",
]

SCALE_SIZES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "e4m3": 1, "e8m0": 1}
"""Bytes of one stored scale (or zero point), by type."""

Granularity = Literal["none", "per_tensor", "per_head", "per_token", "per_group", "per_channel"]


@dataclass(frozen=True)
class ScaleRule:
    """How a scale is found. `stored` numbers are kept per group: a scale, or a scale and a zero point."""

    summary: str
    stored: int
    granularities: tuple[Granularity, ...]


_GROUPS: tuple[Granularity, ...] = ("per_token", "per_group", "per_channel")
_BLOCK: tuple[Granularity, ...] = ("per_group",)

SCALE_RULES: dict[str, ScaleRule] = {
    "none": ScaleRule("stored as it is", 0, ("none",)),
    "fixed": ScaleRule("the constant `fixed_scale`", 0, ("per_tensor",)),
    "static": ScaleRule("calibrated beforehand, or taken from the checkpoint", 0, ("per_tensor", "per_head")),
    "first_write_amax": ScaleRule(
        "amax of the sequence's first write over the element's max, then frozen", 0, ("per_tensor",)
    ),
    "amax": ScaleRule("amax over the element's max", 1, _GROUPS),
    "minmax": ScaleRule("step (max - min) / (levels - 1), minimum as zero point", 2, _GROUPS),
    "mx_floor": ScaleRule("2^(floor(log2 amax) - floor(log2 max)), the OCP floor rule", 1, _BLOCK),
    "four_over_six": ScaleRule("amax over 6 or over 4, whichever has the smaller squared error", 1, _BLOCK),
    "rms": ScaleRule("root mean square of the vector", 1, ("per_token",)),
    "ggml_q8_0": ScaleRule("amax / 127, half away from zero", 1, _BLOCK),
    "ggml_extreme": ScaleRule("the value of largest magnitude over the lowest level", 1, _BLOCK),
    "ggml_minmax": ScaleRule("(max - min) / (levels - 1), half up, minimum as zero point", 2, _BLOCK),
    "ggml_iq4_nl": ScaleRule("amax at the lowest level, then fitted by least squares weighted with x^2", 1, _BLOCK),
}
"""Scale rules; `kveval.formats.rules` has a function of each name that stores one number or more."""

TRANSFORMS: dict[str, str] = {
    "none": "",
    "hadamard": "rotated by an orthonormal Hadamard matrix along the head (in blocks of the largest power of two in D)",
    "mean_shift": "less the mean of each channel over the sequence's first write, which is kept in fp32",
}
"""What happens to a vector before it is encoded, and is undone when it is read; see `kveval.formats.transforms`."""


class TensorFormat(BaseModel):
    """How one role (keys or values) is stored. All data; two equal formats store equal bytes.

    Attributes:
        element: Name of an element type (`kveval.formats.element_types`).
        granularity: What shares one scale. `per_tensor`: everything that the layer stores for this role and sequence;
            `per_head`: one head of it; `per_token`: one (token, head) vector of D elements; `per_group`: `group_size`
            adjacent elements of that vector (the last group may be short); `per_channel`: one channel over
            `group_size` adjacent tokens.
        group_size: Elements (`per_group`) or tokens (`per_channel`) that share a scale.
        scale_rule: Name in `SCALE_RULES`.
        scale_dtype: Type in which a scale (and a zero point) is stored.
        fixed_scale: The constant of `fixed`.
        global_divisor: A second-level fp32 scale per sequence: amax of the first write divided by this, then frozen
            (NVFP4: 2688 = 448 * 6, so that block scales use e4m3's whole range). None: no second level.
        transform: Name in `TRANSFORMS`.
        packing: Order of codes in bytes. `sequential`: low bits first; `ggml`: llama.cpp's blocks of 32, in which
            element j and j + 16 share a byte and fifth bits stand in front.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    element: str
    granularity: Granularity = "none"
    group_size: int | None = Field(default=None, ge=2)
    scale_rule: str = "none"
    scale_dtype: str | None = None
    fixed_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    global_divisor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    transform: str = "none"
    packing: Literal["sequential", "ggml"] = "sequential"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        element, rule = get_element(self.element), self.rule
        if self.transform not in TRANSFORMS:
            raise UnknownNameError("transform", self.transform, TRANSFORMS)
        if self.scale_dtype is not None and self.scale_dtype not in SCALE_SIZES:
            raise UnknownNameError("scale type", self.scale_dtype, SCALE_SIZES)
        if (self.granularity in ("per_group", "per_channel")) != (self.group_size is not None):
            raise ValueError("group_size goes with granularity per_group or per_channel, and only with them")
        if self.granularity not in rule.granularities:
            raise ValueError(f"scale_rule {self.scale_rule} takes granularity {' or '.join(rule.granularities)}")
        if bool(rule.stored) != (self.scale_dtype is not None):
            raise ValueError("scale_dtype goes with scale rules that store a scale, and only with them")
        if element.wide != (self.granularity == "none"):
            raise ValueError("bf16 elements take no scale; every other element needs one")
        if element.wide and self.transform != "none":
            raise ValueError("bf16 elements are stored as they are, without a transform")
        if rule.stored == 2 and element.signed:
            raise ValueError(
                f"scale_rule {self.scale_rule} adds a zero point and needs an unsigned element (uint4, ...)"
            )
        if rule.stored < 2 and not element.signed and not element.wide:
            raise ValueError(f"element {self.element} needs a zero point: scale_rule minmax")
        if rule.stored == 2 and self.scale_dtype in ("e4m3", "e8m0"):
            raise ValueError("a zero point needs the sign and the range of fp32, bf16 or fp16")
        if (self.scale_dtype == "e8m0") != (self.scale_rule == "mx_floor"):
            raise ValueError("scale_rule mx_floor goes with e8m0 scales")
        if self.scale_rule == "four_over_six" and self.element != "e2m1":
            raise ValueError("scale_rule four_over_six scales to 6 or to 4, which is for e2m1 elements")
        if self.global_divisor is not None and self.scale_dtype != "e4m3":
            raise ValueError("global_divisor goes with e4m3 scales")
        if self.packing == "ggml" and (self.group_size != 32 or element.bits not in (4, 5, 8)):
            raise ValueError("packing ggml goes with groups of 32 elements of 4, 5 or 8 bits")
        return self

    @property
    def info(self) -> Element:
        """The element type."""
        return get_element(self.element)

    @property
    def rule(self) -> ScaleRule:
        """The scale rule."""
        if self.scale_rule not in SCALE_RULES:
            raise UnknownNameError("scale rule", self.scale_rule, SCALE_RULES)
        return SCALE_RULES[self.scale_rule]

    @property
    def lossy(self) -> bool:
        """Whether a BF16 tensor loses anything when stored."""
        return not self.info.wide

    @property
    def freezes_scale(self) -> bool:
        """Whether a scale is taken from a sequence's first write."""
        return self.global_divisor is not None or self.scale_rule == "first_write_amax"

    @property
    def freezes(self) -> bool:
        """Whether something taken from a sequence's first write decides how later tokens are stored."""
        return self.freezes_scale or self.transform == "mean_shift"

    @property
    def takes_scales(self) -> bool:
        """Whether calibrated scales would be used: `static` needs them, `fixed` takes them instead of its constant."""
        return self.scale_rule in ("static", "fixed")

    @property
    def append_invariant(self) -> bool:
        """Whether the bytes of a token are the same however the tokens before it were split into writes."""
        return not self.freezes

    @property
    def unit(self) -> int:
        """Tokens that are encoded together: the group of a `per_channel` format, else 1."""
        return cast(int, self.group_size) if self.granularity == "per_channel" else 1

    def check(self, head_dim: int) -> None:
        """Refuse a head size that the format can't store.

        Raises:
            UnsupportedError: if `head_dim` is no multiple of the block that llama.cpp needs.
        """
        if self.packing == "ggml" and head_dim % 32:
            raise UnsupportedError(
                f"llama.cpp's blocks hold 32 elements; a head of {head_dim} is no multiple of it.",
                remedy="Use a format with other groups (int8_per_token_head, int4_g32) for this model.",
            )

    def groups(self, head_dim: int) -> int:
        """Stored scales per (unit of tokens, head)."""
        if self.granularity == "per_channel":
            return head_dim
        if self.granularity == "per_token":
            return 1
        return -(-head_dim // self.group_size) if self.group_size else 0

    def payload_bytes(self, head_dim: int) -> int:
        """Bytes of the codes of one (token, head); a last incomplete byte is a whole one."""
        return -(-head_dim * self.info.bits // 8)

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of scales and zero points of one (unit of tokens, head)."""
        return self.groups(head_dim) * self.rule.stored * SCALE_SIZES.get(self.scale_dtype or "", 0)

    def unit_bytes(self, head_dim: int) -> int:
        """Bytes of one (unit of tokens, head): codes, scales and zero points."""
        return self.unit * self.payload_bytes(head_dim) + self.scale_bytes(head_dim)

    def token_bytes(self, head_dim: int) -> Fraction:
        """Bytes of one (token, head), a unit's scales shared evenly among its tokens."""
        return Fraction(self.unit_bytes(head_dim), self.unit)

    def constant_bytes(self, head_dim: int, kv_heads: int) -> int:
        """Bytes per sequence and layer that no token adds: a frozen fp32 scale, or an fp32 mean per channel."""
        return 4 * self.freezes_scale + (4 * head_dim * kv_heads if self.transform == "mean_shift" else 0)

    def bits_per_element(self, head_dim: int) -> float:
        """Stored bits per element, scales included."""
        return float(8 * self.token_bytes(head_dim) / head_dim)


Selector = int | str


class LayerOverride(BaseModel):
    """Other formats for some layers.

    Attributes:
        layers: Which: an index, a range "4-7" (both ends included), "first:2" or "last:2" (of the layers that store
            keys and values), or a kind: "full", "sliding", "mla".
        key: Format of keys there; None keeps the scheme's.
        value: Format of values there; None keeps the scheme's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[Selector, ...] = Field(min_length=1)
    key: TensorFormat | None = None
    value: TensorFormat | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.key is None and self.value is None:
            raise ValueError("an entry of layers names a key format, a value format or both")
        return self


class KVScheme(BaseModel):
    """A key format and a value format under one name, and where they apply. Identity is all but the name.

    Attributes:
        name: For people.
        key: Format of keys (of the latent, in MLA layers).
        value: Format of values.
        sink_tokens: First tokens of every sequence that stay BF16.
        residual_length: Last tokens of every sequence that stay BF16. A `per_channel` side fills a tail of up to this
            many tokens (at least one group), then encodes it as a whole, as KIVI does.
        skip_layers: Layers that stay BF16, selected as in `LayerOverride`.
        layers: Other formats for some layers; the last that names a layer counts.
        sliding: Whether sliding-window layers stay BF16 or take the formats too. They have no sinks and no residual.
        block_size: Tokens by which the cache allocates.
        scales: Calibrated scales, which formats of scale_rule `static` need and those of `fixed` take in place of their
            constant. "checkpoint" stands for those that the model's checkpoint carries, "none" for ignoring these; a
            plan has the numbers themselves.
        summary: One line for people.
        engines: What serving engines call it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    key: TensorFormat
    value: TensorFormat
    sink_tokens: int = Field(default=0, ge=0)
    residual_length: int = Field(default=0, ge=0)
    skip_layers: tuple[Selector, ...] = ()
    layers: tuple[LayerOverride, ...] = ()
    sliding: Literal["bf16", "quantized"] = "bf16"
    block_size: int = Field(default=256, ge=1)
    scales: StaticScales | Literal["checkpoint", "none"] | None = None
    summary: str = ""
    engines: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for side in self._formats():
            if self.residual_length % side.unit:
                raise ValueError(f"residual_length must be a multiple of the {side.unit} tokens of a per_channel group")
        if self.scales not in (None, "none") and not self.takes_scales:
            raise ValueError("scales go with formats whose scale_rule is static or fixed")
        return self

    def _formats(self) -> tuple[TensorFormat, ...]:
        overrides = (side for o in self.layers for side in (o.key, o.value) if side is not None)
        return (self.key, self.value, *overrides)

    @property
    def lossy(self) -> bool:
        """Whether any side loses anything against BF16 storage."""
        return any(side.lossy for side in self._formats())

    @property
    def append_invariant(self) -> bool:
        """Whether all sides are (see `TensorFormat.append_invariant`)."""
        return all(side.append_invariant for side in self._formats())

    @property
    def blind_to_later(self) -> bool:
        """Whether a token is stored the same whatever follows it: nothing is grouped over tokens or kept recent."""
        return self.residual_length == 0 and all(side.unit == 1 for side in self._formats())

    @property
    def needs_scales(self) -> bool:
        """Whether some side can't be stored without calibrated scales."""
        return any(side.scale_rule == "static" for side in self._formats())

    @property
    def takes_scales(self) -> bool:
        """Whether some side would use calibrated scales (see `TensorFormat.takes_scales`)."""
        return any(side.takes_scales for side in self._formats())

    def identity(self) -> dict[str, Any]:
        """What decides stored bytes; equal for two names of one scheme.

        Elements of other packages count with their tables, not by their names alone.
        """
        data = self.model_dump(mode="json", exclude={"name", "summary", "engines", "scales"}, exclude_defaults=True)
        if isinstance(self.scales, StaticScales):
            data["scales"] = self.scales.digest
        if foreign := {side.element: side.info.digest for side in self._formats() if side.info.foreign}:
            data["elements"] = foreign
        return data


SCHEME_GROUP = "kveval.schemes"


@cache
def _presets() -> dict[str, dict[str, Any]]:
    text = resources.files("kveval.formats").joinpath("presets.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text)["schemes"])


def scheme_names() -> tuple[str, ...]:
    """Names of the preset schemes in the order of the presets file, then those that other packages register."""
    return (*_presets(), *(name for name in plugin_names(SCHEME_GROUP) if name not in _presets()))


@cache
def _preset(name: str) -> KVScheme:
    if name in _presets():
        refuse_claims(SCHEME_GROUP, name)
        return build_scheme(name, _presets()[name])
    data = load_plugin(SCHEME_GROUP, name)
    if not isinstance(data, Mapping):
        raise ConfigError(f"the entry point {name} of {SCHEME_GROUP} is not a mapping as in presets.yaml.")
    try:
        return build_scheme(name, data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"the entry point {name} of {SCHEME_GROUP}: {': '.join([*map(str, first['loc']), first['msg']])}.",
            remedy="Mend or uninstall the package that registers it.",
        ) from error


def get_scheme(name: str, *, where: str = "") -> KVScheme:
    """The preset called `name`.

    Raises:
        UnknownNameError: with the nearest names; `where` (file and line) leads the message.
    """
    if name not in scheme_names():
        raise UnknownNameError("scheme", name, scheme_names(), where=where)
    return _preset(name)


def build_scheme(name: str, data: Mapping[str, Any], *, where: str = "") -> KVScheme:
    """A scheme from plain data, as in presets.yaml.

    `key` and `value` are formats, or names of presets whose side is taken; `both` stands for the same on both sides;
    `extends` names a preset whose keys are the defaults.
    """
    base: dict[str, Any] = {}
    if "extends" in data:
        base = get_scheme(data["extends"], where=where).model_dump(exclude={"name", "summary", "engines"})
    built = {**base, **_with_sides(data, where)}
    built["layers"] = [_with_sides(o, where) if isinstance(o, Mapping) else o for o in built.get("layers", ())]
    return KVScheme(name=name, **{k: v for k, v in built.items() if k != "extends"})


def _with_sides(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`data` with `both` spread over key and value, and names of presets replaced by that side of them."""
    spread = {"key": data["both"], "value": data["both"]} if "both" in data else {}
    sides = {**spread, **{role: data[role] for role in ("key", "value") if role in data}}
    built = {
        role: getattr(get_scheme(side, where=where), role) if isinstance(side, str) else side
        for role, side in sides.items()
    }
    return {**{k: v for k, v in data.items() if k != "both"}, **built}
