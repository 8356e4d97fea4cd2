"""The centre: a sweep from its config to its records.

Per cluster of samples (one haystack or document): the baseline first, then every other arm on the same tokens, so
that the baseline's answer log-probabilities are at hand for the comparison. Every finished sample is journalled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kveval import env, layer_errors, native_path, selftest
from kveval.backends.base import Backend, Output
from kveval.config import SweepConfig, TaskConfig
from kveval.errors import ConfigError, KvevalError, MeasurementError, UnknownNameError, UnsupportedError
from kveval.evaluate import sessions_of
from kveval.layer_note import NOTE, LayerErrors, read_layer_errors
from kveval.models import carried_scales, compute_device, describe, load, load_tokenizer
from kveval.plan import Arm, Cell, Plan, TaskPlan, build_plan, settle_scales
from kveval.progress import Progress
from kveval.prompting import PromptTemplate
from kveval.records import METRICS, Record
from kveval.store import RunStore
from kveval.tasks import Sample, Task, TaskContext, load_task

if TYPE_CHECKING:
    from kveval.backends.hf import HFBackend
    from kveval.generation import Generated

__all__ = ["Progress", "RunSummary", "make_samples", "plan_sweep", "run_sweep"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSummary:
    """What a finished sweep says of itself: its folder, how many records were measured now, how many have errors."""

    path: Path
    measured: int
    errors: int


@dataclass(frozen=True)
class _Cluster:
    """Samples that share a prefill, each with the cells that it fills, by arm label.

    A batch of `rows` clusters, whose samples follow one another, is one too.
    """

    task: Task
    samples: tuple[Sample, ...]
    cells: tuple[Mapping[str, Cell], ...] = field(repr=False)
    rows: int = 1

    def keys(self, arm: Arm) -> list[tuple[str, str]]:
        return [(cells[arm.label].id, s.id) for s, cells in zip(self.samples, self.cells, strict=True)]

    @property
    def sequences(self) -> list[tuple[Sample, ...]]:
        """The samples by sequence of the batch."""
        size = len(self.samples) // self.rows
        return [self.samples[at : at + size] for at in range(0, len(self.samples), size)]

    @cached_property
    def tokens(self) -> int:
        """Tokens that one arm feeds: each sequence's longest prompt, and every sample's own tail."""
        longest = sum(max(len(s.prompt_ids) for s in sequence) for sequence in self.sequences)
        return longest + sum(len(s.answer_ids) + (s.max_new_tokens or 0) for s in self.samples)


def plan_sweep(config: SweepConfig) -> tuple[Plan, list[Task]]:
    """Resolve a sweep's model and tasks into a plan. Loads the tokenizer, not the weights.

    Raises:
        KvevalError: if the model, a task, a context length or the capacity's GPU can't be had, a scheme does not fit
            the model or lacks its scales, or the gate can't be decided.
    """
    tasks = [
        load_task(t.name, t.params, label=t.label, where=config.where("tasks", i), folder=config.folder("tasks", i))
        for i, t in enumerate(config.tasks)
    ]
    try:
        info = describe(config.model, device=config.model.device)
    except UnknownNameError as error:
        raise UnknownNameError(error.kind, error.name, error.known, where=config.where("model", "id")) from error
    carried = cache(lambda: carried_scales(config.model, info.geometry))
    config = settle_scales(config, info.geometry, info.weights_digest, carried)
    task_plans = [_task_plan(config, task, entry) for task, entry in zip(tasks, config.tasks, strict=True)]
    plan = build_plan(config, info, task_plans, device=compute_device(config.model.device))
    sessions_of(config, plan.model)
    _refuse_batches(config, plan.arms)
    _refuse_undecidable(config, tasks)
    return plan, tasks


def _refuse_batches(config: SweepConfig, arms: Iterable[Arm]) -> None:
    """What fills the shorter sequences of a batch must not take part in how others' tokens are stored."""
    grouped = [arm.label for arm in arms if not arm.scheme.blind_to_later]
    if config.batch_size > 1 and grouped:
        raise ConfigError(
            f"batch_size: {config.batch_size}, but how {' and '.join(grouped)} stores a token depends on later ones.",
            remedy="Set `batch_size: 1`, or run these schemes in a sweep of their own.",
        )


def _task_plan(config: SweepConfig, task: Task, entry: TaskConfig) -> TaskPlan:
    """What is planned of a task. Raises ConfigError if its answers can't be written and the config wants them to be."""
    if not config.writes(entry):
        return TaskPlan(task.label, task.version, task.identity(), task.passage, buckets=not task.exact_length)
    if task.passage:
        raise ConfigError(
            f"task {task.label!r} scores running text, which has no answer to write.",
            remedy="Give it `mode: teacher_forced`.",
        )
    return TaskPlan(
        task.label,
        task.version,
        task.identity(),
        task.passage,
        entry.max_new_tokens or task.max_new_tokens,
        task.stop if entry.stop is None else entry.stop,
        buckets=not task.exact_length,
    )


def _refuse_undecidable(config: SweepConfig, tasks: Iterable[Task]) -> None:
    """A gate on a metric that the task never has could not be decided by any number of samples."""
    passages = {task.label for task in tasks if task.passage}
    written = {entry.label for entry in config.tasks if config.writes(entry)}
    for i, end in enumerate(config.gate.endpoints if config.gate else ()):
        where = config.where("gate", "endpoints", i)
        if end.task in passages and METRICS[end.metric].of != "tokens":
            raise ConfigError(
                f"{where}: {end.task} scores running text and has no {end.metric}.",
                remedy="Gate it on answer_nll or kl.",
            )
        if METRICS[end.metric].of == "text" and end.task not in written:
            raise ConfigError(
                f"{where}: {end.metric} judges an answer that the model writes; {end.task} is fed its answers.",
                remedy="Give the task `mode: generate`, or gate it on answer_nll, exact_match or kl.",
            )


def make_samples(plan: Plan, tasks: Sequence[Task], tokenizer: Any) -> dict[tuple[str, int], list[Sample]]:
    """Every sample of the sweep by (task label, context length), before any model runs.

    Raises:
        LengthError: if a context length is under a task's minimum.
    """
    config = plan.config
    template = PromptTemplate.from_tokenizer(tokenizer, config.model.chat_template)
    samples = {}
    for task, entry in zip(tasks, config.tasks, strict=True):
        for length in config.lengths_of(entry):
            planned = plan.tasks[task.label]
            context = TaskContext(
                tokenizer=tokenizer,
                prompt=template,
                context_length=length,
                samples=config.samples_of(entry),
                seed=config.seed,
                max_new_tokens=planned.max_new_tokens,
                stop=planned.stop,
                shorter=max((n for n in config.lengths_of(entry) if n < length), default=0),
            )
            samples[task.label, length] = task.samples(context)
    return samples


def run_sweep(config: SweepConfig, out: str | Path, *, progress: Progress | None = None) -> RunSummary:
    """Run what is missing of a sweep and write its records.

    Args:
        config: The sweep.
        out: The run folder; made if missing, resumed if it holds this sweep.
        progress: Where to report progress.

    Raises:
        KvevalError: before any sample is measured, for whatever a user can mend. A sample that fails later becomes
            a record with status "error".
    """
    progress = progress or Progress()
    plan, tasks = plan_sweep(config)
    samples = make_samples(plan, tasks, load_tokenizer(config.model))
    alone = list(_clusters(plan, tasks, samples))
    timed = _first_of_each_length(alone) if config.decode_tokens else []
    clusters = list(_batches(alone, config.batch_size, timed))
    order = [(cell.id, sample.id) for cell in plan.cells for sample in samples[cell.task, cell.context_length]]
    with RunStore.open(out, plan.to_dict(), env=env.collect()) as store:
        already = len(store.done)
        todo = [c for c in clusters if any(key not in store.done for arm in plan.arms for key in c.keys(arm))]
        progress.total = sum(c.tokens for c in clusters) * len(plan.arms)
        progress.advance(progress.total - sum(c.tokens for c in todo) * len(plan.arms), "resuming")
        if todo:
            backend = _load_backend(plan, store)
            progress.advance(0, "error by layer")
            _note_layer_errors(plan, samples, backend, store)
            native_path.note(plan.arms, backend, store)
            for cluster in todo:
                decode_tokens = config.decode_tokens if cluster in timed else 0
                _run_cluster(cluster, plan.arms, backend, store, decode_tokens, progress)
        store.finish(order)
        errors = sum(record.status == "error" for record in store.done.values())
        return RunSummary(Path(out), len(order) - already, errors)


def _clusters(plan: Plan, tasks: Sequence[Task], samples: Mapping[tuple[str, int], list[Sample]]) -> Iterator[_Cluster]:
    """Group samples that share a haystack or document. Passages nest, so theirs are grouped across lengths."""
    for task, entry in zip(tasks, plan.config.tasks, strict=True):
        by_cluster: dict[tuple[str, int | None], list[tuple[Sample, dict[str, Cell]]]] = {}
        for length in plan.config.lengths_of(entry):
            cells = plan.cells_of(entry.label, length)
            together = None if cells[plan.config.baseline].passage else length
            for sample in samples[entry.label, length]:
                by_cluster.setdefault((sample.cluster, together), []).append((sample, cells))
        for members in by_cluster.values():
            yield _Cluster(task, tuple(s for s, _ in members), tuple(c for _, c in members))


def _batches(clusters: Sequence[_Cluster], size: int, timed: Sequence[_Cluster]) -> Iterator[_Cluster]:
    """Up to `size` neighbours of one task and context length together, whatever of them is measured already.

    Alone stay the clusters that decoding is timed on, running text, which is prefilled from length to length, answers
    to write, which end at different tokens, and prompts of unequal lengths.
    """
    waiting: list[_Cluster] = []
    for cluster in clusters:
        first = cluster.samples[0]
        alike = cluster.task.exact_length and not cluster.task.passage and first.max_new_tokens is None
        joins = alike and cluster not in timed
        kind = (cluster.cells[0], len(cluster.samples))
        if waiting and (not joins or len(waiting) == size or kind != (waiting[0].cells[0], len(waiting[0].samples))):
            yield _batch(waiting)
            waiting = []
        if joins:
            waiting.append(cluster)
        else:
            yield cluster
    if waiting:
        yield _batch(waiting)


def _batch(clusters: Sequence[_Cluster]) -> _Cluster:
    samples = tuple(sample for cluster in clusters for sample in cluster.samples)
    cells = tuple(cell for cluster in clusters for cell in cluster.cells)
    return _Cluster(clusters[0].task, samples, cells, rows=len(clusters))


def _first_of_each_length(clusters: Iterable[_Cluster]) -> list[_Cluster]:
    """One cluster per context length, on which decoding is timed: its time depends on the length, not on the task."""
    first: dict[int, _Cluster] = {}
    for cluster in clusters:
        first.setdefault(max(s.context_length for s in cluster.samples), cluster)
    return list(first.values())


def _load_backend(plan: Plan, store: RunStore) -> HFBackend:
    from kveval.backends.hf import HFBackend

    backend = HFBackend(load(plan.config.model, device=plan.config.model.device))
    for arm in plan.arms:
        try:
            backend.new_cache(arm)  # an arm that can't run is refused before any of them does
        except UnsupportedError as error:
            raise UnsupportedError(f"scheme {arm.label}: {error.message}", remedy=error.remedy) from error
    store.write_note("self_test.json", selftest.check(backend))
    return backend


def _note_layer_errors(
    plan: Plan, samples: Mapping[tuple[str, int], list[Sample]], backend: HFBackend, store: RunStore
) -> None:
    """Measure each layer's error on the first of the longest samples, unless the run has that already.

    It explains the sweep's figures and decides none of them: if it fails, the note says why and the sweep goes on.
    """
    known = read_layer_errors(store.path)
    if known is not None and known.measured:
        return
    task, length = max(samples, key=lambda at: at[1])
    sample = samples[task, length][0]
    rows, problem = [], None
    try:
        rows = layer_errors.measure(backend, plan.arms, sample.prompt_ids)
    except (KvevalError, RuntimeError) as error:
        log.exception("measuring the error by layer failed")
        problem = f"{type(error).__name__}: {error}"
    tokens = min(len(sample.prompt_ids), layer_errors.MAX_TOKENS)
    queries = min(tokens, layer_errors.PROBED_QUERIES)
    found = LayerErrors(task, sample.id, tokens, queries, tuple(rows), problem)
    store.write_note(NOTE, found.to_dict())


def _run_cluster(
    cluster: _Cluster,
    arms: Iterable[Arm],
    backend: Backend,
    store: RunStore,
    decode_tokens: int,
    progress: Progress,
) -> None:
    """Score a cluster on every arm that lacks records. The baseline always runs: the others are compared with it."""
    baseline: dict[str, Any] = {}
    for arm in arms:
        missing = {key for key in cluster.keys(arm) if key not in store.done}
        if missing or arm.role == "baseline":
            for record, output in _score(cluster, arm, backend, baseline, decode_tokens):
                if arm.role == "baseline" and output is not None:
                    baseline[record.sample_id] = output.reference
                if (record.cell_id, record.sample_id) in missing:
                    store.append(record)
        progress.advance(cluster.tokens, f"{cluster.cells[0][arm.label].task}: {arm.label}")


def _score(
    cluster: _Cluster, arm: Arm, backend: Backend, baseline: Mapping[str, Any], decode_tokens: int
) -> Iterator[tuple[Record, Output | None]]:
    """Records of one arm. Whatever the backend could not score is a row with status "error"."""
    waiting = {s.id: (s, c[arm.label]) for s, c in zip(cluster.samples, cluster.cells, strict=True)}
    try:
        for output in backend.score(cluster.sequences, arm, baseline, decode_tokens=decode_tokens):
            sample, cell = waiting.pop(output.sample_id)
            if arm.role != "baseline" and sample.id not in baseline:
                yield _error_record(sample, cell, MeasurementError("the baseline failed on this sample.")), None
                continue
            try:
                record = _record(sample, cell, output, cluster.task)
            except KvevalError as error:  # the text's score alone: what the model computed is right
                log.exception("%s: no score for sample %s", arm.label, sample.id)
                record = _error_record(sample, cell, error)
            yield record, output
    except (KvevalError, RuntimeError) as error:
        log.exception("%s failed on %s", arm.label, cluster.samples[0].cluster)
        for sample, cell in waiting.values():
            yield _error_record(sample, cell, error), None


def _head(sample: Sample, cell: Cell) -> dict[str, Any]:
    return {
        "cell_id": cell.id,
        "sample_id": sample.id,
        "sample_index": sample.index,
        "cluster": sample.cluster,
        "task": cell.task,
        "task_version": cell.task_version,
        "scheme": cell.arm.label,
        "role": cell.arm.role,
        "context_length": sample.context_length,
        "depth": sample.depth,
        "n_prompt_tokens": len(sample.prompt_ids),
        "n_answer_tokens": len(sample.answer_ids),
        "prefill_chunk": cell.arm.prefill_chunk,
        "reads": cell.arm.reads,
    }


def _record(sample: Sample, cell: Cell, output: Output, task: Task) -> Record:
    score, ran, key_tokens = output.score, output.effective, output.reference.key_tokens
    is_baseline = cell.arm.role == "baseline"
    scored = bool(score.token_nll)
    whole = not cell.passage and key_tokens is None
    return Record(
        **_head(sample, cell),
        status="ok",
        answer_nll=score.answer_nll,
        answer_nll_sum=score.answer_nll_sum if scored else None,
        exact_match=float(score.exact_match) if whole else None,
        first_token_match=float(score.first_token_match) if whole else None,
        accepted_prefix=score.accepted_tokens / len(score.token_nll) if whole else None,
        key_tokens=None if key_tokens is None else len(key_tokens),
        kl=0.0 if is_baseline and scored else score.kl,
        top1_flips=0.0 if is_baseline and scored else score.top1_flips,
        token_nll=list(score.token_nll),
        stored_bytes=ran.stored.stored,
        payload_bytes=ran.stored.payload,
        scale_bytes=ran.stored.scales,
        constant_bytes=ran.stored.constants,
        padding_bytes=ran.stored.padding,
        wide_layer_bytes=ran.stored.wide_layers,
        wide_token_bytes=ran.stored.wide_tokens,
        undo_bytes=ran.stored.undo,
        billed_bytes=ran.billed,
        cache_tokens=ran.cache_tokens,
        packed_reads=ran.packed_reads,
        attention_path=ran.attention_path,
        compute_dtype=ran.compute_dtype,
        batch=ran.batch,
        prefill_s=output.prefill_s,
        score_s=output.score_s,
        decode_s_per_token=output.decode_s_per_token,
        **_written(sample, output.generated, task),
    )


def _written(sample: Sample, generated: Generated | None, task: Task) -> dict[str, Any]:
    """The columns about what the model wrote. Cut thoughts have no scores: 0 in both arms would pass for no loss."""
    if generated is None:
        return {}
    cut = generated.finish_reason == "thinking"
    return {
        "generated_text": generated.text,
        "n_generated_tokens": len(generated.token_ids),
        "finish_reason": generated.finish_reason,
        **({} if cut else dataclasses.asdict(task.score_text(sample, generated.text))),
    }


def _error_record(sample: Sample, cell: Cell, error: Exception) -> Record:
    return Record(**_head(sample, cell), status="error", error=f"{type(error).__name__}: {error}")
