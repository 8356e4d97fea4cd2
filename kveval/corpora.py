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
import os
import platform
import re
import sysconfig
import tokenize
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
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
    "blocks_before",
    "dataset_rows",
    "ids_after",
    "ids_before",
    "load_corpus",
    "rotation_blocks",
    "split_sentences",
]

MAX_UNIT_CHARS: Final = 400
"""Longest sentence, in characters: longer ones are cut, so a needle can be placed anywhere."""

BLOCK_CHARS: Final = 4096
"""Longest piece of running text that is tokenized at once, in characters."""

_MARKS_IN_A_ROW: Final = 32
_JOINER: Final = "\u200d"  # makes one picture of several

NOISE: Final = (
    "Green grass grows beside the road.",
    "Blue sky hangs over the hills.",
    "A yellow sun shines all day.",
    "On we go again.",
    "Out we walk and home we come.",
)

# Where reading may begin: behind what these match. Possessive and anchored, so that a run of white space is gone
# through once: a file that ends in a million newlines is read as fast as any other.
_PLACES: Final = tuple(
    re.compile(rf"(?:\A\s*+|{before})(?=\S)")
    for before in (r"(?<!\s)[^\S\n]*+\n[^\S\n]*+\n\s*+(?<=\n)", r"\n", r"(?<!\s)\s++")
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
        names: The documents' file names, below the folder that they share; empty where they are no files.
    """

    name: str
    documents: tuple[str, ...] = field(repr=False)
    joiner: str = " "
    interpreter: str = ""
    names: tuple[str, ...] = field(default=(), repr=False)

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

        Paragraphs, else lines, else words, else pieces of `MAX_UNIT_CHARS` characters (Chinese in one line has no
        spaces): the coarsest that offers at least 64 places, else the one that offers most.
        """
        finest: tuple[int, ...] = ()
        for before in _PLACES:
            places = tuple(m.end() for m in before.finditer(self.text))
            if len(places) >= 64:
                return places
            finest = max(finest, places, key=len)
        pieces = range(finest[0], len(self.text), MAX_UNIT_CHARS)
        cuts = (_between_characters(self.text, place) for place in pieces)
        return max(finest, tuple(place for place in cuts if not self.text[place].isspace()), key=len)

    def spread(self, shift: float, count: int) -> list[int]:
        """`count` different offsets of `starts`, evenly spread, the first ones the same whatever the count.

        The base-2 van der Corput sequence, moved by `shift` (a fraction of the text).

        Raises:
            TaskError: the text has too few places.
        """
        places: dict[int, None] = {}
        for index in range(count):
            bits = f"{index:b}"
            target = (shift + int(bits[::-1], 2) / 2 ** len(bits)) % 1.0 * len(self.text)
            # Behind the last start, reading begins at the first: the text is a ring.
            place = self.starts[bisect_left(self.starts, target) % len(self.starts)]
            if place in places:
                raise TaskError(
                    f"the text source {self.name!r} is too short for {count} different passages.",
                    remedy="Name a longer source, or ask for fewer samples.",
                )
            places[place] = None
        return list(places)


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
    documents = {}
    for path in paths:
        with tokenize.open(path) as file:  # honours the file's own encoding line
            text = file.read()
        if text.strip():
            documents[path.relative_to(root).as_posix()] = text
    return Corpus(
        "python-code",
        tuple(documents.values()),
        joiner="\n",
        interpreter=platform.python_version(),
        names=tuple(documents),
    )


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
    paths = [Path(name) for name, _, _ in stamps]
    texts = [_read_text(path) for path in paths]
    # A folder of sources has empty files (`__init__.py`): they are no documents, and no mistake either.
    written = [(path, text) for path, text in zip(paths, texts, strict=True) if text.strip()]
    if not written:
        which = f"{paths[0].name} is empty" if len(paths) == 1 else f"all {len(paths)} files are empty"
        raise TaskError(f"{which}.", remedy="Name files with text.")
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files from {paths[0].name}"
    folder = os.path.commonpath([path.parent for path in paths])
    return Corpus(
        f"file:{name}",
        tuple(text for _, text in written),
        joiner="\n" if all(path.suffix == ".py" for path in paths) else " ",
        names=tuple(Path(os.path.relpath(path, folder)).as_posix() for path, _ in written),
    )


def _read_text(path: Path) -> str:
    try:
        # utf-8-sig takes off a byte-order mark, which is no text.
        return _plain_newlines(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{path.name} is not UTF-8 text (byte {error.start}).", remedy="Convert it to UTF-8."
        ) from error


def _dataset(spec: str) -> Corpus:
    name, config, split, column = _parse_dataset(spec)
    rows = dataset_rows(name, config, split)
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


def dataset_rows(name: str, config: str | None, split: str) -> Any:
    """A split of a Hugging Face dataset.

    Raises:
        TaskError: the package `datasets` is missing, or the dataset can't be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            f"the dataset {name!r} needs the package `datasets`, which is not installed.",
            remedy="pip install 'kveval[datasets]', or use file:<path>.",
        ) from error
    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TaskError(
            f"the dataset {name!r} (config {config}, split {split}) can't be loaded: {error}",
            remedy="Check the name; without a network, load it once with one, or use file:<path>.",
        ) from error


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
    # Western: an end mark, closing quotes, then space and something that can open a sentence. A row of dots is gone
    # through once: it neither begins in the middle nor gives back what it took.
    rf"(?<![.!?…؟۔।])[.!?…؟۔।]++[{_CLOSERS}]*+(?=\s+[^\s\Wa-z]|\s+[\"'“‘«(\[])"
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
    start = 0
    while len(unit) - start > MAX_UNIT_CHARS:
        space = unit.rfind(" ", start + 1, start + MAX_UNIT_CHARS)
        cut = space if space > 0 else _between_characters(unit, start + MAX_UNIT_CHARS)
        piece = unit[start:cut].rstrip()
        if piece.strip():  # a code line's indent alone is no unit
            yield piece
        start = cut
        while start < len(unit) and unit[start].isspace():
            start += 1
    if start < len(unit):
        yield unit[start:]


def _between_characters(text: str, cut: int) -> int:
    """The last place up to `cut` that parts no letter from its accents or vowel signs; `cut` if they never end."""
    for place in range(cut, cut - _MARKS_IN_A_ROW, -1):
        if not unicodedata.category(text[place]).startswith("M") and _JOINER not in text[place - 1 : place + 1]:
            return place
    return cut


def rotation_blocks(text: str, start: int, *, block_chars: int = BLOCK_CHARS) -> Iterator[str]:
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


def blocks_before(text: str, end: int, *, chars: int) -> Iterator[str]:
    """The `chars` characters before `end`, from there backwards; the text is a ring, its end lies before its start.

    Comes in blocks of at most `BLOCK_CHARS` characters that begin at whitespace where there is any. The cuts depend
    on `end` only, so tokens of a longer reading end with those of a shorter one.

    Args:
        text: The ring.
        end: Offset in characters, behind the last one that is read.
        chars: How many to read; at most len(text), so that none is read twice.
    """
    for begin, last in ((0, end), (end, len(text))):
        first = max(begin, last - chars)
        chars -= last - first
        while last > first:
            start = max(first, last - BLOCK_CHARS)
            if start > first:
                blanks = (text.find(" ", start, last - 1), text.find("\n", start, last - 1))
                start = min((blank for blank in blanks if blank >= 0), default=start)
            yield text[start:last]
            last = start


Encode = Callable[[str], Sequence[int]]
"""Tokens of a piece of text that follows other text."""


def ids_before(encode: Encode, text: str, end: int, count: int, *, chars: int) -> tuple[tuple[int, ...], int]:
    """The last `count` tokens of the ring before `end`, of at most `chars` characters; fewer if those hold no more.

    Returns:
        The tokens, and how many characters were read for them.
    """
    blocks: list[Sequence[int]] = []
    found = read = 0
    for block in blocks_before(text, end, chars=chars):
        if found >= count:
            break
        blocks.append(encode(block))
        found += len(blocks[-1])
        read += len(block)
    ids = [i for block in reversed(blocks) for i in block]
    return tuple(ids[max(0, found - count) :]), read


def ids_after(encode: Encode, text: str, start: int, count: int) -> tuple[tuple[int, ...], int]:
    """The first `count` tokens of the ring from `start` on; fewer if it holds no more.

    Returns:
        The tokens, and how many characters hold them: a bound, one or two tokens above what is needed.
    """
    ids: list[int] = []
    read = 0
    for block in rotation_blocks(text, start):
        piece = encode(block)
        missing = count - len(ids)
        ids += piece
        if len(piece) >= missing:
            ends = range(len(block))
            read += bisect_left(ends, True, key=lambda end: len(encode(block[:end])) > missing + 1)
            break
        read += len(block)
    return tuple(ids[:count]), read
