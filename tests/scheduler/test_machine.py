"""Any order of submissions, failures, losses and time, under every policy: nothing is lost."""

from __future__ import annotations

import os
from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.looping import Plain, request
from tests.simulator.faults import Faults, FaultyExecutor
from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.formations import Callback, StepTimes, membership
from tlora_fx.scheduler.loop import Loop, LoopOptions
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import ChangeCosts, broken
from tlora_fx.simulator.replay import Clock

NODES = 4
SWITCH, COMMIT = 5.0, 20.0
IGNORE_BOUNDS = {"mlora-fifo", "mlora-memory", "no-scheduler"}
POLICIES = ("tlora", "tlora-paper", "megatron", "mlora-fifo", "mlora-memory", "no-kernel-fuser")


class Held(Callback):
    """Adds up GPU-seconds that runs hold, those that nobody does, and the credit of ended jobs."""

    def __init__(self, capacity: int) -> None:
        self.gpus, self.time, self.held = capacity, 0.0, 0
        self.total = self.allocated = self.idle = self.credit = 0.0
        self.finished: list[str] = []

    def launched(self, time, run):
        self.passes(time)
        self.held += len(run.launched.place)

    def left(self, time, run, job, reason):
        self.credit += job.credit
        if not reason:
            self.finished.append(job.name)

    def gave_up(self, time, job, reason):
        self.credit += job.credit

    def ended(self, time, run, how):
        self.passes(time)
        self.held -= len(run.launched.place)
        self.allocated += (time - run.time) * len(run.launched.place)

    def capacity(self, time, gpus):
        self.passes(time)
        self.gpus = gpus

    def passes(self, time):
        seconds, self.time = time - self.time, time
        self.total += seconds * self.gpus
        self.idle += seconds * (self.gpus - self.held)


class Machine(RuleBasedStateMachine):
    """A loop over a simulated cluster, and all that can happen to it."""

    policy = "tlora"

    @initialize(
        per_node=st.sampled_from((1, 2, 4)),
        runnable=st.sampled_from((3, 8, 128)),
        changes=st.sampled_from(
            (None, ChangeCosts(1.0, 0.5, 2.0), ChangeCosts(1.0, 0.5, 2.0, end=0.7))
        ),
    )
    def begin(self, per_node, runnable, changes):
        cluster = Cluster(NODES * per_node, per_node, 2)
        self.times, self.clock = StepTimes(Plain(fits=6000.0)), Clock()
        self.executor = FaultyExecutor(
            cluster,
            self.times,
            self.clock,
            switch_seconds=SWITCH,
            changes=changes,
            faults=Faults(commit_seconds=COMMIT),
        )
        self.callback = Held(cluster.capacity())
        self.loop = Loop(
            find_policy(self.policy),
            self.times.estimator,
            self.executor,
            options=LoopOptions(30.0, SWITCH, changes, runnable),
            callback=self.callback,
            times=self.times,
        )
        self.submitted: dict[str, float] = {}
        self.before: dict[str, float] = {}

    def go(self, time):
        while True:
            due = self.loop.next_due(self.clock.now)
            step = min(time, self.executor.next_time(), inf if due is None else due)
            self.clock.go_to(step)
            self.loop.advance(step)
            if step >= time:
                return

    @rule(
        gpus=st.integers(1, 5),
        steps=st.integers(1, 200),
        tokens=st.sampled_from((100.0, 1000.0, 5000.0, 9000.0)),
        base=st.sampled_from(("one", "two")),
        slowdown=st.sampled_from((1.0, 1.2, 1.5, 3.0)),
        lends=st.sampled_from((0.0, 0.0, 4.0)),
        hurry=st.sampled_from((None, None, 100.0, 1000.0)),
    )
    def submit(self, gpus, steps, tokens, base, slowdown, lends, hurry):
        now, name = self.clock.now, f"j{len(self.submitted)}"
        job = request(
            name,
            gpus=gpus,
            steps=steps,
            tokens=tokens,
            base=base,
            submitted=now,
            max_slowdown=slowdown,
            max_slowdown_opt_in=max(lends, slowdown) if lends else 0.0,
            deadline=None if hurry is None else now + hurry,
        )
        self.submitted[name] = float(steps)
        refused = self.loop.submit(job)
        assert (refused is not None) == (gpus > self.loop.cluster.gpus or tokens > 6000.0 * gpus)
        self.loop.advance(now)

    @rule(seconds=st.sampled_from((0.5, 7.0, 30.0, 95.0, 400.0)))
    def wait(self, seconds):
        self.go(self.clock.now + seconds)

    @precondition(lambda self: self.loop.running)
    @rule()
    def finish(self):
        """To the end of the next job."""
        self.go(min(self.executor.next_time(), self.clock.now + 1000.0))

    @precondition(lambda self: self.loop.running)
    @rule(data=st.data())
    def kill_group(self, data):
        self.executor.fail_group(data.draw(st.sampled_from(sorted(self.loop.running))))
        self.loop.advance(self.clock.now)

    @precondition(lambda self: self.loop.running)
    @rule(data=st.data())
    def kill_job(self, data):
        epoch = data.draw(st.sampled_from(sorted(self.loop.running)))
        name = data.draw(st.sampled_from(sorted(self.loop.running[epoch].jobs)))
        self.executor.fail_job(epoch, name)
        self.loop.advance(self.clock.now)

    @precondition(lambda self: len(self.loop.cluster.lost) < NODES - 1)
    @rule(node=st.integers(0, NODES - 1))
    def lose_node(self, node):
        self.executor.lose_node(node)
        self.loop.advance(self.clock.now)

    @precondition(lambda self: self.loop.cluster.lost)
    @rule(data=st.data())
    def return_node(self, data):
        self.executor.return_node(data.draw(st.sampled_from(sorted(self.loop.cluster.lost))))
        self.loop.advance(self.clock.now)

    @rule()
    def nothing_changed(self):
        """P8: asked twice about the same moment, a policy moves nothing."""
        if not self.loop.active:
            return
        self.loop.decide(self.clock.now)
        self.loop.advance(self.clock.now)
        before = {epoch: membership(run.group) for epoch, run in self.loop.running.items()}
        self.loop.decide(self.clock.now)
        self.loop.advance(self.clock.now)
        assert {epoch: membership(run.group) for epoch, run in self.loop.running.items()} == before

    @invariant()
    def no_job_is_lost(self):
        """P1: active, done, failed and refused are all that were submitted."""
        if not hasattr(self, "loop"):
            return
        active = set(self.loop.active) | {job.name for job in self.loop.window.waiting()}
        assert {name for name, how in self.loop.ended.items() if not how} == active
        assert set(self.loop.ended) == set(self.submitted)
        done = sorted(name for name, how in self.loop.ended.items() if how == "done")
        assert sorted(self.callback.finished) == done

    @invariant()
    def groups_are_whole(self):
        """P2, P3: one group a job, one base a group, one group a GPU, none on lost nodes."""
        if not hasattr(self, "loop"):
            return
        jobs, gpus = [], []
        for run in self.loop.running.values():
            assert list(run.jobs) == list(run.group.jobs)
            assert len({job.request.base for job in run.jobs.values()}) == 1
            jobs += run.jobs
            gpus += run.launched.place
        assert len(jobs) == len(set(jobs))
        assert len(gpus) == len(set(gpus))
        assert set(gpus) <= set(self.loop.cluster.present())
        assert set(jobs) <= set(self.loop.active)

    @invariant()
    def nobody_is_slowed_down_too_much(self):
        """P4: at its formation; a deadline that comes nearer may be lost later."""
        if not hasattr(self, "loop") or self.policy in IGNORE_BOUNDS:
            return
        for run in self.loop.running.values():
            if run.time == self.clock.now:
                jobs = list(run.jobs.values())
                step = self.times.of(
                    [job.request for job in jobs], run.launched.place, self.loop.cluster
                )
                assert not broken(jobs, step.seconds, run.time)

    @invariant()
    def steps_stay_within_a_job(self):
        """P11: no job has more steps than it asked for, nor fewer than none."""
        if not hasattr(self, "loop"):
            return
        for job in self.loop.active.values():
            assert 0 <= job.steps_done <= job.request.steps

    @invariant()
    def what_is_lent_is_taken(self):
        """Credit is conserved, and each job's is what the account says."""
        if not hasattr(self, "loop"):
            return
        jobs = self.loop.active.values()
        total = self.callback.credit + sum(job.credit for job in jobs)
        assert total == pytest.approx(0.0, abs=1e-6)
        for job in jobs:
            balance = self.loop.credits.balance(job.name)
            assert job.credit == pytest.approx(balance, abs=1e-6)

    @invariant()
    def gpu_seconds_add_up(self):
        """P12: what runs held and what was idle is all that there was."""
        if not hasattr(self, "loop"):
            return
        self.callback.passes(self.clock.now)
        running = sum(
            (self.clock.now - run.time) * len(run.launched.place)
            for run in self.loop.running.values()
        )
        found = self.callback.allocated + running + self.callback.idle
        assert found == pytest.approx(self.callback.total, rel=1e-9, abs=1e-6)

    def teardown(self):
        """P9: left alone, with all nodes back, every job ends."""
        if not hasattr(self, "loop"):
            return
        for node in sorted(self.loop.cluster.lost):
            self.executor.return_node(node)
        self.loop.advance(self.clock.now)
        end = self.clock.now + 1e6
        while not self.loop.idle and self.clock.now < end:
            self.go(self.clock.now + 1000.0)
        assert self.loop.idle, self.loop.active
        self.no_job_is_lost()
        self.gpu_seconds_add_up()


def machine(policy: str, examples: int, steps: int) -> type:
    """The test of one policy."""
    made = type(f"Machine_{policy}", (Machine,), {"policy": policy})
    case = made.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


TestTlora = machine("tlora", 25, 25)
TestMegatron = machine("megatron", 10, 25)
TestMloraFifo = machine("mlora-fifo", 10, 25)
TestTloraPaper = machine("tlora-paper", 10, 25)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_thousands_of_histories(policy):
    """Each policy, many and long histories."""
    case = machine(policy, int(os.environ.get("TLORA_HISTORIES", "500")), 50)
    case("runTest").runTest()
