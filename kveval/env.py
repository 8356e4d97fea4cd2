"""What a run ran on: versions, machine, GPU, driver and the commit of the checkout.

Recorded with every run, and printed by `kveval doctor`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kveval

__all__ = ["collect"]

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "gguf", "accelerate", "pyarrow")
"""Packages whose versions can change a result or how it is stored."""


def collect() -> dict[str, Any]:
    """Plain data on the software and the machine at hand. Bytes are bytes; None is "not known".

    Imports torch to learn of its threads and GPUs; models are not touched.
    """
    import torch

    return {
        "kveval": kveval.__version__,
        "git": _git(Path(kveval.__file__).parents[1]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "ram_bytes": _ram_bytes()},
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "driver": _nvidia_driver(),
        "gpus": [_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(checkout: Path) -> dict[str, Any] | None:
    """Commit, and whether code or content differs from it; None outside a checkout of kveval."""
    # An installed kveval may lie inside somebody else's repository: that commit says nothing about kveval.
    if not (checkout / ".git").exists():
        return None
    git = ("git", "-C", str(checkout))
    commit = _output(*git, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _output(*git, "status", "--porcelain", "--", "kveval", "tasks", "kernels")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor() or None


def _ram_bytes() -> int | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _nvidia_driver() -> str | None:
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0].strip() if versions else None


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None where it is missing, fails or takes more than 10 s."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
