"""Rounds whose end nobody waits for: what `Trainer` promises holds there too.

Kernels are on GPUs alone; here torch does what they do, and the trainer looks at it a round later.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tests.runtime.test_isolation import (  # noqa: F401
    PARTS,
    Break,
    ended_after,
    jobs_of,
    test_a_disk_that_is_full_for_all_ends_the_run,
)
from tests.runtime.test_isolation import test_a_broken_part_ends_its_job_and_no_other as broken
from tests.runtime.test_trainer import (  # noqa: F401
    test_a_nan_stops_its_job_and_leaves_the_neighbours_alone,
    test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on_bitwise,
)
from tests.runtime.update_by_torch import updates_on_the_cpu
from tlora_fx.compiler import compile
from tlora_fx.errors import MetricsError
from tlora_fx.runtime.optim import group_update
from tlora_fx.runtime.optim.group_update import GroupUpdate, PendingOutcomes
from tlora_fx.runtime.run_folder import MetricsLog
from tlora_fx.runtime.trainer import Trainer, TrainerCallback


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def launched():
    """How many jobs were updated at once, an entry a round."""
    with updates_on_the_cpu() as launched:
        yield launched


def train(jobs, folder, callback=None):
    model = compile(jobs)
    trainer = Trainer(model, output=folder, device="cpu", data=make_data(jobs), callback=callback)
    if callback is not None:
        callback.trainer = trainer
    trainer.run()
    return model


class Order(TrainerCallback):
    """When steps were launched, and when they were reported."""

    def __init__(self):
        self.seen, self.runs = [], []

    def started(self, runs):
        self.runs = runs

    def stepped(self, report):
        run = next(run for run in self.runs if run.job.name == report.job)
        self.seen.append((report.job, report.step, run.step))


def test_steps_are_looked_at_a_round_later_but_where_something_follows(base, tmp_path, launched):
    """Reports are complete and in order; each job's adapter is what torch.optim makes of it."""
    jobs = [
        make_job(base, "a", max_steps=6, save_steps=100),
        make_job(base, "b", max_steps=4, save_steps=3, max_grad_norm=0.01, weight_decay=0.1),
    ]
    order = Order()
    model = train(jobs, tmp_path / "together", order)

    assert launched == [2, 2, 2, 2, 1, 1]
    assert [seen[1] for seen in order.seen if seen[0] == "a"] == [1, 2, 3, 4, 5, 6]
    # Step 3 saves a checkpoint and step 4 ends a job, so nothing is left open there.
    assert [seen[2] - seen[1] for seen in order.seen if seen[0] == "a"] == [1, 1, 0, 0, 1, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupUpdate, "of", staticmethod(lambda *_, **__: None))
        expected = train(jobs, tmp_path / "each")
    for job in jobs:
        theirs = expected.job_parameters(job.name)
        for name, param in model.job_parameters(job.name).items():
            torch.testing.assert_close(param, theirs[name], rtol=1e-12, atol=1e-12)
    found, wanted = losses_of(tmp_path / "together", jobs), losses_of(tmp_path / "each", jobs)
    assert found["a"] + found["b"] == pytest.approx(wanted["a"] + wanted["b"], rel=1e-9)


class Late:
    """The event of a round that ends when it was asked for so often."""

    def __init__(self, turns):
        self.turns = turns

    def query(self):
        self.turns -= 1
        return self.turns < 0

    def synchronize(self):
        assert self.turns < 0, "the host slept though it had something to do"


@pytest.mark.parametrize("turns", [0, 1, 7])
def test_orders_and_checkpoints_are_looked_at_while_a_round_is_waited_for(
    base, tmp_path, monkeypatch, turns
):
    """Once a turn for as long as the round runs; a job that is asked to leave then does so."""
    jobs = [make_job(base, name, max_steps=5) for name in "ab"]
    plain = PendingOutcomes.__init__

    def pending(self, facts):
        plain(self, facts)
        self._event = Late(turns)

    monkeypatch.setattr(PendingOutcomes, "__init__", pending)
    monkeypatch.setattr(group_update, "TURN_SECONDS", 0)
    trainer = Trainer(compile(jobs), output=tmp_path, device="cpu", data=make_data(jobs))
    asked, looked, look = [], [], trainer.commits.look

    def looks():
        asked.append(trainer.rounds)
        if len(asked) == 1:
            trainer.release("b")

    monkeypatch.setattr(trainer.commits, "look", lambda: (looked.append(1), look())[1])
    trainer.looks = looks
    trainer.run()

    assert len(asked) == turns * 5
    # At each round's start too, and where one changes who trains instead.
    assert len(looked) == len(asked) + (6 if turns else 5)
    # The first round is waited for when the second is on its way.
    assert {run.job.name: run.step for run in trainer.runs} == {"a": 5, "b": 2 if turns else 5}


def test_jobs_with_another_optimizer_do_their_own_step_and_others_theirs_at_once(
    base, tmp_path, launched
):
    """All are looked at in their round, as long as such a job trains; each trains as alone."""
    jobs = [
        make_job(base, "a", max_steps=4),
        make_job(base, "b", max_steps=2, optim="sgd", max_grad_norm=0.01),
        make_job(base, "c", max_steps=3, weight_decay=0.1),
    ]
    order = Order()
    model = train(jobs, tmp_path / "together", order)

    assert launched == [2, 2, 2, 1]
    assert [run - step for job, step, run in order.seen if job == "a"] == [0, 0, 0, 0]
    assert [seen[1] for seen in order.seen if seen[0] == "b"] == [1, 2]
    for job in jobs:
        alone = train([job], tmp_path / job.name).job_parameters(job.name)
        for name, param in model.job_parameters(job.name).items():
            torch.testing.assert_close(param, alone[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("part", sorted(PARTS.keys() - {"optimizer"}))
def test_a_broken_part_ends_its_job_and_no_other(base, ended_after, tmp_path, part):  # noqa: F811
    """As where each job's optimizer does its own step, which here none does."""
    broken(base, ended_after, tmp_path, part)


def test_a_full_disk_at_a_jobs_last_step_is_told_of_and_ends_nothing(base, tmp_path):
    """It has done all its steps: only the line is missing."""
    jobs, broken_one = jobs_of(base, steps=3), Break("")
    warnings, plain = broken_one.warnings, MetricsLog.append

    def full(log, **line):
        if line["step"] == 3 and log.path.parent.name == "a":
            raise MetricsError("a metrics file could not be written", reason="disk full")
        plain(log, **line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLog, "append", full)
        train(jobs, tmp_path / "run", broken_one)

    assert {run.status for run in broken_one.runs.values()} == {"done"}
    assert [text for text in warnings if "disk full" in text]
    assert [len(losses) for losses in losses_of(tmp_path / "run", jobs).values()] == [2, 5, 5]
    assert (tmp_path / "run" / "a" / "adapter_model.safetensors").exists()


def test_a_full_disk_costs_lines_of_metrics_and_no_step(base, ended_after, tmp_path):  # noqa: F811
    """The job goes on from its last step where the run is resumed."""
    jobs, broken_one = jobs_of(base), Break("metrics")
    train(jobs, tmp_path / "run", broken_one)
    # The line of step 1 is written when the job is at step 2.
    assert broken_one.runs["a"].reason.startswith("step 1: ")
    healthy, folder = ended_after(5)
    model = compile(jobs)
    Trainer(model, output=tmp_path / "run", device="cpu", data=make_data(jobs), resume=True).run()

    for job in jobs:
        theirs = healthy.job_parameters(job.name)
        for name, param in model.job_parameters(job.name).items():
            torch.testing.assert_close(param, theirs[name], rtol=1e-12, atol=1e-12)
    lines, every = (losses_of(at, jobs)["a"] for at in (tmp_path / "run", folder))
    assert 3 <= len(lines) < len(every)
    assert set(lines) <= set(every)
