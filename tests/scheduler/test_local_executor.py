"""The local executor with workers that train nothing: processes, events, commits, ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.scheduler.fake_worker import GATE, NEVER_READY, adapter_of
from tests.scheduler.local_bench import FAKE, TWO, worker_of
from tlora_fx.errors import PlaceTaken
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.workers.protocol import DISK_FULL, FILES_ABSENT, EventWriter
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    Failed,
    Finished,
    GroupLaunch,
    GroupStarted,
    Noted,
    Progress,
)
from tlora_fx.scheduler.local import executor, processes
from tlora_fx.scheduler.local.executor import LocalOptions
from tlora_fx.scheduler.local.group import RunningGroup
from tlora_fx.scheduler.local.watchdog import StallLimits, Watchdog
from tlora_fx.scheduler.state import Group


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


def test_a_group_whose_files_cannot_be_read_blames_no_job(tmp_path):
    """Though a job is alone: it is told which jobs lack a file, and why."""
    server = SimpleNamespace(code=lambda worker: FILES_ABSENT, signal=lambda worker, number: None)
    watchdog = Watchdog(StallLimits())
    group = RunningGroup(1, ("a",), tmp_path, server, (7,), float, {}, watchdog, tmp_path / "train")
    absent = {"a": "the base is gone"}
    EventWriter(tmp_path / "events.jsonl").write("failed", reason="x", job="a", absent=absent)
    [failed] = group.events(0.0)

    assert (failed.job, failed.blameless, failed.absent) == (None, True, absent)
    assert failed.reason == "files of its jobs cannot be read: x"


@pytest.mark.parametrize("codes", [(1, FILES_ABSENT), (-signal.SIGKILL, FILES_ABSENT)])
@pytest.mark.parametrize("reason", [None, "process 1 cannot go on"])
def test_a_group_of_which_another_rank_cannot_read_a_file_blames_no_job(tmp_path, codes, reason):
    """The first rank, which alone tells, was killed or knows no more: all jobs are looked at."""
    server = SimpleNamespace(code=codes.__getitem__, signal=lambda worker, number: None)
    watchdog = Watchdog(StallLimits())
    group = RunningGroup(1, ("a",), tmp_path, server, (0, 1), float, {}, watchdog, tmp_path / "run")
    if reason:
        EventWriter(tmp_path / "events.jsonl").write("failed", reason=reason, job=None)
    [failed] = group.events(0.0)

    assert (failed.job, failed.killed, failed.blameless) == (None, False, True)
    assert failed.reason == (reason or "a process ended: files of its jobs cannot be read")
    assert failed.absent == {"a": failed.reason}


def test_a_job_that_is_named_is_at_fault_though_another_rank_cannot_read_a_file(tmp_path):
    """What it did itself is not mended by waiting."""
    server = SimpleNamespace(code=(1, FILES_ABSENT).__getitem__, signal=lambda worker, number: None)
    watchdog = Watchdog(StallLimits())
    group = RunningGroup(1, ("a",), tmp_path, server, (0, 1), float, {}, watchdog, tmp_path / "run")
    EventWriter(tmp_path / "events.jsonl").write("failed", reason="loss nan", job="a")

    assert [(event.job, event.absent) for event in group.events(0.0)] == [("a", {}), (None, {})]


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


def hangs(pid):
    """Whether a process has stopped itself."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


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
