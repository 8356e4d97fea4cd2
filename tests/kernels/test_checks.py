"""The checks of the kernels: each of them can fail, and those of stored bytes pass in the emulator.

The others pass in test_decode.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from emulator.emulator import EmulatorLauncher
from torch import Tensor

from kveval.bench.warm import variants_of
from kveval.errors import UnsupportedError
from kveval.formats.spec import get_scheme
from kveval.kernels import decode, reference
from kveval.kernels.checks import CHECKS, FULL, SMALL, Check, Result, invariance, probes, run_check, storage, trials
from kveval.kernels.checks.cases import Case, covered_schemes, poisoned_memory
from kveval.kernels.checks.measure import Measured, Yardstick, different, precision
from kveval.kernels.checks.record import summary
from kveval.kernels.checks.storage import STORAGE_CHECKS
from kveval.kernels.checks.trials import Sizes, Trial

CPU = torch.device("cpu")
ON_GPU = ("graphs", "giant")
TINY = replace(SMALL, few=("nvfp4", "bf16"), lengths=(40,), random=4, long=(64, 256))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(STORAGE_CHECKS))
def test_check_passes(emulator: EmulatorLauncher, name: str) -> None:
    emulator.seed = 1 + list(CHECKS).index(name)
    results = list(run_check(name, CPU, replace(SMALL, seed=emulator.seed)))
    assert results
    failed = [f"{r.case}, {r.what}: {r.error:.3g}, limit {r.limit:.3g} {r.message}" for r in results if not r.passed]
    assert not failed


@pytest.mark.parametrize("name", ON_GPU)
def test_what_only_a_gpu_can_do_is_left_out(name: str) -> None:
    assert list(CHECKS[name](CPU, SMALL)) == []


def exact(*args: object, splits: int = 0, **_: object) -> tuple[Tensor, Tensor]:
    """The kernel as it should be."""
    return reference.decode(*args)  # type: ignore[arg-type]


def reads_one_row_more(*args: object) -> tuple[Tensor, Tensor]:
    """Off by one: the first query sees the row behind its own, or the row that follows a sequence's last."""
    changed = list(args)
    changed[12] = args[12] + 1  # type: ignore[operator]
    if args[7] is not None:
        changed[7] = args[7] + torch.tensor([0, 1], dtype=torch.int32)  # type: ignore[operator]
    changed[11] = min(args[11] + 1, args[1].shape[2])  # type: ignore[operator,attr-defined]
    return reference.decode(*changed)  # type: ignore[arg-type]


def coarse(*args: object) -> tuple[Tensor, Tensor]:
    """Too few bits: a result rounded to six of them."""
    out, lse = reference.decode(*args)  # type: ignore[arg-type]
    mantissa, exponent = out.double().frexp()
    return ((mantissa * 64).round() / 64 * 2.0**exponent).to(out.dtype), lse


def forgets_the_last_split(*args: object) -> tuple[Tensor, Tensor]:
    changed = list(args)
    if int(str(args[17])) > 1:
        changed[11] = max(1, int(str(args[11])) - 16)
    return reference.decode(*changed)  # type: ignore[arg-type]


def leaves_memory(*args: object) -> tuple[Tensor, Tensor]:
    """Does not write what nothing is attended to for."""
    out, lse = reference.decode(*args)  # type: ignore[arg-type]
    left = torch.empty_like(out)
    seen = lse.isfinite().transpose(1, 2)[..., None]
    return torch.where(seen, out, left), lse


def wavers(*args: object) -> tuple[Tensor, Tensor]:
    """Differs from call to call by what the order of sums may."""
    *others, _, splits = args
    out, lse = reference.decode(*others, torch.float32, splits)  # type: ignore[arg-type]
    return (out * (1 + 1e-6 * torch.rand(()))).to(args[16]), lse  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (reads_one_row_more, "unused slots"),
        (reads_one_row_more, "bounds"),
        (reads_one_row_more, "queries"),
        (reads_one_row_more, "windows"),
        (coarse, "accuracy"),
        (coarse, "groups"),
        (coarse, "lengths"),
        (coarse, "head sizes"),
        (coarse, "softcap, sinks, dtypes"),
        (coarse, "random"),
        (coarse, "magnitudes"),
        (coarse, "strides"),
        (coarse, "long"),
        (coarse, "tails"),
        (coarse, "chunks"),
        (forgets_the_last_split, "splits"),
        (leaves_memory, "bounds"),
        (wavers, "repeats"),
        (wavers, "back to back"),
        (wavers, "scale equivariance"),
    ],
)
def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., tuple[Tensor, Tensor]], name: str
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(trials, "covered_schemes", lambda head_dim: TINY.few)
    monkeypatch.setattr(invariance, "append_cuda", reference.append)
    monkeypatch.setattr(decode, "decode_cuda", exact)
    assert all(r.passed for r in run_check(name, CPU, TINY))
    monkeypatch.setattr(decode, "decode_cuda", wrong)
    assert not all(r.passed for r in run_check(name, CPU, TINY))


def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_byte_off(*args: Tensor) -> None:
        reference.append(*args)  # type: ignore[arg-type]
        args[5][0, 0, -1, 0] ^= 1

    sizes = replace(SMALL, storage_step=9)
    monkeypatch.setattr(storage, "append_cuda", reference.append)
    assert all(r.passed for name in ("append", "append: NaN and infinity") for r in run_check(name, CPU, sizes))
    monkeypatch.setattr(storage, "append_cuda", one_byte_off)
    failed = [r for r in run_check("append", CPU, sizes) if not r.passed]
    assert failed
    assert all(r.what.startswith("codes of values") and r.error == 1 for r in failed)


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(SMALL, storage_step=9)
    monkeypatch.setattr(storage, "dequantize_cuda", reference.dequantize)
    assert all(r.passed for r in run_check("dequantize", CPU, sizes))
    monkeypatch.setattr(storage, "dequantize_cuda", lambda *args: reference.dequantize(*args).nextafter(torch.ones(())))
    assert not any(r.passed for r in run_check("dequantize", CPU, sizes) if "zeros" in r.what)


def test_a_case_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(device: torch.device, sizes: Sizes) -> list[Trial]:
        def refused() -> list[Measured]:
            raise UnsupportedError("no such kernel.", remedy="")

        def faulted() -> list[Measured]:
            raise RuntimeError("an illegal address")

        return [
            Trial("refused", refused, ()),
            Trial("faulted", faulted, ()),
            Trial("fine", lambda: [Measured("out", 1.0, 2.0), Measured("lse", 3.0, 2.0)], ()),
        ]

    named: Check = check  # type: ignore[assignment]
    monkeypatch.setitem(CHECKS, "three", named)
    results = list(run_check("three", CPU, SMALL))
    assert [(r.case, r.what, r.passed) for r in results] == [
        ("refused", "run", False),
        ("faulted", "run", False),
        ("fine", "out", True),
        ("fine", "lse", False),
    ]
    assert "no such kernel" in results[0].message
    row = summary("three", results)
    assert (row["cases"], row["comparisons"], len(row["failures"])) == (3, 4, 3)
    assert row["worst_ratio"] is None
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_ratios() -> None:
    def ratio(error: float, limit: float) -> float:
        return Result("a", "b", "c", error, limit).ratio

    assert ratio(1.0, 2.0) == 0.5
    assert ratio(0.0, 0.0) == 0.0
    assert ratio(1.0, 0.0) == math.inf
    assert ratio(math.nan, 1.0) == math.inf
    assert not Result("a", "b", "c", math.nan, 1.0).passed


def test_nan_is_the_worst_sequence() -> None:
    case = Case(scheme="nvfp4", batch=3, length=20)
    yardstick = Yardstick.of(case, case.make(CPU))
    out = yardstick.out.clone()
    out[1, 0, 0, 0] = torch.nan
    (measured, _) = yardstick.measure(out, yardstick.lse)
    assert math.isnan(measured.error)


def test_the_limit_is_that_of_the_precision() -> None:
    limits = {}
    for scheme in ("fp8_e4m3", "k16v8"):
        case = Case(scheme=scheme, heads=4, length=300)
        limits[precision(case)] = float(Yardstick.of(case, case.make(CPU)).out_limit[0])
    # Of rounding to eleven bits and to eight, a few times.
    assert 2**-12 < limits[torch.float16] < 2**-9
    assert 2**-9 < limits[torch.bfloat16] < 2**-6


def test_rows_that_nothing_reads_are_nan() -> None:
    case = Case(scheme="fp8_per_token_head", batch=2, length=30, bounds=((0, 20), (11, 30)))
    cache = case.make(CPU)
    assert cache.value.s is not None
    scales = cache.value.s.contiguous().view(torch.float32)[:, 0, :, 0]
    assert scales.isnan().tolist() == [
        [row >= 20 for row in range(case.capacity)],
        [not 11 <= row < 30 for row in range(case.capacity)],
    ]
    assert torch.equal(cache.value.q[scales.isnan()[:, None].expand(-1, 2, -1)].unique(), torch.tensor([0xFF]))


def test_memory_is_poisoned_where_a_kernel_allocates() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.zeros(1).new_empty(64).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_different_counts_bits() -> None:
    a = torch.tensor([0.0, 1.0, torch.nan, 2.0])
    assert different("x", a, torch.tensor([-0.0, 1.0, torch.nan, 3.0])).error == 2


def test_seeds_differ_and_repeat() -> None:
    first, again, other, later = (
        [seed() for _ in range(50)] and seed()
        for seed in (
            SMALL.seeds("bounds"), SMALL.seeds("bounds"), SMALL.seeds("splits"), replace(SMALL, seed=1).seeds("bounds"),
        )
    )  # fmt: skip
    assert first == again
    assert len({first, other, later}) == 3


def test_every_preset_with_a_kernel_is_tried() -> None:
    named = {trial.case.split()[0] for trial in CHECKS["accuracy"](CPU, FULL)}
    assert named == set(covered_schemes(128))
    assert {"bf16", "fp8_per_token_head", "int4_g64", "nvfp4", "k8v4", "k16v4", "mxfp4", "mxfp8"} <= named
    assert not any(get_scheme(name).key.granularity == "per_channel" for name in named)


def test_the_kernels_of_a_check_are_known_beforehand(emulator: EmulatorLauncher) -> None:
    """Else they would be compiled one after the other, while the GPU waits."""
    for name in ("tails", "dequantize"):
        known = variants_of([probe.touch for probe in probes(name, CPU, SMALL)])
        emulator.launches.clear()
        list(run_check(name, CPU, SMALL))
        assert emulator.launches
        assert set(emulator.launches) <= set(known)
