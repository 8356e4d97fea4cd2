"""The contract of every preset's codec: bytes, bounds, independence and extremes, against float64 references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kveval.formats.codec import Codec
from kveval.formats.spec import KVScheme, TensorFormat, get_scheme, scheme_names

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def format_of(name: str) -> TensorFormat:
    return get_scheme(name).key


PURE = [name for name in scheme_names() if get_scheme(name).key == get_scheme(name).value]
LOSSY = [name for name in PURE if name != "bf16"]
MATRIX = pytest.mark.parametrize("head_dim", HEAD_DIMS)
EVERY = pytest.mark.parametrize("name", PURE)


def numbers(*shape: int, seed: int = 0, magnitude: float = 1.0) -> Tensor:
    """Random bfloat16-representable values with a few larger channels, as keys have."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    x[..., ::17] *= 6
    return x.bfloat16().float()


def stored(name: str, x: Tensor) -> tuple[Codec, Tensor, Tensor | None, Tensor | None]:
    """Codec, payload, scales and frozen constant of `x` [B, H, T, D] written at once."""
    codec = Codec(format_of(name), x.shape[-1])
    constant = codec.constant(x)
    return codec, *codec.encode(x, constant), constant


def round_trip(name: str, x: Tensor) -> Tensor:
    codec, payload, scale, constant = stored(name, x)
    return codec.decode(payload, scale, constant, torch.float32)


def element_grid(fmt: TensorFormat) -> np.ndarray:
    """float64: what each code of the element stands for, by its definition; NaN where it stands for no number."""
    codes = np.arange(2**fmt.info.bits)
    if fmt.element == "e2m1":
        return np.where(codes < 8, 1.0, -1.0) * E2M1[codes & 7]
    if fmt.info.kind == "int":
        if fmt.scale_rule == "minmax":
            return codes.astype(float)
        return np.where(codes < 2 ** (fmt.info.bits - 1), codes, codes - 2.0**fmt.info.bits)
    mantissa_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[fmt.element]
    return float8(codes, mantissa_bits, bias)


def float8(codes: np.ndarray, mantissa_bits: int, bias: int) -> np.ndarray:
    exponent, mantissa = (codes & 0x7F) >> mantissa_bits, codes & (2**mantissa_bits - 1)
    fraction = mantissa / 2**mantissa_bits
    value = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    value[((codes & 0x7F) == 0x7F) if mantissa_bits == 3 else (exponent == 31)] = np.nan
    return np.where(codes < 128, value, -value)


def stored_scales(fmt: TensorFormat, scale: Tensor) -> np.ndarray:
    """float64 [..., n] from scale bytes [..., S], by each type's definition."""
    raw = np.ascontiguousarray(scale.numpy())
    if fmt.scale_dtype == "fp32":
        return raw.view("<f4").astype(np.float64)
    if fmt.scale_dtype == "bf16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if fmt.scale_dtype == "e8m0":
        return 2.0 ** (raw.astype(float) - 127)
    assert fmt.scale_dtype == "e4m3"
    return float8(raw.astype(np.int64), 3, 7)


def steps_and_zeros(
    fmt: TensorFormat, scale: Tensor | None, constant: Tensor | None, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """float64 step and zero point per element, broadcastable to [B, H, T, D]."""
    frozen = 1.0 if constant is None else constant.double().numpy()
    if scale is None:
        return np.full((1, 1, 1, 1), fmt.fixed_scale) * frozen, np.zeros((1, 1, 1, 1))
    values = stored_scales(fmt, scale)
    zeros = np.zeros_like(values)
    if fmt.scale_rule == "minmax":
        values, zeros = np.split(values, 2, axis=-1)
    size = fmt.group_size or head_dim
    spread = [np.repeat(v, size, axis=-1)[..., :head_dim] for v in (values * frozen, zeros)]
    return spread[0], spread[1]


def codes_in(payload: Tensor, bits: int, head_dim: int) -> np.ndarray:
    """int64 [..., D] from packed bytes: bit i of a row is bit i % 8 of byte i // 8."""
    as_bits = np.unpackbits(payload.numpy(), axis=-1, bitorder="little")[..., : head_dim * bits]
    return (as_bits.reshape(*payload.shape[:-1], head_dim, bits) << np.arange(bits)).sum(-1)


@EVERY
@MATRIX
def test_stored_bytes_equal_the_formula(name: str, head_dim: int) -> None:
    fmt = format_of(name)
    _, payload, scale, constant = stored(name, numbers(2, 3, 5, head_dim))
    assert payload.dtype == torch.uint8
    assert payload.shape == (2, 3, 5, fmt.payload_bytes(head_dim))
    assert (0 if scale is None else scale.shape[-1]) == fmt.scale_bytes(head_dim)
    assert scale is None or (scale.dtype == torch.uint8 and scale.shape[:-1] == (2, 3, 5))
    assert (0 if constant is None else constant[0].nbytes) == fmt.constant_bytes
    total = payload.nbytes + (0 if scale is None else scale.nbytes)
    assert total == 2 * 3 * 5 * fmt.token_bytes(head_dim)


@pytest.mark.parametrize("name", LOSSY)
@MATRIX
def test_decode_is_what_the_stored_bytes_say_in_float64(name: str, head_dim: int) -> None:
    fmt, x = format_of(name), numbers(2, 2, 6, head_dim, seed=1)
    codec, payload, scale, constant = stored(name, x)
    step, zero = steps_and_zeros(fmt, scale, constant, head_dim)
    expected = element_grid(fmt)[codes_in(payload, fmt.info.bits, head_dim)] * step + zero
    decoded = codec.decode(payload, scale, constant, torch.float32).double().numpy()
    np.testing.assert_allclose(decoded, expected, rtol=1e-6, atol=1e-6 * np.abs(zero).max())


@pytest.mark.parametrize("name", LOSSY)
@MATRIX
def test_every_element_has_the_nearest_code_that_its_scale_offers(name: str, head_dim: int) -> None:
    fmt, x = format_of(name), numbers(2, 2, 6, head_dim, seed=2)
    codec, payload, scale, constant = stored(name, x)
    step, zero = steps_and_zeros(fmt, scale, constant, head_dim)
    grid = element_grid(fmt)
    if fmt.info.kind == "int" and fmt.scale_rule != "minmax":
        grid = grid[np.abs(grid) <= fmt.info.max]
    exact = x.double().numpy()
    candidates = grid[np.isfinite(grid)] * step[..., None] + zero[..., None]
    nearest = np.abs(exact[..., None] - candidates).min(-1)
    error = np.abs(exact - codec.decode(payload, scale, constant, torch.float32).double().numpy())
    assert (error <= nearest * (1 + 1e-6) + 1e-6 * np.abs(exact)).all()


def group_amax(fmt: TensorFormat, exact: np.ndarray) -> np.ndarray:
    """Largest magnitude of each element's scale group; [B, H, T, D] (or [B, 1, 1, 1] for a whole sequence)."""
    if fmt.granularity == "per_tensor":
        return np.abs(exact).max((1, 2, 3), keepdims=True)
    size = fmt.group_size or exact.shape[-1]
    starts = np.arange(0, exact.shape[-1], size)
    per_group = np.maximum.reduceat(np.abs(exact), starts, axis=-1)
    return np.repeat(per_group, size, axis=-1)[..., : exact.shape[-1]]


def error_bound(name: str, exact: np.ndarray, sequence_amax: np.ndarray) -> np.ndarray:
    """The most that a value may move, from the formats' definitions alone (not from what was stored)."""
    fmt, size = format_of(name), np.abs(exact)
    amax = group_amax(fmt, exact)
    if fmt.scale_rule == "minmax":
        # Half a step, what rounding the step and the zero point to 8 significant bits moves.
        return 2 * amax / 15 / 2 + 3 * amax * 2.0**-8
    return {
        "bf16": lambda: size * 2.0**-8,
        "fp8_e4m3": lambda: np.maximum(np.maximum(size * 2.0**-4, 2.0**-10), size - 448),
        "fp8_e5m2": lambda: np.maximum(np.maximum(size * 2.0**-3, 2.0**-17), size - 57344),
        "fp8_per_token_head": lambda: size * 2.0**-4 + amax / 448 * 2.0**-10,
        "int8_per_token_head": lambda: amax / 127 / 2,
        # Half the gap between 4 and 6, times a block scale that e4m3 rounds by 1/16, or by half its least value.
        "nvfp4": lambda: amax / 6 * 17 / 16 + 6 * 2.0**-10 * sequence_amax / 2688,
        # The floor rule leaves amax between 4 and 8 steps: up to 2 steps are cut off, a quarter of 8.
        "mxfp4": lambda: amax / 4,
        "crush": lambda: amax / 2,
    }[name]()


@EVERY
@MATRIX
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_error_bound_against_float64(name: str, head_dim: int, magnitude: float) -> None:
    x = numbers(2, 2, 8, head_dim, seed=3, magnitude=magnitude)
    exact = x.double().numpy()
    error = np.abs(round_trip(name, x).double().numpy() - exact)
    bound = error_bound(name, exact, np.abs(exact).max((1, 2, 3), keepdims=True))
    assert (error <= bound * (1 + 1e-5)).all()


@EVERY
def test_lossy_formats_really_lose_and_bf16_keeps_every_bit(name: str) -> None:
    x = numbers(1, 2, 4, 64, seed=4)
    lost = (round_trip(name, x) != x).float().mean()
    assert lost == 0 if name == "bf16" else lost > 0.2


@EVERY
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunks_give_the_same_bytes(name: str, head_dim: int, chunk: int) -> None:
    """In any chunks where that is promised; else in any chunks after the first write, which freezes the scale."""
    fmt, x = format_of(name), numbers(2, 2, 23, head_dim, seed=5)
    codec = Codec(fmt, head_dim)
    constant = codec.constant(x[:, :, :4])
    assert (constant is None) == fmt.append_invariant
    starts = [*range(0, 23, chunk)] if fmt.append_invariant else [0, *range(4, 23, chunk)]
    pieces = [x[:, :, a:b] for a, b in zip(starts, [*starts[1:], 23], strict=True)]
    written = [codec.encode(piece, constant) for piece in pieces]
    payload, scale = codec.encode(x, constant)
    assert torch.equal(torch.cat([p for p, _ in written], 2), payload)
    if scale is not None:
        assert torch.equal(torch.cat([s for _, s in written], 2), scale)


@pytest.mark.parametrize("name", ["nvfp4", "crush"])
def test_formats_that_freeze_a_scale_do_depend_on_the_first_write(name: str) -> None:
    x = numbers(1, 1, 8, 64)
    x[:, :, 4:] *= 8
    codec = Codec(format_of(name), 64)
    first, whole = codec.constant(x[:, :, :4]), codec.constant(x)
    assert first is not None
    assert whole is not None
    assert not torch.equal(codec.encode(x, first)[0], codec.encode(x, whole)[0])


@EVERY
def test_a_row_alone_has_the_bytes_of_the_row_in_a_batch(name: str) -> None:
    x = numbers(3, 2, 5, 80, seed=6) * torch.tensor([1.0, 100.0, 0.01])[:, None, None, None]
    _, payload, scale, constant = stored(name, x)
    for row in range(3):
        _, p, s, c = stored(name, x[row : row + 1])
        assert torch.equal(payload[row : row + 1], p)
        for whole, alone in ((scale, s), (constant, c)):
            assert (alone is None) if whole is None else torch.equal(whole[row : row + 1], alone)


@EVERY
def test_a_transposed_view_has_the_bytes_of_its_copy(name: str) -> None:
    x = numbers(2, 5, 3, 96, seed=7).transpose(1, 2)
    assert not x.is_contiguous()
    codec = Codec(format_of(name), 96)
    constant = codec.constant(x)
    for strided, plain in zip(codec.encode(x, constant), codec.encode(x.contiguous(), constant), strict=True):
        assert (strided is None) if plain is None else torch.equal(strided, plain)


@EVERY
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zeros_stay_zeros(name: str, value: float) -> None:
    assert (round_trip(name, torch.full((1, 2, 3, 80), value)) == 0).all()


@EVERY
@pytest.mark.parametrize("value", [1.0, -3.0, 448.0, 2.0**-100, 2.0**60])
def test_constants_are_exact_where_the_format_can(name: str, value: float) -> None:
    got = round_trip(name, torch.full((1, 1, 3, 80), value))
    assert torch.isfinite(got).all()
    in_range = {"fp8_e4m3": 2.0**-9 <= abs(value) <= 448, "fp8_e5m2": 2.0**-16 <= abs(value) <= 57344}
    if name in ("fp8_per_token_head", "int8_per_token_head", "nvfp4"):
        # The scale itself is rounded to float32, at least once.
        assert torch.allclose(got, torch.tensor(value), rtol=1e-6, atol=0)
    elif in_range.get(name, True):
        # 448 / 2^6 = 7 is beyond the largest e2m1 value; the floor rule cuts it to 6.
        expected = 384.0 if (name, value) == ("mxfp4", 448.0) else value
        assert (got == expected).all()


@EVERY
def test_one_outlier_channel_is_kept_and_stays_in_its_group(name: str) -> None:
    fmt = format_of(name)
    x = numbers(1, 1, 4, 128, seed=8)
    x[..., 77] = 3e4
    got = round_trip(name, x)
    assert torch.isfinite(got).all()
    limit = 448 if name == "fp8_e4m3" else 3e4
    assert torch.allclose(got[..., 77], torch.tensor(float(limit)), rtol=0.2)
    if fmt.granularity == "per_group" and fmt.global_divisor is None:
        size = fmt.group_size or 0
        near = torch.arange(128) // size == 77 // size
        alone = x.clone()
        alone[..., 77] = 0
        assert torch.equal(got[..., ~near], round_trip(name, alone)[..., ~near])


# 1.4e-45 and 1e-42 are subnormal in float32, and so small that dividing them by a scale's divisor gives zero.
EXTREMES = [1.4e-45, 1e-42, 9.2e-41, 1e-38, 1e-30, 6e4, 1e30, 1e38]


@EVERY
@pytest.mark.parametrize("magnitude", EXTREMES)
@pytest.mark.parametrize("shape", ["constant", "alternating", "outlier"])
def test_extreme_magnitudes_stay_finite_and_in_bounds(name: str, magnitude: float, shape: str) -> None:
    x = torch.full((1, 2, 3, 80), magnitude)
    if shape == "alternating":
        x[..., ::2] *= -1
    if shape == "outlier":
        x[..., 1:] = 0
    codec, payload, scale, constant = stored(name, x)
    got = codec.decode(payload, scale, constant, torch.float32)
    assert torch.isfinite(got).all()
    assert constant is None or (torch.isfinite(constant) & (constant > 0)).all()
    # Nothing may grow beyond its block by more than the rounding of a scale; ranges that are fixed cut instead.
    assert (got.abs() <= x.abs().amax() * 1.1 + 2.0**-9).all()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4", "crush"])
def test_values_beyond_a_frozen_scale_saturate(name: str) -> None:
    codec = Codec(format_of(name), 64)
    first, later = numbers(1, 1, 4, 64), numbers(1, 1, 4, 64) * 1e6
    constant = codec.constant(first)
    payload, scale = codec.encode(later, constant)
    got = codec.decode(payload, scale, constant, torch.float32)
    assert torch.isfinite(got).all()
    assert (torch.sign(got) * torch.sign(later) >= 0).all()
    if name == "nvfp4":
        assert scale is not None
        assert scale.max() == 0x7E
        assert got.abs().max() == torch.tensor(6 * 448.0) * constant[0, 0, 0, 0]


def test_nvfp4_blocks_whose_scale_rounds_to_zero_decode_to_zero() -> None:
    x = torch.zeros(1, 1, 2, 64)
    x[..., 0], x[..., 16:32] = 2688.0, 1e-3
    codec, payload, scale, constant = stored("nvfp4", x)
    assert constant is not None
    assert constant.item() == 1.0
    assert scale is not None
    assert scale[0, 0].tolist() == [[0x7E, 0x00, 0x00, 0x00]] * 2
    got = codec.decode(payload, scale, constant, torch.float32)
    assert got[0, 0, 0, 0] == 2688
    assert (got[..., 1:] == 0).all()


def test_a_frozen_scale_ignores_an_empty_range() -> None:
    for name, divisor in (("nvfp4", 2688.0), ("crush", 1.0)):
        codec = Codec(format_of(name), 64)
        x = torch.zeros(3, 1, 2, 64)
        x[1, 0, 0, 5], x[2, 0, 1, 3] = -divisor, 1e-44
        constant = codec.constant(x)
        assert constant is not None
        assert constant[:2, 0, 0, 0].tolist() == [1.0, 1.0]
        assert constant[2].item() == (1.0 if name == "nvfp4" else float(torch.tensor(1e-44)))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("head_dim", [64, 80, 112])
def test_decoded_values_are_stored_unchanged(name: str, head_dim: int) -> None:
    """Reading and writing back (a move between caches, a fork through tensors) must not drift."""
    codec, payload, scale, constant = stored(name, numbers(2, 2, 6, head_dim, seed=9))
    once = codec.decode(payload, scale, constant, torch.float32)
    again_payload, again_scale = codec.encode(once, constant)
    again = codec.decode(again_payload, again_scale, constant, torch.float32)
    assert torch.allclose(again, once, rtol=1e-5, atol=1e-6)
    if format_of(name).granularity == "per_tensor" or name == "mxfp4":
        assert torch.equal(again_payload, payload)
        assert scale is None or torch.equal(again_scale, scale)


def test_golden_bytes() -> None:
    """Bytes worked out by hand; a reader and a writer that are wrong together can't agree on these."""
    ramp = torch.arange(16.0).repeat(4)[None, None, None]
    _, payload, scale, _ = stored("int4_g64", ramp)
    assert payload[0, 0, 0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert scale[0, 0, 0].tolist() == [0x80, 0x3F, 0x00, 0x00]  # step 1, zero point 0 in bfloat16

    x = torch.zeros(1, 1, 1, 32)
    x[..., 0], x[..., 1], x[..., 2], x[..., 3] = -448.0, 1.0, 448.0, 0.5
    _, payload, scale, _ = stored("fp8_per_token_head", x)
    assert payload[0, 0, 0, :5].tolist() == [0xFE, 0x38, 0x7E, 0x30, 0x00]
    assert scale[0, 0, 0].tolist() == [0x00, 0x00, 0x80, 0x3F]  # 1.0 in float32

    x[..., 0], x[..., 2] = -254.0, 127.0
    _, payload, scale, _ = stored("int8_per_token_head", x)
    assert payload[0, 0, 0, :4].tolist() == [0x81, 0x00, 64, 0x00]  # -127; 0.5 and 63.5 tie to even; 0.25
    assert scale[0, 0, 0].tolist() == [0x00, 0x00, 0x00, 0x40]

    x[..., 0], x[..., 1], x[..., 2], x[..., 3] = -6.5, 0.25, 3.0, 5.0
    _, payload, scale, _ = stored("mxfp4", x)
    assert payload[0, 0, 0, :3].tolist() == [0x0F, 0x65, 0x00]  # -6, 0, 3, 4: low nibble first
    assert scale[0, 0, 0].tolist() == [127]  # 2^(floor(log2 6.5) - 2)

    x[..., 0], x[..., 16] = -6.0, 3.0
    _, payload, scale, constant = stored("nvfp4", x)
    assert payload[0, 0, 0, [0, 1, 8]].tolist() == [0x0F, 0x65, 0x07]
    assert scale[0, 0, 0].tolist() == [0x7E, 0x76]  # 448 and 224 in e4m3
    assert constant.item() == pytest.approx(6 / 2688)

    _, payload, _, constant = stored("crush", torch.tensor([[[[-4.0, 4.0, 1.9, 2.1, 0.0]]]]))
    assert payload[0, 0, 0].tolist() == [0b01000111, 0]
    assert constant.item() == 4.0


def test_mx_scales_follow_the_floor_rule_by_integers() -> None:
    exponents = list(range(-149, 128))
    amax = torch.tensor([2.0**e for e in exponents] + [1.999 * 2.0**e for e in exponents if e > -127])
    x = torch.zeros(1, 1, len(amax), 32)
    x[0, 0, :, 9] = amax
    _, _, scale, _ = stored("mxfp4", x)
    expected = [int(np.frexp(a)[1]) - 1 - 2 + 127 for a in amax.double().tolist()]
    assert scale is not None
    assert scale[0, 0, :, 0].tolist() == [min(max(e, 0), 254) for e in expected]


def test_mx_scales_of_other_elements_use_their_own_largest_exponent() -> None:
    for element, largest in (("e4m3", 8), ("e5m2", 15), ("e2m1", 2), ("int8", 6)):
        fmt = TensorFormat(
            element=element, granularity="per_group", group_size=32, scale_rule="amax", scale_dtype="e8m0"
        )
        x = torch.full((1, 1, 1, 32), 1.5 * 2.0**20)
        _, scale = Codec(fmt, 32).encode(x, None)
        assert scale is not None
        assert scale.tolist() == [[[[127 + 20 - largest]]]]


@pytest.mark.parametrize("rule", ["amax", "minmax"])
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e9])
def test_float16_scales_saturate_instead_of_overflowing(rule: str, magnitude: float) -> None:
    fmt = TensorFormat(element="int4", granularity="per_token", scale_rule=rule, scale_dtype="fp16")
    codec, x = Codec(fmt, 32), torch.linspace(-1, 1, 32)[None, None, None] * magnitude
    payload, scale = codec.encode(x, None)
    got = codec.decode(payload, scale, None, torch.float32)
    assert torch.isfinite(got).all()
    assert (got.abs() <= magnitude * 1.01).all()
    if magnitude == 1.0:
        assert (got - x).abs().max() < 1 / 7 / 2 + 1e-3


def test_minmax_stores_steps_first_then_zero_points() -> None:
    x = torch.cat([torch.linspace(-1, 14, 64), torch.linspace(100, 130, 16)])[None, None, None]
    codec, payload, scale, _ = stored("int4_g64", x)
    assert scale is not None
    assert stored_scales(codec.format, scale).tolist() == [[[[1.0, 2.0, -1.0, 100.0]]]]
    got = codec.decode(payload, scale, None, torch.float32)
    assert ((got - x).abs() <= torch.cat([torch.full((64,), 0.5), torch.ones(16)]) + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EVERY
def test_decode_gives_the_asked_dtype_rounded_once(name: str, dtype: torch.dtype) -> None:
    x = numbers(1, 2, 3, 80)
    codec, payload, scale, constant = stored(name, x)
    got = codec.decode(payload, scale, constant, dtype)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert torch.equal(got, codec.decode(payload, scale, constant, torch.float32).to(dtype))


@settings(max_examples=60)
@given(
    name=st.sampled_from(PURE),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 5),
    head_dim=st.integers(2, 70),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_magnitude(
    name: str, batch: int, heads: int, tokens: int, head_dim: int, exponent: int, seed: int
) -> None:
    """Finite, bounded, and a power of two on the input is a power of two on the output."""
    fmt = format_of(name)
    x = torch.randn(batch, heads, tokens, head_dim, generator=torch.Generator().manual_seed(seed))
    scaled = x * 2.0**exponent
    codec, payload, scale, constant = stored(name, scaled)
    assert payload.shape[-1] + (0 if scale is None else scale.shape[-1]) == fmt.token_bytes(head_dim)
    got = codec.decode(payload, scale, constant, torch.float32)
    assert got.shape == scaled.shape
    exact = scaled.double().numpy()
    bound = error_bound(name, exact, np.abs(exact).max((1, 2, 3), keepdims=True))
    assert (np.abs(got.double().numpy() - exact) <= bound * (1 + 1e-5)).all()
    if fmt.scale_rule != "fixed":
        assert torch.equal(got, round_trip(name, x) * 2.0**exponent)
        assert torch.equal(payload, stored(name, x)[1]) or name == "bf16"


def test_schemes_of_two_formats_are_their_sides() -> None:
    for scheme in (get_scheme("k8v4"), get_scheme("k4v8")):
        assert isinstance(scheme, KVScheme)
        assert scheme.key != scheme.value
        assert {scheme.key, scheme.value} == {format_of("fp8_per_token_head"), format_of("nvfp4")}
