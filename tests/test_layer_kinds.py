"""Every kind of layer and of attention, through the BF16 scheme, against transformers' own cache and attention.

The reference cache rounds keys and values to bfloat16 as the BF16 scheme does, so that nothing but the order of sums
may differ. The models are float64: in float32 that order now and then rounds a key the other way, which later layers
amplify.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_models import (
    ALL_BUILDERS,
    WINDOW,
    RoundingCache,
    generated,
    in_chunks,
    logits_of,
    packed,
    tokens,
)
from torch import Tensor

import kveval.packed_layer
from kveval.attention import ATTENTION_PATH, FLOAT32_PATH, recorded_paths
from kveval.cache import QuantizedCache
from kveval.errors import UnsupportedError
from kveval.formats.spec import KVScheme, LayerOverride, get_scheme
from kveval.geometry import LayerGeometry, geometry_from_config

FAMILIES = tuple(ALL_BUILDERS)
WINDOWED = ("gemma2", "gemma3", "gemma3n", "gpt_oss", "llama4", "mistral")
HYBRID = ("qwen3_next", "qwen3_5")
MODIFIED = ("gemma2", "gpt_oss")
"""Attention with capped scores or sinks, which transformers computes in its eager attention only."""


def plain(model: Any, family: str) -> Any:
    """`model`, attending through transformers in the way that knows all that the model asks for."""
    model.set_attn_implementation("eager" if family in MODIFIED else "sdpa")
    return model


def built(family: str) -> Any:
    """Gemma 2's eager softmax is float32 whatever the model; its mask overflows there in a wider one."""
    return ALL_BUILDERS[family](torch.float32 if family == "gemma2" else torch.float64)


@functools.cache
def plain_model(family: str) -> Any:
    return plain(built(family), family)


@functools.cache
def packed_model(family: str) -> Any:
    return packed(built(family))


def our_cache(family: str, scheme: str = "bf16", **kwargs: Any) -> QuantizedCache:
    return QuantizedCache(packed_model(family).config, scheme, **kwargs)


def reference_cache(family: str) -> RoundingCache:
    return RoundingCache(config=plain_model(family).config)


@functools.cache
def reference_logits(family: str, length: int) -> Tensor:
    """float32 [1, length, V]: one forward, without any cache of ours."""
    return logits_of(plain_model(family), tokens(length), reference_cache(family))


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference as a part of the spread (largest minus smallest) of the expected logits."""
    return float((got - expected).abs().max() / (expected.max() - expected.min()))


def assert_close(got: Tensor, expected: Tensor, family: str) -> None:
    """Recurrent layers run in float32, by one algorithm for one token and by another for many."""
    assert distance(got, expected) <= (1e-4 if family in (*HYBRID, "gemma2") else 1e-6)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def assert_same_generation(got: Any, expected: Any, family: str) -> None:
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), family)


@pytest.fixture
def eager_dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers free tokens as soon as they may, so that short sequences meet it."""
    monkeypatch.setattr(kveval.packed_layer, "TILE", 2)
    monkeypatch.setattr(kveval.packed_layer, "CROP_RESERVE", 0)


@pytest.mark.parametrize("family", FAMILIES)
class TestAgainstTransformers:
    def test_one_forward(self, family: str) -> None:
        cache = our_cache(family)
        assert_close(logits_of(packed_model(family), tokens(40), cache), reference_logits(family, 40), family)
        assert cache.get_seq_length() == 40
        assert cache.stored_bytes().stored == cache.billed_bytes()

    @pytest.mark.parametrize("chunk", [1, WINDOW - 1, WINDOW, WINDOW + 1])
    @pytest.mark.usefixtures("eager_dropping")
    def test_in_chunks(self, family: str, chunk: int) -> None:
        """Token by token too; windowed layers drop on the way what has left the window."""
        cache = our_cache(family)
        got = in_chunks(packed_model(family), tokens(27), cache, chunk)
        assert_close(got, reference_logits(family, 40)[:, :27], family)
        dropped = {layer.dropped for layer in cache.packed_layers if layer.is_sliding}
        assert dropped == ({(27 - WINDOW + 1) // 2 * 2} if family in WINDOWED else set())

    @pytest.mark.parametrize("row_by_row", [False, True])
    @pytest.mark.usefixtures("eager_dropping")
    def test_left_padded_batch(self, family: str, row_by_row: bool) -> None:
        ids, mask = tokens(21, seed=2, batch=3), torch.ones(3, 21, dtype=torch.long)
        for row, padding in enumerate((0, 5, 13)):
            ids[row, :padding], mask[row, :padding] = 0, 0
        options = {"attention_mask": mask, "new_tokens": 5}
        expected = generated(plain_model(family), ids, reference_cache(family), **options)
        cache = our_cache(family, padding_mask=mask if row_by_row else None)
        assert_same_generation(generated(packed_model(family), ids, cache, **options), expected, family)
        assert cache.stored_bytes().stored == cache.billed_bytes()

    def test_a_second_turn(self, family: str) -> None:
        """New tokens in one forward after generated ones."""
        first, second = tokens(11, seed=6), tokens(2 * WINDOW, seed=7)
        runs = []
        for model, cache in (
            (plain_model(family), reference_cache(family)),
            (packed_model(family), our_cache(family)),
        ):
            out = generated(model, first, cache, new_tokens=4)
            runs.append(generated(model, torch.cat([out.sequences, second], dim=1), cache, new_tokens=3))
        assert_same_generation(runs[1], runs[0], family)


@pytest.mark.parametrize("family", WINDOWED)
def test_generation_past_the_window_and_its_reserve(family: str) -> None:
    """Tokens are dropped as in a real run, while the prompt is prefilled in chunks."""
    ids = tokens(140, seed=1)
    expected = generated(plain_model(family), ids, reference_cache(family), new_tokens=4)
    cache = our_cache(family)
    got = generated(packed_model(family), ids, cache, new_tokens=4, prefill_chunk_size=50)
    assert_same_generation(got, expected, family)
    assert {layer.dropped for layer in cache.packed_layers if layer.is_sliding} == {64}
    assert {layer.dropped for layer in cache.packed_layers if not layer.is_sliding} <= {0}


@pytest.mark.parametrize("family", FAMILIES)
class TestStoredBytesAreRead:
    def test_a_lossy_scheme_shows(self, family: str) -> None:
        """Windowed layers stay BF16 by default, so a model of nothing else loses nothing."""
        cache = our_cache(family, "int4_g32")
        got = in_chunks(packed_model(family), tokens(40), cache, 15)
        error = distance(got, reference_logits(family, 40))
        assert error <= 1e-6 if family == "mistral" else error > 0.01
        assert cache.stored_bytes().stored == cache.billed_bytes()

    def test_every_layer_reads(self, family: str) -> None:
        """Layers that share keys and values read their donor's, once each."""
        cache = our_cache(family, "fp8_per_token_head")
        logits_of(packed_model(family), tokens(10), cache)
        reads = cache.tokens_read()
        assert reads == ([20, 20, 40, 40] if family == "gemma3n" else [20] * len(cache.packed_layers))
        assert all(read >= owed > 0 for read, owed in zip(reads, cache.tokens_owed(10), strict=True))

    def test_layers_tell_their_path(self, family: str) -> None:
        with recorded_paths() as paths:
            logits_of(packed_model(family), tokens(10), our_cache(family))
        path = FLOAT32_PATH if family in MODIFIED else ATTENTION_PATH
        assert paths == {i: path for i, shape in enumerate(shapes(family)) if shape.kind != "linear"}

    @pytest.mark.usefixtures("eager_dropping")
    def test_a_branch_leaves_nothing_behind(self, family: str) -> None:
        model, rest = packed_model(family), tokens(9, seed=3)
        cache = our_cache(family, "kivi4")
        in_chunks(model, tokens(30), cache, 13)
        untouched = cache.fork()
        for chunk in (1, 7):
            with cache.branch():
                in_chunks(model, tokens(2 + chunk, seed=chunk), cache, chunk)
        assert cache.get_seq_length() == 30
        assert torch.equal(logits_of(model, rest, cache), logits_of(model, rest, untouched))
        assert cache.stored_bytes() == untouched.stored_bytes()

    def test_a_fork_is_independent(self, family: str) -> None:
        model, rest = packed_model(family), tokens(12, seed=3)
        cache = our_cache(family, "int8_per_token_head")
        logits_of(model, tokens(20), cache)
        twin = cache.fork()
        before = logits_of(model, rest, cache.fork())
        logits_of(model, tokens(30, seed=4), twin)
        assert torch.equal(logits_of(model, rest, cache), before)


def shapes(family: str) -> tuple[LayerGeometry, ...]:
    return geometry_from_config(packed_model(family).config.to_dict())


@pytest.mark.parametrize("family", ["gemma3n", "gpt_oss", "llama4", "qwen3_5", "deepseek_v3"])
def test_beam_search_reorders_every_kind_of_layer(family: str) -> None:
    ids = tokens(11, seed=3, batch=2)
    options = {"num_beams": 2, "num_return_sequences": 2, "new_tokens": 5, "output_scores": True}
    expected = generated(plain_model(family), ids, reference_cache(family), **options)
    got = generated(packed_model(family), ids, our_cache(family), **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert torch.allclose(got.sequences_scores, expected.sequences_scores, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3n", "gpt_oss", "llama4", "mistral", "deepseek_v3"])
@pytest.mark.parametrize("scheme", ["bf16", "int4_g32"])
def test_rejected_drafts_are_cropped_off_exactly(family: str, scheme: str) -> None:
    model, ids = packed_model(family), tokens(6, seed=4).repeat(1, 5)
    greedy = generated(model, ids, our_cache(family, scheme), new_tokens=7)
    drafted = generated(model, ids, our_cache(family, scheme), new_tokens=7, prompt_lookup_num_tokens=4)
    assert drafted.sequences.tolist() == greedy.sequences.tolist()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.usefixtures("eager_dropping")
def test_windowed_layers_of_different_formats_share_one_mask(padded: bool) -> None:
    """transformers makes one mask for all of them, so they must drop the same tokens."""
    grouped = get_scheme("kivi4").key
    scheme = KVScheme(
        name="mixed",
        key=get_scheme("int8_per_token_head").key,
        value=get_scheme("int8_per_token_head").value,
        sliding="quantized",
        layers=(LayerOverride(layers=("2",), key=grouped, value=grouped),),
    )
    model, ids, mask = packed_model("gemma3"), tokens(80, batch=2), torch.ones(2, 80, dtype=torch.long)
    if padded:
        ids[0, :3], ids[1, :5], mask[0, :3], mask[1, :5] = 0, 0, 0, 0
    cache = QuantizedCache(model.config, scheme, padding_mask=mask if padded else None)
    for start in range(0, 80, 16):
        logits_of(model, ids[:, start : start + 16], cache, attention_mask=mask[:, : start + 16])
    assert len({layer.dropped for layer in cache.packed_layers if layer.is_sliding}) == 1
    assert cache.layers[0].dropped > 0


@pytest.mark.parametrize("family", HYBRID)
class TestRecurrentLayers:
    def test_they_are_the_models_own(self, family: str) -> None:
        cache = our_cache(family, "nvfp4")
        logits_of(packed_model(family), tokens(9), cache)
        assert [type(layer).__name__ for layer in cache.layers] == [
            "LinearAttentionLayer",
            "PackedLayer",
            "LinearAttentionLayer",
        ]
        assert cache.layers[0].recurrent_states[0].dtype == torch.float32
        assert cache.get_seq_length() == 9

    def test_single_tokens_cannot_be_forgotten(self, family: str) -> None:
        cache = our_cache(family)
        logits_of(packed_model(family), tokens(9), cache)
        with pytest.raises(UnsupportedError, match="recurrent layers can't forget single tokens"):
            cache.crop(-1)
        cache.crop(0)
        assert cache.get_seq_length() == 9

    def test_rows_are_picked_together(self, family: str) -> None:
        model, ids = packed_model(family), tokens(9, batch=3)
        cache, picked = our_cache(family), our_cache(family)
        logits_of(model, ids, cache)
        logits_of(model, ids[[2, 2, 0]], picked)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 1, 3]))
        rest = tokens(4, seed=1, batch=3)
        assert torch.allclose(logits_of(model, rest, cache), logits_of(model, rest, picked), atol=1e-5)

    def test_a_dict_cannot_make_them(self, family: str) -> None:
        with pytest.raises(UnsupportedError, match="layer 0 keeps a recurrent state"):
            QuantizedCache(packed_model(family).config.to_dict(), "bf16")


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_stored_and_rope_parts_stay_wide(family: str) -> None:
    cache, latent, rope = our_cache(family, "int8_per_token_head"), 32, 8
    logits_of(packed_model(family), tokens(10), cache)
    held = cache.stored_bytes()
    assert held.payload + held.scales == 2 * 10 * (latent + 4 + 2 * rope)
    assert held.stored == cache.billed_bytes()


def test_readers_have_no_bytes_of_their_own() -> None:
    cache = our_cache("gemma3n")
    logits_of(packed_model("gemma3n"), tokens(10), cache)
    assert len(cache.packed_layers) == 4
    assert cache.stored_bytes().stored == 4 * 10 * 2 * (16 + 16) * 2


@pytest.mark.parametrize("family", ["gemma3n", "deepseek_v3", "gpt_oss", "llama4", "qwen3_5"])
def test_fresh_chunk_reads_are_exact_where_storage_is(family: str) -> None:
    """In bfloat16 the BF16 scheme loses nothing, so raw and stored reads agree to the last bit."""
    model, ids = packed(ALL_BUILDERS[family](torch.bfloat16)), tokens(30)
    stored, fresh = (
        in_chunks(model, ids, QuantizedCache(model.config, "bf16", reads=reads), 7)
        for reads in ("stored", "fresh_chunk")
    )
    assert torch.equal(stored, fresh)


class TestTheModelsShowWhatTheyAreFor:
    """A tiny model on which its own feature changed nothing would test nothing."""

    def changed(self, family: str, change: Any) -> float:
        model = plain(built(family), family)
        change(model)
        return distance(logits_of(model, tokens(40), reference_cache(family)), reference_logits(family, 40))

    @pytest.mark.parametrize("family", WINDOWED)
    def test_windows(self, family: str) -> None:
        key = "attention_chunk_size" if family == "llama4" else "sliding_window"
        assert self.changed(family, lambda model: setattr(model.config, key, 512)) > 0.01

    def test_softcap(self) -> None:
        def uncap(model: Any) -> None:
            for layer in model.model.layers:
                layer.self_attn.attn_logit_softcapping = None

        assert self.changed("gemma2", uncap) > 0.01

    def test_sinks(self) -> None:
        def close(model: Any) -> None:
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(-100)

        assert self.changed("gpt_oss", close) > 0.01

    def test_keys_that_readers_share(self) -> None:
        def scramble(model: Any) -> None:
            for layer in model.model.layers[4:]:
                layer.self_attn.q_proj.weight.neg_()

        assert self.changed("gemma3n", scramble) > 0.01
