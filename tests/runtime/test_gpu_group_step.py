"""A loop of one's own on a GPU, where kernels update all jobs at once."""

from __future__ import annotations

import math

import pytest
import torch

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def jobs(tmp_path):
    base = tiny_base(tmp_path / "base", dtype="float32", hidden_size=64, intermediate_size=128)
    fields = {"lora": {"r": 8, "lora_dropout": 0.1}, "max_steps": 6}
    jobs = [make_job(base, name, seed=seed, **fields) for seed, name in enumerate("ab")]
    return {job.name: job for job in jobs}


@pytest.fixture
def data(jobs):
    return make_data(list(jobs.values()))


def step(group, batches, rates=None):
    outputs = group.accumulate(batches)
    updates = group.apply({name: (rates or {}).get(name, {}) for name in batches})
    return {name: output.loss for name, output in outputs.items()}, updates


def test_a_loop_of_steps_is_what_the_trainer_does(jobs, data, tmp_path):
    """Losses of every step, with one update for all jobs."""
    run = tmp_path / "run"
    Trainer(compile(list(jobs.values())), output=run, device="cuda", data=data).run()
    group = GroupStep(compile(list(jobs.values())), device="cuda")

    losses = [step(group, {name: data[name].step(n) for name in jobs})[0] for n in range(6)]

    assert len(group.updater.split(list(group.members.values())).together) == 2
    expected = losses_of(run, list(jobs.values()))
    for name in jobs:
        assert [each[name] for each in losses] == pytest.approx(expected[name], rel=1e-5)


def test_a_step_that_failed_is_not_counted_and_the_next_one_is(jobs, data):
    """Kernels leave a job out whose gradients were not finite, for this step alone."""
    group, sound = (GroupStep(compile(list(jobs.values())), device="cuda") for _ in range(2))
    batches = {name: data[name].step(0) for name in jobs}
    group.accumulate(batches)
    for parameter in group.member("a").optimizer.trained.values():
        parameter.grad.fill_(math.nan)

    updates = group.apply({"a": {"lr": 0.5}, "b": {}})

    assert (updates["a"].updated, updates["a"].step) == (False, 0)
    assert (updates["b"].updated, updates["b"].step) == (True, 1)
    step(group, {"a": batches["a"]})
    step(sound, batches)
    for name in jobs:
        found, expected = (each.member(name).final_adapter() for each in (group, sound))
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=2e-6)


def test_a_rate_holds_for_one_step(jobs, data):
    """By the kernels that update all jobs, too."""
    group = GroupStep(compile(list(jobs.values())), device="cuda")
    step(group, {name: data[name].step(0) for name in jobs}, {"a": {"lr": 3e-3}})
    fields = {"learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    other = jobs["a"].model_copy(update=fields)
    alone = GroupStep(compile([other]), device="cuda")
    step(alone, {"a": data["a"].step(0)})

    found, expected = (each.member("a").final_adapter() for each in (group, alone))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=2e-6)
