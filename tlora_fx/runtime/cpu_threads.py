"""How many threads compute a base on the CPU: one where the base is small."""

from __future__ import annotations

import logging

import torch
from torch import nn

from tlora_fx.host.threads import thread_rules

logger = logging.getLogger(__name__)
#: Numbers of a matrix, in the mean over a base's matrices, up to which one thread computes it: its
#: product takes about as long as threads need to find each other.
SMALL_MATRIX = 1 << 16


def settle_threads(base: nn.Module, device: torch.device) -> None:
    """Let one thread compute a small base on the CPU, under our command line.

    The base alone decides, for several threads round sums otherwise than one: a job has the same
    numbers with its neighbours, without them, and when it goes on. Nothing is done where the user
    has said how many threads there are, or another program uses us.
    """
    if device.type != "cpu" or not thread_rules.adapts:
        return
    if mean_matrix(base) <= SMALL_MATRIX:
        torch.set_num_threads(1)
        logger.info("the base is small: one thread computes it")


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
