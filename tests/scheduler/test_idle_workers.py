"""Workers that stay for the next group of their base, and those that go for want of memory."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest

from tests.scheduler.fake_worker import is_there
from tests.scheduler.local_bench import (
    HELD_BY,
    PIPE,
    TWO,
    both,
    change,
    noted,
    run_through,
    sharing,
    stay,
    wait_for_end,
    worker_of,
)
from tlora_fx.cost.hardware import Cluster
from tlora_fx.runtime.workers.protocol import NEEDS_NEW_PROCESS
from tlora_fx.scheduler.executor import Committed, Drained, Failed, Finished, GroupStarted, Progress
from tlora_fx.scheduler.local import processes


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
