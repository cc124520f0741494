"""How long a round of scheduling takes, by the number of jobs, and how many groups it evaluates.

    python -m benchmarks.decisions [--jobs 16 32 ...]

Process time of one process. "first" is a round in which every job is new; "next" are rounds in
which four jobs have ended and four have come, as in a replay, each on the groups of the round
before. Full: jobs ask for three times the GPUs that there are. Two bases, measured profiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from math import log2
from typing import Any

from rich.table import Table

from benchmarks.results_file import RESULTS, bare_table, console, described, write
from tlora_fx.cost.estimator import Estimator, ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import demand_of
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import ActiveJob, JobRequest, Policy, SchedulerState

BASES = ("llama-3-8b", "qwen3-8b")
POLICIES = ("tlora", "tlora-paper", "mlora-fifo", "megatron")
BOUNDS = {128: 0.2, 2000: 3.0}
ROUNDS = 30
STEADY = 0.25


def job(index: int, rng: random.Random, estimator: Estimator) -> ActiveJob:
    """A job as the field notes draw them, with lengths of its own."""
    draw = rng.random()
    gpus = 1 if draw < 0.558 else 2 if draw < 0.676 else 4 if draw < 0.703 else 8
    base, batch, length = rng.choice(BASES), rng.choice((1, 2, 4, 8)), rng.randrange(100, 600)
    demand = demand_of(base, rng.choice((2, 4, 8, 16)), batch, length)
    request = JobRequest(f"j{index:06}", base, demand, gpus, 100_000, float(index))
    return ActiveJob(request, estimator.solo(base, demand, gpus))


def measured(name: str, count: int, estimator: Estimator, *, full: bool) -> dict[str, Any]:
    """One policy on one number of jobs."""
    rng = random.Random(count)  # noqa: S311 (instances come from a seed)
    jobs = [job(index, rng, estimator) for index in range(count)]
    asked = sum(one.request.gpus for one in jobs)
    nodes = max(4, -(-asked // (24 if full else 6)))
    active = {one.name: one for one in jobs}
    state = SchedulerState(float(count), Cluster(nodes * 8), estimator, active)
    policy = find_policy(name)
    first, evaluations = timed(policy, state)
    later = []
    for turn in range(ROUNDS):
        ended = set(rng.sample(sorted(state.jobs), min(4, count - 1)))
        left = {key: value for key, value in state.jobs.items() if key not in ended}
        new = [job(10**5 + turn * 4 + index, rng, estimator) for index in range(len(ended))]
        groups = [without(group, ended) for group in state.groups]
        state = replace(
            state,
            now=state.now + STEADY * state.horizon,
            jobs=left | {one.name: one for one in new},
            groups=tuple(group for group in groups if group is not None),
        )
        later.append(timed(policy, state)[0])
    return {
        "policy": name,
        "jobs": count,
        "gpus": state.cluster.gpus,
        "full": full,
        "first_seconds": first,
        "next_seconds_median": statistics.median(later),
        "next_seconds_worst": max(later),
        "evaluations": evaluations,
        "evaluations_over_k_log2_k": evaluations / (count * log2(count)) if count > 1 else None,
        "bound_seconds": BOUNDS.get(count) if name == "tlora" else None,
    }


def without(group: Any, ended: set[str]) -> Any:
    """A group as it is once some of its jobs have ended."""
    stay = tuple(name for name in group.jobs if name not in ended)
    if len(stay) == len(group.jobs):
        return group
    return replace(group, jobs=stay) if stay else None


def timed(policy: Policy, state: SchedulerState) -> tuple[float, int]:
    """Seconds of the processor, and evaluations; the answer becomes what runs."""
    before, begun = state.estimator.evaluations, time.process_time()
    decision = policy.decide(state)
    seconds = time.process_time() - begun
    state.groups = decision.groups
    return seconds, state.estimator.evaluations - before


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 2000])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    asked = parser.parse_args()
    out, rows = console(), []
    estimator = ProfileEstimator(profiles_for(BASES, "h200"), Cluster(128))
    measured("tlora", 16, estimator, full=True)
    for name in asked.policies:
        for count in asked.jobs:
            rows += [measured(name, count, estimator, full=full) for full in (False, True)]
    out.print(table(rows))
    write(RESULTS / "decisions.json", described("decisions", "cpu") | {"rows": rows})


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    drawn = bare_table(
        "policy", "jobs", "GPUs", "first", "bound", "next", "worst", "evaluations", "/K log2 K",
        title="One round, seconds of one core",
    )  # fmt: skip
    for row in rows:
        share = row["evaluations_over_k_log2_k"]
        drawn.add_row(
            row["policy"],
            str(row["jobs"]),
            f"{row['gpus']}{', full' if row['full'] else ''}",
            f"{row['first_seconds']:.3f}",
            f"{row['bound_seconds']:.1f}" if row["bound_seconds"] else "",
            f"{row['next_seconds_median'] * 1e3:.1f} ms",
            f"{row['next_seconds_worst'] * 1e3:.1f} ms",
            f"{row['evaluations']:,}",
            f"{share:.2f}" if share is not None else "",
        )
    return drawn


if __name__ == "__main__":
    main()
