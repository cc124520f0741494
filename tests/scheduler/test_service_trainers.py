"""Runs with real trainers: each job ends as it would have ended alone, whatever happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch

from tests.parallel.processes import run_processes
from tests.scheduler import run_folder
from tests.scheduler.fork_here import ForkHere
from tests.scheduler.run_folder import QUICKSTART, Heard, epochs, kill, records
from tests.scheduler.test_service import Shuffling, require_no_step_past_a_commit_twice
from tlora_fx.compiler import compile
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import UnknownTarget
from tlora_fx.runtime import group_step
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.launching.launch import Launch
from tlora_fx.runtime.rounds.run_checkpoints import Commits, RunCheckpoints
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.workers import protocol
from tlora_fx.runtime.workers import training as worker
from tlora_fx.runtime.workers.protocol import NEEDS_NEW_PROCESS
from tlora_fx.scheduler import service
from tlora_fx.scheduler.executor import Drained, Failed, GroupLaunch, Progress
from tlora_fx.scheduler.local.executor import LocalExecutor, LocalOptions
from tlora_fx.scheduler.state import Group, JobRequest

#: As `tlora-fx verify` bounds a job fused with others against the same job alone in float32.
BOUND = 1e-4
JOBS = """
base: {{config: {base}, dtype: float32}}
defaults: {{lora: {{r: 4, lora_dropout: 0.1}}, per_device_train_batch_size: 2, max_length: 32}}
jobs:
{jobs}
"""
JOB = "  - {{name: {name}, max_steps: {steps}, seed: {seed}, data: {{path: {data}}}}}\n"


@pytest.fixture(autouse=True)
def forked_here(monkeypatch):
    """Workers that need not import anything, and a folder that is looked at often."""
    monkeypatch.setattr(service, "ForkServer", ForkHere)
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.1)


@pytest.fixture
def fast_disk(monkeypatch):
    """A checkpoint is written before the next round begins."""
    monkeypatch.setattr(Commits, "look", Commits.settle)


def write(folder, layers=1, **steps):
    """Job files with one job each, on the quickstart's base with fewer layers."""
    folder.mkdir()
    base = shutil.copytree(QUICKSTART / "base", folder.parent / "base")
    config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": layers}
    (base / "config.json").write_text(json.dumps(config))
    data = QUICKSTART / "data" / "records.jsonl"
    for seed, (name, count) in enumerate(steps.items()):
        entry = JOB.format(name=name, steps=count, seed=seed, data=data)
        (folder / f"{name}.yaml").write_text(JOBS.format(base=base, jobs=entry))
    return folder


def options(**changed):
    given = {"save_seconds": 0.5, "callbacks": ()}
    local = LocalOptions(**{name: changed.pop(name, value) for name, value in given.items()})
    return {"worker": "", "local": local, "horizon": 2.0, **changed}


def alone(folder, name, output):
    """What `train` leaves of a job alone."""
    job_file = load_job_file(folder / f"{name}.yaml")
    Trainer(compile(job_file), output=output / name, device="cpu").run()
    return output / name / name


def require_as_alone(folder, output, names, tmp_path):
    for name in names:
        solo, mine = alone(folder, name, tmp_path / "alone"), output / name
        expected = safetensors.torch.load_file(solo / "adapter_model.safetensors")
        found = safetensors.torch.load_file(mine / "adapter_model.safetensors")
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            assert (found[key] - tensor).norm() <= BOUND * tensor.norm().clamp(min=1e-6)
        steps = [
            [line["step"] for line in read_metrics(at / "metrics.jsonl")] for at in (solo, mine)
        ]
        assert steps[0] == steps[1]
        for file in ("adapter_config.json", "status.json"):
            assert json.loads((solo / file).read_text()) == json.loads((mine / file).read_text())


def test_jobs_that_change_company_end_as_they_would_alone(tmp_path):
    """Drained in the middle and taken up again, in one group and then in another."""
    folder = write(tmp_path / "jobs", a=12, b=9)
    stopped = []

    def stop(it):
        if not stopped and any(run.started is not None for run in it.loop.running.values()):
            stopped.append(it.stop())

    for policy in ("mlora-fifo", "megatron"):
        run_folder.run(folder, tmp_path / "run", Heard(), stop, policy=policy, **options())

    assert {name: one.status for name, one in records(tmp_path / "run").items()} == {
        "a": "done",
        "b": "done",
    }
    require_as_alone(folder, tmp_path / "run", "ab", tmp_path)


def executor_of(folder, tmp_path, names):
    """An executor of two slots for jobs of a folder, and their requests."""
    jobs = [load_job_file(folder / f"{name}.yaml").jobs[0] for name in names]
    executor = LocalExecutor(
        tmp_path / "run",
        Cluster(2, 2, 1, "cpu"),
        {job.name: job.model_dump(mode="json") for job in jobs},
        ForkHere(tmp_path / "log"),
    )
    return executor, [JobRequest(job.name, "base", Demand(), 1, 1) for job in jobs]


@pytest.mark.slow
def test_a_group_of_two_processes_trains_what_one_trains(tmp_path):
    """A layout of two replicas; the group goes on from what one process had committed."""
    folder = write(tmp_path / "jobs", a=12, b=9)
    executor, requests = executor_of(folder, tmp_path, "ab")
    group, wide = Group(("a", "b"), 1, (0,)), Group(("b", "a"), 2, (0, 1))
    executor.reserve(group, 1)
    executor.launch(GroupLaunch(group, 1, requests))
    until(executor, Progress)
    executor.drain(group, 1)
    until(executor, Drained)
    executor.release(group, 1)
    executor.reserve(wide, 2)
    executor.launch(GroupLaunch(wide, 2, requests[::-1], {}, Layout(MeshShape(dp=2))))
    told = until(executor, Drained)
    executor.close()

    assert told.steps == {"a": 12, "b": 9}
    require_as_alone(folder, tmp_path / "run", "ab", tmp_path)


#: Steps of jobs that come and go.
COMING = {"a": 300, "b": 200, "c": 10}


def come_and_go(executor, requests, layout):
    """Two processes train a and b; then b leaves as c comes, and b is back."""
    group = Group(("a", "b"), 2, (0, 1))
    executor.reserve(group, 1)
    executor.launch(GroupLaunch(group, 1, requests[:2], {}, layout))
    until(executor, Progress)
    processes = executor._groups[1].workers
    for epoch, names in enumerate((("a", "c"), ("a", "c", "b")), 2):
        successor = replace(group, jobs=names)
        assert executor.can_change(group, epoch - 1, successor)
        executor.change(group, epoch - 1, GroupLaunch(successor, epoch, requests))
        assert until(executor, Drained).successor == epoch
        executor.release(group, epoch - 1)
        group = successor
    assert executor._groups[3].workers == processes
    assert until(executor, Drained).steps == COMING
    executor.release(group, 3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    Layout(MeshShape(dp=2)), Layout(MeshShape(dp=2), True),
    Layout(MeshShape(tp=2)), Layout(MeshShape(pp=2)),
])  # fmt: skip
def test_jobs_join_and_leave_a_group_of_two_processes(tmp_path, layout):
    """Whatever each of them holds, each job ends as it does alone."""
    folder = write(tmp_path / "jobs", layers=2, **COMING)
    executor, requests = executor_of(folder, tmp_path, COMING)
    come_and_go(executor, requests, layout)
    executor.close()

    require_as_alone(folder, tmp_path / "run", COMING, tmp_path)


def train_in_turn(orders):
    """Have a process carry out orders one after the other; what it needed for each."""
    needed = []

    def noting(what, function):
        return lambda *given, **named: needed.append(what) or function(*given, **named)

    with pytest.MonkeyPatch.context() as changes:
        loads = noting("base", group_step.base_tensors)
        changes.setattr(group_step, "base_tensors", loads)
        changes.setattr(worker, "compile", noting("code", worker.compile))
        for order in orders:
            assert worker.main(order)
            assert worker.stays()
    kept = worker._kept[0]
    return needed, list(kept.members), kept.applied.mesh.size


@pytest.mark.parametrize(("mesh", "shard_base"), [
    ("dp=2", False), ("dp=2", True), ("tp=2", False), ("pp=2", False),
])  # fmt: skip
def test_processes_of_a_group_keep_their_model_for_the_next_one(tmp_path, mesh, shard_base):
    """They compile and load once, and every job ends as alone."""
    folder, orders = write(tmp_path / "jobs", layers=2, a=6, b=5, c=4, d=7), []
    for epoch, names in enumerate(("ab", "c", "d"), 1):
        own = tmp_path / "run" / "groups" / str(epoch)
        own.mkdir(parents=True)
        jobs = [load_job_file(folder / f"{name}.yaml").jobs[0] for name in names]
        orders.append(own / "worker.json")
        protocol.WorkerConfig(
            epoch, tuple(job.model_dump(mode="json") for job in jobs), {}, str(own / "train"),
            str(tmp_path / "run"), str(own / "events.jsonl"), gpus=(0, 1), mesh=mesh,
            shard_base=shard_base, stays="one",
        ).write(orders[-1])  # fmt: skip
    found = run_processes(2, train_in_turn, orders)

    assert found == [(["code", "base"], ["d"], 2)] * 2
    require_as_alone(folder, tmp_path / "run", "abcd", tmp_path)


def not_fitting(model, jobs):
    return False


def without_targets(model, jobs):
    raise UnknownTarget("no module of the base is called so")


@pytest.mark.parametrize("refuse", [not_fitting, without_targets])
def test_processes_of_a_group_end_where_their_model_does_not_fit_the_next_one(
    tmp_path, monkeypatch, refuse
):
    """New ones take its order, and tell what is wrong: what several share is not made twice."""
    folder = write(tmp_path / "jobs", a=6)
    (config,) = orders_of(folder, tmp_path, "a")
    monkeypatch.setattr(worker, "_kept", [SimpleNamespace(members={})])
    monkeypatch.setattr(worker, "_joined", refuse)
    monkeypatch.setattr(Launch, "found", lambda: Launch(rank=1, size=2))

    with pytest.raises(SystemExit) as stopped:
        worker.main(Path(config.event_log).with_name("worker.json"))
    assert stopped.value.code == NEEDS_NEW_PROCESS


def test_a_worker_keeps_its_model_for_the_next_group(tmp_path, monkeypatch):
    """The second group of a base is formed without tracing or loading; both end as alone."""
    folder = write(tmp_path / "jobs", a=6, b=5)
    monkeypatch.setattr(worker, "_kept", [])
    models = []
    for epoch, name in enumerate("ab", 1):
        job = load_job_file(folder / f"{name}.yaml").jobs[0]
        config = protocol.WorkerConfig(
            epoch, (job.model_dump(mode="json"),), {}, str(tmp_path / "groups" / name),
            str(tmp_path / "run"), str(tmp_path / "events.jsonl"), stays="one",
        )  # fmt: skip
        trainer = worker._trainer(config, Launch(), None)
        models.append(trainer.model)
        with monkeypatch.context() as changes:
            if epoch == 2:
                changes.setattr(group_step, "base_tensors", None)
            trainer.run()
        worker.keep(trainer)

    assert worker.stays()
    assert models[0] is models[1] is worker._kept[0]
    require_as_alone(folder, tmp_path / "run", "ab", tmp_path)


class AtOnce:
    """Reads data before anybody goes on."""

    def submit(self, read, *arguments):
        future = Future()
        future.set_result(read(*arguments))
        return future


def orders_of(folder, tmp_path, *groups):
    """Orders of groups that become each other, each told of the next one."""
    run, configs = tmp_path / "run", []
    for epoch, names in enumerate(groups, 1):
        jobs = [load_job_file(folder / f"{name}.yaml").jobs[0] for name in names]
        own = tmp_path / "groups" / str(epoch)
        own.mkdir(parents=True)
        configs.append(protocol.WorkerConfig(
            epoch, tuple(job.model_dump(mode="json") for job in jobs),
            {name: str(run) for before in groups[: epoch - 1] for name in before},
            str(run), str(run), str(own / "events.jsonl"), stays="one", keeps=tuple("abc"),
        ))  # fmt: skip
        configs[-1].write(own / "worker.json")
    for config, successor in pairwise(configs):
        log = Path(config.event_log)
        log.with_name(protocol.SUCCESSOR).write_text(
            str(Path(successor.event_log).with_name("worker.json"))
        )
    return configs


def told_by(config):
    return list(protocol.EventReader(Path(config.event_log)).lines())


@pytest.mark.usefixtures("fast_disk")
def test_jobs_join_and_leave_a_group_that_trains_and_end_as_alone(tmp_path, monkeypatch):
    """b leaves and comes back, c comes; one model trains them all, and each log has its own."""
    folder = write(tmp_path / "jobs", a=12, b=7, c=5)
    monkeypatch.setattr(worker, "_kept", [])
    monkeypatch.setattr(worker, "_reader", AtOnce())
    first, second, third = orders_of(folder, tmp_path, "ab", "ac", "acb")
    worker._train(first, Launch())

    logs = [told_by(config) for config in (first, second, third)]
    assert [log[-1]["kind"] for log in logs] == ["handed_over", "handed_over", "ended"]
    assert [set(log[0]["steps"]) for log in logs] == [set("ab"), set("ac"), set("abc")]
    (left,) = [line["steps"]["b"] for line in logs[0] if line["kind"] == "saved"][-1:]
    assert 0 < left == logs[2][0]["steps"]["b"] - 1
    ended = [name for line in logs[2] for name in line.get("ended", {})]
    assert set(ended) == set("abc")
    require_as_alone(folder, tmp_path / "run", "abc", tmp_path)


def test_a_group_is_handed_over_by_the_checkpoint_that_holds_who_left(tmp_path, monkeypatch):
    """One from before the change, which is told after it, hands nobody over."""
    folder = write(tmp_path / "jobs", a=12, b=9, c=5)
    monkeypatch.setattr(worker, "_kept", [])
    monkeypatch.setattr(worker, "_reader", AtOnce())
    first, second = orders_of(folder, tmp_path, "ab", "ac")
    came, waited = threading.Event(), []
    save, stepped = CheckpointStore.save, worker.EventCallback.stepped
    look = worker.EventCallback.look

    def slow_save(self, *given, **named):
        if not waited:
            waited.append(came.wait(600))
        return save(self, *given, **named)

    def hear(self, report):
        if report.job == "c":
            came.set()
        stepped(self, report)

    monkeypatch.setattr(CheckpointStore, "save", slow_save)
    monkeypatch.setattr(worker.EventCallback, "stepped", hear)
    # One checkpoint after the first round; jobs change after the second.
    asked = set()
    monkeypatch.setattr(
        RunCheckpoints, "is_due", lambda self: self not in asked and not asked.add(self)
    )
    monkeypatch.setattr(
        worker.EventCallback, "look", lambda self: self.trainer.rounds > 1 and look(self)
    )
    worker._train(first, Launch())

    told = told_by(first)
    assert waited == [True]
    assert [line["steps"]["b"] for line in told if line["kind"] == "saved"] == [1, 2]
    assert told[-1]["kind"] == "handed_over"
    assert told_by(second)[-1]["kind"] == "ended"
    require_as_alone(folder, tmp_path / "run", "ac", tmp_path)


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.parametrize("coming", ["acd", "abc"])
def test_a_job_whose_data_is_gone_when_it_joins_stays_away_and_nobody_waits(
    tmp_path, monkeypatch, coming
):
    """The others join and leave as they should, and end as alone; it is named with the reason."""
    folder = write(tmp_path / "jobs", a=12, b=9, c=5, d=6)
    data, written = tmp_path / "records.jsonl", (folder / "c.yaml").read_text()
    records_path = str(QUICKSTART / "data" / "records.jsonl")
    (folder / "c.yaml").write_text(written.replace(records_path, str(data)))
    data.symlink_to(QUICKSTART / "data" / "records.jsonl")
    monkeypatch.setattr(worker, "_kept", [])
    monkeypatch.setattr(worker, "_reader", AtOnce())
    first, second = orders_of(folder, tmp_path, "ab", coming)
    data.unlink()
    worker._train(first, Launch())

    told = told_by(first)
    assert [line["kind"] for line in told if line["kind"] == "declined"] == []
    assert list(told[-1]["absent"]) == ["c"]
    assert str(data) in told[-1]["absent"]["c"]
    assert set(told_by(second)[0]["steps"]) == set(coming) - {"c"}
    assert not (tmp_path / "run" / "c").exists()
    require_as_alone(folder, tmp_path / "run", sorted(set(coming) - {"c"}), tmp_path)


def test_a_job_leaves_a_group_that_trains_where_nobody_comes(tmp_path, monkeypatch):
    """The other one trains on, without a new formation."""
    folder = write(tmp_path / "jobs", a=12, b=7)
    monkeypatch.setattr(worker, "_kept", [])
    monkeypatch.setattr(worker, "_reader", AtOnce())
    first, second = orders_of(folder, tmp_path, "ab", "a")
    worker._train(first, Launch())

    assert [told_by(config)[-1]["kind"] for config in (first, second)] == ["handed_over", "ended"]
    require_as_alone(folder, tmp_path / "run", "a", tmp_path)


def test_a_job_of_another_structure_is_declined_and_the_others_train_on(tmp_path, monkeypatch):
    """Also a wrong one; the reason is told, and nobody has left."""
    folder = write(tmp_path / "jobs", a=4, b=4, c=4)
    text = (folder / "c.yaml").read_text()
    (folder / "c.yaml").write_text(text.replace("r: 4,", "r: 64, "))
    monkeypatch.setattr(worker, "_kept", [])
    monkeypatch.setattr(worker, "_reader", AtOnce())
    first, second = orders_of(folder, tmp_path, "ab", "ac")
    worker._train(first, Launch())

    told = told_by(first)
    (declined,) = [line["reason"] for line in told if line["kind"] == "declined"]
    assert "a rank of 16 at most" in declined
    assert told[-1]["kind"] == "ended"
    assert [line["steps"] for line in told if line["kind"] == "saved"][-1] == {"a": 4, "b": 4}
    assert not Path(second.event_log).exists()


def until(executor, kind):
    """Wait for an event."""
    end = time.monotonic() + 900
    while time.monotonic() < end:
        for event in executor.events():
            assert not isinstance(event, Failed), event.reason
            if isinstance(event, kind):
                return event
        time.sleep(0.02)
    raise AssertionError(kind)


class Audit(TrainerCallback):
    """Writes down where jobs begin, what steps they do, and what is committed, as they happen.

    A trainer says who has joined after the first round with it: its first step says so here.
    """

    def write(self, what, run_folder, jobs):
        now = time.time()
        lines = "".join(json.dumps([now, 0, what, *job]) + "\n" for job in jobs)
        handle = os.open(run_folder / "audit.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, lines.encode())
        os.close(handle)

    def started(self, runs):
        self.folder = runs[0].folder.jobs.resolve()
        self.inside = {run.job.name for run in runs}
        self.write("begin", self.folder, [(run.job.name, run.step) for run in runs])

    def stepped(self, report):
        if report.job not in self.inside:
            self.inside.add(report.job)
            self.write("begin", self.folder, [(report.job, report.step - 1)])
        self.write("step", self.folder, [(report.job, report.step)])

    def saved(self, path, runs):
        self.write("commit", self.folder, [(run.job.name, run.step) for run in runs])
        self.inside -= {run.job.name for run in runs if run.left}


AUDITED = {"callbacks": (f"{__name__}:Audit",), "save_seconds": 0.3}


def lines_of(output):
    """How often somebody began, did a step or committed it so far."""
    path = output / "audit.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Patient(Shuffling):
    """Changes company as soon as every job has got further in the last, however long that takes."""

    def __init__(self):
        super().__init__(1.0)
        self.turn, self.before = 0, {}

    def decide(self, state, *, explain=False):
        steps = {name: job.steps_done for name, job in state.jobs.items()}
        if all(done > self.before.get(name, -1.0) for name, done in steps.items()):
            self.turn, self.before = self.turn + 1, steps
        return super().decide(replace(state, now=float(self.turn)))


def killed_at_random(folder, output, points, chance):
    """A run that is killed so often: itself, with its workers, or a worker alone."""
    given = options(**AUDITED, horizon=0.5, refresh=1, tries=1000)
    pid = None
    for _ in range(points):
        pid = pid or run_folder.forked(folder, output, **given)
        wanted, end = lines_of(output) + chance.randrange(100), time.monotonic() + 60
        while lines_of(output) < wanted and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 0.15))
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if chance.random() < 0.5:
            for one in workers[: chance.randint(1, 2)]:
                os.kill(int(one), signal.SIGKILL)
        if chance.random() < 0.7 or not workers:
            assert kill(pid)
            pid = None
    pid = pid or run_folder.forked(folder, output, **given)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.slow
def test_jobs_that_join_leave_and_move_survive_forty_kills(tmp_path, monkeypatch):
    """None is lost, none trained twice past its last commit, each ends as it does alone."""
    points, output = 40, tmp_path / "run"
    monkeypatch.setattr(run_folder, "policy_of", lambda name: Patient())
    # More than can be done before the last kill.
    steps = {name: 20 * points + 50 * seed for seed, name in enumerate("abcde")}
    folder = write(tmp_path / "jobs", **steps)
    killed_at_random(folder, output, points, random.Random(20))

    hows = [record.how or "" for record in epochs(output)]
    assert sum(how.startswith("goes on as") for how in hows) > points // 2
    done = {name: (record.status, record.steps) for name, record in records(output).items()}
    assert done == {name: ("done", count) for name, count in steps.items()}
    for name in steps:
        require_no_step_past_a_commit_twice(output, name)
    require_as_alone(folder, output, steps, tmp_path)


def dies_after(name):
    """Kill this process after a method of its trainer, once jobs have come and gone."""
    method = getattr(Trainer, name)

    def dies(self, *given, **named):
        value = method(self, *given, **named)
        if any(run.left for run in self.runs):
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    setattr(Trainer, name, dies)


LATER = [pytest.param(name, marks=pytest.mark.slow) for name in ("_tell_of_changes", "_save")]


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.parametrize("moment", ["_change", *LATER])
def test_a_worker_that_is_killed_as_jobs_come_and_go_costs_no_job_its_commits(
    tmp_path, monkeypatch, moment
):
    """After rows were written, the change, or its checkpoint: all go on, and end as alone."""
    folder, output = write(tmp_path / "jobs", a=9, b=6, c=5), tmp_path / "run"
    monkeypatch.setattr(worker, "_kept", [])
    monkeypatch.setattr(worker, "_reader", AtOnce())
    first, _, third = (
        replace(config, save_seconds=0.0, callbacks=AUDITED["callbacks"])
        for config in orders_of(folder, tmp_path, "ab", "ac", "abc")
    )
    pid = os.fork()
    if pid == 0:
        try:
            dies_after(moment)
            worker._train(first, Launch())
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    committed = CheckpointStore(output).counters()
    again = replace(
        third, sources={name: str(output) for name in committed}, output=str(tmp_path / "again")
    )
    worker._train(again, Launch())

    assert committed["b"]["step"] > 0
    for name in "abc":
        require_no_step_past_a_commit_twice(output, name)
    require_as_alone(folder, output, "abc", tmp_path)


@pytest.mark.slow
def test_trainers_survive_kills(tmp_path):
    """The run is killed at random points; adapters, metrics and status are those of no kill."""
    chance = random.Random(3)
    steps = {"a": 900, "b": 1200, "c": 600}
    folder = write(tmp_path / "jobs", **steps)
    hits = 0
    for _ in range(4):
        pid = run_folder.forked(folder, tmp_path / "run", **options())
        time.sleep(chance.uniform(3.0, 7.0))
        hits += kill(pid)
    _, status = os.waitpid(run_folder.forked(folder, tmp_path / "run", **options()), 0)

    assert status == 0
    assert hits > 1
    assert {one.status for one in records(tmp_path / "run").values()} == {"done"}
    require_as_alone(folder, tmp_path / "run", steps, tmp_path)
