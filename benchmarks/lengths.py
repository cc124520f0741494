"""Rows of many lengths, as real data brings them, beside the same rows padded to one of few.

    python -m benchmarks.lengths

What a row of one length needed is kept for the next of that length: an exact length hardly ever
comes again. The third arm runs padded rows as CUDA graphs where their form comes again, as training
does on a GPU. One model, forward and backward of each row. All arms see a part of the rows twice;
measured are the others, arms in turn, and a figure is the median over them.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.distributed_models import Planned, planned, weights_of
from benchmarks.interleaved import Spread, ratios
from benchmarks.results_file import RESULTS, console, described, write
from benchmarks.step_mixes import SEED, Shape
from tlora_fx.cost.plan import Plan
from tlora_fx.model.batch import JobTokens, PackedBatch, pack
from tlora_fx.model.row_ladder import repeating_length
from tlora_fx.parallel.apply import StepRunner, apply
from tlora_fx.parallel.mesh import Mesh

JOBS = 8


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    cuda = given.device == "cuda"
    shape = Shape(layers=given.layers) if cuda else _small(given.layers)
    made = planned(shape, Plan(planner="single"), Mesh.alone(torch.device(given.device)), jobs=JOBS)
    found: dict[str, Any] = described("lengths", given.device) | {
        "layers": given.layers,
        "rows": [],
    }
    out = console()
    for tokens in (int(part) for part in given.tokens.split(",")):
        drawn = _rows(shape, tokens, given.rows)
        exact = [pack(row) for row in drawn]
        padded = [pack(row, repeating_length(_tokens(row))) for row in drawn]
        arms: dict[str, tuple[StepRunner, list[PackedBatch]]] = {
            "exact": (made.runner, exact), "repeating": (made.runner, padded),
        }  # fmt: skip
        largest = max(row.input_ids.numel() for row in padded)
        graphs: Any = apply(made.model, made.plan, made.mesh, largest_row=largest)
        if cuda:
            arms["graphs"] = graphs, padded
        warm = given.rows * 2 // 3
        for runner, rows in arms.values():
            for row in (*rows[:warm], *rows[:warm]):
                _milliseconds(made, runner, row)
        times: dict[str, list[float]] = {name: [] for name in arms}
        for place in range(warm, given.rows):
            for name, (runner, rows) in arms.items():
                times[name].append(_milliseconds(made, runner, rows[place]))
        found["rows"].append({
            "tokens": tokens, "padding": _sum(padded) / _sum(exact) - 1,
            "lengths": {
                name: len({row.input_ids.numel() for row in rows})
                for name, (_, rows) in arms.items()
            },
            "ms": {name: Spread.of(ms).json() for name, ms in times.items()},
            "exact over it": {
                name: ratios(times["exact"], ms).json() for name, ms in times.items()
            },
            "forms captured": len(graphs.graphs.keys) if cuda else 0,
            "refused": graphs.graphs.refused if cuda else "",
        })  # fmt: skip
        out.print(found["rows"][-1], soft_wrap=True)
    write(Path(given.out) / f"lengths-{found['date']}.json", found)


def _sum(rows: list[PackedBatch]) -> int:
    return sum(row.input_ids.numel() for row in rows)


def _milliseconds(made: Planned, runner: StepRunner, row: PackedBatch) -> float:
    """Of forward and backward of one row."""
    weights = weights_of([row], made.mesh.device)
    _synchronize()
    started = time.perf_counter()
    runner.run([row], weights)
    _synchronize()
    return (time.perf_counter() - started) * 1e3


def _rows(shape: Shape, tokens: int, count: int) -> list[list[JobTokens]]:
    """Rows of about so many tokens: sequences of 60 to 240, dealt to the jobs in turn."""
    draw = random.Random(SEED)  # noqa: S311  (data, not secrets)
    found = []
    for _ in range(count):
        own: list[list[list[int]]] = [[] for _ in range(JOBS)]
        for place in range(max(JOBS, tokens // 150)):
            length = draw.randint(60, 240)
            own[place % JOBS].append([draw.randrange(shape.vocabulary) for _ in range(length)])
        found.append([JobTokens(ids, ids, seed, 0) for seed, ids in enumerate(own)])
    return found


def _tokens(row: list[JobTokens]) -> int:
    return sum(len(sequence) for job in row for sequence in job.sequences)


def _small(layers: int) -> Shape:
    return Shape(
        layers=layers, hidden=64, intermediate=128, heads=4, key_value_heads=2, vocabulary=512,
        dtype="float32",
    )  # fmt: skip


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1280,4800")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=40, help="of each number of tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default=str(RESULTS), help="folder for the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
