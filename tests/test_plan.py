from __future__ import annotations

import pytest

from kveval.config import SweepConfig
from kveval.errors import ConfigError, LengthError
from kveval.formats.spec import build_scheme
from kveval.geometry import LayerGeometry
from kveval.models import ModelInfo
from kveval.plan import TaskPlan, build_plan

CONFIG = {
    "name": "sweep",
    "model": {"id": "m"},
    "schemes": ["fp8_e4m3", "nvfp4"],
    "tasks": ["niah_single", {"name": "perplexity", "samples": 2}],
    "context_lengths": [512, 1024],
    "samples": 4,
}
LAYER = LayerGeometry(kind="full", kv_heads=2, head_dim_k=64, head_dim_v=64)


def info(**changes):
    fields = {
        "id": "m", "revision": None, "source": "folder", "weights_digest": "w", "config_digest": "c",
        "template_digest": "t",
        "tokenizer_digest": "k", "max_context": 2048, "vocab_size": 100, "geometry": (LAYER,), "weights_bytes": 10,
        "compute_dtype": "float32", "has_chat_template": True,
    }  # fmt: skip
    return ModelInfo(**{**fields, **changes})


def tasks(config, *, version=1, params=None):
    return [
        TaskPlan(
            t.label,
            version,
            {"name": t.name, "version": version, "params": params or {}},
            passage=t.name == "perplexity",
        )
        for t in config.tasks
    ]


def make(model=None, task_changes=None, device="cpu", **changes):
    config = SweepConfig.model_validate({**CONFIG, **changes})
    return build_plan(config, model or info(), tasks(config, **(task_changes or {})), device=device)


def ids(plan, task="niah_single"):
    return {(c.arm.label, c.context_length): c.id for c in plan.cells if c.task == task}


def test_arms_and_order():
    plan = make()
    assert [(a.label, a.role) for a in plan.arms] == [
        ("bf16", "baseline"), ("bf16 (A/A)", "aa"), ("fp8_e4m3", "scheme"), ("nvfp4", "scheme"), ("crush", "crush"),
    ]  # fmt: skip
    assert len(plan.cells) == 2 * 2 * 5
    assert [c.samples for c in plan.cells] == [4] * 10 + [2] * 10
    assert len({c.id for c in plan.cells}) == 20


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_chunk": 1024},
        {"reads": "fresh_chunk"},
        {"seed": 1},
        {"model": info(weights_digest="x")},
        {"model": info(revision="x")},
        {"model": info(config_digest="x")},
        {"model": info(template_digest="x")},
        {"model": info(tokenizer_digest="x")},
        {"model": info(compute_dtype="bfloat16")},
        {"device": "cuda"},
        {"task_changes": {"version": 2}},
        {"task_changes": {"params": {"keys": 3}}},
    ],
    ids=str,
)
def test_what_affects_a_result_changes_its_cell_id(changes):
    before, after = ids(make()), ids(make(**changes))
    for cell in before:
        assert before[cell] != after[cell]


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 8},
        {"name": "other"},
        {"capacity": {"gpu": "l4-24gb"}},
        {"decode_tokens": 0},
        {"model": info(id="n", source="hub", weights_bytes=11)},
        {
            "gate": {
                "scheme": "nvfp4",
                "endpoints": [{"metric": "kl", "task": "niah_single", "context_length": 512, "margin": 1}],
            }
        },
        {"schemes": ["nvfp4", "fp8_e4m3"]},
        {"context_lengths": [512, 1024, 2048]},
    ],
    ids=str,
)
def test_what_does_not_affect_a_result_leaves_its_cell_id(changes):
    before, after = ids(make()), ids(make(**changes))
    assert {cell: after[cell] for cell in before} == before


def test_scheme_parameter_changes_only_that_schemes_cells():
    one = build_scheme(
        "mine",
        {
            "both": {
                "element": "int4",
                "granularity": "per_group",
                "group_size": 64,
                "scale_rule": "minmax",
                "scale_dtype": "bf16",
            }
        },
    )
    two = one.model_copy(update={"key": one.key.model_copy(update={"group_size": 32})})
    before = ids(make(schemes=[one, "nvfp4"]))
    after = ids(make(schemes=[two, "nvfp4"]))
    changed = {cell[0] for cell in before if before[cell] != after[cell]}
    assert changed == {"mine"}


def test_a_schemes_name_is_not_its_identity():
    named = build_scheme("other_name", {"key": "nvfp4", "value": "nvfp4"})
    before, after = ids(make()), ids(make(schemes=["fp8_e4m3", named]))
    assert after["other_name", 512] == before["nvfp4", 512]


def test_nested_documents_know_which_lengths_share_their_prefill():
    before = ids(make(), "perplexity")
    after = ids(make(context_lengths=[512, 1024, 2048]), "perplexity")
    assert all(before[cell] != after[cell] for cell in before)


def test_plan_digest_ignores_the_name_and_knows_the_gate():
    digest = make().to_dict()["plan_digest"]
    assert make(name="other").to_dict()["plan_digest"] == digest
    gate = {
        "scheme": "nvfp4",
        "endpoints": [{"metric": "kl", "task": "niah_single", "context_length": 512, "margin": 1}],
    }
    gated = make(gate=gate)
    assert gated.to_dict()["plan_digest"] != digest
    assert gated.gate_digest != make(gate={**gate, "confidence": 0.9}).gate_digest
    assert make().gate_digest is None


def test_length_beyond_the_model():
    with pytest.raises(LengthError, match="'niah_single' asks for 4096 tokens, but m takes at most 2048"):
        make(context_lengths=[4096])
    assert make(model=info(max_context=None), context_lengths=[4096]).cells


def test_one_measurement_under_two_names_is_refused():
    twin = build_scheme("twin", {"both": {"element": "e4m3", "granularity": "per_tensor", "scale_rule": "fixed"}})
    with pytest.raises(ConfigError, match="fp8_e4m3 on niah_single and twin on niah_single are the same measurement"):
        make(schemes=["fp8_e4m3", twin])
