"""What can be asked for: shapes of attention, lengths, batches. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kveval.bench.record import ShapeRow
from kveval.config import parse_length
from kveval.errors import ConfigError, UnknownNameError
from kveval.formats.spec import KVScheme, get_scheme, scheme_names

__all__ = [
    "SHAPES",
    "WHAT",
    "Case",
    "parse_batches",
    "parse_lengths",
    "parse_schemes",
    "parse_shapes",
    "parse_what",
]

WHAT = ("decode", "append", "step")
"""What can be timed; a whole model is asked for by its name."""

SHAPES = {
    shape.name: shape
    for shape in (
        ShapeRow("llama-8b", 32, 8, 128, 32),
        ShapeRow("qwen2.5-0.5b", 14, 2, 64, 24),
        ShapeRow("gemma-3-1b", 4, 1, 256, 26),
        ShapeRow("smollm2-135m", 9, 3, 64, 30),
    )
}
"""Attention of well-known models; every layer is taken to see all tokens."""

DEFAULT_LAYERS = 32

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One layer's attention: `batch` sequences of `length` tokens."""

    shape: ShapeRow
    batch: int
    length: int

    @property
    def capacity(self) -> int:
        """Tokens that are allocated: kernels want heads that begin at multiples of 16 bytes."""
        return -(-self.length // 16) * 16

    def __str__(self) -> str:
        return f"{self.shape.name}, batch {self.batch}, {self.length:,} tokens"


def parse_shapes(text: str) -> tuple[ShapeRow, ...]:
    """From "llama-8b,32/8/128": names of `SHAPES`, or query heads / KV heads / head size [/ layers].

    Raises:
        ConfigError: for anything else.
    """
    return _listed(text, _shape, "--shapes")


def _shape(text: str) -> ShapeRow:
    if "/" not in text:
        if text not in SHAPES:
            raise UnknownNameError("shape", text, SHAPES, where="--shapes")
        return SHAPES[text]
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in text.split("/")]
    if len(numbers) not in (3, 4) or min(numbers) < 1 or numbers[0] % numbers[1]:
        raise ConfigError(
            f"--shapes {text!r} is no shape.",
            remedy="Write query heads/KV heads/head size, as 32/8/128; a fourth number is layers.",
        )
    query_heads, kv_heads, head_dim, layers = (*numbers, DEFAULT_LAYERS)[:4]
    return ShapeRow(text, query_heads, kv_heads, head_dim, layers)


def parse_lengths(text: str) -> tuple[int, ...]:
    """From "1k,8192"."""

    def length(part: str) -> int:
        tokens = parse_length(part)
        if not isinstance(tokens, int) or tokens < 1:
            raise ConfigError(f"--lengths {part!r} is no length.", remedy="Write 4096, 4k or 1M.")
        return tokens

    return tuple(sorted(_listed(text, length, "--lengths")))


def parse_batches(text: str) -> tuple[int, ...]:
    """From "1,4"."""

    def batch(part: str) -> int:
        if not (part.isascii() and part.isdigit()) or int(part) < 1:
            raise ConfigError(f"--batches {part!r} is no number of sequences.", remedy="Write 1,4.")
        return int(part)

    return tuple(sorted(_listed(text, batch, "--batches")))


def parse_what(text: str) -> tuple[str, ...]:
    """From "decode,append"."""

    def part(name: str) -> str:
        if name not in WHAT:
            raise UnknownNameError("part of the benchmark", name, WHAT, where="--what")
        return name

    return _listed(text, part, "--what")


def parse_schemes(text: str) -> tuple[KVScheme, ...]:
    """From "k8v4,nvfp4", or "all"; BF16 is always among them and comes first."""
    names = scheme_names() if text == "all" else _listed(text, str, "--schemes")
    return tuple(get_scheme(name, where="--schemes") for name in dict.fromkeys(["bf16", *names]))


def _listed(text: str, parse: Callable[[str], T], where: str) -> tuple[T, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{where} is empty.", remedy="Separate what you want by commas.")
    return tuple(dict.fromkeys(parse(part) for part in parts))
