"""A sweep whose jobs stop once they learn no more, against the same jobs trained to the end.

    python -m benchmarks.sweep --device cpu --threads 1
    python -m benchmarks.sweep --data gsm8k/train.jsonl

Both arms are `examples/sweep/sweep.py`: 24 jobs through one running model, eight at a time; who
waits takes the rows of who ends. What is right is compared first: each job's losses, step for step
as far as it went in both arms, and the evaluations by which it was judged.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.arguments import parser_of
from benchmarks.interleaved import turns
from benchmarks.results_file import console, described, write
from tlora_fx import TrainerCallback

EXAMPLE = "examples.sweep.sweep"
#: Of losses of the two arms, relative: rows are shared with others there, in float32.
BOUND = 1e-3
ARMS = ("to the end", "stopped early")

Figures = dict[str, Any]


def main() -> None:
    """Train both arms in turns, compare, print and write."""
    given = _arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    found = described("sweep", given.device) | {"threads": torch.get_num_threads(), "arms": {}}
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        for turn, arm in turns(ARMS, given.turns):
            figures = train(arm, given, Path(name) / f"{arm} {turn}")
            found["arms"].setdefault(arm, []).append(figures)
            print(f"{arm}: {figures['seconds']:.1f} s", flush=True)
        for turn in range(given.turns):
            found["differences"] = compare(*(Path(name) / f"{arm} {turn}" for arm in ARMS))
    write(given.out / f"sweep-{found['date']}.json", found)
    show(found)


class Noting(TrainerCallback):
    """Notes the round's jobs as they come and end, and when training began."""

    def __init__(self) -> None:
        self.joins: list[str] = []
        self.begun = self.processor = 0.0

    def started(self, runs: Any) -> None:
        """From here on only training and its checkpoints take time."""
        self.begun, self.processor = time.perf_counter(), time.process_time()

    def joined(self, run: Any) -> None:
        """It takes rows that another has left, or that nobody had yet."""
        self.joins.append(run.job.name)


def train(arm: str, given: argparse.Namespace, output: Path) -> Figures:
    """Train the sweep; its seconds, whole and from the first round on, and what became of jobs."""
    sweep: Any = import_module(EXAMPLE)
    jobs = sweep.sweep_jobs(given.data or sweep.DATA, stop_early=arm == ARMS[1])
    noting, begun = Noting(), time.perf_counter()
    runs = sweep.train(jobs, output, device=given.device, callback=noting)
    ended, processor = time.perf_counter(), time.process_time()
    best = min(runs, key=lambda run: run.evaluation.best_value)
    return {
        "seconds": ended - noting.begun,
        "processor seconds": processor - noting.processor,
        "with start": ended - begun,
        "steps": sum(run.step for run in runs),
        "stopped early": sum(run.step < run.job.max_steps for run in runs),
        "joins": len(noting.joins),
        "best": {"job": best.job.name, "eval_loss": best.evaluation.best_value},
    }


def compare(whole: Path, stopped: Path) -> Figures:
    """How far the arms are apart, over all steps and evaluations that both did.

    raises    RuntimeError beyond the bound
    """
    worst = {"loss": 0.0, "eval_loss": 0.0}
    shared = {"loss": 0, "eval_loss": 0}
    for path in sorted(stopped.glob("*/metrics.jsonl")):
        for kind in shared:
            long, short = _values(whole / path.parent.name / path.name, kind), _values(path, kind)
            if not short or any(step not in long for step in short):
                raise RuntimeError(f"{path.parent.name}: {kind} of other steps than to the end")
            shared[kind] += len(short)
            apart = max(abs(value - long[step]) / abs(long[step]) for step, value in short.items())
            worst[kind] = max(worst[kind], apart)
    if not max(worst.values()) <= BOUND:
        raise RuntimeError(f"the arms differ by {worst}, beyond {BOUND}")
    return {"worst, relative": worst, "values compared": shared}


def _values(path: Path, kind: str) -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row[kind] for row in rows if kind in row}


def show(found: Figures) -> None:
    """A line a run."""
    table = Table(
        "arm",
        "seconds",
        "processor",
        "with start",
        "steps",
        "stopped early",
        "joins",
        "best",
        box=None,
    )
    for arm, runs in found["arms"].items():
        for run in runs:
            best = f"{run['best']['job']} {run['best']['eval_loss']:.4f}"
            times = (f"{run[key]:.1f}" for key in ("seconds", "processor seconds", "with start"))
            counts = (str(run[name]) for name in ("steps", "stopped early", "joins"))
            table.add_row(arm, *times, *counts, best)
    console().print(table)
    console().print(found["differences"])


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="JSON lines, such as GSM8K's")
    parser.add_argument("--turns", type=int, default=1, help="of each arm, in turns")
    parser.add_argument("--threads", type=int, help="of a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
