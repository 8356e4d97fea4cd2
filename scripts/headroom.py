"""Which tasks can see a damaged cache on which model, from finished runs: prints Markdown tables.

    python scripts/headroom.py results/headroom-*-h200 --write docs/explanation/what-tasks-see.md

A run needs the schemes that are asked about, beside its controls. --write puts the tables between the page's markers.
Runs of one model share a table; no two of them may have the same task at the same context length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from kveval.capacity import format_tokens
from kveval.files import write_atomic
from kveval.stats import Estimate, compare
from kveval.store import read_plan, read_records

SCHEMES = ("k8v4", "int4_g64")
START, END = "<!-- headroom: begin -->", "<!-- headroom: end -->"


class Cell(NamedTuple):
    """What a task shows at one context length.

    `seen` is the mildest arm whose cost in answer NLL lies above 0 (95 % intervals over clusters), None if not even
    crush's does; `costs` are those of all arms in nats per token, mildest first. Scores are the baseline's.
    """

    seen: str | None
    exact_match: float | None
    accepted: float | None
    costs: dict[str, Estimate]


def main() -> None:
    """Read the runs; print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="of the runs, from the mildest to the coarsest")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    text = tables(options.runs, options.schemes.split(","))
    if options.write is None:
        sys.stdout.write(text)
        return
    page = options.write.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    write_atomic(options.write, f"{before}{START}\n\n{text}\n{END}{after}".encode())


def tables(runs: Iterable[Path], schemes: Sequence[str]) -> str:
    """One table per model, context lengths across, tasks down in the order of the run that has most of them."""
    by_model: dict[str, list[Path]] = {}
    for run in runs:
        by_model.setdefault(read_plan(run)["model"]["id"], []).append(run)
    return "\n".join(_table(model, of, schemes) for model, of in by_model.items())


def _table(model: str, runs: Sequence[Path], schemes: Sequence[str]) -> str:
    cells: dict[tuple[str, int], str] = {}
    sources = []
    for run in sorted(runs, key=lambda run: -len(read_plan(run)["config"]["tasks"])):
        records = read_records(run)
        clusters = records.groupby(["task", "context_length"], sort=False)["cluster"].nunique()
        for task, length in clusters.index:
            if (task, length) in cells:
                raise SystemExit(f"{run.name}: {task} at {format_tokens(length)} is in another run too: name one.")
            cells[task, length] = text(look(records[records["task"] == task], task, length, schemes))
        sources.append(f"{run.name} ({_range(clusters)} haystacks or documents a cell)")
    lengths = sorted({length for _, length in cells})
    lines = [
        f"### {model}",
        "",
        "| task | " + " | ".join(format_tokens(int(n)) for n in lengths) + " |",
        "| --- |" + " --- |" * len(lengths),
    ]
    for task in dict.fromkeys(task for task, _ in cells):
        lines.append(f"| {task} | " + " | ".join(cells.get((task, n), "") for n in lengths) + " |")
    return "\n".join([*lines, "", f"From {', '.join(sources)}.", ""])


def _range(numbers: pd.Series[int]) -> str:
    low, high = numbers.min(), numbers.max()
    return f"{low}" if low == high else f"{low} to {high}"


def look(records: pd.DataFrame, task: str, length: int, schemes: Sequence[str]) -> Cell:
    """How a task sees damage in one cell; `schemes` from the mildest to the coarsest."""
    costs = {
        arm: compare(records, scheme=arm, role=role, metric="answer_nll", task=task, context_length=length).loss
        for arm, role in (*((scheme, "scheme") for scheme in schemes), ("crush", "crush"))
    }
    seen = [arm for arm, loss in costs.items() if loss.defined and loss.low is not None and loss.low > 0]
    base = records[(records["role"] == "baseline") & (records["context_length"] == length)]
    means = (base[column].mean() for column in ("exact_match", "accepted_prefix"))
    exact, accepted = (None if pd.isna(mean) else float(mean) for mean in means)
    return Cell(seen[0] if seen else None, exact, accepted, costs)


def text(cell: Cell) -> str:
    """A cell in words: the mildest damage that it sees; the baseline's scores; what each arm costs."""
    if any(loss.value is None for loss in cell.costs.values()):
        return "nothing to score"
    parts = [f"**{cell.seen}**" if cell.seen else "blind"]
    if cell.exact_match is not None:
        accepted = "" if cell.accepted is None else f" ({100 * cell.accepted:.0f} %)"
        parts.append(f"{100 * cell.exact_match:.0f} %{accepted}")
    parts.append(", ".join(f"{loss.value:+.2g}" for loss in cell.costs.values()))
    return "; ".join(parts)


if __name__ == "__main__":
    main()
