"""Golden blocks of torchao: NVFP4 with a per-tensor scale, MXFP4 and MXFP8 with the OCP floor rule."""

from __future__ import annotations

import importlib.metadata

import inputs
from missing import MissingToolError
from numpy.typing import NDArray


def vectors() -> tuple[dict[str, NDArray], dict[str, str]]:
    """Codes uint8 (fp4: two a byte, first in the low bits), scales uint8, per-tensor scales float32 [1]."""
    try:
        import torch
        from torchao.prototype.mx_formats import config, mx_tensor, nvfp4_tensor
    except ImportError as e:
        raise MissingToolError("torchao: pip install --no-deps torchao==0.18.0") from e
    floor = config.ScaleCalculationMode.FLOOR
    out: dict[str, NDArray] = {}
    for head_dim in (64, 128):
        for case, array in inputs.cases(head_dim).items():
            x, key = torch.from_numpy(array), f"{head_dim}.{case}"
            out[f"{key}.x"] = array
            for name, dtype in (("mxfp4", torch.float4_e2m1fn_x2), ("mxfp8", torch.float8_e4m3fn)):
                scale, codes = mx_tensor.to_mx(x, dtype, 32, floor)
                out[f"{key}.{name}.scale"] = scale.view(torch.uint8).numpy()
                out[f"{key}.{name}.codes"] = codes.view(torch.uint8).numpy()
                if head_dim == 64:
                    decoded = mx_tensor.to_dtype(codes, scale, dtype, 32, torch.float32)
                    out[f"{key}.{name}.decoded"] = decoded.numpy()
            if case in ("zero", "subnormal"):
                continue  # torchao divides 1 by the per-tensor scale: infinity
            per_tensor = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
            scale, codes = nvfp4_tensor.nvfp4_quantize(x, 16, per_tensor)
            out[f"{key}.nvfp4.global"] = per_tensor.reshape(1).numpy()
            out[f"{key}.nvfp4.scale"] = scale.view(torch.uint8).numpy().reshape(len(array), -1)
            out[f"{key}.nvfp4.codes"] = codes.numpy()
    return out, {name: importlib.metadata.version(name) for name in ("torchao", "torch")}
