"""What it takes to form a group of two processes: cold, and by those that the last one left.

    python -m benchmarks.forming             # two GPUs, 8B's width
    python -m benchmarks.forming --model tiny --device cpu --layers 2 --eager   # tries the code

For each layout a group is launched, trains, and is drained; then the next group of the base, with
other jobs, has its place. Timed is from the order until its first step is done. The first group's
processes are forked, join each other, trace, load and compile; they wait for the next ones, whose
jobs join their model. A group's first step may capture rows, and reads its data.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.interleaved import Spread
from benchmarks.moves import ENDLESS, Bench, jobs_of, parser_of
from benchmarks.results_file import console, described, write
from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.cost.plan import MeshShape
from tlora_fx.scheduler.executor import Drained, GroupLaunch, Progress
from tlora_fx.scheduler.local.executor import LocalExecutor, LocalOptions
from tlora_fx.scheduler.local.processes import ForkServer
from tlora_fx.scheduler.state import Group, JobRequest

LAYOUTS = {
    "replicated": Layout(MeshShape(dp=2)),
    "fsdp": Layout(MeshShape(dp=2), True),
    "tensor": Layout(MeshShape(tp=2)),
    "pipeline": Layout(MeshShape(pp=2)),
}
#: Whose jobs train in turn.
GROUPS = (("a", "b"), ("c", "d"))


class Groups(Bench):
    """Groups of two processes, one after the other."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.limit, self.last = given.limit_seconds, 0
        jobs = jobs_of(given, folder)
        specs = {job.name: job.model_dump(mode="json") for job in jobs}
        self.requests = {name: JobRequest(name, "base", Demand(), 2, ENDLESS) for name in specs}
        options = LocalOptions(given.device, save_seconds=1e6, compiled=not given.eager)
        self.groups = []
        self.executor = LocalExecutor(
            folder / "run", Cluster(2, 2, 1), specs, ForkServer(folder / "workers.log"),
            options=options,
        )  # fmt: skip

    def form(self, names: tuple[str, ...], layout: Layout) -> float:
        """Launch a group, let it train a little, and drain it; seconds until its first step."""
        self.last += 1
        group, jobs = Group(names, 2, (0, 1)), [self.requests[name] for name in names]
        begun = time.monotonic()
        self.executor.reserve(group, self.last)
        self.executor.launch(GroupLaunch(group, self.last, jobs, {}, layout))
        self.until(Progress, self.last)
        seconds = time.monotonic() - begun
        self.until(Progress, self.last)
        self.executor.drain(group, self.last)
        self.until(Drained, self.last)
        self.executor.release(group, self.last)
        return seconds


def main() -> None:
    """Form groups, print and write."""
    given = _arguments()
    found = described("forming", given.device) | {
        "model": given.model, "layers": given.layers, "rank": given.rank,
        "gpus": 2 if given.device == "cuda" else 0, "layouts": {},
    }  # fmt: skip
    path = Path(given.out) / f"forming-{found['date']}.json"
    with tempfile.TemporaryDirectory(prefix="forming-") as name:
        groups = Groups(given, Path(name))
        try:
            for layout in given.layouts:
                cold, *resident = [
                    groups.form(GROUPS[number % 2], LAYOUTS[layout])
                    for number in range(given.groups + 1)
                ]
                found["layouts"][layout] = {
                    "cold_s": cold, "resident_s": Spread.of(resident).json(),
                }  # fmt: skip
                print(layout, round(cold, 2), [round(one, 3) for one in resident], flush=True)
                write(path, found)
        finally:
            groups.executor.close()
    show(found)


def show(found: dict[str, Any]) -> None:
    """Seconds from an order to the first step, by layout."""
    table = Table("layout", "new processes", "resident ones", "least to most", box=None)
    for layout, times in found["layouts"].items():
        spread = times["resident_s"]
        low, high = spread["least"], spread["most"]
        table.add_row(
            layout, f"{times['cold_s']:.1f}", f"{spread['median']:.2f}", f"{low:.2f} to {high:.2f}"
        )
    console().print(table)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--groups", type=int, default=4, help="after the first, of each layout")
    return parser.parse_args()


if __name__ == "__main__":
    main()
