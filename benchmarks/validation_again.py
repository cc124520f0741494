"""Simulate a run of `validation.py` again, from its result file, with other times of a switch.

    python -m benchmarks.validation_again --switch-seconds 5.5
    python -m benchmarks.validation_again RESULT.json --profile PROFILE.json --moved 0.3

The jobs, when they came, and when they really ended are the file's; the profile is the one that was
measured there.

`--moved` tells how far decisions hang on little things: the simulator runs again and again, and
each job comes up to so many seconds earlier or later. Where its own completion times part as far as
the real ones do, the real run says no more of it than one of these.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.results_file import RESULTS, console
from benchmarks.validation import Bench
from benchmarks.validation_steady import Simulated
from benchmarks.validation_workload import base_of, workload
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.profile import Profile
from tlora_fx.scheduler.estimates import Estimates
from tlora_fx.scheduler.loop import LoopOptions
from tlora_fx.scheduler.state import ChangeCosts

RUN = "validation-2026-11-22"
#: Of a completion time, as validation asks for.
BOUND = 0.12


def main() -> None:
    """Replay each policy of the file and print both errors of each job."""
    asked = _arguments()
    found = json.loads(asked.file.read_text())
    switch = found["switch_seconds"] if asked.switch_seconds is None else asked.switch_seconds
    with tempfile.TemporaryDirectory() as folder:
        bench = _bench(found, asked.profile, Path(folder))
        join = found.get("join_seconds", 0.0) if asked.join_seconds is None else asked.join_seconds
        changes = ChangeCosts(**found["changes"]) if "changes" in found else None
        if changes is not None and asked.end_seconds is not None:
            changes = replace(changes, end=asked.end_seconds)
        options = LoopOptions(bench.asked.horizon, switch, changes, at_once="end")
        for policy, told in found["policies"].items():
            came = {job["job"]: job["submitted"] for job in told["jobs"]}
            simulated = Simulated(bench, policy, came, options, join)
            show(policy, told["jobs"], simulated.seconds({}), switch)
            if asked.moved:
                draws = [simulated.seconds(moved) for moved in simulated.draws(asked.moved)]
                show_moved(policy, told["jobs"], draws, asked.moved)


def show(policy: str, jobs: list[dict[str, Any]], seconds: dict[str, float], switch: float) -> None:
    """A table of errors, then and now."""
    table = Table("policy", "job", "real s", "error then", f"with {switch:.2f} s", box=None)
    now = errors(jobs, seconds)
    for job in jobs:
        table.add_row(policy, job["job"], f"{job['real_seconds']:.1f}", f"{job['error']:+.1%}",
                      f"{now[job['job']]:+.1%}")  # fmt: skip
    told = [spread([job["error"] for job in jobs]), spread(now.values())]
    table.add_row(policy, "mean, worst", "", *told)
    console().print(table)


def show_moved(
    policy: str, jobs: list[dict[str, Any]], draws: list[dict[str, float]], most: float
) -> None:
    """How far the simulator parts from itself, and from the real run in the nearest draw."""
    own = [spread([b[name] / a[name] - 1 for name in a]) for a, b in pairwise(draws)]
    worst = sorted(own, key=lambda text: float(text.split(", ")[1].rstrip("%")))
    nearest = min((errors(jobs, draw) for draw in draws), key=lambda found: _mean(found.values()))
    table = Table("policy", "arrivals moved by", "mean, worst", box=None)
    table.add_row(policy, f"{most:g} s: a draw over the one before, median", worst[len(worst) // 2])
    table.add_row(policy, "the same, the furthest", worst[-1])
    table.add_row(policy, "real over the nearest draw", spread(nearest.values()))
    inside = sum(
        min(draw[job["job"]] for draw in draws) / (1 + BOUND)
        <= job["real_seconds"]
        <= max(draw[job["job"]] for draw in draws) * (1 + BOUND)
        for job in jobs
    )
    table.add_row(policy, f"jobs within {BOUND:.0%} of what draws span", f"{inside} of {len(jobs)}")
    console().print(table)


def errors(jobs: list[dict[str, Any]], seconds: dict[str, float]) -> dict[str, float]:
    """Of each job's simulated completion time, relative."""
    return {job["job"]: seconds[job["job"]] / job["real_seconds"] - 1 for job in jobs}


def spread(found: Iterable[float]) -> str:
    """The mean and the worst, without signs."""
    sizes = [abs(error) for error in found]
    return f"{fmean(sizes):.1%}, {max(sizes):.1%}"


def _mean(found: Iterable[float]) -> float:
    return fmean(map(abs, found))


def _bench(found: dict[str, Any], profile: Path, folder: Path) -> Bench:
    """The workload and the estimates of the run that a file tells of."""
    options = found["options"]
    base = base_of(
        options["model"], int(options["layers"]), int(options["vocabulary"]), folder / "base"
    )
    planned = workload(
        int(options["jobs"]), float(options["lone_seconds"]), float(options["over_seconds"]),
        int(options["longest"]), int(found.get("seed", options["seed"])), folder / "data",
    )  # fmt: skip
    if options.get("max_slowdown", "None") != "None":
        schedule = {"schedule": {"max_slowdown": float(options["max_slowdown"])}}
        planned = [replace(one, fields=one.fields | schedule) for one in planned]
    slots = 1 if options["slots"] == "None" else int(options["slots"])
    gpu = Profile.load(profile).hardware.gpu
    cluster = Cluster(slots, gpus_per_node=slots, nodes_per_rack=1, gpu=gpu)
    asked = Namespace(horizon=float(options["horizon"]))
    return Bench(asked, folder, base, planned, Estimates(cluster, (profile,)), options["device"])


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("file", type=Path, nargs="?", default=RESULTS / f"{RUN}.json")
    made.add_argument("--profile", type=Path, default=RESULTS / f"{RUN}-profile.json")
    made.add_argument("--switch-seconds", type=float, help="default: as the run was told")
    made.add_argument("--join-seconds", type=float, help="each further job adds; as told")
    made.add_argument("--end-seconds", type=float, help="from a job's last step to its end")
    made.add_argument("--moved", type=float, default=0.0, help="seconds that jobs may come apart")
    return made.parse_args()


if __name__ == "__main__":
    main()
