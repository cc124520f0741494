"""One job's optimizer, learning rate schedule and gradient clipping.

Each job of a group has its own, and none of them reads anything of a neighbour. Parameters may be
views of storage that many jobs share, so nothing here replaces `.data` or `.grad`: gradients are
zeroed in place and updated in place.

A job has hundreds of small parameters, and on a GPU a launch for each costs more than its
arithmetic. So they are zeroed, measured and updated together, by lists of them that are made once
(`gradients`, `fused_adam`); every other optimizer does its own step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tlora_fx.errors import OptimizerError, OptimizerStateError
from tlora_fx.runtime.fused_adam import FusedAdam, fused_adam
from tlora_fx.runtime.gradients import Gradients

if TYPE_CHECKING:
    from tlora_fx.config.job import Job

# Counters that torch.optim keeps on the host, wherever the parameters are.
HOST_SCALARS = frozenset({"step", "mu_product"})
# Kernels that update all parameters at once, by the class that has them.
FUSED = {
    "Adam": "aten::_fused_adam_",
    "AdamW": "aten::_fused_adamw_",
    "SGD": "aten::_fused_sgd_",
}
# Rows of so many numbers begin where vectors may, whatever stands before them in a bank.
_ROW = 8


class JobOptimizer:
    """A job's torch.optim optimizer, its schedule, and clipping by the job's own norm.

    job      names the optimizer, its arguments, the schedule and the largest gradient norm
    params   the job's trained parameters by name; their order is the optimizer's order
    steps    optimizer steps of the whole job, from which the schedule takes its length
    raises   OptimizerError when the job's arguments do not fit its optimizer or schedule
    """

    def __init__(self, job: Job, params: Mapping[str, torch.nn.Parameter], steps: int) -> None:
        self._params = dict(params)
        self._max_norm = job.max_grad_norm or 0.0
        self._optimizer = _make_optimizer(job, list(self._params.values()))
        self._schedule = _make_schedule(job, self._optimizer, steps)
        self._gradients = Gradients(self._params.values())
        self._fused: FusedAdam | None = None

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def is_fused(self) -> bool:
        """Whether one kernel updates all parameters; it keeps its counters on the GPU."""
        return bool(self._optimizer.param_groups[0].get("fused"))

    def zero_grad(self) -> None:
        """Fill every gradient with zeros, in place."""
        self._held_gradients().zero()

    def gradient_norm(self) -> float:
        """The 2-norm over all gradients of the job, in float32 or the widest gradient's dtype.

        It may be NaN or infinite: whoever calls decides what becomes of the job.
        """
        return float(self.measured_norm())

    def measured_norm(self) -> Tensor:
        """What `gradient_norm` returns, on the device: many jobs' need only one wait for it."""
        return self._held_gradients().norm()

    @torch.no_grad()
    def step(self, norm: float | None = None) -> float:
        """Clip, update the parameters, and advance the schedule.

        norm      what `gradient_norm` returned for these gradients; measured when left out
        returns   the norm before clipping
        """
        if norm is None:
            norm = self.gradient_norm()
        gradients = self._held_gradients()
        if self._max_norm > 0:
            gradients.clip(norm, self._max_norm)
        self._fused = self._fused or fused_adam(self._optimizer, gradients)
        (self._fused or self._optimizer).step()
        self._schedule.step()
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors as `kind/parameter name`, such as `exp_avg/….lora_A.weight`."""
        return {
            f"{kind}/{name}": value
            for name, param in self._params.items()
            for kind, value in self._optimizer.state.get(param, {}).items()
            if isinstance(value, Tensor)
        }

    def state_values(self) -> dict[str, Any]:
        """What is not a tensor, JSON-able: the schedule's counters, and plain numbers by name."""
        values = {
            f"{kind}/{name}": value
            for name, param in self._params.items()
            for kind, value in self._optimizer.state.get(param, {}).items()
            if not isinstance(value, Tensor)
        }
        schedule = self._schedule.state_dict()
        kept = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
        return {"state": values, "schedule": {key: schedule[key] for key in kept}}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what `state_tensors` and `state_values` returned.

        The next step is then bitwise what it would have been without a stop, on the same kind of
        device.

        raises   OptimizerStateError when the state belongs to other parameters
        """
        entries = {**tensors, **values["state"]}
        states: dict[str, dict[str, Any]] = {}
        for key, value in entries.items():
            kind, _, name = key.partition("/")
            if name not in self._params:
                raise OptimizerStateError(
                    "the saved optimizer state belongs to other parameters",
                    expected=f"one of the job's {len(self._params)} trained parameters",
                    found=name,
                    help="resume with the job file that the checkpoint was made with",
                )
            states.setdefault(name, {})[kind] = self._restored(name, kind, value)
        for name, state in states.items():
            self._optimizer.state[self._params[name]] = state
        self._fused = None
        groups = self._optimizer.param_groups
        # The schedule's functions come from the job file; only their counters are saved.
        schedule = {**values["schedule"], "lr_lambdas": [None] * len(groups)}
        self._schedule.load_state_dict(schedule)
        for group, rate in zip(groups, self._rates(values["schedule"]), strict=True):
            group["lr"] = rate

    def _rates(self, saved: Mapping[str, Any]) -> list[float]:
        """The rates to go on with: by the schedule as it is now, which may be longer than then."""
        functions = getattr(self._schedule, "lr_lambdas", None)
        if functions is None:
            return list(saved["_last_lr"])
        pairs = zip(saved["base_lrs"], functions, strict=True)
        return [base * function(saved["last_epoch"]) for base, function in pairs]

    def _restored(self, name: str, kind: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        param = self._params[name]
        if kind in HOST_SCALARS:
            return value.to(param.device if self.is_fused else "cpu", copy=True)
        if value.shape != param.shape:
            return value.to(param.device, copy=True)
        # The memory layout that the optimizer itself would give it: kernels that read several
        # tensors at once choose their arithmetic by layout.
        return torch.empty_like(param, dtype=value.dtype).copy_(value).detach()

    def _held_gradients(self) -> Gradients:
        """The gradients as they are; lists of tensors that somebody replaced are made anew."""
        if not self._gradients.holds():
            self._gradients, self._fused = Gradients(self._params.values()), None
        return self._gradients


def _make_optimizer(job: Job, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    arguments, name = job.optimizer_arguments(), job.optimizer_class()
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    if _has_fused(name, params):
        # What it refuses, the plain class takes, or says what is wrong.
        with suppress(TypeError, ValueError, RuntimeError):
            return make(params, **arguments, fused=True)
    try:
        return make(params, **arguments)
    except (TypeError, ValueError) as error:
        raise OptimizerError(
            f"the optimizer '{job.optim}' does not take its arguments",
            job=job.name,
            found=arguments,
            reason=error,
            help="mend optim_args in the job file",
        ) from error


def _has_fused(name: str, params: list[torch.nn.Parameter]) -> bool:
    """Whether this torch has a kernel for all of these parameters; never on the CPU.

    The kernels' arithmetic depends on whether a view begins on a vector's boundary, which
    neighbours' ranks decide where rows are no multiple of vectors.
    """
    kernel = FUSED.get(name)
    return (
        kernel is not None
        and torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "CUDA")
        and all(param.is_cuda and param.is_floating_point() for param in params)
        and all(_row_of(param) % _ROW == 0 for param in params)
    )


def _row_of(param: Tensor) -> int:
    """How many numbers of a parameter lie in a run that is never parted."""
    runs = [n for n, step in zip(param.shape, param.stride(), strict=True) if step == 1]
    return max(runs, default=1)


def _make_schedule(
    job: Job, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    from transformers import get_scheduler

    arguments = dict(job.lr_scheduler_kwargs)
    try:
        schedule: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
            job.lr_scheduler_type, optimizer, job.warmup(steps), steps, arguments
        )
    except (TypeError, ValueError) as error:
        raise OptimizerError(
            f"the schedule '{job.lr_scheduler_type}' does not take its arguments",
            job=job.name,
            found=arguments,
            reason=error,
            help="mend lr_scheduler_kwargs in the job file",
        ) from error
    return schedule
