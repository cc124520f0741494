"""The optimizer and the schedule that a job asks for: their classes and arguments.

Both may be functions of the user's, which only a job has that was made in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tlora_fx.config.fields import ADAM_LIKE, OPTIMIZER_MODULES, OPTIMIZERS, WITH_BETAS
from tlora_fx.config.functions import UserFunction, callable_of, offered_arguments
from tlora_fx.config.job import Job
from tlora_fx.errors import JobError, errors_as

if TYPE_CHECKING:
    import torch


def optimizer_arguments(job: Job) -> dict[str, Any]:
    """Keyword arguments of the job's optimizer class, beside its parameters."""
    if isinstance(job.optim, UserFunction):
        return {"lr": job.learning_rate, **job.optim_args}
    arguments: dict[str, Any] = {"lr": job.learning_rate, "weight_decay": job.weight_decay}
    if job.optim in ADAM_LIKE:
        arguments |= {"betas": (job.adam_beta1, job.adam_beta2), "eps": job.adam_epsilon}
    elif job.optim in WITH_BETAS:
        arguments["betas"] = (job.adam_beta1, job.adam_beta2)
    return arguments | job.optim_args


def optimizer_class(job: Job) -> Callable[..., torch.optim.Optimizer]:
    """The job's optimizer class, or function. Imports torch, or the library that has it.

    raises  JobError where that library is not installed, or the function is not at hand
    """
    if isinstance(job.optim, UserFunction):
        return callable_of(job.optim, "optim", job.name)
    name, module = OPTIMIZERS[job.optim][0], OPTIMIZER_MODULES.get(job.optim, "torch.optim")
    what = f"the optimizer '{job.optim}' needs a library that is not installed"
    help = "pip install 'tlora-fx[optimizers]'"
    with errors_as(JobError, what, ImportError, job=job.name, help=help):
        found: type[torch.optim.Optimizer] = getattr(import_module(module), name)
    return found


def own_schedule(
    job: Job, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """A new scheduler by the job's own class or function; None where the job names one.

    steps   optimizer steps of the whole job
    raises  JobError where the function is not at hand; whatever it raises
    """
    if not isinstance(job.lr_scheduler_type, UserFunction):
        return None
    make = callable_of(job.lr_scheduler_type, "lr_scheduler", job.name)
    offered = {"num_training_steps": steps, "num_warmup_steps": job.warmup(steps)}
    given = offered_arguments(make, offered) | job.lr_scheduler_kwargs
    made: torch.optim.lr_scheduler.LRScheduler = make(optimizer, **given)
    return made
