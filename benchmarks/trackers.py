"""What trackers and callbacks cost a round, on the thread that trains.

    python -m benchmarks.trackers

Eight jobs, each reported to TensorBoard, Weights & Biases (offline), Trackio and MLflow by their
own libraries, and heard by a callback. A round is eight `stepped` events; every tenth also has
eight evaluations. Between rounds the thread sleeps as a step would take, so that the trackers'
threads work meanwhile, as they do beside a GPU. What is timed is how long the events hold up the
thread that trains. At the end each tracker has every step, or the script says which has not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.table import Table

from benchmarks.arguments import parser_of
from benchmarks.results_file import console, described, write
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.runtime.callbacks import Callbacks, EachInTurn, TrainerCallback
from tlora_fx.runtime.job_evaluation import EvaluationReport
from tlora_fx.runtime.job_run import StepReport
from tlora_fx.runtime.reports.trackers import Trackers
from tlora_fx.runtime.run_folder import RunFolder

BOUND_MS = 1.0


class Hear(TrainerCallback):
    """A callback of a user that keeps a number."""

    loss = 0.0

    def stepped(self, report: StepReport) -> None:
        """Keep the loss."""
        self.loss = report.loss


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    warnings: list[str] = []
    with tempfile.TemporaryDirectory(prefix="trackers-") as name:
        folder = Path(name)
        _stay_here(folder)
        trackers = Trackers("run", warnings.append)
        told = EachInTurn(trackers, Callbacks([Hear()]))
        jobs = _jobs(folder, given.jobs)
        began = time.perf_counter()
        told.started(cast(Any, jobs))
        start_ms = (time.perf_counter() - began) * 1e3
        times = [_round(told, jobs, step, given) for step in range(1, given.rounds + 1)]
        trackers.close()
    ordered = sorted(times)
    found = described("trackers", "cpu") | {
        "jobs": given.jobs, "rounds": given.rounds, "round_ms": given.round_ms,
        "bound_ms": BOUND_MS, "start_ms": start_ms, "median_ms": statistics.median(times),
        "p99_ms": ordered[int(len(ordered) * 0.99)], "most_ms": ordered[-1], "warnings": warnings,
    }  # fmt: skip
    write(given.out / f"trackers-{found['date']}.json", found)
    table = Table("ms a round", "median", "99 %", "most", "bound", box=None)
    shown = (f"{found[key]:.3f}" for key in ("median_ms", "p99_ms", "most_ms", "bound_ms"))
    table.add_row(f"{given.jobs} jobs, 4 trackers", *shown)
    console().print(table)
    for text in warnings:
        console().print(text)


def _round(told: TrainerCallback, jobs: list[SimpleNamespace], step: int, given: Any) -> float:
    """Milliseconds that the events of one round take."""
    time.sleep(given.round_ms / 1e3)
    began = time.perf_counter()
    for run in jobs:
        name = run.job.name
        told.stepped(StepReport(name, step, 2.0 / step, 1.0, 1e-3, step * 100, 0.1))
        if step % 10 == 0:
            metrics = {"eval_loss": 2.0 / step, "eval_runtime": 0.1}
            told.evaluated(EvaluationReport(name, step, metrics, is_best=True))
    return (time.perf_counter() - began) * 1e3


def _stay_here(folder: Path) -> None:
    """Let no tracker write elsewhere, or ask the network."""
    os.environ |= {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }


def _jobs(folder: Path, count: int) -> list[SimpleNamespace]:
    """Of runs, what trackers ask of them."""
    (folder / "config.json").write_text("{}")
    base = BaseSpec(config=folder)
    runs = RunFolder(folder / "run")
    made = []
    for place in range(count):
        fields: dict[str, Any] = {"lora": {"r": 8}, "data": {"path": "-"}, "report_to": "all"}
        job = Job(name=f"job-{place}", base=base, **fields)
        made.append(SimpleNamespace(job=job, status="running", step=0, folder=runs))
    return made


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device=False)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--round-ms", type=float, default=100.0, help="between two rounds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
