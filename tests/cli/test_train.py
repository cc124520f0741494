"""`tlora-fx train` and `verify` as a user meets them: whole processes on the quickstart."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests import fresh
from tlora_fx.cli.train import _starting
from tlora_fx.config.job_file import load_job_file
from tlora_fx.errors import RunFolderError
from tlora_fx.runtime import run_folder
from tlora_fx.runtime.launching.interrupts import Terminated
from tlora_fx.runtime.run_folder import ask_to_stop, require_new

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def job_file(tmp_path_factory):
    """The quickstart with short jobs that checkpoint often."""
    folder = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(QUICKSTART, folder, dirs_exist_ok=True)
    path = folder / "jobs.yaml"
    content = yaml.safe_load(path.read_text())
    for job, steps in zip(content["jobs"], (9, 7, 5), strict=True):
        job |= {"max_steps": steps, "per_device_train_batch_size": 2}
    content["defaults"]["save_steps"] = 2
    path.write_text(yaml.safe_dump(content))
    return path


def run(*words):
    return fresh.run("-m", "tlora_fx", *words)


def statuses(folder):
    return [json.loads(path.read_text()) for path in folder.glob("*/status.json")]


def losses(folder):
    return {
        path.parent.name: [json.loads(line)["loss"] for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*/metrics.jsonl"))
    }


#: `tlora-fx`, whose job file is written anew as soon as it was checked.
EDITED = """
import sys
from pathlib import Path
from tlora_fx.cli import main
from tlora_fx.runtime.launching import early_checks

check = early_checks.require_data_and_base

def check_and_edit(jobs, **options):
    check(jobs, **options)
    path = Path(sys.argv[2])
    path.write_text(path.read_text().replace("max_steps: 2", "max_steps: 4"))

early_checks.require_data_and_base = check_and_edit
main(sys.argv[1:])
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_file_that_is_edited_while_a_run_starts_is_trained_as_it_was_checked(
    tmp_path, processes
):
    """By all processes: it is read once, however long their imports take."""
    shutil.copytree(QUICKSTART, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "jobs.yaml"
    content = yaml.safe_load(path.read_text())
    content["jobs"] = [content["jobs"][-1] | {"max_steps": 2, "per_device_train_batch_size": 2}]
    path.write_text(yaml.safe_dump(content))
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 2}))
    words = ["train", path, "-o", tmp_path / "run", "--device", "cpu", "--gpus", processes]
    told = fresh.run("-c", EDITED, *words)

    assert told.returncode == 0, told.stderr
    assert "max_steps: 4" in path.read_text()
    assert [len(each) for each in losses(tmp_path / "run").values()] == [2]


#: `tlora-fx`, killed as soon as a checkpoint of it is there, in the middle of a round.
DIES = """
import os, signal, sys
from tlora_fx.cli import main
from tlora_fx.runtime.checkpoints.store import CheckpointStore

save = CheckpointStore.save

def save_and_die(self, *given, **named):
    save(self, *given, **named)
    os.kill(os.getpid(), signal.SIGKILL)

CheckpointStore.save = save_and_die
main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_with_the_losses_of_an_uninterrupted_one(job_file, tmp_path):
    """kill -9 in the middle, --resume, and every loss is bitwise that of a run left alone."""
    whole = run("train", job_file, "-o", tmp_path / "whole", "--device", "cpu")
    assert whole.returncode == 0, whole.stderr
    killed = fresh.run("-c", DIES, "train", job_file, "-o", tmp_path / "cut", "--device", "cpu")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "cut" / "checkpoints" / "latest").exists()
    assert not (tmp_path / "cut" / "word-problems" / "adapter_model.safetensors").exists()

    resumed = run("train", job_file, "-o", tmp_path / "cut", "--resume", "--device", "cpu")

    assert resumed.returncode == 0, resumed.stderr
    assert "going on from" in resumed.stderr
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert {k: len(v) for k, v in losses(tmp_path / "cut").items()} == {
        "word-problems": 9,
        "small-talk": 7,
        "records": 5,
    }


def test_ctrl_c_names_the_checkpoint_and_the_command_that_goes_on(job_file, tmp_path):
    """The command is the one that was stopped, with --resume."""
    long = job_file.with_name("long.yaml")
    content = yaml.safe_load(job_file.read_text())
    for job in content["jobs"]:
        job["max_steps"] = 100_000
    long.write_text(yaml.safe_dump(content))
    words = ["train", long, "-o", tmp_path / "run", "--device", "cpu"]
    process = fresh.Program("-m", "tlora_fx", *words)
    pointer = tmp_path / "run" / "checkpoints" / "latest"
    while not pointer.exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    told = process.wait()
    command = told.stderr.rpartition("go on with: tlora-fx ")[2].split()

    assert told.returncode == 130, told.stderr
    assert str(tmp_path / "run" / "checkpoints" / "step-") in told.stderr
    assert command == [*map(str, words), "--resume"]


def end_a_start(folder, jobs, end, *files):
    """Raise an error while jobs start, after files have come to be."""
    with _starting(folder, jobs):
        assert [status["status"] for status in statuses(folder)] == ["starting"] * len(jobs)
        for file in files:
            (folder / file).touch()
        raise end


def stop_a_start(folder, jobs):
    """Ask a job to stop while jobs start, and then end the start."""
    with _starting(folder, jobs):
        ask_to_stop(folder, "records")
        require_new(folder)
        raise KeyboardInterrupt


@pytest.mark.parametrize("end", [KeyboardInterrupt, Terminated, RunFolderError])
def test_who_ends_a_start_finds_no_job_that_still_starts(tmp_path, end):
    """Another command would take the folder for a run."""
    jobs = load_job_file(QUICKSTART / "jobs.yaml").jobs
    with pytest.raises(end):
        end_a_start(tmp_path / "run", jobs, end("no"))

    assert not (tmp_path / "run").exists()


def test_who_asks_a_job_to_stop_while_it_starts_does_not_end_the_start(tmp_path):
    """It stops after its first step; a start that is ended leaves nothing all the same."""
    jobs = load_job_file(QUICKSTART / "jobs.yaml").jobs
    with pytest.raises(KeyboardInterrupt):
        stop_a_start(tmp_path / "run", jobs)

    assert not (tmp_path / "run").exists()


def test_a_start_on_a_full_disk_leaves_no_folder_of_a_job(tmp_path, monkeypatch):
    """Once there is room, the same command may be given again."""

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "replace_file", full)
    jobs = load_job_file(QUICKSTART / "jobs.yaml").jobs
    with pytest.raises(RunFolderError, match="No space left"):
        end_a_start(tmp_path / "run", jobs, AssertionError())

    assert not (tmp_path / "run").exists()


def test_an_ended_start_keeps_the_state_of_what_has_begun(tmp_path):
    """Of a job that has files of its own, the status is left as it stands."""
    jobs = load_job_file(QUICKSTART / "jobs.yaml").jobs
    with pytest.raises(KeyboardInterrupt):
        end_a_start(tmp_path / "run", jobs, KeyboardInterrupt(), "records/metrics.jsonl")

    assert [path.name for path in (tmp_path / "run").iterdir()] == ["records"]
    assert [status["status"] for status in statuses(tmp_path / "run")] == ["starting"]


def test_resume_without_a_run_is_refused_before_anything_is_read(job_file, tmp_path):
    """A misspelt folder is not begun as a new run."""
    told = run("train", job_file, "-o", tmp_path / "gone", "--resume", "--device", "cpu")

    assert told.returncode == 1
    assert "error[T0407] there is no run to go on with" in told.stderr
    assert "no folder of that name" in told.stderr
    assert "compiling" not in told.stderr
    assert not (tmp_path / "gone").exists()


def test_an_output_folder_in_use_is_refused_with_a_way_out(job_file, tmp_path):
    """Exit code 1, and the message says who goes on with it, if somebody does."""
    ways = {"kept.txt": "another folder with -o", "run.json": "--resume", "ledger.sqlite": "fx run"}
    for name, way in ways.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("mine")

        told = run("train", job_file, "-o", tmp_path / name)

        assert told.returncode == 1
        assert "holds something already" in told.stderr
        assert way in told.stderr
        assert (tmp_path / name / name).read_text() == "mine"


def test_an_output_folder_in_use_is_refused_before_anything_is_read(job_file, tmp_path):
    """The data is not even there."""
    gone = job_file.with_name("gone.yaml")
    content = yaml.safe_load(job_file.read_text())
    content["jobs"][0]["data"]["path"] = "gone.jsonl"
    gone.write_text(yaml.safe_dump(content))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "kept.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")

    used, file, new = (
        run("train", gone, "-o", tmp_path / name, "--device", "cpu")
        for name in ("used", "file", "new")
    )

    assert "error[T0407] the output folder holds something already" in used.stderr
    assert "error[T0407] the output folder cannot be written" in file.stderr
    assert "gone.jsonl" in new.stderr
    assert "compiling" not in used.stderr + file.stderr
    assert not (tmp_path / "new").exists()


def test_a_plan_of_estimated_times_is_trained_by_with_a_warning(job_file, tmp_path):
    """One line, and every job is done; `auto` measures by itself."""
    path = tmp_path / "plan.json"
    words = ["--gpus", "1", "--gpu", "roofline:h100", "--allow-estimated", "-o", path]
    assert run("plan", job_file, *words).returncode == 0
    words = ["train", job_file, "--device", "cpu", "--nano-batches", "2"]
    told = run(*words, "-o", tmp_path / "run", "--plan", path)
    empty = {**os.environ, "TLORA_FX_PROFILES": str(tmp_path)}
    auto = fresh.run("-m", "tlora_fx", *words, "-o", tmp_path / "a", "--plan", "auto", env=empty)

    # Lines are cut where a long path would pass the terminal's width.
    warned = " ".join(told.stderr.split()).split("warning: ")[1:]
    assert "the plan rests on estimated times (roofline:NVIDIA H100" in warned[0]
    assert "nothing overlaps between nano-batches without --compile" in warned[1]
    assert len(warned) == 2
    assert told.returncode == 0, told.stderr
    assert {status["status"] for status in statuses(tmp_path / "run")} == {"done"}
    assert auto.returncode == 0, auto.stderr
    assert "nobody has profiled this base here" in " ".join(auto.stderr.split())


@pytest.mark.parametrize(("processes", "plan"), [("1", "single"), ("2", "replicated")])
def test_auto_has_a_plan_for_a_base_without_layers(job_file, tmp_path, processes, plan):
    """Of one layer none folds, and nothing can be timed."""
    config = job_file.parent / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    words = ["--device", "cpu", "--plan", "auto", "--gpus", processes, "-o", tmp_path / "run"]
    told = fresh.run("-m", "tlora_fx", "train", job_file, *words)

    assert told.returncode == 0, told.stderr
    assert f"plan {plan}: the base was compiled without layers" in " ".join(told.stderr.split())
    assert {status["status"] for status in statuses(tmp_path / "run")} == {"done"}


def test_a_wrong_key_is_told_with_file_line_and_job_before_anything_runs(job_file, tmp_path):
    """`learning_rat` leads to `learning_rate`."""
    wrong = job_file.with_name("wrong.yaml")
    wrong.write_text(job_file.read_text().replace("learning_rate:", "learning_rat:", 1))

    told = run("train", wrong, "-o", tmp_path / "run")

    assert told.returncode == 1
    assert "learning_rate" in told.stderr
    assert "wrong.yaml:" in told.stderr
    assert not (tmp_path / "run").exists()


def test_a_sharded_base_needs_a_plan_that_shards_it(job_file, tmp_path):
    """Another plan is not chosen without a word, and nothing runs."""
    told = run("train", job_file, "-o", tmp_path / "run", "--device", "cpu", "--shard-base")

    assert told.returncode == 1
    assert "--shard-base" in told.stderr
    assert "pipeline with a mesh that has dp" in told.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_command_gets_the_nearest_one():
    """`tlora-fx trian` leads to `train`."""
    told = run("trian")

    assert told.returncode == 2
    assert "'train'" in told.stderr


def test_verify_prints_a_table_and_says_against_what(job_file):
    """Both ways of dropout, each job, the bounds, exit code 0."""
    told = run("verify", job_file, "--steps", "2", "--device", "cpu")

    assert told.returncode == 0, told.stderr
    assert told.stdout.count("small-talk") == 2
    assert "plain PEFT" in told.stdout
    assert "keyed masks" in told.stdout
    assert "bound" in told.stdout
