"""Packed storage of one role (keys or values) of one layer: growable uint8 buffers and what is read from them.

Shape legend: B batch, H KV heads, T tokens, D head size, P payload bytes, S scale bytes per (token, head).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.codec import Codec

__all__ = ["PackedKV", "PackedStore", "StoredBytes"]

GROWTH_TOKENS = 256
"""Buffers grow in whole multiples of this many tokens; what is allocated beyond the stored tokens is padding."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of live cache tensors, by part.

    `payload`, `scales` and `constants` belong to layers in the scheme's format; `wide_layers` is everything in
    layers that stay BF16 whatever the scheme (sliding windows). `padding` is allocated but holds no token.
    """

    payload: int = 0
    scales: int = 0
    constants: int = 0
    wide_layers: int = 0
    padding: int = 0

    @property
    def stored(self) -> int:
        """All bytes that hold tokens; padding is not part of it."""
        return self.payload + self.scales + self.constants + self.wide_layers

    def __add__(self, other: StoredBytes) -> StoredBytes:
        return StoredBytes(*(a + b for a, b in zip(self._parts(), other._parts(), strict=True)))

    def _parts(self) -> tuple[int, ...]:
        return self.payload, self.scales, self.constants, self.wide_layers, self.padding


class PackedStore:
    """The bytes of one role of one layer, and the only way in and out of them."""

    def __init__(self, codec: Codec, *, where: str) -> None:
        self.codec = codec
        self.length = 0
        self.tokens_read = 0
        self._where = where
        self._payload: Tensor | None = None
        self._scale: Tensor | None = None
        self._constant: Tensor | None = None

    def append(self, x_BHTD: Tensor, *, valid_BT: Tensor | None = None) -> None:
        """Encode and store tokens after the last one.

        Args:
            x_BHTD: New keys or values.
            valid_BT: False where one of the sequence's first tokens is padding; padding is stored but never enters
                a frozen scale. At least as long as the first write.

        Raises:
            MeasurementError: on NaN or infinity, naming the layer.
            UnsupportedError: if `valid_BT` does not tell which tokens may freeze a scale.
        """
        if x_BHTD.shape[2] == 0:
            return
        x_BHTD = x_BHTD.detach()
        if not torch.isfinite(x_BHTD).all():
            raise MeasurementError(
                f"{self._where} got NaN or infinity; a cache that stores it would hide where it came from.",
                remedy="Check the model's dtype (float16 overflows in some models) and its weights.",
            )
        if self._constant is None and not self.codec.format.append_invariant:
            self._constant = self.codec.constant(self._without_padding(x_BHTD, valid_BT))
        payload, scale = self.codec.encode(x_BHTD, self._constant)
        end = self.length + x_BHTD.shape[2]
        self._payload = _written(self._payload, payload, self.length, end)
        if scale is not None:
            self._scale = _written(self._scale, scale, self.length, end)
        self.length = end

    def _without_padding(self, x_BHTD: Tensor, valid_BT: Tensor | None) -> Tensor:
        """The first write with padding set to zero, which no scale is taken from."""
        if valid_BT is None:
            return x_BHTD
        batch, tokens = x_BHTD.shape[0], x_BHTD.shape[2]
        if valid_BT.shape[0] != batch or valid_BT.shape[1] < tokens:
            raise UnsupportedError(
                f"{self._where}: a padding mask of {valid_BT.shape[0]} x {valid_BT.shape[1]} does not cover "
                f"the first write of {batch} x {tokens}.",
                remedy="Give the mask of the batch that the model gets (for beam search, each row repeated per beam).",
            )
        valid_BT = valid_BT[:, :tokens]
        if not valid_BT.any(1).all():
            raise UnsupportedError(
                f"{self._where}: a whole row of the first write is padding, so nothing can set its scale.",
                remedy="Prefill in larger chunks, or run the short prompts by themselves.",
            )
        return x_BHTD.masked_fill(~valid_BT[:, None, :, None], 0)

    def read(self, length: int, dtype: torch.dtype) -> Tensor:
        """`dtype` [B, H, length, D]: the first `length` tokens, decoded from their bytes. Counted."""
        if length > self.length or self._payload is None:
            raise MeasurementError(f"{self._where} was asked for {length} tokens but stores {self.length}.")
        self.tokens_read += length
        scale = None if self._scale is None else self._scale[:, :, :length]
        return self.codec.decode(self._payload[:, :, :length], scale, self._constant, dtype)

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Live payload [B, H, T, P], scales [B, H, T, S] and frozen constant [B, 1, 1, 1], without padding."""
        if self._payload is None:
            raise MeasurementError(f"{self._where} stores nothing yet.")
        scale = None if self._scale is None else self._scale[:, :, : self.length]
        return self._payload[:, :, : self.length], scale, self._constant

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens. A store cropped to nothing forgets its frozen scale too."""
        self.length = max(0, self.length - tokens)
        if self.length == 0:
            self._payload = self._scale = self._constant = None

    def map_batch(self, change: Any) -> None:
        """Apply `change` (tensor -> tensor, along dimension 0) to codes, scales and constants alike."""
        for name in ("_payload", "_scale", "_constant"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def copy(self) -> PackedStore:
        """An independent store with the same tokens."""
        twin = PackedStore(self.codec, where=self._where)
        twin.length = self.length
        twin._payload, twin._scale, twin._constant = self._payload, self._scale, self._constant
        twin.map_batch(torch.clone)
        return twin

    def nbytes(self) -> StoredBytes:
        """Bytes of the live tensors, from the tensors themselves."""
        if self._payload is None:
            return StoredBytes()
        payload, scale, constant = self.parts()
        used = payload.nbytes + (0 if scale is None else scale.nbytes)
        allocated = self._payload.nbytes + (0 if self._scale is None else self._scale.nbytes)
        return StoredBytes(
            payload=payload.nbytes,
            scales=0 if scale is None else scale.nbytes,
            constants=0 if constant is None else constant.nbytes,
            padding=allocated - used,
        )


def _written(buffer: Tensor | None, new: Tensor, start: int, end: int) -> Tensor:
    """`buffer` with `new` at tokens start..end, grown to a whole number of growth steps where needed."""
    if buffer is None or buffer.shape[2] < end:
        capacity = -(-end // GROWTH_TOKENS) * GROWTH_TOKENS
        grown = new.new_zeros((*new.shape[:2], capacity, new.shape[3]))
        if buffer is not None:
            grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    buffer[:, :, start:end] = new
    return buffer


class PackedKV(Tensor):
    """What a cache layer's `update` hands to the model: a tensor in shape, dtype and device, with bytes behind it.

    kveval's attention function recognises it and reads the packed store. Any other operation that meets it reads
    the store too (through `__torch_dispatch__`), so models that touch keys between cache and attention stay right.
    """

    store: PackedStore
    length: int
    fresh: Tensor | None

    @staticmethod
    def __new__(cls, store: PackedStore, like: Tensor, *, fresh: Tensor | None) -> PackedKV:
        """A handle to what `store` holds now.

        Args:
            cls: This class.
            store: The bytes.
            like: Gives batch, heads, head size, dtype and device.
            fresh: [B, H, t, D]; if given, what a read returns for the last t tokens instead of their stored form
                (`reads: fresh_chunk`).
        """
        shape = (*like.shape[:2], store.length, like.shape[3])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self.store, self.length, self.fresh = store, store.length, fresh
        return self

    def __init__(self, store: PackedStore, like: Tensor, *, fresh: Tensor | None) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedKV(shape={tuple(self.shape)}, dtype={self.dtype}, element={self.store.codec.format.element})"

    def dequantize(self) -> Tensor:
        """Read the store: a plain tensor [B, H, T, D]."""
        if self.length == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.fresh is None:
            return self.store.read(self.length, self.dtype)
        stored = self.length - self.fresh.shape[2]
        if stored == 0:
            return self.fresh
        return torch.cat([self.store.read(stored, self.dtype), self.fresh], dim=2)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, PackedKV) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
