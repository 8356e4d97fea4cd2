from __future__ import annotations

import pytest

from kveval.config import SweepConfig
from kveval.errors import ConfigError, LengthError, UnsupportedError
from kveval.formats.scales import StaticScales
from kveval.formats.spec import build_scheme, get_scheme
from kveval.geometry import LayerGeometry
from kveval.models import ModelInfo
from kveval.plan import TaskPlan, build_plan, settle_scales

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
        {"attention": "packed"},
        {"attention": "dequant"},
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
                "element": "uint4",
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


def test_plans_that_say_nothing_of_attention_keep_their_names():
    """They were made before there was a choice; published results go by these names."""
    plan = make()
    assert plan.to_dict()["plan_digest"] == "759df46c5b671f2e"
    assert (ids(plan)["bf16", 512], ids(plan)["crush", 1024]) == ("6f8adfa852ed6b01", "955117485f8c41e5")
    assert make(attention="auto").to_dict() == plan.to_dict()
    digests = {make(attention=mode).to_dict()["plan_digest"] for mode in ("auto", "packed", "dequant")}
    assert len(digests) == 3


def test_the_controls_run_whatever_attention_is_asked_for():
    """A/A decodes first, to show what kernels add by rounding; nothing reads crush packed."""
    for mode, crush in (("auto", "auto"), ("packed", "auto"), ("dequant", "dequant")):
        arms = {arm.role: arm.attention for arm in make(attention=mode).arms}
        assert arms == {"baseline": mode, "aa": "dequant", "scheme": mode, "crush": crush}


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


PER_TENSOR = StaticScales(source="scales.json", key={0: (0.5,)}, value={0: (0.25,)})
PER_HEAD = StaticScales(source="scales.json", key={0: (0.5, 0.6)}, value={0: (0.25, 0.26)})


def scheme(extends: str, scales=None, **more):
    return build_scheme("mine", {"extends": extends, "scales": scales, **more})


def settle(*schemes, carried=None, layers=(LAYER,)):
    """The schemes of a sweep once they are settled on a model whose checkpoint carries `carried`."""
    config = SweepConfig.model_validate({**CONFIG, "schemes": list(schemes)})
    return settle_scales(config, layers, "w", lambda: carried).schemes


def never():
    raise AssertionError("the checkpoint was read")


def test_schemes_without_scales_leave_the_checkpoint_unread():
    config = SweepConfig.model_validate({**CONFIG, "schemes": ["nvfp4", "k8v4", scheme("fp8_e4m3", "none")]})
    assert settle_scales(config, (LAYER,), "w", never).schemes == config.schemes
    given = SweepConfig.model_validate({**CONFIG, "schemes": [scheme("fp8_e4m3", PER_TENSOR)]})
    assert settle_scales(given, (LAYER,), "w", never).schemes == given.schemes


def test_scales_of_the_checkpoint_become_numbers():
    (settled,) = settle(scheme("fp8_e4m3", "checkpoint"), carried=PER_TENSOR)
    assert settled.scales == PER_TENSOR
    assert settled.identity()["scales"] == PER_TENSOR.digest


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "turboquant_k8v4"])
def test_scales_that_the_checkpoint_carries_are_not_passed_over(name):
    with pytest.raises(ConfigError, match=f"{name}: the model's checkpoint carries scales") as caught:
        settle("nvfp4", name, carried=PER_TENSOR)
    assert f"{{name: my_{name}, extends: {name}, scales: checkpoint}}" in caught.value.remedy
    assert "scales: none" in caught.value.remedy
    assert settle(scheme(name, "none"), carried=PER_TENSOR)[0].scales == "none"
    assert settle(name)[0] == get_scheme(name)


def test_a_checkpoint_without_scales_has_none_to_take():
    with pytest.raises(ConfigError, match=r"mine: `scales: checkpoint`, but .* carries no scales") as caught:
        settle(scheme("fp8_e4m3", "checkpoint"))
    assert "kveval calibrate" in caught.value.remedy


@pytest.mark.parametrize("scales", [None, "none"])
def test_a_scheme_that_needs_scales_is_refused_before_the_model_loads(scales):
    with pytest.raises(ConfigError, match="mine: this scheme stores with calibrated scales and has none") as caught:
        settle(scheme("fp8_per_head", scales))
    assert "kveval calibrate" in caught.value.remedy


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (scheme("fp8_per_head", PER_TENSOR), "have 1 key scales for layer 0; per_head takes 2"),
        (scheme("fp8_e4m3", PER_HEAD), "have 2 key scales for layer 0; per_tensor takes 1"),
        (scheme("fp8_e4m3", PER_TENSOR.model_copy(update={"value": {1: (1.0,)}})), "no value scale for layer 0"),
        (scheme("fp8_e4m3", PER_TENSOR.model_copy(update={"weights_digest": "x"})), "calibrated on another model"),
        (scheme("fp8_e5m2", PER_TENSOR.model_copy(update={"element": "e4m3"})), "are for e4m3, .* stores e5m2"),
        (scheme("fp8_e4m3", skip_layers=["first:2"]), "skip_layers: 'first:2' asks for 2 of 1 layers"),
        (scheme("fp8_e4m3", layers=[{"layers": ["sliding"], "both": "bf16"}]), "no layer of this model"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(entry, message):
    with pytest.raises(ConfigError, match=f"^mine: .*{message}"):
        settle(entry)


def test_scales_of_this_model_and_element_are_taken():
    known = PER_HEAD.model_copy(update={"weights_digest": "w", "element": "e4m3"})
    assert settle(scheme("fp8_per_head", known))[0].scales == known


def test_a_head_size_that_a_format_cannot_store_is_refused_with_its_scheme():
    narrow = LayerGeometry(kind="full", kv_heads=2, head_dim_k=80, head_dim_v=80)
    with pytest.raises(UnsupportedError, match=r"^q8_0: .* 80 "):
        settle("q8_0", layers=(narrow,))


def test_the_digest_of_the_scales_is_in_the_cells_and_the_plan():
    others = PER_TENSOR.model_copy(update={"key": {0: (0.75,)}})
    plans = [make(schemes=[scheme("fp8_e4m3", s), "nvfp4"]) for s in (None, PER_TENSOR, others)]
    before, given, other = (ids(plan) for plan in plans)
    for length in (512, 1024):
        assert len({cells["mine", length] for cells in (before, given, other)}) == 3
        assert len({cells["nvfp4", length] for cells in (before, given, other)}) == 1
    assert len({plan.to_dict()["plan_digest"] for plan in plans}) == 3
    renamed = PER_TENSOR.model_copy(update={"source": "elsewhere.json"})
    assert ids(make(schemes=[scheme("fp8_e4m3", renamed), "nvfp4"])) == given


def test_scales_of_a_layer_that_is_not_there_are_refused():
    numbers = {0: (1.5,), 77: (1.5,)}
    with pytest.raises(ConfigError, match="name layer 77; the model has layers 0 to 0"):
        settle(scheme("fp8_e4m3", StaticScales(source="f", key=numbers, value=numbers)))
