"""Attention to packed bytes equals attention to what they decode to, for every format, part, mask and history."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cache_tools import OPTIONS, SCHEMES, scheme
from tiny_models import (
    ALL_BUILDERS,
    WINDOW,
    generated,
    in_chunks,
    logits_of,
    packed,
    tiny_deepseek_v3,
    tiny_gemma3,
    tiny_llama,
    tokens,
)
from torch import Tensor, nn
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

import kveval.attention
import kveval.packed_layer
import kveval.storage
from kveval.attention import PACKED_PATH, PREFILL_PATH, REFERENCE_PATH, attention, path_text, recorded_paths
from kveval.cache import QuantizedCache
from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.spec import KVScheme, build_scheme
from kveval.kernel_use import KernelUse, format_problem
from kveval.kernels import ops
from kveval.masks import causal_mask
from kveval.packed_kv import PackedKV

HEADS, QUERY_HEADS, D = 2, 6, 64
SHAPE: dict[str, Any] = {
    "num_attention_heads": QUERY_HEADS, "num_key_value_heads": HEADS, "head_dim": D, "hidden_size": 96,
}  # fmt: skip
FULL = LlamaConfig(num_hidden_layers=1, **SHAPE)
SLIDING = Gemma3TextConfig(
    num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=WINDOW, **SHAPE
)  # fmt: skip

_INT4 = {
    "element": "uint4",
    "granularity": "per_group",
    "group_size": 32,
    "scale_rule": "minmax",
    "scale_dtype": "fp16",
}
PARTS: dict[str, dict[str, Any]] = {
    "parts_of_keys_and_values_differ": {"extends": "k16v8", "sink_tokens": 3, "residual_length": 10},
    "values_alone_are_wide": {
        "key": "nvfp4", "value": {"element": "bf16"}, "sink_tokens": 3, "residual_length": 10,
    },
    "hadamard_in_parts": {"extends": "nvfp4_hadamard", "sink_tokens": 3, "residual_length": 10},
    "mean_shift_in_parts": {"extends": "int4_g64_mean_shift", "sink_tokens": 3, "residual_length": 10},
    "mean_shift_of_values": {"key": "int8_per_token_head", "value": {**_INT4, "transform": "mean_shift"}},
    "mean_shift_of_both_in_parts": {
        "both": {**_INT4, "transform": "mean_shift"}, "sink_tokens": 3, "residual_length": 10,
    },
    "one_side_rotated": {"key": "int4_g64_hadamard", "value": "fp8_per_token_head"},
}  # fmt: skip
"""Where parts of a sequence, or its two sides, are stored in different ways."""


def built(name: str) -> KVScheme:
    return build_scheme(name, PARTS[name]) if name in PARTS else scheme(name)


def problem(name: str) -> str:
    layer = QuantizedCache(FULL, built(name)).packed_layers[0]
    return format_problem(layer.format, layer.shape)


ALL = (*SCHEMES, *PARTS)
COVERED = tuple(name for name in ALL if not problem(name))
REFUSED = tuple(name for name in ALL if problem(name))
IN_PARTS = ("sinks", "residual", "sinks_residual", *PARTS)


@functools.cache
def numbers(role: str, batch: int = 2) -> Tensor:
    """float32 [batch, HEADS, 400, D] with channels of different size and offset, as keys have."""
    generator = torch.Generator().manual_seed("kvq".index(role))
    heads = QUERY_HEADS if role == "q" else HEADS
    x = torch.randn(batch, 400, heads, D, generator=generator)
    return (x * torch.linspace(0.2, 1.5, D) + torch.linspace(-1, 1, D)).transpose(1, 2)


@dataclass(frozen=True)
class Case:
    """A layer that is filled up to each of `stops`, and attended to by the last write's queries, or a part of them."""

    name: str
    stops: tuple[int, ...] = (40, 100, 103)
    sliding: bool = False
    padding: tuple[int, int] | None = None
    told: bool = True
    dtype: torch.dtype = torch.float32
    reads: Any = "stored"
    softcap: float | None = None
    sinks: bool = False

    def run(self, mode: str) -> tuple[Tensor, str, list[int]]:
        """Output of the last write's attention, its path, and reads."""
        last = self.stops[-1]
        seen = None if self.padding is None else torch.arange(last) >= torch.tensor(self.padding)[:, None]
        config = SLIDING if self.sliding else FULL
        cache = QuantizedCache(
            config, built(self.name), attention=mode, reads=self.reads, padding_mask=seen if self.told else None
        )  # fmt: skip
        out, start = torch.empty(0), 0
        for stop in self.stops:
            q, k, v = (numbers(role)[:, :, start:stop].to(self.dtype) for role in "qkv")
            kept, dropped = cache.get_mask_sizes(stop - start, 0)
            window = WINDOW if self.sliding else None
            mask = causal_mask(
                batch_size=2, q_length=stop - start, kv_length=kept, q_offset=start, kv_offset=dropped,
                mask_function=causal_mask_function if window is None else sliding_window_causal_mask_function(window),
                local_size=window, attention_mask=None if seen is None else seen[:, :stop],
            )  # fmt: skip
            handles = cache.update(k, v, 0)
            sinks = torch.linspace(-1, 2, QUERY_HEADS) if self.sinks else None
            with recorded_paths() as paths:
                out, _ = attention(nn.Module(), q, *handles, mask, softcap=self.softcap, s_aux=sinks, scaling=0.1)
            start = stop
        cache.check_finite()
        assert out.is_contiguous()
        return out, path_text(paths), cache.tokens_read()

    def check(self, path: str = REFERENCE_PATH, tolerance: float = 1e-5) -> None:
        got, taken, reads = self.run("packed")
        expected, other, expected_reads = self.run("dequant")
        assert (taken, other.split(" ")[0]) == (path, "dequantize")
        assert reads == expected_reads
        assert (got.dtype, got.shape) == (self.dtype, expected.shape)
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


class TestEqualsDequantized:
    @pytest.mark.parametrize("name", COVERED)
    @pytest.mark.parametrize("stops", [(1,), (5,), (40, 100, 101), (40, 100, 103)], ids=str)
    def test_every_format(self, name: str, stops: tuple[int, ...]) -> None:
        Case(name, stops).check()

    @pytest.mark.parametrize("name", COVERED)
    def test_a_prompt_block_by_block(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kveval.prefill_attention.BLOCK", 32)
        Case(name, (130,)).check(PREFILL_PATH)
        Case(name, (50, 115, 200)).check(PREFILL_PATH)

    @pytest.mark.parametrize("name", [*IN_PARTS, "bf16", "nvfp4", "nvfp4_mean_shift"])
    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("softcap", [None, 1.5])
    @pytest.mark.parametrize("stops", [(2,), (12,), (40, 100, 107), (40, 140)], ids=str)
    def test_parts_with_sinks_and_caps(
        self, name: str, sinks: bool, softcap: float | None, stops: tuple[int, ...]
    ) -> None:
        case = Case(name, stops, sinks=sinks, softcap=softcap)
        if softcap is not None and built(name).key.transform == "mean_shift":
            with pytest.raises(UnsupportedError, match=r"layer 0 can't .* scores are capped, and its keys are stored"):
                case.run("packed")
        else:
            case.check(REFERENCE_PATH if sinks or softcap or stops != (40, 140) else PREFILL_PATH)

    @pytest.mark.parametrize("name", ["bf16", "sliding", "sliding_nvfp4"])
    @pytest.mark.parametrize("stops", [(100,), (6, 30, 31), (80, 200, 203), (300, 380)], ids=str)
    @pytest.mark.parametrize("padding", [None, (0, 11)])
    def test_windows(self, name: str, stops: tuple[int, ...], padding: tuple[int, int] | None) -> None:
        Case(name, stops, sliding=True, padding=padding).check()

    @pytest.mark.parametrize("name", COVERED)
    @pytest.mark.parametrize("stops", [(30, 50), (5, 30, 31)], ids=str)
    def test_left_padding(self, name: str, stops: tuple[int, ...]) -> None:
        """Rows are stored one by one; a first piece may be padding alone."""
        Case(name, stops, padding=(3, 14)).check()
        Case(name, stops, padding=(0, 14), sinks=True).check()

    @pytest.mark.parametrize("name", [*IN_PARTS, "bf16", "int4_g32"])
    def test_left_padding_that_is_stored_like_tokens(self, name: str) -> None:
        if built(name).sink_tokens or any(side.freezes for side in (built(name).key, built(name).value)):
            with pytest.raises(UnsupportedError, match="left padding, which would enter"):
                Case(name, (50,), padding=(0, 14), told=False).run("packed")
        else:
            Case(name, (20, 50), padding=(2, 14), told=False).check()
            Case(name, (50, 51), padding=(0, 14), told=False).check()

    @pytest.mark.parametrize("name", [*IN_PARTS, "bf16", "nvfp4"])
    @pytest.mark.parametrize("stops", [(17,), (40, 100, 107), (40, 140)], ids=str)
    @pytest.mark.parametrize("padding", [None, (3, 14)])
    def test_a_raw_chunk(self, name: str, stops: tuple[int, ...], padding: tuple[int, int] | None) -> None:
        """Only bfloat16 models: their raw tokens are a part like any other."""
        path = PREFILL_PATH if stops == (40, 140) and padding is None else REFERENCE_PATH
        case = Case(name, stops, dtype=torch.bfloat16, reads="fresh_chunk", padding=padding)
        case.check(path, tolerance=0.01)

    def test_a_query_that_sees_nothing_gets_nothing(self) -> None:
        """Rows of padding, in a chunk of their own and beside tokens."""
        for told in (True, False):
            out, _, _ = Case("int4_g32", (10,), padding=(0, 7), told=told).run("packed")
            assert torch.isfinite(out).all()
            assert not out[1, :7].any()
            assert out[1, 7:].any()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("name", ["fp8_per_token_head", "sinks_residual", "nvfp4_hadamard"])
    def test_in_the_models_dtype(self, name: str, dtype: torch.dtype) -> None:
        Case(name, dtype=dtype).check(tolerance={torch.float64: 1e-6, torch.float16: 2e-3}.get(dtype, 0.015))


FAMILIES = tuple(name for name in ALL_BUILDERS if "deepseek" not in name and name != "llama4")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["bf16", "fp8_per_token_head"])
def test_every_family(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, with windows that free tokens on the way, and a prompt at once."""
    monkeypatch.setattr(kveval.packed_layer, "TILE", 2)
    monkeypatch.setattr(kveval.packed_layer, "CROP_RESERVE", 0)
    model, runs = packed(ALL_BUILDERS[family](torch.float32 if family == "gemma2" else torch.float64)), {}
    for mode in ("dequant", "packed"):
        cache = QuantizedCache(model.config, scheme(name), attention=mode)
        with recorded_paths() as paths:
            logits = [in_chunks(model, tokens(27), cache, 9), logits_of(model, tokens(70, seed=1), cache)]
            logits.append(in_chunks(model, tokens(2, seed=2), cache, 1))
        runs[mode] = torch.cat(logits, dim=1), cache.tokens_read(), cache.stored_bytes()
    assert set(paths.values()) == {REFERENCE_PATH}
    (got, *counts), (expected, *expected_counts) = runs["packed"], runs["dequant"]
    assert (got - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())
    assert counts == expected_counts


@functools.cache
def llama() -> Any:
    return packed(tiny_llama(head_dim=D))


class TestHistories:
    """Whatever happened to a cache, both ways of reading it agree on what follows."""

    @pytest.mark.parametrize("name", ["int4_g64", "nvfp4", "sinks_residual", "nvfp4_mean_shift"])
    def test_crop_branch_fork_and_chosen_rows(self, name: str) -> None:
        runs = []
        for mode in ("packed", "dequant"):
            cache = QuantizedCache(llama().config, scheme(name), attention=mode)
            seen = [logits_of(llama(), tokens(50, batch=3), cache)]
            cache.crop(0)
            seen.append(in_chunks(llama(), tokens(30, seed=1, batch=3), cache, 11))
            cache.crop(-20)
            with cache.branch():
                seen.append(logits_of(llama(), tokens(9, seed=2, batch=3), cache))
                cache.reorder_cache(torch.tensor([2, 0, 0]))
                seen.append(logits_of(llama(), tokens(2, seed=3, batch=3), cache))
            twin = cache.fork()
            twin.batch_select_indices(torch.tensor([1]))
            seen.append(in_chunks(llama(), tokens(5, seed=4), twin, 1).expand(3, -1, -1))
            seen.append(logits_of(llama(), tokens(4, seed=5, batch=3), cache))
            runs.append(torch.cat(seen, dim=1))
        assert (runs[0] - runs[1]).abs().max() <= 2e-3 * (runs[1].max() - runs[1].min())

    @pytest.mark.parametrize("name", ["bf16", "int4_g64", "sinks"])
    @pytest.mark.parametrize(
        "options",
        [{"num_beams": 3, "num_return_sequences": 3}, {"prompt_lookup_num_tokens": 4}],
        ids=["beams", "drafts"],
    )
    def test_generation(self, name: str, options: dict[str, Any]) -> None:
        ids = tokens(6, seed=4).repeat(1, 5)
        runs = [
            generated(llama(), ids, QuantizedCache(llama().config, scheme(name), attention=mode), **options)
            for mode in ("packed", "dequant")
        ]
        assert runs[0].sequences.tolist() == runs[1].sequences.tolist()

    @pytest.mark.parametrize("name", ["int4_g64", "sinks_residual"])
    def test_left_padded_generation(self, name: str) -> None:
        ids, mask = tokens(20, seed=2, batch=3), torch.ones(3, 20, dtype=torch.long)
        for row, padding in enumerate((0, 5, 13)):
            ids[row, :padding], mask[row, :padding] = 0, 0
        runs = []
        for mode in ("packed", "dequant"):
            cache = QuantizedCache(llama().config, scheme(name), attention=mode, padding_mask=mask)
            runs.append(generated(llama(), ids, cache, attention_mask=mask))
        assert runs[0].sequences.tolist() == runs[1].sequences.tolist()


class TestWhatIsCalled:
    def test_one_append_per_layer_and_one_decode_per_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        for name in ("append", "decode", "dequantize"):
            function = getattr(ops, name)
            monkeypatch.setattr(
                ops, name, lambda *args, _name=name, _function=function: (calls.append(_name), _function(*args))[1]
            )
        for name, parts in (("fp8_per_token_head", 1), ("k8v4", 1), ("sinks_residual", 3)):
            cache = QuantizedCache(llama().config, scheme(name), attention="packed")
            logits_of(llama(), tokens(50), cache)
            assert calls == ["append", *["decode"] * parts] * 2
            calls.clear()
            logits_of(llama(), tokens(1), cache)
            assert calls == ["append", *["decode"] * parts] * 2
            calls.clear()
        cache = QuantizedCache(llama().config, "int4_g64", attention="packed")
        logits_of(llama(), tokens(100), cache)
        assert calls == ["append", "dequantize", "dequantize"] * 2

    def test_a_constant_scale_is_made_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, scales = [], {"source": "test", "key": {0: [0.01, 0.02]}, "value": {0: [0.01, 0.02]}}
        built = build_scheme("x", {"extends": "fp8_per_head", "scales": scales})
        tensor_scale = kveval.storage.tensor_scale
        monkeypatch.setattr(kveval.storage, "tensor_scale", lambda *x: made.append(x) or tensor_scale(*x))
        cache = QuantizedCache(FULL, built, attention="packed")
        for start in range(0, 40, 4):
            q, k, v = (numbers(role)[:, :, start : start + 4] for role in "qkv")
            attention(nn.Module(), q[:, :, :1], *cache.update(k, v, 0), None)
        assert len(made) == 2

    def test_auto_decodes_first_on_a_cpu(self) -> None:
        with recorded_paths() as paths:
            logits_of(llama(), tokens(5), QuantizedCache(llama().config, "nvfp4"))
        assert path_text(paths) == "dequantize + torch sdpa"


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    def test_formats_without_a_kernel_name_their_layer(self, name: str) -> None:
        with pytest.raises(
            UnsupportedError, match=r"layer 0 can't be attended to as packed bytes: (keys|values): "
        ) as e:
            QuantizedCache(FULL, built(name), attention="packed")
        assert "attention: auto" in e.value.remedy

    def test_the_first_layer_that_has_none_is_named(self) -> None:
        mixed = build_scheme("x", {"extends": "int4_g64", "layers": [{"layers": [1], "key": "q4_0"}]})
        with pytest.raises(UnsupportedError, match="layer 1 can't be attended to as packed bytes: keys: kernels "):
            QuantizedCache(llama().config, mixed, attention="packed")

    def test_latents(self) -> None:
        with pytest.raises(UnsupportedError, match=r"layer 0 can't .* makes keys and values of the latents"):
            QuantizedCache(tiny_deepseek_v3().config, "fp8_per_token_head", attention="packed")

    def test_chunked_attention(self) -> None:
        model = packed(ALL_BUILDERS["llama4"]())
        with pytest.raises(
            UnsupportedError, match=r"layer 0 can't .*: its mask is neither causal nor a sliding window"
        ):
            logits_of(model, tokens(20), QuantizedCache(model.config, "bf16", attention="packed"))

    def test_raw_chunks_in_another_dtype(self) -> None:
        with pytest.raises(UnsupportedError, match=r"layer 0 can't .* read raw, in float32, and kernels read bfloat16"):
            Case("bf16", reads="fresh_chunk").run("packed")

    def test_gradients(self) -> None:
        handles = QuantizedCache(FULL, "bf16", attention="packed").update(numbers("k"), numbers("v"), 0)
        query = numbers("q")[:, :, :1].clone().requires_grad_()
        with pytest.raises(UnsupportedError, match=r"layer 0 can't .* gradients are on"):
            attention(nn.Module(), query, *handles, None)
        with torch.no_grad():
            attention(nn.Module(), query, *handles, None)

    def test_attention_that_is_not_causal(self) -> None:
        handles = QuantizedCache(FULL, "bf16", attention="packed").update(numbers("k"), numbers("v"), 0)
        with pytest.raises(UnsupportedError, match=r"layer 0 can't .* is not causal"):
            attention(nn.Module(), numbers("q"), *handles, None, is_causal=False)


class TestRecordedReasons:
    """Where a GPU decodes first although nobody asked it to, the record says why."""

    def path(self, monkeypatch: pytest.MonkeyPatch, case: Case, problem: str = "") -> str:
        use = KernelUse("auto", "layer 0", (not problem, not problem), problem)
        monkeypatch.setattr(kveval.packed_layer, "kernel_use", lambda *args, **kwargs: use)
        monkeypatch.setattr(kveval.attention, "_on_gpu", lambda tensor: True)
        return case.run("auto")[1]

    def test_of_a_format(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.path(monkeypatch, Case("kivi4"), "no such kernel")
        assert path == "dequantize + torch sdpa (no kernel: no such kernel)"
        path = self.path(monkeypatch, Case("bf16", softcap=2.0), "no such kernel")
        assert path == "dequantize + float32 softmax (no kernel: no such kernel)"

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"softcap": 2.0}, "a prompt with capped scores or attention sinks"),
            ({"sliding": True}, "a prompt with a sliding window"),
            ({"padding": (0, 3)}, "a prompt in a batch with left padding"),
        ],
    )
    def test_of_a_prompt(self, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.path(monkeypatch, Case("bf16", (100,), **changes))
        assert path.endswith(f"(no kernel: {reason})")
        assert self.path(monkeypatch, Case("bf16", (100, 101), **changes)) == PACKED_PATH

    def test_of_tensors_that_came_unpacked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kveval.attention, "_on_gpu", lambda tensor: True)
        with recorded_paths() as paths:
            attention(nn.Module(), *(numbers(role)[:, :, :3] for role in "qkv"), None)
        assert path_text(paths) == "dequantize + torch sdpa (no kernel: keys and values came unpacked)"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["bf16", "fp8_per_token_head", "sinks", "residual", "nvfp4_hadamard"])
class TestNonFinite:
    """Kernels note what is not finite; whoever looks next hears of it, with the layer and the role."""

    def cache(self, name: str, value: float, at: int) -> QuantizedCache:
        cache = QuantizedCache(llama().config, scheme(name), attention="packed")
        bad = torch.ones(1, 2, 60, D)
        bad[0, 1, at, 3] = value
        cache.update(torch.ones_like(bad), bad, 1)
        return cache

    @pytest.mark.parametrize("at", [0, 30, 59])
    def test_in_every_part(self, name: str, value: float, at: int) -> None:
        with pytest.raises(MeasurementError, match="values of layer 1 got NaN or infinity"):
            self.cache(name, value, at).check_finite()

    def test_at_the_next_forward(self, name: str, value: float) -> None:
        cache = self.cache(name, value, 7)
        with pytest.raises(MeasurementError, match="values of layer 1"):
            cache.update(torch.ones(1, 2, 1, D), torch.ones(1, 2, 1, D), 0)

    def test_a_fork_knows_and_a_reset_forgets(self, name: str, value: float) -> None:
        cache = self.cache(name, value, 7)
        twin = cache.fork()
        cache.reset()
        cache.check_finite()
        with pytest.raises(MeasurementError, match="values of layer 1"):
            twin.check_finite()

    def test_a_branch_tells_and_forgets(self, name: str, value: float) -> None:
        cache = QuantizedCache(llama().config, scheme(name), attention="packed")
        good = torch.ones(1, 2, 60, D)
        for layer in range(2):
            cache.update(good, good, layer)
        with pytest.raises(MeasurementError, match="keys of layer 0"), cache.branch():
            cache.update(good * value, good, 0)
        cache.check_finite()
        assert {layer.get_seq_length() for layer in cache.packed_layers} == {60}


def test_a_handle_still_decodes_for_any_operation() -> None:
    cache = QuantizedCache(llama().config, "nvfp4", attention="packed")
    k, _ = cache.update(numbers("k"), numbers("v"), 0)
    plain, _ = QuantizedCache(llama().config, "nvfp4").update(numbers("k"), numbers("v"), 0)
    assert isinstance(k, PackedKV)
    assert torch.equal(k * 1, plain * 1)
    assert torch.equal(k.rows(3, 50), plain[:, :, 3:50])


def test_every_option_is_covered_or_refused() -> None:
    assert {"bf16", "fp8_per_head", "k8v4", "k16v4", "mxfp4", "sinks_residual", *PARTS} <= set(COVERED)
    assert {"kivi4", "q4_0", "crush", "mixed"} <= set(REFUSED)
    assert set(OPTIONS) <= {*COVERED, *REFUSED}
    assert tiny_gemma3 in ALL_BUILDERS.values()
