"""CUDA sources to machine code, when they are needed: NVRTC compiles, the disk keeps.

Neither a GPU nor a driver nor the CUDA toolkit takes part, only the library NVRTC, which every CUDA build of torch
brings. The sources need no header but their own: they are handed to NVRTC from memory, so what is hashed is what is
compiled.

    <cache>/cubins/<source>-<entry>-<architecture>-<key>.cubin

`key` covers the source, every header, the options, the architecture and NVRTC's version. Behind the ELF stand the
compiler's log and a checksum: a file that is cut short or altered is compiled anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kveval.content import content_dir
from kveval.errors import KernelError, UnsupportedError
from kveval.files import sha256
from kveval.identity import digest
from kveval.kernels.cubin import resources
from kveval.model_cache import cache_root

__all__ = [
    "INSTALL",
    "OLDEST_CAPABILITY",
    "Binary",
    "Variant",
    "architecture",
    "check_architecture",
    "compile_kernel",
    "nvrtc_version",
    "sources_digest",
]

_log = logging.getLogger(__name__)

INSTALL = "Run `pip install 'kveval[cuda]'`."

OLDEST_CAPABILITY = (8, 0)
"""Before it there are neither asynchronous copies nor bfloat16 products."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel, compiled for one combination of macros.

    Attributes:
        source: file name in kernels/, "append.cu".
        entry: name of the `extern "C" __global__` function.
        defines: macros and their values.
        fast_math: fused and approximate arithmetic. Without it every operation is IEEE's, rounded on its own, as in
            torch.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()
    fast_math: bool = False

    def __str__(self) -> str:
        macros = "".join(f" -D{name}={value}" for name, value in self.defines)
        return f"{self.entry} of {self.source}{macros}"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        cubin: the ELF that the driver loads.
        log: the compiler's warnings, '' where it has none.
        seconds: that it took to compile; None if it came from the disk.
    """

    cubin: bytes
    log: str
    seconds: float | None


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of a GPU's architecture, from its compute capability.

    Machine code is made for exactly this one. Hopper's is sm_90a, which has its warp-group and bulk-copy instructions.

    Raises:
        UnsupportedError: the GPU is older than the kernels can use.
    """
    if capability < OLDEST_CAPABILITY:
        raise UnsupportedError(
            f"the kernels need compute capability 8.0 (Ampere) or newer; this GPU has {capability[0]}.{capability[1]}.",
            remedy="Use a newer GPU, or run on the CPU.",
        )
    return "sm_90a" if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC at hand.

    Raises:
        UnsupportedError: NVRTC or the package cuda-bindings, through which it is called, is not installed.
    """
    return _load_nvrtc()[1]


def check_architecture(arch: str) -> None:
    """Refuses an architecture that the NVRTC at hand does not know.

    Raises:
        UnsupportedError: it does not, or there is no NVRTC.
    """
    nvrtc, version = _load_nvrtc()
    error, known = nvrtc.nvrtcGetSupportedArchs()
    _check(nvrtc, error, "asking NVRTC for its architectures")
    if int(re.sub(r"\D", "", arch)) not in known:
        raise UnsupportedError(
            f"NVRTC {version[0]}.{version[1]} can't compile for {arch}.",
            remedy="Install a torch for a newer CUDA; it brings a newer NVRTC.",
        )


def sources_digest(*, folder: Path | None = None) -> str:
    """Hex sha256 over all kernel sources, *.cu and *.cuh, by name and content: what "the kernels" of a result were."""
    return digest("kernels", {name: sha256(text) for name, text in _read(folder, "*.cu", "*.cuh").items()}, length=64)


def compile_kernel(variant: Variant, arch: str, *, folder: Path | None = None) -> Binary:
    """The machine code of a kernel for an architecture such as "sm_90a", from the disk if it was compiled before.

    Args:
        variant: what to compile.
        arch: name of the architecture, see `architecture`.
        folder: where the sources lie, if not in kveval's kernels/.

    Raises:
        UnsupportedError: no NVRTC, or one that does not know the architecture.
        KernelError: the source is missing, does not compile, or has no such entry.
    """
    headers = _read(folder, "*.cuh")
    source = _read(folder, variant.source).get(variant.source)
    if source is None:
        raise KernelError(
            f"there is no kernel source {variant.source}.", remedy="Install kveval again, or restore the file with git."
        )
    options = _options(variant, arch)
    version = nvrtc_version()
    hashes = {name: sha256(text) for name, text in {variant.source: source, **headers}.items()}
    key = digest("cubin", [hashes, options, version], length=32)
    file = cache_root() / "cubins" / f"{Path(variant.source).stem}-{variant.entry}-{arch}-{key}.cubin"
    kept = _load(file)
    if kept is not None:
        return kept
    check_architecture(arch)
    binary = _compile(variant, arch, source, headers, options)
    if variant.entry not in resources(binary.cubin):
        raise KernelError(
            f"{variant.source} has no kernel {variant.entry!r}.", remedy='Declare it extern "C" __global__.'
        )
    _store(file, binary)
    return binary


def _options(variant: Variant, arch: str) -> list[str]:
    arithmetic = ["--use_fast_math"] if variant.fast_math else ["--fmad=false"]
    macros = [f"-D{name}={value}" for name, value in variant.defines]
    # Without --no-source-include a header that is missing would be taken from the working directory.
    return [f"--gpu-architecture={arch}", "-std=c++17", "--no-source-include", *arithmetic, *macros]


def _read(folder: Path | None, *patterns: str) -> dict[str, bytes]:
    """Files by name, sorted."""
    root = content_dir("kernels") if folder is None else folder
    return {path.name: path.read_bytes() for path in sorted(p for glob in patterns for p in root.glob(glob))}


def _compile(variant: Variant, arch: str, source: bytes, headers: dict[str, bytes], options: list[str]) -> Binary:
    nvrtc, version = _load_nvrtc()
    start = time.perf_counter()
    names = [name.encode() for name in headers]
    error, program = nvrtc.nvrtcCreateProgram(
        source, variant.source.encode(), len(names), list(headers.values()), names
    )
    _check(nvrtc, error, f"handing {variant.source} to NVRTC")
    try:
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _bytes(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if failed:
            raise KernelError(
                f"{variant} does not compile for {arch} with NVRTC {version[0]}.{version[1]}: {failed.name}\n{log}",
                remedy="Try the NVRTC of another CUDA release (each torch brings one), and report these lines.",
            )
        cubin = _bytes(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    seconds = time.perf_counter() - start
    _log.info("compiled %s for %s in %.1f s", variant, arch, seconds)
    return Binary(cubin, log, seconds)


def _bytes(nvrtc: Any, program: Any, what: str) -> bytes:
    """A program's log or machine code."""
    error, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, error, f"asking NVRTC for the size of {what}")
    buffer = bytearray(size)
    (error,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, error, f"asking NVRTC for {what}")
    return bytes(buffer)


def _check(nvrtc: Any, error: Any, doing: str) -> None:
    if error:
        raise KernelError(
            f"{doing} failed: {error.name}.", remedy="Install the NVRTC that belongs to this torch again."
        )


@cache
def _load_nvrtc() -> tuple[Any, tuple[int, int]]:
    try:
        from cuda.bindings import nvrtc
    except ImportError as reason:
        raise UnsupportedError(f"the package cuda-bindings can't be imported ({reason}).", remedy=INSTALL) from reason
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as reason:  # cuda-bindings looks for the library at its first use
        raise UnsupportedError(f"NVRTC is not found ({reason}).", remedy=INSTALL) from reason
    _check(nvrtc, error, "asking NVRTC for its version")
    return nvrtc, (major, minor)


def _load(file: Path) -> Binary | None:
    """What `_store` wrote, or None if it is not there whole."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:  # costs time, not truth
        _log.warning("can't read the compiled kernel %s: %s", file, error)
        return None
    body, checksum = data[:-32], data[-32:]
    if hashlib.sha256(body).digest() != checksum:
        _log.warning("the compiled kernel %s is damaged and is compiled again", file)
        return None
    end = len(body) - _LENGTH.size
    start = end - _LENGTH.unpack_from(body, end)[0]
    return Binary(body[:start], body[start:end].decode(), None)


def _store(file: Path, binary: Binary) -> None:
    """Writes ELF, log, length of the log and sha256 of all that, as one file; others may write the same at once."""
    log = binary.log.encode()
    body = binary.cubin + log + _LENGTH.pack(len(log))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with open(handle, "wb") as stream:
                stream.write(body + hashlib.sha256(body).digest())
            os.replace(partial, file)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:  # costs time, not truth: it is compiled again next time
        _log.warning("can't keep the compiled kernel %s: %s", file, error)
