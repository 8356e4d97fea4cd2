"""A model that decodes through the kernels themselves, run on the CPU: from the cache's update to the logits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from emulator.emulator import EmulatorLauncher
from tiny_models import in_chunks, logits_of, packed, tiny_gemma3, tiny_llama, tokens

from kveval.attention import recorded_paths
from kveval.cache import QuantizedCache
from kveval.errors import MeasurementError
from kveval.formats.spec import build_scheme
from kveval.kernels import ops
from kveval.kernels.append import append_cuda
from kveval.kernels.decode import decode_cuda
from kveval.kernels.dequantize import dequantize_cuda

SCHEMES: dict[str, dict[str, Any]] = {
    "bf16": {"extends": "bf16"},
    "fp8": {"extends": "fp8_per_token_head"},
    "k8v4": {"extends": "k8v4"},
    "in parts": {"extends": "nvfp4_hadamard", "sink_tokens": 2, "residual_length": 5},
}


@pytest.fixture
def launches(emulator: EmulatorLauncher, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The cache's calls go to the kernels instead of their reference; counts the launches of each."""
    seen: Counter[str] = Counter()
    launch = emulator.launch

    def counted(variant: Any, **options: Any) -> None:
        seen[variant.entry] += 1
        launch(variant, **options)

    def decode(*args: Any) -> Any:
        return decode_cuda(*args, 0)

    monkeypatch.setattr(emulator, "launch", counted)
    for name, function in (("append", append_cuda), ("decode", decode), ("dequantize", dequantize_cuda)):
        monkeypatch.setattr(ops, name, function)
    return seen


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_decoding_first(name: str, launches: Counter[str]) -> None:
    """Two layers, four query heads on two KV heads of 64; a prompt and single tokens after it."""
    model, scheme = packed(tiny_llama(torch.bfloat16, head_dim=64)), build_scheme(name, SCHEMES[name])
    ids, rest = tokens(9), tokens(3, seed=1)
    cache = QuantizedCache(model.config, scheme, attention="packed")
    with recorded_paths() as paths:
        got = [logits_of(model, ids, cache), in_chunks(model, rest, cache, 1)]
    assert set(paths.values()) == {"packed reference"}
    parts = 3 if name == "in parts" else 1
    assert launches == {"append": 4 * 2, "decode": 4 * 2 * parts}
    cache.check_finite()
    launches.clear()
    expected_cache = QuantizedCache(model.config, scheme, attention="dequant")
    expected = [logits_of(model, ids, expected_cache), in_chunks(model, rest, expected_cache, 1)]
    assert not launches
    got_logits, expected_logits = torch.cat(got, dim=1), torch.cat(expected, dim=1)
    # A bfloat16 sum that rounds the other way tips codes of the next layer.
    assert (got_logits - expected_logits).abs().max() <= 0.05 * (expected_logits.max() - expected_logits.min())
    first, other = (c.packed_layers[0].stores()[0] for c in (cache, expected_cache))
    for part, tensor in first.parts().items():  # type: ignore[attr-defined]
        assert torch.equal(tensor, other.parts()[part]), part  # type: ignore[attr-defined]


def test_a_prompt_in_blocks(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kveval.prefill_attention.BLOCK", 16)
    model = packed(tiny_llama(torch.bfloat16, head_dim=64))
    runs = []
    for mode in ("packed", "dequant"):
        cache = QuantizedCache(model.config, "int4_g64", attention=mode)
        logits_of(model, tokens(40), cache)
        launches.clear()
        runs.append(logits_of(model, tokens(65, seed=1), cache))
        if mode == "packed":
            # Two layers, keys and values, three blocks of the past and the chunk itself.
            assert launches == {"append": 2, "dequantize": 2 * 2 * 4}
    assert (runs[0] - runs[1]).abs().max() <= 0.05 * (runs[1].max() - runs[1].min())


def test_left_padding_and_windows(launches: Counter[str]) -> None:
    """Rows that are stored one by one, in layers of both kinds."""
    model = packed(tiny_gemma3(torch.bfloat16, head_dim=64))
    ids, mask = tokens(14, batch=2), torch.ones(2, 14, dtype=torch.long)
    ids[1, :5], mask[1, :5] = 0, 0
    runs = []
    for mode in ("packed", "dequant"):
        cache = QuantizedCache(model.config, "nvfp4", attention=mode, padding_mask=mask)
        logits = [logits_of(model, ids[:, :13], cache, attention_mask=mask[:, :13])]
        logits.append(logits_of(model, ids[:, 13:], cache, attention_mask=mask))
        runs.append(torch.cat(logits, dim=1)[mask.bool()])
    assert launches == {"append": 2 * 3 * 2, "decode": 2 * 3 * 2}
    assert (runs[0] - runs[1]).abs().max() <= 0.05 * (runs[1].max() - runs[1].min())


def test_nan_is_noted_by_the_kernel(launches: Counter[str]) -> None:
    model = packed(tiny_llama(torch.bfloat16, head_dim=64))
    model.model.layers[1].self_attn.v_proj.weight[70, 3] = float("nan")
    cache = QuantizedCache(model.config, "fp8_per_token_head", attention="packed")
    logits_of(model, tokens(4), cache)
    with pytest.raises(MeasurementError, match="values of layer 1 got NaN or infinity"):
        cache.check_finite()
