"""What the gate leaves for CI: text, gate.json, junit.xml, a job summary, a comment and annotations.

Everything is made from one `kveval.gate.Verdict`, so the forms can't disagree.
"""

from __future__ import annotations

import json
import logging
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kveval.gate import EndpointResult, Verdict
from kveval.stats import Comparison

__all__ = [
    "GATE_SCHEMA_VERSION",
    "append_step_summary",
    "comment_markdown",
    "gate_dict",
    "gate_text",
    "github_annotations",
    "junit_xml",
    "summary_markdown",
    "write_gate_files",
]

log = logging.getLogger(__name__)

GATE_SCHEMA_VERSION = 1
"""Version of gate.json. Raised when a field changes its meaning or goes away."""

STEP_SUMMARY_LIMIT = 1024 * 1024
"""Bytes that GitHub accepts as the summary of one step."""

COMMENT_LIMIT = 65_536
"""Characters that GitHub accepts in one comment."""

MAX_ANNOTATIONS = 10
"""GitHub shows at most 10 annotations of a kind per step."""

COMMENT_ROWS = 20

_WORST_FIRST = ("FAIL", "INCOMPLETE", "INCONCLUSIVE", "NON_DISCRIMINATIVE", "PASS")


def gate_dict(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain data, the content of gate.json. Holds no NaN: what is undefined is null."""
    return {
        "schema": "kveval.gate",
        "schema_version": GATE_SCHEMA_VERSION,
        "status": verdict.status,
        "exit_code": int(verdict.exit_code),
        "first_line": verdict.first_line,
        "scheme": verdict.scheme,
        "confidence": verdict.confidence,
        "on_inconclusive": verdict.on_inconclusive,
        "post_hoc": verdict.post_hoc,
        "gate_digest": verdict.gate_digest,
        "endpoints": [_endpoint_dict(e) for e in verdict.endpoints],
        "controls": [{**asdict(c), "blocking": c in verdict.blocking} for c in verdict.controls],
        "notes": list(verdict.notes),
    }


def gate_text(verdict: Verdict) -> str:
    """The verdict as plain text: first line, endpoints worst first, failed controls, notes."""
    lines = [verdict.first_line, ""]
    for end in _worst_first(verdict):
        lines.append(f"  {end.status:<18} {_name(end)}: {end.message}")
    failed = [c for c in verdict.controls if not c.ok]
    if failed:
        lines += ["", "Controls:"]
        lines += [f"  {c.severity.upper():<18} {c.name}: {c.detail}" for c in failed]
    lines += ["", *_own_notes(verdict)]
    return "\n".join(lines) + "\n"


def junit_xml(verdict: Verdict) -> str:
    """JUnit XML with one test case per endpoint.

    FAIL is a failure; INCOMPLETE is an error, and so is every endpoint of a verdict that is void as a
    whole (INVALID, or INCOMPLETE by a control); a non-discriminative endpoint is skipped; INCONCLUSIVE is a
    failure, or skipped when the gate lets it pass.
    """
    counts = {"failure": 0, "error": 0, "skipped": 0}
    suite = ET.Element("testsuite", name=f"kveval gate {_xml_safe(verdict.scheme)}")
    properties = ET.SubElement(suite, "properties")
    described = {
        "status": verdict.status,
        "exit_code": str(int(verdict.exit_code)),
        "gate_digest": verdict.gate_digest,
        "post_hoc": str(verdict.post_hoc).lower(),
        "first_line": verdict.first_line,
    }
    for key, value in described.items():
        ET.SubElement(properties, "property", name=key, value=_xml_safe(value))
    for end in verdict.endpoints:
        names = {"classname": _xml_safe(f"kveval.gate.{verdict.scheme}"), "name": _xml_safe(_name(end))}
        case = ET.SubElement(suite, "testcase", names, time="0")
        kind, message = _junit_outcome(verdict, end)
        if kind is not None:
            counts[kind] += 1
            attributes = {"message": _xml_safe(message)}
            if kind != "skipped":
                attributes["type"] = verdict.status if kind == "error" else end.status
            ET.SubElement(case, kind, attributes)
        ET.SubElement(case, "system-out").text = _xml_safe(end.message)
    suite.set("tests", str(len(verdict.endpoints)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def summary_markdown(verdict: Verdict) -> str:
    """The verdict as Markdown, with every endpoint and every failed control."""
    return _markdown(verdict, _worst_first(verdict))


def comment_markdown(verdict: Verdict, *, key: str | None = None) -> str:
    """A comment-sized form. Its first line is a hidden marker, by which a bot finds and updates it in place.

    Args:
        verdict: what to show.
        key: tells several gates of one pull request apart; default the scheme's name.
    """
    marker = f"<!-- kveval-gate:{re.sub(r'[^A-Za-z0-9_.]+', '_', key or verdict.scheme)} -->\n"
    ends = _worst_first(verdict)
    for rows in (COMMENT_ROWS, 5, 0):
        text = marker + _markdown(verdict, ends[:rows], left_out=max(len(ends) - rows, 0))
        if len(text) <= COMMENT_LIMIT:
            return text
    return f"{marker}**{verdict.status}**: the details are too long for a comment; see gate.json.\n"


def github_annotations(verdict: Verdict) -> list[str]:
    """GitHub workflow commands, worst first, at most ten; the last one says how many were left out."""
    level = "error" if verdict.exit_code else "warning"
    found = [_command(level, f"kveval gate: control {c.name}", c.detail) for c in verdict.blocking]
    found += [
        _command(level, f"kveval gate: {_name(e)}", e.message) for e in _worst_first(verdict) if e.status != "PASS"
    ]
    if len(found) <= MAX_ANNOTATIONS:
        return found
    rest = len(found) - (MAX_ANNOTATIONS - 1)
    return [*found[: MAX_ANNOTATIONS - 1], _command(level, "kveval gate", f"{rest} more; see gate.json.")]


def append_step_summary(markdown: str, path: Path) -> None:
    """Append to a GitHub step summary. Over GitHub's limit, a short note is written instead, and logged."""
    used = path.stat().st_size if path.exists() else 0
    note = "\n**kveval gate**: the summary is longer than GitHub accepts; see summary.md of the run.\n"
    for text in ("\n" + markdown, note):
        if used + len(text.encode()) <= STEP_SUMMARY_LIMIT:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
            if text is note:
                log.warning("the gate's summary did not fit into the step summary; a note stands there")
            return
    log.warning("the step summary is full; the gate's summary is only in summary.md")


def write_gate_files(
    verdict: Verdict,
    folder: Path,
    *,
    environ: Mapping[str, str] | None = None,
    comment_key: str | None = None,
) -> dict[str, Path]:
    """Write gate.json, junit.xml, summary.md and comment.md into `folder`, each whole or not at all.

    Appends the summary to the file that GITHUB_STEP_SUMMARY names, when it is set.

    Returns:
        File name -> path.
    """
    environ = os.environ if environ is None else environ
    folder.mkdir(parents=True, exist_ok=True)
    summary = summary_markdown(verdict)
    texts = {
        "gate.json": json.dumps(gate_dict(verdict), indent=2, allow_nan=False) + "\n",
        "junit.xml": junit_xml(verdict),
        "summary.md": summary,
        "comment.md": comment_markdown(verdict, key=comment_key),
    }
    paths = {name: folder / name for name in texts}
    for name, text in texts.items():
        partial = folder / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(paths[name])
    if step_summary := environ.get("GITHUB_STEP_SUMMARY"):
        append_step_summary(summary, Path(step_summary))
    return paths


def _endpoint_dict(end: EndpointResult) -> dict[str, Any]:
    return {
        "metric": end.metric,
        "task": end.task,
        "context_length": end.context_length,
        "margin": end.margin,
        "status": end.status,
        "message": end.message,
        "competence": end.competence,
        "n_expected": end.n_expected,
        "samples_needed": end.samples_needed,
        "p_noninferior": end.p_noninferior,
        "p_inferior": end.p_inferior,
        "p_inferior_holm": end.p_inferior_holm,
        "comparison": _comparison_dict(end.comparison) if end.comparison is not None else None,
    }


def _comparison_dict(comparison: Comparison) -> dict[str, Any]:
    data = asdict(comparison)
    del data["distribution"]  # the bounds and p-values made from it are already here
    return {**data, "notes": list(comparison.notes)}


def _worst_first(verdict: Verdict) -> list[EndpointResult]:
    return sorted(verdict.endpoints, key=lambda e: _WORST_FIRST.index(e.status))


def _name(end: EndpointResult) -> str:
    return f"{end.metric} on {end.task} at {end.context_length:,} tokens"


def _own_notes(verdict: Verdict) -> list[str]:
    """Notes that are not already shown as a failed control."""
    shown = {f"{c.name}: {c.detail}" for c in verdict.controls if not c.ok}
    return [note for note in verdict.notes if note not in shown]


def _junit_outcome(verdict: Verdict, end: EndpointResult) -> tuple[str | None, str]:
    severity = "invalid" if verdict.status == "INVALID" else "incomplete"
    void = next((c for c in verdict.blocking if c.severity == severity), None)
    if void is not None:
        return "error", f"{verdict.status}: {void.name}: {void.detail}"
    if end.status == "INCONCLUSIVE":
        return ("skipped" if verdict.on_inconclusive == "pass" else "failure"), end.message
    kinds = {"FAIL": "failure", "INCOMPLETE": "error", "NON_DISCRIMINATIVE": "skipped", "PASS": None}
    return kinds[end.status], end.message


def _xml_safe(text: str) -> str:
    """Replaces characters that XML 1.0 can't hold (an error message may carry any)."""
    return re.sub("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _cell_text(text: str) -> str:
    """Text for a Markdown table cell: no column breaks, no line breaks, no HTML."""
    return re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _markdown(verdict: Verdict, ends: list[EndpointResult], *, left_out: int = 0) -> str:
    lines = [
        f"### kveval gate: {_cell_text(verdict.scheme)}",
        "",
        f"**{_cell_text(verdict.first_line)}**",
        "",
    ]
    if ends:
        lines += [
            "| status | endpoint | loss | bounds | margin | n |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_row(end) for end in ends]
        lines.append("")
    if left_out:
        lines += [f"{left_out} more endpoints are in gate.json.", ""]
    failed = [c for c in verdict.controls if not c.ok]
    if failed:
        lines += ["Controls:", ""]
        lines += [f"- {c.severity}: {_cell_text(c.name)}: {_cell_text(c.detail)}" for c in failed]
        lines.append("")
    lines += [f"- {_cell_text(note)}" for note in _own_notes(verdict)]
    lines += ["", f"Bounds are one-sided at {verdict.confidence:.0%} each. Gate {verdict.gate_digest}."]
    return "\n".join(lines) + "\n"


def _row(end: EndpointResult) -> str:
    comparison = end.comparison
    loss = bounds = n = "-"
    if comparison is not None and comparison.loss.value is not None:
        loss, n = f"{comparison.loss.value:.4g}", str(comparison.n_pairs)
        if comparison.lower is not None and comparison.upper is not None:
            bounds = f"{comparison.lower:.4g} to {comparison.upper:.4g}"
    status = end.status.lower().replace("_", "-") if end.status == "NON_DISCRIMINATIVE" else end.status
    cells = (status, _name(end), loss, bounds, f"{end.margin:g}", n)
    return "| " + " | ".join(_cell_text(c) for c in cells) + " |"


def _command(level: str, title: str, message: str) -> str:
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    heading = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title={heading.replace(':', '%3A').replace(',', '%2C')}::{text}"
