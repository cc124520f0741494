"""The update of all jobs at once against torch.optim and torch.nn.utils, job by job."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.parameters import job_with
from tlora_fx.config.job import Job
from tlora_fx.config.job_optimizer import optimizer_arguments, optimizer_class
from tlora_fx.runtime.optim import group_update, optimizer
from tlora_fx.runtime.optim.group_update import GroupUpdate
from tlora_fx.runtime.optim.optimizer import JobOptimizer

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
        make: Any = optimizer_class(job)
        made: torch.optim.Optimizer = make(groups, **optimizer_arguments(job), fused=True)
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
    """And so do jobs of another dtype than the first one's; the rest is updated at once."""
    plain, other, third = (parameters(place, torch.float32) for place in range(3))
    wide = parameters(3, torch.float64)
    optimizers = [JobOptimizer(job_with(), each, 9) for each in (plain, third, wide)]
    sgd = JobOptimizer(job_with(optim="sgd"), other, 9)

    update = GroupUpdate.of([sgd, *optimizers], [5, 3, 0, 1])
    assert update is not None
    assert update.places == [3, 0]
    assert update.optimizers == optimizers[:2]
    assert GroupUpdate.of([sgd], [0]) is None


class Part:
    """What one of two processes has of all jobs: a half of "long", and all of the rest.

    The first one counts everything that it has, the other its halves alone.
    """

    PLACES = (1, 2, 3, 4, 6)

    def __init__(self, side: int, jobs: list[Job], dtype: torch.dtype) -> None:
        self.rows = slice(4 * side, 4 * side + 4)
        self.params = [parameters(place, dtype) for place in range(len(jobs))]
        for params in self.params:
            params["long"] = nn.Parameter(params["long"][self.rows].detach().clone())
            params["long"].grad = torch.zeros_like(params["long"])
        halves = {id(params["long"]) for params in self.params}
        self.optimizers = [
            JobOptimizer(job, params, 9) for job, params in zip(jobs, self.params, strict=True)
        ]
        made = GroupUpdate.of(
            self.optimizers, self.PLACES, lambda param: side == 0 or id(param) in halves
        )
        assert made is not None
        self.update = made

    def take(self, whole: list[dict[str, nn.Parameter]]) -> Tensor:
        """Take over gradients; the squares of those that count here."""
        for mine, params in zip(self.params, whole, strict=True):
            for name, param in params.items():
                assert param.grad is not None
                given = param.grad[self.rows] if name == "long" else param.grad
                mine[name].grad.copy_(given)  # type: ignore[union-attr]
        squares = torch.zeros(7, dtype=torch.float64)
        self.update.measure(squares)
        return squares

    def step(self, squares: Tensor) -> list[float]:
        """Update by the squares of both; norms."""
        outcomes = self.update.launch(torch.ones(7), squares).read()
        for each in self.optimizers:
            each.noted()
        return [outcome.norm for outcome in outcomes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_jobs_are_updated_as_whole_ones(dtype):
    """Squares are measured on each process, without what another one counts, and added up."""
    jobs = [job_with(**fields) for fields in JOBS.values()]
    whole = [parameters(place, dtype) for place in range(len(jobs))]
    alone = [JobOptimizer(job, params, 9) for job, params in zip(jobs, whole, strict=True)]
    parts = [Part(side, jobs, dtype) for side in (0, 1)]

    for step in range(3):
        for place, params in enumerate(whole):
            torch.manual_seed(place)
            give(params, step)
        first, second = (part.take(whole) for part in parts)
        norms = [each.step() for each in alone]
        for part in parts:
            assert part.step(first + second) == pytest.approx(norms, rel=1e-6)
        assert not first[[0, 5]].any()
        assert not second[[0, 5]].any()

    bound = 1e-6 if dtype == torch.float32 else 1e-13
    for params, one, other in zip(whole, parts[0].params, parts[1].params, strict=True):
        long = nn.Parameter(torch.cat([one["long"], other["long"]]))
        assert_equal({**one, "long": long}, {**params}, bound)
        assert_equal({**other, "long": long}, {**params}, bound)
