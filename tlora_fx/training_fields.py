"""Which optimizers and schedules a job may name, and which arguments they take.

The tables are static, so that a job file with a mistake is refused without importing torch; a
test holds them against the installed torch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from tlora_fx.config.validation import refuse
from tlora_fx.errors import nearest

OptimizerName = Literal[
    "adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adafactor"
]

ScheduleName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]

#: The class in torch.optim, and the arguments that 'optim_args' may hold.
OPTIMIZERS: Mapping[str, tuple[str, frozenset[str]]] = {
    "adamw": ("AdamW", frozenset({"amsgrad", "maximize"})),
    "adam": ("Adam", frozenset({"amsgrad", "maximize", "decoupled_weight_decay"})),
    "sgd": ("SGD", frozenset({"momentum", "dampening", "nesterov", "maximize"})),
    "rmsprop": ("RMSprop", frozenset({"alpha", "eps", "momentum", "centered", "maximize"})),
    "adagrad": (
        "Adagrad",
        frozenset({"lr_decay", "initial_accumulator_value", "eps", "maximize"}),
    ),
    "nadam": ("NAdam", frozenset({"momentum_decay", "decoupled_weight_decay", "maximize"})),
    "radam": ("RAdam", frozenset({"decoupled_weight_decay", "maximize"})),
    "adamax": ("Adamax", frozenset({"maximize"})),
    "adafactor": ("Adafactor", frozenset({"beta2_decay", "eps", "d", "maximize"})),
}

#: Optimizers that take the job's betas and epsilon.
ADAM_LIKE = frozenset({"adamw", "adam", "nadam", "radam", "adamax"})

_OWN_FIELDS: Mapping[str, str] = {
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}

_MIN_LR = frozenset({"num_cycles", "min_lr", "min_lr_rate"})
SCHEDULE_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "linear": frozenset(),
    "cosine": frozenset({"num_cycles"}),
    "cosine_with_restarts": frozenset({"num_cycles"}),
    "polynomial": frozenset({"lr_end", "power"}),
    "constant": frozenset(),
    "constant_with_warmup": frozenset(),
    "inverse_sqrt": frozenset({"timescale"}),
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": _MIN_LR | {"warmup_lr_rate"},
    "warmup_stable_decay": frozenset(
        {
            "num_decay_steps",
            "num_stable_steps",
            "warmup_type",
            "decay_type",
            "min_lr_ratio",
            "num_cycles",
        }
    ),
}
NEEDED_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "warmup_stable_decay": frozenset({"num_decay_steps"}),
}


def check_optimizer_arguments(name: str, given: Mapping[str, Any]) -> PydanticCustomError | None:
    """The mistake in 'optim_args' for the optimizer `name`, or None."""
    _, allowed = OPTIMIZERS[name]
    for key in given:
        if key in allowed:
            continue
        own = _OWN_FIELDS.get(key)
        help = f"use {own}" if own else ""
        return _unknown(key, f"the optimizer '{name}'", allowed, help)
    return None


def check_schedule_arguments(name: str, given: Mapping[str, Any]) -> PydanticCustomError | None:
    """The mistake in 'lr_scheduler_kwargs' for the schedule `name`, or None."""
    allowed = SCHEDULE_ARGUMENTS[name]
    for key in given:
        if key not in allowed:
            return _unknown(key, f"the schedule '{name}'", allowed, "")
    for key in NEEDED_ARGUMENTS.get(name, frozenset()) - set(given):
        return refuse(f"the schedule '{name}' needs '{key}' in 'lr_scheduler_kwargs'")
    return None


def _unknown(key: str, owner: str, allowed: frozenset[str], help: str) -> PydanticCustomError:
    near = nearest(key, allowed)
    if not help:
        known = ", ".join(sorted(allowed)) or "none"
        help = f"did you mean '{near}'?" if near else f"known arguments: {known}"
    return refuse(f"unknown argument '{key}' of {owner}", help=help)
