"""The plot of errors by layer: what the keys look like, then what storing does to keys, values and attention."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from kveval.layer_note import LayerError, LayerErrors
from kveval.report.cells import Arm
from kveval.report.figure import MUTED, Plot, caption, footnote, legend, new_figure, style_of, styled
from kveval.report.layers import BIAS_LIMIT, probed
from kveval.report.model import ReportData

__all__ = ["layer_plot"]

PANELS = (
    ("key_difference_error", "Keys: error in what\ntells tokens apart"),
    ("value_error", "Values: error"),
    ("output_error", "Attention: error\nof its output"),
)
"""Fields of `LayerError` that share one y axis, and their titles."""


def layer_plot(data: ReportData, layers: LayerErrors) -> Plot:
    """Errors by layer, one line per scheme, on one logarithmic axis in percent; crush is the grey one.

    What a scheme stores exactly has no point: a logarithmic axis has no zero.
    """
    title = "Where the error comes from: what storage does in each layer"
    with styled():
        figure = new_figure(12.4, 3.9, title)
        bias, *panels = figure.subplots(1, 1 + len(PANELS), width_ratios=[0.8, 1, 1, 1])
        _bias_panel(bias, layers)
        for axes, (field, heading) in zip(panels, PANELS, strict=True):
            axes.sharey(panels[0])
            axes.set_title(heading, loc="left", fontweight="bold")
            for arm in (*data.of_role("crush"), *data.of_role("scheme")):
                _line(
                    axes,
                    data,
                    arm,
                    [row for row in layers.rows if (row.scheme, row.role) == (arm.scheme, arm.role)],
                    field,
                )
            _layer_axis(axes, layers)
        panels[0].set_yscale("log")
        panels[0].set_ylabel("relative error")
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
        panels[0].yaxis.set_minor_locator(NullLocator())
        for axes in panels[1:]:
            axes.tick_params(labelleft=False)
        extra = [("crush (control)", Line2D([], [], color=MUTED, marker="x", linestyle=":"))]
        legend(figure, data, baseline=False, extra=extra if data.of_role("crush") else [])
        how = (
            f"Each layer by itself, fed with what {data.baseline} computes: errors of earlier layers are not in it. "
            f"100 % is an error as large as the thing itself. Dark bars: {BIAS_LIMIT} or more. {probed(layers)}"
        )
        text = caption(data, how)
        footnote(figure, text)
    return Plot("layer_errors", title, text, figure, pd.DataFrame([asdict(row) for row in layers.rows]))


def _bias_panel(axes: Axes, layers: LayerErrors) -> None:
    """The keys' largest channel mean by layer; bars beyond the limit are dark."""
    ratios = {row.layer: row.key_bias_ratio for row in layers.rows if row.key_bias_ratio is not None}
    colours = ["#222222" if ratio >= BIAS_LIMIT else "#b5b5b5" for ratio in ratios.values()]
    axes.bar(list(ratios), list(ratios.values()), color=colours, width=0.8)
    axes.set_title("Keys: largest channel\nmean", loc="left", fontweight="bold")
    axes.set_ylabel("times the median channel's spread")
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)
    _layer_axis(axes, layers)


def _layer_axis(axes: Axes, layers: LayerErrors) -> None:
    last = max(row.layer for row in layers.rows)
    axes.set_xlim(-0.6 - 0.02 * last, last + 0.6 + 0.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("layer")


def _line(axes: Axes, data: ReportData, arm: Arm, rows: list[LayerError], field: str) -> None:
    style = style_of(data, arm)
    known = [(row.layer, error) for row in rows if (error := getattr(row, field)) > 0]
    axes.plot(
        [layer for layer, _ in known],
        [error for _, error in known],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dashes,
        linewidth=1.3,
        markersize=3.5,
        markeredgecolor=style.colour,
        markeredgewidth=1.0 if style.marker == "x" else 0.0,
        zorder=1 if arm.role == "crush" else 3,
    )
