"""Rounds whose end nobody waits for: what `Trainer` promises holds there too.

Kernels are on GPUs alone (tests/ops/interpreted/test_adam.py compares theirs); here torch does what
they do, in the same place, and the trainer looks at it a round later.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tests.runtime.test_isolation import (  # noqa: F401
    PARTS,
    Break,
    jobs_of,
    test_a_disk_that_is_full_for_all_ends_the_run,
)
from tests.runtime.test_isolation import test_a_broken_part_ends_its_job_and_no_other as broken
from tests.runtime.test_trainer import (  # noqa: F401
    test_a_nan_stops_its_job_and_leaves_the_neighbours_alone,
    test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on_bitwise,
)
from tlora_fx.compiler import compile
from tlora_fx.runtime import group_update, optimizer
from tlora_fx.runtime.group_update import GroupUpdate, PendingOutcomes
from tlora_fx.runtime.trainer import Trainer, TrainerCallback

PLAIN = optimizer._make_optimizer


def fused(job, params):
    """A job's optimizer as on a GPU."""
    make = job.optimizer_class()
    if make.__name__ not in ("Adam", "AdamW"):
        return PLAIN(job, params)
    return make(params, **job.optimizer_arguments(), fused=True)


def by_torch(update, losses, given):
    """What the kernels do, by torch."""
    facts = []
    for place, state in enumerate(update.states):
        largest, rate, shrink, decay, beta1, rest1, beta2, rest2, epsilon, root = given[place]
        norm = torch.nn.utils.get_total_norm(state.gradients.tensors)
        loss = losses[update.places[place]]
        sound = bool(update._alive[place]) and bool(torch.isfinite(norm) & torch.isfinite(loss))
        update._alive[place] = int(sound)
        scale = min(float(largest / (norm + 1e-6)), 1.0) if largest else 1.0
        facts.append([float(loss), float(norm), float(sound), scale])
        gradients = state.gradients
        runs = zip(gradients.params, gradients.tensors, state.firsts, state.seconds, strict=True)
        for param, gradient, first, second in runs:
            if sound:
                moved = gradient * scale + param.detach() * decay
                first.mul_(beta1).add_(rest1 * moved)
                second.mul_(beta2).add_(rest2 * moved * moved)
                param.data.sub_(param.data * shrink)
                param.data.sub_(rate * first / (second.sqrt() / root + epsilon))
            gradient.zero_()
    return torch.tensor(facts, dtype=torch.float64)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def launched():
    """How many rounds were updated at once."""
    return []


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch, launched):
    def run(update, losses, given):
        launched.append(len(update.states))
        return by_torch(update, losses, given)

    monkeypatch.setattr(optimizer, "_make_optimizer", fused)
    monkeypatch.setattr(group_update, "KERNELS", frozenset({"cpu"}))
    monkeypatch.setattr(group_update, "_ALIGNED", 1)
    monkeypatch.setattr(GroupUpdate, "_run", run)


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
        patch.setattr(GroupUpdate, "of", staticmethod(lambda *_: None))
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


def test_a_group_with_another_optimizer_is_updated_job_by_job(base, tmp_path, launched):
    """As long as that job trains."""
    jobs = [
        make_job(base, "a", max_steps=4),
        make_job(base, "b", max_steps=2, optim="sgd"),
    ]
    train(jobs, tmp_path)

    assert launched == [1, 1]
    assert [len(losses) for losses in losses_of(tmp_path, jobs).values()] == [4, 2]


@pytest.mark.parametrize("part", sorted(PARTS.keys() - {"optimizer"}))
def test_a_broken_part_ends_its_job_and_no_other(base, tmp_path, part):
    """As where each job's optimizer does its own step, which here none does."""
    broken(base, tmp_path, part)


def test_a_full_disk_costs_lines_of_metrics_and_no_step(base, tmp_path):
    """The job goes on from its last step where the run is resumed."""
    jobs, broken_one = jobs_of(base), Break("metrics")
    train(jobs, tmp_path / "run", broken_one)
    # The line of step 1 is written when the job is at step 2.
    assert broken_one.runs["a"].reason.startswith("step 1: ")
    healthy = train(jobs, tmp_path / "healthy")
    model = compile(jobs)
    Trainer(model, output=tmp_path / "run", device="cpu", data=make_data(jobs), resume=True).run()

    for job in jobs:
        theirs = healthy.job_parameters(job.name)
        for name, param in model.job_parameters(job.name).items():
            torch.testing.assert_close(param, theirs[name], rtol=1e-12, atol=1e-12)
    lines, every = (losses_of(tmp_path / folder, jobs)["a"] for folder in ("run", "healthy"))
    assert 3 <= len(lines) < len(every)
    assert set(lines) <= set(every)
