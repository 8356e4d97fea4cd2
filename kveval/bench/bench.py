"""Runs a benchmark from what was asked for to its record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kveval import env
from kveval.bench.append import measure_append
from kveval.bench.caches import append_misfit, hollow_cache, random_query
from kveval.bench.decode import fitting, measure_decode
from kveval.bench.model_steps import measure_model
from kveval.bench.record import AppendRow, Bench, DecodeRow, LeftOut, ModelRow, ReferenceRow, ShapeRow, StepRow
from kveval.bench.shapes import Case
from kveval.bench.steps import measure_steps
from kveval.bench.timers import Timer, copy_bandwidth, timer_of
from kveval.bench.warm import compile_ahead
from kveval.config import ModelConfig
from kveval.errors import UnsupportedError
from kveval.formats.spec import KVScheme
from kveval.kernels.compiler import nvrtc_version, sources_digest
from kveval.kernels.support import missing
from kveval.models import compute_device, load

__all__ = ["ON_A_CPU", "Asked", "bench_device", "run_bench"]

log = logging.getLogger(__name__)

ON_A_CPU = (
    "These are times of the reference in torch operations on a CPU. They show that the benchmark runs and mean nothing "
    "about GPUs."
)


@dataclass(frozen=True)
class Asked:
    """What to time.

    Attributes:
        schemes: Storage schemes, BF16 first; their transforms, sinks and tails play no part, but with `model`.
        shapes: Of attention.
        lengths: Tokens that are cached.
        batches: Sequences.
        what: Of "decode", "append" and "step".
        replays: Samples of every figure.
        model: Name of a model to decode with, or None.
        seed: Of the random tokens.
    """

    schemes: tuple[KVScheme, ...]
    shapes: tuple[ShapeRow, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    what: tuple[str, ...]
    replays: int
    model: str | None = None
    seed: int = 0


def bench_device(name: str) -> torch.device:
    """The device that "auto", "cpu", "cuda" or "cuda:1" names.

    Raises:
        ConfigError: the name is none of these, or the device is not here.
    """
    kind = compute_device(name)
    device = torch.device(kind if name == "auto" else name)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


@torch.inference_mode()
def run_bench(
    asked: Asked, device: torch.device, *, timer: Timer | None = None, report: Callable[[str], None] = log.info
) -> Bench:
    """Times what was asked for.

    Args:
        asked: What to time.
        device: A GPU that runs the kernels, or the CPU, where the ops' references are timed.
        timer: Takes the time; the device's own if None.
        report: Is told what is being timed.

    Raises:
        UnsupportedError: the GPU can't run kernels.
        KernelError: a kernel does not compile, load or start.
        MeasurementError: attention gave NaN or infinity.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and (reason := missing(device)):
        raise UnsupportedError(f"kernels can't run on {device}: {reason}", remedy="`kveval doctor` says more.")
    timer = timer or timer_of(device)
    # Before anything is timed: a model that is not there would cost all that was.
    loaded = load(ModelConfig(id=asked.model), device=str(device)) if asked.model is not None else None
    found = _Found()
    schemes = {}
    for shape in asked.shapes:
        schemes[shape], left = fitting(asked.schemes, shape.head_dim, shape.name)
        found.left_out += left
    if on_gpu:
        report("compiling")
        count = sum(compile_ahead(_calls(shape, schemes[shape], asked, device), device) for shape in asked.shapes)
        report(f"{count} kernels are compiled")
    report("bandwidth of a copy")
    copied = copy_bandwidth(timer, asked.replays)
    _release(device)
    for shape in (s for s in asked.shapes if schemes[s]):
        for batch in asked.batches:
            _measure(Case(shape, batch, max(asked.lengths)), schemes[shape], asked, timer, found, report, copied)
    if loaded is not None:
        report(f"decoding with {asked.model}")
        rows, left = measure_model(loaded, asked.schemes, asked.lengths, timer, repeats=asked.replays, seed=asked.seed)
        found.model_steps += rows
        found.left_out += left
    machine = env.collect()
    properties: Any = torch.cuda.get_device_properties(device) if on_gpu else None
    return Bench(
        device=properties.name if on_gpu else "cpu",
        caveat="" if on_gpu else ON_A_CPU,
        kernel_hash=sources_digest(),
        nvrtc=_nvrtc(),
        driver=machine["driver"],
        commit=machine["git"]["commit"] if machine["git"] else None,
        l2_bytes=properties.L2_cache_size if on_gpu else None,
        env=machine,
        copy=copied,
        shapes=asked.shapes,
        decode=tuple(found.decode),
        references=tuple(found.references),
        append=tuple(found.append),
        steps=tuple(found.steps),
        model_steps=tuple(found.model_steps),
        left_out=tuple(dict.fromkeys(found.left_out)),
    )


class _Found:
    """What has been found so far."""

    def __init__(self) -> None:
        self.decode: list[DecodeRow] = []
        self.references: list[ReferenceRow] = []
        self.append: list[AppendRow] = []
        self.steps: list[StepRow] = []
        self.model_steps: list[ModelRow] = []
        self.left_out: list[LeftOut] = []


def _measure(
    longest: Case, schemes: Sequence[KVScheme], asked: Asked, timer: Timer, found: _Found,
    report: Callable[[str], None], copied: Any,
) -> None:  # fmt: skip
    """All that was asked for of one shape and batch; what the GPU's memory can't hold is left out."""
    shape, batch = longest.shape, longest.batch
    options: dict[str, Any] = {"replays": asked.replays, "seed": asked.seed}

    def append() -> None:
        rows, left = measure_append(shape, batch, schemes, timer, **options)
        found.append += rows
        found.left_out += left

    def decode(case: Case) -> None:
        done = measure_decode(case, schemes, timer, copy_gb_per_s=copied.gb_per_s.median, **options)
        found.decode += done.rows
        found.references += done.references
        found.left_out += done.left_out

    def step(case: Case) -> None:
        found.steps += measure_steps(case, schemes, timer, **options)

    cases = [Case(shape, batch, length) for length in asked.lengths]
    parts: list[tuple[str, Callable[[], None]]] = []
    if "append" in asked.what:
        parts.append((f"append: {shape.name}, batch {batch}", append))
    for case in cases:
        parts += [
            (f"{what}: {case}", partial(run, case))
            for what, run in (("decode", decode), ("step", step))
            if what in asked.what
        ]
    for what, run in parts:
        report(what)
        try:
            run()
        except torch.OutOfMemoryError:
            found.left_out.append(LeftOut(what, "it does not fit into the GPU's memory"))
        _release(timer.device)


def _calls(
    shape: ShapeRow, schemes: Sequence[KVScheme], asked: Asked, device: torch.device
) -> Iterator[Callable[[], object]]:
    """Every kind of call that will be timed, on caches that hold nothing."""
    attends, appends = {"decode", "step"} & set(asked.what), {"append", "step"} & set(asked.what)
    generator = torch.Generator()
    k = torch.zeros(1, 1, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device).transpose(1, 2)
    nonfinite = torch.zeros(2, dtype=torch.int32, device=device)
    for scheme in schemes:
        for case in (Case(shape, batch, length) for batch in asked.batches for length in asked.lengths if attends):
            cache, query = hollow_cache(scheme, case, device), random_query(case, device, generator)
            yield cache.decode(query)
            if "decode" in asked.what:
                yield cache.decode(query, loads_only=True)
        if appends and not append_misfit(scheme, shape.head_dim):
            yield hollow_cache(scheme, Case(shape, 1, 16), device).append(k, k, nonfinite, 0)


def _release(device: torch.device) -> None:
    """Gives memory that torch keeps for later back to the GPU: the next case is of another size."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _nvrtc() -> str | None:
    try:
        return ".".join(map(str, nvrtc_version()))
    except UnsupportedError:
        return None
