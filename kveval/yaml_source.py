"""Reads YAML so that every later complaint can name a file and a line. Duplicate keys are errors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kveval.errors import ConfigError

__all__ = ["Located", "read_yaml"]

KeyPath = tuple[str | int, ...]


@dataclass
class Located:
    """Plain data from YAML, with the file and line of every key and list item in it."""

    data: Any
    places: dict[KeyPath, tuple[Path, int]] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """`file:line` of the nearest known ancestor of `path`, or '' if nothing is known."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                file, line = self.places[path[:end]]
                return f"{file}:{line}"
        return ""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ConfigError(f"{node.start_mark.name}:{line}: a key is a list or mapping.", remedy="Use text.")
            if key in seen and key != "<<":
                raise ConfigError(
                    f"{node.start_mark.name}:{line}: key {key!r} is written twice (first on line {seen[key]}).",
                    remedy="Keep one of the two.",
                )
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> Located:
    """Parse a YAML file.

    Raises:
        ConfigError: if the file can't be read, is not YAML, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}", remedy="Check the path; `kveval init` writes one.") from error
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", remedy="Take the character out.") from error
    loader.name = str(path)
    try:
        node = loader.get_single_node()
        located = Located(loader.construct_document(node) if node is not None else None)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", remedy="Mend the line it names.") from error
    finally:
        loader.dispose()
    if node is not None:
        _index(node, (), path, located.places)
    return located


def _index(node: yaml.Node, at: KeyPath, path: Path, places: dict[KeyPath, tuple[Path, int]]) -> None:
    places.setdefault(at, (path, node.start_mark.line + 1))
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key_path = (*at, key_node.value)
            places[key_path] = (path, key_node.start_mark.line + 1)
            _index(value_node, key_path, path, places)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _index(item, (*at, i), path, places)
