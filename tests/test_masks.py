"""Masks that take no memory say what transformers' own masks say, and are used for no pattern but their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import ALL_BUILDERS, WINDOW, logits_of, packed, tokens
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    padding_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from kveval.attention import ATTENTION
from kveval.cache import QuantizedCache
from kveval.masks import CausalMask, causal_mask


def left_padding(padding: list[int], length: int) -> Tensor:
    return torch.arange(length) >= torch.tensor(padding)[:, None]


def arguments(
    queries: int, keys: int, *, dropped: int = 0, window: int | None = None, padding: list[int] | None = None
) -> dict[str, Any]:
    """What transformers hands to a mask function for the last `queries` of `keys` kept tokens of two sequences."""
    pattern = {} if window is None else {
        "mask_function": sliding_window_causal_mask_function(window), "local_size": window,
    }  # fmt: skip
    return {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": dropped + keys - queries,
        "kv_offset": dropped,
        "attention_mask": None if padding is None else left_padding(padding, dropped + keys),
        "dtype": torch.float32,
        "config": None,
        "use_vmap": False,
        **pattern,
    }


@pytest.mark.parametrize("window", [None, 1, 8, 30])
@pytest.mark.parametrize(("queries", "keys", "dropped"), [(1, 1, 0), (1, 9, 0), (5, 9, 4), (9, 9, 0), (3, 20, 40)])
@pytest.mark.parametrize("padding", [None, [0, 0], [0, 3], [43, 42], [0, 9]], ids=str)
@pytest.mark.parametrize("skip", [True, False])
def test_it_says_what_transformers_says(
    window: int | None, queries: int, keys: int, dropped: int, padding: list[int] | None, skip: bool
) -> None:
    """None where transformers gives none; else a mask whose whole is transformers' own."""
    options = arguments(queries, keys, dropped=dropped, window=window, padding=padding)
    expected = sdpa_mask(**options, allow_is_causal_skip=skip)
    got = causal_mask(**options, allow_is_causal_skip=skip)
    if expected is None:
        assert got is None
        return
    assert isinstance(got, CausalMask)
    assert (got.shape, got.dtype, got.device) == (expected.shape, torch.bool, expected.device)
    assert torch.equal(got.whole(), expected)
    hidden = [min(max(0, pad - dropped), keys) for pad in padding or [0, 0]]
    assert got.padding == (tuple(hidden) if any(hidden) else None)
    assert got.window == (0 if window is None or keys < window else window)
    # What it says in numbers is the whole mask too.
    row, at = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
    seen = (row <= at) & ((row > at - got.window) | (got.window == 0))
    seen = seen & (row >= torch.tensor(hidden)[:, None, None, None])
    assert torch.equal(seen, expected)


NOT_CAUSAL: dict[str, tuple[Callable[..., Any], int | None]] = {
    "bidirectional": (bidirectional_mask_function, None),
    "chunked": (chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.int64)), 8),
    "window of another size": (sliding_window_causal_mask_function(5), 8),
    "window without its size": (sliding_window_causal_mask_function(8), None),
    "window on both sides": (sliding_window_bidirectional_mask_function(8), 8),
    "causal or all": (or_masks(causal_mask_function, bidirectional_mask_function), None),
    "causal and padding": (and_masks(causal_mask_function, padding_mask_function(left_padding([0, 3], 9))), None),
    "causal twice": (and_masks(causal_mask_function, causal_mask_function), None),
    "looks causal": (lambda b, h, q, kv: kv <= q, None),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_other_patterns_get_the_whole_mask(name: str) -> None:
    pattern, size = NOT_CAUSAL[name]
    options = {**arguments(4, 9), "mask_function": pattern, "local_size": size}
    got = causal_mask(**options)
    assert type(got) is Tensor
    assert torch.equal(got, sdpa_mask(**options))


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 1, 1, 0, 1, 1, 1, 1, 1]] * 2,
        [[1, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 9],
        [[0, 1, 0, 1, 1, 1, 1, 1, 1], [0] + [1] * 8],
    ],
    ids=["hole", "right", "both"],
)
def test_other_padding_gets_the_whole_mask(rows: list[list[int]]) -> None:
    options = {**arguments(4, 9), "attention_mask": torch.tensor(rows).bool()}
    got = causal_mask(**options)
    assert type(got) is Tensor
    assert torch.equal(got, sdpa_mask(**options))


def test_an_attention_mask_that_ends_early_gets_the_whole_mask() -> None:
    """transformers takes what it lacks for padding on the right."""
    options = {**arguments(4, 9), "attention_mask": torch.ones(2, 7, dtype=torch.bool)}
    got = causal_mask(**options)
    assert type(got) is Tensor
    assert torch.equal(got, sdpa_mask(**options))
    assert not got[:, :, :, 7:].any()


def test_queries_that_are_not_the_last_tokens_get_the_whole_mask() -> None:
    """As in a cache of a fixed length, whose last places are empty."""
    options = {**arguments(4, 9), "q_offset": 2}
    assert type(causal_mask(**options)) is Tensor


def test_operations_meet_a_bool_mask_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(**options: Any) -> Any:
        calls.append(options)
        return sdpa_mask(**options)

    monkeypatch.setattr("kveval.masks.sdpa_mask", counted)
    mask, whole = causal_mask(**arguments(4, 9, window=3)), sdpa_mask(**arguments(4, 9, window=3))
    assert isinstance(mask, CausalMask)
    assert not calls
    assert repr(mask) == "CausalMask(shape=(2, 1, 4, 9), window=3, padding=None)"
    assert not calls
    for got, expected in (
        (mask[:, :, -2:, :5], whole[:, :, -2:, :5]),
        (~mask, ~whole),
        (mask.expand(2, 4, 4, 9), whole.expand(2, 4, 4, 9)),
        (torch.zeros(4, 9).masked_fill(mask, 1.0), torch.zeros(4, 9).masked_fill(whole, 1.0)),
        (mask.to(torch.float32), whole.float()),
    ):
        assert type(got) is Tensor
        assert torch.equal(got, expected)
    assert len(calls) == 1


def test_bounds_are_those_of_a_part() -> None:
    mask = causal_mask(**arguments(4, 9, padding=[2, 5]))
    assert isinstance(mask, CausalMask)
    assert mask.bounds(0, 9).tolist() == [[2, 9], [5, 9]]
    assert mask.bounds(3, 6).tolist() == [[0, 6], [2, 6]]
    assert mask.bounds(3, 6).dtype == torch.int32
    assert mask.bounds(3, 6) is mask.bounds(3, 6)
    assert mask.bounds(-1, 4).tolist() == [[3, 4], [6, 4]]
    assert mask.bounds(5, 4) is None
    assert causal_mask(**arguments(4, 9, window=3)).bounds(0, 9) is None


@pytest.mark.parametrize("family", [name for name in ALL_BUILDERS if "deepseek" not in name])
def test_every_family_gets_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a second chunk, beyond the window where there is one: whole masks are made for chunked attention alone."""
    kinds = []

    def seen(**options: Any) -> Any:
        mask = causal_mask(**options)
        kinds.append("whole" if type(mask) is Tensor else "window" if mask is not None and mask.window else "causal")
        return mask

    model = packed(ALL_BUILDERS[family]())
    assert AttentionMaskInterface()[ATTENTION] is causal_mask
    AttentionMaskInterface.register(ATTENTION, seen)
    try:
        cache = QuantizedCache(model.config, "bf16")
        logits_of(model, tokens(2 * WINDOW), cache)
        kinds.clear()
        logits_of(model, tokens(5), cache)
    finally:
        AttentionMaskInterface.register(ATTENTION, causal_mask)
    sliding = {layer.is_sliding for layer in cache.packed_layers}
    expected = {{True: "whole" if family == "llama4" else "window", False: "causal"}[s] for s in sliding}
    assert set(kinds) == expected
