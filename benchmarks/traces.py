"""Our policy against the others on every trace at hand, over seeds, beside the paper's numbers.

    python -m benchmarks.traces --data ../shared/data

Replays on a simulated clock by the shipped profiles; nothing runs on a GPU. The synthetic trace is
drawn from AcmeTrace's marginals; Pollux's workloads have no durations, which are drawn by the
stated rule; the converted Kalos file has all but what makes a LoRA job.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.arguments import parser_of
from benchmarks.reasons import offered_load, reasons
from benchmarks.results_file import bare_table, console, described, write
from tlora_fx.cost.hardware import Cluster
from tlora_fx.simulator.comparison import (
    BASELINES,
    METRICS,
    PAPER_COMPLETION,
    PAPER_THROUGHPUT,
    ratio_text,
    spread,
)
from tlora_fx.simulator.report import Report
from tlora_fx.simulator.sweep import (
    JobSource,
    Scenario,
    ScenarioResult,
    SweepPlan,
    plan_of,
    run_all,
)

POLICIES = ("tlora", "tlora-paper", *BASELINES, "no-scheduler", "no-kernel-fuser")


def scenarios(data: Path | None, jobs: int, gpus: int) -> Iterator[tuple[str, Scenario]]:
    """Each trace by name; those that are not there are left out."""
    cluster = Cluster(gpus)
    synthetic = Scenario("tlora", source=JobSource(jobs=jobs), cluster=cluster)
    yield "synthetic", synthetic
    yield (
        "synthetic, 0.25 x arrivals",
        replace(synthetic, source=JobSource(jobs=jobs, intensity=0.25)),
    )
    by_gpus = replace(synthetic.choices, batch_rule="gpus")
    yield "synthetic, batch by GPUs", replace(synthetic, choices=by_gpus)
    if data is None:
        return
    files = [data / "acme" / "converted_kalos_trace.csv", *sorted((data / "pollux").glob("*.csv"))]
    for path in files:
        if path.exists():
            yield (
                f"{path.parent.name}, {path.stem}",
                replace(synthetic, source=JobSource(trace=str(path))),
            )


def replay_parser(text: str | None, *, seeds: int, jobs: int) -> argparse.ArgumentParser:
    """The arguments of all replays of these traces.

    seeds, jobs   by default
    """
    parser = parser_of(text, device=False)
    parser.add_argument("--data", type=Path, help="folder with acme/ and pollux/")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=jobs, help="of the synthetic trace")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser


def shortened(value: float) -> float:
    """In five digits."""
    return float(f"{value:.5g}")


def told(report: Report) -> dict[str, Any]:
    """What is kept of a trace; of each metric mean, least and most over the seeds."""
    loads = [offered_load(one) for one in report.policies["tlora"]]
    return {
        "trace": report.first.trace,
        "dropped": report.first.dropped,
        "choices": {name: value for name, value, _ in report.choices()},
        "offered_load": sum(loads) / len(loads),
        "ratios": [asdict(one) for one in report.ratios],
        "policies": {
            name: {
                metric.key: [shortened(value) for value in (found.mean, found.low, found.high)]
                for metric in METRICS
                if (found := spread(metric, outcomes)) is not None
            }
            for name, outcomes in report.policies.items()
        },
        "reasons": reasons(report.policies, report.ratios),
    }


def table(reports: dict[str, Report]) -> Table:
    """Ratios of each trace, one baseline a row."""
    made = bare_table("trace", "against", "load", "throughput", "completion", texts=2)
    for name, report in reports.items():
        load = offered_load(next(iter(report.policies["tlora"])))
        for one in report.ratios:
            ratios = (ratio_text(one.throughput), ratio_text(one.completion))
            made.add_row(name, one.baseline, f"{load:.2f}", *ratios)
    return made


def told_all(reports: dict[str, Report]) -> dict[str, Any]:
    """What is kept of all of them."""
    return {"traces": {name: told(report) for name, report in reports.items()}}


def replayed(
    plans: dict[str, SweepPlan], processes: int, keep: Callable[[dict[str, Report]], None]
) -> dict[str, Report]:
    """The report of each trace.

    keep    called with those that are whole, after each
    """
    wanted = [one for plan in plans.values() for one in plan.main]
    outcomes: dict[Scenario, ScenarioResult] = {}
    reports: dict[str, Report] = {}
    start = time.perf_counter()

    def done(outcome: ScenarioResult) -> None:
        outcomes[outcome.scenario] = outcome
        for name, plan in plans.items():
            if name not in reports and all(one in outcomes for one in plan.main):
                reports[name] = Report(plan, dict(outcomes))
                keep(reports)
                wall = time.perf_counter() - start
                print(f"{wall:6.0f} s  {name}: {len(outcomes)} of {len(wanted)}", flush=True)

    run_all(wanted, processes, done)
    return reports


def main() -> None:
    """Replay, print, write."""
    parser = replay_parser(__doc__, seeds=5, jobs=1000)
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    terminal = console()
    result = described("traces", "cpu")
    result["paper"] = {"throughput": PAPER_THROUGHPUT, "completion": PAPER_COMPLETION}
    found = scenarios(given.data, given.jobs, given.gpus)
    plans = {name: plan_of(one, given.policies.split(","), given.seeds) for name, one in found}
    path = given.out / f"traces-{result['date']}.json"
    reports = replayed(plans, given.processes, lambda made: write(path, result | told_all(made)))
    terminal.print(table(reports))
    terminal.print(f"paper: throughput {PAPER_THROUGHPUT}, completion {PAPER_COMPLETION}")
    write(path, result | told_all(reports))


if __name__ == "__main__":
    main()
