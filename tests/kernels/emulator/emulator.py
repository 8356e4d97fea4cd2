"""Runs CUDA kernels on the CPU: compiled by a C++ compiler against `emulator.h`, launched from Python."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kveval.kernels.launcher import Variant

__all__ = ["KERNELS", "EmulatorError", "EmulatorLauncher", "cpp_compiler"]

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kernels"

# Multiplications and additions stay apart, as they are written. Alignment, shifts and array indices are checked: a GPU
# faults where a CPU does not. Strict aliasing is off, because kernels read bytes as words all the time. The C library's
# fortified longjmp would not jump from fiber to fiber.
FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-Werror=uninitialized"),
    "-fsanitize=alignment,shift-exponent,bounds",
]
MAX_THREADS = 1024
MAX_PARAMETER_BYTES = 4096
# Dynamic shared memory that a block can have, by compute capability; 8.6 and its like stand for all that is not listed.
SHARED_BYTES = {80: 163 * 1024, 87: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}
SHARED_BYTES_ELSEWHERE = 99 * 1024


class EmulatorError(Exception):
    """A kernel did what a GPU would answer with a fault, a hang or undefined behaviour, or it does not compile."""


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("error", ctypes.c_char_p),
        ("error_size", ctypes.c_uint64),
    ]


def cpp_compiler() -> str | None:
    """The C++ compiler's path: `$CXX`, or the first of g++, clang++ and c++ that is there."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++", "c++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


class EmulatorLauncher:
    """A `Launcher` whose device is the CPU; parameter structs hold addresses of CPU tensors.

    Args:
        build: folder for compiled kernels, which are used again where sources and options are the same.
        sources: folder of the `.cu` files. `kernels/` is searched for included files as well.
        seed: the order in which blocks, warps and lanes take turns; 0 is their natural order.
        multiprocessors: what `multiprocessors()` answers.
        architecture: compute capability times ten; decides `__CUDA_ARCH__`, which functions exist and how much shared
            memory a block can have.
    """

    def __init__(
        self,
        build: Path,
        *,
        sources: Path = KERNELS,
        seed: int = 0,
        multiprocessors: int = 4,
        architecture: int = 90,
    ) -> None:
        compiler = cpp_compiler()
        if compiler is None:
            raise EmulatorError("no C++ compiler was found (g++, clang++ or $CXX)")
        self.build = build
        self.sources = sources
        self.seed = seed
        self.architecture = architecture
        self.launches: list[Variant] = []
        self._multiprocessors = multiprocessors
        self._compiler = compiler
        self._version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        self._loaded: dict[Variant, ctypes.CDLL] = {}
        self._lock = threading.Lock()

    def multiprocessors(self, device: torch.device) -> int:
        """The number of multiprocessors that a kernel's grid is chosen for."""
        return self._multiprocessors

    def shared_limit(self, device: torch.device) -> int:
        """Most bytes of shared memory that a block may have."""
        return SHARED_BYTES.get(self.architecture, SHARED_BYTES_ELSEWHERE)

    def launch(
        self,
        variant: Variant,
        *,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        """Runs the kernel to its end.

        Raises:
            EmulatorError: the kernel does not compile, its launch is refused as a GPU would refuse it, or it failed.
        """
        limit = self.shared_limit(device)
        if device.type != "cpu":
            raise EmulatorError(f"the emulator runs on CPU tensors, not on {device}")
        if not (0 < block <= MAX_THREADS and block % 32 == 0):
            raise EmulatorError(f"{variant.entry}: a block of {block} threads (a multiple of 32 up to {MAX_THREADS})")
        if not 0 <= shared_bytes <= limit:
            raise EmulatorError(f"{variant.entry}: {shared_bytes} bytes of shared memory; there are {limit}")
        if not (0 < grid[0] < 2**31 and 0 < grid[1] < 2**16 and 0 < grid[2] < 2**16):
            raise EmulatorError(f"{variant.entry}: a grid of {grid}")
        if ctypes.sizeof(params) > MAX_PARAMETER_BYTES:
            raise EmulatorError(f"{variant.entry}: {ctypes.sizeof(params)} bytes of parameters")
        message = ctypes.create_string_buffer(2048)
        launch = _Launch(
            (ctypes.c_uint32 * 3)(*grid), block, shared_bytes, self.seed, ctypes.addressof(message), len(message)
        )
        # One at a time: a library has one machine, whose fibers are not the process's threads.
        with self._lock:
            library = self._loaded.get(variant)
            if library is None:
                library = self._loaded[variant] = ctypes.CDLL(str(self.compile(variant)))
            self.launches.append(variant)
            failed = library.emulate(ctypes.byref(launch), ctypes.byref(params), ctypes.c_uint64(ctypes.sizeof(params)))
        if failed:
            raise EmulatorError(f"{variant.source}, {variant.entry}: {message.value.decode()}")

    def compile(self, variant: Variant) -> Path:
        """The shared library of that kernel, compiled if it is not there yet.

        Raises:
            EmulatorError: with the compiler's messages.
        """
        if not re.fullmatch(r"\w+", variant.entry):
            raise EmulatorError(f"{variant.entry!r} is no kernel's name")
        main = (
            f'#include "{variant.source}"\n'
            'extern "C" __attribute__((visibility("default")))\n'
            "int emulate(const emulator::Launch* launch, const void* params, u64 params_size) {\n"
            f"  return emulator::run({variant.entry}, *launch, params, params_size);\n}}\n"
        )
        defines = [f"-D__CUDA_ARCH__={self.architecture * 10}", *(f"-D{name}={n}" for name, n in variant.defines)]
        library = self.build / f"{variant.entry}-{self._digest(main, defines)}.so"
        if library.exists():
            library.touch()
            return library
        self.build.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.build) as folder:
            source, compiled, linked = (Path(folder, name) for name in ("main.cpp", "main.o", "main.so"))
            source.write_text(main)
            includes = [f"-I{path}" for path in (self.sources, KERNELS, HERE)]
            # Linked apart and without the sanitizer's library: emulator.h has what its checks call.
            self._run([*FLAGS, *defines, *includes, "-c", str(source), "-o", str(compiled)], variant)
            self._run(["-shared", str(compiled), "-o", str(linked)], variant)
            linked.replace(library)
        return library

    def remove_stale(self, days: float = 7) -> None:
        """Removes compiled kernels that nobody used for so long; changed sources leave theirs behind."""
        for library in self.build.glob("*.so"):
            if library.stat().st_mtime < time.time() - days * 86400:
                library.unlink(missing_ok=True)

    def _digest(self, main: str, defines: list[str]) -> str:
        digest = hashlib.sha256("\0".join([self._version, main, *FLAGS, *defines]).encode())
        for folder in sorted({self.sources, KERNELS, HERE}):
            for path in sorted(folder.iterdir()):
                if path.suffix in {".cu", ".cuh", ".h"}:
                    digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()[:24]

    def _run(self, arguments: list[str], variant: Variant) -> None:
        done = subprocess.run([self._compiler, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulatorError(f"{variant.source}, {variant.entry} does not compile:\n{done.stderr}")
