"""Published runs stay readable, and a plan that can't be read says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kveval.config import SweepConfig
from kveval.errors import StoreError
from kveval.evaluate import evaluate
from kveval.formats.spec import get_scheme
from kveval.report.tables import report_json
from kveval.store import read_plan
from tests.test_cli import call

PUBLISHED = sorted(p.parent for p in (Path(__file__).parent.parent / "results").glob("*/plan.json"))


@pytest.fixture
def run(tmp_path) -> Path:
    """A published run in its place, to be changed."""
    return Path(shutil.copytree(PUBLISHED[0], tmp_path / "run"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_a_published_run_is_judged_as_it_was(path):
    evaluation = evaluate(path)
    judged = path / "gate.json"
    status = None if evaluation.verdict is None else evaluation.verdict.status
    assert status == (json.loads(judged.read_text())["status"] if judged.exists() else None)
    assert evaluation.records.attrs["complete"]
    assert [row["scheme"] for row in report_json(evaluation.report)["cells"]]


@pytest.mark.slow
def test_a_published_run_is_reported(run, monkeypatch, capsys):
    code, printed, _ = call(monkeypatch, capsys, "report", str(run))
    assert code == 0
    assert "k8v4" in printed
    assert (run / "report.html").stat().st_size > 100_000


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_a_published_scheme_is_the_preset_of_its_name(path):
    config = SweepConfig.model_validate(read_plan(path)["config"])
    assert {s.name: s.identity() for s in config.schemes} == {
        s.name: get_scheme(s.name).identity() for s in config.schemes
    }


def change(run: Path, edit) -> None:
    plan = json.loads((run / "plan.json").read_text())
    edit(plan)
    (run / "plan.json").write_text(json.dumps(plan))


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda p: p["config"].update(speed=3), "config.speed: Extra inputs are not permitted"),
        (lambda p: p["config"]["schemes"][0].update(rotor=3), r"config.schemes.0.rotor: Extra"),
        (lambda p: p["config"]["schemes"][0]["key"].update(element="e9m9"), "unknown element type 'e9m9'"),
        (lambda p: p["config"]["schemes"][0].pop("key"), "KeyError: 'key'|config.schemes.0.key: Field required"),
        (lambda p: p["config"].pop("tasks"), "config.tasks: Field required"),
        (lambda p: p.pop("config"), "KeyError: 'config'"),
        (lambda p: p.pop("cells"), "KeyError: 'cells'"),
        (lambda p: p["model"].pop("geometry"), "KeyError: 'geometry'"),
        (lambda p: p["model"]["geometry"][0].update(spin=3), "unexpected keyword argument 'spin'"),
        (lambda p: p["model"].update(geometry=3), "TypeError"),
    ],
)
def test_a_plan_that_cannot_be_read_says_what_and_what_to_do(run, edit, problem):
    change(run, edit)
    with pytest.raises(StoreError, match=f"can't read .*plan.json: .*({problem})") as caught:
        evaluate(run)
    assert "run the sweep again" in caught.value.remedy


@pytest.mark.parametrize("text", ["{", "[1]", "", "\xff"])
def test_a_plan_that_is_no_json(run, text):
    (run / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=r"Can't read .*plan\.json") as caught:
        evaluate(run)
    assert caught.value.remedy
