from __future__ import annotations

import json
import logging
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stat_records import BASELINE, CRUSH, failed, frame, sweep

from kveval.config import GateConfig, GateEndpoint
from kveval.gate import Verdict, decide
from kveval.records import Record
from kveval.report.ci import (
    COMMENT_LIMIT,
    STEP_SUMMARY_LIMIT,
    append_step_summary,
    comment_markdown,
    gate_dict,
    gate_text,
    github_annotations,
    junit_xml,
    summary_markdown,
    write_gate_files,
)


def made(rows: list[Record], *, task: str = "niah", nll: float = 0.1, match: float = 0.05, **fields: Any) -> Verdict:
    ends = (
        GateEndpoint(metric="answer_nll", task=task, context_length=2048, margin=nll),
        GateEndpoint(metric="exact_match", task=task, context_length=2048, margin=match),
    )
    return decide(frame(rows), GateConfig(scheme="s", endpoints=ends, **fields))


def passing() -> Verdict:
    return made(sweep())


def failing() -> Verdict:
    return made(sweep(loss=1.0))


def inconclusive(**fields: Any) -> Verdict:
    return made(sweep(n=30), match=0.01, **fields)


def incomplete() -> Verdict:
    return made([failed(r) if r.scheme == "s" and r.sample_index == 2 else r for r in sweep()])


def invalid() -> Verdict:
    return made(sweep(aa=2.0))


def at_floor() -> Verdict:
    return made([replace(r, exact_match=0.0) for r in sweep()])


def outcomes(verdict: Verdict) -> list[str]:
    """Outcome of each test case, in declared order."""
    cases = ET.fromstring(junit_xml(verdict)).iter("testcase")
    return [next((c.tag for c in case if c.tag != "system-out"), "passed") for case in cases]


@pytest.mark.parametrize(
    ("verdict", "status", "code", "tests"),
    [
        (passing(), "PASS", 0, ["passed", "passed"]),
        (failing(), "FAIL", 10, ["failure", "passed"]),
        (inconclusive(), "INCONCLUSIVE", 11, ["passed", "failure"]),
        (inconclusive(on_inconclusive="pass"), "INCONCLUSIVE", 0, ["passed", "skipped"]),
        (incomplete(), "INCOMPLETE", 12, ["error", "error"]),
        (invalid(), "INVALID", 13, ["error", "error"]),
        (at_floor(), "INCONCLUSIVE", 11, ["passed", "skipped"]),
    ],
    ids=["pass", "fail", "inconclusive", "inconclusive-passes", "incomplete", "invalid", "floor"],
)
def test_every_form_says_the_same(verdict: Verdict, status: str, code: int, tests: list[str]) -> None:
    data = gate_dict(verdict)
    assert (data["status"], data["exit_code"]) == (status, code) == (verdict.status, int(verdict.exit_code))
    assert outcomes(verdict) == tests
    suite = ET.fromstring(junit_xml(verdict)).find("testsuite")
    assert suite is not None
    counts = {
        kind: tests.count(tag) for kind, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    assert {k: int(suite.get(k, "")) for k in counts} == counts
    assert suite.get("tests") == "2"
    assert gate_text(verdict).startswith(verdict.first_line + "\n")
    assert verdict.first_line.split(":")[0] in summary_markdown(verdict)
    assert bool(github_annotations(verdict)) == (status != "PASS")
    assert all(a.startswith("::error " if code else "::warning ") for a in github_annotations(verdict))


def test_gate_json_is_versioned_strict_json_and_complete() -> None:
    verdict = failing()
    data = json.loads(json.dumps(gate_dict(verdict), allow_nan=False))
    assert (data["schema"], data["schema_version"]) == ("kveval.gate", 1)
    first = data["endpoints"][0]
    comparison = verdict.endpoints[0].comparison
    assert comparison is not None
    assert first["comparison"]["upper"] == comparison.upper
    assert first["comparison"]["loss"]["n"] == 120
    assert "distribution" not in first["comparison"]
    assert {c["name"] for c in data["controls"]} >= {"A/A clean", "crush caught", "exact zero", "bytes"}
    undefined = made([replace(r, cluster="x") for r in sweep()])
    json.dumps(gate_dict(undefined), allow_nan=False)


def test_names_and_messages_from_users_break_nothing() -> None:
    rows = [replace(r, task="a|b <x>\x00&", error="bad \x1b[0m") for r in sweep(n=30)]
    rows = [failed(r) if r.scheme == "s" and r.sample_index == 0 else r for r in rows]
    verdict = made(rows, task="a|b <x>\x00&")
    case = next(ET.fromstring(junit_xml(verdict)).iter("testcase"))
    assert case.get("name") == "answer_nll on a|b <x>\ufffd& at 2,048 tokens"
    table = [line for line in summary_markdown(verdict).splitlines() if line.startswith("| INCOMPLETE")]
    assert len(table) == 2
    assert "a\\|b &lt;x>" in table[0]
    verdict = replace(passing(), scheme="x:y,z", first_line="50% off\nnext")
    assert "\n" not in "".join(github_annotations(replace(failing(), scheme="x:y")))
    assert comment_markdown(verdict).startswith("<!-- kveval-gate:x_y_z -->\n")


def many(count: int) -> Verdict:
    rows, ends = [], []
    for i in range(count):
        rows += sweep(n=20, loss=1.0, task=f"t{i}", seed=i)
        ends.append(GateEndpoint(metric="answer_nll", task=f"t{i}", context_length=2048, margin=0.1))
    return decide(frame(rows), GateConfig(scheme="s", endpoints=tuple(ends)))


def test_at_most_ten_annotations_and_twenty_rows_in_a_comment() -> None:
    verdict = many(24)
    found = github_annotations(verdict)
    assert len(found) == 10
    assert found[-1] == "::error title=kveval gate::15 more; see gate.json."
    assert "title=kveval gate%3A answer_nll on t0 at 2%2C048 tokens::" in found[0]
    comment = comment_markdown(verdict)
    assert comment.count("| FAIL |") == 20
    assert "4 more endpoints are in gate.json." in comment
    assert summary_markdown(verdict).count("| FAIL |") == 24


def test_a_comment_never_exceeds_what_github_accepts() -> None:
    verdict = failing()
    long = replace(verdict, notes=tuple("x" * 1000 for _ in range(100)))
    comment = comment_markdown(long)
    assert len(comment) <= COMMENT_LIMIT
    assert "see gate.json" in comment
    assert comment.startswith("<!-- kveval-gate:s -->\n**FAIL**")


def test_the_files_and_the_step_summary(tmp_path: Path) -> None:
    step = tmp_path / "step.md"
    step.write_text("before\n")
    paths = write_gate_files(failing(), tmp_path / "run", environ={"GITHUB_STEP_SUMMARY": str(step)})
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "comment.md",
        "gate.json",
        "junit.xml",
        "summary.md",
    ]
    assert json.loads(paths["gate.json"].read_text())["status"] == "FAIL"
    assert step.read_text() == "before\n\n" + paths["summary.md"].read_text()
    write_gate_files(passing(), tmp_path / "run", environ={})
    assert json.loads(paths["gate.json"].read_text())["status"] == "PASS"


def test_a_full_step_summary_is_told_and_never_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = tmp_path / "step.md"
    step.write_bytes(b"x" * (STEP_SUMMARY_LIMIT - 200))
    with caplog.at_level(logging.WARNING):
        append_step_summary("y" * 300, step)
    assert "a note stands there" in caplog.text
    assert step.stat().st_size <= STEP_SUMMARY_LIMIT
    assert step.read_text().endswith("see summary.md of the run.\n")
    step.write_bytes(b"x" * STEP_SUMMARY_LIMIT)
    append_step_summary("y", step)
    assert step.stat().st_size == STEP_SUMMARY_LIMIT
    assert "is full" in caplog.text


def test_the_text_shows_the_worst_first_and_each_control_once() -> None:
    rows = sweep(loss=1.0, aa=2.0)
    text = gate_text(made([r for r in rows if r.scheme != CRUSH]))
    assert text.count("A/A clean") == 2  # in the first line and among the controls
    lines = [line.split()[0] for line in gate_text(failing()).splitlines() if line.startswith("  ")]
    assert lines == ["FAIL", "PASS"]
    assert BASELINE not in text.splitlines()[0]
