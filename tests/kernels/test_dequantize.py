"""The dequantize kernel, run by the emulator: it reads what the reference reads, bit for bit."""

from __future__ import annotations

import pytest
import torch
from emulator.emulator import EmulatorLauncher
from kernel_formats import FORMATS, HEAD_DIMS, global_scale
from torch import Tensor

from kveval.errors import UnsupportedError
from kveval.formats.codec import Frozen
from kveval.formats.spec import get_scheme
from kveval.kernels.dequantize import dequantize_cuda, dequantize_variant
from kveval.kernels.formats import format_key, format_of, kernel_codec, misfit
from kveval.kernels.manifest import read_manifest

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PER = ("one", "batch", "none", "head", "both")


def cases() -> list[tuple[str, int, torch.dtype, str]]:
    """Every format at one head size, and one of them at all."""
    found = []
    for i, (name, fmt) in enumerate(FORMATS.items()):
        fitting = [head_dim for head_dim in HEAD_DIMS if not misfit(fmt, head_dim)]
        found.append((name, fitting[i % len(fitting)], DTYPES[i % 3], PER[i % 5]))
    found += [("nvfp4.key", head_dim, DTYPES[i % 3], PER[i % 5]) for i, head_dim in enumerate(HEAD_DIMS)]
    # Here alone a product and its sum are rounded once where an addition apart would round twice.
    found.append(("uint8 groups of 8, fp32", 64, torch.float32, "none"))
    return list(dict.fromkeys(found))


def random_bytes(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def bits_of(x: Tensor) -> Tensor:
    """As integers, with one NaN: which of them comes out is the processor's choice."""
    one = torch.where(x.isnan(), torch.nan, x)
    return one.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check(
    name: str, head_dim: int, dtype: torch.dtype, per: str, *, start: int = 3, end: int = 60, device: str = "cpu"
) -> None:
    fmt = format_of(format_key(FORMATS[name]))
    batch, heads, capacity = 2, 3, 64
    q = random_bytes(batch, heads, capacity, fmt.payload_bytes(head_dim), seed=0)
    scale_bytes = fmt.scale_bytes(head_dim)
    s = random_bytes(batch, heads, capacity, scale_bytes, seed=1) if scale_bytes else None
    g = global_scale(fmt, batch, heads, per=per)
    frozen = Frozen() if g is None else Frozen(g[:, :, None, None])
    codec = kernel_codec(format_key(fmt), head_dim)
    x = torch.randn(batch, heads, capacity // 2, head_dim, generator=torch.Generator().manual_seed(2))
    payload, scale = codec.encode(x, frozen)
    q[:, :, ::2] = payload
    if s is not None and scale is not None:
        s[:, :, ::2] = scale
    rows = slice(start, end)
    expected = codec.decode(q[:, :, rows].contiguous(), None if s is None else s[:, :, rows], frozen, dtype)
    there = (None if t is None else t.to(device) for t in (s, g))
    found = dequantize_cuda(q.to(device), *there, format_key(fmt), head_dim, start, end, dtype).cpu()
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(bits_of(found), bits_of(expected))
    assert found.isfinite().float().mean() > 0.5


@pytest.mark.parametrize(("name", "head_dim", "dtype", "per"), cases())
def test_numbers_are_the_references(
    emulator: EmulatorLauncher, name: str, head_dim: int, dtype: torch.dtype, per: str
) -> None:
    """Of stored numbers, and of random bytes: every code, and scales of every kind, infinite ones too."""
    check(name, head_dim, dtype, per)
    assert len(emulator.launches) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "head_dim", "dtype", "per"), cases())
def test_a_gpu_reads_the_references_numbers(name: str, head_dim: int, dtype: torch.dtype, per: str) -> None:
    check(name, head_dim, dtype, per, device="cuda")


@pytest.mark.parametrize("name", ["bf16", "fp8_e5m2", "fp8_per_token_head", "int8_asym", "int4_g64", "mxfp4", "nvfp4"])
def test_the_manifest_compiles_what_is_launched(name: str) -> None:
    (entry,) = (entry for entry in read_manifest() if entry.kernel == f"dequantize {name}")
    fmt = get_scheme(name).key
    assert entry.variant == dequantize_variant(format_key(fmt), 128, scaled=fmt.freezes_scale, dtype=torch.bfloat16)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 64), (63, 64), (5, 7)])
def test_any_rows(emulator: EmulatorLauncher, start: int, end: int) -> None:
    check("nvfp4.key", 64, torch.bfloat16, "batch", start=start, end=end)


def test_no_rows_launch_nothing(emulator: EmulatorLauncher) -> None:
    fmt = FORMATS["nvfp4.key"]
    q, s = random_bytes(2, 3, 8, 32, seed=0), random_bytes(2, 3, 8, 4, seed=1)
    out = dequantize_cuda(q, s, None, format_key(fmt), 64, 5, 5, torch.bfloat16)
    assert out.shape == (2, 3, 0, 64)
    assert not emulator.launches


def test_offsets_beyond_32_bits(emulator: EmulatorLauncher) -> None:
    """The second head begins 2.6 GB after the first. Only what is read takes memory."""
    key, start = format_key(FORMATS["fp8_e4m3.key"]), 39_999_990
    q = torch.empty(1, 2, 40_000_000, 64, dtype=torch.uint8)
    q[:, :, start : start + 8] = random_bytes(1, 2, 8, 64, seed=2)
    expected = kernel_codec(key, 64).decode(q[:, :, start : start + 8].contiguous(), None)
    found = dequantize_cuda(q, None, None, key, 64, start, start + 8, torch.float32)
    assert torch.equal(bits_of(found), bits_of(expected))


def test_formats_without_a_kernel_are_refused(emulator: EmulatorLauncher) -> None:
    q, s = random_bytes(1, 1, 8, 64, seed=0), random_bytes(1, 1, 8, 8, seed=1)
    with pytest.raises(UnsupportedError, match="no element offset4"):
        dequantize_cuda(q, s, None, format_key(get_scheme("q4_0").key), 128, 0, 8, torch.bfloat16)
