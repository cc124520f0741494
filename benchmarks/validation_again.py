"""Simulate a run of `validation.py` again, from its result file, with other times of a switch.

    python -m benchmarks.validation_again --switch-seconds 5.5

The jobs, when they came, and when they really ended are the file's; the profile is the one that was
measured there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.results_file import RESULTS, console
from benchmarks.validation import Bench
from benchmarks.validation_workload import base_of, workload
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.profile import Profile
from tlora_fx.scheduler.loop import LoopOptions
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.service import Estimates
from tlora_fx.simulator.replay import replay

RUN = "validation-2026-11-22"


def main() -> None:
    """Replay each policy of the file and print both errors of each job."""
    asked = _arguments()
    found = json.loads(asked.file.read_text())
    switch = found["switch_seconds"] if asked.switch_seconds is None else asked.switch_seconds
    with tempfile.TemporaryDirectory() as folder:
        bench = _bench(found, asked.profile, Path(folder))
        for policy, told in found["policies"].items():
            jobs = again(bench, policy, told["jobs"], switch, asked.join_seconds)
            show(policy, jobs, switch)


def again(
    bench: Bench, policy: str, told: list[dict[str, Any]], switch: float, join: float
) -> list[dict[str, Any]]:
    """Each job as the file has it, with what the simulator says now."""
    came = {job["job"]: job["submitted"] for job in told}
    requests = [
        bench.estimates.request(bench.job(one, bench.steps(one)), came[one.name])
        for one in bench.planned
    ]
    options = bench.asked
    ran = replay(
        requests, find_policy(policy), bench.estimates.estimator, bench.estimates.cluster,
        options=LoopOptions(options.horizon, switch, at_once="end"), join_seconds=join,
    )  # fmt: skip
    made = []
    for job in told:
        seconds = float(ran.jobs.ended[ran.jobs.index[job["job"]]]) - job["submitted"]
        made.append(job | {"again_seconds": seconds, "again": seconds / job["real_seconds"] - 1})
    return made


def show(policy: str, jobs: list[dict[str, Any]], switch: float) -> None:
    """A table of errors, then and now."""
    table = Table("policy", "job", "real s", "error then", f"with {switch:g} s", box=None)
    for job in jobs:
        table.add_row(policy, job["job"], f"{job['real_seconds']:.1f}", f"{job['error']:+.1%}",
                      f"{job['again']:+.1%}")  # fmt: skip
    ends = [[abs(job[name]) for job in jobs] for name in ("error", "again")]
    told = [f"{fmean(errors):.1%}, {max(errors):.1%}" for errors in ends]
    table.add_row(policy, "mean, worst", "", *told)
    console().print(table)


def _bench(found: dict[str, Any], profile: Path, folder: Path) -> Bench:
    """The workload and the estimates of the run that a file tells of."""
    options = found["options"]
    base = base_of(
        options["model"], int(options["layers"]), int(options["vocabulary"]), folder / "base"
    )
    planned = workload(
        int(options["jobs"]), float(options["lone_seconds"]), float(options["over_seconds"]),
        int(options["longest"]), int(options["seed"]), folder / "data",
    )  # fmt: skip
    slots = int(options["slots"])
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
    made.add_argument("--join-seconds", type=float, default=0.0, help="each further job adds")
    return made.parse_args()


if __name__ == "__main__":
    main()
