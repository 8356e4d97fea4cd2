"""`kveval task`: for those who write a task of their own."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kveval.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from kveval.task_check import Finding

__all__ = ["app"]

app = typer.Typer(help="Tasks of your own: check a task file.", no_args_is_help=True)

STYLES = {"pass": "green", "fail": "bold red", "skip": "dim"}


@app.callback()
def task() -> None:
    """Tasks of your own: check a task file."""


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Path of a task file, or a bundled task's name.", metavar="FILE|NAME")],
    model: Annotated[
        str | None, typer.Option(help="Make samples for this model's tokenizer; without it, a token is a byte.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Context lengths; 512,4k with a model, 4k,16k without one.")
    ] = None,
    samples: Annotated[int, typer.Option(min=2, help="Samples at each length.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of all randomness.")] = 0,
    params: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of the task: --set keys=4; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Hold a task against what a sweep relies on; one line per check, exit code 10 if one fails. Loads no weights."""
    from dataclasses import asdict

    from kveval.bench.shapes import parse_lengths
    from kveval.task_check import Asked, check_task

    findings = check_task(
        Asked(
            name,
            params=_parameters(params or []),
            model=None if model is None else {"id": model},
            lengths=parse_lengths(lengths) if lengths else (),
            samples=samples,
            seed=seed,
        )
    )
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        _show(findings)
    raise typer.Exit(ExitCode.FAIL if any(f.status == "fail" for f in findings) else ExitCode.PASS)


def _parameters(texts: list[str]) -> dict[str, Any]:
    import yaml

    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {text!r} is not of the form key=value.", remedy="For example --set keys=4.")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {text!r}: the value is not YAML: {error}", remedy="Quote it.") from error
    return found


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        line = Text(
            f"{finding.status.upper() if finding.status == 'fail' else finding.status}  ", STYLES[finding.status]
        )
        line.append(finding.check.ljust(width) if finding.detail else finding.check, style="default")
        console.print(line.append(f"  {finding.detail}" if finding.detail else "", style="default"), soft_wrap=True)
