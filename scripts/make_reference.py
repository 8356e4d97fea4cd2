"""Write docs/reference/ from the code: the command line, the config keys, the storage formats, the record columns.

`python scripts/make_reference.py` writes the pages; a test checks that they are up to date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from kveval import config
from kveval.cli import app
from kveval.content import content_dir
from kveval.formats.element_types import element_names, get_element
from kveval.formats.hardware import GPUS, native
from kveval.formats.spec import SCALE_RULES, KVScheme, LayerOverride, TensorFormat, get_scheme, scheme_names
from kveval.python_file import load_python_file
from kveval.records import METRICS, Record
from kveval.report.format_text import describe, format_markdown, levels_text
from kveval.tasks import MAX_NEW_TOKENS, TEXT_METRIC, known_tasks

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
HEADER = "<!-- Written by scripts/make_reference.py; change the code, not this page. -->\n"


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    return {
        "cli.md": HEADER + "# Command line\n\n" + EXIT_CODES + "\n".join(_commands()),
        "config.md": HEADER + "# Sweep config\n\n" + CONFIG_INTRO + "\n".join(_config_blocks()),
        "formats.md": HEADER + "# Storage formats\n\n" + FORMATS_INTRO + _formats(),
        "records.md": HEADER + "# Records\n\n" + _records(),
        "tasks.md": HEADER + "# Tasks\n\n" + TASKS_INTRO + "\n".join(_tasks()),
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
`kveval formats` lists them, `kveval show-format NAME` prints the section of one for any head size.
[What decides their bytes, and the traps](../explanation/formats.md) has the reasons behind the numbers;
[how to add one](../how-to/add-a-format.md) the steps.

Sizes include scales and zero points. "Append-invariant" formats store the same bytes however a prompt is split into
chunks; the others freeze something at the first write of a sequence, so the chunk size is part of the result. Bytes per
token are those of 32 layers with 8 heads of 128.

"""


TASKS_INTRO = """\
A task is named in a config under `tasks`, its parameters beside its name: `{name: niah_multikey, keys: 4, queries: 2}`.
Every task can be fed its answers; with `mode: generate` the model writes them as well, up to `max_new_tokens` or a
`stop` string, and they are scored by the task's text metric. Running text (perplexity) has no answer to write.

Also: [which of them see damage](../explanation/what-tasks-see.md) on two models;
[a task of your own](../tutorial/custom-task.md) in one file; [your traffic](../how-to/measure-your-traffic.md);
`lm_eval:NAME` for a task of [lm-eval](../how-to/lm-eval.md).

"""


def _tasks() -> Iterator[str]:
    for name in known_tasks():
        module = load_python_file(content_dir("tasks") / f"{name}.py")
        rows = [
            f"| `{key}` | {_type(field.annotation)} | {_default(module.Params, key, field)} |"
            for key, field in module.Params.model_fields.items()
        ]
        table = ["| parameter | type | default |\n| --- | --- | --- |\n" + "\n".join(rows)] if rows else []
        parts = [_paragraphs(module), *_written(module), _paragraphs(module.Params), *table]
        yield f"## {name}\n\n" + "\n\n".join(parts) + "\n"


def _written(module: ModuleType) -> Iterator[str]:
    if getattr(module, "PASSAGE", False):
        return
    how = "the task's own score" if hasattr(module, "score") else f"`{getattr(module, 'TEXT_METRIC', TEXT_METRIC)}`"
    stop = "".join(f", stops at `{text!r}`" for text in getattr(module, "STOP", ()))
    yield f"Written answers: up to {getattr(module, 'MAX_NEW_TOKENS', MAX_NEW_TOKENS)} tokens{stop}; {how}."


def _paragraphs(documented: Any) -> str:
    return "\n\n".join(_one_line(paragraph) for paragraph in (inspect.getdoc(documented) or "").split("\n\n"))


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
        config.GateEndpoint, config.ControlsConfig, KVScheme, TensorFormat, LayerOverride,
    )  # fmt: skip
    for block in blocks:
        about, _, attributes = (inspect.getdoc(block) or "").partition("\nAttributes:\n")
        yield f"## {block.__name__}\n\n{_one_line(about)}\n"
        meanings = _meanings(attributes)
        more = " meaning |" if meanings else ""
        rows = [
            f"| `{name}` | {_type(field.annotation)} | {_default(block, name, field)} |"
            + (f" {meanings[name]} |" if meanings else "")
            for name, field in block.model_fields.items()
        ]
        rule = "| --- | --- | --- |" + (" --- |" if more else "")
        yield f"| key | type | default |{more}\n{rule}\n" + "\n".join(rows) + "\n"


def _meanings(attributes: str) -> dict[str, str]:
    """Name -> text, from the attributes of a docstring: one `name: text` each, continued with a deeper indent."""
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, flags=re.MULTILINE)
    return {name: _one_line(text).replace("|", "\\|") for name, text in found}


FILLED_IN = {("SweepConfig", "name"): "the file's name", ("TaskConfig", "label"): "the task's name"}


def _default(block: type, name: str, field: Any) -> str:
    if (block.__name__, name) in FILLED_IN:
        return FILLED_IN[block.__name__, name]
    if field.is_required():
        return "required"
    return f"`{field.get_default(call_default_factory=True)}`"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Annotated and "KVScheme" not in str(annotation) and "gt=0" not in str(annotation):
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is Union:
        return "`" + " or ".join(_type(kind).strip("`") for kind in get_args(annotation)) + "`"
    text = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    text = re.sub(r"Annotated\[([\w.]+KVScheme), BeforeValidator\(.*?\)\]", r"\1", text)
    text = re.sub(r"(typing|kveval\.\w+(\.\w+)?)\.", "", text)
    text = re.sub(r"Annotated\[int,.*?gt=0\)\]\)?\]", "length", text)
    return "`" + text.replace("|", "or").replace("NoneType", "None") + "`"


def _formats() -> str:
    facts = [describe(get_scheme(name)) for name in scheme_names()]
    rows = [
        f"| [`{f['name']}`](#{f['name']}) | {f['summary']} "
        f"| {f['bytes']['bits_per_element']['key']:g} / {f['bytes']['bits_per_element']['value']:g} "
        f"| {f['bytes']['example_token']:,.10g} | {f['bytes']['fewer_than_bf16']:.2f}x "
        f"| {'yes' if f['append_invariant'] else 'no'} |"
        for f in facts
    ]
    head = (
        "| format | keys and values | bits per element, K / V | bytes per token | vs BF16 | append-invariant |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    sections = "\n".join(format_markdown(f) for f in facts)
    return head + "\n".join(rows) + "\n\n" + _elements() + "\n" + _scale_rules() + "\n" + sections


def _elements() -> str:
    """Every element: its numbers, where it is defined, and what GPUs do with its codes."""
    head = "## Elements\n\nA code stands for a number, which is read times a scale (plus a zero point).\n\n"
    elements = [get_element(name) for name in element_names()]
    rows = [f"| `{e.name}` | {e.bits} | {levels_text(e)} | {e.source} |" for e in elements]
    table = "| element | bits | numbers | defined by |\n| --- | --- | --- | --- |\n" + "\n".join(rows)
    columns = "".join(f" {gpu} |" for gpu in GPUS)
    rules = " --- |" * len(GPUS)
    answers = []
    for element in elements:
        found = native(element.name)
        for question, by_gpu in (("convert", found.convert), ("multiply", found.multiply)):
            answers.append(f"| `{element.name}`: {question} |" + "".join(f" {answer} |" for answer in by_gpu))
    return f"{head}{table}\n\n{HARDWARE_INTRO}\n| |{columns}\n| --- |{rules}\n" + "\n".join(answers) + "\n"


def _scale_rules() -> str:
    rows = [f"| `{name}` | {rule.summary} | {', '.join(rule.granularities)} |" for name, rule in SCALE_RULES.items()]
    table = "| scale rule | the scale is | granularities |\n| --- | --- | --- |\n" + "\n".join(rows)
    return f"## Scale rules\n\n{table}\n"


HARDWARE_INTRO = """\
What GPUs do with the codes themselves: how a code becomes a 16-bit number, and whether tensor cores multiply codes as
they are. Scales are applied apart, except e2m1 with the block scales of NVFP4 and MXFP4 on Blackwell. kveval's
kernels do what Hopper's column says and multiply 16-bit numbers; without them, codes go through a table.
"""


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
