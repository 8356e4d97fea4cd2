"""The contract of a task, held against a task file: what a sweep relies on, checked without a model's weights.

A task's author runs it with `kveval task check FILE`. Each check is a function of a `Subject` that gives what is wrong,
or None; it raises `NotApplicable` where the task has nothing to look at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from kveval.byte_tokenizer import byte_tokenizer
from kveval.config import ModelConfig
from kveval.errors import KvevalError, TaskError
from kveval.identity import digest
from kveval.models import load_tokenizer
from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, Task, TaskContext, load_task

__all__ = ["CHECKS", "Asked", "Finding", "NotApplicable", "Subject", "check_task"]

MODEL_LENGTHS = (512, 4096)
BYTE_LENGTHS = (4096, 16384)
"""Context lengths where none are asked for: in bytes, a text has some four times as many tokens."""

SECONDS = 2.0
"""Most time for one sample at the longest context length."""

DEPTH_TOLERANCE = 0.15
"""How far from its depth a needle may lie, of the whole context: instruction and question stand around the text."""

_HASH_SEEDS = ("1", "2")
_WORKER_SECONDS = 300


class NotApplicable(Exception):  # noqa: N818 - an outcome of a check, not an error
    """The task has nothing that this check could look at; the message says what."""


@dataclass(frozen=True)
class Finding:
    """Outcome of one check; `detail` says what was looked at, or what is wrong."""

    check: str
    status: Literal["pass", "fail", "skip"]
    detail: str


@dataclass(frozen=True)
class Asked:
    """What to check, as plain data, so that another process can make the same samples.

    Attributes:
        name: A bundled task's name, or the path of a task file.
        params: The task's own parameters.
        model: Keys of a `ModelConfig` whose tokenizer makes the samples; None: one token per byte.
        lengths: Context lengths in tokens; empty: two that suit the tokenizer.
        samples: Samples at each length.
        seed: Of all randomness.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] | None = None
    lengths: tuple[int, ...] = ()
    samples: int = 8
    seed: int = 0

    def prompt(self) -> PromptTemplate:
        """What surrounds the task's text, with its tokenizer. Raises KvevalError if there is none."""
        if self.model is None:
            return PromptTemplate.from_tokenizer(byte_tokenizer())
        model = ModelConfig(**self.model)
        return PromptTemplate.from_tokenizer(load_tokenizer(model), model.chat_template)

    def subject(self, prompt: PromptTemplate) -> Subject:
        """The loaded task with its surroundings. Raises ConfigError if it can't be loaded."""
        lengths = tuple(sorted(set(self.lengths))) or (MODEL_LENGTHS if self.model else BYTE_LENGTHS)
        return Subject(self, load_task(self.name, self.params), prompt, lengths)


@dataclass(frozen=True)
class Subject:
    """A task with all that its samples depend on; `lengths` ascend."""

    asked: Asked
    task: Task
    prompt: PromptTemplate
    lengths: tuple[int, ...]
    _made: dict[int, list[Sample]] = field(default_factory=dict, repr=False, compare=False)

    def context(
        self, length: int, *, samples: int | None = None, seed: int | None = None, writes: bool = False
    ) -> TaskContext:
        """What samples of a length are made for; `writes`: with room for an answer that the model writes."""
        return TaskContext(
            self.prompt.tokenizer,
            self.prompt,
            length,
            self.asked.samples if samples is None else samples,
            self.asked.seed if seed is None else seed,
            max_new_tokens=self.task.max_new_tokens if writes else None,
            stop=self.task.stop if writes else (),
            shorter=max((other for other in self.lengths if other < length), default=0),
        )

    def make(self, context: TaskContext) -> list[Sample]:
        """What the task file gives, before a sweep would look at it."""
        made: list[Sample] = self.task.module.samples(self.task.params, context)
        return made

    def made(self, length: int) -> list[Sample]:
        """The samples of a length, made once."""
        if length not in self._made:
            self._made[length] = self.make(self.context(length))
        return self._made[length]

    def each(self, problem: Callable[[Sample], str | None]) -> str | None:
        """The first sample with a problem, and which."""
        for length in self.lengths:
            for place, sample in enumerate(self.made(length)):
                if found := problem(sample):
                    return f"sample {place} at {length} tokens {found}"
        return None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones spelled out."""
        text: str = self.prompt.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text


def check_task(asked: Asked) -> list[Finding]:
    """Hold a task against the contract: one finding per check.

    Raises:
        KvevalError: the model's tokenizer can't be had. What is wrong with the task is a finding.
    """
    prompt = asked.prompt()
    try:
        subject = asked.subject(prompt)
    except KvevalError as error:
        return [Finding("loads", "fail", _in_one_line(error))]
    tokens = " and ".join(f"{length:,}" for length in subject.lengths)
    what = f"{subject.task.name}, version {subject.task.version}; {asked.samples} samples each at {tokens} tokens"
    findings = [Finding("loads", "pass", what)]
    for name, check in CHECKS.items():
        findings.append(_outcome(name, check, subject))
        if check is makes_samples and findings[-1].status == "fail":
            break
    return findings


def _outcome(name: str, check: Callable[[Subject], str | None], subject: Subject) -> Finding:
    try:
        problem = check(subject)
    except NotApplicable as reason:
        return Finding(name, "skip", str(reason))
    except KvevalError as error:
        problem = _in_one_line(error)
    except Exception as error:  # noqa: BLE001 - a task file is its author's code: whatever it raises is the finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} ({os.path.basename(last.filename)} line {last.lineno})"
    return Finding(name, "fail", problem) if problem else Finding(name, "pass", "")


def _in_one_line(error: KvevalError) -> str:
    return f"{error.message} {error.remedy}".strip()


# --- the checks ---------------------------------------------------------------------------------------


def makes_samples(subject: Subject) -> str | None:
    """As many as are asked for, at every length."""
    for length in subject.lengths:
        found = len(subject.made(length))
        if found != subject.asked.samples:
            return f"{found} samples instead of {subject.asked.samples} at {length} tokens"
    return None


def fits_the_length(subject: Subject) -> str | None:
    """Prompt and answer fill the context length to the token; for `EXACT_LENGTH = False` they fit into it."""

    def problem(sample: Sample) -> str | None:
        tokens, most = len(sample.prompt_ids) + len(sample.answer_ids), sample.context_length
        if not sample.prompt_ids or not sample.answer_ids:
            return "has an empty prompt or answer"
        if tokens > most or (subject.task.exact_length and tokens < most):
            return f"has {tokens} tokens, prompt and answer together"
        return None

    return subject.each(problem)


def ids_are_unique(subject: Subject) -> str | None:
    """Ids differ, and samples are numbered from 0."""
    for length in subject.lengths:
        samples = subject.made(length)
        if len({sample.id for sample in samples}) < len(samples):
            return f"ids repeat at {length} tokens; make_sample(ctx, index, ...) gives unique ones"
        if [sample.index for sample in samples] != list(range(len(samples))):
            return f"the indices at {length} tokens are not 0, 1, 2, ..."
    return None


def clusters_lie_together(subject: Subject) -> str | None:
    """Samples of a cluster follow one another, so that one prefill can serve them."""
    for length in subject.lengths:
        names = [sample.cluster for sample in subject.made(length)]
        starts = [name for before, name in pairwise([None, *names]) if name != before]
        if len(set(starts)) < len(starts):
            return f"a cluster's samples don't follow one another at {length} tokens: {', '.join(names)}"
    return None


def runs_in_both_modes(subject: Subject) -> str | None:
    """A sweep takes the samples, fed with the answer and with room for a written one."""
    for writes in (False, True):
        if writes and subject.task.passage:
            continue
        for length in subject.lengths:
            try:
                subject.task.samples(subject.context(length, writes=writes))
            except TaskError as error:
                return f"in mode {'generate' if writes else 'teacher_forced'}: {_in_one_line(error)}"
    return None


def same_seed_same_samples(subject: Subject) -> str | None:
    """Asked again, the task gives the same samples."""
    for length in subject.lengths:
        if subject.make(subject.context(length)) != subject.made(length):
            return f"a second call at {length} tokens gives other samples; use seeded_random(ctx, ...)"
    return None


def same_in_other_processes(subject: Subject) -> str | None:
    """Two new processes with different PYTHONHASHSEED give the samples of this one."""
    length = subject.lengths[0]
    asked = json.dumps({**asdict(subject.asked), "lengths": [length]})

    def run(hash_seed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from kveval import task_check; task_check.print_fingerprint()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": hash_seed},
            input=asked,
            capture_output=True,
            text=True,
            check=False,
            timeout=_WORKER_SECONDS,
        )

    with ThreadPoolExecutor(len(_HASH_SEEDS)) as pool:
        ended = list(pool.map(run, _HASH_SEEDS))
    expected = _fingerprint(subject.make(subject.context(length)))
    for hash_seed, process in zip(_HASH_SEEDS, ended, strict=True):
        if process.returncode:
            return f"a new process fails: {(process.stderr.strip().splitlines() or ['no message'])[-1]}"
        if process.stdout.split()[-1] != expected:
            return f"with PYTHONHASHSEED={hash_seed} the samples are others; don't iterate over sets or use hash()"
    return None


def print_fingerprint() -> None:
    """What the other processes run: `Asked` comes in as JSON, the fingerprint of its samples goes out."""
    found = json.load(sys.stdin)
    asked = Asked(**{**found, "lengths": tuple(found["lengths"])})
    subject = asked.subject(asked.prompt())
    sys.stdout.write(f"\n{_fingerprint(subject.made(subject.lengths[0]))}\n")


def _fingerprint(samples: Sequence[Sample]) -> str:
    return digest("task-check", [asdict(sample) for sample in samples])


def number_changes_no_sample(subject: Subject) -> str | None:
    """Fewer samples are the beginning of more."""
    length, all_of_them = subject.lengths[0], subject.made(subject.lengths[0])
    for fewer in sorted({1, subject.asked.samples // 2} - {0, subject.asked.samples}):
        if subject.make(subject.context(length, samples=fewer)) != all_of_them[:fewer]:
            return f"the first {fewer} of {subject.asked.samples} samples are others when only {fewer} are asked for"
    return None


def seed_changes_samples(subject: Subject) -> str | None:
    """Another seed gives other samples."""
    length = subject.lengths[0]
    other = subject.make(subject.context(length, seed=subject.asked.seed + 1))
    if [sample.id for sample in other] == [sample.id for sample in subject.made(length)]:
        return f"seeds {subject.asked.seed} and {subject.asked.seed + 1} give the same samples"
    return None


def passages_nest(subject: Subject) -> str | None:
    """For `PASSAGE`: a longer passage begins with the shorter one, so that one prefill serves both."""
    if not subject.task.passage:
        raise NotApplicable("answers are no running text (PASSAGE)")
    for short, long in pairwise(subject.lengths):
        for a, b in zip(subject.made(short), subject.made(long), strict=True):
            if a.prompt_ids + a.answer_ids != (b.prompt_ids + b.answer_ids)[:short] or a.cluster != b.cluster:
                return f"sample {a.index} at {long} tokens doesn't begin with that at {short}"
    return None


def no_special_tokens(subject: Subject) -> str | None:
    """Special tokens are those of the chat template (or BOS), none are in the task's text or its answers."""
    prompt = subject.prompt
    control = prompt.control_ids

    def steering(ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in control]

    frames = [steering(prompt.head_ids + prompt.tail("", "")), steering(prompt.bos_ids)]

    def problem(sample: Sample) -> str | None:
        if found := steering(sample.answer_ids):
            return f"has special tokens in its answer: {prompt.tokenizer.convert_ids_to_tokens(found)}"
        roles = sample.metadata.get("roles")
        talk = (
            [steering(prompt.conversation([(role, "x") for role in roles]))] if roles and prompt.mode == "chat" else []
        )
        if (found := steering(sample.prompt_ids)) not in [*frames, *talk]:
            if not found:
                return (
                    "has none of the chat template's special tokens: put prompt.head_ids before its text, and "
                    "prompt.tail behind it"
                )
            return (
                f"has special tokens beside those of the chat template: {prompt.tokenizer.convert_ids_to_tokens(found)}"
            )
        return None

    return subject.each(problem)


def metadata_is_json(subject: Subject) -> str | None:
    """Metadata is plain JSON data."""

    def problem(sample: Sample) -> str | None:
        try:
            json.dumps(dict(sample.metadata), allow_nan=False)
        except (TypeError, ValueError) as error:
            return f"has metadata that is no JSON: {error}"
        return None

    return subject.each(problem)


def needle_is_where_it_is_asked(subject: Subject) -> str | None:
    """The needle stands in the text once, at the sample's depth.

    The needle is `metadata["needle"]`; without it, an answer that occurs once in the text stands for it.
    """
    length = subject.lengths[-1]
    samples = [sample for sample in subject.made(length) if sample.depth is not None]
    if not samples:
        raise NotApplicable("no sample has a depth")
    looked = 0
    for sample in samples:
        named = sample.metadata.get("needle")
        needle = named if named is not None else next(iter(sample.references), "")
        count = subject.decode(sample.prompt_ids).count(needle) if needle else 0
        if named is not None and count != 1:
            return f"sample {sample.index} at {length} tokens has its needle {count} times in its text: {named[:60]!r}"
        if count != 1:
            continue
        looked += 1
        depth, start = sample.depth or 0.0, _start_of(needle, sample.prompt_ids, subject)
        if abs(start / length - depth) > DEPTH_TOLERANCE:
            return (
                f"sample {sample.index} at {length} tokens says depth {depth:.2f}, "
                f"and has {needle[:60]!r} at {start / length:.2f}"
            )
    if not looked:
        raise NotApplicable("no sample names its needle (metadata['needle']), and no answer stands in the text once")
    return None


def _start_of(needle: str, ids: Sequence[int], subject: Subject) -> int:
    """Number of tokens before `needle`, which is in the text of `ids`: the fewest tokens that hold it, less its own."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if needle in subject.decode(ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return max(0, low - len(subject.prompt.encode(needle)))


def right_answer_scores_1(subject: Subject) -> str | None:
    """The answer that is fed to the model scores 1 when the model writes it, its stop strings applied."""
    _with_references(subject)

    def problem(sample: Sample) -> str | None:
        text = whole = subject.decode(sample.answer_ids)
        for stop in subject.task.stop:
            text = text.partition(stop)[0]
        if (score := subject.task.score_text(sample, text).task_score) != 1:
            cut = f" (cut by a stop string to {text[:40]!r})" if text != whole else ""
            return f"scores {score:.3g} for its own answer {whole[:60]!r}{cut}"
        return None

    return subject.each(problem)


def empty_answer_scores_0(subject: Subject) -> str | None:
    """An empty text scores 0."""
    _with_references(subject)

    def problem(sample: Sample) -> str | None:
        score = subject.task.score_text(sample, "").task_score
        return f"scores {score:.3g} for an empty answer" if score else None

    return subject.each(problem)


def _with_references(subject: Subject) -> None:
    if not subject.made(subject.lengths[0])[0].references:
        raise NotApplicable("samples have no references, so nothing that a model writes can be scored")


def made_in_time(subject: Subject) -> str | None:
    """One sample of the longest context takes no longer than `SECONDS`; what is read once is not counted."""
    context = subject.context(subject.lengths[-1], samples=1)
    started = time.perf_counter()
    subject.make(context)
    seconds = time.perf_counter() - started
    return f"a sample of {subject.lengths[-1]} tokens takes {seconds:.1f} s" if seconds > SECONDS else None


CHECKS: dict[str, Callable[[Subject], str | None]] = {
    "makes its samples": makes_samples,
    "fits the context length": fits_the_length,
    "unique ids, in order": ids_are_unique,
    "clusters lie together": clusters_lie_together,
    "runs in both modes": runs_in_both_modes,
    "same seed, same samples": same_seed_same_samples,
    "same in other processes": same_in_other_processes,
    "number changes no sample": number_changes_no_sample,
    "seed changes samples": seed_changes_samples,
    "longer passages nest": passages_nest,
    "no special tokens": no_special_tokens,
    "metadata is JSON": metadata_is_json,
    "needle once, at its depth": needle_is_where_it_is_asked,
    "right answer scores 1": right_answer_scores_1,
    "empty answer scores 0": empty_answer_scores_0,
    "made in time": made_in_time,
}
"""Every check by what it says, in the order in which they run."""
