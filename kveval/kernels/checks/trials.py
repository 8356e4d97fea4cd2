"""What a check consists of, and how much of it is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

import torch

from kveval.kernels.checks.cases import Case, covered_schemes
from kveval.kernels.checks.measure import Measured, Yardstick

__all__ = ["FULL", "SMALL", "Check", "Draw", "Probe", "Sizes", "Trial", "plain_trial"]

T = TypeVar("T")


class Probe(Protocol):
    """Something that calls kernels."""

    def touch(self) -> None:
        """Make the calls on tensors without memory."""


@dataclass(frozen=True)
class Trial:
    """One thing that is tried.

    Attributes:
        case: What it is, for people.
        run: Does it.
        probes: Its calls, from which the kernels that it needs can be known beforehand.
    """

    case: str
    run: Callable[[], list[Measured]]
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class Sizes:
    """How much is tried.

    Attributes:
        seed: Of all data.
        few: Schemes that stand for all: one of every way in which elements and scales are read.
        rotate: Whether a case that needs a kernel of its own is tried with one of `few`, in turn, not with all.
        splits: Blocks per KV head in cases that need a kernel of their own; 0: as the host chooses, which makes it two.
        heads: KV heads.
        groups: Query heads of a KV head.
        head_dims: D.
        queries: Lq.
        lengths: Of a sequence whose attention is measured for every preset.
        long: Two lengths; the error at the second may be twice that at the first.
        random: Cases drawn at random.
        giant: Bytes of the planes that lie beyond 32-bit offsets, 0 for none.
        storage_tokens: Tokens of a tensor whose stored bytes are compared.
        storage_dims: D of such tensors in all dtypes, and in one each.
        storage_step: Of the formats that are stored, each so-manieth is tried.
    """

    seed: int
    few: tuple[str, ...]
    rotate: bool
    splits: int
    heads: int
    groups: tuple[int, ...]
    head_dims: tuple[int, ...]
    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    long: tuple[int, int]
    random: int
    giant: int
    storage_tokens: int
    storage_dims: tuple[tuple[int, ...], tuple[int, ...]]
    storage_step: int

    def every(self) -> tuple[str, ...]:
        """All presets that have kernels."""
        return covered_schemes(128)

    def schemes(self, turn: int) -> tuple[str, ...]:
        """For the `turn`-th case that needs kernels of its own."""
        return (self.few[turn % len(self.few)],) if self.rotate else self.few

    def seeds(self, check: str) -> Callable[[], int]:
        """A new seed at every call, the same ones whenever `check` is run with these sizes."""
        base = (self.seed * 1_000_003 + sum(ord(c) * 131**i for i, c in enumerate(check))) % 2**40
        counter = count(base)
        return lambda: next(counter)


def plain_trial(device: torch.device, case: Case) -> Trial:
    """One call against exact attention."""

    def run() -> list[Measured]:
        cache = case.make(device)
        return Yardstick.of(case, cache).measure(*case.attend(cache))

    return Trial(str(case), run, (case,))


Check = Callable[[torch.device, Sizes], Iterator[Trial]]


class Draw:
    """Random choices.

    Args:
        seed: The same seed makes the same choices.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def between(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.between(0, len(options) - 1)]


SMALL = Sizes(
    seed=0,
    few=("nvfp4", "fp8_per_token_head", "int4_g64", "bf16"),
    rotate=True,
    splits=2,
    heads=2,
    groups=(1, 4, 7, 16),
    head_dims=(64, 128, 192, 256),
    queries=(1, 2, 7, 64),
    lengths=(1, 200, 1500),
    long=(512, 8192),
    random=24,
    giant=0,
    storage_tokens=12,
    storage_dims=((), (64,)),
    storage_step=4,
)
"""What an emulator on one CPU core does in a minute or two, most of it compiling."""

FULL = Sizes(
    seed=0,
    few=("bf16", "fp8_per_token_head", "int4_g64", "nvfp4", "k8v4", "k16v4", "mxfp8"),
    rotate=False,
    splits=0,
    heads=8,
    groups=tuple(range(1, 17)),
    head_dims=(64, 128, 192, 256),
    queries=(1, 2, 7, 64),
    lengths=(1, 200, 4000),
    long=(1024, 131072),
    random=200,
    giant=2**31 + 2**24,
    storage_tokens=64,
    storage_dims=((64, 128), (80, 96, 256)),
    storage_step=1,
)
"""What a GPU does in some minutes."""
