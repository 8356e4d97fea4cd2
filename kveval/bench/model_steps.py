"""Timing of a whole model: milliseconds for one token with its prompt cached, and the memory that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from kveval.attention import cache_argument, path_text, recorded_paths, use_packed_attention
from kveval.bench.decode import BASELINE
from kveval.bench.record import LeftOut, ModelRow, Spread
from kveval.bench.timers import Timer
from kveval.cache import QuantizedCache
from kveval.formats.layout import misfit
from kveval.formats.spec import KVScheme
from kveval.models import LoadedModel

__all__ = ["OWN_CACHE", "measure_model"]

OWN_CACHE = "transformers"
"""How the row of transformers' own cache is called."""

OWN_PATH = "torch sdpa over transformers' own cache"
CHUNK = 2048


class Modelled(NamedTuple):
    """What was found of a model."""

    rows: list[ModelRow]
    left_out: list[LeftOut]


class _Timed(NamedTuple):
    ms: Spread
    path: str
    cache_bytes: int | None
    peak_bytes: int | None
    peak_decode_bytes: int | None


def measure_model(
    loaded: LoadedModel, schemes: Sequence[KVScheme], lengths: Sequence[int], timer: Timer, *, repeats: int, seed: int
) -> Modelled:
    """Times one-token forwards of a model after prompts of random tokens.

    Every scheme has the GPU to itself: its cache is made, filled, timed and dropped before the next one's.

    Args:
        loaded: The model.
        schemes: Of the cache, BF16 first.
        lengths: Of the prompt; longer ones than the model takes are left out.
        timer: Takes the time.
        repeats: Forwards that are timed.
        seed: Of the prompt.
    """
    model, info = loaded.model, loaded.info
    left = [LeftOut(f"{s.name} with {info.id}", why) for s in schemes if (why := misfit(s, info.geometry))]
    unfit = {row.what.partition(" with ")[0] for row in left}
    rows = []
    for length in lengths:
        if info.max_context is not None and length + repeats + 1 > info.max_context:
            left.append(LeftOut(f"{info.id} at {length:,} tokens", f"the model takes {info.max_context:,} tokens."))
            continue
        ids = torch.randint(info.vocab_size, (1, length + repeats + 1), generator=torch.Generator().manual_seed(seed))
        ids = ids.to(loaded.device)
        use_packed_attention(model)
        found = {
            scheme.name: _timed(model, ids, length, _packed(model, scheme, ids.shape[1]), timer)
            for scheme in schemes
            if scheme.name not in unfit
        }
        model.set_attn_implementation("sdpa")
        found[OWN_CACHE] = _timed(model, ids, length, lambda: DynamicCache(config=model.config), timer)
        use_packed_attention(model)
        bf16 = found[BASELINE].ms.median
        rows += [
            ModelRow(
                info.id, length, name, t.ms, bf16 / t.ms.median, t.path, t.cache_bytes, t.peak_bytes,
                t.peak_decode_bytes,
            )
            for name, t in found.items()
        ]  # fmt: skip
    return Modelled(rows, left)


def _packed(model: Any, scheme: KVScheme, tokens: int) -> Callable[[], QuantizedCache]:
    return lambda: QuantizedCache(model.config, scheme, reserve=tokens)


def _timed(model: Any, ids: torch.Tensor, length: int, make: Callable[[], Any], timer: Timer) -> _Timed:
    """Fills a cache with the first `length` of `ids` [1, n] and feeds the others one by one; the first is not timed."""
    memory = _Memory(timer.device)
    cache, name = make(), cache_argument(model)

    def feed(part: torch.Tensor) -> None:
        model(input_ids=part, use_cache=True, logits_to_keep=1, **{name: cache})

    for start in range(0, length, CHUNK):
        feed(ids[:, start : min(start + CHUNK, length)])
    prefilled = memory.peak()
    rest = iter(ids[0, length:])
    with recorded_paths() as paths:
        ms = timer.milliseconds({"": lambda: feed(next(rest).view(1, 1))}, ids.shape[1] - length - 1)[""]
    decoded = memory.peak()
    nbytes = cache.stored_bytes().stored if isinstance(cache, QuantizedCache) else None
    path = path_text(paths) if paths else OWN_PATH
    peak = None if prefilled is None or decoded is None else max(prefilled, decoded)
    return _Timed(Spread.of(ms), path, nbytes, peak, decoded)


class _Memory:
    """The most GPU memory that torch held between two looks; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._restart()

    def peak(self) -> int | None:
        """Bytes since the last look."""
        if self._device.type != "cuda":
            return None
        found = torch.cuda.max_memory_allocated(self._device)
        self._restart()
        return int(found)

    def _restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
