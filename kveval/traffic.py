"""A user's own requests, one JSON object a line: read, checked, measured in tokens, chosen by length.

    {"prompt": "...", "answer": "..."}
    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}], "answers": ["...", "..."],
     "id": "req-17", "cluster": "customer-4", "metric": "text_f1"}

The file is read line by line, as it is or gzipped. What stays in memory is a few numbers and the names of each request
(some hundred bytes), never its text: the text of the chosen ones is read again.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from kveval.errors import KvevalError, LengthError, TaskError
from kveval.identity import digest
from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, TaskContext, make_sample
from kveval.text_metrics import TEXT_METRICS, text_metric
from kveval.traffic_lines import Problem, Request, open_requests, parse_request, unreadable

__all__ = [
    "Lengths",
    "Requests",
    "Template",
    "encode_request",
    "measure",
    "read_requests",
    "scan_requests",
    "traffic_identity",
    "traffic_samples",
]

log = logging.getLogger(__name__)

Template = Literal["auto", "none"]
"""auto: the model's chat template; none: the prompt as plain text behind BOS."""


@dataclass(frozen=True)
class Requests:
    """Where the requests of a file are and what they are called. Request number i is on line `lines[i]`.

    Attributes:
        path: The file.
        digest: First 16 hex digits of sha256 over its bytes, unpacked where it is gzipped.
        lines: Line numbers, from 1.
        offsets: Where each line starts, in bytes of the unpacked file.
        characters: Of each request's prompt, and of its first answer.
        clusters: Number of each request's cluster.
        cluster_names: Name of each cluster, in the order of the file.
        metrics: The text metrics that lines ask for, in the order of the file.
    """

    path: Path
    digest: str
    lines: array[int] = field(repr=False)
    offsets: array[int] = field(repr=False)
    characters: tuple[array[int], array[int]] = field(repr=False)
    clusters: array[int] = field(repr=False)
    cluster_names: tuple[str, ...] = field(repr=False)
    metrics: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, chosen: Sequence[int]) -> Iterator[tuple[int, Request]]:
        """The requests with these numbers, with their numbers, in the order of the file."""
        with open_requests(self.path) as stream:
            for number in sorted(chosen):
                stream.seek(self.offsets[number])
                line = self.lines[number]
                parsed = parse_request(line, stream.readline())
                if isinstance(parsed, Problem):
                    raise parsed.error(self.path)
                yield number, parsed


@dataclass(frozen=True)
class Lengths:
    """Tokens of every request's prompt and first answer, in the order of `Requests`."""

    prompt: array[int] = field(repr=False)
    answer: array[int] = field(repr=False)


def scan_requests(path: Path) -> tuple[Requests, list[Problem]]:
    """Read a whole file once: where its requests are, and everything that is wrong with it.

    Raises:
        TaskError: the file can't be read at all, or holds no line.
    """
    hashed = hashlib.sha256()
    lines, offsets, clusters = array("q"), array("q"), array("q")
    characters = (array("q"), array("q"))
    seen: dict[str, int] = {}
    names: dict[str, int] = {}
    metrics: dict[str, None] = {}
    problems = []
    offset = 0
    with open_requests(path) as stream:
        for number, raw in enumerate(stream, start=1):
            hashed.update(raw)
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                continue
            request = parse_request(number, raw)
            if isinstance(request, Request) and request.id in seen:
                request = Problem(
                    number, f"the id {request.id!r} is that of line {seen[request.id]} too", "Give each its own."
                )
            if isinstance(request, Problem):
                problems.append(request)
                continue
            seen[request.id] = number
            lines.append(number)
            offsets.append(start)
            characters[0].append(sum(len(text) for _, text in request.turns))
            characters[1].append(len(request.answers[0]))
            clusters.append(names.setdefault(request.cluster, len(names)))
            if request.metric is not None:
                metrics[request.metric] = None
    if not lines and not problems:
        raise TaskError(
            f"{path.name} holds no request.", remedy='Write one a line: {"prompt": "...", "answer": "..."}.'
        )
    found = Requests(
        path, hashed.hexdigest()[:16], lines, offsets, characters, clusters, tuple(names), metrics=tuple(metrics)
    )
    return found, problems


def read_requests(path: Path) -> Requests:
    """The requests of a file in which nothing is wrong. Read once for as long as the file stays the same.

    Raises:
        TaskError: the file can't be read, or a line is broken: the first one, by file and line.
    """
    path = path.expanduser().resolve()
    try:
        stamp = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return _read_requests(path, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=4)
def _read_requests(path: Path, modified_ns: int, size: int) -> Requests:
    found, problems = scan_requests(path)
    if problems:
        error = problems[0].error(path)
        more = f" ({len(problems) - 1} more lines are broken; `kveval traffic check` lists them.)"
        raise TaskError(error.message, remedy=error.remedy + (more if len(problems) > 1 else ""))
    return found


def measure(requests: Requests, prompt: PromptTemplate, template: Template) -> Lengths:
    """Lengths of all requests in tokens. Kept for as long as the same requests are asked about.

    Raises:
        TaskError: a request that this model's chat template or tokenizer can't take, by file and line.
    """
    return _measure(_Key(requests), _Key(prompt), template)


@dataclass(frozen=True)
class _Key:
    """Stands for the very object: two tokenizers may have equal templates, and arrays have no hash."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.value is other.value


@lru_cache(maxsize=4)
def _measure(requests_key: _Key, prompt_key: _Key, template: Template) -> Lengths:
    requests: Requests = requests_key.value
    lengths = Lengths(array("q"), array("q"))
    for _, request in requests.read(range(len(requests))):
        prompt_ids, answer_ids = encode_request(request, prompt_key.value, template, requests.path)
        lengths.prompt.append(len(prompt_ids))
        lengths.answer.append(len(answer_ids))
    return lengths


def encode_request(
    request: Request, prompt: PromptTemplate, template: Template, path: Path
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of a request's prompt and of its first answer, which follows the assistant's header directly.

    Raises:
        TaskError: this model's chat template or tokenizer can't take the request; named by file and line.
    """
    text = request.turns[0][1]
    try:
        if template == "none" and request.is_chat:
            raise TaskError(
                "`messages` need a chat template, and the config says `template: none`.",
                remedy="Leave `template` out, or write the text as `prompt`.",
            )
        if template == "none":
            ids = prompt.bos_ids + prompt.encode(text)
        elif prompt.mode == "raw" and not request.is_chat:
            ids = prompt.head_ids + prompt.encode(text) + prompt.tail("", "")
        else:
            ids = prompt.conversation(request.turns)
        return ids, prompt.encode(request.answers[0])
    except KvevalError as error:
        raise TaskError(f"{path.name}:{request.line}: {error.message}", remedy=error.remedy) from error


def traffic_identity(path: Path, metric: str | None) -> dict[str, Any]:
    """What decides samples and scores: the file's content, and that of the metrics' own files; no path of either."""
    requests = read_requests(path)
    named = dict.fromkeys([*requests.metrics, *([metric] if metric else [])])
    own = [_metric_identity(name) for name in named if name not in TEXT_METRICS]
    return {"file": requests.digest, "metrics": own}


def _metric_identity(name: str) -> str:
    text_metric(name)
    file, _, function = name.rpartition(":")
    return f"{function}@{hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()[:16]}"


def traffic_samples(
    ctx: TaskContext, path: Path, *, template: Template, metric: str | None, per_cluster: int
) -> list[Sample]:
    """`ctx.samples` requests of the bucket (ctx.shorter, ctx.context_length], prompt and answer's room together.

    Clusters come in an order that the seed decides, each with at most `per_cluster` of its requests, so fewer samples
    are the beginning of more.

    Raises:
        TaskError: the file is broken, or the bucket holds too few requests.
    """
    if ctx.max_new_tokens is not None and ctx.max_new_tokens >= ctx.context_length:
        raise LengthError(
            f"max_new_tokens: {ctx.max_new_tokens} leaves no room for a request at a context length of "
            f"{ctx.context_length}.",
            remedy="Lower `max_new_tokens`, or ask for longer contexts.",
        )
    requests = read_requests(path)
    lengths = measure(requests, ctx.prompt, template)
    bucket = _bucket(requests, lengths, ctx)
    chosen = [number for group in _by_cluster(requests, bucket, ctx.seed) for number in group[:per_cluster]]
    if len(chosen) < ctx.samples:
        raise _too_few(requests, lengths, ctx, len(chosen), bucket, per_cluster)
    wanted = chosen[: ctx.samples]
    read = dict(requests.read(wanted))
    samples = []
    for index, number in enumerate(wanted):
        request = read[number]
        prompt_ids, answer_ids = encode_request(request, ctx.prompt, template, requests.path)
        samples.append(
            make_sample(
                ctx,
                index,
                prompt_ids,
                answer_ids,
                cluster=request.cluster,
                metadata={
                    "request": request.id,
                    "line": request.line,
                    "roles": [role for role, _ in request.turns] if template == "auto" else [],
                    "answer": request.answers[0],
                },
                references=request.answers,
                metric=request.metric or metric,
            )
        )
    return samples


def _bucket(requests: Requests, lengths: Lengths, ctx: TaskContext) -> list[int]:
    """Numbers of the requests in the context's bucket, in the order of the file.

    A reference answer longer than what the model may write can't be scored, so its request is in no bucket.
    """
    most = ctx.max_new_tokens
    fits = [number for number, answer in enumerate(lengths.answer) if most is None or answer <= most]
    if len(fits) < len(requests):
        log.warning(
            "%s: %d of %d requests have answers of more than max_new_tokens: %d, and are left out",
            requests.path.name,
            len(requests) - len(fits),
            len(requests),
            most,
        )
    return [
        n for n in fits if ctx.shorter < lengths.prompt[n] + ctx.answer_room(lengths.answer[n]) <= ctx.context_length
    ]


def _by_cluster(requests: Requests, numbers: Sequence[int], seed: int) -> list[list[int]]:
    """The requests grouped by cluster; clusters, and requests within one, in an order that the seed decides."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(requests.clusters[number], []).append(number)
    order = sorted(groups, key=lambda cluster: digest("traffic-cluster", [seed, requests.cluster_names[cluster]]))
    return [sorted(groups[c], key=lambda n: digest("traffic-request", [seed, requests.lines[n]])) for c in order]


def _too_few(
    requests: Requests, lengths: Lengths, ctx: TaskContext, usable: int, bucket: Sequence[int], per_cluster: int
) -> TaskError:
    most = ctx.max_new_tokens
    totals = [
        prompt + (answer if most is None else most)
        for prompt, answer in zip(lengths.prompt, lengths.answer, strict=True)
        if most is None or answer <= most
    ]
    groups = {requests.clusters[number] for number in bucket}
    at_most = f" ({usable} with per_cluster: {per_cluster})" if usable < len(bucket) else ""
    below, above = sum(t <= ctx.shorter for t in totals), sum(t > ctx.context_length for t in totals)
    ways = [f"set `samples: {usable}` for this task"] if usable else []
    ways += ["raise `per_cluster`"] if len(bucket) >= ctx.samples else []
    ways += ["run other `context_lengths`", "add requests of that length"]
    return TaskError(
        f"{requests.path.name} has {len(bucket)} requests of {ctx.shorter + 1} to {ctx.context_length} tokens, in "
        f"{len(groups)} clusters{at_most}; {ctx.samples} are asked for. {below} are shorter, {above} longer.",
        remedy=f"You can {', or '.join(ways)}. `kveval traffic check` counts them.",
    )
