"""A benchmark's record as tables on a terminal. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kveval.bench.record import Bench, DecodeRow, ModelRow, ReferenceRow, Spread
from kveval.capacity import GIB, format_tokens

__all__ = ["bench_tables"]

BASELINE = "bf16"


def bench_tables(bench: Bench) -> RenderableType:
    """Everything that was timed, one table per shape and part."""
    parts: list[RenderableType] = []
    if bench.caveat:
        parts += [Text(bench.caveat, style="bold yellow"), Text()]
    parts += [_limit(bench), *_decode(bench), *_append(bench), *_steps(bench), *_models(bench)]
    if bench.left_out:
        parts += [Text(), Text("Not timed", style="bold")]
        parts += [Text(f"  {row.what}: {row.reason}") for row in bench.left_out]
    return Group(*parts)


def _limit(bench: Bench) -> RenderableType:
    rate, on_gpu = bench.copy.gb_per_s, bench.device != "cpu"
    kernels = (
        f"kernels {bench.kernel_hash[:12]} by NVRTC {bench.nvrtc}, driver {bench.driver}" if on_gpu else "reference"
    )
    return Text(
        f"{bench.device}: {kernels}. A copy moves {_number(rate.median)} GB/s "
        f"({_number(rate.min)} to {_number(rate.max)})."
    )


def _decode(bench: Bench) -> Iterable[RenderableType]:
    """One query per sequence, one layer: a block of rows per batch and length."""
    with_flashinfer = any(row.speedup_to_flashinfer for row in bench.decode)
    with_widening = any(row.widening for row in bench.decode)
    for shape in bench.shapes:
        rows = [row for row in bench.decode if row.shape == shape.name]
        if not rows:
            continue
        heads = f"{shape.query_heads}/{shape.kv_heads} heads of {shape.head_dim}"
        table = _table(f"Decode attention of one layer, {shape.name} ({heads})", "batch", "tokens", "format")
        columns = ["µs", "GB/s", "of copy", "vs BF16", "vs torch"]
        columns += ["vs FlashInfer"] if with_flashinfer else []
        columns += ["widening"] if with_widening else []
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for at, key in enumerate(dict.fromkeys((row.batch, row.length) for row in rows)):
            if at:
                table.add_row()
            block = [row for row in rows if (row.batch, row.length) == key]
            others = [r for r in bench.references if (r.shape, r.batch, r.length) == (shape.name, *key)]
            _fill(table, block, others, bench.copy.gb_per_s.median, with_flashinfer, with_widening)
        yield from (Text(), table)
    if bench.decode:
        yield from (Text(line, style="dim") for line in _decode_notes(bench, with_widening))


def _fill(
    table: Table, rows: Sequence[DecodeRow], others: Sequence[ReferenceRow], limit: float, with_flashinfer: bool,
    with_widening: bool,
) -> None:  # fmt: skip
    first = (str(rows[0].batch), format_tokens(rows[0].length))
    for row in rows:
        cells = [_number(row.us.median), _number(row.gb_per_s.median), f"{row.of_copy.median:.0%}"]
        cells += [_times(row.speedup_to_bf16), _times(row.speedup_to_sdpa)]
        cells += [_times(row.speedup_to_flashinfer)] if with_flashinfer else []
        cells += ["–" if row.widening is None else f"{row.widening.median:.0%}"] if with_widening else []
        table.add_row(*first, row.scheme, *cells)
        first = ("", "")
    for other in others:
        cells = [_number(other.us.median), _number(other.gb_per_s.median), f"{other.gb_per_s.median / limit:.0%}"]
        table.add_row("", "", Text(other.name, style="dim"), *(Text(cell, style="dim") for cell in cells))


def _decode_notes(bench: Bench, with_widening: bool) -> list[str]:
    forms = dict.fromkeys(f"{row.name} by {row.form}" for row in bench.references)
    notes = [
        "GB/s: bytes that must be read over the time; of copy: over what a copy moves. vs: times faster than our BF16 "
        "kernel, than torch's attention on BF16 tensors.",
        f"Fastest forms: {'; '.join(forms)}." if len(forms) < 4 else "Each form of torch's attention is in the record.",
    ]
    if with_widening:
        notes.append("Widening: share of the time that is gone when the kernel loads its bytes and computes nothing.")
    return notes


def _append(bench: Bench) -> Iterable[RenderableType]:
    if not bench.append:
        return
    table = _table("Append of one token of one layer, keys and values", "shape", "batch", "format")
    for name in ("µs", "BF16 copy, µs", "times the copy", "launches"):
        table.add_column(name, justify="right", no_wrap=True)
    shown: tuple[str, int] | None = None
    for row in bench.append:
        key = (row.shape, row.batch)
        head = (row.shape, str(row.batch)) if key != shown else ("", "")
        launches = "–" if row.launches is None else str(row.launches)
        numbers = (_number(row.us.median), _number(row.copy_us.median), _times(row.times_copy))
        if shown not in (None, key):
            table.add_row()
        table.add_row(*head, row.scheme, *numbers, launches)
        shown = key
    yield from (Text(), table)


def _steps(bench: Bench) -> Iterable[RenderableType]:
    if not bench.steps:
        return
    with_graph = any(row.graph_ms for row in bench.steps)
    title = "Append and attention of all layers for one token"
    table = _table(title, "shape", "batch", "tokens", "format")
    names = ["eager, ms", "vs BF16"] + (["as a graph, ms", "vs BF16"] if with_graph else [])
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    shown: tuple[str, int, int] | None = None
    for row in bench.steps:
        key = (row.shape, row.batch, row.length)
        head = (row.shape, str(row.batch), format_tokens(row.length)) if key != shown else ("", "", "")
        cells = [_number(row.eager_ms.median), _times(row.eager_speedup_to_bf16)]
        if with_graph:
            cells += ["–" if row.graph_ms is None else _number(row.graph_ms.median), _times(row.graph_speedup_to_bf16)]
        if shown not in (None, key):
            table.add_row()
        table.add_row(*head, row.scheme, *cells)
        shown = key
    yield from (Text(), table)


def _models(bench: Bench) -> Iterable[RenderableType]:
    if not bench.model_steps:
        return
    with_memory = any(row.peak_bytes for row in bench.model_steps)
    models = ", ".join(dict.fromkeys(row.model for row in bench.model_steps))
    table = _table(f"A whole forward of {models} for one token, eager", "tokens", "cache")
    names = ["ms", "vs BF16", "cache, MiB"] + (["peak, GiB", "while decoding"] if with_memory else [])
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("read through", overflow="fold")
    shown = 0
    for row in bench.model_steps:
        if shown not in (0, row.length):
            table.add_row()
        head = format_tokens(row.length) if row.length != shown else ""
        table.add_row(head, row.scheme, *_model_cells(row, with_memory), row.attention_path)
        shown = row.length
    yield from (Text(), table)


def _model_cells(row: ModelRow, with_memory: bool) -> list[str]:
    size = "–" if row.cache_bytes is None else _number(row.cache_bytes / 2**20)
    cells = [_number(row.ms.median), f"{row.speedup_to_bf16:.2f}x", size]
    if with_memory:
        peaks = (row.peak_bytes, row.peak_decode_bytes)
        cells += ["–" if peak is None else f"{peak / GIB:.2f}" for peak in peaks]
    return cells


def _number(x: float) -> str:
    """Three digits that count, thousands in commas."""
    if x >= 100:
        return f"{x:,.0f}"
    return f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def _times(ratio: Spread | None) -> str:
    return "–" if ratio is None else f"{ratio.median:.2f}x"


def _table(title: str, *columns: str) -> Table:
    options: dict[str, Any] = {"title_justify": "left", "box": None, "pad_edge": False}
    table = Table(title=title, **options)
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table
