"""What is recorded about software and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kveval
from kveval import env


def test_collect_tells_versions_and_machine() -> None:
    found = env.collect()
    assert json.loads(json.dumps(found, allow_nan=False)) == found, "plain data"
    assert found["kveval"] == kveval.__version__
    assert found["python"] == platform.python_version()
    for package in ("torch", "transformers", "tokenizers", "numpy", "gguf"):
        assert found["packages"][package] == version(package)
    assert found["cpu"]["cores"] == os.cpu_count()
    assert found["cpu"]["ram_bytes"] > 2**28
    assert found["threads"] == torch.get_num_threads()
    assert len(found["gpus"]) == torch.cuda.device_count()


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=85_520_809_984, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(env, "_output", lambda *command: "580.95.05\n580.95.05")
    found = env.collect()
    assert found["driver"] == "580.95.05"
    assert (
        found["gpus"]
        == [
            {
                "name": "NVIDIA H100 80GB HBM3",
                "capability": "9.0",
                "memory_bytes": 85_520_809_984,
                "multiprocessors": 132,
            }
        ]
        * 2
    )


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_and_changes_of_a_checkout(tmp_path: Path) -> None:
    assert env._git(tmp_path) is None
    git(tmp_path, "init")
    assert env._git(tmp_path) is None, "no commit yet"
    (tmp_path / "kveval").mkdir()
    (tmp_path / "kveval" / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "my-sweep.yaml").write_text("notes beside the code change no result")
    assert env._git(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "kveval" / "b.py").write_text("new code does")
    assert env._git(tmp_path) == {"commit": commit, "dirty": True}
    assert env._git(tmp_path / "kveval") is None, "a folder inside somebody's repository is no checkout"


def test_a_missing_or_failing_command_is_not_known() -> None:
    assert env._output("no-such-command-anywhere") is None
    assert env._output("false") is None
    assert env._output("printf", " 1 \n") == "1"


def test_a_missing_package_is_not_known() -> None:
    assert env._version("no-such-package-anywhere") is None
