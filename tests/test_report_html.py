from __future__ import annotations

import re

import pytest
from report_records import make_config, make_data, make_records

from kveval.gate import decide
from kveval.report.html import render_html, write_report
from kveval.report.plots import all_plots


@pytest.fixture(scope="module")
def data():
    records = make_records(samples=6, lengths=(1024,), schemes=("k8v4",))
    records = records[records["task"] == "perplexity"]  # few plots: drawing takes most of the time
    endpoint = {"metric": "answer_nll", "task": "perplexity", "context_length": 1024, "margin": 0.1}
    config = make_config(
        schemes=["k8v4"], context_lengths=[1024], samples=6, gate={"scheme": "k8v4", "endpoints": [endpoint]}
    )
    return make_data(records, config, verdict=decide(records, config.gate))


def test_a_run_gets_one_self_contained_page_and_its_plots(data, tmp_path):
    path = write_report(tmp_path, data)
    assert path == tmp_path / "report.html"
    page = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", page)
    assert "url(" not in page
    assert page.count("data:image/svg+xml;base64,") == len(list((tmp_path / "plots").glob("*.svg")))
    for kind in ("svg", "png", "csv"):
        assert (tmp_path / "plots" / f"degradation.{kind}").stat().st_size > 0


def test_the_verdict_comes_first(data):
    page = render_html(data, [])
    body = page[page.index("<body>") :]
    assert body.index(data.headline) < body.index("The exchange at 1k tokens")
    assert "NVIDIA H100 SXM 80 GB (79.6 GiB as its driver reports)" in page
    assert "bf16: 3,250" in page
    assert page.count("Intervals rest on 6 clusters of samples") == 2  # under the headline and with the gate
    assert "intervals are trusted" not in page


def test_the_headline_plot_is_kl_and_what_is_not_drawn_is_said():
    records = make_records(samples=3, lengths=(512,), schemes=("k8v4",))
    data = make_data(records, make_config(schemes=["k8v4"], context_lengths=[512], gate=None))
    page = render_html(data, [(plot, b"<svg/>") for plot in all_plots(data)])
    figures = re.findall(r'<figure id="([^"]+)"', page)
    assert figures[:2] == ["degradation_kl", "degradation"]
    assert "Exact match is not drawn: in no cell" in page


def test_what_users_write_is_escaped(data):
    records = make_records(samples=2, lengths=(1024,), schemes=("k8v4",))
    evil = "<script>alert(1)</script>"
    records["task"] = evil
    records["sample_id"] = [f"{i}" for i in range(len(records))]
    config = make_config(name=evil, schemes=["k8v4"], context_lengths=[1024], gate=None)
    page = render_html(make_data(records, config), [])
    assert evil not in page
    assert "&lt;script&gt;" in page
