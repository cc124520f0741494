"""Order what a process does so that it computes while its collectives run.

A list schedule: a collective starts as soon as what it sends is there; then comes any computation
whose inputs are there, first what leads to further collectives; only where nothing else is left
does the process wait, for the collective that started first. Within a limit of memory: what would
go beyond it comes later, and where that is not enough the schedule looks less far ahead, down to
the order that the tasks came in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["compute", "start", "wait"]


@dataclass(frozen=True, slots=True)
class Task:
    """One step of a process.

    kind      a computation, the start of a collective, or the wait for one
    needs     places of earlier tasks that must have run
    bytes     of the memory that it takes
    reads     places of the tasks whose memory it reads, itself left out
    kept      its memory is a result, and stays
    """

    kind: Kind
    needs: frozenset[int] = frozenset()
    bytes: int = 0
    reads: frozenset[int] = frozenset()
    kept: bool = False


def list_schedule(tasks: Sequence[Task], limit_bytes: int | None = None) -> list[int]:
    """The order in which tasks hide their communication best.

    tasks         in an order in which they may run
    limit_bytes   of memory at any time; by default none. Where the given order needs more, no
                  schedule needs more than that order
    returns       places of the tasks, each after what it needs
    """
    allowed = None
    if limit_bytes is not None:
        allowed = max(limit_bytes, peak_bytes(tasks, range(len(tasks))))
    window = len(tasks)
    while window > 1:
        order = _Schedule(tasks, allowed, window).run()
        if allowed is None or peak_bytes(tasks, order) <= allowed:
            return order
        window //= 2
    return list(range(len(tasks)))


def peak_bytes(tasks: Sequence[Task], order: Sequence[int]) -> int:
    """The most memory that tasks take at once in an order."""
    memory = _Memory(tasks)
    return max((memory.run(place) for place in order), default=0)


class _Memory:
    """What lies in memory while tasks run."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.live = 0
        self.readers = [0] * len(tasks)
        for task in tasks:
            for place in task.reads:
                self.readers[place] += 1

    def during(self, place: int) -> int:
        """How much there is while a task runs: its inputs and its own."""
        return self.live + self.tasks[place].bytes

    def run(self, place: int) -> int:
        """Run a task; returns how much there was while it ran."""
        peak = self.live = self.during(place)
        for read in self.tasks[place].reads:
            self.readers[read] -= 1
            self._free(read)
        self._free(place)
        return peak

    def _free(self, place: int) -> None:
        if not self.readers[place] and not self.tasks[place].kept:
            self.live -= self.tasks[place].bytes


@dataclass(slots=True)
class _Schedule:
    """One run of the list scheduler.

    limit    of memory, None where there is none
    window   how many tasks behind the first one left are looked at
    """

    tasks: Sequence[Task]
    limit: int | None
    window: int
    memory: _Memory = field(init=False)
    missing: list[int] = field(init=False)
    users: list[list[int]] = field(init=False)
    urgent: list[bool] = field(init=False)
    started: list[int] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.tasks)
        self.memory = _Memory(self.tasks)
        self.missing = [len(task.needs) for task in self.tasks]
        self.users = [[] for _ in range(count)]
        for place, task in enumerate(self.tasks):
            for need in task.needs:
                self.users[need].append(place)
        self.urgent = _leads_to_start(self.tasks)
        self.started = [0] * count

    def run(self) -> list[int]:
        """The order."""
        order: list[int] = []
        ready = {place for place, count in enumerate(self.missing) if not count}
        left = 0
        done = [False] * len(self.tasks)
        while ready:
            while done[left]:
                left += 1
            near = [place for place in ready if place < left + self.window]
            place = self._choose(near)
            self.memory.run(place)
            done[place] = True
            order.append(place)
            ready.remove(place)
            ready.update(self._released(place, len(order)))
        assert len(order) == len(self.tasks), "tasks need each other"
        return order

    def _choose(self, ready: list[int]) -> int:
        fitting = [place for place in ready if self._fits(place)]
        return min(fitting, key=self._rank) if fitting else min(ready)

    def _fits(self, place: int) -> bool:
        return self.limit is None or self.memory.during(place) <= self.limit

    def _rank(self, place: int) -> tuple[int, int]:
        """Starts, then what leads to starts, then other work, then waits in order of starts."""
        kind = self.tasks[place].kind
        if kind == "wait":
            return 3, self.started[place]
        if kind == "start":
            return 0, place
        return (1 if self.urgent[place] else 2), place

    def _released(self, place: int, when: int) -> Iterator[int]:
        """What may run now that a task has."""
        for user in self.users[place]:
            if self.tasks[place].kind == "start" and self.tasks[user].kind == "wait":
                self.started[user] = when
            self.missing[user] -= 1
            if not self.missing[user]:
                yield user


def _leads_to_start(tasks: Sequence[Task]) -> list[bool]:
    """For each task whether a start needs it."""
    found = [task.kind == "start" for task in tasks]
    for place in reversed(range(len(tasks))):
        if found[place]:
            for need in tasks[place].needs:
                found[need] = True
    return found
