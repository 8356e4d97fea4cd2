"""Text sources behind one interface: generated, from the running Python, from files or datasets.

    noise                                            short generated sentences, repeated
    prose, python-docs                               the reference prose that Python carries (pydoc)
    python-code                                      the standard library's own source files
    file:<path or glob>                              UTF-8 text files, one document each
    datasets:<name>[:config[:split[:column]]]        a column of a Hugging Face dataset, one document a row

No text lies in the repository. A corpus has a digest of its content, and the interpreter's version
where the text comes from it: the same name can be another text on another machine.
"""

from __future__ import annotations

import glob
import hashlib
import platform
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from kveval.errors import TaskError, UnknownNameError

__all__ = [
    "CORPUS_FIELD",
    "Corpus",
    "CorpusName",
    "load_corpus",
    "rotation_blocks",
    "split_sentences",
]

MAX_UNIT_CHARS: Final = 400
"""Longest sentence, in characters: longer ones are cut, so a needle can be placed anywhere."""

NOISE: Final = (
    "Green grass grows beside the road.",
    "Blue sky hangs over the hills.",
    "A yellow sun shines all day.",
    "On we go again.",
    "Out we walk and home we come.",
)

_NAMES: Final = ("noise", "prose", "python-docs", "python-code")
_PREFIXES: Final = ("file:", "datasets:")
_SKIPPED_FOLDERS: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)


@dataclass(frozen=True)
class Corpus:
    """A text source.

    Attributes:
        name: The name without folders: a corpus is the same wherever its files lie.
        documents: The texts, in a fixed order; at least one, and none blank.
        joiner: What stands between two units of a haystack: a space, or a newline for code.
        interpreter: Python's version where the text comes with it, else empty.
    """

    name: str
    documents: tuple[str, ...] = field(repr=False)
    joiner: str = " "
    interpreter: str = ""

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of sha256 over every document, with its length."""
        digest = hashlib.sha256()
        for text in self.documents:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(f"{len(data)}:".encode() + data)
        return digest.hexdigest()[:16]

    def identity(self) -> dict[str, str]:
        """Plain data that decides the text: name, digest, interpreter where relevant."""
        identity = {"name": self.name, "digest": self.digest}
        if self.interpreter:
            identity["python"] = self.interpreter
        return identity

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The units of a haystack: sentences of prose, lines of code. None is empty."""
        if self.joiner == "\n":
            lines = (line.rstrip() for text in self.documents for line in text.splitlines())
            return tuple(piece for line in lines if line for piece in _cut_giant(line))
        return tuple(unit for text in self.documents for unit in split_sentences(text))

    @cached_property
    def text(self) -> str:
        """All documents as one running text, blank lines between them."""
        return "\n\n".join(self.documents)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Character offsets in `text` where reading may begin, ascending.

        Paragraphs, else lines, else words: the coarsest that offers at least 64 places, else the one
        that offers most.
        """
        finest: tuple[int, ...] = ()
        for before in (r"\A\s*|\n\s*\n", r"\A\s*|\n", r"\A\s*|\s+"):
            places = tuple(m.end() for m in re.finditer(rf"(?:{before})(?=\S)", self.text))
            if len(places) >= 64:
                return places
            finest = max(finest, places, key=len)
        return finest


def load_corpus(spec: str) -> Corpus:
    """The corpus that a config names.

    Raises:
        UnknownNameError: no such source, with suggestions.
        TaskError: the files or the dataset can't be read, or hold no text.
    """
    check_corpus_name(spec)
    if spec.startswith("file:"):
        paths = _matching_files(spec.removeprefix("file:"))
        # The stamps are part of the key of the cache: an edited file is read again.
        stamps = tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths)
        return _file_corpus(stamps)
    return _named_corpus(spec)


def check_corpus_name(spec: str) -> str:
    """The name itself if it is well formed (its text isn't read); else UnknownNameError."""
    known = spec in _NAMES or any(spec.startswith(p) and len(spec) > len(p) for p in _PREFIXES)
    if not known:
        names = [*_NAMES, "file:<path or glob>", "datasets:<name>[:config[:split[:column]]]"]
        raise UnknownNameError("text source", spec, names)
    return spec


CORPUS_FIELD: Final = "kveval: names a text source"
CorpusName = Annotated[str, AfterValidator(check_corpus_name), CORPUS_FIELD]
"""Type of a task parameter that names a text source; its content's digest joins the task's identity."""


@lru_cache(maxsize=8)
def _named_corpus(spec: str) -> Corpus:
    if spec == "noise":
        return Corpus("noise", (" ".join(NOISE),))
    if spec in ("prose", "python-docs"):
        return _python_docs()
    if spec == "python-code":
        return _python_code()
    return _dataset(spec)


def _python_docs() -> Corpus:
    from pydoc_data.topics import topics  # 0.7 MB: read when asked for

    documents = tuple(topics[name] for name in sorted(topics))
    return Corpus("python-docs", documents, interpreter=platform.python_version())


def _python_code() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    )
    documents = []
    for path in paths:
        with tokenize.open(path) as file:  # honours the file's own encoding line
            documents.append(file.read())
    texts = tuple(text for text in documents if text.strip())
    return Corpus("python-code", texts, joiner="\n", interpreter=platform.python_version())


def _matching_files(pattern: str) -> list[Path]:
    found = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    files = [path for path in map(Path, found) if path.is_file()]
    if not files:
        raise TaskError(
            f"no file matches {pattern!r}.",
            remedy="Give a path or a glob relative to the current folder, such as file:texts/*.txt.",
        )
    return files


@lru_cache(maxsize=8)
def _file_corpus(stamps: tuple[tuple[str, int, int], ...]) -> Corpus:
    documents = []
    for name, _, _ in stamps:
        path = Path(name)
        try:
            # utf-8-sig takes off a byte-order mark, which is no text.
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise TaskError(
                f"{path.name} is not UTF-8 text (byte {error.start}).", remedy="Convert it to UTF-8."
            ) from error
        if not text.strip():
            raise TaskError(f"{path.name} is empty.", remedy="Name files with text.")
        documents.append(_plain_newlines(text))
    first = Path(stamps[0][0])
    name = first.name if len(stamps) == 1 else f"{len(stamps)} files from {first.name}"
    joiner = "\n" if all(Path(stamp[0]).suffix == ".py" for stamp in stamps) else " "
    return Corpus(f"file:{name}", tuple(documents), joiner=joiner)


def _dataset(spec: str) -> Corpus:
    name, config, split, column = _parse_dataset(spec)
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            f"{spec!r} needs the package `datasets`, which is not installed.",
            remedy="pip install 'kveval[datasets]', or use file:<path>.",
        ) from error
    try:
        rows: Any = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TaskError(
            f"the dataset {name!r} (config {config}, split {split}) can't be loaded: {error}",
            remedy="Check the name; without a network, load it once with one, or use file:<path>.",
        ) from error
    if column not in rows.column_names:
        raise TaskError(
            f"the dataset {name!r} has no column {column!r}.",
            remedy=f"Write datasets:{name}:{config or ''}:{split}:<column>; columns: {', '.join(rows.column_names)}.",
        )
    documents = tuple(_plain_newlines(str(text)) for text in rows[column] if str(text).strip())
    if not documents:
        raise TaskError(
            f"column {column!r} of the dataset {name!r} holds no text.", remedy="Name another column or split."
        )
    return Corpus(spec, documents)


def _parse_dataset(spec: str) -> tuple[str, str | None, str, str]:
    """Name, config, split and column. A colon in brackets belongs to the split ("train[:100]")."""
    parts = re.split(r":(?![^\[\]]*\])", spec)[1:]
    if len(parts) > 4:
        raise TaskError(f"{spec!r} has too many parts.", remedy="Write datasets:<name>[:config[:split[:column]]].")
    name, config, split, column = [*parts, "", "", ""][:4]
    return name, config or None, split or "train", column or "text"


def _plain_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


# --- cutting text into units -----------------------------------------------------------------------

_CLOSERS = "\"'”’»)\\]"
_SENTENCE_END = re.compile(
    # Western: an end mark, closing quotes, then space and something that can open a sentence.
    rf"[.!?…؟۔।]+[{_CLOSERS}]*(?=\s+[^\s\Wa-z]|\s+[\"'“‘«(\[])"
    # Chinese and Japanese: the end mark is enough.
    r"|[。！？｡]+[」』”’）]*"
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'“‘])(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z]"
    r"|Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|Gen|Col|Lt|Capt|Rev|Hon|No|Nos|Fig|Figs|Eq|Sec|Ch|Vol|pp?|cf|vs|etc|al"
    r"|approx|Inc|Ltd|Co|Corp|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)$"
)


def split_sentences(text: str) -> list[str]:
    """Cuts prose into sentences, with single spaces inside them; none is empty.

    Blank lines always end one. A full stop after an abbreviation or an initial does not. What is longer
    than `MAX_UNIT_CHARS` characters is cut at whitespace, or, where there is none, anywhere. No
    character other than whitespace is lost or moved.
    """
    units = []
    for paragraph in re.split(r"\n\s*\n", _plain_newlines(text)):
        flat = " ".join(paragraph.split())
        start = 0
        for match in _SENTENCE_END.finditer(flat):
            before = flat[max(start, match.start() - 16) : match.start()]
            if match[0].startswith(".") and _ABBREVIATION.search(before):
                continue
            units.append(flat[start : match.end()].strip())
            start = match.end()
        units.append(flat[start:].strip())
    return [piece for unit in units if unit for piece in _cut_giant(unit)]


def _cut_giant(unit: str) -> Iterator[str]:
    while len(unit) > MAX_UNIT_CHARS:
        space = unit.rfind(" ", 1, MAX_UNIT_CHARS)
        cut = space if space > 0 else MAX_UNIT_CHARS
        piece = unit[:cut].rstrip()
        if piece:  # a code line's indent alone is no unit
            yield piece
        unit = unit[cut:].strip()
    if unit:
        yield unit


def rotation_blocks(text: str, start: int, *, block_chars: int = 4096) -> Iterator[str]:
    """The text from `start` to its end, then from its beginning to `start`: every character once.

    Comes in blocks of at most `block_chars` characters that begin at whitespace where there is any.
    The cuts depend on `start` only, so tokens of a longer reading begin with those of a shorter one.
    """
    for part in (text[start:], text[:start]):
        position = 0
        while position < len(part):
            end = position + block_chars
            if end < len(part):
                blank = max(part.rfind(" ", position + 1, end), part.rfind("\n", position + 1, end))
                end = blank if blank > position else end
            yield part[position:end]
            position = end
