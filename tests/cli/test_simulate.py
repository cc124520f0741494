"""`tlora-fx simulate`."""

from __future__ import annotations

import json

import pytest

from tlora_fx.cli import main

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
    assert "max(1, round(duration / T_solo))" in out
    assert "Against megatron: throughput" in out
    results = json.loads((tmp_path / "report" / "results.json").read_text(encoding="utf-8"))
    assert [one["scenario"]["policy"] for one in results["replays"]] == ["tlora", "megatron"]
    assert all(one["summary"]["finished"] > 0 for one in results["replays"])
    assert (tmp_path / "report" / "index.html").exists()


def test_every_choice_stands_there_with_its_default(capsys):
    """Its value, and what it would be if nobody had said anything."""
    words = ("--policies", "megatron", "--horizon", "30", "--ranks", "4", "--max-slowdown", "2")
    lines = told(capsys, *FEW, *words).splitlines()
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
    assert "negative num_iteration" in text


def test_a_saved_trace_gives_the_same_replay(capsys, tmp_path):
    """The file says that it is synthetic, and so does the replay of it."""
    saved = tmp_path / "own.jsonl"
    first = told(capsys, *FEW, "--policies", "megatron", "--save-trace", str(saved))
    again = told(capsys, *FEW, "--policies", "megatron", "--trace", str(saved))

    def row(text):
        return next(line for line in text.splitlines() if line.startswith("megatron")).split()[:14]

    assert row(first) == row(again)
    assert "SYNTHETIC" in again


def test_a_mistake_that_another_process_finds_is_told_once(capsys):
    """As it would be by one process, with what was found and what to do."""
    words = ("simulate", "--jobs", "9", "--gpus", "32", "--seeds", "1", "--policies", "megatron")
    wrong = ("--bases", "gpt-9")
    one, _ = refused(capsys, *words, *wrong, "--processes", "1")
    many, status = refused(capsys, *words, "--seeds", "2", *wrong, "--processes", "2")

    assert status == 1
    assert many[many.index("error[") :] == one[one.index("error[") :]
    assert many.count("error[") == 1


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
        (("--ranks", "two"), "--ranks are whole numbers"),
        (("--bad-rows", "keep"), "--bad-rows is drop or refuse"),
        (("--policies", "tlora:objective=["), "error[T0901]"),
        (("--sweeps", "cluster", "--cluster-sizes", "0,8"), "--cluster-sizes are above 0"),
        (("--sweeps", "colour"), "--sweeps is scale or cluster or months or nano"),
        (("--gpu", "abacus"), "error[T0850]"),
        (("--trace", "synthetic", "--month", "9"), "error[T0933]"),
    ],
)
def test_mistakes_are_explained(capsys, words, said):
    """Each with what to do."""
    text, status = refused(capsys, *FEW, *words)

    assert status in {1, 2}
    assert said in text
