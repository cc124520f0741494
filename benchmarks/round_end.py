"""What a round of the trainer costs beyond its rows: `python -m benchmarks.round_end`.

    python -m benchmarks.round_end                                              # on a GPU
    python -m benchmarks.round_end --device cpu --layers 2 --hidden 64 --cases 2   # tries the code
    torchrun --nproc-per-node 2 -m benchmarks.round_end --planner tensor     # over several GPUs

`rows`          forward and backward of one round's rows, again and again
`round`         whole rounds: data, packing, rows, norms, clipping, update, metrics
`job by job`    the same, where each job's own optimizer does its step and is waited for

Arms take turns; each runs some rounds without a wait between them, and a figure is the time of one.
The end of a round is what `round` takes above `rows`. Before anything is timed, the update of all
jobs at once is compared with each job's own on the same gradients.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.table import Table

import tlora_fx
from benchmarks.arguments import parser_of, shape_of
from benchmarks.distributed_models import jobs_of
from benchmarks.interleaved import seconds_of, turns
from benchmarks.results_file import console, described, write
from benchmarks.step_mixes import SEED, Shape
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.model.backbone import load_backbone
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.distributed import gradient_norms
from tlora_fx.runtime.interrupts import Interrupts
from tlora_fx.runtime.launch import Launch, join
from tlora_fx.runtime.round_end import RoundEnd
from tlora_fx.runtime.trainer import Trainer, TrainerOptions

ROWS, ROUND, EACH = "rows", "round", "job by job"
MANY = 1_000_000
WARM_UP = 4
#: Of a parameter, relative to the largest change of the step.
BOUND = 1e-3

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of each job in a round, of one length, and how many rounds are timed at once."""

    name: str
    batches: tuple[int, ...]
    length: int
    rounds: int

    @property
    def tokens(self) -> int:
        """Of a round."""
        return sum(self.batches) * self.length


CASES = (
    Case("one of 160", (1,), 160, 20),
    Case("eight of 160", (1,) * 8, 160, 20),
    Case("gsm8k 30 x 160", (1, 1, 2, 2, 4, 4, 8, 8), 160, 10),
    Case("64 x 256", (8,) * 8, 256, 4),
    Case("8 x 1,024", (1,) * 8, 1024, 6),
    Case("64 jobs of 160", (1,) * 64, 160, 6),
)


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    launch = Launch.found()
    device = launch.device(given.device)
    leader = join(launch, device).leader
    shape, out = shape_of(given), console()
    found = described("round_end", given.device) | {"layers": given.layers, "cases": {}}
    found |= {"planner": given.planner, "processes": launch.size}
    path = given.out / f"round_end-{found['date']}.json"
    chosen = CASES[: given.cases] if given.only is None else [CASES[n] for n in given.only]
    with tempfile.TemporaryDirectory(prefix="round-end-") as folder:
        weights: Figures = {}
        for case in chosen:
            trainer, weights = _trainer(shape, case, given, Path(folder), weights)
            figures = measured(trainer, case, given)
            found["cases"][case.name] = figures
            if leader:
                out.print(case.name, figures, highlight=False)
                write(path, found)
            trainer._let_go()
            del trainer
            gc.collect()
            if given.device == "cuda":
                torch.cuda.empty_cache()
    if leader:
        show(found)


def _trainer(
    shape: Shape, case: Case, given: argparse.Namespace, folder: Path, weights: Figures
) -> tuple[Trainer, Figures]:
    """A trainer that is ready, and the base's weights, which all cases share."""
    fields = {"max_steps": MANY, "save_steps": MANY}
    jobs = [
        job.model_copy(update=fields | {"per_device_train_batch_size": batch})
        for job, batch in zip(
            jobs_of(shape, folder / "base", len(case.batches)), case.batches, strict=True
        )
    ]
    model = tlora_fx.compile(jobs)
    plan = None
    if given.planner == "single":
        weights = weights or dict(base_tensors(load_backbone(jobs[0].base), given.device))
        model.materialize(weights, given.device)
    else:
        plan = _plan(model, given.planner)
    generator = torch.Generator().manual_seed(SEED)

    def sample() -> Sample:
        drawn = torch.randint(0, shape.vocabulary, (case.length,), generator=generator)
        ids = tuple(drawn.tolist())
        return Sample(ids, ids)

    data = {
        job.name: JobData(job, [sample() for _ in range(2 * batch)], DataReport())
        for job, batch in zip(jobs, case.batches, strict=True)
    }
    trainer = Trainer(
        model, output=folder / case.name, device=Launch.found().device(given.device), data=data,
        plan=plan, options=TrainerOptions(compiled=given.device == "cuda"),
    )  # fmt: skip
    trainer.prepare(data)
    return trainer, weights


def _plan(model: SuperModel, planner: str) -> Plan:
    """The planner's, over all processes in one dimension."""
    size = Launch.found().size
    shape = {"tensor": MeshShape(tp=size), "pipeline": MeshShape(pp=size)}
    options = {"micro_batches": 2 * size} if planner == "pipeline" else {}
    return find_planner(planner).plan(
        model, shape.get(planner, MeshShape(dp=size)), options=options
    )


def measured(trainer: Trainer, case: Case, given: argparse.Namespace) -> Figures:
    """All arms in turns; milliseconds a round, and what the update was compared with."""
    with Interrupts() as interrupts:
        run = {
            ROWS: lambda: _rows(trainer),
            ROUND: lambda: _round(trainer, interrupts),
            EACH: lambda: _each(trainer, interrupts),
        }
        for _ in range(WARM_UP):
            run[ROUND]()
        run[EACH]()
        difference = compared(trainer)
        times: dict[str, list[float]] = {name: [] for name in run}
        for _, name in turns(run, given.repeats):
            times[name].append(1e3 * seconds_of(run[name], case.rounds))
        trainer._end.collect()
    graphs = trainer.graphs
    ms = {name: round(statistics.median(each), 2) for name, each in times.items()}
    spread = {name: [round(min(each), 2), round(max(each), 2)] for name, each in times.items()}
    return {
        "tokens": case.tokens,
        "jobs": len(case.batches),
        "ms": ms,
        "least and most": spread,
        "end of a round": round(ms[ROUND] - ms[ROWS], 2),
        "end, job by job": round(ms[EACH] - ms[ROWS], 2),
        "update against each job's own": difference,
        "captured": len(graphs.keys) if graphs else 0,
        "refused": graphs.refused if graphs else "",
    }


def _rows(trainer: Trainer) -> None:
    if not hasattr(trainer, "_held"):
        batches = trainer._batches()
        weights = torch.full((len(trainer.jobs),), 1e-3, device=trainer.device)
        trainer._held = trainer.group.rows_of(batches), weights  # type: ignore[attr-defined]
    rows, weights = trainer._held  # type: ignore[attr-defined]
    assert trainer.group.runner is not None
    trainer.group.runner.run(rows, weights)


def _round(trainer: Trainer, interrupts: Interrupts) -> None:
    before = trainer.rounds
    went_on = trainer._round(interrupts)
    ended = {run.job.name: run.reason for run in trainer.runs if run.status != "running"}
    if trainer.rounds == before or ended:
        raise RuntimeError(f"a round trained nobody, or not all: went on {went_on}, {ended}")


def _each(trainer: Trainer, interrupts: Interrupts) -> None:
    with mock.patch.object(RoundEnd, "_update_of", return_value=None):
        _round(trainer, interrupts)


def compared(trainer: Trainer) -> float:
    """The largest difference of a parameter, over the step's largest change, of the two ways.

    raises   RuntimeError beyond the bound, or where nothing changed
    """
    trainer._end.collect()
    runs = trainer.runs
    update = trainer.group.updater._update_of(runs)
    if update is None:
        return 0.0
    states = [
        (run, {k: v.clone() for k, v in run.optimizer.state_tensors().items()},
         run.optimizer.state_values(), [p.detach().clone() for p in run.parameters.values()])
        for run in runs
    ]  # fmt: skip
    # The same for what several processes have.
    torch.manual_seed(SEED)
    for run in runs:
        for param in run.parameters.values():
            assert param.grad is not None
            param.grad.normal_()
    norms = gradient_norms(runs, trainer.device, trainer.group.updater._squares(None, runs))
    gradients = [[p.grad.clone() for p in run.parameters.values()] for run in runs]  # type: ignore[union-attr]
    squares = trainer.group.updater._squares(
        update, [run for run in runs if run.index not in update.places]
    )
    update.launch(torch.ones(len(trainer.jobs), device=trainer.device), squares).read()
    found = [[p.detach().clone() for p in run.parameters.values()] for run in runs]
    worst = change = 0.0
    for (run, tensors, values, params), own, mine in zip(states, gradients, found, strict=True):
        run.optimizer.load_state(tensors, values)
        for place, param in enumerate(run.parameters.values()):
            param.data.copy_(params[place])
            assert param.grad is not None
            param.grad.copy_(own[place])
        run.optimizer.step(norms[run.index])
        run.optimizer.zero_grad()
        for place, param in enumerate(run.parameters.values()):
            worst = max(worst, float((param.detach() - mine[place]).abs().max()))
            change = max(change, float((param.detach() - params[place]).abs().max()))
        run.optimizer.load_state(tensors, values)
    trainer.group.updater.forget()
    if not change or worst / change > BOUND:
        raise RuntimeError(f"the updates part: {worst} of {change}")
    return worst / change


def show(found: Figures) -> None:
    """A line a case."""
    table = Table("case", "tokens", *(f"{n} ms" for n in (ROWS, ROUND, EACH)), "end", "", box=None)
    for name, one in found["cases"].items():
        ms = [f"{one['ms'][arm]:.1f}" for arm in (ROWS, ROUND, EACH)]
        ends = f"{one['end of a round']:.1f}", f"{one['end, job by job']:.1f}"
        table.add_row(name, str(one["tokens"]), *ms, *ends)
    console().print(table)


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, layers=32)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first of them")
    parser.add_argument("--only", type=int, nargs="*", help="cases by number, from 0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--planner", default="single", help="under torchrun another")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
