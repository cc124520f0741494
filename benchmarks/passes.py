"""Processor seconds of passes and of reading graph files, and memory of compiling.

    python -m benchmarks.passes

32 jobs on a Llama-3-8B configuration are compiled on the meta device. Each measurement is a fresh
process of one thread. The first has empty caches, and only its memory counts; each of the others
finds the traces that it left. A figure is the least of its runs: processor seconds do not count
other work on the machine, but that work empties the processor's caches.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.compile import CASES, jobs_of

if TYPE_CHECKING:
    from tlora_fx.ir.graph import GroupGraph

RESULTS = Path(__file__).parent / "results"
READS = 5  # of one text in a process that has read one
TEXT_BYTES = 83_000  # of the text whose reading is bounded


@dataclass(frozen=True, slots=True)
class PassTime:
    """One pass, over all graphs that it ran on.

    seconds      of the processor, with shapes and checks after it
    propagated   operators that ran on fake tensors for their values after it
    """

    name: str
    seconds: float
    nodes_in: int
    nodes_out: int
    propagated: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one process measured; processor seconds.

    first_read    of the graph file, with what is imported for it; read: the least of some more
    peak_gib      of the process, before any file was read
    """

    passes: tuple[PassTime, ...]
    text_bytes: int
    first_read: float
    read: float
    peak_gib: float

    @property
    def seconds(self) -> float:
        """Those of all passes."""
        return sum(item.seconds for item in self.passes)


def measure(case: str) -> Run:
    """Compile a case in this process, and read the text of its graphs."""
    from tlora_fx import compile
    from tlora_fx.graph_file import graph_text
    from tlora_fx.pipeline import Done, Event, Instrument

    class Clock(Instrument):
        """Times passes by the processor."""

        def __init__(self) -> None:
            self.rows: dict[int, PassTime] = {}
            self.started_at = 0.0

        def before(self, event: Event) -> None:
            self.started_at = time.process_time()

        def after(self, done: Done) -> None:
            seconds = time.process_time() - self.started_at
            row = self.rows.get(done.place, PassTime(done.item.name, 0.0, 0, 0, 0))
            self.rows[done.place] = PassTime(
                row.name,
                row.seconds + seconds,
                row.nodes_in + done.nodes[0],
                row.nodes_out + done.nodes[1],
                row.propagated + done.shapes,
            )

    clock = Clock()
    model = compile(jobs_of(CASES[case]), instruments=[clock])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    text = graph_text(model.group)
    first, *reads = (_read(text) for _ in range(1 + READS))
    rows = tuple(clock.rows[place] for place in sorted(clock.rows))
    return Run(rows, len(text.encode()), first, min(reads), peak)


def _read(text: str) -> float:
    """Processor seconds of reading a text."""
    from tlora_fx.graph_file import graphs_of_text

    started = time.process_time()
    graphs: object | GroupGraph = graphs_of_text(text)
    seconds = time.process_time() - started
    del graphs
    return seconds


def spawn(case: str, caches: str) -> Run:
    """Measure in a fresh process whose caches lie in a folder."""
    command = [sys.executable, "-m", "benchmarks.passes", "--measure", case]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = os.environ | threads | {"TLORA_FX_CACHE": caches}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"measuring '{case}' failed:\n{done.stderr}")
    told = json.loads(done.stdout.splitlines()[-1])
    return Run(**told | {"passes": tuple(PassTime(**row) for row in told["passes"])})


def report(empty: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that was measured, as a result file has it.

    empty   the run with empty caches; runs: those that found its traces
    """
    least = min(runs, key=lambda run: run.seconds)
    share = TEXT_BYTES / least.text_bytes
    bounds = [
        _bound("all passes", 1.5, least.seconds, "s"),
        _bound(f"reading {TEXT_BYTES:,} bytes", 0.1, min(r.read for r in runs) * share, "s"),
        _bound("peak memory, empty caches", 1.5, empty.peak_gib, "GiB"),
        _bound("peak memory, known traces", 1.5, max(r.peak_gib for r in runs), "GiB"),
    ]
    return {
        "processor_seconds": True,
        "load": os.getloadavg()[0],
        "bounds": bounds,
        "first_read": min(run.first_read for run in runs),
        "empty": asdict(empty),
        "runs": [asdict(run) for run in runs],
    }


def _bound(what: str, bound: float, measured: float, unit: str) -> dict[str, Any]:
    return {
        "what": what,
        "bound": bound,
        "measured": measured,
        "unit": unit,
        "holds": measured <= bound,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Two tables: passes of the quickest run, and the bounds."""
    from benchmarks.results_file import bare_table

    least = min(found["runs"], key=lambda run: sum(row["seconds"] for row in run["passes"]))
    passes = bare_table("pass", "cpu s", "nodes in", "nodes out", "propagated")
    for row in least["passes"]:
        numbers = (row["nodes_in"], row["nodes_out"], row["propagated"])
        passes.add_row(row["name"], f"{row['seconds']:.3f}", *(f"{n:,}" for n in numbers))
    bounds = bare_table("bound", "at most", "measured", "holds")
    for row in found["bounds"]:
        measured = f"{row['measured']:.3g} {row['unit']}"
        holds = "yes" if row["holds"] else "NO"
        bounds.add_row(row["what"], f"{row['bound']:g}", measured, holds)
    console.print(passes, "", bounds)
    console.print(f"first text of a process: {found['first_read']:.3f} s")
    console.print(f"load average: {found['load']:.1f}")


def main() -> int:
    """Measure; exit status 1 when a bound does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="processes that find traces")
    parser.add_argument("--case", choices=CASES, default="8B", help="what is compiled")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--measure", choices=CASES, help="measure in this process")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(asdict(measure(given.measure))))
        return 0
    # A process that measures has imported none of what these import.
    from benchmarks.results_file import console, described, write

    with tempfile.TemporaryDirectory() as caches:
        empty = spawn(given.case, caches)
        runs = [spawn(given.case, caches) for _ in range(given.runs)]
    found = described("passes", "cpu") | report(empty, runs)
    show(found, console())
    write(given.out / f"passes-{found['date']}.json", found)
    return 0 if all(row["holds"] for row in found["bounds"]) else 1


if __name__ == "__main__":
    sys.exit(main())
