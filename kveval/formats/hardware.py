"""What GPU generations do natively with an element, as data. No torch.

`convert` is how a code becomes a 16-bit number; `multiply` is whether tensor cores take the codes themselves. Both are
about the element alone: scales and zero points per token or group are applied apart, except where tensor cores take
block scales. Sources: PTX ISA 9.2 (cvt, mma, wgmma, tcgen05.mma), cuda_fp8.hpp and cuda_fp4.hpp of CUDA 13, NVIDIA's
architecture whitepapers.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPUS", "Native", "native"]

GPUS = ("Ampere", "Ada", "Hopper", "Blackwell")
"""Generations, in the order of the fields of `Native`: sm_80 and sm_86, sm_89, sm_90, sm_100 and sm_120."""

FourAnswers = tuple[str, str, str, str]


@dataclass(frozen=True)
class Native:
    """Answers by generation, in the order of `GPUS`."""

    convert: FourAnswers
    multiply: FourAnswers


_NO: FourAnswers = ("no", "no", "no", "no")
_BITS: FourAnswers = ("bit operations",) * 4
_LOOKUP = Native(("table lookup",) * 4, _NO)
_FP8 = ("to fp16 pairs", "to fp16 pairs", "to fp16 or bf16 pairs")
_FP8_PRODUCTS: FourAnswers = ("no", "yes", "yes, short accumulator", "yes")
_INT4 = Native(_BITS, ("yes", "yes", "no", "no"))
_INT8 = Native(("int to float",) * 4, ("yes",) * 4)
_PACKED_INTEGER = Native(_BITS, _NO)

_NATIVE: dict[str, Native] = {
    "bf16": Native(("not needed",) * 4, ("yes",) * 4),
    "e4m3": Native(("bit operations", *_FP8), _FP8_PRODUCTS),
    # The bits of e5m2 are the upper half of an fp16.
    "e5m2": Native(("shift to fp16", *_FP8), _FP8_PRODUCTS),
    "e2m1": Native(
        ("bit operations", "bit operations", "bit operations", "to fp16 or bf16 pairs"),
        ("no", "no", "no", "yes, with block scales"),
    ),
    "int8": _INT8,
    "uint8": _INT8,
    "int4": _INT4,
    "uint4": _INT4,
    "offset4": _INT4,
    "e1m2": _PACKED_INTEGER,
    "int2": _PACKED_INTEGER,
    "uint2": _PACKED_INTEGER,
    "uint5": _PACKED_INTEGER,
    "offset5": _PACKED_INTEGER,
}


def native(element: str) -> Native:
    """What each generation does with an element; one that is not listed is looked up in a table."""
    return _NATIVE.get(element, _LOOKUP)
