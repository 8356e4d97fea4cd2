"""Packed storage of one role (keys or values) of one layer: growable uint8 buffers and what is read from them.

Shape legend: B batch, H KV heads, T tokens, D head size, P payload bytes of a token, S scale bytes of a unit of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.codec import NOTHING_FROZEN, Codec, Frozen
from kveval.formats.layout import RoleFormat

__all__ = ["CROP_RESERVE", "PackedStore", "Store", "StoredBytes"]

CROP_RESERVE = 64
"""Tokens that `crop` can take back exactly, counted from the most that were held since the cache was empty.

Formats that encode tokens only once they leave a tail keep in BF16 as well what such a crop would put back into it, and
sliding windows keep this many beyond the window.
"""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of live cache tensors, by part.

    Attributes:
        payload: Codes.
        scales: Scales and zero points.
        constants: What was frozen at the first write of each sequence.
        wide_tokens: Sinks and recent tokens that the scheme keeps in BF16.
        wide_layers: Everything in layers that stay BF16 under a lossy scheme (sliding windows, skipped layers).
        padding: Allocated, but holds no token.
        undo: BF16 copies of recently encoded tokens, for `crop` alone; engines have none and attention sees none.
    """

    payload: int = 0
    scales: int = 0
    constants: int = 0
    wide_tokens: int = 0
    wide_layers: int = 0
    padding: int = 0
    undo: int = 0

    @property
    def stored(self) -> int:
        """All bytes that hold tokens for attention; neither padding nor undo is part of it."""
        return self.payload + self.scales + self.constants + self.wide_tokens + self.wide_layers

    def __add__(self, other: StoredBytes) -> StoredBytes:
        return StoredBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Store(ABC):
    """What a layer needs of the storage of one role; every tensor in it and out of it is [B, H, T, D]."""

    tokens_read = 0
    """Tokens decoded so far."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Tokens appended, the dropped ones included."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Rows of the batch, or -1 while nothing is stored."""

    @property
    @abstractmethod
    def dropped(self) -> int:
        """Oldest tokens that are gone."""

    @abstractmethod
    def append(self, x_BHTD: Tensor) -> None:
        """Store tokens after the last one."""

    @abstractmethod
    def check_padding(self, padding: list[int]) -> None:
        """Refuse a batch whose rows begin with this much padding, if what is stored depends on it and did not know."""

    @abstractmethod
    def snapshot(self) -> Any:
        """What is stored now; stays valid while tokens are appended, dropped or rows selected."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Forget what was done since `snapshot`."""

    @abstractmethod
    def read(self, snapshot: Any, dtype: torch.dtype) -> Tensor:
        """All that `snapshot` holds, decoded. Counted."""

    @abstractmethod
    def crop(self, tokens: int) -> None:
        """Forget the last tokens."""

    @abstractmethod
    def drop(self, oldest: int) -> None:
        """Free the oldest tokens, up to `oldest` in all."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Make the batch of these rows (int64)."""

    @abstractmethod
    def copy(self) -> Store:
        """An independent store with the same tokens."""

    @abstractmethod
    def nbytes(self) -> StoredBytes:
        """Bytes of the live tensors, from the tensors themselves."""

    @abstractmethod
    def billed_bytes(self) -> int:
        """What the formats' formulas say for as many tokens; equals `nbytes().stored`."""


@dataclass(frozen=True)
class _State:
    """Everything a store holds. Tensors are never changed in place, but for buffers beyond `encoded`.

    Attributes:
        total: Tokens appended.
        encoded: Of these, how many were encoded.
        dropped: Of these, how many of the oldest are gone.
        first_write: Tokens of the first append, from which scales are frozen.
        payload: uint8 [B, H, capacity, P]; token i of the encoded ones is at i - dropped.
        scale: uint8 [B, H, capacity / unit, S], or None.
        frozen: Scales and means taken from the first write.
        sinks: bfloat16 [B, H, s, D]: the first tokens, kept wide.
        recent: bfloat16 [B, H, r, D]: the last tokens; those not yet encoded, and some encoded ones before them.
    """

    total: int = 0
    encoded: int = 0
    dropped: int = 0
    first_write: int = 0
    payload: Tensor | None = None
    scale: Tensor | None = None
    frozen: Frozen = NOTHING_FROZEN
    sinks: Tensor | None = None
    recent: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int] | None:
        """Batch and KV heads; None while nothing is stored."""
        some = next((t for t in (self.payload, self.sinks, self.recent) if t is not None), None)
        return None if some is None else (some.shape[0], some.shape[1])

    @property
    def tail(self) -> int:
        """Tokens after the sinks that are not encoded."""
        return self.total - self.encoded - _length(self.sinks)

    def map(self, change: Callable[[Tensor], Tensor]) -> _State:
        """Apply `change` to every tensor."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return replace(
            self,
            payload=changed(self.payload),
            scale=changed(self.scale),
            frozen=self.frozen.map(change),
            sinks=changed(self.sinks),
            recent=changed(self.recent),
        )


class PackedStore(Store):
    """The bytes of one role of one layer, and the only way in and out of them. See `Store`.

    Args:
        role: How which token is stored.
        head_dim: D.
        where: Names the layer and role in messages.
        block_size: Tokens by which buffers grow; what is allocated beyond the stored tokens is padding.
    """

    def __init__(self, role: RoleFormat, head_dim: int, *, where: str, block_size: int = 256) -> None:
        self.role = role
        self.codec = Codec(role.format, head_dim, role.scales)
        self._where = where
        unit = role.format.unit
        self._block = -(-block_size // unit) * unit
        self._has_tail = role.residual_length > 0 or unit > 1
        self._state = _State()

    @property
    @override
    def total(self) -> int:
        return self._state.total

    @property
    @override
    def batch_size(self) -> int:
        return -1 if self._state.shape is None else self._state.shape[0]

    @property
    @override
    def dropped(self) -> int:
        return self._state.dropped

    @override
    def append(self, x_BHTD: Tensor) -> None:
        """Encode and store tokens after the last one.

        Raises:
            MeasurementError: on NaN or infinity, naming the layer.
        """
        if x_BHTD.shape[2] == 0:
            return
        x = x_BHTD.detach()
        if not torch.isfinite(x).all():
            raise MeasurementError(
                f"{self._where} got NaN or infinity; a cache that stores it would hide where it came from.",
                remedy="Check the model's dtype (float16 overflows in some models) and its weights.",
            )
        state = self._state
        if state.total == 0:
            state = replace(state, first_write=x.shape[2], frozen=self.codec.freeze(x))
        if self._has_tail or self.role.sink_tokens:
            # What waits in a tail waits in BF16; encoded at once, a token must give the same bytes.
            x = x.to(torch.bfloat16)
        state = replace(state, total=state.total + x.shape[2])
        state, x = self._keep_sinks(state, x)
        encoded = self.role.encoded_tokens(state.total)
        if self._has_tail:
            recent = _cat(state.recent, x)
            first = recent.shape[2] - (state.total - _length(state.sinks) - state.encoded)
            x = recent[:, :, first : first + encoded - state.encoded]
            # A crop may reach back over the border of a tail that was encoded as a whole.
            reach = self.role.encoded_tokens(max(0, state.total - CROP_RESERVE))
            keep = min(recent.shape[2], state.total - _length(state.sinks) - reach)
            state = replace(state, recent=recent[:, :, recent.shape[2] - keep :].clone())
        self._state = self._encode(state, x, encoded)

    def _keep_sinks(self, state: _State, x: Tensor) -> tuple[_State, Tensor]:
        missing = self.role.sink_tokens - _length(state.sinks)
        if missing <= 0:
            return state, x
        return replace(state, sinks=_cat(state.sinks, x[:, :, :missing])), x[:, :, missing:]

    def _encode(self, state: _State, x: Tensor, encoded: int) -> _State:
        """`state` with `x`, the tokens from `state.encoded` to `encoded`, in its buffers."""
        if x.shape[2] == 0:
            return state
        unit = self.role.format.unit
        start, end = state.encoded - state.dropped, encoded - state.dropped
        payload, scale = self.codec.encode(x, state.frozen)
        state = replace(state, encoded=encoded, payload=_written(state.payload, payload, start, end, self._block))
        if scale is None:
            return state
        written = _written(state.scale, scale, start // unit, end // unit, self._block // unit)
        return replace(state, scale=written)

    @override
    def check_padding(self, padding: list[int]) -> None:
        if any(padding) and (self.role.format.freezes or self.role.format.unit > 1 or self.role.sink_tokens):
            raise UnsupportedError(
                f"{self._where}: the batch has left padding, which would enter a frozen scale, a group or the sinks.",
                remedy="Give QuantizedCache the batch's attention mask as `padding_mask`.",
            )

    @override
    def snapshot(self) -> _State:
        return self._state

    @override
    def restore(self, snapshot: _State) -> None:
        self._state = snapshot

    @override
    def read(self, snapshot: _State, dtype: torch.dtype) -> Tensor:
        parts = [] if snapshot.sinks is None else [snapshot.sinks.to(dtype)]
        payload, scale = self._body(snapshot)
        if payload is not None:
            parts.append(self.codec.decode(payload, scale, snapshot.frozen, dtype))
        if snapshot.tail and snapshot.recent is not None:
            parts.append(snapshot.recent[:, :, -snapshot.tail :].to(dtype))
        if not parts:
            raise MeasurementError(f"{self._where} was read, but stores nothing.")
        self.tokens_read += snapshot.total - snapshot.dropped
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _body(self, state: _State) -> tuple[Tensor | None, Tensor | None]:
        """Live payload and scales of the encoded tokens, without padding."""
        kept = state.encoded - state.dropped
        if state.payload is None or kept == 0:
            return None, None
        scale = None if state.scale is None else state.scale[:, :, : kept // self.role.format.unit]
        return state.payload[:, :, :kept], scale

    def parts(self) -> dict[str, Tensor]:
        """Every live tensor without padding, by name: payload, scale, scale and mean that were frozen, sinks, tail."""
        state = self._state
        payload, scale = self._body(state)
        tail = state.recent[:, :, -state.tail :] if state.tail and state.recent is not None else None
        named = {
            "payload": payload, "scale": scale, "frozen_scale": state.frozen.scale, "frozen_mean": state.frozen.mean,
            "sinks": state.sinks, "tail": tail,
        }  # fmt: skip
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @override
    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens; what is left equals never having stored them.

        Raises:
            UnsupportedError: where it could not: a crop into the write that froze a scale, further back than the BF16
                copies reach, or into tokens that a sliding window has dropped.
        """
        state = self._state
        total = max(0, state.total - tokens)
        if total == 0:
            self._state = _State()
            return
        if tokens <= 0:
            return
        if self.role.format.freezes and total < state.first_write:
            self._refuse_crop(
                tokens,
                f"its scale was frozen from the first {state.first_write} tokens",
                hint=" `generate` with drafts feeds the first of them together with the prompt: decode without drafts.",
            )
        sinks = None if state.sinks is None else state.sinks[:, :, :total]
        encoded = self.role.encoded_tokens(total)
        if encoded < state.dropped:
            self._refuse_crop(tokens, f"its first {state.dropped} tokens have left the sliding window")
        recent = state.recent
        if recent is not None:
            tail_from = encoded + _length(sinks)
            if tail_from < min(total, state.total - recent.shape[2]):
                self._refuse_crop(tokens, f"only the last {recent.shape[2]} tokens are at hand in BF16")
            recent = recent[:, :, : max(0, recent.shape[2] - tokens)]
        self._state = replace(state, total=total, encoded=encoded, sinks=sinks, recent=recent)

    def _refuse_crop(self, tokens: int, reason: str, *, hint: str = "") -> None:
        raise UnsupportedError(
            f"{self._where} can't forget its last {tokens} tokens exactly: {reason}.",
            remedy=f"Use `with cache.branch():` or `cache.fork()` around what is to be taken back.{hint}",
        )

    @override
    def drop(self, oldest: int) -> None:
        state, unit = self._state, self.role.format.unit
        more = min(oldest, state.encoded) // unit * unit - state.dropped
        if more <= 0 or state.payload is None:
            return
        kept = state.encoded - state.dropped
        payload = state.payload[:, :, more:kept].clone()
        scale = None if state.scale is None else state.scale[:, :, more // unit : kept // unit].clone()
        self._state = replace(state, dropped=state.dropped + more, payload=payload, scale=scale)

    @override
    def select_rows(self, rows: Tensor) -> None:
        self._state = self._state.map(lambda t: t.index_select(0, rows.to(t.device)))

    @override
    def copy(self) -> PackedStore:
        twin = object.__new__(PackedStore)
        twin.__dict__.update(self.__dict__)
        twin._state, twin.tokens_read = self._state.map(torch.clone), 0
        return twin

    @override
    def nbytes(self) -> StoredBytes:
        state, live = self._state, self.parts()
        size = {name: tensor.nbytes for name, tensor in live.items()}
        used = size.get("payload", 0) + size.get("scale", 0)
        allocated = sum(t.nbytes for t in (state.payload, state.scale) if t is not None)
        return StoredBytes(
            payload=size.get("payload", 0),
            scales=size.get("scale", 0),
            constants=size.get("frozen_scale", 0) + size.get("frozen_mean", 0),
            wide_tokens=size.get("sinks", 0) + size.get("tail", 0),
            padding=allocated - used,
            undo=0 if state.recent is None else state.recent.nbytes - size.get("tail", 0),
        )

    @override
    def billed_bytes(self) -> int:
        state = self._state
        if state.shape is None:
            return 0
        batch, heads = state.shape
        return batch * self.role.nbytes(
            state.total, head_dim=self.codec.head_dim, kv_heads=heads, dropped=state.dropped
        )


def _length(tokens: Tensor | None) -> int:
    return 0 if tokens is None else tokens.shape[2]


def _cat(first: Tensor | None, second: Tensor) -> Tensor:
    return second.clone() if first is None else torch.cat([first, second], dim=2)


def _written(buffer: Tensor | None, new: Tensor, start: int, end: int, block: int) -> Tensor:
    """`buffer` with `new` at start..end, grown to a whole number of blocks where needed."""
    if buffer is None or buffer.shape[2] < end:
        grown = new.new_zeros((*new.shape[:2], -(-end // block) * block, new.shape[3]))
        if buffer is not None:
            grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    buffer[:, :, start:end] = new
    return buffer
