"""Calibrated scales of static formats: one number per layer, or one per layer and KV head."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kveval.errors import ConfigError, first_problem
from kveval.identity import digest

__all__ = ["StaticScales"]

LayerScales = tuple[float, ...]


class StaticScales(BaseModel):
    """Scales of keys and values by layer index: a stored code times its scale is the value.

    Attributes:
        source: Where they come from, for people: a file's name, "checkpoint".
        key: Layer index -> one scale, or one per KV head. Empty where only values take scales.
        value: The same for values.
        element: Element type that they bring the largest magnitudes to the end of; None: not known.
        weights_digest: Of the model that they were calibrated on (`kveval.models.ModelInfo`); None: not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    key: dict[int, LayerScales] = {}
    value: dict[int, LayerScales] = {}
    element: str | None = None
    weights_digest: str | None = None

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        if not self.key and not self.value:
            raise ValueError("there is no scale of a key or a value")
        for role, layers in (("key", self.key), ("value", self.value)):
            for index, numbers in layers.items():
                if not numbers or not all(math.isfinite(n) and n > 0 for n in numbers):
                    raise ValueError(f"the {role} scales of layer {index} must be finite and above 0, not {numbers}")
        return self

    @property
    def digest(self) -> str:
        """Identity of the numbers; two sources of the same numbers are the same scales."""
        return digest("scales", self.model_dump(mode="json", include={"key", "value"}))

    @classmethod
    def read(cls, path: str | Path) -> StaticScales:
        """Read a JSON file as `kveval calibrate` writes it: {"key": {"0": [..]}, "value": {..}, ...}.

        Of the other keys only `element` and `weights_digest` count; both may be missing.

        Raises:
            ConfigError: naming the file and what is wrong with it.
        """
        path = Path(path)
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"can't read scales from {path}: {error}", remedy="`kveval calibrate` writes such a file."
            ) from error
        if not isinstance(data, Mapping) or not {"key", "value"} <= data.keys():
            raise ConfigError(
                f"{path} has no `key` and `value` scales.", remedy="`kveval calibrate` writes such a file."
            )
        known = {name: data[name] for name in ("key", "value", "element", "weights_digest") if name in data}
        try:
            return cls(source=path.name, **known)
        except ValidationError as error:
            raise ConfigError(
                f"{path}: {first_problem(error)}.",
                remedy="Scales are lists of positive numbers, by layer index.",
            ) from error
