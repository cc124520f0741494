"""Keys of other trainers: each hint leads to a job that is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tlora_fx.config import other_names
from tlora_fx.config.job import BaseSpec, DataSpec, Job
from tlora_fx.config.job_file import load_job_file
from tlora_fx.errors import JobError, JobFileError

#: A right value of each key that hints name.
VALUES: dict[str, Any] = {
    "quantize": "nf4",
    "adam_beta1": 0.8, "adam_epsilon": 1e-6, "attention": "batch", "beta": 0.2, "columns": {},
    "completion_only_loss": False, "data": {"path": "x.csv"}, "dtype": "float32",
    "early_stopping_patience": 2, "eval_data": {"path": "y.csv"}, "eval_split": 0.2,
    "eval_steps": 5, "eval_strategy": "epoch", "format": "text", "gradient_accumulation_steps": 2,
    "init_lora_weights": "gaussian", "learning_rate": 1e-3, "lora": {"r": 3}, "lora_alpha": 4,
    "loraplus_lr_ratio": 8.0, "lora_dropout": 0.1, "loss_on": "all",
    "lr_scheduler_type": "cosine", "max_grad_norm": 0.5,
    "max_length": 64, "max_steps": 3, "method": "dpo", "model": "someone/base", "name": "main",
    "num_train_epochs": 2.0, "optim": "sgd", "packing": True, "path": "z.csv",
    "per_device_eval_batch_size": 4, "per_device_train_batch_size": 4, "r": 4, "save_steps": 5,
    "seed": 3, "target_modules": ["q_proj"], "task": "CAUSAL_LM",
    "tokenizer": "someone/tokenizer", "use_dora": True,
    "use_rslora": True, "warmup_steps": 2, "weight_decay": 0.1,
}  # fmt: skip
#: What some of them need beside them.
BESIDE: dict[str, dict[str, Any]] = {
    "beta": {"method": "dpo"},
    "early_stopping_patience": {"eval_split": 0.2},
    "eval_steps": {"eval_split": 0.2},
    "eval_strategy": {"eval_split": 0.2},
}


def built(**fields: Any) -> Job:
    parts = {"base": {"model": "m"}, "lora": {"r": 2}, "data": {"path": "a.csv"}}
    return Job.model_validate({"name": "a", **parts, **fields})


@pytest.mark.parametrize(("key", "ours"), other_names.JOB_KEYS.items())
def test_a_key_of_a_job_leads_to_ours(key: str, ours: str) -> None:
    """The hint names a key that takes its value."""
    with pytest.raises(JobError, match=f"it is called '{ours}' here"):
        built(**{key: VALUES[ours]})

    assert getattr(built(**{ours: VALUES[ours]}, **BESIDE.get(ours, {})), ours) is not None


@pytest.mark.parametrize(("key", "ours"), other_names.LORA_KEYS.items())
def test_a_key_of_lora_leads_to_ours(key: str, ours: str) -> None:
    """So does each under `lora`."""
    with pytest.raises(JobError, match=f"it is called '{ours}' here"):
        built(lora={key: VALUES[ours]})

    assert built(lora={ours: VALUES[ours]}).lora == {ours: VALUES[ours]}


@pytest.mark.parametrize(
    ("spec", "keys"), [(BaseSpec, other_names.BASE_KEYS), (DataSpec, other_names.DATA_KEYS)]
)
def test_keys_of_base_and_data_lead_to_ours(spec: Any, keys: dict[str, str]) -> None:
    """So does each under `base` and `data`."""
    right = {"model": "m"} if spec is BaseSpec else {"path": "a.csv"}
    for key, ours in keys.items():
        with pytest.raises(JobError, match=f"it is called '{ours}' here"):
            spec(**right, **{key: VALUES[ours]})
        assert getattr(spec(**{**right, ours: VALUES[ours]}), ours) == VALUES[ours]


@pytest.mark.parametrize(("key", "told"), other_names.ELSEWHERE.items())
def test_what_no_job_says_is_told_where_it_is_said(key: str, told: str) -> None:
    """No name of ours, nor an option that the command does not have, is named."""
    from tlora_fx.cli.train import TrainOptions

    with pytest.raises(JobError) as caught:
        built(**{key: True})
    assert caught.value.help == told
    options = {field.replace("_", "-") for field in TrainOptions.__dataclass_fields__}
    named = {word.strip("-,;:") for word in told.split() if word.startswith("--")}
    assert named <= options


def test_a_file_of_another_trainer_is_told_where_its_keys_go(tmp_path: Path) -> None:
    """Keys beside `jobs` too: of a job, of its adapter, and of the base."""
    jobs = {"base": {"model": "m"}, "jobs": [{"name": "a", "lora": {}, "data": {"path": "a.csv"}}]}
    hints = {
        "micro_batch_size": "'per_device_train_batch_size' here, in a job or in 'defaults'",
        "lora_r": "'r' here, under 'lora' in a job or in 'defaults'",
        "base_model": "'model' here under 'base'",
        "output_dir": "train -o FOLDER",
    }
    for key, told in hints.items():
        path = tmp_path / "jobs.yaml"
        path.write_text(yaml.safe_dump({**jobs, key: "x"}))
        with pytest.raises(JobFileError) as caught:
            load_job_file(path)
        assert told in caught.value.help
