"""How long a replay takes by the number of its jobs, and how much memory: both must grow linearly.

Synthetic AcmeTrace jobs on 128 GPUs, the whole of 450,590 or a part of them, each part in a process
of its own. What the replay itself takes is told apart from what the policy's decisions do.

    python -m benchmarks.replay [--parts 16,8,4] [--policies tlora,megatron] [--estimator profile]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from rich.table import Table

from benchmarks.arguments import parser_of
from benchmarks.results_file import bare_table, console, described, write
from benchmarks.synthetic_roofline import SyntheticEstimator
from tlora_fx.cost.estimator import Estimator, ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.simulator.replay import OPTIONS, replay
from tlora_fx.simulator.sweep import Choices, workload_of
from tlora_fx.simulator.synthetic import Draw, generate, shipped_fit

WHOLE = 450_590
BOUNDS = {"minutes": 15.0, "gib": 4.0}


@dataclass(frozen=True)
class Case:
    """One replay.

    intensity   arrivals, as a multiple of the trace's mean rate
    """

    policy: str
    jobs: int
    estimator: str = "profile"
    gpus: int = 128
    intensity: float = 1.0
    horizon: float = 60.0
    seed: int = 0


def estimator_of(case: Case, cluster: Cluster) -> Estimator:
    """Profiles as `tlora-fx simulate` takes them, or the field notes' roofline."""
    if case.estimator == "synthetic":
        return SyntheticEstimator(cluster)
    profiles = profiles_for(Choices().bases, cluster.gpu, allow_estimated=True)
    return ProfileEstimator(profiles, cluster)


def measured(case: Case) -> dict[str, Any]:
    """One replay, in this process."""
    cluster = Cluster(case.gpus)
    estimator = estimator_of(case, cluster)
    begun = time.process_time()
    trace = generate(shipped_fit(), Draw(case.jobs, intensity=case.intensity, seed=case.seed))
    workload = workload_of(trace, Choices(seed=case.seed), cluster, estimator)
    drawn = time.process_time()
    summary = replay(
        workload.requests,
        find_policy(case.policy),
        estimator,
        cluster,
        options=replace(OPTIONS, horizon=case.horizon),
    ).summary
    spent = time.process_time() - drawn
    decisions = summary.decision_wall_seconds
    in_policy = decisions.mean * decisions.count * spent / summary.wall_seconds
    return {
        **vars(case),
        "replayed": summary.jobs,
        "finished": summary.finished,
        "refused": summary.refused,
        "draw_cpu_seconds": drawn - begun,
        "replay_cpu_seconds": spent,
        "replay_wall_seconds": summary.wall_seconds,
        "policy_seconds": in_policy,
        "cpu_ms_per_job": 1e3 * spent / summary.jobs,
        "engine_ms_per_job": 1e3 * (spent - in_policy) / summary.jobs,
        "decisions": summary.decisions,
        "decision_ms": {
            name: 1e3 * getattr(decisions, name) for name in ("mean", "p50", "p99", "most")
        },
        "evaluations": summary.evaluations,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "replayed_days": summary.whole.seconds / 86400,
        "most_waiting_jobs": max((point.waiting_jobs for point in summary.series), default=0.0),
        "loaded": {
            "samples_per_second": summary.loaded.samples_per_second,
            "weighted_speedup": summary.loaded.weighted_speedup,
            "allocated_share": summary.loaded.allocated_share,
            "busy_share": summary.loaded.busy_share,
        },
        "completion_hours_mean": summary.completion_seconds.mean / 3600,
        "queue_hours_mean": summary.queue_seconds.mean / 3600,
        "violations": summary.violations,
    }


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Each policy, from the smallest part to the largest."""
    for policy in options.policies.split(","):
        for part in sorted((int(part) for part in options.parts.split(",")), reverse=True):
            yield Case(
                policy,
                round(WHOLE / part),
                options.estimator,
                options.gpus,
                options.intensity,
                options.horizon,
                options.seed,
            )


def alone(case: Case) -> dict[str, Any]:
    """One replay in a process of its own, so that its peak of memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, case).result()


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """For the terminal."""
    shown = bare_table(
        "policy", "jobs", "minutes", "ms a job", "engine", "decisions", "decision ms mean / p99",
        "GiB", "days replayed", "most waiting",
        title="replays of synthetic AcmeTrace jobs, CPU time of one process",
    )  # fmt: skip
    for row in rows:
        shown.add_row(
            row["policy"],
            f"{row['replayed']:,}",
            f"{row['replay_cpu_seconds'] / 60:.2f}",
            f"{row['cpu_ms_per_job']:.2f}",
            f"{row['engine_ms_per_job']:.2f}",
            f"{row['decisions']:,}",
            f"{row['decision_ms']['mean']:.2f} / {row['decision_ms']['p99']:.1f}",
            f"{row['peak_gib']:.2f}",
            f"{row['replayed_days']:,.0f}",
            f"{row['most_waiting_jobs']:,.0f}",
        )
    return shown


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__, device=False)
    parser.add_argument("--parts", default="16,8,4", help="parts of 450,590 jobs: 1 is all")
    parser.add_argument("--policies", default="tlora,megatron")
    parser.add_argument("--estimator", choices=("profile", "synthetic"), default="profile")
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--intensity", type=float, default=1.0)
    parser.add_argument("--horizon", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    found = described("replay", "cpu") | {"bounds": BOUNDS, "rows": rows}
    for case in cases(options):
        rows.append(alone(case))
        write(options.out / f"replay-{found['date']}.json", found)
        console().print(table(rows[-1:]))
    console().print(table(rows))


if __name__ == "__main__":
    main()
