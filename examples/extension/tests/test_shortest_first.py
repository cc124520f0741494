"""`shortest-first`: what it starts, and what waits."""

from tlora_fx_extension.shortest_first import ShortestFirst

from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import demand_of
from tlora_fx.scheduler.state import ActiveJob, JobRequest, SchedulerState

DEMAND = demand_of("llama-3-8b", rank=8, batch=4, lengths=130)


def state_of(jobs, **more):
    """A state of four GPUs; jobs are (name, GPUs, steps)."""
    active = {
        name: ActiveJob(JobRequest(name, "llama-3-8b", DEMAND, gpus, steps), solo_seconds=1.0)
        for name, gpus, steps in jobs
    }
    return SchedulerState(0.0, Cluster(4), None, active, **more)


def test_the_shortest_start():
    """What does not fit waits."""
    decision = ShortestFirst().decide(state_of([("long", 2, 90), ("mid", 2, 60), ("short", 2, 30)]))

    assert [group.jobs for group in decision.groups] == [("short",), ("mid",)]
    assert decision.waiting == ("long",)


def test_wide_jobs_come_last():
    """However short they are."""
    jobs = [("wide", 4, 1), ("narrow", 1, 90)]
    decision = ShortestFirst(most_gpus=2).decide(state_of(jobs))

    assert [group.jobs for group in decision.groups] == [("narrow",)]


def test_what_runs_stays():
    """A shorter job does not push it out."""
    first = ShortestFirst().decide(state_of([("long", 4, 90)]))
    jobs = [("long", 4, 90), ("short", 1, 1)]
    decision = ShortestFirst().decide(state_of(jobs, groups=first.groups))

    assert decision.groups == first.groups
