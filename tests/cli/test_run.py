"""`tlora-fx run` and `tlora-fx schedule`, as a user meets them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.scheduler.fork_here import ForkHere
from tlora_fx.cli import main
from tlora_fx.cli.arguments import run_options
from tlora_fx.cli.arguments.run_options import StopSignals
from tlora_fx.cli.run import Page
from tlora_fx.cli.terminal import Console
from tlora_fx.cost.profile_sources import SHIPPED
from tlora_fx.runtime.launching import interrupts
from tlora_fx.runtime.launching.interrupts import stop_signals
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.workers.protocol import EventReader
from tlora_fx.scheduler import service
from tlora_fx.scheduler.store import Ledger

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
PROFILE = ROOT / "tests" / "scheduler" / "quickstart-cpu.json"
STEPS = {"a": 3, "b": 4}


def write_jobs(folder: Path, **steps: int) -> Path:
    """One file with two jobs on the quickstart's base."""
    folder.mkdir()
    entry = {"lora": {"r": 4}, "per_device_train_batch_size": 2, "max_length": 32}
    entry["data"] = {"path": str(QUICKSTART / "data" / "records.jsonl")}
    content = {
        "base": {"config": str(QUICKSTART / "base"), "dtype": "float32"},
        "defaults": entry,
        "jobs": [
            {"name": name, "max_steps": count, "schedule": {"max_slowdown": 8.0}}
            for name, count in steps.items()
        ],
    }
    (folder / "jobs.yaml").write_text(yaml.safe_dump(content))
    return folder


def words(jobs: Path, output: Path, *more: str) -> list[str]:
    given = ["run", str(jobs), "-o", str(output), "--device", "cpu", "--profile", str(PROFILE)]
    return [*given, "--horizon", "2s", "--until-empty", *more]


def call(*given: str) -> int | str | None:
    """Run a command; its exit code."""
    with pytest.raises(SystemExit) as stop:
        main(list(given))
    return stop.value.code


EVALUATED = {
    "eval_split": 0.1, "eval_steps": 2, "load_best_model_at_end": True,
    "sample_prompts": ["name"], "sample_steps": 3, "sample_max_new_tokens": 2,
    "report_to": "tensorboard",
}  # fmt: skip

#: Writes what it hears beside itself.
TELL = """
from pathlib import Path
from tlora_fx import TrainerCallback

class Tell(TrainerCallback):
    def evaluated(self, report):
        self.note("evaluated", report)

    def sampled(self, report):
        self.note("sampled", report)

    def note(self, event, report):
        with Path(__file__).with_name("told").open("a") as file:
            print(event, report.job, report.step, file=file)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of jobs and the run that trained them."""
    folder = tmp_path_factory.mktemp("run")
    jobs = write_jobs(folder / "jobs", **STEPS)
    content = yaml.safe_load((jobs / "jobs.yaml").read_text())
    content["jobs"][1] |= EVALUATED
    (jobs / "jobs.yaml").write_text(yaml.safe_dump(content))
    (folder / "tell.py").write_text(TELL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "ForkServer", ForkHere)
        patch.chdir(folder)
        more = ("--policy", "tlora:payback=2", "--callback", "tell.py:Tell")
        assert call(*words(jobs, folder / "run", *more)) == 0
    return jobs, folder / "run"


WRONG = {
    "long": {"max_length": 10**30},
    "rank": {"lora": {"r": 10**42}},
    "batch": {"per_device_train_batch_size": 10**400},
    "steps": {"max_steps": 10**400},
    "schedule": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": -1.0}},
}
PATTERN = {"lora": {"r": 4, "target_modules": "(([a-z_.]+)+)+[0-9]"}}


def write_wrong(folder: Path, wrong: dict[str, dict]) -> None:
    """A file for each job that cannot run, and files that are none."""
    [good, *_] = yaml.safe_load((folder / "jobs.yaml").read_text())["jobs"]
    for name, fields in wrong.items():
        content = yaml.safe_load((folder / "jobs.yaml").read_text())
        content["jobs"] = [{**good, "name": name, **fields}]
        (folder / f"0-{name}.yaml").write_text(yaml.safe_dump(content))
    os.mkfifo(folder / "0-pipe.yaml")
    (folder / "0-endless.yaml").symlink_to("/dev/zero")
    (folder / "0-half.yaml").write_text('base: {config: "\\ud800"}\njobs: [{name: half}]')
    (folder / "0-big.yaml").write_text("".join(f"k{n}: [1, 2, 3]\n" for n in range(60_000)))


def require_neighbour_unmoved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, dict], *more: str
) -> None:
    """Every wrong job is refused, and the good one leaves the bits that it leaves without them."""
    monkeypatch.setattr(service, "ForkServer", ForkHere)
    jobs = write_jobs(folder / "jobs", good=3)
    assert call(*words(jobs, folder / "alone")) == 0
    write_wrong(jobs, wrong)
    assert call(*words(jobs, folder / "run", *more)) == 1

    ledger = Ledger(folder / "run" / "ledger.sqlite")
    found = {record.name: record.status for record in ledger.jobs()}
    ledger.close()
    assert found == {"good": "done"} | dict.fromkeys(wrong, "refused")
    name = Path("good") / "adapter_model.safetensors"
    assert (folder / "run" / name).read_bytes() == (folder / "alone" / name).read_bytes()


def test_jobs_that_cannot_run_cost_their_neighbour_nothing(tmp_path, monkeypatch):
    """Numbers that nothing holds, a pipe, an endless device, half a character, a large file."""
    require_neighbour_unmoved(tmp_path, monkeypatch, WRONG)


@pytest.mark.slow
def test_a_pattern_that_backtracks_for_hours_costs_its_neighbour_nothing(tmp_path, monkeypatch):
    """It is given up after the seconds that preparing may take."""
    wrong = {**WRONG, "pattern": PATTERN}
    require_neighbour_unmoved(tmp_path, monkeypatch, wrong, "--prepare-seconds", "30")


def test_every_job_leaves_what_train_leaves(trained):
    """An adapter folder, metrics and status a job."""
    _, output = trained
    for name, steps in STEPS.items():
        status = json.loads((output / name / "status.json").read_text())
        assert (status["status"], status["step"]) == ("done", steps)
        assert (output / name / "adapter_model.safetensors").is_file()
        rows = read_metrics(output / name / "metrics.jsonl")
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))


def test_jobs_of_a_run_are_evaluated_asked_tracked_and_told_of(trained):
    """As under `train`: metrics, the best step, answers, event files, and a callback of a user."""
    _, output = trained
    rows = read_metrics(output / "b" / "metrics.jsonl")

    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4]
    assert [row["step"] for row in rows if "samples" in row] == [3, 4]
    status = json.loads((output / "b" / "status.json").read_text())
    assert status["evaluation"]["best_step"] in (2, 4)
    assert list((output / "b" / "tensorboard").iterdir())
    assert (output.parent / "told").read_text().splitlines() == [
        "evaluated b 2", "sampled b 3", "evaluated b 4", "sampled b 4",
    ]  # fmt: skip


def test_a_run_that_has_ended_ends_at_once(trained, monkeypatch, capsys):
    """Started again it says what there is, and trains nothing."""
    monkeypatch.setattr(service, "ForkServer", ForkHere)
    assert call(*words(*trained)) == 0

    told = capsys.readouterr()
    assert "going on: 2 submitted before, 2 of them ended" in told.err
    assert "group" not in told.err
    assert told.out.count("done") == 2


def test_a_decision_of_a_run_can_be_asked(trained, tmp_path, capsys):
    """Its state is saved, and explained from the file as from the folder."""
    _, output = trained
    call("schedule", "state", str(output), "-o", str(tmp_path / "state.json"))
    capsys.readouterr()
    saved = json.loads((tmp_path / "state.json").read_text())
    name = saved["state"]["jobs"][0]["request"]["name"]
    told = []
    for source in (output, tmp_path / "state.json"):
        assert call("schedule", "explain", str(source), "--job", name) == 0
        told.append(capsys.readouterr().out)

    assert told[0] == told[1]
    assert told[0].startswith(f"{name}: ")
    assert "as decided" in told[0]


def test_a_policy_s_options_stand_behind_its_name(trained):
    """As for `simulate`."""
    saved = json.loads((trained[1] / "state.json").read_text())

    assert saved["policy"]["name"] == "tlora"
    assert saved["policy"]["options"]["payback"] == 2


def test_jobs_that_have_ended_can_be_asked(trained, tmp_path, capsys):
    """Of a run's folder as of a saved state: how they ended, where they ran, what was decided."""
    _, output = trained
    call("schedule", "state", str(output), "-o", str(tmp_path / "state.json"))
    for name, steps in STEPS.items():
        capsys.readouterr()
        assert call("schedule", "explain", str(output), "--job", name) == 0
        told = capsys.readouterr().out
        assert call("schedule", "explain", str(tmp_path / "state.json"), "--job", name) == 0

        assert capsys.readouterr().out == told
        assert told.startswith(f"{name}: done after {steps} steps\n")
        assert "as decided" in told
        assert "first in a group at" in told


def test_a_run_that_refused_all_can_be_asked(tmp_path, monkeypatch, capsys):
    """Nothing was decided, and the ledger has the reason; a state there is none."""
    monkeypatch.setattr(service, "ForkServer", ForkHere)
    jobs = write_jobs(tmp_path / "jobs", wide=3)
    file = jobs / "jobs.yaml"
    file.write_text(file.read_text().replace("max_slowdown: 8.0", "gpus: 7"))
    assert call(*words(jobs, tmp_path / "run")) == 1
    capsys.readouterr()

    assert call("schedule", "explain", str(tmp_path / "run"), "--job", "wide") == 0
    told = capsys.readouterr().out
    assert told.startswith("wide: refused: it asks for 7 GPUs and the cluster has 1")
    assert call("schedule", "state", str(tmp_path / "run"), "-o", str(tmp_path / "s.json")) == 1
    assert "the run has decided nothing yet" in capsys.readouterr().err


def test_a_base_that_was_not_measured_is_refused_with_what_to_do(tmp_path, monkeypatch, capsys):
    """A CPU has no data sheet, and nobody asked for one."""
    monkeypatch.setattr(service, "ForkServer", ForkHere)
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path / "none"))
    jobs = write_jobs(tmp_path / "jobs", a=3, b=3, c=3)
    given = ("run", str(jobs), "-o", str(tmp_path / "run"), "--device", "cpu", "--until-empty")

    assert call(*given) == 1
    told = capsys.readouterr().err
    assert told.count("T0922") == 3
    assert "was not measured on this machine's cpu" in told
    # Whole for the first job of the base, in one line for the others.
    assert told.count("tlora-fx profile JOBS.yaml --eager --tokens 64,256,1024 --lengths 32") == 1
    assert [told.count(f"{name} cannot run") for name in "abc"] == [1, 1, 1]
    assert told.count("as told of 'a'") == 2


def test_a_folder_of_jobs_that_is_not_there_leaves_nothing_behind(tmp_path, capsys):
    """It is found out before anything is written."""
    assert call(*words(tmp_path / "nowhere", tmp_path / "run")) == 1
    assert "T0954" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_a_library_misses_is_not_told(tmp_path):
    """The first job imports PEFT, which looks for libraries; only the run speaks."""
    script = (
        "from tlora_fx.scheduler.requests import quiet_import\n"
        "import logging\n"
        "quiet_import('tests.cost.noisy')\n"
        "logging.getLogger('later').warning('heard')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )

    assert "I miss a part" not in ran.stderr
    assert "I am broken" in ran.stderr
    assert "heard" in ran.stderr


def test_a_job_that_is_not_there_cannot_be_asked(trained, capsys):
    """The nearest name is told."""
    assert call("schedule", "explain", str(trained[1]), "--job", "aa") == 1
    assert "T0903" in capsys.readouterr().err


def test_a_folder_without_a_state_is_told(tmp_path, capsys):
    """So is a file that is none."""
    (tmp_path / "no.json").write_text("{}")
    for source in (tmp_path, tmp_path / "no.json"):
        assert call("schedule", "explain", str(source), "--job", "a") == 1
        assert "T0955" in capsys.readouterr().err


def test_a_profile_of_other_hardware_is_refused(tmp_path, capsys):
    """Before anything is written."""
    jobs = write_jobs(tmp_path / "jobs", **STEPS)
    profile = next(SHIPPED.glob("*.json"))
    given = ("run", str(jobs), "-o", str(tmp_path / "run"), "--device", "cpu")

    assert call(*given, "--profile", str(profile)) == 1
    assert "T0922" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "more", [("--horizon", "soon"), ("--horizon", "0s"), ("--slots", "0")], ids=" ".join
)
def test_options_that_say_nothing_are_refused(tmp_path, more):
    """As wrong usage."""
    assert call(*words(tmp_path, tmp_path / "run", *more)) == 2


def test_more_slots_than_cores_are_refused(tmp_path, capsys):
    """With how many there are."""
    jobs = write_jobs(tmp_path / "jobs", **STEPS)
    assert call(*words(jobs, tmp_path / "run", "--slots", "100000")) == 1
    assert "T0953" in capsys.readouterr().err


@pytest.mark.usefixtures("hears_hangups")
def test_a_closed_terminal_drains_a_run_once(monkeypatch):
    """SIGHUP may come twice; under nohup it says nothing."""
    left = []
    monkeypatch.setattr(run_options, "leave_terminal", lambda: left.append(True))
    heard = SimpleNamespace(stopping=False)
    heard.stop = lambda: setattr(heard, "stopping", True)
    with StopSignals(heard):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    under_nohup = stop_signals()
    signal.signal(signal.SIGHUP, ignored)

    assert heard.stopping
    assert left == [True, True]
    assert set(under_nohup) == {signal.SIGINT, signal.SIGTERM}


def test_a_line_for_a_terminal_that_is_gone_ends_no_run(monkeypatch):
    """Its groups are to be drained first; a full pipe is another matter."""
    left = []
    monkeypatch.setattr(interrupts, "leave_terminal", lambda: left.append(True))

    def refuse(number):
        def write(text):
            raise OSError(number, "refused")

        return SimpleNamespace(write=write, flush=lambda: None, isatty=lambda: False)

    Page(Console(file=refuse(errno.EIO))).say("heard by nobody")

    assert left == [True]
    with pytest.raises(OSError, match="refused"):
        Page(Console(file=refuse(errno.ENOSPC))).say("heard by nobody")


@pytest.mark.slow
def test_the_command_is_killed_and_goes_on(tmp_path):
    """As processes: killed twice, interrupted once, and every job is trained once."""
    steps = {"a": 40, "b": 60}
    jobs = write_jobs(tmp_path / "jobs", **steps)
    command = [sys.executable, "-m", "tlora_fx", *words(jobs, tmp_path / "run", "--slots", "2")]
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT):
        started = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        time.sleep(35)
        started.send_signal(number)
        started.communicate(timeout=900)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)

    assert ended.returncode == 0, ended.stderr
    for name, count in steps.items():
        lines = (tmp_path / "run" / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, count + 1))
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("name", ["", "jobs.yml.txt"])
def test_a_folder_without_job_files_is_refused(tmp_path, name, capsys):
    """With what lies in it; an earlier run showed an empty table and was content."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    if name:
        (jobs / name).touch()

    assert call(*words(jobs, tmp_path / "run")) == 1

    told = capsys.readouterr().err
    assert "the folder holds no job files" in told
    assert (name or "an empty folder") in told
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_job_that_came_joins_the_group_that_trains(tmp_path):
    """As docs/running.md says: on one CPU slot, by the default policy, without a new process."""
    entry = {"lora": {"r": 4}, "per_device_train_batch_size": 2, "max_length": 32}
    entry["data"] = {"path": str(QUICKSTART / "data" / "records.jsonl")}
    base = {"config": str(QUICKSTART / "base"), "dtype": "float32"}
    jobs, output = tmp_path / "jobs", tmp_path / "run"
    jobs.mkdir()

    def add(name: str, steps: int) -> None:
        job = {"name": name, "max_steps": steps, "schedule": {"max_slowdown": 3.0}, **entry}
        text = yaml.safe_dump({"base": base, "jobs": [job]})
        (jobs / f"{name}.yaml").write_text(text)

    add("a", 1_000_000)
    given = [*words(jobs, output), "--slots", "1"]
    given[given.index("--horizon") + 1] = "12s"
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", "tlora_fx", *given], stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as running:  # fmt: skip
        for line in running.stderr:
            lines.append(" ".join(line.split()))
            if "group 1 on 0: a" in line:
                add("b", 150)
            if "b done" in line:
                assert call("stop", str(output), "a") == 0

    assert running.returncode == 0
    assert any(line.endswith("group 1 goes on as 2: b joins") for line in lines)
    groups = output / "groups"
    told = [EventReader(groups / epoch / "events.jsonl").lines() for epoch in ("000001", "000002")]
    first, second = ([line for line in log if line["kind"] == "started"] for log in told)
    assert first[0]["process"] == second[0]["process"]
    assert second[0]["steps"]["a"] > 0
    assert Ledger(output / "ledger.sqlite").epochs()[0].how == "goes on as 2"


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path, capsys):
    """A run would write over adapters that `train` has left there."""
    jobs = write_jobs(tmp_path / "jobs", **STEPS)
    output = tmp_path / "trained"
    (output / "checkpoints").mkdir(parents=True)
    (output / "run.json").write_text('{"jobs": ["a"]}')

    with pytest.raises(SystemExit):
        main(["run", str(jobs), "-o", str(output), "--profile", str(PROFILE)])

    told = " ".join(capsys.readouterr().err.split())
    assert "error[T0407] the output folder holds something already" in told
    assert "`tlora-fx train` made it" in told
    assert sorted(path.name for path in output.iterdir()) == ["checkpoints", "run.json"]
