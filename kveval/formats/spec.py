"""What a storage format is, as data: element, granularity and scale of keys and of values.

Nothing here imports torch: configs, capacity and plans read formats without it. The arithmetic that
turns tensors into bytes and back is in `kveval.formats.codec`.

Sizes are in bytes. D is the head size, H the number of KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kveval.errors import UnknownNameError

__all__ = ["ELEMENTS", "SCALE_SIZES", "Element", "KVScheme", "TensorFormat", "get_scheme", "scheme_names"]


@dataclass(frozen=True)
class Element:
    """A number format of one stored element. `max` is its largest finite magnitude."""

    name: str
    bits: int
    max: float
    kind: Literal["wide", "float", "int"]


ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        Element("bf16", 16, 3.3895313892515355e38, "wide"),
        Element("e4m3", 8, 448.0, "float"),
        Element("e5m2", 8, 57344.0, "float"),
        Element("e2m1", 4, 6.0, "float"),
        Element("int8", 8, 127.0, "int"),
        Element("int4", 4, 7.0, "int"),
        Element("int2", 2, 1.0, "int"),
    )
}
"""Element types. The integer `max` is that of the symmetric code; asymmetric codes use all 2^bits levels."""

SCALE_SIZES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "e4m3": 1, "e8m0": 1}
"""Bytes of one stored scale (or zero point), by type."""

Granularity = Literal["none", "per_tensor", "per_token", "per_group"]
ScaleRule = Literal["none", "fixed", "amax", "minmax", "first_write_amax"]


class TensorFormat(BaseModel):
    """How one role (keys or values) is stored. All data; two equal formats store equal bytes.

    Attributes:
        element: Name in `ELEMENTS`.
        granularity: What shares one scale. `per_token` is one (token, head) vector of D elements,
            `per_group` is `group_size` adjacent elements of it (the last group may be short),
            `per_tensor` is everything the layer stores for this role and sequence.
        group_size: Elements per scale, for `per_group`.
        scale_dtype: Type in which the scale is stored.
        scale_rule: `fixed` (the constant `fixed_scale`, not stored), `amax` (largest magnitude over
            the element's `max`; for e8m0 scales the OCP floor rule), `minmax` (asymmetric: step
            (max-min)/(2^bits-1) and the minimum as zero point), `first_write_amax` (amax rule over
            the first write of the sequence, then frozen).
        fixed_scale: The constant of `fixed`.
        global_divisor: A second-level fp32 scale per sequence, amax of the first write divided by
            this, then frozen (NVFP4: 2688 = 448 * 6). None: no second level.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    element: str
    granularity: Granularity = "none"
    group_size: int | None = Field(default=None, ge=2)
    scale_dtype: str | None = None
    scale_rule: ScaleRule = "none"
    fixed_scale: float = Field(default=1.0, gt=0)
    global_divisor: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.element not in ELEMENTS:
            raise UnknownNameError("element type", self.element, ELEMENTS)
        if self.scale_dtype is not None and self.scale_dtype not in SCALE_SIZES:
            raise UnknownNameError("scale type", self.scale_dtype, SCALE_SIZES)
        if (self.granularity == "per_group") != (self.group_size is not None):
            raise ValueError("group_size goes with granularity per_group, and only with it")
        expected = {
            "none": ("none",),
            "per_tensor": ("fixed", "first_write_amax"),
            "per_token": ("amax", "minmax"),
            "per_group": ("amax", "minmax"),
        }[self.granularity]
        if self.scale_rule not in expected:
            raise ValueError(f"granularity {self.granularity} takes scale_rule {' or '.join(expected)}")
        if (self.scale_rule in ("amax", "minmax")) != (self.scale_dtype is not None):
            raise ValueError("scale_dtype goes with scale_rule amax or minmax, and only with them")
        if (self.info.kind == "wide") != (self.granularity == "none"):
            raise ValueError("bf16 elements take no scale; every other element needs one")
        if self.scale_rule == "minmax" and self.info.kind != "int":
            raise ValueError("scale_rule minmax needs an integer element")
        if self.scale_rule == "minmax" and self.scale_dtype in ("e4m3", "e8m0"):
            raise ValueError("a zero point needs the sign and the range of fp32, bf16 or fp16")
        if self.global_divisor is not None and self.scale_dtype != "e4m3":
            raise ValueError("global_divisor goes with e4m3 scales")
        return self

    @property
    def info(self) -> Element:
        """The element type."""
        return ELEMENTS[self.element]

    @property
    def lossy(self) -> bool:
        """Whether a BF16 tensor loses anything when stored."""
        return self.info.kind != "wide"

    @property
    def append_invariant(self) -> bool:
        """Whether the bytes of a token are the same however the tokens before it were split into writes."""
        return self.global_divisor is None and self.scale_rule != "first_write_amax"

    def groups(self, head_dim: int) -> int:
        """Stored scales per (token, head)."""
        if self.granularity == "per_token":
            return 1
        return -(-head_dim // self.group_size) if self.group_size else 0

    def payload_bytes(self, head_dim: int) -> int:
        """Bytes of the codes of one (token, head); a last incomplete byte is a whole one."""
        return -(-head_dim * self.info.bits // 8)

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of scales and zero points of one (token, head)."""
        if self.scale_dtype is None:
            return 0
        per_group = SCALE_SIZES[self.scale_dtype] * (2 if self.scale_rule == "minmax" else 1)
        return self.groups(head_dim) * per_group

    def token_bytes(self, head_dim: int) -> int:
        """Bytes of one (token, head): codes, scales and zero points."""
        return self.payload_bytes(head_dim) + self.scale_bytes(head_dim)

    @property
    def constant_bytes(self) -> int:
        """Bytes per sequence and layer that do not grow with tokens (a frozen fp32 scale)."""
        return 0 if self.append_invariant else 4

    def bits_per_element(self, head_dim: int) -> float:
        """Stored bits per element, scales included."""
        return 8 * self.token_bytes(head_dim) / head_dim


class KVScheme(BaseModel):
    """A key format and a value format under one name. The name is for people; identity is the formats."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    key: TensorFormat
    value: TensorFormat
    summary: str = ""
    engines: tuple[str, ...] = ()

    @property
    def lossy(self) -> bool:
        """Whether either side loses anything against BF16 storage."""
        return self.key.lossy or self.value.lossy

    @property
    def append_invariant(self) -> bool:
        """Whether both sides are (see `TensorFormat.append_invariant`)."""
        return self.key.append_invariant and self.value.append_invariant

    def identity(self) -> dict[str, Any]:
        """What decides stored bytes; equal for two names of one format."""
        return {"key": self.key.model_dump(), "value": self.value.model_dump()}

    def layer_bytes_per_token(self, *, head_dim_k: int, head_dim_v: int, kv_heads: int) -> int:
        """Bytes that one token adds to one layer: H * (key bytes + value bytes)."""
        return kv_heads * (self.key.token_bytes(head_dim_k) + self.value.token_bytes(head_dim_v))

    def layer_constant_bytes(self) -> int:
        """Bytes per sequence and layer that do not grow with tokens."""
        return self.key.constant_bytes + self.value.constant_bytes


@cache
def _presets() -> dict[str, dict[str, Any]]:
    text = resources.files("kveval.formats").joinpath("presets.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text)["schemes"])


def scheme_names() -> tuple[str, ...]:
    """Names of the preset schemes, in the order of the presets file."""
    return tuple(_presets())


@cache
def _preset(name: str) -> KVScheme:
    return build_scheme(name, _presets()[name])


def get_scheme(name: str, *, where: str = "") -> KVScheme:
    """The preset called `name`.

    Raises:
        UnknownNameError: with the nearest names; `where` (file and line) leads the message.
    """
    if name not in _presets():
        raise UnknownNameError("scheme", name, _presets(), where=where)
    return _preset(name)


def build_scheme(name: str, data: dict[str, Any], *, where: str = "") -> KVScheme:
    """A scheme from plain data. `key` and `value` are formats, or names of presets whose side is taken.

    `both` stands for the same format on both sides.
    """
    sides = {role: data.get(role, data.get("both")) for role in ("key", "value")}
    built = {
        role: getattr(get_scheme(side, where=where), role) if isinstance(side, str) else side
        for role, side in sides.items()
    }
    rest = {k: v for k, v in data.items() if k not in ("key", "value", "both")}
    return KVScheme(name=name, **built, **rest)
