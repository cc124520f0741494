"""Controllers of nano-batches beside the best fixed count: the case `controllers`.

Each number of tokens is another ratio of communication to compute. `--nccl MAX_NCHANNELS=1`
throttles the links, and with `--nccl P2P_DISABLE=1` GPUs speak by the host's memory. Fixed counts
and controllers take turns, a step each; a controller hears the slowest process's time of its steps,
as in training. A step packs its row, runs it forward and backward, sums gradients, updates the
adapters and reads the losses.

Every count is code of its own, and twice the count is reckoned to compile twice as long. Under
`--limit-seconds` the two smallest are always compiled; another one, or a number of tokens, is left
out where it would not end in time. `--region-layers 1` compiles smaller graphs, and hides less than
training does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed_models import (
    Planned,
    once,
    planned_for,
    slowest,
    tokens_of,
    weights_of,
)
from benchmarks.interleaved import turns
from benchmarks.step_mixes import Shape
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.model.batch import pack
from tlora_fx.parallel.nano_batches import NanoModel
from tlora_fx.runtime.controllers import Aimd, KeepBest, NanoBatches

BOUND = 1.04
WARM_UP = 3

Step = Callable[[int], None]


def controllers(shape: Shape, given: Any) -> dict[str, Any]:
    """Mean step of each controller over that of the best fixed count, all in turns.

    Means are of the second half of the steps, when controllers have looked around.
    """
    world = dist.get_world_size()
    made = planned_for(shape, Plan(planner="tensor", mesh=MeshShape(tp=world)), given)
    if given.region_layers:
        runner: Any = getattr(made.runner, "inner", made.runner)
        runner.nano = NanoModel(made.model, layers=given.region_layers)
    tokens = [int(part) for part in given.tokens.split(",")]
    steps = {each: _step(shape, given, made, each) for each in tokens}
    found: dict[str, Any] = {"bound": BOUND, "first_step_s": {}, "left out": [], "rows": []}
    wanted = [int(part) for part in given.counts.split(",")]
    counts = _ready(steps[min(tokens)], wanted, given, found)
    longest = 0.0
    for each, step in steps.items():
        if not given.progress.has_time_for(longest):
            found["left out"].append(f"{each} tokens")
            continue
        began = perf_counter()
        for count in counts:
            for _ in range(WARM_UP):
                step(count)
        talk = _talk_ms(shape, each, made)
        row: dict[str, Any] = {"tokens": each, "all_reduces_ms": talk}
        row |= _raced(step, counts, given.steps)
        row["ratio"] = talk / max(row["fixed_ms"]["1"] - talk, 1e-9)
        found["rows"].append(row)
        longest = max(longest, perf_counter() - began)
        given.progress.row(row)
        given.progress.keep(found)
    return found


def _step(shape: Shape, given: Any, made: Planned, tokens: int) -> Step:
    """One training step over a row of so many tokens, cut into so many nano-batches."""
    (own,) = tokens_of(shape, tokens, given.length, 1)
    weights = weights_of([pack(own)], made.mesh.device)

    def step(count: int) -> None:
        runner: Any = made.runner
        runner.nano_batches = count
        made.step([pack(own)], weights).tolist()

    return step


def _ready(step: Step, wanted: Sequence[int], given: Any, found: dict[str, Any]) -> list[int]:
    """Compile each count by a first step; those that are ready."""
    ready: list[int] = []
    last = 0.0
    for count in sorted({1, *wanted}):
        expected = last * count / ready[-1] if ready else 0.0
        # What is left of the time is for the steps themselves.
        late = not given.progress.has_time_for(expected + given.limit_seconds / 2)
        if len(ready) > 1 and late:
            found["left out"].append(f"{count} nano-batches")
            continue
        began = perf_counter()
        step(count)
        last = slowest(perf_counter() - began)
        ready.append(count)
        found["first_step_s"][str(count)] = round(last, 1)
        given.progress.row({"nano-batches": count, "first_step_s": last})
        given.progress.keep(found)
    return ready


def _controllers(counts: Sequence[int]) -> dict[str, NanoBatches]:
    return {
        "keep-best": NanoBatches(KeepBest(counts=counts), counts),
        "aimd": NanoBatches(Aimd(), counts),
    }


def _raced(step: Step, counts: Sequence[int], steps: int) -> dict[str, Any]:
    """Steps of each fixed count and of each controller, in turns."""
    chosen = {name: dict.fromkeys(counts, 0) for name in _controllers(counts)}
    deciding = _controllers(counts)
    names = [*(str(count) for count in counts), *deciding]
    every: dict[str, list[float]] = {name: [] for name in names}
    for _, name in turns(names, steps):
        count = deciding[name].count if name in deciding else int(name)
        ms = once(partial(step, count))
        every[name].append(ms)
        if name in deciding:
            deciding[name].decide(ms * 1e-3)
            chosen[name][count] += 1
    means = {name: statistics.mean(own[steps // 2 :]) for name, own in every.items()}
    fixed = {name: ms for name, ms in means.items() if name not in deciding}
    best = min(fixed.values())
    found: dict[str, Any] = {"fixed_ms": fixed}
    found["over the best fixed"] = {name: means[name] / best for name in deciding}
    return found | {f"counts of {name}": own for name, own in chosen.items()}


def _talk_ms(shape: Shape, tokens: int, made: Planned) -> float:
    """What the all-reduces of a step's layers would take, one after the other."""
    if made.mesh.device.type != "cuda":
        return 0.0
    payload = torch.zeros(tokens, shape.hidden, dtype=shape.torch_dtype, device=made.mesh.device)
    for _ in range(3):
        dist.all_reduce(payload, group=made.mesh.tp)
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        dist.all_reduce(payload, group=made.mesh.tp)
    end.record()
    end.synchronize()
    return slowest(start.elapsed_time(end) / 10 * 4 * shape.layers)
