"""Which tasks see which damage, from records whose losses are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kveval.python_file import load_python_file

ROOT = Path(__file__).parents[1]
headroom = load_python_file(ROOT / "scripts" / "headroom.py")


def records(**costs: float) -> pd.DataFrame:
    """Eight clusters of one sample; each arm's answer NLL is the baseline's, plus its cost, plus a little scatter."""
    noise = np.random.default_rng(0).normal(0, 0.01, 8)
    rows = []
    for arm, role in (("bf16", "baseline"), ("mild", "scheme"), ("coarse", "scheme"), ("crush", "crush")):
        for i in range(8):
            scatter = 0.0 if arm == "bf16" else noise[i]
            rows.append(
                {
                    "task": "t",
                    "context_length": 1024,
                    "scheme": arm,
                    "role": role,
                    "sample_id": str(i),
                    "cluster": str(i),
                    "status": "ok",
                    "answer_nll": 1.0 + costs.get(arm, 0.0) + scatter,
                    "exact_match": float(i < 6),
                    "accepted_prefix": 0.5 + i / 16,
                }
            )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("costs", "seen"),
    [
        ({"mild": 0.1, "coarse": 0.5, "crush": 3.0}, "mild"),
        ({"coarse": 0.5, "crush": 3.0}, "coarse"),
        ({"crush": 3.0}, "crush"),
        ({}, None),
        ({"crush": -3.0}, None),
    ],
)
def test_the_mildest_damage_that_shows(costs: dict[str, float], seen: str | None) -> None:
    cell = headroom.look(records(**costs), "t", 1024, ["mild", "coarse"])
    assert cell.seen == seen
    assert cell.exact_match == 0.75
    assert [loss.value for loss in cell.costs.values()] == pytest.approx(
        [costs.get(arm, 0.0) for arm in ("mild", "coarse", "crush")], abs=0.01
    )
    shown = headroom.text(cell)
    assert shown.startswith(f"**{seen}**; 75 % (72 %); " if seen else "blind; ")


def test_a_cell_without_values_says_so() -> None:
    frame = records(crush=1.0)
    frame["answer_nll"] = np.nan
    assert headroom.text(headroom.look(frame, "t", 1024, ["mild", "coarse"])) == "nothing to score"


def test_the_page_shows_what_the_published_runs_say() -> None:
    page = (ROOT / "docs" / "explanation" / "what-tasks-see.md").read_text(encoding="utf-8")
    tables = headroom.tables(sorted((ROOT / "results").glob("headroom-*-h200")), headroom.SCHEMES)
    assert f"{headroom.START}\n\n{tables}\n{headroom.END}" in page, "run scripts/headroom.py as the page says"


def test_two_runs_of_one_cell_are_refused() -> None:
    run = ROOT / "results" / "headroom-smollm2-135m-h200"
    with pytest.raises(SystemExit, match="niah_single at 1k is in another run too"):
        headroom.tables([run, run], headroom.SCHEMES)
