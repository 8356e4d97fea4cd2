"""Element types: what each code of a stored element stands for. All data, no torch.

An element is a table. `values[code]` times a scale (plus a zero point) is what reading returns; writing picks the
nearest value. NaN marks codes that stand for no number, which writing never produces.

Adding one: an `Element` in `ELEMENTS`, or one that another package registers under the entry point group
`kveval.elements`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from kveval.errors import ConfigError, UnknownNameError
from kveval.identity import digest
from kveval.registry import load_plugin, plugin_names, refuse_claims

__all__ = ["Element", "element_names", "get_element", "integers", "minifloat"]

ELEMENT_GROUP = "kveval.elements"
NAN = math.nan


@dataclass(frozen=True)
class Element:
    """A number format of one stored element.

    Attributes:
        name: What formats call it.
        bits: Bits of one code, at most 8; 16 for `bf16`, the one element that is stored as it is.
        values: What each of the 2^bits codes stands for, in code order; empty for `bf16`.
        ties: Which neighbour a value exactly between two takes: the `even` code, as hardware rounds, or the `upper`.
        source: Where the definition can be checked.
    """

    name: str
    bits: int
    values: tuple[float, ...] = ()
    ties: Literal["even", "upper"] = "even"
    source: str = ""

    def __post_init__(self) -> None:
        if self.wide:
            return
        if not 1 <= self.bits <= 8 or len(self.values) != 2**self.bits:
            raise ConfigError(
                f"element {self.name}: {self.bits} bits need {2**self.bits} values, not {len(self.values)}."
            )
        if len(set(self.numbers)) < 2 or any(map(math.isinf, self.values)):
            raise ConfigError(
                f"element {self.name}: needs two or more different finite values (NaN where a code is unused)."
            )

    @property
    def wide(self) -> bool:
        """Whether it is stored as bfloat16, without a scale."""
        return self.bits == 16

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers it can hold, in code order."""
        return tuple(v for v in self.values if not math.isnan(v))

    @property
    def max(self) -> float:
        """Largest finite magnitude."""
        return _BF16_MAX if self.wide else max(map(abs, self.numbers))

    @property
    def foreign(self) -> bool:
        """Whether another package brings it, and may bring another table under its name tomorrow."""
        return self.name not in _BY_NAME

    @property
    def digest(self) -> str:
        """Identity of its codes."""
        numbers = [None if math.isnan(v) else float(v) for v in self.values]
        return digest("element", [self.bits, self.ties, numbers])

    @property
    def signed(self) -> bool:
        """Whether it holds numbers of both signs."""
        return self.wide or min(self.numbers) < 0


_BF16_MAX = (2 - 2**-7) * 2.0**127


def minifloat(exponent_bits: int, mantissa_bits: int, *, bias: int, unused: int = 0) -> tuple[float, ...]:
    """Values of a small float, sign bit first; the `unused` largest magnitudes of each sign are no numbers.

    Exponent 0 holds the subnormals m * 2^(1 - bias - mantissa_bits); others (1 + m / 2^mantissa_bits) * 2^(e - bias).
    """
    magnitudes = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
        leading = 1 if exponent else 0
        magnitudes.append((leading + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias))
    if unused:
        magnitudes[-unused:] = [NAN] * unused
    return (*magnitudes, *(-m for m in magnitudes))


def integers(bits: int, *, offset: int | None = None) -> tuple[float, ...]:
    """Values of an integer code: two's complement without the most negative one, or code - `offset`."""
    if offset is not None:
        return tuple(float(code - offset) for code in range(2**bits))
    half = 2 ** (bits - 1)
    return (*map(float, range(half)), NAN, *map(float, range(1 - half, 0)))


def mirrored(magnitudes: Iterable[float]) -> tuple[float, ...]:
    """Values in ascending order: the magnitudes (ascending) with both signs."""
    up = tuple(magnitudes)
    return (*(-m for m in reversed(up)), *up)


_OCP = "OCP 8-bit Floating Point Specification 1.0"
_MX = "OCP Microscaling Formats 1.0, section 5.3"
_GGML = "llama.cpp, ggml/src/ggml-quants.c"
_MAX = "J. Max, Quantizing for minimum distortion, 1960, table I (unit normal distribution)"

ELEMENTS: tuple[Element, ...] = (
    Element("bf16", 16, source="the baseline: the upper half of a float32"),
    Element("e4m3", 8, minifloat(4, 3, bias=7, unused=1), source=_OCP),
    Element("e5m2", 8, minifloat(5, 2, bias=15, unused=4), source=_OCP),
    Element("e2m1", 4, minifloat(2, 1, bias=1), source=_MX),
    Element("e1m2", 4, minifloat(1, 2, bias=1), source="a sign, one exponent bit and two mantissa bits, bias 1"),
    Element("int8", 8, integers(8), source="two's complement, -127 to 127"),
    Element("int4", 4, integers(4), source="two's complement, -7 to 7"),
    Element("int2", 2, integers(2), source="two's complement, -1 to 1"),
    Element("uint8", 8, integers(8, offset=0), source="0 to 255, above a zero point"),
    Element("uint5", 5, integers(5, offset=0), source="0 to 31, above a zero point"),
    Element("uint4", 4, integers(4, offset=0), source="0 to 15, above a zero point"),
    Element("uint2", 2, integers(2, offset=0), source="0 to 3, above a zero point"),
    Element("offset5", 5, integers(5, offset=16), source=f"-16 to 15, stored plus 16; {_GGML}"),
    Element("offset4", 4, integers(4, offset=8), source=f"-8 to 7, stored plus 8; {_GGML}"),
    Element(
        "iq4_nl", 4, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), "upper",
        source=f"a table of 16 levels, kvalues_iq4nl; {_GGML}",
    ),
    Element(
        "lloyd_max4", 4, mirrored((0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326)), "upper",
        source=_MAX,
    ),
    Element("lloyd_max3", 3, mirrored((0.2451, 0.7560, 1.3439, 2.1520)), "upper", source=_MAX),
)  # fmt: skip
"""The element types of this package."""

_BY_NAME = {e.name: e for e in ELEMENTS}


def element_names() -> tuple[str, ...]:
    """Names of all element types, those of other packages last."""
    return (*_BY_NAME, *(name for name in plugin_names(ELEMENT_GROUP) if name not in _BY_NAME))


@cache
def get_element(name: str) -> Element:
    """The element type called `name`.

    Raises:
        UnknownNameError: with the nearest names.
        ConfigError: if the package that registers it gives something else, or a package claims a name of kveval's own.
    """
    if name in _BY_NAME:
        refuse_claims(ELEMENT_GROUP, name)
        return _BY_NAME[name]
    if name not in plugin_names(ELEMENT_GROUP):
        raise UnknownNameError("element type", name, element_names())
    element = load_plugin(ELEMENT_GROUP, name)
    if not isinstance(element, Element) or element.name != name:
        raise ConfigError(f"the entry point {name} of {ELEMENT_GROUP} is not an Element of that name.")
    return element
