"""Storage formats as kernels know them: the keys that name them in calls, and the macros that compile them in.

The numbers are those of kernels/types.cuh.
"""

from __future__ import annotations

import json
from functools import cache

import torch
from torch import Tensor

from kveval.formats.codec import Codec, Frozen
from kveval.formats.spec import SCALE_SIZES, TensorFormat

__all__ = [
    "alignments",
    "format_key",
    "format_of",
    "kernel_codec",
    "macros",
    "misfit",
    "stored_width",
    "takes_tensor_scale",
    "tensor_scale",
]

ELEMENTS = {"bf16": 0, "e4m3": 1, "e5m2": 2, "int8": 3, "uint8": 4, "uint4": 5, "e2m1": 6}
"""Elements that kernels read and write."""

SCALES = {None: 0, "fp32": 1, "bf16": 2, "fp16": 3, "e4m3": 4, "e8m0": 5}
"""Types of a stored scale."""

RULES = {"none": 0, "fixed": 1, "amax": 2, "minmax": 3, "mx_floor": 4, "four_over_six": 5}
"""Scale rules, after `format_key` has made one of those that divide by a scale given to them."""

_GIVEN = ("fixed", "static", "first_write_amax")
LANE = 8
"""Elements of a head that one lane encodes."""
LARGEST_GROUP = 32 * LANE
"""Elements that a warp encodes at a time; a larger group is the whole head or none."""


@cache
def format_key(fmt: TensorFormat) -> str:
    """JSON of what decides the bytes that `fmt` makes of a tensor, once its tensor-level scale is given.

    Neither the transform is part of it (kernels get what it gives) nor where a tensor-level scale comes from.
    """
    given = fmt.scale_rule in _GIVEN
    fields = {
        "element": fmt.element,
        "granularity": "per_tensor" if given else fmt.granularity,
        "group_size": fmt.group_size,
        "scale_rule": "fixed" if given else fmt.scale_rule,
        "scale_dtype": fmt.scale_dtype,
        "packing": fmt.packing,
    }
    defaults = TensorFormat.model_fields
    return json.dumps({k: v for k, v in fields.items() if v != defaults[k].default}, separators=(",", ":"))


@cache
def format_of(key: str) -> TensorFormat:
    """The inverse of `format_key`; two formats that differ in what it leaves out come back as one."""
    return TensorFormat.model_validate_json(key)


@cache
def kernel_codec(key: str, head_dim: int) -> Codec:
    """The reference of what kernels do for this format."""
    return Codec(format_of(key), head_dim)


def takes_tensor_scale(fmt: TensorFormat) -> bool:
    """Whether the format can have a scale for the whole tensor: as its only one, or above e4m3 scales of groups."""
    return fmt.scale_rule in _GIVEN or fmt.scale_dtype == "e4m3"


def tensor_scale(codec: Codec, frozen: Frozen, device: torch.device) -> Tensor | None:
    """The tensor-level scale that ops take.

    Args:
        codec: Of the role.
        frozen: What the first write froze.
        device: Where the scale goes.

    Returns:
        float32 [B or 1, H or 1]: the frozen scale, else the calibrated ones, else the constant; None where there is
        none or it is 1.
    """
    if frozen.scale is not None:
        return frozen.scale[:, :, 0, 0]
    if codec.format.scale_rule not in _GIVEN:
        return None
    numbers = codec.scales or (codec.format.fixed_scale,)
    return None if numbers == (1.0,) else torch.tensor([numbers], dtype=torch.float32, device=device)


def stored_width(fmt: TensorFormat, payload_bytes: int) -> int:
    """D of the heads whose codes take `payload_bytes`, a whole number of codes."""
    return payload_bytes * 8 // fmt.info.bits


@cache
def alignments(key: str) -> tuple[int, int]:
    """Bytes to which kernels need rows of codes aligned, of which they move eight at a time, and rows of scales."""
    fmt = format_of(key)
    return fmt.info.bits, SCALE_SIZES.get(fmt.scale_dtype or "", 1)


def misfit(fmt: TensorFormat, head_dim: int) -> str:
    """Why the append and dequantize kernels can't take heads of `head_dim` in this format; "" if they can.

    The transform does not count: it happens before a kernel stores and after it reads.
    """
    group = fmt.group_size or head_dim
    if fmt.element not in ELEMENTS:
        return f"kernels have no element {fmt.element} (they have {', '.join(ELEMENTS)})"
    if fmt.granularity == "per_channel":
        return "kernels store a token by itself, and this format scales a channel over several tokens"
    if fmt.packing != "sequential":
        return f"kernels lay codes out in sequence, not as {fmt.packing}"
    if fmt.scale_rule not in RULES and fmt.scale_rule not in _GIVEN:
        return f"kernels have no scale rule {fmt.scale_rule}"
    if head_dim % LANE:
        return f"a head of {head_dim} is no multiple of {LANE}"
    if head_dim % group:
        return f"groups of {group} do not divide a head of {head_dim}"
    whole_head = group == head_dim and fmt.scale_rule != "four_over_six"
    if not whole_head and (group & (group - 1) or group > LARGEST_GROUP):
        return f"groups of {group} are neither the whole head nor a power of two up to {LARGEST_GROUP}"
    return ""


@cache
def macros(key: str, head_dim: int, *, tensor_scale: bool, prefix: str) -> tuple[tuple[str, int], ...]:
    """Macros that describe the format of `key` to a kernel.

    Args:
        key: A `format_key` without `misfit`.
        head_dim: D.
        tensor_scale: Whether a tensor-level scale is given.
        prefix: Of the names: "K_" or "V_" in kernels of two roles. Without one they would meet names in the sources.
    """
    fmt = format_of(key)
    named = {
        "ELEMENT": ELEMENTS[fmt.element],
        "RULE": RULES[fmt.scale_rule],
        "SCALE": SCALES[fmt.scale_dtype],
        "GROUP": fmt.group_size or head_dim,
        "ZERO": int(fmt.rule.stored == 2),
        "GLOBAL": int(tensor_scale),
        "HEAD_DIM": head_dim,
    }
    return tuple((prefix + name, number) for name, number in named.items())
