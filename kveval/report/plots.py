"""The plots over context length and over sessions. Each keeps the data that it drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from kveval.capacity import ExchangeRate, format_tokens
from kveval.records import METRICS
from kveval.report.cells import LOSS_METRICS, Arm
from kveval.report.figure import (
    BASELINE_COLOUR,
    MUTED,
    Plot,
    caption,
    comparison_row,
    estimate_columns,
    footnote,
    legend,
    length_axis,
    linear_below,
    loss_axis,
    loss_unit,
    new_figure,
    plot_name,
    spread,
    style_of,
    styled,
)
from kveval.report.heatmaps import matrix_plot, needle_plot
from kveval.report.model import ReportData
from kveval.stats import Comparison, Estimate

__all__ = ["all_plots", "decode_plot", "degradation_plot", "exchange_plot", "frontier", "quality_plot"]

Spreads = Literal["band", "bars", "none"]


def all_plots(data: ReportData) -> list[Plot]:
    """Every plot that the data allow, in the order of the report.

    A metric without any cell whose baseline leaves room to lose is not drawn: its plots would show "no loss"
    where nothing could be lost.
    """
    metrics = [m for m in LOSS_METRICS if any(data.discriminates(m, task) for task in data.tasks)]
    plots = [make(data, m) for m in metrics for make in (degradation_plot, exchange_plot, matrix_plot)]
    plots += [needle_plot(data, task) for task in dict.fromkeys(n.task for n in data.needles)]
    plots += [quality_plot(data, m) for m in metrics]
    if data.timings:
        plots.append(decode_plot(data))
    return plots


def degradation_plot(data: ReportData, metric: str) -> Plot:
    """Loss against the baseline by context length, one panel per task."""
    tasks = [t for t in data.tasks if data.discriminates(metric, t)]
    factor, unit = loss_unit(metric)
    binary = METRICS[metric].family == "binary"
    threshold = _threshold(data, metric, tasks)
    title = f"Loss in {METRICS[metric].label} by context length (up is worse)"
    rows: list[dict[str, Any]] = []
    drawn: list[Comparison] = []
    with styled():
        figure = new_figure(3.1 * len(tasks) + 2.0, 3.9, title)
        panels = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axes, task in zip(panels, tasks, strict=True):
            for arm in data.arms[1:]:
                series = _series(data, arm, task, metric)
                rows += [comparison_row(c, factor) for c in series]
                if arm.role == "crush":  # drawn to scale it would flatten every real format
                    _tell_crush(axes, series, metric)
                    continue
                drawn += series if arm.role == "scheme" else []
                spreads: Spreads = "none" if arm.role == "aa" else "bars" if binary else "band"
                points = [(c.context_length, c.loss) for c in series]
                _line(axes, data, arm, points, factor, spreads=spreads)
            _margins(axes, data, task, metric, factor)
            axes.axhline(0, color=BASELINE_COLOUR, linestyle="--", linewidth=1.2, zorder=1)
            loss_axis([axes], threshold, headroom=True)
            length_axis(axes, data.context_lengths)
            axes.set_title(task)
        panels[0].set_ylabel(_loss_label(f"0 = {data.baseline}; loss", unit, threshold))
        extra: list[tuple[str, Any]] = []
        if data.of_role("aa"):
            extra.append((f"{data.baseline} against itself", Line2D([], [], color=MUTED, linestyle=":")))
        if any(m == metric for m, _, _ in data.margins):
            extra.append((f"margin for {data.gate_scheme}", Line2D([], [], color="black", linewidth=2.2)))
        legend(figure, data, extra=extra)
        text = caption(
            data, "Mean loss against the baseline on the same samples.", [c.loss for c in drawn if c.n_pairs]
        )
        footnote(figure, text)
    return Plot(plot_name("degradation", metric), title, text, figure, pd.DataFrame(rows))


def quality_plot(data: ReportData, metric: str) -> Plot:
    """The metric itself by context length, the baseline dashed, one panel per task.

    Only the baseline has a band: the schemes' own intervals are those of unpaired means, which overlap even
    where the paired loss is certain.
    """
    tasks = [t for t in data.tasks if data.discriminates(metric, t)]
    label, unit = METRICS[metric].label, METRICS[metric].unit
    factor, unit = (100.0, "%") if unit == "fraction" else (1.0, unit)
    worse = "up is worse" if METRICS[metric].higher_is_worse else "down is worse"
    title = f"{label[0].upper()}{label[1:]} by context length ({worse})"
    rows: list[dict[str, Any]] = []
    drawn: list[Estimate] = []
    with styled():
        figure = new_figure(3.1 * len(tasks) + 2.0, 3.9, title)
        panels = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axes, task in zip(panels, tasks, strict=True):
            for arm in (*data.of_role("scheme"), *data.of_role("baseline")):
                means = [m for m in data.means if (m.arm, m.task, m.metric) == (arm, task, metric)]
                points = [(m.context_length, m.estimate) for m in means]
                spreads: Spreads = "band" if arm.role == "baseline" else "none"
                _line(axes, data, arm, points, factor, spreads=spreads)
                drawn += [e for _, e in points if e.n]
                where = {"task": task, "scheme": arm.scheme, "role": arm.role}
                rows += [{**where, "context_length": n, **estimate_columns(e, factor)} for n, e in points]
            length_axis(axes, data.context_lengths)
            axes.set_title(task)
        panels[0].set_ylabel(f"{label} ({unit})")
        legend(figure, data, extra=[("baseline's interval", Patch(color=BASELINE_COLOUR, alpha=0.13))])
        text = caption(data, "Means. To compare formats use the loss plot: it pairs the samples.", drawn)
        footnote(figure, text)
    return Plot(plot_name("quality", metric), title, text, figure, pd.DataFrame(rows))


def exchange_plot(data: ReportData, metric: str) -> Plot:
    """Sessions per GPU against loss, one panel per task and length, with the frontier."""
    tasks = [t for t in data.tasks if data.discriminates(metric, t)]
    lengths = data.context_lengths
    factor, unit = loss_unit(metric)
    some = next(iter(data.sessions.values()))
    place = some.gpu if some.gpus == 1 else f"{some.gpus} x {some.gpu}"
    title = f"What more sessions on {place} cost in {METRICS[metric].label}"
    rates = [r for r in data.exchange if r.metric == metric and r.task in tasks]
    threshold = _threshold(data, metric, tasks)
    with styled():
        figure = new_figure(2.7 * len(lengths) + 2.0, 2.2 * len(tasks) + 1.3, title)
        grid = figure.subplots(len(tasks), len(lengths), squeeze=False, sharex="col", sharey="row")
        for line, task in zip(grid, tasks, strict=True):
            for axes, length in zip(line, lengths, strict=True):
                here = [r for r in rates if (r.task, r.context_length) == (task, length)]
                _exchange_panel(axes, data, here, data.sessions[data.baseline, length].floored, factor)
            loss_axis(line, threshold)
            line[0].set_ylabel(_loss_label(f"{task}\nloss", unit, threshold))
        for axes, length in zip(grid[0], lengths, strict=True):
            axes.set_title(f"{format_tokens(length)} tokens")
        for axes in grid[-1]:
            axes.set_xlabel("sessions at once")
        legend(
            figure,
            data,
            points_only=True,
            extra=[("best for its size", Line2D([], [], color=MUTED, linestyle=":"))],
        )
        drawn = [c.loss for c in data.ranked(metric) if c.task in tasks and c.n_pairs]
        text = "Better is right (more sessions) and down (less loss). Sessions follow from the cache's bytes."
        text = caption(data, text, drawn)
        footnote(figure, text)
    return Plot(plot_name("exchange", metric), title, text, figure, pd.DataFrame(_exchange_rows(rates, factor)))


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


def _exchange_panel(axes: Axes, data: ReportData, rates: Sequence[ExchangeRate], baseline: int, factor: float) -> None:
    axes.axhline(0, color=BASELINE_COLOUR, linestyle="--", linewidth=1)
    axes.plot([baseline], [0], marker="*", markersize=10, color=BASELINE_COLOUR, linestyle="none", zorder=30)
    known = [(r, factor * r.loss.value) for r in rates if r.loss.value is not None]
    steps = frontier([(baseline, 0.0), *((r.sessions, y) for r, y in known)])
    axes.plot(*zip(*steps, strict=True), color=MUTED, linewidth=1, linestyle=":", zorder=1)
    step = 0.024 * max([baseline, *(r.sessions for r in rates)])
    for rate, y in known:
        style = style_of(data, Arm(rate.scheme, "scheme"))
        # Formats of equal size would hide one another's error bars: they are set side by side.
        twins = [r.scheme for r, _ in known if abs(r.sessions - rate.sessions) < step]
        x = rate.sessions + (twins.index(rate.scheme) - (len(twins) - 1) / 2) * step
        if rate.loss.low is not None and rate.loss.high is not None:
            axes.vlines(x, factor * rate.loss.low, factor * rate.loss.high, color=style.colour, linewidth=1.4)
        axes.plot([x], [y], marker=style.marker, color=style.colour, markeredgecolor="white", markersize=7)
    axes.margins(x=0.08, y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (sessions, loss) points that no other beats on both, by sessions."""

    def beaten(x: float, y: float) -> bool:
        return any(ox >= x and oy <= y and (ox, oy) != (x, y) for ox, oy in points)

    return sorted({(x, y) for x, y in points if not beaten(x, y)})


def decode_plot(data: ReportData) -> Plot:
    """Time per decoded token by context length, in milliseconds."""
    where = "on the GPU" if data.on_gpu else "on the CPU reference path"
    title = f"Decode time per token {where}"
    with styled():
        figure = new_figure(6.6, 3.9, title)
        axes = figure.subplots()
        for arm in (*data.of_role("scheme"), *data.of_role("baseline")):
            times = [t for t in data.timings if t.arm == arm]
            style, x = style_of(data, arm), [t.context_length for t in times]
            axes.plot(
                x,
                [1e3 * t.median for t in times],
                color=style.colour,
                marker=style.marker,
                linestyle=style.dashes,
            )
            low, high = [1e3 * t.low for t in times], [1e3 * t.high for t in times]
            axes.fill_between(x, low, high, color=style.colour, alpha=0.1, linewidth=0)
        axes.set_ylim(bottom=0)
        length_axis(axes, data.context_lengths)
        axes.set_ylabel("milliseconds per token")
        legend(figure, data)
        note = "" if data.on_gpu else "Not GPU speed: formats are unpacked in plain PyTorch here. "
        counts = spread([t.n for t in data.timings])
        text = caption(data, f"{note}Median and quartiles over {counts} samples of all tasks.")
        footnote(figure, text)
    rows = [
        {
            "scheme": t.arm.scheme,
            "role": t.arm.role,
            "context_length": t.context_length,
            "median_ms": 1e3 * t.median,
            "quartile_1_ms": 1e3 * t.low,
            "quartile_3_ms": 1e3 * t.high,
            "n": t.n,
        }
        for t in data.timings
    ]
    return Plot("decode", title, text, figure, pd.DataFrame(rows))


def _threshold(data: ReportData, metric: str, tasks: Sequence[str]) -> float | None:
    """One scale for all panels: where it is logarithmic, from this loss on (in drawn units)."""
    linear = linear_below(c.loss for c in data.ranked(metric) if c.task in tasks)
    return None if linear is None else loss_unit(metric)[0] * linear


def _loss_label(text: str, unit: str, threshold: float | None) -> str:
    return f"{text} ({unit})" if threshold is None else f"{text} ({unit},\nlogarithmic from {threshold:g})"


def _series(data: ReportData, arm: Arm, task: str, metric: str) -> list[Comparison]:
    found = (data.comparison(arm, task, length, metric) for length in data.context_lengths)
    return [c for c in found if c is not None]


def _line(
    axes: Axes,
    data: ReportData,
    arm: Arm,
    points: Sequence[tuple[int, Estimate]],
    factor: float,
    *,
    spreads: Spreads,
) -> None:
    """Draw one arm. What is undefined is left out, never drawn as zero.

    Wide intervals of many arms are told apart better as bars, set side by side, than as bands.
    """
    style = style_of(data, arm)
    schemes = data.of_role("scheme")
    shift = schemes.index(arm) - (len(schemes) - 1) / 2 if spreads == "bars" and arm in schemes else 0.0
    known = [(n * 2 ** (0.045 * shift), e) for n, e in points if e.value is not None]
    y = [factor * e.value for _, e in known if e.value is not None]
    axes.plot(
        [x for x, _ in known],
        y,
        color=style.colour,
        marker=style.marker,
        linestyle=style.dashes,
        linewidth=1.6,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        zorder=3,
    )
    ends = [(x, e.low * factor, e.high * factor) for x, e in known if e.low is not None and e.high is not None]
    at, low, high = ([end[i] for end in ends] for i in range(3))
    if spreads == "bars" or (spreads == "band" and len(ends) == 1):  # a band at one length has no width
        axes.vlines(at, low, high, color=style.colour, linewidth=1.2, alpha=0.7)
    elif spreads == "band":
        axes.fill_between(at, low, high, color=style.colour, alpha=0.13, linewidth=0)


def _tell_crush(axes: Axes, series: Sequence[Comparison], metric: str) -> None:
    factor, unit = loss_unit(metric)
    known = [factor * c.loss.value for c in series if c.loss.value is not None]
    if known:
        low, high = f"{min(known):.3g}", f"{max(known):.3g}"
        text = f"crush (control), not drawn:\n{low if low == high else f'{low} to {high}'} {unit}"
        axes.text(0.03, 0.98, text, transform=axes.transAxes, va="top", fontsize=7.5, color=MUTED)


def _margins(axes: Axes, data: ReportData, task: str, metric: str, factor: float) -> None:
    """The gate's margins, each a short bar over the length that it is declared for."""
    for (of, at, length), margin in data.margins.items():
        if (of, at) == (metric, task):
            axes.hlines(factor * margin, length / 1.2, length * 1.2, color="black", linewidth=2.2, zorder=4)
