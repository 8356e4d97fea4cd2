"""The task protocol: samples, their context, and the loader of task files.

A task is one Python file with three names:

    VERSION: int                                    raised when its samples change
    class Params(TaskParams): ...                   what a config may set
    def samples(params, ctx) -> list[Sample]: ...   deterministic in (params, ctx)

and, if its answers are running text from documents that are the same at every context length,

    PASSAGE = True                                  one prefill serves all lengths; no exact match

The bundled ones lie in `tasks/`; a path to a `.py` file loads a user's own through the same function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kveval.content import content_dir
from kveval.corpora import CORPUS_FIELD, load_corpus
from kveval.errors import ConfigError, TaskError, UnknownNameError
from kveval.identity import digest
from kveval.prompting import PromptTemplate

__all__ = [
    "Sample",
    "Task",
    "TaskContext",
    "TaskParams",
    "known_tasks",
    "load_task",
    "make_sample",
    "seeded_random",
]


@dataclass(frozen=True)
class Sample:
    """One question with its expected answer, in tokens.

    Attributes:
        id: Unique within a task and context length; equal ids mean equal tokens.
        index: Position in the task, from 0. A sample is the same whatever the number of samples.
        prompt_ids: Everything the model reads before it answers.
        answer_ids: The tokens that a perfect model produces next.
        context_length: Exactly len(prompt_ids) + len(answer_ids), in tokens.
        depth: Where the asked needle starts, as a fraction of the context (0 start, 1 end); None for
            tasks without one place.
        cluster: Samples with the same haystack or document share it, and lie next to each other.
        metadata: Plain JSON data about how the sample was made.
    """

    id: str
    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    context_length: int
    depth: float | None
    cluster: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskContext:
    """What samples are made for: `samples` counts questions in total, `context_length` is in tokens."""

    tokenizer: Any
    prompt: PromptTemplate
    context_length: int
    samples: int
    seed: int


class TaskParams(BaseModel):
    """Base of every task's `Params`: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def corpus_fields(self) -> tuple[str, ...]:
        """Names of the fields that name a text source (declared as `CorpusName`)."""
        fields = type(self).model_fields
        return tuple(name for name, info in fields.items() if CORPUS_FIELD in info.metadata)


@dataclass(frozen=True)
class Task:
    """A loaded task with its parameters.

    Attributes:
        name: Name of the task file, without `.py`.
        label: Name in reports; the task's name unless the config gives another.
        version: The task file's VERSION.
        params: The validated parameters.
        module: The loaded task file.
        source_digest: Digest of a user's own file; None for a bundled one, whose VERSION speaks for it.
    """

    name: str
    label: str
    version: int
    params: TaskParams
    module: ModuleType = field(repr=False, compare=False)
    source_digest: str | None = None

    @property
    def passage(self) -> bool:
        """Whether answers are running text from documents that are the same at every context length."""
        return bool(getattr(self.module, "PASSAGE", False))

    def samples(self, ctx: TaskContext) -> list[Sample]:
        """The task's samples, checked against the protocol.

        Raises:
            LengthError: the context length can't hold the task.
            TaskError: the text source is unusable, or the task file breaks the protocol.
        """
        samples: list[Sample] = self.module.samples(self.params, ctx)
        for problem in _protocol_problems(samples, ctx):
            raise TaskError(
                f"task {self.label!r} at {ctx.context_length} tokens: {problem}.",
                remedy="This is a mistake in the task file, not in your config.",
            )
        return samples

    def identity(self) -> dict[str, Any]:
        """What decides the samples besides seed, tokenizer and length: equal identity, equal samples.

        A text source appears by the digest of its content, never by its path.

        Raises:
            TaskError: a text source can't be read.
        """
        params = self.params.model_dump(mode="json")
        for name in self.params.corpus_fields():
            params[name] = load_corpus(params[name]).identity()
        identity: dict[str, Any] = {"name": self.name, "version": self.version, "params": params}
        if self.source_digest is not None:
            identity["source"] = self.source_digest
        return identity


def known_tasks() -> tuple[str, ...]:
    """Names of the bundled tasks, sorted."""
    paths = content_dir("tasks").glob("*.py")
    return tuple(sorted(p.stem for p in paths if not p.stem.startswith("_")))


def load_task(name: str, params: Mapping[str, Any] | None = None, *, label: str | None = None, where: str = "") -> Task:
    """Loads a task by name or by the path of a `.py` file, and validates its parameters.

    Args:
        name: A bundled task's name, or a path ending in `.py`.
        params: The task's own keys from the config.
        label: Name in reports.
        where: Where the config names the task; put before error messages.

    Raises:
        UnknownNameError: no such task or parameter, with suggestions.
        ConfigError: a parameter's value is wrong, or the task file is missing or incomplete.
    """
    prefix = f"{where}: " if where else ""
    own = name.endswith(".py")
    if own:
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(
                f"{prefix}there is no task file {name!r}.",
                remedy="Give a path relative to the current folder, or a bundled task's name.",
            )
    elif name in known_tasks():
        path = content_dir("tasks") / f"{name}.py"
    else:
        raise UnknownNameError("task", name, known_tasks(), where=where)
    source = path.read_bytes()
    module = _load_module(path, prefix)
    shown = label or path.stem
    return Task(
        name=path.stem,
        label=shown,
        version=module.VERSION,
        params=_validate(module.Params, dict(params or {}), shown, where),
        module=module,
        source_digest=hashlib.sha256(source).hexdigest()[:16] if own else None,
    )


def seeded_random(ctx: TaskContext, task: str, index: int, purpose: str = "") -> random.Random:
    """A generator that depends on (seed, task, index, purpose) only: not on n, nor on the length."""
    return random.Random(int(digest("rng", [ctx.seed, task, index, purpose]), 16))


def make_sample(
    ctx: TaskContext,
    index: int,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    cluster: str,
    depth: float | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """A sample whose id is its index and a digest of its tokens: unique, and the same on every run."""
    prompt, answer = tuple(prompt_ids), tuple(answer_ids)
    return Sample(
        id=f"{index:05d}-{digest('sample', [prompt, answer], length=12)}",
        index=index,
        prompt_ids=prompt,
        answer_ids=answer,
        context_length=ctx.context_length,
        depth=depth,
        cluster=cluster,
        metadata=dict(metadata or {}),
    )


def _load_module(path: Path, prefix: str) -> ModuleType:
    """Runs a task file as a module of its own. It stays in `sys.modules`: pydantic looks it up there."""
    name = f"_kveval_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{prefix}{path.name} can't be loaded as Python.", remedy="Check the file's name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, NameError, AttributeError, TypeError, ValueError) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{prefix}{path.name} fails when it is loaded: {type(error).__name__}: {error}.",
            remedy="Mend the task file.",
        ) from error
    except SyntaxError as error:
        del sys.modules[name]
        raise ConfigError(
            f"{prefix}{path.name} line {error.lineno}: {error.msg}.", remedy="Mend the task file."
        ) from error
    missing = [name for name in ("VERSION", "Params", "samples") if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{prefix}{path.name} defines no {', '.join(missing)}.",
            remedy="A task file needs VERSION, class Params(TaskParams) and samples(params, ctx).",
        )
    return module


def _validate(model: type[TaskParams], params: dict[str, Any], task: str, where: str) -> TaskParams:
    at = f"{where}: task {task!r}" if where else f"task {task!r}"
    unknown = sorted(set(params) - set(model.model_fields))
    if unknown:
        raise UnknownNameError("parameter", unknown[0], model.model_fields, where=at)
    try:
        return model.model_validate(params)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{at}: {key + ': ' if key else ''}{first['msg']} (got {first['input']!r}).",
            remedy=f"Parameters: {', '.join(sorted(model.model_fields))}.",
        ) from error


def _protocol_problems(samples: Sequence[Sample], ctx: TaskContext) -> Iterator[str]:
    if len(samples) != ctx.samples:
        yield f"{len(samples)} samples instead of {ctx.samples}"
    if len({sample.id for sample in samples}) != len(samples):
        yield "sample ids repeat"
    finished: dict[str, None] = {}
    for position, sample in enumerate(samples):
        if sample.index != position:
            yield f"sample {position} carries the index {sample.index}"
        if not sample.prompt_ids or not sample.answer_ids:
            yield f"sample {position} has an empty prompt or answer"
        tokens = len(sample.prompt_ids) + len(sample.answer_ids)
        if tokens != ctx.context_length or sample.context_length != tokens:
            yield f"sample {position} has {tokens} tokens"
        if position and samples[position - 1].cluster != sample.cluster:
            finished[samples[position - 1].cluster] = None
        if sample.cluster in finished:
            yield f"cluster {sample.cluster!r} is not contiguous"
