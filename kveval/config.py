"""The sweep as data: frozen models, read from YAML with `extends:` and `--set` overrides.

Importing this module needs neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from kveval.errors import ConfigError, UnknownNameError
from kveval.formats.scales import StaticScales
from kveval.formats.spec import KVScheme, LayerOverride, TensorFormat, build_scheme, get_scheme, scheme_names
from kveval.records import METRICS
from kveval.yaml_source import KeyPath, Located, read_yaml

__all__ = [
    "CapacityConfig",
    "GateConfig",
    "GateEndpoint",
    "ModelConfig",
    "SweepConfig",
    "TaskConfig",
    "load_config",
    "parse_length",
]


def parse_length(value: Any) -> Any:
    """Tokens from 4096, "4096", "4k" or "1M" (k = 1024, M = 1024^2); anything else is left for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", value)):
        return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]
    return value


Length = Annotated[int, BeforeValidator(parse_length), Field(gt=0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Mode = Literal["teacher_forced", "generate"]
"""Feed the model the right answer and look at what it predicted; or have it write one as well, greedily."""


class ModelConfig(_Model):
    """Which causal LM: a name from `kveval models`, a hub id, a folder or a .gguf file."""

    id: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    chat_template: Literal["auto", "none"] = "auto"


class TaskConfig(_Model):
    """One task: its name, and the task's own parameters under `params` (in YAML written beside `name`).

    `mode`, `samples` and `context_lengths` are the sweep's unless given. `max_new_tokens` (at most so many tokens of an
    answer that the model writes) and `stop` (strings that end it) are the task's own unless given.
    """

    name: str
    label: str
    mode: Mode | None = None
    samples: int | None = Field(default=None, gt=0)
    context_lengths: tuple[Length, ...] | None = None
    max_new_tokens: int | None = Field(default=None, gt=0)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_params(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"name": data}
        if not isinstance(data, dict):
            return data
        own = {k: v for k, v in data.items() if k in cls.model_fields and k != "params"}
        rest = {k: v for k, v in data.items() if k not in cls.model_fields}
        params = data.get("params", {})
        if not isinstance(params, dict):
            raise ValueError("params is a mapping of the task's own keys; write them beside `name`")
        return {"label": data.get("name"), **own, "params": {**params, **rest}}


class CapacityConfig(_Model):
    """The GPU on which sessions are counted. `reserve` is the fraction of its memory that is left free."""

    gpu: str = "h100-80gb"
    reserve: float = Field(default=0.1, ge=0, lt=1)
    block_size: int = Field(default=16, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    workspace_gib: float = Field(default=0.0, ge=0)


class GateEndpoint(_Model):
    """One promise: the loss in `metric` on `task` at `context_length` stays within `margin` (the metric's unit)."""

    metric: str
    task: str
    context_length: Length
    margin: float = Field(gt=0)


class GateConfig(_Model):
    """What is accepted, declared before the run. All endpoints must hold."""

    scheme: str
    endpoints: tuple[GateEndpoint, ...] = Field(min_length=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    on_inconclusive: Literal["fail", "pass"] = "fail"
    min_sessions_gain: float | None = Field(default=None, gt=0)


class ControlsConfig(_Model):
    """How the controls run.

    `aa_chunk` is the prefill chunk of the A/A arm, in tokens; it must differ from the sweep's own. That arm also uses
    torch's plain attention: two arms that round alike would show no noise floor.
    """

    aa_chunk: int = Field(default=384, ge=1)


def _scheme(entry: Any) -> Any:
    """A scheme from what YAML has for it: a preset's name, or a mapping as `build_scheme` reads it, with its name."""
    if isinstance(entry, str):
        return get_scheme(entry)
    if not isinstance(entry, dict):
        return entry
    if not isinstance(entry.get("name"), str):
        raise ValueError("a scheme is a preset's name, or a mapping with a `name` of its own")
    if not all(isinstance(key, str) for key in entry):
        raise ValueError("keys of a scheme are words")
    if not isinstance(entry.get("extends", ""), str):
        raise ValueError("`extends` takes the name of a preset")
    if not isinstance(entry.get("layers", ()), (list, tuple)):
        raise ValueError("`layers` is a list of mappings, each with `layers` and `key`, `value` or `both`")
    return build_scheme(entry["name"], {k: v for k, v in entry.items() if k != "name"})


Scheme = Annotated[KVScheme, BeforeValidator(_scheme, json_schema_input_type=str | KVScheme | dict[str, Any])]


class SweepConfig(_Model):
    """One sweep: model x schemes x tasks x context lengths, against a BF16-cache baseline on the same inputs.

    `batch_size` haystacks of one length run together, which a GPU takes faster. Running text, written answers and
    tasks without exact lengths run one by one. Another batch size rounds differently.

    A scheme is a preset's name, or a mapping of the keys of `KVScheme` and `TensorFormat` below. In it, `extends` names
    a preset whose keys are the defaults; `key`, `value` and `both` (one format for both) may be presets' names too,
    whose side is taken; `scales` may be a path relative to the YAML file, as `kveval calibrate` writes it.

    `attention: auto` reads packed bytes by kernels on an NVIDIA GPU wherever there is one for the format and the model,
    and decodes them first elsewhere; `packed` refuses where there is none, and runs the kernels' reference on a CPU,
    which is slow; `dequant` always decodes first. The A/A control always does, and crush where there is no kernel.
    """

    name: str
    model: ModelConfig
    baseline: Literal["bf16"] = "bf16"
    schemes: tuple[Scheme, ...] = Field(min_length=1)
    tasks: tuple[TaskConfig, ...] = Field(min_length=1)
    context_lengths: tuple[Length, ...] = Field(min_length=1)
    samples: int = Field(default=16, gt=0)
    mode: Mode = "teacher_forced"
    seed: int = Field(default=0, ge=0)
    reads: Literal["stored", "fresh_chunk"] = "stored"
    attention: Literal["auto", "packed", "dequant"] = "auto"
    prefill_chunk: int = Field(default=2048, ge=1)
    batch_size: int = Field(default=1, ge=1)
    decode_tokens: int = Field(default=4, ge=0)
    controls: ControlsConfig = ControlsConfig()
    capacity: CapacityConfig = CapacityConfig()
    gate: GateConfig | None = None
    _source: Located | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        _refuse_repeats("scheme", [s.name for s in self.schemes])
        _refuse_repeats("task label", [t.label for t in self.tasks])
        for task in self.tasks:
            if not self.writes(task) and (task.max_new_tokens is not None or task.stop is not None):
                raise ValueError(
                    f"{task.label}: max_new_tokens and stop are for answers that the model writes; add `mode: generate`"
                )
        for reserved in ("crush", self.baseline, f"{self.baseline} (A/A)"):
            if any(s.name == reserved for s in self.schemes):
                raise ValueError(f"{reserved} runs in every sweep by itself; take it out of `schemes`")
        if self.controls.aa_chunk == self.prefill_chunk:
            raise ValueError("controls.aa_chunk must differ from prefill_chunk, or A/A shows no noise")
        if self.gate is not None:
            self._check_gate(self.gate)
        return self

    def _check_gate(self, gate: GateConfig) -> None:
        if gate.scheme not in {s.name for s in self.schemes}:
            raise UnknownNameError("gate scheme", gate.scheme, [s.name for s in self.schemes])
        tasks = {t.label: t for t in self.tasks}
        _refuse_repeats("gate endpoint", [f"{e.metric} on {e.task} at {e.context_length}" for e in gate.endpoints])
        for end in gate.endpoints:
            if end.metric not in METRICS:
                raise UnknownNameError("metric", end.metric, METRICS)
            if METRICS[end.metric].unit == "fraction" and end.margin >= 1:
                raise ValueError(
                    f"the margin of {end.metric} is a fraction: write 0.05 for 5 points, not {end.margin:g}"
                )
            if end.task not in tasks:
                raise UnknownNameError("gate task", end.task, tasks)
            lengths = self.lengths_of(tasks[end.task])
            if end.context_length not in lengths:
                raise ValueError(
                    f"gate endpoint {end.metric} on {end.task} asks for {end.context_length} tokens, "
                    f"but the sweep runs {', '.join(map(str, lengths))}"
                )

    def where(self, *path: str | int) -> str:
        """`file:line` of a key, such as ("tasks", 0); '' if this sweep was not read from a file."""
        return self._source.where(path) if self._source else ""

    def folder(self, *path: str | int) -> Path | None:
        """The folder of the file that holds a key, such as ("tasks", 0); None for a sweep that is in no file."""
        return _folder_of(self._source, path) if self._source else None

    def lengths_of(self, task: TaskConfig) -> tuple[int, ...]:
        """Context lengths, in tokens, at which `task` runs: its own, or the sweep's."""
        return task.context_lengths or self.context_lengths

    def samples_of(self, task: TaskConfig) -> int:
        """Samples per cell of `task`: its own, or the sweep's."""
        return task.samples or self.samples

    def writes(self, task: TaskConfig) -> bool:
        """Whether the model writes answers to `task`, beside being fed the right ones."""
        return (task.mode or self.mode) == "generate"


def _refuse_repeats(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            own = {"task label": "label", "scheme": "name"}.get(kind)
            hint = f"; give each its own `{own}`" if own else ""
            raise ValueError(f"{kind} {name!r} appears {names.count(name)} times{hint}")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep from a YAML file.

    Args:
        path: The file. A key `extends: other.yaml` (relative to this file) names a file whose keys are the
            defaults; mappings merge, lists and values replace.
        overrides: `a.b=value` strings, applied last; the value is parsed as YAML.

    Raises:
        ConfigError: naming the file, the line, the key and what would be right.
    """
    path = Path(path)
    source = _read_with_bases(path, ())
    for text in overrides:
        _override(source, text)
    source.data.setdefault("name", path.stem)
    try:
        config = SweepConfig.model_validate(_with_scales(source))
    except ValidationError as error:
        raise _explain(error, source) from error
    except UnknownNameError as error:
        raise UnknownNameError(error.kind, error.name, error.known, where=_find(source, error)) from error
    _refuse_borrowed_names(config, source)
    config._source = source
    return config


def _with_scales(source: Located) -> dict[str, Any]:
    """The data, with the files that schemes name as `scales` read."""
    schemes = source.data.get("schemes")
    if not isinstance(schemes, list):
        return dict(source.data)
    read = [
        {**entry, "scales": _scales(entry["scales"], source, ("schemes", i, "scales"))}
        if isinstance(entry, dict) and "scales" in entry
        else entry
        for i, entry in enumerate(schemes)
    ]
    return {**source.data, "schemes": read}


def _scales(value: Any, source: Located, at: KeyPath) -> Any:
    """`value`, unless it names a file: then what that holds."""
    if value is None or isinstance(value, dict) or value in ("checkpoint", "none"):
        return value
    where = source.where(at)
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: {_dotted(at)} is {value!r}.",
            remedy="Write the path of a file that `kveval calibrate` wrote, `checkpoint` or `none`.",
        )
    try:
        return StaticScales.read(_folder_of(source, at) / value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", remedy=error.remedy) from error


def _folder_of(source: Located, at: KeyPath) -> Path:
    """Folder of the file in which `at` stands; with `extends` there may be several."""
    nearest = next(at[:end] for end in range(len(at), -1, -1) if at[:end] in source.places)
    return source.places[nearest][0].parent


def _refuse_borrowed_names(config: SweepConfig, source: Located) -> None:
    """A preset's name stands for that preset in every report."""
    for i, scheme in enumerate(config.schemes):
        if not isinstance(source.data["schemes"][i], dict) or scheme.name not in scheme_names():
            continue
        if scheme.scales not in (None, "none") or scheme.identity() != get_scheme(scheme.name).identity():
            raise ConfigError(
                f"{source.where(('schemes', i, 'name'))}: {scheme.name!r} is the name of a preset, "
                "and this scheme is another one.",
                remedy=f"Give it a name of its own: {{name: my_{scheme.name}, extends: {scheme.name}, ...}}.",
            )


def _read_with_bases(path: Path, chain: tuple[Path, ...]) -> Located:
    if path.resolve() in chain:
        raise ConfigError(f"{path} extends itself, through {' -> '.join(map(str, chain))}.", remedy="Break the circle.")
    source = read_yaml(path)
    if not isinstance(source.data, dict):
        raise ConfigError(f"{path} is not a mapping of keys.", remedy="`kveval init` writes a commented example.")
    base_name = source.data.pop("extends", None)
    if base_name is None:
        return source
    base = _read_with_bases(path.parent / str(base_name), (*chain, path.resolve()))
    return Located(_merge(base.data, source.data), {**base.places, **source.places})


def _merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{k: _merge(base[k], v) if k in base else v for k, v in over.items()}}
    return over


def _override(source: Located, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text!r} is not of the form a.b=value.", remedy="For example --set samples=4.")
    *parents, last = key.split(".")
    at = source.data
    for part in parents:
        at = at[_item(at, part, text)] if isinstance(at, list) else at.setdefault(part, {})
        if not isinstance(at, (dict, list)):
            raise ConfigError(f"--set {text!r}: {part!r} is a value, not a mapping.", remedy="Name a key in it.")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: the value is not YAML: {error}", remedy="Quote it.") from error
    if isinstance(at, list):
        at[_item(at, last, text)] = parsed
    else:
        at[last] = parsed


def _item(at: list[Any], part: str, text: str) -> int:
    if not part.isdigit() or int(part) >= len(at):
        raise ConfigError(f"--set {text!r}: the list has items 0 to {len(at) - 1}.", remedy="Use one of these.")
    return int(part)


def _find(source: Located, error: UnknownNameError) -> str:
    """Where the name that a validator refused stands in the file."""

    def walk(value: Any, at: KeyPath) -> str:
        if value == error.name:
            return source.where(at)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return next((found for key, item in items if (found := walk(item, (*at, key)))), "")

    block = "gate" if error.kind in ("gate scheme", "gate task", "metric") else "schemes"
    return walk(source.data.get(block), (block,))


def _explain(error: ValidationError, source: Located) -> ConfigError:
    problems: dict[KeyPath, Any] = {}
    # A list is too short where its items were refused.
    found = [p for p in error.errors() if p["type"] != "too_short"] or error.errors()
    # An unknown key first: it is likely to be the one that is missing elsewhere, misspelt.
    for problem in sorted(found, key=lambda problem: problem["type"] != "extra_forbidden"):
        problems.setdefault(_written(problem, source.data), problem)
    at, first = next(iter(problems.items()))
    place, key = source.where(at), _dotted(at) or "the file"
    remedy = "`kveval schema` prints every key."
    if first["type"] == "extra_forbidden":
        message = f"unknown key {key!r}"
        near = difflib.get_close_matches(str(at[-1]), _keys_at(at), n=2, cutoff=0.5)
        remedy = f"Did you mean {' or '.join(repr(n) for n in near)}? {remedy}" if near else remedy
    elif first["type"] == "missing":
        message = f"key {key!r} is missing"
        if at[0] == "schemes" and at[-1] in ("key", "value"):
            remedy = f"Write `extends: PRESET`, `both:` or `key:` and `value:`. {remedy}"
    else:
        message = f"{key}: {_PLAIN.get(first['type'], first['msg']).removeprefix('Value error, ')}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigError(f"{place + ': ' if place else ''}{message}{more}.", remedy=remedy)


_PLAIN = {"tuple_type": "write a list, [...]", "model_type": "write a mapping, {key: value, ...}"}
"""pydantic's words for types that YAML calls something else."""


def _dotted(at: KeyPath) -> str:
    return ".".join(map(str, at))


def _written(problem: Any, data: Any) -> KeyPath:
    """Where a problem stands in the file: `both` for the sides it gave, without pydantic's names of alternatives."""
    path = problem["loc"]
    written: list[str | int] = []
    for i, part in enumerate(path):
        if isinstance(data, dict) and part in ("key", "value") and part not in data and "both" in data:
            part = "both"
        inside = part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))
        if inside:
            written.append(part)
            data = data[part]
        elif problem["type"] == "missing" and i == len(path) - 1:
            written.append(part)
    return tuple(written)


def _keys_at(path: KeyPath) -> list[str]:
    """Keys that the model holding `path` knows."""
    model: Any = SweepConfig
    for part in path[:-1]:
        fields = getattr(model, "model_fields", {})
        if part in fields:
            model = fields[part].annotation
        elif part == "both":
            model = TensorFormat
        nested = _models_in(model)
        model = nested[0] if nested else model
    own = {KVScheme: ("extends", "both"), LayerOverride: ("both",)}.get(model, ())
    return [*getattr(model, "model_fields", SweepConfig.model_fields), *own]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) for m in _models_in(arg)]
