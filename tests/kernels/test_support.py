"""What a machine lacks is said exactly, and `kveval doctor` shows what kernels take."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from kveval.errors import UnsupportedError
from kveval.kernels import support
from kveval.kernels.compiler import compile_kernel
from kveval.kernels.manifest import MANIFEST, read_manifest
from kveval.kernels.support import examine_kernels, missing
from kveval.report.tables import kernels_table

linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no NVRTC for this system")

GPU = torch.device("cuda", 0)

ADD = """extern "C" __global__ void add(float* x) { x[threadIdx.x] += N; }
extern "C" __global__ void __launch_bounds__(1024) heavy(float* x) {
  float a[80];
#pragma unroll
  for (int i = 0; i < 80; i++) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 80; i++) x[i * 1024 + threadIdx.x] = a[i] * a[(i * 7 + 3) % 80];
}
"""
ENTRIES = """
- {kernel: light, source: add.cu, entry: add, defines: {N: 1}, archs: [sm_90a], max_registers: 32}
- {kernel: heavy, source: add.cu, entry: heavy, defines: {N: 1}, archs: [sm_90a], max_registers: 255}
- {kernel: elsewhere, source: add.cu, entry: heavy, defines: {N: 2}, archs: [sm_100], max_registers: 32}
- {kernel: broken, source: add.cu, entry: add, archs: [sm_90a], max_registers: 32}
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine where nothing is missing."""
    machine = SimpleNamespace(count=1, capability=(9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine.count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)
    monkeypatch.setattr(support, "load_driver", object)
    return machine


def refusing(message: str, remedy: str) -> Any:
    def refuse(*_: object) -> None:
        raise UnsupportedError(message, remedy=remedy)

    return refuse


@pytest.mark.parametrize("name", ["cpu", "meta", "mps"])
def test_no_gpu_at_all(name: str) -> None:
    assert missing(torch.device(name)) == f"{name} is not an NVIDIA GPU."


@linux
@pytest.mark.usefixtures("gpu")
def test_nothing_is_missing() -> None:
    assert missing(GPU) == ""
    assert missing(torch.device("cuda")) == ""


def test_torch_without_cuda(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "Install a CUDA build of torch" in missing(GPU)


def test_gpus_that_are_not_there(gpu: SimpleNamespace) -> None:
    assert missing(torch.device("cuda", 1)) == "there is no cuda:1: torch finds 1 GPU."
    gpu.count = 0
    assert missing(GPU).startswith("torch finds no NVIDIA GPU")


@linux
def test_an_old_gpu(gpu: SimpleNamespace) -> None:
    gpu.capability = (7, 0)
    assert "this GPU has 7.0" in missing(GPU)


@linux
def test_a_gpu_younger_than_nvrtc(gpu: SimpleNamespace) -> None:
    gpu.capability = (99, 0)
    assert "can't compile for sm_990. Install a torch for a newer CUDA" in missing(GPU)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("part", ["load_driver", "check_architecture"])
def test_parts_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(support, part, refusing("it is missing.", "Run `pip install it`."))
    assert missing(GPU) == "it is missing. Run `pip install it`."


def test_a_gpu_that_fails(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    assert missing(GPU) == "torch can't use cuda:0 (CUDA unknown error). See `nvidia-smi`."


@pytest.fixture
def four_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "add.cu").write_text(ADD)
    (tmp_path / MANIFEST).write_text(ENTRIES)
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(support, "read_manifest", lambda: read_manifest(tmp_path))
    monkeypatch.setattr(support, "compile_kernel", lambda v, arch: compile_kernel(v, arch, folder=tmp_path))


def printed(found: dict[str, Any]) -> str:
    console = Console(width=150, color_system=None)
    with console.capture() as capture:
        console.print(kernels_table(found))
    return capture.get()


@linux
@pytest.mark.usefixtures("four_kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for the GPU that is here")
def test_kernels_are_examined_without_a_gpu() -> None:
    found = examine_kernels()
    assert found["architecture"] == "sm_90a"
    assert found["missing"]
    light, heavy, elsewhere, broken = found["kernels"]
    assert light == {
        "kernel": "light", "registers": light["registers"], "stack_bytes": 0, "shared_bytes": 0,
        "seconds": light["seconds"], "problem": "",
    }  # fmt: skip
    assert light["seconds"] > 0
    assert "bytes of stack" in heavy["problem"]
    assert elsewhere["stack_bytes"] == heavy["stack_bytes"]
    assert elsewhere["problem"] == "", "the budget of another architecture"
    assert 'identifier "N" is undefined' in broken["problem"]
    assert broken["registers"] is None

    text = printed(found)
    assert f"Kernels don't run here: {found['missing']}" in text
    assert "compiled for sm_90a by NVRTC" in text
    assert text.count("NO: ") == 2
    assert examine_kernels()["kernels"][0]["seconds"] is None, "it was compiled before"


@pytest.mark.usefixtures("four_kernels")
def test_nothing_is_compiled_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "nvrtc_version", refusing("NVRTC is not found.", "Run `pip install 'kveval[cuda]'`."))
    found = examine_kernels()
    assert found == {
        "missing": "NVRTC is not found. Run `pip install 'kveval[cuda]'`.",
        "nvrtc": None,
        "architecture": None,
        "kernels": [],
    }
    assert "pip install 'kveval[cuda]'" in printed(found)
