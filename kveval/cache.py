"""`QuantizedCache`: a transformers cache whose keys and values are packed bytes, read back on every use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kveval.errors import UnsupportedError
from kveval.formats.codec import Codec
from kveval.formats.spec import KVScheme, get_scheme
from kveval.geometry import LayerGeometry, geometry_from_config
from kveval.storage import PackedKV, PackedStore, StoredBytes

__all__ = ["PackedLayer", "QuantizedCache", "Reads"]

Reads = Literal["stored", "fresh_chunk"]
"""What attention sees for the tokens of the current forward: their stored form, or the raw tensors."""


class PackedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer's keys and values in packed storage.

    A sliding layer keeps every token and lets the mask forget, so that `crop` stays exact at any distance;
    engines drop tokens beyond the window, which `kveval.capacity` counts.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, scheme: KVScheme, *, index: int, sliding: bool, reads: Reads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scheme = scheme
        self.is_sliding = sliding
        self._index, self._reads = index, reads
        self._stores: tuple[PackedStore, PackedStore] | None = None
        self.valid_BT: Tensor | None = None

    @property
    def keys(self) -> Tensor | None:
        """Decoded keys [B, H, T, D] in the compute dtype, or None before the first update."""
        return self._decoded(0)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._refuse_assignment(value)

    @property
    def values(self) -> Tensor | None:
        """Decoded values [B, H, T, D] in the compute dtype, or None before the first update."""
        return self._decoded(1)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._refuse_assignment(value)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty stores for the head sizes, dtype and device at hand."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._stores = (
            PackedStore(Codec(self.scheme.key, key_states.shape[-1]), where=f"keys of layer {self._index}"),
            PackedStore(Codec(self.scheme.value, value_states.shape[-1]), where=f"values of layer {self._index}"),
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, t, D] and return handles to all that is stored [B, H, T, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._append(0, key_states), self._append(1, value_states)

    def stores(self) -> tuple[PackedStore, PackedStore]:
        """The key store and the value store.

        Raises:
            UnsupportedError: before the first update.
        """
        if self._stores is None:
            raise UnsupportedError(f"layer {self._index} has stored nothing yet.", remedy="Run a forward first.")
        return self._stores

    def get_seq_length(self) -> int:
        """Stored tokens."""
        return self._stores[0].length if self._stores else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that attention will see once `query_length` more are stored, offset of the first: 0)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, as transformers counts them.

        What is left equals never having stored them, but for a scale that was frozen from a first write that the
        crop cuts into.

        Raises:
            UnsupportedError: on a positive count, which once meant the length to keep.
        """
        if tokens_to_remove > 0:
            raise UnsupportedError(
                f"crop({tokens_to_remove}) is ambiguous.", remedy="Give minus the number of tokens to remove."
            )
        for store in self._stores or ():
            store.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget everything, frozen scales included."""
        self._stores = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick batch rows for beam search: codes, scales and frozen scales follow."""
        self._map_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row `repeats` times."""
        self._map_batch(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the batch rows `indices`."""
        self._map_batch(lambda t: t[indices.to(t.device)])

    def offload(self) -> None:
        """Refused: moving packed storage off the device is not implemented."""
        raise UnsupportedError("a quantized cache can't be offloaded.", remedy="Build the cache without offloading.")

    def copy(self) -> PackedLayer:
        """An independent layer with the same tokens."""
        twin = PackedLayer(self.scheme, index=self._index, sliding=self.is_sliding, reads=self._reads)
        twin.valid_BT = self.valid_BT
        if self._stores is not None:
            twin.dtype, twin.device, twin.is_initialized = self.dtype, self.device, True
            twin._stores = (self._stores[0].copy(), self._stores[1].copy())
        return twin

    def _append(self, role: int, states: Tensor) -> PackedKV:
        store = self.stores()[role]
        store.append(states, valid_BT=self.valid_BT)
        return PackedKV(store, states, fresh=states if self._reads == "fresh_chunk" else None)

    def _decoded(self, role: int) -> Tensor | None:
        if self._stores is None or self._stores[role].length == 0:
            return None
        return self._stores[role].read(self._stores[role].length, self.dtype)

    def _refuse_assignment(self, value: Any) -> None:
        """The base class in transformers sets both to None when it is constructed; nothing else may write them."""
        if value is not None:
            raise UnsupportedError("keys and values of a packed layer are read-only.", remedy="Use `update`.")

    def _map_batch(self, change: Any) -> None:
        if self.valid_BT is not None:
            self.valid_BT = change(self.valid_BT)
        for store in self._stores or ():
            store.map_batch(change)


class QuantizedCache(Cache):
    """A cache for one batch of sequences. Pass it to `model(...)` or `model.generate(...)` as any other cache.

    Args:
        config: The model's config (or its `to_dict()`), for the kind and shape of every layer.
        scheme: A preset's name or a `KVScheme`.
        reads: `stored` (default): attention sees every token as stored, the current forward's own included.
            `fresh_chunk`: the current forward's tokens are seen raw, as some Hugging Face caches do.
        padding_mask: bool or int [B, T], 0 where one of the first T tokens is padding, so that padding never
            enters a frozen scale; T covers the first forward. Needed only with left-padded batches and formats
            that freeze a scale.

    Raises:
        UnsupportedError: for layer kinds that packed storage does not know.
    """

    def __init__(
        self,
        config: Any,
        scheme: str | KVScheme,
        *,
        reads: Reads = "stored",
        padding_mask: Tensor | None = None,
    ) -> None:
        self.scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
        self.reads = reads
        as_dict = config if isinstance(config, dict) else config.to_dict()
        self.geometry = geometry_from_config(as_dict)
        super().__init__(layers=[self._layer(i, kind) for i, kind in enumerate(self.geometry)])
        if padding_mask is not None:
            for layer in self.packed_layers:
                layer.valid_BT = padding_mask.bool()

    def _layer(self, index: int, geometry: LayerGeometry) -> PackedLayer:
        if geometry.kind not in ("full", "sliding"):
            raise UnsupportedError(
                f"layer {index} is of kind {geometry.kind!r}; packed storage knows full and sliding attention.",
                remedy="Use a model whose layers are full or sliding attention.",
            )
        if geometry.shared_with is not None:
            raise UnsupportedError(
                f"layer {index} reads the keys and values of layer {geometry.shared_with}; "
                "packed storage does not share layers.",
                remedy="Use a model without KV-shared layers.",
            )
        sliding = geometry.kind == "sliding"
        scheme = get_scheme("bf16") if sliding else self.scheme
        return PackedLayer(scheme, index=index, sliding=sliding, reads=self.reads)

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers; every one of them is packed."""
        return cast(list[PackedLayer], self.layers)

    @property
    def wide_layers(self) -> tuple[int, ...]:
        """Indices of layers that stay BF16 whatever the scheme (sliding windows)."""
        return tuple(i for i, layer in enumerate(self.packed_layers) if layer.is_sliding and self.scheme.lossy)

    def fork(self) -> QuantizedCache:
        """An independent cache with the same tokens, frozen scales included."""
        twin = object.__new__(QuantizedCache)
        twin.scheme, twin.reads, twin.geometry = self.scheme, self.reads, self.geometry
        Cache.__init__(twin, layers=[layer.copy() for layer in self.packed_layers])
        return twin

    def crop_to(self, length: int) -> None:
        """Keep the first `length` tokens of every layer."""
        surplus = self.get_seq_length() - length
        if surplus < 0:
            raise UnsupportedError(f"the cache holds {length + surplus} tokens; it can't be cropped to {length}.")
        for layer in self.packed_layers:
            layer.crop(-surplus)

    def stored_bytes(self) -> StoredBytes:
        """Bytes of the live tensors, by part, over all layers."""
        total = StoredBytes()
        for i, layer in enumerate(self.packed_layers):
            for store in layer.stores() if layer.is_initialized else ():
                part = store.nbytes()
                wide = StoredBytes(wide_layers=part.stored, padding=part.padding)
                total += wide if i in self.wide_layers else part
        return total

    def billed_bytes(self, tokens: int, *, batch: int = 1) -> int:
        """What `tokens` tokens of `batch` sequences cost by the formats' formulas; equals `stored_bytes().stored`."""
        return batch * sum(
            _billed(layer.scheme, shape, tokens) for layer, shape in zip(self.packed_layers, self.geometry, strict=True)
        )

    def tokens_read(self) -> int:
        """Tokens decoded from packed bytes since construction or `reset`, over layers, keys and values."""
        stores: Sequence[PackedStore] = [
            s for layer in self.packed_layers if layer.is_initialized for s in layer.stores()
        ]
        return sum(store.tokens_read for store in stores)


def _billed(scheme: KVScheme, shape: LayerGeometry, tokens: int) -> int:
    per_token = scheme.layer_bytes_per_token(
        head_dim_k=shape.head_dim_k, head_dim_v=shape.head_dim_v, kv_heads=shape.kv_heads
    )
    return tokens * per_token + (scheme.layer_constant_bytes() if tokens else 0)
