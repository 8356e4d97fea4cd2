"""The two plots that are tables in colour: loss by cell and scheme, and needles by depth and length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, SymLogNorm
from matplotlib.figure import Figure

from kveval.capacity import format_tokens
from kveval.exchange_rate import interval_decimals
from kveval.records import METRICS
from kveval.report.cells import DEPTH_BUCKETS, Arm, Needle
from kveval.report.figure import (
    Plot,
    caption,
    comparison_row,
    footnote,
    loss_unit,
    new_figure,
    plot_name,
    slug,
    spread,
    styled,
    wrapped,
)
from kveval.report.model import ReportData
from kveval.stats import Comparison

__all__ = ["matrix_plot", "needle_plot"]

MISSING = "#d9d9d9"

FEW = 2
"""Samples behind a square of a heat map up to which it says how many they are."""

LEAST_TOP = {True: 10.0, False: 0.1}
"""Least loss, in points of a fraction or in nats, that gets the scale's darkest colour: noise stays pale."""

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
    top = max([LEAST_TOP[METRICS[metric].unit == "fraction"], *tops])
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
            "has no value. Crush is the control that must fail; its colour stands for anything beyond the scale.",
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
    """Share of needles found by depth and length: every arm on top, its change from the baseline below.

    The arms stand side by side on one axis per row; an axis for each would take ten times as long to draw.
    """
    arms = (*data.of_role("baseline"), *data.of_role("scheme"), *data.of_role("crush"))
    rows = [n for n in data.needles if n.task == task and n.arm in arms]
    lengths = sorted({n.context_length for n in rows})
    grids = {arm: _needle_grid(data, arm, task, lengths) for arm in arms}
    scored = any(n.metric == "task_score" for n in rows)
    title = f"{task}: {'task score' if scored else 'needles found'} (%), by depth and context length"
    width = max(0.42 * len(lengths), 0.95)  # inches of an arm: its squares, or its name
    step = len(lengths) * (1 + 0.12 / width)  # the same in squares, with the gap to the next arm
    with styled(grid=False):
        figure = new_figure(width * len(arms) + 2.4, 4.8, title)
        panels = figure.subplots(2, 1)
        shares = ScalarMappable(Normalize(0, 1), _with_grey("cividis"))
        changes = ScalarMappable(Normalize(-1, 1), _with_grey("PuOr"))
        for at, arm in enumerate(arms):
            counts = _needle_grid(data, arm, task, lengths, of="n")
            _heat(panels[0], grids[arm], at * step, shares, signed=False, counts=counts)
            if at:
                _heat(panels[1], grids[arm] - grids[arms[0]], at * step, changes, signed=True)
        middle = (len(lengths) - 1) / 2
        for axes in panels:
            axes.set_xlim(-0.5, (len(arms) - 1) * step + len(lengths) - 0.5)
            axes.set_ylim(DEPTH_BUCKETS - 0.5, -0.5)
            axes.set_yticks(range(DEPTH_BUCKETS), _depth_labels())
            _bare(axes)
        panels[0].set_xticks([at * step + middle for at in range(len(arms))], [_label(a) for a in arms])
        panels[0].xaxis.tick_top()
        places = [(at * step + i, n) for at in range(1, len(arms)) for i, n in enumerate(lengths)]
        panels[1].set_xticks([x for x, _ in places], [format_tokens(n) for _, n in places])
        panels[1].text(middle, 2, f"change from\n{arms[0].scheme}\n(points)", ha="center", va="center", fontsize=8)
        panels[0].set_ylabel("depth of the needle\n(0 % = start)")
        panels[1].set_xlabel("context length (tokens)", fontsize=8)
        _colour_bar(
            figure, panels[0], shares, "task score (%)" if scored else "exact match (%)", {0: "0", 0.5: "50", 1: "100"}
        )
        _colour_bar(figure, panels[1], changes, "points", {-1: "-100", 0: "0", 1: "+100"})
        what = "the task's own score of the answers that the model wrote" if scored else "answers that match exactly"
        few = f" Small print: where a square is {FEW} samples or fewer, how many." if _few(rows) else ""
        text = caption(
            data,
            f"Shown: {what}. Grey: no sample. White without a number: no change. "
            f"Samples per square: {spread([n.n for n in rows])}.{few} "
            "Look for patterns here, and for sizes in the loss plot.",
        )
        footnote(figure, text)
    frame = pd.DataFrame(
        {
            "scheme": [n.arm.scheme for n in rows],
            "role": [n.arm.role for n in rows],
            "context_length": [n.context_length for n in rows],
            "depth_from": [n.bucket / DEPTH_BUCKETS for n in rows],
            "depth_to": [(n.bucket + 1) / DEPTH_BUCKETS for n in rows],
            "task_score" if scored else "exact_match": [n.value for n in rows],
            "n": [n.n for n in rows],
        }
    )
    return Plot(f"needles_{slug(task)}", title, text, figure, frame)


def _few(needles: Iterable[Needle]) -> bool:
    return any(n.n <= FEW for n in needles)


def _needle_grid(
    data: ReportData, arm: Arm, task: str, lengths: Sequence[int], *, of: Literal["value", "n"] = "value"
) -> Grid:
    """Scores, or numbers of samples, of shape (depth buckets, lengths); NaN where nothing was measured."""
    grid = np.full((DEPTH_BUCKETS, len(lengths)), np.nan)
    for n in data.needles:
        if (n.arm, n.task) == (arm, task):
            grid[n.bucket, lengths.index(n.context_length)] = getattr(n, of)
    return grid


def _with_grey(name: str) -> Colormap:
    return mpl.colormaps[name].with_extremes(bad=MISSING)


def _heat(
    axes: Axes, grid: Grid, left: float, scale: ScalarMappable, *, signed: bool, counts: Grid | None = None
) -> None:
    """Draw `grid` with its first column at x = `left`. A change of nothing bears no number.

    Where `counts` says that few samples are behind a square, their number stands under its value.
    """
    colours_YXC = scale.to_rgba(np.ma.masked_invalid(grid))
    height, width = grid.shape
    axes.imshow(colours_YXC, aspect="auto", extent=(left - 0.5, left + width - 0.5, height - 0.5, -0.5))
    for (y, x), value in np.ndenumerate(grid):
        if not np.isnan(value) and (value or not signed):
            text = f"{round(100 * value):{'+' if signed else ''}d}"
            few = counts is not None and counts[y, x] <= FEW
            look: dict[str, Any] = {"ha": "center", "va": "center", "color": _ink(colours_YXC[y, x])}
            axes.text(left + x, y - 0.12 * few, text, fontsize=7.5, **look)
            if counts is not None and few:
                axes.text(left + x, y + 0.31, f"n={counts[y, x]:.0f}", fontsize=4.5, **look)


def _colour_bar(figure: Figure, axes: Axes, scale: ScalarMappable, label: str, ticks: Mapping[float, str]) -> None:
    bar = figure.colorbar(scale, ax=axes, label=label, ticks=list(ticks), pad=0.01, aspect=14)
    bar.ax.set_yticklabels(list(ticks.values()))


def _depth_labels() -> list[str]:
    step = 100 // DEPTH_BUCKETS
    return [f"{i * step}–{(i + 1) * step} %" for i in range(DEPTH_BUCKETS)]


def _bare(axes: Axes) -> None:
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _label(arm: Arm) -> str:
    name = wrapped(arm.scheme)
    return f"{name}\n(control)" if arm.role == "crush" else name
