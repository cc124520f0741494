"""What goes wrong in one job ends that job, with its reason; its neighbours' bits stay."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.errors import MetricsError, OutOfMemory
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.trainer import Trainer, TrainerCallback


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


def jobs_of(base, steps=5, names="abc"):
    """The first job does some steps, its neighbours five."""
    return [
        make_job(base, name, seed=seed, max_steps=steps if name == "a" else 5, save_steps=2)
        for seed, name in enumerate(names)
    ]


def failing(plain, error, when):
    """A function that raises where `when` says so."""

    def instead(*words, **named):
        if when(*words, **named):
            raise error
        return plain(*words, **named)

    return instead


class Break(TrainerCallback):
    """Lets one part of job 'a' fail at its third step."""

    def __init__(self, part):
        self.part, self.trainer, self.warnings, self.runs = part, None, [], {}

    def started(self, runs):
        self.runs = {run.job.name: run for run in runs}
        sick = self.runs["a"]
        third = {"when": lambda *words, **named: sick.step == 2}
        wrong = ValueError("this part is broken")
        if self.part == "optimizer":
            sick.optimizer.step = failing(sick.optimizer.step, wrong, **third)
        elif self.part == "schedule":
            schedule = sick.optimizer._schedule
            schedule.step = failing(schedule.step, wrong, **third)
        elif self.part == "metrics":
            full = MetricsError("a metrics file could not be written", reason="disk full")
            sick.metrics.append = failing(sick.metrics.append, full, **third)
        elif self.part == "data":
            sick.batches = failing(sick.batches, wrong, **third)
        elif self.part == "adapter":
            sick.write = failing(sick.write, PermissionError("read-only"), lambda *words: True)
        elif self.part in ("forward", "memory"):
            error = (
                wrong if self.part == "forward" else torch.OutOfMemoryError("CUDA out of memory")
            )
            runner = self.trainer.group.runner
            runner.run = failing(runner.run, error, lambda rows, _: sick.step == 2 and has(rows, 0))

    def stepped(self, report):
        if self.part == "callback" and (report.job, report.step) == ("a", 3):
            raise ValueError("this part is broken")

    def warned(self, text):
        self.warnings.append(text)


def has(rows, job):
    """Whether a job has targets in these rows."""
    ends = [row.target_segments.tolist() for row in rows]
    return any(each[job + 1] > each[job] for each in ends)


def train(jobs, folder, callback=None, **options):
    model = compile(jobs)
    trainer = Trainer(
        model, output=folder, device="cpu", data=make_data(jobs), callback=callback, **options
    )
    if callback is not None:
        callback.trainer = trainer
    runs = {run.job.name: run for run in trainer.run()}
    return model, runs


#: Part of the job, the rounds that it still takes part in, and what its reason says.
PARTS = {
    "optimizer": (3, "ValueError: this part is broken"),
    "schedule": (3, "ValueError: this part is broken"),
    "metrics": (3, "disk full"),
    "callback": (3, "ValueError: this part is broken"),
    "data": (2, "ValueError: this part is broken"),
    "forward": (2, "ValueError: this part is broken"),
    "memory": (2, "OutOfMemoryError: CUDA out of memory"),
    "adapter": (5, "PermissionError: read-only"),
}


@pytest.fixture(scope="module")
def ended_after(base, tmp_path_factory):
    """The model and folder of a run whose first job ends by itself after some rounds."""

    @cache
    def train_so_far(rounds):
        folder = tmp_path_factory.mktemp("without")
        return train(jobs_of(base, steps=rounds), folder)[0], folder

    return train_so_far


@pytest.mark.parametrize("part", PARTS)
def test_a_broken_part_ends_its_job_and_no_other(base, ended_after, tmp_path, part):
    """The neighbours are bitwise as where the job ended there by itself."""
    rounds, reason = PARTS[part]
    without, folder = ended_after(rounds)
    jobs = jobs_of(base)
    model, runs = train(jobs, tmp_path / "sick", Break(part))

    assert runs["a"].status == "failed"
    assert reason in runs["a"].reason
    neighbours = jobs[1:]
    assert losses_of(tmp_path / "sick", neighbours) == losses_of(folder, neighbours)
    for name in "bc":
        assert runs[name].status == "done"
        one, two = (adapter_tensors(each.job_parameters(name)) for each in (without, model))
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("part", ["metrics", "callback", "adapter"])
def test_what_is_no_fault_of_the_job_is_made_good_by_resuming(base, ended_after, tmp_path, part):
    """A disk that is full for one file costs no night of training."""
    jobs = jobs_of(base)
    train(jobs, tmp_path / "run", Break(part))
    _, runs = train(jobs, tmp_path / "run", resume=True)

    assert runs["a"].status == "done"
    one, two = (losses_of(at, jobs)["a"] for at in (tmp_path / "run", ended_after(5)[1]))
    assert one == pytest.approx(two, rel=1e-12)
    assert (tmp_path / "run" / "a" / "adapter_model.safetensors").exists()


def test_a_job_that_failed_by_itself_stays_failed(base, tmp_path):
    """Its reason is in the checkpoint."""
    train(jobs_of(base), tmp_path / "run", Break("optimizer"))

    state = CheckpointStore(tmp_path / "run").load().jobs["a"]
    assert (state.status, state.step) == ("failed", 2)
    assert "step 3: ValueError" in state.reason


def test_a_disk_that_is_full_for_all_ends_the_run(base, tmp_path):
    """No job is to blame: the run goes on from its checkpoint once there is room."""
    jobs = jobs_of(base, names="a")

    with pytest.raises(MetricsError):
        train(jobs, tmp_path / "run", Break("metrics"))
    _, runs = train(jobs, tmp_path / "run", resume=True)
    assert runs["a"].status == "done"


class Small(TrainerCallback):
    """A device with room for so many tokens at once."""

    def __init__(self, tokens):
        self.tokens, self.trainer, self.warnings = tokens, None, []

    def started(self, runs):
        runner = self.trainer.group.runner
        runner.run = failing(
            runner.run, torch.OutOfMemoryError("CUDA out of memory"), lambda rows, _: any(
                row.input_ids.numel() > self.tokens for row in rows
            )
        )  # fmt: skip

    def warned(self, text):
        self.warnings.append(text)


def test_jobs_that_have_room_one_by_one_go_on_in_shorter_rows(base, ended_after, tmp_path):
    """Nobody is at fault; it is told once, and the results are the same."""
    jobs = jobs_of(base)
    small = Small(18)
    _, runs = train(jobs, tmp_path / "small", small)

    assert {run.status for run in runs.values()} == {"done"}
    assert [text for text in small.warnings if "no memory for the rows" in text]
    one, two = (losses_of(at, jobs) for at in (tmp_path / "small", ended_after(5)[1]))
    for job in jobs:
        assert one[job.name] == pytest.approx(two[job.name], rel=1e-9)


def test_a_device_without_room_for_any_job_is_told_as_such(base, tmp_path):
    """With the jobs' names and what helps."""
    with pytest.raises(OutOfMemory, match="max_length") as told:
        train(jobs_of(base), tmp_path / "run", Small(1))
    assert told.value.facts["job"] == "a, b, c"


def test_numbers_that_a_last_step_has_broken_are_no_finished_adapter(base, tmp_path):
    """There is no next step whose loss would show it."""

    class Poison(Break):
        def stepped(self, report):
            if (report.job, report.step) == ("a", 5):
                next(iter(self.runs["a"].parameters.values())).data.fill_(float("inf"))

    _, runs = train(jobs_of(base), tmp_path / "run", Poison("nothing"))

    assert runs["a"].status == "failed"
    assert "not finite" in runs["a"].reason
    assert {runs[name].status for name in "bc"} == {"done"}
