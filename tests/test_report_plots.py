from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from report_records import EFFECT, make_config, make_data, make_records, with_answers

from kveval.report.cells import Arm
from kveval.report.exchange import exchange_plot, frontier
from kveval.report.figure import (
    COLOURS,
    LossScale,
    dodge,
    linear_below,
    loss_scale,
    render,
    spread,
    style_of,
    wrapped,
    write_plot,
)
from kveval.report.heatmaps import matrix_plot, needle_plot
from kveval.report.plots import (
    all_plots,
    decode_plot,
    degradation_plot,
    quality_plot,
)
from kveval.report.position_plot import position_plot
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
        "degradation_kl",
        *("degradation", "exchange", "matrix"),
        *("degradation_exact_match", "exchange_exact_match", "matrix_exact_match"),
        "needles_niah_multikey",
        *("quality", "quality_exact_match"),
        "decode",
    ]


def test_degradation_draws_what_its_csv_says(data):
    plot = degradation_plot(data, "answer_nll")
    assert [a.get_title("left") for a in plot.figure.axes] == ["niah_multikey", "passkey_chain", "perplexity"]
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
    assert axes.texts[0].get_text().startswith("crush, off scale: ")
    crush = data.comparison(Arm("crush", "crush"), "niah_multikey", 512, "answer_nll").loss.value
    assert axes.get_ylim()[1] < crush


class TestKL:
    def test_the_axis_is_logarithmic_and_holds_both_controls(self, data):
        plot = degradation_plot(data, "kl")
        assert plot.title == "KL from bf16 by context length (up is worse)"
        aa = data.comparison(Arm("bf16 (A/A)", "aa"), "niah_multikey", 512, "kl").loss.value
        crush = data.comparison(Arm("crush", "crush"), "niah_multikey", 2048, "kl").loss.value
        for axes in plot.figure.axes:
            assert axes.get_yscale() == "log"
            low, high = axes.get_ylim()
            assert 0 < low < aa < crush < high
        drawn = [line.get_ydata()[0] for line in plot.figure.axes[0].get_lines()]
        assert aa in drawn
        assert legend_of(plot) == [*SCHEMES, "crush (control)", "bf16 against itself"]

    def test_a_floor_of_zero_is_told(self):
        records = make_records(samples=8, lengths=(512,), schemes=("k8v4",))
        records.loc[records["role"] == "aa", "kl"] = 0.0
        data = make_data(records, make_config(schemes=["k8v4"], context_lengths=[512], gate=None))
        axes = degradation_plot(data, "kl").figure.axes[0]
        assert [t.get_text() for t in axes.texts] == ["rounding: 0"]

    def test_formats_that_move_nothing_have_no_logarithmic_plot(self):
        records = make_records(samples=8, lengths=(512,), schemes=("k8v4",))
        records.loc[records["role"] == "scheme", "kl"] = 0.0
        data = make_data(records, make_config(schemes=["k8v4"], context_lengths=[512], gate=None))
        assert "degradation_kl" not in [plot.name for plot in all_plots(data)]


@pytest.fixture(scope="module")
def ragged():
    """passkey_chain ran at 512 only, perplexity at 2k only."""
    records = make_records(samples=8, lengths=(512, 2048), schemes=("k8v4",))
    skipped = ((records["task"] == "passkey_chain") & (records["context_length"] == 2048)) | (
        (records["task"] == "perplexity") & (records["context_length"] == 512)
    )
    return make_data(records[~skipped], make_config(schemes=["k8v4"], context_lengths=[512, 2048], gate=None))


class TestTasksOfDifferentLengths:
    def test_ticks_only_where_the_task_ran(self, ragged):
        panels = degradation_plot(ragged, "answer_nll").figure.axes
        assert [list(axes.get_xticks()) for axes in panels] == [[512, 2048], [512], [2048]]

    def test_no_empty_exchange_panels(self, ragged):
        axes = exchange_plot(ragged, "answer_nll").figure.axes
        assert [a.get_title().split(" (")[0] for a in axes] == ["512 tokens", "2k tokens", "512 tokens", "2k tokens"]
        assert axes[1].get_title() == "2k tokens (bf16: 1,625 sessions)"
        assert len({a.get_xlim() for a in axes}) == 1

    def test_needles_have_only_their_lengths(self, ragged):
        axes = needle_plot(ragged, "niah_multikey").figure.axes
        assert [t.get_text() for t in axes[1].get_xticklabels()] == ["512", "2k"] * 2  # k8v4 and crush


class TestUndecidable:
    def test_a_metric_that_is_so_everywhere_is_not_drawn(self):
        data = build(samples=3, lengths=(512,), schemes=("k8v4",), gate=None)
        assert not data.decidable("exact_match")
        assert data.decidable("answer_nll")
        assert not [plot.name for plot in all_plots(data) if plot.name.endswith("exact_match")]


def test_fractions_are_drawn_in_points_and_only_where_they_can_fall(data):
    plot = degradation_plot(data, "exact_match")
    assert [a.get_title("left") for a in plot.figure.axes] == ["niah_multikey", "passkey_chain"]
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
    stars = [line for line in plot.figure.axes[1].get_lines() if line.get_marker() == "*"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in stars] == [(1.0, 0)]
    assert "k8v4" in [t.get_text() for t in plot.figure.axes[1].texts]
    row = plot.data[(plot.data.scheme == "k8v4") & (plot.data.context_length == 2048)].iloc[0]
    assert (row.sessions, row.baseline_sessions) == (4001, 1625)
    assert row.loss_per_doubling == pytest.approx(row.loss / np.log2(row.bytes_gain))


def test_frontier():
    points = [(10.0, 0.0), (20.0, 0.1), (20.0, 0.3), (15.0, 0.2), (30.0, 0.05), (40.0, 0.5)]
    assert frontier(points) == [(10.0, 0.0), (30.0, 0.05), (40.0, 0.5)]


def test_decode_says_when_it_is_not_serving_speed(data):
    plot = decode_plot(data)
    assert plot.title == "Decode time per token on the reference path"
    assert plot.caption.startswith("Not serving speed")
    assert len(plot.data) == 2 * 5


def test_matrix_shows_every_cell(data):
    plot = matrix_plot(data, "answer_nll")
    assert len(plot.figure.axes[0].patches) == 3 * 6
    assert len(matrix_plot(data, "exact_match").figure.axes[0].patches) < 3 * 6  # perplexity is at the floor


def test_needles_leave_out_what_was_not_measured():
    data = build(samples=2, lengths=(512,), schemes=("k8v4",), gate=None)
    plot = needle_plot(data, "niah_multikey")
    top, change = plot.figure.axes[:2]
    assert len(top.images) == 3
    assert len(change.images) == 2
    squares = [t for t in top.texts if round(t.get_position()[0]) == 0]
    assert len([t for t in squares if t.get_text() == "n=1"]) == 2
    assert len([t for t in squares if t.get_text() != "n=1"]) == 2
    assert "Small print: where a square is 2 samples or fewer, how many." in plot.caption
    assert set(plot.data.n) == {1}
    image = top.images[0].get_array()
    assert mpl.colors.to_hex(image[4, 0]) == "#d9d9d9"
    assert all(t.get_text() not in ("0", "+0") for t in change.texts)


@pytest.fixture(scope="module")
def written():
    records = make_records(samples=20, lengths=(512, 2048), schemes=SCHEMES)
    records = with_answers(with_answers(records, "niah_multikey"), "passkey_chain", places=30)
    return make_data(records, make_config(schemes=list(SCHEMES), context_lengths=[512, 2048], gate=None))


class TestWritten:
    def test_score_and_places_are_drawn_too(self, written):
        names = [plot.name for plot in all_plots(written)]
        assert {"degradation_task_score", "quality_task_score", "positions_passkey_chain"} <= set(names)
        assert names.index("needles_niah_multikey") < names.index("positions_passkey_chain") < names.index("quality")

    def test_no_share_is_above_all(self, written):
        for axes in quality_plot(written, "task_score").figure.axes:
            assert 0 <= axes.get_ylim()[0] < axes.get_ylim()[1] <= 102

    def test_needles_show_the_task_score_and_say_so(self, written):
        plot = needle_plot(written, "niah_multikey")
        assert "task score" in plot.title
        assert "Shown: the task's own score" in plot.caption
        assert "Small print" not in plot.caption
        assert plot.figure.axes[2].get_ylabel() == "task score (%)"
        at = (plot.data.scheme == "mxfp4") & (plot.data.context_length == 512) & (plot.data.depth_from == 0.0)
        needle = next(
            n for n in written.needles if (n.arm.scheme, n.context_length, n.bucket) == ("mxfp4", 512, 0)
        )  # fmt: skip
        assert plot.data[at].task_score.item() == needle.value
        assert not any(t.get_text().startswith("n=") for t in plot.figure.axes[0].texts)

    def test_places_have_a_panel_per_length_and_the_baseline_dashed(self, written):
        plot = position_plot(written, "passkey_chain")
        assert [axes.get_title("left") for axes in plot.figure.axes] == ["512 tokens", "2k tokens"]
        lines = plot.figure.axes[1].get_lines()
        assert len(lines) == 4  # baseline, two schemes, crush
        (dashed,) = [line for line in lines if line.get_linestyle() == "--"]
        of = [p for p in written.positions if (p.arm.role, p.context_length) == ("baseline", 2048)]
        assert list(dashed.get_ydata()) == [100 * p.value for p in of]
        assert list(dashed.get_xdata()) == [2 + 3 * i for i in range(10)]
        assert set(plot.data.columns) >= {"place_from", "place_to", "score", "n"}
        assert "up to 3 neighbouring places and 20 samples" in plot.caption


def test_the_axis_turns_logarithmic_where_real_formats_would_vanish(monkeypatch):
    monkeypatch.setitem(EFFECT, "mxfp4", 40.0)
    data = build(samples=24)
    axes = degradation_plot(data, "answer_nll").figure.axes[0]
    assert axes.get_yscale() == "symlog"
    assert "logarithmic from 0.1" in axes.get_ylabel()


def test_a_logarithmic_panel_beside_a_linear_one_says_so():
    records = make_records(samples=24, lengths=(512,), schemes=SCHEMES)
    loud = (records["task"] == "perplexity") & (records["scheme"] == "mxfp4")
    records.loc[loud, "answer_nll"] += 40.0
    records.loc[(records["task"] == "perplexity") & (records["scheme"] == "k8v4"), "answer_nll"] += 0.1
    data = make_data(records, make_config(schemes=list(SCHEMES), context_lengths=[512], gate=None))
    first, _, last = degradation_plot(data, "answer_nll").figure.axes
    assert (first.get_yscale(), last.get_yscale()) == ("linear", "symlog")
    assert first.get_ylabel() == "0 = bf16; loss (nats/token)"
    assert last.get_ylabel().startswith("logarithmic from ")


def test_linear_below():
    assert linear_below([estimate(0.01, 0.005, 0.015), estimate(0.4, 0.3, 0.5)]) is None
    assert linear_below([estimate(0.02, 0.01, 0.03), estimate(4.0, 3.0, 5.0)]) == 0.1
    assert linear_below([estimate(0.0002, 0.0001, 0.0003), estimate(0.04, 0.03, 0.05)], 100.0) == pytest.approx(0.1)
    noise = [estimate(0.0001, -0.01, 0.01), estimate(0.2, 0.1, 0.3)]
    assert linear_below(noise) is None  # what can't be told from zero needs no room of its own
    assert linear_below([Estimate(None, None, None, 0, 0, "", False)]) is None


def test_intervals_wider_than_all_values_are_cut():
    losses = [estimate(0.1, -5.0, 5.2), estimate(0.2, 0.1, 0.3)]
    scale = loss_scale(losses, 1.0, None)
    assert -0.2 < scale.low < 0.0
    assert 0.3 < scale.high < 0.4
    assert loss_scale(losses[1:], 1.0, None).high == pytest.approx(0.3 + 0.06 * 0.3)  # nothing to cut
    cut = loss_scale(losses, 1.0, 0.0, shown=[1e-5])
    assert cut == LossScale(pytest.approx(4e-6), pytest.approx(0.96), 0.0)


def test_no_interval_leaves_the_drawing(data):
    for plot in (degradation_plot(data, "answer_nll"), degradation_plot(data, "kl"), exchange_plot(data, "answer_nll")):
        for axes in plot.figure.axes:
            low, high = sorted(axes.get_ylim())
            for bars in axes.collections:
                ends = np.concatenate(bars.get_segments())[:, 1]
                assert low <= ends.min()
                assert ends.max() <= high


def test_bars_stand_side_by_side():
    shifts = [dodge(i, 3, (512, 1024)) for i in range(3)]
    assert shifts[1] == 1.0
    assert shifts[0] * shifts[2] == pytest.approx(1.0)
    assert 512 * shifts[2] < 1024 * shifts[0]
    crowd = [dodge(i, 40, (512, 1024)) for i in (0, 39)]
    assert 512 * crowd[1] < 1024 * crowd[0]


def test_names_break_after_underscores():
    assert wrapped("int8_per_token_head") == "int8_per_\ntoken_head"
    assert wrapped("k8v4") == "k8v4"
    assert wrapped("a_very-long_name_of_mine", 8).replace("\n", "") == "a_very-long_name_of_mine"


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
