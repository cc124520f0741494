"""The example of GRPO: rewards rise in both jobs, and each is what it would be alone."""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path

import pytest
import torch

from tests.sampled import sampled

PATH = Path(__file__).parents[2] / "examples" / "grpo" / "grpo.py"
STEPS = 14


@pytest.fixture(scope="module")
def grpo():
    """The example's names."""
    return runpy.run_path(str(PATH))


@pytest.fixture(scope="module")
def jobs(grpo, tmp_path_factory):
    return grpo["make_jobs"](grpo["make_base"](tmp_path_factory.mktemp("base"), "float64"), STEPS)


@pytest.fixture(scope="module")
def together(grpo, jobs):
    return grpo["train"](jobs, STEPS)


def test_it_has_at_most_150_lines():
    """Two jobs, from their base to their rewards."""
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 150


def test_rewards_rise_in_both_jobs(together, jobs):
    """The mean of the last three steps over the mean of the first three."""
    _, rewards = together

    for job in jobs:
        own = [each[job.name] for each in rewards]
        assert statistics.mean(own[-3:]) > 2 * statistics.mean(own[:3])


@pytest.mark.parametrize("index", sampled(range(2), 2))
def test_each_job_is_what_it_would_be_alone(grpo, together, jobs, index):
    """It draws the same answers, so it gets the same rewards, and has the same adapter."""
    (step, rewards), job = together, jobs[index]
    own, alone = grpo["train"]([job], STEPS)

    assert [each[job.name] for each in rewards] == [each[job.name] for each in alone]
    mine, theirs = (group.member(job.name).final_adapter() for group in (step, own))
    for key, each in theirs.items():
        torch.testing.assert_close(mine[key], each, rtol=0, atol=1e-7)


def test_a_reward_is_of_the_sum_and_of_its_end(grpo):
    """Half of it for the sum alone; an answer's advantage is relative to its group."""
    completion = grpo["Completion"]

    def reward(text):
        tokens = tuple(grpo["LETTERS"].index(letter) for letter in text)
        return grpo["reward"]((3, 4), completion((), tokens, (0.0,) * len(tokens), "stop"))

    assert [reward(text) for text in ("7.", "7", "77", "8.", ".", "")] == [1, 0.5, 0.5, 0, 0, 0]
    assert grpo["relative"]([1, 0]) == pytest.approx([1, -1], abs=1e-3)
    assert grpo["relative"]([1, 1]) == [0, 0]
