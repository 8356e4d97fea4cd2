"""Sliding windows: what has left is freed, what a token may attend to is there, and a crop stays exact."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cache_tools import HEAD_DIM, HEADS, SLIDING, fill, filled, new_cache, numbers, scheme
from tiny_models import WINDOW, in_chunks, logits_of, packed, tiny_gemma3, tokens
from torch import Tensor

from kveval.cache import QuantizedCache
from kveval.errors import UnsupportedError
from kveval.formats.spec import KVScheme, build_scheme
from kveval.packed_layer import TILE, PackedLayer
from kveval.storage import CROP_RESERVE

QUANTIZED = ("sliding", "sliding_nvfp4", "sliding_kivi")
SLIDING_SCHEMES = ("bf16", "nvfp4", *QUANTIZED)
"""`nvfp4` leaves sliding layers in BF16; the last three store them narrower."""
EVERY = pytest.mark.parametrize("name", SLIDING_SCHEMES)

FIRST_DROP = WINDOW - 1 + CROP_RESERVE + TILE
"""Tokens after which a sliding layer frees its first tile."""


def layer_of(window: int, built: str | KVScheme = "bf16") -> QuantizedCache:
    """One sliding layer."""
    config = {**SLIDING, "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": window}
    return QuantizedCache(config, built)


def kept_by_rule(total: int, window: int, tile: int = TILE) -> int:
    """The next token sees window - 1 stored ones; a crop of CROP_RESERVE moves that back; whole tiles go."""
    return total - max(0, total - (window - 1) - CROP_RESERVE) // tile * tile


def read(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


class TestWhatIsKept:
    @pytest.mark.parametrize("window", [1, WINDOW, 64, 65, 100])
    @pytest.mark.parametrize("piece", [1, 7, 300])
    def test_the_rule(self, window: int, piece: int) -> None:
        cache = layer_of(window)
        layer, x = cache.layers[0], numbers(0, 300, batch=1)
        for start in range(0, 300, piece):
            before, dropped = layer.get_mask_sizes(piece)
            handles = cache.update(x[:, :, start : start + piece], x[:, :, start : start + piece], 0)
            if start + piece <= 300:
                assert handles[0].shape[2] == handles[1].shape[2] == before == start + piece - dropped
            total = min(300, start + piece)
            assert (layer.get_seq_length(), layer.dropped) == (total, total - kept_by_rule(total, window))
            assert layer.get_mask_sizes(5) == (kept_by_rule(total, window) + 5, layer.dropped)
            assert total - layer.dropped >= min(total, window - 1 + CROP_RESERVE)
        assert torch.equal(layer.keys, x[:, :, layer.dropped :].bfloat16().float())

    @pytest.mark.parametrize(("group", "tile"), [(32, 64), (48, 192), (128, 128)])
    def test_groups_of_tokens_are_freed_whole(self, group: int, tile: int) -> None:
        """Keys per channel free whole groups, and values as many tokens."""
        key = {**scheme("kivi4").key.model_dump(), "group_size": group}
        built = build_scheme("x", {"extends": "kivi4", "key": key, "residual_length": 0, "sliding": "quantized"})
        cache, whole = layer_of(WINDOW, built), layer_of(WINDOW, built)
        whole.activate_past_recording()
        for start in range(0, 500, 20):
            for c in (cache, whole):
                c.update(*(numbers(start, start + 20, role=role) for role in "kv"), 0)
            total, layer = start + 20, cache.layers[0]
            assert layer.dropped == total - kept_by_rule(total, WINDOW, tile)
            assert {store.dropped for store in layer.stores()} == {layer.dropped}
        for got, expected in zip(read(cache.layers[0]), read(whole.layers[0]), strict=True):
            assert torch.equal(got, expected[:, :, layer.dropped :])

    @EVERY
    def test_full_layers_keep_every_token(self, name: str) -> None:
        cache = filled(name, 100, 200, 300, config=SLIDING)
        assert [layer.dropped for layer in cache.packed_layers] == [192, 0, 192]
        assert [layer.get_seq_length() for layer in cache.packed_layers] == [300] * 3
        assert cache.get_mask_sizes(1, 0) == (109, 192)
        assert cache.get_mask_sizes(1, 1) == (301, 0)

    @EVERY
    def test_memory_is_freed(self, name: str) -> None:
        """Over five windows of 64 after the first drop no more is held than before, spare room and copies included."""
        built = scheme(name)
        cache, held, allocated = layer_of(64, built.model_copy(update={"block_size": 64})), [], []
        for start in range(0, 12 * 64, 8):
            cache.update(*(numbers(start % 500, start % 500 + 8, role=role) for role in "kv"), 0)
            bytes_now = cache.stored_bytes()
            assert bytes_now.stored == cache.billed_bytes()
            held.append(bytes_now.stored)
            allocated.append(
                sum(
                    t.untyped_storage().nbytes()
                    for store in cache.layers[0].stores()
                    for t in (store.snapshot().payload, store.snapshot().scale, store.snapshot().recent)
                    if t is not None
                )
            )
        early = 6 * 64 // 8
        assert max(held[early:]) == max(held[:early])
        assert max(allocated[early:]) == max(allocated[:early])
        most = 64 - 1 + CROP_RESERVE + TILE + 32
        assert max(held) <= 2 * 2 * HEADS * most * HEAD_DIM * 2


@functools.cache
def gemma() -> Any:
    return packed(tiny_gemma3())


def model_cache(name: str, *, keep: bool = False, **kwargs: Any) -> QuantizedCache:
    """`keep`: the layers never free anything."""
    cache = QuantizedCache(gemma().config, scheme(name), **kwargs)
    if keep:
        cache.activate_past_recording()
    return cache


def close(got: Tensor, expected: Tensor) -> None:
    """Sums over fewer keys round differently, which can tip single codes."""
    assert (got - expected).abs().max() < 0.01 * (expected.max() - expected.min())


class TestAgainstACacheThatKeepsEverything:
    @EVERY
    @pytest.mark.parametrize(
        "total", [WINDOW - 1, WINDOW, WINDOW + 1, FIRST_DROP - 1, FIRST_DROP, FIRST_DROP + 1, FIRST_DROP + TILE]
    )
    @pytest.mark.parametrize("last", [1, 30])
    def test_bytes_at_the_border(self, name: str, total: int, last: int) -> None:
        """Single tokens and several at once up to, across and beyond the border, and some more."""
        cache, whole = new_cache(name, SLIDING), new_cache(name, SLIDING)
        whole.activate_past_recording()
        first = max(1, total - last)
        for start, stop in ((0, first), (first, total), (total, total + 1), (total + 1, total + 20)):
            for c in (cache, whole):
                fill(c, start, stop)
            for layer, other in zip(cache.packed_layers, whole.packed_layers, strict=True):
                assert other.dropped == 0
                for got, expected in zip(read(layer), read(other), strict=True):
                    assert torch.equal(got, expected[:, :, layer.dropped :])
        assert (cache.layers[0].dropped > 0) == (total + 20 >= FIRST_DROP)

    @EVERY
    @pytest.mark.parametrize("chunks", [[WINDOW - 1, 1, 1, 5], [FIRST_DROP - 1, 1, 1, 1, 9], [130, 20, 1, 70, 1]])
    def test_logits_at_the_border(self, name: str, chunks: list[int]) -> None:
        ids = tokens(sum(chunks), seed=2)
        cache, whole = model_cache(name), model_cache(name, keep=True)
        for part in ids.split(chunks, dim=1):
            close(logits_of(gemma(), part, cache), logits_of(gemma(), part, whole))
        assert whole.layers[0].dropped == 0

    @pytest.mark.parametrize(("name", "reads"), [("bf16", "stored"), ("sliding", "fresh_chunk")])
    def test_token_by_token_over_several_windows(self, name: str, reads: Any) -> None:
        ids = tokens(FIRST_DROP + TILE + 3, seed=3)
        cache, whole = model_cache(name, reads=reads), model_cache(name, keep=True, reads=reads)
        start = FIRST_DROP - 3
        close(*(in_chunks(gemma(), ids[:, :start], c, 60) for c in (cache, whole)))
        close(*(in_chunks(gemma(), ids[:, start:], c, 1) for c in (cache, whole)))
        assert (cache.layers[0].dropped, cache.layers[1].dropped, whole.layers[0].dropped) == (2 * TILE, 0, 0)

    def test_what_left_the_window_matters_to_nobody(self) -> None:
        """Other tokens before the window of every sliding layer change a full layer's output alone."""
        config = gemma().config
        assert config.layer_types.count("full_attention") == 1
        a, b = numbers(0, 200), numbers(0, 200, seed=1)
        caches = [new_cache("sliding", SLIDING) for _ in range(2)]
        for cache, early in zip(caches, (a, b), strict=True):
            cache.update(early, early, 0)
            cache.update(a, a, 0)
        assert all(torch.equal(x, y) for x, y in zip(read(caches[0].layers[0]), read(caches[1].layers[0]), strict=True))


class TestCrop:
    @EVERY
    def test_equals_never_written_within_the_reserve(self, name: str) -> None:
        """Distances up to CROP_RESERVE, after tiles were freed: the next window is there and exact."""
        total, full = 215, filled(name, 40, 215, config=SLIDING)
        assert full.layers[0].dropped == 2 * TILE
        for distance in (*range(CROP_RESERVE, 1, -6), 1):
            cache, expected = full.fork(), filled(name, 40, total - distance, config=SLIDING)
            cache.crop(-distance)
            for c in (cache, expected):
                fill(c, 0, 9, seed=1, factor=3)
            for layer, other in zip(cache.packed_layers, expected.packed_layers, strict=True):
                assert layer.get_seq_length() == other.get_seq_length()
                kept = layer.get_seq_length() - max(layer.dropped, other.dropped)
                assert kept >= WINDOW - 1 + 9
                for got, right in zip(read(layer), read(other), strict=True):
                    assert torch.equal(got[:, :, -kept:], right[:, :, -kept:])

    @EVERY
    def test_is_refused_where_the_next_window_is_gone(self, name: str) -> None:
        """Dropped tokens may not be what the next token would see: refused to the token, for all layers or none."""
        full = filled(name, 40, 215, config=SLIDING)
        deepest = 215 - (2 * TILE + WINDOW - 1)
        for distance in (deepest + 1, deepest + 7, deepest + 8, 150, 174):
            cache = full.fork()
            with pytest.raises(UnsupportedError, match=rf"layer 0 can't forget its last {distance} tokens: the window"):
                cache.crop(-distance)
            assert {layer.get_seq_length() for layer in cache.packed_layers} == {215}
        if name in ("bf16", "sliding"):
            full.crop(-deepest)
            assert full.get_seq_length() == 2 * TILE + WINDOW - 1

    @pytest.mark.parametrize("distance", [65, 70, 150, 280])
    @pytest.mark.parametrize("name", ["bf16", "nvfp4", "sliding", "sliding_nvfp4"])
    def test_any_distance_while_the_past_is_recorded(self, name: str, distance: int) -> None:
        cache = new_cache(name, SLIDING)
        cache.activate_past_recording()
        fill(cache, 0, 10)
        fill(cache, 10, 300)
        assert cache.layers[0].dropped == 0
        cache.crop(-distance)
        left = 300 - distance
        # The crop frees what has left the window by now.
        assert cache.layers[0].dropped == left - kept_by_rule(left, WINDOW)
        expected = filled(name, 10, left, config=SLIDING) if left > 10 else filled(name, 10, config=SLIDING)
        for c in (cache, expected):
            fill(c, 300, 320)
        for layer, other in zip(cache.packed_layers, expected.packed_layers, strict=True):
            kept = layer.get_seq_length() - max(layer.dropped, other.dropped)
            assert all(
                torch.equal(a[:, :, -kept:], b[:, :, -kept:]) for a, b in zip(read(layer), read(other), strict=True)
            )

    def test_of_nothing_frees_what_was_recorded(self) -> None:
        cache = new_cache("bf16", SLIDING)
        cache.activate_past_recording()
        fill(cache, 0, 300)
        assert cache.layers[0].dropped == 0
        cache.crop(0)
        assert cache.layers[0].dropped == 300 - kept_by_rule(300, WINDOW)

    @pytest.mark.parametrize("name", ["bf16", "sliding_nvfp4"])
    def test_to_nothing(self, name: str) -> None:
        cache = filled(name, 300, config=SLIDING)
        cache.crop(-300)
        assert [(layer.get_seq_length(), layer.dropped) for layer in cache.packed_layers] == [(0, 0)] * 3
        fill(cache, 0, 20)
        expected = filled(name, 20, config=SLIDING)
        assert torch.equal(cache.layers[0].keys, expected.layers[0].keys)

    @pytest.mark.parametrize("name", ["bf16", "sliding", "sliding_kivi"])
    def test_logits_after_a_crop(self, name: str) -> None:
        ids, rest = tokens(215, seed=4), tokens(12, seed=5)
        cache, expected = model_cache(name), model_cache(name)
        in_chunks(gemma(), ids, cache, 60)
        cache.crop(-50)
        in_chunks(gemma(), ids[:, :165], expected, 60)
        if name == "sliding_kivi":  # what earlier tokens saw depends on how many came with them
            expected = model_cache(name)
            for stop in (60, 120, 180):
                logits_of(gemma(), ids[:, stop - 60 : stop], expected)
            expected.crop(-15)
        close(logits_of(gemma(), rest, cache), logits_of(gemma(), rest, expected))


class TestBatches:
    @EVERY
    def test_rows_move_with_their_windows(self, name: str) -> None:
        x = numbers(0, 220, batch=3) * torch.tensor([1.0, 30.0, 0.1])[:, None, None, None]
        caches = [layer_of(WINDOW, scheme(name)) for _ in range(2)]
        rows = torch.tensor([2, 2, 0])
        for start, stop in ((0, 30), (30, 180)):
            caches[0].update(x[:, :, start:stop], x[:, :, start:stop], 0)
            caches[1].update(x[rows, :, start:stop], x[rows, :, start:stop], 0)
        caches[0].reorder_cache(rows)
        for cache in caches:
            cache.update(x[rows, :, 180:], x[rows, :, 180:], 0)
        first, second = (cache.layers[0] for cache in caches)
        assert first.dropped == second.dropped == 2 * TILE
        assert all(torch.equal(a, b) for a, b in zip(read(first), read(second), strict=True))

    def test_a_layer_of_another_window_frees_for_itself(self) -> None:
        layers = [layer_of(window).layers[0] for window in (8, 100)]
        x = numbers(0, 300)
        for layer in layers:
            assert isinstance(layer, PackedLayer)
            layer.update(x, x)
        assert [layer.dropped for layer in layers] == [192, 128]
