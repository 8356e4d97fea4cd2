"""A small record of a benchmark, with round numbers."""

from __future__ import annotations

from kveval.bench.record import (
    AppendRow,
    Bench,
    CopyRow,
    DecodeRow,
    LeftOut,
    ModelRow,
    ReferenceRow,
    Spread,
    StepRow,
)
from kveval.bench.shapes import SHAPES

BYTES = {"bf16": 536_870_912, "nvfp4": 150_994_944}
US = {"bf16": 120.0, "nvfp4": 40.0}


def flat(x: float) -> Spread:
    return Spread(x, x, x, 3)


def make_bench() -> Bench:
    shape = SHAPES["llama-8b"]
    decode, references = [], []
    for length in (12800, 131072):
        part = 1 if length == 131072 else 10
        for name, us in US.items():
            nbytes = BYTES[name] // part
            rate = nbytes / (us / part) / 1e3
            decode.append(
                DecodeRow(
                    shape.name, 1, length, name, nbytes, flat(us / part), flat(rate), flat(rate / 4000),
                    flat(120 / us), flat(144 / us), None, flat(0.75 * us / part), flat(0.25),
                )
            )  # fmt: skip
        references.append(
            ReferenceRow(
                shape.name, 1, length, "torch sdpa", "heads as queries", BYTES["bf16"] // part, flat(144 / part),
                flat(BYTES["bf16"] / 144e3),
            )
        )  # fmt: skip
    return Bench(
        device="NVIDIA H200",
        caveat="",
        kernel_hash="ab" * 32,
        nvrtc="13.0",
        driver="580.1",
        commit="c" * 40,
        l2_bytes=60 * 2**20,
        env={"kveval": "0.1.0"},
        copy=CopyRow(8 * 2**30, flat(2147.0), flat(4000.0)),
        shapes=(shape,),
        decode=tuple(decode),
        references=tuple(references),
        append=(AppendRow(shape.name, 1, "nvfp4", flat(2.0), flat(4.0), flat(0.5), 1),),
        steps=(StepRow(shape.name, 1, 12800, "bf16", 32, flat(2.0), flat(0.4), flat(1.0), flat(1.0)),),
        model_steps=(ModelRow("smollm2-135m", 1024, "bf16", flat(9.0), 1.0, "packed kernels", 2**20, 2**30, 2**29),),
        left_out=(LeftOut("flashinfer", "it is not installed"),),
    )
