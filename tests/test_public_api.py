"""The public names of the package: all there, all documented, nothing else promised."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

import kveval

ROOT = Path(kveval.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_all_is_what_can_be_seen() -> None:
    assert kveval.__all__ == sorted(kveval.__all__)
    assert dir(kveval) == kveval.__all__


@pytest.mark.parametrize("name", [name for name in kveval.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(kveval, name)
    assert value.__name__ == name
    assert value.__module__.startswith("kveval.")
    assert value.__doc__
    assert getattr(kveval, name) is value, "the second look-up finds the same object"


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(kveval.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    declared = {alias.name: node.module for node in imports for alias in node.names}
    assert declared == kveval._HOME
    assert set(declared) == set(kveval.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kveval' has no attribute 'quantize'"):
        kveval.quantize  # noqa: B018


def test_version_is_the_installed_one() -> None:
    assert kveval.__version__ == version("kveval")


def imported_packages(folder: Path) -> dict[str, Path]:
    """Top-level names imported anywhere in a folder's modules, with one file each."""
    names: dict[str, Path] = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update({alias.name.partition(".")[0]: file for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names[node.module.partition(".")[0]] = file
    return names


def test_every_import_is_a_declared_dependency() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["datasets"] + extras["cuda"] + extras["lm-eval"]
    declared = {re.split(r"[<>=!~\[; ]", line)[0].lower().replace("_", "-") for line in requirements}
    distributions = packages_distributions()
    for folder in ("kveval", "tasks"):
        for name, file in imported_packages(ROOT / folder).items():
            if name == "kveval" or name in sys.stdlib_module_names:
                continue
            homes = {home.lower().replace("_", "-") for home in distributions.get(name, ())}
            assert homes & declared, f"{file} imports {name}, which pyproject.toml doesn't declare"


def test_every_dependency_is_pinned_for_development() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in pins)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        assert re.split(r"[<>=!~\[; ]", line)[0].lower().replace("_", "-") in pinned
