"""Layers are compiled beside the first rounds, and take over at a round that a resume repeats."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.parallel.processes import run_processes
from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model import supermodel
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.group_step import Batch, GroupStep, StepOptions
from tlora_fx.runtime.rounds import compilation
from tlora_fx.runtime.rounds.compilation import (
    Compilation,
    CompileProcess,
    CompileRequest,
    example_row,
    numbered,
    why_at_once,
)
from tlora_fx.runtime.run_folder import COMPILED
from tlora_fx.runtime.trainer import Trainer, TrainerCallback, TrainerOptions

ROUNDS = 3


class Pretended:
    """Stands for the other process: it ends when it was asked for its end so often."""

    def __init__(self, request, looks=ROUNDS, code=0):
        self.left, self.code, self.ended = looks, code, False

    @property
    def returncode(self):
        self.left -= 1
        return None if self.left >= 0 else self.code

    def reason(self):
        return "exit status 1: no compiler"

    def end(self):
        self.ended = True


class Snapshots(TrainerCallback):
    """Copies the run's folder at each checkpoint, as a power cut would leave it."""

    def __init__(self, folder):
        self.folder = folder

    def saved(self, path, runs):
        # Older checkpoints are being removed.
        older = [each.name for each in path.parent.glob("step-*") if each != path]
        shutil.copytree(
            self.folder, self.folder.with_name(f"cut-{path.name}"), dirs_exist_ok=True,
            ignore=lambda folder, names: [name for name in names if name in older],
        )  # fmt: skip


class Listening(TrainerCallback):
    """Keeps the warnings, and whether layers were compiled when training began."""

    def __init__(self):
        self.warnings, self.compiled = [], None

    def started(self, runs):
        self.compiled = self.trainer.model.is_compiled

    def warned(self, text):
        self.warnings.append(text)


def the_jobs(folder):
    base = tiny_base(folder)
    fields = {"max_steps": 6, "save_steps": 2, "lora": {"r": 4, "lora_dropout": 0.1}}
    return [make_job(base, "a", seed=1, **fields), make_job(base, "b", seed=2, **fields)]


def trainer_of(jobs, folder, callback=None, *, resume=False, wait_for_compile=False):
    trainer = Trainer(
        compile(jobs), output=folder, device="cpu", data=make_data(jobs), callback=callback,
        resume=resume, options=TrainerOptions(compiled=True, wait_for_compile=wait_for_compile),
    )  # fmt: skip
    if callback is not None:
        callback.trainer = trainer
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose layers are compiled after three rounds, and the folders that cuts would leave."""
    folder = tmp_path_factory.mktemp("compiled")
    jobs = the_jobs(folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "CompileProcess", Pretended)
        trainer = trainer_of(jobs, folder / "run", Snapshots(folder / "run"))
        trainer.run()
    return trainer, jobs, folder


@pytest.fixture
def plain_code(monkeypatch):
    """Layers that are compiled run as they are."""
    monkeypatch.setattr(supermodel, "compile_method", lambda *given: None)


@pytest.fixture
def no_process(monkeypatch):
    """No process is started."""

    def refuse(request):
        raise AssertionError("a process was started")

    monkeypatch.setattr(compilation, "CompileProcess", refuse)


def test_rounds_before_run_as_they_are_and_later_ones_compiled(run):
    """Losses are those of three steps without compiled layers, and three with them."""
    trainer, jobs, folder = run
    data = make_data(jobs)
    step = GroupStep(
        compile(jobs), device="cpu", options=StepOptions(compiled=True, wait_for_compile=False)
    )
    losses = {job.name: [] for job in jobs}
    for number in range(6):
        if number == ROUNDS:
            assert not step.model.is_compiled
            step.compile()
        out = step.accumulate({job.name: Batch(data[job.name].step(number)) for job in jobs})
        step.apply({job.name: {} for job in jobs})
        for name, result in out.items():
            losses[name].append(result.loss)

    assert trainer.model.is_compiled
    assert json.loads((folder / "run" / COMPILED).read_text())["round"] == ROUNDS
    assert losses_of(folder / "run", jobs) == losses


@pytest.mark.parametrize("rounds", [2, 4])
def test_a_resumed_run_compiles_at_the_same_round(run, no_process, rounds):
    """Cut before or after that round, losses and adapters are bitwise those of the whole run."""
    whole, jobs, folder = run
    cut = next(folder.glob(f"cut-step-*{rounds}"))
    shutil.copy(folder / "run" / COMPILED, cut / COMPILED)
    resumed = trainer_of(jobs, cut, resume=True)
    resumed.run()

    assert resumed.model.is_compiled
    assert losses_of(cut, jobs) == losses_of(folder / "run", jobs)
    for job in jobs:
        one, two = (
            adapter_tensors(trainer.model.job_parameters(job.name)) for trainer in (whole, resumed)
        )
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_trains_on_without_the_process_that_compiles(tmp_path, monkeypatch):
    """Where it fails, one warning says why, and layers stay as they are."""
    monkeypatch.setattr(compilation, "CompileProcess", partial(Pretended, looks=1, code=1))
    jobs = the_jobs(tmp_path / "base")
    listening = Listening()
    trainer = trainer_of(jobs, tmp_path / "run", listening)
    runs = trainer.run()

    assert {each.status for each in runs} == {"done"}
    assert ["no compiler" in text for text in listening.warnings].count(True) == 1
    assert not trainer.model.is_compiled
    assert not (tmp_path / "run" / COMPILED).exists()


def test_a_run_that_ends_earlier_ends_the_process(tmp_path, monkeypatch):
    """Nothing compiles on once all jobs are done."""
    monkeypatch.setattr(compilation, "CompileProcess", partial(Pretended, looks=100))
    trainer = trainer_of(the_jobs(tmp_path / "base"), tmp_path / "run")
    ended = []
    end = Pretended.end
    monkeypatch.setattr(Pretended, "end", lambda self: (ended.append(self), end(self)))
    trainer.run()

    assert len(ended) == 1


def test_a_run_may_wait_for_compiled_layers(tmp_path, no_process, plain_code):
    """They are compiled before the first round, which the run's folder holds."""
    listening, jobs = Listening(), the_jobs(tmp_path / "base")
    trainer_of(jobs, tmp_path / "run", listening, wait_for_compile=True).run()

    assert listening.compiled
    assert json.loads((tmp_path / "run" / COMPILED).read_text())["round"] == 0


def test_what_cannot_be_compiled_beside_training_says_why(tmp_path, monkeypatch):
    """Strict mode, caches that are off, plans that cut matrices, and models that are open."""
    jobs = the_jobs(tmp_path)
    group = GroupStep(compile(jobs), device="cpu")
    open_group = GroupStep(
        compile(jobs, open=OpenSlots(("q_proj", "v_proj"), rows=32, jobs=2, rank=16))
    )

    assert why_at_once(group) == ""
    assert why_at_once(open_group) == "jobs come and go"
    assert why_at_once(open_group, fixed_slots=True) == ""
    group.plan = Plan(planner="tensor", mesh=MeshShape(tp=2))
    assert why_at_once(group) == "the plan cuts matrices into pieces"
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    group.plan = Plan(planner="single")
    assert why_at_once(group) == "torch's caches are switched off"
    monkeypatch.setattr(compilation, "is_strict", lambda: True)
    assert why_at_once(group) == "strict mode"


def test_the_process_builds_an_open_model_as_it_is(tmp_path):
    """With its slots and rows, the free ones too: code depends on how weights lie."""
    jobs = the_jobs(tmp_path)
    slots = OpenSlots(("q_proj", "v_proj"), rows=32, jobs=3, rank=16)
    model = compile(jobs, open=slots)
    row = example_row(GroupStep(model, device="cpu"), make_data(jobs))
    found = CompileRequest.of(model, row, ["cpu"]).model()

    assert found.is_open
    assert found.group.open == slots
    assert [job.name for job in found.jobs] == ["a", "b", "free slot 2"]
    assert {path: bank.table for path, bank in found.banks.items()} == {
        path: bank.table for path, bank in model.banks.items()
    }
    for name in ("a", "b"):
        model.release(name)
    assert len(CompileRequest.of(model, row, ["cpu"]).model().members) == 1


def train_two(folder, looks):
    """Train on one of two processes; the rounds before layers are compiled, and what is started."""
    jobs, rounds, started = the_jobs(folder / "base"), [], []

    def start(request):
        started.append(request.devices)
        return Pretended(request, looks)

    switch = Compilation.take_over
    Compilation.take_over = lambda self, done: (rounds.append(done), switch(self, done))
    compilation.CompileProcess = start
    supermodel.compile_method = lambda *given: None
    trainer = Trainer(
        compile(jobs), output=folder / "run", device="cpu", data=make_data(jobs),
        plan=Plan(planner="replicated", mesh=MeshShape(dp=2)),
        options=TrainerOptions(compiled=True, wait_for_compile=False),
    )  # fmt: skip
    trainer.run()
    return rounds, started


def test_the_process_is_told_the_number_of_a_device(monkeypatch):
    """It sets the device that this process uses, also where nobody gave its number."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = [torch.device("cuda"), torch.device("cuda", 0), torch.device("cpu")]
    assert [numbered(device) for device in devices] == ["cuda:1", "cuda:0", "cpu"]


def test_processes_switch_at_one_round(tmp_path):
    """One process of a host compiles for all devices there, and the others wait for its end."""
    tiny_base(tmp_path / "base")
    results = run_processes(2, train_two, tmp_path, 2)

    assert [rounds for rounds, _ in results] == [[2], [2]]
    assert [started for _, started in results] == [[("cpu",)], []]


@pytest.mark.slow
def test_the_process_fills_the_caches_that_training_reads(tmp_path, monkeypatch, fresh_dynamo):
    """What it has compiled is not compiled again, layer by layer, forward and backward."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    jobs = the_jobs(tmp_path / "base")
    data = make_data(jobs)
    step = GroupStep(compile(jobs), device="cpu", options=StepOptions(compiled=True))
    process = CompileProcess(CompileRequest.of(step.model, example_row(step, data), ["cpu"]))
    while process.returncode is None:
        time.sleep(0.1)
    assert process.returncode == 0, process.reason()
    process.end()
    counters.clear()
    step.accumulate({job.name: Batch(data[job.name].step(0)) for job in jobs})

    assert counters["aot_autograd"]["autograd_cache_hit"] == 2
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0


ORPHAN = """
import pathlib, sys, time
from tests.runtime.test_compilation import *

jobs = the_jobs(pathlib.Path(sys.argv[1]))
step = GroupStep(compile(jobs), device="cpu")
process = CompileProcess(CompileRequest.of(step.model, example_row(step, make_data(jobs)), ["cpu"]))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_process_ends_with_the_one_that_started_it(tmp_path):
    """Also where that was killed."""
    program = subprocess.Popen([sys.executable, "-c", ORPHAN, tmp_path], stdout=subprocess.PIPE)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    deadline = time.monotonic() + 900
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert not _is_alive(pid)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except (OSError, IndexError):
        return False
