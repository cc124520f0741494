"""Several data sets in one job: each reads as it does alone, in the order of `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, interleave_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_fx.cli import main
from tlora_fx.config.job import Job
from tlora_fx.errors import JobError
from tlora_fx.runtime.data.samples import load_job_data
from tlora_fx.runtime.data.tables import digest_of, mixed_order

SETS = {
    "a": [{"prompt": "1+" * n, "completion": "a"} for n in range(1, 8)],
    "b": [{"text": "b" * n} for n in range(1, 6)],
}


def write(folder: Path) -> list[dict[str, Any]]:
    """Two files of different columns."""
    for name, rows in SETS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [{"path": str(folder / f"{name}.jsonl")} for name in SETS]


def make(data: Any, **fields: Any) -> Job:
    return Job(name="a", base={"model": "m"}, lora={"r": 2}, data=data, **fields)


def digest(data: Any, tokenizer: Any, **fields: Any) -> str:
    return load_job_data(make(data, **fields), tokenizer).digest


@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    strategy=st.sampled_from(["first_exhausted", "all_exhausted"]),
    draw=st.data(),
)
@settings(max_examples=25)
def test_the_order_is_that_of_interleave_datasets(counts, seed, strategy, draw):
    """By weights that need not add up to one."""
    weights = draw.draw(st.lists(st.floats(0.1, 9), min_size=len(counts), max_size=len(counts)))
    sets = [Dataset.from_dict({"at": [(k, i) for i in range(n)]}) for k, n in enumerate(counts)]
    expected = interleave_datasets(
        sets, probabilities=(np.array(weights) / sum(weights)).tolist(), seed=seed,
        stopping_strategy=strategy,
    )["at"]  # fmt: skip

    origin, places = mixed_order(counts, weights, seed, strategy)

    assert [*zip(origin.tolist(), places.tolist(), strict=True)] == [tuple(at) for at in expected]


def test_each_data_set_is_read_as_alone(make_tokenizer, tmp_path):
    """Without weights one follows the other, each with its own format; the report names both."""
    parts, tokenizer = write(tmp_path), make_tokenizer()
    alone = [load_job_data(make(part), tokenizer) for part in parts]
    both = load_job_data(make(parts), tokenizer)

    assert list(both.samples) == [sample for data in alone for sample in data.samples]
    assert both.digest == digest_of(list(both.samples))
    assert both.lengths.tolist() == [n for data in alone for n in data.lengths.tolist()]
    told = "\n".join(both.report.lines())
    assert f"{parts[0]['path']}: 7 of 12 samples; " in told
    assert f"{parts[1]['path']}: 5 of 12 samples; read as text" in told


@pytest.mark.parametrize("mixing", ["first_exhausted", "all_exhausted"])
def test_a_weighed_mixture_is_the_same_each_time(make_tokenizer, tmp_path, mixing):
    """So a run that goes on takes what it would have taken; another seed mixes otherwise."""
    first, second = write(tmp_path)
    parts, tokenizer = [{**first, "weight": 3}, {**second, "weight": 1.0}], make_tokenizer()
    digests = [digest(parts, tokenizer, mixing=mixing, seed=seed) for seed in (1, 1, 2)]

    assert digests[0] == digests[1] != digests[2]


def test_a_mixture_is_held_out_of(make_tokenizer, tmp_path):
    """The parts are the mixture."""
    whole = load_job_data(make(write(tmp_path)), make_tokenizer())
    parted = load_job_data(make(write(tmp_path), eval_split=0.25), make_tokenizer())

    assert (len(parted.samples), len(parted.evaluation)) == (9, 3)
    assert {*parted.samples, *parted.evaluation} == {*whole.samples}


def test_a_single_data_set_in_a_list_is_that_one(make_tokenizer, tmp_path):
    """Its digest too."""
    part, _ = write(tmp_path)
    tokenizer = make_tokenizer()

    assert digest([part], tokenizer) == digest(part, tokenizer)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "wrong value of 'data'"),
        (["a.jsonl"], "wrong value of 'data'"),
        ([{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl"}], "some data sets have a weight"),
        ([{"path": "a.jsonl", "weight": -1}, {"path": "b.jsonl", "weight": 1}], "weight"),
        ([{"path": "a.jsonl", "weight": float("nan")}, {"path": "b.jsonl", "weight": 1}], "weight"),
        ([{"path": "a.jsonl", "weight": 0}, {"path": "b.jsonl", "weight": 1}], "weight"),
        ([{"path": "a/b", "streaming": True}, {"path": "b.jsonl"}], "cannot be streamed"),
        ([{"path": "a.jsonl", "more": [{"path": "c.jsonl"}]}, {"path": "b.jsonl"}], "list all"),
    ],
)
def test_what_is_no_mixture_is_refused(data, told):
    """Before a file is read."""
    with pytest.raises(JobError, match=told):
        make(data)


def test_the_command_shows_each_data_set(tmp_path, capsys):
    """By its path; relative paths are those of the job file's folder."""
    write(tmp_path)
    base = Path(__file__).parents[3] / "examples/quickstart/base"
    (tmp_path / "jobs.yaml").write_text(
        f"base: {{model: {base}}}\n"
        "jobs:\n- {name: mixed, lora: {r: 2}, data: [{path: a.jsonl, weight: 2}, "
        "{path: b.jsonl, weight: 1}]}\n"
    )
    with pytest.raises(SystemExit):
        main(["data", str(tmp_path / "jobs.yaml"), "--rows", "1"])
    shown = capsys.readouterr().out

    assert "a.jsonl" in shown
    assert "read as text" in shown
