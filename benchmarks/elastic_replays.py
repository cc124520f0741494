"""The default policy where jobs join and leave running groups, against groups that form anew.

    python -m benchmarks.elastic_replays --data ../shared/data

Replays of every trace at hand, over seeds, by the shipped profiles; nothing runs on a GPU. `tlora`
decides in both. Without joins, any change of a group costs it `--switch-seconds`; with them, a
group that keeps its GPUs stands still for `--change-seconds`, and a job that moves to it is on its
way for twice that. Ratios are with over without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.results_file import bare_table, console, described, write
from benchmarks.traces import replay_parser, scenarios, shortened
from tlora_fx.simulator.sweep import Scenario, ScenarioResult, run_all

FIGURES = (
    "samples_per_second", "completion_hours", "shared_share", "group_jobs", "formations",
    "switches", "moves", "joins", "leaves", "switch_gpu_hours", "past_bound_share",
)  # fmt: skip
#: Of which the ratio with over without is told.
RATIOS = ("samples_per_second", "completion_hours", "shared_share")


def figures(outcome: ScenarioResult) -> dict[str, float]:
    """What is compared, of one replay."""
    summary = outcome.summary
    return {
        "samples_per_second": summary.loaded.samples_per_second,
        "completion_hours": summary.completion_seconds.mean / 3600,
        "shared_share": summary.grouped_job_share,
        "group_jobs": summary.group_jobs,
        "formations": summary.formations,
        "switches": summary.switches,
        "moves": summary.moves,
        "joins": summary.joins,
        "leaves": summary.leaves,
        "switch_gpu_hours": summary.whole.switch_gpu_seconds / 3600,
        "past_bound_share": summary.violating_job_share,
    }


def of_trace(
    scenario: Scenario, outcomes: dict[Scenario, ScenarioResult], arms: dict[str, float | None],
    seeds: int,
) -> dict[str, Any]:  # fmt: skip
    """Means over the seeds of each arm, and what joining changes, seed by seed."""
    rows = {
        name: [
            figures(outcomes[variant(scenario, seconds, seed)]) for seed in range(seeds)
        ]
        for name, seconds in arms.items()
    }  # fmt: skip
    pairs = list(zip(rows["with"], rows["without"], strict=True))
    return {
        **{
            name: {key: shortened(fmean(row[key] for row in each)) for key in FIGURES}
            for name, each in rows.items()
        },
        "ratios": {
            key: _spread([new[key] / old[key] for new, old in pairs if old[key]]) for key in RATIOS
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    named = {"mean": fmean(values), "least": min(values), "most": max(values)}
    return {name: shortened(value) for name, value in named.items()}


def variant(scenario: Scenario, seconds: float | None, seed: int) -> Scenario:
    """A scenario with joins at a price, or without."""
    return replace(scenario, change_seconds=seconds, seed=seed)


def table(traces: dict[str, Any]) -> Table:
    """One trace a row."""
    heads = ("trace", "throughput", "completion", "shared: without", "with", "joins", "moves")
    made = bare_table(*heads)
    for name, told in traces.items():
        ratios = [told["ratios"][key].get("mean", 1.0) for key in RATIOS[:2]]
        made.add_row(
            name,
            *(f"{ratio:.3f}" for ratio in ratios),
            f"{told['without']['shared_share']:.0%}",
            f"{told['with']['shared_share']:.0%}",
            f"{told['with']['joins']:.0f}",
            f"{told['with']['moves']:.0f}",
        )
    return made


def main() -> None:
    """Replay, print, write."""
    parser = replay_parser(__doc__, seeds=3, jobs=500)
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--switch-seconds", type=float, default=20.0)
    parser.add_argument("--change-seconds", type=float, default=0.5)
    parser.add_argument("--policy", default="tlora")
    given = parser.parse_args()
    found = {
        name: replace(one, policy=given.policy, switch_seconds=given.switch_seconds)
        for name, one in scenarios(given.data, given.jobs, given.gpus)
    }
    arms: dict[str, float | None] = {"without": None, "with": given.change_seconds}
    result = described("elastic_replays", "cpu")
    result |= {
        "policy": given.policy, "seeds": given.seeds, "gpus": given.gpus,
        "change_seconds": given.change_seconds, "switch_seconds": given.switch_seconds,
    }  # fmt: skip
    path = given.out / f"elastic-replays-{result['date']}.json"
    traces: dict[str, Any] = {}
    for name, scenario in found.items():
        outcomes: dict[Scenario, ScenarioResult] = {}
        wanted = [
            variant(scenario, seconds, seed)
            for seconds in arms.values()
            for seed in range(given.seeds)
        ]
        run_all(wanted, given.processes, lambda one: outcomes.update({one.scenario: one}))  # noqa: B023
        traces[name] = of_trace(scenario, outcomes, arms, given.seeds)
        write(path, result | {"traces": traces})
        console().print(table({name: traces[name]}))
    console().print(table(traces))


if __name__ == "__main__":
    main()
