"""One job's optimizer, learning rate schedule and gradient clipping.

Each job of a group has its own, and none of them reads anything of a neighbour. Parameters may be
views of storage that many jobs share, so nothing here replaces `.data` or `.grad`: gradients are
zeroed in place and updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tlora_fx.errors import OptimizerError, OptimizerStateError

if TYPE_CHECKING:
    from tlora_fx.job import Job

# Counters that torch.optim keeps on the host, wherever the parameters are.
HOST_SCALARS = frozenset({"step", "mu_product"})


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

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses."""
        return float(self._optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Fill every gradient with zeros, in place."""
        self._optimizer.zero_grad(set_to_none=False)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The 2-norm over all gradients of the job, in float32 or the widest gradient's dtype.

        It may be NaN or infinite: whoever calls decides what becomes of the job.
        """
        return float(torch.nn.utils.get_total_norm(self._wide_gradients()))

    @torch.no_grad()
    def step(self, norm: float | None = None) -> float:
        """Clip, update the parameters, and advance the schedule.

        norm      what `gradient_norm` returned for these gradients; measured when left out
        returns   the norm before clipping
        """
        if norm is None:
            norm = self.gradient_norm()
        if self._max_norm > 0:
            self._clip(norm)
        self._optimizer.step()
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

        The next step is then bitwise what it would have been without a stop.

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
            return value.clone()
        if value.shape != param.shape:
            return value.to(param.device, copy=True)
        # The memory layout that the optimizer itself would give it: kernels that read several
        # tensors at once choose their arithmetic by layout.
        return torch.empty_like(param, dtype=value.dtype).copy_(value).detach()

    def _wide_gradients(self) -> list[Tensor]:
        gradients = (p.grad for p in self._params.values() if p.grad is not None)
        return [_wide(gradient) for gradient in gradients]

    def _clip(self, norm: float) -> None:
        params = [p for p in self._params.values() if p.grad is not None]
        if not params:
            return
        dtype = torch.float32
        for param in params:
            dtype = torch.promote_types(dtype, param.dtype)
        total = torch.tensor(norm, dtype=dtype, device=params[0].device)
        torch.nn.utils.clip_grads_with_norm_(params, self._max_norm, total)


def _wide(gradient: Tensor) -> Tensor:
    """The gradient in float32 at least, on a 16-byte boundary.

    Where a job's view begins depends on its neighbours' ranks, and CUDA's reductions sum in
    another order on another alignment.
    """
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide if wide.data_ptr() % 16 == 0 else wide.clone()


def _make_optimizer(job: Job, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    arguments = job.optimizer_arguments()
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, job.optimizer_class())
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
