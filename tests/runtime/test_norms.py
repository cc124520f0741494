"""The norms of all jobs of a round."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.parameters import job_with, start
from tlora_fx.runtime.distributed import gradient_norms, gradient_squares
from tlora_fx.runtime.optim.optimizer import JobOptimizer


def runs_of(*sizes: float, dtype: torch.dtype = torch.float32) -> list[Any]:
    """A run for each size, which all of its gradients have; indices 0, 2, 4."""
    made = []
    for place, size in enumerate(sizes):
        params = start(dtype)
        for param in params.values():
            if param.grad is not None:
                param.grad.fill_(size)
        made.append(SimpleNamespace(index=2 * place, optimizer=JobOptimizer(job_with(), params, 9)))
    return made


class Waits(TorchDispatchMode):
    """Counts how often a number is asked for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def norms(runs: list[Any]) -> dict[int, float]:
    """The norms on one device, where each job is whole."""
    return gradient_norms(runs, torch.device("cpu"))


def test_each_job_has_the_norm_that_it_has_alone():
    """Also where jobs' dtypes differ, and where a neighbour's is no number."""
    runs = [*runs_of(0.1, math.nan, math.inf), *runs_of(1e200, 0.3, dtype=torch.float64)]
    for place, run in enumerate(runs):
        run.index = place

    found = norms(runs)

    alone = [run.optimizer.gradient_norm() for run in runs]
    assert math.isnan(found[1])
    assert math.isnan(alone[1])
    assert found[2] == math.inf
    assert [found[place] for place in (0, 2, 3, 4)] == [alone[place] for place in (0, 2, 3, 4)]


def test_the_device_is_not_waited_for_once_a_job():
    """No job's norm is asked for on its own."""
    runs = runs_of(1.0, 2.0, 3.0)

    with Waits() as waits:
        found = norms(runs)

    assert list(found) == [0, 2, 4]
    assert waits.count == 0


def test_no_jobs_have_no_norms():
    """A round in which nobody trains."""
    assert norms([]) == {}


def test_squares_of_parts_are_of_what_a_job_trains_and_counts_here():
    """A piece counts on each process, what is whole on the first alone; A of LoRA-FA nowhere."""
    params = {name: each for name, each in start().items() if name != "a.never_used"}
    for param in params.values():
        param.grad.fill_(2.0)
    a, b, magnitude = (param.numel() for param in params.values())
    pieces = {"a.lora_A.weight": None, "a.lora_B.weight": "piece", "a.lora_magnitude_vector": None}
    model: Any = SimpleNamespace(jobs=[None] * 3, shards=lambda name: pieces)

    def found(optim: str, **ranks: int) -> list[float]:
        job = job_with(optim=optim)
        optimizer = JobOptimizer(job, params, 9, {"a.lora_A.weight": 2.0})
        run = SimpleNamespace(index=1, job=job, optimizer=optimizer)
        where = {"dp_rank": 0, "tp_rank": 0} | ranks
        mesh: Any = SimpleNamespace(device=torch.device("cpu"), **where)
        return gradient_squares([run], model, mesh).tolist()

    assert found("adamw") == [0, pytest.approx(4 * (a + b + magnitude)), 0]
    assert found("adamw", tp_rank=1) == [0, pytest.approx(4 * b), 0]
    assert found("adamw", dp_rank=1) == [0, 0, 0]
    assert found("lorafa") == [0, pytest.approx(4 * (b + magnitude)), 0]
