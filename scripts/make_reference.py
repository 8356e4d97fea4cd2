"""Write docs/reference/ from the code: the command line, the config keys, the storage formats, the record columns.

`python scripts/make_reference.py` writes the pages; a test checks that they are up to date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from kveval import config
from kveval.cli import app
from kveval.formats.spec import get_scheme, scheme_names
from kveval.records import METRICS, Record

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
HEADER = "<!-- Written by scripts/make_reference.py; change the code, not this page. -->\n"


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    return {
        "cli.md": HEADER + "# Command line\n\n" + EXIT_CODES + "\n".join(_commands()),
        "config.md": HEADER + "# Sweep config\n\n" + CONFIG_INTRO + "\n".join(_config_blocks()),
        "formats.md": HEADER + "# Storage formats\n\n" + FORMATS_INTRO + _formats(),
        "records.md": HEADER + "# Records\n\n" + _records(),
    }


EXIT_CODES = """\
Results go to stdout, everything else to stderr. Exit codes: 0 pass, 1 crash, 2 usage or config, 10 the gate failed,
11 inconclusive, 12 incomplete (missing or failed samples), 13 invalid (a control failed), 130 interrupted.

"""

CONFIG_INTRO = """\
One YAML file describes one sweep. `extends: other.yaml` takes another file's keys as defaults; `--set a.b=value`
overrides a key on the command line. Lengths are in tokens and may be written 4096, 4k or 1M (k = 1024).

"""

FORMATS_INTRO = """\
Bytes include scales and zero points. "Append-invariant" formats store the same bytes however a prompt is split into
chunks; the others freeze a scale at the first write of a sequence, so the chunk size is part of the result.

"""


def _commands() -> Iterator[str]:
    root = typer.main.get_command(app)
    for name, command in _walk(root, "kveval"):
        yield f"## `{name}`\n\n{_one_line(command.help or '')}\n"
        rows = [_parameter_row(p) for p in command.params if p.name != "help"]
        if rows:
            yield "| argument | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _walk(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _walk(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _parameter_row(parameter: Any) -> str:
    is_option = any(o.startswith("-") for o in parameter.opts)
    shown = ", ".join(f"`{o}`" for o in parameter.opts) if is_option else f"`{parameter.name.upper()}`"
    default = "" if parameter.default in (None, False) or parameter.required else f"`{parameter.default}`"
    return f"| {shown} | {default} | {_one_line(getattr(parameter, 'help', None) or '')} |"


def _config_blocks() -> Iterator[str]:
    blocks = (
        config.SweepConfig, config.ModelConfig, config.TaskConfig, config.CapacityConfig, config.GateConfig,
        config.GateEndpoint, config.ControlsConfig,
    )  # fmt: skip
    for block in blocks:
        yield f"## {block.__name__}\n\n{_one_line(inspect.getdoc(block) or '')}\n"
        rows = [
            f"| `{name}` | {_type(field.annotation)} | {_default(block, name, field)} |"
            for name, field in block.model_fields.items()
        ]
        yield "| key | type | default |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


FILLED_IN = {("SweepConfig", "name"): "the file's name", ("TaskConfig", "label"): "the task's name"}


def _default(block: type, name: str, field: Any) -> str:
    if (block.__name__, name) in FILLED_IN:
        return FILLED_IN[block.__name__, name]
    if field.is_required():
        return "required"
    return f"`{field.get_default(call_default_factory=True)}`"


def _type(annotation: Any) -> str:
    text = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    text = re.sub(r"(typing|kveval\.\w+(\.\w+)?)\.", "", text)
    text = re.sub(r"Annotated\[int,.*?gt=0\)\]\)?\]", "length", text)
    return "`" + text.replace("|", "or") + "`"


def _formats() -> str:
    rows = []
    for name in scheme_names():
        scheme = get_scheme(name)
        bits = [side.bits_per_element(128) for side in (scheme.key, scheme.value)]
        rows.append(
            f"| `{name}` | {scheme.summary} | {bits[0]:g} / {bits[1]:g} "
            f"| {scheme.layer_bytes_per_token(head_dim_k=128, head_dim_v=128, kv_heads=8) * 32:,} "
            f"| {'yes' if scheme.append_invariant else 'no'} | {', '.join(scheme.engines)} |"
        )
    head = (
        "| scheme | keys and values | bits per element, K / V, head size 128 "
        "| bytes per token, 32 layers x 8 heads x 128 "
        "| append-invariant | called by engines |\n| --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "\n".join(rows) + "\n"


def _records() -> str:
    doc = (inspect.getdoc(Record) or "").replace("\n\n", "\n\n")
    columns = ", ".join(f"`{c}`" for c in Record.columns())
    metrics = "\n".join(
        f"| `{m.name}` | {m.label} | {m.unit} | {'a rise' if m.higher_is_worse else 'a drop'} |"
        for m in METRICS.values()
    )
    return (
        f"{doc}\n\nColumns: {columns}.\n\n## Metrics\n\n"
        f"| column | meaning | unit | a loss is |\n| --- | --- | --- | --- |\n{metrics}\n"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    """Write every page."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
