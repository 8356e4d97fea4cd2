"""The plot of decode attention by context length: how much faster than BF16, and how close to the limit. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kveval.bench.record import Bench, DecodeRow, ShapeRow, Spread
from kveval.report.figure import (
    BASELINE_COLOUR,
    COLOURS,
    LEGEND_LINE,
    MARKERS,
    MUTED,
    Plot,
    Style,
    footnote,
    length_axis,
    new_figure,
    styled,
)

__all__ = ["bench_plots"]

BASELINE = "bf16"


def bench_plots(bench: Bench) -> list[Plot]:
    """One plot per shape whose decode attention was timed."""
    return [_plot(bench, shape) for shape in bench.shapes if any(row.shape == shape.name for row in bench.decode)]


def _plot(bench: Bench, shape: ShapeRow) -> Plot:
    rows = [row for row in bench.decode if row.shape == shape.name]
    batches = sorted({row.batch for row in rows})
    lengths = sorted({row.length for row in rows})
    styles = _styles(bench)
    title = f"Decode attention on {'a CPU' if bench.device == 'cpu' else bench.device}, {shape.name}"
    with styled():
        figure = new_figure(1.6 + 3.4 * len(batches) + 2.4, 6.2, title)
        grid = figure.subplots(2, len(batches), squeeze=False, sharex=True, sharey="row")
        for at, batch in enumerate(batches):
            here = [row for row in rows if row.batch == batch]
            faster, rate = grid[0][at], grid[1][at]
            faster.set_title(f"batch {batch}", loc="left", fontweight="bold")
            _lines(faster, here, styles, lambda row: row.speedup_to_bf16, skip=BASELINE)
            _sdpa(faster, here)
            faster.axhline(1, color=BASELINE_COLOUR, linestyle="--", linewidth=1.2, zorder=1)
            _ceilings(faster, here, styles, lengths)
            _lines(rate, here, styles, lambda row: row.gb_per_s)
            rate.axhline(bench.copy.gb_per_s.median, color=MUTED, linewidth=1.2, zorder=1)
            for axes in (faster, rate):
                length_axis(axes, lengths)
            faster.set_xlabel("")
        grid[0][0].set_ylabel("times faster than BF16\n(the same kernel)")
        grid[0][0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
        grid[0][0].set_ylim(bottom=0)
        grid[1][0].set_ylabel("GB/s of bytes that\nmust be read")
        grid[1][0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
        grid[1][0].set_ylim(bottom=0)
        _legend(figure, bench, styles, {row.scheme for row in rows})
        text = _caption(bench, shape, rows)
        footnote(figure, text)
    data = pd.DataFrame([_flat(row) for row in rows])
    return Plot(f"bench_{shape.name.replace('/', '-')}", title, text, figure, data)


def _styles(bench: Bench) -> dict[str, Style]:
    """The same scheme looks the same in the plots of all shapes."""
    names = [name for name in dict.fromkeys(row.scheme for row in bench.decode) if name != BASELINE]
    styles = {
        name: Style(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], "-" if i < len(COLOURS) else "-.")
        for i, name in enumerate(names)
    }
    return {BASELINE: Style(BASELINE_COLOUR, "", "--"), **styles}


def _lines(
    axes: Axes, rows: Sequence[DecodeRow], styles: dict[str, Style], figure_of: Callable[[DecodeRow], Spread], *,
    skip: str = "",
) -> None:  # fmt: skip
    """A line of medians per scheme, a thin bar from the least to the largest sample."""
    for name, style in styles.items():
        points = [(row.length, figure_of(row)) for row in rows if row.scheme == name and name != skip]
        if not points:
            continue
        x = [length for length, _ in points]
        options: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linestyle": style.dashes}
        axes.plot(x, [spread.median for _, spread in points], linewidth=1.6, markersize=5, zorder=3, **options)
        axes.vlines(x, [s.min for _, s in points], [s.max for _, s in points], color=style.colour, linewidth=1.1)


def _sdpa(axes: Axes, rows: Sequence[DecodeRow]) -> None:
    """Torch's attention, over our BF16 kernel."""
    points = [(row.length, 1 / row.speedup_to_sdpa.median) for row in rows if row.scheme == BASELINE]
    # Torch is as many times faster than our BF16 kernel as that one is slower than torch.
    axes.plot(*zip(*points, strict=True), color=MUTED, marker="x", linestyle=":", linewidth=1.3, markersize=5, zorder=2)


def _ceilings(axes: Axes, rows: Sequence[DecodeRow], styles: dict[str, Style], lengths: Sequence[int]) -> None:
    """At the right edge, how many times fewer bytes each scheme reads: no kernel that is bound by them is faster."""
    longest = {row.scheme: row.bytes_read for row in rows if row.length == lengths[-1]}
    for name, nbytes in longest.items():
        if name != BASELINE:
            ratio = longest[BASELINE] / nbytes
            axes.plot(
                [0.975, 1.0], [ratio, ratio], color=styles[name].colour, linewidth=2.4, zorder=4, clip_on=False,
                transform=axes.get_yaxis_transform(), solid_capstyle="butt",
            )  # fmt: skip


def _legend(figure: Figure, bench: Bench, styles: dict[str, Style], shown: set[str]) -> None:
    handles = [
        Line2D([], [], color=style.colour, marker=style.marker, linestyle=style.dashes, label=name)
        for name, style in styles.items()
        if name in shown
    ]
    handles.append(Line2D([], [], color=MUTED, marker="x", linestyle=":", label="torch sdpa, BF16"))
    handles.append(Line2D([], [], color=MUTED, label=f"copy: {bench.copy.gb_per_s.median:,.0f} GB/s"))
    figure.set_figheight(max(figure.get_figheight(), 0.5 + LEGEND_LINE * len(handles)))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8.5)


def _caption(bench: Bench, shape: ShapeRow, rows: Sequence[DecodeRow]) -> str:
    samples = max(row.us.n for row in rows)
    heads = f"{shape.query_heads} query heads, {shape.kv_heads} KV heads of {shape.head_dim}"
    parts = [
        f"One query per sequence over one layer's cache: {heads}. Medians of {samples} replays, taken in turns with "
        "BF16's; bars from the least to the largest. Ticks at the right edge: how many times fewer bytes are read than "
        "in BF16."
    ]
    if bench.device != "cpu":
        parts.append(f"Driver {bench.driver}, kernels {bench.kernel_hash[:12]}.")
    return " ".join([*parts, bench.caveat]).strip()


def _flat(row: DecodeRow) -> dict[str, Any]:
    """A row of a CSV file: every spread as its three numbers."""
    flat: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if isinstance(value, dict):
            flat |= {f"{name}_{part}": number for part, number in value.items() if part != "n"}
        else:
            flat[name] = value
    return flat
