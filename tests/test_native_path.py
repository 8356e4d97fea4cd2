"""How schemes run on a device: what is said of kernels and hardware, the note of it, and how reports show it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from report_records import make_config, make_data, make_records
from rich.console import Console

from kveval import kernel_use, native_path
from kveval.backends.hf import HFBackend
from kveval.bench.record import ShapeRow
from kveval.bench.shapes import SHAPES, Case
from kveval.errors import KernelError, StoreError
from kveval.files import to_json
from kveval.formats.spec import build_scheme, get_scheme
from kveval.geometry import LayerGeometry
from kveval.native_note import NOTE, NativePaths, Widening, read_native_paths
from kveval.native_path import generation, native_paths, note
from kveval.plan import Arm
from kveval.report.html import render_html
from kveval.report.native import native_rows, native_table

LAYER = LayerGeometry(kind="full", kv_heads=8, head_dim_k=128, head_dim_v=128)
GPU = torch.device("cuda", 0)
MEASURED = Widening(0.125, 80.0, 70.0, 32768, 4, 32, 8, 128)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability=(9, 0), lacking=""):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(kernel_use, "_missing", lambda device: lacking)
    monkeypatch.setattr(
        native_path,
        "widening",
        lambda schemes, *_, **__: {s.name: MEASURED if s.name != "kivi2" else "No." for s in schemes},
    )


def paths_of(*names, layers=4, dtype=torch.bfloat16, device=GPU, arms=None) -> NativePaths:
    schemes = [get_scheme(name) if isinstance(name, str) else name for name in names]
    return native_paths(schemes, [LAYER] * layers, device=device, dtype=dtype, shape=SHAPES["llama-8b"], arms=arms)


def test_on_a_gpu_with_kernels(monkeypatch):
    on_gpu(monkeypatch)
    found = paths_of("bf16", "k8v4", "int4_g64")
    assert (found.device, found.generation, found.dtype) == ("NVIDIA H200", "Hopper", "bfloat16")
    bf16, k8v4, int4 = (scheme.layers[0] for scheme in found.schemes)
    assert [(layer.layers, layer.attention, layer.reason) for layer in (bf16, k8v4, int4)] == [("", "kernel", "")] * 3
    assert (bf16.keys.read, bf16.keys.products, bf16.keys.scaled) == ("as stored", "bf16, fp32 sums", "")
    assert k8v4.keys.stored == "e4m3, one fp32 scale per token and head"
    assert (k8v4.keys.read, k8v4.keys.scaled) == ("fp16 pairs by conversion", "outside the products")
    assert k8v4.values.stored == "e2m1, one e4m3 scale per 16 elements, one fp32 scale per sequence"
    assert (k8v4.values.read, k8v4.values.scaled) == ("fp16 pairs by bit operations", "on every number")
    assert (k8v4.keys.converts, k8v4.keys.multiplies) == ("to fp16 pairs", "yes, short accumulator")
    assert (int4.values.read, int4.values.products) == ("fp16 pairs by masks", "fp16, fp32 sums")
    assert {layer.keys.appended for layer in (bf16, k8v4, int4)} == {"kernel"}
    assert found.schemes[1].widening == MEASURED


def test_an_older_gpu_converts_by_bit_operations(monkeypatch):
    on_gpu(monkeypatch, capability=(8, 0))
    (scheme,) = paths_of("fp8_per_token_head").schemes
    assert scheme.layers[0].keys.read == "fp16 pairs by bit operations"
    assert scheme.layers[0].keys.converts == "bit operations"


def test_what_has_no_kernel_says_why(monkeypatch):
    on_gpu(monkeypatch)
    (layer,) = paths_of("kivi2").schemes[0].layers
    assert layer.attention == "dequantize + torch sdpa"
    assert "no element uint2" in layer.reason
    assert (layer.keys.appended, layer.keys.read, layer.keys.products) == (
        "torch",
        "float32 by a table",
        "torch, bfloat16",
    )
    assert layer.keys.stored.endswith("per channel over 32 tokens, last 128 tokens bf16")


def test_kernels_store_what_they_do_not_attend_to(monkeypatch):
    on_gpu(monkeypatch)
    (layer,) = paths_of("nvfp4", dtype=torch.float32).schemes[0].layers
    assert (layer.keys.appended, layer.attention) == ("kernel", "dequantize + torch sdpa")
    assert "computes in float32" in layer.reason


def test_a_gpu_without_what_kernels_need_says_so(monkeypatch):
    on_gpu(monkeypatch, lacking="no NVRTC")
    (layer,) = paths_of("nvfp4").schemes[0].layers
    assert (layer.keys.appended, layer.reason) == ("torch", "no NVRTC")


def test_what_a_run_was_asked_for_counts(monkeypatch):
    on_gpu(monkeypatch)
    arm = Arm("nvfp4", "scheme", get_scheme("nvfp4"), 2048, "stored", attention="dequant")
    (layer,) = paths_of("nvfp4", arms={"nvfp4": arm}).schemes[0].layers
    assert (layer.attention, layer.reason) == ("dequantize + torch sdpa", "asked for")


def test_layers_that_differ_are_told_apart(monkeypatch):
    on_gpu(monkeypatch)
    mixed = build_scheme("mixed", {"extends": "nvfp4", "skip_layers": ["first:1"], "sink_tokens": 4})
    first, rest = paths_of(mixed, layers=8).schemes[0].layers
    assert (first.layers, rest.layers) == ("layer 0", "7 of 8 layers")
    assert first.keys.element == "bf16"
    assert rest.keys.stored.endswith("first 4 tokens bf16")
    rows = native_rows(paths_of(mixed, layers=8))
    assert [(row.scheme, row.what) for row in rows] == [("mixed", "K and V, layer 0"), ("", "K and V, 7 of 8 layers")]


def test_on_a_cpu_nothing_is_measured():
    found = paths_of("bf16", "k8v4", dtype=torch.float32, device=torch.device("cpu"))
    assert (found.device, found.generation) == ("cpu", None)
    assert {(s.widening, s.not_widened) for s in found.schemes} == {(None, native_path.NO_GPU)}
    (layer,) = found.schemes[1].layers
    assert (layer.keys.appended, layer.attention, layer.reason) == ("torch", "dequantize + torch sdpa", "")
    assert layer.keys.converts == ""
    assert "which runs on NVIDIA GPUs alone" in shown(native_table(found))


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 6), "Ampere"), ((8, 9), "Ada"), ((9, 0), "Hopper"), ((12, 0), "Blackwell"), ((7, 5), None)],
)
def test_generations(capability, name):
    assert generation(capability) == name


class FakeTimer:
    def __init__(self, loads: float) -> None:
        self.loads, self.calls = loads, 0

    def microseconds(self, rounds, replays):
        self.calls += 1
        return {"whole": [10.0] * replays, "loads": [self.loads] * replays}


def test_widening_is_measured_once_for_equal_bytes(monkeypatch):
    monkeypatch.setattr(native_path, "LENGTH", 64)
    monkeypatch.setattr(native_path, "compile_ahead", lambda calls, device: None)
    timer = FakeTimer(8.0)
    schemes = [get_scheme(name) for name in ("int4_g64", "int4_g64_hadamard", "int4_g64_mean_shift", "kivi2", "nvfp4")]
    shape = ShapeRow("", 4, 1, 64, 1)
    found = native_path.widening(schemes, shape, torch.device("cpu"), timer=timer)
    assert timer.calls == 2
    assert found["int4_g64"] == Widening(pytest.approx(0.2), 10.0, 8.0, 64, 4, 4, 1, 64)
    assert found["int4_g64_hadamard"] == found["int4_g64_mean_shift"] == found["int4_g64"]
    assert "no element uint2" in found["kivi2"]


def test_a_kernel_that_fails_leaves_a_reason(monkeypatch):
    def fail(calls, device):
        raise KernelError("it does not compile.")

    monkeypatch.setattr(native_path, "compile_ahead", fail)
    found = native_path.widening([get_scheme("nvfp4")], ShapeRow("", 4, 1, 64, 1), torch.device("cpu"))
    assert found == {"nvfp4": "KernelError: it does not compile."}


def test_what_is_compiled_ahead_is_what_is_timed(monkeypatch):
    asked = []
    monkeypatch.setattr(native_path, "compile_ahead", lambda calls, device: asked.extend(calls))
    case = Case(ShapeRow("", 4, 1, 64, 1), 2, 64)
    native_path._compiled({("k", "v"): [get_scheme("nvfp4")]}, case, torch.device("cpu"))
    assert len(asked) == 2  # the kernel, and its loads


def test_the_note_comes_back(monkeypatch, tmp_path):
    assert read_native_paths(tmp_path) is None
    on_gpu(monkeypatch)
    found = paths_of("bf16", "k8v4", "kivi2")
    (tmp_path / NOTE).write_bytes(to_json(found.to_dict()))
    assert read_native_paths(tmp_path) == found
    (tmp_path / NOTE).write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(StoreError, match="schema version 2"):
        read_native_paths(tmp_path)
    (tmp_path / NOTE).write_text(json.dumps({"schema_version": 1, "schemes": [{}]}))
    with pytest.raises(StoreError, match="doesn't hold the fields"):
        read_native_paths(tmp_path)


class Store:
    def __init__(self, path) -> None:
        self.path, self.written = path, 0

    def write_note(self, name, data):
        self.written += 1
        (self.path / name).write_bytes(to_json(data))


def arms() -> list[Arm]:
    return [
        Arm(label, role, get_scheme(name), 2048, "stored")
        for label, role, name in (
            ("bf16", "baseline", "bf16"),
            ("bf16 (A/A)", "aa", "bf16"),
            ("k8v4", "scheme", "k8v4"),
            ("crush", "crush", "crush"),
        )
    ]


def test_a_run_notes_its_schemes_once(tiny_model, tmp_path):
    from kveval.config import ModelConfig
    from kveval.models import load

    backend = HFBackend(load(ModelConfig(id=str(tiny_model)), device="cpu"))
    store = Store(tmp_path)
    for _ in range(2):
        note(arms(), backend, store)
    found = read_native_paths(tmp_path)
    assert store.written == 1
    assert [scheme.scheme for scheme in found.schemes] == ["bf16", "k8v4"]
    assert found.problem is None


def test_a_note_that_fails_says_why_and_is_tried_again(tiny_model, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("the GPU fell off the bus")

    monkeypatch.setattr(native_path, "native_paths", fail)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=4))
    loaded = SimpleNamespace(
        model=SimpleNamespace(config=config),
        device=GPU,
        info=SimpleNamespace(geometry=[LAYER], compute_dtype="bfloat16"),
    )
    store = Store(tmp_path)
    for _ in range(2):
        note(arms(), SimpleNamespace(loaded=loaded), store)
    assert store.written == 2
    assert read_native_paths(tmp_path).problem == "RuntimeError: the GPU fell off the bus"


# ---- reports


def shown(renderable, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def test_the_table_tells_once_what_holds_for_all(monkeypatch):
    on_gpu(monkeypatch)
    text = " ".join(shown(native_table(paths_of("fp8_per_token_head", "nvfp4"))).split())
    assert "All have products in: fp16, fp32 sums; append by: kernel; attention by: kernel." in text
    assert "nvfp4 K and V fp16 pairs by bit operations 12 %" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "e4m3 on Hopper: conversion to fp16 pairs; products of codes themselves: yes, short accumulator." in text
    text = " ".join(shown(native_table(paths_of("nvfp4", "kivi2"))).split())
    assert "No kernel attends to kivi2: keys: kernels have no element uint2" in text
    assert "attention by" in text


@pytest.fixture(scope="module")
def data():
    records = make_records(samples=2, lengths=(512,), schemes=("k8v4",))
    return make_data(records, make_config(schemes=["k8v4"], context_lengths=[512], gate=None))


def test_the_report_shows_what_the_records_say_of_attention(data, monkeypatch):
    on_gpu(monkeypatch)
    assert data.attention_paths == {"bf16": ("dequantize + torch sdpa",), "k8v4": ("dequantize + torch sdpa",)}
    assert "How each scheme ran" not in render_html(data, [])
    page = render_html(replace(data, native=paths_of("bf16", "k8v4")), [])
    section = page[page.index("How each scheme ran") : page.index("<h2>Controls")]
    assert section.count("dequantize + torch sdpa") == 2
    assert "fp16 pairs by conversion" in section
    assert "loads the same bytes and computes nothing" in section
    assert "e2m1 on Hopper" in section


def test_the_report_says_why_nothing_was_found_out(data):
    problem = NativePaths("cpu", None, "float32", "ab", (), "RuntimeError: no")
    assert "could not be found out: RuntimeError: no" in render_html(replace(data, native=problem), [])


@pytest.mark.parametrize(
    ("path", "by_kernels"),
    [
        ("packed kernels", True),
        ("packed reference", False),
        ("packed kernels (layers 1); dequantize + torch sdpa (layers 0)", False),
    ],
)
def test_only_kernels_make_times_that_count(path, by_kernels):
    records = make_records(samples=2, lengths=(512,), schemes=("k8v4",))
    records["attention_path"] = path
    assert make_data(records, make_config(schemes=["k8v4"], context_lengths=[512], gate=None)).by_kernels is by_kernels
