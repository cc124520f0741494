"""How many threads compute a base on the CPU: one where the base is small.

Beside other busy processes, several threads of OpenMP take many times as long as one for a small
base: each waits for the others without giving its CPU away.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from tlora_fx.host.threads import COUNTS, thread_rules

logger = logging.getLogger(__name__)
#: Numbers of a matrix, in the mean over a base's matrices, up to which one thread computes it: its
#: product takes about as long as threads need to find each other.
SMALL_MATRIX = 1 << 16
P = ParamSpec("P")
R = TypeVar("R")


def settle_threads(base: nn.Module, device: torch.device) -> None:
    """Make one thread compute a small base on the CPU, under our command line.

    The base alone decides, for several threads round sums otherwise than one: a job has the same
    numbers with its neighbours, without them, and when it goes on. Nothing is done where the user
    has said how many threads there are.
    """
    if thread_rules.adapts and _is_small(base, device):
        torch.set_num_threads(1)
        logger.info("the base is small: one thread computes it")


@contextmanager
def few_threads(base: nn.Module, device: torch.device) -> Iterator[None]:
    """The same within this context, for programs that use us; then there are as many as before."""
    before = torch.get_num_threads()
    if _is_said(before) or not _is_small(base, device):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_few_threads(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of an object with `model` and `mesh` that computes."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        own: Any = args[0]
        with few_threads(own.model.backbone.model, own.mesh.device):
            return method(*args, **kwargs)

    return run


def _is_said(threads: int) -> bool:
    """Whether somebody has said how many threads there are: not as many as torch takes itself."""
    cpus = len(os.sched_getaffinity(0))
    return any(os.environ.get(name) for name in COUNTS) or threads not in (cpus, max(1, cpus // 2))


def _is_small(base: nn.Module, device: torch.device) -> bool:
    return device.type == "cpu" and mean_matrix(base) <= SMALL_MATRIX


def mean_matrix(base: nn.Module) -> float:
    """Numbers of a matrix that tokens are multiplied with, in the mean; 0 where there is none."""
    sizes = [
        parameter.numel()
        for module in base.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() > 1
    ]
    return sum(sizes) / max(1, len(sizes))
