"""Token ids of long prompts, kept in a temporary file: a sweep's samples are all made before a model runs."""

from __future__ import annotations

import atexit
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from threading import Lock
from typing import IO, Any, TypeVar

from kveval.errors import KvevalError

__all__ = ["tokens_on_disk"]

T = TypeVar("T")

_CODE = "i"
_WIDTH = array(_CODE).itemsize


def tokens_on_disk(*names: str) -> Callable[[type[T]], type[T]]:
    """A decorator for a dataclass, whose fields of these names are tuples of token ids: keep them on disk.

    They are read whenever they are looked at, from a file in the folder for temporary files (`TMPDIR`) that is gone
    when the process ends.
    """

    def decorate(owner: type[T]) -> type[T]:
        for name in names:
            setattr(owner, name, _Field(name))
        return owner

    return decorate


class _Field:
    def __init__(self, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance.__dict__[self._name].read()

    def __set__(self, instance: Any, ids: Iterable[int]) -> None:
        instance.__dict__[self._name] = _Stored(ids)


class _Stored:
    """Where in which file some ids lie."""

    def __init__(self, ids: Iterable[int]) -> None:
        numbers = array(_CODE, ids)
        self._length = len(numbers)
        self._file = _file(os.getpid())
        self._start = self._file.append(numbers.tobytes())

    def read(self) -> tuple[int, ...]:
        found = array(_CODE)
        found.frombytes(self._file.read(self._start, self._length * _WIDTH))
        return tuple(found)

    def __reduce__(self) -> tuple[type[_Stored], tuple[tuple[int, ...]]]:
        return _Stored, (self.read(),)  # another process has another file


class _File:
    """Bytes that are appended once and read again, by any thread, and by processes that were forked since."""

    def __init__(self) -> None:
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="kveval-", buffering=0)  # noqa: SIM115 (stays open)
        except OSError as error:
            raise _no_room(error) from error
        atexit.register(self._file.close)
        self._lock, self._size = Lock(), 0

    def append(self, data: bytes) -> int:
        """Where the bytes lie."""
        with self._lock:
            start, written = self._size, 0
            while written < len(data):
                try:
                    written += os.pwrite(self._file.fileno(), data[written:], start + written)
                except OSError as error:
                    raise _no_room(error) from error
            self._size += len(data)
        return start

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` on. At no time is there a position in the file, which processes would share."""
        parts = []
        while count:
            part = os.pread(self._file.fileno(), count, start)
            if not part:
                raise KvevalError("the temporary file with the samples' token ids was cut short.")
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return b"".join(parts)


def _no_room(error: OSError) -> KvevalError:
    return KvevalError(
        f"the samples' token ids can't be kept in a temporary file: {error.strerror or error}.",
        remedy="Let TMPDIR name a folder that can be written, with 4 bytes of room for every token of all samples.",
    )


@cache
def _file(process: int) -> _File:
    """A file of this process: what a fork of it appends goes into another."""
    return _File()
