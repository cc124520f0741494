"""Jobs that join and leave a group that trains on, with workers that train nothing."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

from tests.scheduler.fake_worker import GATE
from tests.scheduler.local_bench import change, forked_here, worker_of
from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.plan import MeshShape
from tlora_fx.runtime.workers.protocol import WorkerConfig
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    Failed,
    Finished,
    GroupLaunch,
    GroupStarted,
    Progress,
    Warned,
)
from tlora_fx.scheduler.state import Group


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
