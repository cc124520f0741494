"""What our policy gains at light, full and heavy load, on every trace at hand, over seeds.

    python -m benchmarks.loads --data ../shared/data --gpus 32,128
    python -m benchmarks.loads --chart benchmarks/results/loads-DATE.json docs/assets/loads.svg

Replays on a simulated clock by the shipped profiles; nothing runs on a GPU. Each trace is replayed
at several rates of arrival. Jobs join and leave running groups at the cost that was measured for
it. The baselines are `megatron`, which starts jobs in the order of their arrival, and the same
where later jobs overtake those that wait for more GPUs (`backfill`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.results_file import bare_table, console, described, write
from benchmarks.traces import replay_parser, replayed, scenarios, shortened, told_all
from tlora_fx.simulator.comparison import PAPER_COMPLETION, PAPER_THROUGHPUT
from tlora_fx.simulator.figures import Series, lines
from tlora_fx.simulator.sweep import SweepPlan, plan_of

POLICIES = ("tlora", "megatron", "megatron:backfill=true")
#: Seconds that a running group stands still when a job joins it: benchmarks/results/elastic.md.
CHANGE_SECONDS = 0.05
#: Colours of a chart that lies outside a report, and of its text.
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1b2126; } .middle { text-anchor: middle; }
.end { text-anchor: end; } .grid { stroke: #cfd6dc; fill: none; }
.axis, .tick { stroke: #56616b; fill: none; } .line { fill: none; stroke-width: 2; }
.line.s0 { stroke: #0072b2; } .bar.s0, .dot.s0 { fill: #0072b2; }
.line.s1 { stroke: #d55e00; } .bar.s1, .dot.s1 { fill: #d55e00; }
.line.s2 { stroke: #7fb8e0; } .bar.s2, .dot.s2 { fill: #7fb8e0; }
.line.s3 { stroke: #f0a868; } .bar.s3, .dot.s3 { fill: #f0a868; }
"""


def plans_of(given: argparse.Namespace) -> Iterator[tuple[str, SweepPlan]]:
    """The replays of each trace, cluster and rate, by what they are called."""
    for gpus in map(int, given.gpus.split(",")):
        for name, scenario in scenarios(given.data, given.jobs, gpus):
            if "arrivals" in name:
                continue
            for scale in map(float, given.scales.split(",")):
                choices = replace(scenario.choices, scale=scale)
                one = replace(scenario, choices=choices, change_seconds=CHANGE_SECONDS)
                yield f"{name}, {gpus} GPUs, {scale:g}", plan_of(one, POLICIES, given.seeds)


def points(traces: dict[str, Any]) -> list[dict[str, Any]]:
    """One trace, cluster and rate each, by load: what `tlora` gains over each baseline."""
    found = []
    for name, told in traces.items():
        trace, gpus, scale = name.rsplit(", ", 2)
        where = {"trace": trace, "gpus": int(gpus.split()[0]), "scale": float(scale)}
        for ratio in told["ratios"]:
            gains = {
                metric: [shortened(ratio[metric][part]) for part in ("mean", "low", "high")]
                for metric in ("throughput", "completion")
            }
            load = shortened(told["offered_load"])
            found.append(where | {"load": load, "baseline": ratio["baseline"]} | gains)
    return sorted(found, key=lambda one: one["load"])


def table(found: Sequence[dict[str, Any]]) -> Table:
    """A point a row."""
    heads = ("trace", "against", "GPUs", "load", "throughput", "completion")
    made = bare_table(*heads, texts=2)
    for one in found:
        gains = (
            "{:.2f} ({:.2f}–{:.2f})".format(*one[metric]) for metric in ("throughput", "completion")
        )
        where = (one["trace"], one["baseline"], str(one["gpus"]), f"{one['load']:.2f}")
        made.add_row(*where, *gains)
    return made


def chart(result: dict[str, Any], trace: str = "synthetic") -> str:
    """Gains by load of one trace, as SVG: means over the seeds, on the smallest cluster."""
    series: list[Series] = []
    for metric, name in (("throughput", "samples/s"), ("completion", "completion")):
        for baseline, who in (("megatron", "megatron"), ("megatron:backfill=true", "overtaking")):
            own = [
                one
                for one in result["points"]
                if (one["trace"], one["baseline"]) == (trace, baseline)
                and one["gpus"] == min(point["gpus"] for point in result["points"])
            ]
            mean, x = [one[metric][0] for one in own], [one["load"] for one in own]
            series.append(Series(f"{name}, over {who}", mean, x=x, colour=len(series)))
    title = "Gain of tlora by load"
    y_label = "times the baseline's"
    drawn = lines(title, "load", y_label, series, log_x=True, log_y=True, zero=False)
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="760" '
    paper = f'</title><style>{STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>'
    return drawn.replace("<svg ", head, 1).replace("</title>", paper, 1)


def main() -> None:
    """Replay, print, write; or draw a result."""
    parser = replay_parser(__doc__, seeds=5, jobs=300)
    parser.add_argument("--gpus", default="32,128", help="sizes of the cluster")
    parser.add_argument("--scales", default="0.02,0.1,0.4,1.5,5", help="rates of arrival")
    parser.add_argument("--chart", type=Path, nargs=2, help="a result, and the SVG to draw of it")
    given = parser.parse_args()
    if given.chart:
        source, target = given.chart
        target.write_text(chart(json.loads(source.read_text("utf-8"))) + "\n", "utf-8")
        return
    result = described("loads", "cpu") | {"change_seconds": CHANGE_SECONDS, "seeds": given.seeds}
    result["paper"] = {"throughput": PAPER_THROUGHPUT, "completion": PAPER_COMPLETION}
    path = given.out / f"loads-{result['date']}.json"

    def keep(reports: Any) -> None:
        write(path, result | {"points": points(told_all(reports)["traces"])})

    reports = replayed(dict(plans_of(given)), given.processes, keep)
    keep(reports)
    console().print(table(points(told_all(reports)["traces"])))


if __name__ == "__main__":
    main()
