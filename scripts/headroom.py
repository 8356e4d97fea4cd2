"""Which tasks can see a damaged cache on which model, from finished runs: prints Markdown tables.

    python scripts/headroom.py results/headroom-* --write docs/explanation/what-tasks-see.md

A run needs the schemes that are asked about, beside its controls. --write puts the tables between the page's markers.
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
    """One table per run, tasks down, context lengths across."""
    return "\n".join(_table(run, read_records(run), schemes) for run in runs)


def _table(run: Path, records: pd.DataFrame, schemes: Sequence[str]) -> str:
    lengths = sorted(records["context_length"].unique())
    lines = [
        f"### {read_plan(run)['model']['id']} ({run.name})",
        "",
        "| task | " + " | ".join(format_tokens(int(n)) for n in lengths) + " |",
        "| --- |" + " --- |" * len(lengths),
    ]
    for task, of in records.groupby("task", sort=False):
        present = set(of["context_length"])
        cells = [text(look(of, str(task), int(n), schemes)) if n in present else "" for n in lengths]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


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
