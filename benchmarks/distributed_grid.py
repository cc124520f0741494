"""Predicted step times and memory beside measured ones: the case `grid` of `distributed.py`."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tlora_fx
from benchmarks.distributed_models import jobs_of, rows_of, slowest, weights_of
from benchmarks.step_mixes import Shape
from tlora_fx.planners.cost import CostModel
from tlora_fx.planners.facts import facts_of
from tlora_fx.planners.known_profiles import profile_for
from tlora_fx.planners.load import Round
from tlora_fx.planners.memory import memory_of
from tlora_fx.planners.plan import MeshShape, Plan
from tlora_fx.planners.protocol import find_planner
from tlora_fx.planners.step_time import step_time
from tlora_fx.supermodel import SuperModel

JOBS = 8
MEAN_BOUND, WORST_BOUND = 0.08, 0.15


def compared(
    shape: Shape, given: Any, planned: Callable[..., Any], once: Callable[..., float]
) -> dict[str, Any]:
    """Every plan on every number of tokens: forward, backward and the sum of gradients.

    The optimizers are left out on both sides; `step.py` measures them.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = tlora_fx.compile(jobs_of(shape, Path(folder), JOBS))
    gpu = torch.cuda.get_device_name() if given.device == "cuda" else "roofline:h200"
    facts = facts_of(model)
    profile = profile_for(facts, given.profile or gpu, allow_estimated=given.device != "cuda")
    cost = CostModel(facts, profile)
    rows: list[dict[str, Any]] = []
    for name, plan in _plans(model, dist.get_world_size()):
        made = planned(shape, plan, given)
        for tokens in (int(part) for part in given.tokens.split(",")):
            rows.append({"plan": name, "tokens_per_gpu": tokens})
            rows[-1] |= _measured(made, shape, given, tokens, once)
            rows[-1] |= _predicted(cost, plan, tokens, given.length)
        del made
        gc.collect()
        torch.cuda.empty_cache()
    return {"profile": profile.name, "rows": rows} | _summary(rows)


def _plans(model: SuperModel, world: int) -> Iterator[tuple[str, Plan]]:
    replicas = MeshShape(dp=world)
    yield "single", Plan(planner="single")
    yield "replicated", Plan(planner="replicated", mesh=replicas)
    yield "fsdp", Plan(planner="fsdp", mesh=replicas, shard_base=True)
    yield "fsdp, kept", Plan(planner="fsdp", mesh=replicas, shard_base=True, keep_gathered=True)
    again = Plan(planner="fsdp", mesh=replicas, shard_base=True, recompute=True)
    yield "fsdp, recomputed", again
    yield "tensor", Plan(planner="tensor", mesh=MeshShape(tp=world))
    for count in (2 * world, 4 * world):
        plan = find_planner("pipeline").plan(model, MeshShape(pp=world), micro_batches=count)
        yield f"pipeline, {count} micro-batches", plan


def _parts(plan: Plan, tokens: int, length: int) -> tuple[int, int]:
    """How many rows a round has, and tokens of each: as many a GPU under every plan."""
    parts = plan.mesh.dp * plan.micro_batches
    each = tokens * plan.mesh.size // parts
    return parts, max(length, each)


def _measured(
    made: Any, shape: Shape, given: Any, tokens: int, once: Callable[..., float]
) -> dict[str, Any]:
    parts, each = _parts(made.plan, tokens, given.length)
    rows = rows_of(shape, each, given.length, parts, JOBS)
    weights = weights_of(rows, made.mesh.device)
    for _ in range(2):
        made.runner.run(rows, weights)
    peak = 0.0
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [once(lambda: made.runner.run(rows, weights)) for _ in range(given.rounds)]
    if given.device == "cuda":
        peak = slowest(float(torch.cuda.max_memory_allocated()))
    return {"ms": statistics.median(times), "peak_bytes": peak}


def _predicted(cost: CostModel, plan: Plan, tokens: int, length: int) -> dict[str, Any]:
    parts, each = _parts(plan, tokens, length)
    rows = []
    for part in range(parts):
        own: list[tuple[int, ...]] = [()] * JOBS
        for place in range(max(1, each // length)):
            own[(place + part) % JOBS] += (length,)
        rows.append(tuple(own))
    work = Round(tuple(rows), max_row_tokens=max(each, 16384))
    found = step_time(cost, plan, work)
    return {
        "predicted_ms": found.compute + found.bubble + found.reduce,
        "predicted_bytes": memory_of(cost, plan, work).total,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["predicted_ms"] / row["ms"] - 1) for row in rows]
    chosen: dict[str, float] = {}
    for tokens in {row["tokens_per_gpu"] for row in rows}:
        own = [row for row in rows if row["tokens_per_gpu"] == tokens and row["plan"] != "single"]
        best = min(own, key=lambda row: row["predicted_ms"])
        chosen[f"{tokens} tokens: {best['plan']}"] = best["ms"] / min(row["ms"] for row in own)
    memory = [row["predicted_bytes"] / row["peak_bytes"] - 1 for row in rows if row["peak_bytes"]]
    return {
        "configurations": len(rows),
        "mean error": statistics.mean(errors),
        "worst error": max(errors),
        "bounds": [MEAN_BOUND, WORST_BOUND],
        "choice over the best measured": chosen,
        "memory over measured": [min(memory), max(memory)] if memory else None,
    }
