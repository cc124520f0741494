"""When a job is evaluated, on what, and what cannot go together."""

from __future__ import annotations

import pytest

from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.config.job_file import load_job_file
from tlora_fx.errors import JobError, JobFileError, RemoteCodeRefused

DATA = {"eval_data": {"path": "test.jsonl"}}


def job(**fields):
    data = {"path": "train.jsonl", "columns": {"text": "body"}}
    return Job.model_validate(
        {"name": "a", "base": BaseSpec(model="m"), "lora": {}, "data": data} | fields
    )


@pytest.mark.parametrize(
    ("fields", "strategy"),
    [
        ({}, "no"),
        ({"eval_steps": 5}, "no"),
        (DATA, "epoch"),
        ({"eval_split": 0.1}, "epoch"),
        ({"eval_split": "test"}, "epoch"),
        (DATA | {"eval_steps": 5}, "steps"),
        (DATA | {"eval_strategy": "no", "eval_steps": 5}, "no"),
        ({"metric_for_best_model": "train_loss", "eval_steps": 5}, "steps"),
    ],
)
def test_what_there_is_to_evaluate_is_evaluated(fields, strategy):
    """At eval_steps, or else after each epoch, unless the job says otherwise."""
    assert job(**fields).eval_strategy == strategy


def test_evaluation_data_is_read_as_the_training_data_is():
    """Columns are those of `data` unless it has its own; path and split are its own."""
    own = job(eval_data={"path": "b.jsonl", "columns": {"text": "t"}, "skip_bad_rows": True})

    assert job(**DATA).eval_data.columns == {"text": "body"}
    assert (own.eval_data.columns, own.eval_data.skip_bad_rows) == ({"text": "t"}, True)


@pytest.mark.parametrize(
    ("metric", "name", "greatest"),
    [
        (None, "eval_loss", False),
        ("eval_loss", "eval_loss", False),
        ("mean_token_accuracy", "eval_mean_token_accuracy", True),
        ("exact_match", "eval_exact_match", True),
        ("train_loss", "train_loss", False),
    ],
)
def test_the_best_metric_has_the_name_and_direction_of_transformers(metric, name, greatest):
    """With or without eval_; what ends in loss shall fall, unless the job says otherwise."""
    chosen = job(**DATA, metric_for_best_model=metric)
    turned = job(**DATA, metric_for_best_model=metric, greater_is_better=not greatest)

    assert (chosen.best_metric, chosen.best_is_greatest) == (name, greatest)
    assert turned.best_is_greatest is not greatest


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (DATA | {"eval_split": 0.1}, "'eval_data' and 'eval_split' exclude each other"),
        ({"eval_split": 1.0}, "a number n with 0 < n < 1, or the name of a split"),
        ({"eval_strategy": "epoch"}, "needs 'eval_data' or 'eval_split'"),
        (DATA | {"eval_strategy": "steps"}, "needs 'eval_steps'"),
        (DATA | {"eval_strategy": "epoch", "eval_steps": 2}, "exclude each other"),
        ({"load_best_model_at_end": True}, "needs evaluations to compare"),
        ({"early_stopping_patience": 2}, "metric_for_best_model: train_loss"),
        (DATA | {"early_stopping_threshold": 0.1}, "needs 'early_stopping_patience'"),
        ({"metric_for_best_model": "loss"}, "or compare train_loss"),
        (DATA | {"metric_for_best_model": "exact_mach"}, "did you mean 'exact_match'?"),
        ({"compute_metrics": "m:f"}, "needs 'eval_data' or 'eval_split'"),
        (DATA | {"compute_metrics": "m.f"}, "MODULE:FUNCTION or FILE.py:FUNCTION"),
        ({"eval_dataset": {"path": "x.jsonl"}}, "it is called 'eval_data' here"),
    ],
)
def test_what_cannot_go_together_is_refused(fields, told):
    """With what to give instead."""
    with pytest.raises(JobError) as caught:
        job(**fields)

    assert told in str(caught.value)


def test_a_job_keeps_its_evaluation_through_json():
    """As it travels to a worker."""
    written = job(**DATA, eval_steps=3, early_stopping_patience=2, load_best_model_at_end=True)

    assert Job.model_validate(written.model_dump(mode="json")) == written


FILE = """
base: {model: m}
defaults:
  lora: {}
  data: {path: train.jsonl}
  eval_split: 0.1
jobs:
  - {name: a}
  - {name: b, eval_data: {path: sub/test.jsonl}, compute_metrics: "own.py:score"}
  - {name: c, compute_metrics: "package.metrics:score"}
"""


def test_paths_of_evaluation_start_at_the_job_file(tmp_path):
    """A job's own data replaces the split of the defaults."""
    (tmp_path / "jobs.yaml").write_text(FILE)
    a, b, c = load_job_file(tmp_path / "jobs.yaml", trust_remote_code=True).jobs

    assert a.eval_split == 0.1
    assert (b.eval_split, b.eval_data.path) == (None, str(tmp_path / "sub/test.jsonl"))
    assert b.compute_metrics == f"{tmp_path / 'own.py'}:score"
    assert c.compute_metrics == "package.metrics:score"


def test_a_function_of_a_file_runs_only_where_the_command_says_so(tmp_path):
    """As a base's own code does."""
    (tmp_path / "jobs.yaml").write_text(FILE)

    with pytest.raises(RemoteCodeRefused, match=r"own\.py:score"):
        load_job_file(tmp_path / "jobs.yaml")


def test_a_mistake_is_told_with_its_line(tmp_path):
    """That of the key that is wrong."""
    (tmp_path / "jobs.yaml").write_text(FILE.replace("eval_split: 0.1", "eval_split: 2.0"))

    with pytest.raises(JobFileError, match=r"jobs.yaml:6"):
        load_job_file(tmp_path / "jobs.yaml")
