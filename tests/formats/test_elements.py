"""Elements: their tables against their definitions, and every way of rounding to them against plain nearest search."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kveval.errors import ConfigError, UnknownNameError
from kveval.formats import element_types, elements
from kveval.formats.element_types import ELEMENTS, Element, element_names, get_element, integers, minifloat
from kveval.formats.packing import pack

# sha256 over the codes of every finite bfloat16 value, in the order of their bit patterns, as converted by
# __nv_cvt_float_to_fp8 (SATFINITE) and __nv_cvt_float_to_fp4 (cudaRoundNearest) of CUDA 13.0 on the host.
NVIDIA_DIGESTS = {
    "e4m3": "618af8c46c8396a777e752830636a8d18d6034207dce6eb9b7c8108230ed3f08",
    "e5m2": "073759ce31deb36b4c6af5b82193b856606086240b82eca10741571caee138c0",
    "e2m1": "6a666a6359a3c168f1646704ebb476c70b144b5f325d2236872ba46dbe2c1d31",
}
# Exponent bits, mantissa bits, bias and largest magnitude.
FLOATS = {"e4m3": (4, 3, 7, 448), "e5m2": (5, 2, 15, 57344), "e2m1": (2, 1, 1, 6), "e1m2": (1, 2, 1, 1.75)}
TWOS_COMPLEMENT = {"int8": 8, "int4": 4, "int2": 2}
OFFSET = {"uint8": (8, 0), "uint5": (5, 0), "uint4": (4, 0), "uint2": (2, 0), "offset5": (5, 16), "offset4": (4, 8)}
LLOYD_MAX = {"lloyd_max4": 16, "lloyd_max3": 8}

NARROW = [e.name for e in ELEMENTS if not e.wide]

# Elements of nobody's package: what a plug-in may bring, each unlike those above in a way that a short cut could miss.
STRANGE = {
    e.name: e
    for e in (
        Element("gray_code", 2, (0, 1, 3, 2)),
        Element("falling", 2, (3, 2, 1, 0)),
        Element("starts_at_one", 2, (1, 2, 3, 4)),
        Element("odd_offset", 4, integers(4, offset=7)),
        Element("ramp_up", 4, integers(4, offset=8), ties="upper"),
        Element("ramp_with_a_hole", 2, (0, 1, math.nan, 3)),
        Element("float_up", 4, minifloat(2, 1, bias=1), ties="upper"),
        Element("float_with_nan", 6, minifloat(3, 2, bias=3, unused=2)),
        Element("one_bit", 1, (1, -1)),
        Element("one_bit_rising", 1, (-1, 1)),
        Element("mirror_of_negatives", 2, (-1, -2, 1, 2)),
        Element("no_zero_sign_magnitude", 3, (1, 2, 3, 5, -1, -2, -3, -5)),
        Element("half_steps", 3, (-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5)),
        Element("half_offset", 2, (-1.5, -0.5, 0.5, 1.5)),
        Element("shuffled", 3, (0.3, -7, 11, 2.5, math.nan, -0.1, 0.25, 100)),
        Element("twice_the_same", 2, (1, 5, 1, 9)),
        Element("seven_bits", 7, integers(7)),
    )
}


@pytest.fixture(autouse=True)
def strange_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, element in STRANGE.items():
        monkeypatch.setitem(element_types._BY_NAME, name, element)


def every_bf16() -> torch.Tensor:
    """float32 [65280]: every finite bfloat16 value, in the order of its bits."""
    bits = np.arange(65536, dtype=np.uint32) << 16
    values = torch.from_numpy(bits.view(np.float32).copy())
    return values[torch.isfinite(values)]


def around_midpoints(levels: NDArray[np.float64]) -> torch.Tensor:
    """float32: midpoints between neighbours, levels, and what is a few steps of float32 on both sides of them."""
    levels = np.unique(levels)
    points = np.concatenate([levels, (levels[1:] + levels[:-1]) / 2]).astype(np.float32)
    found = [points]
    for direction in (np.float32(np.inf), np.float32(-np.inf)):
        near = points
        for _ in range(3):
            near = np.nextafter(near, direction)
            found.append(near)
    return torch.from_numpy(np.concatenate(found))


def random_values(scale: float) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(20000, generator=draw) * scale
    spread = torch.randn(20000, generator=draw) * 2.0 ** torch.randint(-40, 40, (20000,), generator=draw)
    return torch.cat([plain, spread])


def nearest_value(element: Element, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The definition: the nearest number; between two, the one whose code is even, or the upper one."""
    numbers = sorted({v for v in element.values if not math.isnan(v)})
    is_even = np.array([element.values.index(v) % 2 == 0 for v in numbers])
    grid = np.array(numbers)
    upper = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    # Not two distances: float64 does not tell apart those of a tiny value and of zero.
    middle = (grid[upper] + grid[upper - 1]) / 2
    tie_goes_up = np.ones(len(x), bool) if element.ties == "upper" else is_even[upper]
    return np.where((x > middle) | ((x == middle) & tie_goes_up), grid[upper], grid[upper - 1])


def codes_of(name: str, values: torch.Tensor) -> NDArray[np.uint8]:
    codes = elements.nearest(name, values)
    assert codes.dtype == torch.uint8
    assert codes.shape == values.shape
    return codes.numpy()


@pytest.mark.parametrize("source", ["every bf16", "midpoints", "random"])
@pytest.mark.parametrize("name", [*NARROW, *STRANGE])
def test_every_value_goes_to_the_nearest_number(name: str, source: str) -> None:
    element = get_element(name)
    table = np.array(element.values)
    x = {
        "every bf16": every_bf16,
        "midpoints": lambda: around_midpoints(np.array(element.numbers)),
        "random": lambda: random_values(element.max / 2),
    }[source]()
    got = table[codes_of(name, x)]
    assert not np.isnan(got).any(), "a code was written that stands for no number"
    np.testing.assert_array_equal(got, nearest_value(element, x.double().numpy()))


@pytest.mark.parametrize("name", [e for e in NARROW if e not in FLOATS])
def test_each_number_has_one_code(name: str) -> None:
    numbers = get_element(name).numbers
    assert len(set(numbers)) == len(numbers)
    codes = [c for c, v in enumerate(get_element(name).values) if not math.isnan(v)]
    assert codes_of(name, torch.tensor(numbers)).tolist() == codes


@pytest.mark.parametrize("name", FLOATS)
def test_floats_keep_the_sign_of_zero(name: str) -> None:
    half = 2 ** (get_element(name).bits - 1)
    tiny = 2.0**-120
    assert codes_of(name, torch.tensor([0.0, tiny, -0.0, -tiny])).tolist() == [0, 0, half, half]


@pytest.mark.parametrize("name", NVIDIA_DIGESTS)
def test_every_bf16_value_gets_the_code_that_nvidia_gives_it(name: str) -> None:
    assert hashlib.sha256(codes_of(name, every_bf16()).tobytes()).hexdigest() == NVIDIA_DIGESTS[name]


@pytest.mark.parametrize("name", [*NARROW, *STRANGE])
def test_infinities_take_the_ends(name: str) -> None:
    element = get_element(name)
    got = [element.values[c] for c in codes_of(name, torch.tensor([math.inf, -math.inf])).tolist()]
    assert got == [max(element.numbers), min(element.numbers)]


# Tables.


@pytest.mark.parametrize("name", FLOATS)
def test_tables_of_floats(name: str) -> None:
    exponent_bits, mantissa_bits, bias, largest = FLOATS[name]
    magnitudes = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, fraction = code >> mantissa_bits, (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
        magnitudes.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    expected = [m if m <= largest else math.nan for m in magnitudes]
    np.testing.assert_array_equal(get_element(name).values, [*expected, *(-m for m in expected)])
    assert get_element(name).max == largest


@pytest.mark.parametrize("name", TWOS_COMPLEMENT)
def test_tables_of_signed_integers(name: str) -> None:
    bits = TWOS_COMPLEMENT[name]
    expected = [c if c < 2 ** (bits - 1) else c - 2**bits for c in range(2**bits)]
    expected[2 ** (bits - 1)] = math.nan
    np.testing.assert_array_equal(get_element(name).values, expected)


@pytest.mark.parametrize("name", OFFSET)
def test_tables_of_offset_integers(name: str) -> None:
    bits, offset = OFFSET[name]
    assert get_element(name).values == tuple(range(-offset, 2**bits - offset))


@pytest.mark.parametrize("name", LLOYD_MAX)
def test_lloyd_max_levels_are_centroids_of_the_normal_distribution(name: str) -> None:
    """What defines them: borders are midpoints, and a level is the mean of the distribution between its borders."""
    levels = get_element(name).values
    assert len(levels) == LLOYD_MAX[name]
    borders = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
    for level, (low, high) in zip(levels, itertools.pairwise(borders), strict=True):
        density = [math.exp(-(b**2) / 2) / math.sqrt(2 * math.pi) for b in (low, high)]
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        assert level == pytest.approx((density[0] - density[1]) / mass, abs=2e-4)


def test_every_element_of_this_package_is_tested() -> None:
    assert set(NARROW) == {*FLOATS, *TWOS_COMPLEMENT, *OFFSET, *LLOYD_MAX, "iq4_nl"}
    assert element_names()[: len(ELEMENTS)] == ("bf16", *NARROW)
    assert all(e.source for e in ELEMENTS)


def test_golden_codes() -> None:
    e4m3 = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.001953125, 0.0009765625, 448.0, 1.0625, 1.1875])
    assert codes_of("e4m3", e4m3).tolist() == [0x00, 0x80, 0x38, 0xB8, 0x01, 0x00, 0x7E, 0x38, 0x3A]
    # 0.25 and 1.25 tie downwards to the even code, 0.75, 1.75 and 3.5 upwards; 5.0 ties down to 4.
    e2m1 = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.001, -0.75, 100.0])
    assert codes_of("e2m1", e2m1).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 10, 7]
    assert codes_of("int4", torch.tensor([1.0, -1.0, 7.0, -7.0, -9.0])).tolist() == [1, 15, 7, 9, 9]
    assert codes_of("int2", torch.tensor([1.0, -1.0, 0.0, 0.5, 1.0])).tolist() == [1, 3, 0, 0, 1]
    assert codes_of("offset4", torch.tensor([-8.0, 7.0, 0.5, 1.5])).tolist() == [0, 15, 8, 10]
    # Halfway between -10 and 1, and between 1 and 13: the upper one.
    assert codes_of("iq4_nl", torch.tensor([-4.5, 7.0, -127.0, 113.0, 500.0])).tolist() == [8, 9, 0, 15, 15]


# Reading.


@pytest.mark.parametrize("head_dim", [1, 5, 32, 80])
@pytest.mark.parametrize("name", [*NARROW, *STRANGE])
def test_packed_codes_read_as_their_table_says(name: str, head_dim: int) -> None:
    element = get_element(name)
    written = [c for c, v in enumerate(element.values) if not math.isnan(v)]
    codes = torch.tensor(written, dtype=torch.uint8).repeat(3 * head_dim)[: 3 * head_dim].view(1, 3, head_dim)
    expected = np.float32(np.array(element.values)[codes.numpy()])
    got = elements.decode(name, pack(codes, element.bits), head_dim)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), expected)
    if head_dim == 32 and element.bits in (4, 5, 8):
        blocks = elements.decode(name, pack(codes, element.bits, "ggml"), head_dim, packing="ggml")
        np.testing.assert_array_equal(blocks.numpy(), expected)


@pytest.mark.parametrize("name", [*NARROW, *STRANGE])
def test_a_transposed_view_encodes_as_its_copy(name: str) -> None:
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).T
    assert not values.is_contiguous()
    assert torch.equal(elements.nearest(name, values), elements.nearest(name, values.contiguous()))


# What an element must be.


@pytest.mark.parametrize(
    ("bits", "values", "message"),
    [
        (2, (0, 1, 2), "2 bits need 4 values, not 3"),
        (0, (1,), "0 bits need 1 values"),
        (9, tuple(range(512)), "9 bits need 512 values"),
        (1, (3, 3), "two or more different finite values"),
        (1, (3, math.nan), "two or more different finite values"),
        (1, (0, math.inf), "two or more different finite values"),
    ],
)
def test_impossible_elements_are_refused(bits: int, values: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"element mine: .*{message}"):
        Element("mine", bits, values)


def test_properties() -> None:
    assert get_element("bf16").wide
    assert get_element("bf16").max == (2 - 2**-7) * 2.0**127
    assert {e.name: e.max for e in ELEMENTS if not e.wide} == {
        "e4m3": 448, "e5m2": 57344, "e2m1": 6, "e1m2": 1.75, "int8": 127, "int4": 7, "int2": 1, "uint8": 255,
        "uint5": 31, "uint4": 15, "uint2": 3, "offset5": 16, "offset4": 8, "iq4_nl": 127, "lloyd_max4": 2.7326,
        "lloyd_max3": 2.1520,
    }  # fmt: skip
    assert [e.name for e in ELEMENTS if not e.signed] == ["uint8", "uint5", "uint4", "uint2"]


def test_a_wrong_name_gets_suggestions() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown element type 'e3m4'.*\n.*'e4m3'"):
        get_element("e3m4")
