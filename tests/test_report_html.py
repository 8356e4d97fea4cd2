from __future__ import annotations

import re

import pytest
from report_records import make_config, make_data, make_records, with_answers, with_key_tokens

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


@pytest.fixture(scope="module")
def page():
    records = make_records(samples=8, lengths=(512, 1024), schemes=("k8v4",))
    records = with_answers(records, "niah_multikey", finish=("stop", "length"))
    records = with_key_tokens(records, "perplexity", [2])
    at = (records["task"] == "perplexity") & (records["context_length"] == 512)
    records.loc[at, "key_tokens"] = 0
    records.loc[at, ["answer_nll", "answer_nll_sum", "kl", "top1_flips"]] = None
    return render_html(make_data(records, make_config(schemes=["k8v4"], context_lengths=[512, 1024], gate=None)), [])


class TestWritten:
    def test_task_scores_and_what_else_is_known_of_answers(self, page):
        assert page.count("<th>task score<br>(points)</th>") == 2
        assert "<summary>More on the answers of every cell</summary>" in page
        for label in ("F1 of words", "edit similarity", "accepted prefix"):
            assert f"<th>{label}<br>(lost)</th>" in page
        assert "undecidable at this n" not in page

    def test_cut_answers_and_key_tokens_are_notes(self, page):
        notes = re.findall(r'<p class="note">(.*)</p>', page)
        assert "perplexity at 512 tokens is non-discriminative" in " ".join(notes)
        assert "perplexity at 1k tokens: NLL, KL and flips are over the 16 key tokens of 8 samples alone." in notes
        assert any("4 of 8 answers of bf16 and 4 of 8 of k8v4 reached max_new_tokens (32)" in note for note in notes)
        assert 'class="problem">niah_multikey' not in page

    def test_nothing_empty_is_shown(self, page):
        assert "nan" not in re.findall(r"<td[^>]*>([^<]*)</td>", page)
        rows = re.findall(r'<tr><td class="l">k8v4</td><td class="l">perplexity</td><td>([^<]*)</td>', page)
        assert rows == ["1k"]

    def test_a_run_without_written_answers_has_none_of_it(self):
        records = make_records(samples=3, lengths=(512,), schemes=("k8v4",))
        page = render_html(make_data(records, make_config(schemes=["k8v4"], context_lengths=[512], gate=None)), [])
        assert "undecidable at this n" in page
        for absent in ("task score", "More on the answers", "accepted prefix", "notes on", "key token"):
            assert absent not in page


def test_what_users_write_is_escaped(data):
    records = make_records(samples=2, lengths=(1024,), schemes=("k8v4",))
    evil = "<script>alert(1)</script>"
    records["task"] = evil
    records["sample_id"] = [f"{i}" for i in range(len(records))]
    config = make_config(name=evil, schemes=["k8v4"], context_lengths=[1024], gate=None)
    page = render_html(make_data(records, config), [])
    assert evil not in page
    assert "&lt;script&gt;" in page
