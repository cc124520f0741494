"""Predicted step times and memory beside measured ones: the case `grid` of `distributed.py`.

Plans that want the same weights run one after the other over one model; everything else is built
anew, by code that `torch.compile` finds in its caches where another plan has made it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed_models import (
    Planned,
    Work,
    held_bytes,
    let_go,
    mesh_of,
    once,
    planned,
    replanned,
    rows_of,
    slowest,
    traced_model,
    wants_same_weights,
    weights_of,
)
from benchmarks.distributed_plans import plans_of
from benchmarks.step_mixes import Shape
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.load import Round
from tlora_fx.cost.memory import fits, memory_of
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile_sources import profile_for
from tlora_fx.cost.step_time import CostModel, step_time
from tlora_fx.model.supermodel import SuperModel

JOBS = 8
MEAN_BOUND, WORST_BOUND = 0.08, 0.15
#: Of a trainer: what graphs of small rows leave free (see `row_graphs`).
LARGEST_ROW = 16384
#: A form of rows is captured when it comes for the second time.
WARM_UP = 3
RECOMPILES = 64

Row = dict[str, Any]


def grid(shape: Shape, given: Any) -> dict[str, Any]:
    """Every plan on every number of tokens: forward, backward and the sum of gradients.

    The optimizers are left out on both sides; `step.py` measures them.
    """
    # The loss is one piece of code for all models, compiled anew for some.
    torch._dynamo.config.recompile_limit = RECOMPILES
    model = traced_model(shape, JOBS)
    gpu = torch.cuda.get_device_name() if given.device == "cuda" else "roofline:h200"
    facts = facts_of(model)
    profile = profile_for(facts, given.profile or gpu, allow_estimated=given.device != "cuda")
    cost = CostModel(facts, profile)
    tokens = [int(part) for part in given.tokens.split(",")]
    work = round_of(dist.get_world_size(), tokens[0], given.length)
    plans = _wanted(plans_of(model, cost, work, dist.get_world_size()), given.plans)
    found: dict[str, Any] = {"profile": profile.name, "rows": [], "left out": [], "ready_s": {},
                             "held_bytes": {}}  # fmt: skip
    made: Planned | None = None
    longest = 0.0
    for name, plan in plans.items():
        if not given.progress.has_time_for(longest):
            found["left out"].append(name)
            continue
        began = perf_counter()
        if made is not None and not wants_same_weights(made.plan, plan):
            let_go(made)
            made = None
            _collect()
        made = _made(made, shape, plan, given, model)
        found["ready_s"][name] = round(perf_counter() - began, 1)
        found["held_bytes"][name] = slowest(float(held_bytes() - made.before))
        for count in tokens:
            row = _row(made, name, shape, given, count, cost)
            found["rows"].append(row)
            given.progress.row(row)
        longest = max(longest, perf_counter() - began)
        given.progress.keep(found | summary(found["rows"]))
    return found | summary(found["rows"])


def _collect() -> None:
    """Free what nobody names any more.

    Neighbours must have let go of what they could copy from; shards may stay even so: a plan's
    memory is counted from `before` on.
    """
    gc.collect()
    if torch.cuda.is_available():
        dist.barrier()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _wanted(plans: Mapping[str, Plan], names: str) -> dict[str, Plan]:
    """The plans that were asked for, in the order in which they were asked for; all by default."""
    asked = [name.strip() for name in names.split(";")] if names else list(plans)
    unknown = [name for name in asked if name not in plans]
    if unknown:
        raise ValueError(f"no plans are called {unknown}; there are {'; '.join(plans)}")
    return {name: plans[name] for name in asked}


def _made(
    before: Planned | None, shape: Shape, plan: Plan, given: Any, model: SuperModel
) -> Planned:
    """A model under a plan, over the weights of the plan before where there is one left."""
    if before is not None:
        return replanned(before, plan, largest_row=LARGEST_ROW)
    return planned(
        shape, plan, mesh_of(plan), jobs=JOBS, compiled=not given.eager,
        largest_row=LARGEST_ROW, traced=model,
    )  # fmt: skip


def _row(made: Planned, name: str, shape: Shape, given: Any, tokens: int, cost: CostModel) -> Row:
    """What was predicted, and what was measured where that has room."""
    parts, each = parts_of(made.plan, tokens, given.length)
    row: Row = {"plan": name, "tokens_per_gpu": tokens}
    row |= predicted(cost, made.plan, tokens, given.length)
    if not fits(cost, memory_of(cost, made.plan, round_of(parts, each, given.length))):
        return row | {"ms": None, "peak_bytes": 0.0, "left out": "no memory"}
    rows = rows_of(shape, each, given.length, parts, JOBS)
    weights = weights_of(rows, made.mesh.device)
    if made.graphs is not None:
        # No larger row comes while these are measured.
        made.graphs.largest_row = each
    row |= _measured(made, lambda: made.runner.run(rows, weights), given)
    if made.graphs is not None:
        row |= {"graphs": len(made.graphs.keys), "refused": made.graphs.refused}
    return row | {"error": row["predicted_ms"] / row["ms"] - 1}


def predicted(cost: CostModel, plan: Plan, tokens: int, length: int) -> Row:
    """Milliseconds of a round without the optimizers, and the memory of the fullest process.

    device_ms   what it would take if no layer had to wait for the host, which launches it; hooks of
                a sharded base are counted all the same
    """
    work = round_of(*parts_of(plan, tokens, length), length)
    device = CostModel(cost.facts, cost.profile.as_captured())
    times = [step_time(one, plan, work) for one in (cost, device)]
    whole, alone = (time.compute + time.bubble + time.reduce for time in times)
    return {
        "predicted_ms": whole,
        "device_ms": alone,
        "predicted_bytes": memory_of(cost, plan, work).total,
    }


def _measured(made: Planned, work: Work, given: Any) -> Row:
    """Milliseconds of a round, and the most bytes since its second: replays allocate nothing.

    Stages are captured in their first round, so theirs are counted from it on.
    """
    cuda = given.device == "cuda"
    counted_from = 0 if made.plan.mesh.pp > 1 else 1
    # Predictions of memory count the optimizers' states.
    made.update()
    began = perf_counter()
    for number in range(WARM_UP):
        if number == counted_from and cuda:
            torch.cuda.reset_peak_memory_stats()
        work()
    warm = round(perf_counter() - began, 1)
    times = [once(work) for _ in range(given.rounds)]
    peak = slowest(float(torch.cuda.max_memory_allocated() - made.before)) if cuda else 0.0
    return {"ms": statistics.median(times), "peak_bytes": peak, "warm_up_s": warm}


def parts_of(plan: Plan, tokens: int, length: int) -> tuple[int, int]:
    """How many rows a round has, and tokens of each: as many a GPU under every plan."""
    parts = plan.parts
    return parts, max(length, tokens * plan.mesh.size // parts)


def round_of(parts: int, each: int, length: int) -> Round:
    """So many rows of `each` tokens as `rows_of` makes them."""
    rows = []
    for part in range(parts):
        own: list[tuple[int, ...]] = [()] * JOBS
        for place in range(max(1, each // length)):
            own[(place + part) % JOBS] += (length,)
        rows.append(tuple(own))
    return Round(tuple(rows), max_row_tokens=max(each, LARGEST_ROW))


def summary(every: list[Row]) -> dict[str, Any]:
    """How far predictions were off, and how much slower the plan is that they would choose."""
    rows = [row for row in every if row["ms"] is not None]
    if not rows:
        return {"configurations": 0}
    memory = [row["predicted_bytes"] / row["peak_bytes"] - 1 for row in rows if row["peak_bytes"]]
    waiting = [row for row in rows if row["device_ms"] < (1 - MEAN_BOUND) * row["predicted_ms"]]
    return {
        **_errors(rows),
        "bounds": [MEAN_BOUND, WORST_BOUND],
        "those that wait for the host": _errors(waiting),
        "all others": _errors([row for row in rows if row not in waiting]),
        "choice over the best measured": choices(rows),
        "memory over measured": [min(memory), max(memory)] if memory else None,
    }


def _errors(rows: list[Row]) -> dict[str, Any]:
    """How many there are, and how far their predictions were off."""
    errors = [abs(row["predicted_ms"] / row["ms"] - 1) for row in rows]
    if not errors:
        return {"configurations": 0}
    return {
        "configurations": len(errors),
        "mean error": statistics.mean(errors),
        "worst error": max(errors),
    }


def choices(rows: list[Row]) -> dict[str, float]:
    """The time of the plan that is predicted to be fastest, over that of the fastest.

    `auto` chooses so among all plans that fit; here among those that were measured. A single
    process does a part of the work only, so it is no choice.
    """
    found: dict[str, float] = {}
    for tokens in dict.fromkeys(row["tokens_per_gpu"] for row in rows):
        own = [row for row in rows if row["tokens_per_gpu"] == tokens and row["plan"] != "single"]
        if own:
            best = min(own, key=lambda row: row["predicted_ms"])
            key = f"{tokens} tokens: {best['plan']}"
            found[key] = best["ms"] / min(row["ms"] for row in own)
    return found
