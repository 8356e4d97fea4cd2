"""From a sweep to its cells: what will run, in which order, under which identity. Needs no torch and no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kveval.config import SweepConfig, TaskConfig
from kveval.errors import ConfigError, LengthError, UnsupportedError
from kveval.formats.layout import LayerFormat, layer_formats
from kveval.formats.scales import StaticScales
from kveval.formats.spec import KVScheme, get_scheme
from kveval.geometry import LayerGeometry
from kveval.identity import digest
from kveval.records import SCHEMA_VERSION, Role

__all__ = ["AA_LABEL", "Arm", "Cell", "Plan", "TaskPlan", "build_plan", "settle_scales"]

AA_LABEL = "bf16 (A/A)"


@dataclass(frozen=True)
class Arm:
    """One way to run every sample: a scheme and how its cache is filled.

    `prefill_chunk` is the most tokens that one forward of the prompt takes. `sdpa` is which of torch's attention
    implementations runs on the decoded keys and values: the fastest that applies, or the plain one ("math").
    `attention` is whether attention reads packed bytes; see `kveval.cache.QuantizedCache`.
    """

    label: str
    role: Role
    scheme: KVScheme
    prefill_chunk: int
    reads: str
    sdpa: Literal["fastest", "math"] = "fastest"
    attention: Literal["auto", "packed", "dequant"] = "auto"


@dataclass(frozen=True)
class TaskPlan:
    """What the plan needs to know of a task.

    `identity` decides its samples (besides seed, tokenizer and length). `passage` says that its answers are running
    text from documents that are the same at every context length. One prefill then serves all lengths, and the
    lengths that run together, which decide where it pauses, are part of each cell's identity. `max_new_tokens` and
    `stop` are set where the model writes its answers. `buckets` says that samples are sorted by length, so that they
    depend on the next shorter length too.
    """

    label: str
    version: int
    identity: Mapping[str, Any]
    passage: bool
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    buckets: bool = False


@dataclass(frozen=True)
class Cell:
    """One grid point: every sample of a task at one context length on one arm.

    `passage`: see `TaskPlan`; matching such an answer to the token means nothing.
    """

    id: str
    task: str
    task_version: int
    arm: Arm
    context_length: int
    samples: int
    passage: bool


@dataclass(frozen=True)
class Plan:
    """A sweep, resolved. Cells come task by task, length by length, baseline first; tasks by label."""

    config: SweepConfig
    model: Mapping[str, Any]
    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    tasks: Mapping[str, TaskPlan]

    @property
    def gate_digest(self) -> str | None:
        """Digest of the gate as declared, or None without one."""
        gate = self.config.gate
        return None if gate is None else digest("gate", gate.model_dump(mode="json"))

    def cells_of(self, task: str, context_length: int) -> dict[str, Cell]:
        """The cells of a task at a length, by arm label."""
        return {c.arm.label: c for c in self.cells if (c.task, c.context_length) == (task, context_length)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as stored with the run. `plan_digest` covers everything but the run's name."""
        config = self.config.model_dump(mode="json")
        body = {
            "config": _said(config),
            "model": dict(self.model),
            "cells": [
                {
                    "cell_id": c.id,
                    "task": c.task,
                    "task_version": c.task_version,
                    "scheme": c.arm.label,
                    "role": c.arm.role,
                    "context_length": c.context_length,
                    "samples": c.samples,
                }
                for c in self.cells
            ],
            "gate_digest": self.gate_digest,
        }
        head = {"schema_version": SCHEMA_VERSION, "plan_digest": digest("plan", body)}
        return {**head, **body, "config": config}


UNSAID = (("attention", "auto"), ("mode", "teacher_forced"), ("batch_size", 1))
UNSAID_OF_TASKS = (("mode", None), ("max_new_tokens", None), ("stop", None))
"""Keys of a config, with their defaults, that came after plans were published; they leave a plan's digest as it was."""


def _said(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without its name and without what `UNSAID` names."""
    said = {key: value for key, value in config.items() if key != "name" and (key, value) not in UNSAID}
    said["tasks"] = [{k: v for k, v in task.items() if (k, v) not in UNSAID_OF_TASKS} for task in said["tasks"]]
    return said


def arms_of(config: SweepConfig) -> tuple[Arm, ...]:
    """Baseline, A/A control, the schemes in the config's order, crush control."""
    wide, chunk = get_scheme(config.baseline), config.prefill_chunk
    # No kernel reads the two bits of crush, and a control that can't run leaves the sweep without a verdict.
    crush = "auto" if config.attention == "packed" else config.attention
    return (
        Arm(config.baseline, "baseline", wide, chunk, config.reads, attention=config.attention),
        # Another chunk alone changes no rounding on some GPUs; another attention implementation does everywhere.
        # It decodes first, so that on a GPU it shows what the kernels' own rounding adds as well.
        Arm(AA_LABEL, "aa", wide, config.controls.aa_chunk, config.reads, sdpa="math", attention="dequant"),
        *(Arm(s.name, "scheme", s, chunk, config.reads, attention=config.attention) for s in config.schemes),
        Arm("crush", "crush", get_scheme("crush"), chunk, config.reads, attention=crush),
    )


def settle_scales(
    config: SweepConfig,
    layers: Sequence[LayerGeometry],
    weights_digest: str,
    carried: Callable[[], StaticScales | None],
) -> SweepConfig:
    """The sweep with the numbers in place of `scales: checkpoint`, once every scheme is known to fit the model.

    Args:
        config: The sweep.
        layers: The model's geometry.
        weights_digest: The model's, as `kveval.models.ModelInfo` has it.
        carried: Gives the scales in the model's checkpoint. Called only if a scheme could take them.

    Raises:
        ConfigError: a scheme lacks scales that it needs, says nothing of scales that the checkpoint carries, has scales
            of another model or element, or names layers that the model does not have.
        UnsupportedError: a format can't store a layer's head size.
    """
    schemes = []
    for i, scheme in enumerate(config.schemes):
        try:
            settled = _with_scales(scheme, weights_digest, carried)
            _check_elements(settled, layer_formats(settled, layers))
            _check_layers(settled, len(layers))
        except (ConfigError, UnsupportedError) as error:
            where = config.where("schemes", i)
            kind = ConfigError if isinstance(error, ConfigError) else UnsupportedError
            raise kind(f"{where + ': ' if where else ''}{scheme.name}: {error.message}", remedy=error.remedy) from error
        schemes.append(settled)
    return config.model_copy(update={"schemes": tuple(schemes)})


def _with_scales(scheme: KVScheme, weights_digest: str, carried: Callable[[], StaticScales | None]) -> KVScheme:
    scales, entry = scheme.scales, f"{{name: my_{scheme.name}, extends: {scheme.name}, scales: "
    if scales == "checkpoint":
        scales = carried()
        if scales is None:
            raise ConfigError(
                "`scales: checkpoint`, but the model's checkpoint carries no scales of keys and values.",
                remedy="`kveval calibrate` makes them; name its file as `scales`.",
            )
    elif scales is None and scheme.takes_scales and carried() is not None:
        raise ConfigError(
            "the model's checkpoint carries scales of keys and values; the config doesn't say what to do with them.",
            remedy=f"Write {entry}checkpoint}} to store with them, or {entry}none}} to leave them out.",
        )
    if isinstance(scales, StaticScales):
        if scales.weights_digest not in (None, weights_digest):
            raise ConfigError(
                f"the scales of {scales.source} were calibrated on another model (weights {scales.weights_digest}, "
                f"these are {weights_digest}).",
                remedy="Calibrate on this model.",
            )
        return scheme.model_copy(update={"scales": scales})
    if scheme.needs_scales:
        raise ConfigError(
            "this scheme stores with calibrated scales and has none.",
            remedy="Make them: `kveval calibrate MODEL --text FILE --out scales.json`; "
            f"then write {entry}scales.json}}.",
        )
    return scheme


def _check_elements(scheme: KVScheme, formats: Iterable[LayerFormat | None]) -> None:
    """Scales that bring one element's range to its end leave another's unused, or overflow it."""
    if not isinstance(scheme.scales, StaticScales) or scheme.scales.element is None:
        return
    sides = (role for fmt in formats if fmt is not None for role in (fmt.key, fmt.value))
    others = {side.format.element for side in sides if side.scales is not None} - {scheme.scales.element}
    if others:
        raise ConfigError(
            f"the scales of {scheme.scales.source} are for {scheme.scales.element}, "
            f"and the scheme stores {' and '.join(sorted(others))} with them.",
            remedy="Calibrate with this scheme.",
        )


def _check_layers(scheme: KVScheme, count: int) -> None:
    """Scales of a layer that is not there are scales of another model."""
    if not isinstance(scheme.scales, StaticScales):
        return
    surplus = sorted(i for i in {*scheme.scales.key, *scheme.scales.value} if not 0 <= i < count)
    if surplus:
        raise ConfigError(
            f"the scales of {scheme.scales.source} name layer {surplus[0]}; the model has layers 0 to {count - 1}.",
            remedy="Calibrate on this model.",
        )


def build_plan(config: SweepConfig, model: Any, tasks: Iterable[TaskPlan], *, device: str) -> Plan:
    """Resolve a sweep into cells.

    Args:
        config: The sweep.
        model: A `kveval.models.ModelInfo`.
        device: Type of the device that will run it ("cpu", "cuda"); rounding differs between them.
        tasks: One per task of the config, in its order.

    Raises:
        LengthError: if a context length is beyond what the model takes.
    """
    info = {**dataclasses.asdict(model), "device": device}
    arms = arms_of(config)
    cells = []
    by_label = {task.label: task for task in tasks}
    for task, entry in zip(by_label.values(), config.tasks, strict=True):
        for length in config.lengths_of(entry):
            if model.max_context is not None and length > model.max_context:
                raise LengthError(
                    f"task {entry.label!r} asks for {length} tokens, but {model.id} takes at most {model.max_context}.",
                    remedy="Shorten context_lengths, or use a model with a longer context.",
                )
            for arm in arms:
                identity = _cell_identity(config, info, task, entry, length, arm)
                cells.append(
                    Cell(
                        digest("cell", identity),
                        task.label,
                        task.version,
                        arm,
                        length,
                        config.samples_of(entry),
                        task.passage,
                    )
                )
    _refuse_twins(cells)
    return Plan(config, info, arms, tuple(cells), by_label)


def _refuse_twins(cells: Iterable[Cell]) -> None:
    """Two cells of one identity would be one measurement under two names."""
    seen: dict[str, Cell] = {}
    for cell in cells:
        twin = seen.setdefault(cell.id, cell)
        if twin is not cell:
            raise ConfigError(
                f"{twin.arm.label} on {twin.task} and {cell.arm.label} on {cell.task} are the same measurement "
                f"at {cell.context_length} tokens.",
                remedy="Drop one of the two, or change what should differ.",
            )


MODEL_IDENTITY = (
    "revision",
    "weights_digest",
    "config_digest",
    "tokenizer_digest",
    "template_digest",
    "compute_dtype",
    "device",
)
"""What of a model decides a result. Its name and path do not."""


def _cell_identity(
    config: SweepConfig, model: Mapping[str, Any], task: TaskPlan, entry: TaskConfig, length: int, arm: Arm
) -> dict[str, Any]:
    """Everything that affects the cell's results, and nothing else."""
    # What was measured before there was a choice keeps its name.
    chosen: dict[str, Any] = {} if config.attention == "auto" else {"attention": config.attention}
    if config.batch_size > 1:
        chosen["batch_size"] = config.batch_size
    if task.max_new_tokens is not None:
        chosen["written"] = {"max_new_tokens": task.max_new_tokens, "stop": list(task.stop)}
    if task.buckets:
        chosen["context_lengths"] = list(config.lengths_of(entry))
    return {
        "model": {key: model[key] for key in MODEL_IDENTITY},
        "task": dict(task.identity),
        "lengths_sharing_a_prefill": list(config.lengths_of(entry)) if task.passage else None,
        "context_length": length,
        "seed": config.seed,
        "scheme": arm.scheme.identity(),
        "role": arm.role,
        "reads": arm.reads,
        "prefill_chunk": arm.prefill_chunk,
        "baseline_prefill_chunk": config.prefill_chunk,
        "sdpa": arm.sdpa,
        **chosen,
    }
