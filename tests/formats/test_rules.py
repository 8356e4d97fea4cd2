"""Scale rules: what each does that the contract of all formats doesn't say, by hand and against plain definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from format_contract import Written, numbers, stored_numbers, write
from hypothesis import given, settings
from hypothesis import strategies as st
from preset_formats import format_of
from torch import Tensor

from kveval.formats.arithmetic import or_one, over, reciprocal, total
from kveval.formats.rules import RULES
from kveval.formats.spec import SCALE_RULES, TensorFormat

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def block(*values: float, size: int = 32) -> Tensor:
    """[1, 1, 1, size]: the values, then zeros."""
    x = torch.zeros(1, 1, 1, size)
    x[0, 0, 0, : len(values)] = torch.tensor(values)
    return x


def scales_of(w: Written) -> list[float]:
    """All stored numbers of the first token."""
    assert w.scale is not None
    return stored_numbers(w.format.scale_dtype or "", w.scale.numpy())[0, 0, 0].tolist()


def test_every_rule_that_stores_a_number_has_a_function() -> None:
    assert set(RULES) == {name for name, rule in SCALE_RULES.items() if rule.stored}
    assert all(rule.__doc__ for rule in RULES.values())


# The floor rule.


def test_mx_scales_follow_the_floor_rule_by_integers() -> None:
    exponents = list(range(-149, 128))
    amax = torch.tensor([2.0**e for e in exponents] + [1.999 * 2.0**e for e in exponents if e > -127])
    x = torch.zeros(1, 1, len(amax), 32)
    x[0, 0, :, 9] = amax
    w = write(format_of("mxfp4"), x)
    expected = [int(np.frexp(a)[1]) - 1 - 2 + 127 for a in amax.double().tolist()]
    assert w.scale is not None
    assert w.scale[0, 0, :, 0].tolist() == [min(max(e, 0), 254) for e in expected]


@pytest.mark.parametrize(
    ("element", "largest"), [("e4m3", 8), ("e5m2", 15), ("e2m1", 2), ("e1m2", 0), ("int8", 6), ("lloyd_max4", 1)]
)
def test_mx_scales_use_the_largest_exponent_of_the_element(element: str, largest: int) -> None:
    fmt = TensorFormat(
        element=element, granularity="per_group", group_size=32, scale_rule="mx_floor", scale_dtype="e8m0"
    )
    w = write(fmt, torch.full((1, 1, 1, 32), 1.5 * 2.0**20))
    assert w.scale is not None
    assert w.scale.tolist() == [[[[127 + 20 - largest]]]]


def test_a_scale_of_code_zero_is_two_to_the_minus_127() -> None:
    w = write(format_of("mxfp4"), block(2.0**-126, 2.0**-127, -(2.0**-128)))
    assert w.scale is not None
    assert w.scale.item() == 0
    assert w.decode()[0, 0, 0, :3].tolist() == [2.0**-126, 2.0**-127, -(2.0**-128)]


# Symmetric and asymmetric scales.


@pytest.mark.parametrize("rule", ["amax", "minmax"])
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e9])
def test_float16_scales_saturate_instead_of_overflowing(rule: str, magnitude: float) -> None:
    element = "int4" if rule == "amax" else "uint4"
    fmt = TensorFormat(element=element, granularity="per_token", scale_rule=rule, scale_dtype="fp16")
    x = torch.linspace(-1, 1, 32)[None, None, None] * magnitude
    got = write(fmt, x).decode()
    assert torch.isfinite(got).all()
    assert (got.abs() <= magnitude * 1.01).all()
    if magnitude == 1.0:
        assert (got - x).abs().max() < 1 / 7 / 2 + 1e-3


def test_codes_answer_to_the_scale_as_it_is_stored() -> None:
    """7.02 / 7 is 1.0029 and stored as 1; 3.506 is then nearest to 4, and to 3 of the exact scale."""
    fmt = TensorFormat(element="int4", granularity="per_group", group_size=32, scale_rule="amax", scale_dtype="bf16")
    w = write(fmt, block(7.02, 3.506))
    assert scales_of(w) == [1.0]
    assert w.codes[0, 0, 0, :2].tolist() == [7, 4]


def test_minmax_of_values_far_from_zero_keeps_their_differences() -> None:
    x = torch.linspace(1000, 1015, 16)[None, None, None]
    fmt = TensorFormat(element="uint4", granularity="per_token", scale_rule="minmax", scale_dtype="fp16")
    assert torch.equal(write(fmt, x).decode(), x)


def test_zero_points_of_a_short_group_ignore_what_fills_it() -> None:
    x = torch.full((1, 1, 1, 80), 5.0)
    x[..., 64:] = torch.linspace(100, 130, 16)
    assert scales_of(write(format_of("int4_g64"), x)) == [0.0, 5.0, 2.0, 100.0]


# Four over six.


def squared_error(x: np.ndarray, step: float) -> float:
    """Of the nearest e2m1 values times `step`, in float64."""
    levels = np.array([s * v for v in E2M1 for s in (1, -1)]) * step
    return float((np.abs(x[:, None] - levels).min(-1) ** 2).sum())


@settings(max_examples=80)
@given(seed=st.integers(0, 2**20), size=st.sampled_from([16, 13, 5, 1]), tail=st.integers(0, 6))
def test_four_over_six_takes_the_smaller_error(seed: int, size: int, tail: int) -> None:
    """Of a whole block and of a short one; in float64, from both scales as e4m3 stores them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, 1, 16 + size, generator=draw)
    x[..., 16] *= tail
    w = write(format_of("nvfp4_4over6"), x)
    assert w.frozen.scale is not None
    frozen = w.frozen.scale.item()
    for stored, values in zip(scales_of(w), np.split(x.double().numpy().ravel(), [16]), strict=True):
        amax = np.float32(np.abs(values).max())
        tries = [float(torch.tensor(amax / top / frozen).to(torch.float8_e4m3fn)) for top in (6, 4)]
        errors = [squared_error(values, t * frozen) for t in tries]
        assert stored in tries
        assert errors[tries.index(stored)] <= min(errors) * (1 + 1e-5)


def test_four_over_six_scales_to_four_where_five_would_be_lost() -> None:
    # 4 and 2.75 of a scale to 4 are 6 and 4.125 of a scale to 6; 5 of 6 is 3.33 of 4.
    fmt = TensorFormat(
        element="e2m1", granularity="per_group", group_size=16, scale_rule="four_over_six", scale_dtype="fp32"
    )
    exact = [-3.0, 1.5, 6.0, 4.0]
    assert scales_of(write(fmt, block(*exact, size=16))) == [1.0]  # a tie of no error at all goes to 6
    assert scales_of(write(fmt, block(12.0, 9.0, -4.5, size=16))) == [3.0]  # 12 = 4 * 3, 9 = 3 * 3, 4.5 = 1.5 * 3
    assert scales_of(write(fmt, block(12.0, 8.0, -6.0, size=16))) == [2.0]


def test_four_over_six_beats_plain_nvfp4_on_the_whole() -> None:
    x = torch.randn(1, 2, 64, 128, generator=torch.Generator().manual_seed(0))
    errors = {name: float((write(format_of(name), x).decode() - x).norm()) for name in ("nvfp4", "nvfp4_4over6")}
    assert errors["nvfp4_4over6"] < 0.95 * errors["nvfp4"]


# Root mean square.


def test_rms_is_the_root_mean_square_of_the_vector() -> None:
    x = numbers(2, 2, 9, 96)
    w = write(format_of("turboquant_4bit"), x)
    assert w.scale is not None
    stored = stored_numbers("fp16", w.scale.numpy())[..., 0]
    # A rotation keeps the length.
    np.testing.assert_allclose(stored, np.sqrt((x.double().numpy() ** 2).mean(-1)), rtol=2.0**-11)


def test_lloyd_max_levels_suit_rotated_vectors() -> None:
    """The mean squared error of 16 and 8 levels on a normal distribution is 0.009497 and 0.03454 (Max, 1960)."""
    x = torch.randn(1, 4, 256, 128, generator=torch.Generator().manual_seed(0))
    for name, known in (("turboquant_4bit", 0.009497), ("turboquant_k3v4", 0.03454)):
        got = write(format_of(name), x).decode()
        assert float(((got - x) ** 2).mean() / (x**2).mean()) == pytest.approx(known, rel=0.03)


# llama.cpp, by hand.


def test_q4_0_scales_by_the_extreme_with_its_sign() -> None:
    w = write(format_of("q4_0"), block(-4.0, 3.75, 4.0, 0.25, -0.25))
    assert scales_of(w) == [0.5]  # -4 / -8
    assert w.codes[0, 0, 0, :6].tolist() == [0, 15, 15, 9, 8, 8]  # halves go up: 0.25 is 0.5 steps, -0.25 is -0.5
    flipped = write(format_of("q4_0"), block(4.0, -4.0, 1.0))
    assert scales_of(flipped) == [-0.5]  # the first of the largest
    assert flipped.codes[0, 0, 0, :4].tolist() == [0, 15, 6, 8]
    assert flipped.decode()[0, 0, 0, :4].tolist() == [4.0, -3.5, 1.0, 0.0]


def test_q8_0_rounds_half_away_from_zero() -> None:
    below_half = float(np.nextafter(np.float32(0.5), np.float32(0)))
    w = write(format_of("q8_0"), block(127.0, 0.5, -0.5, 1.5, -2.5, below_half, -below_half, 63.499996))
    assert scales_of(w) == [1.0]
    assert w.codes[0, 0, 0, :8].astype(np.int8).tolist() == [127, 1, -1, 2, -3, 0, 0, 63]


def test_q5_1_and_q4_1_store_their_minimum() -> None:
    for name, top in (("q4_1", 15), ("q5_1", 31)):
        x = torch.full((1, 1, 1, 32), -2.0)
        x[..., 1], x[..., 2] = top - 2.0, 0.5
        w = write(format_of(name), x)
        assert scales_of(w) == [1.0, -2.0]
        assert w.codes[0, 0, 0, :4].tolist() == [0, top, 3, 0]  # 2.5 goes up


def test_iq4_nl_fits_its_scale_to_the_large_values() -> None:
    w = write(format_of("iq4_nl"), block(-127.0, 113.0, 1.0, size=32))
    assert scales_of(w) == [1.0]
    assert w.codes[0, 0, 0, :4].tolist() == [0, 15, 8, 8]
    # 120 is nearest to 113; fitting with weights x^2 makes both errors smaller than leaving the first exact.
    w = write(format_of("iq4_nl"), block(-127.0, 120.0))
    a, b = 127.0**2, 120.0**2
    fitted = (a * 127 * 127 + b * 113 * 120) / (a * 127 * 127 + b * 113 * 113)
    # The zeros have weight 0, though no level is 0.
    assert scales_of(w)[0] == pytest.approx(fitted, rel=2.0**-11)


def test_iq4_nl_forgets_blocks_below_1e_15_and_cuts_what_fp16_cannot_scale() -> None:
    assert (write(format_of("iq4_nl"), block(9e-16, -5e-16)).decode() == 0).all()
    for magnitude in (1e9, 1e20, 1e38):
        got = write(format_of("iq4_nl"), block(-magnitude, magnitude)).decode()[0, 0, 0, :2]
        assert got.tolist() == [-127 * 65504.0, 113 * 65504.0]


# Arithmetic.


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 33, 576])
def test_total_is_the_sum_and_does_not_depend_on_the_shape(count: int) -> None:
    x = torch.randn(5, 3, count, generator=torch.Generator().manual_seed(count))
    exact = [math.fsum(row) for row in x.double().view(-1, count).tolist()]
    np.testing.assert_allclose(total(x).flatten().numpy(), exact, rtol=0, atol=count * 2.0**-22)
    for i, j in np.ndindex(5, 3):
        assert torch.equal(total(x)[i, j], total(x[i, j]))
    assert torch.equal(total(x.mT.contiguous().mT), total(x))


def test_division_by_zero_steps() -> None:
    step = torch.tensor([0.0, 4.0, -0.5])
    assert or_one(step).tolist() == [1.0, 4.0, -0.5]
    assert reciprocal(step).tolist() == [0.0, 0.25, -2.0]
    assert over(torch.tensor([1.0, 2.0]), 127.0).tolist() == [float(np.float32(v) / np.float32(127)) for v in (1, 2)]
