"""Is the simulator right? The same jobs on this machine, and on the simulated clock.

    python -m benchmarks.validation --model tiny --slots 2                    # a CPU, minutes
    python -m benchmarks.validation --model 8b --layers 4 --device cuda       # one GPU
    python -m benchmarks.validation --model 8b --layers 4 --device cuda --quick        # 3 minutes

One command does all: it profiles the base's layers here, launches and drains groups of one and of
three jobs to learn what a switch costs, lets a job join and leave a running group, lets the local
executor run twelve jobs as they come under each policy, and replays the same jobs, with the times
at which they came, by the simulator. What the simulator is told was measured before the run that it
predicts. Of `--seeds` workloads it takes the one whose simulated times hang least on when jobs come
(`--moved`), which is known before any of it runs. A cold start is no part of it: the workers of a
run have trained before its first job.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from benchmarks.moves import until
from benchmarks.results_file import RESULTS, console, described, write
from benchmarks.validation_steady import Parting, Simulated, steadiest
from benchmarks.validation_workload import Planned, base_of, workload, write_file
from tlora_fx.config.job import Job
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost.load import Demand
from tlora_fx.runtime.workers.protocol import EventReader
from tlora_fx.scheduler.estimates import Estimates, machine
from tlora_fx.scheduler.executor import Drained, GroupLaunch, GroupStarted, Progress
from tlora_fx.scheduler.formations import Callback
from tlora_fx.scheduler.history import EpochRecord, JobRecord
from tlora_fx.scheduler.local.executor import LocalOptions, cpu_threads
from tlora_fx.scheduler.loop import LoopOptions
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.requests import keep_facts
from tlora_fx.scheduler.service import RunOptions, SchedulerService, opened
from tlora_fx.scheduler.state import ChangeCosts, Group, JobRequest
from tlora_fx.simulator.replay import replay

#: Jobs of each group that is formed to learn what a switch takes.
WARM_UPS = (1, 3, 1, 3)
TURN_SECONDS = 0.02
#: What differs by model, unless it is asked for.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"lone_seconds": 12.0, "over_seconds": 40.0, "longest": 64, "tokens": "64,256,1024",
             "lengths": "32,64", "vocabulary": 512},
    "8b": {"lone_seconds": 12.0, "over_seconds": 50.0, "longest": 2048,
           "tokens": "512,1024,1280,1536,2048,4096,8192,16384", "lengths": "256,1024",
           "vocabulary": 8192},
}  # fmt: skip
#: What `--quick` asks for instead.
QUICK: dict[str, Any] = {
    "jobs": 8, "policies": "tlora", "lone_seconds": 8.0, "over_seconds": 25.0, "horizon": 5.0,
    "rounds": 3, "max_slowdown": 3.0, "limit_seconds": 150.0,
}  # fmt: skip
QUICK_8B: dict[str, Any] = {"longest": 1024, "tokens": "512,1024,1280,1536,2048,4096,8192"}
#: The formation that warms workers; the loop counts from 1.
WARMING = 1_000_000
LIMIT_SECONDS = 1200.0
USUAL: dict[str, Any] = {
    "jobs": 12, "policies": "tlora,mlora-fifo", "horizon": 20.0, "rounds": 5,
    "limit_seconds": LIMIT_SECONDS,
}  # fmt: skip
#: Joins and leaves that are timed; the first ones run what later ones find warm.
CHANGES = 3


class Quiet(Callback):
    """Says what is wrong, and nothing else."""

    def read_file(self, name: str, jobs: Sequence[str], mistake: str) -> None:
        """A file of ours should hold no mistake."""
        if mistake:
            print(mistake, file=sys.stderr)


@dataclass(slots=True)
class Bench:
    """All that the parts of the benchmark share.

    seed   of the workload
    """

    asked: argparse.Namespace
    folder: Path
    base: dict[str, Any]
    planned: list[Planned]
    estimates: Estimates
    device: str
    seed: int = 0

    def job(self, one: Planned, steps: int) -> Job:
        """A job of the workload as its file says it."""
        path = self.folder / "parsed" / f"{one.name}.yaml"
        fields = one.fields | {"max_steps": steps}
        return load_job_file(write_file(path, self.base, [fields])).jobs[0]

    def steps(self, one: Planned) -> int:
        """As many as take its time alone, by what is expected of a step."""
        return self.request(one, 0.0).steps

    def request(self, one: Planned, came: float) -> JobRequest:
        """As the scheduler sees it."""
        request = self.estimates.request(self.job(one, 1), came)
        solo = self.estimates.estimator.solo(request.base, request.demand, request.gpus)
        return replace(request, steps=max(2, round(one.lone_seconds / solo)))

    def options(self, switch_seconds: float, changes: ChangeCosts | None) -> RunOptions:
        """Of every run; nothing is learnt while it runs."""
        local = LocalOptions(device=self.device, save_seconds=self.asked.save_seconds,
                             compiled=self.asked.compile)  # fmt: skip
        return RunOptions(
            loop=LoopOptions(self.asked.horizon, switch_seconds, changes), linger=0.0, learns=False,
            layout_of=self.estimates.layout_of, local=local,
        )  # fmt: skip

    def opened(
        self, name: str, policy: str, switch_seconds: float, changes: ChangeCosts | None = None
    ) -> Any:
        """A run in a folder of its own."""
        jobs = self.folder / name / "jobs"
        jobs.mkdir(parents=True)
        return opened(
            jobs, self.folder / name / "run", self.estimates.cluster, find_policy(policy),
            self.estimates.estimator, self.estimates, Quiet(),
            self.options(switch_seconds, changes),
        )  # fmt: skip


def main() -> None:
    """Profile, warm up, run, simulate, compare, write."""
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="validation-") as name:
        folder = Path(name)
        bench = _bench(asked, folder)
        switches, changes = warm_up(bench)
        launch, further, end = switch_of(switches)
        switch, changes = (launch, further), replace(changes, end=end)
        print(f"a launch takes {launch:.2f} s, {further:.2f} s more for each further job")
        print(f"an end takes {end:.2f} s")
        print(f"a join takes {changes.join:.3f} s, a leave {changes.leave:.3f} s", flush=True)
        partings = choose(bench, *switch, changes)
        found = described("validation", bench.device) | {
            "options": {
                k: str(v)
                for k, v in vars(asked).items()
                if k not in ("output", "out", "keep", "profile")
            },
            "warm_ups": switches,
            "switch_seconds": switch[0],
            "join_seconds": switch[1],
            "changes": asdict(changes),
            "seed": bench.seed,
            "partings": {seed: one._asdict() for seed, one in partings.items()},
            "policies": {
                policy: compare(bench, policy, *switch, changes)
                for policy in asked.policies.split(",")
            },
        }
        if asked.keep:
            keep(folder, asked.keep, asked.policies.split(","))
    write(asked.output, found)
    show(found)


def choose(
    bench: Bench, switch_seconds: float, join_seconds: float, changes: ChangeCosts
) -> dict[int, Parting]:
    """Let the bench take the workload that the first policy's simulated run hangs on least.

    returns   how far the simulator parts from itself, of each that was looked at
    """
    asked, found = bench.asked, dict[int, Parting]()
    options = LoopOptions(asked.horizon, switch_seconds, changes, at_once="end")
    policy = asked.policies.split(",")[0]
    for seed in range(bench.seed, bench.seed + asked.seeds):
        bench.planned = planned_of(asked, seed, bench.folder)
        came = {one.name: one.arrives for one in bench.planned}
        found[seed] = Simulated(bench, policy, came, options, join_seconds).parting(asked.moved)
    bench.seed = steadiest(found)
    bench.planned = planned_of(asked, bench.seed, bench.folder)
    told = found[bench.seed]
    print(f"workload {bench.seed}: jobs that come {asked.moved:g} s apart move its times by "
          f"{told.mean:.1%}, at worst {told.worst:.1%}", flush=True)  # fmt: skip
    return found


def keep(folder: Path, kept: Path, policies: Sequence[str]) -> None:
    """Copy the profile and what the runs noted, without weights: all that a replay needs."""
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "profile.json", kept)
    for policy in policies:
        shutil.copytree(folder / policy / "jobs", kept / policy / "jobs", dirs_exist_ok=True)
        run = folder / policy / "run"
        for path in [*run.glob("*.*"), *run.glob("groups/*/events.jsonl")]:
            copied = kept / policy / "run" / path.relative_to(run)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)


def warm_up(bench: Bench) -> tuple[list[dict[str, float]], ChangeCosts]:
    """Launch groups of jobs, each anew, and drain them; then let one join and leave another."""
    count = min(sum(WARM_UPS), len(bench.planned))
    jobs = [bench.job(one, 1_000_000) for one in bench.planned[:count]]
    measured, done = [], 0
    with bench.opened("warm-up", "megatron", 0.0) as running:
        _ready(running)
        executor = running.executor
        for job in jobs:
            running.specs[job.name] = job.model_dump(mode="json")
        requests = [bench.estimates.request(job, 0.0) for job in jobs]
        for epoch, count in enumerate(WARM_UPS, 1):
            # In a run, too, no data was read and no state was made before a job's first launch.
            wanted = min(count, len(requests))
            own = [requests[(done + place) % len(requests)] for place in range(wanted)]
            done += count
            total = Demand.total(request.demand for request in own)
            step = bench.estimates.estimator.solo(own[0].base, total, 1)
            group = Group(tuple(request.name for request in own), 1, (0,))
            begun = executor.now()
            executor.reserve(group, epoch)
            executor.launch(GroupLaunch(group, epoch, own))
            # The first step compiles kernels: what it takes beyond a step belongs to the switch.
            first = until(running.executor, Progress, epoch, LIMIT_SECONDS).time
            time.sleep(2.0)
            asked = executor.now()
            executor.drain(group, epoch)
            drained = until(running.executor, Drained, epoch, LIMIT_SECONDS).time
            executor.release(group, epoch)
            launch = first - begun - step
            measured.append(
                {"jobs": count, "launch_seconds": launch, "drain_seconds": drained - asked}
            )
        return measured, changes_of(running, requests[0], requests[1], len(WARM_UPS) + 1)


def changes_of(
    running: SchedulerService, first: JobRequest, other: JobRequest, epoch: int
) -> ChangeCosts:
    """What it takes that a job joins a group that trains another, and leaves it."""
    executor = running.executor
    alone, both = Group((first.name,), 1, (0,)), Group((first.name, other.name), 1, (0,))
    executor.reserve(alone, epoch)
    executor.launch(GroupLaunch(alone, epoch, [first]))
    until(running.executor, Progress, epoch, LIMIT_SECONDS)
    joined: list[float] = []
    left: list[float] = []
    moved: list[float] = []
    for before, after in [(alone, both), (both, alone)] * CHANGES:
        asked = executor.now()
        jobs = [first, other][: len(after.jobs)]
        executor.change(before, epoch, GroupLaunch(after, epoch + 1, jobs))
        started = until(running.executor, GroupStarted, epoch + 1, LIMIT_SECONDS)
        assert started.paused is not None
        (joined if after is both else left).append(started.paused)
        moved.append(started.time - asked)
        executor.release(before, epoch)
        epoch += 1
        time.sleep(1.0)
    executor.drain(alone, epoch)
    until(running.executor, Drained, epoch, LIMIT_SECONDS)
    executor.release(alone, epoch)
    return ChangeCosts(median(joined), median(left), median(moved))


def switch_of(measured: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
    """Seconds that a lone job takes to launch, that each further one adds, and that an end takes.

    A job that ends by itself is written as a drained one is, before it is told.

    measured   the last of each size counts: the first one compiles kernels
    """
    last = {int(one["jobs"]): one for one in measured}
    few, many = min(last), max(last)
    launch, end = last[few]["launch_seconds"], last[few]["drain_seconds"]
    more = (last[many]["launch_seconds"] - launch) / (many - few)
    return launch, max(0.0, more), end


def _ready(running: SchedulerService) -> None:
    """Wait until workers can be forked: that is no switch."""
    while not running.executor.ready:
        time.sleep(TURN_SECONDS)


def compare(
    bench: Bench, policy: str, switch_seconds: float, join_seconds: float, changes: ChangeCosts
) -> dict[str, Any]:
    """One policy, run and simulated."""
    print(f"running {policy}", flush=True)
    records, epochs = run_here(bench, policy, switch_seconds, changes)
    requests = [record.request for record in records]
    told = replay(
        requests, find_policy(policy), bench.estimates.estimator, bench.estimates.cluster,
        options=LoopOptions(bench.asked.horizon, switch_seconds, changes, at_once="end"),
        join_seconds=join_seconds,
    )  # fmt: skip
    jobs: list[dict[str, Any]] = []
    for record in records:
        row = told.jobs.index[record.name]
        submitted = record.request.submitted
        real = (record.ended or float("nan")) - submitted
        simulated = float(told.jobs.ended[row]) - submitted
        jobs.append({
            "job": record.name, "status": record.status, "submitted": submitted,
            "real_seconds": real, "simulated_seconds": simulated,
            "real_queued_seconds": (record.first_started or float("nan")) - submitted,
            "simulated_queued_seconds": float(told.jobs.started[row]) - submitted,
            "error": simulated / real - 1,
        })  # fmt: skip
    errors = [abs(job["error"]) for job in jobs if job["status"] == "done"] or [float("nan")]
    groups = [group_of(bench.folder / policy / "run", epoch) for epoch in epochs]
    return {
        "mean_error": fmean(errors),
        "worst_error": max(errors),
        "real_groups": len(epochs),
        "real_changes": sum(epoch.how.startswith("goes on as") for epoch in epochs),
        "simulated_groups": told.summary.formations,
        "simulated_joins": told.summary.joins,
        "simulated_moves": told.summary.moves,
        "groups": groups,
        "jobs_done": sum(job["status"] == "done" for job in jobs),
        "mean_completion_real": _mean(job["real_seconds"] for job in jobs),
        "mean_completion_simulated": _mean(job["simulated_seconds"] for job in jobs),
        "jobs": jobs,
    }


def _mean(values: Iterable[float]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if not isnan(value)]
    return fmean(known) if known else None


def group_of(run: Path, epoch: EpochRecord) -> dict[str, Any]:
    """What a formation took to launch, and its steps before one of its jobs ended."""
    lines = EventReader(run / "groups" / f"{epoch.epoch:06d}" / "events.jsonl").lines()
    ended = next((at for at, line in enumerate(lines) if line.get("ended")), len(lines))
    told = [line for line in lines[:ended] if line["kind"] == "progress"]
    # The first step compiles kernels.
    measured = None
    if len(told) > 2:
        first, last = told[1], told[-1]
        done = max(last["steps"][job] - first["steps"][job] for job in epoch.jobs)
        measured = (last["time"] - first["time"]) / done if done else None
    return {
        "jobs": list(epoch.jobs),
        "gpus": len(epoch.place),
        "launch_seconds": None if epoch.started is None else epoch.started - epoch.launched,
        "predicted_step_seconds": epoch.seconds,
        "measured_step_seconds": measured,
    }


def warm_workers(bench: Bench, running: SchedulerService) -> None:
    """Let each slot's worker load the base and train, so that it is there when jobs come.

    What the scheduler compiles of the base before it takes the first job is there too: the
    simulator knows of jobs that have been taken.
    """
    keep_facts(running.admission.folder / "facts")
    names = [f"warm-{one.name}" for one in bench.planned[: max(WARM_UPS)]]
    for name, one in zip(names, bench.planned, strict=False):
        job = bench.job(one, 1_000_000).model_copy(update={"name": name})
        running.specs[name] = job.model_dump(mode="json")
    for one in bench.planned:
        bench.estimates.request(bench.job(one, 1), 0.0)
    request = bench.estimates.request(bench.job(bench.planned[0], 1), 0.0)
    requests = [replace(request, name=name) for name in names]
    for gpu in range(bench.estimates.cluster.gpus):
        group, epoch = Group(tuple(names), 1, (gpu,)), WARMING + gpu
        running.executor.reserve(group, epoch)
        running.executor.launch(GroupLaunch(group, epoch, requests))
        until(running.executor, Progress, epoch, LIMIT_SECONDS)
        time.sleep(1.0)
        running.executor.drain(group, epoch)
        until(running.executor, Drained, epoch, LIMIT_SECONDS)
        running.executor.release(group, epoch)


def run_here(
    bench: Bench, policy: str, switch_seconds: float, changes: ChangeCosts
) -> tuple[list[JobRecord], list[EpochRecord]]:
    """The workload by the local executor; its jobs and its groups."""
    waiting = [(one, one.fields | {"max_steps": bench.steps(one)}) for one in bench.planned]
    with bench.opened(policy, policy, switch_seconds, changes) as running:
        _ready(running)
        warm_workers(bench, running)
        begun = time.monotonic()
        folder = bench.folder / policy / "jobs"
        while time.monotonic() - begun < bench.asked.limit_seconds:
            while waiting and time.monotonic() - begun >= waiting[0][0].arrives:
                one, fields = waiting.pop(0)
                write_file(folder / f"{one.name}.yaml", bench.base, [fields])
            over = not running.turn()
            if over and not waiting and len(running.ledger.jobs()) == len(bench.planned):
                break
            time.sleep(TURN_SECONDS)
        return running.ledger.jobs(), running.ledger.epochs()


def show(found: dict[str, Any]) -> None:
    """What was predicted of steps, and a table of errors."""
    steps = Table("policy", "group", "launch s", "step ms", "predicted ms", box=None)
    for policy, told in found["policies"].items():
        for one in told["groups"]:
            launch, measured = one["launch_seconds"], one["measured_step_seconds"]
            steps.add_row(
                policy, " ".join(one["jobs"]), "" if launch is None else f"{launch:.1f}",
                "" if measured is None else f"{measured * 1e3:.1f}",
                f"{one['predicted_step_seconds'] * 1e3:.1f}",
            )  # fmt: skip
    console().print(steps)
    table = Table("policy", "job", "real s", "simulated s", "error", box=None)
    for policy, told in found["policies"].items():
        for job in told["jobs"]:
            table.add_row(policy, job["job"], f"{job['real_seconds']:.1f}",
                          f"{job['simulated_seconds']:.1f}", f"{job['error']:+.1%}")  # fmt: skip
        table.add_row(policy, "mean, worst", "", "",
                      f"{told['mean_error']:.1%}, {told['worst_error']:.1%}")  # fmt: skip
        table.add_row(policy, "changes of groups, joins", str(told["real_changes"]),
                      str(told["simulated_joins"]), "")  # fmt: skip
    console().print(table)


def _bench(asked: argparse.Namespace, folder: Path) -> Bench:
    base = base_of(asked.model, asked.layers, asked.vocabulary, folder / "base")
    planned = planned_of(asked, asked.seed, folder)
    cluster, device = machine(asked.device, asked.slots)
    profile = folder / "profile.json"
    if asked.profile:
        shutil.copy(asked.profile, profile)
    else:
        _profile(asked, base, planned, device, cluster.gpus, folder, profile)
    return Bench(asked, folder, base, planned, Estimates(cluster, (profile,)), device, asked.seed)


def planned_of(asked: argparse.Namespace, seed: int, folder: Path) -> list[Planned]:
    """A workload; its data lie in a folder of their own."""
    planned = workload(asked.jobs, asked.lone_seconds, asked.over_seconds, asked.longest, seed,
                       folder / "data" / str(seed))  # fmt: skip
    if asked.max_slowdown is None:
        return planned
    schedule = {"schedule": {"max_slowdown": asked.max_slowdown}}
    return [replace(one, fields=one.fields | schedule) for one in planned]


def _profile(
    asked: argparse.Namespace, base: dict[str, Any], planned: Sequence[Planned], device: str,
    slots: int, folder: Path, output: Path,
) -> None:  # fmt: skip
    """Measure the base's layers, in a process of its own, on as many cores as a slot has."""
    fields = [one.fields | {"max_steps": 1} for one in planned[: asked.profile_jobs]]
    jobs = write_file(folder / "profile.yaml", base, fields)
    environment = os.environ | (cpu_threads(slots) if device == "cpu" else {})
    command = [sys.executable, "-m", "tlora_fx", "profile", str(jobs), "-o", str(output),
               "--device", device, "--tokens", asked.tokens, "--lengths", asked.lengths,
               "--rounds", str(asked.rounds), *([] if asked.compile else ["--eager"])]  # fmt: skip
    begun = time.monotonic()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    print(f"profiled in {time.monotonic() - begun:.0f} s", flush=True)


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--model", choices=("tiny", "8b"), default="tiny")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--device", choices=("cpu", "cuda"), default=None)
    made.add_argument("--slots", type=int, default=None, help="GPUs, or parts of the CPU")
    made.add_argument("--quick", action="store_true", help="eight short jobs, under tlora alone")
    made.add_argument("--jobs", type=int)
    made.add_argument("--policies")
    made.add_argument("--max-slowdown", type=float, help="of every job, instead of the usual one")
    made.add_argument("--lone-seconds", type=float, help="of a job alone, on average")
    made.add_argument("--over-seconds", type=float, help="within which jobs come")
    made.add_argument("--longest", type=int, help="tokens of the longest samples")
    made.add_argument("--tokens", help="rows that are profiled")
    made.add_argument("--lengths", help="sequences that are profiled")
    made.add_argument("--vocabulary", type=int, help="of the base")
    made.add_argument("--horizon", type=float)
    made.add_argument("--save-seconds", type=float, default=60.0)
    made.add_argument("--rounds", type=int)
    made.add_argument("--profile-jobs", type=int, default=8, help="whose adapters are profiled")
    made.add_argument(
        "--limit-seconds",
        type=float,
        help="of each run; jobs that are not done then do not count",
    )
    made.add_argument("--profile", type=Path, help="of this base, measured here before")
    made.add_argument("--keep", type=Path, help="folder for the profile and what the runs noted")
    made.add_argument("--compile", action="store_true", help="compile the layers")
    made.add_argument("--seed", type=int, default=0, help="of the workload, or the first of them")
    made.add_argument("--seeds", type=int, default=1, help="workloads to choose from")
    made.add_argument("--moved", type=float, default=0.3, help="seconds that jobs may come apart")
    made.add_argument("-o", "--output", type=Path, help="file; else validation.json in --out")
    made.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    asked = made.parse_args()
    asked.output = asked.output or asked.out / "validation.json"
    quick = QUICK | (QUICK_8B if asked.model == "8b" else {}) if asked.quick else {}
    for name, value in (USUAL | PRESETS[asked.model] | quick).items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    return asked


if __name__ == "__main__":
    main()
