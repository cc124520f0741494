"""Several data sets in one job: each is checked as one of its own; a mistake names its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tlora_fx.config.job import DataSpec, Job
from tlora_fx.config.job_file import load_job_file
from tlora_fx.errors import JobError, JobFileError

A, B = {"path": "a.jsonl"}, {"path": "b.jsonl"}
CLASSIFIER = {"model": "m", "task": "SEQ_CLS", "labels": 2}


def make(data: Any, **fields: Any) -> Job:
    return Job.model_validate(
        {"name": "a", "base": {"model": "m"}, "lora": {"r": 2}, "data": data} | fields
    )


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "wrong value of 'data'"),
        (["a.jsonl"], "wrong value of 'data'"),
        ([A, "b.jsonl"], "wrong value of 'data'"),
        ([A, {"format": "text"}], "'path' is missing"),
        ([A | {"weight": 1}, B], "some data sets have a weight"),
        ([A, B | {"weight": 1}], "some data sets have a weight"),
        ([A | {"weight": -1}, B | {"weight": 1}], "wrong value of 'data.weight'"),
        ([A | {"weight": 1}, B | {"weight": -1}], "wrong value of 'data.1.weight'"),
        ([A | {"weight": 1}, B | {"weight": 0}], "wrong value of 'data.1.weight'"),
        ([A | {"weight": 1}, B | {"weight": float("nan")}], "wrong value of 'data.1.weight'"),
        ([A | {"weight": 1}, B | {"weight": True}], "wrong value of 'data.1.weight'"),
        ([A | {"weight": 1e308}, B | {"weight": 1e308}], "no finite sum"),
        ([A, B | {"format": "mesages"}], "did you mean 'messages'"),
        ([A, B | {"wieght": 1}], "did you mean 'weight'"),
        ([{"path": "a/b", "streaming": True}, B], "cannot be streamed"),
        ([A, {"path": "a/b", "streaming": True}], "cannot be streamed"),
        ([A | {"more": [B]}, B], "list all"),
        ([A, B | {"more": [A]}], "data sets of its own"),
    ],
)
def test_what_is_no_list_of_data_sets_is_refused(data, told):
    """In one mistake, before a file is read."""
    with pytest.raises(JobError, match=told) as refused:
        make(data)
    assert "mistakes" not in refused.value.what


@pytest.mark.parametrize(
    ("data", "fields", "told"),
    [
        ([A, B | {"format": "preference"}], {}, "needs pairs to be compared"),
        ([A, B | {"format": "text"}], {"method": "dpo"}, "learns from pairs"),
        ([A, B | {"format": "label"}], {}, "needs a base that classifies"),
        ([A, B | {"format": "text"}], {"base": CLASSIFIER}, "learns from labels"),
        ([A, B | {"loss_on": "all"}], {"completion_only_loss": True}, "exclude each other"),
        ([A, B], {"mixing": "all_exhausted"}, "needs data sets with weights"),
        ([A, B], {"eval_split": "test"}, "names a split of one data set"),
        ([A, B], {"eval_data": A | {"more": [B]}}, "'eval_data' is one data set"),
        ([A, B], {"eval_data": [A, B]}, "wrong value of 'eval_data'"),
    ],
)
def test_each_data_set_has_to_fit_the_job(data, fields, told):
    """Not only the first."""
    with pytest.raises(JobError, match=told):
        make(data, **fields)


def test_a_job_of_several_data_sets_survives_json():
    """As job.json of an adapter's folder holds it; data sets may be specs, and a tuple."""
    job = make((DataSpec(**A, weight=2), B | {"weight": 1, "format": "text"}))

    assert [part.path for part in job.data.parts] == ["a.jsonl", "b.jsonl"]
    assert Job.model_validate_json(job.model_dump_json()) == job


def written(folder: Path, text: str) -> Path:
    path = folder / "jobs.yaml"
    path.write_text(f"base: {{model: m}}\n{text}")
    return path


def test_defaults_stand_under_each_data_set(tmp_path):
    """What a data set says itself wins; paths are relative to the file."""
    file = load_job_file(
        written(
            tmp_path,
            "defaults: {data: {columns: {prompt: q, completion: a}, skip_bad_rows: true}}\n"
            "jobs:\n- name: a\n  lora: {r: 2}\n"
            "  data: [{path: a.jsonl}, {path: b.jsonl, skip_bad_rows: false}]\n",
        )
    )
    first, second = file.jobs[0].data.parts

    assert first.columns == second.columns == {"prompt": "q", "completion": "a"}
    assert (first.skip_bad_rows, second.skip_bad_rows) == (True, False)
    assert (first.path, second.path) == tuple(str(tmp_path / f"{n}.jsonl") for n in "ab")


def test_a_mistake_names_the_line_of_its_data_set(tmp_path):
    """In the job, and in the defaults."""
    path = written(
        tmp_path,
        "defaults:\n  data:\n    formt: text\n"  # line 4
        "jobs:\n- name: a\n  lora: {r: 2}\n  data:\n"
        "  - path: a.jsonl\n    weight: -1\n"  # line 10
        "  - path: b.jsonl\n    weight: 0\n",  # line 12
    )
    with pytest.raises(JobFileError) as refused:
        load_job_file(path)
    lines = refused.value.facts["mistakes"].splitlines()

    assert [line.partition(",")[0] for line in lines] == ["line 4", "line 10", "line 12"]
    assert "'formt'" in lines[0]
