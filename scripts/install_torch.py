"""Installs the torch pinned in constraints.txt into the environment that runs this script.

    python scripts/install_torch.py constraints.txt

Does nothing when that version is there already, whatever its build. Otherwise pip's own configuration decides
which build is taken. Set KVEVAL_TORCH_INDEX to an index with CPU builds on a machine without an NVIDIA GPU:
the default index's Linux build brings several GB of CUDA libraries, which are of no use there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def pinned_version(constraints: Path) -> str:
    """The version in the line `torch==VERSION`."""
    match = re.search(r"^torch==(\S+)$", constraints.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if match is None:
        raise SystemExit(f"{constraints} has no line torch==VERSION")
    return match[1]


def installed_version() -> str | None:
    """The installed torch's version without its build tag (2.13.0+cpu is 2.13.0), None without one."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return None


def main() -> int:
    """Returns pip's exit status, 0 when there is nothing to do."""
    constraints = Path(sys.argv[1])
    wanted = pinned_version(constraints)
    if installed_version() == wanted:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", f"torch=={wanted}"]
    index = os.environ.get("KVEVAL_TORCH_INDEX")
    if index:
        command += ["--index-url", index]
    elif shutil.which("nvidia-smi") is None:
        print(
            "No NVIDIA GPU here: if pip fetches several GB of CUDA libraries, set KVEVAL_TORCH_INDEX to the "
            "address of PyTorch's index of CPU builds (see CONTRIBUTING.md) and run make again.",
            file=sys.stderr,
        )
    print(f"Installing torch {wanted}...", file=sys.stderr)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
