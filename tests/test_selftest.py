"""The self-test passes where kveval is right, and fails where something is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ALL_BUILDERS, BUILDERS, VOCABULARY, loaded, tiny_llama

from kveval import selftest
from kveval.attention import ATTENTION
from kveval.backends.hf import HFBackend
from kveval.cache import QuantizedCache
from kveval.config import ModelConfig
from kveval.errors import MeasurementError
from kveval.formats.spec import get_scheme
from kveval.models import load
from kveval.plan import Arm
from kveval.storage import PackedStore


class Bytes:
    """A stand-in tokenizer: one token per byte, ids below the tiny vocabulary."""

    def __init__(self, first: int = 1) -> None:
        self.first = first

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.first, *(1 + b % (VOCABULARY - 1) for b in text.encode())]}


def backend_of(model: Any, **kwargs: Any) -> HFBackend:
    return HFBackend(loaded(model, Bytes(**kwargs)))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in ALL_BUILDERS), *((family, torch.bfloat16) for family in BUILDERS)],
    ids=str,
)
def test_passes_on_every_family(family: str, dtype: torch.dtype) -> None:
    """Capped scores, attention sinks, windows, chunks, latents, shared and recurrent layers included."""
    backend = backend_of(ALL_BUILDERS[family](dtype))
    result = selftest.check(backend)
    assert result["plain"] == result["packed"]
    assert len(result["plain"]) == selftest.NEW_TOKENS
    assert 0 <= result["max_logit_difference"] <= result["tolerance"]
    assert result["closest_call"] >= 0
    assert result["attention_path"].startswith("dequantize")
    json.dumps(result)
    assert backend.loaded.model.config._attn_implementation == ATTENTION


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gemma3n"])
def test_what_a_sweep_attends_by_is_what_is_tested(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where caches are attended to packed without being asked; the reference stays what it is."""
    backend = backend_of(ALL_BUILDERS[family]())
    arms = []
    new_cache = backend.new_cache

    def packed_if_auto(arm: Arm) -> QuantizedCache:
        arms.append(arm.attention)
        return new_cache(replace(arm, attention="packed") if arm.attention == "auto" else arm)

    monkeypatch.setattr(backend, "new_cache", packed_if_auto)
    result = selftest.check(backend)
    assert result["plain"] == result["packed"]
    assert result["attention_path"] == "packed reference"
    assert sorted(arms) == ["auto", "dequant"]


def test_passes_on_a_model_from_disk(tiny_model: Path) -> None:
    result = selftest.check(HFBackend(load(ModelConfig(id=str(tiny_model)), device="cpu")))
    assert result["plain"] == result["packed"]


def test_a_prompt_that_starts_with_token_0_is_not_taken_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokenizers put a BOS of id 0 first, and transformers masks what looks like padding if left to guess."""
    monkeypatch.setattr(selftest, "PROMPT", "ab")
    result = selftest.check(backend_of(tiny_llama(), first=0))
    assert result["plain"] == result["packed"]


def test_an_end_token_does_not_cut_the_plain_run_short() -> None:
    model = tiny_llama()
    first = selftest.check(backend_of(model))["plain"][0]
    model.generation_config.eos_token_id = first
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    assert selftest.check(backend_of(model))["plain"][0] == first
    assert model.generation_config.eos_token_id == first


def test_fails_on_a_lossy_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "get_scheme", lambda name: get_scheme("crush"))
    with pytest.raises(MeasurementError, match="does not reproduce plain transformers"):
        selftest.check(backend_of(tiny_llama()))


@pytest.mark.parametrize("fault", ["zeros", "shifted", "swapped heads"])
def test_fails_when_reads_return_something_else(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = PackedStore.read
    change = {
        "zeros": torch.zeros_like,
        "shifted": lambda x: x.roll(1, dims=2),
        "swapped heads": lambda x: x.flip(1),
    }[fault]
    monkeypatch.setattr(PackedStore, "read", lambda self, snapshot, dtype: change(read(self, snapshot, dtype)))
    backend = backend_of(tiny_llama())
    with pytest.raises(MeasurementError, match="does not reproduce plain transformers"):
        selftest.check(backend)
    assert backend.loaded.model.config._attn_implementation == ATTENTION


def test_the_attention_is_restored_when_the_plain_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(tiny_llama())

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(backend.loaded.model, "generate", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        selftest.check(backend)
    assert backend.loaded.model.config._attn_implementation == ATTENTION
