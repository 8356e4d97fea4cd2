"""Commands as a user calls them, in process, on a tiny random model."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kveval import cli
from kveval.errors import ExitCode
from kveval.geometry import geometry_from_config

SWEEP = {
    "schemes": ["fp8_e4m3", "nvfp4"],
    "tasks": [{"name": "niah_single"}, {"name": "perplexity", "scored_tokens": 16}],
    "context_lengths": [512],
    "samples": 3,
    "decode_tokens": 1,
    "gate": {
        "scheme": "fp8_e4m3",
        "endpoints": [{"metric": "answer_nll", "task": "perplexity", "context_length": 512, "margin": 0.2}],
    },
}


def call(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `kveval WORDS`."""
    monkeypatch.setattr("sys.argv", ["kveval", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out = capsys.readouterr()
    return int(stopped.value.code or 0), out.out, out.err


@pytest.fixture(scope="module")
def workspace(tiny_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    sweep = {"model": {"id": str(tiny_model), "device": "cpu"}, **SWEEP}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return folder


@pytest.fixture(scope="module")
def ran(workspace) -> tuple[int, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        patch.setattr("sys.argv", ["kveval", "run", "sweep.yaml"])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    return int(stopped.value.code or 0), workspace / "runs" / "sweep"


def test_run_leaves_everything_a_reader_needs(ran):
    code, run = ran
    # A random model can't see damage: the controls must notice, whatever the numbers.
    assert code in (ExitCode.INVALID, ExitCode.INCONCLUSIVE, ExitCode.FAIL)
    for name in ("plan.json", "env.json", "self_test.json", "journal.jsonl", "manifest.json", "report.html"):
        assert (run / name).stat().st_size > 0
    verdict = json.loads((run / "gate.json").read_text())
    assert verdict["exit_code"] == code
    assert ElementTree.parse(run / "junit.xml").getroot().iter("testcase")
    assert (run / "summary.md").read_text().strip()
    assert list((run / "plots").glob("*.svg"))


def test_gate_repeats_the_runs_verdict(ran, monkeypatch, capsys):
    code, run = ran
    again, out, _ = call(monkeypatch, capsys, "gate", str(run), "--json")
    assert again == code
    assert json.loads(out)["exit_code"] == code


def test_another_gate_is_refused_unless_marked(ran, workspace, monkeypatch, capsys):
    _, run = ran
    sweep = yaml.safe_load((workspace / "sweep.yaml").read_text())
    sweep["gate"]["endpoints"][0]["margin"] = 5.0
    (workspace / "later.yaml").write_text(yaml.safe_dump(sweep))
    code, _, err = call(monkeypatch, capsys, "gate", str(run), "--config", str(workspace / "later.yaml"))
    assert code == ExitCode.USAGE
    assert "--post-hoc" in err
    _, out, _ = call(
        monkeypatch, capsys, "gate", str(run), "--config", str(workspace / "later.yaml"), "--post-hoc", "--json"
    )
    assert json.loads(out)["post_hoc"] is True


def test_report_json(ran, monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "report", str(ran[1]), "--json")
    assert code == 0
    assert json.loads(out)


def test_ls_and_show(ran, monkeypatch, capsys):
    _, run = ran
    code, out, _ = call(monkeypatch, capsys, "ls", str(run.parent), "--json")
    assert code == 0
    (row,) = json.loads(out)
    assert row["run"] == "sweep"
    assert row["records"] == row["planned"] == 2 * 3 * 5
    code, out, _ = call(monkeypatch, capsys, "show", str(run), "--json")
    assert json.loads(out)["plan"]["config"]["name"] == "sweep"
    code, out, _ = call(monkeypatch, capsys, "show", str(run))
    assert code == 0
    assert "fp8_e4m3" in out


def test_plan_prints_grid_and_power(workspace, monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "plan", str(workspace / "sweep.yaml"))
    assert code == 0
    assert "niah_single" in out
    assert "margin 0.2" in out
    code, out, _ = call(monkeypatch, capsys, "plan", str(workspace / "sweep.yaml"), "--json")
    assert len(json.loads(out)["cells"]) == 10


def test_init_writes_a_config_that_loads(tmp_path, monkeypatch, capsys):
    from kveval.config import load_config

    path = tmp_path / "mine.yaml"
    code, _, err = call(monkeypatch, capsys, "init", str(path))
    assert code == 0
    assert f"kveval plan {path}" in err
    assert load_config(path).gate is not None
    code, _, err = call(monkeypatch, capsys, "init", str(path))
    assert code == ExitCode.USAGE
    assert "exists already" in err


def test_capacity(tiny_model, monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "capacity", str(tiny_model), "--context", "4k", "--json")
    assert code == 0
    rows = {row["scheme"]: row for row in json.loads(out)}
    assert rows["fp8_e4m3"]["bytes_per_token"] * 2 == rows["bf16"]["bytes_per_token"]


def test_schema_is_json(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "schema")
    assert code == 0
    assert "context_lengths" in json.loads(out)["properties"]


def test_doctor(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "doctor", "--json")
    assert code == 0
    assert all(scheme["works"] for scheme in json.loads(out)["schemes"])
    code, out, _ = call(monkeypatch, capsys, "doctor")
    assert "nvfp4" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nothing.yaml"], "can't read nothing.yaml"),
        (["report", "nothing"], "is not a run's folder"),
        (["gate", "nothing"], "is not a run's folder"),
        (["models", "fetch", "smollm"], "unknown model 'smollm'"),
        (["capacity", "nothing-like-this"], "unknown model 'nothing-like-this'"),
        (["ls", "nothing"], "no folder"),
    ],
)
def test_user_errors_have_a_message_and_no_traceback(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == ExitCode.USAGE
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("key", "value", "line", "message"),
    [
        ("tasks", [{"name": "niah_singel"}], "tasks", "Did you mean 'niah_single'"),
        ("tasks", [{"name": "niah_single", "fillr": "noise"}], "tasks", "Did you mean 'filler'"),
        ("model", {"id": "smolm2-135m"}, "model", "Did you mean 'smollm2-135m'"),
    ],
)
def test_wrong_names_in_a_config_name_the_line(workspace, tmp_path, monkeypatch, capsys, key, value, line, message):
    sweep = yaml.safe_load((workspace / "sweep.yaml").read_text())
    del sweep["gate"]
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({**sweep, key: value}))
    (number,) = [i for i, text in enumerate(path.read_text().splitlines(), 1) if text.startswith(line)]
    code, _, err = call(monkeypatch, capsys, "plan", str(path))
    assert code == ExitCode.USAGE
    assert f"{path}:{number}" in err or f"{path}:{number + 1}" in err
    assert message in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("capacity.gpu=h1000", "unknown GPU 'h1000'"),
        ("gate.endpoints.0.metric=exact_match", "has no exact_match"),
    ],
)
def test_what_could_only_fail_after_the_sweep_fails_before_it(workspace, monkeypatch, capsys, change, message):
    code, _, err = call(monkeypatch, capsys, "plan", str(workspace / "sweep.yaml"), "--set", change)
    assert code == ExitCode.USAGE
    assert message in err


def test_models_without_a_verb_lists_them(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "models")
    assert code == 0
    assert "smollm2-135m" in out


def test_bad_lengths_and_gpus(tiny_model, monkeypatch, capsys):
    code, _, err = call(monkeypatch, capsys, "capacity", str(tiny_model), "--context", "4q")
    assert (code, "4q" in err) == (ExitCode.USAGE, True)
    code, _, err = call(monkeypatch, capsys, "capacity", str(tiny_model), "--gpu", "h1000")
    assert (code, "unknown GPU 'h1000'" in err) == (ExitCode.USAGE, True)


def test_interrupt_says_how_to_resume(monkeypatch, capsys, workspace):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kveval.run.run_sweep", interrupted)
    code, _, err = call(monkeypatch, capsys, "run", str(workspace / "sweep.yaml"), "--out", str(workspace / "x"))
    assert code == ExitCode.INTERRUPTED
    assert "resume" in err


def test_capacity_leaves_out_formats_that_the_model_cannot_store(monkeypatch, capsys, tmp_path):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 160, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64,
    }  # fmt: skip
    layers = geometry_from_config(config)
    info = SimpleNamespace(geometry=layers, weights_bytes=1000)
    monkeypatch.setattr("kveval.models.describe", lambda *a, **k: info)
    code, out, err = call(monkeypatch, capsys, "capacity", "some/model", "--context", "4k", "--json")
    assert code == 0
    assert "q8_0 is left out: llama.cpp's blocks hold 32 elements; a head of 80 is no multiple of it." in err
    assert {"nvfp4", "int4_g32"} <= {row["scheme"] for row in json.loads(out)}
    assert "q8_0" not in {row["scheme"] for row in json.loads(out)}
    code, _, err = call(monkeypatch, capsys, "capacity", "some/model", "--scheme", "q8_0")
    assert code == 2
    assert "head of 80" in err
