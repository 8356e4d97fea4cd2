"""The contract (`format_contract`) of every preset's keys and values, and what single formats promise beyond it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_contract import (
    CONTRACT,
    HEAD_DIMS,
    Clause,
    can_store,
    check_bytes_are_the_formula,
    check_codes_are_the_nearest,
    check_contract,
    check_decoding_says_what_the_bytes_say,
    check_extremes_stay_finite,
    check_short_groups_are_groups_of_their_own,
    check_strides_do_not_show,
    error_bound,
    numbers,
    stored_numbers,
    tokens_for,
    write,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from preset_formats import FORMATS, SIDES, format_of
from pydantic import ValidationError
from torch import Tensor

from kveval.errors import UnsupportedError
from kveval.formats.codec import Codec
from kveval.formats.element_types import ELEMENTS
from kveval.formats.spec import SCALE_RULES, SCALE_SIZES, TensorFormat, get_scheme, scheme_names

EVERY = pytest.mark.parametrize("side", FORMATS)

# On every head size run the clauses that say what bytes mean; on fewer the others, which cost more.
EVERY_HEAD_DIM = {
    check_bytes_are_the_formula,
    check_decoding_says_what_the_bytes_say,
    check_codes_are_the_nearest,
    check_short_groups_are_groups_of_their_own,
}
SOME_HEAD_DIMS = (64, 80, 96, 576)
TWO_HEAD_DIMS = {check_extremes_stay_finite: (64, 96), check_strides_do_not_show: (64, 96)}

BLOCKS = {"granularity": "per_group", "group_size": 32}
ROWS = {"granularity": "per_token", "scale_dtype": "fp32"}
COLUMNS = {"granularity": "per_channel", "group_size": 16}
NOT_IN_A_PRESET: dict[str, TensorFormat] = {
    name: TensorFormat(**fields)
    for name, fields in {
        "e5m2 rows": {"element": "e5m2", **ROWS, "scale_rule": "amax"},
        "e2m1 columns": {"element": "e2m1", **COLUMNS, "scale_rule": "amax", "scale_dtype": "fp16"},
        "int8 columns, rotated": {
            "element": "int8", **COLUMNS, "scale_rule": "amax", "scale_dtype": "fp32", "transform": "hadamard",
        },
        "uint4 columns, shifted": {
            "element": "uint4", "granularity": "per_channel", "group_size": 4, "scale_rule": "minmax",
            "scale_dtype": "bf16", "transform": "mean_shift",
        },
        "columns of fp8-scaled e4m3": {
            "element": "e4m3", **COLUMNS, "scale_rule": "amax", "scale_dtype": "e4m3", "global_divisor": 448 * 448,
        },
        "uint5 in a stream": {"element": "uint5", **BLOCKS, "scale_rule": "minmax", "scale_dtype": "fp16"},
        "three-bit table in groups": {"element": "lloyd_max3", **BLOCKS, "scale_rule": "amax", "scale_dtype": "bf16"},
        "iq4_nl table, rotated": {
            "element": "iq4_nl", **BLOCKS, "scale_rule": "amax", "scale_dtype": "fp16", "transform": "hadamard",
        },
        "int8 blocks of e8m0": {"element": "int8", **BLOCKS, "scale_rule": "mx_floor", "scale_dtype": "e8m0"},
        "shifted q8_0": {
            "element": "int8", **BLOCKS, "scale_rule": "ggml_q8_0", "scale_dtype": "fp16", "packing": "ggml",
            "transform": "mean_shift",
        },
        "a constant that is no power of two": {
            "element": "int8", "granularity": "per_tensor", "scale_rule": "fixed", "fixed_scale": 0.3,
        },
        "frozen fp8, rotated": {
            "element": "e4m3", "granularity": "per_tensor", "scale_rule": "first_write_amax", "transform": "hadamard",
        },
        "integers with coarse scales": {"element": "int8", **BLOCKS, "scale_rule": "amax", "scale_dtype": "e4m3"},
        "groups of 48": {
            "element": "e2m1", "granularity": "per_group", "group_size": 48, "scale_rule": "four_over_six",
            "scale_dtype": "bf16",
        },
    }.items()
}  # fmt: skip


def round_trip(name: str, x: Tensor) -> Tensor:
    return write(format_of(name), x).decode()


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__.removeprefix("check_"))
@EVERY
def test_contract(side: str, clause: Clause) -> None:
    head_dims = HEAD_DIMS if clause in EVERY_HEAD_DIM else TWO_HEAD_DIMS.get(clause, SOME_HEAD_DIMS)
    for head_dim in head_dims:
        if can_store(FORMATS[side], head_dim):
            clause(FORMATS[side], head_dim)


@pytest.mark.parametrize("name", NOT_IN_A_PRESET)
def test_contract_of_formats_that_no_preset_has(name: str) -> None:
    for head_dim in (64, 96):
        check_contract(NOT_IN_A_PRESET[name], head_dim)


def test_every_side_of_every_preset_is_tested() -> None:
    assert {name.rsplit(".", 1)[0] for name in SIDES} == set(scheme_names())
    assert set(FORMATS.values()) == {getattr(get_scheme(n), role) for n in scheme_names() for role in ("key", "value")}
    assert {fmt.scale_rule for fmt in FORMATS.values()} == set(SCALE_RULES)


@EVERY
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_head_size_is_stored_or_refused(side: str, head_dim: int) -> None:
    fmt = FORMATS[side]
    if fmt.packing == "ggml" and head_dim % 32:
        with pytest.raises(UnsupportedError, match=f"head of {head_dim} is no multiple of it.\n.*int8_per_token"):
            fmt.check(head_dim)
    else:
        fmt.check(head_dim)
        assert write(fmt, numbers(1, 1, fmt.unit, head_dim)).decode().shape == (1, 1, fmt.unit, head_dim)


def _formats() -> st.SearchStrategy[TensorFormat]:
    """Any format that the data model admits, and that promises what the contract says."""

    @st.composite
    def draw(draw: st.DrawFn) -> TensorFormat:
        rule = draw(st.sampled_from(sorted(SCALE_RULES)))
        granularity = draw(st.sampled_from(SCALE_RULES[rule].granularities))
        element = draw(st.sampled_from([e.name for e in ELEMENTS]))
        grouped, ggml = granularity in ("per_group", "per_channel"), rule.startswith("ggml")
        fields = {
            "element": element,
            "granularity": granularity,
            "scale_rule": rule,
            "group_size": draw(st.sampled_from([32] if ggml else [2, 7, 16, 32])) if grouped else None,
            "scale_dtype": draw(st.sampled_from(sorted(SCALE_SIZES))) if SCALE_RULES[rule].stored else None,
            "fixed_scale": draw(st.sampled_from([1.0, 0.3])) if rule == "fixed" else 1.0,
            "global_divisor": draw(st.sampled_from([None, 2688.0, 3.0])),
            "transform": draw(st.sampled_from(["none", "hadamard", "mean_shift"])),
            "packing": "ggml" if ggml else "sequential",
        }
        try:
            fmt = TensorFormat(**fields)
        except ValidationError:
            assume(False)
        return fmt

    return draw()


# ggml's rules are for ggml's elements; what they do with others nobody has defined.
GGML_ELEMENTS = {
    "ggml_q8_0": {"int8"}, "ggml_extreme": {"offset4", "offset5"}, "ggml_minmax": {"uint4", "uint5"},
    "ggml_iq4_nl": {"iq4_nl"},
}  # fmt: skip


@settings(max_examples=150)
@given(
    fmt=_formats(),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    units=st.integers(1, 3),
    head_dim=st.integers(2, 70),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 2**16),
)
def test_any_format_any_shape_any_magnitude(
    fmt: TensorFormat, batch: int, heads: int, units: int, head_dim: int, exponent: int, seed: int
) -> None:
    """Bytes by the formula, codes that mean something, and errors within the bound."""
    assume(fmt.element in GGML_ELEMENTS.get(fmt.scale_rule, {fmt.element}))
    assume(can_store(fmt, head_dim))
    x = torch.randn(batch, heads, units * fmt.unit, head_dim, generator=torch.Generator().manual_seed(seed))
    w = write(fmt, x.bfloat16().float() * 2.0**exponent)
    assert w.payload.shape == (batch, heads, units * fmt.unit, fmt.payload_bytes(head_dim))
    assert (0 if w.scale is None else w.scale[0, 0].numel()) == units * fmt.scale_bytes(head_dim)
    if not fmt.lossy:
        assert torch.equal(w.decode(), w.x)
        return
    assert np.isfinite(w.stored).all()
    size = np.abs(w.target).max()
    bound = error_bound(w)
    assert (np.abs(w.stored - w.target) <= bound * (1 + 1e-5) + size * 2.0**-20).all()
    # A rotation spreads an error over a vector, but doesn't lengthen it.
    error = w.decode().double().numpy() - w.x.double().numpy()
    length = np.linalg.norm(bound, axis=-1) if fmt.transform == "hadamard" else None
    if length is None:
        assert (np.abs(error) <= bound * (1 + 1e-5) + np.abs(w.x.numpy()).max() * 2.0**-19).all()
    else:
        assert (np.linalg.norm(error, axis=-1) <= length * (1 + 1e-5) + size * 2.0**-16).all()


@settings(max_examples=60)
@given(side=st.sampled_from(sorted(FORMATS)), head_dim=st.sampled_from([32, 64, 96]), exponent=st.integers(-12, 12))
def test_a_power_of_two_on_the_input_is_one_on_the_output(side: str, head_dim: int, exponent: int) -> None:
    """Where the scale follows the values, and has the range to (fp16 has not, beyond a factor of a few thousand)."""
    fmt = FORMATS[side]
    if fmt.scale_rule in ("fixed", "static"):
        return
    if fmt.scale_dtype == "fp16":
        exponent //= 4
    x = numbers(2, 2, tokens_for(fmt, 3), head_dim, seed=21)
    plain, scaled = write(fmt, x), write(fmt, x * 2.0**exponent)
    assert torch.equal(scaled.decode(), plain.decode() * 2.0**exponent)
    assert not fmt.lossy or torch.equal(scaled.payload, plain.payload)


@pytest.mark.parametrize("value", [1.0, -3.0, 448.0, 2.0**-100, 2.0**60])
@pytest.mark.parametrize("name", scheme_names())
def test_constants_are_exact_where_the_format_can(name: str, value: float) -> None:
    fmt = format_of(name)
    head_dim = 80 if can_store(fmt, 80) else 64
    got = write(fmt, torch.full((1, 1, tokens_for(fmt, 3), head_dim), value)).decode()
    within = {"fp16": 2.0**-7 <= abs(value) <= 65504}.get(fmt.scale_dtype or "", True)
    if fmt.element in ("e4m3", "e5m2") and not fmt.rule.stored:
        limit = {"e4m3": (2.0**-9, 448), "e5m2": (2.0**-16, 57344)}[fmt.element]
        within = limit[0] <= abs(value) <= limit[1]
    if not within:
        return
    if fmt.scale_rule == "static":
        assert torch.allclose(got, torch.tensor(value).clamp(-448 * 0.04, 448 * 0.04), rtol=1 / 16)
    elif fmt.scale_rule == "rms" or fmt.transform == "hadamard":
        # A rotated constant is one spike; levels made for a normal distribution cut it.
        assert torch.isfinite(got).all()
    elif fmt.scale_rule in ("minmax", "fixed", "none"):
        assert (got == value).all()
    elif fmt.scale_rule == "mx_floor":
        # 448 / 2^6 = 7 is beyond the largest e2m1 value; the floor rule cuts it to 6.
        assert (got == (384.0 if (fmt.element, value) == ("e2m1", 448.0) else value)).all()
    else:
        # The scale itself is rounded: to the type that stores it, to float32 at least.
        rounding = {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(fmt.scale_dtype or "", 1e-6)
        assert torch.allclose(got, torch.tensor(value), rtol=rounding, atol=0)


def test_bf16_keeps_every_pattern_of_bits() -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = patterns[torch.isfinite(patterns)].view(1, 1, -1, 64)
    w = write(format_of("bf16"), x)
    assert torch.equal(w.payload.view(torch.int16), x.view(torch.int16))
    assert torch.equal(w.decode(torch.bfloat16).view(torch.int16), x.view(torch.int16))
    assert write(format_of("bf16"), torch.tensor([[[[1.0, -2.0]]]])).payload.tolist() == [[[[0x80, 0x3F, 0x00, 0xC0]]]]


def test_bf16_rounds_float32_to_nearest_and_never_overflows() -> None:
    largest, limit = torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max
    x = torch.tensor([[[[largest, -largest, 1.00390625, 1.01171875]]]])
    assert write(format_of("bf16"), x).decode().flatten().tolist() == [limit, -limit, 1.0, 1.015625]


@pytest.mark.parametrize("magnitude", [448.0, 449.0, 464.0, 465.0, 480.0, 1e5, 3e38])
def test_e4m3_saturates_at_448_on_every_torch(magnitude: float) -> None:
    w = write(format_of("fp8_e4m3"), torch.tensor([[[[magnitude, -magnitude]]]]))
    assert w.payload.tolist() == [[[[0x7E, 0xFE]]]]
    assert w.decode().flatten().tolist() == [448.0, -448.0]


@pytest.mark.parametrize("magnitude", [57344.0, 61439.0, 61440.0, 65536.0, 1e30])
def test_e5m2_saturates_below_its_infinity(magnitude: float) -> None:
    w = write(format_of("fp8_e5m2"), torch.tensor([[[[magnitude, -magnitude]]]]))
    assert w.payload.tolist() == [[[[0x7B, 0xFB]]]]


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
def test_blocks_whose_scale_rounds_to_zero_decode_to_zero(name: str) -> None:
    divisor = format_of(name).global_divisor
    assert divisor is not None
    x = torch.zeros(1, 1, 2, 64)
    x[..., 0], x[..., 16:32] = divisor, 1e-3
    w = write(format_of(name), x)
    assert w.frozen.scale is not None
    assert w.frozen.scale.item() == 1.0
    assert w.scale is not None
    first = {"nvfp4": 0x7E, "nvfp4_4over6": 0x78}[name]  # 448 = 2688 / 6 and 256 = 1536 / 6
    assert w.scale[0, 0].tolist() == [[first, 0x00, 0x00, 0x00]] * 2
    got = w.decode()
    assert got[0, 0, 0, 0] == divisor
    assert (got[..., 1:] == 0).all()


def test_a_frozen_scale_ignores_an_empty_range() -> None:
    for name, divisor in (("nvfp4", 2688.0), ("crush", 1.0)):
        x = torch.zeros(3, 1, 2, 64)
        x[1, 0, 0, 5], x[2, 0, 1, 3] = -divisor, 1e-44
        frozen = Codec(format_of(name), 64).freeze(x)
        assert frozen.scale is not None
        assert frozen.scale[:2, 0, 0, 0].tolist() == [1.0, 1.0]
        assert frozen.scale[2].item() == (1.0 if name == "nvfp4" else float(torch.tensor(1e-44)))


def test_a_per_tensor_scale_is_that_of_a_sequence_not_of_a_batch() -> None:
    x = torch.ones(2, 2, 3, 64) * torch.tensor([1.0, 8.0])[:, None, None, None]
    frozen = Codec(format_of("crush"), 64).freeze(x)
    assert frozen.scale is not None
    assert frozen.scale.flatten().tolist() == [1.0, 8.0]


def test_calibrated_scales_stand_in_for_the_constant_by_head() -> None:
    x = torch.full((1, 3, 2, 8), 6.0)
    one = Codec(format_of("fp8_e4m3"), 8, (2.0,)).encode(x)[0]
    assert (one == 0x44).all()  # 3.0
    by_head = Codec(format_of("fp8_per_head"), 8, (2.0, 4.0, 0.5))
    payload, scale = by_head.encode(x)
    assert scale is None
    assert payload[0, :, 0, 0].tolist() == [0x44, 0x3C, 0x54]  # 3, 1.5, 12
    assert torch.equal(by_head.decode(payload, None), x)


def test_a_static_format_without_its_scales_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"calibrated scales and has none.\n.*kveval calibrate"):
        Codec(format_of("fp8_per_head"), 64)


def test_golden_bytes() -> None:
    """Bytes worked out by hand; a reader and a writer that are wrong together can't agree on these."""
    ramp = torch.arange(16.0).repeat(4)[None, None, None]
    w = write(format_of("int4_g64"), ramp)
    assert w.payload[0, 0, 0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert w.scale is not None
    assert w.scale[0, 0, 0].tolist() == [0x80, 0x3F, 0x00, 0x00]  # step 1, zero point 0 in bfloat16

    x = torch.zeros(1, 1, 1, 32)
    x[..., 0], x[..., 1], x[..., 2], x[..., 3] = -448.0, 1.0, 448.0, 0.5
    w = write(format_of("fp8_per_token_head"), x)
    assert w.payload[0, 0, 0, :5].tolist() == [0xFE, 0x38, 0x7E, 0x30, 0x00]
    assert w.scale is not None
    assert w.scale[0, 0, 0].tolist() == [0x00, 0x00, 0x80, 0x3F]  # 1.0 in float32

    x[..., 0], x[..., 2] = -254.0, 127.0
    w = write(format_of("int8_per_token_head"), x)
    assert w.payload[0, 0, 0, :4].tolist() == [0x81, 0x00, 64, 0x00]  # -127; 0.5 and 63.5 tie to even; 0.25
    assert w.scale is not None
    assert w.scale[0, 0, 0].tolist() == [0x00, 0x00, 0x00, 0x40]

    x[..., 0], x[..., 1], x[..., 2], x[..., 3] = -6.5, 0.25, 3.0, 5.0
    w = write(format_of("mxfp4"), x)
    assert w.payload[0, 0, 0, :3].tolist() == [0x0F, 0x65, 0x00]  # -6, 0, 3, 4: low nibble first
    assert w.scale is not None
    assert w.scale[0, 0, 0].tolist() == [127]  # 2^(floor(log2 6.5) - 2)

    x[..., 0], x[..., 16] = -6.0, 3.0
    w = write(format_of("nvfp4"), x)
    assert w.payload[0, 0, 0, [0, 1, 8]].tolist() == [0x0F, 0x65, 0x07]
    assert w.scale is not None
    assert w.scale[0, 0, 0].tolist() == [0x7E, 0x76]  # 448 and 224 in e4m3
    assert w.frozen.scale is not None
    assert w.frozen.scale.item() == pytest.approx(6 / 2688)

    w = write(format_of("crush"), torch.tensor([[[[-4.0, 4.0, 1.9, 2.1, 0.0]]]]))
    assert w.payload[0, 0, 0].tolist() == [0b01000111, 0]
    assert w.frozen.scale is not None
    assert w.frozen.scale.item() == 4.0


def test_golden_bytes_per_channel() -> None:
    """KIVI's keys: a channel's scale and zero point, then the next channel's; a token's codes side by side."""
    x = torch.zeros(1, 1, 32, 4)
    x[0, 0, :, 0] = torch.arange(32.0) % 16
    x[0, 0, :, 1] = 2 * (torch.arange(32.0) % 16) + 5
    x[0, 0, :, 2] = -1.0
    w = write(format_of("kivi4"), x)
    assert w.payload[0, 0, :3].tolist() == [[0x00, 0x00], [0x11, 0x00], [0x22, 0x00]]
    assert w.scale is not None
    assert w.scale.shape == (1, 1, 1, 16)
    assert stored_numbers("fp16", w.scale.numpy())[0, 0, 0].tolist() == [1, 0, 2, 5, 0, -1, 0, 0]
    assert torch.equal(w.decode(), x)


def test_zero_points_stand_beside_their_steps_group_by_group() -> None:
    x = torch.cat([torch.linspace(-1, 14, 64), torch.linspace(100, 130, 16)])[None, None, None]
    w = write(format_of("int4_g64"), x)
    assert w.scale is not None
    assert stored_numbers("bf16", w.scale.numpy()).tolist() == [[[[1.0, -1.0, 2.0, 100.0]]]]
    assert ((w.decode() - x).abs() <= torch.cat([torch.full((64,), 0.5), torch.ones(16)]) + 1e-5).all()


def test_rotations_are_orthonormal_and_spread_an_outlier() -> None:
    x = torch.zeros(1, 1, 1, 96)
    x[..., 40] = 32.0
    w = write(TensorFormat(element="int8", **ROWS, scale_rule="amax", transform="hadamard"), x)
    # 96 is three blocks of 32, of which the outlier's own takes it all: 32 / sqrt(32) each.
    assert (w.payload[..., 32:64].view(torch.int8).abs() == 127).all()
    assert (w.payload[..., :32] == 0).all()
    assert (w.payload[..., 64:] == 0).all()
    assert torch.allclose(w.decode(), x, atol=1e-5)


def test_mean_shift_takes_out_a_channel_bias() -> None:
    bias = torch.zeros(64)
    bias[3], bias[50] = 200.0, -90.0
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0)) + bias
    shifted, plain = write(format_of("int4_g64_mean_shift"), x), write(format_of("int4_g64"), x)
    assert (shifted.decode() - x).abs().max() < 0.4
    assert (plain.decode() - x).norm() > 20 * (shifted.decode() - x).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EVERY
def test_narrow_inputs_have_the_bytes_of_the_same_numbers_in_float32(side: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[side]
    x = numbers(2, 2, tokens_for(fmt, 4), 64).to(dtype)
    narrow, wide = write(fmt, x), write(fmt, x.float())
    assert narrow.same_bytes(wide)
    for a, b in zip(narrow.frozen.tensors(), wide.frozen.tensors(), strict=True):
        assert torch.equal(a, b)


def test_the_contract_notices_a_wrong_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clause that can't fail is none: a code off by one, a scale off by a bit, a decoder off by 2^-18."""
    encode, decode = Codec.encode, Codec.decode

    def off_by_one(self: Codec, x: Tensor, frozen: object = None) -> tuple[Tensor, Tensor | None]:
        payload, scale = encode(self, x, frozen) if frozen is not None else encode(self, x)
        return payload ^ (payload.new_tensor([1] + [0] * (payload.shape[-1] - 1))), scale

    monkeypatch.setattr(Codec, "encode", off_by_one)
    with pytest.raises(AssertionError, match="not the nearest"):
        check_contract(format_of("int4_g64"))

    def coarse_scale(self: Codec, x: Tensor, frozen: object = None) -> tuple[Tensor, Tensor | None]:
        payload, scale = encode(self, x, frozen) if frozen is not None else encode(self, x)
        return payload, None if scale is None else scale & 0xFE

    monkeypatch.setattr(Codec, "encode", coarse_scale)
    with pytest.raises(AssertionError, match="not the nearest"):
        check_contract(format_of("nvfp4"))

    monkeypatch.setattr(Codec, "encode", encode)
    monkeypatch.setattr(Codec, "decode", lambda self, *args: decode(self, *args) * (1 + 2.0**-18))
    with pytest.raises(AssertionError) as caught:
        check_contract(format_of("int4_g64"))
    assert "check_decoding_says_what_the_bytes_say" in caught.value.__notes__[0]
