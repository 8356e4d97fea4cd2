"""Storage of rows that share their first tokens: those are stored once, and what every row adds by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kveval.errors import UnsupportedError
from kveval.packed_state import Segment, Write, length
from kveval.storage import PackedStore, Store, StoredBytes

__all__ = ["ForkedStore"]


class ForkedStore(Store):
    """Every row of a batch continued as several rows, which begin with its tokens. See `Store`.

    The new rows of a row lie side by side. Each has the bytes that it would have alone, so that nothing may be grouped
    over tokens or kept recent; what is frozen was frozen by the shared tokens.

    Args:
        stem: The tokens that are shared; it must hold some.
        forks: New rows of each of its rows.

    Raises:
        UnsupportedError: how the format stores a token depends on later ones.
    """

    def __init__(self, stem: PackedStore, forks: int) -> None:
        self.forks = forks
        self._stem, self._own = stem, stem.continued(forks)

    @property
    @override
    def total(self) -> int:
        return self._own.total

    @property
    @override
    def batch_size(self) -> int:
        return self._stem.batch_size * self.forks

    @property
    @override
    def dropped(self) -> int:
        return self._stem.dropped

    @property
    @override
    def kernels(self) -> bool:
        return self._stem.kernels

    @override
    def plan(self, x_BHTD: Tensor, *, check: bool) -> list[Write]:
        return self._own.plan(x_BHTD, check=check)

    @override
    def commit(self, writes: Sequence[Write], tokens: int) -> None:
        self._own.commit(writes, tokens)

    @override
    def check_padding(self, padding: list[int]) -> None:
        self._stem.check_padding(padding)

    @override
    def snapshot(self) -> Any:
        return self._stem.snapshot(), self._own.snapshot()

    @override
    def restore(self, snapshot: Any) -> None:
        self._stem.restore(snapshot[0])
        self._own.restore(snapshot[1])

    def shared(self, snapshot: Any) -> int:
        """How many of the tokens that `read` returns all rows of a row share; the first ones."""
        stem, _ = snapshot
        return int(stem.total - stem.dropped)

    @override
    def read(self, snapshot: Any, dtype: torch.dtype) -> Tensor:
        shared = self.shared(snapshot)
        total = snapshot[1].total - snapshot[0].dropped
        stem = self.read_rows(snapshot, 0, shared, dtype).repeat_interleave(self.forks, dim=0)
        return stem if total == shared else torch.cat([stem, self.read_rows(snapshot, shared, total, dtype)], dim=2)

    @override
    def read_rows(self, snapshot: Any, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """As `Store.read_rows`, of tokens that are shared, once for each row of the stem, or of tokens that are not."""
        (stem, own), shared = snapshot, self.shared(snapshot)
        with self._counting():
            if stop <= shared:
                return self._stem.read_rows(stem, start, stop, dtype)
            assert start >= shared, "shared tokens and others are read one after the other"
            sinks = length(stem.sinks)  # the store of the rest has them too, first
            return self._own.read_rows(own, start - shared + sinks, stop - shared + sinks, dtype)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count as read what the two stores count."""
        before = self._stem.tokens_read + self._own.tokens_read
        yield
        self.tokens_read += self._stem.tokens_read + self._own.tokens_read - before

    @override
    def segments(self, snapshot: Any) -> list[tuple[int, list[Segment]]]:
        (stem, own), shared = snapshot, self.shared(snapshot)
        sinks = length(stem.sinks)
        with self._counting():
            ((_, first),) = self._stem.segments(stem)
            ((_, last),) = self._own.segments(own)
            self._own.tokens_read -= sinks  # which are read with the shared tokens
        last = [part.cut(max(part.start, sinks), part.stop) for part in last if part.stop > sinks]
        last = [replace(part, start=part.start - sinks + shared) for part in last]
        return [
            (0, [*(part.row(i // self.forks) for part in first), *(part.row(i) for part in last)])
            for i in range(self.batch_size)
        ]

    @override
    def crop(self, tokens: int) -> None:
        own = self._own.total - self._stem.total
        if tokens > own:
            raise UnsupportedError(
                f"rows that share their first {self._stem.total} tokens can't forget {tokens}: they have {own} more.",
                remedy="Use `with cache.branch():` around the fork and what is to be taken back.",
            )
        self._own.crop(tokens)

    @override
    def drop(self, oldest: int) -> None:
        self._stem.drop(min(oldest, self._stem.total))

    @override
    def select_rows(self, rows: Tensor) -> None:
        raise UnsupportedError(
            "rows that share their first tokens can't be picked one by one.",
            remedy="Use `batch_repeat_interleave` in place of `fork_rows`: every row then has its own copy.",
        )

    @override
    def copy(self) -> ForkedStore:
        twin = object.__new__(ForkedStore)
        twin.forks, twin._stem, twin._own = self.forks, self._stem.copy(), self._own.copy()
        return twin

    @override
    def nbytes(self) -> StoredBytes:
        """As if every row were alone: the shared tokens count for each."""
        own, stem = self._own.nbytes(), self._stem.nbytes()
        return own + StoredBytes(
            payload=stem.payload * self.forks, scales=stem.scales * self.forks, padding=stem.padding * self.forks
        )

    @override
    def billed_bytes(self) -> int:
        stem, own = self._stem.snapshot(), self._own
        assert stem.shape is not None
        return self.batch_size * own.role.nbytes(
            own.total, head_dim=own.codec.head_dim, kv_heads=stem.shape[1], dropped=stem.dropped
        )
