"""`QuantizedCache` inside transformers: every operation, every way of feeding it, every byte accounted for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cache_tools import (
    DIFFERENT,
    FREEZING,
    FULL,
    HEAD_DIM,
    HEADS,
    INVARIANT,
    SCHEMES,
    SLIDING,
    assert_same,
    fill,
    filled,
    new_cache,
    numbers,
    scheme,
    stores,
)
from tiny_models import (
    BUILDERS,
    WINDOW,
    RoundingCache,
    generated,
    in_chunks,
    logits_of,
    packed,
    tiny_gemma3,
    tiny_llama,
    tokens,
)
from torch import Tensor

from kveval.attention import cache_argument
from kveval.cache import QuantizedCache
from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.layout import layer_formats
from kveval.formats.spec import build_scheme
from kveval.geometry import geometry_from_config
from kveval.packed_kv import PackedKV
from kveval.packed_layer import PackedLayer
from kveval.storage import StoredBytes

EVERY = pytest.mark.parametrize("name", SCHEMES)
EVERY_KIND = pytest.mark.parametrize("name", DIFFERENT)
TAILED = [n for n in SCHEMES if scheme(n).residual_length or scheme(n).key.unit > 1 or n == "mixed"]
CHUNKED_ALIKE = [n for n in INVARIANT if n not in TAILED]


@functools.cache
def llama() -> Any:
    """Two full layers with heads of 32, which every scheme can store."""
    return packed(tiny_llama(head_dim=HEAD_DIM))


@functools.cache
def gemma() -> Any:
    """Sliding, full, sliding; heads of 16."""
    return packed(tiny_gemma3())


@functools.cache
def plain_model(family: str, dtype: torch.dtype) -> Any:
    return BUILDERS[family](dtype)


@functools.cache
def packed_model(family: str, dtype: torch.dtype) -> Any:
    return packed(BUILDERS[family](dtype))


def cache_of(model: Any, name: str, **kwargs: Any) -> QuantizedCache:
    return QuantizedCache(model.config, scheme(name), **kwargs)


class Recording(QuantizedCache):
    """Keeps the keys and values that are left after every crop and reorder, to build the same cache from them alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pieces: dict[int, list[list[Tensor]]] = {}
        self.crops: list[int] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.pieces.setdefault(layer_idx, []).append([key_states.clone(), value_states.clone()])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.crops.append(-int(tokens_to_remove))
        for pieces in self.pieces.values():
            surplus = -int(tokens_to_remove)
            while surplus > 0:
                last = pieces[-1][0].shape[2]
                if last <= surplus:
                    pieces.pop()
                else:
                    pieces[-1] = [x[:, :, : last - surplus] for x in pieces[-1]]
                surplus -= last

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.pieces = {i: [[x[beam_idx] for x in pair] for pair in pieces] for i, pieces in self.pieces.items()}

    def assert_holds_what_is_left(self, config: Any) -> None:
        expected = QuantizedCache(config, self.scheme)
        for index, pieces in self.pieces.items():
            for keys, values in pieces:
                expected.update(keys, values, index)
        assert_same(self, expected)


class TestCrop:
    @EVERY
    def test_then_append_equals_never_written(self, name: str) -> None:
        """Each of 70 distances is tested on every store alone; here all layers go together."""
        distance = 33
        left = 131 - distance
        cache = filled(name, 60, 131)
        cache.crop(-distance)
        expected = filled(name, 60, left)
        assert_same(cache, expected)
        for c in (cache, expected):
            fill(c, left, left + 40, seed=1, factor=3)
        assert_same(cache, expected)

    @EVERY_KIND
    def test_to_nothing_forgets_frozen_scales(self, name: str) -> None:
        cache = filled(name, 9, config=SLIDING, factor=100)
        cache.crop_to(0)
        assert (cache.get_seq_length(), cache.stored_bytes(), cache.billed_bytes()) == (0, StoredBytes(), 0)
        fill(cache, 0, 5)
        assert_same(cache, filled(name, 5, config=SLIDING))

    def test_counts_as_transformers_does(self) -> None:
        cache = filled("bf16", 9)
        cache.crop(0)
        assert cache.get_seq_length() == 9
        with pytest.raises(UnsupportedError, match=r"crop\(3\) is ambiguous"):
            cache.crop(3)
        with pytest.raises(UnsupportedError, match="holds 9 tokens; it can't be cropped to 10"):
            cache.crop_to(10)
        cache.crop_to(9)
        assert_same(cache, filled("bf16", 9))
        cache.crop(-torch.tensor(2))
        assert_same(cache, filled("bf16", 7))
        cache.crop(torch.tensor(0))
        assert cache.get_seq_length() == 7
        cache.crop(-20)
        assert cache.get_seq_length() == 0
        new_cache("bf16").crop(-2)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"extends": "int4_g32", "layers": [{"layers": [1], "key": "nvfp4"}]}, "frozen from the first 50 tokens"),
            ({"extends": "int4_g32", "layers": [{"layers": [1], "key": "kivi4"}]}, "only the last 72 tokens are at"),
        ],
    )
    def test_is_refused_for_all_layers_or_none(self, data: dict[str, Any], message: str) -> None:
        """The first layer could crop; it must not."""
        mixed = build_scheme("mixed", data)
        caches = [QuantizedCache(FULL, mixed) for _ in range(2)]
        for cache in caches:
            fill(cache, 0, 50)
            fill(cache, 50, 200)
        with pytest.raises(UnsupportedError, match=f"keys of layer 1 can't forget its last 160 tokens .*{message}"):
            caches[0].crop(-160)
        assert_same(*caches)
        for cache in caches:
            fill(cache, 200, 220)
        assert_same(*caches)


class TestBranch:
    """Whatever happens inside, the cache is afterwards as if it had not happened."""

    @EVERY
    def test_forgets_everything_inside(self, name: str) -> None:
        """Growth of buffers, freed tiles of sliding windows, chosen rows, crops, all at once; and nested."""
        cache = filled(name, 40, 150, config=SLIDING)
        expected = cache.fork()
        with cache.branch():
            fill(cache, 150, 330, seed=1, factor=20)
            assert cache.layers[0].dropped > expected.layers[0].dropped
            with cache.branch():
                cache.crop(0)
                fill(cache, 330, 350, seed=2)
                cache.reorder_cache(torch.tensor([1, 1, 0]))
                fill(cache, 350, 360, batch=3)
                cache.crop(-5)
            assert (cache.get_seq_length(), cache.packed_layers[0].batch_size) == (330, 2)
            cache.crop(-20)
            fill(cache, 310, 320, seed=3)
        assert_same(cache, expected)
        assert cache.stored_bytes() == expected.stored_bytes()
        for c in (cache, expected):
            fill(c, 150, 260)
        assert_same(cache, expected)

    @EVERY_KIND
    def test_equals_a_fork(self, name: str) -> None:
        cache = filled(name, 40, 150)
        twin = cache.fork()
        fill(twin, 150, 190, seed=1, factor=9)
        with cache.branch():
            fill(cache, 150, 190, seed=1, factor=9)
            assert_same(cache, twin)

    @pytest.mark.parametrize("name", ["bf16", "nvfp4", "kivi4", "sinks_residual"])
    def test_from_an_empty_cache(self, name: str) -> None:
        cache = new_cache(name)
        with cache.branch():
            fill(cache, 0, 20, factor=100)
            cache.crop(-100)
            fill(cache, 0, 3, batch=1)
        assert (cache.get_seq_length(), cache.is_initialized, cache.stored_bytes()) == (0, False, StoredBytes())
        fill(cache, 0, 20)
        assert_same(cache, filled(name, 20))

    @pytest.mark.parametrize("name", ["nvfp4", "kivi4", "sliding_kivi"])
    def test_an_exception_inside_is_forgotten_too(self, name: str) -> None:
        cache, bad = filled(name, 150, config=SLIDING), numbers(0, 3).clone()
        bad[0, 1, 2, 3] = float("nan")
        expected = cache.fork()

        def broken() -> None:
            with cache.branch():
                cache.update(numbers(0, 3), numbers(0, 3), 0)
                cache.update(numbers(0, 3), bad, 1)

        with pytest.raises(MeasurementError, match="values of layer 1"):
            broken()
        assert_same(cache, expected)
        assert {layer.get_seq_length() for layer in cache.packed_layers} == {150}

    @pytest.mark.parametrize("refilled", [False, True])
    def test_a_reset_inside_is_forgotten_too(self, refilled: bool) -> None:
        cache = filled("nvfp4", 20)
        with cache.branch():
            cache.reset()
            if refilled:
                fill(cache, 0, 5, batch=1, factor=9)
        assert cache.is_initialized
        fill(cache, 20, 30)
        assert_same(cache, filled("nvfp4", 20, 30))

    def test_past_recording_inside_ends_with_it(self) -> None:
        cache = filled("bf16", 150, config=SLIDING)
        with cache.branch():
            cache.activate_past_recording()
            fill(cache, 150, 400)
            assert cache.layers[0].dropped == 64
        fill(cache, 150, 400)
        assert cache.layers[0].dropped == 320

    @EVERY_KIND
    def test_copies_no_codes(self, name: str) -> None:
        cache = filled(name, 180)
        held = [store.snapshot() for store in stores(cache)]
        with cache.branch():
            fill(cache, 180, 200)
            for store, before in zip(stores(cache), held, strict=True):
                now = store.snapshot()
                for tensor, old in ((now.payload, before.payload), (now.scale, before.scale)):
                    if old is not None and now.encoded - now.dropped <= before.payload.shape[2]:
                        assert tensor.data_ptr() == old.data_ptr()
        assert all(store.snapshot() is before for store, before in zip(stores(cache), held, strict=True))

    def test_cannot_be_cropped_below_its_start(self) -> None:
        cache = filled("int8_per_token_head", 20)
        with cache.branch():
            fill(cache, 20, 30)
            with cache.branch():
                fill(cache, 30, 40)
                with pytest.raises(UnsupportedError, match="a branch can't be cropped below the 30 tokens"):
                    cache.crop(-11)
                cache.crop(-10)
            cache.crop_to(25)
            with pytest.raises(UnsupportedError, match="below the 20 tokens"):
                cache.crop_to(19)
            assert cache.get_seq_length() == 25
            cache.crop_to(20)
        cache.crop_to(10)
        assert_same(cache, filled("int8_per_token_head", 10))

    def test_a_fork_made_inside_is_free(self) -> None:
        cache = filled("int8_per_token_head", 20)
        with cache.branch():
            fill(cache, 20, 30, seed=1)
            twin = cache.fork()
        twin.crop_to(5)
        fill(twin, 5, 40, seed=2)
        assert_same(cache, filled("int8_per_token_head", 20))
        assert twin.get_seq_length() == 40


class TestOperations:
    @EVERY_KIND
    def test_forks_are_independent(self, name: str) -> None:
        cache = filled(name, 12, 100, config=SLIDING)
        twin = cache.fork()
        assert_same(cache, twin)
        assert (twin.scheme, twin.reads, twin.is_sliding) == (cache.scheme, cache.reads, cache.is_sliding)
        fill(twin, 100, 200, seed=1, factor=50)
        assert_same(cache, filled(name, 12, 100, config=SLIDING))
        cache.crop(-20)
        fill(cache, 80, 230)
        other = filled(name, 12, 100, config=SLIDING)
        fill(other, 100, 200, seed=1, factor=50)
        assert_same(twin, other)

    @EVERY_KIND
    def test_batch_operations_move_scales_too(self, name: str) -> None:
        size = torch.tensor([1.0, 30.0, 0.1])[:, None, None, None]

        def make(rows: list[int]) -> QuantizedCache:
            cache = new_cache(name)
            for start, stop in ((0, 6), (6, 150)):
                for index in range(2):
                    k, v = (numbers(start, stop, index=index, role=role, batch=3) * size for role in "kv")
                    cache.update(k[rows], v[rows], index)
            return cache

        reordered, selected, repeated = (make([0, 1, 2]) for _ in range(3))
        reordered.reorder_cache(torch.tensor([2, 2, 0]))
        assert_same(reordered, make([2, 2, 0]))
        selected.batch_select_indices(torch.tensor([1]))
        assert_same(selected, make([1]))
        repeated.batch_repeat_interleave(2)
        assert_same(repeated, make([0, 0, 1, 1, 2, 2]))
        repeated.batch_select_indices(torch.tensor([False, True, True, False, False, True]))
        assert_same(repeated, make([0, 1, 2]))

    def test_batch_operations_on_an_empty_cache(self) -> None:
        cache = new_cache("nvfp4")
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1]))
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.early_initialization(2, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
        cache.batch_repeat_interleave(2)
        fill(cache, 0, 3)
        assert_same(cache, filled("nvfp4", 3))

    @EVERY_KIND
    def test_reset_forgets_everything(self, name: str) -> None:
        cache = filled(name, 150, config=SLIDING, factor=100)
        cache.reset()
        assert (cache.get_seq_length(), cache.stored_bytes(), cache.is_initialized) == (0, StoredBytes(), False)
        assert cache.tokens_read() == [0, 0, 0]
        fill(cache, 0, 5, batch=1)
        assert_same(cache, filled(name, 5, batch=1, config=SLIDING))

    @EVERY_KIND
    @pytest.mark.parametrize("reads", ["stored", "fresh_chunk"])
    def test_an_empty_first_update(self, name: str, reads: Any) -> None:
        cache, empty = new_cache(name, reads=reads), numbers(0, 0)
        keys, values = cache.update(empty, empty, 0)
        assert keys.shape == values.shape == (2, HEADS, 0, HEAD_DIM)
        assert (keys @ values.mT).shape == (2, HEADS, 0, 0)
        assert cache.get_seq_length() == 0
        assert cache.layers[0].keys is None
        fill(cache, 0, 5)
        keys, values = cache.update(empty, empty, 0)
        assert keys.shape == values.shape == (2, HEADS, 5, HEAD_DIM)
        assert torch.equal(keys.dequantize(), cache.layers[0].keys)
        assert_same(cache, filled(name, 5))

    def test_keys_and_values_are_decoded_and_read_only(self) -> None:
        cache = filled("int4_g64", 7)
        layer = cache.layers[1]
        assert isinstance(layer, PackedLayer)
        for tensor, store in zip((layer.keys, layer.values), layer.stores(), strict=True):
            assert torch.equal(tensor, store.read(store.snapshot(), torch.float32))
        with pytest.raises(UnsupportedError, match="read-only"):
            layer.keys = torch.zeros(1)
        with pytest.raises(UnsupportedError, match="read-only"):
            layer.values = torch.zeros(1)

    def test_moving_off_the_device_is_refused(self) -> None:
        layer = filled("int4_g64", 7).layers[0]
        for move in (layer.offload, layer.prefetch):
            with pytest.raises(UnsupportedError, match="can't be offloaded"):
                move()

    def test_what_transformers_asks_of_a_layer(self) -> None:
        cache = new_cache("bf16", SLIDING)
        assert cache.is_sliding == [True, False, True]
        assert (cache.is_compileable, cache.is_croppable, cache.get_max_length()) == (False, True, -1)
        assert cache.get_mask_sizes(5, 0) == (5, 0)
        fill(cache, 0, 30)
        assert cache.get_mask_sizes(1, 0) == cache.get_mask_sizes(1, 1) == (31, 0)
        with pytest.raises(UnsupportedError, match="layer 0 has stored nothing yet"):
            new_cache("bf16").layers[0].stores()

    @EVERY_KIND
    def test_nan_and_infinity_name_their_layer_and_role(self, name: str) -> None:
        for value in (float("nan"), float("inf"), float("-inf")):
            cache, good = new_cache(name), torch.ones(1, HEADS, 3, HEAD_DIM)
            bad = good.clone()
            bad[0, 1, 2, 3] = value
            with pytest.raises(MeasurementError, match="values of layer 1 got NaN or infinity"):
                cache.update(good, bad, 1)
            with pytest.raises(MeasurementError, match="keys of layer 0 got NaN or infinity"):
                cache.update(bad, good, 0)


class TestBytes:
    @EVERY
    def test_stored_equals_billed_equals_the_formula(self, name: str) -> None:
        batch = 3
        cache, shapes, at = new_cache(name, SLIDING), geometry_from_config(SLIDING), 0
        formats = layer_formats(scheme(name), shapes)
        assert cache.stored_bytes().stored == cache.billed_bytes() == 0
        for length in (1, 31, 32, 33, 127, 128, 129, 200):
            fill(cache, at, length, batch=batch)
            at, held = length, cache.stored_bytes()
            by_layer = [
                batch * fmt.nbytes(length, shape, dropped=layer.dropped)
                for fmt, shape, layer in zip(formats, shapes, cache.packed_layers, strict=True)
                if fmt is not None
            ]
            assert held.stored == cache.billed_bytes() == sum(by_layer)
            assert held.wide_layers == sum(by_layer[i] for i in cache.wide_layers)
            tensors = [t for s in stores(cache) for t in (s.snapshot().payload, s.snapshot().scale) if t is not None]
            wide = [t for s in stores(cache) for t in (s.snapshot().sinks, s.snapshot().recent) if t is not None]
            frozen = [t for s in stores(cache) for t in s.snapshot().frozen.tensors()]
            assert held.stored + held.padding + held.undo == sum(t.nbytes for t in (*tensors, *wide, *frozen))

    def test_undo_is_named_and_not_billed(self) -> None:
        cache = filled("kivi4", 300, batch=1)
        held = cache.stored_bytes()
        # Keys: 256 encoded, 44 wait; values: 172 encoded, 128 wide. Of 236 tokens, 128 and 108 would be encoded.
        assert held.undo == 2 * (128 + 64) * HEADS * HEAD_DIM * 2
        assert held.wide_tokens == 2 * (44 + 128) * HEADS * HEAD_DIM * 2
        assert held.stored == held.payload + held.scales + held.wide_tokens

    def test_sliding_layers_stay_bf16_and_are_reported(self) -> None:
        cache = filled("crush", 20, config=SLIDING, batch=1)
        assert cache.wide_layers == (0, 2)
        held = cache.stored_bytes()
        assert held.wide_layers == 2 * 20 * HEADS * 2 * HEAD_DIM * 2
        assert held.payload == 20 * HEADS * 2 * HEAD_DIM // 4
        assert (held.scales, held.constants) == (0, 8)
        exact = filled("bf16", 20, config=SLIDING, batch=1)
        assert exact.wide_layers == ()
        assert exact.stored_bytes().wide_layers == 0
        assert torch.equal(cache.layers[2].keys, exact.layers[2].keys)
        assert not torch.equal(cache.layers[1].keys, exact.layers[1].keys)
        assert filled("sliding", 20, config=SLIDING).wide_layers == ()
        assert filled("skipped", 20).wide_layers == (0,)


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (
                {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
                "layer 1 keeps a recurrent state",
            ),
            (
                {"layer_types": ["telepathic_attention"], "num_hidden_layers": 1},
                "does not know what a layer of type 'telepathic_attention' caches",
            ),
        ],
    )
    def test_layer_kinds_that_packed_storage_does_not_know(self, config: dict[str, Any], message: str) -> None:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        with pytest.raises(UnsupportedError, match=message):
            QuantizedCache({**heads, **config}, "bf16")

    def test_heads_that_a_format_cannot_store(self) -> None:
        with pytest.raises(UnsupportedError, match="a head of 80 is no multiple"):
            QuantizedCache({**FULL, "head_dim": 80}, "q8_0")

    def test_scales_that_are_missing(self) -> None:
        with pytest.raises(UnsupportedError, match="stores with calibrated scales and has none"):
            fill(QuantizedCache(FULL, "fp8_per_head"), 0, 3)


@pytest.mark.parametrize("family", BUILDERS)
class TestAgainstTransformers:
    """The BF16 scheme in bfloat16 models against transformers' own cache and attention, token for token.

    Only the order of sums may differ. Float32 models of every family are compared in test_layer_kinds.
    """

    def compare(self, family: str, ids: Tensor, **kwargs: Any) -> None:
        plain, ours = plain_model(family, torch.bfloat16), packed_model(family, torch.bfloat16)
        expected = generated(plain, ids, RoundingCache(config=plain.config), **kwargs)
        cache = QuantizedCache(ours.config, "bf16")
        got = generated(ours, ids, cache, **kwargs)
        assert got.sequences.tolist() == expected.sequences.tolist()
        assert all(cache.tokens_read())
        for a, b in zip(got.logits, expected.logits, strict=True):
            assert (a - b).abs().max() <= 0.02 * b.abs().max()

    def test_greedy_beyond_the_window(self, family: str) -> None:
        self.compare(family, tokens(3 * WINDOW + 1))

    def test_chunked_prefill(self, family: str) -> None:
        self.compare(family, tokens(3 * WINDOW + 1, seed=1), prefill_chunk_size=WINDOW + 1)

    def test_left_padded_batch(self, family: str) -> None:
        ids, mask = tokens(20, seed=2, batch=3), torch.ones(3, 20, dtype=torch.long)
        for row, padding in enumerate((0, 5, 13)):
            ids[row, :padding], mask[row, :padding] = 0, 0
        self.compare(family, ids, attention_mask=mask)

    def test_prompt_lookup_decoding(self, family: str) -> None:
        self.compare(family, tokens(6, seed=4).repeat(1, 4), prompt_lookup_num_tokens=4)


class TestDrafts:
    """Rejected drafts are cropped off again: a crop that left anything would change what follows."""

    REPEATED = tokens(6, seed=4).repeat(1, 4)
    """Drafts from the first forward on."""
    UNIQUE = torch.cat([tokens(5, seed=4).repeat(1, 6) % 50 + 1, torch.tensor([[96]])], dim=1)
    """Its last token is new, so the first forward feeds the prompt alone."""

    def runs(self, model: Any, name: str, ids: Tensor, **drafts: Any) -> tuple[Any, Any, Recording]:
        """A greedy run, one with drafts, and the latter's cache."""
        caches = [Recording(model.config, scheme(name)) for _ in range(2)]
        greedy = generated(model, ids, caches[0], new_tokens=14)
        return greedy, generated(model, ids, caches[1], new_tokens=14, **drafts), caches[1]

    @pytest.mark.parametrize("name", [n for n in DIFFERENT if n in CHUNKED_ALIKE])
    def test_prompt_lookup_equals_greedy(self, name: str) -> None:
        greedy, drafted, cache = self.runs(llama(), name, self.REPEATED, prompt_lookup_num_tokens=4)
        assert drafted.sequences.tolist() == greedy.sequences.tolist()
        assert any(cache.crops)
        cache.assert_holds_what_is_left(llama().config)

    @pytest.mark.parametrize("name", ["nvfp4", "crush", "k8v4", "nvfp4_mean_shift", "int4_g64_mean_shift"])
    def test_formats_that_freeze_want_the_prompt_in_a_forward_of_its_own(self, name: str) -> None:
        greedy, drafted, cache = self.runs(llama(), name, self.UNIQUE, prompt_lookup_num_tokens=4)
        assert drafted.sequences.tolist() == greedy.sequences.tolist()
        assert any(cache.crops)
        cache.assert_holds_what_is_left(llama().config)
        with pytest.raises(UnsupportedError, match=r"frozen from the first 28 tokens.\n.*decode without drafts"):
            self.runs(llama(), name, self.REPEATED, prompt_lookup_num_tokens=4)

    @pytest.mark.parametrize("name", ["int4_g32", "kivi4", "residual"])
    def test_assisted_decoding_equals_greedy(self, name: str) -> None:
        """The assistant is another model, so most of its drafts are rejected."""
        assistant = BUILDERS["qwen2"](torch.float32)
        greedy, drafted, cache = self.runs(llama(), name, self.REPEATED, assistant_model=assistant)
        assert drafted.sequences.tolist() == greedy.sequences.tolist()
        assert any(cache.crops)
        cache.assert_holds_what_is_left(llama().config)

    @pytest.mark.parametrize("name", ["kivi4", "sliding", "sliding_nvfp4", "sliding_kivi", "sinks_residual"])
    @pytest.mark.parametrize("length", [126, 187])
    def test_what_is_left_is_as_if_never_drafted(self, name: str, length: int) -> None:
        """Across the borders of tails and windows.

        With a tail the tokens may differ from greedy ones: a draft sees some tokens encoded that would still wait
        in BF16 if it came alone. What the cache holds after a crop may not.
        """
        ids = self.UNIQUE[:, [0] * (length - 31) + [*range(31)]]
        greedy, drafted, cache = self.runs(gemma(), name, ids, prompt_lookup_num_tokens=6)
        assert any(cache.crops)
        cache.assert_holds_what_is_left(gemma().config)
        assert name in TAILED or drafted.sequences.tolist() == greedy.sequences.tolist()


class TestGeneration:
    @pytest.mark.parametrize("name", ["nvfp4", "kivi4", "sinks_residual", "sliding_kivi", "int4_g64_mean_shift"])
    @pytest.mark.parametrize("length", [18, 130])
    def test_beam_search_moves_everything(self, name: str, length: int) -> None:
        cache = Recording(gemma().config, scheme(name))
        options = {"num_beams": 3, "num_return_sequences": 3}
        out = generated(gemma(), tokens(length, seed=3, batch=2), cache, new_tokens=6, **options)
        assert out.sequences.shape == (6, length + 6)
        assert len({tuple(row) for row in out.sequences.tolist()}) == 6
        cache.assert_holds_what_is_left(gemma().config)

    def test_multinomial_return_sequences(self) -> None:
        torch.manual_seed(0)
        cache = cache_of(llama(), "nvfp4")
        out = llama().generate(
            tokens(9),
            attention_mask=torch.ones(1, 9),
            do_sample=True,
            num_return_sequences=3,
            max_new_tokens=5,
            **{cache_argument(llama()): cache},
        )
        assert out.shape == (3, 14)
        assert cache.packed_layers[0].batch_size == 3
        assert cache.stored_bytes().stored == cache.billed_bytes()

    @pytest.mark.parametrize("name", ["nvfp4", "kivi4", "sinks_residual", "int4_g32", "int4_g64_mean_shift"])
    def test_multi_turn_equals_cold(self, name: str) -> None:
        """A second turn over a kept cache is what a cold run with the same forwards gives."""
        first, second = tokens(131, seed=6), tokens(7, seed=7)
        warm = cache_of(llama(), name)
        out = generated(llama(), first, warm, new_tokens=5)
        conversation = torch.cat([out.sequences, second], dim=1)
        continued = generated(llama(), conversation, warm, new_tokens=5)
        cold = cache_of(llama(), name)
        logits_of(llama(), first, cold)
        for position in range(131, 135):
            logits_of(llama(), conversation[:, position : position + 1], cold)
        again = generated(llama(), conversation, cold, new_tokens=5)
        assert continued.sequences.tolist() == again.sequences.tolist()
        assert_same(warm, cold)


class TestLeftPadding:
    """A padded row has the logits that it has alone; its bytes are compared in test_row_stores."""

    PADDING = (0, 5, 21)

    def batch(self, length: int) -> tuple[Tensor, Tensor]:
        ids, mask = tokens(length, seed=5, batch=3), torch.ones(3, length, dtype=torch.long)
        for row, padding in enumerate(self.PADDING):
            ids[row, :padding], mask[row, :padding] = 0, 0
        return ids, mask

    def close(self, got: Tensor, expected: Tensor, tolerance: float = 0.01) -> None:
        """Within what single codes may move the logits: sums over a mask round in another order, which can tip some."""
        assert (got - expected).abs().max() < tolerance * (expected.max() - expected.min())

    @EVERY_KIND
    def test_in_one_forward_and_in_chunks_shorter_than_the_padding(self, name: str) -> None:
        ids, mask = self.batch(46)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        for chunk in (46, 16):
            cache, got = cache_of(llama(), name, padding_mask=mask), []
            for start in range(0, 46, chunk):
                stop = min(46, start + chunk)
                part = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
                got.append(logits_of(llama(), ids[:, start:stop], cache, **part))
            logits = torch.cat(got, dim=1)
            assert torch.isfinite(logits).all()
            for row, padding in enumerate(self.PADDING):
                alone, expected = cache_of(llama(), name), []
                for start in range(0, 46, chunk):
                    part = ids[row : row + 1, max(start, padding) : start + chunk]
                    if part.shape[1]:
                        expected.append(logits_of(llama(), part, alone))
                self.close(logits[row, padding:], torch.cat(expected, dim=1)[0])

    @pytest.mark.parametrize("name", ["nvfp4", "crush", "kivi2", "sinks_residual", "kivi_no_residual", "sliding_kivi"])
    @pytest.mark.parametrize("model", [llama, gemma], ids=["llama", "gemma"])
    def test_with_generate(self, model: Any, name: str) -> None:
        ids, mask = self.batch(150)
        cache = cache_of(model(), name, padding_mask=mask)
        batch = generated(model(), ids, cache, attention_mask=mask)
        single = generated(model(), ids[2:, 21:], cache_of(model(), name))
        assert batch.sequences[2, 150:].tolist() == single.sequences[0, 129:].tolist()
        self.close(torch.stack(batch.logits)[:, 2], torch.stack(single.logits)[:, 0])

    def test_with_beams(self) -> None:
        """Every row of the mask is repeated per beam."""
        ids, mask = self.batch(40)
        beams = {"num_beams": 3, "num_return_sequences": 3, "new_tokens": 5}
        cache = cache_of(llama(), "kivi_no_residual", padding_mask=mask.repeat_interleave(3, dim=0))
        batch = generated(llama(), ids, cache, attention_mask=mask, **beams)
        single = generated(llama(), ids[2:, 21:], cache_of(llama(), "kivi_no_residual"), **beams)
        assert batch.sequences[6:, 40:].tolist() == single.sequences[:, 19:].tolist()
        short = cache_of(llama(), "nvfp4", padding_mask=mask)
        with pytest.raises(UnsupportedError, match="a padding mask of 3 rows does not cover a batch of 9"):
            generated(llama(), ids, short, attention_mask=mask, **beams)


class TestPrefixReuse:
    @EVERY_KIND
    def test_several_questions_equal_cold_runs(self, name: str) -> None:
        """A stem is prefilled once; every question is a branch of it. To the last bit what a cold run gives."""
        stem, cache = tokens(70, seed=8), cache_of(llama(), name)
        in_chunks(llama(), stem, cache, 32)
        for seed, length in ((9, 3), (10, 70), (11, 1)):
            question = tokens(length, seed=seed)
            with cache.branch():
                got = in_chunks(llama(), question, cache, 40)
            cold = cache_of(llama(), name)
            in_chunks(llama(), stem, cold, 32)
            assert torch.equal(got, in_chunks(llama(), question, cold, 40))

    @pytest.mark.parametrize("name", CHUNKED_ALIKE)
    def test_chunking_changes_nothing_where_bytes_are_invariant(self, name: str) -> None:
        ids = tokens(9)
        runs = {chunk: in_chunks(llama(), ids, cache_of(llama(), name), chunk) for chunk in (1, len(ids[0]))}
        scale = float(runs[1].abs().max())
        for chunk, logits in runs.items():
            # Float32 sums run in another order; a changed code would move logits by far more.
            assert (logits - runs[1]).abs().max() < 2e-3 * scale, chunk

    @pytest.mark.parametrize("name", ["kivi4", "residual", "kivi_sinks", "kivi_no_residual"])
    def test_tails_hold_the_same_bytes_in_any_chunks(self, name: str) -> None:
        """Of the first layer, whose keys do not depend on what attention saw before."""
        ids, caches = tokens(150), []
        for chunk in (7, 40, 150):
            caches.append(cache_of(llama(), name))
            in_chunks(llama(), ids, caches[-1], chunk)
        for cache in caches[1:]:
            for store, expected in zip(stores(cache)[:2], stores(caches[0])[:2], strict=True):
                same = store.read(store.snapshot(), torch.float32), expected.read(expected.snapshot(), torch.float32)
                # A code may tip where a projection rounds differently for one token and for many.
                assert ((same[0] - same[1]).abs() > 1e-5).float().mean() < 1e-3


class TestReads:
    @pytest.mark.parametrize("name", [n for n in DIFFERENT if scheme(n).lossy and n not in TAILED])
    def test_one_forward_already_reads_the_stored_form(self, name: str) -> None:
        """In transformers' own quantized caches the first forward is bit-identical to BF16. Not here."""
        ids, model = tokens(32), llama()
        exact = logits_of(model, ids, cache_of(model, "bf16"))
        got = logits_of(model, ids, cache_of(model, name))
        sinks = scheme(name).sink_tokens
        # Position 0 included: even a lone token attends to its own stored form.
        assert ((got - exact).abs().amax((0, 2))[sinks:] > 1e-4).all()
        assert torch.equal(got[:, :sinks], exact[:, :sinks])

    @pytest.mark.parametrize("name", ["residual", "kivi4", "kivi_sinks", "sinks_residual"])
    def test_a_tail_is_read_as_it_is(self, name: str) -> None:
        """Nothing is encoded while all tokens are sinks or in a tail; beyond that something is lost."""
        ids, model = tokens(150), llama()
        room = scheme(name).sink_tokens + scheme(name).residual_length - (scheme(name).key.unit > 1)
        exact, got = cache_of(model, "bf16"), cache_of(model, name)
        assert torch.equal(logits_of(model, ids[:, :room], got), logits_of(model, ids[:, :room], exact))
        late, right = (logits_of(model, ids[:, room:], cache) for cache in (got, exact))
        assert (late - right).abs().max() > 1e-3

    @pytest.mark.parametrize("name", [n for n in DIFFERENT if scheme(n).lossy and n not in TAILED])
    def test_fresh_chunks_read_the_past_only(self, name: str) -> None:
        ids, model = tokens(64), llama()
        exact = in_chunks(model, ids, cache_of(model, "bf16"), 32)
        stored = in_chunks(model, ids, cache_of(model, name), 32)
        fresh = in_chunks(model, ids, cache_of(model, name, reads="fresh_chunk"), 32)
        full = in_chunks(model, ids, cache_of(model, name, reads="fresh_chunk"), 64)
        assert not torch.allclose(stored, fresh, atol=1e-4)
        # One fresh chunk is an unquantized forward; BF16 storage rounds more than that.
        assert torch.allclose(full, exact, atol=0.05 * float(exact.abs().max()))
        assert torch.allclose(fresh[:, :32], full[:, :32], atol=1e-4)
        assert not torch.allclose(fresh[:, 32:], full[:, 32:], atol=1e-4)

    @EVERY_KIND
    def test_a_fresh_chunk_is_stored_all_the_same(self, name: str) -> None:
        caches = [new_cache(name, SLIDING, reads=reads) for reads in ("stored", "fresh_chunk")]
        for cache in caches:
            fill(cache, 0, 9)
            fill(cache, 9, 150)
        assert_same(*caches)
        assert caches[1].tokens_read() == [0, 0, 0]

    @EVERY_KIND
    @pytest.mark.parametrize("role", [0, 1], ids=["keys", "values"])
    @pytest.mark.parametrize("layer", [0, 1])
    def test_poisoned_bytes_are_seen(self, name: str, role: int, layer: int) -> None:
        """Whatever overwrites a part of one role of one layer changes the next forward: nothing bypasses it."""
        ids, model = tokens(140), llama()
        cache = prefilled(name)
        clean = logits_of(model, ids[:, 136:], cache.fork())
        for part in stores(cache)[2 * layer + role].parts():
            poisoned = cache.fork()
            held = stores(poisoned)[2 * layer + role].parts()[part]
            if "frozen" in part:
                held.mul_(2)
            else:
                held.copy_(held.flip(2).roll(1, dims=1))
            seen = logits_of(model, ids[:, 136:], poisoned)
            assert torch.isfinite(seen).all()
            assert (clean - seen).abs().max() > 1e-3, part

    def test_tokens_read_counts_every_layer_and_role(self) -> None:
        cache = cache_of(gemma(), "int4_g64")
        logits_of(gemma(), tokens(10), cache)
        assert cache.tokens_read() == cache.tokens_owed(10) == [2 * 10] * 3
        logits_of(gemma(), tokens(1), cache)
        assert cache.tokens_read() == [2 * (10 + 11)] * 3
        assert cache.tokens_owed(1) == [2 * 11] * 3
        assert cache.fork().tokens_read() == [0] * 3
        fresh = cache_of(gemma(), "int4_g64", reads="fresh_chunk")
        in_chunks(gemma(), tokens(10), fresh, 6)
        assert fresh.tokens_read() == fresh.tokens_owed(4) == [2 * 6] * 3

    def test_reads_of_a_window_are_owed_by_what_it_keeps(self) -> None:
        cache = cache_of(gemma(), "int4_g64")
        in_chunks(gemma(), tokens(200), cache, 50)
        before = cache.tokens_read()
        logits_of(gemma(), tokens(1), cache)
        reads = [now - then for now, then in zip(cache.tokens_read(), before, strict=True)]
        assert cache.tokens_owed(1) == reads == [2 * (201 - 128), 2 * 201, 2 * (201 - 128)]

    def test_a_padded_batch_counts_reads_too(self) -> None:
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        cache = cache_of(llama(), "nvfp4", padding_mask=mask)
        logits_of(llama(), tokens(4, batch=2), cache, attention_mask=mask)
        assert cache.tokens_read() == cache.tokens_owed(4) == [2 * 4] * 2

    def test_a_layer_that_bypasses_its_bytes_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reads are counted by layer: what one layer skips, another can't make up for."""
        update = PackedLayer.update

        def leaky(layer: PackedLayer, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            handles = update(layer, keys, values, *args, **kwargs)
            return (keys, handles[1]) if layer._index == 1 else handles

        monkeypatch.setattr(PackedLayer, "update", leaky)
        cache = cache_of(llama(), "nvfp4")
        logits_of(llama(), tokens(10), cache)
        assert cache.tokens_owed(10) == [20, 20]
        assert cache.tokens_read() == [20, 10]

    def test_update_returns_handles(self) -> None:
        cache, x = new_cache("bf16"), numbers(0, 3)
        assert all(type(handle) is PackedKV for handle in cache.update(x, x, 0))

    @pytest.mark.parametrize("name", ["int4_g64", "kivi_no_residual"])
    def test_another_attention_reads_the_same_bytes(self, name: str) -> None:
        """A model that attends by itself (eager) meets the handles in ordinary operations."""
        ids, runs = tokens(44), []
        for implementation in ("kveval", "eager", "sdpa"):
            model = packed(tiny_llama())
            model.set_attn_implementation(implementation)
            cache = cache_of(model, name)
            runs.append(in_chunks(model, ids, cache, 15))
            assert all(reads >= 2 * (15 + 30 + 44) for reads in cache.tokens_read())
        assert torch.allclose(runs[1], runs[0], atol=1e-4)
        assert torch.allclose(runs[2], runs[0], atol=1e-4)

    def test_gradients_may_be_on(self) -> None:
        model, ids = packed(tiny_llama()).requires_grad_(True), tokens(9)
        for name in ("nvfp4", "int4_g64_mean_shift", "sinks_residual"):
            cache = cache_of(model, name)
            model(input_ids=ids, **{cache_argument(model): cache})
            assert not any(part.requires_grad for store in stores(cache) for part in store.parts().values())


@functools.cache
def prefilled(name: str) -> QuantizedCache:
    """136 tokens: some in a tail, some encoded, for every scheme. To be forked, not to be written to."""
    cache = cache_of(llama(), name)
    logits_of(llama(), tokens(140)[:, :136], cache)
    return cache


class TestHandles:
    @EVERY_KIND
    def test_a_handle_is_a_tensor_in_shape_dtype_and_every_operation(self, name: str) -> None:
        cache, x = new_cache(name), numbers(0, 36).bfloat16()
        handle, _ = cache.update(x, x, 0)
        store = stores_of_layer(cache)[0]
        assert (handle.shape, handle.dtype, handle.device) == (x.shape, torch.bfloat16, x.device)
        assert store.tokens_read == 0
        assert f"PackedKV(shape=(2, {HEADS}, 36, {HEAD_DIM})" in repr(handle)
        expected = store.read(store.snapshot(), torch.bfloat16)
        assert type(handle.dequantize()) is Tensor
        for got, right in (
            (handle.dequantize(), expected),
            (handle.transpose(2, 3), expected.transpose(2, 3)),
            (handle[:, :1, 2:4], expected[:, :1, 2:4]),
            (torch.cat([handle, handle], dim=2), torch.cat([expected, expected], dim=2)),
            (x @ handle.mT, x @ expected.mT),
            (handle.repeat_interleave(2, dim=1), expected.repeat_interleave(2, dim=1)),
            (handle.float(), expected.float()),
        ):
            assert torch.equal(got, right)
        assert store.tokens_read == 36 * 10

    @pytest.mark.parametrize("inference", [False, True])
    def test_what_changes_nothing_keeps_the_handle(self, inference: bool) -> None:
        """Models move shared keys to the device where they are; in inference mode torch hands such calls on whole."""
        with torch.inference_mode(inference):
            handle, _ = new_cache("nvfp4").update(numbers(0, 36), numbers(0, 36), 0)
            for same in (handle.to("cpu"), handle.to(torch.float32), handle.to(handle), handle.contiguous()):
                assert same is handle
            assert type(handle.to(torch.bfloat16)) is Tensor
            assert torch.equal(handle.to(torch.bfloat16), handle.dequantize().bfloat16())

    @EVERY_KIND
    def test_a_handle_is_what_was_stored_then(self, name: str) -> None:
        """Also after later appends, freed tiles and chosen rows: a layer may share the keys of an earlier one."""
        cache = new_cache(name, SLIDING)
        fill(cache, 0, 40)
        k, v = (numbers(40, 60, role=role) for role in "kv")
        handles = cache.update(k, v, 0)
        expected = [handle.dequantize() for handle in handles]
        cache.update(numbers(60, 300), numbers(60, 300, role="v"), 0)
        cache.layers[0].reorder_cache(torch.tensor([1, 0]))
        assert cache.layers[0].dropped > 60
        for handle, tensor in zip(handles, expected, strict=True):
            assert torch.equal(handle.dequantize(), tensor)

    @pytest.mark.parametrize("name", ["crush", "kivi4", "sinks_residual"])
    def test_a_fresh_handle_reads_the_past_only(self, name: str) -> None:
        cache = new_cache(name, reads="fresh_chunk")
        fill(cache, 0, 150)
        past = cache.layers[0].keys
        new = numbers(150, 160, factor=3)
        handle, _ = cache.update(new, new, 0)
        store, got = stores_of_layer(cache)[0], handle.dequantize()
        assert torch.equal(got[:, :, 150:], new)
        assert torch.equal(got[:, :, :150], past)
        assert store.tokens_read == 2 * 150


def stores_of_layer(cache: QuantizedCache, index: int = 0) -> Any:
    return cache.packed_layers[index].stores()


def test_freezing_and_invariant_schemes_are_both_here() -> None:
    assert {"nvfp4", "crush", "k8v4", "int4_g64_mean_shift"} <= set(FREEZING)
    assert {"bf16", "kivi4", "int4_g64"} <= set(INVARIANT)


class TestMistakes:
    @pytest.mark.parametrize("name", ["kivi4", "k8v4"])
    def test_a_negative_length_is_no_crop(self, name: str) -> None:
        cache = filled(name, 9)
        with pytest.raises(UnsupportedError, match=r"crop_to\(-5\)") as caught:
            cache.crop_to(-5)
        assert "`crop(-5)` forgets the last 5 tokens" in caught.value.remedy
        assert cache.get_seq_length() == 9

    def test_a_cache_of_another_model(self) -> None:
        model = packed(tiny_llama())
        with pytest.raises(UnsupportedError, match="got 2 heads with keys of 16 and values of 16; the cache was built"):
            logits_of(model, tokens(4), QuantizedCache(tiny_llama(head_dim=32).config, "bf16"))
        fewer = {**model.config.to_dict(), "num_hidden_layers": 1}
        fewer.pop("layer_types", None)
        with pytest.raises(UnsupportedError, match="keys and values in layer 1; the cache was built for 1"):
            logits_of(model, tokens(4), QuantizedCache(fewer, "bf16"))
