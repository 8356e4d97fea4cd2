"""How time is taken: on a GPU that is simulated by a clock, which every call moves on by what it costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from kveval.bench import timers
from kveval.bench.timers import GraphTimer, WallTimer, copy_bandwidth


class SimulatedGpu:
    """Work that is handed over runs when the GPU is free; handing over costs the host some time."""

    def __init__(self) -> None:
        self.host = self.free = 0.0  # microseconds
        self.captured: list[Callable[[], None]] | None = None
        self.ran: list[str] = []

    def launch(self, name: str, us: float, launch_us: float = 5.0) -> None:
        if self.captured is not None:
            self.captured.append(partial(self._run, name, us))
            return
        self.host += launch_us
        self._run(name, us)

    def _run(self, name: str, us: float) -> None:
        self.ran.append(name)
        self.free = max(self.free, self.host) + us

    def synchronize(self, device: Any = None) -> None:
        self.host = max(self.host, self.free)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    simulated = SimulatedGpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            assert simulated.captured is None
            self.at = max(simulated.free, simulated.host)

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) / 1e3

    class Graph:
        def __init__(self) -> None:
            self.nodes: list[Callable[[], None]] = []

        def capture_begin(self) -> None:
            simulated.captured = self.nodes

        def capture_end(self) -> None:
            simulated.captured = None

        def replay(self) -> None:
            simulated.host += 40.0  # a graph of many nodes is slow to hand over
            for node in self.nodes:
                node()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.synchronize)
    return simulated


CUDA = torch.device("cuda", 0)


def test_graphs_give_the_time_of_the_gpu_alone(gpu):
    rounds = {"a": [partial(gpu.launch, "a", 3.0)] * 8, "b": [partial(gpu.launch, "b", 50.0)] * 2}
    assert GraphTimer(CUDA).microseconds(rounds, 4) == {"a": pytest.approx([3.0] * 4), "b": pytest.approx([50.0] * 4)}


def test_a_replay_lasts_long_enough(gpu):
    GraphTimer(CUDA).microseconds({"a": [partial(gpu.launch, "a", 10.0)] * 4}, 1)
    # One call to load the kernel, a pass of four to learn how long it takes (50 µs), then two turns of two replays.
    passes = timers.REPLAY_US / 40.0
    assert gpu.ran.count("a") == pytest.approx(1 + 4 + 4 * 4 * passes, rel=0.15)


def test_what_is_compared_takes_turns(gpu):
    rounds = {name: [partial(gpu.launch, name, 3000.0)] for name in "ab"}
    GraphTimer(CUDA).microseconds(rounds, 2)
    assert gpu.ran[4:] == list("aabb" * 3)  # the first turn is not counted


def test_a_graph_stays_small(gpu, monkeypatch):
    monkeypatch.setattr(timers, "LARGEST_GRAPH", 16)
    GraphTimer(CUDA).microseconds({"a": [partial(gpu.launch, "a", 1.0, launch_us=0.0)] * 8}, 1)
    assert gpu.ran.count("a") == 1 + 8 + 4 * 16


def test_a_capture_ends_where_a_call_fails(gpu):
    def fails_when_captured() -> None:
        if gpu.captured is not None:
            raise RuntimeError("not while capturing")

    with pytest.raises(RuntimeError, match="not while capturing"):
        GraphTimer(CUDA).microseconds({"a": [fails_when_captured]}, 1)
    assert gpu.captured is None


def test_what_a_caller_waits_for_counts_launches_too(gpu, monkeypatch):
    monkeypatch.setattr(timers.time, "perf_counter", lambda: gpu.host / 1e6)

    def step() -> None:
        for _ in range(10):
            gpu.launch("a", 1.0)

    (ms,) = GraphTimer(CUDA).milliseconds({"step": step}, 1)["step"]
    assert ms == pytest.approx((10 * 5.0 + 1.0) / 1e3)


def test_the_clock_times_turns_and_leaves_out_the_first(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(timers.time, "perf_counter", lambda: float(next(now)))
    order: list[str] = []
    rounds = {"a": [partial(order.append, "a")] * 2, "b": [partial(order.append, "b")]}
    found = WallTimer(torch.device("cpu")).microseconds(rounds, 2)
    assert found == {"a": [0.5e6, 0.5e6], "b": [1e6, 1e6]}
    assert "".join(order) == "aab" * 3


def test_the_bandwidth_of_a_copy_counts_reads_and_writes():
    class Fixed:
        device = torch.device("cpu")

        def direct(self, call, repeats):
            call()
            return [1000.0] * repeats

    found = copy_bandwidth(Fixed(), 3)
    assert found.nbytes == 2 * timers.COPY_BYTES["cpu"]
    assert found.gb_per_s.median == pytest.approx(found.nbytes / 1e6)
