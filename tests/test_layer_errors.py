"""Errors by layer: right against transformers' own attention, on every kind of layer, and recorded once per run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ALL_BUILDERS, RoundingCache, loaded, logits_of, tiny_gemma3n, tiny_llama, tiny_qwen2, tokens
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kveval import layer_errors
from kveval.attention import ATTENTION, cache_argument
from kveval.backends.hf import HFBackend
from kveval.cache import QuantizedCache
from kveval.config import SweepConfig
from kveval.errors import MeasurementError, StoreError
from kveval.evaluate import evaluate
from kveval.formats.spec import get_scheme
from kveval.layer_errors import measure
from kveval.layer_note import NOTE, LayerError, LayerErrors, read_layer_errors
from kveval.plan import Arm
from kveval.run import run_sweep
from kveval.store import read_records

TOKENS = 160


def arms(*schemes: str, chunk: int = 2048) -> list[Arm]:
    roles = [("bf16", "baseline"), *((s, "crush" if s == "crush" else "scheme") for s in schemes)]
    return [Arm(name, role, get_scheme(name), chunk, "stored") for name, role in roles]  # type: ignore[arg-type]


def backend_of(model: Any) -> HFBackend:
    return HFBackend(loaded(model))


def errors(model: Any, *schemes: str, chunk: int = 2048, length: int = TOKENS) -> dict[tuple[str, int], LayerError]:
    rows = measure(backend_of(model), arms(*schemes, chunk=chunk), tokens(length)[0].tolist())
    return {(row.scheme, row.layer): row for row in rows}


class NarrowCache(DynamicCache):
    """transformers' own cache, handing out what a scheme's storage reads back."""

    def __init__(self, model: Any, scheme: str) -> None:
        super().__init__(config=model.config)
        self.packed = QuantizedCache(model.config, scheme)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        handles = self.packed.update(key_states, value_states, layer_idx)
        self.seen.append((handles[0].dequantize(), handles[1].dequantize()))
        return self.seen[-1]


def eager(model: Any, cache: Any) -> Tensor:
    """float64 [Hq, T, T]: the first layer's attention probabilities, by transformers' own code."""
    model.set_attn_implementation("eager")
    ids = tokens(TOKENS)
    return model(input_ids=ids, output_attentions=True, **{cache_argument(model): cache}).attentions[0][0].double()


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["nvfp4", "kivi2", "crush"])
def test_the_first_layer_agrees_with_transformers_own_attention(scheme: str) -> None:
    model = tiny_llama()
    cache, narrow = NarrowCache(model, "bf16"), NarrowCache(model, scheme)
    p, p_narrow = (eager(model, c)[:, -layer_errors.PROBED_QUERIES :] for c in (cache, narrow))
    (k, v), (k_narrow, v_narrow) = (tuple(x.double() for x in c.seen[0]) for c in (cache, narrow))
    out, v_heads, narrow_heads = (
        p @ v.repeat_interleave(2, 1),
        v.repeat_interleave(2, 1),
        v_narrow.repeat_interleave(2, 1),
    )
    seen = p > 0
    kl = (p[seen] * (p[seen].log() - p_narrow[seen].log())).sum() / (p.shape[0] * p.shape[1])
    error, mean = k - k_narrow, k.mean(2, keepdim=True)
    expected = {
        "key_error": error.norm() / k.norm(),
        "key_difference_error": (error - error.mean(2, keepdim=True)).norm() / (k - mean).norm(),
        "value_error": (v - v_narrow).norm() / v.norm(),
        "attention_kl": kl,
        "output_error": (out - p_narrow @ narrow_heads).norm() / out.norm(),
        "output_error_keys": (out - p_narrow @ v_heads).norm() / out.norm(),
        "output_error_values": (out - p @ narrow_heads).norm() / out.norm(),
        "key_bias_ratio": mean.abs().max() / k.std(2, correction=0).median(),
    }
    found = errors(tiny_llama(), scheme)[scheme, 0]
    assert (found.kind, found.role) == ("full", "crush" if scheme == "crush" else "scheme")
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(float(value), rel=2e-4), name
        assert value > 0.001


@pytest.mark.parametrize("family", ALL_BUILDERS)
def test_the_attention_tried_on_other_keys_is_the_models_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the baseline's keys and values it gives what the model's attention gave, in every kind of layer."""
    backend = backend_of(ALL_BUILDERS[family]())
    ran, tried = [], []
    attention, compare = ALL_ATTENTION_FUNCTIONS[ATTENTION], layer_errors._attention_errors

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = attention(*args, **kwargs)
        ran.append(out[0][:, -layer_errors.PROBED_QUERIES :].transpose(1, 2))
        return out

    def compared(wide: Any, narrow: Any) -> dict[str, float]:
        tried.append(wide.out)
        return compare(wide, narrow)

    monkeypatch.setattr(layer_errors, "_attention_errors", compared)
    AttentionInterface.register(ATTENTION, watched)
    try:
        rows = measure(backend, arms("int8_per_token_head"), tokens(TOKENS)[0].tolist())
    finally:
        AttentionInterface.register(ATTENTION, attention)
    assert len(rows) == len(tried) == len(ran) > 0
    for own, again in zip(ran, tried, strict=True):
        torch.testing.assert_close(own, again, rtol=0, atol=2e-6 * float(own.abs().max()))
    assert any(row.output_error > 0 for row in rows) or {row.kind for row in rows} == {"sliding"}


def test_sliding_layers_that_stay_wide_have_no_error() -> None:
    found = errors(ALL_BUILDERS["gemma3"](), "nvfp4", chunk=16)
    assert [found["nvfp4", i].kind for i in range(3)] == ["sliding", "full", "sliding"]
    assert [found["nvfp4", i].output_error > 0 for i in range(3)] == [False, True, False]
    assert found["nvfp4", 0].key_error == found["nvfp4", 2].attention_kl == 0


def test_quantized_sliding_layers_are_measured_on_all_that_the_queries_see() -> None:
    """Their oldest tokens have left the window, but not that of the first probed query."""
    wide = get_scheme("int8_per_token_head")
    everywhere = wide.model_copy(update={"sliding": "quantized", "name": "everywhere"})
    backend = backend_of(ALL_BUILDERS["mistral"]())
    rows = measure(backend, [*arms(), Arm("everywhere", "scheme", everywhere, 16, "stored")], tokens(300)[0].tolist())
    assert [row.layer for row in rows] == [0, 1]
    assert all(0 < row.output_error < 0.1 for row in rows)


def test_a_layer_that_reads_anothers_keys_is_measured_on_those() -> None:
    found = errors(tiny_gemma3n(), "int8_per_token_head")
    donor, reader = found["int8_per_token_head", 3], found["int8_per_token_head", 5]
    assert donor.key_error == reader.key_error > 0
    assert donor.output_error != reader.output_error > 0


def test_biased_keys_hide_their_error_until_the_mean_is_taken_out() -> None:
    model = tiny_qwen2()
    for layer in model.model.layers:
        # The seventh channel turns slowest with the position, so that its bias survives the rotation.
        layer.self_attn.k_proj.bias.zero_()[7] = 60.0
    found = errors(model, "nvfp4", "nvfp4_mean_shift", "int8_per_token_head")
    for layer in range(2):
        plain, shifted = found["nvfp4", layer], found["nvfp4_mean_shift", layer]
        assert plain.key_bias_ratio == shifted.key_bias_ratio > 15
        assert plain.key_error < 0.12 < 0.2 < plain.key_difference_error
        assert shifted.key_difference_error < 0.5 * plain.key_difference_error
        assert shifted.output_error_keys < plain.output_error_keys
        assert plain.value_error < 0.12


def test_a_constant_added_to_every_key_is_no_difference() -> None:
    k = torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(0))
    found = layer_errors._stored_errors(k, k, k + torch.arange(16), k)
    assert found["key_error"] > 5
    assert found["key_difference_error"] < 1e-6
    assert found["value_error"] == 0


def test_scales_freeze_in_the_sweeps_chunks() -> None:
    at_once, in_chunks = (errors(tiny_llama(), "nvfp4", "int8_per_token_head", chunk=c) for c in (2048, 8))
    assert at_once["nvfp4", 0].key_error != in_chunks["nvfp4", 0].key_error
    assert at_once["int8_per_token_head", 0] == in_chunks["int8_per_token_head", 0]


def test_what_is_read_raw_in_the_sweep_is_measured_as_stored() -> None:
    fresh = [replace(arm, reads="fresh_chunk") for arm in arms("nvfp4")]
    ids = tokens(TOKENS)[0].tolist()
    assert measure(backend_of(tiny_llama()), fresh, ids) == measure(backend_of(tiny_llama()), arms("nvfp4"), ids)


def test_rows_are_in_the_order_of_the_arms_and_long_prompts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_errors, "MAX_TOKENS", 40)
    long = measure(backend_of(tiny_llama()), arms("nvfp4", "fp8_e4m3", "crush"), tokens(TOKENS)[0].tolist())
    cut = measure(backend_of(tiny_llama()), arms("nvfp4", "fp8_e4m3", "crush"), tokens(TOKENS)[0, :40].tolist())
    assert long == cut
    assert [row.scheme for row in long] == ["nvfp4", "nvfp4", "fp8_e4m3", "fp8_e4m3", "crush", "crush"]


def test_the_models_attention_is_put_back_even_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_llama(), tokens(TOKENS)
    backend = backend_of(model)
    before = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    logits = logits_of(model, ids, RoundingCache(config=model.config))
    monkeypatch.setattr(layer_errors, "_stored_errors", lambda *x: {"key_error": float("nan")})
    with pytest.raises(MeasurementError, match=r"key_error of layer 0 under nvfp4 has no value"):
        measure(backend, arms("nvfp4"), ids[0].tolist())
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION] is before
    assert torch.equal(logits_of(model, ids, RoundingCache(config=model.config)), logits)


# --- the note of a run ---


def config(tiny_model: Path, **changes: Any) -> SweepConfig:
    fields = {
        "name": "tiny",
        "model": {"id": str(tiny_model), "device": "cpu"},
        "schemes": ["fp8_e4m3", "nvfp4"],
        "tasks": [{"name": "perplexity", "corpus": "python-docs", "scored_tokens": 32, "samples": 1}],
        "context_lengths": [192, 256],
        "decode_tokens": 0,
        **changes,
    }
    return SweepConfig.model_validate(fields)


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers") / "run"
    run_sweep(config(tiny_model), path)
    return path


def unfinished(finished: Path, path: Path) -> Path:
    """A copy of the run without its last record."""
    path.mkdir()
    for name in ("plan.json", "env.json", NOTE):
        (path / name).write_bytes((finished / name).read_bytes())
    lines = (finished / "journal.jsonl").read_text().splitlines(keepends=True)
    (path / "journal.jsonl").write_text("".join(lines[:-1]))
    return path


def test_a_sweep_records_every_scheme_and_crush_in_every_layer(finished: Path) -> None:
    found = read_layer_errors(finished)
    assert found is not None
    assert found.measured
    assert (found.task, found.tokens, found.queries) == ("perplexity", 256 - 32, 64)
    assert [(row.scheme, row.role, row.layer) for row in found.rows] == [
        (scheme, role, layer)
        for scheme, role in (("fp8_e4m3", "scheme"), ("nvfp4", "scheme"), ("crush", "crush"))
        for layer in (0, 1)
    ]
    assert found.sample_id in set(read_records(finished)["sample_id"])
    assert LayerErrors.from_dict(json.loads((finished / NOTE).read_text())) == found
    assert evaluate(finished).report.layers == found


def test_a_resumed_run_measures_them_once(
    finished: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(layer_errors, "measure", lambda *x: calls.append(x) or [])
    path = unfinished(finished, tmp_path / "with")
    run_sweep(config(tiny_model), path)
    assert not calls
    assert (path / NOTE).read_bytes() == (finished / NOTE).read_bytes()
    path = unfinished(finished, tmp_path / "without")
    (path / NOTE).unlink()
    run_sweep(config(tiny_model), path)
    assert len(calls) == 1


def test_a_failure_is_told_and_tried_again_and_the_sweep_goes_on(
    finished: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unfinished(finished, tmp_path / "run")
    (path / NOTE).unlink()

    def broken(*args: Any) -> None:
        raise MeasurementError("no value.")

    with monkeypatch.context() as patch:
        patch.setattr(layer_errors, "measure", broken)
        assert run_sweep(config(tiny_model), path).errors == 0
    found = read_layer_errors(path)
    assert found is not None
    assert (found.rows, found.problem) == ((), "MeasurementError: no value.")
    unfinished_again = unfinished(path, tmp_path / "again")
    run_sweep(config(tiny_model), unfinished_again)
    assert read_layer_errors(unfinished_again) == read_layer_errors(finished)


def test_a_run_without_the_note_has_none(finished: Path, tmp_path: Path) -> None:
    path = unfinished(finished, tmp_path / "run")
    (path / NOTE).unlink()
    assert read_layer_errors(path) is None
    assert evaluate(path).report.layers is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Can't read"),
        ('{"schema_version": 2}', "has schema version 2; this kveval reads 1"),
        ('{"schema_version": 1, "rows": []}', "doesn't hold the fields"),
        ('{"schema_version": 1, "rows": [{"scheme": "a"}]}', "doesn't hold the fields"),
    ],
)
def test_a_damaged_note_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / NOTE).write_text(text)
    with pytest.raises(StoreError, match=message) as caught:
        read_layer_errors(tmp_path)
    assert f"Delete {NOTE}" in caught.value.remedy
