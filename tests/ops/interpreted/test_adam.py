"""The update of all jobs at once against torch.optim and torch.nn.utils, job by job."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.parameters import job_with
from tlora_fx.config.job import Job
from tlora_fx.runtime import group_update, optimizer
from tlora_fx.runtime.group_update import GroupUpdate
from tlora_fx.runtime.optimizer import JobOptimizer

STEPS = 5
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decayed": {"weight_decay": 0.1, "learning_rate": 1e-2, "lr_scheduler_type": "cosine"},
    "coupled": {"optim": "adam", "weight_decay": 0.1, "max_grad_norm": 0.0},
    "loraplus": {"loraplus_lr_ratio": 16.0, "weight_decay": 0.1, "learning_rate": 1e-3},
    "clipped": {"max_grad_norm": 1e-3, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused optimizers, and kernels, also without a GPU."""

    def fused(job: Job, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        make: Any = job.optimizer_class()
        made: torch.optim.Optimizer = make(groups, **job.optimizer_arguments(), fused=True)
        return made

    monkeypatch.setattr(optimizer, "_make_optimizer", fused)
    monkeypatch.setattr(group_update, "KERNELS", frozenset({"cpu"}))


def parameters(seed: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, nn.Parameter]:
    """A [r, in] and B [out, r] as banks have them, a vector, and a run longer than a chunk."""
    torch.manual_seed(seed)
    bank = torch.randn(24, 40).to(device, dtype)
    tensors = {"a": bank[8:16], "x.lora_B.w": bank[16:24].t()}
    tensors["bias"] = torch.randn(48).to(device, dtype)
    tensors["long"] = torch.randn(8, 1104).to(device, dtype)
    made = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
    for param in made.values():
        param.grad = torch.zeros_like(param)
    return made


def give(params: dict[str, nn.Parameter], step: int) -> None:
    """Gradients that depend on the step."""
    for place, param in enumerate(params.values()):
        assert param.grad is not None
        param.grad.copy_(torch.randn(param.shape).mul(0.1 + step + place))


def by_torch(job: Job, params: dict[str, nn.Parameter], found: JobOptimizer) -> list[float]:
    """The norms of some steps by the job's own optimizer."""
    norms = []
    for step in range(STEPS):
        torch.manual_seed(step)
        give(params, step)
        norms.append(found.step())
    return norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_jobs_do_what_each_does_by_torch(dtype):
    """Norms, parameters, moments and counters; gradients are zeros afterwards."""
    jobs = [job_with(**fields) for fields in JOBS.values()]
    expected = [parameters(place, dtype) for place in range(len(jobs))]
    alone = [JobOptimizer(job, params, 9) for job, params in zip(jobs, expected, strict=True)]
    norms = [by_torch(*each) for each in zip(jobs, expected, alone, strict=True)]

    found = [parameters(place, dtype) for place in range(len(jobs))]
    together = [JobOptimizer(job, params, 9) for job, params in zip(jobs, found, strict=True)]
    update = GroupUpdate.of(together, [3, 0, 1, 2, 4])
    assert update is not None
    losses = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    for step in range(STEPS):
        for params in found:
            torch.manual_seed(step)
            give(params, step)
        outcomes = update.launch(losses).read()
        for each in together:
            each.noted()
        assert [outcome.loss for outcome in outcomes] == pytest.approx([0.4, 0.1, 0.2, 0.3, 0.5])
        for outcome, each in zip(outcomes, norms, strict=True):
            assert outcome.updated
            assert outcome.norm == pytest.approx(each[step], rel=1e-6)
        assert not any(param.grad.any() for params in found for param in params.values())

    bound = 1e-6 if dtype == torch.float32 else 1e-14
    for one, other in zip(alone, together, strict=True):
        assert one.learning_rate == other.learning_rate
        assert one.state_values() == other.state_values()
        assert_equal(one.state_tensors(), other.state_tensors(), bound)
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal(dict(mine), dict(theirs), bound)


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    """All tensors, by name."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=bound, atol=bound)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_job_without_finite_numbers_stays_and_its_neighbour_does_not(what):
    """From then on, also where its numbers are finite again; the neighbour is bitwise as alone."""
    sick, well, alone = (parameters(place, torch.float32) for place in (1, 2, 2))
    before = {name: param.detach().clone() for name, param in sick.items()}
    optimizers = [JobOptimizer(job_with(), params, 9) for params in (sick, well)]
    update = GroupUpdate.of(optimizers, [0, 1])
    unchanged = JobOptimizer(job_with(), alone, 9)
    only = GroupUpdate.of([unchanged], [1])
    assert update is not None
    assert only is not None

    updated = []
    for step in range(3):
        losses = torch.tensor([math.nan if what == "loss" and step == 0 else 1.0, 2.0])
        for params in (sick, well, alone):
            torch.manual_seed(step)
            give(params, step)
        if what == "gradient" and step == 0:
            sick["a"].grad[3, 5] = math.inf
        updated.append([outcome.updated for outcome in update.launch(losses).read()])
        only.launch(losses)
        for each in (*optimizers, unchanged):
            each.noted()

    assert updated == [[False, True]] * 3
    assert all(torch.equal(param, before[name]) for name, param in sick.items())
    assert not any(param.grad.any() for param in sick.values())
    assert all(torch.equal(param, alone[name]) for name, param in well.items())


def test_updates_are_taken_back_and_counted_once():
    """A job that failed has the counters of its last good step."""
    params = parameters(0, torch.float32)
    found = JobOptimizer(job_with(), params, 9)
    update = GroupUpdate.of([found], [0])
    assert update is not None
    for _ in range(3):
        give(params, 1)
        update.launch(torch.ones(1))
        found.noted()
    found.noted(-1)

    assert {float(value) for name, value in found.state_tensors().items() if "step/" in name} == {2}
    assert found.state_values()["schedule"]["last_epoch"] == 2


def test_other_optimizers_do_their_own_step():
    """All of a round's, where one of them is another."""
    plain, other = (parameters(place, torch.float32) for place in (0, 1))
    assert GroupUpdate.of([JobOptimizer(job_with(), plain, 9)], [0]) is not None

    sgd = JobOptimizer(job_with(optim="sgd"), other, 9)
    assert GroupUpdate.of([JobOptimizer(job_with(), plain, 9), sgd], [0, 1]) is None
