"""The tables of optimizers and schedules against the installed libraries."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, get_args

import pytest
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from tlora_fx.config.fields import (
    ADAM_LIKE,
    OPTIMIZER_ALIASES,
    OPTIMIZER_MODULES,
    OPTIMIZERS,
    SCHEDULE_ARGUMENTS,
    WITH_BETAS,
    ScheduleName,
)

#: Arguments that a job has fields for, and those that the trainer chooses.
OWN = {"params", "lr", "weight_decay"}
CHOSEN = {"foreach", "fused", "capturable", "differentiable"}
#: Of bitsandbytes: refused by it, kept for callers of old, or said by the class's name.
IDLE = {"adamw_8bit": {"amsgrad", "optim_bits", "args", "is_paged"}}

#: Schedules that read an evaluation metric, which a job does not have.
BY_METRIC = {"reduce_lr_on_plateau", "greedy"}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizer_arguments_are_those_of_its_library(name: str) -> None:
    """What a job may give is what the class takes, less what has a field of its own."""
    kind, allowed = OPTIMIZERS[name]
    own = OWN | ({"betas", "eps"} if name in ADAM_LIKE else set())
    own |= {"betas"} if name in WITH_BETAS else IDLE.get(name, set())
    home = import_module(OPTIMIZER_MODULES.get(name, "torch.optim"))

    assert allowed == set(inspect.signature(getattr(home, kind)).parameters) - own - CHOSEN


def test_other_names_of_optimizers_are_those_of_transformers() -> None:
    """Each is one that transformers knows and we do not."""
    known = {name.value for name in OptimizerNames}

    assert set(OPTIMIZER_ALIASES) <= known
    assert set(OPTIMIZER_ALIASES.values()) <= set(OPTIMIZERS)


def test_schedules_are_those_of_transformers() -> None:
    """Each schedule that needs no metric has its arguments in the table."""
    assert set(get_args(ScheduleName)) == {kind.value for kind in SchedulerType} - BY_METRIC
    assert set(SCHEDULE_ARGUMENTS) == set(get_args(ScheduleName))


@pytest.mark.parametrize("name", sorted(SCHEDULE_ARGUMENTS))
def test_schedule_arguments_are_those_of_transformers(name: str) -> None:
    """What a job may give is what the schedule takes, less what the trainer knows."""
    function: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    known = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}

    assert SCHEDULE_ARGUMENTS[name] == set(inspect.signature(function).parameters) - known
