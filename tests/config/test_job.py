"""What a job may hold, and what is said of what it may not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tlora_fx.config.job import BaseSpec, DataSpec, Job
from tlora_fx.config.job_optimizer import optimizer_arguments, optimizer_class
from tlora_fx.errors import AdapterFolderError, JobError


def job(**fields: Any) -> Job:
    """A job that is right but for `fields`."""
    given = {"name": "a", "base": {"model": "m"}, "lora": {}, "data": {"path": "x.jsonl"}}
    return Job.model_validate(given | fields)


def refusal(**fields: Any) -> str:
    """What is said of a job with `fields`."""
    with pytest.raises(JobError) as caught:
        job(**fields)
    return str(caught.value)


def test_a_job_survives_being_written_down() -> None:
    """A job read back from its own JSON is the same job."""
    first = job(max_steps=3, lora={"r": 4, "target_modules": ["q"]})

    assert Job(**json.loads(first.model_dump_json())) == first


def test_a_job_file_needs_no_torch() -> None:
    """Importing jobs and job files imports neither torch nor transformers nor PEFT."""
    code = (
        "import sys, tlora_fx.config.job_file\n"
        "assert not {'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/b", "a\\b", "a..b", ".a", "-a", "a b", "ä", "a\n", "a" * 101]
)
def test_a_name_cannot_lead_out_of_a_folder(name: str) -> None:
    """A job's name is one plain file name."""
    assert "wrong value of 'name'" in refusal(name=name)


@pytest.mark.parametrize("name", ["a", "7", "math-r16", "A.b_c-1", "a" * 100])
def test_plain_names_are_right(name: str) -> None:
    """Letters, digits, dots, dashes and underlines make a name."""
    assert job(name=name).name == name


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seed": -1}, "a whole number n with 0 <= n < 4294967296"),
        ({"seed": 2**32}, "a whole number n with 0 <= n < 4294967296"),
        ({"max_length": 1}, "a whole number n with 2 <= n"),
        ({"max_steps": 0}, "a whole number n with 1 <= n or null"),
        ({"adam_beta1": 1.0}, "a number n with 0 <= n < 1"),
        ({"warmup_ratio": 1.5}, "a number n with 0 <= n <= 1"),
        ({"warmup_steps": 1.5}, "the part of all steps, a number n with 0 < n < 1"),
        ({"warmup_steps": True}, "a whole number of steps from 0"),
        ({"max_steps": -2}, "a whole number n with 1 <= n or null"),
        ({"learning_rate": float("nan")}, "a number n with 0 <= n"),
        ({"learning_rate": True}, "a number n with 0 <= n"),
        ({"per_device_train_batch_size": "8"}, "a whole number n with 1 <= n"),
        ({"shuffle": "maybe"}, "true or false"),
        ({"optim": "adamww"}, "did you mean 'adamw'?"),
        ({"data": {"path": 3}}, "text"),
        ({"data": "x.jsonl"}, "a mapping"),
        ({"lora": [1]}, "a mapping"),
        ({"base": {"model": "m", "dtype": "bf16"}}, "did you mean 'bfloat16'?"),
    ],
)
def test_a_wrong_value_gets_its_range(fields: dict[str, Any], said: str) -> None:
    """The error holds what is allowed and what was found."""
    text = refusal(**fields)

    assert said in text
    assert "wrong value of" in text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lerning_rate": 1.0}, "did you mean 'learning_rate'?"),
        ({"data": {"path": "x", "colums": {}}}, "did you mean 'columns'?"),
        ({"base": {"model": "m", "tokeniser": "t"}}, "did you mean 'tokenizer'?"),
        ({"lora": {"taget_modules": "x"}}, "did you mean 'target_modules'?"),
        ({"data": {"path": "x", "columns": {"promt": "q"}}}, "did you mean 'prompt'?"),
        ({"zzzz": 1}, "known keys: name, base"),
    ],
)
def test_a_wrong_key_gets_the_nearest(fields: dict[str, Any], said: str) -> None:
    """Keys are told at each depth."""
    assert said in refusal(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"adapter": "x"}, "'lora' and 'adapter' exclude each other"),
        ({"lora": None}, "the job has no 'lora'"),
        ({"max_steps": 3, "num_train_epochs": 2.0}, "'max_steps' and 'num_train_epochs'"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "'warmup_steps' and 'warmup_ratio'"),
        ({"warmup_steps": 0.3, "warmup_ratio": 0.1}, "'warmup_steps' and 'warmup_ratio'"),
        ({"base": {}}, "the base has no source"),
        ({"base": {"model": "m", "module": torch.nn.Linear(1, 1)}}, "'model' and 'module' exclude"),
        ({"base": {"module": "m"}}, "no torch.nn.Module"),
        ({"base": {"model": "./nowhere"}}, "'./nowhere' does not exist"),
        ({"base": {"model": __file__}}, "is no folder"),
        ({"base": {"config": "nowhere"}}, "'nowhere' does not exist"),
        ({"data": {"path": "x", "columns": {"prompt": "a", "text": "b"}}}, "name one format"),
        (
            {"data": {"path": "x", "format": "text", "columns": {"prompt": "a"}}},
            "the format 'text' has no column 'prompt'",
        ),
        (
            {"data": {"path": "x", "format": "text", "loss_on": "completion"}},
            "no completion to train on",
        ),
        ({"optim_args": {"lr": 1}}, "use learning_rate"),
        ({"loraplus_lr_embedding": 1e-4}, "needs 'loraplus_lr_ratio'"),
        ({"optim": "muon", "lora": {"use_dora": True}}, "'use_dora' trains vectors beside them"),
        ({"optim": "sgd", "optim_args": {"momentun": 1}}, "did you mean 'momentum'?"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "unknown argument 'power'"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "needs 'num_decay_steps'"),
    ],
)
def test_what_does_not_fit_together_is_told(fields: dict[str, Any], said: str) -> None:
    """Each pair that excludes each other has its words."""
    assert said in refusal(**fields)


def test_all_mistakes_are_told_at_once() -> None:
    """Three mistakes at three depths make one error."""
    text = refusal(seed=-1, lora={"r": 0}, data={"path": "x", "format": "txt"})

    assert text.startswith("error[T0101] 3 mistakes in a job")


def test_parts_raise_job_errors_of_their_own() -> None:
    """A base or a data spec built alone fails like one inside a job."""
    with pytest.raises(JobError, match="no source"):
        BaseSpec()
    with pytest.raises(JobError, match="'path' is missing"):
        DataSpec()  # type: ignore[call-arg]


def test_a_job_counts_epochs_unless_it_has_steps() -> None:
    """One epoch is the default, and does not count beside max_steps."""
    assert job().num_train_epochs == 1.0
    assert job(num_train_epochs=None).num_train_epochs == 1.0
    assert job(max_steps=3).num_train_epochs is None


def test_a_lora_config_has_the_fields_of_the_job() -> None:
    """PEFT gets what was given, for a causal language model."""
    config = job(lora={"r": 4, "lora_alpha": 8, "target_modules": ["b", "a"]}).lora_config()

    assert (config.r, config.lora_alpha) == (4, 8)
    assert set(config.target_modules or ()) == {"a", "b"}
    assert config.task_type == "CAUSAL_LM"


def test_a_saved_adapter_is_continued(tmp_path: Path) -> None:
    """The configuration of a folder that PEFT wrote becomes the job's."""
    saved = job(lora={"r": 4, "target_modules": ["a"], "rank_pattern": {"x": 2}}).lora_config()
    saved.base_model_name_or_path = "m"
    saved.inference_mode = True
    saved.save_pretrained(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").touch()

    continued = job(lora=None, adapter=tmp_path).lora_config()
    assert continued.r == 4
    assert set(continued.target_modules or ()) == {"a"}
    assert continued.rank_pattern == {"x": 2}
    assert not continued.inference_mode


def test_a_copy_of_a_job_has_its_own_lora_fields() -> None:
    """Nothing is remembered of the job that a copy was made from."""
    first = job(lora={"r": 4})
    assert first.lora_config().r == 4

    assert first.model_copy(update={"lora": {"r": 8}}).lora_config().r == 8


def test_an_adapter_that_vanishes_later_is_told(tmp_path: Path) -> None:
    """The folder is read when the configuration is wanted."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (tmp_path / "adapter_model.safetensors").touch()
    continued = job(lora=None, adapter=tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()

    with pytest.raises(AdapterFolderError, match="no adapter_model"):
        continued.lora_config()


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop", "adafactor", "adagrad", "adamax"])
def test_torch_takes_the_arguments_of_an_optimizer(name: str) -> None:
    """Each optimizer is made by its class in torch.optim."""
    mine = job(optim=name, learning_rate=0.5, weight_decay=0.1)
    kind: Any = optimizer_class(mine)
    optimizer = kind([torch.zeros(1, requires_grad=True)], **optimizer_arguments(mine))

    assert optimizer.param_groups[0]["lr"] == 0.5


def test_warmup_is_rounded_up() -> None:
    """A part of the steps is a whole number of steps."""
    assert job(warmup_ratio=0.1).warmup(11) == 2
    assert job(warmup_steps=5).warmup(11) == 5
    assert job().warmup(11) == 0


@pytest.mark.parametrize("steps", [1, 7, 11, 1000])
@pytest.mark.parametrize("warmup", [0, 1, 5, 0.05, 0.1, 0.999])
def test_warmup_steps_below_one_are_those_of_transformers(warmup: float, steps: int) -> None:
    """The same number of steps as its Trainer takes."""
    args = transformers.TrainingArguments(warmup_steps=warmup, use_cpu=True)

    assert job(warmup_steps=warmup).warmup(steps) == args.get_warmup_steps(steps)


def test_max_steps_of_minus_one_counts_by_epochs() -> None:
    """As in transformers: with the epochs that are given, or one."""
    mine = job(max_steps=-1, num_train_epochs=3)

    assert (mine.max_steps, mine.num_train_epochs) == (None, 3.0)
    assert job(max_steps=-1).num_train_epochs == 1.0
