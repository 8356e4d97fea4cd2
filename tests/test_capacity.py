from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kveval.capacity import (
    GIB,
    Budget,
    Gpu,
    cache_cost,
    format_tokens,
    get_gpu,
    known_gpus,
    product_cycles,
    sessions,
    sessions_table,
    widening_cycles,
)
from kveval.config import CapacityConfig
from kveval.errors import ConfigError, UnknownNameError, UnsupportedError
from kveval.exchange_rate import exchange_rate, format_interval, format_loss
from kveval.formats.spec import KVScheme, TensorFormat, get_scheme
from kveval.geometry import LayerGeometry
from kveval.records import METRICS

BF16 = get_scheme("bf16")
FP8 = get_scheme("fp8_e4m3")
NVFP4 = get_scheme("nvfp4")
LLAMA_8B = [LayerGeometry(kind="full", kv_heads=8, head_dim_k=128, head_dim_v=128)] * 32
MLA = LayerGeometry(kind="mla", kv_heads=1, head_dim_k=512, head_dim_v=64)
EIGHTY_GB = get_gpu("80gb")
FLASHMLA = KVScheme(
    name="flashmla_656",
    key=TensorFormat(element="e4m3", granularity="per_group", group_size=128, scale_rule="amax", scale_dtype="fp32"),
    value=TensorFormat(element="bf16"),
)


def count(scheme: KVScheme, *, reserve: float = 0.0, length: int = 100_000, weights: int = 16 * 10**9):
    budget = Budget(EIGHTY_GB, weights, reserve=reserve)
    return sessions(cache_cost(LLAMA_8B, scheme), budget, context_length=length)


@dataclass(frozen=True)
class Loss:
    value: float | None
    low: float | None = None
    high: float | None = None
    defined: bool = True


@dataclass(frozen=True)
class Comparison:
    loss: Loss
    scheme: str = "k8v4"
    task: str = "niah_multikey"
    metric: str = "answer_nll"
    context_length: int = 2048


class TestReferenceFigures:
    def test_bytes_per_token_of_32_layers_8_heads_128(self):
        assert cache_cost(LLAMA_8B, BF16).bytes_per_token == 131_072
        assert cache_cost(LLAMA_8B, FP8).bytes_per_token == 65_536
        assert cache_cost(LLAMA_8B, NVFP4).bytes_per_token == 36_864

    def test_the_bytes_ratio_is_two_and_the_jump_is_more(self):
        wide, narrow = count(BF16), count(FP8)
        assert (wide.floored, narrow.floored) == (4, 9)
        assert wide.fractional == pytest.approx(4.8828125)
        assert narrow.fractional == pytest.approx(9.765625)
        assert narrow.floored / wide.floored == 2.25
        assert narrow.fractional / wide.fractional == 2.0

    def test_with_an_engine_that_uses_92_percent_of_the_card(self):
        assert count(BF16, reserve=0.08).free_bytes == 57_600_000_000
        assert (count(BF16, reserve=0.08).floored, count(FP8, reserve=0.08).floored) == (4, 8)

    def test_nvfp4_counts_its_scales(self):
        assert count(NVFP4).floored == 17
        assert 64 * 10**9 // (131_072 // 4 * 100_000) == 19  # what forgetting them would promise

    def test_deepseek_v32_request_of_128k(self):
        request = cache_cost([MLA] * 62, BF16).session_bytes(131_072)
        assert request == 576 * 2 * 62 * 131_072
        assert round(request / GIB, 2) == 8.72

    def test_flashmla_token(self):
        wide, narrow = (cache_cost([MLA], s).bytes_per_token for s in (BF16, FLASHMLA))
        assert (wide, narrow) == (1152, 656)
        assert round(100 * (1 - narrow / wide)) == 43

    def test_widening_costs_more_cycles_than_the_products(self):
        assert widening_cycles(512) == 50.0
        assert product_cycles(64, 576, 512) == 34.0


class TestCost:
    def test_scales_frozen_per_sequence_are_constants(self):
        cost = cache_cost(LLAMA_8B, NVFP4)
        assert cost.constant_bytes == 32 * 2 * 4
        assert cost.session_bytes(1600) == 256 + 1600 * 36_864

    def test_a_started_block_is_a_whole_block(self):
        cost = cache_cost(LLAMA_8B, BF16)
        assert cost.session_bytes(17) == 32 * 131_072
        assert cost.session_bytes(17, block_size=1) == 17 * 131_072
        assert cost.session_bytes(17, block_size=256) == 256 * 131_072

    def test_sliding_layers_keep_a_window_in_bf16(self):
        sliding = LayerGeometry(kind="sliding", kv_heads=1, head_dim_k=256, head_dim_v=256, window=512)
        full = LayerGeometry(kind="full", kv_heads=1, head_dim_k=256, head_dim_v=256)
        cost = cache_cost([sliding] * 15 + [full] * 3, FP8)
        assert cost.session_bytes(256) == 256 * (15 * 1024 + 3 * 512)
        assert cost.session_bytes(512) == 512 * (15 * 1024 + 3 * 512)
        assert cost.session_bytes(32_768) == 512 * 15 * 1024 + 32_768 * 3 * 512
        assert cost.notes == ("15 sliding-window layers stay in BF16: fp8_e4m3 narrows only the others.",)
        assert cache_cost([sliding] * 15 + [full] * 3, BF16).notes == ()

    def test_a_model_of_windows_only_stops_growing(self):
        sliding = LayerGeometry(kind="sliding", kv_heads=8, head_dim_k=128, head_dim_v=128, window=4096)
        cost = cache_cost([sliding] * 32, BF16)
        assert cost.session_bytes(4096) == cost.session_bytes(131_072)
        assert "does not grow" in cost.notes[0]

    def test_shared_linear_and_attention_free_layers_store_nothing(self):
        full = LayerGeometry(kind="full", kv_heads=2, head_dim_k=64, head_dim_v=64)
        reader = LayerGeometry(kind="full", kv_heads=2, head_dim_k=64, head_dim_v=64, shared_with=0)
        cost = cache_cost([full, reader, LayerGeometry(kind="linear"), LayerGeometry(kind="none")], BF16)
        assert cost.bytes_per_token == 512
        assert cost.notes == (
            "1 of 4 layers read another layer's cache and store none.",
            "1 of 4 layers keep a recurrent state; its bytes are not counted.",
        )

    def test_keys_and_values_may_differ_in_width(self):
        layer = LayerGeometry(kind="full", kv_heads=4, head_dim_k=192, head_dim_v=128)
        assert cache_cost([layer], BF16).bytes_per_token == 4 * 2 * (192 + 128)

    def test_the_indexer_of_sparse_attention_is_billed_wide(self):
        layer = LayerGeometry(kind="mla", kv_heads=1, head_dim_k=512, head_dim_v=64, indexer_dim=128)
        assert cache_cost([layer], FLASHMLA).bytes_per_token == 656 + 256
        assert "indexer" in cache_cost([layer], FLASHMLA).notes[0]

    @pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
    def test_tensor_parallel_splits_heads_until_one_is_left(self, ranks, heads):
        cost = cache_cost(LLAMA_8B, BF16, tensor_parallel=ranks)
        assert cost.bytes_per_token == 32 * heads * 512
        assert bool(cost.notes) == (ranks > 8)

    def test_mla_latents_are_replicated(self):
        assert cache_cost([MLA], BF16, tensor_parallel=8).bytes_per_token == 1152
        assert cache_cost([MLA], BF16, tensor_parallel=8).notes == ("MLA latents are replicated on all 8 ranks.",)

    def test_heads_that_do_not_split_are_refused(self):
        with pytest.raises(UnsupportedError, match="8 KV heads don't split over 3 ranks"):
            cache_cost(LLAMA_8B, BF16, tensor_parallel=3)


class TestSessions:
    def test_a_session_that_fits_to_the_byte_is_counted(self):
        gpu = Gpu("exact", 10 * 131_072 * 16, "", "")
        result = sessions(cache_cost(LLAMA_8B, BF16), Budget(gpu, 0, reserve=0.1), context_length=16)
        assert (result.floored, result.fractional) == (9, 9.0)

    def test_tensor_parallel_splits_the_weights(self):
        cost = cache_cost(LLAMA_8B, BF16, tensor_parallel=2)
        budget = Budget(EIGHTY_GB, 140 * 10**9, reserve=0, tensor_parallel=2, workspace_bytes=10**9)
        result = sessions(cost, budget, context_length=16_384)
        assert result.free_bytes == 9 * 10**9
        assert result.floored == 9 * 10**9 // (65_536 * 16_384)
        assert result.gpus == 2

    def test_weights_that_do_not_fit_are_said(self):
        result = count(BF16, weights=80 * 10**9 + GIB)
        assert (result.floored, result.fractional, result.free_bytes) == (0, 0.0, -GIB)
        assert result.notes[0] == "The weights don't fit on 80gb: 1.0 GiB short."

    def test_table_has_every_scheme_and_length(self):
        table = sessions_table(LLAMA_8B, [BF16, FP8], [1000, 100_000], budget=Budget(EIGHTY_GB, 0, reserve=0))
        assert set(table) == {(s, n) for s in ("bf16", "fp8_e4m3") for n in (1000, 100_000)}
        assert table["fp8_e4m3", 100_000].floored == 80 * 10**9 // (65_536 * 100_000)

    @pytest.mark.parametrize(("length", "block"), [(0, 16), (16, 0)])
    def test_nonsense_sizes_are_refused(self, length, block):
        with pytest.raises(ConfigError):
            sessions(cache_cost(LLAMA_8B, BF16), Budget(EIGHTY_GB, 0), context_length=length, block_size=block)

    def test_a_model_without_a_cache_is_refused(self):
        with pytest.raises(ConfigError, match="not bound by a cache"):
            sessions(cache_cost([LayerGeometry(kind="linear")], BF16), Budget(EIGHTY_GB, 0), context_length=16)

    def test_budget_refuses_nonsense(self):
        with pytest.raises(ConfigError, match="reserve"):
            Budget(EIGHTY_GB, 0, reserve=1.0)
        with pytest.raises(ConfigError, match="tensor_parallel"):
            Budget(EIGHTY_GB, 0, tensor_parallel=0)

    def test_budget_from_a_capacity_block(self):
        config = CapacityConfig(gpu="h200-141gb", reserve=0.2, workspace_gib=1.5, tensor_parallel=2)
        budget = Budget.from_config(config, weights_bytes=GIB)
        assert budget == Budget(get_gpu("h200-141gb"), GIB, 0.2, 3 * GIB // 2, 2)

    @given(
        free=st.integers(0, 2**38),
        length=st.integers(1, 200_000),
        block=st.integers(1, 256),
        heads=st.integers(1, 16),
    )
    def test_the_count_fits_and_one_more_does_not(self, free, length, block, heads):
        layers = [LayerGeometry(kind="full", kv_heads=heads, head_dim_k=80, head_dim_v=96)] * 3
        cost = cache_cost(layers, NVFP4)
        budget = Budget(Gpu("g", free, "", ""), 0, reserve=0)
        result = sessions(cost, budget, context_length=length, block_size=block)
        assert result.floored * result.session_bytes <= free < (result.floored + 1) * result.session_bytes
        assert result.floored == math.floor(result.fractional) or math.isclose(result.floored, result.fractional)


class TestGpus:
    def test_drivers_figures(self):
        assert get_gpu("h100-80gb").memory_bytes == 81_559 * 2**20
        assert get_gpu("h200-141gb").memory_bytes == 143_771 * 2**20
        assert get_gpu("mi300x-192gb").memory_bytes == 206_141_652_992

    def test_reported_memory_is_near_what_is_sold(self):
        for gpu in known_gpus().values():
            sold = float(gpu.sold_as.removesuffix(" GB"))
            assert sold * 0.93e9 < gpu.memory_bytes < sold * 1.08e9, gpu.name
            assert gpu.name.endswith(f"-{sold:.0f}gb")

    def test_plain_sizes_tell_gb_from_gib(self):
        assert get_gpu("80gb").memory_bytes == 80 * 10**9
        assert get_gpu("80 GiB").memory_bytes == 80 * 2**30
        assert get_gpu("0.5gib").memory_bytes == 2**29

    def test_unknown_gpu_gets_suggestions(self):
        with pytest.raises(UnknownNameError, match=r"capacity\.gpu: unknown GPU 'h100-80g'.*\n.*h100-80gb"):
            get_gpu("h100-80g", where="capacity.gpu")


class TestExchangeRate:
    def rate(self, loss: Loss, *, scheme: KVScheme = FP8, weights: int = 16 * 10**9, **kwargs):
        arms = [count(s, weights=weights) for s in (scheme, BF16)]
        return exchange_rate(Comparison(loss, scheme=scheme.name, **kwargs), scheme=arms[0], baseline=arms[1])

    def test_the_sentence_to_decide_on(self):
        rate = self.rate(Loss(0.004, -0.006, 0.014))
        assert rate.sentence == (
            "fp8_e4m3 at 2k tokens: 9 sessions instead of 4 (2.2x); costs 0.004 ± 0.010 nats/token of answer "
            "NLL on niah_multikey (indistinguishable from zero at this n; could be as large as 0.014)"
        )

    def test_gain_is_of_whole_sessions_and_doubling_of_bytes(self):
        rate = self.rate(Loss(0.1, 0.05, 0.15))
        assert (rate.sessions, rate.baseline_sessions, rate.gain, rate.bytes_gain) == (9, 4, 2.25, 2.0)
        assert rate.loss_per_extra_session == 0.1 / 5
        assert rate.loss_per_doubling == 0.1

    def test_no_session_gained_has_no_price(self):
        rate = self.rate(Loss(0.1, 0.05, 0.15), scheme=BF16)
        assert (rate.loss_per_extra_session, rate.loss_per_doubling) == (None, None)

    def test_a_baseline_that_fits_none(self):
        rate = self.rate(Loss(0.1, 0.05, 0.15), weights=70 * 10**9)
        assert (rate.gain, rate.sessions, rate.bytes_gain) == (None, 1, 2.0)
        assert rate.sentence.startswith("fp8_e4m3 at 2k tokens: 1 session instead of none; costs")

    def test_decode_speed_is_said(self):
        def said(speedup: float) -> str:
            return exchange_rate(
                Comparison(Loss(0.1, 0.05, 0.15)),
                scheme=count(FP8),
                baseline=count(BF16),
                decode_speedup=speedup,
            ).sentence

        assert said(2.34).endswith("; decode 2.3x as fast")
        assert said(0.5).endswith("; decode 0.5x as fast")

    @pytest.mark.parametrize(
        ("loss", "metric", "words"),
        [
            (Loss(0.084, 0.072, 0.096), "answer_nll", "costs 0.084 ± 0.012 nats/token of answer NLL"),
            (Loss(0.004, 0.001, 0.007), "exact_match", "costs 0.40 ± 0.30 points of exact match"),
            (Loss(0.004, 0.0005, 0.009), "exact_match", "costs 0.40 (0.05 to 0.90) points of exact match"),
            (Loss(-0.02, -0.03, -0.01), "answer_nll", "better by 0.020 ± 0.010 nats/token of answer NLL"),
            (Loss(0.0, 0.0, 0.0), "exact_match", "costs 0 points of exact match (the same in every sample)"),
            (
                Loss(0.1234, defined=False),
                "answer_nll",
                "costs 0.123 nats/token of answer NLL (no interval: too few independent samples)",
            ),
            (Loss(None, defined=False), "answer_nll", "cost in answer NLL unknown: no complete pairs"),
        ],
    )
    def test_losses_in_words(self, loss, metric, words):
        assert format_loss(loss, METRICS[metric]) == words

    def test_intervals_show_two_digits_of_their_width(self):
        assert format_interval(12.3, 0.3, 24.3) == "12 ± 12"
        assert format_interval(1e-5, 0.0, 2e-5) == "0.000010 ± 0.000010"

    def test_tokens(self):
        lengths = (512, 2048, 131_072, 2**20, 3 * 2**20, 2**20 + 1024, 100_000)
        assert [format_tokens(n) for n in lengths] == ["512", "2k", "128k", "1M", "3M", "1025k", "100,000"]


def test_an_interval_never_shows_a_negative_zero():
    assert format_interval(-0.0001, -0.02, 0.02) == "0.000 ± 0.020"
    assert format_interval(-0.04, -0.05, -0.03) == "-0.040 ± 0.010"
