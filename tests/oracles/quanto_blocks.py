"""Golden codes of optimum-quanto, the library behind transformers' quantized cache: INT4 in groups, INT8 per row."""

from __future__ import annotations

import importlib.metadata

import inputs
import numpy as np
from missing import MissingToolError
from numpy.typing import NDArray

GROUP = 64


def vectors() -> tuple[dict[str, NDArray], dict[str, str]]:
    """INT4 codes uint8 with fp32 scale and shift (x = scale * code - shift); INT8 codes with fp32 scale.

    `int4` groups 64 adjacent elements of a row, `int4_channel` 64 consecutive rows of a channel, `int4_row` a whole
    row. `.bf16` is the same on bfloat16 tensors, in which quanto rounds every step of its arithmetic to bfloat16.
    """
    try:
        import torch
        from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qint4, qint8, quantize_weight
    except ImportError as e:
        raise MissingToolError("quanto: pip install optimum-quanto==0.2.7") from e

    def int4(x: torch.Tensor, axis: int, group: int) -> dict[str, NDArray]:
        scale, shift = MaxOptimizer()(x, qint4, axis, group)
        stored = quantize_weight(x, qint4, axis, scale, shift, group, optimized=False)
        arrays = {"codes": stored._data.unpack(), "scale": scale.float(), "shift": shift.float()}
        if x.shape[1] == 64:
            arrays["decoded"] = stored.dequantize().float()
        return {field: a.numpy() for field, a in arrays.items()}

    out: dict[str, NDArray] = {}
    for head_dim in (64, 128):
        for case, array in inputs.cases(head_dim).items():
            if _has_constant_group(array):
                continue  # quanto divides 0 by 0 there and casts NaN to an integer
            x, key = torch.from_numpy(array), f"{head_dim}.{case}"
            results = {"int4": int4(x, 0, GROUP), "int4_row": int4(x, 0, head_dim)}
            if case != "float32":
                results["int4.bf16"] = int4(x.bfloat16(), 0, GROUP)
            if case in ("normal", "large_channels", "magnitudes"):
                tokens = torch.cat([x, x.flip(0)[:16]])  # 64 rows: one group of tokens
                out[f"{key}.int4_channel.x"] = tokens.numpy()
                results["int4_channel"] = int4(tokens, -1, GROUP)
            scale = AbsmaxOptimizer()(x, qint8, 0)
            stored = quantize_weight(x, qint8, 0, scale, optimized=False)
            results["int8"] = {"codes": stored._data.numpy(), "scale": scale.numpy()}
            out[f"{key}.x"] = array
            for name, arrays in results.items():
                out |= {f"{key}.{name}.{field}": values for field, values in arrays.items()}
    return out, {name: importlib.metadata.version(name) for name in ("optimum-quanto", "torch")}


def _has_constant_group(x: NDArray[np.float32]) -> bool:
    groups = x.reshape(-1, GROUP)
    extent = groups.max(-1) - groups.min(-1)
    return bool((extent < 1e-30).any())
