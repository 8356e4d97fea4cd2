"""What every plot shares: colours, markers, scales, captions, and how a figure is written.

matplotlib is used without pyplot, so nothing here touches state that a caller's own plots would see.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kveval.capacity import format_tokens
from kveval.exchange_rate import LossEstimate
from kveval.records import METRICS
from kveval.report.cells import LOSS_METRICS, Arm
from kveval.report.model import ReportData
from kveval.stats import Comparison, Estimate

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BASELINE_COLOUR",
    "MUTED",
    "Dashes",
    "LossScale",
    "Plot",
    "Style",
    "caption",
    "comparison_row",
    "dodge",
    "error_bars",
    "estimate_columns",
    "footnote",
    "legend",
    "length_axis",
    "linear_below",
    "loss_label",
    "loss_scale",
    "loss_unit",
    "new_figure",
    "plot_name",
    "render",
    "slug",
    "spread",
    "style_of",
    "styled",
    "wrapped",
    "write_plot",
]

# Okabe & Ito's palette, told apart by people with any common colour blindness; yellow is too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "<", ">")
BASELINE_COLOUR = "#222222"
MUTED = "#767676"
PNG_DPI = 150

EDGE = 0.32
"""Octaves of a length axis left free at either end."""

LEGEND_LINE = 0.215
"""Height of one legend entry, in inches."""

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
        return Style(MUTED, "x" if arm.role == "crush" else "", ":")
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


def slug(text: str) -> str:
    """A task's label as part of a file name."""
    return "".join(ch if ch.isalnum() or ch in "-_" else "-" for ch in text)


def loss_unit(metric: str) -> tuple[float, str]:
    """Factor and unit in which a loss is drawn: fractions in points (hundredths)."""
    unit = METRICS[metric].unit
    return (100.0, "points") if unit == "fraction" else (1.0, unit)


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """log2 x axis with a tick at every length that was run."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_tokens(round(x))))
    axes.set_xlim(lengths[0] / 2**EDGE, lengths[-1] * 2**EDGE)
    axes.set_xlabel("context length (tokens)")


def dodge(at: int, of: int, lengths: Sequence[int]) -> float:
    """What to multiply a length by so that the bars of arm `at` of `of` stand beside those of the others.

    Neighbours are 2.6 % of the axis apart, less where that would fill half the way to the next length or pass the
    edge of the panel.
    """
    gaps = [math.log2(b / a) for a, b in pairwise(lengths)]
    width = math.log2(lengths[-1] / lengths[0]) + 2 * EDGE
    step = min([0.026 * width, 1.6 * EDGE / of, *(0.5 * gap / of for gap in gaps)])
    return float(2.0 ** (step * (at - (of - 1) / 2)))


def linear_below(losses: Iterable[Estimate], factor: float = 1.0) -> float | None:
    """The loss, times `factor`, up to which an axis is linear; None if it can be linear all the way.

    Where the largest loss is over 50 times the smallest one that is told from zero, a linear axis would draw
    the latter as zero: the axis is then logarithmic from the next power of ten above that loss on. (From the
    one below on, differences that are all noise would fill most of the axis.)
    """
    known = [e for e in losses if e.value is not None and e.low is not None and e.high is not None]
    largest = max((abs(e.value or 0.0) for e in known), default=0.0)
    clear = [abs(e.value or 0.0) for e in known if (e.low or 0.0) > 0 or (e.high or 0.0) < 0]
    if not clear or largest <= 50 * min(clear):
        return None
    return factor * float(10.0 ** np.ceil(np.log10(min(clear))))


@dataclass(frozen=True)
class LossScale:
    """A y axis of losses, in drawn units. `linear_below` is None for a linear axis, 0 for a logarithmic one."""

    low: float
    high: float
    linear_below: float | None

    def apply(self, axes: Axes) -> None:
        """Set the axis."""
        if self.linear_below is not None:
            if self.linear_below:
                axes.set_yscale("symlog", linthresh=self.linear_below, linscale=1.0)
            else:
                axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_ylim(self.low, self.high)


def loss_scale(
    losses: Sequence[Estimate], factor: float, threshold: float | None, *, shown: Sequence[float] = (0.0,)
) -> LossScale:
    """The axis that shows every value of `losses` and the drawn numbers `shown`, and most of the intervals.

    Intervals of few samples can be many times wider than all values together: they are cut where they would
    squeeze the values.
    """
    points = [factor * e.value for e in losses if e.value is not None] + list(shown)
    lows = [factor * e.low for e in losses if e.low is not None] + points
    highs = [factor * e.high for e in losses if e.high is not None] + points
    bottom, top = min(points), max(points)
    if threshold == 0.0:
        positive = min(y for y in points if y > 0)
        return LossScale(positive / 2.5, min(max(highs), 3.0 * top) * 1.6, threshold)
    if threshold is not None:
        low, high = max(min(lows), min(3.0 * bottom, -threshold)), min(max(highs), max(3.0 * top, threshold))
        return LossScale(1.3 * low, 1.3 * high, threshold)
    room = 0.6 * (top - bottom) or max(max(highs), -min(lows)) or 1.0
    low, high = max(min(lows), bottom - room), min(max(highs), top + room)
    pad = 0.06 * ((high - low) or 1.0)
    return LossScale(low - pad, high + pad, threshold)


def loss_label(text: str, unit: str, threshold: float | None) -> str:
    """Label of an axis of losses, telling where it is logarithmic."""
    return f"{text} ({unit})" if threshold is None else f"{text} ({unit},\nlogarithmic from {threshold:g})"


def error_bars(
    axes: Axes, points: Iterable[tuple[float, LossEstimate]], factor: float, scale: LossScale, colour: str
) -> None:
    """A thin bar for every interval; one that goes on beyond the axis ends in an arrowhead there.

    On a logarithmic axis, which has no zero, the part under the mean of an interval that reaches zero is pale.
    """
    stems: list[tuple[float, float, float]] = []
    pale: list[tuple[float, float, float]] = []
    heads: list[tuple[float, float, str]] = []
    for x, e in points:
        if e.value is None or e.low is None or e.high is None:
            continue
        value, low, high = factor * e.value, factor * e.low, factor * e.high
        faded = scale.linear_below == 0.0 and low < scale.low
        stems.append((x, value if faded else max(low, scale.low), min(high, scale.high)))
        pale += [(x, scale.low, value)] if faded else []
        heads += [(x, scale.high, "^")] if high > scale.high else []
        heads += [(x, scale.low, "v")] if low < scale.low and not faded else []
    for bars, alpha in ((stems, 0.8), (pale, 0.2)):
        if bars:
            axes.vlines(*zip(*bars, strict=True), color=colour, linewidth=1.1, alpha=alpha)
    for marker in ("^", "v"):
        at = [(x, y) for x, y, head in heads if head == marker]
        if at:
            style: dict[str, Any] = {"color": colour, "linestyle": "none", "markersize": 3.5, "clip_on": False}
            axes.plot(*zip(*at, strict=True), marker=marker, **style)


def wrapped(name: str, width: int = 12) -> str:
    """A name over several lines of about `width` characters, broken after underscores and hyphens."""
    lines = [""]
    for part in re.findall(r"[^_-]*[_-]?", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def render(plot: Plot, kind: Literal["svg", "png"]) -> bytes:
    """The figure as a file. Equal plots give equal bytes.

    The layout takes as long as drawing does and holds for every kind of file: it is found once. The canvases
    are told to print directly, because `savefig` draws everything twice.
    """
    buffer, figure = io.BytesIO(), plot.figure
    with styled():
        mpl.rcParams["svg.hashsalt"] = plot.name
        engine = figure.get_layout_engine()
        if isinstance(engine, ConstrainedLayoutEngine):
            figure.set_dpi(PNG_DPI)  # texts measured here are not measured again for the PNG
            FigureCanvasAgg(figure)
            engine.execute(figure)
            figure.set_layout_engine("none")
        canvas: Any  # matplotlib's stubs leave these methods untyped
        if kind == "svg":
            canvas = FigureCanvasSVG(figure)
            canvas.print_svg(buffer, metadata={"Date": None})
        else:
            figure.set_dpi(PNG_DPI)
            canvas = FigureCanvasAgg(figure)
            canvas.print_png(buffer, metadata={"Software": None}, pil_kwargs={"compress_level": 3})
    return buffer.getvalue()


def footnote(figure: Figure, text: str) -> None:
    """Small print at the bottom left, wrapped to the figure's width."""
    width = int(figure.get_figwidth() * 17.5)
    figure.supxlabel(textwrap.fill(text, width), x=0.012, ha="left", fontsize=7, color=MUTED)


def write_plot(plot: Plot, folder: Path) -> bytes:
    """Write NAME.svg, NAME.png and the data as NAME.csv; return the SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{plot.name}.png").write_bytes(render(plot, "png"))
    svg = render(plot, "svg")
    (folder / f"{plot.name}.svg").write_bytes(svg)
    plot.data.to_csv(folder / f"{plot.name}.csv", index=False)
    return svg


def legend(
    figure: Figure,
    data: ReportData,
    *,
    points_only: bool = False,
    baseline: bool = True,
    extra: Iterable[tuple[str, Any]] = (),
) -> None:
    """One legend for all panels, at the right: schemes, the baseline (star or dashed line), then `extra`.

    The figure is made as high as the legend needs.
    """
    handles: list[Any] = []
    for arm in data.of_role("scheme"):
        style = style_of(data, arm)
        dashes = "none" if points_only else style.dashes
        handles.append(Line2D([], [], color=style.colour, marker=style.marker, linestyle=dashes, label=arm.scheme))
    if baseline:
        star: Any = {"marker": "*", "markersize": 9, "linestyle": "none"} if points_only else {"linestyle": "--"}
        handles.append(Line2D([], [], color=BASELINE_COLOUR, label=f"{data.baseline} (baseline)", **star))
    for label, handle in extra:
        handle.set_label(label)
        handles.append(handle)
    figure.set_figheight(max(figure.get_figheight(), 0.5 + LEGEND_LINE * len(handles)))
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
