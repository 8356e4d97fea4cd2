"""The element codecs of kernels/elements.cuh, compiled for the CPU, against the torch reference, bit for bit."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

import pytest
import torch
from emulator.emulator import KERNELS, cpp_compiler
from torch import Tensor

from kveval.formats import elements
from kveval.formats.element_types import get_element
from kveval.formats.rules import RULES, Quantizer
from kveval.formats.spec import TensorFormat
from kveval.kernels.formats import ELEMENTS, SCALES

NARROW = [name for name in ELEMENTS if name != "bf16"]
SCALE_TYPES = [name for name in SCALES if name is not None]
STORED = [name for name in SCALE_TYPES if name != "e8m0"]

SOURCE = """
#include "elements.cuh"
#define MAP(NAME, RESULT, ARGUMENT, CALL) \\
  extern "C" void NAME(const ARGUMENT* in, RESULT* out, i64 count) { \\
    for (i64 i = 0; i < count; i++) out[i] = CALL(in[i]); \\
  }
"""
FUNCTIONS = {
    **{f"code_{name}": ("u32", "float", f"code_of<{ELEMENTS[name]}>") for name in NARROW},
    **{f"value_{name}": ("float", "u32", f"value_of<{ELEMENTS[name]}>") for name in NARROW},
    **{f"floor_{name}": ("u32", "float", f"floor_scale<{ELEMENTS[name]}>") for name in NARROW},
    **{f"store_{name}": ("u32", "float", f"store_scale<{SCALES[name]}>") for name in STORED},
    **{f"load_{name}": ("float", "u32", f"load_scale<{SCALES[name]}>") for name in SCALE_TYPES},
}
"""{name: (type of the result, type of the argument, what is called)}"""


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Tensor], Tensor]:
    """Runs one of `FUNCTIONS` over a tensor: float32 for floats, int32 for bits."""
    compiler = cpp_compiler()
    assert compiler is not None, "a C++ compiler is needed"
    folder = tmp_path_factory.mktemp("elements")
    source, library = folder / "elements.cpp", folder / "elements.so"
    calls = "\n".join(f"MAP({name}, {', '.join(parts)})" for name, parts in FUNCTIONS.items())
    source.write_text(SOURCE + calls)
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, f"-I{KERNELS}", str(source), "-o", str(library)], check=True)
    functions = ctypes.CDLL(str(library))

    def over(name: str, x: Tensor) -> Tensor:
        result, argument, _ = FUNCTIONS[name]
        assert x.dtype == (torch.float32 if argument == "float" else torch.int32)
        x = x.contiguous()
        out = torch.empty_like(x, dtype=torch.float32 if result == "float" else torch.int32)
        getattr(functions, name)(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(x.numel())
        )
        return out

    return over


def around(numbers: Tensor) -> Tensor:
    """`numbers`, the midpoints between neighbours, and the floats just below and above each, with both signs."""
    numbers = numbers.unique()
    points = torch.cat([numbers, (numbers[1:].double() + numbers[:-1].double()).div(2).float()])
    near = torch.cat([points, *(torch.nextafter(points, torch.tensor(s * torch.inf)) for s in (-1, 1))])
    return torch.cat([near, -near])


def every_bf16() -> Tensor:
    """All finite ones."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).float()
    return x[x.isfinite()]


def random_bits() -> Tensor:
    """Finite float32 numbers of every magnitude."""
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = bits.view(torch.float32)
    return x[x.isfinite()]


def common_range() -> Tensor:
    """Numbers within the range of some element."""
    draw = torch.Generator().manual_seed(1)
    return torch.cat([torch.randn(50_000, generator=draw) * size for size in (0.01, 1, 4, 100, 1000, 3e4)])


def floats(near: Tensor) -> Tensor:
    return torch.cat([every_bf16(), random_bits(), common_range(), around(near)])


def bits_of(x: Tensor) -> Tensor:
    """With one NaN: which of them a conversion gives is the processor's choice."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


@pytest.mark.parametrize("name", NARROW)
def test_codes_are_the_references(call: Callable[[str, Tensor], Tensor], name: str) -> None:
    x = floats(torch.tensor(get_element(name).numbers))
    assert torch.equal(call(f"code_{name}", x), elements.nearest(name, x).int())


@pytest.mark.parametrize("name", NARROW)
def test_values_are_the_references(call: Callable[[str, Tensor], Tensor], name: str) -> None:
    codes = torch.arange(2 ** get_element(name).bits, dtype=torch.int32)
    expected = elements.look_up(name, codes.to(torch.uint8))
    assert torch.equal(bits_of(call(f"value_{name}", codes)), bits_of(expected))


def quantizer(scale_dtype: str) -> Quantizer:
    rule = "mx_floor" if scale_dtype == "e8m0" else "amax"
    return Quantizer(
        TensorFormat(element="e2m1", granularity="per_group", group_size=32, scale_rule=rule, scale_dtype=scale_dtype)
    )


def as_bits(stored: Tensor) -> Tensor:
    """Little-endian bytes uint8 [..., size] as numbers."""
    if stored.shape[-1] == 4:
        return stored.view(torch.int32)[..., 0]
    wide = stored.int()
    return wide[..., 0] if stored.shape[-1] == 1 else wide[..., 0] | wide[..., 1] << 8


@pytest.mark.parametrize("name", STORED)
def test_scales_are_stored_as_the_reference_does(call: Callable[[str, Tensor], Tensor], name: str) -> None:
    small = torch.arange(2**15, dtype=torch.int16).view(torch.float16).float()
    x = floats(small[small.isfinite()])
    assert torch.equal(call(f"store_{name}", x), as_bits(quantizer(name).store(x)))


@pytest.mark.parametrize("name", SCALE_TYPES)
def test_scales_are_read_as_the_reference_does(call: Callable[[str, Tensor], Tensor], name: str) -> None:
    if name == "fp32":
        stored = random_bits().view(torch.uint8).view(-1, 4)
    elif name in ("bf16", "fp16"):
        stored = torch.arange(2**16, dtype=torch.int32)[:, None].view(torch.uint8)[:, :2]
    else:
        stored = torch.arange(2**8, dtype=torch.uint8)[:, None]
    expected = quantizer(name).load(stored)
    assert torch.equal(bits_of(call(f"load_{name}", as_bits(stored))), bits_of(expected))


@pytest.mark.parametrize("name", [name for name in NARROW if get_element(name).signed])
def test_power_of_two_scales_are_the_references(call: Callable[[str, Tensor], Tensor], name: str) -> None:
    fmt = TensorFormat(
        element=name, granularity="per_group", group_size=32, scale_rule="mx_floor", scale_dtype="e8m0"
    )  # fmt: skip
    powers = torch.arange(1, 255, dtype=torch.int32).mul(2**23).view(torch.float32)
    x = torch.cat([every_bf16(), around(powers)]).abs()
    _, (stored,) = RULES["mx_floor"](x[:, None], Quantizer(fmt))
    assert torch.equal(call(f"floor_{name}", x), as_bits(stored))
