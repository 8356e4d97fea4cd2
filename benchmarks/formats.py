"""Time to encode and decode a million elements on the CPU: kveval's codec against the libraries' own references.

int4_g64 is compared with optimum-quanto's INT4 in groups of 64 (the storage behind transformers' quantized cache),
nvfp4 with torchao's NVFP4 tensor. Both sides take the same float32 tensor, alternate, and are compared by medians.

    pip install -e '.[bench]'
    python benchmarks/formats.py --out results/benchmarks/formats.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from optimum.quanto import MaxOptimizer, qint4, quantize_weight
from torch import Tensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from kveval import env
from kveval.formats.codec import Codec
from kveval.formats.spec import get_scheme, scheme_names

SHAPE = (1, 8, 1024, 128)
RoundTrip = Callable[[Tensor], Tensor]


def main() -> None:
    """Run the benchmark, print the ratios, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", default=15, type=int)
    parser.add_argument("--out", type=Path, help="where to write the record (JSON)")
    options = parser.parse_args()
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    pairs = {"int4_g64": ("optimum-quanto", quanto_int4), "nvfp4": ("torchao", torchao_nvfp4)}
    compared = {}
    for scheme, (library, theirs) in pairs.items():
        ours_s, theirs_s = alternate([kveval_round_trip(scheme), theirs], x, options.repeats)
        compared[scheme] = {"against": library, "kveval_s": ours_s, "theirs_s": theirs_s, "ratio": theirs_s / ours_s}
        sys.stdout.write(
            f"{scheme}: {1e3 * ours_s:.1f} ms, {library} {1e3 * theirs_s:.1f} ms, {theirs_s / ours_s:.2f}x\n"
        )
    schemes = [name for name in scheme_names() if not get_scheme(name).needs_scales]
    alone = {name: alternate([kveval_round_trip(name)], x, max(3, options.repeats // 5))[0] for name in schemes}
    if options.out:
        record = {
            "what": "seconds to encode and decode a float32 tensor, medians",
            "shape": SHAPE,
            "repeats": options.repeats,
            "threads": torch.get_num_threads(),
            "compared": compared,
            "keys_of_every_scheme_s": alone,
            "env": env.collect(),
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def alternate(sides: list[RoundTrip], x: Tensor, repeats: int) -> list[float]:
    """Median seconds of each side; they take turns, so that a machine that slows down slows all."""
    for side in sides:
        side(x)
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, times in zip(sides, seconds, strict=True):
            start = time.perf_counter()
            side(x)
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def kveval_round_trip(scheme: str) -> RoundTrip:
    """Encode and decode as keys of a preset."""
    codec = Codec(get_scheme(scheme).key, SHAPE[-1])

    def round_trip(x: Tensor) -> Tensor:
        frozen = codec.freeze(x)
        return codec.decode(*codec.encode(x, frozen), frozen, x.dtype)

    return round_trip


def quanto_int4(x: Tensor) -> Tensor:
    """What transformers' quanto cache does with a tensor (axis 0, groups of 64)."""
    scale, zero = MaxOptimizer()(x, qint4, 0, 64)
    return quantize_weight(x, qint4, 0, scale, zero, 64).dequantize()


def torchao_nvfp4(x: Tensor) -> Tensor:
    """The reference of torchao, with the per-tensor scale that its own recipe takes."""
    rows = x.view(-1, x.shape[-1])
    stored = NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=per_tensor_amax_to_scale(rows.abs().amax()))
    return stored.dequantize(torch.float32).view(x.shape)


if __name__ == "__main__":
    main()
