"""Which tokens and layers of a scheme are encoded, what they weigh, and calibrated scales by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from format_contract import can_store, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from preset_formats import FORMATS, format_of
from pydantic import ValidationError

from kveval.errors import ConfigError, UnsupportedError
from kveval.formats.layout import BF16, LayerFormat, RoleFormat, layer_formats, select_layers
from kveval.formats.scales import StaticScales
from kveval.formats.spec import KVScheme, TensorFormat, build_scheme, get_scheme, scheme_names
from kveval.geometry import LayerGeometry
from kveval.storage import PackedStore

FULL = LayerGeometry(kind="full", kv_heads=2, head_dim_k=64, head_dim_v=64)
WINDOW = LayerGeometry(kind="sliding", kv_heads=2, head_dim_k=64, head_dim_v=64, window=128)
LINEAR = LayerGeometry(kind="linear")
MLA = LayerGeometry(kind="mla", kv_heads=1, head_dim_k=512, head_dim_v=64)
SHARED = LayerGeometry(kind="full", kv_heads=2, head_dim_k=64, head_dim_v=64, shared_with=0)


def layout(data: dict[str, Any] | str, *layers: LayerGeometry) -> tuple[LayerFormat | None, ...]:
    scheme = get_scheme(data) if isinstance(data, str) else build_scheme("mine", data)
    return layer_formats(scheme, layers)


def one(data: dict[str, Any] | str, shape: LayerGeometry = FULL) -> LayerFormat:
    (found,) = layout(data, shape)
    assert found is not None
    return found


def encoded(data: dict[str, Any] | str, role: str, totals: list[int]) -> list[int]:
    return [getattr(one(data), role).encoded_tokens(total) for total in totals]


# Tokens.


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"extends": "nvfp4"}, {0: 0, 1: 1, 7: 7, 500: 500}),
        ({"extends": "nvfp4", "sink_tokens": 4}, {0: 0, 3: 0, 4: 0, 5: 1, 500: 496}),
        ({"extends": "nvfp4", "residual_length": 32}, {1: 0, 32: 0, 33: 1, 500: 468}),
        ({"extends": "nvfp4", "sink_tokens": 4, "residual_length": 32}, {4: 0, 36: 0, 37: 1, 500: 464}),
        ({"both": "bf16", "sink_tokens": 4, "residual_length": 32}, {0: 0, 1: 1, 500: 500}),
    ],
)
def test_sinks_and_recent_tokens_stay_wide(data: dict[str, Any], role: str, expected: dict[int, int]) -> None:
    assert encoded(data, role, list(expected)) == list(expected.values())


def test_kivi_keys_keep_up_to_a_window_and_values_always_one() -> None:
    totals = [0, 1, 127, 128, 129, 255, 256, 300, 1000]
    assert encoded("kivi4", "key", totals) == [0, 0, 0, 128, 128, 128, 256, 256, 896]
    assert encoded("kivi4", "value", totals) == [0, 0, 0, 0, 1, 127, 128, 172, 872]
    wide = {total - done for total, done in zip(range(1000), encoded("kivi4", "key", [*range(1000)]), strict=True)}
    assert wide == set(range(128))
    assert [t - d for t, d in zip(totals[3:], encoded("kivi4", "value", totals[3:]), strict=True)] == [128] * 6


def test_per_channel_groups_follow_the_sinks() -> None:
    data = {"extends": "kivi4", "sink_tokens": 5, "residual_length": 64}
    assert encoded(data, "key", [5, 68, 69, 132, 133, 200]) == [0, 0, 64, 64, 128, 192]
    assert encoded({"extends": "kivi4", "residual_length": 0}, "key", [31, 32, 33, 64, 95]) == [0, 32, 32, 64, 64]


def test_bytes_of_tokens_by_hand() -> None:
    nvfp4 = 64 // 2 + 64 // 16
    role = one({"extends": "nvfp4", "sink_tokens": 4, "residual_length": 8}).key
    nbytes = [role.nbytes(total, head_dim=64, kv_heads=2) for total in (0, 1, 12, 13, 100)]
    assert nbytes == [0, 4 + 2 * 128, 4 + 2 * 12 * 128, 4 + 2 * (12 * 128 + nvfp4), 4 + 2 * (12 * 128 + 88 * nvfp4)]
    assert role.nbytes(100, head_dim=64, kv_heads=2, dropped=64) == 4 + 2 * (12 * 128 + 24 * nvfp4)
    keys = one("kivi4").key
    group = 32 * 32 + 64 * 4
    assert keys.nbytes(300, head_dim=64, kv_heads=2) == 2 * (8 * group + 44 * 128)
    assert keys.nbytes(300, head_dim=64, kv_heads=2, dropped=64) == 2 * (6 * group + 44 * 128)
    mean = one("int4_g64_mean_shift").key
    assert mean.nbytes(3, head_dim=64, kv_heads=2) == 2 * 64 * 4 + 2 * 3 * (32 + 4)


def test_keys_and_values_may_differ_in_width() -> None:
    shape = LayerGeometry(kind="full", kv_heads=3, head_dim_k=192, head_dim_v=128)
    assert one("nvfp4", shape).nbytes(10, shape) == 2 * 4 + 3 * 10 * (108 + 72)
    assert one("k8v4", shape).nbytes(10, shape) == 4 + 3 * 10 * (192 + 4 + 72)
    assert one("bf16", MLA).nbytes(1, MLA) == 1152


@settings(max_examples=60)
@given(
    side=st.sampled_from(sorted(FORMATS)),
    sinks=st.sampled_from([0, 1, 5, 40]),
    units=st.integers(0, 3),
    writes=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_store_holds_what_the_layout_says(side: str, sinks: int, units: int, writes: list[int], seed: int) -> None:
    """Bytes and encoded tokens are a function of the total, whatever the writes were; and reading gives the tokens."""
    fmt = FORMATS[side]
    if not can_store(fmt, 64):
        return
    scales = (0.05, 0.1) if fmt.scale_rule == "static" else None
    role = RoleFormat(fmt, sinks, units * fmt.unit, scales) if fmt.lossy else RoleFormat(fmt)
    store = PackedStore(role, 64, where="keys of layer 0", block_size=16)
    x = numbers(2, 2, sum(writes), 64, seed=seed)
    start = 0
    for count in writes:
        store.append(x[:, :, start : start + count])
        start += count
        wide = start - role.encoded_tokens(start)
        parts = store.parts()
        assert (parts["payload"].shape[2] if "payload" in parts else 0) == start - wide
        assert sum(parts[p].shape[2] for p in ("sinks", "tail") if p in parts) == wide
        assert store.nbytes().stored == 2 * role.nbytes(start, head_dim=64, kv_heads=2)
        assert store.nbytes().stored == store.billed_bytes()
    got = store.read(store.snapshot(), torch.float32)
    assert got.shape == x.shape
    kept = [*range(min(sinks, start)), *range(start - max(0, wide - sinks), start)] if fmt.lossy else [*range(start)]
    assert torch.equal(got[:, :, kept], x[:, :, kept])


# Layers.


def kinds(data: dict[str, Any], *layers: LayerGeometry) -> list[str | None]:
    """The key element of every layer."""
    return [None if fmt is None else fmt.key.format.element for fmt in layout(data, *layers)]


def test_layers_without_keys_and_values_of_their_own_have_no_format() -> None:
    none = LayerGeometry(kind="none")
    assert kinds({"extends": "nvfp4"}, FULL, LINEAR, SHARED, none, MLA) == ["e2m1", None, None, None, "e2m1"]


def test_the_rope_part_of_mla_layers_stays_bf16() -> None:
    found = one({"extends": "nvfp4", "sink_tokens": 4}, MLA)
    assert found.key == RoleFormat(format_of("nvfp4"), sink_tokens=4)
    assert found.value == RoleFormat(BF16)
    assert found.nbytes(10, MLA) == 4 + 4 * 1024 + 6 * (256 + 32) + 10 * 128
    override = {"both": "bf16", "layers": [{"layers": ["mla"], "both": "nvfp4"}]}
    assert (one(override, MLA).key.format, one(override, MLA).value.format) == (format_of("nvfp4"), BF16)


def test_sliding_layers_stay_bf16_unless_asked_for() -> None:
    sliding_mla = LayerGeometry(kind="mla", kv_heads=1, head_dim_k=512, head_dim_v=64, window=128)
    for shape in (WINDOW, sliding_mla):
        assert one({"extends": "kivi4", "sink_tokens": 4}, shape) == LayerFormat(RoleFormat(BF16), RoleFormat(BF16))
        asked = one({"extends": "kivi4", "sink_tokens": 4, "sliding": "quantized"}, shape)
        assert asked.key == RoleFormat(get_scheme("kivi4").key)
        assert (asked.key.sink_tokens, asked.key.residual_length) == (0, 0)


SIX = (FULL, WINDOW, LINEAR, FULL, SHARED, FULL)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (0, {0}),
        ("3", {3}),
        ("0-3", {0, 1, 3}),
        (" 3 - 5 ", {3, 5}),
        ("5-5", {5}),
        ("first:1", {0}),
        ("first:3", {0, 1, 3}),
        ("last:2", {3, 5}),
        ("last:4", {0, 1, 3, 5}),
        ("full", {0, 3, 5}),
        ("sliding", {1}),
    ],
)
def test_selectors(selector: int | str, expected: set[int]) -> None:
    assert select_layers([selector], SIX, where="skip_layers") == expected


def test_selectors_add_up() -> None:
    assert select_layers([0, "last:1", "sliding"], SIX, where="skip_layers") == {0, 1, 5}
    assert select_layers(["mla"], (FULL, MLA), where="skip_layers") == {1}
    assert select_layers([], SIX, where="skip_layers") == frozenset()


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (6, "'6' is no layer or ascending range of layers 0 to 5"),
        ("4-6", "'4-6' is no layer or ascending range"),
        ("5-3", "'5-3' is no layer or ascending range"),
        ("first:0", "'first:0' asks for 0 of 4"),
        ("last:5", "'last:5' asks for 5 of 4 layers with keys and values"),
        (2, "no layer of this model that stores keys and values is '2'"),
        (4, "no layer of this model that stores keys and values is '4'"),
        ("mla", "no layer of this model .* is 'mla'"),
        ("linear", r"'linear' names no layers.\n.*first:2"),
        ("middle:2", "'middle:2' names no layers"),
        (-1, "'-1' names no layers"),
        ("", "'' names no layers"),
    ],
)
def test_selectors_that_name_nothing_are_refused(selector: int | str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"skip_layers: {message}"):
        layout({"extends": "nvfp4", "skip_layers": [selector]}, *SIX)
    with pytest.raises(ConfigError, match=f"layers: {message}"):
        layout({"extends": "nvfp4", "layers": [{"layers": [selector], "key": "bf16"}]}, *SIX)


def test_skipped_layers_stay_bf16_on_both_sides() -> None:
    data = {"extends": "nvfp4", "sink_tokens": 4, "residual_length": 8, "skip_layers": [0, "last:1"]}
    first, _, _, middle, _, last = layout(data, *SIX)
    assert first == last == LayerFormat(RoleFormat(BF16), RoleFormat(BF16))
    assert not first.lossy
    assert middle is not None
    assert middle.lossy
    assert middle.key == RoleFormat(format_of("nvfp4"), 4, 8)


def test_overrides_replace_the_sides_they_name_and_the_last_counts() -> None:
    data = {
        "extends": "nvfp4",
        "sliding": "quantized",
        "layers": [
            {"layers": ["full"], "key": "fp8_per_token_head"},
            {"layers": ["last:1"], "key": "bf16", "value": "mxfp4"},
        ],
    }
    found = [fmt for fmt in layout(data, *SIX) if fmt is not None]
    assert [fmt.key.format.element for fmt in found] == ["e4m3", "e2m1", "e4m3", "bf16"]
    assert [fmt.value.format for fmt in found] == [format_of("nvfp4")] * 3 + [format_of("mxfp4")]
    skipped = {**data, "skip_layers": ["last:1"]}
    assert layout(skipped, *SIX)[-1] == LayerFormat(RoleFormat(BF16), RoleFormat(BF16))
    wide = {**data, "sliding": "bf16", "layers": [{"layers": ["sliding"], "key": "nvfp4"}]}
    assert layout(wide, *SIX)[1] == LayerFormat(RoleFormat(BF16), RoleFormat(BF16))


@pytest.mark.parametrize("head_dim", [80, 112])
@pytest.mark.parametrize("name", [n for n in scheme_names() if get_scheme(n).key.packing == "ggml"])
def test_llama_formats_refuse_other_heads_when_layers_are_laid_out(name: str, head_dim: int) -> None:
    odd = LayerGeometry(kind="full", kv_heads=2, head_dim_k=64, head_dim_v=head_dim)
    with pytest.raises(UnsupportedError, match=f"a head of {head_dim} is no multiple"):
        layout(name, FULL, odd)
    scheme = get_scheme(name).model_copy(update={"skip_layers": (1,)})
    assert layer_formats(scheme, (FULL, odd))[1] == LayerFormat(RoleFormat(BF16), RoleFormat(BF16))


# Calibrated scales.


def with_scales(name: str, scales: StaticScales, **fields: Any) -> KVScheme:
    return build_scheme("mine", {"extends": name, "scales": scales, **fields})


def test_calibrated_scales_reach_their_layers() -> None:
    scales = StaticScales(source="s", key={0: (0.5,), 1: (0.25,)}, value={0: (1.0,), 1: (2.0,)})
    found = layer_formats(with_scales("fp8_e4m3", scales), (FULL, FULL))
    assert [(fmt.key.scales, fmt.value.scales) for fmt in found if fmt] == [((0.5,), (1.0,)), ((0.25,), (2.0,))]
    by_head = StaticScales(source="s", key={0: (0.5, 0.25)}, value={0: (1.0, 2.0)})
    (fmt,) = layer_formats(with_scales("fp8_per_head", by_head), (FULL,))
    assert fmt is not None
    assert (fmt.key.scales, fmt.value.scales) == ((0.5, 0.25), (1.0, 2.0))
    (fmt,) = layer_formats(with_scales("turboquant_k8v4", StaticScales(source="s", key={0: (0.5,)})), (FULL,))
    assert fmt is not None
    assert (fmt.key.scales, fmt.value.scales) == ((0.5,), None)


def test_a_layer_without_its_scale_is_refused() -> None:
    scales = StaticScales(source="s.json", key={0: (0.5,)}, value={0: (1.0,)})
    with pytest.raises(ConfigError, match=r"scales of s\.json have no key scale for layer 1"):
        layer_formats(with_scales("fp8_e4m3", scales), (FULL, FULL))
    (_, second) = layer_formats(with_scales("fp8_e4m3", scales, skip_layers=[1]), (FULL, FULL))
    assert second is not None
    assert second.key.scales is None


def test_a_wrong_number_of_scales_is_refused() -> None:
    two = StaticScales(source="s", key={0: (0.5, 0.25)}, value={0: (1.0, 2.0)})
    with pytest.raises(ConfigError, match="2 key scales for layer 0; per_tensor takes 1"):
        layer_formats(with_scales("fp8_e4m3", two), (FULL,))
    three = StaticScales(source="s", key={0: (0.5, 0.25)}, value={0: (1.0, 2.0, 3.0)})
    with pytest.raises(ConfigError, match="3 value scales for layer 0; per_head takes 2"):
        layer_formats(with_scales("fp8_per_head", three), (FULL,))


def test_a_fixed_format_without_scales_keeps_its_constant() -> None:
    assert one("fp8_e4m3").key.scales is None


def test_scales_are_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"key": {"0": [0.5], "11": [0.25]}, "value": {"0": [1, 2]}, "note": "more"}))
    scales = StaticScales.read(path)
    assert scales == StaticScales(source="scales.json", key={0: (0.5,), 11: (0.25,)}, value={0: (1.0, 2.0)})
    again = scales.model_copy(update={"source": "elsewhere"})
    assert again.digest == scales.digest
    other = StaticScales(source="scales.json", key={0: (0.5,), 11: (0.25,)}, value={0: (1.0, 2.5)})
    assert other.digest != scales.digest
    swapped = StaticScales(source="scales.json", key=scales.value, value=scales.key)
    assert swapped.digest != scales.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't read scales from .*scales.json"),
        ("[1]", "has no `key` and `value` scales"),
        ('{"key": {"0": [1]}}', "has no `key` and `value` scales"),
        ('{"key": {"0": [0]}, "value": {"0": [1]}}', r"key scales of layer 0 must be finite and above 0, not \(0"),
        ('{"key": {"0": [1]}, "value": {"3": [-1]}}', "value scales of layer 3 must be finite and above 0"),
        ('{"key": {"0": [1]}, "value": {"3": []}}', "value scales of layer 3 must be finite and above 0"),
        ('{"key": {"0": [NaN]}, "value": {"0": [1]}}', "key scales of layer 0 must be finite"),
        ('{"key": {"0": [Infinity]}, "value": {"0": [1]}}', "key scales of layer 0 must be finite"),
        ('{"key": {"0": 1}, "value": {"0": [1]}}', r"scales\.json: key\.0: .*tuple"),
        ('{"key": {"first": [1]}, "value": {"0": [1]}}', r"scales\.json: key\.first.*integer"),
        ('{"key": {"0": ["x"]}, "value": {"0": [1]}}', r"scales\.json: key\.0\.0: .*number"),
        ('{"key": {}, "value": {}}', "no scale of a key or a value"),
    ],
)
def test_damaged_scales_are_refused_with_the_file_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        StaticScales.read(path)
    assert caught.value.remedy


def test_missing_scales_are_refused_with_the_file_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read scales from .*nowhere\.json"):
        StaticScales.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize("selector", ["7-4", 99, "first:0", "first:99", "sliding", "odd"])
def test_selectors_that_name_no_layer_say_what_to_write(selector):
    layers = [LayerGeometry(kind="full", kv_heads=1, head_dim_k=64, head_dim_v=64)] * 8
    with pytest.raises(ConfigError) as caught:
        select_layers([selector], layers, where="skip_layers")
    assert '"first:2"' in caught.value.remedy


def test_an_override_that_changes_nothing_is_refused():
    with pytest.raises(ValidationError, match="names a key format, a value format or both"):
        build_scheme("mine", {"extends": "nvfp4", "layers": [{"layers": [1]}]})


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 0.0, -1.0])
def test_constants_are_finite_and_positive(number):
    with pytest.raises(ValidationError):
        TensorFormat(element="e4m3", granularity="per_tensor", scale_rule="fixed", fixed_scale=number)
