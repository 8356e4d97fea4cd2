"""A user's own requests, one JSON object a line: read, checked, measured in tokens, chosen by length.

    {"prompt": "...", "answer": "..."}
    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}], "answers": ["...", "..."],
     "id": "req-17", "cluster": "customer-4", "metric": "text_f1"}

The file is read line by line, as it is or gzipped. What stays in memory is a few numbers and the names of each request
(some hundred bytes), never its text: the text of the chosen ones is read again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from kveval.errors import KvevalError, TaskError
from kveval.identity import digest
from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, TaskContext, make_sample
from kveval.text_metrics import TEXT_METRICS, text_metric

__all__ = [
    "Lengths",
    "Problem",
    "Request",
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

ROLES = ("system", "user", "assistant")
KEYS = ("prompt", "messages", "answer", "answers", "id", "cluster", "metric")

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Request:
    """One line of the file.

    Attributes:
        line: Its number, from 1.
        id: Unique in the file; `line-17` where it has none.
        cluster: Requests that belong together (a customer, a document) share it; the id where it has none.
        turns: (role, content) of each message.
        is_chat: Whether the line has `messages`: then there is no way to read it without a chat template.
        answers: Right answers; the first one is fed to the model, what the model writes is held against all.
        metric: The line's own text metric.
    """

    line: int
    id: str
    cluster: str
    turns: tuple[tuple[str, str], ...] = field(repr=False)
    is_chat: bool
    answers: tuple[str, ...] = field(repr=False)
    metric: str | None = None


@dataclass(frozen=True)
class Problem:
    """What is wrong with a line."""

    line: int
    message: str
    remedy: str

    def error(self, path: Path) -> TaskError:
        """The problem as an error that names file and line."""
        return TaskError(f"{path.name}:{self.line}: {self.message}.", remedy=self.remedy)


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
        with _opened(self.path) as stream:
            for number in sorted(chosen):
                stream.seek(self.offsets[number])
                line = self.lines[number]
                parsed = _parse(line, stream.readline())
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
    with _opened(path) as stream:
        for number, raw in enumerate(stream, start=1):
            hashed.update(raw)
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                continue
            request = _parse(number, raw)
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
        raise _unreadable(path, error) from error
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


# --- reading a line ----------------------------------------------------------------------------------


def _unreadable(path: Path, error: Exception) -> TaskError:
    why = getattr(error, "strerror", None) or str(error)
    return TaskError(f"can't read {path}: {why}.", remedy="Name a JSONL file, as it is or gzipped, that is whole.")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's unpacked bytes; whatever goes wrong while they are read is a TaskError."""
    try:
        with open(path, "rb") as plain:
            packed = plain.read(2) == _GZIP
        with gzip.open(path, "rb") if packed else open(path, "rb") as stream:
            yield cast(BinaryIO, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _parse(number: int, raw: bytes) -> Request | Problem:
    try:
        text = raw.removeprefix(_BOM if number == 1 else b"").decode("utf-8")
        value = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
        return _request(number, value)
    except UnicodeDecodeError as error:
        return Problem(number, f"byte {error.start + 1} of the line is not UTF-8", "Convert the file to UTF-8.")
    except json.JSONDecodeError as error:
        return Problem(number, f"no JSON: {error.msg} (column {error.colno})", "Write one JSON object a line.")
    except ValueError as error:  # a number of thousands of digits
        return Problem(number, f"no JSON: {error}", "Write texts as strings.")
    except RecursionError:
        return Problem(number, "no request: nested too deeply", "Write one JSON object a line.")
    except _Wrong as wrong:
        return Problem(number, wrong.message, wrong.remedy)


class _Wrong(Exception):  # noqa: N818 - a finding on its way to a Problem, never seen outside
    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Wrong(f"the key {key!r} appears twice", "Keep one of them.")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise _Wrong(f"{name} is no JSON", "Write texts as strings.")


def _request(number: int, value: Any) -> Request:
    if not isinstance(value, dict):
        raise _Wrong("the line is not a JSON object", 'Write {"prompt": "...", "answer": "..."}.')
    unknown = [key for key in value if key not in KEYS]
    if unknown:
        raise _Wrong(f"unknown key {unknown[0]!r}", f"Known: {', '.join(KEYS)}.")
    if ("prompt" in value) == ("messages" in value):
        have = "both `prompt` and `messages`" if "prompt" in value else "neither `prompt` nor `messages`"
        raise _Wrong(f"the request has {have}", "Give it one of the two.")
    if ("answer" in value) == ("answers" in value):
        have = "both `answer` and `answers`" if "answer" in value else "neither `answer` nor `answers`"
        raise _Wrong(f"the request has {have}", "Give it one of the two: what a right reply says.")
    turns = _turns(value["messages"]) if "messages" in value else (("user", _text(value["prompt"], "prompt")),)
    name = _name(value["id"], "id") if "id" in value else f"line-{number}"
    return Request(
        line=number,
        id=name,
        cluster=_name(value["cluster"], "cluster") if "cluster" in value else name,
        turns=turns,
        is_chat="messages" in value,
        answers=_answers(value),
        metric=_metric(value["metric"]) if "metric" in value else None,
    )


def _turns(messages: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise _Wrong("`messages` is not a list of messages", 'Write [{"role": "user", "content": "..."}].')
    turns = []
    for place, message in enumerate(messages):
        at = f"messages[{place}]"
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise _Wrong(f"{at} has not the keys `role` and `content` alone", "Write them, and nothing else.")
        if message["role"] not in ROLES:
            raise _Wrong(f"{at} has the role {message['role']!r}", f"Known: {', '.join(ROLES)}.")
        turns.append((message["role"], _text(message["content"], f"{at}.content")))
    if turns[-1][0] != "user":
        raise _Wrong(
            f"the last message is the {turns[-1][0]}'s", "End with the user's; the reply to it belongs into `answer`."
        )
    return tuple(turns)


def _answers(value: Mapping[str, Any]) -> tuple[str, ...]:
    if "answer" in value:
        return (_text(value["answer"], "answer"),)
    answers = value["answers"]
    if not isinstance(answers, list) or not answers:
        raise _Wrong("`answers` is not a list of texts", 'Write ["...", "..."]: one text at least.')
    return tuple(_text(text, f"answers[{place}]") for place, text in enumerate(answers))


def _metric(name: Any) -> str:
    if not isinstance(name, str):
        raise _Wrong("`metric` is not a name", f"Known: {', '.join(TEXT_METRICS)}, file.py:function.")
    try:
        text_metric(name)
    except KvevalError as error:
        raise _Wrong(error.message.removesuffix("."), error.remedy) from error
    return name


def _name(value: Any, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise _Wrong(f"`{key}` is {value!r}", "Write a name or a whole number.")
    return str(value)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"`{key}` is not a text", "Write a string; images and other parts are not supported.")
    if not value.strip():
        raise _Wrong(f"`{key}` is empty", "Write its text, or leave the line out.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _Wrong(f"`{key}` holds half of a surrogate pair", "Write the whole character.") from None
    return value
