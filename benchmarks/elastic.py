"""What it costs that jobs join, leave and move while others train on, and what a cold start takes.

    python -m benchmarks.elastic                                       # on a GPU, 8B
    python -m benchmarks.elastic --device cpu --layers 2 --hidden 64 --eager   # tries the code

A round of `--jobs` jobs trains until its rows are compiled and captured. Then, again and again, one
job leaves and another takes its place: `leave` and `join` are the time between two rounds, until
the device is done, without reading data. What is written about them follows after the next round,
which is compared with one before: for how long the jobs stand still then, how long the checkpoint
is being written beside the rounds that follow, and by how much these are longer. Graphs that were
compiled and rows that were captured since the first change are counted. What is right is compared
first: the newcomer's loss in the row with its loss alone. Each part is printed as it is done, and
the file is written anew after each, so that a run that is cut short has left what it knew.

`move` lets a job pause here and go on in another model of the same base: the checkpoint of the
pause, reading it back, and the join. `cold` is what this process took to its first step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from torch._dynamo.utils import counters

import tlora_fx
from benchmarks.arguments import parser_of, shape_of
from benchmarks.distributed_models import jobs_of
from benchmarks.interleaved import Spread, seconds_of, synchronize
from benchmarks.results_file import console, described, write
from benchmarks.rounds import data_of
from tlora_fx.config.job import Job
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.launching.interrupts import Interrupts
from tlora_fx.runtime.trainer import Trainer, TrainerOptions

STEPS = 1_000
#: The newcomer's loss in a shared row against its loss alone, relative.
BOUNDS = {"bfloat16": 2e-2, "float32": 1e-4}
ABOVE, WRITTEN = "first round above the usual, ms", "written after that round, ms"
BESIDE, SLOWED = "until the disk holds it, ms", "rounds meanwhile above the usual, ms"
#: Rounds without a change, and changes after which a checkpoint is written: that takes longest.
ROUNDS, CHECKPOINTS = 10, 3

Figures = dict[str, Any]


class Parts:
    """Seconds of what is done one after another, the device included.

    told    each is printed when it is done
    """

    def __init__(self, *, told: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.told = told

    def time(self, name: str, run: Callable[[], Any]) -> Any:
        """What a call returns; how long it took is kept."""
        synchronize()
        started = time.perf_counter()
        value = run()
        synchronize()
        self.seconds[name] = time.perf_counter() - started
        if self.told:
            print(f"{name}: {self.seconds[name]:.2f} s", flush=True)
        return value


def main() -> None:
    """Measure, print and write."""
    since_start = time.clock_gettime(time.CLOCK_BOOTTIME) - _process_started()
    given = _arguments()
    found = described("elastic", given.device) | {"layers": given.layers, "jobs": given.jobs}
    path = given.out / f"elastic-{found['date']}.json"
    cold = Parts(told=True)
    cold.seconds["imports"] = since_start
    found["cold_s"] = cold.seconds
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder, Interrupts() as interrupts:
        bench = Bench(given, Path(folder), interrupts)
        trainer = bench.cold(cold)
        write(path, found)
        for found["changes"] in bench.changes(trainer):
            write(path, found)
        if given.move:
            found["move"] = bench.move(trainer)
            write(path, found)
    show(found)


class Bench:
    """Trainers over open models of one base, and jobs for them."""

    def __init__(self, given: argparse.Namespace, folder: Path, interrupts: Interrupts) -> None:
        self.given, self.folder, self.interrupts = given, folder, interrupts
        self.shape = shape_of(given)
        fields = {"max_steps": STEPS, "save_steps": STEPS, "per_device_train_batch_size": 1}
        count = given.jobs + given.changes + 2
        jobs = jobs_of(self.shape, folder / "base", count)
        self.jobs: list[Job] = [job.model_copy(update=fields) for job in jobs]
        # Rows of one length: what changes is who is in them.
        every = data_of(self.jobs, self.shape.vocabulary, 4)
        self.data: dict[str, JobData] = {
            name: JobData(data.job, [_of_length(sample, given.tokens) for sample in data.samples],
                          data.report)
            for name, data in every.items()
        }  # fmt: skip
        rank = max(job.lora_config().r for job in self.jobs)
        self.slots = tlora_fx.OpenSlots(
            rows=-(-rank // 8) * 8 * given.jobs, jobs=given.jobs, rank=-(-rank // 8) * 8,
            dropout=any(job.lora_config().lora_dropout for job in self.jobs),
        )  # fmt: skip

    def trainer(self, jobs: Sequence[Job], name: str, parts: Parts) -> Trainer:
        """A trainer that is ready for its first round."""
        model = parts.time("trace and fuse", lambda: tlora_fx.compile(jobs, open=self.slots))
        data = {job.name: self.data[job.name] for job in jobs}
        trainer = Trainer(
            model, output=self.folder / name, device=self.given.device, data=data,
            options=TrainerOptions(compiled=not self.given.eager),
        )  # fmt: skip
        trainer.checkpoints.describe(trainer.jobs, data)
        parts.time("weights and probe", lambda: trainer.prepare(data))
        return trainer

    def cold(self, parts: Parts) -> Trainer:
        """A trainer whose rows run as they will."""
        trainer = self.trainer(self.jobs[: self.given.jobs], "here", parts)
        parts.time("first round", lambda: trainer._round(self.interrupts))
        for number in range(2, self.given.warm_up + 1):
            parts.time(f"round {number}", lambda: trainer._round(self.interrupts))
        return trainer

    def changes(self, trainer: Trainer) -> Iterator[Figures]:
        """One job leaves and one comes, again and again: the figures so far, after each."""
        waiting = self.jobs[self.given.jobs :]
        apart = self._apart(trainer, waiting.pop())
        rounds = [self._ms(lambda: trainer._round(self.interrupts)) for _ in range(ROUNDS)]
        usual = statistics.median(rounds)
        before = _made(trainer)
        series: dict[str, list[float]] = {
            name: [] for name in ("leave_ms", "ask_ms", "join_ms", ABOVE, WRITTEN, BESIDE, SLOWED)
        }
        for number, job in enumerate(waiting[: self.given.changes]):
            left = trainer.roster.training()[0].job.name
            trainer.pause(left)
            series["leave_ms"].append(self._ms(trainer._change))
            data = self.data[job.name]
            series["ask_ms"].append(self._ms(partial(trainer.admit, job, data)))
            series["join_ms"].append(self._ms(trainer._change))
            # With them the round would write a checkpoint, which is measured by itself.
            changed, trainer._to_tell = trainer._to_tell, []
            series[ABOVE].append(self._ms(lambda: trainer._round(self.interrupts)) - usual)
            trainer._to_tell = changed
            if number < CHECKPOINTS:
                series[WRITTEN].append(self._ms(partial(self._written, trainer)))
                beside = self._beside(trainer)
                series[BESIDE].append(sum(beside))
                series[SLOWED].append(statistics.median(beside) - usual)
            trainer._to_tell = []
            trainer.roster.forget([left])
            last = {name: round(values[-1], 2) for name, values in series.items()}
            print(f"change {number + 1}: {last}", flush=True)
            yield {
                "newcomer's loss against alone, relative": apart,
                "round_ms": Spread.of(rounds).json(),
                **{name: Spread.of(values).json() for name, values in series.items()},
                "made since": {
                    name: _made(trainer)[name] - count for name, count in before.items()
                },
                "refused": trainer.graphs.refused if trainer.graphs is not None else "",
            }

    def move(self, trainer: Trainer) -> Figures:
        """A job pauses, and goes on in another model."""
        other = self.trainer([self.jobs[0]], "there", Parts())
        for _ in range(self.given.warm_up):
            other._round(self.interrupts)
        run = trainer.roster.training()[-1]
        parts = Parts()
        trainer._save(last=False)
        trainer.commits.settle()
        trainer.pause(run.job.name)
        parts.time("pause and checkpoint", lambda: self._left(trainer))
        parts.time(
            "read the checkpoint",
            lambda: other.admit(run.job, run.data, resume=self.folder / "here"),
        )
        parts.time("join", other._change)
        there = next(each for each in other.runs if each.job.name == run.job.name)
        if there.step != run.step:
            raise RuntimeError(f"moved at step {run.step}, goes on at {there.step}")
        return {"seconds": parts.seconds, "s": sum(parts.seconds.values())}

    def _left(self, trainer: Trainer) -> None:
        """Between two rounds, and what is written after the next one, until the disk holds it."""
        trainer._change()
        self._written(trainer)
        trainer.commits.settle()

    def _written(self, trainer: Trainer) -> None:
        """What is written of a change: a checkpoint with those who have come and gone anew."""
        changed = trainer._tell_of_changes()
        trainer._save(last=False, only=changed)

    def _beside(self, trainer: Trainer) -> list[float]:
        """Milliseconds of each round until the disk holds what is being written."""
        rounds: list[float] = []
        while trainer.commits.writes:
            rounds.append(self._ms(lambda: trainer._round(self.interrupts)))
        return rounds

    def _apart(self, trainer: Trainer, job: Job) -> float:
        """How far a newcomer's first loss in the row is from what it is alone, relative."""
        trainer.pause(trainer.roster.training()[0].job.name)
        trainer.admit(job, self.data[job.name])
        trainer._change()
        run = next(each for each in trainer.runs if each.job.name == job.name)
        parts = Parts(told=True)
        alone = parts.time(
            "the newcomer alone", lambda: trainer.gradients({run.index: run.batches()})
        )[run.index]
        run.optimizer.zero_grad()
        parts.time("its first round", lambda: trainer._round(self.interrupts))
        trainer._end.collect()
        apart = abs(run.metrics.last_loss() - alone) / abs(alone)
        if not apart <= BOUNDS[self.shape.dtype]:
            raise RuntimeError(f"the newcomer's loss is {run.metrics.last_loss()}, alone {alone}")
        return float(apart)

    def _ms(self, run: Callable[[], Any]) -> float:
        return 1e3 * seconds_of(run)


def _made(trainer: Trainer) -> dict[str, int]:
    """Graphs that Dynamo has compiled and rows that were captured so far."""
    graphs = trainer.graphs
    return {
        "compilations": counters["stats"]["unique_graphs"],
        "captures": graphs.captured if graphs is not None else 0,
    }


def _of_length(sample: Any, tokens: int) -> Any:
    ids = (sample.input_ids * (1 + tokens // len(sample.input_ids)))[:tokens]
    return type(sample)(ids, ids)


def _process_started() -> float:
    """When this process began, on the clock of the machine's start."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / 100


def show(found: Mapping[str, Any]) -> None:
    """A table of all figures."""
    table = Table("what", "median", "least to most", box=None)
    for name, spread in found["changes"].items():
        if isinstance(spread, dict) and "median" in spread:
            low, high = spread["least"], spread["most"]
            table.add_row(name, f"{spread['median']:.1f}", f"{low:.1f} to {high:.1f}")
    table.add_row("made since the first change", str(found["changes"]["made since"]), "")
    for name, seconds in found.get("move", {}).get("seconds", {}).items():
        table.add_row(f"move: {name}, s", f"{seconds:.3f}", "")
    for name, seconds in found["cold_s"].items():
        table.add_row(f"cold: {name}, s", f"{seconds:.2f}", "")
    console().print(table)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, layers=32)
    parser.add_argument("--jobs", type=int, default=8, help="in each round")
    parser.add_argument("--tokens", type=int, default=160, help="of each job in a round")
    parser.add_argument("--changes", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=6, help="rounds before the first change")
    parser.add_argument("--no-move", dest="move", action="store_false", help="one model only")
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    return parser.parse_args()


if __name__ == "__main__":
    main()
