"""Named arrays in one compressed file, whose bytes depend on the arrays alone."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray]


def write(path: Path, arrays: Mapping[str, NDArray], versions: Mapping[str, str]) -> None:
    """Write arrays and the versions of what made them: a line of JSON, then the arrays' bytes, compressed by xz."""
    index = {name: [a.dtype.str, list(a.shape)] for name, a in arrays.items()}
    head = json.dumps({"versions": dict(sorted(versions.items())), "arrays": index}, separators=(",", ":"))
    body = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())
    path.write_bytes(lzma.compress(head.encode() + b"\n" + body, preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays and versions of a file."""
    head, body = lzma.decompress(path.read_bytes()).split(b"\n", 1)
    meta = json.loads(head)
    arrays: Arrays = {}
    start = 0
    for name, (dtype, shape) in meta["arrays"].items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, dtype, count, start).reshape(shape)
        start += arrays[name].nbytes
    return arrays, meta["versions"]
