"""Progress of a sweep: what the runner reports, and a bar (or, without a terminal, lines) on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

__all__ = ["Progress", "progress_bar"]

SECONDS_BETWEEN_LINES = 30.0


@dataclass
class Progress:
    """What a caller may watch: `report(done, total, what)` after every step, in tokens to be processed."""

    report: Callable[[int, int, str], None] = lambda done, total, what: None
    total: int = 0
    done: int = 0

    def advance(self, tokens: int, what: str) -> None:
        """Count `tokens` more as processed."""
        self.done += tokens
        self.report(self.done, self.total, what)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A `Progress` to hand to `run_sweep`; what it is told appears on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Progress(_Lines())
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Bar(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("loading the model", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield Progress(show)


class _Lines:
    """One line at most every `SECONDS_BETWEEN_LINES`, for logs."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._first_done: int | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if self._first_done is None:
            self._first_done, self._start = done, now
        if now - self._last < SECONDS_BETWEEN_LINES and done < total:
            return
        self._last = now
        worked, elapsed = done - self._first_done, now - self._start
        left = f", about {elapsed / worked * (total - done):.0f} s left" if worked else ""
        sys.stderr.write(f"{100 * done // max(total, 1)} % of {total} tokens{left} ({what})\n")
