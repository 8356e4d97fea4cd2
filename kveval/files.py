"""Small files that are written whole and read with a remedy at hand."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kveval.errors import StoreError

__all__ = ["read_json", "read_versioned", "sha256", "temporary", "to_json", "unwritable", "write_atomic", "writing"]


T = TypeVar("T")


def read_json(file: Path, *, remedy: str) -> dict[str, Any]:
    """The object in a JSON file. Raises StoreError with the remedy if it is missing or not an object."""
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"Can't read {file}: {error}", remedy=remedy) from error
    if not isinstance(data, dict):
        raise StoreError(f"Can't read {file}: it is not a JSON object.", remedy=remedy)
    return data


def read_versioned(file: Path, build: Callable[[dict[str, Any]], T], *, version: int, remedy: str) -> T:
    """What `build` makes of the object in a JSON file that names its `schema_version`.

    Raises:
        StoreError: with the remedy, if the file can't be read, is of another schema version or lacks fields.
    """
    data = read_json(file, remedy=remedy)
    found = data.get("schema_version")
    if found != version:
        raise StoreError(f"{file} has schema version {found}; this kveval reads {version}.", remedy=remedy)
    try:
        return build(data)
    except (KeyError, TypeError) as error:
        raise StoreError(f"{file} doesn't hold the fields of this schema: {error}", remedy=remedy) from error


def to_json(data: Mapping[str, Any]) -> bytes:
    """Indented JSON with sorted keys and a last newline. Raises ValueError on NaN and infinity."""
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def sha256(data: bytes) -> str:
    """The checksum in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def temporary(file: Path) -> Path:
    """Where a file is written before it takes its place. The name is fixed: a folder has one writer."""
    return file.with_name(f".{file.name}.tmp")


def write_atomic(file: Path, data: bytes) -> None:
    """Replaces a file as a whole: after a crash the old or the new one is there, never a part."""
    with open(temporary(file), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary(file), file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns a disk's refusal into a StoreError with a remedy."""
    try:
        yield
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(path: Path, error: OSError) -> StoreError:
    """What to tell a user whose disk refused a write."""
    return StoreError(
        f"Can't write to {path}: {error.strerror}.",
        remedy="Check the folder's permissions and the free space, or choose another place.",
    )
