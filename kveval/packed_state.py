"""What a packed store holds, in the forms in which it is written and read: by the codec, and by kernels.

Shape legend: B batch, H KV heads, T tokens, D head size, P payload bytes of a token, S scale bytes of a unit of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kveval.formats.codec import NOTHING_FROZEN, Codec, Frozen
from kveval.formats.layout import BF16
from kveval.formats.transforms import rotate
from kveval.kernels import ops
from kveval.kernels.formats import format_key

__all__ = ["KERNEL_FLOATS", "Segment", "State", "Write", "append_by_kernel", "length"]

KERNEL_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What the ops take and give."""


@dataclass(frozen=True)
class State:
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
        return self.total - self.encoded - length(self.sinks)

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
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


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that are stored alike, as ops take them.

    Attributes:
        start: The first token, counted from the oldest that is kept.
        tokens: How many.
        payload: uint8 [B, H, capacity, P]; their codes come first.
        scale: uint8 [B, H, capacity, S], or None.
        tensor_scale: float32 [B or 1, H or 1], or None.
        key: `format_key` of their format.
        rotated: Whether they were rotated before they were encoded.
        mean: float32 [B, H, 1, D] that was taken from them before, or None.
    """

    start: int
    tokens: int
    payload: Tensor
    scale: Tensor | None = None
    tensor_scale: Tensor | None = None
    key: str = format_key(BF16)
    rotated: bool = False
    mean: Tensor | None = None

    @property
    def stop(self) -> int:
        """The token after the last."""
        return self.start + self.tokens

    def cut(self, start: int, stop: int) -> Segment:
        """Its tokens from `start` to `stop`."""
        skipped = start - self.start
        rows = slice(skipped, None)
        return replace(
            self,
            start=start,
            tokens=stop - start,
            payload=self.payload[:, :, rows] if skipped else self.payload,
            scale=self.scale[:, :, rows] if skipped and self.scale is not None else self.scale,
        )

    def row(self, index: int) -> Segment:
        """What it is of one row of the batch."""

        def own(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or tensor.shape[0] == 1 else tensor[index : index + 1]

        one = self.payload[index : index + 1]
        return replace(
            self, payload=one, scale=own(self.scale), tensor_scale=own(self.tensor_scale), mean=own(self.mean)
        )

    @classmethod
    def wide(cls, start: int, x_BHTD: Tensor) -> Segment:
        """Tokens as they are, in bfloat16."""
        return cls(start, x_BHTD.shape[2], x_BHTD.view(torch.uint8))


@dataclass(frozen=True)
class Write:
    """Tokens on their way into the buffers of a store.

    Attributes:
        codec: Encodes them.
        key: `format_key` of their format, where kernels know it.
        state: What the store holds once they are encoded.
        x: [B, H, t, D], to be encoded; t may be 0.
        start: Position of the first of them in the buffers.
        tensor_scale: float32 [B or 1, H or 1] for kernels, or None.
        unencoded: [B, H, n, D]: what the store was given, if some of it stays wide for now; else None.
    """

    codec: Codec
    key: str
    state: State
    x: Tensor
    start: int
    tensor_scale: Tensor | None = None
    unencoded: Tensor | None = None

    def encode(self) -> None:
        """Put the codes of `x` into the buffers."""
        state, unit = self.state, self.codec.format.unit
        if state.payload is None or self.x.shape[2] == 0:
            return
        payload, scale = self.codec.encode(self.x, state.frozen)
        end = self.start + self.x.shape[2]
        state.payload[:, :, self.start : end] = payload
        if scale is not None and state.scale is not None:
            state.scale[:, :, self.start // unit : end // unit] = scale

    def transformed(self) -> Tensor:
        """`x` as kernels encode it: rotated, or without its mean."""
        x, mean = self.x, self.state.frozen.mean
        if mean is not None and x.shape[2]:
            x = x.float() - mean
        if self.codec.format.transform == "hadamard" and x.shape[2]:
            x = rotate(x.float())
        return x if x.dtype in KERNEL_FLOATS else x.float()

    def planes(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Payload, scales and tensor-level scale, as ops take them."""
        state, fmt, head_dim = self.state, self.codec.format, self.codec.head_dim
        if state.payload is not None:
            return state.payload, state.scale, self.tensor_scale
        (batch, heads), scale_bytes = self.x.shape[:2], fmt.scale_bytes(head_dim)
        nothing = self.x.new_empty(batch, heads, 0, fmt.payload_bytes(head_dim), dtype=torch.uint8)
        return nothing, nothing.new_empty(batch, heads, 0, scale_bytes) if scale_bytes else None, None


def append_by_kernel(key: Write, value: Write, nonfinite: Tensor) -> None:
    """Encode keys and values of one layer in one launch.

    Args:
        key: Of a store that kernels encode for.
        value: Likewise, of as many sequences and heads.
        nonfinite: int32 [2]; becomes 1 where keys, or values, had NaN or infinity.
    """
    for role, write in enumerate((key, value)):
        if write.unencoded is not None:
            nonfinite[role].bitwise_or_((~torch.isfinite(write.unencoded)).any().int())
    k, v = key.transformed(), value.transformed()
    if k.shape[2] + v.shape[2] == 0:
        return
    if k.dtype != v.dtype:
        k, v = k.float(), v.float()
    ops.append(
        k, v, *key.planes(), *value.planes(), nonfinite, key.start, value.start, key.key, value.key
    )  # fmt: skip


def length(tokens: Tensor | None) -> int:
    """Tokens of a tensor [B, H, T, D]; 0 for None."""
    return 0 if tokens is None else tokens.shape[2]
