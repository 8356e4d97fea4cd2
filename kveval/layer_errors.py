"""How far each layer's keys, values and attention move when they are stored under each scheme of a sweep.

One forward of the baseline over a sample's first tokens shows the keys and values that every layer stores and the
queries that read them. The cache layers of each scheme store the same tensors, and attention is worked out on what they
read back. A layer's error is its own: errors of earlier layers never enter. Nothing but numbers is kept.

Shape legend: Hq query heads, H KV heads, Q probed queries, T tokens, D head size; the batch is one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kveval.attention import ATTENTION
from kveval.cache import QuantizedCache
from kveval.errors import MeasurementError
from kveval.layer_note import LayerError
from kveval.packed_kv import PackedKV
from kveval.packed_layer import PackedLayer
from kveval.plan import Arm

if TYPE_CHECKING:
    from kveval.backends.hf import HFBackend

__all__ = ["MAX_TOKENS", "PROBED_QUERIES", "measure"]

MAX_TOKENS = 2048
"""Most tokens that are measured: the cost is that of one such prefill, and of storing it once per scheme."""

PROBED_QUERIES = 64
"""Most queries whose attention is compared; they are the last ones, which read the most tokens, as decoding does."""


@torch.inference_mode()
def measure(backend: HFBackend, arms: Sequence[Arm], prompt: Sequence[int]) -> list[LayerError]:
    """Errors of every scheme and of crush in every attention layer, on the first `MAX_TOKENS` tokens of `prompt`.

    Args:
        backend: The model.
        arms: The sweep's, the baseline among them.
        prompt: Token ids.

    Returns:
        Rows in the order of `arms`, then of layers.

    Raises:
        MeasurementError: a layer's keys, values or outputs are NaN, infinite or all zero.
    """
    baseline = next(arm for arm in arms if arm.role == "baseline")
    tested = [arm for arm in arms if arm.role in ("scheme", "crush")]
    # What a later forward would read is wanted, so nothing is read raw even where the sweep does.
    caches = {arm.label: backend.new_cache(replace(arm, reads="stored")) for arm in (baseline, *tested)}
    probe = _Probe(caches[baseline.label], [(arm, caches[arm.label]) for arm in tested])
    with probe.watching():
        backend.forward(prompt[:MAX_TOKENS], caches[baseline.label], keep=1)
    order = [arm.label for arm in tested]
    return sorted(probe.rows, key=lambda row: (order.index(row.scheme), row.layer))


class _Probe:
    """Sees what one forward of the baseline stores and attends to, and keeps the errors."""

    def __init__(self, cache: QuantizedCache, schemes: Sequence[tuple[Arm, QuantizedCache]]) -> None:
        self.rows: list[LayerError] = []
        self._cache, self._schemes = cache, schemes
        self._stored: dict[int, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}
        self._donors = {layer.shared_with for layer in cache.geometry}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, the probe sees the cache's writes and every call of kveval's attention."""
        attention, update = ALL_ATTENTION_FUNCTIONS[ATTENTION], self._cache.update

        def watched_update(
            key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            handles = update(key_states, value_states, layer_idx, *args, **kwargs)
            self._stored[layer_idx] = (key_states, value_states), handles
            return handles

        def watched_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
            out = attention(module, query, key, value, mask, **kwargs)
            self._attended(_Reader(module, query, mask, kwargs))
            return out

        self._cache.update = watched_update  # type: ignore[method-assign]
        AttentionInterface.register(ATTENTION, watched_attention)
        try:
            yield
        finally:
            AttentionInterface.register(ATTENTION, attention)
            self._cache.update = update  # type: ignore[method-assign]

    def _attended(self, reader: _Reader) -> None:
        """Append the errors of the layer whose attention just ran."""
        index = int(reader.module.layer_idx)
        shape = self._cache.geometry[index]
        # A layer that reads another's keys and values is measured on those.
        source = index if shape.shared_with is None else shape.shared_with
        raw, handles = self._stored[source] if source in self._donors else self._stored.pop(source)
        wide = _plain(handles)
        attended, bias = reader.attend(*wide), _bias_ratio(wide[0])
        for arm, cache in self._schemes:
            narrow = _read_back(cache, source, raw, chunk=arm.prefill_chunk)
            errors = {**_stored_errors(*wide, *narrow), **_attention_errors(attended, reader.attend(*narrow))}
            undefined = [name for name, error in errors.items() if not 0 <= error < math.inf]
            if undefined:
                raise MeasurementError(f"{', '.join(undefined)} of layer {index} under {arm.label} has no value.")
            role = cast(Literal["scheme", "crush"], arm.role)
            self.rows.append(LayerError(arm.label, role, index, shape.kind, **errors, key_bias_ratio=bias))


def _read_back(cache: QuantizedCache, layer: int, raw: tuple[Tensor, Tensor], *, chunk: int) -> tuple[Tensor, Tensor]:
    """float32 keys and values [1, H, T, D] as attention reads them once `cache` has stored `raw` in its own way.

    They are written in the sweep's chunks, which decide scales that the first write freezes. A sliding layer keeps what
    its window leaves behind, for the probed queries to read.
    """
    key, value = raw
    store = cast(PackedLayer, cache.layers[layer])
    store.activate_past_recording()
    handles = raw
    for at in range(0, key.shape[2], chunk):
        handles = store.update(key[:, :, at : at + chunk], value[:, :, at : at + chunk])
    plain = _plain(handles)
    store.reset()
    return plain


def _plain(handles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What the handles read: float32 keys and values."""
    key, value = (x.dequantize() if isinstance(x, PackedKV) else x for x in handles)
    return key.float(), value.float()


@dataclass(frozen=True)
class _Attended:
    """Attention of the probed queries: log-probabilities [1, Hq, Q, T] and values [1, Hq, T, D], float32.

    A layer with sinks has one column of log-probabilities more, for what goes to them.
    """

    log_p: Tensor
    v: Tensor

    @cached_property
    def all_p(self) -> Tensor:
        """Probabilities, a sink's too."""
        return self.log_p.exp()

    @property
    def p(self) -> Tensor:
        """Probabilities [1, Hq, Q, T] of the tokens."""
        return self.all_p[..., : self.v.shape[2]]

    @cached_property
    def out(self) -> Tensor:
        """Output [1, Hq, Q, D]."""
        return self.p @ self.v


class _Reader:
    """The last queries of one call of attention, to be tried on other keys and values.

    Works out in float32 what `kveval.attention` does: softmax(q k / sqrt(d)), or with the model's own scaling, its cap
    on scores, its mask and its sinks.
    """

    def __init__(self, module: Any, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> None:
        self.module = module
        self._query, self._dtype = query[:, :, -PROBED_QUERIES:].float(), query.dtype
        scaling, causal = options.get("scaling"), options.get("is_causal")
        self._scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        self._causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        self._softcap, self._sinks = options.get("softcap"), options.get("s_aux")
        self._mask = None if mask is None else mask[:, :, -PROBED_QUERIES:]

    def attend(self, key: Tensor, value: Tensor) -> _Attended:
        """Attention over keys and values [1, H, T, D] as the cache reads them."""
        if hasattr(self.module, "expand_kv"):
            # Latent attention stores what keys and values are made of.
            key, value = self.module.expand_kv(key.to(self._dtype), value.to(self._dtype))
        heads = self._query.shape[1]
        key, value = (x.float().repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        return _Attended(self._log_probabilities(key), value)

    def _log_probabilities(self, key: Tensor) -> Tensor:
        scores = self._query @ key.transpose(2, 3) * self._scaling
        if self._softcap is not None:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        allowed = self._mask
        if allowed is None and self._causal:
            queries, tokens = scores.shape[2:]
            allowed = torch.ones(queries, tokens, dtype=torch.bool, device=scores.device).tril(tokens - queries)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        if self._sinks is not None:
            sinks = self._sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return nn.functional.log_softmax(scores, dim=-1)


def _attention_errors(wide: _Attended, narrow: _Attended) -> dict[str, float]:
    """The fields of `LayerError` that say what attention makes of the error."""
    # Where the mask leaves nothing both logarithms are minus infinity, and nothing has moved.
    moved = torch.where(wide.log_p == -math.inf, 0.0, wide.log_p - narrow.log_p)
    return {
        # Rounding can take a KL of nothing below zero.
        "attention_kl": max(0.0, float((wide.all_p * moved).sum(-1).mean())),
        "output_error": _relative(wide.out - narrow.out, wide.out),
        "output_error_keys": _relative(wide.out - narrow.p @ wide.v, wide.out),
        "output_error_values": _relative(wide.out - wide.p @ narrow.v, wide.out),
    }


def _stored_errors(k: Tensor, v: Tensor, k_narrow: Tensor, v_narrow: Tensor) -> dict[str, float]:
    """The fields of `LayerError` that compare what is stored [1, H, T, D]."""
    return {
        "key_error": _relative(k - k_narrow, k),
        "key_difference_error": _relative(_varying(k - k_narrow), _varying(k)),
        "value_error": _relative(v - v_narrow, v),
    }


def _relative(error: Tensor, of: Tensor) -> float:
    """||error|| / ||of||, and 0 for no error at all."""
    size, whole = float(error.norm()), float(of.norm())
    return 0.0 if size == 0 else size / whole if whole else math.inf


def _varying(x: Tensor) -> Tensor:
    """`x` [1, H, T, D] without its mean over tokens."""
    return x - x.mean(dim=2, keepdim=True)


def _bias_ratio(k: Tensor) -> float | None:
    """Largest |mean over tokens| of a channel of `k` [1, H, T, D] over the median channel's standard deviation."""
    spread = float(k.std(dim=2, correction=0).median())
    return float(k.mean(dim=2).abs().max()) / spread if spread else None
