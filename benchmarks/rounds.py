"""Whole rounds of the trainer: data, rows, forward, backward, optimizers and metrics.

    python -m benchmarks.rounds                                       # on a GPU
    python -m benchmarks.rounds --device cpu --layers 2 --hidden 64   # tries the code

`exact`         rows of the lengths that the data have
`few lengths`   the same rows padded to one of few lengths
`graphs`        those as CUDA graphs where their form comes again, as training does; on a GPU only

Each arm is a trainer over one model, with optimizers, metrics and data of its own; all draw the
same samples. Arms take turns round by round, odd rounds backwards. The first rounds compile and
capture, and do not count; a figure is the median over those that do.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import tlora_fx
from benchmarks.arguments import parser_of, shape_of
from benchmarks.distributed_models import jobs_of
from benchmarks.interleaved import Spread, ratios, seconds_of, turns
from benchmarks.results_file import console, described, write
from benchmarks.step_mixes import SEED, Shape
from tlora_fx.config.job import Job
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.launching.interrupts import Interrupts
from tlora_fx.runtime.trainer import Trainer, TrainerOptions

EXACT, FEW, GRAPHS = "exact", "few lengths", "graphs"
#: Tokens of a sequence, evenly drawn.
SHORTEST, LONGEST = 120, 200
NEVER = 1_000_000
NO_GRAPHS = "graphs need a GPU"

Figures = dict[str, Any]


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    found = described("rounds", given.device) | {"layers": given.layers, "jobs": given.jobs}
    path = given.out / f"rounds-{found['date']}.json"
    with tempfile.TemporaryDirectory(prefix="rounds-") as folder:
        arms = arms_of(shape_of(given), given, Path(folder))
        found |= measured(arms, given)
    if given.device != "cuda":
        found["cannot"] = {GRAPHS: NO_GRAPHS}
    write(path, found)
    show(found)


def arms_of(shape: Shape, given: argparse.Namespace, folder: Path) -> dict[str, Trainer]:
    """A trainer for each arm, all over the weights of one model."""
    last = given.warm_up + given.rounds + 1
    fields = {
        "max_steps": last, "save_steps": NEVER, "per_device_train_batch_size": given.batch,
    }  # fmt: skip
    jobs = [job.model_copy(update=fields) for job in jobs_of(shape, folder / "base", given.jobs)]
    model = tlora_fx.compile(jobs)
    data = data_of(jobs, shape.vocabulary, given.batch * last)
    arms: dict[str, Trainer] = {}
    for name in (EXACT, FEW, GRAPHS)[: 3 if given.device == "cuda" else 2]:
        arms[name] = Trainer(
            model, output=folder / name, device=given.device, data=data,
            options=TrainerOptions(compiled=not given.eager, cuda_graphs=name == GRAPHS),
        )  # fmt: skip
        arms[name].prepare(data)
        arms[name].group.bucketer.lengthened = name != EXACT
    return arms


def data_of(jobs: Sequence[Job], vocabulary: int, count: int) -> dict[str, JobData]:
    """So many samples of random tokens for each job, all of them trained."""
    draw = random.Random(SEED)  # noqa: S311  (data, not secrets)

    def sample() -> Sample:
        length = draw.randint(SHORTEST, LONGEST)
        ids = tuple(draw.randrange(vocabulary) for _ in range(length))
        return Sample(ids, ids)

    return {job.name: JobData(job, [sample() for _ in range(count)], DataReport()) for job in jobs}


def measured(arms: Mapping[str, Trainer], given: argparse.Namespace) -> Figures:
    """Times of all arms, and what their rows and graphs came to."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    tokens: dict[str, list[int]] = {name: [] for name in arms}
    first: dict[str, float] = {}
    with Interrupts() as interrupts:
        for number, name in turns(arms, given.warm_up + given.rounds):
            ms, count = _round(arms[name], interrupts)
            first.setdefault(name, ms * 1e-3)
            if number >= given.warm_up:
                times[name].append(ms)
                tokens[name].append(count)
            if interrupts.asked:
                raise KeyboardInterrupt
    found: Figures = {"rounds": given.rounds, "warm_up": given.warm_up, "arms": {}}
    for name, trainer in arms.items():
        figures = _figures(trainer, times[name], tokens[name]) | {"first_round_s": first[name]}
        figures["exact over it"] = ratios(times[EXACT], times[name]).json()
        found["arms"][name] = figures
    return found


def _round(trainer: Trainer, interrupts: Interrupts) -> tuple[float, int]:
    """One round of the trainer: its milliseconds, and its tokens without padding."""
    before = sum(run.tokens for run in trainer.runs)
    ms = 1e3 * seconds_of(lambda: trainer._round(interrupts))
    ended = [run for run in trainer.runs if run.status != "running"]
    if ended:
        raise RuntimeError("; ".join(f"{run.job.name}: {run.status} {run.reason}" for run in ended))
    return ms, sum(run.tokens for run in trainer.runs) - before


def _figures(trainer: Trainer, times: Sequence[float], tokens: Sequence[int]) -> Figures:
    per_second = [count / ms * 1e3 for count, ms in zip(tokens, times, strict=True)]
    graphs = trainer.graphs
    return {
        "ms": Spread.of(times).json(),
        "tokens_per_second": Spread.of(per_second).json(),
        "padding": trainer.group.bucketer.padding / trainer.group.bucketer.tokens,
        "forms captured": len(graphs.keys) if graphs else 0,
        "refused": graphs.refused if graphs else "",
        "without memory": graphs.skipped_no_memory if graphs else 0,
    }


def show(found: Mapping[str, Any]) -> None:
    """A table of the arms, and why others did not run."""
    table = Table("arm", "ms a round", "tokens/s", "exact over it", "padding", "graphs", box=None)
    for name, arm in found["arms"].items():
        ms, over = arm["ms"], arm["exact over it"]["median"]
        table.add_row(
            name, f"{ms['median']:.1f} ({ms['least']:.1f} to {ms['most']:.1f})",
            f"{arm['tokens_per_second']['median']:.0f}", f"{over:.2f}", f"{arm['padding']:.1%}",
            arm["refused"] or str(arm["forms captured"]),
        )  # fmt: skip
    for name, why in found.get("cannot", {}).items():
        table.add_row(name, why, "", "", "", "")
    console().print(table)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, layers=32)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="sequences of each job in a round")
    parser.add_argument("--rounds", type=int, default=20, help="that count")
    parser.add_argument("--warm-up", type=int, default=24, help="rounds before")
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    return parser.parse_args()


if __name__ == "__main__":
    main()
