"""Golden blocks of llama.cpp: its own quantizers, called in a released library, and gguf-python's beside them."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path

import inputs
import numpy as np
from missing import MissingToolError
from numpy.typing import NDArray

BLOCK = 32
BLOCK_BYTES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}
"""Bytes of one block: fp16 scale (and minimum) and codes, in the order of ggml's structs."""


def vectors() -> tuple[dict[str, NDArray], dict[str, str]]:
    """Blocks uint8 [rows, blocks, bytes] for every case, and the versions of what made them."""
    ggml = _ggml()
    try:
        import gguf
    except ImportError as e:
        raise MissingToolError("gguf: pip install gguf") from e
    out: dict[str, NDArray] = {}
    for head_dim in (64, 128):
        cases = inputs.cases(head_dim)
        cases["order_of_sums"] = _order_of_sums(ggml, head_dim)
        for case, x in cases.items():
            kept = x[_defined(x)]
            if not kept.size:
                continue
            out[f"{head_dim}.{case}.x"] = kept
            for name, size in BLOCK_BYTES.items():
                blocks = _quantize(ggml, f"quantize_row_{name}_ref", kept, size)
                if name == "iq4_nl":
                    _clear_undefined_codes(kept, blocks)
                out[f"{head_dim}.{case}.{name}"] = blocks
                if head_dim == 64:
                    out[f"{head_dim}.{case}.{name}.decoded"] = _dequantize(ggml, name, blocks).reshape(kept.shape)
                _compare_with_gguf(gguf, name, kept, blocks)
            cpu = _quantize(ggml, "quantize_row_q8_0", kept, BLOCK_BYTES["q8_0"])
            out[f"{head_dim}.{case}.q8_0_x86"] = cpu
    versions = {name: importlib.metadata.version(name) for name in ("xllamacpp", "gguf")}
    return out, versions


def _defined(x: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Rows that C defines: none of their blocks divides by a number whose reciprocal overflows float32.

    ggml then multiplies by infinity and casts the result to an integer, which may give anything.
    """
    blocks = x.reshape(len(x), -1, BLOCK)
    amax, extent = np.abs(blocks).max(-1), blocks.max(-1) - blocks.min(-1)
    safe = np.float32(1e-35)
    return (((amax == 0) | (amax > safe)) & ((extent == 0) | (extent > safe))).all(-1)


def _clear_undefined_codes(x: NDArray[np.float32], blocks: NDArray[np.uint8]) -> None:
    """Zero what ggml leaves uninitialised: the codes of iq4_nl blocks below 1e-15, to which it gives a scale of 0."""
    peak = np.abs(x.reshape(*blocks.shape[:2], BLOCK)).max(-1)
    blocks[peak < np.float32(1e-15), 2:] = 0


def _order_of_sums(ggml: ctypes.CDLL, head_dim: int) -> NDArray[np.float32]:
    """Rows whose iq4_nl scales show how they were summed: float64 sums round to another fp16 in 1 block of 10,000."""
    rng = np.random.default_rng(1)
    x = inputs.bf16(rng.standard_normal((200_000, BLOCK)))
    blocks = _quantize(ggml, "quantize_row_iq4_nl_ref", x, BLOCK_BYTES["iq4_nl"])[:, 0]
    scale, nibbles = blocks[:, :2].copy().view(np.float16)[:, 0], blocks[:, 2:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    value, wide = np.array(inputs.IQ4_NL, np.float64)[codes], x.astype(np.float64)
    exact = ((wide**3 * value).sum(1) / (wide**2 * value**2).sum(1)).astype(np.float32).astype(np.float16)
    shown = x[exact != scale]
    return shown[: len(shown) * BLOCK // head_dim * head_dim // BLOCK].reshape(-1, head_dim)


def _quantize(ggml: ctypes.CDLL, function: str, x: NDArray[np.float32], size: int) -> NDArray[np.uint8]:
    x = np.ascontiguousarray(x)
    out = np.zeros((len(x), x.shape[1] // BLOCK, size), np.uint8)
    call = getattr(ggml, function)
    call.restype = None
    call(x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.size))
    return out


def _dequantize(ggml: ctypes.CDLL, name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    out = np.empty(blocks.shape[0] * blocks.shape[1] * BLOCK, np.float32)
    call = getattr(ggml, f"dequantize_row_{name}")
    call.restype = None
    call(blocks.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(out.size))
    return out


def _compare_with_gguf(gguf: object, name: str, x: NDArray[np.float32], blocks: NDArray[np.uint8]) -> None:
    """Two implementations of one rule have to agree, else the vector is not golden. gguf has no iq4_nl quantizer."""
    if name == "iq4_nl":
        return
    kind = gguf.GGMLQuantizationType[name.upper()]  # type: ignore[attr-defined]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        other = gguf.quants.quantize(x, kind).reshape(blocks.shape)  # type: ignore[attr-defined]
    if not np.array_equal(other, blocks):
        differing = int((other != blocks).any(-1).sum())
        raise ValueError(f"{name}: gguf and ggml differ in {differing} of {blocks[..., 0].size} blocks")


def _ggml() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise MissingToolError("llama.cpp's library: pip install --no-deps xllamacpp")
    return ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))
