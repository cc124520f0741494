"""What it takes that a job moves between two resident workers, and how long each stands still.

    python -m benchmarks.moves           # two GPUs, a worker each, or both on one; 8B's width
    python -m benchmarks.moves --model tiny --device cpu --layers 2 --eager     # tries the code

Two workers train, each a model of the same base. Again and again a job leaves one
of them and joins the other, by the executor's own messages, as under `tlora-fx run`: a checkpoint,
its reading back, and a checkpoint there. Timed are the whole move, from the order to leave until
the other worker says that it trains the job, its two halves, and how long the jobs of each worker
stood still. Workers that share a GPU take turns on it, which each copy then waits for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.table import Table

from benchmarks.arguments import parser_of
from benchmarks.interleaved import Spread
from benchmarks.results_file import console, described, write
from benchmarks.validation_workload import base_of, workload, write_file
from tlora_fx.config.job import Job
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.scheduler.executor import (
    Drained,
    Executor,
    Failed,
    GroupEvent,
    GroupLaunch,
    GroupStarted,
    Progress,
    Warned,
)
from tlora_fx.scheduler.local.executor import LocalExecutor, LocalOptions
from tlora_fx.scheduler.local.group import RunningGroup
from tlora_fx.scheduler.local.processes import ForkServer
from tlora_fx.scheduler.state import Group, JobRequest

TURN_SECONDS = 0.002
ENDLESS = 1_000_000
NAMES = "abcd"
VOCABULARY = {"tiny": 512, "8b": 8192}
SERIES = ("move_s", "leaves_s", "comes_s", "stood_still_left_s", "stood_still_joined_s")

Event = TypeVar("Event", bound=GroupEvent)


class OneDevice(LocalExecutor):
    """Both slots are the first GPU."""

    def _gpus(self, running: RunningGroup) -> tuple[int, ...]:
        return (0,)


class Bench:
    """Two groups that run, and a job that goes from one to the other."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.limit = given.limit_seconds
        jobs = jobs_of(given, folder)
        specs = {job.name: job.model_dump(mode="json") for job in jobs}
        self.requests = {
            job.name: JobRequest(job.name, "base", Demand(), 1, ENDLESS) for job in jobs
        }
        options = LocalOptions(device=given.device, save_seconds=1e6, compiled=not given.eager)
        shared = given.device == "cpu" or torch.cuda.device_count() == 1
        self.executor = (OneDevice if shared else LocalExecutor)(
            folder / "run",
            Cluster(2, 2, 1),
            specs,
            ForkServer(folder / "workers.log"),
            options=options,
        )
        self.groups = [(Group(tuple("abc"), 1, (0,)), 1), (Group(("d",), 1, (1,)), 2)]
        self.last = 2

    def begin(self) -> list[float]:
        """Launch both groups; seconds until the first step of each."""
        seconds = []
        for group, epoch in self.groups:
            self.executor.reserve(group, epoch)
            begun = time.monotonic()
            jobs = [self.requests[name] for name in group.jobs]
            self.executor.launch(GroupLaunch(group, epoch, jobs))
            self.until(Progress, epoch)
            seconds.append(time.monotonic() - begun)
            print(f"worker {epoch}: first step after {seconds[-1]:.1f} s", flush=True)
        return seconds

    def become(self, index: int, names: tuple[str, ...]) -> GroupStarted:
        """Let one of the groups have these jobs, without stopping."""
        group, epoch = self.groups[index]
        self.last += 1
        successor, jobs = replace(group, jobs=names), [self.requests[name] for name in names]
        if not self.executor.can_change(group, epoch, successor):
            raise RuntimeError(f"formation {epoch} cannot become one of {', '.join(names)}")
        self.executor.change(group, epoch, GroupLaunch(successor, self.last, jobs))
        started = self.until(GroupStarted, self.last)
        self.executor.release(group, epoch)
        self.groups[index] = successor, self.last
        return started

    def move(self, name: str, here: int, there: int) -> dict[str, float]:
        """Let a job go from one group to the other: seconds of it."""
        begun = time.monotonic()
        stay = tuple(job for job in self.groups[here][0].jobs if job != name)
        left = self.become(here, stay)
        between = time.monotonic()
        joined = self.become(there, (*self.groups[there][0].jobs, name))
        ended = time.monotonic()
        assert left.paused is not None
        assert joined.paused is not None
        values = (ended - begun, between - begun, ended - between, left.paused, joined.paused)
        return dict(zip(SERIES, values, strict=True))

    def until(self, kind: type[Event], epoch: int) -> Event:
        """Wait for what a group says."""
        return until(self.executor, kind, epoch, self.limit)

    def close(self) -> None:
        """Drain both groups."""
        for group, epoch in self.groups:
            self.executor.drain(group, epoch)
            self.until(Drained, epoch)
            self.executor.release(group, epoch)
        self.executor.close()


def until(executor: Executor, kind: type[Event], epoch: int, limit_seconds: float) -> Event:
    """Wait for what a group says.

    raises   RuntimeError where a group fails; TimeoutError
    """
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        for event in executor.events():
            if isinstance(event, Failed):
                raise RuntimeError(event.reason)
            if isinstance(event, Warned):
                print(event.text, file=sys.stderr)
            if isinstance(event, kind) and event.epoch == epoch:
                return event
        time.sleep(TURN_SECONDS)
    raise TimeoutError(f"no {kind.__name__} of formation {epoch} in {limit_seconds:.0f} s")


def jobs_of(given: argparse.Namespace, folder: Path) -> list[Job]:
    """Jobs of one rank on one base."""
    base = base_of(given.model, given.layers, VOCABULARY[given.model], folder / "base")
    planned = workload(len(NAMES), 1.0, 1.0, given.longest, 0, folder / "data")
    lora = {"r": given.rank, "target_modules": "all-linear"}
    fields = [
        one.fields
        | {"name": name, "lora": lora, "max_steps": ENDLESS, "per_device_train_batch_size": 1}
        for name, one in zip(NAMES, planned, strict=True)
    ]
    return list(load_job_file(write_file(folder / "jobs.yaml", base, fields)).jobs)


def main() -> None:
    """Move, print and write."""
    given = _arguments()
    found = described("moves", given.device) | {
        "model": given.model, "layers": given.layers, "rank": given.rank,
        "gpus": min(2, torch.cuda.device_count()) if given.device == "cuda" else 0,
    }  # fmt: skip
    path = given.out / f"moves-{found['date']}.json"
    moves: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="moves-") as name:
        bench = Bench(given, Path(name))
        try:
            found["first_step_s"] = bench.begin()
            for number in range(given.moves):
                here = number % 2
                moves.append(bench.move("b", here, 1 - here))
                print({key: round(value, 3) for key, value in moves[-1].items()}, flush=True)
                # The first one each way runs what later ones find warm.
                warm = moves[2:] or moves
                found |= {key: Spread.of([each[key] for each in warm]).json() for key in SERIES}
                write(path, found | {"moves": moves})
            bench.close()
        finally:
            bench.executor.close()
    show(found)


def show(found: dict[str, Any]) -> None:
    """Seconds of moves, without the first one each way."""
    table = Table("what", "median", "least to most", box=None)
    for key in SERIES:
        spread = found[key]
        low, high = spread["least"], spread["most"]
        table.add_row(key, f"{spread['median']:.3f}", f"{low:.3f} to {high:.3f}")
    console().print(table)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=("tiny", "8b"), default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest samples")
    parser.add_argument("--limit-seconds", type=float, default=240.0, help="of each wait")
    parser.add_argument("--moves", type=int, default=8)
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    return parser.parse_args()


if __name__ == "__main__":
    main()
