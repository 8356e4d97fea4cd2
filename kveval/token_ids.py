"""Token ids of long prompts, kept in a temporary file: a sweep's samples are all made before a model runs."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from threading import Lock
from typing import IO, Any, TypeVar

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

    def __get__(self, instance: Any, owner: type) -> tuple[int, ...]:
        stored: _Stored = instance.__dict__[self._name]
        return stored.read()

    def __set__(self, instance: Any, ids: Iterable[int]) -> None:
        instance.__dict__[self._name] = _Stored(ids)


class _Stored:
    """Where in the file some ids lie."""

    def __init__(self, ids: Iterable[int]) -> None:
        numbers = array(_CODE, ids)
        self._length = len(numbers)
        self._start = _file().append(numbers.tobytes())

    def read(self) -> tuple[int, ...]:
        found = array(_CODE)
        found.frombytes(_file().read(self._start, self._length * _WIDTH))
        return tuple(found)

    def __reduce__(self) -> tuple[type[_Stored], tuple[tuple[int, ...]]]:
        return _Stored, (self.read(),)  # another process has another file


class _File:
    """Bytes that are appended once and read again, by any thread."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="kveval-")  # noqa: SIM115 (open until the process ends)
        self._lock, self._size = Lock(), 0

    def append(self, data: bytes) -> int:
        """Where the bytes lie."""
        with self._lock:
            start = self._size
            self._file.seek(start)
            self._file.write(data)
            self._size += len(data)
        return start

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` on."""
        with self._lock:
            self._file.seek(start)
            return self._file.read(count)


@cache
def _file() -> _File:
    return _File()
