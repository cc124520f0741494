"""The executor of a Ray cluster with actors that are forks of this process: leases, ends, losses.

`test_ray.py` has the same over real raylets.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from importlib import import_module
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from tests.scheduler import fake_worker
from tests.scheduler.local_bench import FAKE, Bench, change
from tests.scheduler.test_ray_cluster import told
from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.load import Demand
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import PlaceTaken
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.workers.protocol import NEEDS_NEW_PROCESS
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    Failed,
    Finished,
    GroupLaunch,
    GroupStarted,
    NodeBack,
    NodeLost,
    Progress,
)
from tlora_fx.scheduler.lease import is_granted
from tlora_fx.scheduler.local.executor import LocalOptions
from tlora_fx.scheduler.local.recovery import recover
from tlora_fx.scheduler.ray import cluster, executor, worker
from tlora_fx.scheduler.ray.cluster import RayCluster, cluster_of, seats_of
from tlora_fx.scheduler.ray.executor import RayExecutor
from tlora_fx.scheduler.ray.worker import Worker
from tlora_fx.scheduler.state import Group, JobRequest

NODES = told(("n0", 1, "a"), ("n1", 1, "a"), resource="CPU")


class RayHere:
    """The part of Ray that the executor uses.

    free     whether placement groups come about
    kills    whether `kill` does; else a killed actor goes on, as on a machine that is cut off
    actors   every one that was made
    """

    def __init__(self):
        self.free = self.kills = True
        self.actors = []

    def remote(self, kind):
        def create(module, version, folder):
            self.actors.append(ActorHere(module))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **named: SimpleNamespace(remote=create))

    def wait(self, replies, timeout, num_returns=1):
        return [reply for reply in replies if reply.ready()], []

    def get(self, reply):
        return [each.value() for each in reply] if isinstance(reply, list) else reply.value()

    def kill(self, actor):
        if self.kills:
            actor.kill()

    def placement_group(self, bundles, bundle_label_selector):
        return SimpleNamespace(wait=lambda seconds: self.free)


class ActorHere:
    """Each order in a fork; what the actor would keep is forgotten."""

    address = SimpleNamespace(remote=lambda: ("127.0.0.1", 4711))

    def __init__(self, module):
        self.worker = Worker.__new__(Worker)
        self.worker.module = import_module(module)
        self.work = SimpleNamespace(remote=self.begin)
        self.replies = []
        self.dead = False
        self.__ray_ready__ = SimpleNamespace(remote=lambda: Answer(self))

    def begin(self, *given):
        self.replies.append(Reply(lambda: self.worker.work(*given)))
        return self.replies[-1]

    def kill(self):
        for reply in self.replies:
            if not reply.ready():
                os.kill(reply.pid, signal.SIGKILL)


class Answer:
    """What an actor that waits answers at once."""

    def __init__(self, actor):
        self.actor = actor

    def ready(self):
        return True

    def value(self):
        if self.actor.dead:
            raise RayError("the actor has died")


class Reply:
    """What a fork answers."""

    def __init__(self, action):
        self.reading, writing = os.pipe()
        self.over = False
        self.pid = os.fork()
        if self.pid == 0:
            os.write(writing, pickle.dumps(action()))
            os._exit(0)
        os.close(writing)

    def ready(self):
        self.over = self.over or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self.over

    def value(self):
        content = os.read(self.reading, 1000)
        os.close(self.reading)
        if not content:
            raise RayError("the actor has died")
        return pickle.loads(content)


class RayBench(Bench):
    """An executor over two nodes of one slot each, and what it has told."""

    def __init__(self, folder, more=None, **specs):
        self.folder = folder
        self.specs = {name: {"name": name, **spec} for name, spec in specs.items()}
        seats = seats_of(NODES, "cpu", None)
        self.nodes = RayCluster("cpu", seats, cluster_of(seats, "cpu"))
        self.told = []
        forks = SimpleNamespace(begin=lambda: None, close=lambda: None)
        self.executor = RayExecutor(
            self.nodes, FAKE, folder, self.nodes.cluster, self.specs, forks,
            options=LocalOptions(save_seconds=0.05, more=more or {}),
        )  # fmt: skip


@pytest.fixture
def ray(monkeypatch):
    here = RayHere()
    # Nobody asks for nodes here.
    monkeypatch.setattr(cluster, "HEAD_SECONDS", float("inf"))
    monkeypatch.setattr(executor, "ray", here)
    monkeypatch.setattr(executor, "placement_group", here.placement_group)
    monkeypatch.setattr(executor, "remove_placement_group", lambda bundles: None)
    monkeypatch.setattr(executor, "PlacementGroupSchedulingStrategy", lambda *given, **named: None)
    return here


@pytest.fixture
def bench(tmp_path, ray):
    made = []

    def make(**specs):
        made.append(RayBench(tmp_path, **specs))
        return made[-1]

    yield make
    ray.kills = True
    for one in made:
        one.close()


def read(here, epoch):
    """What is committed of a formation: each job's steps, and its adapter."""
    train = here.folder / "groups" / f"{epoch:06d}" / "train"
    return CheckpointStore(train).counters()


def test_a_group_trains_to_its_end(bench):
    """Two jobs on one actor; what they leave lies where one machine leaves it."""
    here = bench(a={"steps": 5}, b={"steps": 9})
    here.launch(1, "a", "b")
    here.until(Drained)

    assert [type(event) for event in here.of(GroupStarted, Finished, Drained)] == [
        GroupStarted, Finished, Finished, Drained,
    ]  # fmt: skip
    assert {name: job["step"] for name, job in read(here, 1).items()} == {"a": 5, "b": 9}
    assert (here.folder / "a" / "adapter.json").is_file()


def test_a_group_that_is_asked_to_stop_commits(bench):
    """The signal goes through the folder."""
    here = bench(a={"steps": 10**6})
    group = here.launch(1, "a")
    here.until(Progress)
    here.executor.drain(group, 1)
    end = here.until(Drained)

    assert end.steps["a"] == read(here, 1)["a"]["step"] > 0


def test_a_worker_that_outlives_its_epoch_commits_nothing(bench, ray, monkeypatch):
    """Cut off from its cluster it trains on, and its next commit finds no way."""
    monkeypatch.setattr(worker, "HEAR_SECONDS", 1000.0)
    here = bench(a={"steps": 10**6})
    group = here.launch(1, "a")
    here.until(Committed)
    ray.kills = False
    here.executor.kill(group, 1)
    committed = read(here, 1)
    (reply,) = ray.actors[0].replies
    _, status = os.waitpid(reply.pid, 0)
    reply.over = True

    assert not os.WIFSIGNALED(status)
    assert reply.value() == (1, False)
    assert read(here, 1) == committed


def test_a_worker_ends_with_its_lease(bench, ray):
    """Also where nobody can reach it, and while it waits."""
    here = bench(a={"steps": 5}, more={"step_seconds": 1000})
    here.launch(1, "a")
    here.until(GroupStarted)
    executor.revoke(here.folder / "groups" / "000001")
    _, status = os.waitpid(ray.actors[0].replies[0].pid, 0)
    ray.actors[0].replies[0].over = True

    assert os.WTERMSIG(status) == signal.SIGKILL


def test_the_death_of_an_actor_ends_its_group_at_its_last_commit(bench, ray):
    """Its jobs go on from there, on the same GPU."""
    here = bench(more={"gates": {"a": 20}}, a={"steps": 40})
    group = here.launch(1, "a")
    here.until(Committed)
    ray.actors[0].kill()
    failed = here.until(Failed, job=None)
    (here.folder / fake_worker.GATE).touch()
    here.executor.release(group, 1)
    here.launch(2, "a")
    here.until(Finished, epoch=2)

    assert failed.steps["a"] == read(here, 1)["a"]["step"]
    assert "SIGKILL" in failed.reason
    assert "the actor has died" in failed.reason


def test_a_lost_node_ends_its_groups_and_comes_back(bench, ray):
    """Whether Ray has told of the actor or not; another node's group goes on."""
    here = bench(a={"steps": 10**6}, b={"steps": 10**6})
    group = here.launch(1, "a", gpu=0)
    here.launch(2, "b", gpu=1)
    here.until(Committed, epoch=1)
    here.until(Committed, epoch=2)
    ray.kills = False
    here.nodes._seen = (time.monotonic(), [NODES[1]])
    here.until(NodeLost, node=0)
    failed = here.until(Failed, epoch=1, job=None)
    ray.kills = True
    here.executor.release(group, 1)

    assert failed.steps["a"] == read(here, 1)["a"]["step"]
    assert here.executor.inventory().lost == {0}
    with pytest.raises(PlaceTaken):
        here.executor.reserve(Group(("a",), 1, (0,)), 3)
    here.nodes._seen = (time.monotonic(), [*NODES[1:], *told(("n9", 1, "a"), resource="CPU")])
    here.until(NodeBack, node=0)
    here.executor.reserve(Group(("a",), 1, (0,)), 4)
    assert not [event for event in here.of(Failed) if event.epoch == 2]


def test_a_worker_stays_for_the_next_group_of_its_place(bench, ray):
    """And ends where another base, or a place that overlaps, needs it."""
    here = bench(more={"stays": True}, **{
        name: {"steps": 3, "base": base} for name, base in (("a", "x"), ("b", "x"), ("c", "y"))
    })  # fmt: skip
    for epoch, name in enumerate("abc", 1):
        group = here.launch(epoch, name)
        here.until(Drained, epoch=epoch)
        here.executor.release(group, epoch)

    assert [len(actor.replies) for actor in ray.actors] == [2, 1]


def test_processes_of_a_group_stay_for_the_next_one_until_it_needs_new_ones(
    bench, ray, monkeypatch
):
    """Each of them; where one says that its order is for a new one, all are new."""
    train = fake_worker.main

    def main(order):
        mark = order.with_name("mark")
        if os.environ["RANK"] == "0" and order.parent.name == "000003" and not mark.exists():
            mark.touch()
            raise SystemExit(NEEDS_NEW_PROCESS)
        return train(order)

    monkeypatch.setattr(fake_worker, "main", main)
    here = bench(more={"stays": True}, **{name: {"steps": 3, "base": "x"} for name in "abc"})
    for epoch, name in enumerate("abc", 1):
        group = here.launch(epoch, name, layout=Layout(MeshShape(dp=2)))
        here.until(Drained, epoch=epoch)
        here.executor.release(group, epoch)

    assert [len(actor.replies) for actor in ray.actors] == [3, 3, 1, 1]
    assert [event.job for event in here.of(Finished)] == ["a", "b", "c"]
    assert not here.of(Failed)


def test_the_death_of_an_actor_that_waits_is_seen_before_a_group_needs_it(bench, ray, monkeypatch):
    """Its place is given back, and the next group there has another actor and fails nothing."""
    monkeypatch.setattr(executor, "PROBE_SECONDS", 0.0)
    removed = []
    monkeypatch.setattr(executor, "remove_placement_group", removed.append)
    here = bench(more={"stays": True}, a={"steps": 3, "base": "x"}, b={"steps": 3, "base": "x"})
    group = here.launch(1, "a")
    here.until(Drained, epoch=1)
    here.executor.release(group, 1)
    here.executor.events()
    assert removed == []
    ray.actors[0].dead = True
    here.executor.events()
    here.executor.events()

    assert len(removed) == 1
    here.launch(2, "b")
    here.until(Drained, epoch=2)
    assert [len(actor.replies) for actor in ray.actors] == [1, 1]
    assert not here.of(Failed)


def test_a_group_that_takes_over_has_the_place_and_the_lease(bench, ray):
    """The worker goes on where it is; when the last of its groups has ended nothing is kept."""
    here = bench(a={"base": "x", "steps": 10**6}, b={"base": "x", "steps": 5})
    first = here.launch(1, "a")
    here.until(Progress, epoch=1)
    second = change(here, 1, first, 2, "a", "b")
    left = here.until(Drained, epoch=1)
    here.executor.release(first, 1)
    here.until(Finished, epoch=2, job="b")
    here.executor.drain(second, 2)
    end = here.until(Drained, epoch=2)
    here.executor.release(second, 2)

    assert left.successor == 2
    assert end.steps["a"] == read(here, 1)["a"]["step"]
    assert [len(actor.replies) for actor in ray.actors] == [1]
    assert not is_granted(here.folder / "groups" / "000001")


def test_a_run_that_goes_on_revokes_the_lease_of_whoever_took_over(bench):
    """Its worker still writes where the first group did."""
    here = bench(a={"base": "x", "steps": 10**6}, b={"base": "x", "steps": 10**6})
    first = here.launch(1, "a")
    here.until(Committed, epoch=1)
    change(here, 1, first, 2, "a", "b")
    here.until(Committed, epoch=2)
    open_epoch = SimpleNamespace(epoch=2, ended=None)
    told = []
    ledger = SimpleNamespace(open_epochs=lambda: [open_epoch], record=told.append)
    recover(ledger, here.folder, 9.0)

    assert not is_granted(here.folder / "groups" / "000001")
    assert told[0].steps == {name: job["step"] for name, job in read(here, 1).items()}


def test_the_first_process_of_a_group_may_be_the_last_to_end(bench, monkeypatch):
    """It writes what all have trained, when the others have nothing left to do."""
    train = fake_worker.main
    found = os.pipe()

    def first_trains(order):
        os.write(found[1], b"%s of %s\n" % (os.environb[b"RANK"], os.environb[b"MASTER_ADDR"]))
        return os.environ["RANK"] != "0" or train(order)

    monkeypatch.setattr(fake_worker, "main", first_trains)
    monkeypatch.setattr(fake_worker, "stays", lambda: False)
    here = bench(a={"steps": 60})
    group = Group(("a",), 2, (0, 1))
    here.executor.reserve(group, 1)
    requests = [JobRequest("a", "base", Demand(), 1, 1)]
    here.executor.launch(GroupLaunch(group, 1, requests, {}, Layout(MeshShape(dp=2))))
    here.until(Drained)

    assert read(here, 1)["a"]["step"] == 60
    assert sorted(os.read(found[0], 100).splitlines()) == [b"0 of 127.0.0.1", b"1 of 127.0.0.1"]


def test_a_place_that_somebody_else_has_is_taken(bench, ray):
    """The cluster may have other users; what was held for the group is free again."""
    here = bench(a={"steps": 3})
    ray.free = False
    group = Group(("a",), 1, (0,))
    with pytest.raises(PlaceTaken, match="cluster"):
        here.executor.reserve(group, 1)
    ray.free = True

    here.executor.reserve(group, 2)
