"""`tlora-fx simulate`."""

from __future__ import annotations

import json
import re

import pytest

from tests import forked
from tlora_fx.cli import main
from tlora_fx.simulator import sweep

FEW = ("simulate", "--jobs", "15", "--gpus", "32", "--seeds", "1", "--processes", "1")


def told(capsys, *words):
    """What a command prints that ends well."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    """What a command says when it ends with an error, and its exit status."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return capsys.readouterr().err, stop.value.code


@pytest.fixture
def kalos(tmp_path):
    """A trace of three jobs, one of which is too large."""
    path = tmp_path / "kalos.csv"
    path.write_text(
        "job_id,arrival_time,num_iteration,iteration_computing_time,gpu_workers,gpu_per_worker\n"
        "0,0.0,200,0.5,1,8.0\n"
        "1,50.0,100,0.5,1,2.0\n"
        "2,60.0,-4,0.5,1,8.0\n"
        "3,70.0,100,0.5,16,8.0\n",
        encoding="utf-8",
    )
    return path


def test_a_synthetic_trace_is_replayed_and_reported(capsys, tmp_path):
    """A table in the terminal, every choice, and a page with its numbers."""
    out = told(capsys, *FEW, "--policies", "tlora,megatron", "-o", str(tmp_path / "report"))

    assert "SYNTHETIC" in out
    assert "change-seconds  none" in out
    assert "max(1, round(duration / T_solo))" in out
    assert "Against megatron: throughput" in out
    results = json.loads((tmp_path / "report" / "results.json").read_text(encoding="utf-8"))
    assert [one["scenario"]["policy"] for one in results["replays"]] == ["tlora", "megatron"]
    assert all(one["summary"]["finished"] > 0 for one in results["replays"])
    assert (tmp_path / "report" / "index.html").exists()


def test_every_choice_stands_there_with_its_default(capsys):
    """Its value, and what it would be if nobody had said anything."""
    words = ("--policies", "megatron", "--horizon", "30", "--ranks", "4", "--max-slowdown", "2")
    # A value's meaning goes on below it.
    lines = re.sub(r"\n {20,}", " ", told(capsys, *FEW, *words)).splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("  ")}

    assert rows["horizon"].split()[1:3] == ["30", "s"]
    assert rows["horizon"].endswith("by default 60 s")
    assert rows["ranks"].endswith("by default 2, 4, 8, 16")
    assert rows["max-slowdown"].endswith("by default 1.5")
    assert rows["jobs"].split()[1] == "15"
    assert rows["jobs"].endswith("by default 1,000")
    assert rows["seeds"].endswith("by default 0, 1, 2, 3, 4")
    assert "default" not in rows["switch-seconds"]


def test_what_is_left_out_of_a_file_is_said(capsys, kalos):
    """By reason, with the count."""
    out = told(
        capsys, "simulate", "--trace", str(kalos), "--gpus", "32", "--policies", "megatron",
        "--seeds", "1", "--processes", "1",
    )  # fmt: skip

    assert "left out  1: negative num_iteration (first: line 4)" in out
    assert "left out  1: larger than the cluster of 32 GPUs (first: job 3)" in out
    assert "SYNTHETIC" not in out


def test_wrong_rows_are_refused_on_request(capsys, kalos):
    """As an error with its code."""
    text, status = refused(capsys, "simulate", "--trace", str(kalos), "--bad-rows", "refuse")

    assert status == 1
    assert "error[T0932]" in text
    assert "1 wrong: negative num_iteration (first: line 4)" in text
    assert "left out:" not in text


def test_a_saved_trace_gives_the_same_replay(capsys, tmp_path):
    """The file says that it is synthetic, and so does the replay of it."""
    saved = tmp_path / "own.jsonl"
    first = told(capsys, *FEW, "--policies", "megatron", "--save-trace", str(saved))
    again = told(capsys, *FEW, "--policies", "megatron", "--trace", str(saved))

    def row(text):
        return next(line for line in text.splitlines() if line.startswith("megatron")).split()[:14]

    assert row(first) == row(again)
    assert "SYNTHETIC" in again


def test_a_mistake_that_another_process_finds_is_told_once(capsys, tmp_path):
    """As it would be by one process, with what was found and what to do."""
    path = tmp_path / "acme.csv"
    path.write_text(
        "job_id,gpu_num,type,state,submit_time,duration\n"
        "a,8,SFT,COMPLETED,2023-03-01 00:00:00,60\n",
        encoding="utf-8",
    )
    words = ("simulate", "--trace", str(path), "--gpus", "32", "--seeds", "1")
    wrong = ("--policies", "megatron", "--sweeps", "cluster", "--cluster-sizes", "4")
    one, _ = refused(capsys, *words, *wrong, "--processes", "1")
    with forked.interpreter():
        many, status = refused(capsys, *words, *wrong, "--processes", "2")

    assert status == 1
    assert many[many.index("error[") :] == one[one.index("error[") :]
    assert many.count("error[") == 1


@pytest.mark.parametrize("name", ["--max-tokens", "--most-tokens"])
def test_the_longest_sample_goes_by_its_old_name_too(capsys, name):
    """For one release."""
    text, status = refused(capsys, *FEW, name, "1")

    assert status == 1
    assert "--max-tokens makes no sense" in text


def test_states_that_nobody_has_are_no_matter_of_the_cluster(capsys, tmp_path):
    """The help is about what left the jobs out."""
    path = tmp_path / "acme.csv"
    path.write_text(
        "job_id,gpu_num,type,state,submit_time,duration\n"
        "a,8,SFT,COMPLETED,2023-03-01 00:00:00,3600\n",
        encoding="utf-8",
    )
    text, status = refused(capsys, *FEW, "--trace", str(path), "--states", "NOPE")

    assert status == 1
    assert "a state that is not asked for: COMPLETED" in text
    assert "choose other --states" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trace", "nowhere.csv"), "error[T0930]"),
        (("--policies", "tlor"), "tlora"),
        (("--scale", "0"), "error[T0935]"),
        (("--ranks", "two"), "error[T0935] --ranks makes no sense"),
        (("--bad-rows", "keep"), "error[T0935] --bad-rows makes no sense"),
        (("--policies", "tlora:objective=["), "error[T0901]"),
        (("--sweeps", "cluster", "--cluster-sizes", "0,8"), "--cluster-sizes makes no sense"),
        (("--sweeps", "colour"), "--sweeps is scale or cluster or months or nano"),
        (("--gpu", "abacus"), "error[T0850]"),
        (("--trace", "synthetic", "--month", "9"), "jobs in month 1"),
        (("--bases", "gpt-9"), "error[T0920]"),
        (("--gpu", "h100"), "take scaled ones with --allow-estimated"),
        (("--horizon", "0"), "--horizon is a time, such as 60s or 5m"),
        (("--horizon", "soon"), "--horizon is a time, such as 60s or 5m"),
        (("--switch-seconds", "-1"), "error[T0935] --switch-seconds makes no sense"),
        (("--policies", ""), "--policies names none"),
        (("--policies", "oracle", "--jobs", "60"), "add --runnable 16"),
        (("-o", "/proc/nowhere"), "error[T0936]"),
        (("--trace", "nowhere.csv"), "there is no such trace"),
        (("--marginals", "nowhere.json"), "there is no such file of marginals"),
    ],
)
def test_mistakes_are_explained_before_anything_is_said(capsys, monkeypatch, words, said):
    """Each with what to do, and nothing is replayed for it."""
    monkeypatch.setattr(sweep, "run", None)
    with pytest.raises(SystemExit) as stop:
        main([*FEW, *words])
    told = capsys.readouterr()

    assert stop.value.code in {1, 2}
    assert said in told.err
    assert told.out == ""


def test_a_folder_that_cannot_be_written_is_known_before_the_replay(capsys, monkeypatch, tmp_path):
    """A file stands in its place; the folder of a good report is there at once, and empty."""
    begun = []
    monkeypatch.setattr(sweep, "run", lambda scenario: begun.append(list(tmp_path.iterdir())))
    (tmp_path / "taken").write_text("")
    text, _ = refused(capsys, *FEW, "-o", str(tmp_path / "taken"))
    assert "error[T0936]" in text
    assert begun == []

    with pytest.raises(AttributeError):
        main([*FEW, "--policies", "megatron", "-o", str(tmp_path / "good")])
    assert sorted(path.name for path in begun[0]) == ["good", "taken"]
    assert list((tmp_path / "good").iterdir()) == []


@pytest.mark.parametrize(
    ("file", "code"), [("jobs.csv", "T0936"), ("index.html", "T0936"), ("run.json", "T0407")]
)
def test_a_folder_of_something_else_is_not_written_into(capsys, tmp_path, file, code):
    """Such as a user's own table, or a run."""
    (tmp_path / file).write_text("mine")
    text, _ = refused(capsys, *FEW, "-o", str(tmp_path))

    assert f"error[{code}]" in text
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_report_takes_the_place_of_the_one_before(capsys, tmp_path):
    """Files that are of no report stay."""
    (tmp_path / "notes.txt").write_text("mine")
    for seed in ("1", "2"):
        told(capsys, *FEW, "--policies", "megatron", "--seed", seed, "-o", str(tmp_path))

    assert '"seed": 2' in (tmp_path / "results.json").read_text()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("horizon", "shown"), [("60s", "60"), ("90", "90"), ("5m", "300"), ("0.5h", "1800")]
)
def test_times_are_written_as_run_takes_them(capsys, horizon, shown):
    """With a unit or without."""
    words = ("--policies", "megatron", "--horizon", horizon)
    lines = told(capsys, *FEW, *words).splitlines()

    assert [line.split()[1] for line in lines if line.startswith("  horizon ")] == [shown]


def test_the_exact_policy_runs_where_it_sees_few_jobs(capsys):
    """By a small window, or because there are few."""
    many = ("simulate", "--jobs", "40", "--gpus", "32", "--seeds", "1", "--processes", "1")
    assert "oracle" in told(capsys, *many, "--policies", "oracle", "--runnable", "8")
    assert "oracle" in told(capsys, *FEW, "--policies", "oracle")


def test_a_trace_that_ends_before_anything_is_trained_says_so(capsys, tmp_path):
    """Its jobs come within two seconds; numbers of that time are dashes, with the reason."""
    path = tmp_path / "kalos.csv"
    path.write_text(
        "job_id,arrival_time,num_iteration,iteration_computing_time,gpu_workers,gpu_per_worker\n"
        "0,0.0,200,0.5,1,8.0\n"
        "1,2.0,100,0.5,1,2.0\n",
        encoding="utf-8",
    )
    out = told(
        capsys, "simulate", "--trace", str(path), "--gpus", "32", "--policies", "megatron",
        "--seeds", "1", "--processes", "1", "-o", str(tmp_path / "report"),
    )  # fmt: skip
    tables = [line.split() for line in out.splitlines() if line.startswith("megatron")]
    row = [cell for part in tables for cell in part]
    note = " ".join(out.partition("–  megatron")[2].partition("written")[0].split())
    [one] = json.loads((tmp_path / "report" / "results.json").read_text())["replays"]
    whole = one["summary"]["whole"]["samples_per_second"]

    assert (row[1], row[2], row[-1]) == ("–", "–", "2")
    assert "no sample was trained in the 2 s in which jobs arrive" in note
    assert float(note.split()[-2]) == pytest.approx(whole, rel=0.01)
    assert "no sample was trained" in (tmp_path / "report" / "index.html").read_text()
