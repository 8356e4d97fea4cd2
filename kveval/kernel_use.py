"""Which layers are stored and attended to by kernels: what was asked for, what a layer's format and device allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from kveval.errors import UnsupportedError
from kveval.formats.layout import LayerFormat
from kveval.geometry import LayerGeometry
from kveval.kernels import decode, formats, support

__all__ = ["NO_KERNELS", "AttentionMode", "KernelUse", "format_problem", "kernel_use", "refuse_packed"]

AttentionMode = Literal["auto", "packed", "dequant"]
"""`packed`: attention reads packed bytes, or refuses. `dequant`: everything is decoded first, and torch attends.
`auto`: packed on an NVIDIA GPU wherever kernels can, else dequant."""


@dataclass(frozen=True)
class KernelUse:
    """What kernels do for one layer. Their torch reference does it where `packed` is asked for on another device.

    Attributes:
        mode: What was asked for.
        where: The layer, for messages.
        stores: Whether they encode and decode keys, and values. What they give equals what the codec gives.
        problem: Why they can't attend to packed bytes; "" if they can.
        keys_lack_mean: Whether keys are stored without their mean.
    """

    mode: AttentionMode
    where: str
    stores: tuple[bool, bool]
    problem: str
    keys_lack_mean: bool = False


NO_KERNELS = KernelUse("dequant", "", (False, False), "")


def kernel_use(
    mode: AttentionMode,
    fmt: LayerFormat,
    shape: LayerGeometry,
    *,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    raw_chunk: bool,
) -> KernelUse:
    """What kernels do for a layer.

    Args:
        mode: What was asked for.
        fmt: How keys and values are stored.
        shape: Of the layer.
        index: Of the layer.
        dtype: What the model computes in.
        device: Where it does.
        raw_chunk: Whether the tokens of the current forward are read raw.

    Raises:
        UnsupportedError: `packed` was asked for, and the layer can't be attended to so.
    """
    lacking = _missing(device) if device.type == "cuda" else ""
    problem = lacking or format_problem(fmt, shape)
    if device.type not in ("cuda", "cpu"):
        problem = f"kernels run on NVIDIA GPUs and their reference on the CPU, not on {device.type}"
    if device.type == "cuda":
        problem = problem or _kernel_problem(fmt, shape, dtype)
    if raw_chunk and dtype != torch.bfloat16:
        problem = problem or f"tokens of the current forward are read raw, in {_name(dtype)}, and kernels read bfloat16"
    if mode == "packed" and problem:
        raise refuse_packed(f"layer {index}", problem)
    usable = mode == "packed" or (device.type == "cuda" and not lacking)
    fits = (
        not formats.misfit(fmt.key.format, shape.head_dim_k),
        not formats.misfit(fmt.value.format, shape.head_dim_v),
    )
    shifted = fmt.key.format.transform == "mean_shift"
    return KernelUse(mode, f"layer {index}", (usable and fits[0], usable and fits[1]), problem, shifted)


def format_problem(fmt: LayerFormat, shape: LayerGeometry) -> str:
    """Why attention can't read a layer packed on any device; "" if it can."""
    if shape.kind == "mla":
        return "the model makes keys and values of the latents that it stores"
    for name, role, head_dim in (("keys", fmt.key, shape.head_dim_k), ("values", fmt.value, shape.head_dim_v)):
        if reason := formats.misfit(role.format, head_dim):
            return f"{name}: {reason}"
    return ""


def refuse_packed(where: str, problem: str) -> UnsupportedError:
    """The error for a layer that can't be attended to as `packed` asks."""
    return UnsupportedError(
        f"{where} can't be attended to as packed bytes: {problem}.",
        remedy="Use `attention: auto`, which decodes such layers first and records it, or `attention: dequant`.",
    )


def _kernel_problem(fmt: LayerFormat, shape: LayerGeometry, dtype: torch.dtype) -> str:
    """Why the decode kernel can't read a layer."""
    if reason := decode.misfit(fmt.key.format, fmt.value.format, shape.head_dim_k, shape.head_dim_v):
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the model computes in {_name(dtype)}, and kernels multiply in bfloat16 and float16"
    wide = not fmt.key.format.lossy or fmt.key.sink_tokens or fmt.key.residual_length
    if dtype == torch.float16 and wide:
        return "keys that stay bfloat16 are not multiplied with float16 queries"
    return ""


@cache
def _missing(device: torch.device) -> str:
    return support.missing(device).removesuffix(".")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
