"""Samples scored per minute: kveval's sweep against the plain way, on the same samples, model and machine.

The plain way takes each question by itself: prefill its whole prompt into transformers' own quantized cache
(optimum-quanto, int4) and `generate` the answer. kveval prefills a haystack once, forks it for each question and
scores the answer in one forward over packed storage (int4_g64).

    pip install -e '.[bench]'
    python benchmarks/sweep.py --length 1k --haystacks 2 --queries 4 --out results/benchmarks/sweep.json

The two sides alternate haystack by haystack, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import QuantizedCache as TransformersQuantizedCache

from kveval import env
from kveval.attention import ATTENTION
from kveval.backends.hf import HFBackend
from kveval.config import ModelConfig, parse_length
from kveval.formats.spec import get_scheme
from kveval.models import LoadedModel, load
from kveval.plan import Arm
from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, TaskContext, load_task

SCHEME = "int4_g64"


def main() -> None:
    """Run the benchmark, print the ratio, and write the record."""
    options = parse_options()
    loaded = load(ModelConfig(id=options.model))
    backend = HFBackend(loaded)
    warm_up, *clusters = haystacks(loaded, options)
    sides = {"plain": answer_plainly, "kveval": score_with_kveval}
    for run in sides.values():
        run(backend, warm_up)
    seconds, exact = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0)
    for cluster in clusters:
        for side, run in sides.items():
            start = time.perf_counter()
            exact[side] += run(backend, cluster)
            seconds[side] += time.perf_counter() - start
    write_record(options, sum(map(len, clusters)), seconds, exact)


def parse_options() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", default="1k", type=parse_length, help="context length in tokens")
    parser.add_argument("--haystacks", default=2, type=int, help="haystacks that are timed")
    parser.add_argument("--queries", default=4, type=int, help="questions per haystack")
    parser.add_argument("--out", type=Path, help="where to write the record (JSON)")
    return parser.parse_args()


def haystacks(loaded: LoadedModel, options: argparse.Namespace) -> list[list[Sample]]:
    """One haystack to warm up and those that are timed, each with its questions."""
    task = load_task("niah_multikey", {"keys": options.queries, "queries": options.queries})
    count = (options.haystacks + 1) * options.queries
    template = PromptTemplate.from_tokenizer(loaded.tokenizer)
    samples = task.samples(TaskContext(loaded.tokenizer, template, options.length, count, seed=0))
    return [samples[i : i + options.queries] for i in range(0, count, options.queries)]


@torch.inference_mode()
def answer_plainly(backend: HFBackend, cluster: list[Sample]) -> int:
    """Each question by itself through transformers' quantized cache; how many answers come out exactly."""
    model = backend.loaded.model
    model.set_attn_implementation("sdpa")
    exact = 0
    for sample in cluster:
        cache = TransformersQuantizedCache("quanto", model.config, nbits=4)
        prompt = torch.tensor([sample.prompt_ids], device=backend.loaded.device)
        count = len(sample.answer_ids)
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            **{backend.cache_argument: cache},
        )
        exact += tuple(out[0, len(sample.prompt_ids) :].tolist()) == sample.answer_ids
    model.set_attn_implementation(ATTENTION)
    return exact


def score_with_kveval(backend: HFBackend, cluster: list[Sample]) -> int:
    """All questions of the haystack through packed storage; how many answers come out exactly."""
    arm = Arm(SCHEME, "scheme", get_scheme(SCHEME), prefill_chunk=2048, reads="stored")
    return sum(output.score.exact_match for output in backend.score([cluster], arm, {}))


def write_record(options: argparse.Namespace, samples: int, seconds: dict[str, float], exact: dict[str, int]) -> None:
    """Print samples per minute of both sides and their ratio; write them with the machine they were taken on."""
    per_minute = {side: 60 * samples / s for side, s in seconds.items()}
    record = {
        "model": options.model,
        "context_length": options.length,
        "samples": samples,
        "queries_per_haystack": options.queries,
        "samples_per_minute": per_minute,
        "ratio": per_minute["kveval"] / per_minute["plain"],
        "exact_answers": exact,
        "env": env.collect(),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(
        f"plain {per_minute['plain']:.1f}, kveval {per_minute['kveval']:.1f} samples per minute: "
        f"{record['ratio']:.1f}x\n"
    )


if __name__ == "__main__":
    main()
