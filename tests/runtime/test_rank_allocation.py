"""AdaLoRA's ranks against PEFT's own model and torch.optim, step by step."""

from __future__ import annotations

from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn

from tests.runtime.test_optimizer import through_files
from tlora_fx.config.job import Job
from tlora_fx.runtime.optim.optimizer import JobOptimizer
from tlora_fx.runtime.optim.rank_allocation import regularise

STEPS = 12
LORA = {
    "peft_type": "ADALORA", "target_modules": ["a", "b"], "init_r": 4, "target_r": 2,
    "tinit": 2, "tfinal": 3, "deltaT": 2, "total_step": 10,
}  # fmt: skip


class Base(nn.Module):
    """Two linears, whose loss is what PEFT adds its regulariser to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x):
        """The mean square of what both do."""
        return SimpleNamespace(loss=self.b(self.a(x)).square().mean())


def wrapped(job):
    """What PEFT makes of a job, whose loss has the regulariser, and what it trains."""
    torch.manual_seed(0)
    config = job.lora_config()
    config.task_type = None
    model = peft.get_peft_model(Base(), config)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return model.base_model, trained


@pytest.fixture(scope="module")
def job():
    return Job(
        name="a", base={"model": "m"}, lora=LORA, data={"path": "x"}, optim="adamw",
        learning_rate=0.05, lr_scheduler_type="constant", max_grad_norm=0.1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_peft(job):
    """What PEFT and torch.optim alone leave."""
    model, params = wrapped(job)
    optimizer = torch.optim.AdamW(params.values(), lr=0.05, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(7, 6, generator=torch.Generator().manual_seed(step))).loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), 0.1)
        optimizer.step()
        model.update_and_allocate(step)
    return {name: each.detach().clone() for name, each in params.items()}


def train(job, model, params, optimizer, first, last):
    """Steps whose regulariser is ours."""
    model.peft_config["default"].orth_reg_weight = 0.0
    for step in range(first, last):
        model(torch.randn(7, 6, generator=torch.Generator().manual_seed(step))).loss.backward()
        regularise(job, params)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stop", [0, 1, 4, 7, 8, 11])
def test_ranks_move_as_peft_moves_them_wherever_a_run_stops(job, by_peft, stop, tmp_path):
    """Before the budget shrinks, between two cuts, at the last one and behind it."""
    model, params = wrapped(job)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer = JobOptimizer(job, params, STEPS)
    train(job, model, params, optimizer, 0, stop)
    tensors, values = through_files(optimizer, tmp_path)
    again = JobOptimizer(job, params, STEPS)
    again.load_state(tensors, values)

    train(job, model, params, again, stop, STEPS)

    assert any(bool((each == 0).any()) for name, each in params.items() if "lora_E" in name)
    for name, param in params.items():
        torch.testing.assert_close(param.detach(), by_peft[name])
        assert torch.equal(param == 0, by_peft[name] == 0)


def test_a_resumed_allocation_is_bitwise_that_of_one_run(job, tmp_path):
    """Through a checkpoint's files, all parameters and all of the optimizer's state."""
    ends = []
    for stop in (0, 5, 9):
        model, params = wrapped(job)
        for param in params.values():
            param.grad = torch.zeros_like(param)
        before = JobOptimizer(job, params, STEPS)
        train(job, model, params, before, 0, stop)
        after = JobOptimizer(job, params, STEPS)
        after.load_state(*through_files(before, tmp_path))
        train(job, model, params, after, stop, STEPS)
        ends.append({**{k: p.detach() for k, p in params.items()}, **after.state_tensors()})

    assert ends[0].keys() == ends[1].keys() == ends[2].keys()
    assert any(name.startswith("kept/") for name in ends[0])
    assert all(torch.equal(one, ends[1][name]) for name, one in ends[0].items())
    assert all(torch.equal(one, ends[2][name]) for name, one in ends[0].items())
