"""What the start of a run took stands in its folder, and in its jobs' first lines of metrics."""

from __future__ import annotations

import json

import pytest

from tests.runtime.groups import make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.host import phases
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer


class Listen(TrainerCallback):
    """Keeps the reports of steps, and warnings."""

    def __init__(self):
        self.reports, self.texts = [], []

    def stepped(self, report):
        self.reports.append(report)

    def warned(self, text):
        self.texts.append(text)


@pytest.fixture(autouse=True)
def short_phases_too(monkeypatch):
    """A phase is recorded however fast the machine is."""
    monkeypatch.setattr(phases, "RECORDED_SECONDS", 0.0)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    base = tiny_base(tmp_path_factory.mktemp("base"))
    return [make_job(base, "a", max_steps=3), make_job(base, "b", max_steps=2)]


def trained(jobs, folder, **options):
    """What a callback heard of a run."""
    listen = Listen()
    data = make_data(jobs)
    Trainer(compile(jobs), output=folder, device="cpu", data=data, callback=listen, **options).run()
    return listen


def test_a_run_says_what_its_start_took(jobs, tmp_path):
    """In start.json, and in the line of each job's first step alone."""
    trained(jobs, tmp_path)

    start = json.loads((tmp_path / "start.json").read_text())
    assert {"weights", "first step"} <= set(start["phases"])
    assert {each["phase"] for each in start["timeline"]} == set(start["phases"])
    for name in "ab":
        first, *others = read_metrics(tmp_path / name / "metrics.jsonl")
        assert (first["start_seconds"], first["phases"]) == (start["seconds"], start["phases"])
        assert not any("phases" in row or "start_seconds" in row for row in others)
    assert phases.current() is None


def test_every_step_has_the_tokens_a_second_of_its_job_and_of_its_round(jobs, tmp_path):
    """A round's are those of all jobs that step in it."""
    listen = trained(jobs, tmp_path)

    rows = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in "ab"}
    for a, b in zip(rows["a"], rows["b"], strict=False):
        tokens = sum(row["tokens_per_second"] * row["seconds"] for row in (a, b))
        assert tokens == pytest.approx(a["round_tokens_per_second"] * a["seconds"])
    for name in "ab":
        tokens = [0, *(row["tokens"] for row in rows[name])]
        for before, row in zip(tokens, rows[name], strict=False):
            rate = (row["tokens"] - before) / row["seconds"]
            assert row["tokens_per_second"] == pytest.approx(rate)
    assert [report.round.number for report in listen.reports] == [1, 1, 2, 2, 3]
    assert "rows" not in rows["a"][0]


def test_jobs_whose_optimizers_step_one_by_one_say_so_too(jobs, tmp_path):
    """Their steps are not launched together."""
    own = [job.model_copy(update={"optim": "adafactor"}) for job in jobs]
    trained(own, tmp_path)

    start = json.loads((tmp_path / "start.json").read_text())
    for name in "ab":
        first, *_ = read_metrics(tmp_path / name / "metrics.jsonl")
        assert first["phases"] == start["phases"]
        assert first["tokens_per_second"] > 0


def test_a_start_that_was_begun_before_the_trainer_is_gone_on_with(jobs, tmp_path):
    """What the command line did first is part of it."""
    phases.begin()
    with phases.phase("data"):
        json.dumps([0] * 100_000)
    trained(jobs, tmp_path)

    assert "data" in json.loads((tmp_path / "start.json").read_text())["phases"]


def test_a_start_that_cannot_be_written_costs_a_warning(jobs, tmp_path, monkeypatch):
    """The run goes on."""

    def refuse(self, start):
        raise OSError("no space")

    monkeypatch.setattr("tlora_fx.runtime.run_folder.RunFolder.write_start", refuse)
    listen = trained(jobs, tmp_path)

    assert listen.texts == ["what the start took could not be written: no space"]
    assert len(listen.reports) == 5
