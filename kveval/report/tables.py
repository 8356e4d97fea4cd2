"""What the command line prints: rich tables, and the same results as plain data for --json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kveval.capacity import GIB, Sessions, format_tokens
from kveval.exchange_rate import ExchangeRate
from kveval.layer_note import LayerErrors
from kveval.report.answers import key_token_sentences
from kveval.report.layers import bias_sentence, layer_rows, layer_sentences
from kveval.report.model import ReportData
from kveval.report.rows import BRIEF, UNDECIDABLE, CellRow, Loss, cell_rows, few_clusters
from kveval.stats import Comparison

__all__ = [
    "capacity_json",
    "capacity_table",
    "findings_table",
    "kernels_table",
    "models_table",
    "report_json",
    "run_summary",
    "runs_table",
    "terminal_report",
]

TONE_STYLES = {
    "good": "bold green",
    "bad": "bold red",
    "void": "bold red",
    "unsure": "bold yellow",
    "plain": "bold",
}


SENTENCES = 3
"""Formats whose error by layer is told in words as well."""


def terminal_report(data: ReportData, *, limit: int = 12) -> RenderableType:
    """Headline, the `limit` worst cells, the exchange rate in words, and where the error comes from."""
    rows = [row for row in cell_rows(data) if row.role == "scheme"]
    parts: list[RenderableType] = [Text(data.headline, style=TONE_STYLES[data.tone])]
    parts += [Text(problem, style="yellow") for problem in data.problems]
    parts += [Text(), CellsTable(tuple(rows[:limit]), scored=data.has("task_score"))]
    if len(rows) > limit:
        parts.append(Text(f"{len(rows) - limit} more cells are in report.html.", style="dim"))
    parts += [Text(note, style="dim") for note in key_token_sentences(data.key_tokens)]
    few = few_clusters(data.ranked("answer_nll"))
    parts += [Text(), Text(few, style="yellow")] if few else []
    layers = _layers_section(data.layers, limit=limit) if data.layers else []
    return Group(*parts, Text(), *(Text(f"{sentence}.") for sentence in data.key_sentences), *layers)


def _layers_section(layers: LayerErrors, *, limit: int) -> list[RenderableType]:
    """Where the error comes from: the `limit` worst schemes, and the worst few in words."""
    title = "Where the error comes from"
    if layers.problem is not None:
        return [Text(), Text(f"{title}: the error by layer could not be measured: {layers.problem}", style="yellow")]
    rows = [row for row in layer_rows(layers) if row.role == "scheme"]
    if not rows:
        return []
    table = _table(f"{title}\nRelative error of attention's output, by storage in that layer alone")
    table.add_column("format", overflow="fold")
    for name in ("median\nlayer", "off by\nhalf", "worst\n(layer)", "keys\nalone", "values\nalone"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:limit]:
        worst = f"{row.output} ({row.layer})"
        table.add_row(row.scheme, row.median, row.lost, worst, row.from_keys, row.from_values)
    more = [Text(f"{len(rows) - limit} more formats are in report.html.", style="dim")] if len(rows) > limit else []
    words = [f"{sentence}." for sentence in layer_sentences(layers)[:SENTENCES]]
    return [Text(), table, *more, Text(), *map(Text, words), Text(bias_sentence(layers))]


@dataclass(frozen=True)
class CellsTable:
    """Cells, worst first, with as many columns as fit without a line break. `scored`: whether any has a task score."""

    rows: tuple[CellRow, ...]
    scored: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The first of the tables, from all columns to the fewest, that fits the width."""
        score = ("task score",) if self.scored else ()
        least = ("KL", "answer NLL")
        full = (*least, "exact match", *score)
        for columns in dict.fromkeys([(*full, "samples"), full, (*least, *score), least]):
            table = self._table(columns)
            if Measurement.get(console, options.update_width(1000), table).maximum <= options.max_width:
                break
        yield table

    def _table(self, columns: Sequence[str]) -> Table:
        title = "Against the baseline, largest loss in answer NLL first"
        points = [name for name in ("exact match", "task score") if name in columns]
        units = "KL and answer NLL in nats/token" + (f", {' and '.join(points)} in points" if points else "")
        table = _table(f"{title}\n{units}")
        for name in ("format", "task"):
            table.add_column(name, overflow="fold")  # a name that is cut off could be another's
        table.add_column("at", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        brief = BRIEF if self.scored else {UNDECIDABLE: BRIEF[UNDECIDABLE]}
        for row in self.rows:
            cells = {
                "KL": Text(row.kl),
                "answer NLL": _coloured(row.answer_nll),
                "exact match": _coloured(row.exact_match, brief),
                "task score": _coloured(row.task_score, brief),
                "samples": Text(row.n),
            }
            table.add_row(row.scheme, row.task, row.context, *(cells[name] for name in columns))
        return table


def _coloured(loss: Loss, short: Mapping[str, str] | None = None) -> Text:
    text = (short or {}).get(loss.text, loss.text)
    return Text(text, style={"worse": "red", "better": "green"}.get(loss.clear, "dim"))


def report_json(data: ReportData) -> dict[str, Any]:
    """A report as plain data. Losses are in their metric's unit; what is unknown is null."""
    return {
        "schema": "kveval.report",
        "schema_version": 1,
        "name": data.name,
        "headline": data.headline,
        "status": data.verdict.status if data.verdict else None,
        "model": data.model,
        "confidence": data.confidence,
        "sentences": list(data.sentences),
        "problems": list(data.problems),
        "notes": list(data.notes),
        "cells": [_comparison_dict(c) for c in data.comparisons],
        "answers": [{**asdict(e), "stopped": e.n - e.at_length - e.thinking} for e in data.endings],
        "key_tokens": [asdict(k) for k in data.key_tokens],
        "positions": [asdict(p) for p in data.positions],
        "exchange": [_exchange_dict(r) for r in data.exchange],
        "controls": [asdict(c) for c in data.controls],
        "storage": [asdict(s) for s in data.storage],
        "decode": [asdict(t) for t in data.timings],
        "layers": data.layers.to_dict() if data.layers else None,
        "native": data.native.to_dict() if data.native else None,
        "attention_paths": {scheme: list(paths) for scheme, paths in data.attention_paths.items()},
    }


def _comparison_dict(c: Comparison) -> dict[str, Any]:
    return {
        "task": c.task,
        "context_length": c.context_length,
        "scheme": c.scheme,
        "role": c.role,
        "metric": c.metric,
        "loss": asdict(c.loss),
        "n_missing": c.n_missing_scheme + c.n_missing_baseline,
        "notes": list(c.notes),
    }


def _exchange_dict(rate: ExchangeRate) -> dict[str, Any]:
    plain = {key: value for key, value in vars(rate).items() if key != "loss"}
    return {**plain, "loss": {"value": rate.loss.value, "low": rate.loss.low, "high": rate.loss.high}}


def capacity_table(sessions: Mapping[tuple[str, int], Sessions], *, model: str) -> RenderableType:
    """Sessions per scheme (rows) and context length (columns), with the gain over the baseline."""
    some = next(iter(sessions.values()))
    lengths = sorted({length for _, length in sessions})
    schemes = list(dict.fromkeys(scheme for scheme, _ in sessions))
    place = some.gpu if some.gpus == 1 else f"{some.gpus} x {some.gpu}"
    table = _table(f"Sessions of {model} at once on {place}", "format")
    table.add_column("bytes per token", justify="right")
    for length in lengths:
        table.add_column(f"{format_tokens(length)} tokens", justify="right")
    for scheme in schemes:
        counts = [_count(sessions[scheme, n], sessions[schemes[0], n]) for n in lengths]
        table.add_row(scheme, f"{sessions[scheme, lengths[0]].cost.bytes_per_token:,}", *counts)
    free = f"{some.free_bytes / GIB:.1f} GiB of each GPU are left for caches."
    notes = sorted({note for s in sessions.values() for note in s.notes})
    return Group(table, *(Text(line, style="dim") for line in (free, *notes)))


def _count(own: Sessions, baseline: Sessions) -> str:
    if own is baseline or not baseline.floored:
        return f"{own.floored:,}"
    return f"{own.floored:,} ({own.floored / baseline.floored:.2f}x)"


def capacity_json(sessions: Mapping[tuple[str, int], Sessions]) -> list[dict[str, Any]]:
    """One object per scheme and context length; bytes are per GPU."""
    return [
        {
            "scheme": s.scheme,
            "gpu": s.gpu,
            "gpus": s.gpus,
            "context_length": s.context_length,
            "sessions": s.floored,
            "sessions_fractional": s.fractional,
            "session_bytes": s.session_bytes,
            "bytes_per_token": s.cost.bytes_per_token,
            "free_bytes": s.free_bytes,
            "notes": list(s.notes),
        }
        for s in sessions.values()
    ]


def models_table(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Packaged models: name, hub id, licence, size of the download, and whether it is here."""
    table = _table("", "name", "hub id", "licence")
    table.add_column("download", justify="right")
    table.add_column("here")
    for row in rows:
        here = Text("yes", style="green") if row["present"] else Text(f"kveval models fetch {row['name']}")
        size = f"{row['download_bytes'] / 1e6:,.0f} MB"
        table.add_row(row["name"], row["hub_id"], row["licence"], size, here)
    return table


def findings_table(findings: Mapping[str, Any]) -> RenderableType:
    """What `kveval doctor` found: versions and hardware, models, and every scheme on this machine."""
    env, models = findings["env"], findings["models"]
    facts = _table("This machine", "", "")
    facts.show_header = False
    for key, value in _flat(env):
        facts.add_row(key, "–" if value is None else str(value))
    facts.add_row("models here", ", ".join(name for name, here in models.items() if here) or "none")
    rows = findings["schemes"]
    paths = {row["read_through"] for row in rows if row["works"]}
    schemes = _table("Formats on this machine", "format", "keys", "values")
    schemes.add_column("bytes*", justify="right")
    if len(paths) > 1:
        schemes.add_column("read through")
    schemes.add_column("works")
    for row in rows:
        size = row["bytes_per_token_and_head_of_128"]
        values = "as keys" if row["values"] == row["keys"] else row["values"]
        works = Text("yes", style="green") if row["works"] else Text(f"NO: {row['problem']}", style="bold red")
        path = [row["read_through"]] if len(paths) > 1 else []
        schemes.add_row(row["scheme"], row["keys"], values, "–" if size is None else f"{size:g}", *path, works)
    notes = ["* of keys and values per token and head of 128; BF16 takes 512."]
    notes += [f"All are read through: {path}." for path in paths if len(paths) == 1]
    return Group(facts, Text(), schemes, *(Text(note, style="dim") for note in notes))


def kernels_table(found: Mapping[str, Any]) -> RenderableType:
    """What `kveval doctor` found of the kernels: whether they run here, and what each takes of the GPU."""
    lines = [Text()]
    if found["missing"]:
        lines.append(Text(f"Kernels don't run here: {found['missing']}"))
    if not found["kernels"]:
        return Group(*lines)
    title = f"Kernels, compiled for {found['architecture']} by NVRTC {found['nvrtc']}"
    table = _table(title, "kernel")
    for name in ("registers", "stack bytes", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("compiles")
    for row in found["kernels"]:
        numbers = ("–" if row[key] is None else str(row[key]) for key in ("registers", "stack_bytes"))
        seconds = "–" if row["seconds"] is None else f"{row['seconds']:.1f}"
        works = Text(f"NO: {row['problem']}", style="bold red") if row["problem"] else Text("yes", style="green")
        table.add_row(row["kernel"], *numbers, seconds, works)
    note = "Seconds: to compile; – if it was compiled before."
    return Group(*lines, table, Text(note, style="dim"))


def runs_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Runs, one per row; the columns are the rows' keys."""
    if not rows:
        return Text("No runs here. `kveval run CONFIG` makes one.")
    table = _table("", *rows[0])
    for row in rows:
        table.add_row(*("–" if value is None else str(value) for value in row.values()))
    return table


def run_summary(plan: Mapping[str, Any], env: Mapping[str, Any]) -> RenderableType:
    """What a run is: model, grid, settings, and the machine it ran on."""
    config, model = plan["config"], plan["model"]
    table = _table(config["name"], "", "")
    table.show_header = False
    cells = plan["cells"]
    lengths = sorted({cell["context_length"] for cell in cells})
    facts: dict[str, Any] = {
        "plan": plan["plan_digest"],
        "gate": plan["gate_digest"] or "none declared",
        "model": model["id"],
        "revision": model["revision"] or "–",
        "weights": model["weights_digest"],
        "computed in": f"{model['compute_dtype']} on {model['device']}",
        "arms": ", ".join(dict.fromkeys(cell["scheme"] for cell in cells)),
        "tasks": ", ".join(dict.fromkeys(cell["task"] for cell in cells)),
        "context lengths": ", ".join(f"{n:,}" for n in lengths),
        "cells": f"{len(cells):,} with {sum(cell['samples'] for cell in cells):,} samples",
        "reads": f"{config['reads']}, prefill in chunks of {config['prefill_chunk']:,} tokens",
    }
    for key, value in (*facts.items(), *_flat(env)):
        table.add_row(key, "–" if value is None else str(value))
    return table


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested mappings as dotted keys; lists as text."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(map(str, value)) or None
        else:
            yield f"{prefix}{key}", value


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name)
    return table
