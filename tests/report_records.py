"""Synthetic records of a sweep, shaped like the real ones: two retrieval tasks and perplexity, all arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from kveval.config import SweepConfig
from kveval.controls import ControlResult
from kveval.evaluate import sessions_of
from kveval.gate import Verdict
from kveval.geometry import LayerGeometry
from kveval.records import Record
from kveval.report.model import ReportData, build_report

LENGTHS = (512, 1024, 2048)
SCHEMES = ("fp8_e4m3", "k8v4", "k4v8", "nvfp4", "mxfp4", "int4_g64")
EFFECT = {  # added nats per answer token at 2k; shorter contexts lose less
    "bf16": 0.0,
    "bf16 (A/A)": 0.0,
    "fp8_e4m3": 0.004,
    "k8v4": 0.012,
    "k4v8": 0.09,
    "nvfp4": 0.1,
    "mxfp4": 0.16,
    "int4_g64": 0.13,
    "crush": 5.5,
}
BITS = {
    "fp8_e4m3": 8,
    "k8v4": 6.5,
    "k4v8": 6.5,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "int4_g64": 4.5,
    "crush": 2,
}
TASKS = {"niah_multikey": 0.12, "passkey_chain": 0.5, "perplexity": 2.6}


def role_of(scheme: str) -> str:
    return {"bf16": "baseline", "bf16 (A/A)": "aa", "crush": "crush"}.get(scheme, "scheme")


def make_records(
    *,
    samples: int = 64,
    lengths: tuple[int, ...] = LENGTHS,
    schemes: tuple[str, ...] = SCHEMES,
    seed: int = 0,
) -> pd.DataFrame:
    """A finished sweep. Effects grow with the context; crush dwarfs every other scheme."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for task, level in TASKS.items():
        for length in lengths:
            for index in range(samples):
                base = level * float(rng.lognormal(0.0, 0.5)) * (1 + 0.1 * np.log2(length / 512))
                for scheme in ("bf16", "bf16 (A/A)", *schemes, "crush"):
                    rows.append(_row(rng, task, length, index, scheme, base).to_dict())
    return pd.DataFrame(rows, columns=Record.columns())


def _row(rng: np.random.Generator, task: str, length: int, index: int, scheme: str, base: float) -> Record:
    retrieval = task != "perplexity"
    effect = EFFECT[scheme] * (length / 2048) ** 0.6 * (1.0 if retrieval else 0.35)
    if scheme in ("bf16",):
        change = 0.0
    elif scheme == "bf16 (A/A)":
        change = float(rng.normal(0, 2e-4))
    else:
        change = float(effect * rng.lognormal(0, 0.4) + rng.normal(0, 0.02 + 0.3 * effect))
    nll = max(1e-4, base + change)
    wide = 23_040
    per_token = wide * BITS.get(scheme, 16) / 16
    right = float(nll < (0.3 if task == "niah_multikey" else 0.8)) if retrieval else 0.0
    return Record(
        cell_id=f"{task}-{length}-{scheme}",
        sample_id=f"{task}-{length}-{index}",
        sample_index=index,
        cluster=f"{task}-{index // 4 if task == 'niah_multikey' else index}",
        task=task,
        task_version=1,
        scheme=scheme,
        role=role_of(scheme),  # type: ignore[arg-type]
        context_length=length,
        depth=(index % 5) / 5 + 0.1 + float(rng.uniform(-0.02, 0.02)) if task == "niah_multikey" else None,
        status="ok",
        n_prompt_tokens=length - 8,
        n_answer_tokens=8,
        answer_nll=nll,
        answer_nll_sum=nll * 8,
        exact_match=right,
        first_token_match=right,
        kl=abs(change) * 0.5 if scheme != "bf16" else 0.0,
        top1_flips=min(1.0, abs(change) * 0.4) if scheme != "bf16" else 0.0,
        token_nll=[nll] * 8,
        stored_bytes=int(per_token * length),
        payload_bytes=int(per_token * length),
        scale_bytes=0,
        constant_bytes=0,
        padding_bytes=0,
        wide_layer_bytes=0,
        billed_bytes=int(per_token * length),
        cache_tokens=length,
        packed_reads=30,
        attention_path="dequantize + torch sdpa",
        prefill_chunk=384 if scheme == "bf16 (A/A)" else 2048,
        reads="stored",
        compute_dtype="float32",
        prefill_s=length / 300,
        score_s=0.05,
        decode_s_per_token=0.03 + length * (4e-6 if scheme.startswith("bf16") else 9e-6) + float(rng.uniform(0, 2e-3)),
    )


def with_answers(
    records: pd.DataFrame, task: str, *, places: int = 0, finish: Sequence[str] = ("stop",)
) -> pd.DataFrame:
    """The same sweep with answers to `task` that the model wrote; `places` of each are scored one by one.

    Sample i ends as `finish[i % len(finish)]` says, at 32 tokens if it was cut.
    """
    written = records.copy()
    at = written["task"] == task
    nll = written.loc[at, "answer_nll"].astype(float)
    score = (4 * (1.2 - nll).clip(0, 1)).round() / 4
    ends = written.loc[at, "sample_index"].map(lambda i: finish[i % len(finish)])
    scores = {"task_score": score, "text_f1": 0.9 * score, "text_exact_match": (score == 1).astype(float)}
    scores |= {"edit_similarity": 0.5 + 0.5 * score, "accepted_prefix": score}
    for column, values in scores.items():
        written.loc[at, column] = values.where((ends != "thinking") | (column == "accepted_prefix"))
    written.loc[at, "finish_reason"] = ends
    written.loc[at, "n_generated_tokens"] = ends.map(lambda end: 20 if end == "stop" else 32)
    written.loc[at, "generated_text"] = "text"
    if places:
        fall = {i: [float(s * (1 - 0.5 * p / places) > 0.4) for p in range(places)] for i, s in score.items()}
        written["position_scores"] = pd.Series(fall, index=written.index, dtype=object)
    return written


def with_key_tokens(records: pd.DataFrame, task: str, counts: Sequence[int]) -> pd.DataFrame:
    """The same sweep with `task` scored by key tokens alone; sample i has `counts[i % len(counts)]` of them."""
    keyed = records.copy()
    at = keyed["task"] == task
    keyed.loc[at, "key_tokens"] = keyed.loc[at, "sample_index"].map(lambda i: counts[i % len(counts)])
    keyed.loc[at, ["exact_match", "first_token_match"]] = None
    keyed.loc[at & (keyed["key_tokens"] == 0), ["answer_nll", "answer_nll_sum", "kl", "top1_flips"]] = None
    return keyed


GATE: dict[str, Any] = {
    "scheme": "k8v4",
    "endpoints": [
        {"metric": "answer_nll", "task": "niah_multikey", "context_length": 2048, "margin": 0.1},
        {"metric": "answer_nll", "task": "passkey_chain", "context_length": 2048, "margin": 0.1},
    ],
}


def make_config(*, gate: dict[str, Any] | None = GATE, **changes: Any) -> SweepConfig:
    return SweepConfig.model_validate(
        {
            "name": "quickstart",
            "model": {"id": "smollm2-135m"},
            "schemes": list(SCHEMES),
            "tasks": list(TASKS),
            "context_lengths": list(LENGTHS),
            "samples": 64,
            "gate": gate,
            **changes,
        }
    )


def make_plan(config: SweepConfig | None = None, *, device: str = "cpu") -> dict[str, Any]:
    """The parts of a stored plan that a report reads: SmolLM2-135M's cache, 30 layers of 3 heads of 64."""
    layer = LayerGeometry(kind="full", kv_heads=3, head_dim_k=64, head_dim_v=64)
    return {
        "plan_digest": "0123456789abcdef",
        "config": (config or make_config()).model_dump(mode="json"),
        "model": {
            "id": "smollm2-135m",
            "revision": None,
            "weights_digest": "b179c9523d0e6a0f98a330c7562b6827",
            "geometry": [asdict(layer)] * 30,
            "weights_bytes": 269_060_552,
            "compute_dtype": "float32",
            "device": device,
        },
    }


ENV: dict[str, Any] = {
    "kveval": "0.1.0",
    "git": {"commit": "abcdef0123456789", "dirty": False},
    "python": "3.11.2",
    "platform": "Linux",
    "packages": {"torch": "2.13.0", "transformers": "5.24.0"},
    "cpu": {"model": "a CPU", "cores": 2, "ram_bytes": 8 * 2**30},
    "threads": 2,
    "cuda": None,
    "driver": None,
    "gpus": [],
}


def make_data(
    records: pd.DataFrame,
    config: SweepConfig,
    *,
    verdict: Verdict | None = None,
    controls: Sequence[ControlResult] = (),
    device: str = "cpu",
) -> ReportData:
    plan = make_plan(config, device=device)
    return build_report(
        records,
        plan,
        sessions=sessions_of(config, plan["model"]),
        controls=verdict.controls if verdict else controls,
        verdict=verdict,
        env=ENV,
    )
