"""Element codecs against brute-force nearest-even oracles, and against NVIDIA's own conversions by digest."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kveval.formats import elements
from kveval.formats.spec import ELEMENTS

# sha256 over the codes of every finite bfloat16 value, in the order of their bit patterns, as converted by
# __nv_cvt_float_to_fp8 (SATFINITE) and __nv_cvt_float_to_fp4 (cudaRoundNearest) of CUDA 13.0 on the host.
NVIDIA_DIGESTS = {
    "e4m3": "618af8c46c8396a777e752830636a8d18d6034207dce6eb9b7c8108230ed3f08",
    "e5m2": "073759ce31deb36b4c6af5b82193b856606086240b82eca10741571caee138c0",
    "e2m1": "6a666a6359a3c168f1646704ebb476c70b144b5f325d2236872ba46dbe2c1d31",
}
# Exponent bits, mantissa bits and bias.
FLOATS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
INTS = {"int8": 8, "int4": 4, "int2": 2}


def every_bf16() -> torch.Tensor:
    """float32 [65280]: every finite bfloat16 value, in the order of its bits."""
    bits = np.arange(65536, dtype=np.uint32) << 16
    values = torch.from_numpy(bits.view(np.float32).copy())
    return values[torch.isfinite(values)]


def codes_of(element: str, values: torch.Tensor, levels: str = "symmetric") -> np.ndarray:
    """One code per byte: each value is encoded in a row of its own."""
    return elements.encode(element, values[:, None], levels=levels)[:, 0].numpy()


def magnitudes(element: str) -> np.ndarray:
    """float64 values of the non-negative finite codes, in code order, from the definition of the format."""
    exponent_bits, mantissa_bits, bias = FLOATS[element]
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return np.array([v for v in values if v <= ELEMENTS[element].max])


def nearest_even(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest grid point in float64; a tie goes to the even index, beyond the grid to its end."""
    upper = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    lower = upper - 1
    below, above = values - grid[lower], grid[upper] - values
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(take_upper, upper, lower)


@pytest.mark.parametrize("element", FLOATS)
def test_every_bf16_value_goes_to_the_nearest_code_ties_to_even(element: str) -> None:
    values = every_bf16()
    grid, exact = magnitudes(element), values.double().numpy()
    expected = nearest_even(np.abs(exact), grid) | (np.signbit(exact) << (ELEMENTS[element].bits - 1))
    assert np.array_equal(codes_of(element, values), expected)


@pytest.mark.parametrize("element", FLOATS)
def test_every_bf16_value_gets_the_code_that_nvidia_gives_it(element: str) -> None:
    assert hashlib.sha256(codes_of(element, every_bf16()).tobytes()).hexdigest() == NVIDIA_DIGESTS[element]


@pytest.mark.parametrize("element", INTS)
@pytest.mark.parametrize("levels", ["symmetric", "unsigned"])
def test_integers_round_half_to_even_and_saturate(element: str, levels: str) -> None:
    bits, values = INTS[element], every_bf16()
    low, high = (0, 2**bits - 1) if levels == "unsigned" else (-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1)
    expected = np.clip(np.rint(values.double().numpy()), low, high).astype(np.int64) & (2**bits - 1)
    assert np.array_equal(codes_of(element, values, levels), expected)
    decoded = elements.decode(element, elements.encode(element, values[:, None], levels=levels), 1, levels=levels)
    assert np.array_equal(decoded[:, 0].numpy(), np.clip(np.rint(values.double().numpy()), low, high))


@pytest.mark.parametrize("element", FLOATS)
def test_float_codes_decode_to_their_definition(element: str) -> None:
    grid, bits = magnitudes(element), ELEMENTS[element].bits
    codes = torch.arange(len(grid), dtype=torch.uint8)
    packed = elements.pack(codes[:, None], bits)
    assert np.array_equal(elements.decode(element, packed, 1)[:, 0].numpy(), grid)
    negative = elements.pack((codes | 1 << (bits - 1))[:, None], bits)
    assert np.array_equal(elements.decode(element, negative, 1)[:, 0].numpy(), -grid)


@pytest.mark.parametrize("magnitude", [448.0, 449.0, 464.0, 465.0, 480.0, 1e5, 3e38])
def test_e4m3_saturates_at_448_on_every_torch(magnitude: float) -> None:
    both = torch.tensor([[magnitude, -magnitude]])
    assert elements.encode("e4m3", both).tolist() == [[0x7E, 0xFE]]
    assert elements.decode("e4m3", elements.encode("e4m3", both), 2).tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("magnitude", [57344.0, 61439.0, 61440.0, 65536.0, 1e30])
def test_e5m2_saturates_below_its_infinity(magnitude: float) -> None:
    assert elements.encode("e5m2", torch.tensor([[magnitude, -magnitude]])).tolist() == [[0x7B, 0xFB]]


def test_golden_codes() -> None:
    e4m3 = torch.tensor([[0.0, -0.0, 1.0, -1.0, 0.001953125, 0.0009765625, 448.0, 1.0625, 1.1875]])
    assert elements.encode("e4m3", e4m3).tolist() == [[0x00, 0x80, 0x38, 0xB8, 0x01, 0x00, 0x7E, 0x38, 0x3A]]
    # 0.25 and 1.25 tie downwards to the even code, 0.75, 1.75 and 3.5 upwards; 5.0 ties down to 4.
    e2m1 = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.001, -0.75, 100.0]])
    assert elements.unpack(elements.encode("e2m1", e2m1), 4).tolist() == [[0, 2, 2, 4, 4, 6, 6, 7, 10, 7]]
    assert elements.encode("int4", torch.tensor([[1.0, -1.0, 7.0, -7.0, -9.0]])).tolist() == [[0xF1, 0x97, 0x09]]
    assert elements.encode("int2", torch.tensor([[1.0, -1.0, 0.0, 0.5, 1.0]])).tolist() == [[0b00001101, 0b01]]
    assert elements.encode("bf16", torch.tensor([[1.0, -2.0]])).tolist() == [[0x80, 0x3F, 0x00, 0xC0]]


def test_bf16_rounds_to_nearest_and_never_overflows_to_infinity() -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([[largest, -largest, 1.00390625, 1.01171875]])
    limit = torch.finfo(torch.bfloat16).max
    assert elements.decode("bf16", elements.encode("bf16", values), 4).tolist() == [[limit, -limit, 1.0, 1.015625]]


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1", "int8", "int4", "int2"])
def test_a_transposed_view_encodes_as_its_copy(element: str) -> None:
    values = torch.randn(6, 5).T
    assert not values.is_contiguous()
    assert torch.equal(elements.encode(element, values), elements.encode(element, values.contiguous()))


@given(
    bits=st.sampled_from([2, 4, 8]),
    codes=st.lists(st.integers(0, 255), min_size=1, max_size=40),
)
def test_packing_is_lossless_and_puts_the_first_code_in_the_low_bits(bits: int, codes: list[int]) -> None:
    codes = [c % 2**bits for c in codes]
    packed = elements.pack(torch.tensor([codes], dtype=torch.uint8), bits)
    as_integer = sum(c << (bits * i) for i, c in enumerate(codes))
    length = -(-len(codes) * bits // 8)
    assert bytes(packed[0].tolist()) == as_integer.to_bytes(length, "little")
    assert elements.unpack(packed, bits)[0, : len(codes)].tolist() == codes
