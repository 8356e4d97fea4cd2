"""What every plot shares: colours, markers, scales, captions, and how a figure is written.

matplotlib is used without pyplot, so nothing here touches state that a caller's own plots would see.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kveval.capacity import format_tokens
from kveval.records import METRICS
from kveval.report.cells import LOSS_METRICS, Arm
from kveval.report.model import ReportData
from kveval.stats import Comparison, Estimate

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BASELINE_COLOUR",
    "MUTED",
    "Plot",
    "Style",
    "caption",
    "comparison_row",
    "estimate_columns",
    "footnote",
    "legend",
    "length_axis",
    "linear_below",
    "loss_axis",
    "loss_unit",
    "new_figure",
    "plot_name",
    "render",
    "spread",
    "style_of",
    "styled",
    "write_plot",
]

# Okabe & Ito's palette, told apart by people with any common colour blindness; yellow is too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "<", ">")
BASELINE_COLOUR = "#222222"
MUTED = "#767676"

Dashes = Literal["-", "--", "-.", ":", "none"]

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Style:
    """How an arm is drawn in every plot."""

    colour: str
    marker: str
    dashes: Dashes


@dataclass(frozen=True)
class Plot:
    """One finished figure, the sentence under it, and the data that it shows."""

    name: str
    title: str
    caption: str
    figure: Figure
    data: pd.DataFrame


def style_of(data: ReportData, arm: Arm) -> Style:
    """The same arm looks the same everywhere; seven markers with six colours repeat after 42 schemes."""
    if arm.role == "baseline":
        return Style(BASELINE_COLOUR, "", "--")
    if arm.role != "scheme":
        return Style(MUTED, "", ":")
    at = data.of_role("scheme").index(arm)
    return Style(COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)], "-" if at < len(COLOURS) else "-.")


def styled(*, grid: bool = True) -> AbstractContextManager[None]:
    """Matplotlib's settings for our plots; inside a `with` only, so that a caller's own are left alone."""
    settings: Any = {**STYLE, "axes.grid": grid}
    return mpl.rc_context(settings)


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure of about `width` x `height` inches, its title at the top left. Needs `styled`.

    It is made wider where the title would else run into the legend at the right.
    """
    figure = Figure(figsize=(max(width, 0.092 * len(title) + 2.0), height), layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold")
    return figure


def caption(data: ReportData, text: str, estimates: Iterable[Estimate] = ()) -> str:
    """`text`, then what was measured: model, samples, clusters and how intervals were made."""
    made = list(estimates)
    parts = [text, f"Model: {data.model}."]
    if made:
        samples, clusters = spread([e.n for e in made]), spread([e.n_clusters for e in made])
        parts.append(f"Samples per point: {samples}, in clusters: {clusters}.")
    methods = sorted({e.method for e in made if e.defined})
    if methods:
        parts.append(f"{data.confidence:.0%} intervals: {'; '.join(methods)}.")
    return " ".join(parts)


def spread(numbers: Sequence[int]) -> str:
    """As "64", or "16 to 64" where numbers differ."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def plot_name(kind: str, metric: str) -> str:
    """File name of a plot: the main metric's has the plain name."""
    return kind if metric == LOSS_METRICS[0] else f"{kind}_{metric}"


def loss_unit(metric: str) -> tuple[float, str]:
    """Factor and unit in which a loss is drawn: fractions in points (hundredths)."""
    unit = METRICS[metric].unit
    return (100.0, "points") if unit == "fraction" else (1.0, unit)


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """log2 x axis with a tick at every measured length."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_tokens(round(x))))
    axes.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
    axes.set_xlabel("context length (tokens)")


def linear_below(losses: Iterable[Estimate]) -> float | None:
    """The loss (in the metric's unit) up to which an axis is linear; None if it can be linear all the way.

    Where the largest loss is over 50 times the smallest one that is told from zero, a linear axis would draw
    the latter as zero: the axis is then logarithmic from that loss's power of ten on.
    """
    known = [e for e in losses if e.value is not None and e.low is not None and e.high is not None]
    largest = max((abs(e.value or 0.0) for e in known), default=0.0)
    clear = [abs(e.value or 0.0) for e in known if (e.low or 0.0) > 0 or (e.high or 0.0) < 0]
    if not clear or largest <= 50 * min(clear):
        return None
    return float(10.0 ** np.floor(np.log10(min(clear))))


def loss_axis(panels: Sequence[Axes], threshold: float | None, *, headroom: bool = False) -> None:
    """Scale the y axis of losses that `panels` share, in drawn units.

    `threshold` is `linear_below`'s, None for a linear axis. `headroom` leaves place for two lines of text.
    """
    if threshold is None:
        low, high = panels[0].get_ylim()
        panels[0].set_ylim(low, high + (0.18 * (high - low) if headroom else 0.0))
        return
    low, high = min(p.dataLim.y0 for p in panels), max(p.dataLim.y1 for p in panels)
    for axes in panels:
        axes.set_yscale("symlog", linthresh=threshold, linscale=0.5)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panels[0].set_ylim(min(-threshold, 1.5 * low), high * (10 if headroom else 1.8))


def render(plot: Plot, kind: Literal["svg", "png"]) -> bytes:
    """The figure as a file. Equal plots give equal bytes."""
    buffer = io.BytesIO()
    with styled():
        mpl.rcParams["svg.hashsalt"] = plot.name
        if plot.figure.get_layout_engine() is not None:
            # The layout takes longest and is the same for every kind of file: find it once and keep it.
            FigureCanvasAgg(plot.figure)
            plot.figure.draw_without_rendering()
            plot.figure.set_layout_engine("none")
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        plot.figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def footnote(figure: Figure, text: str) -> None:
    """Small print at the bottom left, wrapped to the figure's width."""
    width = int(figure.get_figwidth() * 17.5)
    figure.supxlabel(textwrap.fill(text, width), x=0.012, ha="left", fontsize=7, color=MUTED)


def write_plot(plot: Plot, folder: Path) -> bytes:
    """Write NAME.svg, NAME.png and the data as NAME.csv; return the SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    svg = render(plot, "svg")
    (folder / f"{plot.name}.svg").write_bytes(svg)
    (folder / f"{plot.name}.png").write_bytes(render(plot, "png"))
    plot.data.to_csv(folder / f"{plot.name}.csv", index=False)
    return svg


def legend(
    figure: Figure, data: ReportData, *, points_only: bool = False, extra: Iterable[tuple[str, Any]] = ()
) -> None:
    """One legend for all panels, at the right: schemes, the baseline (star or dashed line), then `extra`."""
    handles: list[Any] = []
    for arm in data.of_role("scheme"):
        style = style_of(data, arm)
        dashes = "none" if points_only else style.dashes
        handles.append(Line2D([], [], color=style.colour, marker=style.marker, linestyle=dashes, label=arm.scheme))
    star = {"marker": "*", "markersize": 9, "linestyle": "none"} if points_only else {"linestyle": "--"}
    handles.append(Line2D([], [], color=BASELINE_COLOUR, label=f"{data.baseline} (baseline)", **star))
    for label, handle in extra:
        handle.set_label(label)
        handles.append(handle)
    figure.legend(handles=handles, loc="outside right upper", fontsize=8.5)


def estimate_columns(estimate: Estimate, factor: float) -> dict[str, Any]:
    """An estimate as columns of a CSV file, in the unit that was drawn."""
    ends = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    scaled = {key: None if x is None else x * factor for key, x in ends.items()}
    return {**scaled, "n": estimate.n, "clusters": estimate.n_clusters, "interval": estimate.method}


def comparison_row(comparison: Comparison, factor: float) -> dict[str, Any]:
    """A comparison as a row of a CSV file, in the unit that was drawn."""
    return {
        "task": comparison.task,
        "context_length": comparison.context_length,
        "scheme": comparison.scheme,
        "role": comparison.role,
        **estimate_columns(comparison.loss, factor),
    }
