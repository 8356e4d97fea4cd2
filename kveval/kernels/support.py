"""What of the kernels works on this machine, and what exactly is missing where they do not."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kveval.errors import KvevalError
from kveval.kernels.compiler import architecture, check_architecture, compile_kernel, nvrtc_version
from kveval.kernels.cubin import resources
from kveval.kernels.launcher import load_driver
from kveval.kernels.manifest import ManifestEntry, read_manifest

__all__ = ["WITHOUT_GPU", "examine_kernels", "missing"]

WITHOUT_GPU = "sm_90a"
"""What the kernels are compiled for as a check on a machine without a GPU."""


def missing(device: torch.device) -> str:
    """'' if kernels can run on the device, else what is missing and how to get it. Never raises."""
    if device.type != "cuda":
        return f"{device} is not an NVIDIA GPU."
    if torch.version.cuda is None:
        return "this build of torch is not for NVIDIA GPUs. Install a CUDA build of torch."
    count = torch.cuda.device_count()
    if count == 0:
        return "torch finds no NVIDIA GPU. See `nvidia-smi`."
    if device.index is not None and device.index >= count:
        return f"there is no {device}: torch finds {count} GPU{'s' if count > 1 else ''}."
    try:
        load_driver()
        check_architecture(architecture(torch.cuda.get_device_capability(device)))
    except KvevalError as error:
        return _sentence(error)
    except RuntimeError as error:  # a GPU that is seen and can't be used
        return f"torch can't use {device} ({error}). See `nvidia-smi`."
    return ""


def examine_kernels() -> dict[str, Any]:
    """Compiles all kernels of the manifest for this machine's first GPU, or for `WITHOUT_GPU` where there is none.

    Returns:
        `missing`: see above, of the first GPU; `nvrtc`: its version or None; `architecture`: what was compiled for;
        `kernels`: of each entry its name, what of a GPU it takes, the seconds to compile it (None: it was on the disk)
        and what is wrong with it ('' if nothing is). Where nothing can be compiled there are no kernels.
    """
    found: dict[str, Any] = {
        "missing": missing(torch.device("cuda")),
        "nvrtc": None,
        "architecture": None,
        "kernels": [],
    }
    try:
        found["nvrtc"] = ".".join(map(str, nvrtc_version()))
        has_gpu = torch.cuda.is_available()
        arch = architecture(torch.cuda.get_device_capability(0)) if has_gpu else WITHOUT_GPU
        check_architecture(arch)
    except KvevalError as error:
        return {**found, "missing": _sentence(error)}
    found["architecture"] = arch
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles in several threads at once
        found["kernels"] = list(pool.map(lambda entry: _examine(entry, arch), read_manifest()))
    return found


def _examine(entry: ManifestEntry, arch: str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("registers", "stack_bytes", "shared_bytes", "seconds"))
    row = {"kernel": entry.kernel, **row, "problem": ""}
    try:
        binary = compile_kernel(entry.variant, arch)
        taken = resources(binary.cubin)[entry.entry]
    except KvevalError as error:
        # One kernel that fails is a finding; the others are still examined.
        return {**row, "problem": error.message}
    # The budget holds for the architectures that the entry names; elsewhere it says nothing.
    problem = entry.over_budget(taken) if arch in entry.archs else ""
    return {**row, **vars(taken), "seconds": binary.seconds, "problem": problem}


def _sentence(error: KvevalError) -> str:
    return f"{error.message} {error.remedy}".strip()
