"""How large an HTML page is and how fast it opens: `python -m benchmarks.html_page`.

The page shows every pass over 32 jobs on a Llama-3-8B config. Chromium opens the file anew for each
run, with an empty profile; times are wall seconds as the page sees them, from the start of the
navigation, or from an event, to the frame that shows what follows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compile import COMMON, RANKS, RATES, SMALL, TARGETS, hardware

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("tlora-fx", "torch", "transformers", "peft", "playwright")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
MB = 1e6

# Seconds from an action to the second frame after it, by when the first is on the screen.
TIMED = """async () => {
  const start = performance.now();
  ACT
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return (performance.now() - start) / 1000;
}"""
SLIDE = """
const slider = document.getElementById("slider");
slider.value = "5";
slider.dispatchEvent(new Event("input"));
"""
SEARCH = """
const field = document.getElementById("search");
field.value = "q_proj";
field.dispatchEvent(new Event("input"));
"""
SIDE_BY_SIDE = """
const choice = document.getElementById("compare");
choice.value = "previous";
choice.dispatchEvent(new Event("change"));
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What one opening of the page measured, in seconds.

    list_shown     navigation to the first list of modules
    first_frame    navigation to the frame after it
    slide          from the last pass to fuse-backbone, where each job has nodes of its own
    side_by_side   that pass beside the one before it
    search         every node of both for "q_proj"
    """

    list_shown: float
    first_frame: float
    slide: float
    side_by_side: float
    search: float


def write_page(path: Path) -> dict[str, float]:
    """Compile the jobs, record every pass, write the page; returns seconds and sizes."""
    from tlora_fx import BaseSpec, Job, compile
    from tlora_fx.inspect.html import write_html
    from tlora_fx.inspect.program import Recorder

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        config = COMMON | SMALL.sizes | {"num_hidden_layers": SMALL.layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        base = BaseSpec(config=folder, dtype="bfloat16")
        compile(
            [Job(name=f"job-{i}", base=base, **_job(i)) for i in range(SMALL.jobs)],
            instruments=[recorder],
        )
    start = time.perf_counter()
    stages = recorder.stages
    write_html(stages, path)
    return {
        "write_seconds": time.perf_counter() - start,
        "bytes": path.stat().st_size,
        "stages": len(stages),
        "nodes": sum(len(graph.nodes) for stage in stages for graph in stage.program.graphs),
    }


def _job(place: int) -> dict[str, Any]:
    rank = RANKS[place % len(RANKS)]
    lora = {
        "r": rank,
        "lora_dropout": RATES[place % len(RATES)],
        "target_modules": TARGETS[place % len(TARGETS)],
    }
    return {"lora": lora, "data": {"path": "none.jsonl"}, "max_steps": 1}


def open_page(chromium: str, path: Path) -> Run:
    """Open the page in a new Chromium, and use it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*ARGUMENTS])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("body.ready")
        frame = "() => new Promise(done => requestAnimationFrame(() => done(performance.now())))"
        first = page.evaluate(frame) / 1000
        shown = page.evaluate("performance.getEntriesByName('list-shown')[0].startTime") / 1000
        acts = (SLIDE, SIDE_BY_SIDE, SEARCH)
        times = [page.evaluate(TIMED.replace("ACT", act)) for act in acts]
        browser.close()
    return Run(shown, first, *times)


def report(page: dict[str, float], runs: Sequence[Run], chromium: str, count: int) -> Any:
    """Everything that was measured, as JSON."""
    told = subprocess.run([chromium, "--version"], capture_output=True, text=True, check=True)
    return {
        "benchmark": "html_page",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m benchmarks.html_page --runs {count}",
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "browser": told.stdout.strip()}
        | {package: version(package) for package in PACKAGES},
        "case": asdict(SMALL),
        "page": page,
        "bounds": bounds(page, runs),
        "runs": [asdict(run) for run in runs],
    }


def bounds(page: dict[str, float], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What must hold, beside what was measured."""
    opened = median(runs, "first_frame")
    held = [("size of the file, MB", 5, page["bytes"] / MB), ("opens, seconds", 2, opened)]
    return [
        {"what": what, "bound": bound, "measured": found, "holds": found < bound}
        for what, bound, found in held
    ]


def median(runs: Sequence[Run], field: str) -> float:
    """The median of one figure."""
    return float(statistics.median(getattr(run, field) for run in runs))


def show(page: dict[str, float], runs: Sequence[Run], console: Console) -> None:
    """One table: the file, and the medians of the runs."""
    table = Table("what", "measured")
    table.add_row("file", f"{page['bytes'] / MB:.2f} MB")
    table.add_row("stages, nodes in all", f"{page['stages']:.0f}, {page['nodes']:.0f}")
    table.add_row("writing it", f"{page['write_seconds']:.2f} s")
    for field in Run.__dataclass_fields__:
        table.add_row(field.replace("_", " "), f"{median(runs, field):.2f} s")
    console.print(table)


def main() -> int:
    """Write the page, open it a few times; exit status 1 when a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="times to open it (default 5)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no Chromium: apt install chromium")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        page = write_page(path)
        runs = [open_page(chromium, path) for _ in range(given.runs)]
    show(page, runs, Console())
    found = report(page, runs, chromium, given.runs)
    output = given.output or RESULTS / f"html_page-{found['date']}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {output}")
    return 0 if all(bound["holds"] for bound in found["bounds"]) else 1


if __name__ == "__main__":
    sys.exit(main())
