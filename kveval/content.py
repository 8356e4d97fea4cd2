"""Finds the folders that travel with kveval: tasks/, configs/ and kernels/.

In an installed wheel they lie in `kveval/_bundled/<folder>`; in a checkout beside the package. They
are no packages (a root package called `kernels` would shadow the Hugging Face one), so their files
are found by path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kveval.errors import KvevalError

__all__ = ["Folder", "content_dir"]

Folder = Literal["tasks", "configs", "kernels"]

_PACKAGE = Path(__file__).resolve().parent


def content_dir(folder: Folder, *, package: Path = _PACKAGE) -> Path:
    """The folder's path: the wheel's copy first, the checkout's second.

    A folder beside the package counts only in a checkout (there is a `pyproject.toml` next to it):
    beside an installed package lie other people's folders.

    Raises:
        KvevalError: neither is there, so the installation is damaged.
    """
    bundled = package / "_bundled" / folder
    if bundled.is_dir():
        return bundled
    root = package.parent
    if (root / "pyproject.toml").is_file() and (root / folder).is_dir():
        return root / folder
    raise KvevalError(
        f"kveval's folder {folder!r} is missing from this installation (looked in {bundled}).",
        remedy="Install kveval again; in a checkout, restore the folder with git.",
    )
