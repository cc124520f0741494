"""How long `ssm.compile()` takes by the number of layers: `python -m benchmarks.ssm_compile`.

Each measurement is a fresh process on two cores without any cached code. It builds a small Llama in
float32, calls `compile()`, and times the first forward and backward, in which Inductor's C++
backend compiles; then a second one with another number of tokens. A figure is the median of its
runs. Runs of different depths alternate, so that a busy minute of the machine falls on all of them.
Processor seconds, those of the C++ compiler included, stand beside wall seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
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
from rich.progress import track
from rich.table import Table

from benchmarks.compile import CORES, PACKAGES, WIDTH, hardware

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHALLOW, DEEP = 4, 32
BOUND = 1.3
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True, slots=True)
class Run:
    """What one process measured; seconds."""

    layers: int
    first_wall: float
    first_cpu: float
    second_wall: float
    compilations: int


def measure(layers: int) -> Run:
    """Compile a model of so many layers in this process."""
    import torch
    import transformers

    from tlora_fx import BaseSpec, Job, compile
    from tlora_fx.model.batch import JobTokens, pack
    from tlora_fx.runtime.adapters.files import base_tensors, start_adapters

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(num_hidden_layers=layers, **SIZES)
        config.save_pretrained(folder)
        base = BaseSpec(config=folder, dtype="float32")
        jobs = [Job(name=f"job-{i}", base=base, lora=_lora(i), data={"path": "-"}) for i in (0, 1)]
        model = compile(jobs)
    model.materialize(base_tensors(model.backbone), "cpu")
    start_adapters(model)
    model.compile()

    def step(tokens: int) -> tuple[float, float]:
        sequence = [[7] * tokens]
        row = pack([JobTokens(sequence, sequence) for _ in jobs])
        before = _now()
        model(row).sum().backward()
        after = _now()
        return after[0] - before[0], after[1] - before[1]

    first, second = step(40), step(33)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return Run(layers, *first, second[0], count)


def _lora(place: int) -> dict[str, Any]:
    return {"r": 4 * place + 4, "lora_dropout": 0.1, "target_modules": "all-linear"}


def _now() -> tuple[float, float]:
    """Wall seconds, and processor seconds of this process and of those that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = time.process_time() + children.ru_utime + children.ru_stime
    return time.perf_counter(), used


def spawn(layers: int) -> Run:
    """Measure in a fresh process, with an empty cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        # Without worker processes, all compilers are children of the one that is measured.
        own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.ssm_compile", "--measure", str(layers)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | own
        )
    if done.returncode:
        raise SystemExit(f"measuring {layers} layers failed:\n{done.stderr}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def median(runs: Sequence[Run], layers: int, field: str) -> float:
    """The median of one figure over the runs of one depth."""
    return float(statistics.median(getattr(r, field) for r in runs if r.layers == layers))


def ratio(runs: Sequence[Run], field: str) -> float:
    """How many times as long the deep model takes."""
    return median(runs, DEEP, field) / median(runs, SHALLOW, field)


def report(runs: Sequence[Run], count: int) -> dict[str, Any]:
    """Everything that was measured, as JSON."""
    measured = ratio(runs, "first_wall")
    return {
        "benchmark": "ssm_compile",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m benchmarks.ssm_compile --runs {count}",
        "hardware": hardware(),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "bounds": [
            {
                "what": f"first step, {DEEP} layers against {SHALLOW}",
                "bound": BOUND,
                "measured": measured,
                "cpu": ratio(runs, "first_cpu"),
                "unit": "times",
                "holds": measured <= BOUND,
            }
        ],
        "runs": [asdict(run) for run in runs],
    }


def show(runs: Sequence[Run], console: Console) -> None:
    """A line for each depth."""
    table = Table("layers", "compilations", "first step", "cpu", "next step")
    for layers in (SHALLOW, DEEP):
        figures = [median(runs, layers, f"{what}") for what in ("first_wall", "first_cpu")]
        told = [f"{value:.1f} s" for value in figures]
        after = f"{median(runs, layers, 'second_wall'):.3f} s"
        table.add_row(str(layers), f"{median(runs, layers, 'compilations'):.0f}", *told, after)
    console.print(table)
    console.print(f"{ratio(runs, 'first_wall'):.2f} times as long, at most {BOUND} wanted")


def main() -> int:
    """Measure both depths; exit status 1 when the bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="processes a depth (default 3)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    parser.add_argument("--measure", type=int, help="measure so many layers in this process")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(asdict(measure(given.measure))))
        return 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    order = [layers for _ in range(given.runs) for layers in (SHALLOW, DEEP)]
    runs = [spawn(layers) for layers in track(order, "compiling", console=console)]
    show(runs, console)
    found = report(runs, given.runs)
    output = given.output or RESULTS / f"ssm-compile-{found['date']}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"written to {output}")
    return 0 if found["bounds"][0]["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
