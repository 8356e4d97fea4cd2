"""Runs a user's or a bundled Python file as a module of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kveval.errors import ConfigError, KvevalError, MeasurementError

__all__ = ["call_own", "load_python_file"]


def load_python_file(path: Path, where: str = "") -> ModuleType:
    """The file as a module. It stays in `sys.modules`: pydantic looks it up there.

    Args:
        path: The file.
        where: Where a config names it; put before error messages.

    Raises:
        ConfigError: there is no such file, or it fails when it is run.
    """
    prefix = f"{where}: " if where else ""
    if not path.is_file():
        raise ConfigError(f"{prefix}there is no file {path}.", remedy="Give a path relative to the current folder.")
    name = f"_kveval_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{prefix}{path.name} can't be loaded as Python.", remedy="Check the file's name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, NameError, AttributeError, TypeError, ValueError) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{prefix}{path.name} fails when it is loaded: {type(error).__name__}: {error}.",
            remedy="Mend the file.",
        ) from error
    except SyntaxError as error:
        del sys.modules[name]
        raise ConfigError(f"{prefix}{path.name} line {error.lineno}: {error.msg}.", remedy="Mend the file.") from error
    return module


def call_own(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's own.

    Raises:
        MeasurementError: whatever it raises, in the name of the function.
    """
    try:
        return function(*arguments)
    except KvevalError:
        raise
    except Exception as error:  # a user's code may raise anything, and a sweep goes on without the sample
        raise MeasurementError(
            f"{name} failed: {type(error).__name__}: {error}.", remedy="Mend the function."
        ) from error
