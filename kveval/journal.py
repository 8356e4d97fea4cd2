"""The journal of a run: one record per line of JSON, whole or not at all.

A record is on the disk before `Journal.append` returns. A process that dies while it writes leaves at most
one half line at the end, which the next opening cuts off.
"""

from __future__ import annotations

import json
import logging
import math
import os
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from kveval.errors import MeasurementError, StoreError
from kveval.records import ADDED, Record

__all__ = ["Journal", "Key", "mend", "read_journal"]

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""(cell id, sample id): what a record is a record of."""


class Journal:
    """Appends records to a journal file. Only one process may do so at a time (see `kveval.store`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - held until close()

    @property
    def closed(self) -> bool:
        """True once `close` was called or the disk refused a write."""
        return self._file.closed

    def append(self, record: Record) -> None:
        """Puts a record on the disk; when this returns, no crash can lose it.

        Raises:
            MeasurementError: A number in the record is NaN or infinite.
            OSError: The disk refused the write. The journal is closed then: a further line must not follow a
                half one, which the next `mend` cuts off.
        """
        line = _to_line(record)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            os.fsync(self._file.fileno())
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Ends writing; can be called twice."""
        self._file.close()


def mend(path: Path) -> None:
    """Cuts off a last line that a crash left half written. Does nothing to a whole or missing journal."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        log.warning("%s: its last line was half written; %d bytes cut off.", path, len(data) - whole)
        os.truncate(path, whole)


def read_journal(path: Path) -> dict[Key, Record]:
    """Records by key, of each the latest; a half last line is left out, a missing journal is empty.

    Raises:
        StoreError: A whole line is not a record, or a sample was recorded again after it had succeeded.
    """
    records: dict[Key, Record] = {}
    if not path.exists():
        return records
    *lines, _half = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = _row_model(earlier=line.startswith(_EARLIER)).model_validate_json(line)
            record = Record.from_dict(row.__dict__)
        except ValidationError as error:
            first = error.errors()[0]
            raise StoreError(
                f"{path}, line {number} is damaged: {' '.join(map(str, (*first['loc'], first['msg'])))}.",
                remedy="Delete that line and run the same `kveval run` command again: it measures it anew.",
            ) from error
        key = (record.cell_id, record.sample_id)
        if key in records and records[key].status == "ok":
            raise StoreError(
                f"{path}, line {number}: sample {key[1]} of cell {key[0]} was recorded before.",
                remedy="Delete one of the two lines and run the same `kveval run` command again.",
            )
        records[key] = record
    return records


def _to_line(record: Record) -> bytes:
    """A record as a line of JSON. Numbers survive it exactly; NaN and infinity are no measurements."""
    data = record.to_dict()
    for name, value in data.items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise MeasurementError(
                f"{name} is not a finite number in sample {record.sample_id} of cell {record.cell_id}.",
                remedy="The model or the format overflowed: try compute in float32, or a format with scales.",
            )
    return json.dumps(data, ensure_ascii=False, allow_nan=False).encode() + b"\n"


_EARLIER = b'{"schema_version": 2,'
"""How a line of schema 2 begins."""


@cache
def _row_model(*, earlier: bool) -> type[BaseModel]:
    """What a line must hold: every column of `Record`, of its type, and nothing else. An earlier one lacks `ADDED`."""
    hints = get_type_hints(Record).items()
    columns: dict[str, Any] = {name: (hint, None if earlier and name in ADDED else ...) for name, hint in hints}
    return create_model("Row", __config__=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False), **columns)
