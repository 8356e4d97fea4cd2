"""How each scheme of a run was stored, read and multiplied on its machine: the note beside the records. No torch.

`kveval.native_path` finds it out, `kveval.report.native` lays it out; neither needs the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kveval.files import read_versioned

__all__ = ["NOTE", "LayerPath", "NativePaths", "RolePath", "SchemePath", "Widening", "read_native_paths"]

NOTE = "native_path.json"
"""Name of the note in a run's folder."""

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RolePath:
    """The way of keys (or values) into a layer's cache and out of it.

    Attributes:
        element: What a code is.
        stored: Element, what shares a scale, and the scale's type.
        appended: What encodes new tokens: "kernel" or "torch".
        read: How a code becomes a number that can be multiplied.
        scaled: Where scales are multiplied in; "" where none is stored.
        products: What multiplies, and what sums.
        converts, multiplies: Whether this GPU converts the element in one instruction, and whether its tensor cores
            take the codes as they are, whatever the kernel does; "" on a CPU.
    """

    element: str
    stored: str
    appended: str
    read: str
    scaled: str
    products: str
    converts: str
    multiplies: str


@dataclass(frozen=True)
class LayerPath:
    """Layers that are stored and attended to alike.

    Attributes:
        layers: Which, in words; "" for all.
        keys, values: Their ways.
        attention: What attends.
        reason: Why that is not a kernel, on a GPU; "" where it is.
    """

    layers: str
    keys: RolePath
    values: RolePath
    attention: str
    reason: str


@dataclass(frozen=True)
class Widening:
    """How much of the decode kernel's time is not loading, for one layer.

    Attributes:
        share: 1 - loads_us / us.
        us: Microseconds of the kernel.
        loads_us: Of the kernel without its arithmetic: all bytes are loaded, nothing is widened or multiplied.
        length, batch: Tokens of a sequence, and sequences.
        query_heads, kv_heads, head_dim: Of the layer.
    """

    share: float
    us: float
    loads_us: float
    length: int
    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class SchemePath:
    """A scheme's layers; `widening` is None where it was not measured, and `not_widened` says why."""

    scheme: str
    layers: tuple[LayerPath, ...]
    widening: Widening | None
    not_widened: str


@dataclass(frozen=True)
class NativePaths:
    """How schemes run on one device.

    Attributes:
        device: Name of the GPU, or "cpu".
        generation: Of the GPU, as in `kveval.formats.hardware`; None on a CPU or for one that is not known.
        dtype: What the model computes in.
        kernel_hash: Of the kernels' sources.
        schemes: In the order asked for.
        problem: Why there are none.
    """

    device: str
    generation: str | None
    dtype: str
    kernel_hash: str
    schemes: tuple[SchemePath, ...]
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the note."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, note: Mapping[str, Any]) -> NativePaths:
        """The inverse of `to_dict`."""
        fields = {key: value for key, value in note.items() if key != "schema_version"}
        return cls(**{**fields, "schemes": tuple(_scheme(row) for row in fields["schemes"])})


def _scheme(row: Mapping[str, Any]) -> SchemePath:
    widening = None if row["widening"] is None else Widening(**row["widening"])
    return SchemePath(row["scheme"], tuple(_layer(of) for of in row["layers"]), widening, row["not_widened"])


def _layer(row: Mapping[str, Any]) -> LayerPath:
    return LayerPath(row["layers"], RolePath(**row["keys"]), RolePath(**row["values"]), row["attention"], row["reason"])


def read_native_paths(path: str | Path) -> NativePaths | None:
    """The note of the run in the folder `path`; None for a run that has none.

    Raises:
        StoreError: the note is damaged or of another schema version.
    """
    file = Path(path) / NOTE
    if not file.exists():
        return None
    remedy = f"Delete {NOTE}: the report is then made without its section."
    return read_versioned(file, NativePaths.from_dict, version=SCHEMA_VERSION, remedy=remedy)
