"""One line of a file of requests: read, checked, and what is wrong with it said.

The formats of a line are in `kveval.traffic`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from kveval.errors import KvevalError, TaskError
from kveval.text_metrics import TEXT_METRICS, text_metric

__all__ = ["Problem", "Request", "open_requests", "parse_request", "unreadable"]

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


def unreadable(path: Path, error: Exception) -> TaskError:
    """The error of a file that the system refuses to give."""
    why = getattr(error, "strerror", None) or str(error)
    return TaskError(f"can't read {path}: {why}.", remedy="Name a JSONL file, as it is or gzipped, that is whole.")


@contextmanager
def open_requests(path: Path) -> Iterator[BinaryIO]:
    """The file's unpacked bytes; whatever goes wrong while they are read is a TaskError."""
    try:
        with open(path, "rb") as plain:
            packed = plain.read(2) == _GZIP
        with gzip.open(path, "rb") if packed else open(path, "rb") as stream:
            yield cast(BinaryIO, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def parse_request(number: int, raw: bytes) -> Request | Problem:
    """The request on line `number` of a file, from its bytes, or what is wrong with it."""
    try:
        text = raw.removeprefix(_BOM if number == 1 else b"").decode("utf-8")
        value = json.loads(text.rstrip("\r\n"), object_pairs_hook=_no_repeats, parse_constant=_no_constant)
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
