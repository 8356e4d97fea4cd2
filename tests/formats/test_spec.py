"""Formats and schemes as data: what is refused, how many bytes each preset costs, and what makes two the same."""

from __future__ import annotations

from typing import Any

import pytest
from preset_formats import SIDES, format_of
from pydantic import ValidationError

from kveval.errors import UnknownNameError, UnsupportedError
from kveval.formats.scales import StaticScales
from kveval.formats.spec import KVScheme, LayerOverride, TensorFormat, build_scheme, get_scheme, scheme_names
from kveval.identity import canonical_json

# Bits per element at a head size of 128, scales included (keys, values), and bytes per token of 32 layers with 8 KV
# heads of 128. A per-channel scale is shared out among its tokens; windows of recent BF16 tokens are not counted.
PRESETS: dict[str, tuple[float, float, int]] = {
    "bf16": (16, 16, 131072),
    "fp8_e4m3": (8, 8, 65536),
    "fp8_e5m2": (8, 8, 65536),
    "fp8_per_head": (8, 8, 65536),
    "fp8_per_token_head": (8.25, 8.25, 67584),
    "int8_per_token_head": (8.25, 8.25, 67584),
    "int8_asym": (8.25, 8.25, 67584),
    "mxfp8": (8.25, 8.25, 67584),
    "int4_asym": (4.25, 4.25, 34816),
    "int4_g64": (4.5, 4.5, 36864),
    "int4_g32": (5, 5, 40960),
    "nvfp4": (4.5, 4.5, 36864),
    "nvfp4_4over6": (4.5, 4.5, 36864),
    "mxfp4": (4.25, 4.25, 34816),
    "e1m2_g32": (4.5, 4.5, 36864),
    "q8_0": (8.5, 8.5, 69632),
    "q5_1": (6, 6, 49152),
    "q5_0": (5.5, 5.5, 45056),
    "q4_1": (5, 5, 40960),
    "q4_0": (4.5, 4.5, 36864),
    "iq4_nl": (4.5, 4.5, 36864),
    "kivi4": (5, 5, 40960),
    "kivi2": (3, 3, 24576),
    "k8v4": (8.25, 4.5, 52224),
    "k4v8": (4.5, 8.25, 52224),
    "k16v8": (16, 8.25, 99328),
    "k16v4": (16, 4.5, 83968),
    "int4_g64_hadamard": (4.5, 4.5, 36864),
    "nvfp4_hadamard": (4.5, 4.5, 36864),
    "q8_0_hadamard": (8.5, 8.5, 69632),
    "q4_0_hadamard": (4.5, 4.5, 36864),
    "int4_g64_mean_shift": (4.5, 4.5, 36864),
    "nvfp4_mean_shift": (4.5, 4.5, 36864),
    "turboquant_k8v4": (8, 4.25, 50176),
    "turboquant_4bit": (4.125, 4.25, 34304),
    "turboquant_k3v4": (3.125, 4.25, 30208),
    "crush": (2, 2, 16384),
}

# Bytes of one llama.cpp block of 32 elements.
LLAMA_BLOCKS = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}

# Bytes per sequence and layer (8 KV heads of 128) that no token adds, for keys and for values: fp32 scales and means.
CONSTANTS = {
    "nvfp4": (4, 4), "nvfp4_4over6": (4, 4), "nvfp4_hadamard": (4, 4), "nvfp4_mean_shift": (4 + 4 * 1024, 4),
    "int4_g64_mean_shift": (4 * 1024, 0), "k8v4": (0, 4), "k4v8": (4, 0), "k16v4": (0, 4), "crush": (4, 4),
}  # fmt: skip


def test_every_preset_is_in_the_table() -> None:
    assert set(scheme_names()) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_bytes_per_token(name: str) -> None:
    scheme, (key_bits, value_bits, expected) = get_scheme(name), PRESETS[name]
    assert (scheme.key.bits_per_element(128), scheme.value.bits_per_element(128)) == (key_bits, value_bits)
    assert 32 * 8 * (scheme.key.token_bytes(128) + scheme.value.token_bytes(128)) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_only_what_is_frozen_costs_bytes_per_sequence(name: str) -> None:
    scheme = get_scheme(name)
    constants = scheme.key.constant_bytes(128, 8), scheme.value.constant_bytes(128, 8)
    assert constants == CONSTANTS.get(name, (0, 0))
    assert scheme.append_invariant == (name not in CONSTANTS)
    assert scheme.lossy == (name != "bf16")


@pytest.mark.parametrize("name", LLAMA_BLOCKS)
def test_llama_blocks(name: str) -> None:
    assert format_of(name).token_bytes(32) == LLAMA_BLOCKS[name]
    assert format_of(name).token_bytes(128) == 4 * LLAMA_BLOCKS[name]


def test_windows_of_recent_tokens() -> None:
    assert {n: get_scheme(n).residual_length for n in scheme_names() if get_scheme(n).residual_length} == {
        "kivi4": 128,
        "kivi2": 128,
    }
    assert {side: fmt.unit for side, fmt in SIDES.items() if fmt.unit > 1} == {"kivi4.key": 32, "kivi2.key": 32}


@pytest.mark.parametrize(
    ("side", "head_dim", "expected"),
    [
        ("int4_g64.key", 80, 40 + 2 * 4),
        ("int4_g64.key", 96, 48 + 2 * 4),
        ("int4_g64.key", 7, 4 + 4),
        ("nvfp4.key", 80, 40 + 5),
        ("nvfp4.key", 100, 50 + 7),
        ("nvfp4.key", 192, 108),
        ("mxfp4.key", 112, 56 + 4),
        ("mxfp4.key", 33, 17 + 2),
        ("mxfp8.key", 576, 576 + 18),
        ("crush.key", 5, 2),
        ("fp8_per_token_head.key", 1, 1 + 4),
        ("turboquant_k3v4.key", 80, 30 + 2),
        ("turboquant_k3v4.key", 5, 2 + 2),
        ("kivi4.key", 80, (32 * 40 + 80 * 4) / 32),
        ("kivi2.value", 80, 20 + 3 * 4),
        ("bf16.key", 576, 1152),
    ],
)
def test_short_groups_and_incomplete_bytes_are_whole_ones(side: str, head_dim: int, expected: float) -> None:
    assert SIDES[side].token_bytes(head_dim) == expected


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("k8v4", "fp8_per_token_head", "nvfp4"),
        ("k4v8", "nvfp4", "fp8_per_token_head"),
        ("k16v8", "bf16", "fp8_per_token_head"),
        ("k16v4", "bf16", "nvfp4"),
        ("turboquant_k8v4", "fp8_e4m3", "int4_asym"),
    ],
)
def test_mixed_presets_take_the_sides_they_name(name: str, key: str, value: str) -> None:
    assert get_scheme(name).key == get_scheme(key).key
    assert get_scheme(name).value == get_scheme(value).value


@pytest.mark.parametrize("side", SIDES)
def test_llama_heads_are_multiples_of_32(side: str) -> None:
    fmt = SIDES[side]
    fmt.check(576)
    if fmt.packing == "ggml":
        with pytest.raises(UnsupportedError, match="no multiple"):
            fmt.check(80)
    else:
        fmt.check(80)


# Identity and round trips.

RICH: dict[str, Any] = {
    "both": "nvfp4",
    "sink_tokens": 4,
    "residual_length": 64,
    "skip_layers": [0, "last:2"],
    "layers": [{"layers": ["4-7", "sliding"], "key": "fp8_per_token_head"}],
    "sliding": "quantized",
    "block_size": 32,
}
SCALES = StaticScales(source="here", key={0: (0.5,)}, value={0: (0.25,), 3: (1.0, 2.0)})


def every_scheme() -> dict[str, KVScheme]:
    presets = {name: get_scheme(name) for name in scheme_names()}
    scaled = get_scheme("fp8_e4m3").model_copy(update={"scales": SCALES})
    return {**presets, "rich": build_scheme("rich", RICH), "scaled": scaled}


@pytest.mark.parametrize("name", every_scheme())
def test_json_round_trip(name: str) -> None:
    scheme = every_scheme()[name]
    again = KVScheme.model_validate_json(scheme.model_dump_json())
    assert again == scheme
    assert again.identity() == scheme.identity()
    assert hash(again.key) == hash(scheme.key)
    canonical_json(scheme.identity())


def test_no_two_presets_store_the_same() -> None:
    assert len({canonical_json(get_scheme(name).identity()) for name in scheme_names()}) == len(scheme_names())


def test_identity_is_what_is_stored_not_what_it_is_called() -> None:
    twin = build_scheme("mine", {"both": {"element": "bf16"}, "summary": "for me", "engines": ["mine 1.0"]})
    assert twin.identity() == get_scheme("bf16").identity()
    spelled_out = build_scheme("mine", {"both": {"element": "e4m3", "granularity": "per_tensor", "scale_rule": "fixed",
                                                 "fixed_scale": 1.0, "transform": "none"}})  # fmt: skip
    assert spelled_out.identity() == get_scheme("fp8_e4m3").identity()
    moved = SCALES.model_copy(update={"source": "there"})
    scaled = get_scheme("fp8_e4m3").model_copy(update={"scales": SCALES})
    assert scaled.model_copy(update={"scales": moved}).identity() == scaled.identity()


OTHER_SCHEME_FIELDS: dict[str, Any] = {
    "key": format_of("mxfp4"),
    "value": format_of("mxfp4"),
    "sink_tokens": 5,
    "residual_length": 0,
    "skip_layers": (0,),
    "layers": (LayerOverride(layers=("4-7", "sliding"), value=format_of("mxfp4")),),
    "sliding": "bf16",
    "block_size": 64,
    "scales": SCALES,
}
NAMES_ONLY = {"name", "summary", "engines"}

OTHER_FORMAT_FIELDS: dict[str, Any] = {
    "element": "e1m2",
    "granularity": "per_channel",
    "group_size": 32,
    "scale_rule": "four_over_six",
    "scale_dtype": "bf16",
    "fixed_scale": 2.0,
    "global_divisor": 448.0,
    "transform": "hadamard",
    "packing": "ggml",
}


def test_every_field_of_a_scheme_but_its_names_is_part_of_its_identity() -> None:
    assert OTHER_SCHEME_FIELDS.keys() | NAMES_ONLY == KVScheme.model_fields.keys()
    base = build_scheme("rich", RICH)
    seen = [base.identity()]
    for field, value in OTHER_SCHEME_FIELDS.items():
        changed = base.model_copy(update={field: value}).identity()
        assert changed not in seen, field
        seen.append(changed)
    for field in NAMES_ONLY:
        assert base.model_copy(update={field: "other"}).identity() == base.identity()


@pytest.mark.parametrize("role", ["key", "value"])
def test_every_field_of_a_format_is_part_of_its_schemes_identity(role: str) -> None:
    assert OTHER_FORMAT_FIELDS.keys() == TensorFormat.model_fields.keys()
    base = get_scheme("nvfp4")
    for field, value in OTHER_FORMAT_FIELDS.items():
        side = getattr(base, role).model_copy(update={field: value})
        assert base.model_copy(update={role: side}).identity() != base.identity(), field


def test_scales_of_other_numbers_are_another_scheme() -> None:
    base = get_scheme("fp8_e4m3").model_copy(update={"scales": SCALES})
    other = StaticScales(source="here", key={0: (0.5,)}, value={0: (0.25,), 3: (1.0, 2.5)})
    assert base.model_copy(update={"scales": other}).identity() != base.identity()
    assert base.identity() != get_scheme("fp8_e4m3").identity()


# Building and refusing.


def test_extends_starts_from_a_preset() -> None:
    mine = build_scheme("mine", {"extends": "kivi4", "value": "nvfp4", "sink_tokens": 4})
    assert mine.key == get_scheme("kivi4").key
    assert mine.value == get_scheme("nvfp4").value
    assert (mine.residual_length, mine.sink_tokens, mine.summary, mine.engines) == (128, 4, "", ())
    both = build_scheme("mine", {"extends": "kivi4", "both": "bf16", "residual_length": 0})
    assert both.key == both.value == format_of("bf16")
    side = build_scheme("mine", {"both": "nvfp4", "value": "bf16"})
    assert (side.key, side.value) == (format_of("nvfp4"), format_of("bf16"))


def test_overrides_take_presets_by_name_on_either_side() -> None:
    mine = build_scheme("mine", {"both": "bf16", "layers": [{"layers": ["first:1"], "key": "kivi4", "value": "kivi4"}]})
    assert mine.layers[0].key == get_scheme("kivi4").key
    assert mine.layers[0].value == get_scheme("kivi4").value
    assert mine.lossy
    assert mine.append_invariant
    assert not build_scheme("x", {"both": "bf16", "layers": [{"layers": [0], "both": "nvfp4"}]}).append_invariant


def test_a_wrong_name_gets_suggestions_and_its_place() -> None:
    with pytest.raises(UnknownNameError, match=r"sweep\.yaml:7: unknown scheme 'nvpf4'.*\n.*'nvfp4'"):
        get_scheme("nvpf4", where="sweep.yaml:7")
    with pytest.raises(UnknownNameError, match="unknown element type 'e3m4'"):
        TensorFormat(element="e3m4")
    with pytest.raises(UnknownNameError, match=r"here: unknown scheme 'fp9'"):
        build_scheme("mine", {"key": "fp9", "value": "bf16"}, where="here")
    with pytest.raises(UnknownNameError, match="unknown scheme 'kivi'"):
        build_scheme("mine", {"extends": "kivi"})
    with pytest.raises(UnknownNameError, match="unknown scheme 'kivi'"):
        build_scheme("mine", {"both": "bf16", "layers": [{"layers": [0], "key": "kivi"}]})
    for field, value, kind in (
        ("scale_rule", "amx", "scale rule"),
        ("scale_dtype", "fp17", "scale type"),
        ("transform", "hadamart", "transform"),
    ):
        with pytest.raises(UnknownNameError, match=f"unknown {kind} '{value}'.*\n.*Did you mean"):
            TensorFormat(**{"element": "int4", **GROUPED, field: value})


GROUPED = {"granularity": "per_group", "group_size": 32, "scale_rule": "amax", "scale_dtype": "bf16"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"element": "int4", **GROUPED, "group_size": None}, "group_size goes with"),
        ({"element": "int4", **GROUPED, "group_size": 1}, "greater than or equal to 2"),
        ({"element": "int4", **GROUPED, "granularity": "per_token"}, "group_size goes with"),
        ({"element": "int4", **GROUPED, "granularity": "per_channel", "group_size": None}, "group_size goes with"),
        ({"element": "int4", **GROUPED, "granularity": "per_row"}, "Input should be 'none'"),
        ({"element": "int4", **GROUPED, "scale_rule": "fixed"}, "fixed takes granularity per_tensor"),
        ({"element": "int4", **GROUPED, "scale_rule": "rms"}, "rms takes granularity per_token"),
        ({"element": "int4", **GROUPED, "scale_dtype": None}, "scale_dtype goes with"),
        ({"element": "int4", "granularity": "per_tensor", "scale_rule": "fixed", "scale_dtype": "fp32"}, "scale_dtype"),
        ({"element": "bf16", **GROUPED}, "bf16 elements take no scale"),
        ({"element": "bf16", "transform": "hadamard"}, "without a transform"),
        ({"element": "e4m3"}, "every other element needs one"),
        ({"element": "e2m1", **GROUPED, "scale_rule": "minmax"}, "minmax adds a zero point"),
        ({"element": "uint4", **GROUPED}, "uint4 needs a zero point"),
        ({"element": "e2m1", **GROUPED, "global_divisor": 2688}, "global_divisor goes with e4m3 scales"),
        ({"element": "uint4", **GROUPED, "scale_rule": "minmax", "scale_dtype": "e8m0"}, "zero point"),
        ({"element": "uint4", **GROUPED, "scale_rule": "minmax", "scale_dtype": "e4m3"}, "zero point"),
        ({"element": "e2m1", **GROUPED, "scale_dtype": "e8m0"}, "mx_floor goes with e8m0"),
        ({"element": "e2m1", **GROUPED, "scale_rule": "mx_floor"}, "mx_floor goes with e8m0"),
        ({"element": "int8", **GROUPED, "scale_rule": "four_over_six"}, "for e2m1 elements"),
        ({"element": "int4", **GROUPED, "group_size": 16, "packing": "ggml"}, "groups of 32"),
        ({"element": "int2", **GROUPED, "packing": "ggml"}, "4, 5 or 8 bits"),
        ({"element": "int4", **GROUPED, "packing": "zigzag"}, "sequential"),
        ({"element": "int4", **GROUPED, "fixed_scale": 0}, "greater than 0"),
        ({"element": "bf16", "bits": 16}, "Extra inputs are not permitted"),
    ],
)
def test_inconsistent_formats_are_refused_when_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TensorFormat(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"residual_length": 100}, "multiple of the 32 tokens"),
        ({"both": "bf16", "layers": [{"layers": [0], "key": "kivi4"}], "residual_length": 33}, "multiple of the 32"),
        ({"residual_length": -1}, "greater than or equal to 0"),
        ({"sink_tokens": -1}, "greater than or equal to 0"),
        ({"sliding": "fp8"}, "'bf16' or 'quantized'"),
        ({"block_size": 0}, "greater than or equal to 1"),
        ({"layers": [{"layers": []}]}, "at least 1 item"),
        ({"layers": [{"layers": [0], "keys": "bf16"}]}, "Extra inputs"),
        ({"scales": SCALES}, "scale_rule is static or fixed"),
        ({"sinks": 4}, "Extra inputs are not permitted"),
    ],
)
def test_inconsistent_schemes_are_refused_when_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_scheme("mine", {"extends": "kivi4", **fields})


def test_formats_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        get_scheme("bf16").key.element = "e4m3"
    with pytest.raises(ValidationError, match="Field required"):
        KVScheme(name="half", key=get_scheme("bf16").key)


def test_needed_and_taken_scales() -> None:
    assert [n for n in scheme_names() if get_scheme(n).needs_scales] == ["fp8_per_head"]
    assert [n for n in scheme_names() if get_scheme(n).takes_scales] == [
        "fp8_e4m3", "fp8_e5m2", "fp8_per_head", "turboquant_k8v4",
    ]  # fmt: skip
