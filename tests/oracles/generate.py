"""Make the golden vectors of tests/oracles/golden from implementations that are not ours. See README.md.

Usage: python generate.py [--check] [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import golden_file
import numpy as np
from missing import MissingToolError

GOLDEN = Path(__file__).parent / "golden"
SOURCES = {
    "cuda": "cuda_headers",
    "ggml": "llama_blocks",
    "torchao": "torchao_blocks",
    "quanto": "quanto_blocks",
    "fouroversix": "four_over_six_blocks",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SOURCES)}; all of them by default")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SOURCES):
        parser.error(f"unknown source {', '.join(sorted(unknown))}; there are {', '.join(SOURCES)}")
    changed = False
    for name in options.names or SOURCES:
        try:
            arrays, versions = importlib.import_module(SOURCES[name]).vectors()
        except MissingToolError as e:
            print(f"{name}: skipped, file left as it is; missing {e}")
            continue
        path = GOLDEN / f"{name}.xz"
        differing = _differing(golden_file.read(path)[0], arrays) if path.is_file() else sorted(arrays)
        changed |= bool(differing)
        if differing and not options.check:
            golden_file.write(path, arrays, versions)
        state = f"{len(differing)} differ: {', '.join(differing[:5])}" if differing else "unchanged"
        print(f"{name}: {len(arrays)} arrays, {state}; made by {versions}")
    return int(options.check and changed)


def _differing(old: golden_file.Arrays, new: golden_file.Arrays) -> list[str]:
    """Names of arrays that are not the same in both. Compared as bytes: NaN is equal to itself."""

    def same(a: np.ndarray, b: np.ndarray) -> bool:
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()

    return sorted(n for n in old.keys() | new.keys() if n not in old or n not in new or not same(old[n], new[n]))


if __name__ == "__main__":
    sys.exit(main())
