"""Small synthetic records, made from plain lists of values per arm, for the statistics and the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kveval.records import Record, Role

BASELINE, AA, CRUSH = "bf16", "bf16 (A/A)", "crush"
ROLES: dict[str, Role] = {BASELINE: "baseline", AA: "aa", CRUSH: "crush"}


def record(scheme: str, index: int, *, task: str = "niah", length: int = 2048, **fields: Any) -> Record:
    """One ok record. `cluster` is the sample itself unless given."""
    defaults: dict[str, Any] = {
        "cell_id": f"{task}/{scheme}/{length}",
        "sample_id": f"{task}-{length}-{index}",
        "sample_index": index,
        "cluster": f"{task}-{length}-{index}",
        "task": task,
        "task_version": 1,
        "scheme": scheme,
        "role": ROLES.get(scheme, "scheme"),
        "context_length": length,
        "depth": None,
        "status": "ok",
        "answer_nll": 0.5,
        "exact_match": 1.0,
        "kl": 0.0,
        "top1_flips": 0.0,
        "stored_bytes": 1000,
        "billed_bytes": 1000,
        "packed_reads": 8,
    }
    return Record(**{**defaults, **fields})


def failed(row: Record) -> Record:
    """The same sample, errored."""
    return replace(row, status="error", error="out of memory", answer_nll=None, exact_match=None, kl=None)


def frame(rows: Sequence[Record]) -> pd.DataFrame:
    """The table, in a scrambled order: nothing may depend on it."""
    data = [vars(rows[i]) for i in np.random.default_rng(5).permutation(len(rows))]
    return pd.DataFrame(data, columns=Record.columns())


def two_arms(metric: str, base: Sequence[float | None], scheme: Sequence[float | None], **fields: Any) -> list[Record]:
    """A baseline and a scheme "s" that have these values of one metric. `size` samples share a cluster."""
    size = fields.pop("size", 1)
    rows = []
    for name, values in ((BASELINE, base), ("s", scheme)):
        for i, value in enumerate(values):
            row = record(name, i, **{**fields, "cluster": f"c{i // size}", metric: value})
            rows.append(failed(row) if value is None else row)
    return rows


def sweep(
    n: int = 120,
    *,
    loss: float = 0.0,
    noise: float = 0.02,
    task: str = "niah",
    length: int = 2048,
    aa: float = 0.0,
    crush: float = 4.0,
    scheme: str = "s",
    flips: int = 0,
    seed: int = 0,
) -> list[Record]:
    """All four arms of one cell.

    The scheme's answer NLL is `loss` above the baseline's, with a spread of `noise`; the A/A arm's is `aa`
    above, the crush arm's `crush`. The baseline's exact match is 1 on nine of ten samples; the scheme loses
    the first `flips` of these, crush all.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        level, hit = float(rng.lognormal(-1.0, 0.4)), float(i % 10 != 9)
        at = {"task": task, "length": length}
        kept = 0.0 if sum(j % 10 != 9 for j in range(i)) < flips else hit
        shift = rng.normal(0.0, noise, 2)
        rows += [
            record(BASELINE, i, answer_nll=level, exact_match=hit, **at),
            record(AA, i, answer_nll=level + aa + shift[0] / 10, exact_match=hit, kl=1e-5, **at),
            record(scheme, i, answer_nll=level + loss + shift[1], exact_match=kept, kl=0.01, **at),
            record(CRUSH, i, answer_nll=level + crush, exact_match=0.0, kl=3.0, top1_flips=0.9, **at),
        ]
    return rows
