"""The launcher: which calls of the driver it makes, in which order and context. On a GPU also that they work."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kveval.errors import KernelError, UnsupportedError
from kveval.kernels import compiler, launcher
from kveval.kernels.compiler import Binary, Variant
from kveval.kernels.launcher import CudaLauncher, use_launcher

APPEND = Variant("append.cu", "append", (("ELEMENT", 1),))
DECODE = Variant("decode.cu", "decode")
GPU = torch.device("cuda", 0)
SECOND = torch.device("cuda", 1)
STREAMS = {0: 0, 1: 0xABC}
DEFAULT_SHARED = 48 * 1024


class Params(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint64), ("n", ctypes.c_int32))


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver:
    """Records calls, keeps the stack of contexts and the mode of capture, and fails where it is told to."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic limit")
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launches: list[dict[str, Any]] = []
        self.limits: list[int] = []
        self.images: list[bytes] = []
        self.contexts: list[str] = []
        self.mode = "global"
        self.failing: dict[str, Result] = {}

    def _done(self, name: str, *result: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        return (self.failing.get(name, Result.CUDA_SUCCESS), *result)

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done("cuInit")

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done("cuDeviceGet", f"device {index}")

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Any, ...]:  # noqa: N802
        return self._done("cuDevicePrimaryCtxRetain", f"context of {device}")

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:  # noqa: N802
        self.contexts.append(context)
        return self._done("cuCtxPushCurrent")

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return self._done("cuCtxPopCurrent", self.contexts.pop())

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Any, ...]:  # noqa: N802
        before, self.mode = self.mode, mode
        return self._done("cuThreadExchangeStreamCaptureMode", before)

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert self.contexts
        assert self.mode == "relaxed"
        self.images.append(image)
        return self._done("cuModuleLoadData", f"module {len(self.images)}")

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert self.mode == "relaxed"
        return self._done("cuModuleGetFunction", f"{name.decode()} of {module} in {self.contexts[-1]}")

    def cuFuncGetAttribute(self, attribute: str, function: str) -> tuple[Any, ...]:  # noqa: N802
        assert attribute == "dynamic limit"
        return self._done("cuFuncGetAttribute", DEFAULT_SHARED)

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[Any, ...]:  # noqa: N802
        assert attribute == "dynamic limit"
        assert self.mode == "relaxed"
        self.limits.append(value)
        return self._done("cuFuncSetAttribute")

    def cuLaunchKernel(self, function: str, *numbers: int) -> tuple[Any, ...]:  # noqa: N802
        *shape, shared, stream, arguments, extra = numbers
        assert extra == 0
        (at,) = (ctypes.c_void_p * 1).from_address(arguments)
        params = Params.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(Params)))
        self.launches.append(
            {
                "function": function,
                "shape": tuple(shape),
                "shared": shared,
                "stream": stream,
                "params": (params.x, params.n),
                "context": self.contexts[-1],
                "mode": self.mode,
            }
        )
        return self._done("cuLaunchKernel")

    def cuGetErrorString(self, error: Result) -> tuple[Any, ...]:  # noqa: N802
        text = {Result.CUDA_ERROR_INVALID_VALUE: b"invalid argument", Result.CUDA_ERROR_OUT_OF_MEMORY: b"out of memory"}
        return (Result.CUDA_SUCCESS, text[error])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Variant, str]]:
    """A machine with two GPUs, an H200 and an A100, as far as torch's answers go; what was compiled for them."""
    asked: list[tuple[Variant, str]] = []

    def compile_kernel(variant: Variant, arch: str) -> Binary:
        asked.append((variant, arch))
        return Binary(f"{variant.entry} for {arch}".encode(), "", 0.1)

    capability = {0: (9, 0), 1: (8, 0)}
    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=STREAMS[index]))
    return asked


@pytest.fixture
def driver(compiled: list[tuple[Variant, str]]) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    yield fake
    assert fake.contexts == []
    assert fake.mode == "global"


def start(target: Any, variant: Variant = APPEND, device: torch.device = GPU, shared: int = 0, n: int = 7) -> None:
    target.launch(variant, grid=(5, 4, 3), block=128, shared_bytes=shared, params=Params(2**40, n), device=device)


def test_a_launch(driver: FakeDriver) -> None:
    start(CudaLauncher(driver), shared=1000)
    assert driver.launches == [
        {
            "function": "append of module 1 in context of device 0",
            "shape": (5, 4, 3, 128, 1, 1),
            "shared": 1000,
            "stream": 0,
            "params": (2**40, 7),
            "context": "context of device 0",
            "mode": "global",
        }
    ]
    assert driver.images == [b"append for sm_90a"]


def test_later_launches_only_launch(driver: FakeDriver, compiled: list[tuple[Variant, str]]) -> None:
    target = CudaLauncher(driver)
    start(target)
    driver.calls.clear()
    start(target, n=8)
    assert driver.calls == ["cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"]
    assert driver.launches[-1]["params"] == (2**40, 8)
    assert compiled == [(APPEND, "sm_90a")]


def test_every_device_has_its_own_code_context_and_stream(
    driver: FakeDriver, compiled: list[tuple[Variant, str]]
) -> None:
    target = CudaLauncher(driver)
    for device in (GPU, SECOND, torch.device("cuda")):
        start(target, device=device)
    start(target, variant=DECODE)
    assert compiled == [(APPEND, "sm_90a"), (APPEND, "sm_80"), (DECODE, "sm_90a")]
    assert [launch["context"][-8:] for launch in driver.launches] == ["device 0", "device 1", "device 1", "device 0"]
    assert [launch["stream"] for launch in driver.launches] == [0, 0xABC, 0xABC, 0]
    assert [launch["function"].split()[0] for launch in driver.launches] == ["append", "append", "append", "decode"]


def test_shared_memory_beyond_the_default_is_asked_for_once(driver: FakeDriver) -> None:
    target = CudaLauncher(driver)
    for size in (DEFAULT_SHARED, 100_000, 100_000, 60_000, 200_000):
        start(target, shared=size)
    assert driver.limits == [100_000, 200_000]
    start(target, variant=DECODE, shared=60_000)
    assert driver.limits == [100_000, 200_000, 60_000]


def test_threads_load_a_kernel_once(driver: FakeDriver) -> None:
    target = CudaLauncher(driver)
    barrier = threading.Barrier(4)

    def load(_: int) -> Any:
        barrier.wait()
        return target._load(APPEND, 0)

    with ThreadPoolExecutor(4) as pool:
        kernels = list(pool.map(load, range(4)))
    assert len(driver.images) == 1
    assert all(kernel is kernels[0] for kernel in kernels)


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        ("cuInit", "cuInit"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain"),
        ("cuModuleLoadData", "loading append of append.cu -DELEMENT=1"),
        ("cuModuleGetFunction", "loading append of append.cu -DELEMENT=1"),
        ("cuFuncSetAttribute", "giving append of append.cu -DELEMENT=1 60000 bytes of shared memory"),
        (
            "cuLaunchKernel",
            "launching append of append.cu -DELEMENT=1 as (5, 4, 3) blocks of 128 threads"
            " with 60000 bytes of shared memory",
        ),
    ],
)
def test_failures_carry_the_drivers_words_and_leave_nothing_behind(driver: FakeDriver, call: str, doing: str) -> None:
    target = CudaLauncher(driver)
    driver.failing = {call: Result.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(KernelError) as caught:
        start(target, shared=60_000)
    assert caught.value.message == f"{doing} failed: CUDA_ERROR_INVALID_VALUE (invalid argument)."
    assert "kveval doctor" in caught.value.remedy
    driver.failing = {}
    driver.launches.clear()
    start(target, shared=60_000)
    assert len(driver.launches) == 1, "the next attempt starts afresh"


def test_memory_that_is_full_has_its_own_remedy(driver: FakeDriver) -> None:
    driver.failing = {"cuModuleLoadData": Result.CUDA_ERROR_OUT_OF_MEMORY}
    with pytest.raises(KernelError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        start(CudaLauncher(driver))
    assert "Free GPU memory" in caught.value.remedy


def test_an_old_gpu_is_refused(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(UnsupportedError, match=r"this GPU has 7\.5"):
        start(CudaLauncher(driver))
    assert driver.calls == []


def test_multiprocessors_are_asked_once(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(index: int) -> Any:
        asked.append(index)
        return SimpleNamespace(multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    target = CudaLauncher(driver)
    assert [target.multiprocessors(GPU), target.multiprocessors(GPU)] == [132, 132]
    assert asked == [0]


def test_another_launcher_for_a_while() -> None:
    one, two = CudaLauncher(None), CudaLauncher(None)
    with use_launcher(one):
        with use_launcher(two):
            assert launcher.launcher() is two
        assert launcher.launcher() is one
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(launcher.launcher).result() is one
        with pytest.raises(ZeroDivisionError), use_launcher(two):
            1 / 0  # noqa: B018
        assert launcher.launcher() is one


@pytest.mark.skipif(sys.platform != "linux", reason="cuda-bindings is for Linux")
@pytest.mark.parametrize(
    ("answer", "message", "remedy"),
    [
        (RuntimeError("libcuda.so.1 is nowhere"), r"no NVIDIA driver \(libcuda\.so\.1 is nowhere\)", "run on the CPU"),
        ((Result.CUDA_ERROR_INVALID_VALUE, 0), "driver answers CUDA_ERROR_INVALID_VALUE", "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, answer: Any, message: str, remedy: str) -> None:
    from cuda.bindings import driver

    def version() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(driver, "cuDriverGetVersion", version)
    launcher._cuda_launcher.cache_clear()
    with pytest.raises(UnsupportedError, match=message) as caught:
        launcher.launcher()
    assert remedy in caught.value.remedy


def test_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    launcher._cuda_launcher.cache_clear()
    with pytest.raises(UnsupportedError, match="cuda-bindings can't be imported") as caught:
        launcher.launcher()
    assert "pip install 'kveval[cuda]'" in caught.value.remedy


SUM = """
struct Params { unsigned long long x; int n; };
extern "C" __global__ void add(const __grid_constant__ Params p) {
  extern __shared__ float held[];
  float* x = reinterpret_cast<float*>(p.x);
  int i = blockIdx.x * blockDim.x + threadIdx.x, last = SHARED / 4 - 1 - threadIdx.x;
  held[last] = x[i];
  __syncthreads();
  x[i] = held[last] + p.n;
}
"""


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a kernel that adds n to a tensor whose size is a multiple of 256."""
    (tmp_path / "sum.cu").write_text(SUM)
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launcher, "compile_kernel", lambda v, arch: compiler.compile_kernel(v, arch, folder=tmp_path))
    target = CudaLauncher(launcher.load_driver())

    def add(x: torch.Tensor, n: int, shared: int = 1024) -> None:
        target.launch(
            Variant("sum.cu", "add", (("SHARED", shared),)),
            grid=(x.numel() // 256, 1, 1),
            block=256,
            shared_bytes=shared,
            params=Params(x.data_ptr(), n),
            device=x.device,
        )

    return add


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [1024, 49152, 98304])
def test_gpu_launches_in_order_on_the_current_stream(on_gpu: Any, shared: int) -> None:
    x = torch.arange(1024.0, device="cuda")
    on_gpu(x, 3, shared)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x *= 2
        on_gpu(x, 1, shared)
    torch.cuda.current_stream().wait_stream(stream)
    assert x.equal((torch.arange(1024.0, device="cuda") + 3) * 2 + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("shared", [1024, 98304])
def test_gpu_graphs_capture_launches_even_the_first(on_gpu: Any, warm: bool, shared: int) -> None:
    x = torch.zeros(1024, device="cuda")
    if warm:
        on_gpu(x, 0, shared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu(x, 1, shared)
        on_gpu(x, 10, shared)
    assert x.sum().item() == 0, "nothing ran during the capture"
    for _ in range(3):
        graph.replay()
    assert x.eq(33).all()


@pytest.mark.gpu
def test_gpu_launches_from_a_thread_that_torch_has_not_seen(on_gpu: Any) -> None:
    x = torch.zeros(1024, device="cuda")
    thread = threading.Thread(target=on_gpu, args=(x, 5))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert x.eq(5).all()


@pytest.mark.gpu
def test_gpu_refuses_more_shared_memory_than_there_is(on_gpu: Any) -> None:
    with pytest.raises(KernelError, match=r"giving add of sum\.cu .* failed: CUDA_ERROR_INVALID_VALUE"):
        on_gpu(torch.zeros(256, device="cuda"), 1, 1 << 20)


@pytest.mark.gpu
def test_gpu_other_devices_than_the_current_one(on_gpu: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    x = torch.zeros(256, device="cuda:1")
    on_gpu(x, 4)
    assert torch.cuda.current_device() == 0
    assert x.eq(4).all()
