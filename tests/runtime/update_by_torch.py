"""`GroupUpdate` without a GPU: torch does what the kernels do, in the same place.

tests/ops/interpreted/test_adam.py compares the kernels' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tlora_fx.config.job import Job
from tlora_fx.config.job_optimizer import optimizer_arguments, optimizer_class
from tlora_fx.runtime.optim import group_update, optimizer
from tlora_fx.runtime.optim.group_update import GroupUpdate

PLAIN = optimizer._make_optimizer


@contextmanager
def updates_on_the_cpu() -> Iterator[list[int]]:
    """Jobs are updated at once on a CPU too; yields how many jobs each update served."""
    launched: list[int] = []

    def run(update: GroupUpdate, losses: Tensor, given: Tensor, squares: Tensor | None) -> Tensor:
        launched.append(len(update.states))
        return _updated(update, losses, given, squares)

    with (
        mock.patch.object(optimizer, "_make_optimizer", _fused),
        mock.patch.object(group_update, "KERNELS", frozenset({"cpu"})),
        mock.patch.object(group_update, "_ALIGNED", 1),
        mock.patch.object(GroupUpdate, "_run", run),
        mock.patch.object(GroupUpdate, "measure", _measure),
    ):
        yield launched


def _fused(job: Job, params: Any) -> torch.optim.Optimizer:
    """A job's optimizer as on a GPU."""
    make: Any = optimizer_class(job)
    if make.__name__ not in ("Adam", "AdamW"):
        return PLAIN(job, params)
    made: torch.optim.Optimizer = make(params, **optimizer_arguments(job), fused=True)
    return made


def _measure(update: GroupUpdate, squares: Tensor) -> None:
    from tlora_fx.ops.kernels.adam import CHUNK

    chunk = 0
    assert update._counted is not None
    for place, state in zip(update.places, update.states, strict=True):
        squares[place] = 0.0
        for gradient in state.gradients.tensors:
            if update._counted[chunk]:
                squares[place] += gradient.double().square().sum()
            chunk += -(-gradient.numel() // CHUNK)


def _updated(update: GroupUpdate, losses: Tensor, given: Tensor, squares: Tensor | None) -> Tensor:
    facts = []
    for place, state in enumerate(update.states):
        largest, rate, shrink, decay, beta1, rest1, beta2, rest2, epsilon, root = given[place]
        gradients = state.gradients
        if squares is None:
            norm = torch.nn.utils.get_total_norm(gradients.tensors)
        else:
            norm = squares[update.places[place]].sqrt()
        loss = losses[update.places[place]]
        sound = bool(update._alive[place]) and bool(torch.isfinite(norm) & torch.isfinite(loss))
        update._alive[place] = int(sound)
        scale = min(float(largest / (norm + 1e-6)), 1.0) if largest else 1.0
        facts.append([float(loss), float(norm), float(sound), scale])
        runs = zip(gradients.params, gradients.tensors, state.firsts, state.seconds, strict=True)
        for param, gradient, first, second in runs:
            if sound:
                moved = gradient * scale + param.detach() * decay
                first.mul_(beta1).add_(rest1 * moved)
                second.mul_(beta2).add_(rest2 * moved * moved)
                param.data.sub_(param.data * shrink)
                param.data.sub_(rate * first / (second.sqrt() / root + epsilon))
            gradient.zero_()
    return torch.tensor(facts, dtype=torch.float64)
