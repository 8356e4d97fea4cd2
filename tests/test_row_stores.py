"""A left-padded batch is stored row by row: every row has the bytes that it has alone, and padding has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_tools import (
    HEAD_DIM,
    HEADS,
    KINDS,
    ROLES,
    SCHEMES,
    SLIDING,
    WINDOW,
    assert_same_store,
    new_cache,
    numbers,
    scheme,
)
from torch import Tensor

from kveval.cache import QuantizedCache
from kveval.errors import MeasurementError, UnsupportedError
from kveval.row_stores import RowStores
from kveval.storage import CROP_RESERVE, PackedStore, StoredBytes

PADDING = (0, 5, 40)
SIZES = torch.tensor([1.0, 30.0, 0.1])[:, None, None, None]
"""Rows of different size: a scale that two of them shared would show."""
EVERY = pytest.mark.parametrize("name", KINDS)


def new_rows(name: str, padding: tuple[int, ...] = PADDING) -> RowStores:
    rows = [PackedStore(ROLES[name], HEAD_DIM, where=f"row {i}") for i in range(len(padding))]
    return RowStores(rows, list(padding), unit=ROLES[name].format.unit)


def batch(start: int, stop: int, **kwargs: Any) -> Tensor:
    """[3, HEADS, stop - start, HEAD_DIM]; positions that are padding hold huge numbers."""
    x = (numbers(start, stop, batch=3, **kwargs) * SIZES).clone()
    for row, pad in enumerate(PADDING):
        x[row, :, : max(0, pad - start)] = 1e4
    return x


def alone(name: str, row: int, *stops: int) -> PackedStore:
    """Row `row` without its padding, written in the pieces of the batch."""
    store, start = PackedStore(ROLES[name], HEAD_DIM, where="alone"), 0
    for stop in stops:
        store.append(batch(start, stop)[row : row + 1, :, max(0, PADDING[row] - start) :])
        start = stop
    return store


def read(store: Any) -> Tensor:
    return store.read(store.snapshot(), torch.float32)


class TestRowStores:
    @EVERY
    @pytest.mark.parametrize("stops", [(75,), (3, 6, 75), (3, 40, 41, 150)], ids=str)
    def test_rows_have_the_bytes_that_they_have_alone(self, name: str, stops: tuple[int, ...]) -> None:
        """In one write, and in writes that are shorter than the padding."""
        store, start = new_rows(name), 0
        for stop in stops:
            store.append(batch(start, stop))
            start = stop
        got, held = read(store), StoredBytes()
        assert (store.total, got.shape) == (stops[-1], (3, HEADS, stops[-1], HEAD_DIM))
        for row, pad in enumerate(PADDING):
            single = alone(name, row, *stops)
            assert_same_store(store.rows[row], single)
            assert torch.equal(got[row, :, pad:], read(single)[0])
            assert not got[row, :, :pad].any()
            held += single.nbytes()
        assert store.nbytes() == held
        assert store.billed_bytes() == held.stored

    @EVERY
    def test_padding_alone(self, name: str) -> None:
        """A first piece that is padding in every row stores nothing, and still has its place."""
        store = new_rows(name, (4, 9))
        assert store.billed_bytes() == 0
        with pytest.raises(MeasurementError, match="stores nothing"):
            read(store)
        x = numbers(0, 20)
        store.append(x[:, :, :3])
        assert (store.total, store.dropped, store.nbytes(), store.billed_bytes()) == (3, 0, StoredBytes(), 0)
        assert torch.equal(read(store), torch.zeros(2, HEADS, 3, HEAD_DIM))
        store.append(x[:, :, 3:])
        got = read(store)
        assert got.shape == (2, HEADS, 20, HEAD_DIM)
        assert got[0, :, 4:].any()
        assert got[1, :, 9:].any()
        assert not got[0, :, :4].any()
        assert not got[1, :, :9].any()

    @EVERY
    def test_crop_into_the_padding(self, name: str) -> None:
        """A row whose every token is cropped off begins anew, what it froze included."""
        store = new_rows(name)
        store.append(batch(0, 30))
        store.append(batch(30, 50, seed=1))
        store.crop(15)
        assert store.total == 35
        assert [row.total for row in store.rows] == [35, 30, 0]
        store.append(batch(35, 60))
        expected = PackedStore(ROLES[name], HEAD_DIM, where="alone")
        expected.append(batch(35, 60)[2:, :, 5:])
        assert_same_store(store.rows[2], expected)
        assert not read(store)[2, :, :40].any()
        store.crop(60)
        assert (store.total, store.dropped, store.nbytes()) == (0, 0, StoredBytes())

    @EVERY
    def test_restore_brings_rows_and_padding_back(self, name: str) -> None:
        store = new_rows(name)
        store.append(batch(0, 75))
        before, expected, held = store.snapshot(), read(store), store.nbytes()
        store.append(batch(75, 99, seed=1))
        store.select_rows(torch.tensor([2, 2, 0, 1]))
        store.append(batch(99, 120, seed=2)[[2, 2, 0, 1]])
        assert torch.equal(store.read(before, torch.float32), expected)
        store.restore(before)
        assert (store.total, store.padding, store.nbytes()) == (75, list(PADDING), held)
        store.append(batch(75, 99))
        for row in range(3):
            assert_same_store(store.rows[row], alone(name, row, 75, 99))

    @EVERY
    def test_selected_rows_are_independent(self, name: str) -> None:
        store = new_rows(name)
        store.append(batch(0, 75))
        store.select_rows(torch.tensor([2, 2, 1]))
        assert store.padding == [40, 40, 5]
        store.append(torch.cat([batch(75, 80)[2:], batch(75, 80, seed=1)[2:], batch(75, 80)[1:2]]))
        assert_same_store(store.rows[0], alone(name, 2, 75, 80))
        assert_same_store(store.rows[2], alone(name, 1, 75, 80))
        assert not torch.equal(read(store)[0], read(store)[1])

    @EVERY
    def test_copies_are_independent(self, name: str) -> None:
        store = new_rows(name)
        store.append(batch(0, 75))
        expected = read(store)
        twin = store.copy()
        assert torch.equal(read(twin), expected)
        twin.append(batch(75, 160, seed=1))
        twin.select_rows(torch.tensor([0]))
        assert torch.equal(read(store), expected)
        assert (store.total, len(store.rows), twin.total, len(twin.rows)) == (75, 3, 160, 1)
        assert twin.copy().tokens_read == 0
        assert store.tokens_read == 2 * 75

    @pytest.mark.parametrize("name", ["bf16-keys-sliding", "kivi_no_residual-keys-full"])
    @pytest.mark.parametrize("oldest", [0, 32, 64, 96])
    @pytest.mark.parametrize("padding", [PADDING, (5, 40, 60)], ids=str)
    def test_dropped_positions_include_padding(self, name: str, oldest: int, padding: tuple[int, ...]) -> None:
        """Rows drop whole units behind their padding; positions that one row lacks are read from none."""
        store, whole = new_rows(name, padding), new_rows(name, padding)
        for s in (store, whole):
            s.append(batch(0, 170))
        store.drop(oldest)
        unit = ROLES[name].format.unit
        gone = [max(0, oldest - pad) // unit * unit for pad in padding]
        assert [row.dropped for row in store.rows] == gone
        assert store.dropped == max((pad + g for pad, g in zip(padding, gone, strict=True) if g), default=0)
        assert torch.equal(read(store), read(whole)[:, :, store.dropped :])
        store.drop(oldest // 2)
        assert torch.equal(read(store), read(whole)[:, :, store.dropped :])
        assert store.nbytes().stored == store.billed_bytes() <= whole.billed_bytes()

    def test_scores_of_compute_dtype(self) -> None:
        store = new_rows("bf16-keys-sliding")
        store.append(batch(0, 50).bfloat16())
        assert store.read(store.snapshot(), torch.float16).dtype == torch.float16


def mask_of(padding: tuple[int, ...], length: int) -> Tensor:
    return (torch.arange(length) >= torch.tensor(padding)[:, None]).long()


def fill(cache: QuantizedCache, start: int, stop: int, rows: slice = slice(None), skip: int = 0) -> list[Any]:
    """Update every layer with the batch's tokens; returns what the last layer hands to attention."""
    handles: list[Any] = []
    for index in range(len(cache.layers)):
        k, v = (batch(start, stop, index=index, role=role)[rows, :, max(0, skip - start) :] for role in "kv")
        handles = list(cache.update(k, v, index))
    return handles


@pytest.mark.parametrize("name", SCHEMES)
def test_a_padded_row_of_a_cache_equals_the_row_alone(name: str) -> None:
    """Every scheme and kind of layer, in pieces shorter than the padding, past the window and what it frees."""
    cache = new_cache(name, SLIDING, padding_mask=mask_of(PADDING, 45))
    stops = (3, 41, 150)
    handles: list[Any] = []
    for start, stop in zip((0, *stops), stops, strict=False):
        handles = fill(cache, start, stop)
        assert {layer.get_seq_length() for layer in cache.packed_layers} == {stop}
        assert len({layer.dropped for layer in cache.packed_layers if layer.is_sliding}) <= 1
    assert handles[0].shape == handles[1].shape
    assert [h.dequantize().shape for h in handles] == [h.shape for h in handles]
    assert cache.stored_bytes().stored == cache.billed_bytes()
    assert cache.layers[0].dropped > 0
    for row, pad in list(enumerate(PADDING))[1:]:
        single = new_cache(name, SLIDING)
        for start, stop in zip((0, *stops), stops, strict=False):
            if stop > pad:
                fill(single, start, stop, slice(row, row + 1), skip=pad)
        for layer, other in zip(cache.packed_layers, single.packed_layers, strict=True):
            for store, expected in zip(layer.stores(), other.stores(), strict=True):
                kept = 150 - max(store.dropped, pad + expected.dropped)
                assert kept >= WINDOW - 1 + CROP_RESERVE
                assert torch.equal(read(store)[row, :, -kept:], read(expected)[0, :, -kept:])
                if not layer.is_sliding:
                    assert_same_store(store.rows[row], expected)


@pytest.mark.parametrize("name", ["bf16", "sliding", "sliding_kivi"])
def test_keys_and_values_free_the_same_tokens_where_every_row_is_padded(name: str) -> None:
    """Keys in groups of tokens free whole groups behind each row's padding, and values go with them."""
    cache, whole = (new_cache(name, SLIDING, padding_mask=mask_of(PADDING[1:], 45)) for _ in range(2))
    whole.activate_past_recording()
    for start in range(0, 330, 30):
        for c in (cache, whole):
            keys, values = fill(c, start, start + 30, slice(1, None))
            assert keys.dequantize().shape == values.dequantize().shape
        for layer, other in zip(cache.packed_layers, whole.packed_layers, strict=True):
            assert len({store.dropped for store in layer.stores()}) == 1
            assert layer.get_seq_length() - layer.dropped >= min(start + 30, WINDOW - 1 + CROP_RESERVE)
            assert torch.equal(layer.keys, other.keys[:, :, layer.dropped :])
            assert torch.equal(layer.values, other.values[:, :, layer.dropped :])
    assert cache.layers[0].dropped > 0
    assert cache.layers[0].dropped == cache.layers[2].dropped


class TestPaddingMask:
    def test_one_without_padding_costs_nothing(self) -> None:
        cache = new_cache("nvfp4", padding_mask=torch.ones(3, 20))
        fill(cache, 0, 20)
        assert all(isinstance(store, PackedStore) for layer in cache.packed_layers for store in layer.stores())

    def test_a_bool_mask_equals_an_int_mask(self) -> None:
        caches = [new_cache("nvfp4", padding_mask=kind(mask_of(PADDING, 50))) for kind in (Tensor.bool, Tensor.float)]
        for cache in caches:
            fill(cache, 0, 50)
        assert torch.equal(caches[0].layers[1].keys, caches[1].layers[1].keys)

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            ([[1, 1, 0], [1, 1, 1], [1, 1, 1]], "padding after a token"),
            ([[0, 1, 0], [1, 1, 1], [1, 1, 1]], "padding after a token"),
            ([[0, 0, 0], [1, 1, 1], [1, 1, 1]], "a whole row of the padding mask is padding"),
            ([[0, 1, 1], [1, 1, 1]], "a padding mask of 2 rows does not cover a batch of 3"),
        ],
    )
    def test_others_are_refused(self, mask: list[list[int]], message: str) -> None:
        cache = new_cache("nvfp4", padding_mask=torch.tensor(mask))
        with pytest.raises(UnsupportedError, match=message):
            fill(cache, 0, 3)

    def test_it_follows_the_rows(self) -> None:
        """Also before the first token: beams repeat the rows of a batch."""
        cache = new_cache("nvfp4", padding_mask=mask_of(PADDING, 50))
        cache.batch_select_indices(torch.tensor([False, True, True]))
        cache.batch_repeat_interleave(2)
        fill(cache, 0, 60, rows=[1, 1, 2, 2])  # type: ignore[arg-type]
        whole = new_cache("nvfp4", padding_mask=mask_of(PADDING, 50))
        fill(whole, 0, 60)
        assert torch.equal(cache.layers[0].keys, whole.layers[0].keys[[1, 1, 2, 2]])
        cache.reset()
        fill(cache, 0, 60, rows=[1, 1, 2, 2])  # type: ignore[arg-type]
        assert torch.equal(cache.layers[0].keys, whole.layers[0].keys[[1, 1, 2, 2]])

    def test_a_branch_and_a_fork_keep_it(self) -> None:
        cache = new_cache("kivi4", padding_mask=mask_of(PADDING, 50))
        with cache.branch():
            cache.reorder_cache(torch.tensor([2, 1, 0]))
            fill(cache, 0, 50, rows=[2, 1, 0])  # type: ignore[arg-type]
        twin = cache.fork()
        for c in (cache, twin):
            fill(c, 0, 60)
        expected = new_cache("kivi4", padding_mask=mask_of(PADDING, 50))
        fill(expected, 0, 60)
        assert torch.equal(cache.layers[0].keys, expected.layers[0].keys)
        assert torch.equal(twin.layers[0].keys, expected.layers[0].keys)


def test_every_scheme_with_options_is_built() -> None:
    assert all(scheme(name).name == name for name in SCHEMES)
