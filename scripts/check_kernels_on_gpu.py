"""Do the CUDA kernels store and compute what they should on this GPU? Writes a record, and fails if one case does not.

    python scripts/check_kernels_on_gpu.py --out results/gpu/kernels.json

Stored bytes are compared with the reference's bit for bit; attention is compared with exact attention in float64, and
may err twice as far as torch's own in the same precision. All data is random, from a seed that is printed and recorded.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kveval import env
from kveval.bench.warm import compile_ahead
from kveval.errors import KvevalError
from kveval.kernels.checks import CHECKS, FULL, Sizes, probes, run_check
from kveval.kernels.checks.record import SCHEMA_VERSION, summary
from kveval.kernels.compiler import nvrtc_version, sources_digest
from kveval.kernels.support import missing

FAILURES_SHOWN = 8


def main() -> int:
    """Run, print, write; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, help="of all data; drawn at random unless given")
    parser.add_argument("--only", action="append", choices=list(CHECKS), help="run this check alone; may be repeated")
    options = parser.parse_args()
    device = torch.device(options.device)
    if reason := missing(device):
        sys.stderr.write(f"kernels can't run here: {reason}\n")
        return 1
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    sizes = replace(FULL, seed=seed)
    names = options.only or list(CHECKS)
    sys.stdout.write(f"{torch.cuda.get_device_name(device)}, seed {seed}\n")
    compile_all(names, device, sizes)
    rows = [checked(name, device, sizes) for name in names]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {**about(device, seed), "checks": rows}
    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    failed = sum(len(row["failures"]) for row in rows)
    sys.stdout.write(f"{sum(row['comparisons'] for row in rows)} comparisons, {failed} failed; {options.out}\n")
    return 1 if failed else 0


def compile_all(names: list[str], device: torch.device, sizes: Sizes) -> None:
    """On all cores, so that the checks themselves wait for nothing."""
    started = time.monotonic()
    calls = [probe.touch for name in names for probe in probes(name, device, sizes)]
    try:
        count = compile_ahead(calls, device)
    except KvevalError as error:
        # The cases that need this kernel will say so; the others still count.
        sys.stdout.write(f"compiling ahead failed: {error}\n")
        return
    sys.stdout.write(f"{count} kernels compiled in {time.monotonic() - started:.0f} s\n")


def checked(name: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Run one check and print a line about it, and more where it fails."""
    started = time.monotonic()
    results = list(run_check(name, device, sizes))
    row = {**summary(name, results), "seconds": round(time.monotonic() - started, 1)}
    worst = "-" if row["worst_ratio"] is None else f"{row['worst_ratio']:.2f}"
    sys.stdout.write(
        f"{name:28} {row['cases']:5} cases {row['comparisons']:6} comparisons  worst {worst:>5} of the limit  "
        f"{len(row['failures']):4} failed  {row['seconds']:6.1f} s\n"
    )
    for failure in row["failures"][:FAILURES_SHOWN]:
        sys.stdout.write(f"    {failure}\n")
    sys.stdout.flush()
    return row


def about(device: torch.device, seed: int) -> dict[str, Any]:
    """What was checked, and where."""
    found = env.collect()
    return {
        "schema_version": SCHEMA_VERSION,
        "what": "CUDA kernels against exact arithmetic",
        "gpu": torch.cuda.get_device_name(device),
        "driver": found["driver"],
        "commit": (found["git"] or {}).get("commit"),
        "kernel_hash": sources_digest(),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "seed": seed,
        "env": found,
    }


if __name__ == "__main__":
    sys.exit(main())
