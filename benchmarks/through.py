"""Many small jobs through one running model: throughput, memory and the time of a join.

    python -m benchmarks.through --layers 4 --number 1000             # on a GPU, 8B's width
    python -m benchmarks.through --device cpu --layers 2 --hidden 64 --eager  # tries the code

The jobs have ranks of 2 to 8 and twenty steps each. A model with slots for sixteen takes the next
that waits as soon as one has ended. After each tenth of them is noted: jobs a second, what a join
took, memory of the process and of the device, tensors alive, files open, and graphs that were
compiled or captured. Losses of the first, the middle and the last job are compared with those of
each alone, in a model whose layers are not compiled. The file is written before that too, so that
a run that is cut short has left what it knew.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch._dynamo.utils import counters

import tlora_fx
from benchmarks.arguments import parser_of, shape_of
from benchmarks.distributed_models import jobs_of
from benchmarks.results_file import console, described, write
from benchmarks.rounds import data_of
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.trainer import Trainer, TrainerOptions

STEPS, SLOTS, RANK = 20, 16, 8
#: Losses in a shared row against those alone, relative.
BOUNDS = {"bfloat16": 5e-2, "float32": 1e-4}

APART = "losses against alone, relative"

Figures = dict[str, Any]


def main() -> None:
    """Measure, compare, print and write."""
    given = _arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    found = described("through", given.device) | {"layers": given.layers, "number": given.number}
    path = given.out / f"through-{found['date']}.json"
    with tempfile.TemporaryDirectory(prefix="through-") as name:
        jobs, data = jobs_and_data(given, Path(name))
        passed, figures = measure(jobs, data, given, Path(name))
        found |= figures
        write(path, found)
        found[APART] = apart(passed, data, given, Path(name))
    write(path, found)
    show(found)


def jobs_and_data(
    given: argparse.Namespace, folder: Path
) -> tuple[list[tlora_fx.Job], dict[str, JobData]]:
    """Small jobs that differ in their ranks."""
    shape = shape_of(given)
    base = jobs_of(shape, folder / "base", 1)[0].base
    targets = given.targets.split(",")
    jobs = [
        tlora_fx.Job(
            name=f"job-{number}", base=base, data={"path": "-"}, max_steps=STEPS, save_steps=10_000,
            lora={"r": 2 + number % 7, "target_modules": targets}, per_device_train_batch_size=1,
        )
        for number in range(given.number)
    ]  # fmt: skip
    return jobs, data_of(jobs, shape.vocabulary, 4)


def measure(
    jobs: Sequence[tlora_fx.Job],
    data: Mapping[str, JobData],
    given: argparse.Namespace,
    folder: Path,
) -> tuple[list[tlora_fx.Job], Figures]:
    """Let the jobs pass; those that came to their end, and the figures."""
    noting = Noting(given, max(1, given.number // given.parts))
    trainer = trainer_of(jobs[:1], data, given, folder / "run", noting)
    noting.trainer = trainer
    begun = time.perf_counter()
    for job in jobs[1:]:
        trainer.admit(job, data[job.name])
    asked = time.perf_counter() - begun
    print(f"asked for {len(jobs)} jobs in {asked:.1f} s", flush=True)
    begun = time.perf_counter()
    runs = trainer.run()
    seconds = time.perf_counter() - begun
    passed = [run.job for run in runs if run.step == STEPS]
    if len(passed) < SLOTS or any(run.status != "done" for run in runs):
        raise RuntimeError(f"{len(passed)} of {len(runs)} jobs came to their end")
    return passed, {
        "ask_s": asked, "seconds": seconds, "passed": len(passed), "parts": noting.parts,
        APART: None,
    }  # fmt: skip


def apart(
    passed: Sequence[tlora_fx.Job],
    data: Mapping[str, JobData],
    given: argparse.Namespace,
    folder: Path,
) -> float:
    """How far losses of three jobs are from those that each has alone, relative."""
    shape, farthest = shape_of(given), 0.0
    solo = argparse.Namespace(**vars(given) | {"eager": True})
    model = None
    for job in (passed[0], passed[len(passed) // 2], passed[-1]):
        output = folder / "alone" / job.name
        trainer = trainer_of([job], data, solo, output, model=model)
        model = trainer.model
        trainer.run()
        here, alone = (
            [json.loads(line)["loss"] for line in (place / job.name / "metrics.jsonl").open()]
            for place in (folder / "run", output)
        )
        if len(here) != len(alone):
            raise RuntimeError(f"{job.name}: {len(here)} steps, alone {len(alone)}")
        pairs = zip(here, alone, strict=True)
        farthest = max(farthest, *(abs(a - b) / abs(b) for a, b in pairs))
    if not farthest <= BOUNDS[shape.dtype]:
        raise RuntimeError(f"a job's losses differ from those alone by {farthest}")
    return farthest


def trainer_of(
    jobs: Sequence[tlora_fx.Job],
    data: Mapping[str, JobData],
    given: argparse.Namespace,
    output: Path,
    callback: tlora_fx.TrainerCallback | None = None,
    model: SuperModel | None = None,
) -> Trainer:
    """A trainer over a model with room for sixteen of the jobs.

    model    an earlier one's, whose jobs these replace
    """
    targets = tuple(given.targets.split(","))
    # As more wait than have room, slots and rows double once.
    slots = tlora_fx.OpenSlots(targets, rows=SLOTS * RANK // 2, jobs=SLOTS // 2, rank=RANK)
    if model is None:
        model = tlora_fx.compile(jobs, open=slots)
    else:
        for name in list(model.members):
            model.release(name)
        for job in jobs:
            model.admit(job)
    return Trainer(
        model, output=output, device=given.device, callback=callback,
        data={job.name: data[job.name] for job in jobs},
        options=TrainerOptions(compiled=not given.eager, wait_for_compile=True),
    )  # fmt: skip


class Noting(tlora_fx.TrainerCallback):
    """Notes figures each time that another part of the jobs has ended.

    count   jobs of a part
    """

    trainer: Trainer

    def __init__(self, given: argparse.Namespace, count: int) -> None:
        self.given, self.count = given, count
        self.parts: list[Figures] = []
        self.ended_jobs = 0
        self._changes: list[tuple[int, float]] = []
        self._joined = 0
        self._began = self._since = time.perf_counter()

    def started(self, runs: Any) -> None:
        """The clock begins with the first round."""
        self._began = self._since = time.perf_counter()

    def joined(self, run: Any) -> None:
        """Counted, to part the time of a change among those who came in it."""
        self._joined += 1

    def stepped(self, report: Any) -> None:
        """The first step after a change: it is known by now who came."""
        if self._joined:
            self._changes.append((self._joined, self.trainer.change_seconds))
            self._joined = 0
        late = time.perf_counter() - self._began > self.given.limit_seconds
        if late and self.trainer.roster.changes.pending_joins:
            waiting = [joining.job.name for joining in self.trainer.roster.changes.pending_joins]
            self.trainer.roster.cancel_join(waiting)

    def ended(self, run: Any) -> None:
        """Another one; at the end of a part its figures are noted."""
        self.ended_jobs += 1
        if self.ended_jobs % self.count:
            return
        now = time.perf_counter()
        each = [seconds / joins * 1e3 for joins, seconds in self._changes]
        self.parts.append({
            "ended": self.ended_jobs,
            "jobs_per_s": self.count / (now - self._since),
            "join_ms": statistics.median(each) if each else None,
            **_memory(self.given.device),
            "compilations": counters["stats"]["unique_graphs"],
            "captures": self.trainer.graphs.captured if self.trainer.graphs is not None else 0,
        })  # fmt: skip
        print(json.dumps(self.parts[-1]), flush=True)
        self._changes, self._since = [], time.perf_counter()


def _memory(device: str) -> Figures:
    """Of the process and the device, and tensors that Python knows."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "rss_mib": pages * resource.getpagesize() / 2**20,
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }
    if device == "cuda":
        found["device_mib"] = torch.cuda.memory_allocated() / 2**20
        found["device_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def show(found: Figures) -> None:
    """A line a part."""
    columns = list(found["parts"][0])
    table = Table(*columns, box=None)
    for part in found["parts"]:
        values = (part[name] for name in columns)
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in values))
    console().print(table)
    far = found[APART]
    print(f"{found['passed']} jobs in {found['seconds']:.1f} s; losses against alone {far:.1e}")


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, layers=4)
    parser.add_argument("--targets", default="q_proj,v_proj", help="that jobs may adapt")
    parser.add_argument("--number", type=int, default=1000, help="of jobs")
    parser.add_argument("--parts", type=int, default=10, help="of them, each with its figures")
    parser.add_argument("--limit-seconds", type=float, default=240.0, help="then no further join")
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    parser.add_argument("--threads", type=int, help="of a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
