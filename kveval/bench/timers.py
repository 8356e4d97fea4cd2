"""How time is taken: by replays of CUDA graphs on a GPU, by the clock on a CPU.

What is compared is timed in turns, replay by replay, so that a clock that rises or a busy neighbour hits all alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from kveval.bench.record import CopyRow, Spread

__all__ = ["GraphTimer", "Round", "Timer", "WallTimer", "copy_bandwidth", "timer_of"]

Round = Sequence[Callable[[], object]]
"""Calls that differ in the memory they work on alone; together they pass over more than the L2 cache holds."""

REPLAY_US = 2000.0
"""What a replay takes at least, where nobody is in a hurry."""

LARGEST_GRAPH = 4096
"""Most calls of a graph."""

COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**26}
"""Of the tensor that is copied to learn the bandwidth."""


class Timer(Protocol):
    """Takes time on one device."""

    device: torch.device

    def microseconds(self, rounds: Mapping[str, Round], replays: int) -> dict[str, list[float]]:
        """Microseconds of a call, `replays` samples by name, each a mean over a pass of its round or more."""

    def direct(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Microseconds of the device for a long call that is made as it is, `repeats` samples."""

    def milliseconds(self, step: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
        """What a caller waits for each step until its work is done, `repeats` samples by name, taken in turns."""


class GraphTimer:
    """Kernel time on an NVIDIA GPU: every round is captured as a CUDA graph, and graphs are replayed in turns.

    What a GPU needs between two kernels of a graph, about a microsecond, counts as time of the kernel.

    Args:
        device: The GPU.
        replay_us: A replay takes about this many microseconds or more, beside which its start does not count.
    """

    def __init__(self, device: torch.device, replay_us: float = REPLAY_US) -> None:
        self.device = device
        self._replay_us = replay_us
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def microseconds(self, rounds: Mapping[str, Round], replays: int) -> dict[str, list[float]]:
        """See `Timer.microseconds`."""
        graphs = {name: self._captured(calls) for name, calls in rounds.items()}
        samples: dict[str, list[float]] = {name: [] for name in rounds}
        for turn in range(replays + 1):
            for name, (graph, calls) in graphs.items():
                # The replay before keeps the GPU busy until the timed one is handed over as well.
                us = self._elapsed(graph.replay, before=graph.replay) / calls
                if turn:  # the first replay also uploads the graph
                    samples[name].append(us)
        return samples

    def direct(self, call: Callable[[], object], repeats: int) -> list[float]:
        """See `Timer.direct`."""
        return [self._elapsed(call, before=call) for _ in range(repeats)]

    def milliseconds(self, step: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
        """See `Timer.milliseconds`."""
        return _by_the_clock(step, repeats, lambda: torch.cuda.synchronize(self.device))

    def _captured(self, calls: Round) -> tuple[torch.cuda.CUDAGraph, int]:
        """A graph of one pass or more over a round, and how many calls it holds."""
        once = partial(_run, calls)
        self._elapsed(calls[0])  # loads the kernel
        passes = math.ceil(self._replay_us / max(1.0, self._elapsed(once)))
        passes = max(1, min(passes, LARGEST_GRAPH // len(calls)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # The context manager `torch.cuda.graph` collects garbage first, which takes longer than all that is timed.
            graph.capture_begin()
            try:
                for _ in range(passes):
                    once()
            finally:
                graph.capture_end()
        return graph, passes * len(calls)

    def _elapsed(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        """Microseconds of the GPU from the end of `before` to the end of `run`."""
        with torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self.device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if before is not None:
                before()
            start.record()
            run()
            end.record()
            torch.cuda.synchronize(self.device)
            return float(start.elapsed_time(end)) * 1e3


class WallTimer:
    """The clock, for devices whose calls return when they are done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def microseconds(self, rounds: Mapping[str, Round], replays: int) -> dict[str, list[float]]:
        """See `Timer.microseconds`."""
        steps = {name: partial(_run, calls) for name, calls in rounds.items()}
        times = _by_the_clock(steps, replays, lambda: None)
        return {name: [1e3 * ms / len(rounds[name]) for ms in of] for name, of in times.items()}

    def direct(self, call: Callable[[], object], repeats: int) -> list[float]:
        """See `Timer.direct`."""
        return [1e3 * ms for ms in _by_the_clock({"": call}, repeats, lambda: None)[""]]

    def milliseconds(self, step: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
        """See `Timer.milliseconds`."""
        return _by_the_clock(step, repeats, lambda: None)


def _run(calls: Round) -> None:
    for call in calls:
        call()


def _by_the_clock(
    steps: Mapping[str, Callable[[], object]], repeats: int, wait: Callable[[], None]
) -> dict[str, list[float]]:
    """Milliseconds; the first turn is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            step()
            wait()
            if turn:
                samples[name].append(1e3 * (time.perf_counter() - start))
    return samples


def timer_of(device: torch.device) -> Timer:
    """The timer of a device."""
    return GraphTimer(device) if device.type == "cuda" else WallTimer(device)


def copy_bandwidth(timer: Timer, replays: int) -> CopyRow:
    """What torch's copy_ of a large tensor reaches: the limit that kernels are held against."""
    size = COPY_BYTES[timer.device.type]
    if timer.device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(timer.device)[0] // 4)
    source = torch.empty(size // 4, dtype=torch.int32, device=timer.device).random_()
    target = torch.empty_like(source)
    # Not as a graph: there a copy of this size falls to the copy engines, which are slower than the multiprocessors.
    us = timer.direct(lambda: target.copy_(source), replays)
    nbytes = 2 * source.numel() * source.element_size()
    return CopyRow(nbytes, Spread.of(us), Spread.rate(nbytes, us))
