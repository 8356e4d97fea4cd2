from __future__ import annotations

import json

import pytest
from report_records import ENV, make_config, make_data, make_plan, make_records, with_answers, with_key_tokens
from rich.console import Console

from kveval.capacity import Budget, get_gpu, sessions_table
from kveval.formats.spec import get_scheme
from kveval.geometry import LayerGeometry
from kveval.report.cells import Arm
from kveval.report.tables import (
    capacity_json,
    capacity_table,
    findings_table,
    models_table,
    report_json,
    run_summary,
    runs_table,
    terminal_report,
)

LAYERS = [LayerGeometry(kind="full", kv_heads=8, head_dim_k=128, head_dim_v=128)] * 32


def printed(renderable, *, width: int = 120) -> str:
    console = Console(width=width, color_system=None, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


@pytest.fixture(scope="module")
def data():
    schemes = ["k8v4", "mxfp4"]
    records = make_records(samples=12, lengths=(512, 2048), schemes=tuple(schemes))
    return make_data(records, make_config(schemes=schemes, context_lengths=[512, 2048], gate=None))


@pytest.fixture(scope="module")
def sessions():
    schemes = [get_scheme(s) for s in ("bf16", "fp8_e4m3")]
    return sessions_table(LAYERS, schemes, [4096, 100_000], budget=Budget(get_gpu("80gb"), 16 * 10**9, 0))


def test_the_worst_cell_is_on_top(data):
    lines = printed(terminal_report(data, limit=3)).splitlines()
    assert lines[0] == data.headline
    assert lines[2].startswith("Against the baseline, largest loss in answer NLL first")
    worst = data.ranked("answer_nll")[0]
    kl = data.comparison(Arm(worst.scheme, "scheme"), worst.task, worst.context_length, "kl")
    assert lines[5].split()[:2] == [worst.scheme, worst.task]
    assert lines[5].split()[3] == f"{kl.loss.value:.3g}"
    assert "9 more cells are in report.html." in "\n".join(lines)


def test_verdict_then_cells_then_the_exchange(data):
    text = printed(terminal_report(data))
    assert text.index(data.headline) < text.index("largest loss") < text.index(data.sentences[0][:30])


def test_columns_that_do_not_fit_are_left_out(data):
    widths = {}
    for width in (80, 66, 54):
        lines = printed(terminal_report(data, limit=3), width=width).splitlines()
        assert all(len(line) <= width for line in lines)
        at = next(i for i, line in enumerate(lines) if line.startswith("format"))
        widths[width] = [n for n in ("KL", "answer NLL", "exact match", "samples") if n in lines[at]]
        rows = lines[at + 1 : at + 4]
        assert [row.split()[0] for row in rows] == [c.scheme for c in data.ranked("answer_nll")[:3]]  # none is broken
        assert [row.split()[1] for row in rows] == [c.task for c in data.ranked("answer_nll")[:3]]
    assert widths == {
        80: ["KL", "answer NLL", "exact match", "samples"],
        66: ["KL", "answer NLL", "exact match"],
        54: ["KL", "answer NLL"],
    }


@pytest.fixture(scope="module")
def written():
    records = make_records(samples=12, lengths=(512,), schemes=("k8v4",))
    records = with_answers(records, "niah_multikey", places=5, finish=("stop", "length", "thinking"))
    records = with_key_tokens(records, "perplexity", [0, 4])
    return make_data(records, make_config(schemes=["k8v4"], context_lengths=[512], gate=None))


def test_task_scores_have_a_column_where_there_are_any(written):
    columns = {}
    for width in (100, 74, 64, 52):
        lines = printed(terminal_report(written), width=width).splitlines()
        (head,) = [line for line in lines if line.startswith("format")]
        columns[width] = [n for n in ("KL", "answer NLL", "exact match", "task score", "samples") if n in head]
    assert columns[100] == ["KL", "answer NLL", "exact match", "task score", "samples"]
    assert columns[52] == ["KL", "answer NLL"]
    assert "task score" in columns[74]
    assert "exact match and task score in points" in printed(terminal_report(written))


def test_thoughts_that_were_cut_are_told_in_the_terminal(written):
    text = " ".join(printed(terminal_report(written)).split())
    assert "4 of 12 answers of bf16 and 4 of 12 of k8v4 were still thinking at max_new_tokens (32)" in text
    assert "reached max_new_tokens" not in text
    assert "perplexity at 512 tokens: NLL, KL and flips are over the 24 key tokens of 12 samples alone" in text


def test_report_json_tells_of_written_answers(written):
    plain = json.loads(json.dumps(report_json(written), allow_nan=False))
    assert plain["answers"][0] == {
        "arm": {"scheme": "bf16", "role": "baseline"},
        "task": "niah_multikey",
        "context_length": 512,
        "n": 12,
        "at_length": 4,
        "thinking": 4,
        "max_new_tokens": 32,
        "stopped": 4,
    }
    assert plain["key_tokens"] == [{"task": "perplexity", "context_length": 512, "tokens": 24, "n": 12, "without": 6}]
    assert {c["metric"] for c in plain["cells"] if c["task"] == "perplexity"} == {"answer_nll", "kl", "top1_flips"}
    assert [p["first"] for p in plain["positions"] if p["arm"]["role"] == "baseline"] == [1, 2, 3, 4, 5]
    assert len(plain["notes"]) == 2


def test_few_clusters_are_told(data):
    text = printed(terminal_report(data), width=400)
    assert "Intervals rest on 3 to 12 clusters of samples" in text
    assert "from about 40 clusters on: take more samples before deciding on these figures." in text


def test_exchange_rates_are_in_words(data):
    assert data.sentences[0][:60] in printed(terminal_report(data), width=400)


def test_report_json_is_plain_and_has_no_nan(data):
    plain = json.loads(json.dumps(report_json(data), allow_nan=False))
    assert (plain["schema"], plain["schema_version"], plain["status"]) == ("kveval.report", 1, None)
    assert len(plain["cells"]) == len(data.comparisons)
    assert plain["exchange"][0]["loss"]["value"] == data.exchange[0].loss.value


def test_capacity_shows_gain_over_the_baseline(sessions):
    text = printed(capacity_table(sessions, model="llama-8b"))
    assert "Sessions of llama-8b at once on 80gb" in text
    row = next(line for line in text.splitlines() if line.startswith("fp8_e4m3"))
    assert row.split() == ["fp8_e4m3", "65,536", "238", "(2.00x)", "9", "(2.25x)"]
    assert "59.6 GiB of each GPU are left for caches." in text


def test_capacity_json(sessions):
    last = capacity_json(sessions)[-1]
    assert (last["scheme"], last["context_length"], last["sessions"]) == ("fp8_e4m3", 100_000, 9)
    assert last["sessions_fractional"] == pytest.approx(9.765625)
    assert last["bytes_per_token"] == 65_536


def test_models_say_how_to_get_them():
    row = {"name": "a", "hub_id": "org/a", "licence": "MIT", "download_bytes": 98_362_432, "present": False}
    text = printed(models_table([row, {**row, "name": "b", "present": True}]))
    assert "kveval models fetch a" in text
    assert "98 MB" in text


def test_findings_show_machine_models_and_formats():
    scheme = {
        "scheme": "k8v4",
        "keys": "e4m3 per_token",
        "values": "e2m1 per_group",
        "bytes_per_token_and_head_of_128": 204,
        "read_through": "packed",
        "works": False,
        "problem": "nothing was encoded",
    }
    text = printed(findings_table({"env": ENV, "models": {"a": True, "b": False}, "schemes": [scheme]}))
    assert "packages.torch" in text
    assert "2.13.0" in text
    assert "NO: nothing was encoded" in text


def test_runs():
    assert "No runs here" in printed(runs_table([]))
    text = printed(runs_table([{"name": "quickstart", "records": 12, "finished": True, "model": None}]))
    assert text.split() == ["name", "records", "finished", "model", "quickstart", "12", "True", "–"]


def test_run_summary():
    plan = make_plan()
    cell = {"task": "niah_multikey", "context_length": 2048, "scheme": "k8v4", "samples": 64}
    text = printed(run_summary({**plan, "gate_digest": None, "cells": [cell, cell]}, ENV))
    assert "none declared" in text
    assert "2 with 128 samples" in text
