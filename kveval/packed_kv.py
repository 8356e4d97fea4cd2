"""`PackedKV`: what a packed cache layer hands to the model in place of a tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kveval.forked_store import ForkedStore
from kveval.kernel_use import NO_KERNELS, KernelUse
from kveval.masks import CausalMask
from kveval.packed_state import Segment
from kveval.storage import Store

__all__ = ["PackedKV"]

_OFTEN_NOTHING = (torch.ops.aten.to, torch.ops.aten.contiguous)
"""Operations that return the tensor itself where it is already as asked."""


class PackedKV(Tensor):
    """What a cache layer's `update` hands to the model: a tensor in shape, dtype and device, with bytes behind it.

    kveval's attention function recognises it and reads the packed store. Any other operation that meets it reads
    the store too (through `__torch_dispatch__`), so models that touch keys between cache and attention stay right.
    """

    store: Store
    snapshot: Any
    fresh: Tensor | None
    use: KernelUse

    @staticmethod
    def __new__(
        cls,
        store: Store,
        snapshot: Any,
        like: Tensor,
        length: int,
        *,
        fresh: Tensor | None,
        use: KernelUse = NO_KERNELS,
    ) -> PackedKV:
        """A handle to what `store` held when `snapshot` was taken.

        Args:
            cls: This class.
            store: The bytes.
            snapshot: Of the store.
            like: Gives batch, heads, head size, dtype and device.
            length: Tokens that a read returns.
            fresh: [B, H, t, D]; if given, what a read returns after the snapshot's own tokens (`reads: fresh_chunk`).
            use: What kernels do for the layer.
        """
        shape = (*like.shape[:2], length, like.shape[3])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self.store, self.snapshot, self.fresh, self.use = store, snapshot, fresh, use
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedKV(shape={tuple(self.shape)}, dtype={self.dtype})"

    def check_padding(self, mask: Tensor | None) -> None:
        """Compare the padding that a first forward's mask shows with the padding that the store was told of.

        Args:
            mask: bool [B, 1 or Hq, Lq, Lk] or None. On a first forward (Lq = Lk = all tokens) a token attends to itself
                in every kind of layer, unless it is padding.
        """
        if mask is None or mask.dtype != torch.bool or not mask.shape[2] == mask.shape[3] == self.store.total:
            return
        if isinstance(mask, CausalMask):
            self.store.check_padding(list(mask.padding or [0] * self.shape[0]))
            return
        hidden = (~mask[:, 0].diagonal(dim1=-2, dim2=-1)).sum(-1)
        self.store.check_padding([int(n) for n in hidden.expand(self.shape[0])])

    def dequantize(self) -> Tensor:
        """Read the store: a plain tensor [B, H, T, D]."""
        if self.shape[2] == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.fresh is None:
            return self.store.read(self.snapshot, self.dtype)
        if self.shape[2] == self.fresh.shape[2]:
            return self.fresh
        return torch.cat([self.store.read(self.snapshot, self.dtype), self.fresh], dim=2)

    @property
    def shared(self) -> int:
        """How many of the first tokens are stored once for several rows."""
        return self.store.shared(self.snapshot) if isinstance(self.store, ForkedStore) else 0

    def rows(self, start: int, stop: int) -> Tensor:
        """Tokens `start` to `stop` of what `dequantize` returns: a plain tensor [B, H, stop - start, D].

        The range lies before the fresh tokens or is theirs, and no row of the batch is stored by itself. Tokens that
        rows share come once, for fewer rows; the range then lies among them or after them.
        """
        held = self.shape[2] - (0 if self.fresh is None else self.fresh.shape[2])
        if self.fresh is not None and start >= held:
            return self.fresh[:, :, start - held : stop - held]
        return self.store.read_rows(self.snapshot, start, stop, self.dtype)

    def segments(self) -> list[list[Segment]]:
        """All tokens, packed, for the whole batch or row by row; starts are positions in what `dequantize` returns.

        Fresh tokens are in bfloat16.
        """
        found = [
            [replace(part, start=first + part.start) for part in parts]
            for first, parts in self.store.segments(self.snapshot)
        ]
        if self.fresh is not None:
            held = self.shape[2] - self.fresh.shape[2]
            pieces = torch.split(self.fresh, 1) if len(found) > 1 else (self.fresh,)
            for parts, fresh in zip(found, pieces, strict=True):
                parts.append(Segment.wide(held, fresh.contiguous()))
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket in _OFTEN_NOTHING:
            # In inference mode they come here whole; taken apart, they return the handle or come back as a copy.
            return func.decompose(*args, **(kwargs or {}))

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, PackedKV) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
