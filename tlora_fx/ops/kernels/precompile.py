"""Compile many kernels in processes of their own, so that tuning finds them in Triton's cache.

A compiler takes a second or more a kernel on one core, the measurement of it milliseconds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context

import torch

from tlora_fx.codegen.spec import Dtype, Kind, Tile
from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.bench_case import Case

logger = logging.getLogger("tlora_fx.kernels")
_TOKENS = 256
_MOST_WORKERS = 12
_TOGETHER = 3


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel: the site that runs it, and how it cuts its work."""

    kind: Kind
    shape: tuple[int, int]
    ranks: tuple[int, ...]
    drops: bool
    dtype: Dtype
    tile: Tile
    beside: tuple[int, ...] = ()


def precompile(tasks: Sequence[Task], seconds: float) -> None:
    """Run every kernel once on a short row, in several processes, for so long at most.

    What fails here fails again where it is measured, and is noted there.
    """
    workers = min(_MOST_WORKERS, max(1, (os.cpu_count() or 2) - 2))
    until = time.monotonic() + seconds
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        groups = [tasks[start : start + _TOGETHER] for start in range(0, len(tasks), _TOGETHER)]
        futures = [pool.submit(_compile, group) for group in groups]
        done, late = wait(futures, timeout=max(0.0, until - time.monotonic()))
        for future in late:
            future.cancel()
        for future in done:
            if error := future.exception():
                logger.info("precompiling stopped in one process: %s", error)


def _compile(tasks: Sequence[Task]) -> None:
    for task in tasks:
        try:
            _run(task)
        except Exception as error:  # noqa: BLE001  # compilers and drivers raise what they like
            logger.info("%s %s does not run: %s", task.kind, task.tile, error)


def _run(task: Task) -> None:
    case = _case(task.shape, task.ranks, task.drops, task.dtype, task.beside)
    directed = task.kind in ("forward", "input_gradient")
    call = case.direction(task.kind) if directed else case.kernel(task.kind)
    with select.force_tiles({task.kind: task.tile}), select.force_plan("fused"):
        call()
    torch.cuda.synchronize()


@lru_cache(maxsize=4)
def _case(
    shape: tuple[int, int], ranks: tuple[int, ...], drops: bool, dtype: Dtype,
    beside: tuple[int, ...],
) -> Case:  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    with select.force_plan("fused"):
        return Case.make(shape, _TOKENS, ranks, getattr(torch, dtype), drops, device, beside)
