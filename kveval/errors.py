"""Exceptions and exit codes.

    KvevalError              a user can mend it; the message names the remedy (exit 2)
    ├── ConfigError          a config file or command-line value is wrong
    │   └── UnknownNameError a name that nothing answers to, with suggestions
    ├── ModelError           a model can't be found, fetched, verified or loaded
    ├── TaskError            a task can't make its samples
    │   └── LengthError      a context length that a task or a model can't hold
    ├── StoreError           a run folder is damaged, foreign, locked or unwritable
    ├── UnsupportedError     a combination that kveval refuses rather than approximates
    ├── KernelError          a CUDA kernel does not compile, load or start
    └── MeasurementError     a result was produced in a way that voids it

`MeasurementError` is raised by invariants of the measurement itself (a cache that did not grow, a
read that never happened). A sweep records it as an errored sample; it is never swallowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = [
    "ConfigError",
    "ExitCode",
    "KernelError",
    "KvevalError",
    "LengthError",
    "MeasurementError",
    "ModelError",
    "StoreError",
    "TaskError",
    "UnknownNameError",
    "UnsupportedError",
    "first_problem",
]


class ExitCode(IntEnum):
    """Exit codes of every command; CI can tell a lost quality gate from a broken machine."""

    PASS = 0
    CRASH = 1
    USAGE = 2
    FAIL = 10
    INCONCLUSIVE = 11
    INCOMPLETE = 12
    INVALID = 13
    INTERRUPTED = 130


class KvevalError(Exception):
    """An error that a user can mend. `remedy` says how, in one sentence."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message}\n  {remedy}" if remedy else message)


def first_problem(error: ValidationError, *within: str) -> str:
    """Pydantic's first finding as "key.of.what: message", the key led by `within`; the message alone without a key."""
    first = error.errors()[0]
    at = ".".join(map(str, (*within, *first["loc"])))
    return f"{at + ': ' if at else ''}{first['msg'].removeprefix('Value error, ')}"


class ConfigError(KvevalError):
    """A config file or a command-line value is wrong."""


MOST_NAMES = 80
"""Known names that an error still lists where it has a suggestion."""


class UnknownNameError(ConfigError):
    """A name that nothing answers to. Suggests the nearest known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, where: str = "") -> None:
        names = sorted(known)
        self.kind, self.name, self.known = kind, name, names
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        prefix = f"{where}: " if where else ""
        shown = ", ".join(names) if len(names) <= MOST_NAMES or not near else f"{len(names)} names"
        super().__init__(f"{prefix}unknown {kind} {name!r}.", remedy=f"{hint} Known: {shown}.".strip())


class ModelError(KvevalError):
    """A model can't be found, fetched, verified or loaded."""


class TaskError(KvevalError):
    """A task can't make its samples."""


class LengthError(TaskError):
    """A context length that a task or a model can't hold. Nothing is ever truncated to fit."""


class StoreError(KvevalError):
    """A run folder is damaged, foreign, locked or unwritable."""


class UnsupportedError(KvevalError):
    """A combination that kveval refuses rather than approximates."""


class KernelError(KvevalError):
    """A CUDA kernel does not compile, load or start. The compiler's or the driver's own words are in the message."""


class MeasurementError(KvevalError):
    """A result was produced in a way that voids it."""
