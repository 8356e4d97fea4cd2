"""The command line. Each command reads its input, calls the library once, and shows the result; no logic here.

Results go to stdout (as JSON with --json), everything else to stderr. Nothing heavy is imported before a command
needs it.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kveval.cli_lm_eval import lm_eval
from kveval.cli_task import app as task_app
from kveval.cli_traffic import app as traffic_app
from kveval.errors import ExitCode, KvevalError

if TYPE_CHECKING:
    from kveval.config import SweepConfig
    from kveval.evaluate import Evaluation
    from kveval.gate import Verdict

app = typer.Typer(
    help="What does a narrower KV cache cost? Sweep, compare with the BF16 cache, report the exchange rate, gate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Models that package wheels carry: list them, fetch one.", invoke_without_command=True)
app.add_typer(models_app, name="models")

app.add_typer(traffic_app, name="traffic")
app.add_typer(task_app, name="task")
app.command("lm-eval")(lm_eval)

ConfigFile = Annotated[Path, typer.Argument(help="Sweep config (YAML); `kveval init` writes one.")]
RunFolder = Annotated[Path, typer.Argument(help="Run folder, as `kveval run` prints it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a config key: --set a.b=value.")]
Name = Annotated[str | None, typer.Option(help="Name of the run; its folder is runs/NAME.")]
Out = Annotated[Path | None, typer.Option(help="Run folder, instead of runs/NAME.")]


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write the config.")] = Path("sweep.yaml"),
) -> None:
    """Write a commented sweep config to start from."""
    from kveval.content import content_dir

    if path.exists():
        raise KvevalError(f"{path} exists already.", remedy="Give another path, or delete it first.")
    text = (content_dir("configs") / "quickstart.yaml").read_text(encoding="utf-8")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvevalError(f"can't write {path}: {error.strerror}.", remedy="Give another path.") from error
    _say(f"Wrote {path}. Next: kveval plan {path}")


@app.command()
def plan(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show what a sweep would run and whether its samples can decide its gate. Loads no weights."""
    from kveval.models import load_tokenizer
    from kveval.report.plan_text import plan_text
    from kveval.run import make_samples, plan_sweep

    sweep = _load(config, overrides, None)
    resolved, tasks = plan_sweep(sweep)
    samples = make_samples(resolved, tasks, load_tokenizer(sweep.model))
    clusters = {cell: len({s.cluster for s in found}) for cell, found in samples.items()}
    if as_json:
        _print_json(resolved.to_dict())
    else:
        sys.stdout.write(plan_text(resolved, clusters))


@app.command()
def run(
    config: ConfigFile,
    name: Name = None,
    out: Out = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run a sweep (or resume it), then report and apply its gate. Exits with the gate's code."""
    from kveval.progress import progress_bar
    from kveval.run import run_sweep

    sweep = _load(config, overrides, name)
    folder = out or Path("runs") / sweep.name
    try:
        with progress_bar() as progress:
            summary = run_sweep(sweep, folder, progress=progress)
    except KeyboardInterrupt:
        _say("kveval: interrupted. What was measured is kept; run the same command again to resume.")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    _say(f"{summary.measured} records measured, {summary.errors} with errors, in {folder}.")
    _finish(folder, as_json=as_json)


@app.command()
def report(path: RunFolder, as_json: AsJson = False) -> None:
    """Write a run's report (HTML, plots, tables) and print its table. Always exits 0 if the report was written."""
    evaluation = _report(path)
    _show(evaluation, as_json=as_json)


@app.command()
def gate(
    path: RunFolder,
    config: Annotated[
        Path | None, typer.Option(help="Take the gate from this config instead of the declared one.")
    ] = None,
    post_hoc: Annotated[
        bool,
        typer.Option("--post-hoc", help="Accept a gate that was not declared before the run, and mark it."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Hold a run against its declared gate; write gate.json, junit.xml and summary.md; exit with its code."""
    from kveval.config import load_config
    from kveval.evaluate import evaluate
    from kveval.report.ci import gate_dict, gate_text

    other = load_config(config).gate if config else None
    if config and other is None:
        raise KvevalError(f"{config} declares no gate.", remedy="Add a `gate:` block to it.")
    verdict = evaluate(path, gate=other, post_hoc=post_hoc).verdict
    if verdict is None:
        raise KvevalError(
            f"{path} was run without a gate.",
            remedy="Give one with --config and --post-hoc, or declare one and run the sweep again.",
        )
    _write_verdict(verdict, path)
    if as_json:
        _print_json(gate_dict(verdict))
    else:
        sys.stdout.write(gate_text(verdict))
    raise typer.Exit(verdict.exit_code)


@app.command()
def capacity(
    model: Annotated[str, typer.Argument(help="Name, hub id, folder or .gguf file; no weights are loaded.")],
    gpu: Annotated[str, typer.Option(help="A GPU of the table, or a size such as 80gb or 80gib.")] = "h100-80gb",
    context: Annotated[list[str] | None, typer.Option(help="Context length in tokens (4096, 4k); repeatable.")] = None,
    schemes: Annotated[list[str] | None, typer.Option("--scheme", help="Scheme to count; repeatable.")] = None,
    reserve: Annotated[float, typer.Option(min=0.0, max=0.99, help="Fraction of the GPU's memory left free.")] = 0.1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs in the group.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Count sessions per GPU for each scheme and context length. Needs no GPU."""
    from kveval.capacity import Budget, sessions_table
    from kveval.config import CapacityConfig, ModelConfig, parse_length
    from kveval.formats.layout import misfit
    from kveval.formats.spec import get_scheme, scheme_names
    from kveval.models import describe
    from kveval.report.tables import capacity_json, capacity_table

    lengths = [parse_length(text) for text in context or ["4k", "32k", "128k"]]
    if bad := [n for n in lengths if not isinstance(n, int) or n < 1]:
        raise KvevalError(f"--context {bad[0]!r} is not a length.", remedy="Write 4096, 4k or 1M.")
    info = describe(ModelConfig(id=model), device="cpu")
    wanted = [get_scheme(s) for s in dict.fromkeys(["bf16", *(schemes or scheme_names())]) if s != "crush"]
    if not schemes:
        misfits = {s.name: why for s in wanted if (why := misfit(s, info.geometry))}
        wanted = [s for s in wanted if s.name not in misfits]
        for name, why in misfits.items():
            _say(f"{name} is left out: {why}")
    settings = CapacityConfig(gpu=gpu, reserve=reserve, tensor_parallel=tensor_parallel)
    budget = Budget.from_config(settings, weights_bytes=info.weights_bytes, where="--gpu")
    table = sessions_table(info.geometry, wanted, lengths, budget=budget, block_size=settings.block_size)
    if as_json:
        _print_json(capacity_json(table))
    else:
        _print(capacity_table(table, model=model))


@app.command()
def formats(as_json: AsJson = False) -> None:
    """List the storage formats: bits per element, bytes against BF16, what each is."""
    from kveval.formats.spec import get_scheme, scheme_names
    from kveval.report.format_text import describe, formats_table

    schemes = [get_scheme(name) for name in scheme_names()]
    if as_json:
        _print_json([describe(scheme) for scheme in schemes])
    else:
        _print(formats_table(schemes))


@app.command("show-format")
def show_format(
    name: Annotated[str, typer.Argument(help="A name from `kveval formats`, or a scheme of the sweep in --config.")],
    head_dim: Annotated[int, typer.Option(min=1, help="Head size to count for.")] = 128,
    config: Annotated[Path | None, typer.Option(help="Sweep config whose schemes can be named, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say all about a storage format: numbers, scales, bytes and layout, engines that use it, what GPUs do with it."""
    from kveval.formats.spec import get_scheme
    from kveval.report.format_text import describe, format_renderable

    own = {scheme.name: scheme for scheme in _load(config, None, None).schemes} if config else {}
    facts = describe(own[name] if name in own else get_scheme(name), head_dim=head_dim)
    if as_json:
        _print_json(facts)
    else:
        _print(format_renderable(facts))


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Name, hub id, folder or .gguf file.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to calibrate on; its first tokens are used.")],
    out: Annotated[Path, typer.Option(help="Where to write the scales (JSON).")],
    scheme: Annotated[str, typer.Option(help="Preset whose static or fixed formats get scales.")] = "fp8_per_head",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in all, a multiple of --length.")] = 4096,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each sequence; none is padded.")] = 2048,
    as_json: AsJson = False,
) -> None:
    """Find scales for static formats from the largest keys and values that a model makes of a text."""
    from kveval.calibrate import calibrate, read_text
    from kveval.config import ModelConfig
    from kveval.files import to_json, write_atomic, writing
    from kveval.formats.spec import get_scheme
    from kveval.progress import progress_bar

    if out.exists():
        raise KvevalError(f"{out} exists already.", remedy="Give another path, or delete it first.")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    wanted = get_scheme(scheme, where="--scheme")
    with progress_bar() as progress:
        found = calibrate(
            ModelConfig(id=model), read_text(text), wanted, tokens=tokens, length=length, progress=progress
        )
    with writing(out):
        write_atomic(out, to_json(found.to_dict()))
    if as_json:
        _print_json(found.to_dict())
    else:
        sys.stdout.write(found.summary())
    entry = f"{{name: my_{scheme}, extends: {scheme}, scales: {out.name}}}"
    _say(f"Wrote {out}. Use it in a sweep: {entry}, with the path relative to the sweep's file.")


@models_app.callback()
def models(context: typer.Context) -> None:
    """Models that package wheels carry: list them, fetch one."""
    if context.invoked_subcommand is None:
        models_list()


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """List the models that package wheels carry, and whether they are here."""
    from kveval.models import known_models, resolve
    from kveval.report.tables import models_table

    rows = [
        {
            "name": name,
            "hub_id": entry.hub_id,
            "licence": entry.licence,
            "download_bytes": entry.size,
            "present": resolve(_Named(name)).is_present,
        }
        for name, entry in known_models().items()
    ]
    if as_json:
        _print_json(rows)
    else:
        _print(models_table(rows))


@models_app.command("fetch")
def models_fetch(name: Annotated[str, typer.Argument(help="A name from `kveval models list`.")]) -> None:
    """Download, verify and convert a model from the table, once; afterwards no network is needed."""
    from kveval.model_fetch import fetch

    folder = fetch(name, report=_say)
    _say(f"{name} is ready in {folder}.")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show versions, hardware, which models are here, and whether the packed path works on this machine."""
    from kveval.doctor import examine

    findings = examine()
    if as_json:
        _print_json(findings)
    else:
        from kveval.native_note import NativePaths
        from kveval.report.native import native_table
        from kveval.report.tables import findings_table, kernels_table

        _print(findings_table(findings))
        _print(kernels_table(findings["kernels"]))
        _print(native_table(NativePaths.from_dict(findings["native"])))


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Folder for the record and the plots; made if missing.")] = Path("bench"),
    schemes: Annotated[
        str, typer.Option(help="Formats, separated by commas, or all; bf16 is always timed.")
    ] = "fp8_per_token_head,k8v4,int4_g64,nvfp4",
    lengths: Annotated[
        str | None, typer.Option(help="Tokens that are cached; 1k,8k,32k,128k, on a CPU 256,1k.")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Sequences at once; 1,4, on a CPU 1.")] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Attention: names, or query heads/KV heads/head size (/layers); llama-8b,qwen2.5-0.5b,gemma-3-1b, "
            "on a CPU qwen2.5-0.5b."
        ),
    ] = None,
    what: Annotated[str, typer.Option(help="What is timed, of decode, append and step.")] = "decode,append,step",
    model: Annotated[str | None, typer.Option(help="Time one-token forwards of this model as well.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    replays: Annotated[int, typer.Option(min=1, help="Samples of every figure; its median is shown.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Time the kernels against BF16, torch's attention and the bandwidth of a copy. Needs a GPU to mean anything."""
    from kveval.bench.bench import Asked, bench_device, run_bench
    from kveval.bench.plot import bench_plots
    from kveval.bench.shapes import parse_batches, parse_lengths, parse_schemes, parse_shapes, parse_what
    from kveval.bench.tables import bench_tables
    from kveval.files import to_json, write_atomic, writing
    from kveval.report.figure import write_plot

    place = bench_device(device)
    on_gpu = place.type == "cuda"
    asked = Asked(
        schemes=parse_schemes(schemes),
        shapes=parse_shapes(shapes or ("llama-8b,qwen2.5-0.5b,gemma-3-1b" if on_gpu else "qwen2.5-0.5b")),
        lengths=parse_lengths(lengths or ("1k,8k,32k,128k" if on_gpu else "256,1k")),
        batches=parse_batches(batches or ("1,4" if on_gpu else "1")),
        what=parse_what(what),
        replays=replays,
        model=model,
    )
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    record = run_bench(asked, place, report=_say)
    with writing(out):
        write_atomic(out / "bench.json", to_json(record.to_dict()))
        for plot in bench_plots(record):
            write_plot(plot, out)
    if as_json:
        _print_json(record.to_dict())
    else:
        _print(bench_tables(record))
    _say(f"Wrote {out / 'bench.json'}.")


@app.command()
def schema() -> None:
    """Print the JSON schema of sweep configs."""
    from kveval.config import SweepConfig

    _print_json(SweepConfig.model_json_schema())


@app.command()
def ls(folder: Annotated[Path, typer.Argument(help="Folder of runs.")] = Path("runs"), as_json: AsJson = False) -> None:
    """List runs: model, records, whether they are finished."""
    from kveval.report.tables import runs_table
    from kveval.store import list_runs

    rows = list_runs(folder)
    if as_json:
        _print_json(rows)
    else:
        _print(runs_table(rows))


@app.command()
def show(path: RunFolder, as_json: AsJson = False) -> None:
    """Print what a run is: its config, its cells and the machine it ran on."""
    from kveval.report.tables import run_summary
    from kveval.store import read_env, read_plan

    what = {"plan": read_plan(path), "env": read_env(path)}
    if as_json:
        _print_json(what)
    else:
        _print(run_summary(what["plan"], what["env"]))


class _Named:
    """A model named on the command line."""

    revision = None
    dtype = "auto"
    chat_template = "auto"

    def __init__(self, name: str) -> None:
        self.id = name


def _load(config: Path, overrides: list[str] | None, name: str | None) -> SweepConfig:
    from kveval.config import load_config

    return load_config(config, [*(overrides or []), *([f"name={name}"] if name else [])])


def _report(path: Path) -> Evaluation:
    from kveval.evaluate import evaluate
    from kveval.files import writing
    from kveval.report.html import write_report

    evaluation = evaluate(path)
    with writing(path):
        write_report(path, evaluation.report)
    return evaluation


def _show(evaluation: Evaluation, *, as_json: bool) -> None:
    from kveval.report.tables import report_json, terminal_report

    if as_json:
        _print_json(report_json(evaluation.report))
    else:
        _print(terminal_report(evaluation.report))
        _say(f"Report: {evaluation.path / 'report.html'}")


def _finish(path: Path, *, as_json: bool) -> None:
    """After a sweep: report, gate files, exit code."""
    evaluation = _report(path)
    if evaluation.verdict is not None:
        _write_verdict(evaluation.verdict, path)
    _show(evaluation, as_json=as_json)
    raise typer.Exit(_exit_code(evaluation))


def _exit_code(evaluation: Evaluation) -> int:
    """The gate's code; without a gate, whether anything was measured and no control failed."""
    if evaluation.verdict is not None:
        return evaluation.verdict.exit_code
    failed = {c.severity for c in evaluation.controls if c.blocks}
    if "invalid" in failed:
        return ExitCode.INVALID
    unmeasured = bool((evaluation.records["status"] != "ok").any())
    return ExitCode.INCOMPLETE if failed or unmeasured else ExitCode.PASS


def _write_verdict(verdict: Verdict, path: Path) -> None:
    """The gate's files in the run folder, and annotations where GitHub Actions reads them."""
    import os

    from kveval.files import writing
    from kveval.report.ci import github_annotations, write_gate_files

    with writing(path):
        write_gate_files(verdict, path)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(verdict):
            sys.stderr.write(line + "\n")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=False, allow_nan=False) + "\n")


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console().print(renderable)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def main() -> NoReturn:
    """Entry point: user errors become one message and an exit code, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except KvevalError as error:
        _say(f"kveval: {error}")
        sys.exit(ExitCode.USAGE)
    sys.exit(ExitCode.PASS)


if __name__ == "__main__":
    main()
