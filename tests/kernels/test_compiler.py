"""The compiler: what it is told, what it keeps, what it says when it fails. Needs NVRTC, but neither GPU nor driver."""

from __future__ import annotations

import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kveval.errors import KernelError, UnsupportedError
from kveval.kernels import compiler
from kveval.kernels.compiler import (
    Variant,
    architecture,
    check_architecture,
    compile_kernel,
    nvrtc_version,
    sources_digest,
)
from kveval.kernels.cubin import resources

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no NVRTC for this system")

HEADER = "#pragma once\n#ifndef FACTOR\n#define FACTOR 1\n#endif\n"
SOURCE = """#include "factor.cuh"
extern "C" __global__ void scale(float* x, float y) { x[threadIdx.x] = x[threadIdx.x] * FACTOR + y; }
extern "C" __global__ void shared(float* x) {
  __shared__ float t[100];
  t[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = t[99 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x) {
  float a[80];
#pragma unroll
  for (int i = 0; i < 80; i++) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 80; i++) x[i * 1024 + threadIdx.x] = a[i] * a[(i * 7 + 3) % 80];
}
__device__ __noinline__ float sum(const float* x, int n) {
  float a[64], s = 0;
  for (int i = 0; i < n; i++) a[i] = x[i];
  __syncthreads();
  for (int i = 0; i < n; i++) s += a[(int)x[i]];
  return s;
}
extern "C" __global__ void calling(float* x, int n) { x[0] = sum(x, n); }
"""
SCALE = Variant("some.cu", "scale", (("FACTOR", 3),))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "factor.cuh").write_text(HEADER)
    (sources / "some.cu").write_text(SOURCE)
    return sources


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_architectures(capability: tuple[int, int], name: str) -> None:
    assert architecture(capability) == name
    check_architecture(name)


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (3, 5)])
def test_old_gpus_are_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=r"8\.0 .*this GPU has"):
        architecture(capability)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_a_cubin_is_an_elf_with_the_resources_of_each_kernel(folder: Path, arch: str) -> None:
    binary = compile_kernel(SCALE, arch, folder=folder)
    assert binary.cubin.startswith(b"\x7fELF")
    assert binary.log == ""
    found = resources(binary.cubin)
    assert set(found) == {"scale", "shared", "spilling", "calling"}
    assert 1 < found["scale"].registers < 32
    assert found["scale"].stack_bytes == 0
    assert found["scale"].shared_bytes == 0
    assert found["shared"].shared_bytes == 400 + (0 if arch == "sm_80" else 1024)
    # 65,536 registers over 1,024 threads leave 64 to each; 80 numbers must be held at once.
    assert found["spilling"].registers <= 64
    assert found["spilling"].stack_bytes
    assert found["calling"].stack_bytes == 256


def test_macros_and_options_reach_the_compiler(folder: Path) -> None:
    (folder / "some.cu").write_text(
        "#if FACTOR != 3 || __CUDA_ARCH__ != 900 || __cplusplus != 201703L\n#error other options\n#endif\n" + SOURCE
    )
    compile_kernel(SCALE, "sm_90a", folder=folder)
    with pytest.raises(KernelError, match="other options"):
        compile_kernel(Variant("some.cu", "scale", (("FACTOR", 4),)), "sm_90a", folder=folder)


def test_arithmetic_is_not_contracted_unless_asked_for(folder: Path) -> None:
    """With fused multiply-add allowed, the multiplication and the addition of `scale` become one instruction."""
    exact = compile_kernel(SCALE, "sm_90a", folder=folder)
    fast = compile_kernel(Variant("some.cu", "scale", SCALE.defines, fast_math=True), "sm_90a", folder=folder)
    assert exact.cubin != fast.cubin
    assert compiler._options(SCALE, "sm_90a")[-2:] == ["--fmad=false", "-DFACTOR=3"]


def test_the_second_time_comes_from_the_disk(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernel(SCALE, "sm_90a", folder=folder)
    assert first.seconds is not None
    (file,) = cache.iterdir()
    assert file.name.startswith("some-scale-sm_90a-")

    def never(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_compile", never)
    second = compile_kernel(SCALE, "sm_90a", folder=folder)
    assert (second.cubin, second.log, second.seconds) == (first.cubin, first.log, None)


def test_warnings_are_kept_with_the_code(folder: Path) -> None:
    (folder / "some.cu").write_text(SOURCE + "__device__ int unused() { int x; return 1; }\n")
    first = compile_kernel(SCALE, "sm_90a", folder=folder)
    assert 'variable "x" was declared but never referenced' in first.log
    assert compile_kernel(SCALE, "sm_90a", folder=folder).log == first.log


def test_what_changes_the_code_changes_the_key(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files() -> int:
        return len(list(cache.iterdir()))

    compile_kernel(SCALE, "sm_90a", folder=folder)
    (folder / "other.cu").write_text("// another kernel\n")
    compile_kernel(SCALE, "sm_90a", folder=folder)
    assert files() == 1
    compile_kernel(SCALE, "sm_80", folder=folder)
    compile_kernel(Variant("some.cu", "scale", (("FACTOR", 5),)), "sm_90a", folder=folder)
    compile_kernel(Variant("some.cu", "scale", SCALE.defines, fast_math=True), "sm_90a", folder=folder)
    assert files() == 4
    (folder / "factor.cuh").write_text(HEADER + "// changed\n")
    compile_kernel(SCALE, "sm_90a", folder=folder)
    assert files() == 5
    (folder / "some.cu").write_text(SOURCE + "// changed\n")
    compile_kernel(SCALE, "sm_90a", folder=folder)
    assert files() == 6
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    compile_kernel(SCALE, "sm_90a", folder=folder)
    assert files() == 7


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:100], lambda data: b"", lambda data: b"x" + data[1:]]
)
def test_a_damaged_file_is_compiled_again(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage) -> None:
    first = compile_kernel(SCALE, "sm_90a", folder=folder)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    again = compile_kernel(SCALE, "sm_90a", folder=folder)
    assert "is damaged" in caplog.text
    assert again.seconds is not None
    assert resources(again.cubin) == resources(first.cubin)
    assert compile_kernel(SCALE, "sm_90a", folder=folder).seconds is None


def test_the_same_may_be_compiled_at_once(folder: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: compile_kernel(SCALE, "sm_80", folder=folder), range(8)))
    assert len({binary.cubin for binary in found}) == 1
    assert len(list(cache.iterdir())) == 1, "no partial files are left"
    assert compile_kernel(SCALE, "sm_80", folder=folder).seconds is None


def test_a_cache_that_cannot_be_written_costs_time_alone(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert compile_kernel(SCALE, "sm_90a", folder=folder).seconds is not None
    assert "can't keep the compiled kernel" in caplog.text


def test_a_failed_write_leaves_no_partial_file(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    compile_kernel(SCALE, "sm_90a", folder=folder)
    assert list(cache.iterdir()) == []


def test_errors_show_what_the_compiler_says(folder: Path) -> None:
    (folder / "some.cu").write_text('extern "C" __global__ void scale() { nonsense(); }\n')
    with pytest.raises(KernelError) as caught:
        compile_kernel(SCALE, "sm_90a", folder=folder)
    assert 'some.cu(1): error: identifier "nonsense" is undefined' in caught.value.message
    assert "scale of some.cu -DFACTOR=3 does not compile for sm_90a" in caught.value.message
    assert caught.value.remedy


def test_headers_come_from_the_sources_folder_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "factor.cuh").rename(tmp_path / "factor.cuh")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KernelError, match=r'could not open source file "factor\.cuh"'):
        compile_kernel(SCALE, "sm_90a", folder=folder)


def test_missing_sources_and_entries_are_named(folder: Path, cache: Path) -> None:
    with pytest.raises(KernelError, match=r"no kernel source none\.cu"):
        compile_kernel(Variant("none.cu", "scale"), "sm_90a", folder=folder)
    with pytest.raises(KernelError, match=r"some\.cu has no kernel 'sum'"):
        compile_kernel(Variant("some.cu", "sum"), "sm_90a", folder=folder)
    assert not cache.exists()


def test_an_architecture_that_nvrtc_does_not_know(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"NVRTC \d+\.\d+ can't compile for sm_999") as caught:
        compile_kernel(SCALE, "sm_999", folder=folder)
    assert "newer CUDA" in caught.value.remedy


@pytest.fixture
def nvrtc_forgotten():
    compiler._load_nvrtc.cache_clear()
    yield
    compiler._load_nvrtc.cache_clear()


@pytest.mark.usefixtures("nvrtc_forgotten")
def test_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match="cuda-bindings can't be imported") as caught:
        nvrtc_version()
    assert "pip install 'kveval[cuda]'" in caught.value.remedy


@pytest.mark.usefixtures("nvrtc_forgotten")
def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def absent() -> None:
        raise RuntimeError("libnvrtc.so.13 not found")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    with pytest.raises(UnsupportedError, match=r"NVRTC is not found \(libnvrtc\.so\.13 not found\)") as caught:
        nvrtc_version()
    assert "pip install 'kveval[cuda]'" in caught.value.remedy


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(100)])
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(KernelError, match="can't be read"):
        resources(data)


def test_a_stack_that_the_compiler_cannot_tell(folder: Path) -> None:
    cubin = compile_kernel(SCALE, "sm_90a", folder=folder).cubin
    known = re.compile(rb"\x04\x12\x08\x00(.{4})\x00{4}", re.DOTALL)
    unknown = known.sub(lambda found: found[0][:-4] + b"\xff" * 4, cubin)
    assert {name for name, taken in resources(unknown).items() if taken.stack_bytes is None} == {"scale", "shared"}


def test_a_cut_cubin_is_refused(folder: Path) -> None:
    cubin = compile_kernel(SCALE, "sm_90a", folder=folder).cubin
    with pytest.raises(KernelError, match="can't be read"):
        resources(cubin[: len(cubin) // 2])


def test_the_digest_covers_names_and_contents_of_sources(folder: Path) -> None:
    first = sources_digest(folder=folder)
    assert len(first) == 64
    (folder / "README.md").write_text("no source")
    assert sources_digest(folder=folder) == first
    (folder / "factor.cuh").write_text(HEADER + "\n")
    second = sources_digest(folder=folder)
    (folder / "factor.cuh").rename(folder / "other.cuh")
    assert len({first, second, sources_digest(folder=folder)}) == 3


def test_the_digest_of_the_sources_that_ship() -> None:
    assert sources_digest() != sources_digest(folder=Path(compiler.__file__).parent)
