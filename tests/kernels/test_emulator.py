"""The emulator itself: its functions against torch, and mistakes of kernels that it must find."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulator.emulator import KERNELS, EmulatorError, EmulatorLauncher
from torch import Tensor

from kveval.kernels.compiler import Variant

HERE = Path(__file__).parent / "emulator"
CPU = torch.device("cpu")
SEEDS = range(6)
Run = Callable[..., None]


class SampleParams(ctypes.Structure):
    _fields_ = (("a", ctypes.c_uint64), ("b", ctypes.c_uint64), ("out", ctypes.c_uint64), ("sample", ctypes.c_int32))


@pytest.fixture(scope="module")
def launcher(kernel_builds: Path) -> EmulatorLauncher:
    return EmulatorLauncher(kernel_builds, sources=HERE)


@pytest.fixture
def run(launcher: EmulatorLauncher) -> Run:
    """Runs one sample of samples.cu."""

    def launch(
        sample: int,
        a: Tensor,
        out: Tensor,
        b: Tensor | None = None,
        *,
        seed: int = 0,
        block: int = 32,
        shared: int = 4096,
        grid: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        launcher.seed = seed
        params = SampleParams(a.data_ptr(), b.data_ptr() if b is not None else 0, out.data_ptr(), sample)
        variant = Variant("samples.cu", "sample")
        launcher.launch(variant, grid=grid, block=block, shared_bytes=shared, params=params, device=CPU)

    return launch


def words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def random_words(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).to(torch.int32)


# ---- functions


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("sample", "dtype"), [(0, torch.float16), (1, torch.bfloat16)])
def test_mma_is_a_matrix_product(run: Run, sample: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(16, 16, generator=generator).to(dtype)
    b = torch.randn(8, 16, generator=generator).to(dtype)
    c = torch.randn(16, 8, generator=generator)
    out = c.clone()
    run(sample, a, out, b, seed=seed)
    exact = c.double() + a.double() @ b.double().T
    assert torch.equal(out, exact.float())


def test_mma_keeps_infinity_and_nan_where_they_belong(run: Run) -> None:
    a = torch.ones(16, 16, dtype=torch.float16)
    b = torch.ones(8, 16, dtype=torch.float16)
    a[3, 15], b[6, 2] = torch.inf, torch.nan
    out = torch.zeros(16, 8)
    run(0, a, out, b)
    expected = torch.full((16, 8), 16.0)
    expected[3], expected[:, 6] = torch.inf, torch.nan
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_calls(run: Run, seed: int) -> None:
    x, out = random_words(32), words(6, 32)
    x[torch.arange(32)] &= 0x3FFFFFFF  # no NaN: a float keeps its bits
    run(2, x, out, seed=seed)
    lane = torch.arange(32)
    assert torch.equal(out[0], x[lane * 7 % 32])
    assert torch.equal(out[1], x[lane ^ 5])
    assert out[2].tolist() == [1] * 32
    assert torch.equal(out[3].view(torch.int16).view(8, 8), x.view(torch.int16).view(8, 8).T)
    assert sorted(out[4].tolist()) == [0] * 31 + [1]
    assert torch.equal(out[5], x[31 - lane])


def test_another_seed_elects_another_lane(run: Run) -> None:
    elected = set()
    for seed in range(8):
        out = words(6, 32)
        run(2, words(32), out, seed=seed)
        elected.add(int(out[4].argmax()))
    assert len(elected) > 3


def canonical(x: Tensor) -> Tensor:
    """The bits of a float16, bfloat16 or float32 tensor, with one pattern for NaN."""
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    return torch.where(x.isnan(), torch.tensor(-1, dtype=bits.dtype), bits)


def test_arithmetic_equals_torch_to_the_bit(run: Run) -> None:
    blocks = 256
    x = random_words(blocks * 32, 2)
    # Floats around the range of fp16 as well as anywhere, and halves on both sides of rounding ties.
    x[::2] = (
        (torch.randn(blocks * 16, 2, generator=torch.Generator().manual_seed(2)).exp2() * 2e-6)
        .pow(torch.tensor([1.0, -0.9]))
        .view(torch.int32)
    )
    x[1::8] &= ~0xFFF
    x[3::8, 0] = torch.arange(blocks * 4, dtype=torch.int32) * 0x10001 * 61
    out = words(blocks * 32, 8)
    run(3, x, out, grid=(blocks, 1, 1))
    halves = x.view(torch.float16).view(-1, 2, 2)
    floats = x.view(torch.float32)

    def check(column: int, expected: Tensor) -> None:
        got = out[:, column].contiguous().view(expected.dtype).view(expected.shape)
        assert torch.equal(canonical(got), canonical(expected))

    check(0, halves[:, 0] * halves[:, 1])
    check(1, halves[:, 0] - halves[:, 1])
    check(2, floats.to(torch.float16))
    check(3, floats.to(torch.bfloat16))
    check(4, halves[:, 0, 0].float())
    check(5, x.view(torch.uint8).view(-1, 8)[:, :2].contiguous().view(torch.float8_e4m3fn).to(torch.float16))
    octets = x.view(torch.uint8).view(-1, 8)
    assert torch.equal(out[:, 6].contiguous().view(torch.uint8).view(-1, 4), octets[:, [1, 3, 5, 7]])
    got = out[:, 7].contiguous().view(torch.uint8).view(-1, 4)
    sign = torch.where(octets >= 128, 255, 0).to(torch.uint8)
    assert torch.equal(got, torch.stack([octets[:, 4], octets[:, 0], sign[:, 4], sign[:, 0]], dim=1))


def test_exp2_and_log2(run: Run) -> None:
    x, out = torch.linspace(0.01, 9, 32), torch.zeros(32)
    run(9, x, out)
    torch.testing.assert_close(out, x.exp2() + x.log2())
    x[0], x[1] = torch.inf, torch.nan
    run(9, x, out)
    assert out[0] == torch.inf
    assert out[1].isnan()


@pytest.mark.parametrize("seed", SEEDS)
def test_rings_of_copies(run: Run, seed: int) -> None:
    x, out = torch.arange(7 * 64.0), torch.zeros(32)
    run(4, x, out, seed=seed)
    assert torch.equal(out, x.view(14, 32).sum(0))
    x, out = torch.arange(6 * 128.0), torch.zeros(128)
    run(5, x, out, seed=seed)
    assert torch.equal(out, x.view(6, 128).sum(0))


@pytest.mark.parametrize("seed", SEEDS)
def test_block_reduction(run: Run, seed: int) -> None:
    x, out = torch.arange(1024.0), torch.zeros(1)
    run(6, x, out, block=1024, seed=seed)
    assert out.item() == x.sum()


def test_the_last_block_combines_and_seeds_change_which_it_is(run: Run) -> None:
    x = torch.arange(24 * 32.0)
    last = set()
    for seed in SEEDS:
        out, counter = torch.full((26,), torch.nan), words(1)
        run(7, x, out, counter, grid=(2, 3, 4), seed=seed)
        assert out[0] == x.sum()
        assert counter.item() == 24
        last.add(out[1].item())
    assert 23 in last
    assert len(last) > 3


def test_atomics(run: Run) -> None:
    out = words(2)
    run(8, out, out, block=256, grid=(3, 1, 1))
    assert out.tolist() == [3 * 255 * 128, 0xFFFF]


# ---- mistakes


def found_in_results(run: Run, sample: int, expected: Tensor, a: Tensor, block: int = 32) -> int:
    """In how many of some seeds the sample either fails or gives another result."""
    found = 0
    for seed in range(20):
        out = torch.zeros_like(expected)
        try:
            run(sample, a, out, seed=seed, block=block)
        except EmulatorError:
            found += 1
        else:
            found += not torch.equal(out, expected)
    return found


def test_a_read_before_the_copy_has_landed_is_not_a_number(run: Run) -> None:
    out = torch.zeros(128)
    run(27, torch.arange(6 * 128.0), out)
    assert out.isnan().any()


def test_missing_synchronisation_is_found_by_some_order(run: Run) -> None:
    ring = torch.arange(7 * 64.0)
    assert found_in_results(run, 4, ring.view(14, 32).sum(0), ring) == 0
    assert found_in_results(run, 20, ring.view(14, 32).sum(0), ring) == 20
    assert found_in_results(run, 21, ring.view(14, 32).sum(0), ring) > 15
    block = torch.arange(256.0)
    assert found_in_results(run, 6, block.sum()[None], block, block=256) == 0
    assert found_in_results(run, 28, block.sum()[None], block, block=256) > 15


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (20, "a second arrival in one phase|copies in flight"),
        (22, "copy to byte .* is in flight|second arrival|copies in flight"),
        (23, "nothing can go on: threads 0 to 31 wait in barrier_wait at .*, -16 bytes missing"),
        (24, "nothing can go on: threads 0 to 31 wait in barrier_wait at .*, 16 bytes missing"),
        (25, "no barrier_init_fence"),
        (26, "the block ends with copies in flight"),
        (30, "shuffle at .*samples.cu:.*, but thread 0 is in sync_warp at .*samples.cu"),
        (31, "sync_warp at .*, but thread 0 is in sync_warp at"),
        (32, "thread 0 waits for it in sync_warp"),
        (33, "thread 0 waits for it in sync_block"),
        (34, "nothing can go on: threads 0 to 47 wait in sync_block at .*; threads 48 to 63 wait in sync_warp"),
        (40, "access to shared memory at byte 1048576 of 1024"),
        (41, "write to shared memory at byte 1008 of 1008"),
        (42, "is not in the block's shared memory"),
        (43, "bytes 1008 to 1024 of a block with 1008 bytes"),
        (44, "no multiple of 16 bytes"),
        (45, "no multiple of 16 bytes"),
        (46, "another copy to byte 0 is in flight"),
        (47, "returns with lane copies in flight"),
        (50, "misaligned or null access at .*samples.cu"),
        (51, "a shift by more bits than there are at .*samples.cu"),
        (52, "index 4 outside of an array at .*samples.cu"),
        (53, "invalid memory access at 0x8"),
        (54, "no barrier was initialised there"),
        (55, "the barrier was written over"),
        (56, "integer division by zero"),
    ],
)
def test_mistakes_end_the_launch_with_a_message(run: Run, sample: int, message: str) -> None:
    x, out = torch.arange(1024.0), torch.zeros(1024)
    with pytest.raises(EmulatorError, match=message) as error:
        run(sample, x, out, block=64 if sample in (33, 34) else 32, shared=1008 if sample in (41, 43) else 1024)
    assert re.search(r"samples\.cu, sample: block \(0, 0, 0\)", str(error.value))
    # The machine is as good as new.
    total = torch.zeros(1)
    run(6, x, total, block=256)
    assert total.item() == x[:256].sum()


def test_refused_launches(launcher: EmulatorLauncher) -> None:
    x = words(4)
    params = SampleParams(x.data_ptr(), x.data_ptr(), x.data_ptr(), 8)
    right = {"grid": (1, 1, 1), "block": 32, "shared_bytes": 0, "params": params, "device": CPU}
    variant = Variant("samples.cu", "sample")
    launcher.launch(variant, **right)
    for key, wrong in (
        ("grid", (0, 1, 1)),
        ("grid", (1, 2**16, 1)),
        ("block", 48),
        ("block", 2048),
        ("shared_bytes", 228 * 1024),
        ("params", ctypes.c_uint64(0)),
        ("device", torch.device("meta")),
    ):
        with pytest.raises(EmulatorError, match=r"sample|meta"):
            launcher.launch(variant, **{**right, key: wrong})
    with pytest.raises(EmulatorError, match="does not compile"):
        launcher.launch(Variant("samples.cu", "missing"), **right)


def test_an_older_gpu_lacks_what_came_later(kernel_builds: Path, tmp_path: Path) -> None:
    def compile_for(architecture: int, body: str) -> Path:
        (tmp_path / "old.cu").write_text(f'#include "ptx.cuh"\nKERNEL void old(GRID_CONSTANT u64 p) {{ {body} }}\n')
        return EmulatorLauncher(kernel_builds, sources=tmp_path, architecture=architecture).compile(
            Variant("old.cu", "old")
        )

    for body, first in (("barrier_init(0);", 90), ("half2_of_e4m3(0);", 89)):
        compile_for(first, body)
        with pytest.raises(EmulatorError, match=r"was not declared|undeclared"):
            compile_for(80, body)


def test_every_function_of_ptx_cuh_is_emulated() -> None:
    def functions(path: Path) -> set[str]:
        return set(re.findall(r"^DEVICE [\w ]+[*&]? ?\b(\w+)\(", path.read_text(), flags=re.MULTILINE))

    assert functions(KERNELS / "ptx.cuh") >= {"mma", "shared_memory", "lane_copies_wait", "bulk_copy"}
    assert functions(KERNELS / "ptx.cuh") == functions(HERE / "emulator.h")
