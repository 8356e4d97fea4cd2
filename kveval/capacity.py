"""How many sessions fit on a GPU under a scheme.

    sessions = floor((usable - weights - workspace) / session_bytes(T))
    session_bytes(T) = sum over layers of the formats' bytes for T tokens (a window's, in sliding layers), in blocks

`usable` is the driver's memory less the reserve. Everything is per GPU of one tensor-parallel group:
weights are split over its ranks, KV heads too while there are enough of them (fewer heads than ranks are
replicated, as engines do), latents of MLA layers are replicated. Sizes are in bytes, lengths in tokens.
GB is 1e9 bytes and GiB is 2^30 bytes, never mixed. Arithmetic is exact (fractions), so a session that fits
to the byte is counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import yaml

from kveval.errors import ConfigError, UnknownNameError, UnsupportedError
from kveval.formats.layout import BF16, LayerFormat, layer_formats
from kveval.formats.spec import KVScheme

if TYPE_CHECKING:
    from kveval.config import CapacityConfig
    from kveval.geometry import LayerGeometry

__all__ = [
    "GIB",
    "Budget",
    "CacheCost",
    "Gpu",
    "Sessions",
    "cache_cost",
    "format_tokens",
    "get_gpu",
    "known_gpus",
    "product_cycles",
    "sessions",
    "sessions_table",
    "widening_cycles",
]

GIB = 2**30
MIB = 2**20
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>gb|gib)", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    """Memory of one GPU. `memory_bytes` is what the driver reports, `sold_as` what the vendor prints."""

    name: str
    memory_bytes: int
    card: str
    sold_as: str


@cache
def known_gpus() -> dict[str, Gpu]:
    """The GPU table, by name."""
    text = resources.files("kveval").joinpath("gpus.yaml").read_text(encoding="utf-8")
    return {
        name: Gpu(name, row["memory_mib"] * MIB, row["card"], row["sold_as"])
        for name, row in yaml.safe_load(text)["gpus"].items()
    }


def get_gpu(name: str, *, where: str = "") -> Gpu:
    """A GPU of the table, or a plain size: "80gb" is 80e9 bytes, "80gib" is 80 * 2^30 bytes.

    Raises:
        UnknownNameError: neither; `where` (file and key) leads the message.
    """
    gpus = known_gpus()
    if name in gpus:
        return gpus[name]
    size = _SIZE.fullmatch(name.strip())
    if size is None:
        raise UnknownNameError("GPU", name, gpus, where=where)
    unit = "GiB" if size["unit"].lower() == "gib" else "GB"
    label = f"{size['number']} {unit}"
    bytes_ = int(Fraction(size["number"]) * (GIB if unit == "GiB" else 10**9))
    return Gpu(name, bytes_, f"a GPU with {label}", label)


@dataclass(frozen=True)
class CacheCost:
    """What the cache of one session costs on one GPU of the group.

    Attributes:
        scheme: Name of the scheme.
        layers: Format and shape of every layer that stores keys and values, with the heads of one rank.
        notes: What was assumed, in sentences for the reader.
    """

    scheme: str
    layers: tuple[tuple[LayerFormat, LayerGeometry], ...]
    notes: tuple[str, ...]

    def session_bytes(self, context_length: int, *, block_size: int = 16) -> int:
        """Bytes of one session of `context_length` tokens, in whole blocks of `block_size` tokens."""
        total = 0
        for fmt, shape in self.layers:
            kept = context_length if shape.window is None else min(context_length, shape.window)
            tokens = _whole_blocks(kept, block_size)
            total += fmt.nbytes(tokens, shape) + tokens * BF16.unit_bytes(shape.indexer_dim)
        return total

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds to a long session, over the layers that keep every token; rounded up."""
        return math.ceil(sum((_layer_token_bytes(*layer) for layer in self.layers), Fraction(0)))

    @property
    def constant_bytes(self) -> int:
        """Bytes of a long session that no token adds: frozen scales, and what sinks and recent tokens cost in BF16."""
        tokens = math.lcm(*(role.step for fmt, _ in self.layers for role in (fmt.key, fmt.value))) * 2**20
        grown = sum((tokens * _layer_token_bytes(*layer) for layer in self.layers), Fraction(0))
        total = sum(
            fmt.nbytes(tokens, shape) + tokens * BF16.unit_bytes(shape.indexer_dim)
            for fmt, shape in self.layers
            if shape.window is None
        )
        return int(total - grown)


def _layer_token_bytes(fmt: LayerFormat, shape: LayerGeometry) -> Fraction:
    """Bytes that one more token adds to a layer that keeps every token; 0 for a window."""
    if shape.window is not None:
        return Fraction(0)
    sides = fmt.key.format.token_bytes(shape.head_dim_k) + fmt.value.format.token_bytes(shape.head_dim_v)
    return shape.kv_heads * sides + BF16.unit_bytes(shape.indexer_dim)


def _whole_blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


def cache_cost(layers: Sequence[LayerGeometry], scheme: KVScheme, *, tensor_parallel: int = 1) -> CacheCost:
    """Bytes of one session under `scheme`, per GPU of a group of `tensor_parallel`.

    Layers that read another layer's keys and values, linear layers and layers without attention store nothing here.
    Sparse-attention indexers keep one BF16 key per token, whatever the scheme says.

    Raises:
        UnsupportedError: KV heads that don't split over the ranks evenly (engines refuse them too), or a format that
            can't store the model's head size.
        ConfigError: the scheme names layers that the model does not have.
    """
    formats = layer_formats(scheme, layers)
    stored = [
        (fmt, replace(layer, kv_heads=_heads_of_rank(layer, tensor_parallel)))
        for fmt, layer in zip(formats, layers, strict=True)
        if fmt is not None
    ]
    return CacheCost(scheme.name, tuple(stored), tuple(_cost_notes(layers, formats, scheme, tensor_parallel)))


def _heads_of_rank(layer: LayerGeometry, ranks: int) -> int:
    return layer.kv_heads if layer.kind == "mla" else _heads_per_rank(layer.kv_heads, ranks)


def _heads_per_rank(kv_heads: int, ranks: int) -> int:
    if kv_heads % ranks and ranks % kv_heads:
        raise UnsupportedError(
            f"{kv_heads} KV heads don't split over {ranks} ranks.",
            remedy="Use a tensor_parallel that divides the number of KV heads, or a multiple of it.",
        )
    return max(1, kv_heads // ranks)


def _cost_notes(
    layers: Sequence[LayerGeometry], formats: Sequence[LayerFormat | None], scheme: KVScheme, ranks: int
) -> Iterator[str]:
    kinds = Counter("shared" if layer.shared_with is not None else layer.kind for layer in layers)
    wide = Counter(
        layer.kind
        for layer, fmt in zip(layers, formats, strict=True)
        if fmt is not None and scheme.lossy and not fmt.lossy
    )
    if wide["sliding"]:
        yield f"{_layers(wide['sliding'], 'sliding-window')} in BF16: {scheme.name} narrows only the others."
    if others := wide.total() - wide["sliding"]:
        yield f"{_layers(others, 'other' if wide['sliding'] else 'whole')} in BF16, as {scheme.name} says."
    if kinds["sliding"] and not kinds["full"] and not kinds["mla"]:
        yield "Every layer keeps only a window: past it, a session does not grow with its context."
    if any(layer.stores_kv and layer.indexer_dim for layer in layers):
        yield "The keys of the sparse-attention indexer are counted in BF16, whatever the scheme."
    if kinds["shared"]:
        yield f"{kinds['shared']} of {len(layers)} layers read another layer's cache and store none."
    if kinds["linear"]:
        yield f"{kinds['linear']} of {len(layers)} layers keep a recurrent state; its bytes are not counted."
    if ranks > 1 and kinds["mla"]:
        yield f"MLA latents are replicated on all {ranks} ranks."
    if any(layer.stores_kv and layer.kind != "mla" and layer.kv_heads < ranks for layer in layers):
        yield f"There are fewer KV heads than {ranks} ranks: heads are replicated."


def _layers(count: int, kind: str) -> str:
    return f"{count} {kind} layer stays" if count == 1 else f"{count} {kind} layers stay"


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU of a group of `tensor_parallel`, and what is taken from it before the cache.

    Attributes:
        gpu: The GPU.
        weights_bytes: Bytes of the whole model's weights; a rank holds its share.
        reserve: Fraction of the GPU's memory that is never given to the cache (0 to below 1).
        workspace_bytes: Bytes for activations and for dequantizing, per GPU.
        tensor_parallel: GPUs in the group.
    """

    gpu: Gpu
    weights_bytes: int
    reserve: float = 0.1
    workspace_bytes: int = 0
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1:
            raise ConfigError(f"reserve is a fraction from 0 to below 1, not {self.reserve}")
        if self.tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel is 1 or more, not {self.tensor_parallel}")

    @classmethod
    def from_config(cls, config: CapacityConfig, *, weights_bytes: int, where: str = "capacity.gpu") -> Budget:
        """The budget that a sweep's `capacity` block describes."""
        return cls(
            get_gpu(config.gpu, where=where),
            weights_bytes,
            config.reserve,
            int(config.workspace_gib * GIB),
            config.tensor_parallel,
        )

    @property
    def free_bytes(self) -> Fraction:
        """Bytes of one GPU left for caches; negative when the weights alone don't fit."""
        # The decimal that the user wrote, not its binary neighbour: 0.1 of a card is exactly a tenth.
        usable = self.gpu.memory_bytes * (1 - Fraction(str(self.reserve)))
        return usable - Fraction(self.weights_bytes, self.tensor_parallel) - self.workspace_bytes


@dataclass(frozen=True)
class Sessions:
    """How many sessions of one length fit at once on a group of `gpus` GPUs.

    Attributes:
        fractional: Sessions before flooring; its ratios are the ratios of bytes.
        floored: Whole sessions; what can be served.
        session_bytes: Bytes of one session on one GPU.
        free_bytes: Bytes of one GPU left for caches (negative: the weights don't fit).
        cost: What a session is made of.
        notes: Assumptions and problems, in sentences.
    """

    scheme: str
    gpu: str
    gpus: int
    context_length: int
    fractional: float
    floored: int
    session_bytes: int
    free_bytes: int
    cost: CacheCost
    notes: tuple[str, ...]


def sessions(cost: CacheCost, budget: Budget, *, context_length: int, block_size: int = 16) -> Sessions:
    """Sessions of `context_length` tokens that fit in `budget`.

    Raises:
        ConfigError: a length or block size below 1, or a model that caches nothing.
    """
    if context_length < 1 or block_size < 1:
        raise ConfigError(f"context length {context_length} and block size {block_size} are 1 or more")
    per_session = cost.session_bytes(context_length, block_size=block_size)
    if per_session == 0:
        raise ConfigError("the model stores no keys and values: its sessions are not bound by a cache")
    free = budget.free_bytes
    notes = cost.notes
    if free <= 0:
        short = float(-free) / GIB
        notes = (f"The weights don't fit on {budget.gpu.name}: {short:.1f} GiB short.", *notes)
    exact = max(free, Fraction(0)) / per_session
    return Sessions(
        scheme=cost.scheme,
        gpu=budget.gpu.name,
        gpus=budget.tensor_parallel,
        context_length=context_length,
        fractional=float(exact),
        floored=math.floor(exact),
        session_bytes=per_session,
        free_bytes=math.floor(free),
        cost=cost,
        notes=notes,
    )


def sessions_table(
    layers: Sequence[LayerGeometry],
    schemes: Iterable[KVScheme],
    context_lengths: Iterable[int],
    *,
    budget: Budget,
    block_size: int = 16,
) -> dict[tuple[str, int], Sessions]:
    """`sessions` for every (scheme name, context length)."""
    lengths = tuple(context_lengths)
    costs = [cache_cost(layers, scheme, tensor_parallel=budget.tensor_parallel) for scheme in schemes]
    return {
        (cost.scheme, length): sessions(cost, budget, context_length=length, block_size=block_size)
        for cost in costs
        for length in lengths
    }


def format_tokens(tokens: int) -> str:
    """2048 -> "2k", 131072 -> "128k", 2^20 -> "1M"; 512 and 100000 as they are, with thousands separated."""
    if tokens and tokens % 1024**2 == 0:
        return f"{tokens // 1024**2}M"
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else f"{tokens:,}"


def widening_cycles(elements: int, *, instructions_per_clock: Sequence[int] = (64, 64, 16, 256)) -> float:
    """Clock cycles that one SM needs to widen `elements` FP8 codes to BF16.

    Each code goes through a chain of instructions: e4m3 to fp16, fp16 to fp32, fp32 to bf16, and the
    multiplication with its scale; `instructions_per_clock` are their throughputs per SM, by default those of
    compute capability 9.0. An MLA token of 512 FP8 elements takes 50 cycles on an H800.
    """
    return float(elements * sum(Fraction(1, rate) for rate in instructions_per_clock))


def product_cycles(query_heads: int, head_dim_k: int, head_dim_v: int, *, flops_per_clock: int = 4096) -> float:
    """Clock cycles that one SM needs for one token's two attention products, for `query_heads` heads.

    2 * heads * (D_k + D_v) operations at `flops_per_clock` dense BF16 operations per SM (4,096 on Hopper).
    For 64 heads on an MLA latent (576 and 512) that is 34 cycles: less than widening the token takes.
    """
    return 2 * query_heads * (head_dim_k + head_dim_v) / flops_per_clock
