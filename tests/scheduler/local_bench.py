"""A local executor whose workers train nothing, and what tests do with it."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.scheduler.fake_worker import is_there
from tests.scheduler.fork_here import ForkHere
from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.cost.plan import MeshShape
from tlora_fx.scheduler.executor import Drained, GroupLaunch, Noted
from tlora_fx.scheduler.local.executor import LocalExecutor, LocalOptions
from tlora_fx.scheduler.local.processes import ForkServer
from tlora_fx.scheduler.state import Group, JobRequest

FAKE = "tests.scheduler.fake_worker"
TWO, PIPE = Layout(MeshShape(dp=2)), Layout(MeshShape(pp=2))
HELD_BY = {"a": "one", "b": "two", "c": "three"}
HELD = dict.fromkeys(HELD_BY.values(), 40)


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


def worker_of(bench, epoch, rank=""):
    """The process that carried out an order; of several, the one of a rank."""
    return int((bench.folder / "groups" / f"{epoch:06d}" / f"pid{rank}").read_text())


def wait_for_end(pid):
    """Wait until a process is there no more."""
    end = time.monotonic() + 900
    while is_there(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def stay(bench, **specs):
    return bench(more={"stays": True}, **{
        name: {"base": "one", "steps": 1_000_000, **spec} for name, spec in specs.items()
    })  # fmt: skip


def both(here, epoch, *jobs, layout=TWO):
    """Have a group of two processes train to its end; these."""
    group = here.launch(epoch, *jobs, layout=layout)
    here.until(Drained, epoch=epoch)
    here.executor.release(group, epoch)
    return [worker_of(here, epoch, rank) for rank in ("", "1")]


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
