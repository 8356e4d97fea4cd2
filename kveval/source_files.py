"""Python files as one running text, and the places in them that a code task asks about.

The files of a corpus stand one behind the other, each below a comment with its name:

    # file: shapes/circle.py
    class Circle: ...

The text is a ring: before its first file comes its last one. Offsets are in characters.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from kveval.corpora import BLOCK_CHARS, Corpus, CorpusName, Encode, ids_before, load_corpus
from kveval.errors import TaskError
from kveval.identity import digest
from kveval.tasks import TaskParams

__all__ = ["Definition", "SourceParams", "SourceText", "definitions", "source_text", "statements"]

_CLUE_CHARS = range(16, 101)
_NAME_CHARS = range(8, 51)
_LINE_CHARS = 100
_LEAST_CHARS = 12
_WORD_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


class SourceParams(TaskParams):
    """`corpus`: where the Python files come from."""

    corpus: CorpusName = "python-code"

    def identity(self) -> dict[str, Any]:
        """Names of files are part of the prompts here, so they are part of the identity."""
        return super().identity() | {"files": digest("files", load_corpus(self.corpus).names)}


@dataclass(frozen=True)
class SourceText:
    """All files of a corpus as a ring of text; `starts[i]` is where the text of document i begins."""

    corpus: Corpus
    text: str
    starts: tuple[int, ...]

    def before(self, encode: Encode, end: int, count: int, *, kept: int, task: str) -> tuple[tuple[int, ...], int]:
        """The `count` tokens before `end`, and the number of characters read for them.

        Args:
            encode: Tokens of a piece of text.
            end: Offset behind the last character that is read.
            count: In tokens.
            kept: Characters from `end` on that belong to the sample already.
            task: The task's name, for the error.

        Raises:
            TaskError: the text is too short.
        """
        ids, read = ids_before(encode, self.text, end, count, chars=len(self.text) - kept)
        if len(ids) < count:
            raise TaskError(
                f"the text source {self.corpus.name!r} is too short: {count} tokens are needed before a place in it, "
                f"it has {len(ids)}; {task} never repeats text.",
                remedy="Name more Python files, such as file:<folder>/**/*.py, or ask for shorter contexts.",
            )
        return ids, read

    def lines_after(self, encode: Encode, start: int, most: int) -> tuple[tuple[int, ...], int]:
        """As many whole lines from `start` on as `most` tokens hold, and their number of characters."""
        ids: list[int] = []
        read = 0
        for block in _line_blocks(self.text, start):
            piece = encode(block)
            if len(ids) + len(piece) > most:
                room = most - len(ids)
                ends = [match.end() for match in re.finditer("\n", block)]
                fitting = bisect_left(ends, True, key=lambda end: len(encode(block[:end])) > room)
                block = block[: ends[fitting - 1]] if fitting else ""
                return (*ids, *encode(block)), read + len(block)
            ids += piece
            read += len(block)
        return tuple(ids), read

    def part(self, start: int, end: int) -> str:
        """The ring from `start`, which may be negative, to `end`, which may lie beyond its length; no text twice."""
        size = len(self.text)
        if end - start >= size:
            return self.text
        if start < 0:
            return self.text[start:] + self.text[: max(0, end)]
        return self.text[start:end] + self.text[: max(0, end - size)]


def _line_blocks(text: str, start: int) -> Iterator[str]:
    """The ring from `start` on in blocks of whole lines; a line longer than `BLOCK_CHARS` is a block."""
    for part in (text[start:], text[:start]):
        at = 0
        while at < len(part):
            end = part.rfind("\n", at, at + BLOCK_CHARS) + 1 or part.find("\n", at) + 1 or len(part)
            yield part[at:end]
            at = end


@lru_cache(maxsize=2)
def source_text(corpus: Corpus) -> SourceText:
    """The files of a corpus behind one another, each below a comment with its name."""
    names = corpus.names or tuple(f"part_{number:05d}.py" for number in range(len(corpus.documents)))
    pieces: list[str] = []
    starts: list[int] = []
    length = 0
    for name, document in zip(names, corpus.documents, strict=True):
        head = f"# file: {name}\n"
        starts.append(length + len(head))
        pieces += [head, document, "\n\n\n"]
        length += len(head) + len(document) + 3
    return SourceText(corpus, "".join(pieces), tuple(starts))


# --- what can be asked about a file ------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """A definition whose name occurs once in its file, with something that tells it from all others.

    Attributes:
        kind: What it defines.
        name: The identifier, of several words that the clue doesn't all hold, so that it is no guess.
        clue: One line of the file that occurs once in it: the docstring's first one, or a constant's value.
        start: Offset in the file of the line with the name.
        end: Offset behind the line with the clue.
    """

    kind: Literal["function", "method", "class", "constant"]
    name: str
    clue: str
    start: int
    end: int


@lru_cache(maxsize=4096)
def definitions(code: str) -> tuple[Definition, ...]:
    """The definitions of a file that can be asked for, in their order; none if it isn't Python."""
    lines = _line_starts(code)
    found = []
    for parent, node in _nodes(code):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if isinstance(node, ast.ClassDef):
                    kind: Literal["function", "method", "class", "constant"] = "class"
                else:
                    kind = "method" if isinstance(parent, ast.ClassDef) else "function"
                clue = (ast.get_docstring(node, clean=False) or "").strip().partition("\n")[0].strip()
                definition = _definition(code, kind, node.name, clue, lines[node.lineno - 1])
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper() and node.lineno == node.end_lineno:
                start = lines[node.lineno - 1]
                clue = code[start : lines[node.lineno]].partition("=")[2].strip()
                definition = _definition(code, "constant", name, clue, start)
            case _:
                continue
        if definition is not None:
            found.append(definition)
    return tuple(sorted(found, key=lambda definition: definition.start))


def _definition(
    code: str, kind: Literal["function", "method", "class", "constant"], name: str, clue: str, start: int
) -> Definition | None:
    words = [word.lower() for word in _WORD_OF_NAME.findall(name)]
    told = sum(word in clue.lower() for word in words)
    fits = len(name) in _NAME_CHARS and len(clue) in _CLUE_CHARS and "\n" not in clue
    if not fits or name.startswith("__") or len(words) < 2 or told == len(words):
        return None
    at = code.find(clue, start)
    # An escape in a docstring is spelled in another way in the file; such a clue isn't found.
    if at < 0 or code.count(clue) != 1 or code.count(name) != 1:
        return None
    end = code.find("\n", at) + 1 or len(code)
    return Definition(kind, name, clue, start, end)


@lru_cache(maxsize=4096)
def statements(code: str, lines: int) -> tuple[tuple[int, int], ...]:
    """Where a statement of a function begins that is worth completing, with `lines` lines of code to write.

    Imports, docstrings and short statements are left out, and so are the first third of the file, where little stands
    before them, and blank or very long lines in the answer or blank ones before it.

    Returns:
        (start, end) offsets of the answers: from the beginning of a line to the end of the last one, its newline
        excluded.
    """
    starts = _line_starts(code)
    shown = code.split("\n")
    found: dict[tuple[int, int], None] = {}
    for node in _function_statements(code):
        first = node.lineno - 1
        answer = shown[first : first + lines]
        if first * 3 < len(shown) or len(answer) < lines or any(len(line) > _LINE_CHARS for line in answer):
            continue
        if len(answer[0].strip()) >= _LEAST_CHARS and all(line.strip() for line in (shown[first - 1], *answer)):
            found[starts[first], starts[first] + len("\n".join(answer))] = None
    return tuple(sorted(found))


def _function_statements(code: str) -> Iterator[ast.stmt]:
    for _, function in _nodes(code):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in function.body:
                for node in ast.walk(part):
                    spoken = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                    if isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)) and not spoken:
                        yield node


def _nodes(code: str) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(parent, node) for every node of a file; nothing if it isn't Python of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in somebody's file
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            yield parent, node


def _line_starts(code: str) -> list[int]:
    """Offsets of the lines, as Python counts them: a form feed begins none."""
    return [0, *(match.end() for match in re.finditer("\n", code))]
