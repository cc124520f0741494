"""The list schedule of computation and communication on graphs of tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.parallel.nano_batches import ScheduledTask, list_schedule


@st.composite
def graphs(draw):
    """Tasks in an order in which they may run; every wait waits for one start."""
    tasks: list[ScheduledTask] = []
    for place in range(draw(st.integers(1, 24))):
        earlier = st.integers(0, place - 1) if place else st.nothing()
        reads = draw(st.frozensets(earlier, max_size=3)) if place else frozenset()
        waited = {need for task in tasks if task.kind == "wait" for need in task.needs}
        open_ = [n for n, t in enumerate(tasks) if t.kind == "start" and n not in waited]
        kind = draw(st.sampled_from(["compute", "compute", "start", *["wait"] * bool(open_)]))
        if kind == "wait":
            reads = frozenset([draw(st.sampled_from(open_))])
        tasks.append(ScheduledTask(kind, reads))
    return tasks


def assert_may_run(tasks, order):
    """Each task once, after what it needs."""
    assert sorted(order) == list(range(len(tasks)))
    at = {place: when for when, place in enumerate(order)}
    assert all(at[need] < at[place] for place in order for need in tasks[place].needs)


@given(graphs())
def test_nothing_that_could_run_comes_after_a_wait(tasks):
    """A process waits only where no computation and no start is left to do."""
    order = list_schedule(tasks)

    assert_may_run(tasks, order)
    done: set[int] = set()
    for place in order:
        if tasks[place].kind == "wait":
            ready = [n for n, t in enumerate(tasks) if n not in done and t.needs <= done]
            assert all(tasks[other].kind == "wait" for other in ready)
        done.add(place)


@given(graphs())
def test_a_collective_starts_as_soon_as_it_can(tasks):
    """No other task runs between the last one that a start needs and the start, but starts."""
    order = list_schedule(tasks)

    done: set[int] = set()
    for place in order:
        ready = [n for n, t in enumerate(tasks) if n not in done and t.needs <= done]
        if any(tasks[other].kind == "start" for other in ready):
            assert tasks[place].kind == "start"
        done.add(place)


def chain(layers=2, nano_batches=2):
    """Layers of one computation and one collective, nano-batch by nano-batch."""
    tasks: list[ScheduledTask] = []
    hidden: list[int | None] = [None] * nano_batches
    for _ in range(layers):
        for part in range(nano_batches):
            needs = frozenset() if hidden[part] is None else frozenset([hidden[part]])
            compute = len(tasks)
            tasks.append(ScheduledTask("compute", needs))
            tasks.append(ScheduledTask("start", frozenset([compute])))
            tasks.append(ScheduledTask("wait", frozenset([compute + 1])))
            hidden[part] = compute + 2
    return tasks


def test_one_nano_batch_computes_while_the_other_communicates():
    """Between a collective's start and its wait stands the other nano-batch's computation."""
    tasks = chain()

    told = "".join(tasks[place].kind[0] for place in list_schedule(tasks))

    assert told == "cscswcswcsww"


def test_with_one_nano_batch_nothing_is_left_to_hide_behind():
    """Each wait follows its start."""
    tasks = chain(nano_batches=1)

    assert list_schedule(tasks) == list(range(len(tasks)))


def test_work_that_leads_to_no_collective_fills_the_gaps():
    """Gradients that only the optimizer reads come after what leads to a collective."""
    tasks = [
        ScheduledTask("compute"),
        ScheduledTask("compute", frozenset([0])),  # leads nowhere
        ScheduledTask("compute", frozenset([0])),
        ScheduledTask("start", frozenset([2])),
        ScheduledTask("wait", frozenset([3])),
    ]

    assert list_schedule(tasks) == [0, 2, 3, 1, 4]
