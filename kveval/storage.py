"""Packed storage of one role (keys or values) of one layer: growable uint8 buffers and what is read from them.

Shape legend: B batch, H KV heads, T tokens, D head size, P payload bytes of a token, S scale bytes of a unit of tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.codec import Codec
from kveval.formats.layout import RoleFormat
from kveval.formats.transforms import rotate
from kveval.kernels import ops
from kveval.kernels.formats import format_key, tensor_scale
from kveval.nonfinite import nonfinite_error
from kveval.packed_state import KERNEL_FLOATS, Segment, State, Write, length

__all__ = ["CROP_RESERVE", "PackedStore", "Store", "StoredBytes"]

CROP_RESERVE = 64
"""Tokens that `crop` can take back exactly, counted from the most that were held since the cache was empty.

Formats that encode tokens only once they leave a tail keep in BF16 as well what such a crop would put back into it, and
sliding windows keep this many beyond the window.
"""

ALIGNMENT = 16
"""Buffers hold a multiple of this many tokens, so that rows of every head begin at a multiple of as many bytes."""


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

    def per_sequence(self, batch: int) -> StoredBytes:
        """A sequence's share of the bytes of `batch` sequences of one length, which all have the same."""
        assert all(getattr(self, f.name) % batch == 0 for f in fields(self)), "sequences of a batch are stored alike"
        return StoredBytes(*(getattr(self, f.name) // batch for f in fields(self)))

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

    @property
    @abstractmethod
    def kernels(self) -> bool:
        """Whether kernels encode and decode these tokens, to the bytes and numbers that the codec gives."""

    @abstractmethod
    def plan(self, x_BHTD: Tensor, *, check: bool) -> list[Write]:
        """What storing tokens after the last one will change; nothing yet, and nothing if there are none.

        Args:
            x_BHTD: The tokens.
            check: Refuse NaN and infinity at once, which waits for the device; `append_by_kernel` notes them instead.

        Raises:
            MeasurementError: on NaN or infinity, naming the layer.
        """

    @abstractmethod
    def commit(self, writes: Sequence[Write], tokens: int) -> None:
        """Make it so: the writes of one `plan` of so many tokens are encoded."""

    def append(self, x_BHTD: Tensor) -> None:
        """Store tokens after the last one, encoded by the codec."""
        writes = self.plan(x_BHTD, check=True)
        for write in writes:
            write.encode()
        self.commit(writes, x_BHTD.shape[2])

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

    def read_rows(self, snapshot: Any, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Tokens `start` to `stop` of what `read` returns, whole units of the format. Counted as read.

        Raises:
            UnsupportedError: every row of the batch is stored by itself.
        """
        raise UnsupportedError("rows that are stored one by one can't be read in part.", remedy="Use `read`.")

    @abstractmethod
    def segments(self, snapshot: Any) -> list[tuple[int, list[Segment]]]:
        """All that `snapshot` holds, packed, for attention. Counted as read.

        Returns:
            One entry for the whole batch, or one for each row: where its first token comes in what `read` returns, and
            its tokens in order.
        """

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


class PackedStore(Store):
    """The bytes of one role of one layer, and the only way in and out of them. See `Store`.

    Args:
        role: How which token is stored.
        head_dim: D.
        where: Names the layer and role in messages.
        block_size: Tokens by which buffers grow; what is allocated beyond the stored tokens is padding.
        reserve: Tokens for which the first write allocates.
        kernels: Whether kernels encode and decode; the format must be one of theirs.
    """

    def __init__(
        self,
        role: RoleFormat,
        head_dim: int,
        *,
        where: str,
        block_size: int = 256,
        reserve: int = 0,
        kernels: bool = False,
    ) -> None:
        self.role = role
        self.codec = Codec(role.format, head_dim, role.scales)
        self.key = format_key(role.format) if kernels else ""
        self._where = where
        unit = role.format.unit
        self._block = _round_up(block_size, math.lcm(unit, ALIGNMENT))
        self._reserve = _round_up(role.encoded_tokens(reserve), math.lcm(unit, ALIGNMENT))
        self._has_tail = role.residual_length > 0 or unit > 1
        self._constant_scale: Tensor | None = None
        self._state = State()

    @property
    @override
    def kernels(self) -> bool:
        return bool(self.key)

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
    def plan(self, x_BHTD: Tensor, *, check: bool) -> list[Write]:
        state, x = self._state, x_BHTD.detach()
        if x.shape[2] == 0:
            return [Write(self.codec, self.key, state, x, 0)]
        if check and not torch.isfinite(x).all():
            raise nonfinite_error(self._where)
        given = x if self._has_tail or self.role.sink_tokens > length(state.sinks) else None
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
            first = recent.shape[2] - (state.total - length(state.sinks) - state.encoded)
            x = recent[:, :, first : first + encoded - state.encoded]
            # A crop may reach back over the border of a tail that was encoded as a whole.
            reach = self.role.encoded_tokens(max(0, state.total - CROP_RESERVE))
            keep = min(recent.shape[2], state.total - length(state.sinks) - reach)
            state = replace(state, recent=_own(recent[:, :, recent.shape[2] - keep :]))
        start = state.encoded - state.dropped
        state = self._with_room(state, x, encoded)
        scale = self._tensor_scale(state) if self.kernels else None
        return [Write(self.codec, self.key, state, x, start, scale, given)]

    @override
    def commit(self, writes: Sequence[Write], tokens: int) -> None:
        (write,) = writes
        self._state = write.state

    def _keep_sinks(self, state: State, x: Tensor) -> tuple[State, Tensor]:
        missing = self.role.sink_tokens - length(state.sinks)
        if missing <= 0:
            return state, x
        return replace(state, sinks=_cat(state.sinks, x[:, :, :missing])), x[:, :, missing:]

    def _with_room(self, state: State, x: Tensor, encoded: int) -> State:
        """`state` with buffers for `encoded` encoded tokens, the last of which are `x`."""
        if x.shape[2] == 0:
            return state
        fmt, head_dim = self.role.format, self.codec.head_dim
        held, needed = state.encoded - state.dropped, encoded - state.dropped
        capacity = 0 if state.payload is None else state.payload.shape[2]
        if capacity < needed:
            capacity = max(_round_up(needed, self._block), self._reserve if state.payload is None else 0)
        payload = _with_rows(state.payload, x, held, capacity, fmt.payload_bytes(head_dim))
        scale = None
        if scale_bytes := fmt.scale_bytes(head_dim):
            scale = _with_rows(state.scale, x, held // fmt.unit, capacity // fmt.unit, scale_bytes)
        return replace(state, encoded=encoded, payload=payload, scale=scale)

    @override
    def check_padding(self, padding: list[int]) -> None:
        if any(padding) and (self.role.format.freezes or self.role.format.unit > 1 or self.role.sink_tokens):
            raise UnsupportedError(
                f"{self._where}: the batch has left padding, which would enter a frozen scale, a group or the sinks.",
                remedy="Give QuantizedCache the batch's attention mask as `padding_mask`.",
            )

    @override
    def snapshot(self) -> State:
        return self._state

    @override
    def restore(self, snapshot: State) -> None:
        self._state = snapshot

    @override
    def read(self, snapshot: State, dtype: torch.dtype) -> Tensor:
        if snapshot.total == 0:
            raise MeasurementError(f"{self._where} was read, but stores nothing.")
        return self.read_rows(snapshot, 0, snapshot.total - snapshot.dropped, dtype)

    @override
    def read_rows(self, snapshot: State, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        parts, at = [], 0
        encoded, tail = snapshot.encoded - snapshot.dropped, _tail(snapshot)
        for wide, tokens in ((snapshot.sinks, length(snapshot.sinks)), (None, encoded), (tail, length(tail))):
            first, last = max(start, at) - at, min(stop, at + tokens) - at
            if first < last:
                decoded = self._decoded(snapshot, first, last, dtype) if wide is None else wide[:, :, first:last]
                parts.append(decoded.to(dtype))
            at += tokens
        self.tokens_read += stop - start
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _decoded(self, state: State, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Encoded tokens `start` to `stop`."""
        assert state.payload is not None
        fmt, unit = self.role.format, self.role.format.unit
        if not self.kernels:
            scale = None if state.scale is None else state.scale[:, :, start // unit : stop // unit]
            return self.codec.decode(state.payload[:, :, start:stop], scale, state.frozen, dtype)
        as_stored = fmt.transform == "none" and dtype in KERNEL_FLOATS
        x = ops.dequantize(
            state.payload, state.scale, self._tensor_scale(state), self.key, self.codec.head_dim, start, stop,
            dtype if as_stored else torch.float32,
        )  # fmt: skip
        if fmt.transform == "hadamard":
            x = rotate(x)
        return (x if state.frozen.mean is None else x + state.frozen.mean).to(dtype)

    def _tensor_scale(self, state: State) -> Tensor | None:
        """float32 [B or 1, H or 1]: the scale of a format that has one for the whole tensor; None: none, or 1."""
        if state.payload is None:
            return None
        device = state.payload.device
        if state.frozen.scale is not None:
            return tensor_scale(self.codec, state.frozen, device)
        if self._constant_scale is None or self._constant_scale.device != device:
            self._constant_scale = tensor_scale(self.codec, state.frozen, device)
        return self._constant_scale

    @override
    def segments(self, snapshot: State) -> list[tuple[int, list[Segment]]]:
        found, kept, sinks = [], snapshot.encoded - snapshot.dropped, length(snapshot.sinks)
        if snapshot.sinks is not None and sinks:
            found.append(Segment.wide(0, snapshot.sinks))
        if snapshot.payload is not None and kept:
            rotated = self.role.format.transform == "hadamard"
            scale = self._tensor_scale(snapshot)
            found.append(
                Segment(sinks, kept, snapshot.payload, snapshot.scale, scale, self.key, rotated, snapshot.frozen.mean)
            )
        if (tail := _tail(snapshot)) is not None:
            found.append(Segment.wide(sinks + kept, tail))
        self.tokens_read += snapshot.total - snapshot.dropped
        return [(0, found)]

    def _body(self, state: State) -> tuple[Tensor | None, Tensor | None]:
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
        tail = _tail(state)
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
            self._state = State()
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
            tail_from = encoded + length(sinks)
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
        capacity = _round_up(kept - more, math.lcm(unit, ALIGNMENT))
        payload = _rows(state.payload, capacity)
        payload[:, :, : kept - more] = state.payload[:, :, more:kept]
        scale = None
        if state.scale is not None:
            scale = _rows(state.scale, capacity // unit)
            scale[:, :, : (kept - more) // unit] = state.scale[:, :, more // unit : kept // unit]
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

    def continued(self, forks: int) -> PackedStore:
        """A store for what comes after these tokens, of every row `forks` times; it counts them, and lacks them.

        Raises:
            UnsupportedError: nothing is stored, or how a token is stored depends on later ones.
        """
        if self._has_tail or self.total == 0:
            reason = "its format stores some tokens together with later ones" if self._has_tail else "it is empty"
            raise UnsupportedError(f"{self._where} can't be continued in several rows: {reason}.")
        twin = object.__new__(PackedStore)
        twin.__dict__.update(self.__dict__)
        state = replace(self._state, dropped=self._state.encoded, payload=None, scale=None)
        twin._state = state.map(lambda tensor: tensor.repeat_interleave(forks, dim=0))
        twin._block, twin._reserve, twin.tokens_read = ALIGNMENT, 0, 0
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


def _tail(state: State) -> Tensor | None:
    """bfloat16 [B, H, t, D]: tokens after the sinks that are not encoded; None if there are none."""
    return state.recent[:, :, -state.tail :] if state.tail and state.recent is not None else None


def _own(x: Tensor) -> Tensor:
    """A copy whose rows of a head lie side by side."""
    return x.clone(memory_format=torch.contiguous_format)


def _cat(first: Tensor | None, second: Tensor) -> Tensor:
    return _own(second) if first is None else torch.cat([first, second], dim=2)


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _rows(like: Tensor, count: int, width: int | None = None) -> Tensor:
    """uint8 zeros [B, H, count, width] for the batch, heads and device of `like` (and its width if none is given)."""
    shape = (*like.shape[:2], count, like.shape[3] if width is None else width)
    # Made in inference mode, they could not be written outside of it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=torch.uint8, device=like.device)


def _with_rows(buffer: Tensor | None, x: Tensor, held: int, count: int, width: int) -> Tensor:
    """`buffer`, or a larger one with its first `held` rows if it has less than `count`."""
    if buffer is not None and buffer.shape[2] >= count:
        return buffer
    grown = _rows(x, count, width)
    if buffer is not None:
        grown[:, :, :held] = buffer[:, :, :held]
    return grown
