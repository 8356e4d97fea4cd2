"""The cache of models: where it is, what counts as finished in it, and digests of files.

    <cache>/models/<name>/            a converted model: bfloat16 safetensors, tokenizer, kveval-model.json
    <cache>/models/gguf-<sha256>/     the same, made from a user's GGUF file
    <cache>/models/<name>.work/       only while fetching, and after a fetch that failed
    <cache>/models/<name>.lock        held while fetching
    <cache>/digests/                  sha256 of weight files, so that large ones are hashed once

The cache is `platformdirs.user_cache_dir("kveval")`, or the folder that KVEVAL_CACHE names. The manifest
kveval-model.json is written last: a folder without it does not exist as far as kveval is concerned, so a
download or a conversion that was cut short never counts as present.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import platformdirs

from kveval.errors import ModelError
from kveval.identity import digest

__all__ = [
    "MANIFEST",
    "MANIFEST_VERSION",
    "cache_root",
    "cached_sha256",
    "file_sha256",
    "gguf_folder",
    "models_dir",
    "read_manifest",
    "weight_files",
    "weight_names",
]

_log = logging.getLogger(__name__)

MANIFEST = "kveval-model.json"
MANIFEST_VERSION = 1


def cache_root() -> Path:
    """Where kveval keeps what it can make again: KVEVAL_CACHE, or the platform's user cache folder."""
    named = os.environ.get("KVEVAL_CACHE")
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("kveval"))


def models_dir(cache_dir: Path | None = None) -> Path:
    """The folder that holds converted models, under `cache_dir` or the usual cache."""
    return (cache_dir or cache_root()) / "models"


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def cached_sha256(path: Path) -> str:
    """sha256 of a file, remembered in the cache under its path, size and time of change."""
    status = path.stat()
    key = digest("file", [str(path.resolve()), status.st_size, status.st_mtime_ns], length=32)
    entry = cache_root() / "digests" / key
    if entry.is_file():
        return entry.read_text(encoding="ascii")
    sha256 = file_sha256(path)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = entry.with_name(f"{key}.{os.getpid()}")
        partial.write_text(sha256, encoding="ascii")
        partial.replace(entry)
    except OSError as error:  # costs time, not truth: the digest is computed again next time
        _log.warning("can't remember the digest of %s: %s", path, error)
    return sha256


def weight_names(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors files that transformers loads from a folder, sorted; from its index if any."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ("model.safetensors",)
    return tuple(sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that transformers loads from a folder, sorted by name.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    paths = tuple(folder / name for name in weight_names(folder))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(
            f"{folder} has no {', '.join(missing)}.",
            remedy="Save the model there with `model.save_pretrained(folder)`; kveval reads safetensors.",
        )
    return paths


def gguf_folder(sha256: str) -> Path:
    """Where the converted form of a user's GGUF file with this sha256 lies, or would lie."""
    return models_dir() / f"gguf-{sha256[:16]}"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a converted model, or None if the folder holds no finished one.

    A weight file of the wrong size makes the folder unfinished too; contents are checked by `fetch`.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:  # torn by a power cut: as good as absent
        return None
    if manifest.get("manifest_version") != MANIFEST_VERSION:
        return None
    for name, entry in manifest["weights"].items():
        weights = folder / name
        if not weights.is_file() or weights.stat().st_size != entry["bytes"]:
            return None
    return manifest
