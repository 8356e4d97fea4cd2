from __future__ import annotations

import pytest

from kveval.content import content_dir
from kveval.errors import KvevalError


def test_the_checkouts_folder_is_found():
    assert (content_dir("tasks") / "niah_single.py").is_file()


def test_the_wheels_copy_wins(tmp_path):
    package = tmp_path / "kveval"
    bundled, beside = package / "_bundled" / "tasks", tmp_path / "tasks"
    bundled.mkdir(parents=True)
    beside.mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert content_dir("tasks", package=package) == bundled
    bundled.rmdir()
    assert content_dir("tasks", package=package) == beside


def test_a_strangers_folder_beside_an_installed_package_is_not_ours(tmp_path):
    (tmp_path / "tasks").mkdir()
    with pytest.raises(KvevalError, match="Install kveval again"):
        content_dir("tasks", package=tmp_path / "kveval")
