"""Pipelines beside an event simulation with their own times, and their cuts beside equal layers.

The case `pipeline` of `distributed.py`. Rounds that are timed and rounds in which stages are
clocked take turns, so that both are of the same moments. The case `stages` has rounds whose stages
are launched beside the same ones replayed as CUDA graphs, once their gradients agree.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tlora_fx
from benchmarks.distributed_models import (
    Planned,
    jobs_of,
    once,
    planned_for,
    rows_of,
    timed,
    weights_of,
)
from benchmarks.interleaved import Spread, ratios
from benchmarks.stage_clock import clocked_round, times_of
from benchmarks.step_mixes import Shape
from tlora_fx.cost.pipeline_simulation import schedule_order, simulate
from tlora_fx.cost.plan import MeshShape
from tlora_fx.model.batch import PackedBatch
from tlora_fx.planners.protocol import find_planner

BOUND = 1.05
MICRO_BATCHES_A_STAGE = 4
# The first rounds compile, and note what each length starts.
WARM_UP = 5
# Tokens of micro-batches, over their mean: jobs that differ, packed to about the same cost; and
# whatever comes.
FORMS = {
    "equal": [1.0],
    "mixed, balanced": [0.97, 1.03, 1.0, 0.95, 1.05],
    "mixed, as they come": [0.6, 1.4, 0.8, 1.1, 1.3, 0.7, 0.9, 1.2],
}


def pipeline(shape: Shape, given: Any) -> dict[str, Any]:
    """Each form of micro-batches at each number of tokens, then the cuts."""
    world = dist.get_world_size()
    count = MICRO_BATCHES_A_STAGE * world
    found: dict[str, Any] = {"rows": [], "bound": BOUND, "micro_batches": count}
    plan = _plan(shape, "all-linear", world, count)
    made = planned_for(shape, plan, given)
    found["cuts"] = plan.cuts
    for tokens in (int(part) for part in given.micro_tokens.split(",")):
        for name, parts in FORMS.items():
            rows = _rows(shape, tokens, parts, count, given.length)
            told = _beside_simulation(made, rows, given.rounds)
            told["formula"] = (world - 1) / (count + world - 1) if name == "equal" else None
            found["rows"].append({"tokens": tokens, "micro-batches": name} | told)
    del made
    found["upper half"] = _cuts(shape, given)
    return found


def _rows(
    shape: Shape, tokens: int, parts: Sequence[float], count: int, length: int
) -> list[PackedBatch]:
    """A round's micro-batches of about so many tokens, in as many sequences each."""
    sizes = [round(tokens * parts[place % len(parts)]) for place in range(count)]
    sequences = max(1, tokens // length)
    return [rows_of(shape, size, size // sequences, 1)[0] for size in sizes]


def _plan(shape: Shape, targets: Any, world: int, count: int, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = tlora_fx.compile(jobs_of(shape, Path(folder), 8, targets))
    planner = find_planner("pipeline")
    return planner.plan(model, MeshShape(pp=world), options={"micro_batches": count, **options})


def _beside_simulation(made: Planned, rows: Sequence[PackedBatch], rounds: int) -> dict[str, Any]:
    """Rounds that are timed, each beside the simulation of one that is clocked after it."""
    weights = weights_of(rows, made.mesh.device)
    runner: Any = getattr(made.runner, "inner", made.runner)
    processes = made.plan.mesh.pp
    order = schedule_order(made.plan.schedule, processes, processes, len(rows))
    work = partial(made.step, rows, weights)
    for _ in range(WARM_UP):
        work()
    measured: list[float] = []
    foretold: list[float] = []
    bubbles: list[float] = []
    for _ in range(rounds):
        measured.append(once(work))
        clocked = clocked_round(runner, rows, weights)
        simulated = simulate(order, times_of(clocked, processes, len(rows)), processes)
        foretold.append(float(simulated.makespan_seconds) * 1e3)
        bubbles.append(float(simulated.bubble))
    return {
        "ms": Spread.of(measured).json(),
        "simulated_ms": Spread.of(foretold).json(),
        "over simulation": ratios(measured, foretold).json(),
        "bubble": statistics.median(bubbles),
    }


def _cuts(shape: Shape, given: Any) -> dict[str, Any]:
    """Stages cut by cost and into equal layers, with adapters in the upper half alone."""
    world, layers = dist.get_world_size(), shape.layers
    count = MICRO_BATCHES_A_STAGE * world
    upper = "|".join(str(layer) for layer in range(layers // 2, layers))
    targets = rf".*\.layers\.({upper})\..*_proj"
    equal = tuple(round(layers * stage / world) for stage in range(1, world))
    plans = {
        "by cost": _plan(shape, targets, world, count),
        "equal layers": _plan(shape, targets, world, count, cuts=equal),
    }
    tokens = max(int(part) for part in given.micro_tokens.split(","))
    rows = [rows_of(shape, tokens, given.length, 1)[0] for _ in range(count)]
    arms: dict[str, Callable[[], object]] = {}
    for name, plan in plans.items():
        made = planned_for(shape, plan, given, targets)
        arms[name] = partial(made.step, rows, weights_of(rows, made.mesh.device))
        for _ in range(WARM_UP - 1):
            arms[name]()
    times = timed(arms, given.rounds)
    return {
        "tokens": tokens,
        "cuts": {name: plan.cuts for name, plan in plans.items()},
        "ms": {name: Spread.of(own).json() for name, own in times.items()},
        "faster by cost": ratios(times["equal layers"], times["by cost"]).json(),
    }


#: By which gradients of replayed stages may differ from those of launched ones, of their norm.
APART = 2e-2


def stages(shape: Shape, given: Any) -> dict[str, Any]:
    """Rounds of each form of micro-batches, launched and replayed, at each number of tokens."""
    world = dist.get_world_size()
    count = MICRO_BATCHES_A_STAGE * world
    plan = _plan(shape, "all-linear", world, count)
    sizes = [int(part) for part in given.micro_tokens.split(",")]
    made = planned_for(
        shape, plan, given, largest_row=round(max(sizes) * max(map(max, FORMS.values())))
    )
    found: dict[str, Any] = {"rows": [], "micro_batches": count, "cuts": plan.cuts}
    for tokens in sizes:
        for name, parts in FORMS.items():
            rows = _rows(shape, tokens, parts, count, given.length)
            told = _replayed(made, rows, given.rounds)
            found["rows"].append({"tokens": tokens, "micro-batches": name} | told)
            given.progress.keep(found)
    return found


def _replayed(made: Planned, rows: Sequence[PackedBatch], rounds: int) -> dict[str, Any]:
    """One number of tokens."""
    weights, graphs = weights_of(rows, made.mesh.device), made.graphs
    most = max(row.input_ids.numel() for row in rows)

    def run(largest_row: int) -> None:
        if graphs is not None:
            graphs.largest_row = largest_row
        made.runner.run(rows, weights)

    def gradients(largest_row: int) -> list[torch.Tensor]:
        run(largest_row)
        leaves = [leaf.grad for leaf in made.leaves if leaf.grad is not None]
        copies = [grad.clone() for grad in leaves]
        torch._foreach_zero_(leaves)
        return copies

    for _ in range(WARM_UP):
        run(0)
        run(most)
    torch._foreach_zero_([leaf.grad for leaf in made.leaves if leaf.grad is not None])
    launched = gradients(0)
    apart, again = _apart(launched, gradients(most)), _apart(launched, gradients(0))
    if apart > APART:
        raise RuntimeError(f"gradients of replayed stages are {apart:.3g} apart")

    def arm(largest_row: int) -> Callable[[], object]:
        def step() -> None:
            run(largest_row)
            made.update()

        return step

    times = timed({"launched": arm(0), "replayed": arm(most)}, rounds)
    return {
        "ms": {name: Spread.of(own).json() for name, own in times.items()},
        "launched over replayed": ratios(times["launched"], times["replayed"]).json(),
        "gradients_apart": apart,
        "gradients_apart_launched": again,
        "graphs": 0 if graphs is None else len(graphs.keys),
        "refused": "" if graphs is None else graphs.refused,
        "roomless": 0 if graphs is None else graphs.skipped_no_memory,
    }


def _apart(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> float:
    """The largest difference of two gradients of a leaf, of the norm of the first."""
    pairs = zip(these, those, strict=True)
    return max((float((a - b).norm() / (a.norm() + 1e-12)) for a, b in pairs), default=0.0)
