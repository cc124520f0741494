"""`train` on a CPU that others use too: `python -m benchmarks.busy --runs 5`.

The quickstart is trained as a user types it, or with --python by README's first example, in turns
on idle cores and beside as many processes as there are cores, each of which computes without a
pause. A figure is the median of a state's runs of whole commands. Every run must leave the losses
of the first one, bit for bit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.arguments import parser_of
from benchmarks.results_file import console, described, write

JOBS = Path(__file__).parents[1] / "examples" / "quickstart" / "jobs.yaml"
#: Whole commands beside busy processes over those on idle cores.
BOUND = 1.6
SPIN = "while True: sum(range(1 << 16))"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Inside, so many processes compute without a pause."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


#: README's first example, without what it prints.
EXAMPLE = """
import sys, tlora_fx
jobs = tlora_fx.load_job_file(sys.argv[1]).jobs
tlora_fx.Trainer(tlora_fx.compile(jobs), jobs, output=sys.argv[2]).run()
"""


def trained(cache: Path, python: bool) -> tuple[float, list[float], dict[str, list[float]]]:
    """Seconds of one command, seconds of its rounds, and each job's losses."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "tlora_fx", "train", str(JOBS), "-o", str(output)]
        if python:
            command = [sys.executable, "-c", EXAMPLE, str(JOBS), str(output)]
        begun = time.monotonic()
        subprocess.run(
            command, env=os.environ | {"TLORA_FX_CACHE": str(cache)}, check=True,
            capture_output=True,
        )  # fmt: skip
        seconds = time.monotonic() - begun
        rows = {
            path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(output.glob("*/metrics.jsonl"))
        }
    losses = {job: [row["loss"] for row in own if "loss" in row] for job, own in rows.items()}
    rounds = [row["seconds"] for own in rows.values() for row in own if row.get("seconds")]
    return seconds, rounds, losses


def main() -> None:
    """Run all, print a table and write the result."""
    parser = parser_of(__doc__, device=False)
    parser.add_argument("--runs", type=int, default=5, help="commands of each state")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", action="store_true", help="README's first example")
    given = parser.parse_args()
    states = {"idle": 0, "busy": given.processes}
    seconds: dict[str, list[float]] = {state: [] for state in states}
    rounds: dict[str, list[float]] = {state: [] for state in states}
    with tempfile.TemporaryDirectory() as folder:
        _, _, expected = trained(Path(folder), given.python)  # fills the caches
        for _ in range(given.runs):
            for state, processes in states.items():
                with busy(processes):
                    took, each, losses = trained(Path(folder), given.python)
                if losses != expected:
                    raise SystemExit(f"losses of a run on {state} cores differ from the first")
                seconds[state].append(round(took, 2))
                rounds[state] += each
    ratio = statistics.median(seconds["busy"]) / statistics.median(seconds["idle"])
    found: dict[str, Any] = described("busy", "cpu") | {
        "processes_beside": given.processes,
        "seconds": seconds,
        "round_seconds": {state: _spread(each) for state, each in rounds.items()},
        "ratio": round(ratio, 3),
        "bound": BOUND,
    }
    table = Table("cores", "whole command, s", "a round: median, 90th percentile, longest, s")
    for state in states:
        of_rounds = ", ".join(f"{value:.2f}" for value in found["round_seconds"][state].values())
        table.add_row(state, ", ".join(f"{value:.1f}" for value in seconds[state]), of_rounds)
    console().print(table, f"busy over idle, by medians: {ratio:.2f} (bound {BOUND})")
    write(given.out / f"busy{'-python' * given.python}-{found['date']}.json", found)


def _spread(values: list[float]) -> dict[str, float]:
    """Median, 90th percentile and maximum, s."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 4),
        "longest": round(ordered[-1], 4),
    }


if __name__ == "__main__":
    main()
