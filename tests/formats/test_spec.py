"""Formats as data: what is refused, and how many bytes each preset costs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kveval.errors import UnknownNameError
from kveval.formats.spec import ELEMENTS, KVScheme, TensorFormat, build_scheme, get_scheme, scheme_names

# bytes per token of 32 layers x 8 KV heads x 128, and bits per element of keys and values together.
BYTES_PER_TOKEN = {
    "bf16": (131072, 16),
    "fp8_e4m3": (65536, 8),
    "fp8_e5m2": (65536, 8),
    "fp8_per_token_head": (67584, 8.25),
    "int8_per_token_head": (67584, 8.25),
    "int4_g64": (36864, 4.5),
    "nvfp4": (36864, 4.5),
    "mxfp4": (34816, 4.25),
    "k8v4": (52224, 6.375),
    "k4v8": (52224, 6.375),
    "crush": (16384, 2),
}


def test_every_preset_is_in_the_table() -> None:
    assert set(scheme_names()) == set(BYTES_PER_TOKEN)


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token(name: str) -> None:
    scheme, (expected, bits) = get_scheme(name), BYTES_PER_TOKEN[name]
    assert 32 * scheme.layer_bytes_per_token(head_dim_k=128, head_dim_v=128, kv_heads=8) == expected
    assert scheme.key.bits_per_element(128) + scheme.value.bits_per_element(128) == 2 * bits


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_only_frozen_scales_cost_bytes_per_sequence(name: str) -> None:
    sides = {"nvfp4": 8, "crush": 8, "k8v4": 4, "k4v8": 4}
    scheme = get_scheme(name)
    assert scheme.layer_constant_bytes() == sides.get(name, 0)
    assert scheme.append_invariant == (name not in sides)
    assert scheme.lossy == (name != "bf16")


def test_keys_and_values_may_differ_in_width() -> None:
    scheme = get_scheme("nvfp4")
    assert scheme.layer_bytes_per_token(head_dim_k=192, head_dim_v=128, kv_heads=3) == 3 * (108 + 72)
    assert get_scheme("bf16").layer_bytes_per_token(head_dim_k=512, head_dim_v=64, kv_heads=1) == 1152


@pytest.mark.parametrize(
    ("name", "head_dim", "expected"),
    [
        ("int4_g64", 80, 40 + 2 * 4),
        ("int4_g64", 96, 48 + 2 * 4),
        ("int4_g64", 7, 4 + 4),
        ("nvfp4", 80, 40 + 5),
        ("nvfp4", 100, 50 + 7),
        ("mxfp4", 112, 56 + 4),
        ("mxfp4", 33, 17 + 2),
        ("crush", 5, 2),
        ("fp8_per_token_head", 1, 1 + 4),
    ],
)
def test_short_groups_and_incomplete_bytes_are_whole_ones(name: str, head_dim: int, expected: int) -> None:
    assert get_scheme(name).key.token_bytes(head_dim) == expected


def test_mixed_presets_take_the_sides_they_name() -> None:
    assert get_scheme("k8v4").key == get_scheme("fp8_per_token_head").key
    assert get_scheme("k8v4").value == get_scheme("nvfp4").value
    assert get_scheme("k4v8").key == get_scheme("nvfp4").key
    assert get_scheme("k4v8").value == get_scheme("fp8_per_token_head").value


def test_identity_is_the_formats_not_the_name() -> None:
    twin = build_scheme("mine", {"both": {"element": "bf16"}})
    assert twin.identity() == get_scheme("bf16").identity()
    assert len({str(get_scheme(name).identity()) for name in scheme_names()}) == len(scheme_names())


def test_a_wrong_name_gets_suggestions_and_its_place() -> None:
    with pytest.raises(UnknownNameError, match=r"sweep\.yaml:7: unknown scheme 'nvpf4'.*\n.*'nvfp4'"):
        get_scheme("nvpf4", where="sweep.yaml:7")
    with pytest.raises(UnknownNameError, match="unknown element type 'e3m4'"):
        TensorFormat(element="e3m4")
    with pytest.raises(UnknownNameError, match="unknown scheme 'fp9'"):
        build_scheme("mine", {"key": "fp9", "value": "bf16"})


GROUPED = {"granularity": "per_group", "group_size": 32, "scale_rule": "amax", "scale_dtype": "bf16"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"element": "int4", **GROUPED, "group_size": None}, "group_size goes with"),
        ({"element": "int4", **GROUPED, "group_size": 1}, "greater than or equal to 2"),
        ({"element": "int4", **GROUPED, "granularity": "per_token"}, "group_size goes with"),
        ({"element": "int4", **GROUPED, "scale_rule": "fixed"}, "takes scale_rule amax or minmax"),
        ({"element": "int4", **GROUPED, "scale_dtype": None}, "scale_dtype goes with"),
        ({"element": "bf16", **GROUPED}, "bf16 elements take no scale"),
        ({"element": "e4m3"}, "every other element needs one"),
        ({"element": "e2m1", **GROUPED, "scale_rule": "minmax"}, "minmax needs an integer element"),
        ({"element": "e2m1", **GROUPED, "global_divisor": 2688}, "global_divisor goes with e4m3 scales"),
        ({"element": "int4", **GROUPED, "scale_rule": "minmax", "scale_dtype": "e8m0"}, "zero point"),
        ({"element": "int4", **GROUPED, "scale_rule": "minmax", "scale_dtype": "e4m3"}, "zero point"),
        ({"element": "bf16", "bits": 16}, "Extra inputs are not permitted"),
    ],
)
def test_inconsistent_formats_are_refused_when_built(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TensorFormat(**fields)


def test_formats_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        get_scheme("bf16").key.element = "e4m3"
    with pytest.raises(ValidationError, match="Field required"):
        KVScheme(name="half", key=get_scheme("bf16").key)


def test_element_maxima() -> None:
    assert {name: e.max for name, e in ELEMENTS.items() if name != "bf16"} == {
        "e4m3": 448,
        "e5m2": 57344,
        "e2m1": 6,
        "int8": 127,
        "int4": 7,
        "int2": 1,
    }
    assert ELEMENTS["bf16"].max == (2 - 2**-7) * 2.0**127
