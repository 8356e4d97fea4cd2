"""Golden blocks of Four Over Six: the reference quantizer of the method's authors (arXiv 2512.02010)."""

from __future__ import annotations

import importlib.metadata

import inputs
from missing import MissingToolError
from numpy.typing import NDArray


def vectors() -> tuple[dict[str, NDArray], dict[str, str]]:
    """NVFP4 codes uint8 (two a byte, first in the low bits), block scales uint8 [rows, D/16], amax float32 [1].

    The second-level scale is amax / 1536 = amax / (6 * 256), so that a block scaled to 4 still fits e4m3.
    """
    try:
        import torch
        from fouroversix.quantize.pytorch.reference import quantize_to_fp4
        from fouroversix.utils import ScaleRule
    except ImportError as e:
        raise MissingToolError("fouroversix: SKIP_CUDA_BUILD=1 pip install --no-deps fouroversix==1.0.5") from e
    out: dict[str, NDArray] = {}
    for head_dim in (64, 128):
        for case, array in inputs.cases(head_dim).items():
            if case in ("zero", "subnormal"):
                continue  # its reciprocals of the tensor's amax are infinite
            codes, scale, amax = quantize_to_fp4(
                torch.from_numpy(array), scale_rule=ScaleRule.mse, use_blackwell_scale_layout=False
            )
            key = f"{head_dim}.{case}"
            out[f"{key}.x"] = array
            out[f"{key}.codes"] = codes.numpy()
            out[f"{key}.scale"] = scale.view(torch.uint8).numpy().reshape(len(array), -1)
            out[f"{key}.amax"] = amax.reshape(1).numpy()
    return out, {name: importlib.metadata.version(name) for name in ("fouroversix", "torch")}
