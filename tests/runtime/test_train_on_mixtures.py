"""A job on several data sets trains as on one file that holds their samples in its order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.groups import READING, losses_of, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.errors import ResumeMismatch
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.data.samples import JobData, load_job_data
from tlora_fx.runtime.data.tables import mixed_order
from tlora_fx.runtime.merge import job_of
from tlora_fx.runtime.run_folder import RunFolder
from tlora_fx.runtime.trainer import Trainer, TrainerCallback

#: Two data sets in one form, so that one file can hold both.
SETS = (
    [{"prompt": "1+" * n, "completion": "a"} for n in range(1, 8)],
    [{"prompt": "b" * n, "completion": "2="} for n in range(1, 6)],
)
WEIGHTS = (3, 1)


def write(path: Path, rows: list[Any]) -> dict[str, str]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"path": str(path)}


@pytest.fixture
def mixed(tmp_path: Path) -> Job:
    """A job on both data sets; its epoch has more steps than it is stopped after."""
    parts = [write(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(SETS)]
    data = [{**part, "weight": w} for part, w in zip(parts, WEIGHTS, strict=True)]
    job = make_job(
        tiny_base(tmp_path, **READING), "a", max_steps=4, seed=5, save_steps=1, shuffle=False
    )
    given = {key: getattr(job, key) for key in job.model_fields_set}
    return Job(**given | {"data": data, "mixing": "all_exhausted"})


def data_of(job: Job, make_tokenizer: Any) -> dict[str, JobData]:
    return {job.name: load_job_data(job, make_tokenizer())}


class StopAtTwo(TrainerCallback):
    """The user's Ctrl-C after two steps."""

    def stepped(self, report: Any) -> None:
        if report.step == 2:
            raise KeyboardInterrupt


def test_a_mixture_trains_as_one_file_of_its_samples(mixed, make_tokenizer, tmp_path):
    """Bit by bit, and by one digest."""
    order = mixed_order([len(rows) for rows in SETS], WEIGHTS, mixed.seed, mixed.mixing)
    rows = [SETS[which][at] for which, at in np.stack(order, axis=1).tolist()]
    file = write(tmp_path / "both.jsonl", rows)
    one = Job(**{key: getattr(mixed, key) for key in mixed.model_fields_set - {"mixing"}}
              | {"data": file})  # fmt: skip
    losses, digests = [], []
    for number, job in enumerate((mixed, one)):
        data = data_of(job, make_tokenizer)
        Trainer(compile([job]), output=tmp_path / f"{number}", device="cpu", data=data).run()
        losses.append(losses_of(tmp_path / f"{number}", [job])["a"])
        digests.append(data["a"].digest)

    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_mixture_goes_on_within_its_epoch(mixed, make_tokenizer, tmp_path, shuffle):
    """With the samples and the losses of a run that nobody stopped."""
    job = mixed.model_copy(update={"shuffle": shuffle})

    def train(folder: str, **options: Any) -> None:
        data = data_of(job, make_tokenizer)
        assert data["a"].steps_per_epoch > 4
        options = {"output": tmp_path / folder, "device": "cpu", "data": data} | options
        Trainer(compile([job]), **options).run()

    train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("cut", callback=StopAtTwo())
    assert CheckpointStore(tmp_path / "cut").load().jobs["a"].step in (1, 2)
    train("cut", resume=True)

    whole, cut = (losses_of(tmp_path / name, [job])["a"] for name in ("whole", "cut"))
    assert cut == whole


def test_other_weights_are_other_data(mixed, make_tokenizer, tmp_path):
    """A resume names them as what may have changed; other paths of the same samples go on."""

    def trainer(job: Job, **options: Any) -> Trainer:
        data = data_of(job, make_tokenizer)
        return Trainer(compile([job]), output=tmp_path / "run", device="cpu", data=data, **options)

    first, second = mixed.data.parts
    moved = write(tmp_path / "moved.jsonl", SETS[1]) | {"weight": 1}
    given = {key: getattr(mixed, key) for key in mixed.model_fields_set}
    lighter = Job(**given | {"data": [first, second.model_copy(update={"weight": 9.0})]})
    elsewhere = Job(**given | {"data": [first, moved]})
    stopped = trainer(mixed, callback=StopAtTwo())
    with pytest.raises(KeyboardInterrupt):
        stopped.run()

    resumed = trainer(lighter, resume=True)
    with pytest.raises(ResumeMismatch, match=r"other samples: .*weights"):
        resumed.run()
    [run] = trainer(elsewhere, resume=True).run()
    assert run.step == 4


def test_the_folder_of_a_mixture_names_each_data_set(mixed, make_tokenizer, tmp_path):
    """The job with each format that was found, and the card with each file by its name."""
    Trainer(
        compile([mixed]), output=tmp_path / "run", device="cpu", data=data_of(mixed, make_tokenizer)
    ).run()
    folder = RunFolder(tmp_path / "run").job("a")
    saved = job_of(folder)

    assert [part.path for part in saved.data.parts] == [part.path for part in mixed.data.parts]
    assert [part.format for part in saved.data.parts] == ["prompt-completion"] * 2
    assert "0.jsonl, 1.jsonl" in (folder / "README.md").read_text()
