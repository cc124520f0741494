"""Controllers of nano-batches beside the best fixed count: the case `controllers`.

Each number of tokens is another ratio of communication to compute; NCCL_MAX_NCHANNELS=1 throttles
the links. Fixed counts take turns in one run, then each controller runs by itself and hears the
slowest process's time of every step, as in training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed_models import Planned, rows_of, slowest, weights_of
from benchmarks.step_mixes import Shape
from tlora_fx.planners.plan import MeshShape, Plan
from tlora_fx.runtime.controllers import Aimd, KeepBest, NanoBatches

COUNTS = (1, 2, 4)
HORIZON = 4
BOUND = 1.04


def controllers(
    shape: Shape, given: Any, planned: Callable[..., Planned], timed: Callable[..., Any]
) -> dict[str, Any]:
    """Mean step of each controller over the best fixed count's median, after its first half."""
    world = dist.get_world_size()
    plan = Plan(planner="tensor", mesh=MeshShape(tp=world), nano_batches=2)
    made = planned(shape, plan, given)
    found: dict[str, Any] = {"rows": [], "bound": BOUND}
    for tokens in (int(part) for part in given.tokens.split(",")):
        rows = rows_of(shape, tokens, given.length, 1)
        weights = weights_of(rows, made.mesh.device)
        runner: Any = getattr(made.runner, "inner", made.runner)

        def step(
            count: int, rows: Any = rows, weights: Any = weights, runner: Any = runner
        ) -> None:
            runner.nano_batches = count
            made.step(rows, weights)

        arms = {str(count): partial(step, count) for count in COUNTS}
        for work in arms.values():
            for _ in range(3):
                work()
        fixed = {name: statistics.median(ms) for name, ms in timed(arms, given.rounds).items()}
        best = min(fixed.values())
        talk = _talk_ms(shape, tokens, made)
        found["rows"].append({
            "tokens": tokens, "fixed_ms": fixed, "all_reduces_ms": talk,
            "ratio": talk / max(fixed["1"] - talk, 1e-9),
            "over the best fixed": {
                name: _run(controller, step, timed, given.steps) / best
                for name, controller in _controllers().items()
            },
        })  # fmt: skip
    return found


def _controllers() -> dict[str, NanoBatches]:
    keep = KeepBest(counts=COUNTS, horizon=HORIZON, settle=1)
    return {
        "keep-best": NanoBatches(keep, COUNTS),
        "aimd": NanoBatches(Aimd(horizon=HORIZON), COUNTS),
    }


def _run(
    controller: NanoBatches, step: Callable[[int], None], timed: Callable[..., Any], steps: int
) -> float:
    """The mean milliseconds of the second half of its steps."""
    every: list[float] = []
    for _ in range(steps):
        (ms,) = timed({"it": partial(step, controller.count)}, 1)["it"]
        controller.decide(ms * 1e-3)
        every.append(ms)
    return statistics.mean(every[steps // 2 :])


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
