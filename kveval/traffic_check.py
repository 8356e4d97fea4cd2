"""What a file of requests holds: how many for each context length, what would not fit, which lines are broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

from kveval.errors import TaskError
from kveval.models import ModelSpec, load_tokenizer
from kveval.prompting import ChatMode, PromptTemplate
from kveval.traffic import Requests, Template, encode_request, scan_requests
from kveval.traffic_lines import Problem

__all__ = ["Bucket", "TrafficCheck", "check_traffic"]


@dataclass(frozen=True)
class Span:
    """Least, median (the lower one of two) and largest of some lengths."""

    least: int
    median: int
    most: int


@dataclass(frozen=True)
class Bucket:
    """Requests that run at one context length.

    They have more than `above` and at most `context_length` tokens, the answer's room included. Prompt and answer are
    in tokens, or in characters where no model counts; None: there is no request.
    """

    label: str
    above: int
    context_length: int | None
    requests: int
    clusters: int
    prompt: Span | None
    answer: Span | None


@dataclass(frozen=True)
class TrafficCheck:
    """What `kveval traffic check` found.

    Attributes:
        name: The file's name, without folders.
        digest: Of its content; what decides the samples.
        requests: Lines that are whole.
        clusters: Theirs.
        in_tokens: Whether a model counted; else there are no buckets, and lengths are in characters.
        buckets: One per context length, ascending.
        unfit: Reason -> lines of the requests that no bucket holds.
        problems: The broken lines.
    """

    name: str
    digest: str
    requests: int
    clusters: int
    in_tokens: bool
    buckets: tuple[Bucket, ...]
    unfit: dict[str, list[int]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def check_traffic(
    path: Path,
    *,
    model: ModelSpec | None,
    lengths: Sequence[int],
    max_new_tokens: int | None = None,
    template: Template = "auto",
    chat_template: ChatMode = "auto",
) -> TrafficCheck:
    """Read a whole file of requests and measure them.

    Args:
        path: The file.
        model: Whose tokenizer counts; None: characters are counted, and there are no buckets.
        lengths: Context lengths in tokens, ascending.
        max_new_tokens: Tokens kept free for the answer that a model writes; None: the reference answer's own.
        template: As the task's parameter.
        chat_template: As the model's in a sweep.

    Raises:
        KvevalError: the file or the model can't be read.
    """
    requests, problems = scan_requests(path)
    name, clusters = path.name, len(requests.cluster_names)
    if model is None:
        row = _bucket("all", 0, None, requests, range(len(requests)), requests.characters)
        return TrafficCheck(
            name, requests.digest, len(requests), clusters, False, (row,) if len(requests) else (), {}, tuple(problems)
        )
    prompt = PromptTemplate.from_tokenizer(load_tokenizer(model), chat_template)
    tokens, refused = _measure(requests, prompt, template)
    total = {n: p + (a if max_new_tokens is None else max_new_tokens) for n, (p, a) in tokens.items()}
    wordy = [n for n, (_, a) in tokens.items() if max_new_tokens is not None and a > max_new_tokens]
    unfit: dict[str, list[int]] = {}
    if wordy:
        unfit[f"with an answer of more than {max_new_tokens:,} tokens (max_new_tokens)"] = [
            requests.lines[n] for n in wordy
        ]
    out = set(wordy)
    long = [n for n in total if total[n] > lengths[-1] and n not in out]
    if long:
        unfit[f"of more than {lengths[-1]:,} tokens (nothing is cut)"] = [requests.lines[n] for n in long]
    buckets = []
    for above, length in zip((0, *lengths), lengths, strict=False):
        inside = [n for n in total if above < total[n] <= length and n not in out]
        columns = tuple({n: tokens[n][side] for n in inside} for side in (0, 1))
        buckets.append(_bucket(f"{length:,}", above, length, requests, inside, columns))
    broken = tuple(sorted([*problems, *refused], key=lambda problem: problem.line))
    return TrafficCheck(name, requests.digest, len(requests), clusters, True, tuple(buckets), unfit, broken)


def _measure(
    requests: Requests, prompt: PromptTemplate, template: Template
) -> tuple[dict[int, tuple[int, int]], list[Problem]]:
    """Tokens of prompt and first answer by request, and the requests that this model can't take."""
    tokens, refused = {}, []
    for number, request in requests.read(range(len(requests))):
        try:
            prompt_ids, answer_ids = encode_request(request, prompt, template, requests.path)
        except TaskError as error:
            plain = error.message.removeprefix(f"{requests.path.name}:{request.line}: ").removesuffix(".")
            refused.append(Problem(request.line, plain, error.remedy))
        else:
            tokens[number] = len(prompt_ids), len(answer_ids)
    return tokens, refused


def _bucket(
    label: str, above: int, length: int | None, requests: Requests, inside: Sequence[int], columns: Any
) -> Bucket:
    prompts, answers = ([column[n] for n in inside] for column in columns)
    return Bucket(
        label,
        above,
        length,
        requests=len(inside),
        clusters=len({requests.clusters[n] for n in inside}),
        prompt=_span(prompts),
        answer=_span(answers),
    )


def _span(numbers: Sequence[int]) -> Span | None:
    return Span(min(numbers), median_low(numbers), max(numbers)) if numbers else None
