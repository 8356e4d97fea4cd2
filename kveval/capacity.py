"""How many sessions fit on a GPU, and what a narrower cache costs in quality for each it adds.

    sessions = floor((usable - weights - workspace) / session_bytes(T))
    session_bytes(T) = constant_bytes + bytes_per_token * blocks(T) + sum over sliding layers

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
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Protocol

import yaml

from kveval.errors import ConfigError, UnknownNameError, UnsupportedError
from kveval.formats.spec import KVScheme, get_scheme
from kveval.records import METRICS, Metric

if TYPE_CHECKING:
    from kveval.config import CapacityConfig
    from kveval.geometry import LayerGeometry

__all__ = [
    "GIB",
    "Budget",
    "CacheCost",
    "ExchangeRate",
    "Gpu",
    "Sessions",
    "cache_cost",
    "exchange_rate",
    "format_interval",
    "format_loss",
    "format_tokens",
    "get_gpu",
    "interval_decimals",
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
        bytes_per_token: Bytes that one more token adds, over the layers that keep every token.
        windows: (window in tokens, bytes per token) of the layers that keep only a window, by window.
        constant_bytes: Bytes per session that no token adds (frozen scales).
        notes: What was assumed, in sentences for the reader.
    """

    scheme: str
    bytes_per_token: int
    windows: tuple[tuple[int, int], ...]
    constant_bytes: int
    notes: tuple[str, ...]

    def session_bytes(self, context_length: int, *, block_size: int = 16) -> int:
        """Bytes of one session of `context_length` tokens, in whole blocks of `block_size` tokens."""
        total = self.constant_bytes + self.bytes_per_token * _whole_blocks(context_length, block_size)
        for window, bytes_per_token in self.windows:
            total += bytes_per_token * _whole_blocks(min(context_length, window), block_size)
        return total


def _whole_blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


def cache_cost(layers: Sequence[LayerGeometry], scheme: KVScheme, *, tensor_parallel: int = 1) -> CacheCost:
    """Bytes of one session under `scheme`, per GPU of a group of `tensor_parallel`.

    Layers that read another layer's keys and values, linear layers and layers without attention store
    nothing here. Sliding layers keep a window of tokens and sparse-attention indexers one key per token, both
    in BF16 whatever the scheme says.

    Raises:
        UnsupportedError: KV heads that don't split over the ranks evenly; engines refuse them too.
    """
    wide = get_scheme("bf16")
    per_token = constant = 0
    windows: dict[int, int] = {}
    for layer in layers:
        if not layer.stores_kv:
            continue
        stored = wide if layer.kind == "sliding" else scheme
        heads = layer.kv_heads if layer.kind == "mla" else _heads_per_rank(layer.kv_heads, tensor_parallel)
        layer_bytes = stored.layer_bytes_per_token(
            head_dim_k=layer.head_dim_k, head_dim_v=layer.head_dim_v, kv_heads=heads
        )
        layer_bytes += wide.key.token_bytes(layer.indexer_dim)
        constant += stored.layer_constant_bytes()
        if layer.kind == "sliding":
            if layer.window is None:
                raise ConfigError("a sliding layer has no window size in the model's config")
            windows[layer.window] = windows.get(layer.window, 0) + layer_bytes
        else:
            per_token += layer_bytes
    notes = tuple(_cost_notes(layers, scheme, tensor_parallel))
    return CacheCost(scheme.name, per_token, tuple(sorted(windows.items())), constant, notes)


def _heads_per_rank(kv_heads: int, ranks: int) -> int:
    if kv_heads % ranks and ranks % kv_heads:
        raise UnsupportedError(
            f"{kv_heads} KV heads don't split over {ranks} ranks.",
            remedy="Use a tensor_parallel that divides the number of KV heads, or a multiple of it.",
        )
    return max(1, kv_heads // ranks)


def _cost_notes(layers: Sequence[LayerGeometry], scheme: KVScheme, ranks: int) -> Iterator[str]:
    kinds = Counter("shared" if layer.shared_with is not None else layer.kind for layer in layers)
    if kinds["sliding"] and scheme.lossy:
        yield f"{_layers(kinds['sliding'], 'sliding-window')} in BF16: {scheme.name} narrows only the others."
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


class LossEstimate(Protocol):
    """The part of `kveval.stats.Estimate` that is read here."""

    @property
    def value(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def defined(self) -> bool: ...


class LossComparison(Protocol):
    """The part of `kveval.stats.Comparison` that is read here."""

    @property
    def scheme(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def context_length(self) -> int: ...
    @property
    def loss(self) -> LossEstimate: ...


@dataclass(frozen=True)
class ExchangeRate:
    """Quality lost against sessions gained, for one scheme, task, metric and length.

    Attributes:
        gain: Whole sessions over whole sessions of the baseline; None when the baseline fits none.
        bytes_gain: The same before flooring: the ratio of a session's bytes.
        loss_per_extra_session: Loss, in the metric's unit, per session gained; None when none is gained.
        loss_per_doubling: Loss per doubling of sessions, from `bytes_gain` (flooring would make it jump).
        sentence: All of it in words.
    """

    scheme: str
    task: str
    metric: str
    context_length: int
    sessions: int
    baseline_sessions: int
    gain: float | None
    bytes_gain: float | None
    loss: LossEstimate
    loss_per_extra_session: float | None
    loss_per_doubling: float | None
    sentence: str


def exchange_rate(
    comparison: LossComparison,
    *,
    scheme: Sessions,
    baseline: Sessions,
    decode_speedup: float | None = None,
) -> ExchangeRate:
    """What `comparison`'s loss buys: sessions under the scheme against sessions under the baseline.

    `decode_speedup` (baseline's seconds per token over the scheme's) is added to the sentence if given.
    """
    extra = scheme.floored - baseline.floored
    gain = scheme.floored / baseline.floored if baseline.floored else None
    bytes_gain = scheme.fractional / baseline.fractional if baseline.fractional else None
    value = comparison.loss.value
    per_session = value / extra if value is not None and extra > 0 else None
    doublings = math.log2(bytes_gain) if bytes_gain and bytes_gain > 1 else None
    per_doubling = value / doublings if value is not None and doublings else None
    times = f" ({gain:.1f}x)" if gain is not None else ""
    instead = f"{baseline.floored:,}" if baseline.floored else "none"
    sentence = (
        f"{comparison.scheme} at {format_tokens(comparison.context_length)} tokens: "
        f"{scheme.floored:,} session{'' if scheme.floored == 1 else 's'} instead of {instead}{times}; "
        f"{format_loss(comparison.loss, METRICS[comparison.metric], task=comparison.task)}"
    )
    if decode_speedup is not None:
        sentence += f"; decode {decode_speedup:.1f}x as fast"
    return ExchangeRate(
        comparison.scheme,
        comparison.task,
        comparison.metric,
        comparison.context_length,
        scheme.floored,
        baseline.floored,
        gain,
        bytes_gain,
        comparison.loss,
        per_session,
        per_doubling,
        sentence,
    )


def format_tokens(tokens: int) -> str:
    """2048 -> "2k", 131072 -> "128k"; 512 and 100000 as they are, with thousands separated."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else f"{tokens:,}"


def format_loss(loss: LossEstimate, metric: Metric, *, task: str = "") -> str:
    """A loss in words, with its interval and what the interval leaves open.

    Fractions are told in points (hundredths). Two significant digits of the interval's half width decide
    how many decimals are shown; nothing is compared after rounding.
    """
    scale, unit = (100.0, "points") if metric.unit == "fraction" else (1.0, metric.unit)
    where = f" on {task}" if task else ""
    what = f"{unit} of {metric.label}{where}"
    if loss.value is None:
        return f"cost in {metric.label}{where} unknown: no complete pairs"
    if not loss.defined or loss.low is None or loss.high is None:
        return f"costs {loss.value * scale:.3g} {what} (no interval: too few independent samples)"
    value, low, high = (x * scale for x in (loss.value, loss.low, loss.high))
    if high < 0:
        return f"better by {format_interval(-value, -high, -low)} {what}"
    if low > 0:
        return f"costs {format_interval(value, low, high)} {what}"
    if low == high:
        return f"costs 0 {what} (the same in every sample)"
    bound = f"{high:.{interval_decimals(high - low)}f}"
    open_question = f"indistinguishable from zero at this n; could be as large as {bound}"
    return f"costs {format_interval(value, low, high)} {what} ({open_question})"


def format_interval(value: float, low: float, high: float) -> str:
    """An interval as "0.40 ± 0.30", or as "0.40 (0.05 to 0.90)" when it is lopsided."""
    digits, half = interval_decimals(high - low), (high - low) / 2
    shown = round(value, digits) + 0.0  # never "-0.00"
    if abs((high - value) - half) <= 0.05 * half:
        return f"{shown:.{digits}f} ± {half:.{digits}f}"
    return f"{shown:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def interval_decimals(width: float) -> int:
    """Decimals that show two significant digits of half an interval's width."""
    if width <= 0:
        return 3
    return min(6, max(0, 1 - math.floor(math.log10(width / 2))))


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
