from __future__ import annotations

import math

import pandas as pd
import pytest
from report_records import ENV, make_config, make_data, make_plan, make_records, with_answers, with_key_tokens

from kveval.controls import ControlResult
from kveval.errors import StoreError
from kveval.gate import decide
from kveval.report.cells import DEPTH_BUCKETS, Arm, arms_of, needles_of, storage_of, timings_of, undecidable
from kveval.report.model import build_report
from kveval.report.rows import Loss, answer_rows, cell_rows, few_clusters, gate_notes, loss_text, summary_rows
from kveval.stats import compare


@pytest.fixture(scope="module")
def records() -> pd.DataFrame:
    return make_records(samples=24, lengths=(512, 2048), schemes=("k8v4", "mxfp4"))


@pytest.fixture(scope="module")
def config():
    return make_config(schemes=["k8v4", "mxfp4"], context_lengths=[512, 2048], samples=24)


@pytest.fixture(scope="module")
def data(records, config):
    verdict = decide(records, config.gate)
    return make_data(records, config, verdict=verdict)


def test_arms_come_baseline_first_and_crush_last(data):
    assert [(a.scheme, a.role) for a in data.arms] == [
        ("bf16", "baseline"),
        ("bf16 (A/A)", "aa"),
        ("k8v4", "scheme"),
        ("mxfp4", "scheme"),
        ("crush", "crush"),
    ]


def test_arms_not_in_the_config_come_after_the_listed_ones(records):
    renamed = records.replace({"scheme": {"k8v4": "zzz"}})
    arms = arms_of(renamed, make_plan()["config"])
    assert [a.scheme for a in arms] == ["bf16", "bf16 (A/A)", "mxfp4", "zzz", "crush"]


def test_comparisons_are_those_of_the_statistics(data, records):
    ours = data.comparison(Arm("mxfp4", "scheme"), "perplexity", 512, "kl")
    assert ours == compare(records, scheme="mxfp4", role="scheme", metric="kl", task="perplexity", context_length=512)
    assert data.comparison(Arm("mxfp4", "scheme"), "perplexity", 4096, "kl") is None
    assert len(data.comparisons) == 3 * 2 * 4 * 4
    assert len(data.exchange) == 3 * 2 * 2 * 2


def test_worst_first(data):
    losses = [c.loss.value for c in data.ranked("answer_nll")]
    assert losses == sorted(losses, reverse=True)
    assert data.ranked("answer_nll")[0].scheme == "mxfp4"
    assert {c.role for c in data.ranked("answer_nll")} == {"scheme"}


def test_headline_and_key_sentence_are_the_gates(data):
    assert data.headline == data.verdict.first_line
    assert data.tone == "good"
    assert data.key_sentences == data.sentences[:1]
    assert data.sentences[0].startswith("k8v4 at 2k tokens: 4,001 sessions instead of 1,625 (2.5x); costs")
    assert "decode" not in data.sentences[0]  # the reference path's times say nothing about serving


def test_a_gpu_alone_makes_no_decode_claim(records):
    data = make_data(records, make_config(schemes=["k8v4", "mxfp4"], gate=None), device="cuda")
    assert not data.by_kernels
    assert not any("decode" in s for s in data.sentences)


def test_each_sentence_is_of_the_task_that_hurts_most(data):
    for sentence, scheme in zip(data.sentences, ("k8v4", "mxfp4"), strict=True):
        worst = next(c for c in data.ranked("answer_nll") if c.scheme == scheme and c.context_length == 2048)
        assert f" on {worst.task}" in sentence


def test_without_a_gate_nothing_is_decided(records):
    config = make_config(schemes=["k8v4", "mxfp4"], gate=None)
    data = make_data(records.assign(attention_path="packed kernel"), config, device="cuda")
    assert data.headline == "No gate was declared: measurements up to 2k tokens, no verdict."
    assert (data.tone, data.gate_scheme, data.margins, data.confidence) == ("plain", None, {}, 0.95)
    assert data.key_sentences == data.sentences
    assert all("; decode 0." in s for s in data.sentences)


def test_a_failed_control_leads_and_silences_the_sentences(records):
    config = make_config(schemes=["k8v4", "mxfp4"], gate=None)
    broken = ControlResult("crush caught", False, "crush is not told from noise.", "invalid")
    data = make_data(records, config, controls=(broken,))
    assert data.headline.endswith("a control failed: crush caught: crush is not told from noise.")
    assert (data.tone, data.key_sentences) == ("void", ())


def test_missing_and_errored_samples_are_told(records, config):
    damaged = records[~((records["scheme"] == "k8v4") & (records["sample_index"] == 3))].copy()
    row = damaged.index[(damaged["scheme"] == "mxfp4") & (damaged["sample_index"] == 5)][0]
    damaged.loc[row, ["status", "error"]] = ["error", "MeasurementError: the cache did not grow"]
    damaged.loc[row, ["answer_nll", "exact_match", "kl", "top1_flips"]] = None
    problems = make_data(damaged, config).problems
    assert problems[0] == (
        "1 of 714 samples errored; the first, mxfp4 on niah_multikey at 512 tokens: "
        "MeasurementError: the cache did not grow"
    )
    assert problems[1].startswith("7 cells lack samples; most of all k8v4 on niah_multikey at 512 tokens (1 ")


def test_no_records_is_an_error():
    with pytest.raises(StoreError, match="no records yet"):
        build_report(make_records(samples=0), make_plan(), sessions={}, controls=(), env=ENV)


def test_margins_are_those_of_the_gate(data):
    assert data.margins == {
        ("answer_nll", "niah_multikey", 2048): 0.1,
        ("answer_nll", "passkey_chain", 2048): 0.1,
    }


def test_a_metric_at_the_floor_discriminates_nothing(data):
    assert data.discriminates("answer_nll", "perplexity")
    assert not data.discriminates("exact_match", "perplexity")
    assert not data.discriminates("exact_match", "no such task")


class TestCells:
    def test_needles_by_depth(self, records, data):
        one = next(n for n in data.needles if (n.arm.role, n.context_length, n.bucket) == ("baseline", 512, 2))
        at = records[
            (records["role"] == "baseline")
            & (records["task"] == "niah_multikey")
            & (records["context_length"] == 512)
            & records["depth"].between(0.4, 0.6)
        ]
        assert (one.n, one.value) == (len(at), at["exact_match"].mean())
        assert {n.bucket for n in data.needles} == set(range(DEPTH_BUCKETS))

    def test_depth_one_is_in_the_last_band(self, records, data):
        deep = records.head(5).assign(depth=1.0)
        assert {n.bucket for n in needles_of(deep, data.arms)} == {DEPTH_BUCKETS - 1}

    def test_storage_is_per_cached_token(self, data):
        found = {s.arm.scheme: s for s in data.storage if s.context_length == 512}
        assert (found["bf16"].stored, found["bf16"].of_baseline) == (23_040, 1.0)
        assert found["mxfp4"].of_baseline == 4.25 / 16

    def test_times_are_medians_and_quartiles(self, records, data):
        seconds = records[(records["scheme"] == "k8v4") & (records["context_length"] == 512)]
        time = next(t for t in data.timings if (t.arm.scheme, t.context_length) == ("k8v4", 512))
        assert time.n == 72
        assert time.median == pytest.approx(seconds["decode_s_per_token"].median())
        assert time.low < time.median < time.high

    def test_unmeasured_bytes_and_times_are_left_out(self, records, data):
        bare = records.assign(stored_bytes=None, decode_s_per_token=math.nan)
        assert storage_of(bare, data.arms, (512,)) == ()
        assert timings_of(bare, data.arms, (512,)) == ()


class TestWritten:
    def test_only_what_has_a_value_is_compared(self, records, config):
        data = make_data(with_answers(records, "niah_multikey"), config)
        metrics = {task: {c.metric for c in data.comparisons if c.task == task} for task in data.tasks}
        plain = {"answer_nll", "exact_match", "kl", "top1_flips"}
        more = {"task_score", "text_f1", "edit_similarity", "accepted_prefix"}
        assert metrics == {"niah_multikey": plain | more, "passkey_chain": plain, "perplexity": plain}
        assert data.has("task_score")
        assert {m.metric for m in data.means} == {"answer_nll", "exact_match", "task_score"}
        assert all((t == "niah_multikey") == ((t, n, "task_score") in data.competence) for t, n, _ in data.competence)

    def test_a_failed_samples_leftovers_are_no_value(self, records, config):
        broken = records[records["task"] == "niah_multikey"].assign(task_score=0.5, status="error", error="x")
        rest = records[records["task"] != "niah_multikey"]
        data = make_data(pd.concat([broken, rest], ignore_index=True), config)
        assert not data.has("task_score")
        assert data.lengths_of("niah_multikey") == ()
        assert len(cell_rows(data)) == 2 * 2 * 4

    def test_needles_are_of_the_task_score(self, records, data):
        written = with_answers(records, "niah_multikey")
        one = next(n for n in needles_of(written, data.arms) if (n.arm.scheme, n.context_length) == ("mxfp4", 2048))
        at = (written["scheme"] == "mxfp4") & (written["task"] == "niah_multikey") & (written["context_length"] == 2048)
        assert one.metric == "task_score"
        assert one.value == written[at & (written["depth"] < 1 / DEPTH_BUCKETS)]["task_score"].mean()
        assert {n.metric for n in data.needles} == {"exact_match"}

    def test_the_sentence_of_the_worst_task_tells_its_score(self, records, config):
        data = make_data(with_answers(with_answers(records, "niah_multikey"), "passkey_chain"), config)
        assert all(" points of task score" in sentence for sentence in data.sentences)
        silent = with_answers(with_answers(records, "niah_multikey"), "passkey_chain").assign(task_score=0.0)
        assert not any("task score" in sentence for sentence in make_data(silent, config).sentences)

    def test_rows_have_the_mean_score_and_every_loss(self, records, config):
        written = with_answers(records, "niah_multikey")
        data = make_data(written, config)
        rows = answer_rows(data)
        assert len(rows) == 2 * 4
        row = next(r for r in rows if (r.scheme, r.context) == ("mxfp4", "2k"))
        at = (written["scheme"] == "mxfp4") & (written["task"] == "niah_multikey") & (written["context_length"] == 2048)
        assert row.score == f"{100 * written[at]['task_score'].mean():.3g}"
        score = data.comparison(Arm("mxfp4", "scheme"), "niah_multikey", 2048, "task_score")
        assert row.task_score == loss_text(score)
        assert len(row.details) == 3
        assert {r.task_score.text for r in cell_rows(data) if r.task != "niah_multikey"} == {"–"}

    def test_thoughts_that_were_cut_are_a_problem(self, records, config):
        data = make_data(with_answers(records, "niah_multikey", finish=("stop", "thinking", "length")), config)
        assert data.problems == tuple(
            f"niah_multikey at {n} tokens: 8 of 24 answers of bf16 and 8 of 24 of each format were still thinking at "
            "max_new_tokens (32) and have no score; raise it. The task score is over the other samples alone."
            for n in ("512", "2k")
        )
        assert data.comparison(Arm("k8v4", "scheme"), "niah_multikey", 512, "task_score").n_pairs == 16

    def test_cut_answers_are_a_note_and_crush_does_not_count(self, records, config):
        written = with_answers(records, "niah_multikey")
        written.loc[(written["role"] == "crush") & written["finish_reason"].notna(), "finish_reason"] = "length"
        assert make_data(written, config).notes == ()
        some = (written["scheme"] == "mxfp4") & (written["context_length"] == 512) & (written["sample_index"] < 5)
        written.loc[some & written["finish_reason"].notna(), "finish_reason"] = "length"
        (note,) = make_data(written, config).notes
        cut = "0 of 24 answers of bf16 and up to 5 of 24 of mxfp4 reached max_new_tokens (20) "
        assert note.startswith(f"niah_multikey at 512 tokens: {cut}")
        assert make_data(written, config).problems == ()

    def test_places_are_in_bands_of_equal_width(self, records, config):
        data = make_data(with_answers(records, "niah_multikey", places=30), config)
        of = [p for p in data.positions if (p.arm.scheme, p.context_length) == ("mxfp4", 512)]
        assert [(p.first, p.last) for p in of] == [(1 + 3 * i, 3 + 3 * i) for i in range(10)]
        assert {p.n for p in of} == {24}

    def test_answers_of_different_lengths_share_bands(self, records, config):
        few = with_answers(records, "niah_multikey", places=2)
        at = few.index[(few["scheme"] == "mxfp4") & few["position_scores"].notna() & (few["context_length"] == 512)]
        few.at[at[0], "position_scores"] = [1.0, 0.0, 0.5]
        of = [p for p in make_data(few, config).positions if (p.arm.scheme, p.context_length) == ("mxfp4", 512)]
        assert [(p.first, p.n) for p in of] == [(1, 24), (2, 24), (3, 1)]
        assert of[2].value == 0.5

    def test_key_tokens_are_counted_and_none_are_not_missing(self, records, config):
        data = make_data(with_key_tokens(records, "perplexity", [0, 2, 4]), config)
        assert data.problems == ()
        assert data.notes[0] == (
            "perplexity at 512 tokens: NLL, KL and flips are over the 48 key tokens of 24 samples alone (8 of them "
            "have none)."
        )
        loss = data.comparison(Arm("k8v4", "scheme"), "perplexity", 512, "answer_nll")
        assert (loss.n_pairs, loss.n_missing_scheme, loss.n_missing_baseline) == (16, 0, 0)

    def test_a_cell_without_key_tokens_shows_nothing(self, records, config):
        data = make_data(with_key_tokens(records, "perplexity", [0]), config)
        assert data.notes[0].startswith("perplexity at 512 tokens is non-discriminative: no token of its 24 samples")
        assert not any(c.task == "perplexity" for c in data.comparisons)
        assert not any(r.task == "perplexity" for r in cell_rows(data))


class TestRows:
    def test_every_cell_once_and_controls_last(self, data):
        rows = cell_rows(data)
        assert len(rows) == 3 * 2 * 4
        assert [r.role for r in rows] == ["scheme"] * 12 + ["aa"] * 6 + ["crush"] * 6
        assert rows[0].answer_nll.clear == "worse"

    def test_floor_is_told_in_place_of_a_figure(self, data):
        row = next(r for r in cell_rows(data) if r.task == "perplexity")
        assert (row.exact_match.text, row.flips) == ("baseline at floor", "–")

    def test_summary_is_at_the_longest_context(self, data):
        k8v4, mxfp4 = summary_rows(data)
        assert (k8v4.scheme, k8v4.gated, k8v4.sessions, k8v4.gain) == ("k8v4", True, "4,001", "2.46x")
        assert (mxfp4.gated, mxfp4.of_baseline, mxfp4.bytes_per_token) == (False, "27%", "6,120")

    def test_an_undefined_interval_is_said(self, records):
        one = records[records["sample_index"] == 0]
        c = compare(one, scheme="k8v4", metric="answer_nll", task="perplexity", context_length=512)
        assert loss_text(c).text.endswith("(no interval)")
        assert loss_text(None).text == "–"

    def test_an_interval_wider_than_50_points_decides_nothing(self, records):
        few = records[records["sample_index"].isin((0, 1))]
        about = {"scheme": "k8v4", "task": "passkey_chain", "context_length": 512}
        wide = compare(few, metric="exact_match", **about)
        assert undecidable(wide)
        assert loss_text(wide) == Loss("undecidable at this n", "")
        assert not undecidable(compare(records, metric="exact_match", **about))
        assert not undecidable(compare(few, metric="answer_nll", **about))  # not a fraction: no such bound

    def test_answers_are_not_counted_where_there_are_none(self, records, config):
        silent = records.copy()
        silent.loc[silent["task"] == "perplexity", "exact_match"] = math.nan
        row = next(r for r in cell_rows(make_data(silent, config)) if r.task == "perplexity")
        assert (row.exact_match.text, row.flips) == ("–", "–")

    def test_few_clusters_are_one_sentence(self, data):
        assert few_clusters(data.ranked("answer_nll")) == (
            "Intervals rest on 6 to 24 clusters of samples (the samples of one document or haystack are one cluster). "
            "They can be relied on from about 40 clusters on: take more samples before deciding on these figures."
        )
        assert few_clusters([]) == ""

    def test_notes_of_the_gate_are_sentences(self, data):
        notes = gate_notes(data.verdict)
        assert notes[0] == "Not tested beyond 2,048 tokens."
        assert notes[-1].startswith("Intervals rest on 6 to 24 clusters of samples")
        assert not any("; intervals are trusted" in note for note in notes)
        assert all(note[0].isupper() and note.endswith(".") for note in notes)


def test_a_task_has_the_lengths_that_it_ran_at(records, config):
    some = records[(records["task"] != "perplexity") | (records["context_length"] == 2048)]
    data = make_data(some, config)
    assert [data.lengths_of(t) for t in ("niah_multikey", "perplexity", "none")] == [(512, 2048), (2048,), ()]
