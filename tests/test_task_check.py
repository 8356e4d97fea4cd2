"""The contract as a command: a good task passes, and each way of breaking it fails the check that it should."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kveval.byte_tokenizer import byte_tokenizer
from kveval.cli_task import app
from kveval.config import load_config
from kveval.errors import ExitCode
from kveval.prompting import PromptTemplate
from kveval.task_check import CHECKS, Asked, check_task
from kveval.tasks import TaskContext, load_task

GOOD = """
from __future__ import annotations
from kveval.tasks import Sample, TaskContext, TaskParams, make_sample, seeded_random
VERSION = 1
class Params(TaskParams):
    digits: int = 6
def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    made = []
    for index in range(ctx.samples):
        rng = seeded_random(ctx, "mine", index)
        number = str(rng.randrange(10 ** (params.digits - 1), 10**params.digits))
        needle = ctx.prompt.encode(f" The code is {number}.")
        tail, answer = ctx.prompt.tail_and_answer("\\n\\nWhat is the code?", "The code is", number)
        room = ctx.context_length - len(ctx.prompt.head_ids) - len(tail) - ctx.answer_room(len(answer))
        filler = ctx.prompt.encode(" word" * room)[: room - len(needle)]
        depth = rng.random() * len(filler) / room
        cut = int(depth * room)
        prompt = ctx.prompt.head_ids + filler[:cut] + needle + filler[cut:] + tail
        made.append(make_sample(ctx, index, prompt, answer, cluster=f"mine-{index // 2}", depth=depth,
                                metadata={"needle": f"The code is {number}."}, references=(number,)))
    return made
"""

BROKEN = [
    ("makes its samples", ("range(ctx.samples)", "range(3)"), "3 samples instead of 4 at 512 tokens"),
    ("makes its samples", ("VERSION = 1", "VERSION = 1\nMISSING = {}\n"), None),
    ("makes its samples", ("str(rng", "MISSING(rng"), r"NameError: name 'MISSING' .*mine\.py line 11"),
    (
        "fits the context length",
        ("filler[cut:] + tail", "filler[cut + 1:] + tail"),
        "sample 0 at 512 .* has 511 tokens",
    ),
    ("unique ids, in order", ("ctx, index, prompt", "ctx, 0, prompt"), "indices at 512 tokens"),
    ("clusters lie together", ("index // 2", "index % 2"), "mine-0, mine-1, mine-0"),
    ("runs in both modes", ("references=(number,)", "references=()"), "in mode generate: .*no references"),
    ("runs in both modes", ("VERSION = 1", "VERSION = 1\nMAX_NEW_TOKENS = 2"), "doesn't fit into max_new_tokens"),
    ("same seed, same samples", ('seeded_random(ctx, "mine", index)', '__import__("random")'), "a second call at 512"),
    (
        "same in other processes",
        ('"mine", index', '"mine", hash("mine") + index'),
        "PYTHONHASHSEED=1 the samples are others",
    ),
    ("number changes no sample", ('"mine", index', '"mine", index + ctx.samples'), "the first 1 of 4 samples"),
    (
        "seed changes samples",
        ('rng = seeded_random(ctx, "mine", index)', "rng = __import__('random').Random(index)"),
        "0",
    ),
    ("no special tokens", ("filler[:cut] +", "filler[:cut][:-1] + ctx.prompt.head_ids[:1] +"), r"beside.*<\|bos\|>"),
    ("metadata is JSON", ('metadata={"needle"', 'metadata={"x": {1}, "needle"'), "no JSON: .*set is not"),
    ("needle once, at its depth", ("depth=depth", "depth=1 - depth"), r"says depth 0\.\d+, and has 'The code is"),
    ("needle once, at its depth", ('f"The code is {number}."', 'f"The key is {number}."'), "its needle 0 times"),
    ("right answer scores 1", ("references=(number,)", 'references=(number, "9")'), r"scores 0\.5 for its own answer"),
    ("right answer scores 1", ("VERSION = 1", "VERSION = 1\nSTOP = ('1', '2', '3', '4', '5')"), "cut by a stop string"),
    (
        "empty answer scores 0",
        ("VERSION = 1", "VERSION = 1\ndef score(params, sample, text): return {'task_score': 1.0}"),
        "scores 1 for an empty answer",
    ),
    (
        "made in time",
        ("made = []", "__import__('time').sleep(2.1 * (ctx.samples == 1)); made = []"),
        "1024 tokens takes 2.",
    ),
]


def write(folder: Path, edit: tuple[str, str] = ("", "")) -> Path:
    text = GOOD.replace(*edit) if edit[0] else GOOD
    assert not edit[0] or text != GOOD, "the edit changes nothing"
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def found(path: Path, *, only: str | None = None, monkeypatch=None) -> dict[str, tuple[str, str]]:
    if only is not None:
        chosen = {name: check for name, check in CHECKS.items() if name in ("makes its samples", only)}
        monkeypatch.setattr("kveval.task_check.CHECKS", chosen)
    findings = check_task(Asked(str(path), lengths=(512, 1024), samples=4))
    return {finding.check: (finding.status, finding.detail) for finding in findings}


def without(monkeypatch, *names: str) -> None:
    """Leave out the checks that start processes or look at a clock, where others are tested."""
    monkeypatch.setattr("kveval.task_check.CHECKS", {n: check for n, check in CHECKS.items() if n not in names})


def test_a_good_task_passes(tmp_path):
    outcome = found(write(tmp_path))
    assert list(outcome) == ["loads", *CHECKS]
    assert [name for name, (status, _) in outcome.items() if status != "pass"] == ["longer passages nest"]
    assert outcome["loads"][1] == "mine, version 1; 4 samples each at 512 and 1,024 tokens"


@pytest.mark.parametrize(("check", "edit", "message"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_broken_fails_its_check(tmp_path, monkeypatch, check, edit, message):
    status, detail = found(write(tmp_path, edit), only=check, monkeypatch=monkeypatch)[check]
    assert status == ("pass" if message is None else "fail"), detail
    assert re.search(message or "", detail), detail


def test_every_check_is_seen_to_fail():
    seen = {check for check, _, message in BROKEN if message}
    assert set(CHECKS) - seen == {"longer passages nest"}


def test_passages_that_do_not_nest(tmp_path, monkeypatch):
    edit = ("VERSION = 1", "VERSION = 1\nPASSAGE = True")
    outcome = found(write(tmp_path, edit), only="longer passages nest", monkeypatch=monkeypatch)
    assert outcome["longer passages nest"] == ("fail", "sample 0 at 1024 tokens doesn't begin with that at 512")


def test_a_file_that_does_not_load(tmp_path):
    (tmp_path / "mine.py").write_text("VERSION = 1\n")
    assert found(tmp_path / "mine.py") == {
        "loads": (
            "fail",
            "mine.py defines no Params, samples. A task file needs VERSION, class Params(TaskParams) and "
            "samples(params, ctx).",
        )
    }


def test_checks_end_where_there_are_no_samples(tmp_path):
    outcome = found(write(tmp_path, ("range(ctx.samples)", "range(3)")))
    assert list(outcome) == ["loads", "makes its samples"]


@pytest.mark.parametrize(
    ("name", "params"), [("niah_single", {}), ("perplexity", {"scored_tokens": 64}), ("variable_tracking", {})]
)
def test_bundled_tasks_pass(name, params, monkeypatch):
    without(monkeypatch, "same in other processes", "made in time")
    findings = check_task(Asked(name, params, lengths=(1024, 4096), samples=4))
    assert [f for f in findings if f.status == "fail"] == []
    assert name != "niah_single" or findings[-3].status == "pass"


def test_traffic_passes_with_turns_of_every_role(tmp_path, monkeypatch):
    without(monkeypatch, "same in other processes")
    turns = [("system", "Be brief."), ("user", "Hello."), ("assistant", "Yes?"), ("user", "How many, <|end|>?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    lines = [{"messages": messages[n % 2 :], "answer": f"{n} of them"} for n in range(8)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = Asked("traffic", {"file": str(tmp_path / "r.jsonl")}, lengths=(512,), samples=4)
    assert [f for f in check_task(asked) if f.status == "fail"] == []


def test_the_command_prints_a_line_per_check(tmp_path, monkeypatch):
    without(monkeypatch, "same in other processes")
    path = write(tmp_path, ("index // 2", "index % 2"))
    call = ["check", str(path), "--lengths", "512,1k", "--samples", "4", "--set", "digits=5"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == ExitCode.FAIL
    assert "FAIL  clusters lie together      a cluster's samples don't follow one another" in result.stdout
    assert "pass  unique ids, in order\n" in result.stdout
    assert len(result.stdout.splitlines()) == len(CHECKS)
    as_json = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    assert [f["check"] for f in as_json if f["status"] == "fail"] == ["clusters lie together", "runs in both modes"]


def test_the_command_takes_a_models_tokenizer(tmp_path, tiny_model):
    result = CliRunner().invoke(
        app, ["check", str(write(tmp_path)), "--model", str(tiny_model), "--lengths", "512", "--samples", "2"]
    )
    assert result.exit_code == 0, result.stdout


def test_the_byte_tokenizer_spells_any_text():
    prompt = PromptTemplate.from_tokenizer(byte_tokenizer())
    text = "Ünïcode, <|end|> 漢字\n\n\x00 \U0001f600"
    ids = prompt.encode(text)
    assert prompt.tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert prompt.tokenizer.decode(prompt.head_ids) == "<|bos|><|user|>\n"


def tutorial(language: str) -> list[str]:
    text = (Path(__file__).parent.parent / "docs" / "tutorial" / "custom-task.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for found, block in blocks if found == language]


def test_the_tutorial_shows_what_its_task_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ledger.py").write_text(tutorial("python")[0], encoding="utf-8")
    command, printed = tutorial("")[0].split("\n", 1)
    assert command == "$ kveval task check ledger.py"
    assert CliRunner().invoke(app, command.split()[3:]).stdout == printed
    (tmp_path / "sweep.yaml").write_text(tutorial("yaml")[0], encoding="utf-8")
    tasks = [load_task(entry.name, entry.params) for entry in load_config("sweep.yaml").tasks]
    assert [(task.stop, task.max_new_tokens) for task in tasks] == [(("\n",), 16)] * 2


def test_the_tutorials_task_scores_near_answers(tmp_path):
    (tmp_path / "ledger.py").write_text(tutorial("python")[0], encoding="utf-8")
    task = load_task(str(tmp_path / "ledger.py"))
    prompt = PromptTemplate.from_tokenizer(byte_tokenizer())
    (sample,) = task.samples(TaskContext(prompt.tokenizer, prompt, 1024, 1, 0))
    right = int(sample.references[0])
    assert task.score_text(sample, f"{right} coins").task_score == 1.0
    assert task.score_text(sample, f"{right * 3}").task_score == 0.0
    assert 0.5 < task.score_text(sample, f"about {right - 1}").task_score < 1.0
