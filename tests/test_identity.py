from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kveval.identity import canonical_json, digest

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def test_golden_digests():
    assert digest("cell", {"b": 1, "a": [1.5, None]}) == "0f338134455da770"
    assert digest("gate", {"b": 1, "a": [1.5, None]}) != digest("cell", {"b": 1, "a": [1.5, None]})


@given(plain)
def test_canonical_json_reads_back_and_is_stable(value):
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


def test_key_order_does_not_matter_but_values_do():
    assert digest("x", {"a": 1, "b": 2}) == digest("x", {"b": 2, "a": 1})
    assert digest("x", {"a": 1}) != digest("x", {"a": 2})
    assert digest("x", 1) != digest("x", "1")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_numbers_without_a_canonical_form(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest("x", value)
