"""`kveval traffic`: what is in a file of one's own requests, before a sweep runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kveval.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from kveval.traffic_check import TrafficCheck

__all__ = ["app"]

app = typer.Typer(help="Your own requests as a task: check a file of them.", no_args_is_help=True)

SHOWN_LINES = 8
"""Line numbers named for each reason why requests don't fit."""


@app.callback()
def traffic() -> None:
    """Your own requests as a task: check a file of them."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Requests, one JSON object a line; as it is or gzipped.")],
    model: Annotated[
        str | None, typer.Option(help="Count tokens as this model does: a name, hub id, folder or .gguf file.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Context lengths that make the buckets.")] = "1k,4k,16k,64k",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens kept free for a written answer (mode generate).")
    ] = None,
    template: Annotated[str, typer.Option(help="auto: the chat template; none: plain text behind BOS.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Say how many requests each context length gets, what would not fit, and which lines are broken (exit code 2)."""
    from kveval.bench.shapes import parse_lengths
    from kveval.config import ModelConfig
    from kveval.traffic_check import check_traffic

    if template not in ("auto", "none"):
        raise ConfigError(f"--template is {template!r}.", remedy="Write auto or none.")
    found = check_traffic(
        file,
        model=None if model is None else ModelConfig(id=model),
        lengths=parse_lengths(lengths),
        max_new_tokens=max_new_tokens,
        template="none" if template == "none" else "auto",
    )
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
    else:
        _show(found)
    raise typer.Exit(ExitCode.USAGE if found.problems else ExitCode.PASS)


def _show(found: TrafficCheck) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Text(f"{found.name}: {found.requests:,} requests in {found.clusters:,} clusters", style="bold"))
    console.print(_table(found))
    if not found.in_tokens:
        console.print(Text("Lengths are in characters. --model ID counts tokens and makes the buckets."))
    for reason, lines in found.unfit.items():
        named = ", ".join(map(str, lines[:SHOWN_LINES])) + (", ..." if len(lines) > SHOWN_LINES else "")
        console.print(Text(f"In no bucket: {len(lines):,} {reason}, line {named}", style="yellow"))
    alike: dict[tuple[str, str], list[int]] = {}
    for problem in found.problems:
        alike.setdefault((problem.message, problem.remedy), []).append(problem.line)
    for (message, remedy), lines in alike.items():
        text = Text(f"{found.name}:{', '.join(map(str, lines))}: {message}. ", style="red")
        console.print(text.append(remedy, style="default"), soft_wrap=True)
    if found.problems:
        lines_are = "1 broken line" if len(found.problems) == 1 else f"{len(found.problems):,} broken lines"
        console.print(Text(f"{lines_are}. A sweep refuses the file.", style="bold red"))


def _table(found: TrafficCheck) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    unit = "tokens" if found.in_tokens else "characters"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("context\nlength" if found.in_tokens else "", justify="right", no_wrap=True)
    for name in ("requests", "clusters", f"{unit} of the prompt\nleast / median / most", "of the answer\n"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.buckets:
        spans = ["-" if s is None else f"{s.least:,} / {s.median:,} / {s.most:,}" for s in (row.prompt, row.answer)]
        table.add_row(row.label, f"{row.requests:,}", f"{row.clusters:,}", *spans)
    return table
