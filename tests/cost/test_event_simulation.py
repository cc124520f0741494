"""A simulated round waits where a real one does."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.stage_clock import times_of
from tlora_fx.cost.pipeline_simulation import (
    Action,
    Times,
    schedule_order,
    simulate,
)
from tlora_fx.errors import ScheduleRefused

SCHEDULES = ("gpipe", "1f1b", "interleaved")
SECONDS = st.floats(0.0, 10.0)


@st.composite
def rounds(draw):
    """A schedule, its sizes, and times that differ in everything."""
    schedule = draw(st.sampled_from(SCHEDULES))
    processes = draw(st.integers(1, 4))
    stages = processes * (draw(st.integers(1, 3)) if schedule == "interleaved" else 1)
    micro_batches = processes * draw(st.integers(1, 3))

    def table():
        return [[draw(SECONDS) for _ in range(micro_batches)] for _ in range(stages)]

    times = Times(table(), table(), draw(st.floats(0, 1)))
    return schedule, stages, processes, micro_batches, times


def run(schedule, stages, processes, micro_batches, times):
    return simulate(schedule_order(schedule, stages, processes, micro_batches), times, stages)


def equal(stages, micro_batches, forward=1.0, backward=2.0):
    def table(seconds):
        return [[seconds] * micro_batches for _ in range(stages)]

    return Times(table(forward), table(backward))


@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    stages=st.integers(1, 8),
    more=st.integers(0, 20),
    forward=st.floats(0.1, 5),
    backward=st.floats(0.1, 5),
)
def test_equal_times_give_the_bubble_of_the_formula(schedule, stages, more, forward, backward):
    """(p - 1) / (m + p - 1) for GPipe and 1F1B."""
    micro_batches = stages + more
    found = run(
        schedule, stages, stages, micro_batches, equal(stages, micro_batches, forward, backward)
    )

    assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-9)


@given(rounds())
def test_a_round_takes_at_least_what_the_busiest_process_works(given_round):
    """And at most all work one after the other, with every transfer."""
    _, stages, _, micro_batches, times = given_round
    found = run(*given_round)

    transfers = 2 * stages * micro_batches * times.transfer
    assert found.makespan_seconds >= max(found.busy_seconds) * (1 - 1e-9)
    assert found.makespan_seconds <= (sum(found.busy_seconds) + transfers) * (1 + 1e-9)


@given(rounds())
def test_every_piece_of_work_is_done_once(given_round):
    """Each stage runs each micro-batch forwards and backwards."""
    schedule, stages, processes, micro_batches, _ = given_round
    order = schedule_order(schedule, stages, processes, micro_batches)
    done = [action for own in order for action in own]

    expected = {
        Action(stage, kind, m)
        for stage in range(stages) for kind in "FB" for m in range(micro_batches)
    }  # fmt: skip
    assert len(done) == len(set(done))
    assert set(done) == expected
    assert all(action.stage % processes == p for p, own in enumerate(order) for action in own)


@given(rounds(), st.data())
def test_more_work_never_makes_a_round_shorter(given_round, data):
    """One piece of work longer: no piece ends earlier."""
    *sizes, times = given_round
    stage = data.draw(st.integers(0, sizes[1] - 1))
    m = data.draw(st.integers(0, sizes[3] - 1))
    longer = [list(row) for row in times.forward]
    longer[stage][m] += data.draw(SECONDS)
    slower = Times(longer, times.backward, times.transfer)

    before, after = run(*sizes, times), run(*sizes, slower)
    assert all(after.ends[action] >= end - 1e-9 for action, end in before.ends.items())


def test_interleaving_shortens_the_bubble():
    """Equal times, four processes, eight micro-batches."""
    plain = run("1f1b", 4, 4, 8, equal(4, 8))
    halves = run("interleaved", 8, 4, 8, equal(8, 8, 0.5, 1.0))

    assert halves.makespan_seconds < plain.makespan_seconds


def test_measured_work_becomes_times():
    """What did not run takes no time."""
    timed = {Action(0, "F", 0): 1.0, Action(0, "B", 0): 2.5}
    times = times_of(timed, stages=2, micro_batches=1)

    assert times.of(Action(0, "B", 0)) == 2.5
    assert times.of(Action(1, "F", 0)) == 0.0


@given(processes=st.integers(2, 5), micro_batches=st.integers(1, 30))
def test_uneven_rounds_are_refused_as_torch_does(processes, micro_batches):
    """With how many micro-batches would do."""
    assume(micro_batches % max(1, micro_batches // processes))

    with pytest.raises(ScheduleRefused, match=f"multiple of {processes}"):
        schedule_order("interleaved", processes, processes, micro_batches)
