"""The exchange-rate plot: sessions gained against quality lost, with the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from kveval.capacity import format_tokens
from kveval.exchange_rate import ExchangeRate
from kveval.records import METRICS
from kveval.report.cells import Arm
from kveval.report.figure import (
    BASELINE_COLOUR,
    MUTED,
    LossScale,
    Plot,
    caption,
    error_bars,
    footnote,
    legend,
    linear_below,
    loss_label,
    loss_scale,
    loss_unit,
    new_figure,
    plot_name,
    style_of,
    styled,
)
from kveval.report.model import ReportData

__all__ = ["exchange_plot", "frontier"]

WIDTH, HEIGHT = 2.75, 2.1
"""Inches of a panel, near enough before the layout is known to tell which names fit in it."""

LABEL_SIZE = 7.0
"""Font size of the names in a panel, in points."""


def exchange_plot(data: ReportData, metric: str) -> Plot:
    """Sessions per GPU against loss, one row per task with a panel per length that it ran at.

    Sessions are drawn as multiples of the baseline's, so that every panel has the same x axis; the panel's
    title gives the baseline's number. Where not one baseline session fits, the multiple is that of the bytes.
    """
    rates = [r for r in data.exchange if r.metric == metric and data.discriminates(metric, r.task)]
    cells = list(dict.fromkeys((r.task, r.context_length) for r in rates if _multiple(r) is not None))
    tasks = [task for task in data.tasks if any(task == t for t, _ in cells)]
    factor, unit = loss_unit(metric)
    some = next(iter(data.sessions.values()))
    place = some.gpu if some.gpus == 1 else f"{some.gpus} x {some.gpu}"
    title = f"What more sessions on {place} cost in {METRICS[metric].label}"
    columns = max(sum(t == task for t, _ in cells) for task in tasks) if tasks else 1
    reach = [1.0, *(m for r in rates if (m := _multiple(r)) is not None)]
    with styled():
        figure = new_figure(WIDTH * columns + 2.6, (HEIGHT + 0.2) * len(tasks) + 1.2, title)
        grid = figure.add_gridspec(max(1, len(tasks)), columns)
        for row, task in enumerate(tasks):
            estimates = [c.loss for c in data.ranked(metric) if c.task == task]
            scale = loss_scale(estimates, factor, linear_below(estimates, factor))
            for column, length in enumerate(n for t, n in cells if t == task):
                axes = figure.add_subplot(grid[row, column])
                here = [r for r in rates if (r.task, r.context_length) == (task, length)]
                _session_axis(axes, min(reach), max(reach))
                scale.apply(axes)
                _exchange_panel(axes, data, here, factor, scale)
                axes.set_title(_panel_title(data, length), fontsize=8.5)
                if row == len(tasks) - 1:
                    axes.set_xlabel(f"sessions, in multiples of {data.baseline}'s")
                if column:
                    axes.tick_params(labelleft=False)
                else:
                    axes.set_ylabel(loss_label(f"{task}\nloss", unit, scale.linear_below))
        frontier_line = Line2D([], [], color=MUTED, linestyle=":")
        legend(figure, data, points_only=True, extra=[("best for its size", frontier_line)])
        drawn = [c.loss for c in data.ranked(metric) if c.task in tasks and c.n_pairs]
        text = "Better is right (more sessions) and down (less loss). Sessions follow from the cache's bytes."
        text = caption(data, f"{text} An arrowhead: the interval goes on beyond the axis.", drawn)
        footnote(figure, text)
    return Plot(plot_name("exchange", metric), title, text, figure, pd.DataFrame(_exchange_rows(rates, factor)))


def _multiple(rate: ExchangeRate) -> float | None:
    """Sessions per session of the baseline; None where the model's weights leave no room for a cache."""
    return rate.gain if rate.gain is not None else rate.bytes_gain


def _panel_title(data: ReportData, length: int) -> str:
    count = data.sessions[data.baseline, length].floored
    return f"{format_tokens(length)} tokens ({data.baseline}: {count:,} session{'s' * (count != 1)})"


def _exchange_rows(rates: Sequence[ExchangeRate], factor: float) -> list[dict[str, Any]]:
    def scaled(x: float | None) -> float | None:
        return None if x is None else factor * x

    return [
        {
            "task": r.task,
            "context_length": r.context_length,
            "scheme": r.scheme,
            "sessions": r.sessions,
            "baseline_sessions": r.baseline_sessions,
            "gain": r.gain,
            "bytes_gain": r.bytes_gain,
            "loss": scaled(r.loss.value),
            "low": scaled(r.loss.low),
            "high": scaled(r.loss.high),
            "loss_per_extra_session": scaled(r.loss_per_extra_session),
            "loss_per_doubling": scaled(r.loss_per_doubling),
        }
        for r in rates
    ]


def _session_axis(axes: Axes, low: float, high: float) -> None:
    """Linear x axis of multiples: the same in every panel, with room for names at the right."""
    span = max(high - low, 0.5)
    axes.set_xlim(low - 0.08 * span, high + 0.3 * span)
    ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high)
    axes.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high + 0.3 * span]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))


def _exchange_panel(
    axes: Axes, data: ReportData, rates: Sequence[ExchangeRate], factor: float, scale: LossScale
) -> None:
    axes.axhline(0, color=BASELINE_COLOUR, linestyle="--", linewidth=1)
    axes.plot([1.0], [0], marker="*", markersize=10, color=BASELINE_COLOUR, linestyle="none", zorder=30)
    known = [
        (r, m, factor * r.loss.value) for r in rates if r.loss.value is not None and (m := _multiple(r)) is not None
    ]
    steps = frontier([(1.0, 0.0), *((m, y) for _, m, y in known)])
    axes.plot(*zip(*steps, strict=True), color=MUTED, linewidth=1, linestyle=":", zorder=1)
    low, high = axes.get_xlim()
    step = 0.024 * (high - low)
    names: list[tuple[str, float, float]] = []
    for rate, m, y in known:
        style = style_of(data, Arm(rate.scheme, "scheme"))
        # Formats of equal size would hide one another's error bars: they are set side by side.
        twins = [r.scheme for r, other, _ in known if abs(other - m) < step]
        apart = min(step, 0.08 * (high - low) / len(twins))
        x = m + (twins.index(rate.scheme) - (len(twins) - 1) / 2) * apart
        error_bars(axes, [(x, rate.loss)], factor, scale, style.colour)
        axes.plot([x], [y], marker=style.marker, color=style.colour, markeredgecolor="white", markersize=6.5)
        names.append((rate.scheme, x, y))
    _name_points(axes, names)


def _name_points(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Write each name beside its point where it covers no other point, name or edge; the legend has them all."""
    scale, size = axes.transScale + axes.transLimits, (WIDTH - 0.3, HEIGHT - 0.3)
    at = {name: scale.transform((x, y)) * size for name, x, y in points}
    high, gap = LABEL_SIZE / 72, 0.08
    taken = [(x - 0.05, y - 0.05, x + 0.05, y + 0.05) for x, y in at.values()]
    for name, (x, y) in at.items():
        wide = 0.62 * high * len(name)
        for side in ("left", "right"):  # where the text's anchor lies, as matplotlib has it
            left = x + gap if side == "left" else x - gap - wide
            box = (left, y - high / 2, left + wide, y + high / 2)
            if box[0] < 0 or box[2] > size[0] or any(_overlap(box, other) for other in taken):
                continue
            taken.append(box)
            axes.annotate(
                name,
                next((px, py) for n, px, py in points if n == name),
                xytext=(72 * gap if side == "left" else -72 * gap, 0),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=LABEL_SIZE,
                bbox={"facecolor": "white", "alpha": 0.7, "pad": 0.5, "linewidth": 0},
                zorder=20,
            )
            break


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Whether two boxes (left, bottom, right, top) share any area."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (sessions, loss) points that no other beats on both, by sessions."""

    def beaten(x: float, y: float) -> bool:
        return any(ox >= x and oy <= y and (ox, oy) != (x, y) for ox, oy in points)

    return sorted({(x, y) for x, y in points if not beaten(x, y)})
