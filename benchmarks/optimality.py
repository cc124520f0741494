"""How near each policy comes to the exact optimum, on instances that can be solved exactly.

Ten jobs of one base, drawn as the field notes draw them, on a cluster with room for all; each group
holds the GPUs that its jobs asked for together. The optimum is over all groupings (a dynamic
program over subsets). Two estimators: the field notes' synthetic roofline, and the measured profile
of Llama-3-8B on one H200. A group in which a job is slowed down past its bound counts as a break.

Then the same with too few GPUs: eight jobs on 4, 8 and 16, by the measured profile. The optimum is
over all groupings, all GPUs of each group, and who waits (a dynamic program over subsets and GPUs).
It knows no order of arrival; policies let the first come first.

Last, the same while groups run: at each of six horizons three of eight jobs end and three others
come. Jobs join groups and leave them, or groups form anew, which takes a part of their horizon; a
moved job's own second is not counted. The optimum of a moment pays for no change. It gives a group
no more GPUs than its jobs asked for; one that runs keeps those of jobs that have ended.

    python -m benchmarks.optimality [--instances 200] [--jobs 10] [--few 60] [--runs 30]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from benchmarks.results_file import RESULTS, bare_table, console, described, write
from benchmarks.synthetic_roofline import SyntheticEstimator
from tlora_fx.cost.estimator import Estimator, ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import demand_of
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.scheduler.formations import StepTimes, membership
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.policies.oracle import best_grouping
from tlora_fx.scheduler.search.objective import Objective, seconds_of, tier_for
from tlora_fx.scheduler.state import (
    ROUNDING,
    ActiveJob,
    ChangeCosts,
    Group,
    JobRequest,
    SchedulerState,
    limit_seconds,
)

BASE = "llama-3-8b"
CLUSTER = Cluster(256)
FEW_JOBS, FEW_GPUS = 8, (4, 8, 16)
FEW_POLICIES = ("tlora", "tlora-paper", "megatron")
OBJECTIVES: tuple[Objective, ...] = ("throughput", "weighted")
BOUNDS = {"throughput": (0.97, 0.85), "weighted": (0.96, 0.80)}
Groups = Sequence[tuple[tuple[str, ...], float]]
Way = Callable[[SchedulerState, Objective], Groups]


def requests_drawn(count: int, seed: int) -> list[JobRequest]:
    """Jobs as the field notes draw them: GPUs as in AcmeTrace, batch 1 to 8, rank 2 to 16."""
    rng = random.Random(seed)  # noqa: S311 (instances come from a seed)
    found = []
    for index in range(count):
        draw = rng.random()
        gpus = 1 if draw < 0.558 else 2 if draw < 0.676 else 4 if draw < 0.703 else 8
        batch, length = rng.choice((1, 2, 4, 8)), rng.choice((128, 256, 512))
        demand = demand_of(BASE, rng.choice((2, 4, 8, 16)), batch, length)
        found.append(JobRequest(f"j{index:02}", BASE, demand, gpus, 10_000, float(index)))
    return found


def state_of(
    requests: Sequence[JobRequest], estimator: Estimator, cluster: Cluster = CLUSTER
) -> SchedulerState:
    """All of them new, at one moment."""
    jobs = {
        one.name: ActiveJob(one, estimator.solo(one.base, one.demand, one.gpus)) for one in requests
    }
    return SchedulerState(float(len(requests)), cluster, estimator, jobs)


def by_policy(name: str, **options: Any) -> Way:
    """The groups that a policy forms."""

    def way(state: SchedulerState, objective: Objective) -> Groups:
        chosen = (
            {} if name.startswith(("mlora", "megatron", "no-sch")) else {"objective": objective}
        )
        decision = find_policy(name, **chosen, **options).decide(state)
        assert not decision.waiting
        return [(group.jobs, group.seconds) for group in decision.groups]

    return way


def literal_prefix(state: SchedulerState, objective: Objective) -> Groups:
    """Algorithm 1 as printed: the prefix of an ascending list with the largest raw throughput."""
    queue: list[tuple[str, ...]] = [(name,) for name in state.jobs]
    done: list[tuple[str, ...]] = []
    while queue:
        queue.sort(key=lambda group: _residual(state, group))
        seed, *rest = queue
        values = [_value(state, seed, objective)]
        for count in range(1, len(rest) + 1):
            joined = (*seed, *(name for group in rest[:count] for name in group))
            values.append(_value(state, joined, objective))
        best = values.index(max(values))
        if best:
            merged = (*seed, *(name for group in rest[:best] for name in group))
            queue = [*rest[best:], merged]
        else:
            done.append(seed)
            queue = rest
    return [(group, _seconds(state, group)) for group in done]


def _seconds(state: SchedulerState, group: tuple[str, ...]) -> float:
    jobs = [state.jobs[name].request for name in group]
    total = jobs[0].demand
    for job in jobs[1:]:
        total = total.plus(job.demand)
    return seconds_of(state, BASE, total.row(), sum(job.gpus for job in jobs))


def _value(state: SchedulerState, group: tuple[str, ...], objective: Objective) -> float:
    """Of one group; -1 where it breaks a bound."""
    seconds = _seconds(state, group)
    return -1.0 if breaks(state, group, seconds) else worth(state, group, seconds, objective)


def _residual(state: SchedulerState, group: tuple[str, ...]) -> float:
    tokens = sum(state.jobs[name].request.demand.tokens for name in group)
    gpus = sum(state.jobs[name].request.gpus for name in group)
    return -tokens / (_seconds(state, group) * gpus)


def worth(
    state: SchedulerState, group: tuple[str, ...], seconds: float, objective: Objective
) -> float:
    """What a group does in a second."""
    jobs = [state.jobs[name] for name in group]
    if objective == "weighted":
        return sum(job.solo_seconds for job in jobs) / seconds
    return sum(job.request.demand.samples for job in jobs) / seconds


def breaks(state: SchedulerState, group: tuple[str, ...], seconds: float) -> int:
    """Jobs of a group that are slowed down past their bound."""
    if len(group) < 2:
        return 0
    limits = [limit_seconds(state.jobs[name], state.now) for name in group]
    return sum(seconds > limit * (1 + 10 * ROUNDING) for limit in limits)


WAYS: dict[str, Way] = {
    "megatron (each alone)": by_policy("megatron"),
    "literal prefix, as printed": literal_prefix,
    "tlora-paper": by_policy("tlora-paper"),
    "tlora, merges only": by_policy("tlora", thorough=0),
    "tlora": by_policy("tlora"),
    "mlora-fifo": by_policy("mlora-fifo"),
    "mlora-memory": by_policy("mlora-memory"),
}


def measured(
    estimator: Estimator, instances: int, jobs: int, told: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """One row for each objective and way."""
    for objective in OBJECTIVES:
        parts: dict[str, list[float]] = {name: [] for name in WAYS}
        broken, evaluations = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0)
        seconds = dict.fromkeys(WAYS, 0.0)
        for seed in range(instances):
            state = state_of(requests_drawn(jobs, seed), estimator)
            best = best_grouping(state, objective).worth
            for name, way in WAYS.items():
                before, begun = estimator.evaluations, time.process_time()
                groups = way(state, objective)
                seconds[name] += time.process_time() - begun
                evaluations[name] += estimator.evaluations - before
                total = sum(worth(state, group, step, objective) for group, step in groups)
                parts[name].append(total / best)
                broken[name] += sum(breaks(state, group, step) for group, step in groups)
        told(objective)
        for name in WAYS:
            yield {
                "objective": objective,
                "policy": name,
                "mean": statistics.mean(parts[name]),
                "worst": min(parts[name]),
                "tenth": sorted(parts[name])[len(parts[name]) // 10],
                "jobs_past_bound": broken[name] / instances,
                "evaluations": evaluations[name] / instances,
                "cpu_ms": seconds[name] / instances * 1e3,
            }


def best_of_few(state: SchedulerState, objective: Objective) -> float:
    """The largest worth of groups that hold no more GPUs than there are; jobs may wait.

    One base. For every set of jobs and every number of GPUs the best is that of the set's first
    job's group, whose GPUs are any, and of the rest on what is left; or the first job waits.
    """
    worths = _worths(state, objective)
    best = np.zeros_like(worths)
    for jobs in range(1, len(worths)):
        first = jobs & -jobs
        rest = part = jobs ^ first
        best[jobs] = best[rest]
        while True:
            worth = worths[part | first]
            # More GPUs are tried only where they bring more.
            for gpus in np.flatnonzero(np.diff(worth) > 0) + 1:
                left = best[rest ^ part][: worths.shape[1] - gpus]
                best[jobs, gpus:] = np.maximum(best[jobs, gpus:], worth[gpus] + left)
            if not part:
                break
            part = (part - 1) & rest
    return float(best[-1, -1])


def _worths(state: SchedulerState, objective: Objective) -> np.ndarray:
    """Of each set of jobs as one group on at most so many GPUs, [2^n, GPUs + 1]; 0 on none."""
    jobs = list(state.jobs.values())
    sets = (np.arange(1 << len(jobs))[:, None] >> np.arange(len(jobs)) & 1).astype(np.float64)
    asked = sets @ np.array([job.request.gpus for job in jobs])
    demand = sets @ np.array([job.request.demand for job in jobs], dtype=np.float64)
    limits = np.array([limit_seconds(job, state.now) for job in jobs])
    limit = np.where(sets > 0, limits, np.inf).min(axis=1) * (1 + ROUNDING)
    weighted = objective == "weighted"
    mass = sets @ np.array(
        [job.solo_seconds if weighted else job.request.demand.samples for job in jobs]
    )
    capacity = state.cluster.capacity()
    worths = np.zeros((len(sets), capacity + 1))
    for gpus in range(1, capacity + 1):
        rows = np.flatnonzero(asked >= gpus)
        tiers = [tier_for(state.cluster, gpus)] * len(rows)
        counts = np.full(len(rows), float(gpus))
        seconds = state.estimator.seconds(BASE, demand[rows], counts, tiers)
        alone = (sets[rows].sum(axis=1) == 1) & (asked[rows] == gpus)
        fits = np.isfinite(seconds) & ((seconds <= limit[rows]) | alone)
        worths[rows[fits], gpus] = mass[rows[fits]] / seconds[fits]
    return np.maximum.accumulate(worths, axis=1)


def with_too_few(instances: int) -> Iterator[dict[str, Any]]:
    """One row for each objective, number of GPUs, and policy."""
    for objective in OBJECTIVES:
        for gpus in FEW_GPUS:
            cluster = Cluster(gpus)
            estimator = ProfileEstimator(profiles_for([BASE], cluster.gpu), cluster)
            parts: dict[str, list[float]] = {name: [] for name in FEW_POLICIES}
            for seed in range(instances):
                drawn = [one for one in requests_drawn(FEW_JOBS, seed) if one.gpus <= gpus]
                state = state_of(drawn, estimator, cluster)
                best = best_of_few(state, objective)
                for name in FEW_POLICIES:
                    options = {"objective": objective} if name == "tlora" else {}
                    groups = find_policy(name, **options).decide(state).groups
                    total = sum(worth(state, one.jobs, one.seconds, objective) for one in groups)
                    parts[name].append(total / best)
            for name, values in parts.items():
                yield {
                    "objective": objective,
                    "gpus": gpus,
                    "policy": name,
                    "mean": statistics.mean(values),
                    "worst": min(values),
                    "tenth": sorted(values)[len(values) // 10],
                }


#: What runs changes at each of so many horizons, by so many jobs.
TURNS, CHANGED = 6, 3
RUNS: dict[str, tuple[str, ChangeCosts | None]] = {
    "tlora, jobs join and leave": ("tlora", ChangeCosts()),
    "tlora, groups form anew": ("tlora", None),
    "tlora-paper, jobs join and leave": ("tlora-paper", ChangeCosts()),
}


def while_running(instances: int) -> Iterator[dict[str, Any]]:
    """One row for each objective, number of GPUs, and way to change what runs."""
    for objective in OBJECTIVES:
        for gpus in FEW_GPUS:
            cluster = Cluster(gpus)
            estimator = ProfileEstimator(profiles_for([BASE], cluster.gpu), cluster)
            turns: dict[str, list[Turn]] = {name: [] for name in RUNS}
            for seed in range(instances):
                drawn = [one for one in requests_drawn(100, seed) if one.gpus <= gpus]
                arriving = drawn[: FEW_JOBS + TURNS * CHANGED]
                rng = random.Random(seed)  # noqa: S311 (instances come from a seed)
                states = list(_states(state_of(arriving, estimator, cluster), rng))
                best = [best_of_few(state, objective) for state in states]
                for name in RUNS:
                    turns[name] += _turns(name, states, best, objective)
            for name, values in turns.items():
                yield {
                    "objective": objective,
                    "gpus": gpus,
                    "policy": name,
                    "mean": statistics.mean(turn.part for turn in values),
                    "net_mean": statistics.mean(turn.net for turn in values),
                    "net_worst": min(turn.net for turn in values),
                    "groups_formed": statistics.mean(turn.formed for turn in values),
                    "groups_changed": statistics.mean(turn.changed for turn in values),
                }


class Turn(NamedTuple):
    """One decision about what runs.

    part              of the optimum, while all groups train
    net               the same over the horizon, in which groups stand still for their changes
    formed, changed   groups that were formed, and those that jobs joined or left
    """

    part: float
    net: float
    formed: int
    changed: int


def _states(drawn: SchedulerState, rng: random.Random) -> Iterator[SchedulerState]:
    """The jobs of each horizon, of which those of the first are all new."""
    now, jobs = drawn.now, list(drawn.jobs.values())
    there, arriving = jobs[:FEW_JOBS], jobs[FEW_JOBS:]
    for _ in range(TURNS + 1):
        yield replace(drawn, now=now, jobs={job.name: job for job in there})
        now += drawn.horizon
        stay = sorted(rng.sample(range(FEW_JOBS), FEW_JOBS - CHANGED))
        new, arriving = arriving[:CHANGED], arriving[CHANGED:]
        there = [there[index] for index in stay]
        there += [replace(job, request=replace(job.request, submitted=now)) for job in new]


def _turns(
    name: str, states: Sequence[SchedulerState], best: Sequence[float], objective: Objective
) -> Iterator[Turn]:
    """What a policy makes of each horizon after the first."""
    kind, changes = RUNS[name]
    policy = find_policy(kind, objective=objective)
    times = StepTimes(states[0].estimator)
    groups: tuple[Group, ...] = ()
    for turn, (state, optimum) in enumerate(zip(states, best, strict=True)):
        before = tuple(_left(groups, state, times))
        groups = policy.decide(replace(state, groups=before, changes=changes)).groups
        if not turn:
            continue
        worths = np.array([worth(state, one.jobs, one.seconds, objective) for one in groups])
        lost = np.array([_lost(one, before, changes, state.switch_seconds) for one in groups])
        net = float(worths @ (1 - np.minimum(1.0, lost / state.horizon)))
        formed = int((lost == state.switch_seconds).sum())
        changed = int((lost > 0).sum()) - formed
        yield Turn(float(worths.sum()) / optimum, net / optimum, formed, changed)


def _left(groups: Sequence[Group], state: SchedulerState, times: StepTimes) -> Iterator[Group]:
    """Groups without the jobs that have ended."""
    for group in groups:
        jobs = tuple(name for name in group.jobs if name in state.jobs)
        if jobs:
            requests = [state.jobs[name].request for name in jobs]
            step = times.of(requests, group.place, state.cluster)
            yield replace(group, jobs=jobs, seconds=step.seconds)


def _lost(
    group: Group, before: Sequence[Group], changes: ChangeCosts | None, switch_seconds: float
) -> float:
    """Seconds that a group stands still for what it was before."""
    for old in before:
        if membership(old) == membership(group):
            return 0.0
        came, went = set(group.jobs) - set(old.jobs), set(old.jobs) - set(group.jobs)
        same = set(old.place) == set(group.place) and len(went) < len(old.jobs)
        if same and changes is not None:
            return changes.of(len(came), len(went))
    return switch_seconds


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--few", type=int, default=60, help="instances with too few GPUs")
    parser.add_argument("--runs", type=int, default=30, help="instances in which what runs changes")
    asked = parser.parse_args()
    profiles = profiles_for([BASE], CLUSTER.gpu)
    estimators: dict[str, Estimator] = {
        "synthetic roofline": SyntheticEstimator(CLUSTER),
        "measured profile": ProfileEstimator(profiles, CLUSTER),
    }
    found = described("optimality", "cpu") | {"instances": asked.instances, "jobs": asked.jobs}
    found["bounds"] = BOUNDS
    out = console()
    for name, estimator in estimators.items():
        rows = list(measured(estimator, asked.instances, asked.jobs, out.print))
        found[name] = rows
        out.print(table(name, rows))
    found["too few GPUs"] = few = list(with_too_few(asked.few))
    for row in few:
        numbers = f"mean {row['mean']:.3f}, worst {row['worst']:.3f}"
        out.print(f"{row['objective']}, {row['gpus']} GPUs, {row['policy']}: {numbers}")
    found["while running"] = changed = list(while_running(asked.runs))
    for row in changed:
        numbers = f"mean {row['mean']:.3f}, after changes {row['net_mean']:.3f}"
        groups = f"{row['groups_formed']:.2f} formed, {row['groups_changed']:.2f} changed"
        where = f"{row['objective']}, {row['gpus']} GPUs, {row['policy']}"
        out.print(f"{where}: {numbers}; {groups}")
    write(RESULTS / "optimality.json", found)


def table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    heads = ("objective", "policy", "mean", "worst", "past bound", "evaluations", "ms")
    drawn = bare_table(*heads, title=f"{name}: part of the exact optimum", texts=2)
    for row in rows:
        drawn.add_row(
            row["objective"],
            row["policy"],
            f"{row['mean']:.3f}",
            f"{row['worst']:.3f}",
            f"{row['jobs_past_bound']:.2f}",
            f"{row['evaluations']:.0f}",
            f"{row['cpu_ms']:.1f}",
        )
    return drawn


if __name__ == "__main__":
    main()
