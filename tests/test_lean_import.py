"""`import kveval` and `kveval --help` answer at once: nothing heavy is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "pandas", "pyarrow", "matplotlib", "scipy", "datasets")

SCRIPT = """
import runpy, sys
sys.argv = {arguments!r}
try:
    {statement}
except SystemExit as stop:
    assert not stop.code, stop.code
print("LOADED", *sorted({heavy!r} & sys.modules.keys()))
"""


def heavy_modules_after(statement: str, *arguments: str) -> str:
    script = SCRIPT.format(statement=statement, arguments=["kveval", *arguments], heavy=set(HEAVY))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_probe_sees_what_is_loaded() -> None:
    assert heavy_modules_after("import scipy") == "LOADED scipy"


def test_import_kveval_is_lean() -> None:
    assert heavy_modules_after("import kveval; dir(kveval); kveval.__version__") == "LOADED"


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("gate", "--help")])
def test_help_is_lean(arguments: tuple[str, ...]) -> None:
    run = "runpy.run_module('kveval.cli', run_name='__main__')"
    assert heavy_modules_after(run, *arguments) == "LOADED"


LEAN = ["capacity", "config", "controls", "errors", "formats.spec", "gate", "geometry", "identity"]
LEAN += ["journal", "plan", "power", "records", "report", "stats", "store"]


def test_what_works_on_records_and_configs_needs_no_torch() -> None:
    imports = "; ".join(f"import kveval.{module}" for module in LEAN)
    assert not {"torch", "transformers"} & set(heavy_modules_after(imports).split())
