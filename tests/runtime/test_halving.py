"""Jobs of a group are compared at rungs and the weak end early; each is what it is alone."""

from __future__ import annotations

import json
import math
import signal
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.api.bases import LORA, ROWS, loaded, save_base
from tlora_fx import Job, TrainerCallback, sweep, train
from tlora_fx.api.sweep import sweep_jobs
from tlora_fx.config.halving import HalvingSpec
from tlora_fx.errors import JobError
from tlora_fx.runtime.rounds.halving import FILE, Halving

#: Of which the second and the fourth are so small or so large that they learn nothing.
RATES = [1e-2, 1e-7, 5e-3, 3.0]
HALVING = {"min_steps": 2, "factor": 2}
LOSSES = st.lists(st.floats(allow_nan=False), min_size=1, max_size=12)


class Run:
    """As much of a job's run as is compared."""

    def __init__(self, index, halving, steps=100, group="g"):
        self.index, self.status, self.reason = index, "running", ""
        spec = halving.model_copy(update={"group": group})
        self.job = SimpleNamespace(name=f"job-{index}", halving=spec)
        self.evaluation = SimpleNamespace(rungs=spec.rungs(steps), rung_losses={})

    def halve(self, why):
        self.status, self.reason = "done", why


def runs_at(losses, halving, step=1):
    runs = [Run(index, halving) for index in range(len(losses))]
    for run, loss in zip(runs, losses, strict=True):
        run.evaluation.rung_losses[step] = loss
    return runs


def running(runs):
    return [run.index for run in runs if run.status == "running"]


def halving_in(folder):
    return Halving(folder, writes=True, warn=pytest.fail)


@given(LOSSES, st.integers(2, 5))
def test_the_best_go_on(tmp_path_factory, losses, factor):
    """One of `factor` jobs, rounded up; no job that ends is better than one that goes on."""
    runs = runs_at(losses, HalvingSpec(min_steps=1, factor=factor))
    halving_in(tmp_path_factory.mktemp("run")).judge(runs)

    left = running(runs)
    assert len(left) == math.ceil(len(losses) / factor)
    gone = [losses[run.index] for run in runs if run.status == "done"]
    assert all(losses[index] <= loss for index in left for loss in gone)


@given(LOSSES, LOSSES)
def test_a_decision_is_repeated(tmp_path_factory, losses, others):
    """Whatever is measured when the same jobs come to the same rung again."""
    folder, halving = tmp_path_factory.mktemp("run"), HalvingSpec(min_steps=1)
    first = runs_at(losses, halving)
    halving_in(folder).judge(first)

    again = runs_at((others * len(losses))[: len(losses)], halving)
    resumed = halving_in(folder)
    resumed.begin(resumed.read())
    resumed.judge(again)
    assert running(again) == running(first)


def test_nobody_ends_before_all_have_come(tmp_path):
    """A job that is behind is waited for; one that has failed is not; other groups are apart."""
    spec = HalvingSpec(min_steps=1, factor=2)
    runs = runs_at([1.0, 2.0, 3.0, 4.0], spec)
    del runs[0].evaluation.rung_losses[1]
    other = Run(4, spec, group="other")
    other.evaluation.rung_losses[1] = 9.0
    halving = halving_in(tmp_path)

    assert halving.judge([*runs, other]) == []
    assert len(running([*runs, other])) == 5
    runs[0].status = "failed"
    assert halving.judge([*runs, other]) == [
        "'g' at step 1: 2 of 3 jobs go on, the best is 'job-1'"
    ]
    assert running([*runs, other]) == [1, 2, 4]
    assert "eval_loss 4 at step 1 is not among the best 2 of 3 jobs" in runs[3].reason


def test_rungs_end_before_the_last_step():
    """Each has `factor` times the steps of the one before."""
    assert HalvingSpec(min_steps=2, factor=3).rungs(54) == [2, 6, 18]
    assert HalvingSpec(min_steps=2, factor=3).rungs(55) == [2, 6, 18, 54]
    assert HalvingSpec(min_steps=10).rungs(10) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "'halving' needs 'eval_data' or 'eval_split'"),
        ({"eval_split": 0.2, "eval_strategy": "no"}, "'eval_strategy' is no"),
    ],
)
def test_halving_needs_an_evaluation(fields, said):
    """It is told before anything is read."""
    job = Job("a", base="org/model", lora=8, data=ROWS, **fields)

    with pytest.raises(JobError, match=said):
        sweep_jobs(job, {"seed": [1, 2]}, halving=HALVING)


def test_decisions_that_cannot_be_read_are_told(tmp_path):
    """A run without any is told nothing."""
    told = []
    halving = Halving(tmp_path, writes=True, warn=told.append)
    assert (halving.read(), told) == ([], [])

    (tmp_path / FILE).write_text('{"group": "a"}\n{')
    assert halving.read() == []
    assert "the jobs are compared anew" in told[0]
    (tmp_path / FILE).write_text('{"group": "a"}\n[1]\n')
    assert halving.read() == [{"group": "a"}]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    base = loaded(save_base(tmp_path_factory.mktemp("base")))
    return Job(
        "a", base=base, lora=LORA, data=ROWS, eval_split=0.2, max_steps=6,
        lr_scheduler_type="constant", max_grad_norm=None, num_train_epochs=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def swept(job, tmp_path_factory):
    """Four jobs, of which two go on after two steps, and one after four."""
    folder = tmp_path_factory.mktemp("swept") / "run"
    return sweep(
        job, {"learning_rate": RATES}, halving=HALVING,
        output=folder, device="cpu", verbose=False,
    )  # fmt: skip


def adapter_of(result):
    return safetensors.torch.load_file(result.adapter / "adapter_model.safetensors")


def told(result):
    """Losses and evaluations, without times."""
    return result.losses, [
        {name: value for name, value in each.items() if name != "eval_runtime"}
        for each in result.evaluations
    ]


def test_weak_jobs_end_at_the_rungs(swept):
    """The reason stands in the table, the decisions in the run's folder."""
    steps = [result.steps for result in swept.values()]
    assert sorted(steps) == [2, 2, 4, 6]
    assert all(result.status == "done" for result in swept.values())
    ended = [row for row in swept.rows() if row["steps"] < 6]
    assert all(row["reason"].startswith("ended by halving: eval_loss ") for row in ended)
    records = [json.loads(line) for line in (swept.folder / FILE).read_text().splitlines()]
    assert [(each["step"], len(each["kept"]), len(each["ended"])) for each in records] == [
        (2, 2, 2),
        (4, 1, 1),
    ]


def test_each_job_is_what_it_is_alone(job, swept, tmp_path):
    """The one that survives to its end, the others as far as they came, but for rounding."""
    for each in sweep_jobs(job, {"learning_rate": RATES}, halving=HALVING):
        result = swept[each.name]
        given = {name: getattr(each, name) for name in each.model_fields_set}
        alone = Job(**given | {"max_steps": result.steps})
        solo = train(alone, output=tmp_path / each.name, device="cpu", verbose=False)[each.name]

        assert solo.losses == pytest.approx(result.losses, rel=1e-12)
        evaluated = [[row["eval_loss"] for row in one.evaluations] for one in (solo, result)]
        assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-12)
        torch.testing.assert_close(adapter_of(solo), adapter_of(result), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_is_the_run_that_never_stopped(job, swept, stop, tmp_path):
    """Stopped before the first rung, or between two."""

    class Stops(TrainerCallback):
        def stepped(self, report):
            if report.step == stop:
                signal.raise_signal(signal.SIGINT)

    jobs = sweep_jobs(job, {"learning_rate": RATES}, halving=HALVING)
    run = {"output": tmp_path / "run", "device": "cpu", "verbose": False}
    with pytest.raises(KeyboardInterrupt):
        train(jobs, **run, callbacks=[Stops()])

    resumed = train(jobs, **run, resume=True)
    assert [told(result) for result in resumed.values()] == [told(x) for x in swept.values()]
    assert [x.reason for x in resumed.values()] == [x.reason for x in swept.values()]
    assert (tmp_path / "run" / FILE).read_bytes() == (swept.folder / FILE).read_bytes()
