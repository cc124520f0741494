"""The cases of `distributed.py`."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed_controllers import controllers
from benchmarks.distributed_grid import grid
from benchmarks.distributed_models import (
    Planned,
    Work,
    captured,
    mesh_of,
    planned,
    planned_for,
    rows_of,
    timed,
    weights_of,
)
from benchmarks.distributed_pipeline import pipeline, stages
from benchmarks.interleaved import Spread, ratios, synchronize
from benchmarks.step_mixes import Shape
from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.host.environment import PEER_COPIES

GIB = 2**30
WARM_UP = 3
FSDP_BOUNDS = {16384: 0.97, 4800: 0.90, 1280: 0.75}
TENSOR_BOUND, TENSOR_GPUS = 2.2, 4
AS_GRAPHS = ", as graphs"
#: Each arm's graphs keep a row's activations: more of them have no memory beside launched arms.
REPLAYED = ("replicated", "fsdp")


def fsdp(shape: Shape, given: Any) -> dict[str, Any]:
    """A base that is sharded, resharded after forward and backward, over a replicated one.

    Both launched, and where rows are small both as CUDA graphs.
    """
    world = dist.get_world_size()
    mesh = MeshShape(dp=world)
    plans = {
        "replicated": Plan(planner="replicated", mesh=mesh),
        "fsdp": Plan(planner="fsdp", mesh=mesh, shard_base=True),
        "fsdp, kept": Plan(planner="fsdp", mesh=mesh, shard_base=True, keep_gathered=True),
    }
    plans["fsdp, by collectives"] = plans["fsdp"]
    made: dict[str, Planned] = {}
    for name, plan in plans.items():
        if not given.arms or name in given.arms.split(";"):
            # The variable is read when weights are sharded.
            os.environ[PEER_COPIES] = "off" if name == "fsdp, by collectives" else "on"
            made[name] = planned_for(shape, plan, given, largest_row=CAPTURED_TOKENS)
    graphs = {name: _take_graphs(one) for name, one in made.items()}
    found: dict[str, Any] = {"rows": []}
    base = shape.frozen_parameters() + shape.vocabulary * shape.hidden
    found["base_gib"] = base * shape.torch_dtype.itemsize / GIB
    found["held_gib"] = {name: one.memory / GIB for name, one in made.items()}
    for tokens in (int(part) for part in given.tokens.split(",")):
        rows = rows_of(shape, tokens, given.length, world)
        weights = weights_of(rows, made["fsdp"].mesh.device)
        arms = {name: _step(one, rows, weights) for name, one in made.items()}
        if tokens <= CAPTURED_TOKENS:
            arms |= {
                f"{name}{AS_GRAPHS}": _replaying(made[name], own, tokens, rows, weights)
                for name, own in graphs.items()
                if name in REPLAYED and own is not None and not own.refused
            }
        peaks = {name: _warm(work, WARM_UP) / GIB for name, work in arms.items()}
        times = timed(arms, given.rounds)
        for name in arms:
            base_arm = f"replicated{AS_GRAPHS}" if name.endswith(AS_GRAPHS) else "replicated"
            if name == base_arm:
                continue
            bound = name.removesuffix(AS_GRAPHS) == "fsdp"
            found["rows"].append({
                "tokens_per_gpu": tokens, "arm": name,
                "over replicated": ratios(times[base_arm], times[name]).json(),
                "bound": FSDP_BOUNDS.get(tokens) if bound else None,
                "ms": Spread.of(times[name]).json(),
                "replicated_ms": Spread.of(times[base_arm]).json(),
                "peak_gib_above_held": peaks[name],
                "tokens_per_second": tokens * world / statistics.median(times[name]) * 1e3,
            })  # fmt: skip
            given.progress.row(found["rows"][-1])
        for own in graphs.values():
            if own is not None:
                own.clear()
        given.progress.keep(found)
    return found


def _take_graphs(made: Planned) -> Any:
    """The graphs of a model's rows, which it runs without until it is given them again."""
    inner: Any = getattr(made.runner, "inner", made.runner)
    graphs, inner.graphs = inner.graphs, None
    return graphs


def _replaying(made: Planned, graphs: Any, tokens: int, rows: Any, weights: Any) -> Work:
    """A step whose rows run as graphs, where all are of so many tokens."""
    inner: Any = getattr(made.runner, "inner", made.runner)

    def step() -> None:
        graphs.largest_row, inner.graphs = tokens, graphs
        try:
            made.step(rows, weights)
        finally:
            inner.graphs = None

    return step


def tensor(shape: Shape, given: Any) -> dict[str, Any]:
    """One row over all GPUs beside the same row on one: eager, captured, and nano-batched."""
    world, tokens = dist.get_world_size(), min(int(part) for part in given.tokens.split(","))
    plans = {"one": Plan(planner="single")}
    for count in (1, 2):
        name = "tensor" if count == 1 else f"tensor, {count} nano-batches"
        plans[name] = Plan(planner="tensor", mesh=MeshShape(tp=world), nano_batches=count)
    rows = rows_of(shape, tokens, given.length, 1)
    eager: dict[str, Work] = {}
    graphs: dict[str, Work] = {}
    failed: dict[str, str] = {}
    for name, plan in plans.items():
        if given.arms and name not in given.arms.split(";"):
            continue
        try:
            made = planned_for(shape, plan, given)
            weights = weights_of(rows, made.mesh.device)
            eager[name] = _step(made, rows, weights)
            _warm(eager[name], WARM_UP)
            if given.device == "cuda":
                graphs[name] = captured(made, rows[0], weights)
        except Exception as error:  # noqa: BLE001  (an arm may fail; the others are told)
            failed[name] = f"{type(error).__name__}: {str(error)[:400]}"
    found: dict[str, Any] = {"tokens": tokens, "rows": [], "failed": failed}
    for mode, arms in (("eager", eager), ("graph", graphs)):
        if "one" not in arms:
            continue
        times = timed(arms, given.rounds)
        for name in arms:
            found["rows"].append({
                "mode": mode, "arm": name, "ms": Spread.of(times[name]).json(),
                "faster than one GPU": ratios(times["one"], times[name]).json(),
                "bound": TENSOR_BOUND if world == TENSOR_GPUS and mode == "graph" else None,
            })  # fmt: skip
    return found


def large(shape: Shape, given: Any) -> dict[str, Any]:
    """A base of 70B's shape with 16 jobs, sharded over all GPUs."""
    world = dist.get_world_size()
    big = replace(shape, layers=80, hidden=8192, intermediate=28672, heads=64, key_value_heads=8)
    plan = Plan(planner="fsdp", mesh=MeshShape(dp=world), shard_base=True, recompute=True)
    made = planned(big, plan, mesh_of(plan), jobs=16, compiled=not given.eager)
    rows = rows_of(big, 4800, given.length, world, jobs=16)
    weights = weights_of(rows, made.mesh.device)
    work = _step(made, rows, weights)
    peak = _warm(work, 2)
    times = timed({"large": work}, given.rounds)["large"]
    return {
        "held_gib": made.memory / GIB,
        "peak_gib_above_held": peak / GIB,
        "ms": Spread.of(times).json(),
        "tokens_per_second": 4800 * world / statistics.median(times) * 1e3,
    }


def _step(made: Planned, rows: Any, weights: Any) -> Work:
    return lambda: made.step(rows, weights)


def _warm(work: Work, times: int) -> int:
    """Run a few times; the most bytes that the last run took above what was held before it."""
    for _ in range(times - 1):
        work()
    if not torch.cuda.is_available():
        work()
        return 0
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


CASES: dict[str, Callable[[Shape, Any], dict[str, Any]]] = {
    "fsdp": fsdp, "tensor": tensor, "pipeline": pipeline, "grid": grid, "large": large,
    "controllers": controllers, "stages": stages,
}  # fmt: skip
