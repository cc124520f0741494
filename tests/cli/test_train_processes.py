"""`tlora-fx train` in several processes, as a user meets them: they train, and they die."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml

import tlora_fx.__main__
from tests import fresh

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MAIN = tlora_fx.__main__.__file__
STEPS = {"word-problems": 3, "small-talk": 2, "records": 1}


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart with short jobs that checkpoint at every step."""
    folder = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(QUICKSTART, folder, dirs_exist_ok=True)
    return write_jobs(folder / "jobs.yaml", folder / "jobs.yaml", STEPS)


def write_jobs(source: Path, path: Path, steps: dict[str, int]) -> Path:
    content = yaml.safe_load(source.read_text())
    for job in content["jobs"]:
        job |= {"max_steps": steps[job["name"]], "per_device_train_batch_size": 2}
        job |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "warmup_ratio": 0.0}
    content["defaults"]["save_steps"] = 1
    path.write_text(yaml.safe_dump(content))
    return path


def command(processes: int, *words: Any, restarts: int = 0, forked: bool = True) -> list[str]:
    """What stands after `python`; forked: torchrun forks its processes, so they import nothing."""
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    program = ["--run-path", "--start-method", "fork", MAIN] if forked else ["-m", "tlora_fx"]
    return [*torchrun, *program, *map(str, words)]


#: torchrun, of whose forks the others wait until the first has told what all have met: here as
#: long as a busy machine takes; torchrun lets them do so for half a minute.
PATIENT = """
import runpy
from tlora_fx.runtime.launching import launch
launch.FIRST_TELLS_SECONDS = 12.0
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""


def patient(words: list[str]) -> list[str]:
    """The same command, whose processes wait longer."""
    assert words[:2] == ["-m", "torch.distributed.run"]
    return ["-c", PATIENT, *words[2:]]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def with_gpus(processes: int, *words: Any) -> list[str]:
    """What stands after `python` where the command starts its processes itself."""
    return ["-m", "tlora_fx", *map(str, words), "--gpus", str(processes)]


def run(processes: int, *words: Any, forked: bool = True) -> subprocess.CompletedProcess[str]:
    return fresh.run(*command(processes, *words, forked=forked), env=environment())


def statuses(folder: Path) -> dict[str, tuple[str, int]]:
    found = {name: json.loads((folder / name / "status.json").read_text()) for name in STEPS}
    return {name: (status["status"], status["step"]) for name, status in found.items()}


@pytest.mark.slow
def test_processes_train_that_die_and_start_again(job_file: Path, tmp_path: Path) -> None:
    """A killed process ends the run, or has torchrun start all again, which go on by themselves."""
    output = tmp_path / "run"
    many = write_jobs(job_file, job_file.parent / "many.yaml", dict.fromkeys(STEPS, 400))
    words = ("train", many, "-o", output, "--device", "cpu", "--plan", "fsdp")
    started = fresh.Program(*command(2, *words, restarts=1), env=environment())
    killed = kill_worker(started.pid, output)
    # Started again, the processes go on from the checkpoint; this time torchrun gives up.
    again = kill_worker(started.pid, output, but=killed)
    told = started.wait(timeout=900)

    assert told.returncode == 1, told.stderr
    assert "SIGKILL" in told.stdout + told.stderr
    assert "error[T0812] lost the connection to another process" in told.stderr
    assert "start again with --resume: the last checkpoint is step-" in told.stderr
    assert killed.isdisjoint(again)
    # Both times had done some steps: the second did not begin at the first step.
    short = write_jobs(job_file, job_file.parent / "short.yaml", dict.fromkeys(STEPS, 1))
    ended = run(1, "train", short, "-o", output, "--device", "cpu", "--resume")

    assert ended.returncode == 0, ended.stderr
    assert {status for status, _ in statuses(output).values()} == {"done"}
    assert min(step for _, step in statuses(output).values()) >= 2


@pytest.mark.slow
def test_a_process_that_hangs_ends_with_the_others(job_file: Path, tmp_path: Path) -> None:
    """It hears no signal; torchrun alone would wait half a minute for it."""
    output = tmp_path / "run"
    many = write_jobs(job_file, job_file.parent / "many.yaml", dict.fromkeys(STEPS, 4000))
    words = ("train", many, "-o", output, "--device", "cpu", "--plan", "fsdp")
    started = fresh.Program(*command(2, *words, "--collective-timeout", 5), env=environment())
    workers = kill_worker(started.pid, output, number=signal.SIGSTOP)
    told = started.wait(timeout=900)

    assert told.returncode == 1, told.stderr
    assert "error[T0812] lost the connection to another process" in told.stderr
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    # What torchrun says when it has waited.
    assert "forcefully exiting via" not in told.stderr


def kill_worker(
    parent: int, output: Path, but: frozenset[int] = frozenset(), number: int = signal.SIGKILL
) -> frozenset[int]:
    """Kill one worker, or signal it, after a checkpoint of theirs; all workers."""
    workers = wait_for_workers(parent, output, but)
    os.kill(max(workers), number)
    return workers


def wait_for_workers(
    parent: int, output: Path, but: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Both workers, once they have written a checkpoint."""
    seen: set[str] = set()
    end = time.monotonic() + 900
    while time.monotonic() < end:
        workers = frozenset(children(parent)) - but
        folder = output / "checkpoints"
        now = {path.name for path in folder.glob("step-*")} if folder.is_dir() else set()
        fresh = {name for name in now if re.fullmatch(r"step-\d+(\.\d+)?", name)}
        if len(workers) == 2 and seen and fresh - seen:
            return workers
        if len(workers) == 2:
            seen |= fresh or {""}
        time.sleep(0.2)
    raise AssertionError("no checkpoint in time")


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.fixture(scope="module")
def alone(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process leaves."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    words = ("train", job_file, "--device", "cpu", "-o", folder)
    told = fresh.run("-m", "tlora_fx", *words)
    assert told.returncode == 0, told.stderr
    return folder


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(command, id="torchrun"),
        pytest.param(with_gpus, id="gpus"),
        pytest.param(partial(command, forked=False), marks=pytest.mark.slow, id="fresh"),
    ],
)
def test_processes_leave_what_one_process_leaves(
    job_file: Path, alone: Path, tmp_path: Path, start: Callable[..., list[str]]
) -> None:
    """The same folders, metrics and adapters, and one table of what came out."""
    words = ("train", job_file, "--device", "cpu", "-o", tmp_path, "--plan", "replicated")
    two = fresh.run(*start(2, *words), env=environment())

    assert two.returncode == 0, two.stderr
    assert two.stdout.count("last loss") == 1
    assert statuses(tmp_path) == {name: ("done", steps) for name, steps in STEPS.items()}
    for name in STEPS:
        files = [folder / name / "adapter_model.safetensors" for folder in (alone, tmp_path)]
        mine, theirs = map(safetensors.torch.load_file, files)
        for key, tensor in mine.items():
            assert (tensor - theirs[key]).norm() <= 1e-3 * tensor.norm()


def test_a_mesh_that_does_not_fit_is_told_once(job_file: Path, tmp_path: Path) -> None:
    """Rank 0 tells, torchrun's summary ends with the same, and nothing is written."""
    words = ("train", job_file, "-o", tmp_path / "run", "--device", "cpu")
    started = patient(command(2, *words, "--plan", "fsdp", "--mesh", "dp=4"))
    told = fresh.run(*started, env=environment())

    assert told.returncode == 1
    first, _, summary = told.stderr.partition("Traceback")
    assert first.count("error[T0805]") == 1
    assert summary.count("traceback : error[T0805]") == 1
    assert "torchrun --nproc-per-node 4 -m tlora_fx train" in told.stderr
    assert not (tmp_path / "run").exists()


def test_processes_that_the_command_has_started_tell_one_error(
    job_file: Path, tmp_path: Path
) -> None:
    """Nothing else is printed: no traceback of a launcher."""
    words = ("train", job_file, "-o", tmp_path / "run", "--device", "cpu")
    words = (*words, "--plan", "replicated", "--shard-base")
    told = fresh.run(*with_gpus(2, *words), env=environment())

    assert told.returncode == 1
    errors = told.stderr[told.stderr.index("error[") :]
    assert errors.startswith("error[T0810] this plan holds the base whole on every replica\n")
    assert re.fullmatch(r"error.*\n(  .*\n)+", errors)
    assert not (tmp_path / "run").exists()


def test_auto_answers_without_a_profile_and_keeps_what_it_measured(
    job_file: Path, tmp_path: Path
) -> None:
    """A resumed run measures nothing, and goes on by the same plan."""
    output = tmp_path / "run"
    words = ("train", job_file, "-o", output, "--device", "cpu")
    empty = {**environment(), "TLORA_FX_PROFILES": str(tmp_path)}
    told = fresh.run(*with_gpus(2, *words), env=empty)
    plan, profile = ((output / name).read_bytes() for name in ("plan.json", "profile.json"))
    more = write_jobs(job_file, job_file.parent / "more.yaml", dict.fromkeys(STEPS, 4))
    words = ("train", more, "-o", output, "--device", "cpu", "--resume", "--accept-changes")
    again = fresh.run(*with_gpus(2, *words), env=empty)

    assert told.returncode == again.returncode == 0, told.stderr + again.stderr
    assert "nobody has profiled this base here" in " ".join(told.stderr.split())
    assert json.loads(profile)["source"] == "calibrated"
    assert (output / "plan.json").read_bytes() == plan
    assert (output / "profile.json").read_bytes() == profile


@pytest.mark.slow
def test_ctrl_c_stops_processes_after_a_checkpoint(job_file: Path, tmp_path: Path) -> None:
    """It is told once, with the command that goes on."""
    output = tmp_path / "run"
    many = write_jobs(job_file, job_file.parent / "many.yaml", dict.fromkeys(STEPS, 4000))
    words = ("train", many, "-o", output, "--device", "cpu", "--plan", "fsdp")
    started = fresh.Program(*with_gpus(2, *words), env=environment())
    wait_for_workers(started.pid, output)
    os.kill(started.pid, signal.SIGINT)
    told = started.wait(timeout=900)

    assert told.returncode == 130, told.stderr
    assert told.stderr.count("interrupted: stopped after a checkpoint, ") == 1
    assert f"go on with: tlora-fx train {many}" in told.stderr
    assert "--gpus 2 --resume\n" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.slow
def test_a_killed_process_is_named_by_the_command(job_file: Path, tmp_path: Path) -> None:
    """And the last checkpoint."""
    output = tmp_path / "run"
    many = write_jobs(job_file, job_file.parent / "many.yaml", dict.fromkeys(STEPS, 4000))
    words = ("train", many, "-o", output, "--device", "cpu", "--plan", "fsdp")
    started = fresh.Program(*with_gpus(2, *words), env=environment())
    kill_worker(started.pid, output)
    told = started.wait(timeout=900)

    assert told.returncode == 1
    assert told.stderr.count("error[") == 1
    assert "found  SIGKILL" in told.stderr
    assert "start again with --resume: the last checkpoint is step-" in told.stderr
