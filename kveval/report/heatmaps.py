"""The two plots that are tables in colour: loss by cell and scheme, and needles by depth and length."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, SymLogNorm

from kveval.capacity import format_tokens, interval_decimals
from kveval.records import METRICS
from kveval.report.cells import DEPTH_BUCKETS, Arm
from kveval.report.figure import (
    Plot,
    caption,
    comparison_row,
    footnote,
    loss_unit,
    new_figure,
    plot_name,
    spread,
    styled,
)
from kveval.report.model import ReportData
from kveval.stats import Comparison

__all__ = ["matrix_plot", "needle_plot"]

MISSING = "#d9d9d9"

Grid = npt.NDArray[np.float64]


def matrix_plot(data: ReportData, metric: str) -> Plot:
    """Loss of every scheme in every cell that leaves room to lose."""
    cells = [
        (task, length)
        for task in data.tasks
        for length in data.context_lengths
        if data.competence.get((task, length, metric), "floor") != "floor"
    ]
    arms = data.of_role("scheme", "crush")
    factor, unit = loss_unit(metric)
    title = f"Loss in {METRICS[metric].label} ({unit}) by task and context length"
    found = {(arm, cell): data.comparison(arm, *cell, metric) for arm in arms for cell in cells}
    rows = [comparison_row(c, factor) for c in found.values() if c is not None]
    tops = [abs(row["value"]) for row in rows if row["role"] == "scheme" and row["value"] is not None]
    top = max(tops, default=0.0) or 1.0
    norm = SymLogNorm(linthresh=top / 6, vmin=-top, vmax=top, clip=True)
    with styled(grid=False):
        figure = new_figure(1.15 * len(arms) + 3.0, 0.34 * len(cells) + 1.9, title)
        axes = figure.subplots()
        for (arm, cell), c in found.items():
            value = None if c is None or c.loss.value is None else c.loss.value * factor
            text, weight = _matrix_text(c, factor)
            _square(axes, (arms.index(arm), cells.index(cell)), value, norm, text, weight)
        axes.set_xlim(-0.5, len(arms) - 0.5)
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set_xticks(range(len(arms)), [_label(a) for a in arms])
        axes.set_yticks(range(len(cells)), [f"{t}, {format_tokens(n)}" for t, n in cells])
        _bare(axes)
        text = caption(
            data,
            "Bold: the interval does not cover zero. Orange is worse than the baseline, purple better, grey "
            "has no value. Crush, a control that must fail, has a capped colour.",
            [c.loss for c in found.values() if c is not None and c.n_pairs],
        )
        footnote(figure, text)
    return Plot(plot_name("matrix", metric), title, text, figure, pd.DataFrame(rows))


def _square(axes: Axes, at: tuple[int, int], value: float | None, norm: Normalize, text: str, weight: str) -> None:
    colour = MISSING if value is None else mpl.colormaps["PuOr_r"](float(norm(value)))
    axes.add_patch(mpl.patches.Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
    axes.text(*at, text, ha="center", va="center", color=_ink(colour), fontsize=8, fontweight=weight)


def _ink(colour: Any) -> str:
    """Black or white, whichever reads better on `colour` (relative luminance, sRGB weights)."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.45 else "#222222"


def _matrix_text(c: Comparison | None, factor: float) -> tuple[str, str]:
    if c is None or c.loss.value is None:
        return "–", "normal"
    value = c.loss.value * factor
    if c.loss.low is None or c.loss.high is None:
        return f"{value:+.3g}", "normal"
    digits = min(3, interval_decimals((c.loss.high - c.loss.low) * factor))
    rounded = round(value, digits) + 0.0  # + 0.0 makes -0.0 a plain zero
    clear = c.loss.low > 0 or c.loss.high < 0
    return (f"{rounded:+.{digits}f}" if rounded else "0"), "bold" if clear else "normal"


def needle_plot(data: ReportData, task: str) -> Plot:
    """Share of needles found by depth and length: every arm on top, its change from the baseline below."""
    arms = (*data.of_role("baseline"), *data.of_role("scheme"), *data.of_role("crush"))
    grids = {arm: _needle_grid(data, arm, task) for arm in arms}
    title = f"{task}: needles found (%), by depth and context length"
    with styled(grid=False):
        figure = new_figure(1.35 * len(arms) + 1.6, 4.6, title)
        panels = figure.subplots(2, len(arms), squeeze=False, sharex=True, sharey=True)
        shares = ScalarMappable(Normalize(0, 1), _with_grey("cividis"))
        changes = ScalarMappable(Normalize(-1, 1), _with_grey("PuOr"))
        for at, arm in enumerate(arms):
            _heat(panels[0][at], grids[arm], shares, signed=False)
            panels[0][at].set_title(_label(arm), fontsize=9)
            if at:
                _heat(panels[1][at], grids[arm] - grids[arms[0]], changes, signed=True)
        for axes in panels.flat:
            axes.set_xticks(range(len(data.context_lengths)), [format_tokens(n) for n in data.context_lengths])
            axes.set_yticks(range(DEPTH_BUCKETS), _depth_labels())
            _bare(axes)
        panels[1][0].axis("off")
        panels[0][0].set_ylabel("depth of the needle\n(0 % = start)")
        panels[1][1].set_ylabel("change from baseline")
        bar = figure.colorbar(shares, ax=list(panels[0]), label="exact match (%)", ticks=[0, 0.5, 1], pad=0.01)
        bar.ax.set_yticklabels(["0", "50", "100"])
        bar = figure.colorbar(changes, ax=list(panels[1]), label="points", ticks=[-1, 0, 1], pad=0.01)
        bar.ax.set_yticklabels(["-100", "0", "+100"])
        rows = [n for n in data.needles if n.task == task and n.arm in arms]
        text = caption(
            data,
            f"Grey: no sample. Samples per square: {spread([n.n for n in rows])}. Look for patterns here, "
            "and for sizes in the loss plot.",
        )
        footnote(figure, text)
    frame = pd.DataFrame(
        {
            "scheme": [n.arm.scheme for n in rows],
            "role": [n.arm.role for n in rows],
            "context_length": [n.context_length for n in rows],
            "depth_from": [n.bucket / DEPTH_BUCKETS for n in rows],
            "depth_to": [(n.bucket + 1) / DEPTH_BUCKETS for n in rows],
            "exact_match": [n.value for n in rows],
            "n": [n.n for n in rows],
        }
    )
    return Plot(f"needles_{_slug(task)}", title, text, figure, frame)


def _needle_grid(data: ReportData, arm: Arm, task: str) -> Grid:
    """Shares of shape (depth buckets, lengths); NaN where nothing was measured."""
    grid = np.full((DEPTH_BUCKETS, len(data.context_lengths)), np.nan)
    for n in data.needles:
        if (n.arm, n.task) == (arm, task):
            grid[n.bucket, data.context_lengths.index(n.context_length)] = n.value
    return grid


def _with_grey(name: str) -> Colormap:
    return mpl.colormaps[name].with_extremes(bad=MISSING)


def _heat(axes: Axes, grid: Grid, scale: ScalarMappable, *, signed: bool) -> None:
    colours_YXC = scale.to_rgba(np.ma.masked_invalid(grid))
    axes.imshow(colours_YXC, aspect="auto")
    for (y, x), value in np.ndenumerate(grid):
        if not np.isnan(value):
            percent = round(100 * value)
            text = f"{percent:+d}" if signed and percent else f"{percent}"
            axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=_ink(colours_YXC[y, x]))


def _depth_labels() -> list[str]:
    step = 100 // DEPTH_BUCKETS
    return [f"{i * step}–{(i + 1) * step} %" for i in range(DEPTH_BUCKETS)]


def _bare(axes: Axes) -> None:
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _label(arm: Arm) -> str:
    return f"{arm.scheme}\n(control)" if arm.role == "crush" else arm.scheme


def _slug(text: str) -> str:
    """A task's label as part of a file name."""
    return "".join(ch if ch.isalnum() or ch in "-_" else "-" for ch in text)
