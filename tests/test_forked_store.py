"""Rows that share their first tokens: to attention, and in bytes, each is what it would be as a copy of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_tools import (
    FULL,
    SCHEMES,
    SLIDING,
    WINDOW,
    assert_same_store,
    fill,
    filled,
    new_cache,
    numbers,
    scheme,
    stores,
)
from torch import Tensor

from kveval.attention import attention
from kveval.cache import QuantizedCache
from kveval.errors import UnsupportedError
from kveval.formats.layout import LayerFormat
from kveval.geometry import LayerGeometry
from kveval.kernel_use import format_problem
from kveval.masks import CausalMask
from kveval.packed_kv import PackedKV
from kveval.storage import CROP_RESERVE


def _layers(name: str) -> list[tuple[LayerFormat, LayerGeometry]]:
    return [(layer.format, layer.shape) for layer in new_cache(name).packed_layers]


BLIND = [name for name in SCHEMES if scheme(name).blind_to_later]
PACKABLE = [name for name in BLIND if not any(format_problem(*layer) for layer in _layers(name))]
LATER = [name for name in SCHEMES if not scheme(name).blind_to_later]
FORKS = 3
ROWS = 2 * FORKS


def pair(name: str, *stops: int, config: dict[str, Any] = FULL) -> tuple[QuantizedCache, QuantizedCache]:
    """A cache of two rows that was forked, and one whose rows were copied."""
    forked = filled(name, *stops, config=config)
    copied = forked.fork()
    forked.fork_rows(FORKS)
    copied.batch_repeat_interleave(FORKS)
    return forked, copied


def update(cache: QuantizedCache, start: int, stop: int) -> list[PackedKV]:
    """Handles to the keys and values of every layer once tokens, others in every row, were stored."""
    handles = []
    for index in range(len(cache.layers)):
        k, v = (numbers(start, stop, index=index, role=role, batch=ROWS, seed=7) for role in "kv")
        handles += cache.update(k, v, index)
    return handles  # type: ignore[return-value]


def reads(cache: QuantizedCache, start: int, stop: int) -> list[Tensor]:
    return [handle.dequantize() for handle in update(cache, start, stop)]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.shape[0] == ROWS
        assert torch.equal(a, b)


@pytest.mark.parametrize("stem", [(20,), (3,), (7, 20)], ids=str)
@pytest.mark.parametrize("name", BLIND)
class TestEveryRow:
    def test_is_read_as_a_copy_would_be(self, name: str, stem: tuple[int, ...]) -> None:
        """Frozen scales and sinks too, which a stem of three tokens does not fill."""
        forked, copied = pair(name, *stem)
        for start, stop in ((stem[-1], stem[-1] + 5), (stem[-1] + 5, stem[-1] + 6)):
            assert_equal(reads(forked, start, stop), reads(copied, start, stop))

    def test_has_the_bytes_of_a_copy(self, name: str, stem: tuple[int, ...]) -> None:
        forked, copied = pair(name, *stem)
        for cache in (forked, copied):
            update(cache, stem[-1], stem[-1] + 5)
        one, other = (cache.stored_bytes() for cache in (forked, copied))
        assert one.stored == other.stored == forked.billed_bytes() == copied.billed_bytes()
        assert (one.payload, one.scales, one.constants, one.wide_tokens, one.wide_layers) == (
            other.payload, other.scales, other.constants, other.wide_tokens, other.wide_layers
        )  # fmt: skip

    def test_counts_as_read_what_it_holds(self, name: str, stem: tuple[int, ...]) -> None:
        forked, _ = pair(name, *stem)
        for read in (PackedKV.dequantize, PackedKV.segments):
            handles = update(forked, stem[-1], stem[-1] + 5)
            before = forked.tokens_read()
            for handle in handles:
                read(handle)
            found = [after - b for after, b in zip(forked.tokens_read(), before, strict=True)]
            assert found == forked.tokens_owed(5)
            forked.crop(-5)


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("tokens", [5, 70])
def test_attention_to_packed_bytes_is_attention_to_a_copy(name: str, tokens: int) -> None:
    """By blocks, by the kernels' reference row by row, and over what was decoded first; in one forward and in two."""
    outputs = {}
    # An attention sink is what attention in blocks does not know.
    for mode, sinks in (("packed", None), ("dequant", None), ("packed", "sinks"), ("dequant", "sinks")):
        cache = new_cache(name, attention=mode)
        fill(cache, 0, 20)
        cache.fork_rows(FORKS)
        handles = [*update(cache, 20, 22), *update(cache, 22, 22 + tokens)][4:6]
        query = numbers(22, 22 + tokens, batch=ROWS, seed=3).repeat_interleave(2, dim=1)
        mask = torch.ones(tokens, 22 + tokens, dtype=torch.bool).tril(22)[None, None].expand(ROWS, 1, -1, -1)
        causal = _causal(mask) if mode == "packed" else mask
        s_aux = None if sinks is None else torch.linspace(10, 20, query.shape[1])
        outputs[mode, sinks] = attention(torch.nn.Module(), query, *handles, causal, s_aux=s_aux)[0]
    for sinks in (None, "sinks"):
        torch.testing.assert_close(outputs["packed", sinks], outputs["dequant", sinks], rtol=2e-3, atol=2e-3)
    assert not torch.allclose(outputs["packed", None], outputs["packed", "sinks"], atol=1e-2)


def _causal(mask: Tensor) -> Tensor:
    return CausalMask(tuple(mask.shape), lambda: mask, window=0, padding=None, device=mask.device)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "int4_g32"])
def test_fresh_chunks_are_read_raw(name: str) -> None:
    forked, copied = (new_cache(name, reads="fresh_chunk") for _ in range(2))
    for cache in (forked, copied):
        fill(cache, 0, 20)
    forked.fork_rows(FORKS)
    copied.batch_repeat_interleave(FORKS)
    for start, stop in ((20, 25), (25, 26)):
        assert_equal(reads(forked, start, stop), reads(copied, start, stop))


def test_shared_tokens_are_stored_once() -> None:
    forked, copied = pair("bf16", 400)
    for cache in (forked, copied):
        update(cache, 400, 405)

    def live(cache: QuantizedCache) -> int:
        """Bytes of all payload buffers, each counted once."""
        sizes = {}
        for store in (store for layer in cache.packed_layers for store in layer.stores()):
            for part in (part for _, parts in store.segments(store.snapshot()) for part in parts):
                memory = part.payload.untyped_storage()
                sizes[memory.data_ptr()] = memory.nbytes()
        return sum(sizes.values())

    assert live(forked) < live(copied) / 2


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "sliding", "sliding_nvfp4"])
def test_windows_free_shared_tokens_as_copies_do(name: str) -> None:
    forked, copied = pair(name, 180, 190, config=SLIDING)
    for start, stop in ((190, 200), (200, 230)):
        assert_equal(reads(forked, start, stop), reads(copied, start, stop))
    assert [layer.dropped for layer in forked.packed_layers] == [layer.dropped for layer in copied.packed_layers]
    assert forked.packed_layers[0].dropped > 230 - WINDOW - 2 * CROP_RESERVE
    assert forked.billed_bytes() == copied.billed_bytes() == forked.stored_bytes().stored


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "sinks"])
class TestWhatIsTakenBack:
    def test_a_branch_forgets_the_fork(self, name: str) -> None:
        cache, plain = filled(name, 20), filled(name, 20)
        with cache.branch():
            cache.fork_rows(FORKS)
            update(cache, 20, 25)
            assert cache.get_seq_length() == 25
        for one in (cache, plain):
            fill(one, 20, 24)
        for a, b in zip(stores(cache), stores(plain), strict=True):
            assert_same_store(a, b)

    def test_a_crop_forgets_what_rows_added_and_no_more(self, name: str) -> None:
        forked, copied = pair(name, 20)
        for cache in (forked, copied):
            update(cache, 20, 25)
            cache.crop(-3)
        assert_equal(reads(forked, 22, 23), reads(copied, 22, 23))
        with pytest.raises(UnsupportedError, match="share their first 20 tokens can't forget 4: they have 3 more"):
            forked.crop(-4)

    def test_copies_are_independent(self, name: str) -> None:
        forked, copied = pair(name, 20)
        twin = forked.fork()
        update(twin, 20, 23)
        assert forked.get_seq_length() == 20
        assert_equal(reads(forked, 20, 24), reads(copied, 20, 24))


class TestRefusals:
    @pytest.mark.parametrize("name", LATER)
    def test_formats_that_later_tokens_change(self, name: str) -> None:
        cache = filled(name, 20)
        with pytest.raises(UnsupportedError, match=f"{name} stores some tokens together with later ones"):
            cache.fork_rows(2)
        with pytest.raises(UnsupportedError, match="together with later ones"):
            cache.packed_layers[-1].fork_rows(2)

    def test_an_empty_cache(self) -> None:
        with pytest.raises(UnsupportedError, match="stored nothing yet"):
            new_cache("bf16").fork_rows(2)

    def test_rows_that_are_stored_one_by_one(self) -> None:
        mask = torch.ones(2, 20)
        mask[0, :3] = 0
        padded = new_cache("bf16", padding_mask=mask)
        fill(padded, 0, 20)
        forked, _ = pair("bf16", 20)
        for cache in (padded, forked):
            with pytest.raises(UnsupportedError, match="stores rows one by one"):
                cache.fork_rows(2)
            assert cache.get_seq_length() == 20

    def test_single_rows(self) -> None:
        forked, _ = pair("bf16", 20)
        with pytest.raises(UnsupportedError, match="can't be picked"):
            forked.batch_select_indices(torch.tensor([0]))
