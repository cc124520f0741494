"""Schedules of learning rates: transformers' own, of which the common ones are written here too.

`transformers.get_scheduler` imports PEFT, and with it whatever optional packages of quantised
bases are installed. That takes seconds before the first step, for functions of three lines. Their
numbers and their states are bitwise those of transformers.

source    transformers 5, optimization.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


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
