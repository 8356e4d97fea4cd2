"""The plot of long answers: right or wrong by place, where errors of a cache that holds generated tokens add up."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kveval.capacity import format_tokens
from kveval.report.cells import Arm
from kveval.report.figure import MUTED, Plot, caption, footnote, legend, new_figure, slug, spread, style_of, styled
from kveval.report.model import ReportData

__all__ = ["position_plot"]


def position_plot(data: ReportData, task: str) -> Plot:
    """Mean score by place in the written answer, one panel per context length, the baseline dashed."""
    arms = (*data.of_role("crush"), *data.of_role("scheme"), *data.of_role("baseline"))
    rows = [p for p in data.positions if p.task == task and p.arm in arms]
    lengths = sorted({p.context_length for p in rows})
    schemes = data.of_role("scheme")
    widest = max(p.last - p.first + 1 for p in rows)
    title = f"{task}: score by place in the written answer (down is worse)"
    with styled():
        figure = new_figure(2.9 * len(lengths) + 2.2, 3.6, title)
        panels = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
        for axes, length in zip(panels, lengths, strict=True):
            here = [p for p in rows if p.context_length == length]
            for arm in arms:
                points = [p for p in here if p.arm == arm]
                style = style_of(data, arm)
                axes.plot(
                    [(p.first + p.last) / 2 + _shift(arm, schemes) * (p.last - p.first + 1) for p in points],
                    [100 * p.value for p in points],
                    color=style.colour,
                    marker=style.marker,
                    linestyle=style.dashes,
                    linewidth=1.4,
                    markersize=4.5,
                    zorder=2 if arm.role == "crush" else 3,
                )
            axes.set_xlim(0.5, max(p.last for p in here) + 0.5)
            axes.set_ylim(-4, 104)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_title(f"{format_tokens(length)} tokens", loc="left", fontweight="bold")
            axes.set_xlabel("place in the answer (1 = first)")
        panels[0].set_ylabel("score (%)")
        crush = [("crush (control)", Line2D([], [], color=MUTED, marker="x", linestyle=":"))]
        legend(figure, data, extra=crush if data.of_role("crush") else ())
        each = "one place" if widest == 1 else f"up to {widest} neighbouring places"
        text = caption(
            data,
            f"A point is the mean over {each} and {spread([p.n for p in rows])} samples; intervals are not drawn. "
            f"A line that falls away from {data.baseline}'s towards the right shows errors that add up as the model "
            "reads its own answer from the cache.",
        )
        footnote(figure, text)
    frame = pd.DataFrame(
        {
            "scheme": [p.arm.scheme for p in rows],
            "role": [p.arm.role for p in rows],
            "context_length": [p.context_length for p in rows],
            "place_from": [p.first for p in rows],
            "place_to": [p.last for p in rows],
            "score": [p.value for p in rows],
            "n": [p.n for p in rows],
        }
    )
    return Plot(f"positions_{slug(task)}", title, text, figure, frame)


def _shift(arm: Arm, schemes: Sequence[Arm]) -> float:
    """How far a scheme stands beside the middle of a band, in bands: lines that agree would cover each other."""
    return 0.3 * ((schemes.index(arm) + 0.5) / len(schemes) - 0.5) if arm in schemes else 0.0
