"""What users want of their jobs happens in the loop, over restarts and kills."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from functools import partial

import httpx
import pytest
import uvicorn

from tests.scheduler.fake_admission import Prepared
from tests.scheduler.fake_admission import request as fake_request
from tests.scheduler.fake_worker import GONE, adapter_of
from tests.scheduler.fork_here import ForkHere
from tests.scheduler.run_folder import audit, kill, options
from tests.scheduler.test_service import require_trained_once
from tests.scheduler.toy import Roofline
from tests.server.conftest import EXAMPLES, job_file, request
from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler import service
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.scheduler.service import Submitters, opened
from tlora_fx.scheduler.store import PARKED, Ledger
from tlora_fx.server import control
from tlora_fx.server.app import make_app
from tlora_fx.server.control import Control, EventLog
from tlora_fx.server.ledger import LOCAL, User
from tlora_fx.server.service import make_service
from tlora_fx.server.submission import IntakeLimits

ME = User(LOCAL, admin=True, priority=9)
KILLS = 60


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
    """Turn a run as `serve` does until a script is through: it yields while it waits."""
    output = it.folder
    store = it.store
    as_served = options(
        linger=None, horizon=0.2, retries=False, removes_files=True,
        submitters=Submitters(store.user_of_file, store.user_of_job, store.wants),
    )  # fmt: skip
    with opened(
        it.store.inbox, output, Cluster(slots, slots, 1, "cpu"), policy_of("megatron"), Roofline(),
        Prepared(), EventLog(it.store), as_served,
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


def test_a_job_that_is_cancelled_before_it_is_restored_does_not_go_on(tmp_path, monkeypatch):
    """Another of its name that comes meanwhile trains all of its own steps, and only those."""
    it = made(tmp_path / "run")
    submit(it, "a", steps=100_000)

    def stop():
        yield from until(lambda: begun(it, "a"))

    run(it, stop)
    steps = len(done(it, "a"))
    monkeypatch.setattr(Prepared, "restored", partial(_waits_for, tmp_path / "go"))

    def cancel():
        it.store.want(ME, "a", "cancel")
        yield from until(lambda: states(it)["a"] == "cancelled")
        it.intake.submit(ME, "a again", job_file("a", max_steps=5), {}, 0)
        yield from until(lambda: states(it)["a"] == "done")
        (tmp_path / "go").touch()
        yield from until(lambda: not (it.folder / "admission" / "000001").exists())

    run(it, cancel)
    assert done(it, "a")[steps:] == [1, 2, 3, 4, 5]


def _waits_for(file, job):
    """Restore a job once there is a file."""
    while not file.exists():
        time.sleep(0.01)


def test_a_job_is_cancelled_before_it_is_prepared(tmp_path, monkeypatch):
    """At once, whether it is being prepared, waits for that, or is in a file that is not read."""
    it = made(tmp_path / "run")
    monkeypatch.setattr(Prepared, "request", partial(_prepared_once, tmp_path / "go"))

    def cancelled(name):
        it.store.want(ME, name, "cancel")
        yield from until(lambda: states(it)[name] == "cancelled")

    def script():
        for name in "abc":
            submit(it, name, steps=5)
        yield from until(lambda: all((it.folder / name).exists() for name in "abc"))
        yield from until((it.folder / "admission" / "000002").exists)
        for name in "abc":
            yield from cancelled(name)
        submit(it, "d", steps=5)
        yield from cancelled("d")
        it.intake.submit(ME, "again", job_file("a", "d", max_steps=3), {}, 0)
        (tmp_path / "go").touch()
        yield from until(lambda: {states(it)[name] for name in "ad"} == {"done"})
        yield from until(lambda: not [*(it.folder / "admission").glob("0*")])

    run(it, script)
    assert {name: done(it, name) for name in "abcd"} == {
        "a": [1, 2, 3], "b": [], "c": [], "d": [1, 2, 3],
    }  # fmt: skip
    assert states(it) == {"a": "done", "b": "cancelled", "c": "cancelled", "d": "done"}
    assert json.loads((it.folder / "b" / "status.json").read_text())["status"] == "cancelled"


def _prepared_once(file, job, now):
    """Prepare a job once there is a file."""
    _waits_for(file, job)
    return fake_request(job, now)


def test_a_job_that_waits_for_its_files_is_cancelled(tmp_path, monkeypatch):
    """And says what it waits for until then."""
    it = made(tmp_path / "run")
    (it.folder / GONE).mkdir(parents=True)
    (it.folder / GONE / "a").touch()
    monkeypatch.setattr(service, "FILES_SECONDS", 0.05)
    monkeypatch.setattr(Prepared, "restored", partial(_gone, it.folder / GONE))
    submit(it, "a", steps=5)

    def script():
        yield from until(lambda: any("gone now" in (job.reason or "") for job in it.store.jobs()))
        assert states(it) == {"a": "queued"}
        it.store.want(ME, "a", "cancel")
        yield from until(lambda: states(it) == {"a": "cancelled"})

    run(it, script)
    assert not begun(it, "a")
    told = [text for (text,) in it.store.rows("SELECT text FROM events")]
    assert "waits for its files: it is gone" in told


def _gone(folder, job):
    """Restore no job while its file in a folder says that its files are gone."""
    if (folder / job.name).exists():
        raise FileNotFoundError("gone now")


def test_a_name_of_a_cancelled_job_is_another_jobs(tmp_path):
    """Whether that had begun or not: the other one trains all of its own steps."""
    it = made(tmp_path / "run")
    submit(it, "a", steps=100_000)
    submit(it, "b", steps=5)

    def again(name, steps):
        it.intake.submit(ME, f"{name} again", job_file(name, max_steps=steps), {}, 0)

    def script():
        yield from until(lambda: begun(it, "a") and states(it).get("b") == "queued")
        it.store.want(ME, "b", "cancel")
        yield from until(lambda: states(it)["b"] == "cancelled")
        again("b", 3)
        it.store.want(ME, "a", "cancel")
        yield from until(lambda: states(it)["a"] == "cancelled")
        yield from until(lambda: not it.store.rows("SELECT 1 FROM epochs WHERE ended IS NULL"))
        (it.folder / "before").write_text(str(len(done(it, "a"))))
        again("a", 4)
        yield from until(lambda: set(states(it).values()) == {"done"})

    run(it, script)
    before = int((it.folder / "before").read_text())
    assert done(it, "a")[before:] == [1, 2, 3, 4]
    assert done(it, "b") == [1, 2, 3]
    assert {job.name: job.total for job in it.store.jobs()} == {"a": 4, "b": 3}
    assert [path.name for path in (it.store.folder / "replaced").iterdir()] == ["000001.a"]


def test_a_job_of_a_cancelled_jobs_name_takes_over_none_of_its_steps(tmp_path):
    """Of one that was paused and then cancelled, whose checkpoint is there."""
    it = made(tmp_path / "run")
    submit(it, "a", steps=100_000)

    def script():
        yield from until(lambda: begun(it, "a"))
        it.store.want(ME, "a", "pause")
        yield from until(lambda: states(it)["a"] == "paused")
        it.store.want(ME, "a", "cancel")
        yield from until(lambda: states(it)["a"] == "cancelled")
        yield from until(lambda: not it.store.rows("SELECT 1 FROM epochs WHERE ended IS NULL"))
        (it.folder / "before").write_text(str(len(done(it, "a"))))
        it.intake.submit(ME, "again", job_file("a", max_steps=4), {}, 0)
        yield from until(lambda: states(it)["a"] == "done")

    run(it, script)
    before = int((it.folder / "before").read_text())
    assert done(it, "a")[before:] == [1, 2, 3, 4]


def test_a_replaced_job_is_not_trained_when_its_file_is_read_again(tmp_path):
    """As by a run that was killed while the others of the file were being prepared."""
    it = made(tmp_path / "run")
    submit(it, "a", "b", steps=5)
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    ledger.submit(request("a"))
    ledger.cancel("a", "its user cancelled it", 1.0)
    ledger.close()
    it.intake.submit(ME, "again", job_file("a", max_steps=3), {}, 0)

    run(it, lambda: until(lambda: states(it) == {"a": "done", "b": "done"}))
    assert done(it, "a") == [1, 2, 3]
    assert done(it, "b") == [1, 2, 3, 4, 5]


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


def test_a_job_of_a_removed_jobs_name_is_another_one_and_trains(tmp_path):
    """In the same process; job files do not stay in the inbox, and GPU-hours stay used."""
    it = made(tmp_path / "run")
    submit(it, "a", "b", steps=5)

    def script():
        yield from until(lambda: set(states(it).values()) == {"done"})
        yield from until(lambda: not list(it.store.inbox.iterdir()) and not it.store.open_jobs())
        yield from until(lambda: not it.store.rows("SELECT 1 FROM epochs WHERE ended IS NULL"))
        before = it.store.gpu_hours(LOCAL)
        for name in "ab":
            it.store.remove(ME, name)
        it.intake.empty_trash()
        assert it.store.gpu_hours(LOCAL) == before > 0
        assert not (it.folder / "a").exists()
        submit(it, "a", "b", steps=7)
        yield from until(lambda: set(states(it).values()) == {"done"})

    run(it, script)
    assert [job.steps for job in it.store.jobs()] == [7, 7]
    assert [job.number for job in it.store.jobs()] == [3, 4]


def forked(action) -> int:
    """A process of its own for an action; its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        os._exit(code)
    return pid


def serve(folder, listening, count):
    """Answer requests and train until so many jobs are done; the paused one waits."""
    it = made(folder)
    config = uvicorn.Config(make_app(it), log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    wanted = {"paused": 1, "done": count}
    run(it, lambda: until(lambda: Counter(states(it).values()) == wanted))


def send(address, steps):
    """Submit jobs, each again and again until the service has answered."""
    with httpx.Client(base_url=address, timeout=5.0) as client:
        for name, count in steps.items():
            body, answer = {"job_file": job_file(name, max_steps=count)}, None
            while answer is None:
                with suppress(httpx.TransportError):
                    answer = client.post(
                        "/api/v1/submissions", json=body, headers={"Idempotency-Key": name}
                    )
            assert answer.status_code in (200, 201), answer.text


def over(pid):
    """Whether a process has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def written(folder):
    """Bytes of what was taken and trained so far."""
    audit = folder / "audit.jsonl"
    taken = len(list((folder / "service" / "inbox").iterdir()))
    return taken, audit.stat().st_size if audit.exists() else 0


def require_kept_over_kills(folder, kills, steps):
    """Kill a service while jobs are sent to it and trained; nothing is lost, nothing doubled.

    returns   how often it was killed before all was done
    """
    chance = random.Random(7)
    it = made(folder)
    submit(it, "paused", steps=40)
    it.store.want(ME, "paused", "pause")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = forked(partial(send, f"http://127.0.0.1:{listening.getsockname()[1]}", steps))
        serves = partial(forked, partial(serve, folder, listening, len(steps)))
        pid, hits = serves(), 0
        for _ in range(kills):
            before = written(folder)
            while written(folder) == before and not over(pid):
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.2))
            if over(pid):
                break
            hits += kill(pid)
            pid = serves()
        assert os.waitpid(sender, 0)[1] == 0
        assert os.waitpid(pid, 0)[1] == 0
    assert hits > 0
    names = [job.name for job in it.store.jobs()]
    assert sorted(names) == sorted(["paused", *steps])
    assert len(it.store.rows("SELECT 1 FROM submissions")) == len(names)
    assert not begun(it, "paused")
    it.store.rows("DELETE FROM jobs WHERE name = 'paused'")
    require_trained_once(folder, steps)
    return hits


def test_a_service_that_is_killed_loses_no_job_and_repeats_none(tmp_path):
    """While jobs are sent, and while they train; what is paused stays paused."""
    require_kept_over_kills(tmp_path / "run", 3, {f"j{index}": 30 for index in range(3)})


@pytest.mark.slow
def test_a_service_that_is_killed_often_loses_no_job_and_repeats_none(tmp_path):
    """The same at 60 points, over 40 jobs."""
    steps = {f"j{index:02d}": 100 + 20 * (index % 7) for index in range(40)}
    assert require_kept_over_kills(tmp_path / "run", KILLS, steps) > KILLS // 2


def test_parked_jobs_stay_parked_until_they_are_compared(tmp_path):
    """Whoever looks after pauses; one that is cancelled there is not compared."""
    it = made(tmp_path / "run")
    sweep = {"parameters": {"seed": [1, 2, 3]}, "halving": {"min_steps": 5, "factor": 2}}
    names = [f"a-seed-{seed}" for seed in (1, 2, 3)]
    it.intake.submit(ME, "a", job_file("a", max_steps=9, eval_split=0.2, sweep=sweep), {}, 0)
    it.store.want(ME, names[2], "pause")

    def script():
        yield from until(lambda: all(begun(it, name) for name in names[:2]))
        yield from until(lambda: all(done(it, name)[-1:] == [5] for name in names[:2]))
        yield from until(lambda: [job.reason for job in it.store.jobs()[:2]] == [PARKED] * 2)
        it.store.want(ME, names[1], "cancel")
        yield from until(lambda: states(it)[names[1]] == "cancelled")
        it.store.want(ME, names[2], "run")
        yield from until(lambda: "queued" not in (states(it)[names[0]], states(it)[names[2]]))
        yield from until(lambda: all(states(it)[name] == "done" for name in (names[0], names[2])))

    run(it, script)
    losses = {name: adapter_of(name, 5) for name in (names[0], names[2])}
    best = min(losses, key=losses.get)
    assert len(done(it, names[1])) == 5
    assert {name: len(done(it, name)) for name in losses} == {
        name: 9 if name == best else 5 for name in losses
    }
