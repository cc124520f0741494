"""A sweep in Python makes the jobs of a sweep in a job file, and trains them together."""

from __future__ import annotations

import peft
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.api.bases import LORA, ROWS, loaded, save_base
from tlora_fx import Job, TrainerCallback, load_job_file, sweep
from tlora_fx.api.sweep import sweep_jobs
from tlora_fx.errors import JobError

JOB = {"base": "org/model", "lora": LORA, "data": "data.jsonl", "num_train_epochs": 2.0}
RATE = {"min": 1e-5, "max": 1e-3, "distribution": "log_uniform"}
SWEEPS = st.fixed_dictionaries(
    {"learning_rate": st.lists(st.floats(0, 1), min_size=1, max_size=3, unique=True)},
    optional={
        "lora.r": st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
        "lora": st.just([{"r": 2, "lora_alpha": 4}, {"r": 4}]),
        "max_steps": st.lists(st.integers(1, 9), min_size=1, max_size=2, unique=True),
        "optim_args": st.just([{}, {"amsgrad": True}]),
    },
).filter(lambda fields: not {"lora", "lora.r"} <= set(fields))


@given(SWEEPS, st.booleans(), st.integers(0, 9))
def test_the_jobs_are_those_of_a_job_file(tmp_path_factory, parameters, drawn, seed):
    """By name and in every field, of a grid and of draws."""
    folder = tmp_path_factory.mktemp("jobs")
    how = {"method": "random", "count": 1, "seed": seed} if drawn else {}
    parameters = parameters | ({"weight_decay": RATE} if drawn else {})
    entry = {**JOB, "name": "a", "data": {"path": str(folder / "data.jsonl")}}
    base = {"model": entry.pop("base")}
    entry["sweep"] = {"parameters": parameters, **how}
    (folder / "jobs.yaml").write_text(
        yaml.safe_dump({"base": base, "jobs": [entry]}, sort_keys=False)
    )
    job = Job("a", **JOB | {"data": str(folder / "data.jsonl")})

    expected = load_job_file(folder / "jobs.yaml").jobs
    assert sweep_jobs(job, parameters, **how) == list(expected)


def test_objects_may_be_values():
    """Configs of PEFT, optimizer classes and rows; the job's callbacks hear of all jobs."""
    callback = TrainerCallback()
    job = Job("a", base="org/model", lora=8, data=ROWS, callbacks=[callback])
    configs = [peft.LoraConfig(r=2), peft.LoraConfig(r=4, use_rslora=True)]
    optimizers = [torch.optim.SGD, torch.optim.Adam]

    jobs = sweep_jobs(job, {"lora": configs, "optim": optimizers, "data": [ROWS[:4], ROWS[4:]]})
    assert [each.name for each in jobs[:2]] == [
        "a-lora-1-optim-1-data-1",
        "a-lora-1-optim-1-data-2",
    ]
    assert [each.lora["r"] for each in jobs] == [2] * 4 + [4] * 4
    assert [each.optim for each in jobs[:4]] == ["sgd", "sgd", "adam", "adam"]
    assert jobs[1].data.rows == ROWS[4:]
    assert all(each.callbacks == (callback,) for each in jobs)
    assert all(each.base is job.base for each in jobs)


def test_a_field_of_the_data_may_be_swept():
    """The rows stay those of the job."""
    job = Job("a", base="org/model", lora=8, data={"rows": ROWS, "append_eos": True})

    first, second = sweep_jobs(job, {"data.loss_on": ["completion", "all"]})
    assert (first.data.loss_on, second.data.loss_on) == ("completion", "all")
    assert first.data.rows is second.data.rows is ROWS
    assert first.data.append_eos


MISTAKES = [
    ({"parameters": {"learning_rate": 1}}, "sweep(parameters=...): 'learning_rate' has no values"),
    ({"parameters": {"base": ["x"]}}, "sweep(parameters=...): 'base' cannot be swept"),
    ({"parameters": {"seed": [1]}, "method": "random"}, "sweep(count=...): a random sweep needs"),
    ({"parameters": {"seed": [1]}, "method": "bayes"}, "sweep(method=...): wrong value of"),
    ({"parameters": {"seed.x": [1], "seed": [2]}}, "sweep(parameters=...): 'seed' holds 'seed.x'"),
    ({"parameters": {"optim.x": [1]}}, "sweep(parameters=...): 'optim.x' leads through 'optim'"),
    ({"parameters": {"lora.r": [-1]}}, "Job(lora=...): wrong value of 'lora.r'"),
    ({"parameters": [1]}, "sweep(parameters=...): it is no mapping"),
    ({"job": {"name": "a"}, "parameters": {"seed": [1]}}, "sweep(job=...): it is no tlora_fx.Job"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=lambda each: str(each)[:40])
def test_a_mistake_names_the_argument(arguments, said):
    """In Python's words, before anything is trained."""
    job = Job("a", **JOB, optim="sgd")

    with pytest.raises(JobError) as caught:
        sweep(**{"job": job} | arguments)

    assert said in str(caught.value)


def test_a_job_is_told_how_to_sweep():
    """The key of job files is a function in Python."""
    with pytest.raises(JobError, match=r"tlora_fx.sweep\(job"):
        Job("a", **JOB, sweep={})


def test_a_sweep_trains_and_ends_with_one_table(tmp_path):
    """A row for each job, with what differs; equal seeds make equal jobs."""
    base = loaded(save_base(tmp_path / "base"))
    job = Job("a", base=base, lora=LORA, data=ROWS, eval_split=0.2, eval_steps=1, max_steps=1)
    rates = {"learning_rate": RATE}
    options = {"method": "random", "count": 2, "device": "cpu", "verbose": False}

    results = sweep(job, rates, **options, output=tmp_path / "run")
    rows = results.rows()
    assert [row["job"] for row in rows] == ["a-001", "a-002"]
    assert [row["learning_rate"] for row in rows] == [
        each.learning_rate for each in sweep_jobs(job, rates, method="random", count=2)
    ]
    assert all(row["best"] is not None for row in rows)
