"""Scored answers per minute, of BF16 and eight schemes: kveval against lm-eval's own way of asking a model.

lm-eval's HFLM takes each question of its RULER task `niah_single_1` by itself: it prefills the whole prompt and writes
the answer. It has no cache formats, so what it scores is one scheme, and each more would take as long again. kveval
prefills a haystack of `niah_multikey` once for each scheme, and feeds the answers of its eight questions. A sweep also
runs controls and compares with the baseline, which is not timed here.

    pip install -e '.[bench,lm-eval]'
    python benchmarks/tasks.py --length 1k --out results/benchmarks/tasks_1k.json

Both sides have the same model, dtype, context length and number of questions, and take turns: a question of lm-eval's,
a scheme of kveval's. Making the samples is not timed. With `--haystacks` and `--batch-size`, kveval also runs as many
haystacks in batches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kveval import env
from kveval.attention import ATTENTION
from kveval.backends.hf import HFBackend
from kveval.config import ModelConfig, parse_length
from kveval.formats.spec import get_scheme
from kveval.models import LoadedModel, load, resolve
from kveval.plan import Arm
from kveval.prefixes import plan_batch
from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, TaskContext, load_task

SCHEMES = ("fp8_e4m3", "int8_per_token_head", "mxfp8", "k8v4", "k4v8", "int4_g64", "nvfp4", "mxfp4")
LM_EVAL_TASK = "niah_single_1"


def main() -> None:
    """Run the benchmark, print the ratio, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", default="1k", type=parse_length, help="context length in tokens")
    parser.add_argument("--questions", default=8, type=int, help="about one haystack on kveval's side")
    parser.add_argument("--haystacks", default=1, type=int, help="on kveval's side, each with as many questions")
    parser.add_argument("--batch-size", default=1, type=int, help="haystacks that kveval runs as one batch")
    parser.add_argument("--max-gen-toks", type=int, help="of lm-eval's answers; its task says 128")
    parser.add_argument("--out", type=Path, help="where to write the record (JSON)")
    options = parser.parse_args()
    loaded = load(ModelConfig(id=options.model))
    backend = HFBackend(loaded)
    arms = [Arm(name, "scheme", get_scheme(name), 2048, "stored") for name in ("bf16", *SCHEMES)]
    clusters, requests, harness = haystacks(loaded, options), *lm_eval_side(loaded, options)
    score(backend, clusters[:1], arms[0], size=1)  # both sides warm
    ask(backend, harness, requests[:1])
    seconds = dict.fromkeys(("lm-eval", *(name for name, _ in kveval_sides(options))), 0.0)
    for turn in range(max(len(arms), len(requests))):
        if turn < len(requests):
            seconds["lm-eval"] += ask(backend, harness, requests[turn : turn + 1])
        if turn < len(arms):
            for name, size in kveval_sides(options):
                seconds[name] += score(backend, clusters, arms[turn], size=size)
    report(options, len(arms), clusters, requests, loaded, seconds)


def kveval_sides(options: argparse.Namespace) -> list[tuple[str, int]]:
    """How kveval runs: a name, and the haystacks that run as one batch."""
    batched = [(f"kveval, batches of {options.batch_size}", options.batch_size)] if options.batch_size > 1 else []
    return [("kveval", 1), *batched]


def haystacks(loaded: LoadedModel, options: argparse.Namespace) -> list[list[Sample]]:
    """The questions about each haystack of the asked length."""
    task = load_task("niah_multikey", {"keys": options.questions, "queries": options.questions})
    template = PromptTemplate.from_tokenizer(loaded.tokenizer)
    count = options.haystacks * options.questions
    samples = task.samples(TaskContext(loaded.tokenizer, template, options.length, count, seed=0))
    return [samples[at : at + options.questions] for at in range(0, count, options.questions)]


def lm_eval_side(loaded: LoadedModel, options: argparse.Namespace) -> tuple[list[Any], Any]:
    """lm-eval's requests, as many as there are questions, and its model class around the same weights."""
    with tempfile.TemporaryDirectory() as data:
        # The task looks for data of nltk's that it does not use, and would fetch it.
        (Path(data) / "tokenizers" / "punkt_tab").mkdir(parents=True)
        os.environ["NLTK_DATA"] = data
        import lm_eval.tasks
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        folder = Path(lm_eval.tasks.__file__).parent / "ruler"
        pretrained = str(resolve(ModelConfig(id=options.model)).location)
        about = {"pretrained": pretrained, "max_seq_lengths": [options.length]}
        manager = TaskManager(include_path=[str(folder)], include_defaults=False, metadata=about)
        task = manager.load([LM_EVAL_TASK])["tasks"][LM_EVAL_TASK]
        task.build_all_requests(limit=options.questions)
    requests = list(task.instances)
    if options.max_gen_toks:
        for request in requests:
            request.args[1]["max_gen_toks"] = options.max_gen_toks
    harness = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, max_length=2 * options.length)
    return requests, harness


def ask(backend: HFBackend, harness: Any, requests: list[Any]) -> float:
    """Seconds that lm-eval takes for the requests, with torch's own attention and transformers' own cache."""
    backend.loaded.model.set_attn_implementation("sdpa")
    start = time.perf_counter()
    harness.generate_until(requests, disable_tqdm=True)
    seconds = time.perf_counter() - start
    backend.loaded.model.set_attn_implementation(ATTENTION)
    return seconds


@torch.inference_mode()
def score(backend: HFBackend, clusters: list[list[Sample]], arm: Arm, *, size: int) -> float:
    """Seconds that kveval takes for all questions on one scheme, `size` haystacks at a time."""
    start = time.perf_counter()
    batches = [clusters[at : at + size] for at in range(0, len(clusters), size)]
    outputs = [output for batch in batches for output in backend.score(batch, arm, {})]
    assert len(outputs) == sum(map(len, clusters))
    return time.perf_counter() - start


def report(
    options: argparse.Namespace,
    arms: int,
    clusters: list[list[Sample]],
    requests: list[Any],
    loaded: LoadedModel,
    seconds: dict[str, float],
) -> None:
    """Print all sides; write them with the machine they were taken on."""
    scored = sum(map(len, clusters))
    answers = {side: len(requests) if side == "lm-eval" else arms * scored for side in seconds}
    sizes = dict(kveval_sides(options))
    fed = {side: sum(_fed(clusters[at : at + n]) for at in range(0, len(clusters), n)) for side, n in sizes.items()}
    asked = [len(loaded.tokenizer(request.args[0])["input_ids"]) for request in requests]
    prefilled = {"lm-eval": sum(asked) / len(asked)} | {side: count / scored for side, count in fed.items()}
    per_minute = {side: 60 * answers[side] / seconds[side] for side in seconds}
    record = {
        "model": options.model,
        "device": str(loaded.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "context_length": options.length,
        "questions": options.questions,
        "haystacks": options.haystacks,
        "schemes": ["bf16", *SCHEMES],
        "lm_eval_task": LM_EVAL_TASK,
        "max_gen_toks": options.max_gen_toks or "the task's",
        "answers": answers,
        "seconds": seconds,
        "prefill_tokens_per_answer": prefilled,
        "answers_per_minute": per_minute,
        "ratio": {side: rate / per_minute["lm-eval"] for side, rate in per_minute.items() if side != "lm-eval"},
        "env": env.collect(),
    }
    for side, rate in per_minute.items():
        ratio = "" if side == "lm-eval" else f", {record['ratio'][side]:.1f}x"
        how = "written" if side == "lm-eval" else "fed"
        fed_each = f"{how}, {prefilled[side]:8.1f} prefill tokens each"
        sys.stdout.write(f"{side:22} {rate:8.1f} answers per minute, {fed_each}{ratio}\n")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _fed(batch: list[list[Sample]]) -> int:
    """Tokens of prompts that are fed for the questions of a batch."""
    prompts = [[sample.prompt_ids for sample in cluster] for cluster in batch]
    rounds = plan_batch(prompts, together=True).rounds
    rests = sum(len(cluster[i]) - r.start for cluster in prompts for r in rounds for i in r.questions)
    return len(batch) * rounds[-1].start + rests


if __name__ == "__main__":
    main()
