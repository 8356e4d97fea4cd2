"""The plots over context length. Each keeps the data that it drew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kveval.records import METRICS
from kveval.report.cells import LOSS_METRICS, Arm
from kveval.report.exchange import exchange_plot
from kveval.report.figure import (
    BASELINE_COLOUR,
    MUTED,
    Dashes,
    LossScale,
    Plot,
    caption,
    comparison_row,
    dodge,
    error_bars,
    estimate_columns,
    footnote,
    legend,
    length_axis,
    linear_below,
    loss_label,
    loss_scale,
    loss_unit,
    new_figure,
    plot_name,
    spread,
    style_of,
    styled,
)
from kveval.report.heatmaps import matrix_plot, needle_plot
from kveval.report.layer_plot import layer_plot
from kveval.report.model import ReportData
from kveval.report.position_plot import position_plot
from kveval.stats import Comparison, Estimate

__all__ = ["all_plots", "decode_plot", "degradation_plot", "quality_plot"]


def all_plots(data: ReportData) -> list[Plot]:
    """Every plot that the data allow, in the order of the report: KL first, the most sensitive.

    A metric without any cell whose baseline leaves room to lose is not drawn: its plots would show "no loss"
    where nothing could be lost. Nor is a metric whose loss is undecidable in every cell: what would be seen is noise.
    """
    plots = [degradation_plot(data, "kl")] if _has_distance(data, "kl") else []
    metrics = [m for m in LOSS_METRICS if data.decidable(m) and any(data.discriminates(m, task) for task in data.tasks)]
    plots += [make(data, m) for m in metrics for make in (degradation_plot, exchange_plot, matrix_plot)]
    plots += [needle_plot(data, task) for task in dict.fromkeys(n.task for n in data.needles)]
    plots += [position_plot(data, task) for task in dict.fromkeys(p.task for p in data.positions)]
    plots += [quality_plot(data, m) for m in metrics]
    if data.timings:
        plots.append(decode_plot(data))
    if data.layers and data.layers.rows:
        plots.append(layer_plot(data, data.layers))
    return plots


def _has_distance(data: ReportData, metric: str) -> bool:
    """Whether any scheme is off the baseline at all, where the baseline leaves room: a log axis needs one."""
    return any((c.loss.value or 0.0) > 0 and data.discriminates(metric, c.task) for c in data.ranked(metric))


def degradation_plot(data: ReportData, metric: str) -> Plot:
    """Loss against the baseline by context length, one panel per task.

    KL is never negative and spans decades: its axis is logarithmic and shows both controls. On the linear axis
    of other metrics crush would flatten every real format; its figure is told in the panel's title.
    """
    tasks = [t for t in data.tasks if data.discriminates(metric, t)]
    factor, unit = loss_unit(metric)
    as_distance = METRICS[metric].against_baseline
    rows: list[dict[str, Any]] = []
    drawn: list[Comparison] = []
    title = f"{_about(metric, data)} by context length (up is worse)"
    series = {(a, t): _series(data, a, t, metric) for t in tasks for a in data.arms[1:]}
    shared = _degradation_scale(data, metric, [c for of in series.values() for c in of]) if as_distance else None
    with styled():
        figure, panels = _panels(data, tasks, title, sharey=as_distance)
        for axes, task in zip(panels, tasks, strict=True):
            here = {arm: series[arm, task] for arm in data.arms[1:]}
            rows += [comparison_row(c, factor) for of in here.values() for c in of]
            drawn += [c for arm, of in here.items() if arm.role == "scheme" for c in of]
            scale = shared or _degradation_scale(data, metric, [c for of in here.values() for c in of])
            for arm, of in here.items():
                if arm.role == "crush" and not as_distance:
                    _tell_crush(axes, of, metric)
                elif arm.role == "aa" and as_distance:
                    _noise_floor(axes, of, factor, scale)
                else:
                    points = [(c.context_length, c.loss) for c in of]
                    _line(axes, data, arm, points, factor, lengths=data.lengths_of(task), scale=scale)
            _margins(axes, data, task, metric, factor)
            if not as_distance:
                axes.axhline(0, color=BASELINE_COLOUR, linestyle="--", linewidth=1.2, zorder=1)
            scale.apply(axes)
            if axes is panels[0]:
                axes.set_ylabel(_loss_label(data, metric, unit, scale.linear_below))
            elif not as_distance and scale.linear_below is not None:
                axes.set_ylabel(f"logarithmic from {scale.linear_below:g}", fontsize=8)
        legend(figure, data, baseline=not as_distance, extra=_controls(data, metric))
        text = caption(data, _how_to_read(data, metric), [c.loss for c in drawn if c.n_pairs])
        footnote(figure, text)
    return Plot(plot_name("degradation", metric), title, text, figure, pd.DataFrame(rows))


def _about(metric: str, data: ReportData) -> str:
    if METRICS[metric].against_baseline:
        return f"{METRICS[metric].label.replace('baseline', data.baseline)}"
    return f"Loss in {METRICS[metric].label}"


def _how_to_read(data: ReportData, metric: str) -> str:
    bars = "Bars are intervals; an arrowhead means that one goes on beyond the axis."
    pale = "Bars are intervals, pale below the mean where they reach zero."
    if not METRICS[metric].against_baseline:
        return f"Mean loss against {data.baseline} on the same samples. {bars}"
    floor = "The grey line is what rounding alone does" if data.of_role("aa") else "Without an A/A arm the floor of"
    floor += "." if data.of_role("aa") else " rounding is unknown."
    return (
        f"How far each format moves the probabilities of the answer's tokens away from {data.baseline}'s: the most "
        f"sensitive measure here, and one that does not say whether answers got worse. {floor} {pale}"
    )


def _panels(data: ReportData, tasks: Sequence[str], title: str, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """One panel per task over the lengths that it was run at, wider for more lengths."""
    widths = [2.0 + 0.45 * min(len(data.lengths_of(t)), 4) for t in tasks]
    figure = new_figure(sum(widths) + 2.0, 3.9, title)
    grid = figure.subplots(1, len(tasks), squeeze=False, sharey=sharey, width_ratios=widths)[0]
    for axes, task in zip(grid, tasks, strict=True):
        length_axis(axes, data.lengths_of(task))
        axes.set_title(task, loc="left", fontweight="bold")
    return figure, list(grid)


def _degradation_scale(data: ReportData, metric: str, comparisons: Sequence[Comparison]) -> LossScale:
    """The y axis of `comparisons`: logarithmic for a distance from the baseline, else with zero on it."""
    factor, _ = loss_unit(metric)
    tasks = {c.task for c in comparisons}
    margins = [factor * m for (of, task, _), m in data.margins.items() if of == metric and task in tasks]
    schemes = [c.loss for c in comparisons if c.role == "scheme"]
    if not METRICS[metric].against_baseline:
        return loss_scale(schemes, factor, linear_below(schemes, factor), shown=[0.0, *margins])
    controls = [factor * c.loss.value for c in comparisons if c.role != "scheme" and c.loss.value is not None]
    return loss_scale(schemes, factor, 0.0, shown=[*controls, *margins])


def _noise_floor(axes: Axes, series: Sequence[Comparison], factor: float, scale: LossScale) -> None:
    """What rounding alone does, as a grey line; on a logarithmic axis a floor of exactly zero is told in words."""
    known = [(c.context_length, factor * c.loss.value) for c in series if c.loss.value is not None]
    above = [(x, y) for x, y in known if y > 0]
    if above:
        axes.plot(*zip(*above, strict=True), color=MUTED, linewidth=1.2, zorder=1)
        x, y = ([point[i] for point in above] for i in range(2))
        axes.hlines(y, [v / 1.2 for v in x], [v * 1.2 for v in x], color=MUTED, linewidth=1.2, zorder=1)
    for x0, y0 in known:
        if y0 <= 0:
            white = {"facecolor": "white", "alpha": 0.85, "pad": 1, "linewidth": 0}
            where: dict[str, Any] = {"ha": "center", "va": "bottom", "zorder": 9, "bbox": white}
            axes.text(x0, scale.low * 1.3, "rounding: 0", fontsize=7, color=MUTED, **where)


def _controls(data: ReportData, metric: str) -> list[tuple[str, Any]]:
    """What a degradation plot's legend holds beside the schemes and the baseline."""
    extra: list[tuple[str, Any]] = []
    as_distance = METRICS[metric].against_baseline
    if data.of_role("crush") and as_distance:
        extra.append(("crush (control)", Line2D([], [], color=MUTED, marker="x", linestyle=":")))
    if data.of_role("aa"):
        dashes: Dashes = "-" if as_distance else ":"
        extra.append((f"{data.baseline} against itself", Line2D([], [], color=MUTED, linestyle=dashes)))
    if any(m == metric for m, _, _ in data.margins):
        extra.append((f"margin for {data.gate_scheme}", Line2D([], [], color="black", linewidth=2.2)))
    return extra


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
        figure, panels = _panels(data, tasks, title)
        for axes, task in zip(panels, tasks, strict=True):
            for arm in (*data.of_role("scheme"), *data.of_role("baseline")):
                means = [m for m in data.means if (m.arm, m.task, m.metric) == (arm, task, metric)]
                points = [(m.context_length, m.estimate) for m in means]
                _line(axes, data, arm, points, factor, lengths=data.lengths_of(task), scale=None)
                drawn += [e for _, e in points if e.n]
                where = {"task": task, "scheme": arm.scheme, "role": arm.role}
                rows += [{**where, "context_length": n, **estimate_columns(e, factor)} for n, e in points]
                if arm.role == "baseline":
                    _band(axes, points, factor)
            _fit_values(axes, [row["value"] for row in rows if row["task"] == task], 100.0 if unit == "%" else math.inf)
        panels[0].set_ylabel(f"{label} ({unit})")
        legend(figure, data, extra=[("baseline's interval", Patch(color=BASELINE_COLOUR, alpha=0.13))])
        text = caption(data, "Means. To compare formats use the loss plot: it pairs the samples.", drawn)
        footnote(figure, text)
    return Plot(plot_name("quality", metric), title, text, figure, pd.DataFrame(rows))


def decode_plot(data: ReportData) -> Plot:
    """Time per decoded token by context length, in milliseconds."""
    where = "" if data.by_kernels else " on the reference path"
    title = f"Decode time per token{where}"
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
        note = "" if data.by_kernels else "Not serving speed: formats are unpacked in plain PyTorch here. "
        counts = [t.n for t in data.timings]
        over = f"Median and quartiles over {spread(counts)} samples of all tasks."
        text = caption(data, f"{note}{over if max(counts) > 1 else 'One sample per point: no spread is known.'}")
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


def _loss_label(data: ReportData, metric: str, unit: str, threshold: float | None) -> str:
    if METRICS[metric].against_baseline:
        return f"KL ({unit})" if metric == "kl" else f"{METRICS[metric].label} ({unit})"
    return loss_label(f"0 = {data.baseline}; loss", unit, threshold)


def _series(data: ReportData, arm: Arm, task: str, metric: str) -> list[Comparison]:
    found = (data.comparison(arm, task, length, metric) for length in data.lengths_of(task))
    return [c for c in found if c is not None]


def _line(
    axes: Axes,
    data: ReportData,
    arm: Arm,
    points: Sequence[tuple[int, Estimate]],
    factor: float,
    *,
    lengths: Sequence[int],
    scale: LossScale | None,
) -> None:
    """Draw one arm. What is undefined is left out, never drawn as zero.

    With a `scale` its schemes' points stand side by side and carry their intervals: as bars, because wide
    bands of many arms cover one another.
    """
    style = style_of(data, arm)
    schemes = data.of_role("scheme")
    bars = scale is not None and arm in schemes
    shift = dodge(schemes.index(arm), len(schemes), lengths) if bars else 1.0
    known = [(n * shift, e) for n, e in points if e.value is not None]
    axes.plot(
        [x for x, _ in known],
        [factor * e.value for _, e in known if e.value is not None],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dashes,
        linewidth=1.4,
        markersize=5.5,
        markeredgecolor=style.colour if style.marker == "x" else "white",
        markeredgewidth=1.2 if style.marker == "x" else 0.6,
        zorder=3,
    )
    if scale is not None and bars:
        error_bars(axes, known, factor, scale, style.colour)


def _band(axes: Axes, points: Sequence[tuple[int, Estimate]], factor: float) -> None:
    """The baseline's interval; at a single length, where a band has no width, as a bar."""
    ends = [(n, e.low * factor, e.high * factor) for n, e in points if e.low is not None and e.high is not None]
    at, low, high = ([end[i] for end in ends] for i in range(3))
    if len(ends) == 1:
        axes.vlines(at, low, high, color=BASELINE_COLOUR, linewidth=5, alpha=0.13)
    else:
        axes.fill_between(at, low, high, color=BASELINE_COLOUR, alpha=0.13, linewidth=0)


def _fit_values(axes: Axes, values: Sequence[float | None], most: float) -> None:
    """Fit the y axis to the means (from 0 to `most`): a wide interval of few samples may be cut."""
    known = [y for y in values if y is not None]
    if known:
        room = 0.5 * (max(known) - min(known)) or 0.1 * max(known) or 1.0
        axes.set_ylim(max(0.0, min(known) - room), min(1.02 * most, max(known) + room))


def _tell_crush(axes: Axes, series: Sequence[Comparison], metric: str) -> None:
    """The control's losses, above the panel: drawn to scale they would flatten every real format."""
    factor, _ = loss_unit(metric)
    known = [factor * c.loss.value for c in series if c.loss.value is not None]
    if known:
        low, high = f"{min(known):.2g}", f"{max(known):.2g}"
        text = f"crush, off scale: {low if low == high else f'{low} to {high}'}"
        axes.set_title(axes.get_title("left"), loc="left", fontweight="bold", pad=16)
        above: Any = {"xycoords": "axes fraction", "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(text, (0, 1), **above, va="bottom", fontsize=7.5, color=MUTED)


def _margins(axes: Axes, data: ReportData, task: str, metric: str, factor: float) -> None:
    """The gate's margins, each a short bar over the length that it is declared for."""
    for (of, at, length), margin in data.margins.items():
        if (of, at) == (metric, task):
            axes.hlines(factor * margin, length / 1.2, length * 1.2, color="black", linewidth=2.2, zorder=4)
