"""lm-eval tasks on the BF16 cache and on others: one run of lm-eval per scheme, compared sample by sample."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kveval.config import ModelConfig
from kveval.content import content_dir
from kveval.errors import ConfigError, MeasurementError, TaskError, UnknownNameError
from kveval.files import to_json, write_atomic, writing
from kveval.formats.spec import KVScheme, get_scheme
from kveval.integrations import require_lm_eval
from kveval.intervals import fit_loss

__all__ = ["LMEvalAsked", "LMEvalResult", "LMEvalRow", "run_lm_eval", "task_manager"]

FORMAT_VERSION = 1
"""Of `results.json`."""

NLL = "nll"
"""What kveval adds to every sample that is scored by likelihood: -log p of the right continuation, in nats. It moves
long before an accuracy does."""

Samples = Mapping[str, Sequence[Mapping[str, Any]]]
SampleKey = tuple[Any, str]
"""Document id and the name of the filter that the answer went through."""


@dataclass(frozen=True, kw_only=True)
class LMEvalAsked:
    """What to run.

    Attributes:
        model: Which model.
        schemes: Names of presets; the BF16 baseline runs first in any case, unless `compare` is off.
        tasks: Names of lm-eval's tasks, groups or tags, of those in `include_path`, or of kveval's own.
        limit: Samples per task, from the first; None for all.
        num_fewshot: Examples before each question; None: the task's own number.
        include_path: A folder with more tasks.
        apply_chat_template: Put the model's chat template around every prompt.
        gen_kwargs: Overrides of the tasks' `generation_kwargs`.
        metadata: Handed to tasks that make their own samples, such as {"max_seq_lengths": [4096]} for RULER's.
        prefill_chunk: Most tokens of a context that one forward takes.
        compare: Run the baseline and compare with it.
    """

    model: ModelConfig
    schemes: tuple[str, ...]
    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    apply_chat_template: bool = False
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    prefill_chunk: int = 2048
    compare: bool = True


@dataclass(frozen=True)
class LMEvalRow:
    """One metric of one task on one scheme, beside the baseline's.

    `difference` is the scheme's value minus the baseline's: of the paired samples, with a 95 % interval, where samples
    carry the metric as a number (`pairs` of them); else of the two aggregates, and `low` and `high` are None.
    """

    task: str
    metric: str
    filter: str
    scheme: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    samples: int
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    method: str | None = None


@dataclass(frozen=True)
class LMEvalResult:
    """What a run gives: rows for a table, facts about every scheme, and every sample."""

    rows: tuple[LMEvalRow, ...]
    facts: Mapping[str, Any]
    samples: Mapping[str, Samples] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the samples."""
        return {**self.facts, "rows": [asdict(row) for row in self.rows]}

    def write(self, folder: Path) -> None:
        """Write `results.json`, and each scheme's samples of each task as JSON lines."""
        with writing(folder):
            for scheme, tasks in self.samples.items():
                for task, samples in tasks.items():
                    path = folder / "samples" / scheme / f"{re.sub(r'[^A-Za-z0-9._-]', '_', task)}.jsonl"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    lines = (json.dumps(_plain(sample), allow_nan=False) + "\n" for sample in samples)
                    write_atomic(path, "".join(lines).encode("utf-8"))
            write_atomic(folder / "results.json", to_json(self.to_dict()))


def run_lm_eval(asked: LMEvalAsked, *, say: Callable[[str], None]) -> LMEvalResult:
    """Run the tasks on every scheme and compare.

    Args:
        asked: What to run.
        say: Told what happens, a line at a time.

    Raises:
        KvevalError: lm-eval or a task is missing, a request exceeds the model's limit or asks to sample, or a result
            would be void.
    """
    require_lm_eval()
    from kveval import selftest
    from kveval.backends.hf import HFBackend
    from kveval.models import load

    schemes = [get_scheme(name, where="--scheme") for name in asked.schemes]
    if asked.compare:
        schemes = [get_scheme("bf16"), *(scheme for scheme in schemes if scheme.name != "bf16")]
    backend = HFBackend(load(asked.model, device=asked.model.device))
    folder = backend.loaded.model.name_or_path
    manager = task_manager(asked.tasks, asked.include_path, {"pretrained": folder, **asked.metadata})
    facts: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "asked": {**asdict(asked), "model": asked.model.model_dump(), "include_path": _text(asked.include_path)},
        "versions": _versions(),
        "model": _model_facts(backend.loaded.info),
        "self_test": selftest.check(backend),
        "schemes": {},
    }
    found: dict[str, dict[str, Any]] = {}
    for scheme in schemes:
        say(f"{scheme.name}: {', '.join(asked.tasks)}")
        found[scheme.name], facts["schemes"][scheme.name] = _run_scheme(asked, scheme, backend, manager)
    rows = tuple(row for name in found for row in _rows(name, found[name], found.get("bf16")))
    return LMEvalResult(rows, facts, {name: result["samples"] for name, result in found.items()})


def task_manager(tasks: Sequence[str], include_path: Path | None, metadata: Mapping[str, Any]) -> Any:
    """lm-eval's index of tasks: kveval's own and those of `include_path`, and lm-eval's thousands if one is asked for.

    Raises:
        UnknownNameError: no such task, with suggestions.
        ConfigError: `include_path` is no folder.
    """
    paths: tuple[str, ...] = (str(content_dir("tasks") / "lm_eval"),)
    if include_path is not None:
        if not include_path.is_dir():
            raise ConfigError(f"include_path {include_path} is no folder.", remedy="Give a folder with task YAMLs.")
        paths = (*paths, str(include_path.resolve()))
    options = json.dumps(dict(metadata), sort_keys=True)
    manager = _index(paths, options, everything=False)
    # A group may name any of lm-eval's own tasks.
    if not set(tasks) <= set(manager.all_subtasks):
        manager = _index(paths, options, everything=True)
    for name in tasks:
        if name not in manager.all_tasks:
            raise UnknownNameError("lm-eval task", name, manager.all_tasks)
    return manager


@lru_cache(maxsize=8)
def _index(paths: tuple[str, ...], metadata: str, *, everything: bool) -> Any:
    """Kept: to index lm-eval's own tasks takes 6 to 13 s."""
    require_lm_eval()
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(paths), include_defaults=everything, metadata=json.loads(metadata))


def _run_scheme(
    asked: LMEvalAsked, scheme: KVScheme, backend: Any, manager: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """lm-eval's result on one scheme, and what running it took."""
    from lm_eval import simple_evaluate

    from kveval.integrations.lm_eval import KvevalLM

    model = KvevalLM(backend, scheme, prefill_chunk=asked.prefill_chunk)
    try:
        result: dict[str, Any] | None = simple_evaluate(
            model=model,
            tasks=list(asked.tasks),
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
            task_manager=manager,
            apply_chat_template=asked.apply_chat_template,
            gen_kwargs=dict(asked.gen_kwargs) or None,
            bootstrap_iters=0,  # intervals come from paired samples
            log_samples=True,
            use_cache=None,  # lm-eval's cache of answers knows neither the model nor its cache
        )
    except (FileNotFoundError, ConnectionError) as error:
        raise TaskError(
            f"a data set of {', '.join(asked.tasks)} can't be had: {error}",
            remedy="Put it into the Hugging Face cache, or allow the network.",
        ) from error
    assert result is not None, "a single process always gets a result"
    usage = model.usage
    if usage.positions == 0 or usage.packed_reads == 0:
        raise MeasurementError(f"{scheme.name}: no answer came from the stored cache.")
    facts = {
        "scheme": scheme.identity(),
        "prefill_chunk": asked.prefill_chunk,
        "reads": "stored",
        "usage": usage.to_dict(),
        "results": _plain(result["results"]),
        "task_versions": _plain(result["versions"]),
        "n_samples": _plain(result["n-samples"]),
    }
    return result, facts


def _rows(scheme: str, result: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> Iterator[LMEvalRow]:
    """Every metric of every task on one scheme, then the likelihood that kveval adds."""
    against = None if scheme == "bf16" else baseline
    for task, samples in result["samples"].items():
        before = against["samples"][task] if against is not None else None
        for key, value in result["results"][task].items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            found = _values(samples, metric, filter_name)
            row = LMEvalRow(
                task=task,
                metric=metric,
                filter=filter_name,
                scheme=scheme,
                value=float(value),
                stderr=_stderr(found),
                higher_is_better=result["higher_is_better"].get(task, {}).get(metric),
                samples=sum(sample["filter"] == filter_name for sample in samples),
            )
            other = None if against is None else float(against["results"][task][key])
            yield _compared(row, found, before, other)
        likely = _nlls(samples)
        if likely:
            mean = sum(likely.values()) / len(likely)
            row = LMEvalRow(task, NLL, "none", scheme, mean, _stderr(likely), False, len(likely))
            other = None if before is None else sum(_nlls(before).values()) / len(likely)
            yield _compared(row, likely, before, other)


def _compared(
    row: LMEvalRow, found: Mapping[SampleKey, float], before: Sequence[Mapping[str, Any]] | None, other: float | None
) -> LMEvalRow:
    """The row with its difference from the baseline, paired by document where both have a number."""
    if before is None or other is None:
        return row
    base = _nlls(before) if row.metric == NLL else _values(before, row.metric, row.filter)
    pairs = [(value, base[key]) for key, value in found.items() if key in base]
    if not pairs or len(pairs) != len(found) or len(found) != len(base):
        return LMEvalRow(**{**asdict(row), "difference": row.value - other})
    change_N = np.array([value - was for value, was in pairs], dtype=np.float64)
    bounded = all(0.0 <= x <= 1.0 for pair in pairs for x in pair)
    fit = fit_loss(change_N, np.arange(len(pairs)), bounded=bounded)
    return LMEvalRow(
        **{
            **asdict(row),
            "difference": fit.value,
            "low": fit.lower(0.025),
            "high": fit.upper(0.025),
            "pairs": len(pairs),
            "method": fit.method,
        }
    )


def _values(samples: Sequence[Mapping[str, Any]], metric: str, filter_name: str) -> dict[SampleKey, float]:
    """A metric by document, of samples that carry it as a number; a document that lacks it is left out."""
    return {
        _key(sample): float(sample[metric])
        for sample in samples
        if sample["filter"] == filter_name
        and isinstance(sample.get(metric), (bool, int, float, np.number))
        and math.isfinite(sample[metric])
    }


def _nlls(samples: Sequence[Mapping[str, Any]]) -> dict[SampleKey, float]:
    """-log p of the right continuation by document, in nats, for tasks that are scored by likelihood."""
    found = {}
    for sample in samples:
        answers, right = [resps[0] for resps in sample["resps"]], sample["target"]
        if isinstance(answers[0], str):
            continue
        place = right if len(answers) > 1 else 0
        if isinstance(place, int) and 0 <= place < len(answers):
            score = answers[place]
            found[_key(sample)] = -float(score[0] if isinstance(score, (tuple, list)) else score)
    return found


def _key(sample: Mapping[str, Any]) -> SampleKey:
    """What pairs a sample over schemes: equal keys are equal prompts."""
    return (sample["doc_id"], sample["prompt_hash"])


def _stderr(values: Mapping[SampleKey, float]) -> float | None:
    if len(values) < 2:
        return None
    return float(np.std(list(values.values()), ddof=1) / math.sqrt(len(values)))


def _model_facts(info: Any) -> dict[str, Any]:
    return {
        "id": info.id,
        "revision": info.revision,
        "weights_digest": info.weights_digest,
        "config_digest": info.config_digest,
        "tokenizer_digest": info.tokenizer_digest,
        "template_digest": info.template_digest,
        "compute_dtype": info.compute_dtype,
        "max_context": info.max_context,
    }


def _versions() -> dict[str, str]:
    names = ("kveval", "lm-eval", "torch", "transformers", "datasets")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _plain(value: Any) -> Any:
    """lm-eval's results as JSON data; whatever is no data, a task's functions say, as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
