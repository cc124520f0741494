"""The simulated executor by itself: verbs that may be repeated, places, commits, faults."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.looping import Plain, request
from tests.simulator.faults import Faults, FaultyExecutor
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import PlaceTaken
from tlora_fx.scheduler.executor import (
    Drained,
    Failed,
    Finished,
    GroupLaunch,
    GroupStarted,
    NodeBack,
    NodeLost,
)
from tlora_fx.scheduler.formations import StepTimes
from tlora_fx.scheduler.state import ChangeCosts, Group
from tlora_fx.simulator.replay import Clock

GROUP = Group(("a",), 1, (0,))


def executor(changes: ChangeCosts | None = None, **faults: float) -> FaultyExecutor:
    """Eight GPUs in two nodes; a switch takes 20 s."""
    return FaultyExecutor(
        Cluster(8, 4),
        StepTimes(Plain()),
        Clock(),
        changes=changes,
        faults=Faults(**faults),  # type: ignore[arg-type]
    )


def launched(made: FaultyExecutor, steps: int = 100, times: int = 1) -> FaultyExecutor:
    """With one job of 1.5 s a step, asked for so many times."""
    for _ in range(times):
        made.reserve(GROUP, 1)
        made.launch(GroupLaunch(GROUP, 1, [request("a", steps=steps)], {"a": 0.0}))
    return made


def at(made: FaultyExecutor, time: float) -> list[object]:
    """What has happened until then."""
    made.clock.go_to(time)
    return list(made.events())


@pytest.mark.parametrize("times", [1, 3])
def test_verbs_may_be_repeated(times):
    """Asked twice, each does what it did, and nothing more."""
    made = launched(executor(), times=times)
    made.clock.go_to(50.0)
    for _ in range(times):
        made.drain(GROUP, 1)
    assert at(made, 50.0) == [Drained(50.0, 1, {"a": 20.0})]

    for _ in range(times):
        made.release(GROUP, 1)
    made.reserve(GROUP, 2)


def test_a_place_has_one_owner():
    """It is taken until it is released."""
    made = launched(executor())
    with pytest.raises(PlaceTaken, match="formation 1 holds it"):
        made.reserve(Group(("b",), 2, (1, 0)), 2)

    made.drain(GROUP, 1)
    with pytest.raises(PlaceTaken):
        made.reserve(Group(("b",), 2, (1, 0)), 2)
    made.release(GROUP, 1)
    made.reserve(Group(("b",), 2, (1, 0)), 2)


def test_nothing_is_launched_without_a_place():
    """A launch follows a reservation."""
    with pytest.raises(PlaceTaken, match="nothing is reserved"):
        executor().launch(GroupLaunch(GROUP, 1, [request("a")]))


def test_a_job_starts_and_ends_at_its_times():
    """Whenever somebody asks, events have the time at which they happened."""
    made = launched(executor())

    assert made.next_time() == 170.0
    assert at(made, 169.0) == []
    assert at(made, 500.0) == [GroupStarted(20.0, 1), Finished(170.0, 1, "a", 100.0)]


def test_others_train_on_while_an_end_is_written():
    """Each is told as much later; so is a drained group, which keeps its place until then."""
    told = {}
    for end in (0.0, 3.0):
        made = executor(ChangeCosts(end=end))
        both = Group(("a", "b"), 2, (0, 1))
        made.reserve(both, 1)
        made.launch(GroupLaunch(both, 1, [request("a", steps=100), request("b", steps=200)]))
        told[end] = at(made, 10_000.0)
    early, late = ([event.time for event in told[end][1:]] for end in told)
    assert len(early) == 2
    assert [b - a for a, b in zip(early, late, strict=True)] == [3.0, 3.0]

    made = launched(executor(ChangeCosts(end=3.0)))
    made.clock.go_to(50.0)
    made.drain(GROUP, 1)
    assert at(made, 52.0) == []
    with pytest.raises(PlaceTaken):
        made.reserve(GROUP, 2)
    assert made.next_time() == 53.0
    assert at(made, 53.0) == [Drained(53.0, 1, {"a": 20.0})]


def test_a_job_whose_end_is_not_told_yet_is_not_trained_again():
    """Whoever has it by then tells of it, once."""
    for how in ("successor", "elsewhere", "fails", "gone"):
        made = executor(ChangeCosts(end=30.0))
        both = Group(("a", "b"), 2, (0, 1))
        jobs = [request("a", steps=100), request("b", steps=200)]
        if how == "gone":
            both, jobs = Group(("a",), 2, (0, 1)), jobs[:1]
        made.reserve(both, 1)
        made.launch(GroupLaunch(both, 1, jobs))
        ended = made.next_time()
        found = at(made, ended + 1.0)
        assert not any(isinstance(event, Finished) for event in found)
        own = 2
        if how in ("successor", "gone"):
            successor = Group(("a", "b", "c"), 2, (0, 1))
            arriving = [*jobs, request("c", steps=500)]
            made.change(both, 1, GroupLaunch(successor, 2, arriving, {"a": 40.0}))
            assert all(request.name != "a" for request in made._groups[2].requests)
        elif how == "elsewhere":
            made.change(both, 1, GroupLaunch(Group(("b",), 2, (0, 1)), 2, jobs[1:]))
            other, own = Group(("a",), 1, (4,)), 3
            made.reserve(other, 3)
            made.launch(GroupLaunch(other, 3, jobs[:1], {"a": 40.0}))
            assert 3 not in made._groups
        else:
            made.fail_group(1)
            own = 1
        finished = [e for e in at(made, 100_000.0) if isinstance(e, Finished) and e.job == "a"]
        assert [(event.epoch, event.steps) for event in finished] == [(own, 100.0)], how


def test_a_released_group_tells_nothing():
    """And nothing of it happens any more."""
    made = launched(executor())
    made.release(GROUP, 1)

    assert at(made, 500.0) == []
    assert made.next_time() == float("inf")


def test_a_lost_node_takes_its_groups_and_its_gpus():
    """They fail with their last commits, and nobody gets a place there until it is back."""
    made = launched(executor(commit_seconds=30.0))
    made.clock.go_to(90.0)
    made.lose_node(0)

    assert at(made, 90.0) == [
        NodeLost(90.0, 0),
        Failed(90.0, 1, None, "node 0 was lost", {"a": 40.0}),
    ]
    assert made.steps_lost == pytest.approx(70 / 1.5 - 40)
    made.release(GROUP, 1)
    with pytest.raises(PlaceTaken, match="it is not there"):
        made.reserve(GROUP, 2)
    made.return_node(0)
    assert at(made, 90.0) == [NodeBack(90.0, 0)]
    made.reserve(GROUP, 2)


@given(seed=st.integers(0, 1000), node=st.integers(0, 20))
def test_a_node_is_lost_only_when_it_is_there(seed, node):
    """Losses and returns take turns."""
    chaos = Faults(seed=seed, node_failure_seconds=100.0, repair_seconds=50.0)
    times = [time for pair in islice(chaos.node_losses(node), 20) for time in pair]

    assert times == sorted(times)


@given(seed=st.integers(0, 1000))
def test_noise_has_mean_one(seed):
    """Some formations are slower, some faster, and none is more than that."""
    chaos = Faults(seed=seed, noise=0.1)
    factors = [chaos.factor(epoch) for epoch in range(400)]

    assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.03)
    assert min(factors) > 0
