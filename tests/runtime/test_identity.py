"""Only the same run goes on: content decides, and what differs is named."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import transformers

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import ResumeMismatch, RunFolderError
from tlora_fx.host.version import __version__
from tlora_fx.runtime.checkpoints.store import CheckpointStore, ResumeSources
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer, TrainerCallback, TrainerOptions

ACCEPT = TrainerOptions(accept_changes=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama of files."""
    folder = tmp_path_factory.mktemp("base")
    config = transformers.LlamaConfig.from_pretrained(tiny_base(folder).config)
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).double().save_pretrained(folder)
    return BaseSpec(model=str(folder), dtype="float64")


class Notes(TrainerCallback):
    """Keeps what is said of a run."""

    def __init__(self):
        self.lines = []

    def noted(self, text):
        self.lines.append(text)


def train(jobs, folder, *, data=None, **options):
    """Train, and say what was noted."""
    notes = Notes()
    data = data or make_data(jobs)
    options = {"output": folder, "device": "cpu", "data": data, "callback": notes} | options
    runs = Trainer(compile(jobs), **options).run()
    return runs, notes.lines


def job_of(base, **fields):
    return make_job(base, "a", **{"max_steps": 4, "lr_scheduler_type": "constant"} | fields)


@pytest.fixture
def begun(base, tmp_path):
    """A run of two steps that may have four."""
    train([job_of(base, max_steps=2)], tmp_path / "run")
    return tmp_path / "run"


def other_data(jobs):
    """The same samples in another order."""
    data = make_data(jobs)
    return {name: replace(each, samples=each.samples[::-1]) for name, each in data.items()}


def test_other_samples_are_refused_by_name(base, begun):
    """The path and the number of samples are as they were."""
    jobs = [job_of(base)]

    with pytest.raises(ResumeMismatch, match=r"job 'a': data unused\.jsonl: other samples") as told:
        train(jobs, begun, data=other_data(jobs), resume=True)
    assert "--accept-changes" in str(told.value)
    assert CheckpointStore(begun).load().jobs["a"].step == 2


def test_other_samples_of_an_older_version_name_what_it_read_otherwise(base, begun):
    """A checkpoint of this version with the same difference does not."""
    jobs = [job_of(base)]
    with pytest.raises(ResumeMismatch) as told:
        train(jobs, begun, data=other_data(jobs), resume=True)
    assert "older version" not in str(told.value)

    store = CheckpointStore(begun)
    checkpoint = store.load()
    assert checkpoint.run.pop("version") == __version__
    store.save(2, checkpoint.jobs, checkpoint.run)
    with pytest.raises(ResumeMismatch, match=r"Since 0\.2\.0 some data has other tokens") as told:
        train(jobs, begun, data=other_data(jobs), resume=True)
    assert "--accept-changes" in told.value.help
    [run], _ = train(jobs, begun, data=other_data(jobs), resume=True, options=ACCEPT)
    assert run.step == 4


def test_an_older_version_is_no_cause_where_samples_are_the_same(base, begun):
    """Another learning rate is told as it is."""
    store = CheckpointStore(begun)
    checkpoint = store.load()
    del checkpoint.run["version"]
    store.save(2, checkpoint.jobs, checkpoint.run)

    with pytest.raises(ResumeMismatch) as told:
        train([job_of(base, learning_rate=0.5)], begun, resume=True)
    assert "older version" not in str(told.value)


def test_other_samples_are_taken_when_asked_for(base, begun):
    """It goes on from where it was, and says what it took."""
    jobs = [job_of(base)]
    [run], notes = train(jobs, begun, data=other_data(jobs), resume=True, options=ACCEPT)

    assert run.step == 4
    assert any("other samples" in line for line in notes)


def test_a_moved_file_of_the_same_samples_goes_on(base, begun):
    """The new path is told, with the step that it goes on from."""
    fields = job_of(base).model_dump() | {"data": {"path": "moved.jsonl"}, "base": base}
    jobs = [type(job_of(base))(**fields)]
    [run], notes = train(jobs, begun, data=make_data(jobs), resume=True)

    assert run.step == 4
    assert "moved.jsonl (was unused.jsonl): the same samples" in "\n".join(notes)
    assert "steps done: a 2 of 4" in "\n".join(notes)


def test_another_base_of_the_same_size_is_refused_by_its_tensor(base, begun):
    """The same file name, the same shapes, other values of one tensor."""
    path = Path(base.model) / "model.safetensors"
    before = path.read_bytes()
    tensors = safetensors.torch.load(before)
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.5
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})

    try:
        with pytest.raises(ResumeMismatch, match=r"1 of \d+ tensors .*layers.1.mlp.up_proj.weight"):
            train([job_of(base)], begun, resume=True)
    finally:
        path.write_bytes(before)


def test_a_base_that_was_moved_goes_on(base, begun, tmp_path):
    """The same tensors under another path."""
    moved = BaseSpec(model=shutil.copytree(base.model, tmp_path / "moved"), dtype="float64")
    [run], _ = train([job_of(moved)], begun, resume=True)

    assert run.step == 4


@pytest.mark.parametrize(("schedule", "allowed"), [("constant", True), ("linear", False)])
def test_more_steps_go_on_where_the_rates_so_far_stay(base, tmp_path, schedule, allowed):
    """A linear schedule over more steps would have begun otherwise."""
    train([job_of(base, max_steps=2, lr_scheduler_type=schedule)], tmp_path / "run")
    longer = [job_of(base, max_steps=6, lr_scheduler_type=schedule)]

    if allowed:
        [run], notes = train(longer, tmp_path / "run", resume=True)
        assert run.step == 6
        assert "the steps were 2, are 6" in "\n".join(notes)
    else:
        with pytest.raises(ResumeMismatch, match="'linear' would have had other rates"):
            train(longer, tmp_path / "run", resume=True)


def test_each_difference_of_a_job_is_a_line_of_its_own(base, begun):
    """No mapping is printed."""
    jobs = [job_of(base, learning_rate=0.5, lora={"lora_alpha": 9}, save_steps=7)]

    with pytest.raises(ResumeMismatch) as told:
        train(jobs, begun, resume=True)
    text = str(told.value)
    assert "job 'a': learning_rate was 0.01, is 0.5" in text
    assert "job 'a': lora.lora_alpha was unset, is 9" in text
    assert "save_steps" not in text
    assert "{" not in text


def test_a_run_goes_on_with_the_learning_rate_that_it_accepts(base, begun):
    """The rates of the remaining steps are the job's, not the checkpoint's."""
    _, notes = train([job_of(base, learning_rate=0.5)], begun, resume=True, options=ACCEPT)

    assert "learning_rate was 0.01, is 0.5" in "\n".join(notes)
    rows = read_metrics(begun / "a" / "metrics.jsonl")
    assert [row["learning_rate"] for row in rows] == [0.01, 0.01, 0.5, 0.5]


def test_a_change_that_no_state_fits_is_refused_even_when_asked_for(base, begun):
    """Another optimizer has other moments."""
    with pytest.raises(ResumeMismatch, match="optim was adamw, is sgd"):
        train([job_of(base, optim="sgd")], begun, resume=True, options=ACCEPT)


def test_a_folder_of_something_else_is_no_run_to_go_on_with(base, tmp_path):
    """Nothing is trained beside what is there."""
    (tmp_path / "kept.txt").write_text("mine")

    with pytest.raises(RunFolderError, match="holds no run of these jobs"):
        train([job_of(base)], tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "kept.txt"]


def test_a_run_without_a_checkpoint_goes_on_for_its_own_jobs_alone(base, tmp_path):
    """It was killed before the first one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"jobs": ["a"]}))

    with pytest.raises(RunFolderError, match="a run of a"):
        train([make_job(base, "b")], tmp_path / "run", resume=True)
    [run], _ = train([job_of(base)], tmp_path / "run", resume=True)
    assert run.step == 4


def test_a_finished_run_is_told_to_have_ended(base, begun):
    """No second checkpoint, the loss of its last step, and its adapter is there again."""
    (begun / "a" / "adapter_model.safetensors").unlink()
    before = sorted((begun / "checkpoints").iterdir())
    jobs = [job_of(base, max_steps=2)]
    [run], notes = train(jobs, begun, resume=True)

    assert sorted((begun / "checkpoints").iterdir()) == before
    assert run.loss == losses_of(begun, jobs)["a"][-1]
    assert not math.isnan(run.loss)
    assert "nothing to train" in notes[-1]
    assert (begun / "a" / "adapter_model.safetensors").exists()


def test_a_piece_of_a_longer_run_refuses_other_samples_of_its_job(base, begun, tmp_path):
    """As a run's workers do when groups are formed anew; the job is named."""
    jobs = [job_of(base), make_job(base, "b")]
    data = {**make_data(jobs), **other_data(jobs[:1])}
    carried = ResumeSources(tmp_path / "jobs", {"a": begun})

    with pytest.raises(ResumeMismatch, match="other samples") as told:
        train(jobs, tmp_path / "next", data=data, resume=carried)
    assert told.value.facts["job"] == "a"


def test_a_checkpoint_from_before_a_field_was_there_goes_on(base, begun):
    """A missing field had its default then."""
    store = CheckpointStore(begun)
    checkpoint = store.load()
    del checkpoint.run["jobs"]["a"]["weight_decay"]
    store.save(2, checkpoint.jobs, checkpoint.run)
    [run], _ = train([job_of(base)], begun, resume=True)

    assert run.step == 4


def test_data_of_equal_samples_have_one_digest(base):
    """However they are kept."""
    data = make_data([job_of(base)])["a"]
    table = JobData(data.job, type(data.samples)(data.samples), data.report)

    assert data.digest == table.digest
    assert data.digest != replace(data, samples=data.samples[1:]).digest
