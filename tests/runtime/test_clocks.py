"""A chat template that prints the date is told that of the job's first start."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.runtime.conftest import MakeTokenizer
from tests.runtime.groups import READING, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.config.job import DataSpec, Job
from tlora_fx.runtime import clocks
from tlora_fx.runtime.checkpoints.store import CheckpointStore, ResumeSources
from tlora_fx.runtime.checks import load_all_data
from tlora_fx.runtime.clocks import JobClocks
from tlora_fx.runtime.trainer import Trainer

DATED = (
    "{{ 'on day ' + strftime_now('%d') + ' ' }}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAID = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]

SetDay = Callable[[int], None]


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> SetDay:
    """Sets the day of the month."""

    def set_day(number: int) -> None:
        class Stopped(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime(2026, 3, number, tzinfo=UTC)

        monkeypatch.setattr(clocks, "datetime", Stopped)

    return set_day


@pytest.fixture
def job_of(tmp_path: Path, make_tokenizer: MakeTokenizer) -> Callable[..., Job]:
    """Jobs on a base whose chat template prints the day."""
    base = tiny_base(tmp_path / "base", **READING)
    make_tokenizer(DATED).save_pretrained(tmp_path / "base")
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": SAID}) + "\n")

    def make(**fields: object) -> Job:
        job = make_job(base, "a", **{"max_steps": 2, "lr_scheduler_type": "constant", **fields})
        return job.model_copy(update={"data": DataSpec(path=str(path))})

    return make


def text_of(trainer: Trainer) -> str:
    [run] = trainer.runs
    return run.data.tokenizer.decode(run.data.samples[0].input_ids).replace(" ", "")


def train(job: Job, folder: Path, **options: object) -> Trainer:
    trainer = Trainer(compile([job]), output=folder, device="cpu", **options)
    trainer.run()
    return trainer


def test_resume_on_another_day_goes_on(
    job_of: Callable[..., Job], day: SetDay, tmp_path: Path
) -> None:
    """The samples are those of the first start, and so is the run."""
    day(1)
    train(job_of(), tmp_path / "run")
    day(2)
    resumed = train(job_of(max_steps=4), tmp_path / "run", resume=True)

    assert "day01" in text_of(resumed)
    assert resumed.runs[0].step == 4


def test_a_job_of_a_longer_run_goes_on_on_another_day(
    job_of: Callable[..., Job], day: SetDay, tmp_path: Path
) -> None:
    """What `tlora-fx run` carries from one run's folder to the next."""
    day(1)
    train(job_of(), tmp_path / "first")
    day(2)
    sources = ResumeSources(tmp_path / "jobs", {"a": tmp_path / "first"})
    carried = train(job_of(max_steps=4), tmp_path / "second", resume=sources)

    assert "day01" in text_of(carried)
    kept = CheckpointStore(tmp_path / "second").run()["clocks"]["a"]
    assert datetime.fromisoformat(kept).day == 1


def test_a_job_that_starts_anew_is_told_its_own_day(
    job_of: Callable[..., Job], day: SetDay, tmp_path: Path
) -> None:
    """Only a job that goes on is told another."""
    for number in (1, 2):
        day(number)
        assert f"day0{number}" in text_of(train(job_of(), tmp_path / f"run-{number}"))


def test_a_template_that_does_not_ask_leaves_no_time(job_of: Callable[..., Job]) -> None:
    """Its checkpoints are as they were."""
    job = job_of()
    (Path(job.base.config) / "chat_template.jinja").write_text(
        DATED.replace("strftime_now('%d')", "'1'")
    )

    assert load_all_data([job], JobClocks())["a"].clock is None
