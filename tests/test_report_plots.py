from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from report_records import EFFECT, make_config, make_data, make_records

from kveval.report.cells import Arm
from kveval.report.figure import COLOURS, linear_below, render, spread, style_of, write_plot
from kveval.report.heatmaps import matrix_plot, needle_plot
from kveval.report.plots import (
    all_plots,
    decode_plot,
    degradation_plot,
    exchange_plot,
    frontier,
    quality_plot,
)
from kveval.stats import Estimate

SCHEMES = ("k8v4", "mxfp4")


def build(**changes):
    schemes = changes.pop("schemes", SCHEMES)
    lengths = changes.pop("lengths", (512, 2048))
    records = make_records(samples=changes.pop("samples", 12), lengths=lengths, schemes=schemes)
    config = make_config(schemes=list(schemes), context_lengths=list(lengths), **changes)
    return make_data(records, config)


@pytest.fixture(scope="module")
def data():
    return build()


def estimate(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, low, high, 10, 10, "t", True)


def legend_of(plot) -> list[str]:
    return [text.get_text() for text in plot.figure.legends[0].get_texts()]


def test_every_plot_that_the_data_allow(data):
    names = [plot.name for plot in all_plots(data)]
    assert names == [
        *("degradation", "exchange", "matrix"),
        *("degradation_exact_match", "exchange_exact_match", "matrix_exact_match"),
        "needles_niah_multikey",
        *("quality", "quality_exact_match"),
        "decode",
    ]


def test_degradation_draws_what_its_csv_says(data):
    plot = degradation_plot(data, "answer_nll")
    assert [a.get_title() for a in plot.figure.axes] == ["niah_multikey", "passkey_chain", "perplexity"]
    frame = plot.data
    assert len(frame) == 3 * 2 * 4  # tasks, lengths, arms but the baseline
    row = frame[(frame.scheme == "mxfp4") & (frame.task == "perplexity") & (frame.context_length == 2048)].iloc[0]
    loss = data.comparison(Arm("mxfp4", "scheme"), "perplexity", 2048, "answer_nll").loss
    assert (row.value, row.low, row.high, row.n) == (loss.value, loss.low, loss.high, 12)
    axes = plot.figure.axes[2]
    drawn = [line.get_ydata()[-1] for line in axes.get_lines() if line.get_color() == COLOURS[1]]
    assert drawn == [loss.value]
    assert legend_of(plot) == [*SCHEMES, "bf16 (baseline)", "bf16 against itself", "margin for k8v4"]


def test_crush_is_told_and_not_drawn(data):
    axes = degradation_plot(data, "answer_nll").figure.axes[0]
    assert axes.texts[0].get_text().startswith("crush (control), not drawn:\n")
    crush = data.comparison(Arm("crush", "crush"), "niah_multikey", 512, "answer_nll").loss.value
    assert axes.get_ylim()[1] < crush


def test_fractions_are_drawn_in_points_and_only_where_they_can_fall(data):
    plot = degradation_plot(data, "exact_match")
    assert [a.get_title() for a in plot.figure.axes] == ["niah_multikey", "passkey_chain"]
    loss = data.comparison(Arm("mxfp4", "scheme"), "niah_multikey", 2048, "exact_match").loss
    at = (plot.data.scheme == "mxfp4") & (plot.data.task == "niah_multikey") & (plot.data.context_length == 2048)
    assert plot.data[at].value.item() == 100 * loss.value


def test_captions_name_model_samples_and_method(data):
    caption = degradation_plot(data, "answer_nll").caption
    for part in (
        "smollm2-135m",
        "Samples per point: 12",
        "in clusters: 3 to 12",
        "95% intervals: cluster-robust t",
    ):
        assert part in caption


def test_quality_has_the_baseline_dashed(data):
    plot = quality_plot(data, "exact_match")
    dashed = [line for line in plot.figure.axes[0].get_lines() if line.get_linestyle() == "--"]
    assert len(dashed) == 1
    mean = next(m for m in data.means if (m.arm.role, m.task, m.metric) == ("baseline", "niah_multikey", "exact_match"))
    assert dashed[0].get_ydata()[0] == 100 * mean.estimate.value


def test_exchange_has_sessions_and_loss(data):
    plot = exchange_plot(data, "answer_nll")
    assert len(plot.figure.axes) == 3 * 2
    row = plot.data[(plot.data.scheme == "k8v4") & (plot.data.context_length == 2048)].iloc[0]
    assert (row.sessions, row.baseline_sessions) == (4001, 1625)
    assert row.loss_per_doubling == pytest.approx(row.loss / np.log2(row.bytes_gain))


def test_frontier():
    points = [(10.0, 0.0), (20.0, 0.1), (20.0, 0.3), (15.0, 0.2), (30.0, 0.05), (40.0, 0.5)]
    assert frontier(points) == [(10.0, 0.0), (30.0, 0.05), (40.0, 0.5)]


def test_decode_says_when_it_is_not_a_gpu(data):
    plot = decode_plot(data)
    assert plot.title == "Decode time per token on the CPU reference path"
    assert plot.caption.startswith("Not GPU speed")
    assert len(plot.data) == 2 * 5


def test_matrix_shows_every_cell(data):
    plot = matrix_plot(data, "answer_nll")
    assert len(plot.figure.axes[0].patches) == 3 * 6
    assert len(matrix_plot(data, "exact_match").figure.axes[0].patches) < 3 * 6  # perplexity is at the floor


def test_needles_leave_out_what_was_not_measured():
    data = build(samples=2, lengths=(512,), schemes=("k8v4",), gate=None)
    plot = needle_plot(data, "niah_multikey")
    texts = [t.get_text() for t in plot.figure.axes[0].texts]
    assert len(texts) == 2
    assert set(plot.data.n) == {1}
    image = plot.figure.axes[0].images[0].get_array()
    assert mpl.colors.to_hex(image[4, 0]) == "#d9d9d9"


def test_the_axis_turns_logarithmic_where_real_formats_would_vanish(monkeypatch):
    monkeypatch.setitem(EFFECT, "mxfp4", 40.0)
    data = build(samples=24)
    axes = degradation_plot(data, "answer_nll").figure.axes[0]
    assert axes.get_yscale() == "symlog"
    assert "logarithmic from" in axes.get_ylabel()


def test_linear_below():
    assert linear_below([estimate(0.01, 0.005, 0.015), estimate(0.4, 0.3, 0.5)]) is None
    assert linear_below([estimate(0.02, 0.01, 0.03), estimate(4.0, 3.0, 5.0)]) == 0.01
    noise = [estimate(0.0001, -0.01, 0.01), estimate(0.2, 0.1, 0.3)]
    assert linear_below(noise) is None  # what can't be told from zero needs no room of its own
    assert linear_below([Estimate(None, None, None, 0, 0, "", False)]) is None


def test_one_length_one_sample_still_draws():
    data = build(samples=1, lengths=(1024,), schemes=("k8v4",), gate=None)
    for plot in all_plots(data):
        assert not plot.data.empty


def test_arms_look_the_same_everywhere(data):
    styles = {style_of(data, arm) for arm in data.of_role("scheme", "baseline", "aa")}
    assert len(styles) == 4
    assert style_of(data, Arm("bf16", "baseline")).dashes == "--"


def test_files_are_equal_for_equal_data(data, tmp_path):
    first, second = (decode_plot(data) for _ in range(2))
    svg = write_plot(first, tmp_path)
    assert svg == render(second, "svg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["decode.csv", "decode.png", "decode.svg"]
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_a_callers_settings_are_left_alone(data):
    before = dict(mpl.rcParams)
    render(decode_plot(data), "png")
    assert dict(mpl.rcParams) == before


def test_spread():
    assert (spread([3, 3]), spread([1200, 3])) == ("3", "3 to 1,200")
