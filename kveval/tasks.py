r"""The task protocol: samples, their context, and the loader of task files.

A task is one Python file with three names:

    VERSION: int                                    raised when its samples change
    class Params(TaskParams): ...                   what a config may set
    def samples(params, ctx) -> list[Sample]: ...   deterministic in (params, ctx)

and, where the defaults do not suit it, some of

    PASSAGE = True            answers are running text from documents that are the same at every context length:
                              one prefill serves all lengths; no exact match
    EXACT_LENGTH = False      a sample may be shorter than the context length
    MAX_NEW_TOKENS = 128      most tokens of an answer that the model writes (mode generate)
    STOP = ("\n",)            strings that end a written answer
    TEXT_METRIC = "..."       how a written answer is scored: a name of `kveval.text_metrics`
    def score(params, sample, text) -> dict[str, float]: ...             instead of it; "task_score" from 0 to 1
    def position_scores(params, sample, text) -> list[float]: ...        0 to 1 by place in the answer

The bundled ones lie in `tasks/`; a path to a `.py` file loads a user's own through the same function.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo

from kveval.content import content_dir
from kveval.corpora import CORPUS_FIELD, load_corpus
from kveval.errors import ConfigError, LengthError, MeasurementError, TaskError, UnknownNameError
from kveval.identity import digest
from kveval.prompting import PromptTemplate
from kveval.python_file import call_own, load_python_file
from kveval.text_metrics import edit_similarity, text_exact_match, text_f1, text_metric
from kveval.token_ids import tokens_on_disk

__all__ = [
    "Sample",
    "Task",
    "TaskContext",
    "TaskFile",
    "TaskParams",
    "TextScores",
    "beside_config",
    "known_tasks",
    "load_task",
    "make_sample",
    "seeded_random",
]

MAX_NEW_TOKENS = 128
"""Most tokens of a written answer where a task file says nothing."""

TEXT_METRIC = "string_match_all"
"""How a written answer is scored where a task file says nothing."""

LM_EVAL_PREFIX = "lm_eval:"
"""Before the name of a task of lm-evaluation-harness; see `kveval.integrations.lm_eval_task`."""


@tokens_on_disk("prompt_ids", "answer_ids", "short_prompt_ids")
@dataclass(frozen=True)
class Sample:
    """One question with its expected answer, in tokens.

    Its token ids are kept on disk (see `tokens_on_disk`).

    Attributes:
        id: Unique within a task and context length; equal ids mean equal tokens.
        index: Position in the task, from 0. A sample is the same whatever the number of samples.
        prompt_ids: Everything the model reads before it answers.
        answer_ids: The tokens that a perfect model produces next.
        context_length: Exactly len(prompt_ids) + the answer's room, in tokens (see `TaskContext.answer_room`);
            at least that for a task without exact lengths.
        depth: Where the asked needle starts, as a fraction of the context (0 start, 1 end); None for
            tasks without one place.
        cluster: Samples with the same haystack or document share it, and lie next to each other.
        metadata: Plain JSON data about how the sample was made.
        references: Texts that a right answer holds; what the model writes is scored against them.
        max_new_tokens: Most tokens that the model may write as its answer; None: it isn't asked to.
        stop: Strings that end the written answer.
        metric: The sample's own text metric; None: the task's.
        short_prompt_ids: The prompt without its far context. Where it is given, only key tokens of the answer
            count: those that the baseline predicts from the full prompt, and not from this one.
    """

    id: str
    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    context_length: int
    depth: float | None
    cluster: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    metric: str | None = None
    short_prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TaskContext:
    """What samples are made for.

    Attributes:
        tokenizer: The model's.
        prompt: What surrounds a task's text.
        context_length: In tokens, the answer's room included.
        samples: Questions in total.
        seed: Of all randomness.
        max_new_tokens: Tokens to keep free for an answer that the model writes; None: it is fed the answer.
        stop: Strings that end a written answer.
        shorter: The next shorter context length that the task runs at; 0 for none.
    """

    tokenizer: Any
    prompt: PromptTemplate
    context_length: int
    samples: int
    seed: int
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    shorter: int = 0

    def answer_room(self, answer_tokens: int) -> int:
        """Tokens of the context that an answer takes: its own, or what the model may write.

        Raises:
            LengthError: the answer itself is longer than what the model may write.
        """
        if self.max_new_tokens is None:
            return answer_tokens
        if answer_tokens > self.max_new_tokens:
            raise LengthError(
                f"an answer of {answer_tokens} tokens doesn't fit into max_new_tokens: {self.max_new_tokens}.",
                remedy="Raise `max_new_tokens` of the task.",
            )
        return self.max_new_tokens


@dataclass(frozen=True)
class TextScores:
    """How right a written answer is, each number from 0 to 1; see `kveval.records.Record`."""

    task_score: float
    text_f1: float
    text_exact_match: float
    edit_similarity: float
    position_scores: tuple[float, ...] | None


def beside_config(name: str, info: ValidationInfo) -> str:
    """The path of a file that a config names: relative to the config's folder, or as it is without a config."""
    folder = (info.context or {}).get("folder")
    return name if folder is None else str(Path(folder) / Path(name).expanduser())


TaskFile = Annotated[str, AfterValidator(beside_config)]
"""Type of a task parameter that names a file."""


class TaskParams(BaseModel):
    """Base of every task's `Params`: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def corpus_fields(self) -> tuple[str, ...]:
        """Names of the fields that name a text source (declared as `CorpusName`)."""
        fields = type(self).model_fields
        return tuple(name for name, info in fields.items() if CORPUS_FIELD in info.metadata)

    def identity(self) -> dict[str, Any]:
        """The parameters as plain data, text sources as their digests. A task that reads other files extends it.

        Raises:
            TaskError: a text source can't be read.
        """
        params = self.model_dump(mode="json")
        return params | {name: load_corpus(params[name]).identity() for name in self.corpus_fields()}


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

    @property
    def exact_length(self) -> bool:
        """Whether every sample has exactly the context length; else it is in the bucket that the length ends."""
        return bool(getattr(self.module, "EXACT_LENGTH", True))

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of a written answer, unless the config says otherwise."""
        return int(getattr(self.module, "MAX_NEW_TOKENS", MAX_NEW_TOKENS))

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a written answer, unless the config names others."""
        return tuple(getattr(self.module, "STOP", ()))

    def samples(self, ctx: TaskContext) -> list[Sample]:
        """The task's samples, checked against the protocol.

        Raises:
            LengthError: the context length can't hold the task.
            TaskError: the text source is unusable, or the task file breaks the protocol.
        """
        samples: list[Sample] = self.module.samples(self.params, ctx)
        if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
            raise TaskError(
                f"task {self.label!r}: samples() gave {type(samples).__name__}, not a list of Sample.",
                remedy="Make each with make_sample and return them as a list.",
            )
        for problem in _protocol_problems(samples, ctx, exact=self.exact_length):
            raise TaskError(
                f"task {self.label!r} at {ctx.context_length} tokens: {problem}.",
                remedy="This is a mistake in the task file, not in your config.",
            )
        return samples

    def score_text(self, sample: Sample, text: str) -> TextScores:
        """Score an answer that the model wrote.

        Raises:
            MeasurementError: the task's own `score` gave no "task_score", or a number beyond 0 to 1.
        """
        own = getattr(self.module, "score", None)
        if own is not None and sample.metric is None:
            scores = call_own(f"score of task {self.label!r}", own, self.params, sample, text)
            if not isinstance(scores, Mapping):
                raise MeasurementError(
                    f"score of task {self.label!r} gave {scores!r}.",
                    remedy='Return {"task_score": a number from 0 to 1}.',
                )
        else:
            metric = text_metric(sample.metric or str(getattr(self.module, "TEXT_METRIC", TEXT_METRIC)))
            scores = {"task_score": metric(text, sample.references)}
        by_position = getattr(self.module, "position_scores", None)
        positions = None
        if by_position is not None:
            what = f"position_scores of task {self.label!r}"
            positions = tuple(call_own(what, by_position, self.params, sample, text))
        for number in (scores.get("task_score"), *(positions or ())):
            if not isinstance(number, (bool, int, float)) or not 0 <= number <= 1:
                raise MeasurementError(
                    f"task {self.label!r} scored sample {sample.id} with {number!r}.",
                    remedy='`score` gives a "task_score" from 0 to 1, `position_scores` numbers from 0 to 1.',
                )
        return TextScores(
            task_score=float(scores["task_score"]),
            text_f1=text_f1(text, sample.references),
            text_exact_match=text_exact_match(text, sample.references),
            edit_similarity=edit_similarity(text, sample.references),
            position_scores=positions,
        )

    def identity(self) -> dict[str, Any]:
        """What decides the samples besides seed, tokenizer and length: equal identity, equal samples.

        A text source appears by the digest of its content, never by its path.

        Raises:
            TaskError: a text source can't be read.
        """
        identity: dict[str, Any] = {"name": self.name, "version": self.version, "params": self.params.identity()}
        if self.source_digest is not None:
            identity["source"] = self.source_digest
        return identity


def known_tasks() -> tuple[str, ...]:
    """Names of the bundled tasks, sorted."""
    paths = content_dir("tasks").glob("*.py")
    return tuple(sorted(p.stem for p in paths if not p.stem.startswith("_")))


def load_task(
    name: str,
    params: Mapping[str, Any] | None = None,
    *,
    label: str | None = None,
    where: str = "",
    folder: Path | None = None,
) -> Task:
    """Loads a task by name or by the path of a `.py` file, and validates its parameters.

    Args:
        name: A bundled task's name, a path ending in `.py`, or `lm_eval:` and the name of an lm-eval task.
        params: The task's own keys from the config.
        label: Name in reports.
        where: Where the config names the task; put before error messages.
        folder: The config's folder, to which files that parameters name are relative.

    Raises:
        UnknownNameError: no such task or parameter, with suggestions.
        ConfigError: a parameter's value is wrong, or the task file is missing or incomplete.
    """
    if name.startswith(LM_EVAL_PREFIX):
        return _lm_eval_task(name, dict(params or {}), label or name, where)
    own = name.endswith(".py")
    if own:
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(
                f"{where + ': ' if where else ''}there is no task file {name!r}.",
                remedy="Give a path relative to the current folder, or a bundled task's name.",
            )
    elif name in known_tasks():
        path = content_dir("tasks") / f"{name}.py"
    else:
        raise UnknownNameError("task", name, known_tasks(), where=where)
    source = path.read_bytes()
    module = _load_module(path, where)
    shown = label or path.stem
    return Task(
        name=path.stem,
        label=shown,
        version=module.VERSION,
        params=_validate(module.Params, dict(params or {}), shown, where, folder),
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
    references: Sequence[str] = (),
    metric: str | None = None,
    short_prompt_ids: Sequence[int] = (),
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
        references=tuple(references),
        max_new_tokens=ctx.max_new_tokens,
        stop=ctx.stop if ctx.max_new_tokens is not None else (),
        metric=metric,
        short_prompt_ids=tuple(short_prompt_ids),
    )


def _lm_eval_task(name: str, params: dict[str, Any], label: str, where: str) -> Task:
    from kveval.integrations.lm_eval_task import LMEvalTask, Params

    settled = cast(Params, _validate(Params, params, label, where))
    module = LMEvalTask(name.removeprefix(LM_EVAL_PREFIX), settled)
    return Task(name, label, module.VERSION, settled, cast(ModuleType, module), module.source_digest)


def _load_module(path: Path, where: str) -> ModuleType:
    module = load_python_file(path, where)
    missing = [name for name in ("VERSION", "Params", "samples") if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{where + ': ' if where else ''}{path.name} defines no {', '.join(missing)}.",
            remedy="A task file needs VERSION, class Params(TaskParams) and samples(params, ctx).",
        )
    for wrong, right in _misfits(module):
        raise ConfigError(f"{where + ': ' if where else ''}{path.name}: {wrong}.", remedy=right)
    return module


def _misfits(module: ModuleType) -> Iterator[tuple[str, str]]:
    """What a task file defines wrongly, and what would be right."""
    params, stop = module.Params, getattr(module, "STOP", ())
    if not (isinstance(params, type) and issubclass(params, TaskParams)):
        yield "Params is no class of parameters", "Write class Params(TaskParams)."
    if not isinstance(module.VERSION, int):
        yield f"VERSION is {module.VERSION!r}", "Write a whole number."
    if not isinstance(stop, (tuple, list)) or not all(isinstance(text, str) and text for text in stop):
        yield f"STOP is {stop!r}", 'Write a tuple of strings: STOP = ("\\n",).'
    budget = getattr(module, "MAX_NEW_TOKENS", MAX_NEW_TOKENS)
    if not isinstance(budget, int) or budget < 1:
        yield f"MAX_NEW_TOKENS is {budget!r}", "Write a whole number, 1 or more."
    for name in ("samples", "score", "position_scores"):
        if not callable(getattr(module, name, print)):
            yield f"{name} is no function", "Define it as kveval/tasks.py says."


def _validate(
    model: type[TaskParams], params: dict[str, Any], task: str, where: str, folder: Path | None = None
) -> TaskParams:
    at = f"{where}: task {task!r}" if where else f"task {task!r}"
    unknown = sorted(set(params) - set(model.model_fields))
    if unknown:
        raise UnknownNameError("parameter", unknown[0], model.model_fields, where=at)
    try:
        return model.model_validate(params, context={"folder": folder})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{at}: {key + ': ' if key else ''}{first['msg']} (got {first['input']!r}).",
            remedy=f"Parameters: {', '.join(sorted(model.model_fields))}.",
        ) from error


def _protocol_problems(samples: Sequence[Sample], ctx: TaskContext, *, exact: bool) -> Iterator[str]:
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
        tokens = len(sample.prompt_ids) + ctx.answer_room(len(sample.answer_ids))
        if tokens > ctx.context_length or (exact and tokens != ctx.context_length):
            yield f"sample {position} has {tokens} tokens"
        if sample.context_length != ctx.context_length:
            yield f"sample {position} says that it has {sample.context_length} tokens"
        if ctx.max_new_tokens is not None and not sample.references:
            yield f"sample {position} has no references to score what the model writes against"
        if position and samples[position - 1].cluster != sample.cluster:
            finished[samples[position - 1].cluster] = None
        if sample.cluster in finished:
            yield f"cluster {sample.cluster!r} is not contiguous"
