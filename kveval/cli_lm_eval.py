"""`kveval lm-eval`: lm-evaluation-harness on the stored cache."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kveval.errors import ConfigError

if TYPE_CHECKING:
    from kveval.config import ModelConfig
    from kveval.integrations.lm_eval_run import LMEvalResult, LMEvalRow

__all__ = ["lm_eval"]


def lm_eval(
    model: Annotated[str, typer.Option(help="Name, hub id, folder or .gguf file.")],
    tasks: Annotated[str, typer.Option(help="lm-eval's tasks or kveval's (kveval_...), separated by commas.")],
    scheme: Annotated[str, typer.Option(help="Formats, separated by commas.")] = "k8v4",
    limit: Annotated[int | None, typer.Option(min=1, help="Samples per task, from the first.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with more tasks (YAML).")] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put the model's chat template around prompts.")
    ] = False,
    gen_kwargs: Annotated[
        str | None, typer.Option(help="Overrides of tasks' generation_kwargs: max_gen_toks=64,do_sample=False.")
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(help='JSON for tasks that make their samples: {"max_seq_lengths": [4096]}.')
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Most tokens of a context per forward.")] = 2048,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compare: Annotated[bool, typer.Option(help="Run the BF16 cache too, and compare with it.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and every sample.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Run tasks of lm-evaluation-harness on the stored cache of each scheme, and compare with BF16 sample by sample."""
    from kveval.integrations import require_lm_eval
    from kveval.integrations.lm_eval_run import LMEvalAsked, run_lm_eval

    require_lm_eval()
    asked = LMEvalAsked(
        model=_model(model, device),
        schemes=_names(scheme, "--scheme"),
        tasks=_names(tasks, "--tasks"),
        limit=limit,
        num_fewshot=num_fewshot,
        include_path=include_path,
        apply_chat_template=apply_chat_template,
        gen_kwargs=_gen_kwargs(gen_kwargs),
        metadata=_metadata(metadata),
        prefill_chunk=prefill_chunk,
        compare=compare,
    )
    if out is not None and (out / "results.json").exists():
        raise ConfigError(f"{out} holds results already.", remedy="Give another folder.")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    result = run_lm_eval(asked, say=_say)
    if out is not None:
        result.write(out)
        _say(f"Wrote {out / 'results.json'} and every sample in {out / 'samples'}.")
    if as_json:
        sys.stdout.write(json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n")
    else:
        _print(result)


def _model(name: str, device: str) -> ModelConfig:
    from kveval.config import ModelConfig

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {device!r}.", remedy="Use auto, cpu or cuda.")
    return ModelConfig.model_validate({"id": name, "device": device})


def _names(text: str, option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"{option} names nothing.", remedy="Give one or more names, separated by commas.")
    return names


def _gen_kwargs(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    from lm_eval.utils import simple_parse_args_string

    try:
        return dict(simple_parse_args_string(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--gen-kwargs {text!r} is not of the form a=1,b=2.", remedy="For example max_gen_toks=64."
        ) from error


def _metadata(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--metadata is no JSON: {error}", remedy='For example {"max_seq_lengths": [4096]}.'
        ) from error
    if not isinstance(found, dict):
        raise ConfigError("--metadata is no JSON mapping.", remedy='For example {"max_seq_lengths": [4096]}.')
    return found


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _print(result: LMEvalResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"lm-eval on the stored cache: {result.facts['model']['id']}", title_justify="left")
    for name in ("task, metric", "scheme"):
        table.add_column(name, overflow="fold")
    for name in ("value", "minus BF16", "95 % interval", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    together: dict[tuple[str, str, str], list[LMEvalRow]] = {}
    for row in result.rows:
        together.setdefault((row.task, row.metric, row.filter), []).append(row)
    for rows in together.values():
        for i, row in enumerate(rows):
            table.add_row(_what(row) if i == 0 else "", *_cells(row), end_section=i == len(rows) - 1)
    console = Console()
    console.print(table)
    for name, facts in result.facts["schemes"].items():
        usage = facts["usage"]
        console.print(
            f"{name}: {usage['positions']:,} positions scored or written in {usage['forwards']:,} forwards, "
            f"{usage['packed_reads']:,} packed reads, {usage['seconds']:.1f} s; at most {usage['cache_tokens']:,} "
            f"tokens cached in {usage['cache_bytes']:,} bytes; attention: {', '.join(usage['attention_paths'])}."
        )


def _what(row: LMEvalRow) -> str:
    arrow = {True: " ↑", False: " ↓", None: ""}[row.higher_is_better]
    filter_name = "" if row.filter == "none" else f" ({row.filter})"
    return f"{row.task} {row.metric}{' (nats)' if row.metric == 'nll' else ''}{filter_name}{arrow}"


def _cells(row: LMEvalRow) -> tuple[str, ...]:
    difference = "" if row.difference is None else f"{row.difference:+.4g}"
    interval = "" if row.low is None or row.high is None else f"{row.low:+.3g} to {row.high:+.3g}"
    if row.difference is not None and not row.pairs:
        interval = "not paired"
    return row.scheme, f"{row.value:.4g}", difference, interval, str(row.samples)
