"""`QuantizedCache`: a transformers cache whose keys and values are packed bytes, read back on every use."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kveval.errors import ConfigError, UnsupportedError
from kveval.formats.layout import LayerFormat, layer_formats
from kveval.formats.spec import KVScheme, get_scheme
from kveval.geometry import LayerGeometry, geometry_from_config
from kveval.kernel_use import AttentionMode, format_problem, refuse_packed
from kveval.nonfinite import NonFinite
from kveval.packed_layer import PackedLayer, Reads
from kveval.storage import StoredBytes

__all__ = ["QuantizedCache"]


class QuantizedCache(Cache):
    """A cache for one batch of sequences. Pass it to `model(...)` or `model.generate(...)` as any other cache.

    Layers without keys and values (linear attention, recurrent) are transformers' own; layers that read another layer's
    keys and values have no entry, and read the donor's bytes.

    Args:
        config: The model's config, or its `to_dict()`; a model with linear layers needs the config itself.
        scheme: A preset's name or a `KVScheme`.
        reads: `stored` (default): attention sees every token as stored, the current forward's own included.
            `fresh_chunk`: the current forward's tokens are seen raw, as some Hugging Face caches do.
        padding_mask: bool or int [B, T], 0 where one of the first T tokens is (left) padding. With it, every row is
            stored as it would be alone; without it, padding is stored like tokens, which formats that freeze a scale,
            group tokens or keep first or last tokens wide must not do.
        attention: `auto` (default): on an NVIDIA GPU, attention reads packed bytes by kernels wherever they can, and
            decodes the rest first; elsewhere it decodes everything first. `packed`: read packed bytes or refuse; on a
            CPU by the kernels' torch reference, which is slow. `dequant`: decode everything first.
        reserve: Tokens for which every layer allocates at its first write. What is allocated and not filled is padding.

    Raises:
        UnsupportedError: for layers or formats that packed storage does not know, or that can't be attended to packed
            where that is asked for.
    """

    def __init__(
        self,
        config: Any,
        scheme: str | KVScheme,
        *,
        reads: Reads = "stored",
        padding_mask: Tensor | None = None,
        attention: AttentionMode = "auto",
        reserve: int = 0,
    ) -> None:
        self.scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
        self.reads = reads
        self._branch_length: int | None = None
        self.geometry = geometry_from_config(config if isinstance(config, dict) else config.to_dict())
        formats = layer_formats(self.scheme, self.geometry)
        if attention not in get_args(AttentionMode):
            raise ConfigError(f"attention is one of {', '.join(get_args(AttentionMode))}, not {attention!r}.")
        if type(reserve) is not int or reserve < 0:
            raise ConfigError(f"reserve is a number of tokens, not {reserve!r}.", remedy="Give 0 or more, as an int.")
        self._nonfinite = NonFinite(len(self.geometry))
        options: dict[str, Any] = {
            "reads": reads,
            "attention": attention,
            "reserve": reserve,
            "nonfinite": self._nonfinite,
            "block_size": self.scheme.block_size,
            "drop_unit": _drop_unit(self.geometry, formats),
        }
        own: list[Any] = []
        for i, (shape, fmt) in enumerate(zip(self.geometry, formats, strict=True)):
            if shape.indexer_dim:
                raise UnsupportedError(
                    f"layer {i} keeps the keys of a sparse-attention indexer, which packed storage does not know.",
                    remedy="Use a model without sparse attention.",
                )
            if fmt is not None:
                if attention == "packed" and (problem := format_problem(fmt, shape)):
                    raise refuse_packed(f"layer {i}", problem)
                own.append(PackedLayer(fmt, shape, index=i, **options))
            elif shape.shared_with is None:
                own.append(_foreign_layer(config, i))
        super().__init__(layers=own)
        self._first_packed = next((i for i, layer in enumerate(own) if isinstance(layer, PackedLayer)), None)
        for layer in self.packed_layers:
            layer.padding_mask = padding_mask

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers that store keys and values."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def wide_layers(self) -> tuple[int, ...]:
        """Indices of layers that stay BF16 under a lossy scheme (sliding windows, skipped layers)."""
        if not self.scheme.lossy:
            return ()
        return tuple(
            i for i, layer in enumerate(self.layers) if isinstance(layer, PackedLayer) and not layer.format.lossy
        )

    def fork(self) -> QuantizedCache:
        """An independent cache with the same tokens, frozen scales and recurrent states included."""
        twin = copy.copy(self)
        twin._branch_length, twin._nonfinite = None, self._nonfinite.copy()
        twin.layers = [
            layer.copy() if isinstance(layer, PackedLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        for layer in twin.packed_layers:
            layer.nonfinite = twin._nonfinite
        return twin

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Forget, exactly, whatever is appended inside the `with` block.

        Costs no copy of the stored tokens, and works for every format, sliding window and recurrent state. Inside,
        the cache can't be cropped to fewer tokens than it held at the start.

        Raises:
            MeasurementError: see `check_finite`, when the block ends.
        """
        self._nonfinite.check(unread_only=True)
        outer = self._branch_length
        saved = [
            (layer, layer.snapshot()) if isinstance(layer, PackedLayer) else (copy.deepcopy(layer), None)
            for layer in self.layers
        ]
        self._branch_length = self.get_seq_length()
        try:
            yield
            self._nonfinite.check(unread_only=True)
        finally:
            self._branch_length = outer
            self._nonfinite.clear()
            self.layers = [layer for layer, _ in saved]
            for layer, snapshot in saved:
                if isinstance(layer, PackedLayer):
                    layer.restore(snapshot)

    def check_finite(self) -> None:
        """Refuse keys and values that were not finite.

        Where kernels store, they note such numbers on the device. This waits for the device and reads the notes; at the
        next forward they are read in any case. Where the codec stores, they were refused at once.

        Raises:
            MeasurementError: naming the layer and the role.
        """
        self._nonfinite.check()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()  # type: ignore[no-untyped-call]
        self._nonfinite.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `PackedLayer.update`.

        Raises:
            UnsupportedError: if the model is not the one whose config the cache was built for.
            MeasurementError: see `check_finite`, of the forward before.
        """
        if layer_idx >= len(self.layers):
            raise UnsupportedError(
                f"the model stores keys and values in layer {layer_idx}; the cache was built for {len(self.layers)}.",
                remedy="Build the cache from this model's config.",
            )
        if layer_idx == self._first_packed:
            self._nonfinite.check(unread_only=True)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every layer; see `PackedLayer.crop`.

        Raises:
            UnsupportedError: if a layer can't, with recurrent states always; no layer is cropped then.
        """
        count = int(tokens_to_remove)
        if self._branch_length is not None and max(0, self.get_seq_length() + count) < self._branch_length:
            raise UnsupportedError(
                f"a branch can't be cropped below the {self._branch_length} tokens that it started from.",
                remedy="Crop after the branch.",
            )
        if count and len(self.packed_layers) < len(self.layers):
            raise UnsupportedError(
                "recurrent layers can't forget single tokens.",
                remedy="Use `with cache.branch():` or `cache.fork()` around what is to be taken back.",
            )
        before = [(layer, layer.snapshot()) for layer in self.packed_layers]
        try:
            for layer, _ in before:
                layer.crop(count)
        except UnsupportedError:
            for layer, snapshot in before:
                layer.restore(snapshot)
            raise

    def crop_to(self, length: int) -> None:
        """Keep the first `length` tokens of every layer."""
        if length < 0:
            raise UnsupportedError(
                f"crop_to({length}): a length can't be negative.",
                remedy=f"`crop({length})` forgets the last {-length} tokens.",
            )
        surplus = self.get_seq_length() - length
        if surplus < 0:
            raise UnsupportedError(f"the cache holds {length + surplus} tokens; it can't be cropped to {length}.")
        self.crop(-surplus)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row `repeats` times."""
        if (rows := self._rows()) > 0:
            self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the batch rows `indices` (int64 indices, or a bool per row)."""
        # The one operation on rows that recurrent layers know; it picks any rows in any number.
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self.reorder_cache(rows)  # type: ignore[arg-type]

    def fork_rows(self, forks: int) -> None:
        """`batch_repeat_interleave` without copies: new rows of a row share its tokens, which stay stored once.

        Raises:
            UnsupportedError: how the scheme stores a token depends on later ones, nothing is stored yet, or rows are
                stored one by one. Nothing has changed then.
        """
        if not self.scheme.blind_to_later:
            raise UnsupportedError(
                f"{self.scheme.name} stores some tokens together with later ones, which rows don't share.",
                remedy="Use `batch_repeat_interleave`.",
            )
        before = self._rows()
        for packed in self.packed_layers:
            packed.fork_rows(forks)
        rows = torch.arange(before).repeat_interleave(forks)
        for layer in self.layers:
            if not isinstance(layer, PackedLayer):
                layer.reorder_cache(rows)  # type: ignore[arg-type]

    def _rows(self) -> int:
        """Rows of the batch: those stored, or else those of the padding mask; -1 if neither is known."""
        for layer in self.packed_layers:
            if layer.batch_size > 0:
                return layer.batch_size
            if layer.padding_mask is not None:
                return layer.padding_mask.shape[0]
        return -1

    def stored_bytes(self) -> StoredBytes:
        """Bytes of the live tensors, by part, over all layers that store keys and values."""
        total, wide_layers = StoredBytes(), self.wide_layers
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, PackedLayer) or not layer.is_initialized:
                continue
            for store in layer.stores():
                part = store.nbytes()
                wide = StoredBytes(wide_layers=part.stored, padding=part.padding)
                total += wide if i in wide_layers else part
        return total

    def billed_bytes(self) -> int:
        """What as many tokens cost by the formats' formulas; equals `stored_bytes().stored`."""
        return sum(
            store.billed_bytes() for layer in self.packed_layers if layer.is_initialized for store in layer.stores()
        )

    def tokens_read(self) -> list[int]:
        """Tokens decoded since construction or `reset`, keys and values together, by packed layer."""
        return [
            sum(store.tokens_read for store in layer.stores()) if layer.is_initialized else 0
            for layer in self.packed_layers
        ]

    def tokens_owed(self, fed: int) -> list[int]:
        """Reads that a forward over the last `fed` tokens owes, by packed layer: all that it holds for attention.

        A lower bound: a layer may also read tokens that its window freed after the forward, and layers that share a
        donor's keys and values read them once more each.
        """
        fresh = fed if self.reads == "fresh_chunk" else 0
        return [2 * max(0, layer.get_seq_length() - layer.dropped - fresh) for layer in self.packed_layers]


def _drop_unit(shapes: Sequence[LayerGeometry], formats: Sequence[LayerFormat | None]) -> int:
    """The least number of tokens that all layers with a window can free together."""
    windowed = [fmt for shape, fmt in zip(shapes, formats, strict=True) if fmt and shape.window is not None]
    return math.lcm(*(role.format.unit for fmt in windowed for role in (fmt.key, fmt.value)))


def _foreign_layer(config: Any, index: int) -> Any:
    """Transformers' own cache layer for a layer without keys and values."""
    if isinstance(config, dict):
        raise UnsupportedError(
            f"layer {index} keeps a recurrent state, whose cache transformers makes from the model's config.",
            remedy="Pass model.config itself.",
        )
    return DynamicCache(config=config).layers[index]
