"""Calibrated scales: what they are made of, that they stay what they are, and that a sweep stores with them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from kveval.attention import cache_argument
from kveval.cache import QuantizedCache
from kveval.calibrate import calibrate, read_text
from kveval.config import ModelConfig
from kveval.errors import ConfigError, LengthError, UnsupportedError
from kveval.formats.scales import StaticScales
from kveval.formats.spec import build_scheme, get_scheme
from kveval.models import load
from kveval.run import plan_sweep, run_sweep
from kveval.store import read_records
from tests.test_cli import call
from tests.test_run import TASKS, config

TEXT = "The scale of a head is the largest of its keys over the largest code. " * 12  # 840 tokens, one per byte
LENGTH = 256


def spec(folder: Path) -> ModelConfig:
    return ModelConfig(id=str(folder), device="cpu")


@pytest.fixture(scope="module")
def calibrated(tiny_model):
    return calibrate(spec(tiny_model), TEXT, get_scheme("fp8_per_head"), tokens=3 * LENGTH, length=LENGTH)


@pytest.fixture(scope="module")
def peaks(tiny_model) -> dict[tuple[str, int], torch.Tensor]:
    """Largest magnitudes [H] by (role, layer) as transformers' own attention and cache make them, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(tiny_model)(TEXT, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(TEXT)
    found: dict[tuple[str, int], list[torch.Tensor]] = {}
    for at in range(0, 3 * LENGTH, LENGTH):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(torch.tensor([ids[at : at + LENGTH]]), use_cache=True, **{cache_argument(model): cache})
        for i, layer in enumerate(cache.layers):
            for role, states in (("key", layer.keys), ("value", layer.values)):
                found.setdefault((role, i), []).append(states.abs().amax((0, 2, 3)))
    return {at: torch.stack(each).amax(0) for at, each in found.items()}


def test_scales_are_the_largest_keys_and_values_over_the_largest_code(calibrated, peaks):
    scales = calibrated.scales
    for (role, layer), peak in peaks.items():
        got = torch.tensor(getattr(scales, role)[layer])
        # The first layer sees what transformers sees; the second one's input went through BF16 keys and values.
        torch.testing.assert_close(got, peak / 448, rtol=1e-6 if layer == 0 else 1e-2, atol=0)
    assert set(scales.key) == set(scales.value) == {0, 1}
    assert (scales.element, calibrated.granularity) == ("e4m3", "per_head")


def test_one_scale_per_layer_is_that_of_its_largest_head(tiny_model, calibrated):
    whole = calibrate(spec(tiny_model), TEXT, get_scheme("fp8_e5m2"), tokens=3 * LENGTH, length=LENGTH)
    for role in ("key", "value"):
        for layer, numbers in getattr(calibrated.scales, role).items():
            (one,) = getattr(whole.scales, role)[layer]
            assert one == pytest.approx(max(numbers) * 448 / 57344, rel=1e-6)
    assert (whole.scales.element, whole.granularity) == ("e5m2", "per_tensor")


def test_a_longer_sequence_runs_in_chunks(tiny_model, monkeypatch):
    whole = calibrate(spec(tiny_model), TEXT, get_scheme("fp8_per_head"), tokens=512, length=512)
    monkeypatch.setattr("kveval.calibrate.PREFILL_CHUNK", 200)
    chunks = calibrate(spec(tiny_model), TEXT, get_scheme("fp8_per_head"), tokens=512, length=512)
    for layer in (0, 1):
        assert chunks.scales.key[layer] == pytest.approx(whole.scales.key[layer], rel=1e-4)


def test_no_padding_is_fed(tiny_model, tmp_path, calibrated):
    """The embedding of the padding token makes no difference to the scales; that of a token of the text does."""

    def changed(token: int) -> StaticScales:
        copy = tmp_path / f"changed-{token}"
        shutil.copytree(tiny_model, copy)
        weights = load_file(copy / "model.safetensors")
        weights["model.embed_tokens.weight"][token] = 1.0
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        return calibrate(spec(copy), TEXT, get_scheme("fp8_per_head"), tokens=3 * LENGTH, length=LENGTH).scales

    assert load(spec(tiny_model), device="cpu").tokenizer.pad_token_id == 0
    assert changed(0).digest == calibrated.scales.digest
    in_text = load(spec(tiny_model), device="cpu").tokenizer("T", add_special_tokens=False)["input_ids"][0]
    assert changed(in_text).digest != calibrated.scales.digest


def test_the_file_says_what_was_run_and_reads_back(calibrated, tiny_model, tmp_path):
    data = calibrated.to_dict()
    info = load(spec(tiny_model), device="cpu").info
    assert data["model"] == str(tiny_model)
    assert data["weights_digest"] == info.weights_digest
    assert (data["tokens"], data["length"], data["scheme"]) == (768, 256, "fp8_per_head")
    assert data["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(data))
    read = StaticScales.read(path)
    assert read.model_copy(update={"source": ""}) == calibrated.scales.model_copy(update={"source": ""})


def scaled(scales: StaticScales, extends: str = "fp8_per_head"):
    return build_scheme("mine", {"extends": extends, "scales": scales})


def test_later_larger_values_saturate_and_change_nothing_before_them(calibrated, tiny_model):
    loaded = load(spec(tiny_model), device="cpu")
    cache = QuantizedCache(loaded.model.config, scaled(calibrated.scales))
    torch.manual_seed(0)
    scale = torch.tensor(calibrated.scales.key[0]).view(1, -1, 1, 1)
    usual = torch.randn(1, 2, 5, 32) * scale * 100
    cache.update(usual, usual, 0)
    layer = cache.packed_layers[0]
    before = layer.stores()[0].parts()["payload"].clone()
    huge = torch.full((1, 2, 3, 32), 1e6)
    huge[:, 1] = -1e6
    cache.update(huge, huge, 0)
    assert torch.equal(layer.stores()[0].parts()["payload"][:, :, :5], before)
    ends = torch.tensor([448.0, -448.0]).view(1, 2, 1, 1)
    assert torch.equal(layer.keys[:, :, 5:], (ends * scale).expand(1, 2, 3, 32))
    # E4M3 keeps 4 bits of a normal number.
    assert ((layer.keys[:, :, :5] - usual).abs() <= (usual.abs() / 16).clamp_min(scale * 2**-10)).all()


def test_a_sweep_stores_with_them_and_their_digest_is_its_identity(calibrated, tiny_model, tmp_path):
    quick = {"tasks": TASKS[:1], "context_lengths": [768]}
    sweep = config(tiny_model, schemes=["fp8_e5m2", scaled(calibrated.scales)], **quick)
    assert run_sweep(sweep, tmp_path / "run").errors == 0
    records = read_records(tmp_path / "run").query("scheme == 'mine'")
    assert (records["stored_bytes"] == records["cache_tokens"] * 256).all()
    assert (records["constant_bytes"] == 0).all()
    assert (records["kl"] > 0).all()
    stored = json.loads((tmp_path / "run" / "plan.json").read_text())["config"]["schemes"][1]["scales"]
    assert StaticScales.model_validate(stored) == calibrated.scales
    other = calibrated.scales.model_copy(update={"key": {0: (1.0, 1.0), 1: (1.0, 1.0)}})
    again, _ = plan_sweep(config(tiny_model, schemes=["fp8_e5m2", scaled(other)], **quick))
    assert set(records["cell_id"]).isdisjoint(c.id for c in again.cells)
    e5m2 = read_records(tmp_path / "run").query("scheme == 'fp8_e5m2'")["cell_id"]
    assert set(e5m2) <= {c.id for c in again.cells}


def test_scales_of_another_model_are_refused(calibrated, tiny_model):
    foreign = calibrated.scales.model_copy(update={"weights_digest": "0" * 16})
    with pytest.raises(ConfigError, match=r"mine: .*calibrated on another model"):
        plan_sweep(config(tiny_model, schemes=[scaled(foreign)]))


def test_sliding_layers_get_scales_too():
    from kveval.calibrate import _scaled_sides
    from kveval.geometry import LayerGeometry

    full = LayerGeometry(kind="full", kv_heads=2, head_dim_k=32, head_dim_v=32)
    window = LayerGeometry(kind="sliding", kv_heads=2, head_dim_k=32, head_dim_v=32, window=8)
    latent = LayerGeometry(kind="mla", kv_heads=1, head_dim_k=64, head_dim_v=16)
    sides = _scaled_sides(get_scheme("fp8_per_head"), (full, window, LayerGeometry(kind="linear"), latent))
    assert set(sides) == {("key", 0), ("value", 0), ("key", 1), ("value", 1), ("key", 3)}
    assert set(_scaled_sides(get_scheme("turboquant_k8v4"), (full,))) == {("key", 0)}


def test_scales_of_one_side_alone_are_enough_for_it(tiny_model):
    found = calibrate(spec(tiny_model), TEXT, get_scheme("turboquant_k8v4"), tokens=LENGTH, length=LENGTH)
    assert found.scales.value == {}
    sweep = config(tiny_model, schemes=[scaled(found.scales, "turboquant_k8v4")])
    assert plan_sweep(sweep)[0].config.schemes[0].scales == found.scales


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "fp8_per_token_head", "crush"])
def test_a_scheme_without_static_scales_is_refused(tiny_model, name):
    with pytest.raises(UnsupportedError, match="nothing to calibrate"):
        calibrate(spec(tiny_model), TEXT, get_scheme(name), tokens=LENGTH, length=LENGTH)


def test_two_scaled_formats_are_refused(tiny_model):
    mixed = build_scheme("mixed", {"key": "fp8_e4m3", "value": "fp8_e5m2"})
    with pytest.raises(UnsupportedError, match="scales several formats"):
        calibrate(spec(tiny_model), TEXT, mixed, tokens=LENGTH, length=LENGTH)


@pytest.mark.parametrize(
    ("kind", "tokens", "length", "message", "remedy"),
    [
        (ConfigError, 300, 256, "300 tokens are no whole number of sequences of 256", "--tokens 512"),
        (ConfigError, 1024, 1024, "the text has 840 tokens, less than one sequence of 1024", "shorter --length"),
        (ConfigError, 1024, 256, "840 tokens, enough for 3 sequences of 256 and not for 4", "--tokens 768"),
        (LengthError, 8192, 8192, "longer than the 4096 that", "--length 4096"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(tiny_model, monkeypatch, kind, tokens, length, message, remedy):
    monkeypatch.setattr("kveval.calibrate.load", None)  # before the weights load
    with pytest.raises(kind, match=message) as caught:
        calibrate(spec(tiny_model), TEXT, get_scheme("fp8_per_head"), tokens=tokens, length=length)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("data", "message"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe\x00", "can't read")]
)
def test_a_text_that_is_none(tmp_path, data, message):
    path = tmp_path / "text"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_text(path)
    with pytest.raises(ConfigError, match="can't read"):
        read_text(tmp_path / "missing")


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_command_writes_what_a_sweep_reads(tiny_model, tmp_path, text_file, calibrated, monkeypatch, capsys):
    out = tmp_path / "scales.json"
    words = ["calibrate", str(tiny_model), "--text", str(text_file), "--out", str(out), "--tokens", "768"]
    code, printed, said = call(monkeypatch, capsys, *words, "--length", "256")
    assert code == 0
    assert "key scales: 4 in 2 layers" in printed
    assert "extends: fp8_per_head" in said
    assert StaticScales.read(out).digest == calibrated.scales.digest
    code, _, said = call(monkeypatch, capsys, *words, "--length", "256")
    assert code == 2
    assert "exists already" in said


def test_the_command_refuses_with_one_message(tiny_model, tmp_path, text_file, monkeypatch, capsys):
    words = ["calibrate", str(tiny_model), "--text", str(text_file), "--out", str(tmp_path / "s.json")]
    code, _, said = call(monkeypatch, capsys, *words, "--scheme", "nvfp4")
    assert (code, "nothing to calibrate" in said) == (2, True)
    code, _, said = call(monkeypatch, capsys, *words, "--scheme", "nvfp5")
    assert (code, "--scheme: unknown scheme 'nvfp5'" in said) == (2, True)
    assert not (tmp_path / "s.json").exists()


def test_capacity_and_doctor_need_no_scales(tiny_model, monkeypatch, capsys):
    code, printed, _ = call(monkeypatch, capsys, "capacity", str(tiny_model), "--scheme", "fp8_per_head", "--json")
    assert code == 0
    assert "fp8_per_head" in printed
    code, printed, _ = call(monkeypatch, capsys, "doctor", "--json")
    assert code == 0
    assert next(row for row in json.loads(printed)["schemes"] if row["scheme"] == "fp8_per_head")["works"]
