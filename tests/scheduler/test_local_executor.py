"""The local executor with workers that train nothing: processes, events, commits, ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.scheduler.fake_worker import GATE, NEVER_READY, adapter_of, is_there
from tests.scheduler.fork_here import ForkHere
from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import PlaceTaken
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.workers.protocol import (
    DISK_FULL,
    NEEDS_NEW_PROCESS,
    EventWriter,
    WorkerConfig,
)
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    Failed,
    Finished,
    GroupLaunch,
    GroupStarted,
    Noted,
    Progress,
    Warned,
)
from tlora_fx.scheduler.local import executor, processes
from tlora_fx.scheduler.local.executor import LocalExecutor, LocalOptions
from tlora_fx.scheduler.local.group import RunningGroup
from tlora_fx.scheduler.local.processes import ForkServer
from tlora_fx.scheduler.local.watchdog import StallLimits, Watchdog
from tlora_fx.scheduler.state import Group, JobRequest

FAKE = "tests.scheduler.fake_worker"


class Bench:
    """An executor, and what it has told."""

    def __init__(self, folder, more=None, server=ForkServer, **specs):
        self.folder = folder
        self.specs = {name: {"name": name, **spec} for name, spec in specs.items()}
        self.server = server(folder / "server.log", module=FAKE)
        self.executor = LocalExecutor(
            folder, Cluster(2, 2, 1, "cpu"), self.specs, self.server,
            options=LocalOptions(save_seconds=0.1, more=more or {}),
        )  # fmt: skip
        self.told = []

    def launch(self, epoch, *jobs, gpu=0, layout=None):
        group = Group(jobs, 1, (gpu,)) if layout is None else Group(jobs, 2, (0, 1))
        self.executor.reserve(group, epoch)
        requests = [JobRequest(name, "base", Demand(), 1, 1) for name in jobs]
        self.executor.launch(GroupLaunch(group, epoch, requests, {}, layout))
        return group

    def until(self, kind, limit=900.0, **fields):
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for event in self.executor.events():
                self.told.append(event)
            for event in self.told:
                if isinstance(event, kind) and all(
                    getattr(event, k) == v for k, v in fields.items()
                ):
                    return event
            time.sleep(0.01)
        raise AssertionError(f"no {kind.__name__} {fields}: {self.told}")

    def of(self, *kinds):
        return [event for event in self.told if isinstance(event, kinds)]

    def close(self):
        self.executor.close()


@pytest.fixture
def bench(tmp_path):
    """Made when called, closed at the end."""
    made = []

    def make(**specs):
        made.append(Bench(tmp_path, **specs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_group_trains_to_its_end(bench):
    """Started, progress, commits, a finish for each job, and an end that nobody asked for."""
    here = bench(a={"steps": 5}, b={"steps": 9})
    here.launch(1, "a", "b")
    here.until(Drained)

    assert [type(event) for event in here.of(GroupStarted, Finished, Drained)] == [
        GroupStarted, Finished, Finished, Drained,
    ]  # fmt: skip
    assert {event.job: event.steps for event in here.of(Finished)} == {"a": 5, "b": 9}
    assert here.of(Progress)
    assert json.loads((here.folder / "b" / "adapter.json").read_text()) == adapter_of("b", 9)


def test_a_drained_group_goes_on_elsewhere_in_other_company(bench):
    """Each job goes on from what it had committed; no step is done twice."""
    gates = {"gates": {"a": 20, "b": 20}}
    here = bench(more=gates, a={"steps": 40}, b={"steps": 30}, c={"steps": 5})
    first = here.launch(1, "a", "b")
    here.until(Committed)
    here.executor.drain(first, 1)
    left = here.until(Drained, epoch=1).steps
    (here.folder / GATE).touch()
    here.executor.release(first, 1)
    here.launch(2, "b", "c", gpu=1)
    here.launch(3, "a")
    here.until(Drained, epoch=2)
    here.until(Drained, epoch=3)

    assert 0 < left["a"] < 40
    audit = [json.loads(line) for line in (here.folder / "audit.jsonl").read_text().splitlines()]
    for name, steps in (("a", 40), ("b", 30), ("c", 5)):
        assert [step for *_, what, job, step in audit if (what, job) == ("step", name)] == list(
            range(1, steps + 1)
        )
        assert json.loads((here.folder / name / "adapter.json").read_text()) == adapter_of(
            name, steps
        )


def test_a_job_that_fails_leaves_its_neighbour_alone(bench):
    """It is named with its reason; the other finishes in the same group."""
    here = bench(a={"steps": 20}, b={"steps": 20, "fail_at": 3})
    here.launch(1, "a", "b")
    here.until(Drained)

    [failed] = here.of(Failed)
    assert (failed.job, failed.reason) == ("b", "loss nan")
    assert [event.job for event in here.of(Finished)] == ["a"]


@pytest.mark.parametrize(("asked", "told"), [(False, ["a", None]), (True, [None])])
def test_a_group_that_was_asked_to_stop_blames_no_job(tmp_path, asked, told):
    """What its trainer refuses while it is ended may not be the job's fault: it is tried again."""
    server = SimpleNamespace(code=lambda worker: 1, signal=lambda worker, number: None)
    watchdog = Watchdog(StallLimits())
    group = RunningGroup(1, ("a",), tmp_path, server, (7,), float, {}, watchdog, tmp_path / "train")
    EventWriter(tmp_path / "events.jsonl").write("failed", reason="no such module", job="a")
    if asked:
        group.drain()

    assert [event.job for event in group.events(0.0)] == told


@pytest.mark.parametrize("asked", [False, True])
def test_a_process_that_is_asked_to_stop_before_it_listens_has_not_failed(tmp_path, asked):
    """The signal ends it; one that nobody asked to stop has failed by it."""
    server = SimpleNamespace(
        code=lambda worker: -signal.SIGTERM, signal=lambda worker, number: None
    )
    watchdog = Watchdog(StallLimits())
    group = RunningGroup(1, ("a",), tmp_path, server, (7,), float, {}, watchdog, tmp_path / "train")
    if asked:
        group.drain()

    assert [type(event) for event in group.events(0.0)] == [Drained if asked else Failed]


def test_events_of_a_group_are_told_in_the_order_in_which_they_happened(tmp_path):
    """Also where the clock puts a late one behind those that follow."""
    server = SimpleNamespace(code=lambda worker: None, signal=lambda worker, number: None)
    times = iter([70.0, 12.0, 13.0, 80.0])
    watchdog = Watchdog(StallLimits())
    group = RunningGroup(
        1, ("a",), tmp_path, server, (7,), lambda _: next(times), {}, watchdog, tmp_path / "train"
    )
    writer = EventWriter(tmp_path / "events.jsonl")
    for step in range(4):
        writer.write("progress", steps={"a": step})

    assert [event.time for event in group.events(0.0)] == [70.0, 70.0, 70.0, 80.0]


def test_a_group_that_ends_knows_nothing_newer_of_a_job_that_was_to_come_back(
    tmp_path, monkeypatch
):
    """b has done a step elsewhere since it left; a's last checkpoint was not told."""
    left = {"a": 9, "b": 64}
    counters = {name: {"step": step, "status": "running"} for name, step in left.items()}
    monkeypatch.setattr(CheckpointStore, "counters", lambda store: counters)
    group, successor = (
        RunningGroup(epoch, jobs, tmp_path, None, (), float, steps, None, tmp_path)
        for epoch, jobs, steps in ((1, ("a",), {"a": 5}), (2, ("a", "b"), {"a": 5, "b": 65}))
    )
    group.successor = successor

    assert [event.steps for event in group._unwritten(0.0)] == [{"a": 9}]


def test_a_worker_that_is_asked_to_stop_before_it_trains_ends_at_once():
    """Not by an exception, which the code that imports or traces may catch."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, processes._stop)
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM


def test_a_worker_that_dies_sends_its_jobs_back(bench):
    """To their last commit, with how it died."""
    here = bench(a={"steps": 500}, b={"steps": 60, "crash_at": 50})
    here.launch(1, "a", "b")
    failed = here.until(Failed)

    assert failed.job is None
    assert failed.killed
    assert "SIGKILL" in failed.reason
    assert failed.steps == here.of(Committed)[-1].steps
    assert 0 < failed.steps["a"] <= 50


def test_a_worker_whose_disk_was_full_blames_no_job(bench):
    """Its jobs return to their last commit."""
    here = bench(a={"steps": 500, "exit_at": (50, DISK_FULL)})
    here.launch(1, "a")
    failed = here.until(Failed)

    assert (failed.job, failed.killed, failed.blameless) == (None, False, True)
    assert "the disk is full" in failed.reason
    assert failed.steps == here.of(Committed)[-1].steps


def test_a_group_that_hangs_is_killed_and_its_jobs_return(bench):
    """To their last commits, with what was expected of it."""
    here = bench(a={"steps": 500}, b={"steps": 60, "hang_at": 50})

    class Impatient(StallLimits):
        """Half a second, but a busy machine has all the time for the first commits."""

        def of(self, longest_seconds):
            return 0.5 if here.of(Committed) else 900.0

    here.executor.options = LocalOptions(save_seconds=0.1, stall=Impatient())
    here.launch(1, "a", "b")
    failed = here.until(Failed)

    assert failed.job is None
    assert not failed.killed
    assert "made no progress" in failed.reason
    assert "at most 0.5 s" in failed.reason
    assert failed.steps == here.of(Committed)[-1].steps
    assert 0 < failed.steps["a"] <= 50


def test_a_group_that_does_not_stop_is_killed_after_its_grace(bench):
    """Also where it hangs in such a way that it hears no signal."""
    here = bench(a={"steps": 500, "hang_at": 0})
    group = here.launch(1, "a")
    here.until(GroupStarted)
    while not hangs(worker_of(here, 1)):
        time.sleep(0.01)
    here.executor.drain(group, 1)
    here.executor.hurry(0.3)

    assert "did not stop in its grace" in here.until(Failed).reason


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(executor.time, "monotonic", lambda: now[0])
    return now


def after(clock, watchdog, seconds, kind=None):
    """Whether a group is given up after so long; then it is heard of."""
    clock[0] += seconds
    reason = watchdog.reason()
    if kind is not None:
        watchdog.hear(kind)
    return bool(reason)


def test_what_a_group_may_take_follows_from_its_steps(clock):
    """Twenty of its longest, and no less than five minutes; compiling at first is no step."""
    watchdog = Watchdog(StallLimits())
    assert not after(clock, watchdog, 1700.0, "progress")
    assert not after(clock, watchdog, 30.0, "progress")
    assert not after(clock, watchdog, 10.0, "progress")

    assert not after(clock, watchdog, 599.0)
    assert after(clock, watchdog, 2.0)


@pytest.mark.parametrize(("begins", "ends"), [("saving", "saved"), ("evaluating", "evaluated")])
def test_a_group_that_writes_a_checkpoint_or_evaluates_has_time(clock, begins, ends):
    """As before its first step; and that was no step."""
    watchdog = Watchdog(StallLimits(seconds=5.0))
    after(clock, watchdog, 1.0, "progress")
    after(clock, watchdog, 1.0, begins)

    assert not after(clock, watchdog, 1700.0, ends)
    assert after(clock, watchdog, 6.0, "progress")
    assert watchdog.longest == 6.0


def test_a_group_that_nobody_could_hear_has_its_time_again(clock):
    """As while the run waited for its disk."""
    watchdog = Watchdog(StallLimits(seconds=10.0))
    after(clock, watchdog, 5.0, "progress")
    after(clock, watchdog, 1000.0)
    assert watchdog.reason()
    watchdog.excuse()
    assert not watchdog.reason()
    after(clock, watchdog, 11.0)
    assert watchdog.reason()


def test_a_killed_group_tells_nothing_more_and_keeps_its_commits(bench):
    """The next group goes on from the newest checkpoint on disk."""
    here = bench(a={"steps": 100_000})
    group = here.launch(1, "a")
    here.until(Committed)
    here.executor.kill(group, 1)
    here.executor.release(group, 1)
    newest = CheckpointStore(here.folder / "groups" / "000001" / "train").counters()["a"]["step"]
    told = len(here.told)
    here.told += here.executor.events()

    assert len(here.told) == told
    here.launch(2, "a")
    here.until(GroupStarted, epoch=2)
    begins = [
        json.loads(line)[1:] for line in (here.folder / "audit.jsonl").read_text().splitlines()
    ]
    begin = next(step for epoch, what, _, step in begins if (epoch, what) == (2, "begin"))
    assert begin == newest > 0


def test_verbs_may_be_repeated(bench):
    """Idempotent on the epoch: one worker, one drain, one end."""
    here = bench(a={"steps": 100_000})
    group = here.launch(1, "a")
    here.launch(1, "a")
    here.until(GroupStarted)
    for _ in range(3):
        here.executor.drain(group, 1)
    here.until(Drained)
    for _ in range(2):
        here.executor.release(group, 1)
        here.executor.drain(group, 1)

    assert len(here.of(GroupStarted)) == len(here.of(Drained)) == 1


def test_a_place_is_held_once(bench):
    """Two groups cannot have one GPU; a GPU that is not there is nobody's."""
    here = bench(a={"steps": 1})
    here.executor.reserve(Group(("a",), 1, (0,)), 1)

    with pytest.raises(PlaceTaken):
        here.executor.reserve(Group(("b",), 2, (0, 1)), 2)
    with pytest.raises(PlaceTaken):
        here.executor.reserve(Group(("b",), 1, (7,)), 2)
    with pytest.raises(PlaceTaken):
        here.executor.launch(GroupLaunch(Group(("b",), 1, (1,)), 2, []))


def test_old_checkpoints_are_removed_once_no_job_needs_them(bench):
    """A finished group leaves its words, not its states."""
    here = bench(a={"steps": 3})
    group = here.launch(1, "a")
    here.until(Drained)
    here.executor.release(group, 1)

    folder = here.folder / "groups" / "000001"
    assert not (folder / "train").exists()
    assert (folder / "events.jsonl").exists()


def test_workers_end_with_their_parent(bench):
    """With a checkpoint, as if they had been asked to."""
    here = bench(a={"steps": 1_000_000})
    here.launch(1, "a")
    here.until(GroupStarted)
    with closing(here.server):
        pass

    audit = [json.loads(line) for line in (here.folder / "audit.jsonl").read_text().splitlines()]
    assert audit[-1][2] == "commit"
    assert audit[-1][4] == max(line[4] for line in audit)


def test_a_worker_that_cannot_do_with_a_fork_gets_a_process_of_its_own(bench):
    """It can be drained like any other."""
    here = bench(a={"steps": 1_000_000})
    here.executor.options = LocalOptions(save_seconds=0.1, more={"anew": True})
    group = here.launch(1, "a")
    here.until(Committed)
    here.executor.drain(group, 1)

    assert here.until(Drained).steps["a"] > 0
    assert (here.folder / "groups" / "000001" / "anew").exists()


def test_a_dead_fork_server_takes_its_workers_with_it_and_is_replaced(bench):
    """The group has failed; the next one runs."""
    here = bench(a={"steps": 100_000}, b={"steps": 3})
    group = here.launch(1, "a")
    here.until(GroupStarted)
    os.kill(here.server._server.pid, signal.SIGKILL)
    failed = here.until(Failed)
    assert (failed.job, failed.killed, failed.blameless) == (None, False, True)
    assert "killed by the death of its fork server" in failed.reason
    here.executor.release(group, 1)
    here.launch(2, "b")

    assert here.until(Finished).job == "b"
    found = subprocess.run(["pgrep", "-f", FAKE], capture_output=True, text=True, check=False)
    assert len(found.stdout.split()) >= 1


def test_a_group_whose_fork_server_died_before_it_had_imported_was_killed(bench, monkeypatch):
    """A server that never comes so far tries no job forever."""
    monkeypatch.setenv(NEVER_READY, "1")
    here = bench(a={"steps": 100})
    here.launch(1, "a")
    os.kill(here.server._server.pid, signal.SIGKILL)
    failed = here.until(Failed)

    assert (failed.killed, failed.blameless) == (True, False)


def worker_of(bench, epoch, rank=""):
    """The process that carried out an order; of several, the one of a rank."""
    return int((bench.folder / "groups" / f"{epoch:06d}" / f"pid{rank}").read_text())


def wait_for_end(pid):
    """Wait until a process is there no more."""
    end = time.monotonic() + 900
    while is_there(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def hangs(pid):
    """Whether a process has stopped itself."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stay(bench, **specs):
    return bench(more={"stays": True}, **{
        name: {"base": "one", "steps": 1_000_000, **spec} for name, spec in specs.items()
    })  # fmt: skip


def test_a_worker_stays_for_the_next_group_of_its_base(bench):
    """Drained or done, it takes the next order; a group of another base gets another process."""
    here = stay(bench, a={"steps": 20}, b={}, c={"base": "two"})
    done = here.launch(1, "a")
    here.until(Finished, epoch=1)
    here.executor.release(done, 1)
    drained = here.launch(2, "b")
    here.until(Progress, epoch=2)
    here.executor.drain(drained, 2)
    here.until(Drained, epoch=2)
    here.executor.release(drained, 2)
    here.launch(3, "b")
    here.launch(4, "c", gpu=1)
    here.until(Progress, epoch=3)
    here.until(Progress, epoch=4)

    one, two, three, four = (worker_of(here, epoch) for epoch in (1, 2, 3, 4))
    assert one == two == three != four
    assert not here.of(Failed)


TWO, PIPE = Layout(MeshShape(dp=2)), Layout(MeshShape(pp=2))


def both(here, epoch, *jobs, layout=TWO):
    """Have a group of two processes train to its end; these."""
    group = here.launch(epoch, *jobs, layout=layout)
    here.until(Drained, epoch=epoch)
    here.executor.release(group, epoch)
    return [worker_of(here, epoch, rank) for rank in ("", "1")]


def test_processes_of_a_group_stay_for_the_next_one_of_their_layout(bench):
    """Each in its rank, drained or done; another layout has its own, as has a group of one."""
    here = stay(bench, **{name: {"steps": 5} for name in "abde"}, c={})
    first, again = both(here, 1, "a"), both(here, 2, "b")
    drained = here.launch(3, "c", layout=TWO)
    here.until(Progress, epoch=3)
    here.executor.drain(drained, 3)
    here.until(Drained, epoch=3)
    here.executor.release(drained, 3)
    piped = both(here, 4, "d", layout=PIPE)
    alone = run_through(here, 5, "e")

    assert first == again == [worker_of(here, 3, rank) for rank in ("", "1")]
    assert not {*first} & {*piped, alone}
    assert alone not in piped
    assert all(map(is_there, [*first, *piped, alone]))
    assert not here.of(Failed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_is_drained_whose_process_was_stopped_before_it_listened(bench, rank):
    """The other one listens, and waits for it in vain; no job is blamed and none has failed."""
    here = bench(more={"launch_seconds": 600}, a={"steps": 5})
    folder = here.folder / "groups" / "000001"
    folder.mkdir(parents=True)
    # Its first act is to open its log: that of a pipe waits until somebody reads.
    os.mkfifo(folder / f"rank-{rank}.log")
    group = here.launch(1, "a", layout=TWO)
    end = time.monotonic() + 120
    while not (folder / ("pid" if rank else "pid1")).exists() and time.monotonic() < end:
        time.sleep(0.01)
    here.executor.drain(group, 1)
    here.until(Drained)

    assert not (folder / ("pid1" if rank else "pid")).exists()
    assert [type(event) for event in here.told if not isinstance(event, Noted)] == [Drained]


@pytest.mark.parametrize(("code", "steps", "told"), [
    (-signal.SIGKILL, 0, Drained), (1, 0, Drained), (-signal.SIGKILL, 3, Failed),
])  # fmt: skip
def test_a_group_that_has_trained_and_whose_process_was_killed_has_failed(
    tmp_path, code, steps, told
):
    """Its neighbour gave up in time. Before the first step, nothing can be lost by that."""
    codes = {7: 128 + signal.SIGTERM, 8: code}
    server = SimpleNamespace(code=codes.get, signal=lambda worker, number: None)
    group = RunningGroup(
        1, ("a",), tmp_path, server, (7, 8), float, {}, Watchdog(StallLimits()), tmp_path / "train"
    )
    for step in range(steps):
        EventWriter(tmp_path / "events.jsonl", every_seconds=0).progress({"a": step + 1})
    group.drain()

    assert [type(event) for event in group.events(0.0)][-1] is told


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_whose_neighbour_has_gone_are_of_no_use(bench, rank):
    """The next group gets two new ones; the one that was left has ended."""
    here = stay(bench, **{name: {"steps": 5} for name in "abc"})
    first = both(here, 1, "a")
    os.kill(first[rank], signal.SIGKILL)
    for pid in first:
        wait_for_end(pid)
    second = both(here, 2, "b")
    third = both(here, 3, "c")

    assert not {*first} & {*second}
    assert not any(map(is_there, first))
    assert second == third
    assert not here.of(Failed)


def test_processes_that_cannot_take_a_group_let_new_ones_do_it(bench):
    """Those stay in their place."""
    here = stay(bench, **{name: {"steps": 5} for name in "ac"}, b={"steps": 5, "anew": True})
    first, second, third = (both(here, epoch, name) for epoch, name in enumerate("abc", 1))

    assert not {*first} & {*second}
    assert not any(map(is_there, first))
    assert second == third
    assert not here.of(Failed)


def test_a_group_that_is_drained_before_its_processes_are_new_stops(tmp_path):
    """Nobody is there to hear it: one waits for the other to ask for a new one, too."""
    told = []
    server = processes._Server(None, 0)
    server.tell = lambda number, code: told.append((number, code))
    for start in (7, 8):
        server.start({"start": start, "order": "here", "rank": start - 7, "size": 3, "stays": "x"})
    server.do({"signal": 7, "number": signal.SIGTERM})
    server.do({"signal": 8, "number": signal.SIGKILL})

    assert told == [(7, 128 + signal.SIGTERM), (8, -signal.SIGKILL)]
    assert not any(server.gathering.values())


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGKILL, -9), (None, NEEDS_NEW_PROCESS)],
)
def test_no_new_process_begins_for_a_group_that_is_over(monkeypatch, number, code):
    """One was signalled as it had just ended; nor for a new process that ends so itself."""
    told, server = [], processes._Server(None, 0)
    server.tell = lambda number, code: told.append((number, code))
    server.start = None
    pid = os.fork()
    if pid == 0:
        os._exit(NEEDS_NEW_PROCESS)
    # It has ended, and nobody has asked for its code.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    server.children[pid] = {"start": 7, "again": number is not None}
    if number is not None:
        server.do({"signal": 7, "number": number})
    # This process has other children, whose ends are not the server's.
    wait, ended = os.waitpid, os.waitpid(pid, 0)
    answers = iter([ended])
    monkeypatch.setattr(os, "waitpid", lambda which, how: next(answers, (0, 0)))
    server.reap(told=True)
    monkeypatch.setattr(os, "waitpid", wait)

    assert told == [(7, code)]


def test_idle_processes_of_a_group_do_not_hinder_others_whose_run_was_killed(bench):
    """They end; who trains writes a checkpoint, though nobody hears of it."""
    here = stay(bench, a={"steps": 5}, b={})
    here.executor.cluster = Cluster(4, 4, 1, "cpu")
    idle = both(here, 1, "a")
    here.launch(2, "b", gpu=2)
    here.until(Progress, epoch=2)
    server = here.server
    server._server.stdout.close()
    os.close(server._lifeline)
    server._lifeline = None
    server._server.wait(900)

    audit = [json.loads(line) for line in (here.folder / "audit.jsonl").read_text().splitlines()]
    assert not any(map(is_there, idle))
    assert audit[-1][2] == "commit"
    assert audit[-1][4] == max(line[4] for line in audit if line[1] == 2)


def test_idle_processes_of_a_group_go_together_where_one_gpu_is_needed(bench):
    """What they hold on the other GPU is free then, too."""
    here = sharing(bench, {"a": 50, "b": 91}, a={"base": "one"}, b={"base": "two"})
    first = both(here, 1, "a")
    second = run_through(here, 2, "b")

    assert not any(map(is_there, first))
    assert is_there(second)
    assert noted(here, "is let go of: group 2 needs its memory")


def test_a_worker_that_is_killed_is_replaced_and_its_jobs_return(bench):
    """While it trains and while it waits: the next order finds a new process."""
    here = stay(bench, a={}, b={"steps": 20})
    group = here.launch(1, "a")
    committed = here.until(Committed, epoch=1)
    os.kill(worker_of(here, 1), signal.SIGKILL)
    lost = here.until(Failed, epoch=1, job=None)
    here.executor.release(group, 1)
    other = here.launch(2, "b")
    here.until(Drained, epoch=2)
    here.executor.release(other, 2)
    idle = worker_of(here, 2)
    os.kill(idle, signal.SIGKILL)
    wait_for_end(idle)
    here.launch(3, "a")
    begun = here.until(GroupStarted, epoch=3)

    assert begun.epoch == 3
    assert lost.steps["a"] >= committed.steps["a"]
    assert len({worker_of(here, epoch) for epoch in (1, 2, 3)}) == 3


def test_idle_workers_give_way_to_another_base_on_their_gpu(bench):
    """What they hold is free before the new process begins."""
    here = stay(bench, a={"steps": 20}, b={"base": "two"})
    here.executor.options = replace(here.executor.options, device="cuda")
    group = here.launch(1, "a")
    here.until(Drained, epoch=1)
    here.executor.release(group, 1)
    waiting = worker_of(here, 1)
    os.kill(waiting, 0)
    here.launch(2, "b")
    here.until(Progress, epoch=2)

    with pytest.raises(ProcessLookupError):
        os.kill(waiting, 0)


HELD_BY = {"a": "one", "b": "two", "c": "three"}
HELD = dict.fromkeys(HELD_BY.values(), 40)


def sharing(bench, needs, free=50, **specs):
    """Groups on a GPU that tells what is free of it: whoever waits there holds 40 bytes."""
    here = stay(bench, **{name: {"steps": 5, **spec} for name, spec in specs.items()})
    more = {**here.executor.options.more, "held": HELD, "free": free}
    here.executor.options = replace(
        here.executor.options, device="cuda", more=more,
        memory_of=lambda group, jobs: needs[group.jobs[0]],
    )  # fmt: skip
    return here


def run_through(here, epoch, *jobs):
    """Have a group train to its end; the process that did it."""
    group = here.launch(epoch, *jobs)
    here.until(Drained, epoch=epoch)
    here.executor.release(group, epoch)
    return worker_of(here, epoch)


def noted(here, end):
    """Whether something was told of an idle worker that ends so."""
    return any(event.text.endswith(end) for event in here.of(Noted))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_bases_take_turns_in_two_processes(bench, device):
    """Each goes on where its base is, while the other waits beside it; at the end none is left."""
    bases = {name: {"base": base} for name, base in zip("abcdef", ["one", "two"] * 3, strict=True)}
    here = sharing(bench, dict.fromkeys(bases, 50), **bases)
    here.executor.options = replace(here.executor.options, device=device)
    workers = [run_through(here, epoch, name) for epoch, name in enumerate(bases, 1)]
    here.close()

    assert workers[:2] * 3 == workers
    assert len(set(workers)) == 2
    assert noted(here, "stays beside group 6")
    assert not any(map(is_there, workers))


def test_the_oldest_idle_worker_goes_where_memory_is_short(bench):
    """One that was used since stays, and so does whoever fits beside the newcomer then."""
    bases = {"a": "one", "b": "two", "c": "one", "d": "three"}
    here = sharing(
        bench, {"a": 50, "b": 50, "c": 50, "d": 90}, **{n: {"base": b} for n, b in bases.items()}
    )
    one, two, again, three = (run_through(here, epoch, n) for epoch, n in enumerate(bases, 1))

    assert one == again
    assert [is_there(worker) for worker in (one, two, three)] == [True, False, True]
    assert noted(here, "is let go of: group 4 needs its memory")
    assert noted(here, "stays beside group 4")


def test_on_a_cpu_idle_workers_go_where_main_memory_is_short(bench):
    """Two wait; a third base needs more than the machine has."""
    here = sharing(bench, {"a": 50, "b": 50, "c": 1e18}, **{n: {"base": HELD_BY[n]} for n in "abc"})
    here.executor.options = replace(here.executor.options, device="cpu")
    workers = [run_through(here, epoch, name) for epoch, name in enumerate("abc", 1)]

    assert [is_there(worker) for worker in workers] == [False, False, True]


def test_a_base_that_comes_back_needs_what_it_holds_no_second_time(bench):
    """It has 40 bytes and 50 are free: 90 are no reason to end its neighbour, 91 are."""
    here = sharing(
        bench, {"a": 50, "b": 50, "c": 90, "d": 50, "e": 91},
        a={"base": "one"}, b={"base": "two"}, c={"base": "one"}, d={"base": "two"},
        e={"base": "one"},
    )  # fmt: skip
    workers = [run_through(here, epoch, name) for epoch, name in enumerate("abcd", 1)]
    assert workers[2:] == workers[:2]
    last = run_through(here, 5, "e")

    assert last == workers[0]
    assert not is_there(workers[1])


def test_whoever_joins_makes_idle_workers_go_for_whom_there_is_no_room(bench):
    """The group that it joins needs more from then on."""
    here = sharing(
        bench, {"a": 50, "b": 50, "c": 91}, a={"base": "two"}, b={"steps": 1_000_000}, c={}
    )
    idle = run_through(here, 1, "a")
    group = here.launch(2, "b")
    here.until(Progress, epoch=2)
    assert is_there(idle)
    change(here, 2, group, 3, "c", "b")
    here.until(GroupStarted, epoch=3)

    # By the server, which the worker does not wait for.
    wait_for_end(idle)


def test_a_group_without_memory_beside_idle_workers_is_tried_again_without_them(bench):
    """No job is at fault; its base has the GPU for itself from then on."""
    here = sharing(
        bench, {"a": 50, "b": 50, "c": 50, "d": 50},
        a={"base": "two"}, b={}, c={"base": "two"}, d={},
    )  # fmt: skip
    here.specs["b"]["crowded_by"] = idle = run_through(here, 1, "a")
    group = here.launch(2, "b")
    failed = here.until(Failed, epoch=2)
    here.executor.release(group, 2)
    run_through(here, 3, "b")
    other = run_through(here, 4, "c")
    run_through(here, 5, "d")

    assert failed.job is None
    assert "no memory beside idle workers, which are let go of: out of memory" in failed.reason
    assert not is_there(idle)
    assert [event.job for event in here.of(Finished)] == ["a", "b", "c", "d"]
    assert not is_there(other)


def test_a_group_that_has_no_memory_with_nobody_beside_it_is_at_fault(bench):
    """There is nothing to be let go of."""
    here = sharing(bench, {"a": 50}, a={"crowded_by": os.getpid()})
    here.launch(1, "a")

    assert here.until(Failed, job="a").reason == "out of memory"


def test_an_idle_worker_that_is_killed_is_replaced_beside_the_others(bench):
    """What it held counts as free; the other base stays."""
    here = sharing(
        bench, {"a": 50, "b": 50, "c": 90},
        a={"base": "one"}, b={"base": "two"}, c={"base": "one"},
    )  # fmt: skip
    one, two = run_through(here, 1, "a"), run_through(here, 2, "b")
    os.kill(one, signal.SIGKILL)
    wait_for_end(one)
    again = run_through(here, 3, "c")

    assert again not in (one, two)
    assert is_there(two)
    assert not here.of(Failed)


def forked_here(bench, more=None, **specs):
    """Workers of one base that are forked from this process."""
    return bench(server=ForkHere, more=more, **{
        name: {"base": "one", "steps": 1_000_000, **spec} for name, spec in specs.items()
    })  # fmt: skip


def change(here, epoch, group, successor_epoch, *jobs):
    """Let a group go on with other jobs on its place."""
    successor = Group(jobs, group.gpus, group.place)
    assert here.executor.can_change(group, epoch, successor)
    for _ in range(2):
        here.executor.change(group, epoch, GroupLaunch(successor, successor_epoch, []))
    return successor


def test_jobs_join_and_leave_a_group_that_trains_on(bench):
    """One process, and no step is done twice; who left goes on elsewhere and comes back."""
    here = forked_here(bench, a={}, b={}, c={"steps": 5})
    first = here.launch(1, "a", "b")
    here.until(Progress, epoch=1)
    second = change(here, 1, first, 2, "a", "c")
    left = here.until(Drained, epoch=1)
    here.executor.release(first, 1)
    assert left.successor == 2
    assert left.steps["b"] > 0
    assert here.until(GroupStarted, epoch=2).paused is not None
    other = here.launch(3, "b", gpu=1)
    here.until(Finished, epoch=2, job="c")
    here.until(Progress, epoch=3)
    here.executor.drain(other, 3)
    here.until(Drained, epoch=3)
    here.executor.release(other, 3)
    change(here, 2, second, 4, "a", "b")
    here.until(Drained, epoch=2)
    here.executor.release(second, 2)
    here.until(Progress, epoch=4)

    assert here.executor.inventory()
    assert not here.of(Failed)
    steps = [json.loads(line) for line in (here.folder / "audit.jsonl").read_text().splitlines()]
    for name in "ab":
        done = [step for *_, what, job, step in steps if (what, job) == ("step", name)]
        assert done == list(range(1, len(done) + 1))
    assert {epoch for _, epoch, what, job, _ in steps if (what, job) == ("step", "b")} == {1, 3, 4}


def test_jobs_join_a_group_of_several_processes(bench):
    """They keep their mesh and GPUs; of jobs of another base they are not asked."""
    here = forked_here(bench, a={}, b={}, c={"base": "two"})
    before, successor = Group(("a",), 2, (1, 0)), Group(("a", "b"), 2, (0, 1))
    here.executor.reserve(before, 1)
    here.executor.launch(GroupLaunch(before, 1, [], {}, Layout(MeshShape(tp=2))))
    assert not here.executor.can_change(before, 1, Group(("c",), 2, (0, 1)))
    assert here.executor.can_change(before, 1, successor)
    here.executor.change(before, 1, GroupLaunch(successor, 2, []))
    order = WorkerConfig.read(here.folder / "groups" / "000002" / "worker.json")

    mesh = MeshShape.parse(order.mesh)
    assert (mesh, order.gpus, order.keeps) == (MeshShape(tp=2), (1, 0), ("a",))
    assert order.stays


def test_a_group_that_cannot_take_jobs_in_is_formed_anew(bench):
    """Its worker says why; the successor begins on the same place, from what was committed."""
    here = forked_here(bench, a={}, b={"steps": 5})
    first = here.launch(1, "a")
    here.until(Committed, epoch=1)
    here.executor.options = replace(
        here.executor.options, more={**here.executor.options.more, "declines": True}
    )
    change(here, 1, first, 2, "a", "b")
    left = here.until(Drained, epoch=1)
    here.executor.release(first, 1)
    here.until(Finished, epoch=2, job="b")

    assert left.successor is None
    assert "no room" in here.of(Warned)[0].text
    assert here.of(GroupStarted)[-1].paused is None
    assert not here.of(Failed)


def test_a_group_that_ends_before_its_heir_takes_over_is_followed_by_it(bench):
    """Its only job is done; the one that should have joined begins without it."""
    here = forked_here(bench, {"lingers": True}, a={"steps": 3}, b={"steps": 5})
    first = here.launch(1, "a")
    here.until(Finished, epoch=1, job="a")
    assert here.executor.can_change(first, 1, Group(("a", "b"), 1, (0,)))
    here.executor.change(first, 1, GroupLaunch(Group(("a", "b"), 1, (0,)), 2, []))
    (here.folder / GATE).touch()
    here.until(Finished, epoch=2, job="b")

    assert [event.successor for event in here.of(Drained) if event.epoch == 1] == [None]


def test_a_worker_that_dies_while_jobs_join_takes_nobody_along(bench):
    """The successor is never heard of; all go on from their commits."""
    here = forked_here(bench, a={}, b={"steps": 5})
    first = here.launch(1, "a")
    committed = here.until(Committed, epoch=1)
    os.kill(worker_of(here, 1), signal.SIGSTOP)
    successor = change(here, 1, first, 2, "a", "b")
    os.kill(worker_of(here, 1), signal.SIGKILL)
    lost = here.until(Failed, epoch=1, job=None)
    here.executor.release(first, 1)
    here.executor.release(successor, 2)
    here.launch(3, "a", "b")
    here.until(Finished, epoch=3, job="b")

    assert lost.steps["a"] >= committed.steps["a"]
    assert not [event for event in here.told if getattr(event, "epoch", 0) == 2]
