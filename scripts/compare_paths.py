"""Do two runs of one sweep, by packed kernels and by decoded tensors, score alike? Prints a table.

    kveval run sweep.yaml --out runs/packed
    kveval run sweep.yaml --set attention=dequant --out runs/dequant
    python scripts/compare_paths.py runs/packed runs/dequant --out paths.json

--out writes the rows as JSON. Samples are paired. The yardstick of BF16 and of formats that lose little is the A/A
control of the first run: BF16 against itself by other arithmetic. In a coarse format a number that rounds the other way
moves a whole code, and later layers with it: there, samples scatter more, and the question is whether their mean moves.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from kveval.files import to_json, write_atomic
from kveval.intervals import fit_loss
from kveval.store import read_records

KEY = ["task", "context_length", "scheme", "sample_id"]


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packed", type=Path)
    parser.add_argument("dequant", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = compare(read_records(options.packed), read_records(options.dequant))
    for row in rows:
        sys.stdout.write(
            f"{row['task']:16} {row['context_length']:7} {row['scheme']:22} {row['samples']:4} samples  "
            f"|dNLL| {row['mean_abs_nll']:.5f}  A/A {row['aa_mean_abs_nll']:.5f}  "
            f"mean {row['mean_nll']:+.5f} ({row['low']:+.5f} to {row['high']:+.5f})  "
            f"exact match differs in {row['exact_match_differs']}\n"
        )
    if options.out:
        write_atomic(
            options.out, to_json({"packed": str(options.packed), "dequant": str(options.dequant), "rows": rows})
        )


def compare(packed: pd.DataFrame, dequant: pd.DataFrame) -> list[dict[str, Any]]:
    """One row per task, length and scheme: how far the answer NLL of a sample differs, in nats per token.

    Its mean absolute difference and that of A/A; its mean, packed less decoded, with a 95 % interval over clusters.

    Raises:
        ValueError: if the runs have no samples in common.
    """
    scored = [of[of["status"] == "ok"] for of in (packed, dequant)]
    both = scored[0].merge(scored[1], on=KEY, suffixes=("", "_dequant"))
    if both.empty:
        raise ValueError("the runs have no samples in common")
    both["off"] = both["answer_nll"] - both["answer_nll_dequant"]
    noise = _noise(scored[0])
    rows = []
    for (task, length, scheme), of in both[both["role"].isin(["baseline", "scheme"])].groupby(KEY[:3], sort=False):
        mean = fit_loss(of["off"].to_numpy(float), pd.factorize(of["cluster"])[0], bounded=False)
        differs = of["exact_match"] != of["exact_match_dequant"]
        rows.append(
            {
                "task": task,
                "context_length": int(length),
                "scheme": scheme,
                "samples": len(of),
                "mean_abs_nll": float(of["off"].abs().mean()),
                "aa_mean_abs_nll": noise[task, length],
                "mean_nll": mean.value,
                "low": mean.lower(0.025),
                "high": mean.upper(0.025),
                "exact_match_differs": int((differs & of["exact_match"].notna()).sum()),
                "paths": sorted(set(of["attention_path"])),
                "paths_dequant": sorted(set(of["attention_path_dequant"])),
            }
        )
    return rows


def _noise(records: pd.DataFrame) -> dict[tuple[str, int], float]:
    """Mean absolute difference of A/A from the baseline, by task and length."""
    base, again = (records[records["role"] == role] for role in ("baseline", "aa"))
    both = base.merge(again, on=["task", "context_length", "sample_id"], suffixes=("", "_aa"))
    off = (both["answer_nll"] - both["answer_nll_aa"]).abs()
    return off.groupby([both["task"], both["context_length"]]).mean().to_dict()


if __name__ == "__main__":
    main()
