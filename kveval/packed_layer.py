"""`PackedLayer`: one attention layer of a transformers cache, in packed storage."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kveval.errors import UnsupportedError
from kveval.forked_store import ForkedStore
from kveval.formats.layout import LayerFormat, RoleFormat
from kveval.geometry import LayerGeometry
from kveval.kernel_use import NO_KERNELS, AttentionMode, kernel_use
from kveval.nonfinite import NonFinite
from kveval.packed_kv import PackedKV
from kveval.packed_state import append_by_kernel
from kveval.row_stores import RowStores
from kveval.storage import CROP_RESERVE, PackedStore, Store

__all__ = ["TILE", "PackedLayer", "Reads"]

Reads = Literal["stored", "fresh_chunk"]
"""What attention sees for the tokens of the current forward: their stored form, or the raw tensors."""

TILE = 64
"""Sliding windows free tokens in whole tiles of this many (and in whole groups of a per-channel format)."""


class PackedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer's keys and values in packed storage.

    A sliding layer frees tiles of tokens that lie `CROP_RESERVE` or more tokens beyond its window, so that a crop of as
    many tokens is exact; after `activate_past_recording` it frees nothing until the next crop, as in transformers.

    Args:
        fmt: How keys and values are stored.
        shape: The layer's geometry.
        index: Of the layer, for messages.
        reads: See `Reads`.
        attention: Whether attention is to read packed bytes.
        block_size: Tokens by which buffers grow.
        reserve: Tokens for which the first write allocates, unless the layer frees what leaves a window.
        drop_unit: Tokens that leave a window together: a multiple of what every windowed layer of the model encodes
            together, since transformers makes one mask for all of them.
        nonfinite: Where kernels note NaN and infinity.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        fmt: LayerFormat,
        shape: LayerGeometry,
        *,
        index: int,
        reads: Reads,
        attention: AttentionMode,
        block_size: int,
        reserve: int,
        drop_unit: int,
        nonfinite: NonFinite,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.format, self.shape = fmt, shape
        self.is_sliding = shape.window is not None
        self.record_past = False
        self.padding_mask: Tensor | None = None
        self.nonfinite = nonfinite
        self._index, self._reads, self._attention, self._drop_unit = index, reads, attention, drop_unit
        self._buffers = {"block_size": block_size, "reserve": 0 if self.is_sliding else reserve}
        self._use = NO_KERNELS
        self._stores: tuple[Store, Store] | None = None

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
        """Make empty stores for the head sizes, dtype and device at hand.

        Raises:
            UnsupportedError: for other heads than the cache was built for, or if the layer can't be attended to packed
                as it is asked to be.
        """
        given = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        expected = (self.shape.kv_heads, self.shape.head_dim_k, self.shape.head_dim_v)
        if given != expected:
            raise UnsupportedError(
                f"layer {self._index} got {given[0]} heads with keys of {given[1]} and values of {given[2]}; the cache "
                f"was built for {expected[0]} heads with {expected[1]} and {expected[2]}.",
                remedy="Build the cache from this model's config.",
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self._use = kernel_use(
            self._attention,
            self.format,
            self.shape,
            index=self._index,
            dtype=self.dtype,
            device=self.device,
            raw_chunk=self._reads == "fresh_chunk",
        )
        padding = self._padding(key_states.shape[0])
        by_kernels = self._use.stores
        self._stores = (
            self._store(self.format.key, "keys", key_states.shape[-1], padding, kernels=by_kernels[0]),
            self._store(self.format.value, "values", value_states.shape[-1], padding, kernels=by_kernels[1]),
        )
        self.is_initialized = True

    def _store(self, role: RoleFormat, name: str, head_dim: int, padding: list[int], *, kernels: bool) -> Store:
        def empty(where: str) -> PackedStore:
            return PackedStore(role, head_dim, where=where, kernels=kernels, **self._buffers)

        where = f"{name} of layer {self._index}"
        if not any(padding):
            return empty(where)
        rows = [empty(f"{where}, row {i}") for i in range(len(padding))]
        return RowStores(rows, list(padding), unit=self._drop_unit)

    def _padding(self, batch: int) -> list[int]:
        """Padding tokens at the start of each row."""
        if self.padding_mask is None:
            return [0] * batch
        mask = self.padding_mask.bool()
        if mask.shape[0] != batch:
            raise UnsupportedError(
                f"a padding mask of {mask.shape[0]} rows does not cover a batch of {batch}.",
                remedy="Give the mask of the batch that the model gets (for beam search, each row repeated per beam).",
            )
        padding = (~mask).sum(1)
        if not torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) >= padding[:, None]):
            raise UnsupportedError(
                "the padding mask has padding after a token.", remedy="Pad on the left, as for generation."
            )
        if bool((padding == mask.shape[1]).any()):
            raise UnsupportedError("a whole row of the padding mask is padding.", remedy="Leave that row out.")
        return [int(n) for n in padding]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, t, D] and return handles to all that is stored [B, H, T, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, stores = (key_states, value_states), self.stores()
        lengths = [store.total - store.dropped + x.shape[2] for store, x in zip(stores, new, strict=True)]
        before = [store.snapshot() for store in stores]
        self._append(key_states, value_states)
        fresh = self._reads == "fresh_chunk"
        snapshots = before if fresh else [store.snapshot() for store in stores]
        key, value = (
            PackedKV(store, snapshot, x, length, fresh=x if fresh else None, use=self._use)
            for store, snapshot, x, length in zip(stores, snapshots, new, lengths, strict=True)
        )
        if not self.record_past:
            self._drop()
        return key, value

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Encode and store keys and values: one launch for both (and for each row of a padded batch), or the codec."""
        stores, new = self.stores(), (key_states, value_states)
        by_kernel = all(store.kernels for store in stores)
        keys, values = (store.plan(x, check=not by_kernel) for store, x in zip(stores, new, strict=True))
        if by_kernel:
            flags = self.nonfinite.of(self._index, self.device)
            for key, value in zip(keys, values, strict=True):
                append_by_kernel(key, value, flags)
        else:
            for write in (*keys, *values):
                write.encode()
        for store, writes, x in zip(stores, (keys, values), new, strict=True):
            store.commit(writes, x.shape[2])

    def _drop(self) -> None:
        """Free whole tiles that neither the window of the next token nor a crop of `CROP_RESERVE` tokens reaches."""
        if self.shape.window is None:
            return
        tile = math.lcm(TILE, self._drop_unit)
        beyond = self.get_seq_length() - (self.shape.window - 1) - CROP_RESERVE
        for store in self.stores():
            store.drop(max(0, beyond) // tile * tile)

    def stores(self) -> tuple[Store, Store]:
        """The key store and the value store.

        Raises:
            UnsupportedError: before the first update.
        """
        if self._stores is None:
            raise UnsupportedError(f"layer {self._index} has stored nothing yet.", remedy="Run a forward first.")
        return self._stores

    def get_seq_length(self) -> int:
        """Tokens stored since the beginning, those that left a sliding window included."""
        return self._stores[0].total if self._stores else 0

    @property
    def dropped(self) -> int:
        """Oldest tokens that have left a sliding window and are gone."""
        return self._stores[0].dropped if self._stores else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that attention will see once `query_length` more are stored, position of the first of them)."""
        return self.get_seq_length() - self.dropped + query_length, self.dropped

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows of the batch, or -1 before the first update."""
        return self._stores[0].batch_size if self._stores else -1

    def activate_past_recording(self) -> None:
        """Free nothing until the next crop, however far it may reach back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, as transformers counts them.

        What is left equals never having stored them; where that can't be, the crop is refused.

        Raises:
            UnsupportedError: on a positive count, which once meant the length to keep, or an impossible crop.
        """
        count = int(tokens_to_remove)
        if count > 0:
            raise UnsupportedError(f"crop({count}) is ambiguous.", remedy="Give minus the number of tokens to remove.")
        if self._stores is None:
            return
        left = max(0, self.get_seq_length() + count)
        if self.shape.window is not None and left and self.dropped > max(0, left - (self.shape.window - 1)):
            raise UnsupportedError(
                f"layer {self._index} can't forget its last {-count} tokens: "
                f"the window before them reaches into the first {self.dropped} tokens, which it has freed.",
                remedy="Use `with cache.branch():` or `cache.fork()` around what is to be taken back.",
            )
        for store in self._stores:
            store.crop(-count)
        self._drop()

    def reset(self) -> None:
        """Forget everything, frozen scales included."""
        self._stores = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the batch of these rows (int64; any, in any number): codes, scales and frozen scales follow."""
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask.index_select(0, beam_idx.to(self.padding_mask.device))
        for store in self._stores or ():
            store.select_rows(beam_idx)

    def fork_rows(self, forks: int) -> None:
        """See `kveval.cache.QuantizedCache.fork_rows`."""
        keys, values = self.stores()
        if not isinstance(keys, PackedStore) or not isinstance(values, PackedStore):
            raise UnsupportedError(
                f"layer {self._index} stores rows one by one, because of padding or an earlier fork.",
                remedy="Use `batch_repeat_interleave`.",
            )
        self._stores = (ForkedStore(keys, forks), ForkedStore(values, forks))

    def offload(self) -> None:
        """Refused: moving packed storage off the device is not implemented."""
        raise UnsupportedError("a quantized cache can't be offloaded.", remedy="Build the cache without offloading.")

    def prefetch(self) -> None:
        """Refused, as `offload`."""
        self.offload()

    def snapshot(self) -> Any:
        """What is stored now, for `restore`."""
        stored = None if self._stores is None else tuple((store, store.snapshot()) for store in self._stores)
        return self.record_past, self.padding_mask, stored

    def restore(self, snapshot: Any) -> None:
        """Forget what was done since `snapshot`."""
        self.record_past, self.padding_mask, stored = snapshot
        if stored is None:
            self.reset()
            return
        for store, state in stored:
            store.restore(state)
        self._stores = tuple(store for store, _ in stored)
        self.is_initialized = True

    def copy(self) -> PackedLayer:
        """An independent layer with the same tokens."""
        twin = copy.copy(self)
        if self._stores is not None:
            twin._stores = (self._stores[0].copy(), self._stores[1].copy())
        return twin

    def _decoded(self, role: int) -> Tensor | None:
        if self._stores is None or self._stores[role].total == 0:
            return None
        store = self._stores[role]
        return store.read(store.snapshot(), self.dtype)

    def _refuse_assignment(self, value: Any) -> None:
        """The base class in transformers sets both to None when it is constructed; nothing else may write them."""
        if value is not None:
            raise UnsupportedError("keys and values of a packed layer are read-only.", remedy="Use `update`.")
