"""Launches kernels: compiled on first use, loaded once per device, put on torch's current stream.

A kernel takes one argument, a plain struct by value, whose Python side is a `ctypes.Structure`. The launch goes
straight to the driver (`cuLaunchKernel`), in the context that torch uses, and never waits for the GPU.

CUDA graphs: a launch is captured like any other. Compiling needs no GPU, and while a kernel is loaded the calling
thread's capture mode is relaxed, so a kernel may even be used for the first time during a capture; the load itself is
not captured.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from kveval.errors import KernelError, UnsupportedError
from kveval.kernels.compiler import INSTALL, Variant, architecture, compile_kernel

__all__ = ["CudaLauncher", "Launcher", "Variant", "launcher", "load_driver", "use_launcher"]


class Launcher(Protocol):
    """Runs kernels on a device."""

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
        """Starts `grid` blocks of `block` threads, each with `shared_bytes` of dynamic shared memory; copies `params`.

        Raises:
            UnsupportedError: the device or what is installed can't run kernels.
            KernelError: the kernel does not compile, load or start.
        """

    def multiprocessors(self, device: torch.device) -> int:
        """How many multiprocessors the device has."""

    def shared_limit(self, device: torch.device) -> int:
        """Most bytes of shared memory that a block may have."""


@dataclass
class _Kernel:
    """A loaded kernel. `dynamic_limit` is how much dynamic shared memory it may be given so far, in bytes."""

    function: Any
    context: Any
    dynamic_limit: int


class CudaLauncher:
    """The launcher of NVIDIA GPUs.

    Args:
        driver: `cuda.bindings.driver`, or what stands for it in a test.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._kernels: dict[tuple[Variant, int], _Kernel] = {}
        self._multiprocessors: dict[int, int] = {}
        self._shared_limits: dict[int, int] = {}
        self._lock = threading.Lock()

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
        """See `Launcher.launch`."""
        index = _index(device)
        kernel = self._kernels.get((variant, index))
        if kernel is None:
            kernel = self._load(variant, index)
        driver = self._driver
        stream = torch.cuda.current_stream(index).cuda_stream
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        # A thread may have no context yet, or another device's: torch's own calls change that only for themselves.
        self._call("cuCtxPushCurrent", kernel.context)
        try:
            if shared_bytes > kernel.dynamic_limit:
                self._allow_shared(variant, kernel, shared_bytes)
            (error,) = driver.cuLaunchKernel(
                kernel.function, *grid, block, 1, 1, shared_bytes, stream, ctypes.addressof(arguments), 0
            )
            if error:
                shape = f"{grid} blocks of {block} threads with {shared_bytes} bytes of shared memory"
                raise self._failure(error, f"launching {variant} as {shape}")
        finally:
            self._call("cuCtxPopCurrent")

    def multiprocessors(self, device: torch.device) -> int:
        """See `Launcher.multiprocessors`."""
        index = _index(device)
        if index not in self._multiprocessors:
            self._multiprocessors[index] = torch.cuda.get_device_properties(index).multi_processor_count
        return self._multiprocessors[index]

    def shared_limit(self, device: torch.device) -> int:
        """See `Launcher.shared_limit`."""
        index = _index(device)
        if index not in self._shared_limits:
            properties: Any = torch.cuda.get_device_properties(index)
            self._shared_limits[index] = properties.shared_memory_per_block_optin
        return self._shared_limits[index]

    def _load(self, variant: Variant, index: int) -> _Kernel:
        arch = architecture(torch.cuda.get_device_capability(index))
        cubin = compile_kernel(variant, arch).cubin
        with self._lock:
            if (variant, index) not in self._kernels:
                self._kernels[variant, index] = self._load_cubin(variant, cubin, index)
            return self._kernels[variant, index]

    def _load_cubin(self, variant: Variant, cubin: bytes, index: int) -> _Kernel:
        driver = self._driver
        self._call("cuInit", 0)
        # torch's context. It is never released: torch keeps it to the end of the process too.
        context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", index))
        self._call("cuCtxPushCurrent", context)
        try:
            with self._relaxed_capture():
                doing = f"loading {variant}"
                module = self._call("cuModuleLoadData", cubin, doing=doing)
                function = self._call("cuModuleGetFunction", module, variant.entry.encode(), doing=doing)
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                limit = self._call("cuFuncGetAttribute", attribute, function, doing=doing)
        finally:
            self._call("cuCtxPopCurrent")
        return _Kernel(function, context, limit)

    def _allow_shared(self, variant: Variant, kernel: _Kernel, size: int) -> None:
        """Raises the kernel's limit, which is 48 KiB until asked for more."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        doing = f"giving {variant} {size} bytes of shared memory"
        with self._relaxed_capture():
            self._call("cuFuncSetAttribute", kernel.function, attribute, size, doing=doing)
        kernel.dynamic_limit = size

    @contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        """Allows allocations of the driver while a stream is captured, as torch's own allocator does."""
        relaxed = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", before)

    def _call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        """The result of a driver function. Raises KernelError with the driver's name and text of the error."""
        error, *result = getattr(self._driver, name)(*arguments)
        if error:
            raise self._failure(error, doing or name)
        return result[0] if result else None

    def _failure(self, error: Any, doing: str) -> KernelError:
        _, text = self._driver.cuGetErrorString(error)  # None for an error younger than the bindings
        remedy = "`kveval doctor` compiles every kernel and says what this machine lacks."
        if "OUT_OF_MEMORY" in error.name:
            remedy = "Free GPU memory: a shorter context, a smaller batch, or nothing else on this GPU."
        return KernelError(f"{doing} failed: {error.name} ({(text or b'no text').decode()}).", remedy=remedy)


_replacement: Launcher | None = None


def launcher() -> Launcher:
    """The launcher that ops use.

    Raises:
        UnsupportedError: this machine can't launch CUDA kernels.
    """
    return _cuda_launcher() if _replacement is None else _replacement


@contextmanager
def use_launcher(replacement: Launcher) -> Iterator[None]:
    """Ops use `replacement` inside the block, in all threads."""
    global _replacement
    before, _replacement = _replacement, replacement
    try:
        yield
    finally:
        _replacement = before


@cache
def _cuda_launcher() -> CudaLauncher:
    return CudaLauncher(load_driver())


def load_driver() -> Any:
    """The module `cuda.bindings.driver`, once the driver has answered.

    Raises:
        UnsupportedError: there is no NVIDIA driver, or the package cuda-bindings is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as reason:
        raise UnsupportedError(f"the package cuda-bindings can't be imported ({reason}).", remedy=INSTALL) from reason
    try:
        error, _ = driver.cuDriverGetVersion()
    except RuntimeError as reason:  # cuda-bindings looks for the library at its first use
        raise UnsupportedError(
            f"there is no NVIDIA driver ({reason}).", remedy="Install the driver, or run on the CPU."
        ) from reason
    if error:
        raise UnsupportedError(f"the NVIDIA driver answers {error.name}.", remedy="Mend the driver: see `nvidia-smi`.")
    return driver


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
