"""The section on layers: its words say what the rows say, and a run without rows has none."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from report_records import make_config, make_data, make_records
from rich.console import Console

from kveval.layer_note import LayerError, LayerErrors
from kveval.report.figure import COLOURS
from kveval.report.html import render_html
from kveval.report.layer_plot import layer_plot
from kveval.report.layers import bias_sentence, layer_rows, layer_sentences, percent
from kveval.report.model import ReportData
from kveval.report.plots import all_plots
from kveval.report.tables import report_json, terminal_report

BIAS = (202.0, 8.0, 15.0, 9.0)
"""By layer."""


def rows_of(
    scheme: str, output: tuple[float, ...], *, keys_lead: bool = True, role: str = "scheme"
) -> list[LayerError]:
    rows = []
    for layer, error in enumerate(output):
        alone = (error, error / 10) if keys_lead else (error / 10, error)
        rows.append(
            LayerError(
                scheme=scheme,
                role=role,  # type: ignore[arg-type]
                layer=layer,
                kind="full",
                key_error=0.05,
                key_difference_error=error / 2,
                value_error=0.093,
                attention_kl=4 * error,
                output_error=error,
                output_error_keys=alone[0],
                output_error_values=alone[1],
                key_bias_ratio=BIAS[layer],
            )
        )
    return rows


def make_layers(*rows: LayerError, problem: str | None = None) -> LayerErrors:
    return LayerErrors("niah_multikey", "a", 2048, 64, rows, problem)


LAYERS = make_layers(
    *rows_of("k8v4", (0.08, 0.12, 0.04, 0.06), keys_lead=False),
    *rows_of("mxfp4", (1.16, 0.2, 0.62, 0.3)),
    *rows_of("crush", (1.5, 1.5, 1.5, 1.5), role="crush"),
)


@pytest.fixture(scope="module")
def data() -> ReportData:
    schemes = ["k8v4", "mxfp4"]
    records = make_records(samples=3, lengths=(512,), schemes=tuple(schemes))
    return make_data(records, make_config(schemes=schemes, context_lengths=[512], gate=None))


@pytest.fixture(scope="module")
def with_layers(data: ReportData) -> ReportData:
    return replace(data, layers=LAYERS)


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def printed(data: ReportData, width: int = 200) -> str:
    console = Console(width=width, color_system=None, record=True, file=io.StringIO())
    console.print(terminal_report(data))
    return plain(console.export_text())


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.0, "0 %"), (1.157, "116 %"), (0.1, "10 %"), (0.0838, "8.4 %"), (0.0065, "0.65 %"), (5e-5, "< 0.01 %")],
)
def test_percent(fraction: float, text: str) -> None:
    assert plain(percent(fraction)) == text


def test_sentences_say_what_the_rows_say_the_largest_median_first() -> None:
    assert [plain(sentence) for sentence in layer_sentences(LAYERS)] == [
        "mxfp4: attention's output is off by 46 % in the median layer and by 116 % in the worst, layer 0 (keys alone "
        "116 %, values alone 12 %); by half or more in layers 0 and 2; the keys of layer 0 are off by 58 % of what "
        "tells tokens apart, and one channel's mean is 202 times the median channel's spread",
        "k8v4: attention's output is off by 7.0 % in the median layer and by 12 % in the worst, layer 1 (keys alone "
        "1.2 %, values alone 12 %); the values of layer 1 are off by 9.3 %",
    ]


def test_a_channel_near_zero_is_not_blamed() -> None:
    rows = [
        replace(row, key_bias_ratio=ratio) for row, ratio in zip(rows_of("a", (0.9, 0.1)), (14.9, None), strict=True)
    ]
    (sentence,) = layer_sentences(make_layers(*rows))
    assert "channel" not in sentence
    assert bias_sentence(make_layers(*rows)).startswith(
        "In none of 1 layers a key channel's mean lies 15 or more times"
    )
    assert bias_sentence(make_layers(*rows)).endswith("(at most 14.9 in layer 0).")
    assert bias_sentence(make_layers(*rows[1:])) == ""


def test_the_keys_are_described_once() -> None:
    assert bias_sentence(LAYERS) == (
        "In layers 0 and 2 a key channel's mean lies 15 or more times the median channel's spread from zero (at most "
        "202 in layer 0)."
    )


def test_many_layers_are_counted() -> None:
    many = [replace(row, layer=i) for i in range(12) for row in rows_of("a", (0.9,))]
    (sentence,) = layer_sentences(make_layers(*many))
    assert "by half or more in all 12 layers" in sentence
    (sentence,) = layer_sentences(make_layers(*many[:7], *(replace(row, output_error=0.1) for row in many[7:])))
    assert "by half or more in 7 of 12 layers" in sentence


def test_layers_that_are_stored_exactly_do_not_count() -> None:
    """Otherwise sliding layers, which stay BF16, would pull the median of most of a model's layers to zero."""
    exact = [replace(row, key_error=0.0, value_error=0.0, output_error=0.0) for row in rows_of("mxfp4", (0.9,) * 3)]
    mixed = make_layers(*exact, replace(rows_of("mxfp4", (0.6,))[0], layer=3), *rows_of("bf16 again", (0.0,)))
    mixed = replace(mixed, rows=(*mixed.rows[:-1], replace(exact[0], scheme="bf16 again")))
    (row,) = layer_rows(mixed)
    assert (row.scheme, plain(row.median), row.lost, row.layer) == ("mxfp4", "60 %", "1 of 1", "3")


def test_rows_are_those_of_the_worst_layer_and_crush_is_last() -> None:
    mxfp4, k8v4, crush = layer_rows(LAYERS)
    assert (mxfp4.scheme, k8v4.scheme, crush.scheme, crush.role) == ("mxfp4", "k8v4", "crush", "crush")
    shown = [mxfp4.median, mxfp4.lost, mxfp4.layer, mxfp4.output, mxfp4.from_keys, mxfp4.from_values, mxfp4.kl]
    assert [plain(text) for text in shown] == ["46 %", "2 of 4", "0", "116 %", "116 %", "12 %", "4.6"]
    assert [plain(text) for text in (mxfp4.key, mxfp4.key_difference, mxfp4.value)] == ["5.0 %", "58 %", "9.3 %"]
    assert mxfp4.bias == "202"


class TestPlot:
    def test_draws_every_scheme_and_marks_far_channels(self, with_layers: ReportData) -> None:
        plot = layer_plot(with_layers, LAYERS)
        bias, keys, values, attention = plot.figure.axes
        assert [patch.get_height() for patch in bias.patches] == list(BIAS)
        assert [to_hex(p.get_facecolor()) for p in bias.patches] == ["#222222", "#b5b5b5", "#222222", "#b5b5b5"]
        for axes, field in ((keys, "key_difference_error"), (values, "value_error"), (attention, "output_error")):
            assert axes.get_yscale() == "log"
            assert axes.get_ylim() == keys.get_ylim()
            lines = {line.get_color(): list(line.get_ydata()) for line in axes.get_lines()}
            assert lines[COLOURS[1]] == [getattr(row, field) for row in LAYERS.rows if row.scheme == "mxfp4"]
            assert len(lines) == 3
        assert len(plot.data) == len(LAYERS.rows)
        assert "first 2,048 tokens of one sample of niah_multikey" in plot.caption

    def test_what_is_exact_has_no_point(self, with_layers: ReportData) -> None:
        exact = [replace(row, value_error=0.0) if row.layer != 2 else row for row in LAYERS.rows]
        values = layer_plot(with_layers, make_layers(*exact)).figure.axes[2]
        assert all(list(line.get_xdata()) == [2] for line in values.get_lines())

    def test_only_for_runs_that_have_rows(self, data: ReportData, with_layers: ReportData) -> None:
        assert "layer_errors" in [plot.name for plot in all_plots(with_layers)]
        failed = replace(data, layers=make_layers(problem="RuntimeError: no memory"))
        assert all("layer_errors" not in [plot.name for plot in all_plots(d)] for d in (data, failed))


class TestPage:
    def test_has_a_section_with_plot_table_and_words(self, with_layers: ReportData) -> None:
        page = plain(render_html(with_layers, [(layer_plot(with_layers, LAYERS), b"<svg/>")]))
        section = page[page.index("Where the error comes from</h2>") : page.index("<h2>Controls")]
        assert section.count('<figure id="layer_errors"') == page.count('<figure id="layer_errors"') == 1
        assert "mxfp4: attention&#39;s output is off by 46 % in the median layer" in section
        assert "<td>2 of 4</td>" in section
        assert "crush (control)" in section

    def test_says_why_there_is_none(self, data: ReportData) -> None:
        failed = replace(data, layers=make_layers(problem="RuntimeError: <no memory>"))
        assert "could not be measured: RuntimeError: &lt;no memory&gt;" in render_html(failed, [])
        assert "could not be measured: RuntimeError: <no memory>" in printed(failed)

    def test_of_an_older_run_has_no_section(self, data: ReportData) -> None:
        assert "Where the error comes from" not in render_html(data, [])
        assert "Where the error comes from" not in printed(data)


def test_the_terminal_shows_the_table_and_the_worst_in_words(with_layers: ReportData) -> None:
    text = printed(with_layers)
    rows = [line.split() for line in text[text.index("Where the error comes from") :].splitlines()]
    assert ["mxfp4", "46", "%", "2", "of", "4", "116", "%", "(0)", "116", "%", "12", "%"] in rows
    assert "k8v4: attention's output is off by 7.0 %" in text
    assert "In layers 0 and 2 a key channel's mean" in text
    assert all(len(line) <= 80 for line in printed(with_layers, width=80).splitlines())


def test_json_holds_the_rows(data: ReportData, with_layers: ReportData) -> None:
    assert LayerErrors.from_dict(json.loads(json.dumps(report_json(with_layers)["layers"]))) == LAYERS
    assert report_json(data)["layers"] is None
