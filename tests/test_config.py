from __future__ import annotations

import json
from pathlib import Path

import pytest

from kveval.config import SweepConfig, load_config
from kveval.errors import ConfigError, UnknownNameError
from kveval.formats.scales import StaticScales
from kveval.formats.spec import get_scheme

MINIMAL = """\
model: {id: some-model}
schemes: [nvfp4]
tasks: [niah_single]
context_lengths: [1k]
"""


SCALES = {"key": {"0": [0.5]}, "value": {"0": [0.25]}, "model": "m", "tokens": 4096, "element": "e4m3"}


def own(entry: str) -> str:
    """`MINIMAL` with this scheme."""
    return MINIMAL.replace("[nvfp4]", f"[{entry}]")


def write(tmp_path: Path, text: str, name: str = "sweep.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_and_name_from_the_file(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    assert config.name == "sweep"
    assert config.schemes == (get_scheme("nvfp4"),)
    assert config.context_lengths == (1024,)
    assert (config.reads, config.prefill_chunk, config.samples, config.seed) == ("stored", 2048, 16, 0)
    assert config.attention == "auto"
    assert config.tasks[0].label == "niah_single"


def test_task_parameters_are_what_the_config_does_not_know(tmp_path):
    text = MINIMAL.replace(
        "[niah_single]", "[{name: niah_multikey, label: mk, keys: 8, samples: 4, context_lengths: [2k]}]"
    )
    config = load_config(write(tmp_path, text))
    task = config.tasks[0]
    assert (task.name, task.label, task.params) == ("niah_multikey", "mk", {"keys": 8})
    assert config.samples_of(task) == 4
    assert config.lengths_of(task) == (2048,)


@pytest.mark.parametrize(
    ("text", "tokens"), [("512", 512), ("1k", 1024), ("128K", 131072), ("1M", 2**20), ('"4096"', 4096)]
)
def test_lengths(tmp_path, text, tokens):
    assert load_config(write(tmp_path, MINIMAL.replace("1k", text))).context_lengths == (tokens,)


def test_inline_scheme_takes_sides_of_presets(tmp_path):
    text = MINIMAL.replace(
        "[nvfp4]",
        "[{name: mine, key: nvfp4,"
        " value: {element: int8, granularity: per_token, scale_rule: amax, scale_dtype: fp32}}]",
    )
    scheme = load_config(write(tmp_path, text)).schemes[0]
    assert scheme.name == "mine"
    assert scheme.key == get_scheme("nvfp4").key
    assert scheme.value == get_scheme("int8_per_token_head").value


def test_a_scheme_extends_a_preset(tmp_path):
    write(tmp_path, json.dumps(SCALES), "scales.json")
    text = own(
        "{name: mine, extends: fp8_e4m3, scales: scales.json, sink_tokens: 4, residual_length: 128,"
        ' skip_layers: ["first:2"], layers: [{layers: ["last:2"], both: bf16}], sliding: quantized}'
    )
    scheme = load_config(write(tmp_path, text)).schemes[0]
    fp8, bf16 = get_scheme("fp8_e4m3"), get_scheme("bf16")
    assert (scheme.name, scheme.key, scheme.value) == ("mine", fp8.key, fp8.value)
    assert (scheme.sink_tokens, scheme.residual_length, scheme.sliding) == (4, 128, "quantized")
    assert scheme.skip_layers == ("first:2",)
    assert [(o.layers, o.key, o.value) for o in scheme.layers] == [(("last:2",), bf16.key, bf16.value)]
    assert scheme.scales == StaticScales(source="scales.json", key={0: (0.5,)}, value={0: (0.25,)}, element="e4m3")


@pytest.mark.parametrize("word", ["checkpoint", "none"])
def test_scales_by_a_word(tmp_path, word):
    text = own(f"{{name: mine, extends: fp8_e4m3, scales: {word}}}")
    assert load_config(write(tmp_path, text)).schemes[0].scales == word


def test_scales_lie_beside_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", json.dumps(SCALES), "scales.json")
    write(tmp_path / "base", own("{name: mine, extends: fp8_e4m3, scales: scales.json}"), "base.yaml")
    child = write(tmp_path, "extends: base/base.yaml\nsamples: 3\n")
    monkeypatch.chdir(tmp_path.parent)
    assert load_config(child).schemes[0].scales.key == {0: (0.5,)}
    absolute = write(tmp_path, own(f"{{name: mine, extends: fp8_e4m3, scales: {tmp_path}/base/scales.json}}"))
    assert load_config(absolute).schemes[0].scales.value == {0: (0.25,)}


def test_a_preset_keeps_its_name_only_as_it_is(tmp_path):
    same = load_config(write(tmp_path, own("{name: fp8_e4m3, extends: fp8_e4m3, scales: none}"))).schemes[0]
    assert same.identity() == get_scheme("fp8_e4m3").identity()


def test_a_config_with_scales_reads_back(tmp_path):
    write(tmp_path, json.dumps(SCALES), "scales.json")
    text = own("{name: mine, extends: fp8_e4m3, scales: scales.json, layers: [{layers: [0], both: bf16}]}, kivi4")
    config = load_config(write(tmp_path, text))
    dumped = json.loads(config.model_dump_json())
    assert SweepConfig.model_validate(dumped).schemes == config.schemes


def test_the_json_schema_admits_names_and_mappings():
    schema = SweepConfig.model_json_schema()
    kinds = schema["properties"]["schemes"]["items"]["anyOf"]
    assert {"type": "string"} in kinds
    assert {"$ref": "#/$defs/KVScheme"} in kinds
    assert "TensorFormat" in schema["$defs"]


def test_overrides(tmp_path):
    config = load_config(
        write(tmp_path, MINIMAL), ["samples=3", "model.dtype=float32", "tasks.0=perplexity", "name=other"]
    )
    assert (config.samples, config.model.dtype, config.tasks[0].name, config.name) == (
        3,
        "float32",
        "perplexity",
        "other",
    )


def test_overrides_reach_into_lists(tmp_path):
    text = MINIMAL.replace("[niah_single]", "[{name: niah_single}, {name: perplexity}]")
    config = load_config(write(tmp_path, text), ["tasks.1.samples=3", "tasks.0.label=first"])
    assert [(t.label, t.samples) for t in config.tasks] == [("first", None), ("perplexity", 3)]


def test_extends_merges_mappings_and_replaces_lists(tmp_path):
    write(tmp_path, MINIMAL + "capacity: {gpu: l4-24gb, reserve: 0.2}\n", "base.yaml")
    child = write(tmp_path, "extends: base.yaml\nschemes: [mxfp4]\ncapacity: {reserve: 0.3}\n", "child.yaml")
    config = load_config(child)
    assert [s.name for s in config.schemes] == ["mxfp4"]
    assert (config.capacity.gpu, config.capacity.reserve) == ("l4-24gb", 0.3)
    assert config.name == "child"


def test_dumped_config_reads_back(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    dumped = config.model_dump(mode="json")
    assert SweepConfig.model_validate(dumped).model_dump(mode="json") == dumped


GATE = "gate: {scheme: SCHEME, endpoints: [{metric: METRIC, task: TASK, context_length: LENGTH, margin: 0.1}]}\n"


def gate(scheme="nvfp4", metric="answer_nll", task="niah_single", length="1k"):
    text = GATE.replace("SCHEME", scheme).replace("METRIC", metric)
    return MINIMAL + text.replace("TASK", task).replace("LENGTH", length)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (MINIMAL + "sampels: 3\n", 5, ["unknown key 'sampels'", "Did you mean 'samples'"]),
        (MINIMAL.replace("id: some-model", "id: some-model, dtyp: x"), 1, ["model.dtyp", "Did you mean 'dtype'"]),
        (MINIMAL.replace("nvfp4", "nvfp5"), 2, ["unknown scheme 'nvfp5'", "Did you mean 'nvfp4'"]),
        (MINIMAL + "samples: 0\n", 5, ["samples", "greater than 0"]),
        (MINIMAL + "samples: 3\nsamples: 4\n", 6, ["'samples' is written twice", "first on line 5"]),
        (MINIMAL.replace("[1k]", "[1q]"), 4, ["context_lengths.0"]),
        (MINIMAL.replace("[nvfp4]", "[crush]"), 1, ["crush runs in every sweep by itself"]),
        (MINIMAL.replace("[nvfp4]", "[bf16]"), 1, ["bf16 runs in every sweep by itself"]),
        (MINIMAL.replace("[nvfp4]", "[nvfp4, nvfp4]"), 1, ["'nvfp4' appears 2 times"]),
        (
            MINIMAL.replace("[niah_single]", "[niah_single, niah_single]"),
            1,
            ["'niah_single' appears 2 times", "`label`"],
        ),
        (MINIMAL + "prefill_chunk: 384\n", 1, ["aa_chunk must differ"]),
        (gate(scheme="nvfp5"), 5, ["unknown gate scheme 'nvfp5'", "Did you mean 'nvfp4'"]),
        (gate(metric="answer_nl"), 5, ["unknown metric 'answer_nl'", "Did you mean 'answer_nll'"]),
        (gate(task="niah_singel"), 5, ["unknown gate task 'niah_singel'"]),
        (
            gate().replace("margin: 0.1", "margin: 5").replace("answer_nll", "exact_match"),
            1,
            ["write 0.05 for 5 points"],
        ),
        (
            MINIMAL.replace("[nvfp4]", "[{name: bf16 (A/A), both: {element: bf16}}]"),
            1,
            ["runs in every sweep by itself"],
        ),
        (MINIMAL.replace("[niah_single]", "[{name: niah_single, params: 3}]"), 3, ["params is a mapping"]),
        ("? [a, b]\n: 1\n", 1, ["a key is a list or mapping"]),
        (own("{name: a, extends: fp8_e4m3, sink_token: 4}"), 2, ["'schemes.0.sink_token'", "'sink_tokens'"]),
        (own("{name: a, extend: fp8_e4m3}"), 2, ["'schemes.0.extend'", "Did you mean 'extends'"]),
        (own("nvfp4, {name: a, both: {elemnt: e4m3}}"), 2, ["'schemes.1.both.elemnt'", "Did you mean 'element'"]),
        (own("{name: a, key: {elemnt: e4m3}}"), 2, ["'schemes.0.key.elemnt'"]),
        (
            own("{name: a, extends: nvfp4, layers: [{layers: [0], bot: bf16}]}"),
            2,
            ["'schemes.0.layers.0.bot'", "Did you mean 'both'"],
        ),
        (own("{name: a, extends: nvfp4, layers: [{both: bf16}]}"), 2, ["'schemes.0.layers.0.layers' is missing"]),
        (own("{name: a, extends: nvfp4, layers: 3}"), 2, ["`layers` is a list of mappings"]),
        (own("{name: a, extends: nvfp4, skip_layers: 3}"), 2, ["schemes.0.skip_layers: write a list"]),
        (own("{name: a, extends: nvfp4, skip_layers: [1.5]}"), 2, ["schemes.0.skip_layers.0: "]),
        (own("{name: a, extends: nvfp4, sink_tokens: -1}"), 2, ["schemes.0.sink_tokens: ", "greater than"]),
        (own("{name: a, extends: nvfp4, sliding: wide}"), 2, ["schemes.0.sliding: ", "'bf16' or 'quantized'"]),
        (own("{name: a, extends: kivi4, residual_length: 100}"), 2, ["schemes.0: residual_length must be a multiple"]),
        (own("{name: a, extends: [nvfp4]}"), 2, ["schemes.0: `extends` takes the name of a preset"]),
        (own("{name: a, extends: nvfp4, 3: 4}"), 2, ["schemes.0: keys of a scheme are words"]),
        (own("{extends: nvfp4}"), 2, ["schemes.0: a scheme is a preset's name, or a mapping with a `name`"]),
        (own("3"), 2, ["schemes.0: write a mapping"]),
        (own("{name: a, key: bf16}"), 2, ["'schemes.0.value' is missing", "`extends: PRESET`"]),
        (own("{name: a, extends: nvfp5}"), 2, ["unknown scheme 'nvfp5'", "Did you mean 'nvfp4'"]),
        (own("{name: a, both: nvfp5}"), 2, ["unknown scheme 'nvfp5'"]),
        (own("{name: a, both: {element: e4m4}}"), 2, ["unknown element type 'e4m4'", "Did you mean 'e4m3'"]),
        (
            own("{name: a, both: {element: e4m3, granularity: per_token, scale_rule: amx, scale_dtype: fp32}}"),
            2,
            ["unknown scale rule 'amx'", "'amax'"],
        ),
        (own("{name: a, extends: fp8_e4m3, scales: 3}"), 2, ["schemes.0.scales is 3", "kveval calibrate"]),
        (own("{name: a, extends: fp8_e4m3, scales: no.json}"), 2, ["can't read scales from", "no.json"]),
        (own("{name: a, extends: nvfp4, scales: checkpoint}"), 2, ["scales go with formats whose scale_rule is"]),
        (
            own("{name: a, extends: fp8_e4m3, scales: {source: s, key: {0: [-1]}}}"),
            2,
            ["schemes.0.scales: the key scales of layer 0 must be finite and above 0"],
        ),
        (own("{name: nvfp4, extends: nvfp4, sink_tokens: 4}"), 2, ["'nvfp4' is the name of a preset", "my_nvfp4"]),
        (
            own("{name: fp8_e4m3, extends: fp8_e4m3, scales: checkpoint}"),
            2,
            ["'fp8_e4m3' is the name of a preset, and this scheme is another one"],
        ),
        (own("nvfp4, {name: nvfp4, extends: nvfp4, sink_tokens: 4}"), 1, ["appears 2 times", "its own `name`"]),
        # The name is looked for where schemes stand, not in the model's id.
        (MINIMAL.replace("some-model", "nvfp5").replace("[nvfp4]", "[nvfp5]"), 2, ["unknown scheme 'nvfp5'"]),
        (gate(length="2k"), 1, ["asks for 2048 tokens, but the sweep runs 1024"]),
        ("model: {id: [}\n", None, ["not valid YAML"]),
        ("- 1\n", None, ["not a mapping"]),
        (MINIMAL.replace("schemes: [nvfp4]\n", ""), 1, ["'schemes' is missing"]),
    ],
)
def test_errors_name_file_line_and_remedy(tmp_path, text, line, words):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert str(path) in message
    if line is not None:
        assert f"{path}:{line}:" in message
    for word in words:
        assert word in message
    assert caught.value.remedy


def test_error_in_a_base_names_the_base(tmp_path):
    base = write(tmp_path, MINIMAL.replace("nvfp4", "nvfp5"), "base.yaml")
    child = write(tmp_path, "extends: base.yaml\n", "child.yaml")
    with pytest.raises(UnknownNameError, match=r"base\.yaml:2"):
        load_config(child)
    assert base.exists()


def test_circular_extends(tmp_path):
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("override", ["samples", "=3", "model.id.x=3", "tasks.7=x", "tasks.9.0=x", "model.id={"])
def test_bad_overrides(tmp_path, override):
    with pytest.raises(ConfigError, match="--set"):
        load_config(write(tmp_path, MINIMAL), [override])


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="can't read"):
        load_config(tmp_path / "nothing.yaml")


def test_knows_where_its_keys_stand(tmp_path):
    path = write(tmp_path, MINIMAL)
    config = load_config(path)
    assert config.where("tasks", 0) == f"{path}:3"
    assert config.where("model", "id") == f"{path}:1"
    assert SweepConfig.model_validate(config.model_dump(mode="json")).where("tasks", 0) == ""
