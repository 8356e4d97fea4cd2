"""The built wheel works where there is no checkout: tasks, configs and tables travel with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import kveval

pytestmark = pytest.mark.slow

ROOT = Path(kveval.__file__).parents[1]
BUNDLED = ("tasks", "kernels", "configs")

SMOKE = """
import json, sys
import kveval
from kveval.content import content_dir
config = kveval.load_config(sys.argv[1])
kveval.run_sweep(config, "out")
records = kveval.read_records("out")
print(json.dumps({
    "package": kveval.__file__,
    "tasks": str(content_dir("tasks")),
    "complete": records.attrs["complete"],
    "status": sorted(set(records["status"])),
    "errors": [error for error in records["error"] if isinstance(error, str)],
    "schemes": sorted(set(records["scheme"])),
}))
"""


def files_under(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' folder of an environment that has kveval from the wheel alone.

    Dependencies come from the environment that runs the tests. A .pth file in a folder that is itself added
    by a .pth file has no effect, so that environment's editable kveval stays invisible.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    scripts = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", scripts / "python")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts


def test_the_wheel_holds_the_package_and_its_content(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"kveval/{name}" for name in files_under(ROOT / "kveval")}
    for folder in BUNDLED:
        expected |= {f"kveval/_bundled/{folder}/{name}" for name in files_under(ROOT / folder)}
    info = f"kveval-{kveval.__version__}.dist-info"
    assert {name for name in names if not name.startswith(info)} == expected
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= names


def test_content_folders_are_no_packages() -> None:
    for folder in BUNDLED:
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_the_command_answers(installed: Path, tmp_path: Path) -> None:
    assert "kveval" in run(installed / "kveval", "--help", cwd=tmp_path)


def test_a_small_sweep_runs_outside_the_checkout(installed: Path, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        f"name: smoke\n"
        f"model: {{id: {tiny_model}}}\n"
        f"schemes: [fp8_e4m3]\n"
        f"tasks: [{{name: niah_single}}]\n"
        f"context_lengths: [1024]\n"
        f"samples: 2\n"
    )
    output = run(installed / "python", "-W", "error", "-c", SMOKE, "sweep.yaml", cwd=tmp_path)
    found = json.loads(output.splitlines()[-1])
    assert not found["errors"]
    packages = installed.parent / "lib"
    assert Path(found["package"]).is_relative_to(packages)
    assert Path(found["tasks"]).is_relative_to(packages)
    assert found["complete"] is True
    assert found["status"] == ["ok"]
    assert "fp8_e4m3" in found["schemes"]
