"""From a run folder to everything that is said of it: sessions, controls, verdict, report data. No torch, no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import ValidationError

from kveval.capacity import Budget, Sessions, sessions_table
from kveval.config import GateConfig, SweepConfig
from kveval.controls import ControlResult, check_controls
from kveval.errors import ConfigError, StoreError, UnsupportedError, first_problem
from kveval.formats.spec import get_scheme
from kveval.gate import Verdict, check_declared, decide
from kveval.geometry import LayerGeometry
from kveval.layer_note import read_layer_errors
from kveval.native_note import read_native_paths
from kveval.store import PLAN, read_env, read_plan, read_records

if TYPE_CHECKING:
    from kveval.report.model import ReportData

__all__ = ["Evaluation", "evaluate", "sessions_of"]


@dataclass(frozen=True)
class Evaluation:
    """A run, judged. `verdict` is None where no gate was declared and none was given."""

    path: Path
    config: SweepConfig
    records: pd.DataFrame
    sessions: dict[tuple[str, int], Sessions]
    controls: tuple[ControlResult, ...]
    verdict: Verdict | None
    report: ReportData


def evaluate(path: str | Path, *, gate: GateConfig | None = None, post_hoc: bool = False) -> Evaluation:
    """Judge a run from its records.

    Args:
        path: The run folder.
        gate: Judge by this gate instead of the declared one.
        post_hoc: Accept a gate that was not declared before the run; the verdict is marked so.

    Raises:
        StoreError: the folder holds no readable run.
        ConfigError: `gate` is not the declared one and `post_hoc` is False.
    """
    from kveval.report.model import build_report

    plan, env, records = read_plan(path), read_env(path), read_records(path)
    config, sessions, expected = _resolved(path, plan)
    used = gate or config.gate
    verdict = None
    if used is not None:
        late = check_declared(used, plan["gate_digest"], allow_post_hoc=post_hoc)
        verdict = decide(
            records,
            used,
            expected=expected,
            sessions_gain=_gains(sessions, used.scheme, config.baseline),
            post_hoc=late,
            lossless=[s.name for s in config.schemes if not s.lossy],
        )
    controls = verdict.controls if verdict else tuple(check_controls(records, None, expected=expected))
    report = build_report(
        records, plan, sessions=sessions, verdict=verdict, controls=controls, env=env,
        layers=read_layer_errors(path), native=read_native_paths(path),
    )  # fmt: skip
    return Evaluation(Path(path), config, records, sessions, controls, verdict, report)


def _resolved(
    path: str | Path, plan: Mapping[str, Any]
) -> tuple[SweepConfig, dict[tuple[str, int], Sessions], dict[tuple[str, int], int]]:
    """The sweep of a stored plan, its sessions per GPU, and its samples by (task, context length)."""
    try:
        config = SweepConfig.model_validate(plan["config"])
        expected = {(c["task"], c["context_length"]): c["samples"] for c in plan["cells"]}
        return config, sessions_of(config, plan["model"]), expected
    except ValidationError as error:
        raise _unreadable(path, first_problem(error, "config")) from error
    except (ConfigError, UnsupportedError) as error:
        raise _unreadable(path, error.message) from error
    except (KeyError, TypeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _unreadable(path: str | Path, problem: str) -> StoreError:
    return StoreError(
        f"this kveval can't read {Path(path) / PLAN}: {problem.removesuffix('.')}.",
        remedy="Use the kveval version that wrote it, with the packages whose formats it used; or run the sweep again "
        "under another --name.",
    )


def sessions_of(config: SweepConfig, model: Mapping[str, Any]) -> dict[tuple[str, int], Sessions]:
    """Sessions per GPU by (scheme, context length), the baseline's included, on the sweep's `capacity` GPU."""
    layers = [LayerGeometry(**layer) for layer in model["geometry"]]
    budget = Budget.from_config(config.capacity, weights_bytes=model["weights_bytes"])
    lengths = sorted({n for task in config.tasks for n in config.lengths_of(task)})
    schemes = [get_scheme(config.baseline), *config.schemes]
    return sessions_table(layers, schemes, lengths, budget=budget, block_size=config.capacity.block_size)


def _gains(sessions: dict[tuple[str, int], Sessions], scheme: str, baseline: str) -> dict[int, float]:
    """Sessions of the scheme per session of the baseline, by context length."""
    return {
        length: found.fractional / sessions[baseline, length].fractional
        for (name, length), found in sessions.items()
        if name == scheme and sessions[baseline, length].fractional > 0
    }
