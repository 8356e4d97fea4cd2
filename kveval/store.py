"""A run's folder: what was planned, what was measured, and proof that it is all there.

    plan.json       what the run is; written once, never changed
    env.json        the versions and the machine it ran on (and those of later, resumed, parts)
    journal.jsonl   one line per record, on the disk before the next sample starts
    records/        the same records as Parquet, in the plan's order
    manifest.json   written last: checksums and row counts. Without it a run is unfinished
    *.json          notes on how the run went, such as the self-test's; they decide nothing

A run that was stopped at any moment is resumed by opening its folder again. The journal is the truth: Parquet
and manifest are rebuilt from it.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, TracebackType, UnionType
from typing import IO, TYPE_CHECKING, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from kveval.errors import StoreError
from kveval.files import read_json, sha256, temporary, to_json, unwritable, write_atomic
from kveval.journal import Journal, Key, mend, read_journal
from kveval.records import ADDED, READABLE, SCHEMA_VERSION, Record

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RunStore", "arrow_schema", "list_runs", "read_env", "read_plan", "read_records"]

log = logging.getLogger(__name__)

PLAN, ENV, JOURNAL, MANIFEST = "plan.json", "env.json", "journal.jsonl", "manifest.json"
LOCK, PART = ".lock", "records/part-00000.parquet"
_REBUILD = "Run the same `kveval run` command again: it is rebuilt from the journal."


class RunStore:
    """The one writer of a run's folder. Open it with `RunStore.open`, best in a `with` statement.

    Attributes:
        path: The folder.
        done: Records that need no measuring, by (cell id, sample id): those journalled, except the errors of
            earlier sessions. A sample that failed is tried again when its run is resumed, and its later
            record counts.
    """

    def __init__(self, path: Path, lock: IO[bytes], journal: Journal, records: dict[Key, Record]) -> None:
        self.path = path
        self.done = {key: record for key, record in records.items() if record.status == "ok"}
        self._earlier_errors = {key: record for key, record in records.items() if record.status == "error"}
        self._lock, self._journal = lock, journal

    @classmethod
    def open(cls, path: str | Path, plan: Mapping[str, Any], *, env: Mapping[str, Any] | None = None) -> RunStore:
        """Creates the run's folder, or takes up the run that is in it, and locks it against other writers.

        Args:
            path: The folder. It is made if missing; a new run's may hold nothing else.
            plan: Plain data with at least `schema_version` and `plan_digest`. Only the digest decides
                whether a folder holds this run.
            env: What `kveval.env.collect` returned. Where a resumed run's differs from the recorded one,
                it is added to `env.json` under `resumed_with`.

        Raises:
            StoreError: The folder is locked by another process, unwritable, damaged, another plan's, of
                another schema version, or not a run's folder at all.
        """
        path = Path(path)
        if plan["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"a plan of schema {plan['schema_version']}; this is schema {SCHEMA_VERSION}")
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = open(path / LOCK, "ab")  # noqa: SIM115 - held until close()
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            _take(lock, path)
            _settle_plan(path, plan)
            if env is not None:
                _settle_env(path, env)
            if (path / MANIFEST).exists() and not (path / JOURNAL).exists():
                raise StoreError(
                    f"{path} holds finished results without their journal; running there would replace them.",
                    remedy="Use another --name or --out; `kveval report` and `kveval gate` read these as they are.",
                )
            mend(path / JOURNAL)
            records = read_journal(path / JOURNAL)
            return cls(path, lock, Journal(path / JOURNAL), records)
        except OSError as error:
            lock.close()
            raise unwritable(path, error) from error
        except BaseException:
            lock.close()
            raise

    def append(self, record: Record) -> None:
        """Puts a record on the disk; when this returns, no crash can lose it.

        Raises:
            MeasurementError: A number in the record is NaN or infinite; nothing was written.
            StoreError: The disk refused the write (the store is closed then), or the sample has been
                measured already.
        """
        self._check_open()
        key = (record.cell_id, record.sample_id)
        if key in self.done and self.done[key].status == "ok":
            raise StoreError(
                f"{self.path}: sample {key[1]} of cell {key[0]} was measured already.",
                remedy="Use another --name for a second measurement.",
            )
        try:
            # A finished run that grows is unfinished again, until the next finish().
            (self.path / MANIFEST).unlink(missing_ok=True)
            self._journal.append(record)
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error
        self.done[key] = record
        self._earlier_errors.pop(key, None)

    def finish(self, order: Sequence[Key]) -> None:
        """Writes all records as Parquet in the given order, then the manifest.

        Can be called again at any time: equal records give equal bytes.

        Args:
            order: (cell id, sample id) of every record that the plan asks for.

        Raises:
            StoreError: Records are missing, or there are some that the order doesn't name.
        """
        self._check_open()
        records = {**self._earlier_errors, **self.done}
        _check_same_keys(self.path, order, records)
        data = _to_parquet(records[key] for key in order)
        try:
            # A reader who comes between the two files must find an unfinished run, not a damaged one.
            (self.path / MANIFEST).unlink(missing_ok=True)
            (self.path / PART).parent.mkdir(exist_ok=True)
            write_atomic(self.path / PART, data)
            manifest = {
                "schema_version": SCHEMA_VERSION,
                "plan_digest": read_plan(self.path)["plan_digest"],
                "journal_sha256": sha256((self.path / JOURNAL).read_bytes()),
                "parts": [{"path": PART, "sha256": sha256(data), "rows": len(order)}],
            }
            write_atomic(self.path / MANIFEST, to_json(manifest))
        except OSError as error:
            raise unwritable(self.path, error) from error

    def write_note(self, name: str, data: Mapping[str, Any]) -> None:
        """Writes plain data to a file of its own beside the records; an earlier one is replaced.

        Args:
            name: A file name ending in ".json" that isn't one of the store's own.
            data: What to write, without NaN.

        Raises:
            StoreError: The disk refused the write.
        """
        self._check_open()
        if not name.endswith(".json") or name in (PLAN, ENV, MANIFEST) or Path(name).name != name:
            raise ValueError(f"{name!r} can't be the name of a note")
        try:
            write_atomic(self.path / name, to_json(data))
        except OSError as error:
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        """Releases the folder. What was appended stays. Can be called twice."""
        self._journal.close()
        self._lock.close()

    def _check_open(self) -> None:
        if self._journal.closed:
            raise ValueError("the store is closed: its folder may have another writer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: str | Path) -> pd.DataFrame:
    """The records of a run, one row each, the columns those of `kveval.Record`.

    `attrs["complete"]` of the frame is False for an unfinished run, whose rows come from the journal. Integer
    columns with missing values become float columns, as pandas does it.

    Raises:
        StoreError: No run is there, or a file of it is damaged or of another schema version.
    """
    path = Path(path)
    plan = read_plan(path)
    if not (path / MANIFEST).exists():
        frame = _to_table(read_journal(path / JOURNAL).values()).to_pandas()
        frame.attrs["complete"] = False
        return frame
    manifest = read_json(path / MANIFEST, remedy=_REBUILD)
    _check_schema_version(path / MANIFEST, manifest)
    if manifest.get("plan_digest") != plan["plan_digest"]:
        raise StoreError(f"{path / MANIFEST} belongs to another plan than {PLAN}.", remedy=_REBUILD)
    # Published results may leave the journal out; where there is one, it must be the one that was packed.
    journal = path / JOURNAL
    if journal.exists() and sha256(journal.read_bytes()) != manifest.get("journal_sha256"):
        raise StoreError(f"{journal} has changed since the run was finished.", remedy=_REBUILD)
    frame = pa.concat_tables(_read_part(path, part) for part in manifest["parts"]).to_pandas()
    frame.attrs["complete"] = True
    return frame


def read_plan(path: str | Path) -> dict[str, Any]:
    """The plan of a run. Raises StoreError if the folder holds none, or a damaged or another schema's."""
    path = Path(path)
    if not (path / PLAN).exists():
        raise StoreError(f"{path} is not a run's folder: it has no {PLAN}.", remedy=_runs_nearby(path))
    plan = read_json(path / PLAN, remedy="Delete the folder and run the sweep again.")
    _check_schema_version(path / PLAN, plan)
    return plan


def read_env(path: str | Path) -> dict[str, Any]:
    """The versions and the machine of a run. Raises StoreError if there is no run or none are recorded."""
    path = Path(path)
    read_plan(path)
    return read_json(path / ENV, remedy="Run the same `kveval run` command again: it records them.")


def list_runs(folder: str | Path) -> list[dict[str, Any]]:
    """The runs in a folder, by name: `run`, `model`, `records` of `planned`, `errors` and `state`.

    `state` is "finished", "unfinished", or what is wrong with a damaged run, whose other values are None.

    Raises:
        StoreError: The folder is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StoreError(f"There is no folder {folder}.", remedy="`kveval run` makes runs.")
    return [_describe(plan.parent) for plan in sorted(folder.glob(f"*/{PLAN}"))]


@cache
def arrow_schema() -> pa.Schema:
    """The columns of the Parquet parts: those of `Record`, in its order, with its types."""
    return pa.schema([_arrow_field(name, hint) for name, hint in get_type_hints(Record).items()])


# --- opening ---


def _take(lock: IO[bytes], path: Path) -> None:
    """Locks the folder for this process; the system unlocks it when the process ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreError(
            f"Another process is writing this run: {path}",
            remedy="Wait for it to end, or choose another --name.",
        ) from error


def _settle_plan(path: Path, plan: Mapping[str, Any]) -> None:
    """Writes the plan into a new folder, or checks that the folder's plan is the same."""
    if (path / PLAN).exists():
        found = read_plan(path)
        if found.get("plan_digest") != plan["plan_digest"]:
            changed = _differences(found, json.loads(to_json(plan))) or ["plan_digest"]
            raise StoreError(
                f"{path} holds a run of another plan. Different: {', '.join(changed)}.",
                remedy="Choose another --name, or delete the folder to start anew.",
            )
        return
    # A process that died while it wrote the plan leaves the lock and a temporary file.
    foreign = sorted({entry.name for entry in path.iterdir()} - {LOCK, temporary(path / PLAN).name})
    if foreign:
        raise StoreError(
            f"{path} is not a run's folder: it has no {PLAN}, but {foreign[0]} "
            f"({len(foreign)} {'entry' if len(foreign) == 1 else 'entries'}).",
            remedy="Choose another --name, or an empty folder.",
        )
    write_atomic(path / PLAN, to_json(plan))


def _settle_env(path: Path, env: Mapping[str, Any]) -> None:
    """Records what the run runs on, and what it is resumed with if that is something else."""
    env = json.loads(to_json(env))
    if not (path / ENV).exists():
        write_atomic(path / ENV, to_json(env))
        return
    found = read_json(path / ENV, remedy=f"Delete {ENV} and run the same `kveval run` command again.")
    resumed = found.pop("resumed_with", [])
    if env != found and env not in resumed:
        log.warning("%s is resumed with another environment: %s.", path, ", ".join(_differences(found, env)))
        write_atomic(path / ENV, to_json({**found, "resumed_with": [*resumed, env]}))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of the keys whose values differ, one level into nested mappings ("config.samples")."""
    names: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after or key == "plan_digest":
            continue
        if not prefix and isinstance(before, dict) and isinstance(after, dict):
            names += _differences(before, after, f"{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names


def _runs_nearby(path: Path) -> str:
    """Where else to look: the runs in the folder itself, or else beside it."""
    for folder in (path, path.parent):
        runs = sorted(plan.parent.name for plan in folder.glob(f"*/{PLAN}"))
        if runs:
            return f"Runs in {folder}: {', '.join(runs)}."
    return "`kveval run` makes one."


def _describe(path: Path) -> dict[str, Any]:
    """One row of `list_runs`."""
    try:
        plan, records = read_plan(path), read_records(path)
    except StoreError as error:
        empty = dict.fromkeys(("model", "records", "planned", "errors"))
        return {"run": path.name, **empty, "state": error.message}
    return {
        "run": path.name,
        "model": plan["config"]["model"]["id"],
        "records": len(records),
        "planned": sum(cell["samples"] for cell in plan["cells"]),
        "errors": int((records["status"] == "error").sum()),
        "state": "finished" if records.attrs["complete"] else "unfinished",
    }


# --- Parquet and manifest ---


def _check_same_keys(path: Path, order: Sequence[Key], records: Mapping[Key, Record]) -> None:
    """Raises StoreError unless the records are exactly those that the order names."""
    if len(set(order)) != len(order):
        raise ValueError("the order names a record twice")
    missing = [key for key in order if key not in records]
    if missing:
        raise StoreError(
            f"{path}: {len(missing)} of {len(order)} records are missing, the first is sample "
            f"{missing[0][1]} of cell {missing[0][0]}.",
            remedy="Run the same `kveval run` command again: it measures what is missing.",
        )
    foreign = sorted(records.keys() - set(order))
    if foreign:
        raise StoreError(
            f"{path}: {len(foreign)} records aren't in the plan, for example sample {foreign[0][1]} of cell "
            f"{foreign[0][0]}.",
            remedy="Use another --name: this folder holds another sweep's records.",
        )


def _arrow_field(name: str, hint: Any) -> pa.Field:
    options = set(get_args(hint)) if get_origin(hint) in (UnionType, Union) else {hint}
    (kind,) = options - {NoneType}
    types = {int: pa.int64(), float: pa.float64(), str: pa.string(), list[float]: pa.list_(pa.float64())}
    return pa.field(name, types[str if get_origin(kind) is Literal else kind], nullable=NoneType in options)


def _to_table(records: Iterable[Record]) -> pa.Table:
    return pa.Table.from_pylist([record.to_dict() for record in records], schema=arrow_schema())


def _to_parquet(records: Iterable[Record]) -> bytes:
    """Parquet holds no time and no path: equal records give equal bytes with the same pyarrow."""
    buffer = io.BytesIO()
    pq.write_table(_to_table(records), buffer, compression="zstd")
    return buffer.getvalue()


def _read_part(path: Path, part: Mapping[str, Any]) -> pa.Table:
    """One Parquet part, checked against its line in the manifest."""
    file = path / part["path"]
    if not file.exists():
        raise StoreError(f"{file} is missing.", remedy=_REBUILD)
    data = file.read_bytes()
    if sha256(data) != part["sha256"]:
        raise StoreError(f"{file} is damaged: its checksum is not the manifest's.", remedy=_REBUILD)
    table = pq.read_table(pa.BufferReader(data))
    for field in arrow_schema():
        if field.name in ADDED and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    if table.num_rows != part["rows"] or not table.schema.equals(arrow_schema()):
        raise StoreError(f"{file} doesn't hold the rows and columns of this schema.", remedy=_REBUILD)
    return table


def _check_schema_version(file: Path, data: Mapping[str, Any]) -> None:
    if data.get("schema_version") not in READABLE:
        raise StoreError(
            f"{file} has schema version {data.get('schema_version')}; this kveval reads "
            f"{' and '.join(map(str, READABLE))}.",
            remedy="Use the kveval version that wrote it, or run the sweep again under another --name.",
        )
