from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from kveval.errors import ConfigError
from kveval.formats.scales import StaticScales

FILE = {"key": {"0": [0.5, 0.25], "3": [1.0, 2.0]}, "value": {"0": [0.125, 8.0]}}


def read(tmp_path, data) -> StaticScales:
    path = tmp_path / "scales.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return StaticScales.read(path)


def test_a_file_is_read_by_layer_and_other_keys_are_left(tmp_path):
    scales = read(tmp_path, {**FILE, "model": "m", "tokens": 4096, "element": "e4m3", "weights_digest": "w"})
    assert scales.source == "scales.json"
    assert scales.key == {0: (0.5, 0.25), 3: (1.0, 2.0)}
    assert scales.value == {0: (0.125, 8.0)}
    assert (scales.element, scales.weights_digest) == ("e4m3", "w")
    assert read(tmp_path, FILE).weights_digest is None


def test_a_side_may_take_none(tmp_path):
    assert read(tmp_path, {**FILE, "value": {}}).value == {}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "can't read scales from .*scales.json"),
        ("[1]", "has no `key` and `value` scales"),
        ({"key": FILE["key"]}, "has no `key` and `value` scales"),
        ({"key": {}, "value": {}}, "there is no scale of a key or a value"),
        ({**FILE, "key": {"0": []}}, r"the key scales of layer 0 must be finite and above 0, not \(\)"),
        ({**FILE, "value": {"2": [1.0, 0.0]}}, "the value scales of layer 2 must be finite and above 0"),
        ({**FILE, "key": {"1": [-1.0]}}, "the key scales of layer 1 must be finite and above 0"),
        ('{"key": {"0": [NaN]}, "value": {}}', "the key scales of layer 0 must be finite"),
        ({**FILE, "key": {"one": [1.0]}}, r"key\.one"),
        ({**FILE, "key": {"0": 1.0}}, r"key\.0"),
        ({**FILE, "key": {"0": ["x"]}}, r"key\.0\.0"),
        ({**FILE, "element": 4}, "element"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, data)
    assert "scales.json" in str(caught.value)
    assert caught.value.remedy


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="can't read scales from"):
        StaticScales.read(tmp_path / "none.json")


@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_is_a_positive_number(number):
    with pytest.raises(ValidationError, match="finite and above 0"):
        StaticScales(source="s", key={0: (1.0,)}, value={0: (number,)})


def test_the_digest_is_that_of_the_numbers():
    scales = StaticScales(source="a", key={0: (0.5,)}, value={0: (0.25,)})
    same = scales.model_copy(update={"source": "b", "element": "e4m3", "weights_digest": "w"})
    assert same.digest == scales.digest
    assert scales.model_copy(update={"key": {0: (0.25,)}, "value": {0: (0.5,)}}).digest != scales.digest
    assert scales.model_copy(update={"key": {1: (0.5,)}}).digest != scales.digest
    assert scales.model_copy(update={"value": {0: (math.nextafter(0.25, 1),)}}).digest != scales.digest


def test_json_keeps_every_bit():
    scales = StaticScales(source="a", key={0: (0.1 + 0.2,), 11: (1e-7,)}, value={0: (1 / 3,)})
    assert StaticScales.model_validate_json(scales.model_dump_json()) == scales
