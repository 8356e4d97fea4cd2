"""Golden vectors from NVIDIA's conversion headers, compiled with plain g++ (no GPU, no driver, no nvcc)."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

import inputs
import numpy as np
from missing import MissingToolError
from numpy.typing import NDArray

Arrays = dict[str, NDArray]

_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
_FLAGS = ("-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC")


def vectors() -> tuple[Arrays, dict[str, str]]:
    """Arrays and the versions of what made them."""
    library = _library()
    call = _Caller(library)
    every_bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    some_float32 = _float32_values()
    out: Arrays = {"float32": some_float32}
    for element in ("e4m3", "e5m2", "e2m1"):
        out[f"bf16.{element}"] = call.encode(f"encode_{element}", every_bf16)
        out[f"float32.{element}"] = call.encode(f"encode_{element}", some_float32)
    # A scale is a magnitude: codes 0x0000 to 0x7F7F are the finite bfloat16 values that are not negative.
    out["bf16.e8m0_floor"] = call.encode("encode_e8m0_floor", every_bf16[:0x7F80])
    out["float32.e8m0_floor"] = call.encode("encode_e8m0_floor", np.abs(some_float32))
    for element, codes in (("e4m3", 256), ("e5m2", 256), ("e2m1", 16), ("e8m0", 256)):
        out[f"decode.{element}"] = call.decode(f"decode_{element}", np.arange(codes, dtype=np.uint8))
    for head_dim in (64, 128):
        cases = inputs.cases(head_dim)
        for name, x in cases.items():
            key = f"{head_dim}.{name}"
            out[f"{key}.x"] = x
            out[f"{key}.fp8_per_token_head.codes"], out[f"{key}.fp8_per_token_head.scale"] = call.fp8_per_row(x)
            for fmt, fp4 in (("mxfp4", 1), ("mxfp8", 0)):
                out[f"{key}.{fmt}.codes"], out[f"{key}.{fmt}.scale"] = call.mx(x, fp4)
            scale = np.abs(x).max() / np.float32(2688)
            out[f"{key}.nvfp4.global"] = np.array([scale or 1], np.float32)
            out[f"{key}.nvfp4.codes"], out[f"{key}.nvfp4.scale"] = call.nvfp4(x, scale or np.float32(1))
        # A constant frozen by an earlier, smaller tensor: block scales saturate at 448.
        frozen, later = cases["normal"], cases["large_channels"]
        scale = np.abs(frozen).max() / np.float32(2688)
        codes, scales = call.nvfp4(later, scale)
        out |= {f"saturating.{head_dim}.nvfp4.codes": codes, f"saturating.{head_dim}.nvfp4.scale": scales}
    versions = {name: importlib.metadata.version(name) for name in _WHEELS}
    versions["CUDART_VERSION"] = str(library.cudart_version())
    return out, versions


def _float32_values() -> NDArray[np.float32]:
    """Random magnitudes from 1e-8 to 1e6, e4m3 and e2m1 midpoints and their neighbours, subnormals, overflow."""
    rng = np.random.default_rng(0)
    random = rng.standard_normal(4096) * 10.0 ** rng.uniform(-8, 6, 4096)
    near = [*inputs.e4m3_midpoints(), 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 448.0, 464.0, 480.0, 57344.0, 61440.0]
    middle = np.array(near, np.float32)
    exact = np.concatenate(
        [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))],
    )
    extreme = [0.0, 1e-45, 1e-40, 1.1754942e-38, 1.1754944e-38, 2.0**-10, 2.0**-17, 1e5, 1e30, 3.4028235e38]
    positive = np.concatenate([exact, np.array(extreme, np.float32)])
    return np.concatenate([random.astype(np.float32), positive, -positive])


class _Caller:
    """Numpy arrays in and out of the library's functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def _call(self, name: str, *args: object) -> None:
        function = getattr(self.library, name)
        function.restype = None
        function(*(a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in args))

    def encode(self, name: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        out = np.empty(x.size, np.uint8)
        self._call(name, np.ascontiguousarray(x), out, ctypes.c_int(x.size))
        return out

    def decode(self, name: str, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        out = np.empty(codes.size, np.float32)
        self._call(name, codes, out, ctypes.c_int(codes.size))
        return out

    def fp8_per_row(self, x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        rows, dim = x.shape
        codes, scales = np.empty((rows, dim), np.uint8), np.empty(rows, np.float32)
        self._call("fp8_per_row", x, ctypes.c_int(rows), ctypes.c_int(dim), codes, scales)
        return codes, scales

    def nvfp4(self, x: NDArray[np.float32], scale: np.float32) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        codes, scales = np.empty(x.shape, np.uint8), np.empty((x.shape[0], x.shape[1] // 16), np.uint8)
        self._call("nvfp4", x, ctypes.c_int(x.size), ctypes.c_float(scale), codes, scales)
        return codes, scales

    def mx(self, x: NDArray[np.float32], fp4: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        codes, scales = np.empty(x.shape, np.uint8), np.empty((x.shape[0], x.shape[1] // 32), np.uint8)
        self._call("mx", x, ctypes.c_int(x.size), ctypes.c_int(fp4), codes, scales)
        return codes, scales


def _library() -> ctypes.CDLL:
    include = _include_folder()
    compiler = shutil.which("g++")
    if compiler is None:
        raise MissingToolError("g++ is not installed")
    source = Path(__file__).with_name("cuda_headers.cpp")
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "cuda_headers.so"
        folders = [f"-I{include}", f"-I{include / 'cccl'}"]
        subprocess.run([compiler, *_FLAGS, *folders, str(source), "-o", str(binary)], check=True)
        return ctypes.CDLL(str(binary))


def _include_folder() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        include = Path(root) / "cu13" / "include"
        if (include / "cuda_fp4.h").is_file() and (include / "crt").is_dir() and (include / "cccl" / "nv").is_dir():
            return include
    raise MissingToolError(f"NVIDIA's headers: pip install --no-deps {' '.join(_WHEELS)}")
