"""What a benchmark found, as data. No torch.

All times are per call. GB are 10^9 bytes. A speedup is the other's time over the scheme's: 2 is twice as fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from kveval.files import read_versioned

__all__ = [
    "SCHEMA_VERSION",
    "AppendRow",
    "Bench",
    "CopyRow",
    "DecodeRow",
    "LeftOut",
    "ModelRow",
    "ReferenceRow",
    "ShapeRow",
    "Spread",
    "StepRow",
    "read_bench",
]

SCHEMA_VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """Median, least and largest of `n` samples."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Self:
        """The spread of at least one sample."""
        known = list(samples)
        return cls(statistics.median(known), min(known), max(known), len(known))

    @classmethod
    def ratio(cls, over: Sequence[float], under: Sequence[float]) -> Self:
        """Of the quotients of samples that were taken side by side."""
        return cls.of(a / b for a, b in zip(over, under, strict=True))

    @classmethod
    def rate(cls, nbytes: int, us: Sequence[float]) -> Self:
        """GB/s of `nbytes` that took each of `us` microseconds."""
        return cls.of(nbytes / t / 1e3 for t in us)


@dataclass(frozen=True)
class CopyRow:
    """Copying one large tensor onto another; `nbytes` counts reads and writes."""

    nbytes: int
    us: Spread
    gb_per_s: Spread


@dataclass(frozen=True)
class ShapeRow:
    """The attention of one model."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    layers: int


@dataclass(frozen=True)
class DecodeRow:
    """One query per sequence over a layer's packed cache.

    Attributes:
        shape, batch, length, scheme: What was timed; `shape` names a `ShapeRow`.
        bytes_read: Fewest bytes that must be read: codes and scales of all tokens, and the query.
        us: Microseconds.
        gb_per_s: `bytes_read` over the time.
        of_copy: That over the copy's bandwidth.
        speedup_to_bf16: Over our own kernel on BF16 storage.
        speedup_to_sdpa: Over torch's attention on BF16 tensors, in its fastest form.
        speedup_to_flashinfer: Over FlashInfer on BF16 pages; None where it was not timed.
        loads_us: The kernel without its arithmetic: it loads all bytes and multiplies nothing. None on a CPU.
        widening: Share of the time that is not that of the loads: 1 - loads / us.
    """

    shape: str
    batch: int
    length: int
    scheme: str
    bytes_read: int
    us: Spread
    gb_per_s: Spread
    of_copy: Spread
    speedup_to_bf16: Spread
    speedup_to_sdpa: Spread
    speedup_to_flashinfer: Spread | None
    loads_us: Spread | None
    widening: Spread | None


@dataclass(frozen=True)
class ReferenceRow:
    """Somebody else's attention on the same tokens in BF16. `form` is the way of calling it that was fastest."""

    shape: str
    batch: int
    length: int
    name: str
    form: str
    bytes_read: int
    us: Spread
    gb_per_s: Spread


@dataclass(frozen=True)
class AppendRow:
    """Encoding and storing one token of one layer, keys and values.

    Attributes:
        shape, batch, scheme: What was timed.
        us: Microseconds.
        copy_us: Of torch copying the same keys and values into BF16 tensors (two index_copy_).
        times_copy: `us` over `copy_us`.
        launches: Kernels launched; None on a CPU.
    """

    shape: str
    batch: int
    scheme: str
    us: Spread
    copy_us: Spread
    times_copy: Spread
    launches: int | None


@dataclass(frozen=True)
class StepRow:
    """Append and attention of every layer for one token, nothing else of the model; every layer sees all tokens.

    `eager_ms` is what a caller waits, Python included; `graph_ms` is the same as a CUDA graph, None on a CPU.
    """

    shape: str
    batch: int
    length: int
    scheme: str
    layers: int
    eager_ms: Spread
    graph_ms: Spread | None
    eager_speedup_to_bf16: Spread
    graph_speedup_to_bf16: Spread | None


@dataclass(frozen=True)
class ModelRow:
    """A whole model's forward for one token, eagerly.

    Attributes:
        model, length, scheme: What was timed; scheme "transformers" is its own cache with torch's attention.
        ms: Milliseconds per token.
        speedup_to_bf16: Median over median, of kveval's own BF16 cache.
        attention_path: What ran.
        cache_bytes: Of the cache when decoding ended; None for transformers' own.
        peak_bytes: Most GPU memory at any time, weights and prefill included; None on a CPU.
        peak_decode_bytes: Most while decoding.
    """

    model: str
    length: int
    scheme: str
    ms: Spread
    speedup_to_bf16: float
    attention_path: str
    cache_bytes: int | None
    peak_bytes: int | None
    peak_decode_bytes: int | None


@dataclass(frozen=True)
class LeftOut:
    """What was asked for and not timed, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class Bench:
    """A benchmark's record.

    Attributes:
        device: "cpu", or the GPU's name.
        caveat: What the figures do not say; "" on a GPU.
        kernel_hash: Of the kernels' sources (`kveval.kernels.compiler.sources_digest`).
        nvrtc: Version of the compiler; None where there is none.
        driver, commit: As in `env`.
        l2_bytes: Of the GPU; caches that are timed exceed it several times.
        env: Of `kveval.env.collect`.
    """

    device: str
    caveat: str
    kernel_hash: str
    nvrtc: str | None
    driver: str | None
    commit: str | None
    l2_bytes: int | None
    env: dict[str, Any]
    copy: CopyRow
    shapes: tuple[ShapeRow, ...]
    decode: tuple[DecodeRow, ...] = ()
    references: tuple[ReferenceRow, ...] = ()
    append: tuple[AppendRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    model_steps: tuple[ModelRow, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema_version": SCHEMA_VERSION, "what": "kveval bench", **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Bench:
        """The inverse of `to_dict`."""
        known = {field.name: data[field.name] for field in fields(cls)}
        known["copy"] = _row(CopyRow, known["copy"])
        for name, kind in _TABLES.items():
            known[name] = tuple(_row(kind, row) for row in known[name])
        return cls(**known)


_TABLES: dict[str, Any] = {
    "shapes": ShapeRow, "decode": DecodeRow, "references": ReferenceRow, "append": AppendRow, "steps": StepRow,
    "model_steps": ModelRow, "left_out": LeftOut,
}  # fmt: skip


def _row(kind: type[T], data: Mapping[str, Any]) -> T:
    assert is_dataclass(kind)
    return kind(**{key: Spread(**value) if isinstance(value, Mapping) else value for key, value in data.items()})


def read_bench(file: str | Path) -> Bench:
    """The record that `kveval bench` wrote.

    Raises:
        StoreError: it can't be read, or is of another schema version.
    """
    remedy = "Run `kveval bench` again."
    return read_versioned(Path(file), Bench.from_dict, version=SCHEMA_VERSION, remedy=remedy)
