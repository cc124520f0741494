"""`tlora-fx results` prints what the folders of a run hold as one table; no training is needed."""

from __future__ import annotations

import csv
import io
import json

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.test_watch import output, write_job
from tlora_fx.cli import main
from tlora_fx.config.hyperparameters import differing
from tlora_fx.runtime.reports.results_table import (
    as_csv,
    as_json,
    as_text,
    result_row,
    results_table,
)
from tlora_fx.runtime.reports.run_view import JobView, read_run

FIELDS = st.dictionaries(st.sampled_from(["seed", "optim", "beta"]), st.integers(0, 2))


@pytest.fixture
def run(tmp_path):
    """A run of two jobs that differ in rank and rate; one still trains, one has failed."""
    folder = tmp_path / "run"
    write_job(folder, "a", 20)
    write_job(folder, "b", 10, status="failed", evaluated=False)
    for name, rank, rate in (("a", 4, 1e-4), ("b", 8, 2e-5)):
        spec = {"name": name, "lora": {"r": rank, "target_modules": ["q"]}, "learning_rate": rate}
        (folder / name / "job.json").write_text(json.dumps(spec))
    status = json.loads((folder / "a" / "status.json").read_text())
    evaluation = {"metric_for_best_model": "eval_loss", "best_step": 20, "best_value": 1.25}
    (folder / "a" / "status.json").write_text(json.dumps(status | {"evaluation": evaluation}))
    (folder / "a" / "adapter_config.json").write_text("{}")
    reason = "loss is not finite\n  help  lower the rate"
    status = {"status": "failed", "step": 10, "steps": 40, "reason": reason}
    (folder / "b" / "status.json").write_text(json.dumps(status))
    return folder


def test_the_table_has_what_differs_and_what_came_out(run, capsys):
    """Rank and rate, best evaluation, last loss, steps, tokens, seconds, adapter, and a reason."""
    head, a, b = output(["results", run], capsys).splitlines()

    assert head.split() == [
        "job", "status", "steps", "lora.r", "learning_rate", "loss", "metric", "best", "best_step",
        "tokens", "seconds", "adapter", "reason",
    ]  # fmt: skip
    assert a.split() == [
        "a", "running", "20", "4", "0.0001", "3.0000", "eval_loss", "1.2500", "20", "2000",
        "10.0000", str(run / "a"),
    ]  # fmt: skip
    assert b.split()[:5] == ["b", "failed", "10", "8", "2e-05"]
    assert b.endswith("loss is not finite")


def test_a_dash_prints_the_table_as_csv_alone(run, tmp_path, capsys, monkeypatch):
    """As other programs take it; no file is called so."""
    monkeypatch.chdir(tmp_path)

    printed = output(["results", run, "--csv", "-"], capsys)

    assert list(pandas.read_csv(io.StringIO(printed))["job"]) == ["a", "b"]
    assert not (tmp_path / "-").exists()


def test_the_csv_file_holds_whole_numbers(run, tmp_path, capsys):
    """pandas reads it; what is not there is empty."""
    path = tmp_path / "new" / "table.csv"
    output(["results", run, "--csv", path], capsys)

    table = pandas.read_csv(path)
    assert table["learning_rate"].tolist() == [1e-4, 2e-5]
    assert table["best"].tolist()[0] == 1.25
    assert table["adapter"].isna().tolist() == [False, True]
    assert table["reason"].tolist()[1] == "loss is not finite\n  help  lower the rate"


def test_json_has_the_same_rows(run, capsys):
    """As a list of objects."""
    rows = json.loads(output(["results", run, "--json"], capsys))

    assert [(row["job"], row["lora.r"], row["best"]) for row in rows] == [
        ("a", 4, 1.25),
        ("b", 8, None),
    ]


def test_a_job_that_has_not_begun_is_a_row(tmp_path, capsys):
    """With no loss, and null in JSON."""
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / "status.json").write_text('{"status": "starting", "step": 0}')
    view = JobView(tmp_path / "run" / "a")
    view.refresh()

    row = result_row(view)
    assert (row["steps"], row["tokens"], row["seconds"]) == (0, 0, 0)
    assert (row["loss"], row["adapter"]) == (None, None)
    [read] = json.loads(output(["results", tmp_path / "run", "--json"], capsys))
    assert read["loss"] is None


def test_a_table_that_cannot_be_written_is_told(run, capsys):
    """A folder is no file."""
    with pytest.raises(SystemExit) as end:
        main(["results", str(run), "--csv", str(run)])

    assert end.value.code == 1
    assert "error[T0936] the table cannot be written" in capsys.readouterr().err


@given(st.lists(st.one_of(st.none(), FIELDS), min_size=1, max_size=4))
def test_only_fields_that_differ_are_told(specs):
    """Jobs whose told fields are equal are equal in all; each has the same columns."""
    told = differing(specs)

    assert len({tuple(fields) for fields in told}) == 1
    defaults = {"seed": 0, "optim": "adamw", "beta": None}
    whole = [None if spec is None else defaults | spec for spec in specs]
    known = [spec for spec in whole if spec is not None]
    differ = {name for name in defaults if len({str(spec[name]) for spec in known}) > 1}
    assert set(told[0]) == differ
    for spec, fields in zip(whole, told, strict=True):
        assert fields == {name: spec and spec[name] for name in fields}


@given(st.text(), st.floats(), st.lists(st.text()))
def test_values_of_any_kind_stand_in_a_csv_file(text, number, texts):
    """Text with quotes and line breaks, endless numbers, lists."""
    row = dict.fromkeys(("job", "status", "reason", "metric"), text)
    row |= dict.fromkeys(("steps", "loss", "best", "best_step", "tokens", "seconds"), number)
    rows = [row | {"adapter": None}, row | {"adapter": None, "job": "b"}]
    specs = {"b": {"sample_prompts": texts}, text: {"sample_prompts": [*texts, "x"]}}
    table = results_table(rows, specs)

    read = list(csv.reader(io.StringIO(as_csv(table), newline="")))
    assert len(as_text(table).split("\n")) >= 3
    assert json.loads(json.dumps(as_json(table), allow_nan=False))[1]["job"] == "b"
    assert [line[0] for line in read[1:]] == [text.replace("\r", "\n"), "b"]


def test_the_rows_of_a_run_are_in_order_of_names(run):
    """As everywhere where a run is shown."""
    assert [view.name for view in read_run(run)] == ["a", "b"]
