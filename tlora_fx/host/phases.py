"""Phases of a start, their beginnings and seconds: imports, data, weights, kernels, ...

A start begins with the process, or with a trainer, and ends with the first step. Code on its way
says what it does by `with phase("weights"):`, in any thread; where no start is on, that does
nothing. On one thread the innermost phase counts alone: time in a phase inside another is not the
outer one's. Phases of several threads run beside each other, so that their seconds may come to more
than the start took.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from os import sysconf
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, monotonic
from typing import Any

from tlora_fx.host import collector

#: What each phase is called while it runs; other names stand for themselves.
TITLES = {
    "imports": "importing libraries",
    "checks": "checking the job file",
    "base files": "reading the base's files ahead",
    "data": "reading the data",
    "tracing": "tracing and fusing the jobs",
    "plan": "choosing a plan",
    "checkpoint": "reading the checkpoint",
    "weights": "loading the weights",
    "adapters": "starting the adapters",
    "probe": "comparing the fused graph with the base",
    "layers": "compiling the layers",
    "kernels": "compiling kernels",
    "processes": "waiting for the other processes",
    "first step": "the first step",
}
#: In a line, and in a file, phases that took less are left out.
SHOWN_SECONDS, RECORDED_SECONDS = 0.05, 0.001


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time that one thread spent in one phase without a break.

    started   seconds after the start began
    thread    name of the thread, or of what else did it
    """

    phase: str
    started: float
    seconds: float
    thread: str

    @property
    def ended(self) -> float:
        """Seconds after the start began."""
        return self.started + self.seconds


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A start, as far as it has come.

    began       wall-clock time at which it began
    seconds     since then
    stretches   in the order in which they began
    """

    began: datetime
    seconds: float
    stretches: tuple[Stretch, ...]

    def totals(self) -> dict[str, float]:
        """By phase, in order of their beginnings, seconds in which any thread was in it."""
        names = dict.fromkeys(stretch.phase for stretch in self.stretches)
        return {
            name: _covered(stretch for stretch in self.stretches if stretch.phase == name)
            for name in names
        }

    @property
    def other_seconds(self) -> float:
        """Seconds in which no thread was in any phase."""
        return max(0.0, self.seconds - _covered(self.stretches))

    def line(self) -> str:
        """The seconds of the start and of its phases: `14.2 s: imports 2.1, data 1.5`."""
        parts = self.totals() | {"other": self.other_seconds}
        shown = [f"{name} {took:.1f}" for name, took in parts.items() if took >= SHOWN_SECONDS]
        return f"{self.seconds:.1f} s: {', '.join(shown)}" if shown else f"{self.seconds:.1f} s"

    def as_json(self) -> dict[str, Any]:
        """Content of start.json; times in seconds, rounded to milliseconds."""
        return {
            "began": self.began.isoformat(timespec="milliseconds"),
            "seconds": round(self.seconds, 3),
            "phases": {
                name: round(took, 3)
                for name, took in self.totals().items()
                if took >= RECORDED_SECONDS
            },
            "other": round(self.other_seconds, 3),
            "timeline": [
                {
                    "phase": stretch.phase,
                    "started": round(stretch.started, 3),
                    "seconds": round(stretch.seconds, 3),
                    "thread": stretch.thread,
                }
                for stretch in self.stretches
                if stretch.seconds >= RECORDED_SECONDS
            ],
        }


def _covered(stretches: Iterable[Stretch]) -> float:
    """Seconds in which at least one of these stretches was on."""
    covered, end = 0.0, 0.0
    for stretch in sorted(stretches, key=lambda each: each.started):
        covered += max(0.0, stretch.ended - max(end, stretch.started))
        end = max(end, stretch.ended)
    return covered


@dataclass(slots=True, eq=False)
class _Open:
    """A phase that a thread is in; it counts since `since`."""

    phase: str
    thread: threading.Thread
    since: float = 0.0


class Start:
    """Records the phases of one start; all methods may be called from any thread.

    began   when it began, by `time.monotonic`, which all processes of a machine share; now where
            that is left out
    """

    def __init__(self, began: float | None = None) -> None:
        self.began = monotonic() if began is None else began
        self._done: list[Stretch] = []
        self._open: dict[threading.Thread, list[_Open]] = {}
        self._record: StartRecord | None = None
        self._lock = threading.RLock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, this thread is in a phase; what leaves it may be another thread."""
        opened = _Open(name, threading.current_thread())
        self._enter(opened)
        try:
            yield
        finally:
            self._leave(opened)

    def add(self, name: str, since: float, until: float | None = None, thread: str = "") -> None:
        """Add what was measured otherwise, such as in another process of this machine.

        since, until   by `time.monotonic`; until now where that is left out
        thread         who did it; by default this thread
        """
        until = monotonic() if until is None else until
        thread = thread or threading.current_thread().name
        with self._lock:
            if self._record is None:
                self._done.append(Stretch(name, since - self.began, until - since, thread))

    def running(self) -> list[str]:
        """Phases that threads are in now, the longest first."""
        with self._lock:
            tops = sorted((stack[-1] for stack in self._open.values()), key=lambda top: top.since)
            return list(dict.fromkeys(top.phase for top in tops))

    def record(self) -> StartRecord:
        """The start until now, or until it ended."""
        with self._lock:
            return self._record or self._recorded(monotonic())

    def end(self) -> StartRecord:
        """The first step is done: phases that go on, or begin later, are no part of the start."""
        with self._lock:
            self._record = self.record()
            self._open.clear()
            return self._record

    def _enter(self, opened: _Open) -> None:
        with self._lock:
            if self._record is not None:
                return
            now, stack = monotonic(), self._open.setdefault(opened.thread, [])
            if stack:
                self._done.append(self._stretch(stack[-1], now))
            opened.since = now
            stack.append(opened)

    def _leave(self, opened: _Open) -> None:
        with self._lock:
            stack = self._open.get(opened.thread, [])
            if opened not in stack:
                return
            now, counted = monotonic(), stack[-1] is opened
            stack.remove(opened)
            if counted:
                self._done.append(self._stretch(opened, now))
            if stack and counted:
                stack[-1].since = now
            if not stack:
                del self._open[opened.thread]

    def _stretch(self, opened: _Open, now: float) -> Stretch:
        since = opened.since
        return Stretch(opened.phase, since - self.began, now - since, opened.thread.name)

    def _recorded(self, now: float) -> StartRecord:
        going = [self._stretch(stack[-1], now) for stack in self._open.values()]
        stretches = sorted([*self._done, *going], key=lambda stretch: stretch.started)
        seconds = now - self.began
        began = datetime.now(UTC) - timedelta(seconds=seconds)
        return StartRecord(began, seconds, tuple(stretches))


_current: Start | None = None


def begin(began: float | None = None) -> Start:
    """Begin the start of this process; it takes the place of one that is on.

    began   by `time.monotonic`; now where that is left out
    """
    global _current  # noqa: PLW0603  (a process has one start)
    _current = Start(began)
    return _current


def current() -> Start | None:
    """The start that is on; None before one begins and after it has ended."""
    return _current


def end() -> StartRecord | None:
    """End the start that is on; its record, None where none is on."""
    global _current
    start, _current = _current, None
    if start is None:
        return None
    record = start.end()
    collector.settle()
    return record


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, this thread is in a phase of the start that is on, if one is."""
    start = _current
    if start is None:
        yield
        return
    with start.phase(name):
        yield


def process_began(root: Path = Path("/")) -> float:
    """When this process was started, by `time.monotonic`; now where the system does not tell."""
    now = monotonic()
    try:
        # The name of the program, which may hold spaces, stands before the last parenthesis.
        fields = (root / "proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        ticks = int(fields[19])
        age = clock_gettime(CLOCK_BOOTTIME) - ticks / sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - max(0.0, age)
