"""How long compiling takes, and how much memory: `python -m benchmarks.compile`.

Each measurement is a fresh process on two cores that imports, compiles on the meta device and ends,
with caches of its own: empty ones, or those that another process has filled for the same jobs. A
figure is the median of its runs. Runs of different cases alternate, so that a busy minute of the
machine falls on all of them. Times are wall seconds; the processor seconds beside them say whether
the machine was busy with something else. A run that was kept waiting is repeated a few times, and
the least disturbed one counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import track
from rich.table import Table

if TYPE_CHECKING:
    from tlora_fx import Job

CORES = 2
BUSY = 1.15  # wall seconds for each processor second from which a machine counts as busy
ATTEMPTS = 4
RESULTS = Path(__file__).parent / "results"

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
COMMON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

RANKS = (2, 4, 8, 16, 32, 64, 128)
RATES = (0.0, 0.05, 0.1)
TARGETS: tuple[str | list[str], ...] = (
    ["q_proj", "v_proj"],
    ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all-linear",
    ["gate_proj", "up_proj", "down_proj"],
    ["o_proj", "down_proj"],
)


@dataclass(frozen=True, slots=True)
class Case:
    """One group of jobs to compile.

    verify    what is checked after each pass
    known     another process has compiled the same before
    """

    name: str
    layers: int
    jobs: int
    sizes: dict[str, int]
    verify: Literal["none", "structure"] = "structure"
    known: bool = False


SMALL = Case("8B", 32, 32, LLAMA_8B)
CROWDED = Case("8B, twice the jobs", 32, 64, LLAMA_8B)
DEEP = Case("70B", 80, 32, LLAMA_70B)
UNCHECKED = Case("8B, passes unchecked", 32, 32, LLAMA_8B, "none")
KNOWN = Case("8B, base known", 32, 32, LLAMA_8B, known=True)
CASES = {case.name: case for case in (SMALL, UNCHECKED, CROWDED, DEEP, KNOWN)}


@dataclass(frozen=True, slots=True)
class Run:
    """What one process measured; times in seconds."""

    import_wall: float
    import_cpu: float
    compile_wall: float
    compile_cpu: float
    dump_wall: float
    peak_gib: float
    ssm_lines: int
    structures: int

    @property
    def waiting(self) -> float:
        """Wall seconds for each processor second: 1 on an idle machine."""
        return self.compile_wall / self.compile_cpu


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound beside what was measured; `cpu` is the same from processor seconds."""

    what: str
    bound: float
    measured: float
    cpu: float | None
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the measured figure keeps the bound."""
        return self.measured <= self.bound


def measure(case: Case) -> Run:
    """Compile one case in this process, which must have imported nothing yet.

    Its caches and its base's config lie in the folder that $TLORA_FX_CACHE names.
    """
    started = _now()
    import peft  # noqa: F401  (compiling would import it)
    import transformers  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from tlora_fx import compile
    from tlora_fx.inspect.dump import dump

    imported = _now()
    jobs = jobs_of(case)
    before = _now()
    model = compile(jobs, verify=case.verify)
    compiled = _now()
    with tempfile.TemporaryDirectory() as build:
        dump(model, Path(build))
        dumped = _now()
        lines = len(Path(build, "ssm.txt").read_text().splitlines())
    return Run(
        import_wall=imported[0] - started[0],
        import_cpu=imported[1] - started[1],
        compile_wall=compiled[0] - before[0],
        compile_cpu=compiled[1] - before[1],
        dump_wall=dumped[0] - compiled[0],
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        ssm_lines=lines,
        structures=len({id(graph.root) for graph in model.group.jobs}),
    )


def jobs_of(case: Case) -> list[Job]:
    """The jobs of a case, with their base's config in the folder that $TLORA_FX_CACHE names."""
    from tlora_fx import BaseSpec, Job

    # Beside the caches: a base is known by its folder, too.
    folder = Path(os.environ["TLORA_FX_CACHE"], "base")
    folder.mkdir(parents=True, exist_ok=True)
    config = COMMON | case.sizes | {"num_hidden_layers": case.layers}
    (folder / "config.json").write_text(json.dumps(config))
    base = BaseSpec(config=folder, dtype="bfloat16")
    return [Job(name=f"job-{i}", base=base, **_job(i)) for i in range(case.jobs)]


def _job(place: int) -> dict[str, Any]:
    """Target sets, ranks and rates in cycles of coprime lengths, so that all of them meet."""
    rank = RANKS[place % len(RANKS)]
    lora = {
        "r": rank,
        "lora_alpha": 2 * rank + place,
        "lora_dropout": RATES[place % len(RATES)],
        "target_modules": TARGETS[place % len(TARGETS)],
    }
    return {"lora": lora, "data": {"path": "none.jsonl"}, "max_steps": 1}


def _now() -> tuple[float, float]:
    """Wall seconds, and this process's processor seconds."""
    return time.perf_counter(), time.process_time()


def spawn(case: Case) -> Run:
    """Measure one case in a fresh process, again while the machine is busy with other work."""
    attempts: list[Run] = []
    with tempfile.TemporaryDirectory() as filled:
        if case.known:
            _run(case, filled)
        while len(attempts) < ATTEMPTS and not any(run.waiting <= BUSY for run in attempts):
            with tempfile.TemporaryDirectory() as empty:
                attempts.append(_run(case, filled if case.known else empty))
    return min(attempts, key=lambda run: run.waiting)


def _run(case: Case, caches: str) -> Run:
    """Measure one case in a fresh process whose caches lie in a folder."""
    command = [sys.executable, "-m", "benchmarks.compile", "--measure", case.name]
    environment = os.environ | {"TLORA_FX_CACHE": caches}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"measuring '{case.name}' failed:\n{done.stderr}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def median(runs: Sequence[Run], field: str) -> float:
    """The median of one figure over the runs of a case."""
    return float(statistics.median(getattr(run, field) for run in runs))


def bounds(runs: dict[str, list[Run]]) -> list[Bound]:
    """What must hold of compiling, beside what was measured."""
    import_wall, small_wall, further_wall, deeper_wall = _times(runs, "wall")
    import_cpu, small_cpu, further_cpu, deeper_cpu = _times(runs, "cpu")
    all_wall, all_cpu = import_wall + small_wall, import_cpu + small_cpu
    kept = [runs[case.name] for case in (SMALL, DEEP)]
    peak = max(median(own, "peak_gib") for own in kept)
    lines = max(median(own, "ssm_lines") for own in kept)
    return [
        Bound("compile 32 jobs, imports not counted", 15, small_wall, small_cpu, "s"),
        Bound("compile 32 jobs, imports counted", 15, all_wall, all_cpu, "s"),
        Bound("compile 32 jobs on a known base, imports not counted", 2, *_known(runs), "s"),
        Bound("each further job of a known structure", 0.1, further_wall, further_cpu, "s"),
        Bound("80 layers (70B) against 32 (8B)", 1.3, deeper_wall, deeper_cpu, "times"),
        Bound("checks after each pass, against shapes alone", 1.2, *_checked(runs), "times"),
        Bound("peak memory of the process", 3, peak, None, "GiB"),
        Bound("ssm.txt", 400, lines, None, "lines"),
    ]


def _known(runs: dict[str, list[Run]]) -> tuple[float, float]:
    """Compiling what another process has compiled, by both clocks."""
    own = runs[KNOWN.name]
    return median(own, "compile_wall"), median(own, "compile_cpu")


def _checked(runs: dict[str, list[Run]]) -> tuple[float, float]:
    """Compiling with the checks that are on by default over compiling without, by both clocks."""
    ratios = [
        median(runs[SMALL.name], field) / median(runs[UNCHECKED.name], field)
        for field in ("compile_wall", "compile_cpu")
    ]
    return ratios[0], ratios[1]


def _times(runs: dict[str, list[Run]], clock: str) -> tuple[float, float, float, float]:
    """By one clock: seconds of importing, of compiling, of each further job; ratio of deep."""
    small, crowded, deep = (
        median(runs[case.name], f"compile_{clock}") for case in (SMALL, CROWDED, DEEP)
    )
    further = (crowded - small) / (CROWDED.jobs - SMALL.jobs)
    return median(runs[SMALL.name], f"import_{clock}"), small, further, deep / small


def report(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Everything that was measured, as a result file has it."""
    return {
        "busy": busy(runs),
        "bounds": [asdict(bound) | {"holds": bound.holds} for bound in bounds(runs)],
        "cases": [
            asdict(case) | {"runs": [asdict(run) for run in runs[case.name]]}
            for case in CASES.values()
        ],
    }


def busy(runs: dict[str, list[Run]]) -> bool:
    """Whether other work took the processor from the measured processes."""
    return any(statistics.median(run.waiting for run in own) > BUSY for own in runs.values())


def show(runs: dict[str, list[Run]], console: Console) -> None:
    """Two tables: the cases, and the bounds."""
    cases = Table(
        "case", "layers", "jobs", "structures", "import", "compile", "cpu", "dump", "peak"
    )
    for case in CASES.values():
        own = runs[case.name]
        seconds = [median(own, f"{what}_wall") for what in ("import", "compile")]
        seconds += [median(own, "compile_cpu"), median(own, "dump_wall")]
        cases.add_row(
            case.name,
            str(case.layers),
            str(case.jobs),
            f"{median(own, 'structures'):.0f}",
            *(f"{value:.2f} s" for value in seconds),
            f"{median(own, 'peak_gib'):.2f} GiB",
        )
    held = Table("bound", "at most", "measured", "from cpu seconds", "holds")
    for bound in bounds(runs):
        cpu = "" if bound.cpu is None else f"{bound.cpu:.3g}"
        measured = f"{bound.measured:.3g} {bound.unit}"
        held.add_row(bound.what, f"{bound.bound:g}", measured, cpu, "yes" if bound.holds else "NO")
    console.print(cases, held)
    if busy(runs):
        console.print(
            "The machine was busy, so wall times are too long: run it again on an idle one."
        )


def main() -> int:
    """Measure all cases; exit status 1 when a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="processes a case (default 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--measure", choices=CASES, help="measure one case in this process")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(asdict(measure(CASES[given.measure]))))
        return 0
    # A process that measures has imported none of what these import.
    from benchmarks.results_file import console, described, write

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    out = console()
    runs: dict[str, list[Run]] = {name: [] for name in CASES}
    order = [case for _ in range(given.runs) for case in CASES.values()]
    for case in track(order, "compiling", console=out):
        runs[case.name].append(spawn(case))
    show(runs, out)
    found = described("compile", "cpu") | report(runs)
    write(given.out / f"compile-{found['date']}.json", found)
    return 0 if all(bound.holds for bound in bounds(runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
