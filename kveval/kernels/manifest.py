"""kernels/manifest.yaml: which kernels are compiled as a check, for which architectures, within which budget."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kveval.content import content_dir
from kveval.errors import ConfigError
from kveval.kernels.compiler import Variant
from kveval.kernels.cubin import Resources
from kveval.yaml_source import Located, read_yaml

__all__ = ["MANIFEST", "ManifestEntry", "read_manifest"]

MANIFEST = "manifest.yaml"

Macro = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
Architecture = Annotated[str, Field(pattern=r"^sm_[0-9]+[af]?$")]


class ManifestEntry(BaseModel):
    """One kernel with one set of macros.

    Attributes:
        kernel: what it is, in words; unique.
        source: file in kernels/.
        entry: name of the function.
        defines: macros and their values.
        fast_math: see `Variant`.
        archs: architectures that it must compile for.
        max_registers: that a thread may take. The stack must be empty: nothing may be spilled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kernel: str = Field(min_length=1)
    source: str = Field(pattern=r"^[a-z0-9_]+\.cu$")
    entry: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    defines: Mapping[Macro, int] = Field(default_factory=dict)
    fast_math: bool = False
    archs: list[Architecture] = Field(min_length=1)
    max_registers: int = Field(ge=1, le=255)

    @property
    def variant(self) -> Variant:
        """What the compiler takes."""
        return Variant(self.source, self.entry, tuple(self.defines.items()), self.fast_math)

    def over_budget(self, found: Resources) -> str:
        """What breaks the budget, in words; '' if nothing does."""
        problems = []
        if found.registers > self.max_registers:
            problems.append(f"{found.registers} registers, {self.max_registers} are allowed")
        if found.stack_bytes is None:
            problems.append("a stack without bound")
        elif found.stack_bytes:
            problems.append(f"{found.stack_bytes} bytes of stack, where spilled registers go")
        return "; ".join(problems)


_ENTRIES = TypeAdapter(list[ManifestEntry])


def read_manifest(folder: Path | None = None) -> tuple[ManifestEntry, ...]:
    """The entries of kernels/manifest.yaml, or of another folder's.

    Raises:
        ConfigError: the file is missing or wrong, or two entries have the same name or compile the same thing.
    """
    located = read_yaml((content_dir("kernels") if folder is None else folder) / MANIFEST)
    try:
        entries = tuple(_ENTRIES.validate_python(located.data))
    except ValidationError as error:
        first = error.errors()[0]
        raise _wrong(located, first["loc"], first["msg"]) from error
    seen: dict[Any, str] = {}
    for i, entry in enumerate(entries):
        for what in (entry.kernel, entry.variant):
            if what in seen:
                raise _wrong(located, (i,), f"{entry.kernel!r} repeats {seen[what]!r}")
            seen[what] = entry.kernel
    return entries


def _wrong(located: Located, path: tuple[int | str, ...], message: str) -> ConfigError:
    key = re.sub(r"^[0-9]+\.?", "", ".".join(map(str, path)))
    return ConfigError(
        f"{located.where(path)}: {key + ': ' if key else ''}{message}.",
        remedy="kveval/kernels/manifest.py describes an entry.",
    )
