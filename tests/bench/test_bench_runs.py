"""A benchmark from what was asked for to its record, on a CPU, through the ops' references."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kveval import cli
from kveval.bench import append, bench, caches, decode, references
from kveval.bench.append import count_launches
from kveval.bench.bench import ON_A_CPU, Asked, run_bench
from kveval.bench.caches import make_caches, random_query
from kveval.bench.model_steps import OWN_CACHE, measure_model
from kveval.bench.record import read_bench
from kveval.bench.shapes import WHAT, Case, parse_schemes, parse_shapes
from kveval.bench.timers import WallTimer
from kveval.bench.warm import variants_of
from kveval.config import ModelConfig
from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.spec import get_scheme
from kveval.kernels.append import append_cuda
from kveval.kernels.decode import decode_cuda
from kveval.kernels.launcher import use_launcher
from kveval.models import load

CPU = torch.device("cpu")
(SHAPE,) = parse_shapes("4/1/64/3")


class Turns:
    """A timer that runs every call once and gives the times it was told, by name."""

    device = CPU

    def __init__(self, us: dict[str, list[float]] | None = None) -> None:
        self.us = us or {}
        self.seen: list[dict[str, int]] = []

    def microseconds(self, rounds, replays):
        self.seen.append({name: len(calls) for name, calls in rounds.items()})
        for calls in rounds.values():
            for call in calls:
                call()
        return {name: self.us.get(name, [10.0] * replays) for name in rounds}

    def direct(self, call, repeats):
        call()
        return self.us.get("copy", [10.0] * repeats)

    def milliseconds(self, step, repeats):
        for call in step.values():
            for _ in range(repeats + 1):
                call()
        return {name: [2.0] * repeats for name in step}


def asked(schemes: str, **changes) -> Asked:
    plain = Asked(parse_schemes(schemes), (SHAPE,), (64, 100), (1, 2), WHAT, 3)
    return replace(plain, **changes)


def test_everything_that_was_asked_for_is_in_the_record():
    timer = Turns({"nvfp4": [2.0, 4.0, 5.0], "bf16": [8.0, 8.0, 20.0]})
    said: list[str] = []
    found = run_bench(asked("nvfp4,kivi2"), CPU, timer=timer, report=said.append)
    assert [(r.batch, r.length, r.scheme) for r in found.decode] == [
        (batch, length, name) for batch in (1, 2) for length in (64, 100) for name in ("bf16", "nvfp4")
    ]
    row = found.decode[-1]
    assert row.bytes_read == 2 * (1 * 100 * 2 * (32 + 4) + 4 * 64 * 2)
    assert (row.us.median, row.us.min, row.us.max, row.us.n) == (4.0, 2.0, 5.0, 3)
    assert row.speedup_to_bf16.median == 4.0  # of 8 / 2, 8 / 4, 20 / 5
    assert row.gb_per_s.median == pytest.approx(row.bytes_read / 4e3)
    assert row.of_copy.median == pytest.approx(row.gb_per_s.median / found.copy.gb_per_s.median)
    assert row.speedup_to_sdpa.min == 2.0
    assert row.loads_us is row.widening is row.speedup_to_flashinfer is None
    assert {r.scheme for r in found.append} == {r.scheme for r in found.steps} == {"bf16", "nvfp4"}
    assert {(r.layers, r.eager_ms.median, r.graph_ms) for r in found.steps} == {(3, 2.0, None)}
    reasons = {left.what: left.reason for left in found.left_out}
    assert "no element uint2" in reasons["kivi2 at 4/1/64/3"]
    assert reasons["flashinfer"] == "FlashInfer needs a GPU."
    assert found.caveat == ON_A_CPU
    assert "decode: 4/1/64/3, batch 2, 100 tokens" in said


def test_schemes_of_a_case_are_timed_together():
    timer = Turns()
    run_bench(asked("nvfp4,k8v4", lengths=(64,), batches=(1,), what=("decode",)), CPU, timer=timer)
    assert {"bf16", "nvfp4", "k8v4", references.SDPA} == set(timer.seen[-1])


def test_a_gpu_without_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "missing", lambda device: "no driver.")
    with pytest.raises(UnsupportedError, match="no driver"):
        run_bench(asked("nvfp4"), torch.device("cuda", 0))


def test_loads_are_held_against_the_whole_kernel():
    case = Case(SHAPE, 1, 64)
    us = {"bf16": [8.0, 8.0], "nvfp4": [4.0, 5.0], decode._loads("nvfp4"): [3.0, 4.0], references.SDPA: [9.0, 9.0]}
    row = decode._row(case, "nvfp4", 1000, us, copy_gb_per_s=1.0)
    assert (row.loads_us.median, row.widening.min, row.widening.max) == (3.5, pytest.approx(0.2), 0.25)


def test_attention_that_is_not_finite_is_no_measurement(monkeypatch):
    real = make_caches

    def poisoned(scheme, case, device, generator, **options):
        made = real(scheme, case, device, generator, **options)
        made[0].value.codes.fill_(0xFF)
        return made

    monkeypatch.setattr(decode, "make_caches", poisoned)
    with pytest.raises(MeasurementError, match=r"bf16 .* NaN"):
        run_bench(asked("fp8_e4m3", what=("decode",)), CPU, timer=Turns())


ALL = [s for s in parse_schemes("all") if not caches.decode_misfit(s, 64)]


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.name)
def test_random_caches_are_like_real_ones(scheme):
    case = Case(SHAPE, 2, 100)
    made = make_caches(scheme, case, CPU, torch.Generator().manual_seed(0))
    assert len(made) == 2
    query = random_query(case, CPU, torch.Generator().manual_seed(1))
    (first, _), (second, lse) = (cache.decode(query)() for cache in made)
    assert first.shape == (2, 1, 4, 64)
    assert torch.isfinite(second).all()
    # Scores of normal keys and queries spread by about one: log of 100 tokens, and half a variance.
    assert lse.mean() == pytest.approx(5.1, abs=0.5)
    bits = made[0].key.codes[:, :, :100].flatten().unique().numel()
    assert bits > 50
    vector = scheme.key.token_bytes(64) + scheme.value.token_bytes(64)
    assert made[0].bytes_read == 2 * 100 * vector


def test_caches_exceed_the_l2_cache_several_times(monkeypatch):
    class Properties:
        L2_cache_size = 50 * 2**20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    gpu, scheme = torch.device("cuda", 0), get_scheme("bf16")
    (llama,) = parse_shapes("llama-8b")
    one = 1024 * 8 * 512
    count = caches._count(scheme, Case(llama, 1, 1024), gpu)
    assert 4 * Properties.L2_cache_size < count * one < 5 * Properties.L2_cache_size
    assert caches._count(scheme, Case(llama, 4, 131072), gpu) == 2


@pytest.mark.parametrize("form", ["_grouped", "_as_queries", "_expanded"])
def test_every_form_of_torchs_attention_computes_the_same(form):
    case = Case(parse_shapes("6/2/64")[0], 2, 100)
    generator = torch.Generator().manual_seed(0)
    cache = make_caches(get_scheme("bf16"), case, CPU, generator)[0]
    query = random_query(case, CPU, generator)
    ours = cache.decode(query)()[0].float()
    theirs = getattr(references, form)(cache, query)().float().reshape(2, 6, 64)
    assert torch.allclose(theirs, ours[:, 0], atol=0.02)


def test_the_fastest_form_is_the_one_that_is_compared():
    case = Case(parse_shapes("6/2/64")[0], 1, 64)
    generator = torch.Generator().manual_seed(0)
    made = make_caches(get_scheme("bf16"), case, CPU, generator)
    timer = Turns({"enable_gqa": [5.0] * 3, "heads as queries": [3.0, 9.0, 3.0], "expanded": [4.0] * 3})
    form, calls = references.fastest_sdpa(made, random_query(case, CPU, generator), timer)
    assert (form, len(calls)) == ("heads as queries", 2)


class Noting:
    """A launcher that notes what it is asked to launch."""

    def __init__(self) -> None:
        self.variants = []

    def launch(self, variant, **options):
        self.variants.append(variant)

    def multiprocessors(self, device):
        return 4

    def shared_limit(self, device):
        return 227 * 1024


def kernel_calls(scheme: str):
    """Append and attention through the host side of the kernels, on CPU tensors."""
    generator = torch.Generator().manual_seed(0)
    cache = make_caches(get_scheme(scheme), Case(SHAPE, 1, 16), CPU, generator)[0]
    query = random_query(cache.case, CPU, generator)
    k = torch.zeros(1, 1, 64, dtype=torch.bfloat16).view(1, 1, 1, 64)
    key, value = cache.key, cache.value
    return (
        lambda: append_cuda(
            k, k, *key.tensors, *value.tensors, torch.zeros(2, dtype=torch.int32), 0, 0, key.key, value.key
        ),
        lambda: decode_cuda(
            query, *key.tensors, *value.tensors, None, None, key.key, value.key, 16, 15, 0, 1.0, 0.0, query.dtype, 0
        ),
    )


def test_launches_of_an_append_are_counted():
    launcher = Noting()
    with use_launcher(launcher):
        assert count_launches(kernel_calls("k8v4")[0]) == 1
    assert [variant.entry for variant in launcher.variants] == ["append"]


def test_kernels_are_found_before_any_is_launched():
    launcher = Noting()
    with use_launcher(launcher):
        found = variants_of([*kernel_calls("nvfp4"), *kernel_calls("nvfp4"), kernel_calls("bf16")[1]])
    assert [variant.entry for variant in found] == ["append", "decode", "decode"]
    assert not launcher.variants


@pytest.mark.parametrize("case", [Case(SHAPE, 1, 16), Case(SHAPE, 3, 1000)], ids=str)
def test_a_hollow_cache_takes_the_kernels_of_a_full_one(case, monkeypatch):
    monkeypatch.setattr(caches.ops, "decode", decode_cuda)
    query = random_query(case, CPU, torch.Generator())
    full = make_caches(get_scheme("k8v4"), case, CPU, torch.Generator())[0]
    hollow = caches.hollow_cache(get_scheme("k8v4"), case, CPU)
    with use_launcher(Noting()):
        wanted, found = (
            variants_of([cache.decode(query), cache.decode(query, loads_only=True)]) for cache in (full, hollow)
        )
    assert wanted == found
    assert len(found) == 2


def test_the_bf16_copy_writes_what_append_would():
    case = Case(SHAPE, 2, append.ROWS)
    k, v = (torch.randn(2, 1, 1, 64).bfloat16() for _ in range(2))
    calls = append._copies(case, k, v)
    for call in calls:
        call()
    keys = calls[0].func.__closure__  # the two caches
    held = [cell.cell_contents for cell in keys if isinstance(cell.cell_contents, torch.Tensor)]
    written = [t for t in held if t.shape[2] == append.ROWS]
    assert sorted(float(t[:, :, : append.CALLS].float().sum()) for t in written) == pytest.approx(
        sorted(append.CALLS * float(x.float().sum()) for x in (k, v)), rel=1e-3
    )


def test_a_model_is_timed_with_every_cache(tiny_model):
    loaded = load(ModelConfig(id=str(tiny_model)), device="cpu")
    schemes = parse_schemes("nvfp4,q4_0")
    found = measure_model(loaded, schemes, (40, 5000), WallTimer(CPU), repeats=2, seed=0)
    assert [row.scheme for row in found.rows] == ["bf16", "nvfp4", "q4_0", OWN_CACHE]
    bf16, nvfp4, _, own = found.rows
    assert bf16.cache_bytes == 43 * 2 * 2 * 2 * 64  # layers, KV heads, keys and values
    assert nvfp4.cache_bytes < bf16.cache_bytes / 3
    assert (bf16.speedup_to_bf16, bf16.peak_bytes, own.cache_bytes) == (1.0, None, None)
    assert nvfp4.attention_path.startswith("dequantize")
    assert "transformers" in own.attention_path
    assert [left.reason for left in found.left_out] == ["the model takes 4,096 tokens."]
    assert loaded.model.config._attn_implementation == "kveval"


def test_the_command(monkeypatch, capsys, tmp_path):
    out = tmp_path / "new" / "bench"
    words = ["bench", "--device", "cpu", "--shapes", "4/1/64/2", "--lengths", "64", "--schemes", "nvfp4,kivi2"]
    monkeypatch.setattr("sys.argv", ["kveval", *words, "--replays", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    printed, said = capsys.readouterr()
    assert not stopped.value.code
    assert "mean nothing about GPUs" in " ".join(printed.split())
    assert f"Wrote {out / 'bench.json'}" in said
    record = read_bench(out / "bench.json")
    assert [row.scheme for row in record.decode] == ["bf16", "nvfp4"]
    assert {file.name for file in out.iterdir()} == {
        "bench.json",
        *(f"bench_4-1-64-2.{e}" for e in ("svg", "png", "csv")),
    }
    assert json.loads((out / "bench.json").read_text())["kernel_hash"]
