"""Whether a job's optimizer and schedule can train, tried before anything is.

Arguments that fail late are tried early: schedules are functions of the step, and optimizers do
with four numbers what they do with millions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tlora_fx.config.functions import UserFunction
from tlora_fx.config.job_optimizer import optimizer_arguments
from tlora_fx.errors import OptimizerError
from tlora_fx.runtime.optim.optimizer import JobOptimizer, make_schedule
from tlora_fx.runtime.optim.schedules import RecordedSchedule

if TYPE_CHECKING:
    from tlora_fx.config.job import Job

#: Steps whose rates are tried, of a job that has more: the first, the last, and others between.
TRIED_STEPS = 100_000
#: Steps on the toy parameter; RAdam changes its formula at the sixth.
TOY_STEPS = 12
#: Counters of steps are float32, which counts no further.
_LARGEST_COUNT = 2**24
#: Jobs that have passed, by what was tried of them; those of a service are many.
MAX_PASSED = 1000
_passed: set[tuple[str, int]] = set()


def require_trainable(job: Job, steps: int) -> None:
    """Try a job's optimizer and schedule before anything is trained; once in a process.

    The schedule has to have a rate for every step; the optimizer does some steps on a toy
    parameter, at the first rates, the largest and the last, and its numbers have to stay finite.

    steps    optimizer steps of the whole job
    raises   OptimizerError
    """
    key = job.model_dump_json(exclude={"name", "base", "data"}), steps
    if key in _passed:
        return
    # After its last step a job asks for one more rate.
    rates = learning_rates(job, steps, _tried(steps))
    toy = nn.Parameter(
        torch.tensor([[1.0, 0.0], [-0.5, 0.0]], dtype=getattr(torch, job.adapter_dtype))
    )
    # B starts as zeros, so the first gradients of A are zeros; some of B may stay so.
    gradient = torch.tensor([[0.0, 1.0], [-0.5, 0.0]], dtype=toy.dtype)
    toy.grad = torch.zeros_like(toy)
    optimizer = JobOptimizer(job, {"toy.lora_B.weight": toy}, steps)
    inner, ratio = optimizer._optimizer, job.loraplus_lr_ratio or 1.0
    for number in range(min(steps, TOY_STEPS) + 2):
        if number == min(steps, TOY_STEPS):
            inner.param_groups[0]["lr"] = max(rates) * ratio
        elif number > TOY_STEPS:
            inner.param_groups[0]["lr"] = rates[-2] * ratio
            for value in inner.state[toy].values():
                if isinstance(value, Tensor) and not value.dim():
                    value.fill_(max(float(value), float(min(steps - 1, _LARGEST_COUNT))))
        toy.grad.copy_(gradient)
        rate = inner.param_groups[0]["lr"]
        reason = _why_not(job, optimizer, toy, rate)
        if reason:
            raise OptimizerError(
                f"the optimizer '{job.optim}' cannot train with its arguments",
                job=job.name,
                found=optimizer_arguments(job),
                reason=reason,
                help="mend learning_rate, loraplus_lr_ratio, adam_epsilon, weight_decay or "
                "optim_args",
            )
    if len(_passed) >= MAX_PASSED:
        _passed.clear()
    _passed.add(key)


def _why_not(job: Job, optimizer: JobOptimizer, toy: Tensor, rate: float) -> str:
    """Why a step on the toy parameter cannot be done, or not kept; "" where it can."""
    try:
        optimizer.step()
        if isinstance(job.optim, UserFunction):
            json.dumps(optimizer.state_values(), allow_nan=False)
    except Exception as error:  # noqa: BLE001  (an optimizer of the user's own may raise anything)
        return f"a rate of {rate:g}: {type(error).__name__}: {error}"
    return "" if toy.isfinite().all() else f"a rate of {rate:g} leaves {toy.tolist()}"


def _tried(steps: int) -> list[int]:
    """Steps to try, in order, the last one and the one after it included."""
    if steps <= TRIED_STEPS:
        return list(range(steps + 1))
    part = TRIED_STEPS // 4
    spread = (steps * number // (2 * part) for number in range(2 * part))
    return sorted({*range(part), *spread, *range(steps + 1 - part, steps + 1)})


def learning_rates(job: Job, total: int, steps: Iterable[int]) -> list[float]:
    """The rates of some optimizer steps, counted from 0, where a job has `total` of them.

    raises   OptimizerError where the schedule has no rate for one
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=job.learning_rate)
    schedule = make_schedule(job, optimizer, total)
    rates = []
    for step in steps:
        try:
            if isinstance(schedule, RecordedSchedule):
                rate = schedule.rates(step)[0]
            else:
                rate = job.learning_rate * schedule.lr_lambdas[0](step)
        except Exception as error:  # a scheduler of the user's own may raise anything
            raise _no_rate(job, step, total, f"{type(error).__name__}: {error}") from error
        if not isinstance(rate, float | int) or not 0 <= rate < math.inf:
            raise _no_rate(job, step, total, f"a rate of {rate}")
        rates.append(float(rate))
    return rates


def _no_rate(job: Job, step: int, total: int, reason: str) -> OptimizerError:
    return OptimizerError(
        f"the schedule '{job.lr_scheduler_type}' has no rate for a step",
        job=job.name,
        step=f"{step + 1} of {total}" if step < total else f"after the last of {total}",
        found=dict(job.lr_scheduler_kwargs) or f"{job.warmup(total)} steps of warmup",
        reason=reason,
        help="mend the job's lr_scheduler_kwargs or its warmup",
    )
