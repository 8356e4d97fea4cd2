"""Scales that checkpoints carry: every name in use, whole sets only, and none passed over."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kveval.checkpoint_scales import find, has_scales, is_scale
from kveval.config import ModelConfig
from kveval.errors import ConfigError, ModelError
from kveval.geometry import LayerGeometry
from kveval.models import carried_scales, load
from kveval.run import plan_sweep
from tests.test_models import hub_cache
from tests.test_run import config

LAYER = LayerGeometry(kind="full", kv_heads=2, head_dim_k=32, head_dim_v=32)
LAYERS = (LAYER, LAYER)

# Exact in BF16 and in FP16, so that the type they are stored in does not matter.
KEY, VALUE = (0.0625, 0.125), (0.25, 0.5)


def folder(tmp_path: Path, tensors: dict[str, object]) -> Path:
    """A model folder with one weight and these scales."""
    made = {name: t if isinstance(t, torch.Tensor) else torch.tensor(t) for name, t in tensors.items()}
    save_file({"model.norm.weight": torch.ones(4), **made}, tmp_path / "model.safetensors")
    return tmp_path


def named(key: str, value: str) -> dict[str, object]:
    """Both layers' scales, under names with `N` for the layer."""
    sides = ((key, KEY), (value, VALUE))
    return {name.replace("N", str(i)): numbers[i] for name, numbers in sides for i in (0, 1)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.layers.N.self_attn.k_scale", "model.layers.N.self_attn.v_scale"),
        ("model.layers.N.self_attn.attn.k_scale", "model.layers.N.self_attn.attn.v_scale"),
        ("model.layers.N.self_attn.k_proj.k_scale", "model.layers.N.self_attn.v_proj.v_scale"),
        ("model.layers.N.self_attn.qkv_proj.k_scale", "model.layers.N.self_attn.qkv_proj.v_scale"),
        ("model.layers.N.self_attn.k_proj.output_scale", "model.layers.N.self_attn.v_proj.output_scale"),
        ("model.language_model.layers.N.self_attn.k_scale", "model.language_model.layers.N.self_attn.v_scale"),
        ("layers.N.attention.k_scale", "layers.N.attention.v_scale"),
        ("transformer.h.N.attn.k_scale", "transformer.h.N.attn.v_scale"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_name_in_use(tmp_path, key, value, dtype):
    tensors = {name: torch.tensor(n, dtype=dtype) for name, n in named(key, value).items()}
    scales = find(folder(tmp_path, tensors), LAYERS)
    assert scales is not None
    assert scales.source == "checkpoint"
    assert scales.key == {0: (KEY[0],), 1: (KEY[1],)}
    assert scales.value == {0: (VALUE[0],), 1: (VALUE[1],)}


def test_one_scale_for_keys_and_values(tmp_path):
    scales = find(folder(tmp_path, {f"model.layers.{i}.self_attn.kv_scale": KEY[i] for i in (0, 1)}), LAYERS)
    assert scales is not None
    assert scales.key == scales.value == {0: (KEY[0],), 1: (KEY[1],)}


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (1, 2, 1, 1)])
def test_one_scale_per_head(tmp_path, shape):
    tensors = {
        f"model.layers.{i}.self_attn.{side}_scale": torch.tensor([0.5, 0.25 * (i + 1)]).reshape(shape)
        for i in (0, 1)
        for side in "kv"
    }
    scales = find(folder(tmp_path, tensors), LAYERS)
    assert scales is not None
    assert scales.key == scales.value == {0: (0.5, 0.25), 1: (0.5, 0.5)}


def test_a_sharded_checkpoint(tmp_path):
    names = named("model.layers.N.self_attn.k_scale", "model.layers.N.self_attn.v_scale")
    shards = {"a.safetensors": list(names)[:3], "b.safetensors": list(names)[3:]}
    for file, inside in shards.items():
        save_file({name: torch.tensor(names[name]) for name in inside}, tmp_path / file)
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    scales = find(tmp_path, LAYERS)
    assert scales is not None
    assert (scales.key, scales.value) == ({0: (KEY[0],), 1: (KEY[1],)}, {0: (VALUE[0],), 1: (VALUE[1],)})


def test_scales_of_weights_are_no_scales_of_keys_and_values(tmp_path):
    others = ["k_proj.weight_scale", "k_proj.input_scale", "v_proj.weight_scale_inv", "q_proj.output_scale", "q_scale"]
    names = [f"model.layers.0.self_attn.{name}" for name in others]
    assert not has_scales(names)
    assert find(folder(tmp_path, dict.fromkeys(names, 1.0)), LAYERS) is None
    assert is_scale("model.layers.0.self_attn.k_zero_point")


NAMES = named("model.layers.N.self_attn.k_scale", "model.layers.N.self_attn.v_scale")


def without(*parts: str) -> dict[str, object]:
    return {name: n for name, n in NAMES.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("layers.1."), "no key scale for layer 1"),
        (without("layers.1.self_attn.v"), "no value scale for layer 1"),
        (without("v_scale"), "no value scale for layer 0"),
        (without("k_scale"), "no key scale for layer 0"),
        ({**NAMES, "model.layers.1.self_attn.k_scale": -1.0}, "the key scales of layer 1 must be finite and above 0"),
        ({**NAMES, "model.layers.0.self_attn.v_scale": float("nan")}, "the value scales of layer 0 must be finite"),
        (
            {**NAMES, "model.layers.0.self_attn.k_scale": [1.0, 1.0, 1.0]},
            "layer 0 has 3 key scales .* 2 heads",
        ),
        ({**NAMES, "model.layers.0.self_attn.kv_scale": 3.0}, "the key scales of layer 0 contradict each other"),
        ({**NAMES, "model.self_attn.k_scale": 3.0}, "can't tell which layer the scale model.self_attn.k_scale is of"),
        ({**NAMES, "vision.layers.0.self_attn.k_scale": 1.0}, "scales in 2 stacks of layers"),
        ({**NAMES, "model.layers.0.self_attn.k_zero_point": 3}, "k_zero_point is not 0"),
    ],
)
def test_half_a_set_is_an_error_that_says_what_is_missing(tmp_path, tensors, message):
    with pytest.raises(ModelError, match=message) as caught:
        find(folder(tmp_path, tensors), LAYERS)
    assert "scales: none" in caught.value.remedy


def test_two_names_of_one_number_and_zero_points_of_zero_do_no_harm(tmp_path):
    more = {"model.layers.0.self_attn.kv_scale": 0.5, "model.layers.0.self_attn.k_zero_point": 0}
    same = {**NAMES, **dict.fromkeys(["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"], 0.5)}
    scales = find(folder(tmp_path, {**same, **more}), LAYERS)
    assert scales is not None
    assert scales.key[0] == scales.value[0] == (0.5,)


def test_only_layers_that_store_need_scales(tmp_path):
    reader = LayerGeometry(kind="full", kv_heads=2, head_dim_k=32, head_dim_v=32, shared_with=1)
    scales = find(folder(tmp_path, NAMES), (LAYER, LAYER, LayerGeometry(kind="linear"), reader))
    assert scales is not None
    assert set(scales.key) == {0, 1}


@pytest.fixture
def scaled_model(tiny_model, tmp_path) -> Path:
    """The tiny model with scales in its checkpoint, and one for queries."""
    copy = tmp_path / "scaled"
    shutil.copytree(tiny_model, copy)
    extra = {name: torch.tensor(n) for name, n in NAMES.items()}
    query = {"model.layers.0.self_attn.q_scale": torch.tensor(1.0)}
    weights = load_file(copy / "model.safetensors")
    save_file({**weights, **extra, **query}, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_checkpoint_with_scales_loads_without_noise(scaled_model, caplog, capfd):
    with caplog.at_level(logging.WARNING):
        loaded = load(ModelConfig(id=str(scaled_model), device="cpu"), device="cpu")
    assert "LOAD REPORT" not in caplog.text + "".join(capfd.readouterr())
    assert "carries 1 scales for narrow queries" in caplog.text
    found = carried_scales(ModelConfig(id=str(scaled_model)), loaded.info.geometry)
    assert found is not None
    assert found.value == {0: (VALUE[0],), 1: (VALUE[1],)}


def test_other_surplus_weights_are_refused_still(scaled_model):
    weights = load_file(scaled_model / "model.safetensors")
    surplus = {"model.layers.0.self_attn.r_proj.weight": torch.ones(2)}
    save_file({**weights, **surplus}, scaled_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 unexpected \(model\.layers\.0\.self_attn\.r_proj\.weight\)"):
        load(ModelConfig(id=str(scaled_model), device="cpu"), device="cpu")


def test_a_sweep_says_what_it_does_with_the_checkpoints_scales(scaled_model):
    with pytest.raises(ConfigError, match=r"fp8_e4m3: .*carries scales[\s\S]*scales: checkpoint[\s\S]*scales: none"):
        plan_sweep(config(scaled_model))
    with_them = {"name": "mine", "extends": "fp8_e4m3", "scales": "checkpoint"}
    plan, _ = plan_sweep(config(scaled_model, schemes=[with_them]))
    (arm,) = [arm for arm in plan.arms if arm.label == "mine"]
    assert arm.scheme.scales.key == {0: (KEY[0],), 1: (KEY[1],)}
    (stored,) = plan.to_dict()["config"]["schemes"]
    assert stored["scales"]["value"] == {"0": [VALUE[0]], "1": [VALUE[1]]}
    without_them, _ = plan_sweep(config(scaled_model, schemes=[{**with_them, "scales": "none"}]))
    assert {c.id for c in plan.cells if c.arm.label == "mine"}.isdisjoint(c.id for c in without_them.cells)


def asked(monkeypatch, names) -> list[str]:
    """Repositories whose tensors were asked for; the hub answers with `names`."""
    from huggingface_hub import HfApi

    questions: list[str] = []

    def answer(self, repo, filename, *, revision):
        questions.append(f"{repo}/{filename}@{revision[:2]}")
        return SimpleNamespace(tensors=dict.fromkeys(names))

    monkeypatch.setattr(HfApi, "parse_safetensors_file_metadata", answer)
    return questions


def test_a_hub_model_is_asked_for_names_before_its_weights_are_fetched(scaled_model, tmp_path, monkeypatch):
    snapshot = hub_cache(tmp_path, monkeypatch, scaled_model)
    model = ModelConfig(id="someone/tiny")
    questions = asked(monkeypatch, ["model.norm.weight"])
    found = carried_scales(model, LAYERS)
    assert found is not None
    assert (found.key, questions) == ({0: (KEY[0],), 1: (KEY[1],)}, [])
    (snapshot / "model.safetensors").unlink()
    assert carried_scales(model, LAYERS) is None
    assert questions == ["someone/tiny/model.safetensors@cc"]
    asked(monkeypatch, NAMES)
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        carried_scales(model, LAYERS)


def test_the_index_of_a_sharded_hub_model_has_the_names(scaled_model, tmp_path, monkeypatch):
    snapshot = hub_cache(tmp_path, monkeypatch, scaled_model)
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert carried_scales(ModelConfig(id="someone/tiny"), LAYERS) is None


def test_a_checkpoint_without_scales(tiny_model):
    entry = {"name": "mine", "extends": "fp8_e4m3", "scales": "checkpoint"}
    with pytest.raises(ConfigError, match="carries no scales"):
        plan_sweep(config(tiny_model, schemes=[entry]))
    assert plan_sweep(config(tiny_model))[0].cells
