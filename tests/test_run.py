"""The sweep end to end on a tiny random model: records, resume, identity of runs, errors."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest
from pydantic import ValidationError

from kveval.config import SweepConfig
from kveval.errors import ConfigError, LengthError, MeasurementError, StoreError
from kveval.models import load_tokenizer
from kveval.records import TIMING_FIELDS
from kveval.run import _clusters, make_samples, plan_sweep, run_sweep
from kveval.store import read_records

TASKS = [
    {"name": "niah_multikey", "keys": 4, "queries": 2, "samples": 4},
    {"name": "perplexity", "corpus": "python-docs", "scored_tokens": 32, "samples": 2},
]


def config(tiny_model: Path, **changes) -> SweepConfig:
    fields = {
        "name": "tiny",
        "model": {"id": str(tiny_model), "device": "cpu"},
        "schemes": ["fp8_e4m3", "nvfp4"],
        "tasks": TASKS,
        "context_lengths": [768, 1024],
        "prefill_chunk": 512,
        "decode_tokens": 1,
        **changes,
    }
    return SweepConfig.model_validate(fields)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "whole"
    summary = run_sweep(config(tiny_model), path)
    assert (summary.measured, summary.errors) == (60, 0)
    return path


def timeless(path: Path) -> pd.DataFrame:
    return read_records(path).drop(columns=list(TIMING_FIELDS))


def same_records(a: Path, b: Path) -> None:
    pd.testing.assert_frame_equal(timeless(a), timeless(b), check_exact=True)


def test_every_cell_has_its_samples(finished):
    records = read_records(finished)
    assert (records["status"] == "ok").all()
    counts = records.groupby(["task", "context_length", "scheme"]).size()
    assert set(counts.index.get_level_values("scheme")) == {"bf16", "bf16 (A/A)", "fp8_e4m3", "nvfp4", "crush"}
    assert counts["niah_multikey"].eq(4).all()
    assert counts["perplexity"].eq(2).all()
    assert (records["n_prompt_tokens"] + records["n_answer_tokens"] == records["context_length"]).all()


def test_records_say_what_was_measured(finished):
    records = read_records(finished)
    assert (records["stored_bytes"] == records["billed_bytes"]).all()
    assert (records["cache_tokens"] == records["context_length"] - 1).all()
    assert (records["packed_reads"] > 0).all()
    # Two layers, two KV heads of 32: 2 * 2 * 2 * 32 elements per token.
    by_scheme = records[records["scheme"] == "fp8_e4m3"]
    assert (by_scheme["stored_bytes"] == by_scheme["cache_tokens"] * 256).all()
    wide = records[records["role"] == "baseline"]
    assert (wide["stored_bytes"] == wide["cache_tokens"] * 512).all()
    assert (wide["kl"] == 0).all()


def test_lossy_schemes_differ_and_crush_differs_most(finished):
    kl = read_records(finished).groupby("scheme")["kl"].mean()
    assert 0 < kl["bf16 (A/A)"] < kl["fp8_e4m3"] < kl["nvfp4"] < kl["crush"]


def test_each_schemes_answers_are_compared_with_the_baselines_own(finished):
    records = read_records(finished)
    scored = records["token_nll"].map(len)
    assert (scored == records["n_answer_tokens"]).all()
    sums = records["token_nll"].map(sum)
    assert (sums - records["answer_nll_sum"]).abs().max() < 1e-9


def test_only_passages_are_prefilled_across_lengths(tiny_model):
    plan, tasks = plan_sweep(config(tiny_model))
    clusters = list(_clusters(plan, tasks, make_samples(plan, tasks, load_tokenizer(plan.config.model))))
    lengths = [(c.cells[0]["bf16"].task, {s.context_length for s in c.samples}) for c in clusters]
    assert lengths.count(("niah_multikey", {768})) == 2
    assert lengths.count(("niah_multikey", {1024})) == 2
    assert lengths.count(("perplexity", {768, 1024})) == 2
    assert len(lengths) == 6


def test_a_second_run_measures_nothing(finished, tiny_model):
    before = (finished / "records").glob("*")
    stamps = {p: p.read_bytes() for p in before}
    summary = run_sweep(config(tiny_model), finished)
    assert summary.measured == 0
    assert {p: p.read_bytes() for p in stamps} == stamps


def test_deleting_any_journal_line_gives_the_same_records(finished, tiny_model, tmp_path):
    lines = (finished / "journal.jsonl").read_text().splitlines(keepends=True)
    chooser = random.Random(0)
    for gone in chooser.sample(range(len(lines)), 4):
        path = tmp_path / f"without-{gone}"
        path.mkdir()
        (path / "plan.json").write_bytes((finished / "plan.json").read_bytes())
        (path / "journal.jsonl").write_text("".join(lines[:gone] + lines[gone + 1 :]))
        assert run_sweep(config(tiny_model), path).measured == 1
        same_records(path, finished)


KILLED = textwrap.dedent(
    """
    import os, random, signal, sys, time
    import torch
    from kveval.config import SweepConfig
    from kveval.run import run_sweep
    import kveval.backends.hf
    torch.set_num_threads(1)
    config = SweepConfig.model_validate_json(sys.argv[1])
    chooser = random.Random(7)
    deaths = 0
    while deaths < 10:
        child = os.fork()
        if child == 0:
            run_sweep(config, sys.argv[2])
            os._exit(0)
        time.sleep(chooser.uniform(0.05, 1.2))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        deaths += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            break
    print(deaths)
    """
)


@pytest.mark.slow
def test_killing_at_random_moments_gives_the_same_records(finished, tiny_model, tmp_path):
    path = tmp_path / "killed"
    sweep = config(tiny_model)
    child = subprocess.run(
        [sys.executable, "-c", KILLED, sweep.model_dump_json(), str(path)],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert int(child.stdout) >= 3, child.stderr
    run_sweep(sweep, path)
    same_records(path, finished)


def test_another_sweep_in_the_same_folder_is_refused(finished, tiny_model):
    with pytest.raises(StoreError, match="seed"):
        run_sweep(config(tiny_model, seed=1), finished)


def test_lengths_are_checked_before_anything_runs(tiny_model, tmp_path):
    with pytest.raises(LengthError, match="at least"):
        run_sweep(config(tiny_model, context_lengths=[64]), tmp_path / "a")
    with pytest.raises(LengthError, match="takes at most 4096"):
        run_sweep(config(tiny_model, context_lengths=[8192]), tmp_path / "b")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_failing_sample_is_a_row_and_is_tried_again(tiny_model, tmp_path, monkeypatch):
    from kveval.backends.hf import HFBackend

    sweep = config(tiny_model, tasks=TASKS[:1], context_lengths=[768])
    whole = HFBackend.score

    def broken(self, cluster, arm, baseline, **options):
        for i, output in enumerate(whole(self, cluster, arm, baseline, **options)):
            if arm.label == "nvfp4" and i == 1:
                raise MeasurementError("the cache went missing.")
            yield output

    with monkeypatch.context() as patch:
        patch.setattr(HFBackend, "score", broken)
        summary = run_sweep(sweep, tmp_path / "run")
    assert summary.errors == 2
    failed = read_records(tmp_path / "run").query("status == 'error'")
    assert failed["scheme"].tolist() == ["nvfp4", "nvfp4"]
    assert failed["error"].str.contains("the cache went missing").all()
    assert failed["answer_nll"].isna().all()
    again = run_sweep(sweep, tmp_path / "run")
    assert (again.measured, again.errors) == (2, 0)


def test_nothing_is_compared_with_a_baseline_that_failed(tiny_model, tmp_path, monkeypatch):
    """Otherwise KL would be missing for good: the other arms' records would count as measured."""
    from kveval.backends.hf import HFBackend

    sweep = config(tiny_model, tasks=TASKS[:1], context_lengths=[768])
    whole = HFBackend.score

    def broken(self, cluster, arm, baseline, **options):
        for i, output in enumerate(whole(self, cluster, arm, baseline, **options)):
            if arm.role == "baseline" and i == 1:
                raise MeasurementError("the baseline went missing.")
            yield output

    with monkeypatch.context() as patch:
        patch.setattr(HFBackend, "score", broken)
        summary = run_sweep(sweep, tmp_path / "run")
    records = read_records(tmp_path / "run")
    ok = records.query("status == 'ok'")
    assert summary.errors == 2 * 5  # one question of each of the two haystacks, on all five arms
    assert ok["kl"].notna().all()
    again = run_sweep(sweep, tmp_path / "run")
    assert (again.measured, again.errors) == (2 * 5, 0)
    assert read_records(tmp_path / "run")["kl"].notna().all()


def test_self_test_is_recorded(finished):
    found = json.loads((finished / "self_test.json").read_text())
    assert found["plain"] == found["packed"]
    assert 0 < found["max_logit_difference"] < found["tolerance"]


def test_fresh_chunk_reads_are_another_measurement(tiny_model, tmp_path, finished):
    sweep = config(tiny_model, reads="fresh_chunk", tasks=TASKS[1:], context_lengths=[768], schemes=["nvfp4"])
    run_sweep(sweep, tmp_path / "fresh")
    fresh = read_records(tmp_path / "fresh").query("scheme == 'nvfp4'")
    stored = read_records(finished).query("scheme == 'nvfp4' and task == 'perplexity' and context_length == 768")
    assert set(fresh["cell_id"]).isdisjoint(stored["cell_id"])
    assert fresh["kl"].mean() < stored["kl"].mean()


OWN_SCORE = """
import random
from kveval.haystack import Haystack, Needle, Question, build_samples, depth_of, numbers
from kveval.tasks import TaskParams

VERSION = 1
MAX_NEW_TOKENS = 5
STOP = ("stop",)

class Params(TaskParams):
    pass

def samples(params, ctx):
    def describe(number, rng):
        (value,) = numbers(rng, 1, 4)
        return Haystack("Read.", (Needle(f"It is {value}.", depth_of(ctx, "own", number)),),
                        (Question("What is it?", "It is", value, needles=(0,)),))
    return build_samples(ctx, "own", filler="noise", queries=1, describe=describe)

def score(params, sample, text):
    return {"task_score": min(1.0, len(text) / 100)}

def position_scores(params, sample, text):
    return [1.0, 0.0]
"""


def test_answers_are_written_where_the_config_asks(tiny_model, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN_SCORE)
    tasks = [
        {"name": "niah_multikey", "keys": 4, "queries": 2, "max_new_tokens": 12, "stop": ["zzz"]},
        {"name": str(own), "label": "own"},
        {"name": "niah_single", "mode": "teacher_forced"},
    ]
    run_sweep(
        config(tiny_model, tasks=tasks, mode="generate", samples=2, context_lengths=[512], schemes=["nvfp4"]),
        tmp_path / "run",
    )
    records = read_records(tmp_path / "run")
    assert set(records["status"]) == {"ok"}
    by_task = dict(list(records.groupby("task")))
    fed, kept = by_task["niah_single"], by_task["niah_multikey"]
    assert fed[["task_score", "generated_text", "finish_reason"]].isna().all().all()
    assert (kept["n_prompt_tokens"] == 512 - 12).all()
    assert (kept["n_generated_tokens"] <= 12).all()
    assert set(kept["finish_reason"]) <= {"stop", "length"}
    assert kept[["task_score", "text_f1", "text_exact_match", "edit_similarity", "exact_match"]].notna().all().all()
    assert kept["position_scores"].isna().all()
    mine = by_task["own"]
    assert (mine["n_prompt_tokens"] == 512 - 5).all()
    assert mine["task_score"].tolist() == [min(1.0, len(text) / 100) for text in mine["generated_text"]]
    assert [list(scores) for scores in mine["position_scores"]] == [[1.0, 0.0]] * len(mine)


def test_passages_can_not_be_written(tiny_model):
    with pytest.raises(ConfigError, match="'perplexity' scores running text"):
        plan_sweep(config(tiny_model, mode="generate"))


def test_a_gate_on_written_text_needs_a_task_that_writes(tiny_model):
    gate = {"scheme": "nvfp4", "endpoints": [
        {"metric": "task_score", "task": "niah_multikey", "context_length": 768, "margin": 0.1}
    ]}  # fmt: skip
    with pytest.raises(ConfigError, match="niah_multikey is fed its answers"):
        plan_sweep(config(tiny_model, gate=gate))
    with pytest.raises(ValidationError, match="add `mode: generate`"):
        config(tiny_model, tasks=[{"name": "niah_single", "stop": ["x"]}])


def test_what_is_written_names_its_cells_and_the_rest_keep_their_names(tiny_model):
    plain, written = (
        plan_sweep(config(tiny_model, tasks=TASKS[:1], mode=mode))[0] for mode in ("teacher_forced", "generate")
    )
    assert {cell.id for cell in plain.cells}.isdisjoint({cell.id for cell in written.cells})
    assert plain.to_dict()["plan_digest"] != written.to_dict()["plan_digest"]


KEYED = """
from kveval.tasks import TaskParams, make_sample

VERSION = 1

class Params(TaskParams):
    pass

def samples(params, ctx):
    ids = list(ctx.prompt.encode("one two three four " * ctx.context_length))[: ctx.context_length]
    return [
        make_sample(ctx, i, [*ids[i:-40], *range(i)], ids[-40:], cluster=str(i), short_prompt_ids=ids[-41:-40])
        for i in range(ctx.samples)
    ]
"""


def test_key_tokens_are_counted_and_shared_by_all_arms(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("kveval.scoring.KEY_GAIN", -0.05)
    monkeypatch.setattr("kveval.scoring.KEY_LOSS", 50.0)
    (tmp_path / "keyed.py").write_text(KEYED)
    run_sweep(
        config(tiny_model, tasks=[str(tmp_path / "keyed.py")], samples=2, context_lengths=[256], schemes=["nvfp4"]),
        tmp_path / "run",
    )
    records = read_records(tmp_path / "run")
    assert (records["status"] == "ok").all()
    assert (records.groupby("sample_id")["key_tokens"].nunique() == 1).all()
    assert 0 < records["key_tokens"].max() < 40
    assert (records["token_nll"].map(len) == records["key_tokens"]).all()
    assert records["exact_match"].isna().all()


def test_haystacks_run_in_batches(tiny_model, tmp_path):
    tasks = [{"name": "niah_multikey", "keys": 4, "queries": 2, "samples": 10}, TASKS[1]]
    found = {}
    for size in (1, 3):
        run_sweep(config(tiny_model, tasks=tasks, context_lengths=[512], batch_size=size), tmp_path / str(size))
        found[size] = read_records(tmp_path / str(size)).set_index(["scheme", "task", "sample_id"])
    assert set(found[1].xs("niah_multikey", level="task")["batch"]) == {2}
    of_needles = found[3].xs("niah_multikey", level="task")
    # The first haystack is timed, and so runs alone; a batch of three and one of the last one follow.
    assert of_needles.groupby("scheme")["batch"].value_counts().unstack().loc["bf16"].to_dict() == {2: 4, 6: 6}
    assert set(found[3].xs("perplexity", level="task")["batch"]) == {1}
    assert (found[3]["status"] == "ok").all()
    off = (found[3]["answer_nll"] - found[1]["answer_nll"]).abs()
    assert off.xs("bf16", level="scheme").max() < 1e-3
    assert off.max() < 0.02
    with pytest.raises(ConfigError, match="batch_size: 2, but how kivi2 stores a token depends"):
        plan_sweep(config(tiny_model, batch_size=2, schemes=["kivi2"]))


def test_a_batch_is_the_same_whatever_of_it_is_measured_already(tiny_model, tmp_path):
    tasks = [{"name": "niah_multikey", "keys": 4, "queries": 2, "samples": 8}]
    sweep = config(tiny_model, tasks=tasks, context_lengths=[512], batch_size=2, schemes=["nvfp4"])
    run_sweep(sweep, tmp_path / "whole")
    run_sweep(sweep, tmp_path / "cut")
    journal = tmp_path / "cut" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    (tmp_path / "cut" / "manifest.json").unlink()
    journal.write_bytes(b"".join(lines[: len(lines) // 2 + 1]))
    run_sweep(sweep, tmp_path / "cut")
    same_records(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("score", "told"),
    [
        ("raise ValueError('boom')", "score of task 'own' failed: ValueError: boom"),
        ("return 1.0", "score of task 'own' gave 1.0"),
        ("return {'task_score': float('nan')}", "scored sample .* with nan"),
        ("return {'task_score': '1'}", "scored sample .* with '1'"),
    ],
)
def test_a_score_that_fails_is_an_error_of_its_sample(tiny_model, tmp_path, score, told):
    """Every sample has a record, and a second run has nothing left to do but those that failed."""
    own = tmp_path / "own.py"
    own.write_text(OWN_SCORE.replace('return {"task_score": min(1.0, len(text) / 100)}', score))
    sweep = config(
        tiny_model, tasks=[{"name": str(own), "label": "own"}], mode="generate", samples=2, context_lengths=[256],
        schemes=["nvfp4"],
    )  # fmt: skip
    summary = run_sweep(sweep, tmp_path / "run")
    records = read_records(tmp_path / "run")
    assert (summary.errors, len(records)) == (8, 8)
    assert records["error"].str.contains(told).all()
