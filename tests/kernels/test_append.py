"""The append kernel, run by the emulator: it stores what the reference stores, byte for byte."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from emulator.emulator import EmulatorLauncher
from kernel_formats import FORMATS, HEAD_DIMS, NOT_IN_A_PRESET, border_rows, canonical, global_scale, hard_rows
from torch import Tensor

from kveval.errors import UnsupportedError
from kveval.formats.codec import Frozen
from kveval.formats.spec import TensorFormat, get_scheme
from kveval.kernels.append import append_cuda, append_variant
from kveval.kernels.formats import format_key, format_of, kernel_codec, misfit
from kveval.kernels.manifest import read_manifest

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRESETS = tuple(name for name in FORMATS if name not in NOT_IN_A_PRESET)
UNTOUCHED = 0xA5


@dataclass
class Role:
    """One side of a cache, before anything is stored."""

    fmt: TensorFormat
    x: Tensor
    g: Tensor | None
    q: Tensor
    s: Tensor | None
    start: int

    @property
    def key(self) -> str:
        return format_key(self.fmt)

    @property
    def frozen(self) -> Frozen:
        return Frozen() if self.g is None else Frozen(self.g[:, :, None, None])

    def to(self, device: str) -> Role:
        s, g = (None if t is None else t.to(device) for t in (self.s, self.g))
        return replace(self, x=self.x.to(device), g=g, q=self.q.to(device), s=s)

    def expected(self) -> tuple[Tensor, Tensor | None]:
        """The buffers as the reference leaves them."""
        q, s = self.q.clone(), None if self.s is None else self.s.clone()
        if self.x.shape[2] == 0:
            return q, s
        payload, scale = kernel_codec(self.key, self.x.shape[3]).encode(self.x, self.frozen)
        q[:, :, self.start : self.start + self.x.shape[2]] = payload
        if s is not None and scale is not None:
            s[:, :, self.start : self.start + self.x.shape[2]] = scale
        return q, s


def role(fmt: TensorFormat, x: Tensor, *, start: int = 2, per: str = "batch") -> Role:
    batch, heads, tokens, head_dim = x.shape
    fmt = format_of(format_key(fmt))

    def buffer(size: int) -> Tensor:
        return torch.full((batch, heads, start + tokens + 3, size), UNTOUCHED, dtype=torch.uint8)

    scale_bytes = fmt.scale_bytes(head_dim)
    return Role(
        fmt, x, global_scale(fmt, batch, heads, per=per), buffer(fmt.payload_bytes(head_dim)),
        buffer(scale_bytes) if scale_bytes else None, start,
    )  # fmt: skip


def with_borders(side: Role) -> Role:
    """`side` with rows at which what is stored changes."""
    batch, heads, _, head_dim = side.x.shape
    more = border_rows(kernel_codec(side.key, head_dim), side.frozen, batch, heads)
    wider = role(side.fmt, torch.cat([side.x, more], dim=2), start=side.start)
    return replace(wider, g=side.g)


def store(k: Role, v: Role) -> list[int]:
    """Run the kernel; what it says of NaN and infinity."""
    nonfinite = torch.zeros(2, dtype=torch.int32)
    append_cuda(k.x, v.x, k.q, k.s, k.g, v.q, v.s, v.g, nonfinite, k.start, v.start, k.key, v.key)
    return nonfinite.tolist()


def check(k: Role, v: Role) -> None:
    expected = [k.expected(), v.expected()]
    assert store(k, v) == [0, 0]
    for name, side, (q, s) in zip(("keys", "values"), (k, v), expected, strict=True):
        if s is not None and side.s is not None:
            wrong = (canonical(side.fmt, side.s) != canonical(side.fmt, s)).any(-1).nonzero().tolist()
            assert not wrong, f"scales of {name} differ at {wrong[:5]}"
        wrong = (side.q != q).any(-1).nonzero().tolist()
        assert not wrong, f"codes of {name} differ at {wrong[:5]}"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


PER = ("batch", "none", "head", "both", "one")


def pairs() -> list[tuple[str, str, int, torch.dtype, str]]:
    """Every preset's format at every head size, others at two, as keys or values.

    The dtype of the input and the shape of the tensor's scale change from one to the next.
    """
    found = []
    for turn, head_dim in enumerate(HEAD_DIMS):
        others = [name for i, name in enumerate(NOT_IN_A_PRESET) if (i + turn) % len(HEAD_DIMS) < 2]
        names = [name for name in (*PRESETS, *others) if not misfit(FORMATS[name], head_dim)]
        names += names[: len(names) % 2]
        for i in range(0, len(names), 2):
            a, b = (names[(i + turn + j) % len(names)] for j in range(2))
            found.append((a, b, head_dim, DTYPES[(i // 2 + turn) % 3], PER[(i + turn) % 5]))
    return found


@pytest.mark.parametrize(
    ("key", "value", "head_dim", "dtype", "per"),
    # Each takes a second to compile.
    [pytest.param(*pair, marks=() if pair[2] in (96, 128) else pytest.mark.slow) for pair in pairs()],
)
def test_bytes_are_the_references(
    emulator: EmulatorLauncher, key: str, value: str, head_dim: int, dtype: torch.dtype, per: str
) -> None:
    k = role(FORMATS[key], hard_rows(2, 3, head_dim, dtype), per=per)
    v = role(FORMATS[value], hard_rows(2, 3, head_dim, dtype, seed=1), start=5, per=per)
    if dtype == torch.float32:
        k, v = (with_borders(side) for side in (k, v))
    check(k, v)
    assert len(emulator.launches) == 1


def test_sums_are_taken_by_halves(emulator: EmulatorLauncher) -> None:
    """Over lanes first; of four lanes the order shows in one rounding of thousands."""
    k, v = (role(FORMATS["4 over 6 in 32"], numbers(4, 8, 1, 128, seed=seed), per="none") for seed in (0, 1))
    check(*(with_borders(side) for side in (k, v)))


@pytest.mark.gpu
@pytest.mark.parametrize(("key", "value", "head_dim", "dtype", "per"), pairs())
def test_a_gpu_stores_the_references_bytes(key: str, value: str, head_dim: int, dtype: torch.dtype, per: str) -> None:
    sides = [
        role(FORMATS[key], hard_rows(2, 3, head_dim, dtype), per=per),
        role(FORMATS[value], hard_rows(2, 3, head_dim, dtype, seed=1), start=5, per=per),
    ]
    if dtype == torch.float32:
        sides = [with_borders(side) for side in sides]
    expected = [side.expected() for side in sides]
    there = [side.to("cuda") for side in sides]
    nonfinite = torch.zeros(2, dtype=torch.int32, device="cuda")
    append_cuda(
        there[0].x, there[1].x, there[0].q, there[0].s, there[0].g, there[1].q, there[1].s, there[1].g, nonfinite,
        there[0].start, there[1].start, there[0].key, there[1].key,
    )  # fmt: skip
    assert nonfinite.tolist() == [0, 0]
    for side, (q, s) in zip(there, expected, strict=True):
        assert torch.equal(side.q.cpu(), q)
        if s is not None and side.s is not None:
            assert torch.equal(canonical(side.fmt, side.s.cpu()), canonical(side.fmt, s))


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "fp8_per_token_head", "nvfp4", "nvfp4_4over6", "k8v4", "k16v4"])
def test_the_manifest_compiles_what_is_launched(name: str) -> None:
    (entry,) = (entry for entry in read_manifest() if entry.kernel == f"append {name}")
    k, v = get_scheme(name).key, get_scheme(name).value
    launched = append_variant(
        format_key(k), format_key(v), 128, 128, key_scaled=k.freezes_scale, value_scaled=v.freezes_scale,
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert entry.variant == launched


def test_every_preset_format_is_stored_at_every_head_size() -> None:
    stored = {(name, head_dim) for a, b, head_dim, _, _ in pairs() for name in (a, b)}
    # Groups of 64 do not divide heads of 80 and 96, nor groups of 32 heads of 80.
    missing = {(name, head_dim) for name in PRESETS for head_dim in HEAD_DIMS} - stored
    assert all(head_dim in (80, 96) and FORMATS[name].group_size in (32, 64) for name, head_dim in missing)
    assert {dtype for *_, dtype, _ in pairs()} == set(DTYPES)


FP8 = get_scheme("fp8_per_token_head").key
NVFP4 = get_scheme("nvfp4").key
INT4 = get_scheme("int4_g64").key


def strided(x: Tensor, kind: str) -> Tensor:
    """A view with the numbers of `x`."""
    batch, heads, tokens, head_dim = x.shape
    if kind == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "part of a wider row":
        wide = torch.full((batch, tokens, heads, 3 * head_dim), 1e4, dtype=x.dtype)
        view = wide[..., head_dim : 2 * head_dim].transpose(1, 2)
    elif kind == "not aligned":
        view = torch.full((batch, heads, tokens, head_dim + 3), 1e4, dtype=x.dtype)[..., 1 : head_dim + 1]
    else:
        view = torch.full((batch, heads, 2 * tokens, head_dim), 1e4, dtype=x.dtype)[:, :, ::2]
    view.copy_(x)
    return view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["transposed", "part of a wider row", "not aligned", "every other token"])
def test_strides_do_not_show(emulator: EmulatorLauncher, kind: str, dtype: torch.dtype) -> None:
    x = hard_rows(2, 3, 128, dtype)
    view = strided(x, kind)
    assert not view.is_contiguous()
    check(role(FP8, view), role(NVFP4, strided(x.flip(2), kind)))


@pytest.mark.parametrize("tokens", [(1, 1), (3, 0), (0, 5), (7, 2), (9, 40)])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_number_of_tokens(emulator: EmulatorLauncher, tokens: tuple[int, int], seed: int) -> None:
    emulator.seed = seed
    """What lies behind them in memory is NaN: nobody may look at it."""
    sides = []
    for fmt, count in zip((FP8, NVFP4), tokens, strict=True):
        x = numbers(2, 3, 50, 128).bfloat16()
        x[:, :, count:] = math.nan
        sides.append(role(fmt, x[:, :, :count]))
    check(*sides)


def test_nothing_new_launches_nothing(emulator: EmulatorLauncher) -> None:
    x = torch.randn(2, 3, 0, 128)
    k, v = role(FP8, x), role(NVFP4, x)
    assert store(k, v) == [0, 0]
    assert not emulator.launches
    assert (k.q == UNTOUCHED).all()


def test_one_by_one_is_at_once(emulator: EmulatorLauncher) -> None:
    x = numbers(2, 3, 6, 128).bfloat16()
    whole = role(FP8, x), role(NVFP4, x)
    store(*whole)
    steps = role(FP8, x), role(NVFP4, x)
    for i in range(6):
        store(*(replace(side, x=x[:, :, i : i + 1], start=side.start + i) for side in steps))
    assert len(emulator.launches) == 7
    for a, b in zip(whole, steps, strict=True):
        assert a.s is not None
        assert b.s is not None
        assert torch.equal(a.q, b.q)
        assert torch.equal(a.s, b.s)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(512, 64), (576, 512), (8, 200)])
def test_keys_and_values_of_other_sizes(emulator: EmulatorLauncher, key_dim: int, value_dim: int) -> None:
    """Heads beyond a warp's 256 elements, of one lane, and of lanes that are no power of two."""
    x = hard_rows(1, 2, key_dim, torch.bfloat16), hard_rows(1, 2, value_dim, torch.bfloat16)
    check(role(FP8, x[0]), role(get_scheme("int8_asym").value, x[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_reported(emulator: EmulatorLauncher, bad: float, dtype: torch.dtype) -> None:
    for where in ((0, 0, 0, 0), (1, 2, 8, 127), (0, 1, 4, 77)):
        for broken in range(2):
            x = [torch.randn(2, 3, 9, 128).to(dtype) for _ in range(2)]
            x[broken][where] = bad
            assert store(role(FP8, x[0]), role(NVFP4, x[1])) == [int(broken == 0), int(broken == 1)]


def test_a_report_is_never_taken_back(emulator: EmulatorLauncher) -> None:
    x = torch.randn(1, 1, 1, 128)
    k, v = role(FP8, x), role(NVFP4, x)
    nonfinite = torch.tensor([1, 0], dtype=torch.int32)
    append_cuda(k.x, v.x, k.q, k.s, k.g, v.q, v.s, v.g, nonfinite, 2, 2, k.key, v.key)
    assert nonfinite.tolist() == [1, 0]


def test_offsets_beyond_32_bits(emulator: EmulatorLauncher) -> None:
    """The second head begins 2.6 GB after the first. Only what is written takes memory."""
    capacity, start = 40_000_000, 39_999_997
    x = numbers(1, 2, 2, 64).bfloat16()
    small = role(FP8, x)
    q, s = small.expected()
    assert s is not None
    large = replace(
        small, start=start,
        q=torch.empty(1, 2, capacity, 64, dtype=torch.uint8), s=torch.empty(1, 2, capacity, 4, dtype=torch.uint8),
    )  # fmt: skip
    nothing = role(FP8, x[:, :, :0])
    assert store(large, nothing) == [0, 0]
    assert large.s is not None
    assert torch.equal(large.q[:, :, start : start + 2], q[:, :, 2:4])
    assert torch.equal(large.s[:, :, start : start + 2], s[:, :, 2:4])


def test_storage_that_kernels_cannot_address_is_refused(emulator: EmulatorLauncher) -> None:
    x = torch.randn(1, 2, 4, 128)
    k, v = role(FP8, x), role(NVFP4, x)
    shifted = torch.zeros(k.q.numel() + 1, dtype=torch.uint8)[1:].view_as(k.q)
    with pytest.raises(UnsupportedError, match="aligned to 8 bytes"):
        store(replace(k, q=shifted), v)
    assert k.s is not None
    shifted = torch.zeros(k.s.numel() + 2, dtype=torch.uint8)[2:].view_as(k.s)
    with pytest.raises(UnsupportedError, match="aligned to 4 bytes"):
        store(replace(k, s=shifted), v)
    assert not emulator.launches


@pytest.mark.parametrize(
    ("name", "head_dim", "reason"),
    [
        ("kivi4", 128, "scales a channel over several tokens"),
        ("q4_0", 128, "no element offset4"),
        ("turboquant_4bit", 128, "no element lloyd_max4"),
        ("q8_0", 128, "not as ggml"),
        ("int4_g64", 96, "groups of 64 do not divide a head of 96"),
        ("fp8_per_token_head", 100, "a head of 100 is no multiple of 8"),
        ("crush", 128, "no element int2"),
    ],
)
def test_formats_without_a_kernel_are_refused(
    emulator: EmulatorLauncher, name: str, head_dim: int, reason: str
) -> None:
    fmt = get_scheme(name).key
    x = torch.zeros(1, 1, 0, head_dim)
    k = role(fmt, x)
    with pytest.raises(UnsupportedError, match=reason):
        append_cuda(
            x.new_zeros(1, 1, 1, head_dim), x, k.q, k.s, None, k.q, k.s, None, torch.zeros(2, dtype=torch.int32), 0, 0,
            k.key, k.key,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "head_dim", "reason"),
    [
        ({"group_size": 24, "scale_rule": "amax"}, 96, "groups of 24 are neither the whole head nor a power of two"),
        ({"group_size": 512, "scale_rule": "amax"}, 1024, "groups of 512 are neither"),
        ({"group_size": 96, "scale_rule": "four_over_six"}, 96, "groups of 96 are neither"),
    ],
)
def test_groups_that_lanes_do_not_share_are_refused(fields: dict[str, object], head_dim: int, reason: str) -> None:
    common = {"element": "e2m1", "granularity": "per_group", "scale_dtype": "fp16"}
    assert reason in misfit(TensorFormat(**common, **fields), head_dim)
    assert not misfit(TensorFormat(**common, group_size=96, scale_rule="amax"), 96)
