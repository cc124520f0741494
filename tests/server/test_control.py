"""What users want of their jobs happens in the loop, over restarts and kills."""

from __future__ import annotations

import os
import time
import traceback

import pytest

from tests.scheduler.fork_here import ForkHere
from tests.scheduler.run_folder import Prepared, audit, kill, options
from tests.scheduler.toy import Roofline
from tests.server.conftest import EXAMPLES, job_file
from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler import service
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.scheduler.service import opened
from tlora_fx.server import control
from tlora_fx.server.app import make_service
from tlora_fx.server.control import Control, EventLog
from tlora_fx.server.store import LOCAL, User
from tlora_fx.server.submission import IntakeLimits

ME = User(LOCAL, admin=True, priority=9)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    """Nobody waits a second for a file, nor for a server that imports; processes fork from here."""
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(service, "ForkServer", ForkHere)


def made(folder):
    return make_service(folder, IntakeLimits(roots=(EXAMPLES,)), open_to_all=True, gpus=1)


def submit(it, *names, steps, priority=0):
    it.intake.submit(ME, ",".join(names), job_file(*names, max_steps=steps), {}, priority)


def states(it):
    return {job.name: job.state for job in it.store.jobs()}


def run(it, script, *, slots=1):
    """Turn a run until a script is through: it yields while it waits."""
    output = it.folder
    with opened(
        it.store.inbox, output, Cluster(slots, slots, 1, "cpu"), policy_of("megatron"), Roofline(),
        Prepared(), EventLog(it.store), options(linger=None, horizon=0.2),
    ) as running:  # fmt: skip
        running.before_advance = Control(it.store, output, running)
        steps = script()
        while running.turn() and next(steps, "over") != "over":
            time.sleep(0.01)
        running.stop()
        while running.turn():
            time.sleep(0.01)


def until(true):
    """Wait in a script."""
    while not true():
        yield


def begun(it, name):
    return (it.folder / "audit.jsonl").exists() and any(
        what == "step" and job == name for _, _, what, job, _ in audit(it.folder)
    )


def done(it, name):
    return [step for _, _, what, job, step in audit(it.folder) if (what, job) == ("step", name)]


def test_a_paused_job_keeps_its_steps_and_goes_on_from_them(tmp_path):
    """Its place is another's meanwhile; a step that was done is not done again."""
    it = made(tmp_path / "run")
    submit(it, "a", steps=100_000)

    def script():
        yield from until(lambda: begun(it, "a"))
        it.store.want(ME, "a", "pause")
        yield from until(lambda: states(it)["a"] == "paused")
        submit(it, "b", steps=5)
        yield from until(lambda: states(it)["b"] == "done")
        assert states(it)["a"] == "paused"
        before = len(done(it, "a"))
        it.store.want(ME, "a", "run")
        yield from until(lambda: len(done(it, "a")) > before)

    run(it, script)
    assert done(it, "a") == list(range(1, len(done(it, "a")) + 1))


def test_a_job_that_trains_is_cancelled_after_its_step_and_its_group_goes_on(tmp_path):
    """Another that waits is taken back at once; both end as cancelled."""
    it = made(tmp_path / "run")
    submit(it, "a", steps=100_000)
    submit(it, "b", steps=5)

    def script():
        yield from until(lambda: begun(it, "a") and states(it).get("b") == "queued")
        it.store.want(ME, "b", "cancel")
        yield from until(lambda: states(it)["b"] == "cancelled")
        it.store.want(ME, "a", "cancel")
        yield from until(lambda: states(it)["a"] == "cancelled")

    run(it, script)
    assert not begun(it, "b")
    [a, b] = it.store.jobs()
    assert (a.status, b.status) == ("done", "cancelled")
    assert 0 < a.steps < a.total


def test_of_jobs_that_wait_the_highest_priority_is_started_first(tmp_path):
    """Though it came last; what runs is left alone."""
    it = made(tmp_path / "run")
    submit(it, "first", steps=100_000)

    def script():
        yield from until(lambda: begun(it, "first"))
        submit(it, "low", steps=3)
        yield from until(lambda: states(it).get("low") == "queued")
        submit(it, "high", steps=3, priority=5)
        yield from until(lambda: states(it).get("high") == "queued")
        it.store.want(ME, "first", "cancel")
        yield from until(lambda: states(it)["low"] == states(it)["high"] == "done")

    run(it, script)
    order = [job for _, _, what, job, _ in audit(it.folder) if what == "begin"]
    assert order == ["first", "high", "low"]


def test_a_killed_service_goes_on_and_a_paused_job_stays_paused(tmp_path):
    """What was submitted while nobody read is read, what was wanted is done, nothing is lost."""
    folder = tmp_path / "run"
    it = made(folder)
    submit(it, "a", "c", steps=40)
    it.store.want(ME, "c", "pause")
    pid = os.fork()
    if pid == 0:
        try:
            run(made(folder), lambda: until(lambda: False))
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        os._exit(1)
    while not begun(it, "a"):
        time.sleep(0.02)
    assert kill(pid)
    it = made(folder)
    submit(it, "b", steps=5)

    def script():
        yield from until(lambda: states(it) == {"a": "done", "b": "done", "c": "paused"})

    run(it, script)
    assert not begun(it, "c")
    committed = 0
    for _, _, what, job, step in audit(folder):
        if job == "a" and what == "begin":
            assert step >= committed
        if job == "a" and what == "commit":
            committed = max(step, committed)
    assert [job.steps for job in it.store.jobs()][:1] == [40]
