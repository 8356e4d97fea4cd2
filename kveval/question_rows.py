r"""Questions with the documents that answer them, from a user's own rows.

    file:<path>                             a JSONL file, one object a line
    datasets:<name>[:config[:split]]        a Hugging Face dataset (split: train unless given)

A row has a question, one or more right answers and a context, in columns that the task names:

    question    text
    answers     text, a list of texts, or {"text": [...]} as in SQuAD
    context     text, a list of texts, or {"title": [...], "sentences": [[...], ...]} as in HotpotQA
    supporting  optional; the titles of the documents that are needed, as a list or {"title": [...]}; the rest distracts
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kveval.corpora import dataset_rows
from kveval.errors import TaskError, UnknownNameError
from kveval.identity import digest

__all__ = ["Columns", "Row", "check_rows_name", "load_rows", "rows_identity"]


@dataclass(frozen=True)
class Columns:
    """Names of a row's columns; `supporting` None: every document of the context is needed."""

    question: str = "question"
    answers: str = "answers"
    context: str = "context"
    supporting: str | None = None


@dataclass(frozen=True)
class Row:
    """A question, its right answers, the documents that it needs, and documents that only came with it."""

    question: str
    answers: tuple[str, ...]
    needed: tuple[str, ...]
    others: tuple[str, ...]


def check_rows_name(spec: str) -> str:
    """The name itself if it is well formed (nothing is read); else UnknownNameError."""
    if not any(spec.startswith(prefix) and len(spec) > len(prefix) for prefix in ("file:", "datasets:")):
        raise UnknownNameError("source of rows", spec, ["file:<path>", "datasets:<name>[:config[:split]]"])
    return spec


def load_rows(spec: str, columns: Columns) -> tuple[Row, ...]:
    """The rows that a config names.

    Raises:
        TaskError: they can't be read, or a row lacks a column or has another kind of value there.
    """
    if spec.startswith("datasets:"):
        return _dataset_rows(spec, columns)
    path = Path(spec.removeprefix("file:")).expanduser()
    if not path.is_file():
        raise TaskError(
            f"there is no file {str(path)!r}.", remedy="Give the path of a JSONL file, as file:questions.jsonl."
        )
    stamp = path.stat()
    return _file_rows(path, (stamp.st_mtime_ns, stamp.st_size), columns)


def rows_identity(spec: str, columns: Columns) -> dict[str, str]:
    """Plain data that decides the rows: the name without folders, and a digest of their content."""
    name = f"file:{Path(spec).name}" if spec.startswith("file:") else spec
    rows = [[row.question, row.answers, row.needed, row.others] for row in load_rows(spec, columns)]
    return {"name": name, "digest": digest("question-rows", rows)}


@lru_cache(maxsize=8)
def _file_rows(path: Path, stamp: tuple[int, int], columns: Columns) -> tuple[Row, ...]:
    """`stamp` is part of the cache's key alone: an edited file is read again."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{path.name} is not UTF-8 text (byte {error.start}).", remedy="Convert it to UTF-8."
        ) from error
    rows = []
    for number, line in enumerate(re.split(r"\r?\n", text), 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{where}: not JSON: {error.msg}.", remedy="Write one JSON object a line.") from error
        rows.append(_row(data, columns, where))
    return _some(rows, path.name)


@lru_cache(maxsize=8)
def _dataset_rows(spec: str, columns: Columns) -> tuple[Row, ...]:
    # A colon in brackets belongs to the split ("train[:100]").
    parts = re.split(r":(?![^\[\]]*\])", spec)[1:]
    if len(parts) > 3:
        raise TaskError(f"{spec!r} has too many parts.", remedy="Write datasets:<name>[:config[:split]].")
    name, config, split = [*parts, "", ""][:3]
    found: Iterable[Any] = dataset_rows(name, config or None, split or "train")
    return _some([_row(data, columns, f"row {number} of {name}") for number, data in enumerate(found)], name)


def _some(rows: list[Row], name: str) -> tuple[Row, ...]:
    if not rows:
        raise TaskError(f"{name} has no rows.", remedy="Name a source with at least one question.")
    return tuple(rows)


def _row(data: Any, columns: Columns, where: str) -> Row:
    if not isinstance(data, Mapping):
        raise TaskError(f"{where}: not an object with columns.", remedy="Write one JSON object a line.")

    def column(name: str) -> Any:
        if name not in data:
            raise TaskError(
                f"{where}: no column {name!r}; there are {', '.join(map(str, data))}.",
                remedy="Name the columns with `question`, `answers` and `context` in the task.",
            )
        return data[name]

    answers = column(columns.answers)
    documents = _documents(column(columns.context), f"{where}, column {columns.context!r}")
    needed = list(range(len(documents)))
    if columns.supporting is not None:
        titles = column(columns.supporting)
        titles = _texts(titles["title"] if isinstance(titles, Mapping) and "title" in titles else titles, where)
        needed = [i for i, (title, _) in enumerate(documents) if title in titles]
        if not needed:
            raise TaskError(
                f"{where}: column {columns.supporting!r} names no title of the context.",
                remedy="Give the context as titles and sentences, or leave `supporting` out.",
            )
    texts = [text for _, text in documents]
    return Row(
        question=_text(column(columns.question), f"{where}, column {columns.question!r}"),
        answers=_texts(
            answers["text"] if isinstance(answers, Mapping) and "text" in answers else answers,
            f"{where}, column {columns.answers!r}",
        ),
        needed=tuple(texts[i] for i in needed),
        others=tuple(text for i, text in enumerate(texts) if i not in needed),
    )


def _documents(value: Any, where: str) -> list[tuple[str, str]]:
    """(title, text) of each document; the title is empty where there is none. Blank lines stand between documents."""
    if isinstance(value, Mapping) and {"title", "sentences"} <= set(value):
        titles = _texts(value["title"], where)
        if len(titles) != len(value["sentences"]):
            raise TaskError(f"{where}: as many titles as lists of sentences are needed.", remedy="Mend the row.")
        pairs = zip(titles, value["sentences"], strict=True)
        found = [(title, f"{title}\n{''.join(_texts(sentences, where))}") for title, sentences in pairs]
    else:
        found = [("", text) for text in _texts(value, where)]
    return [(title, re.sub(r"\s*\n\s*\n\s*", "\n", text.replace("\r\n", "\n")).strip()) for title, text in found]


def _texts(value: Any, where: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not values:
        raise TaskError(f"{where}: neither text nor a list of texts, but {value!r:.60}.", remedy="See the task's docs.")
    return tuple(_text(item, where) for item in values)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"{where}: no text, but {value!r:.60}.", remedy="Give text that isn't blank.")
    return value
