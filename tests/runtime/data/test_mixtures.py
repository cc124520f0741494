"""Several data sets in one job: each reads as it does alone, in the order of `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, interleave_datasets
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.cli import main
from tlora_fx.config.job import Job
from tlora_fx.errors import (
    DataFileError,
    EmptyDataError,
    MissingColumnError,
    MixtureWeightError,
)
from tlora_fx.host import environment
from tlora_fx.runtime.data.samples import load_job_data
from tlora_fx.runtime.data.tables import MixedTable, digest_of, mixed_order
from tlora_fx.runtime.launching.early_checks import require_data

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
    counts=st.lists(st.integers(1, 20) | st.integers(900, 2100), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    strategy=st.sampled_from(["first_exhausted", "all_exhausted"]),
    draw=st.data(),
)
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
    assert f"{parts[1]['path']}: read as text" in "\n".join(both.report.lines())


@pytest.mark.parametrize("mixing", ["first_exhausted", "all_exhausted"])
def test_a_weighed_mixture_is_the_same_each_time(make_tokenizer, tmp_path, mixing):
    """So a run that goes on takes what it would have taken; another seed mixes otherwise."""
    first, second = write(tmp_path)
    parts, tokenizer = [{**first, "weight": 3}, {**second, "weight": 1.0}], make_tokenizer()
    digests = [digest(parts, tokenizer, mixing=mixing, seed=seed) for seed in (1, 1, 2)]

    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("weights", "mixing"),
    [(None, "first_exhausted"), ((3, 1), "first_exhausted"), ((3, 1), "all_exhausted")],
)
def test_what_is_held_out_is_never_trained(make_tokenizer, tmp_path, weights, mixing):
    """It is held out before the data sets are interleaved, so no sample of it comes again."""
    parts, tokenizer = write(tmp_path), make_tokenizer()
    whole = load_job_data(make(parts), tokenizer)
    weighed = (
        [{**p, "weight": w} for p, w in zip(parts, weights, strict=True)] if weights else parts
    )
    split = load_job_data(make(weighed, eval_split=0.25, mixing=mixing), tokenizer)
    plain = load_job_data(make(parts, eval_split=0.25), tokenizer)

    assert len(split.evaluation) == 3
    assert list(split.evaluation) == list(plain.evaluation)
    assert not {*split.evaluation} & {*split.samples}
    assert {*split.samples} <= {*whole.samples} - {*split.evaluation}
    assert weights is None or mixing == "first_exhausted" or {*split.samples} == {*plain.samples}


def test_a_data_set_of_which_nothing_is_left_is_refused(make_tokenizer, tmp_path):
    """Nobody could draw from it."""
    parts = [{**part, "weight": 1} for part in write(tmp_path)]
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b" * 3}))

    with pytest.raises(EmptyDataError, match="leaves a data set with none") as refused:
        load_job_data(make(parts, eval_split=0.8), make_tokenizer())
    assert refused.value.facts["path"].endswith(("a.jsonl", "b.jsonl"))


@pytest.mark.parametrize("weight", [1e-9, 5e-324])
def test_a_weight_by_which_an_epoch_would_hardly_end_is_refused(make_tokenizer, tmp_path, weight):
    """Only where each data set has to be used up."""
    first, second = write(tmp_path)
    parts, tokenizer = [{**first, "weight": 9e9}, {**second, "weight": weight}], make_tokenizer()

    with pytest.raises(MixtureWeightError, match="too small a weight") as refused:
        load_job_data(make(parts, mixing="all_exhausted"), tokenizer)
    assert refused.value.facts["path"] == second["path"]
    assert len(load_job_data(make(parts), tokenizer).samples) == 7


def test_pairs_stay_together(make_tokenizer, tmp_path):
    """Of preferences a batch counts pairs, and a mixture draws them."""
    parts = []
    for name in "ab":
        rows = [{"chosen": name * n, "rejected": "c" * n} for n in range(2, 7)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        parts.append({"path": str(path), "weight": 1})
    data = load_job_data(make(parts, method="dpo", mixing="all_exhausted"), make_tokenizer())
    pairs = [data.unit(index) for index in range(data.count)]

    assert data.count == data.report.samples == len(data.samples) // 2
    assert all(len(chosen.input_ids) == len(other.input_ids) for chosen, other in pairs)
    assert sum(part.samples for part in data.report.parts) == data.count


def test_the_report_has_a_line_for_each_data_set(make_tokenizer, tmp_path):
    """Its rows, its samples, and its share of the job's; then what else is known of it."""
    (first, second), tokenizer = write(tmp_path), make_tokenizer()
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('\n{"text": "b", "note": 1}\nno row')
    parts = [first, {**second, "skip_bad_rows": True}]
    report = load_job_data(make(parts), tokenizer).report
    lines = "\n".join(report.lines())

    assert (report.rows, report.bad_rows, report.samples) == (14, 1, 13)
    assert f"{first['path']}: 7 rows, 7 samples, " in lines
    assert f"{second['path']}: 7 rows, 6 samples, " in lines
    assert "; 6 of the job's samples (46.2%)" in lines
    assert f"{second['path']}: columns that are not read: note" in lines
    assert f"{second['path']}: 1 of 7 bad rows skipped" in lines


def test_a_kept_mixture_keeps_its_digest(make_tokenizer, tmp_path, monkeypatch):
    """Other weights, another cut and another seed have digests of their own."""
    monkeypatch.setenv(environment.CACHE, str(tmp_path / "cache"))
    parts = [{**part, "weight": 1} for part in write(tmp_path)]
    others = [{"seed": 3}, {"max_length": 3}, {"mixing": "all_exhausted"}, {"seed": 3}]
    tokenizer = make_tokenizer()
    before = [load_job_data(make(parts, **fields), tokenizer) for fields in ({}, *others)]
    digests = [data.digest for data in before]
    assert digests == [digest_of(list(data.samples)) for data in before]
    assert len({*digests}) == 4

    monkeypatch.setattr(MixedTable, "_digest", None)
    assert load_job_data(make(parts), tokenizer).digest == digests[0]


def test_a_single_data_set_in_a_list_is_that_one(make_tokenizer, tmp_path):
    """Its digest too."""
    part, _ = write(tmp_path)
    tokenizer = make_tokenizer()

    assert digest([part], tokenizer) == digest(part, tokenizer)


def test_each_data_set_is_looked_at_before_the_base_is_compiled(tmp_path):
    """A file that is not there, and columns that nobody reads."""
    first, second = write(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"words": "b"}')

    with pytest.raises(MissingColumnError) as refused:
        require_data([make([first, second])])
    assert refused.value.facts["file"].startswith(second["path"])
    with pytest.raises(DataFileError) as refused:
        require_data([make([first, {"path": str(tmp_path / "c.jsonl")}])])
    assert refused.value.facts["path"].endswith("c.jsonl")


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
