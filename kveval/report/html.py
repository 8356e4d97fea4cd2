"""One self-contained report.html, and the plots beside it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kveval.capacity import GIB, format_tokens, get_gpu
from kveval.records import METRICS
from kveval.report.cells import DETAIL_METRICS, LOSS_METRICS
from kveval.report.figure import Plot, write_plot
from kveval.report.layers import bias_sentence, layer_rows, layer_sentences, probed
from kveval.report.model import ReportData
from kveval.report.native import hardware_sentences, native_rows, ran_on, reason_sentences, widening_sentence
from kveval.report.plots import all_plots
from kveval.report.rows import BRIEF, answer_rows, cell_rows, few_clusters, gate_notes, loss_text, summary_rows

__all__ = ["render_html", "write_report"]

LAYER_PLOT = "layer_errors"
"""Name of the plot that stands in a section of its own."""

MAIN_PLOTS = ("degradation", "exchange", "matrix", "needles", "positions")
"""Kinds of plots that stand in the page; the others are folded away."""

FOLDED = ("degradation_exact_match", "exchange_exact_match", "matrix_exact_match", "exchange_task_score",
          "matrix_task_score")  # fmt: skip
"""Plots that are folded away whatever their kind."""


def write_report(run_dir: str | Path, data: ReportData) -> Path:
    """Write `report.html` and `plots/` (SVG, PNG and CSV of every plot) into a run's folder.

    Returns:
        The path of `report.html`.
    """
    run_dir = Path(run_dir)
    for stale in (run_dir / "plots").glob("*.*"):
        stale.unlink()
    drawn = [(plot, write_plot(plot, run_dir / "plots")) for plot in all_plots(data)]
    path = run_dir / "report.html"
    path.write_text(render_html(data, drawn), encoding="utf-8")
    return path


def render_html(data: ReportData, plots: Sequence[tuple[Plot, bytes]]) -> str:
    """The page. `plots` are the figures with their SVG, which are embedded: the page loads nothing."""
    environment = Environment(
        loader=PackageLoader("kveval.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tokens"] = format_tokens
    scored = data.has("task_score")
    # One more column leaves no room for what is told in full where there is none.
    environment.filters["brief"] = lambda text: BRIEF.get(text, text) if scored else text
    figures = [_figure(plot, svg) for plot, svg in plots]
    return environment.get_template("report.html").render(
        data=data,
        summary=summary_rows(data),
        baseline_sessions=data.sessions[data.baseline, data.context_lengths[-1]].floored,
        cells=cell_rows(data),
        scored=scored,
        answers=answer_rows(data),
        details=[METRICS[m].label for m in DETAIL_METRICS],
        figures=[f for f in figures if f["main"]],
        more_figures=[f for f in figures if not f["main"] and f["name"] != LAYER_PLOT],
        layer_figure=next((f for f in figures if f["name"] == LAYER_PLOT), None),
        layers=_layers(data),
        native=_native(data),
        endpoints=_endpoints(data),
        gate_notes=gate_notes(data.verdict) if data.verdict else [],
        few_clusters=few_clusters(data.ranked("answer_nll")),
        not_drawn=_not_drawn(data),
        storage=[s for s in data.storage if s.context_length == data.context_lengths[-1]],
        facts=_facts(data),
        env=json.dumps(data.env, indent=2, sort_keys=True),
        config=json.dumps(data.config, indent=2),
    )


def _figure(plot: Plot, svg: bytes) -> dict[str, Any]:
    # An <img> keeps the identifiers inside each SVG apart; several inline <svg> would share one namespace.
    source = "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
    kind = plot.name.split("_")[0]
    main = kind in MAIN_PLOTS and plot.name not in FOLDED
    return {
        "name": plot.name,
        "title": plot.title,
        "alt": f"{plot.title}. {plot.caption}",
        "source": source,
        # A wide figure scrolls rather than shrinks below three quarters of its size (96 pixels to an inch).
        "least_width": round(72 * plot.figure.get_figwidth()),
        "main": main,
    }


def _endpoints(data: ReportData) -> list[dict[str, str]]:
    if data.verdict is None:
        return []
    return [
        {
            "status": end.status,
            "metric": end.metric,
            "task": end.task,
            "context": format_tokens(end.context_length),
            "loss": loss_text(end.comparison).text if end.comparison else "–",
            "margin": f"{end.margin:g}",
            "message": end.message,
        }
        for end in data.verdict.endpoints
    ]


def _layers(data: ReportData) -> dict[str, Any] | None:
    """What the section on layers says; None for a run that did not measure them."""
    if data.layers is None:
        return None
    return {
        "problem": data.layers.problem,
        "probed": probed(data.layers),
        "bias": bias_sentence(data.layers),
        "sentences": layer_sentences(data.layers),
        "rows": layer_rows(data.layers),
    }


def _native(data: ReportData) -> dict[str, Any] | None:
    """What the section on how schemes ran says; None for a run that did not record it."""
    if data.native is None:
        return None
    return {
        "problem": data.native.problem,
        "ran_on": ran_on(data.native),
        "rows": native_rows(data.native, data.attention_paths),
        "widening": widening_sentence(data.native),
        "reasons": reason_sentences(data.native),
        "hardware": hardware_sentences(data.native),
    }


def _not_drawn(data: ReportData) -> list[str]:
    """Labels of the metrics that have no plots because their losses are undecidable in every cell."""
    able = {m for m in LOSS_METRICS if any(data.discriminates(m, task) for task in data.tasks)}
    return [METRICS[m].label for m in LOSS_METRICS if m in able and not data.decidable(m)]


def _facts(data: ReportData) -> list[tuple[str, str]]:
    config, capacity = data.config, data.config["capacity"]
    gpu = get_gpu(capacity["gpu"])
    group = f"{capacity['tensor_parallel']} x " if capacity["tensor_parallel"] > 1 else ""
    notes = {note for s in data.sessions.values() for note in s.notes}
    written = {e.task for e in data.endings}
    tasks = (
        f"{t['label']} ({t['samples'] or config['samples']} samples{', answers written' * (t['label'] in written)})"
        for t in config["tasks"]
    )
    counted = (
        f"counted for {group}{gpu.card} ({gpu.memory_bytes / GIB:.1f} GiB as its driver reports), "
        f"{capacity['reserve']:.0%} of it kept free, in blocks of {capacity['block_size']} tokens."
    )
    return [
        ("Model", data.model),
        ("Tasks", ", ".join(tasks)),
        (
            "Context lengths",
            f"{', '.join(f'{n:,}' for n in data.context_lengths)} tokens; longer: not tested",
        ),
        ("What attention reads", _reads(config)),
        ("Sessions", " ".join([counted, *sorted(notes)])),
        ("Seed", str(config["seed"])),
    ]


def _reads(config: Mapping[str, Any]) -> str:
    chunk = f"prefill in chunks of {config['prefill_chunk']:,} tokens"
    if config["reads"] == "stored":
        return f"every key and value through the stored format; {chunk}"
    return f"the current chunk raw, everything before it through the stored format; {chunk}"
