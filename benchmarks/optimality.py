"""How near each policy comes to the exact optimum, on instances that can be solved exactly.

Ten jobs of one base, drawn as the field notes draw them, on a cluster with room for all; each group
holds the GPUs that its jobs asked for together. The optimum is over all groupings (a dynamic
program over subsets). Two estimators: the field notes' synthetic roofline, and the measured profile
of Llama-3-8B on one H200. A group in which a job is slowed down past its bound counts as a break.

    python -m benchmarks.optimality [--instances 200] [--jobs 10]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.results_file import RESULTS, console, described, write
from tlora_fx.cost.estimator import Estimator, ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import demand_of
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.cost.synthetic import SyntheticEstimator
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.policies.oracle import best_grouping
from tlora_fx.scheduler.search.objective import Objective, seconds_of
from tlora_fx.scheduler.state import ROUNDING, ActiveJob, JobRequest, SchedulerState, limit_seconds

BASE = "llama-3-8b"
CLUSTER = Cluster(256)
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


def state_of(requests: Sequence[JobRequest], estimator: Estimator) -> SchedulerState:
    """All of them new, at one moment."""
    jobs = {
        one.name: ActiveJob(one, estimator.solo(one.base, one.demand, one.gpus)) for one in requests
    }
    return SchedulerState(float(len(requests)), CLUSTER, estimator, jobs)


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
    "tlora, merges only": by_policy("tlora", thorough=0, moves=0),
    "tlora, merges and moves": by_policy("tlora", thorough=0),
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


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=10)
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
    write(RESULTS / "optimality.json", found)


def table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    drawn = Table(title=f"{name}: part of the exact optimum", title_justify="left")
    for column in ("objective", "policy", "mean", "worst", "past bound", "evaluations", "ms"):
        drawn.add_column(column, justify="left" if column in {"objective", "policy"} else "right")
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
