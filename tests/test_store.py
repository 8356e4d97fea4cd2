"""Run folders: resuming, damage, locks, and Parquet that is the same bytes for the same records."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval import journal as journal_module
from kveval.errors import MeasurementError, StoreError
from kveval.files import sha256
from kveval.journal import read_journal
from kveval.records import ADDED, SCHEMA_VERSION, Record
from kveval.store import RunStore, arrow_schema, list_runs, read_env, read_plan, read_records

PLAN = {
    "schema_version": SCHEMA_VERSION,
    "plan_digest": "aaaa",
    "config": {"samples": 4, "seed": 0},
    "cells": ["c0"],
}


def record(index: int = 0, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "cell_id": "c0",
        "sample_id": f"s{index}",
        "sample_index": index,
        "cluster": f"k{index}",
        "task": "niah_single",
        "task_version": 1,
        "scheme": "k8v4",
        "role": "scheme",
        "context_length": 512,
        "depth": 0.5,
        "status": "ok",
        "answer_nll": 0.1 + index,
        "token_nll": [0.1, 0.2 + index],
        "stored_bytes": 1000,
    }
    return Record(**{**fields, **changes})


def failed(index: int) -> Record:
    return record(index, status="error", error="out of memory", answer_nll=None, token_nll=None)


def key(item: Record) -> tuple[str, str]:
    return item.cell_id, item.sample_id


def write(path: Path, *records: Record) -> None:
    with RunStore.open(path, PLAN) as store:
        for item in records:
            store.append(item)


def finished(path: Path, *records: Record) -> Path:
    with RunStore.open(path, PLAN) as store:
        for item in records:
            store.append(item)
        store.finish([key(item) for item in records])
    return path


# --- writing and resuming ---


def test_records_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with RunStore.open(run, PLAN) as store:
        for index in (2, 0, 1):
            store.append(record(index))
        assert store.done[("c0", "s2")] == record(2)
        store.finish([("c0", "s0"), ("c0", "s1"), ("c0", "s2")])
    frame = read_records(run)
    assert frame.attrs["complete"] is True
    assert tuple(frame.columns) == Record.columns()
    assert frame["sample_id"].tolist() == ["s0", "s1", "s2"]
    assert frame["answer_nll"].tolist() == [0.1, 1.1, 2.1]
    assert frame["token_nll"][2].tolist() == [0.1, 2.2]
    assert frame["kl"].isna().all(), "missing is missing, not 0"
    assert read_plan(run) == PLAN


def test_resume_knows_what_is_done(tmp_path: Path) -> None:
    write(tmp_path / "a", record(0), record(1))
    with RunStore.open(tmp_path / "a", {**PLAN, "written_at": "later"}) as store:
        assert store.done == {("c0", "s0"): record(0), ("c0", "s1"): record(1)}


def test_a_journal_torn_at_any_byte_loses_only_its_last_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "a"
    write(run, record(0), record(1), record(2, cluster="Zürich 🗻"))
    whole = (run / "journal.jsonl").read_bytes()
    last = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for length in range(last, len(whole)):
        (run / "journal.jsonl").write_bytes(whole[:length])
        assert len(read_journal(run / "journal.jsonl")) == 2
        assert (run / "journal.jsonl").stat().st_size == length, "reading never changes the folder"
        caplog.clear()
        with RunStore.open(run, PLAN) as store:
            assert list(store.done) == [("c0", "s0"), ("c0", "s1")]
        assert ("half written" in caplog.text) == (length > last)
        assert (run / "journal.jsonl").read_bytes() == whole[:last]
    with RunStore.open(run, PLAN) as store:
        store.append(record(2, cluster="Zürich 🗻"))
    assert (run / "journal.jsonl").read_bytes() == whole


@pytest.mark.parametrize("deleted", range(4))
def test_a_deleted_line_is_a_sample_to_measure(tmp_path: Path, deleted: int) -> None:
    run = tmp_path / "a"
    write(run, *map(record, range(4)))
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    del lines[deleted]
    (run / "journal.jsonl").write_bytes(b"".join(lines))
    order = [("c0", f"s{i}") for i in range(4)]
    with RunStore.open(run, PLAN) as store:
        assert set(order) - store.done.keys() == {("c0", f"s{deleted}")}
        with pytest.raises(StoreError, match=rf"1 of 4 records are missing, the first is sample s{deleted}"):
            store.finish(order)
        store.append(record(deleted))
        store.finish(order)
    assert read_records(run)["sample_id"].tolist() == ["s0", "s1", "s2", "s3"]


def test_an_error_is_tried_again_once_per_session_and_the_later_record_wins(tmp_path: Path) -> None:
    run = tmp_path / "a"
    order = [("c0", "s0"), ("c0", "s1")]
    with RunStore.open(run, PLAN) as store:
        store.append(record(0))
        store.append(failed(1))
        assert store.done[("c0", "s1")].status == "error"
        store.finish(order)
    assert read_records(run)["status"].tolist() == ["ok", "error"]
    with RunStore.open(run, PLAN) as store:
        assert list(store.done) == [("c0", "s0")]
        store.finish(order)
        assert read_records(run)["status"].tolist() == ["ok", "error"], "the earlier error still counts"
        store.append(record(1))
        assert read_records(run).attrs["complete"] is False, "the manifest no longer holds"
        store.finish(order)
    frame = read_records(run)
    assert frame["status"].tolist() == ["ok", "ok"]
    assert frame["error"].isna().all()
    assert len((run / "journal.jsonl").read_bytes().splitlines()) == 3, "the error stays in the journal"


def test_a_sample_is_measured_once(tmp_path: Path) -> None:
    run = tmp_path / "a"
    with RunStore.open(run, PLAN) as store:
        store.append(record(0))
        with pytest.raises(StoreError, match="sample s0 of cell c0 was measured already"):
            store.append(record(0))
    line = (run / "journal.jsonl").read_bytes()
    (run / "journal.jsonl").write_bytes(line * 2)
    with pytest.raises(StoreError, match=r"journal\.jsonl, line 2: sample s0 of cell c0 was recorded before"):
        RunStore.open(run, PLAN)


def test_records_outside_the_plan_are_not_dropped(tmp_path: Path) -> None:
    with RunStore.open(tmp_path / "a", PLAN) as store:
        store.append(record(0))
        store.append(record(1))
        with pytest.raises(StoreError, match="1 records aren't in the plan, for example sample s1"):
            store.finish([("c0", "s0")])
        with pytest.raises(ValueError, match="names a record twice"):
            store.finish([("c0", "s0"), ("c0", "s0")])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [lambda x: {"kl": x}, lambda x: {"token_nll": [0.0, x]}])
def test_nan_is_no_measurement(tmp_path: Path, value: float, wrap: Any) -> None:
    with RunStore.open(tmp_path / "a", PLAN) as store:
        with pytest.raises(MeasurementError, match="not a finite number in sample s0 of cell c0"):
            store.append(record(0, **wrap(value)))
        store.append(record(0))
    assert len(read_records(tmp_path / "a")) == 1


def test_a_full_disk_stops_the_store_and_the_next_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "a"

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunStore.open(run, PLAN) as store:
        store.append(record(0))
        with monkeypatch.context() as patch:
            patch.setattr(journal_module.os, "fsync", full)
            with pytest.raises(StoreError, match="No space left on device"):
                store.append(record(1))
        with pytest.raises(ValueError, match="closed"):
            store.append(record(2))
        with pytest.raises(ValueError, match="closed"):
            store.finish([("c0", "s0")])
    with RunStore.open(run, PLAN) as store:
        assert list(store.done) == [("c0", "s0")]


def test_a_note_lies_beside_the_records(tmp_path: Path) -> None:
    with RunStore.open(tmp_path / "a", PLAN) as store:
        store.write_note("self_test.json", {"passed": False})
        store.write_note("self_test.json", {"passed": True})
        for name in ("plan.json", "manifest.json", "../b.json", "note.txt"):
            with pytest.raises(ValueError, match="can't be the name of a note"):
                store.write_note(name, {})
    assert json.loads((tmp_path / "a" / "self_test.json").read_bytes()) == {"passed": True}
    write(tmp_path / "a", record(0))
    assert read_plan(tmp_path / "a") == PLAN


# --- what is refused ---


def test_another_plan_is_refused_with_what_differs(tmp_path: Path) -> None:
    write(tmp_path / "a", record(0))
    other = {**PLAN, "plan_digest": "bbbb", "config": {"samples": 8, "seed": 0}, "cells": ["c0", "c1"]}
    with pytest.raises(StoreError) as caught:
        RunStore.open(tmp_path / "a", other)
    assert "Different: cells, config.samples." in caught.value.message
    assert "another --name" in caught.value.remedy
    assert "delete the folder" in caught.value.remedy
    with RunStore.open(tmp_path / "a", PLAN) as store:
        assert len(store.done) == 1, "a refusal releases the lock and changes nothing"


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", record(0))
    for file in ("manifest.json", "plan.json"):
        data = json.loads((run / file).read_bytes())
        (run / file).write_text(json.dumps({**data, "schema_version": 999}))
        with pytest.raises(StoreError, match=f"{file} has schema version 999; this kveval reads"):
            read_records(run)
    with pytest.raises(StoreError, match="schema version 999"):
        RunStore.open(run, PLAN)


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    run = tmp_path / "a"
    script = (
        "import sys, json\n"
        "from kveval.errors import StoreError\n"
        "from kveval.store import RunStore\n"
        "try:\n"
        "    RunStore.open(sys.argv[1], json.loads(sys.argv[2])).close()\n"
        "except StoreError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('opened')\n"
    )

    def other_process() -> str:
        command = [sys.executable, "-c", script, str(run), json.dumps(PLAN)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with RunStore.open(run, PLAN) as store:
        store.append(record(0))
        output = other_process()
        assert "Another process is writing this run" in output
        assert "--name" in output
        assert len(read_records(run)) == 1, "reading needs no lock"
    assert other_process() == "opened\n"


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Can't write to .*file/a: Not a directory"):
        RunStore.open(tmp_path / "file" / "a", PLAN)


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        RunStore.open(tmp_path / "a", PLAN)


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StoreError, match=r"not a run's folder: it has no plan\.json, but thesis\.tex"):
        RunStore.open(tmp_path, PLAN)


def test_a_crash_before_the_plan_was_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".plan.json.tmp").write_text('{"schema')
    write(tmp_path, record(0))
    assert read_plan(tmp_path) == PLAN


# --- reading what is damaged or not there ---


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"cell_id": "c0"', "Invalid JSON"),
        (b"[]", "should be an object"),
        (b"\x00\x00", "Invalid JSON"),
        (b"", "Invalid JSON"),
    ],
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, line: bytes, what: str) -> None:
    run = tmp_path / "a"
    write(run, *map(record, range(3)))
    lines = (run / "journal.jsonl").read_bytes().splitlines()
    lines[1] = line
    (run / "journal.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(StoreError, match=r"journal\.jsonl, line 2 is damaged") as caught:
        RunStore.open(run, PLAN)
    assert what in caught.value.message
    assert "Delete that line" in caught.value.remedy
    with pytest.raises(StoreError, match="line 2 is damaged"):
        read_records(run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("answer_nll", "0.1"),
        ("answer_nll", math.nan),
        ("sample_index", 1.5),
        ("sample_index", None),
        ("stored_bytes", True),
        ("token_nll", [None]),
        ("status", "fine"),
        ("new_column", 1),
    ],
)
def test_a_line_that_is_no_record_is_damaged(tmp_path: Path, name: str, value: Any) -> None:
    run = tmp_path / "a"
    write(run, record(0))
    data = {**record(0).to_dict(), name: value}
    (run / "journal.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(StoreError, match=rf"line 1 is damaged: {name}"):
        read_records(run)


@pytest.mark.parametrize("column", Record.columns())
def test_a_line_without_a_column_is_damaged(tmp_path: Path, column: str) -> None:
    data = record(0).to_dict()
    del data[column]
    (tmp_path / "journal.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(StoreError, match=rf"line 1 is damaged: {column} Field required"):
        read_journal(tmp_path / "journal.jsonl")


def test_a_line_of_the_schema_before_lacks_what_was_added_since(tmp_path: Path) -> None:
    data = {name: value for name, value in record(0).to_dict().items() if name not in ADDED} | {"schema_version": 2}
    (tmp_path / "journal.jsonl").write_text(json.dumps(data) + "\n")
    (found,) = read_journal(tmp_path / "journal.jsonl").values()
    assert found == replace(record(0), schema_version=2)


def test_runs_of_the_schema_before_are_read(tmp_path: Path) -> None:
    """As they were published: Parquet without the columns that were added since."""
    run = finished(tmp_path / "a", record(0), record(1))
    part, manifest = run / "records" / "part-00000.parquet", run / "manifest.json"
    pq.write_table(pq.read_table(part).drop_columns(list(ADDED)), part)
    lines = json.loads(manifest.read_text())
    lines["parts"][0]["sha256"] = sha256(part.read_bytes())
    manifest.write_text(json.dumps({**lines, "schema_version": 2}))
    frame = read_records(run)
    assert list(frame.columns) == list(Record.columns())
    assert frame[list(ADDED)].isna().all().all()
    pq.write_table(pq.read_table(part).drop_columns(["answer_nll"]), part)
    lines["parts"][0]["sha256"] = sha256(part.read_bytes())
    manifest.write_text(json.dumps({**lines, "schema_version": 2}))
    with pytest.raises(StoreError, match="doesn't hold the rows and columns"):
        read_records(run)


def test_damaged_parquet_is_refused_and_rebuilt_from_the_journal(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", record(0), record(1))
    part = run / "records" / "part-00000.parquet"
    good = part.read_bytes()
    for position in range(0, len(good), 97):
        damaged = bytearray(good)
        damaged[position] ^= 1
        part.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"part-00000\.parquet is damaged") as caught:
            read_records(run)
        assert "rebuilt from the journal" in caught.value.remedy
    part.write_bytes(good[:50])
    with pytest.raises(StoreError, match="is damaged"):
        read_records(run)
    part.unlink()
    with pytest.raises(StoreError, match="is missing"):
        read_records(run)
    with RunStore.open(run, PLAN) as store:
        store.finish([("c0", "s0"), ("c0", "s1")])
    assert part.read_bytes() == good
    assert len(read_records(run)) == 2


def test_a_journal_changed_after_the_end_is_noticed(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", record(0), record(1))
    journal = run / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(StoreError, match="has changed since the run was finished"):
        read_records(run)
    journal.unlink()
    assert len(read_records(run)) == 2, "published results need no journal"


def test_a_manifest_of_another_plan_is_refused(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", record(0))
    (run / "plan.json").write_text(json.dumps({**PLAN, "plan_digest": "cccc"}))
    with pytest.raises(StoreError, match="belongs to another plan"):
        read_records(run)


def test_an_unfinished_run_is_read_from_its_journal(tmp_path: Path) -> None:
    run = tmp_path / "a"
    write(run)
    frame = read_records(run)
    assert len(frame) == 0
    assert tuple(frame.columns) == Record.columns()
    write(run, record(1), failed(0))
    frame = read_records(run)
    assert frame.attrs["complete"] is False
    assert frame["sample_id"].tolist() == ["s1", "s0"]
    complete = read_records(finished(tmp_path / "b", record(1), failed(0)))
    assert frame.dtypes.to_dict() == complete.dtypes.to_dict()
    assert frame.drop(columns="token_nll").equals(complete.drop(columns="token_nll"))


def test_a_wrong_folder_lists_the_runs_nearby(tmp_path: Path) -> None:
    for name in ("beta", "alpha"):
        write(tmp_path / "runs" / name)
    for wrong in ("runs", "runs/gamma"):
        with pytest.raises(StoreError, match=r"not a run's folder: it has no plan\.json") as caught:
            read_records(tmp_path / wrong)
        assert caught.value.remedy == f"Runs in {tmp_path / 'runs'}: alpha, beta."
    with pytest.raises(StoreError) as caught:
        read_plan(tmp_path / "elsewhere" / "x")
    assert caught.value.remedy == "`kveval run` makes one."


def test_a_damaged_plan_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a" / "plan.json").write_text("{")
    with pytest.raises(StoreError, match=r"Can't read .*plan\.json"):
        read_records(tmp_path / "a")


def test_runs_are_listed_and_a_damaged_one_hides_no_other(tmp_path: Path) -> None:
    plan = {
        **PLAN,
        "config": {"model": {"id": "smollm2-135m"}},
        "cells": [{"cell_id": "c0", "samples": 2}, {"cell_id": "c1", "samples": 1}],
    }
    for name in ("begun", "damaged", "done"):
        with RunStore.open(tmp_path / name, plan) as store:
            store.append(record(0))
            store.append(failed(1))
            if name == "done":
                store.append(record(0, cell_id="c1"))
                store.finish([("c0", "s0"), ("c0", "s1"), ("c1", "s0")])
    (tmp_path / "damaged" / "journal.jsonl").write_text("{}\n")
    (tmp_path / "no-run").mkdir()
    begun, damaged, done = list_runs(tmp_path)
    shared = {"model": "smollm2-135m", "planned": 3, "errors": 1}
    assert begun == {"run": "begun", **shared, "records": 2, "state": "unfinished"}
    assert done == {"run": "done", **shared, "records": 3, "state": "finished"}
    assert damaged["run"] == "damaged"
    assert "line 1 is damaged" in damaged["state"]
    assert damaged["records"] is None
    with pytest.raises(StoreError, match="no folder"):
        list_runs(tmp_path / "elsewhere")


# --- the environment ---


def test_the_environment_is_kept_and_a_change_on_resume_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "a"
    first, second = {"packages": {"torch": "2.13.0"}, "python": "3.11"}, {"packages": {"torch": "2.14.0"}}
    for env in (first, first, second, first, second):
        RunStore.open(run, PLAN, env=env).close()
    assert read_env(run) == {**first, "resumed_with": [second]}
    assert caplog.text.count("resumed with another environment: packages.torch, python.") == 1


def test_a_run_without_environment_says_so(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(StoreError, match=r"Can't read .*env\.json"):
        read_env(tmp_path / "a")


# --- bytes ---


def test_equal_records_give_equal_bytes_in_any_order_of_measuring(tmp_path: Path) -> None:
    records = [record(i) for i in range(5)]
    order = [key(item) for item in records]
    parts = []
    for name, measured in (("a", records), ("b", records[::-1])):
        with RunStore.open(tmp_path / name, PLAN) as store:
            for item in measured:
                store.append(item)
            for _ in range(2):
                store.finish(order)
                parts.append((tmp_path / name / "records" / "part-00000.parquet").read_bytes())
    assert parts[0] == parts[1] == parts[2] == parts[3]
    schema = pq.read_schema(tmp_path / "a" / "records" / "part-00000.parquet")
    assert schema.equals(arrow_schema())
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == [".lock", "journal.jsonl", "manifest.json", "plan.json", "records"]


finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(min_value=-(2**63), max_value=2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    kinds = {"double": finite, "int64": counts, "string": texts, "list<item: double>": st.lists(finite)}
    values: dict[str, Any] = {}
    for field in arrow_schema():
        strategy = kinds[str(field.type)]
        values[field.name] = draw(strategy | st.none() if field.nullable else strategy)
    values["role"] = draw(st.sampled_from(["baseline", "scheme", "aa", "crush"]))
    values["status"] = draw(st.sampled_from(["ok", "error"]))
    values["finish_reason"] = draw(st.sampled_from(["stop", "length", "thinking", None]))
    return Record(**values)


@given(item=any_record())
@settings(max_examples=40)
def test_any_record_survives_journal_and_parquet(tmp_path_factory: pytest.TempPathFactory, item: Record) -> None:
    run = finished(tmp_path_factory.mktemp("run"), item)
    assert list(read_journal(run / "journal.jsonl").values()) == [item]
    (row,) = pq.read_table(run / "records" / "part-00000.parquet").to_pylist()
    assert Record.from_dict(row) == item


def test_every_column_has_a_type_of_its_own(tmp_path: Path) -> None:
    assert arrow_schema().names == list(Record.columns())
    assert replace(record(0), depth=None).depth is None
    types = {field.name: str(field.type) for field in arrow_schema()}
    assert types["token_nll"] == "list<item: double>"
    assert types["stored_bytes"] == "int64"
    assert types["exact_match"] == "double"
    assert types["role"] == "string"
    required = {field.name for field in arrow_schema() if not field.nullable}
    assert {"cell_id", "sample_id", "status", "n_answer_tokens"} <= required
    assert not {"depth", "answer_nll", "error"} & required
