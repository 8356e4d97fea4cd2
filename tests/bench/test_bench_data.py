"""What is asked for and what is kept: shapes, lists, spreads, the record on the disk, tables and plots of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from bench_records import make_bench
from rich.console import Console

from kveval.bench.plot import bench_plots
from kveval.bench.record import Bench, LeftOut, ShapeRow, Spread, read_bench
from kveval.bench.shapes import SHAPES, Case, parse_batches, parse_lengths, parse_schemes, parse_shapes, parse_what
from kveval.bench.tables import bench_tables
from kveval.errors import ConfigError, StoreError, UnknownNameError
from kveval.files import to_json


def test_shapes_are_names_or_numbers():
    assert parse_shapes("llama-8b, 16/4/64,9/3/64/30") == (
        SHAPES["llama-8b"],
        ShapeRow("16/4/64", 16, 4, 64, 32),
        ShapeRow("9/3/64/30", 9, 3, 64, 30),
    )


@pytest.mark.parametrize("text", ["32/8", "32/5/128", "0/1/64", "a/b/c", "1/1/1/1/1", "", " , "])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ConfigError, match="--shapes"):
        parse_shapes(text)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError, match="lama-8b"):
        parse_shapes("lama-8b")
    with pytest.raises(UnknownNameError, match="prefill"):
        parse_what("decode,prefill")
    with pytest.raises(UnknownNameError, match="--schemes"):
        parse_schemes("nvfp5")


def test_lists_are_sorted_and_bf16_is_always_timed():
    assert parse_lengths("8k,1k,8192") == (1024, 8192)
    assert parse_batches("4,1") == (1, 4)
    assert [s.name for s in parse_schemes("nvfp4")] == ["bf16", "nvfp4"]
    assert [s.name for s in parse_schemes("k8v4,bf16")] == ["bf16", "k8v4"]
    for parse, text in ((parse_lengths, "0"), (parse_lengths, "short"), (parse_batches, "0"), (parse_batches, "-1")):
        with pytest.raises(ConfigError):
            parse(text)


def test_a_cache_has_room_for_whole_copies():
    assert Case(SHAPES["llama-8b"], 1, 1000).capacity == 1008
    assert Case(SHAPES["llama-8b"], 1, 1024).capacity == 1024


def test_spreads():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.ratio([4.0, 9.0], [2.0, 3.0]) == Spread(2.5, 2.0, 3.0, 2)
    assert Spread.rate(8_000_000, [2.0, 4.0]) == Spread(3000.0, 2000.0, 4000.0, 2)
    with pytest.raises(ValueError, match="zip"):
        Spread.ratio([1.0], [1.0, 2.0])


def test_the_record_comes_back_from_the_disk(tmp_path):
    bench = make_bench()
    file = tmp_path / "bench.json"
    file.write_bytes(to_json(bench.to_dict()))
    assert read_bench(file) == bench
    assert Bench.from_dict(json.loads(file.read_text())) == bench


def test_a_record_of_another_schema_is_refused(tmp_path):
    file = tmp_path / "bench.json"
    file.write_bytes(to_json({**make_bench().to_dict(), "schema_version": 2}))
    with pytest.raises(StoreError, match="schema version 2"):
        read_bench(file)
    broken = make_bench().to_dict()
    del broken["decode"][0]["us"]
    file.write_bytes(to_json(broken))
    with pytest.raises(StoreError, match="doesn't hold the fields"):
        read_bench(file)


def printed(bench: Bench, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(bench_tables(bench))
    return console.file.getvalue()


def test_tables_show_medians_side_by_side():
    text = printed(make_bench())
    assert "NVIDIA H200: kernels abababababab by NVRTC 13.0, driver 580.1. A copy moves 4,000 GB/s" in text
    (row,) = (line.split() for line in text.splitlines() if line.split()[:2] == ["nvfp4", "40.0"])
    assert row == ["nvfp4", "40.0", "3,775", "94%", "3.00x", "3.60x", "25%"]
    (torch_row,) = (line.split() for line in text.splitlines() if "torch sdpa  " in line and "144" in line)
    assert torch_row == ["torch", "sdpa", "144", "3,728", "93%"]
    assert "vs FlashInfer" not in text
    assert "torch sdpa by heads as queries" in text
    assert "flashinfer: it is not installed" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_figures_of_a_cpu_come_with_a_warning():
    bench = make_bench()
    bench = replace(bench, device="cpu", caveat="They mean nothing about GPUs.", left_out=(LeftOut("a", "b"),))
    assert printed(bench).startswith("They mean nothing about GPUs.")
    (plot,) = bench_plots(bench)
    assert plot.caption.endswith("They mean nothing about GPUs.")


def test_one_plot_per_shape_with_the_data_that_it_shows():
    (plot,) = bench_plots(make_bench())
    assert plot.name == "bench_llama-8b"
    assert list(plot.data["scheme"]) == ["bf16", "nvfp4"] * 2
    assert list(plot.data["us_median"]) == [12.0, 4.0, 120.0, 40.0]
    faster, rate = plot.figure.axes
    assert faster.get_title(loc="left") == "batch 1"
    lines = {tuple(line.get_ydata()) for line in faster.lines}
    assert (3.0, 3.0) in lines  # nvfp4
    assert any(y == pytest.approx((1 / 1.2, 1 / 1.2)) for y in lines)  # torch
    assert any(tuple(line.get_ydata()) == (4000.0, 4000.0) for line in rate.lines)  # the copy
