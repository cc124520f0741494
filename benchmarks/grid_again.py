"""Predict again what the case `grid` of `distributed.py` measured, by today's code and profiles.

    python -m benchmarks.grid_again benchmarks/results/distributed-grid-2026-11-22.json

Needs no GPU: times and memory are the file's, plans and predictions are made anew for the GPU that
it names. All its cases that hold rows of plans are taken together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.distributed_grid import JOBS, Row, predicted, round_of, summary
from benchmarks.distributed_models import traced_model
from benchmarks.distributed_plans import plans_of
from benchmarks.results_file import console
from benchmarks.step_mixes import Shape
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.profile_sources import profile_for
from tlora_fx.cost.step_time import CostModel


def main() -> None:
    """Print both predictions of each row, and how far today's are off."""
    asked = _arguments()
    found = json.loads(asked.file.read_text())
    rows = again(found, asked)
    made = Table("plan", "tokens a GPU", "measured", "then", "now", "", "memory")
    for row in rows:
        made.add_row(
            row["plan"], f"{row['tokens_per_gpu']:,}", f"{row['ms']:.1f} ms", f"{row['then']:.1f}",
            f"{row['predicted_ms']:.1f}", f"{row['predicted_ms'] / row['ms'] - 1:+.1%}",
            f"{row['predicted_bytes'] / row['peak_bytes'] - 1:+.1%}" if row["peak_bytes"] else "",
        )  # fmt: skip
    out = console()
    out.print(made)
    for name, value in summary(rows).items():
        out.print(f"{name}: {value}", highlight=False, soft_wrap=True)


def again(found: dict[str, Any], asked: argparse.Namespace) -> list[Row]:
    """The measured rows of a file with what is predicted now; `then` is what was.

    Rows of plans that there are no more are left out.
    """
    model = traced_model(Shape(layers=asked.layers), JOBS)
    facts = facts_of(model)
    cost = CostModel(facts, profile_for(facts, found["hardware"]["gpu"], allow_estimated=False))
    world = found["processes"]
    cases = [one for one in found["cases"].values() if "plan" in (one.get("rows") or [{}])[0]]
    rows = [row for case in cases for row in case["rows"] if row["ms"] is not None]
    largest = max(row["tokens_per_gpu"] for row in rows)
    plans = plans_of(model, cost, round_of(world, largest, asked.length), world)
    return [
        row
        | {"then": row["predicted_ms"]}
        | predicted(cost, plans[row["plan"]], row["tokens_per_gpu"], asked.length)
        for row in rows
        if row["plan"] in plans
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grid_again", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("file", type=Path, help="that a grid wrote")
    parser.add_argument("--layers", type=int, default=32, help="of the model that was measured")
    parser.add_argument("--length", type=int, default=160, help="tokens of a sequence")
    asked = parser.parse_args()
    if not asked.file.is_file():
        parser.error(f"there is no file {asked.file}; grids lie in benchmarks/results")
    return asked


if __name__ == "__main__":
    main()
