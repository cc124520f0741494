"""Learning rates: schedules of transformers, the common ones written here too; rates of LoRA+.

`transformers.get_scheduler` imports PEFT, and with it whatever optional packages of quantised
bases are installed. That takes seconds before the first step, for functions of three lines. Their
numbers and their states are bitwise those of transformers.

source    transformers 5, optimization.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

if TYPE_CHECKING:
    from tlora_fx.config.job import Job


def lr_schedule(
    name: str,
    optimizer: torch.optim.Optimizer,
    warmup: int,
    steps: int,
    arguments: Mapping[str, Any],
) -> LambdaLR:
    """The schedule that transformers has under a name.

    warmup      steps in which the rate grows from 0
    steps       of the job
    arguments   of the schedule; those of transformers' functions
    raises      TypeError, ValueError or others where transformers refuses the arguments
    """
    factors: dict[str, Callable[[int], float]] = {
        "constant": _constant,
        "constant_with_warmup": partial(_warmed_up, warmup=warmup),
        "linear": partial(_linear, warmup=warmup, steps=steps),
        "cosine": partial(_cosine, warmup=warmup, steps=steps),
    }
    if name in factors and not arguments:
        return LambdaLR(optimizer, factors[name])
    from transformers import get_scheduler

    found: LambdaLR = get_scheduler(name, optimizer, warmup, steps, dict(arguments))
    return found


def _constant(_step: int) -> float:
    return 1.0


def _warmed_up(step: int, *, warmup: int) -> float:
    return step / max(1, warmup) if step < warmup else 1.0


def _linear(step: int, *, warmup: int, steps: int) -> float:
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, (steps - step) / max(1, steps - warmup))


def _cosine(step: int, *, warmup: int, steps: int) -> float:
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, steps - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


class RecordedSchedule(LRScheduler):
    """The rates of a scheduler of a user's own, step by step.

    The scheduler acts on a stand-in with the same rates, and is asked for each step once. So a job
    can go on from any step, whatever state a scheduler has.

    make      makes the scheduler of an optimizer
    raises    ValueError where what is made is no scheduler, or changes more than rates; whatever
              `make` raises
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[[torch.optim.Optimizer], LRScheduler | None],
    ) -> None:
        groups = [
            {"params": [torch.nn.Parameter(torch.zeros(()))], "lr": group["lr"]}
            for group in optimizer.param_groups
        ]
        self._stand_in = torch.optim.SGD(groups, momentum=0.5)
        self._others = self._options()
        found = make(self._stand_in)
        if not isinstance(found, LRScheduler):
            raise ValueError(f"it made {type(found).__name__}, no scheduler of torch.optim")
        self._own, self._recorded = found, [self._rates_now()]
        super().__init__(optimizer)

    def rates(self, step: int) -> list[float]:
        """The rate of each group after so many steps."""
        while len(self._recorded) <= step:
            self._stand_in._opt_called = True  # type: ignore[attr-defined]  # or it warns
            self._own.step()
            self._recorded.append(self._rates_now())
        return self._recorded[step]

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates of the step that the schedule is at."""
        return [*self.rates(self.last_epoch)]

    def _rates_now(self) -> list[float]:
        if self._options() != self._others:
            raise ValueError("it changes more than rates; OneCycleLR takes cycle_momentum=False")
        return [float(group["lr"]) for group in self._stand_in.param_groups]

    def _options(self) -> list[dict[str, Any]]:
        names = ("momentum", "dampening", "weight_decay", "nesterov")
        return [{name: group[name] for name in names} for group in self._stand_in.param_groups]


# LoRA+: B learns at a multiple of A's rate (Hayou, Ghosh and Yu 2024). Groups and their options are
# those of PEFT's create_loraplus_optimizer, which is given the job's weight decay.

#: Names in transformers' Trainer.get_decay_parameter_names.
_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
#: PEFT's rate of adapters on embeddings.
EMBEDDING_RATE = 1e-6


def rate_groups(job: Job, params: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """A job's parameters by their rates and weight decay; most jobs have one group."""
    if job.loraplus_lr_ratio is None:
        return _decay_groups(job, params)
    rate, decay = job.learning_rate, job.weight_decay
    embedding_rate = job.loraplus_lr_embedding or EMBEDDING_RATE
    options: dict[str, dict[str, Any]] = {
        "A": {"lr": rate, "weight_decay": decay},
        "embedding": {"lr": embedding_rate, "weight_decay": decay},
        "B": {"lr": rate * job.loraplus_lr_ratio, "weight_decay": decay},
        "bias": {"lr": rate * job.loraplus_lr_ratio, "weight_decay": 0.0},
    }
    members: dict[str, list[nn.Parameter]] = {kind: [] for kind in options}
    for name, param in params.items():
        members[_kind_of(name, params)].append(param)
    return [{"params": own, **options[kind]} for kind, own in members.items() if own]


def _decay_groups(job: Job, params: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    decayed, spared = list[nn.Parameter](), list[nn.Parameter]()
    # PEFT's LoRA-FA decays all that it trains.
    may_spare = job.weight_decay > 0 and job.optim != "lorafa"
    for name, param in params.items():
        own = spared if may_spare and _is_spared(name, params) else decayed
        own.append(param)
    groups: list[dict[str, Any]] = [{"params": decayed}] if decayed or not spared else []
    return [*groups, {"params": spared, "weight_decay": 0.0}] if spared else groups


def _is_spared(name: str, params: Mapping[str, Tensor]) -> bool:
    """Whether transformers' Trainer lets a parameter be without decay: biases and norms."""
    return bool(_SPARED.search(name.lower())) or _is_of_layer_norm(name, params)


def _is_of_layer_norm(name: str, params: Mapping[str, Tensor]) -> bool:
    """Whether this is the weight of a trained nn.LayerNorm, which transformers knows by its class.

    Here it is known by its bias, which norms of models' own classes do not have.
    """
    bias = params.get(f"{name.removesuffix('.weight')}.bias")
    return ".modules_to_save." in name and params[name].dim() == 1 and bias is not None


def _kind_of(name: str, params: Mapping[str, Tensor]) -> str:
    if ".lora_embedding_" in name:
        return "embedding"
    if ".lora_B." in name or params[name].dim() == 1:
        return "bias" if "bias" in name or _is_of_layer_norm(name, params) else "B"
    return "A"
