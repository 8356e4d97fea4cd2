"""Storage of a batch with left padding: every row as it would be alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kveval.errors import MeasurementError, UnsupportedError
from kveval.packed_state import Segment, Write
from kveval.storage import PackedStore, Store, StoredBytes

__all__ = ["RowStores"]


class RowStores(Store):
    """A batch whose rows begin with different amounts of padding: every row in a store of its own. See `Store`.

    A row then has the bytes that it has alone, whatever is frozen or grouped over tokens, and padding is not stored.
    Reading puts zeros in its place.

    Args:
        rows: One empty store per row.
        padding: Padding tokens at the start of each row.
        unit: Rows drop tokens in whole units of this many, so that keys and values of one layer drop the same ones.
    """

    def __init__(self, rows: list[PackedStore], padding: list[int], *, unit: int = 1) -> None:
        self.rows, self.padding = rows, padding
        self._unit = unit
        self._total = 0
        self._nothing: Tensor | None = None

    @property
    @override
    def total(self) -> int:
        return self._total

    @property
    @override
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    @override
    def dropped(self) -> int:
        # Rows drop whole units behind their padding; what one of them lacks, none is asked for.
        return max(
            (pad + row.dropped for row, pad in zip(self.rows, self.padding, strict=True) if row.dropped), default=0
        )

    @property
    @override
    def kernels(self) -> bool:
        return all(row.kernels for row in self.rows)

    @override
    def plan(self, x_BHTD: Tensor, *, check: bool) -> list[Write]:
        if self._nothing is None:
            self._nothing = x_BHTD.new_empty(1, x_BHTD.shape[1], 0, x_BHTD.shape[3])
        return [
            write
            for x, row, pad in zip(torch.split(x_BHTD, 1), self.rows, self.padding, strict=True)
            for write in row.plan(x[:, :, max(0, pad - self._total) :], check=check)
        ]

    @override
    def commit(self, writes: Sequence[Write], tokens: int) -> None:
        for row, write in zip(self.rows, writes, strict=True):
            row.commit([write], write.x.shape[2])
        self._total += tokens

    @override
    def check_padding(self, padding: list[int]) -> None:
        if padding != [min(pad, self._total) for pad in self.padding]:
            raise UnsupportedError(
                f"the batch's rows begin with {padding} tokens of padding, not {self.padding} as `padding_mask` says.",
                remedy="Give QuantizedCache the attention mask of this batch.",
            )

    @override
    def snapshot(self) -> Any:
        states = tuple(row.snapshot() for row in self.rows)
        return self._total, self.dropped, tuple(self.rows), tuple(self.padding), states

    @override
    def restore(self, snapshot: Any) -> None:
        self._total, _, rows, padding, states = snapshot
        self.rows, self.padding = list(rows), list(padding)
        for row, state in zip(self.rows, states, strict=True):
            row.restore(state)

    @override
    def read(self, snapshot: Any, dtype: torch.dtype) -> Tensor:
        total, dropped, rows, _, states = snapshot
        if self._nothing is None:
            raise MeasurementError("a batch was read that stores nothing.")
        length = total - dropped
        self.tokens_read += length
        shape = (len(rows), self._nothing.shape[1], length, self._nothing.shape[3])
        out: Tensor = self._nothing.new_zeros(shape, dtype=dtype)
        for b, (row, state) in enumerate(zip(rows, states, strict=True)):
            if state.total:
                part = row.read(state, dtype)
                kept = min(length, part.shape[2])
                out[b, :, length - kept :] = part[0, :, part.shape[2] - kept :]
        return out

    @override
    def segments(self, snapshot: Any) -> list[tuple[int, list[Segment]]]:
        total, dropped, rows, _, states = snapshot
        self.tokens_read += total - dropped
        found = []
        for row, state in zip(rows, states, strict=True):
            ((_, parts),) = row.segments(state)
            found.append((total - dropped - (state.total - state.dropped), parts))
        return found

    @override
    def crop(self, tokens: int) -> None:
        for row in self.rows:
            row.crop(min(tokens, row.total))
        self._total = max(0, self._total - tokens)

    @override
    def drop(self, oldest: int) -> None:
        for row, pad in zip(self.rows, self.padding, strict=True):
            row.drop(max(0, oldest - pad) // self._unit * self._unit)

    @override
    def select_rows(self, rows: Tensor) -> None:
        self.padding = [self.padding[i] for i in rows.tolist()]
        self.rows = [self.rows[i].copy() for i in rows.tolist()]

    @override
    def copy(self) -> RowStores:
        twin = RowStores([row.copy() for row in self.rows], list(self.padding), unit=self._unit)
        twin._total, twin._nothing = self._total, self._nothing
        return twin

    @override
    def nbytes(self) -> StoredBytes:
        return sum((row.nbytes() for row in self.rows), StoredBytes())

    @override
    def billed_bytes(self) -> int:
        return sum(row.billed_bytes() for row in self.rows)
