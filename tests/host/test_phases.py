"""The phases of a start: who is in which, since when, and what they come to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tlora_fx.host import phases
from tlora_fx.host.phases import Start, StartRecord, Stretch, phase, process_began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands at 100 s until it is set."""
    clock = Clock()
    monkeypatch.setattr("tlora_fx.host.phases.monotonic", lambda: clock.now)
    return clock


@pytest.fixture(autouse=True)
def no_start() -> Iterator[None]:
    """No start is on, before a test and after it."""
    phases.end()
    yield
    phases.end()


class Clock:
    """A monotonic clock that a test moves."""

    now = 100.0


def record(seconds: float, *stretches: tuple[str, float, float]) -> StartRecord:
    """A record of stretches, each a phase, its beginning and its seconds."""
    made = tuple(Stretch(name, started, took, "main") for name, started, took in stretches)
    return StartRecord(datetime(2026, 1, 2, tzinfo=UTC), seconds, made)


def test_a_phase_is_recorded_with_its_beginning_and_its_seconds(clock: Clock) -> None:
    start = phases.begin()
    clock.now += 1
    with phase("data"):
        clock.now += 2

    assert start.record().stretches == (Stretch("data", 1, 2, "MainThread"),)


def test_a_phase_inside_another_counts_alone(clock: Clock) -> None:
    start = phases.begin()
    with phase("first step"):
        clock.now += 1
        with phase("kernels"):
            clock.now += 3
        clock.now += 0.5

    assert start.record().totals() == {"first step": 1.5, "kernels": 3}


def test_phases_of_two_threads_run_beside_each_other() -> None:
    start = phases.begin()
    inside, read = threading.Event(), threading.Event()

    def load() -> None:
        with phase("weights"):
            inside.set()
            read.wait(600)

    thread = threading.Thread(target=load, name="loader")
    with phase("data"):
        thread.start()
        inside.wait(600)
        running = start.running()
        read.set()
        thread.join()

    assert running == ["data", "weights"]
    assert {(each.phase, each.thread) for each in start.record().stretches} == {
        ("data", "MainThread"),
        ("weights", "loader"),
    }


def test_time_of_one_phase_on_two_threads_counts_once() -> None:
    both = record(10, ("kernels", 0, 4), ("kernels", 2, 4), ("data", 7, 1))

    assert both.totals() == {"kernels": 6, "data": 1}
    assert both.other_seconds == 3


def test_a_phase_that_raises_is_left(clock: Clock) -> None:
    start = phases.begin()

    def read() -> None:
        with phase("data"):
            clock.now += 1
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        read()

    assert start.running() == []
    assert start.record().totals() == {"data": 1}


def test_a_phase_that_outlasts_the_start_is_cut_at_its_end(clock: Clock) -> None:
    phases.begin()
    with phase("layers"):
        clock.now += 1
        ended = phases.end()
        clock.now += 5
        with phase("kernels"):
            clock.now += 1

    assert ended is not None
    assert (ended.seconds, ended.totals()) == (1, {"layers": 1})


def test_an_ended_start_takes_nothing_more(clock: Clock) -> None:
    start = phases.begin()
    clock.now += 1
    start.end()
    with start.phase("data"):
        clock.now += 1
    start.add("weights", 0.0)

    assert start.record().stretches == ()
    assert start.record().seconds == 1


def test_what_another_process_measured_is_added(clock: Clock) -> None:
    start = phases.begin(90.0)
    start.add("data", 95.0, 98.0, "reader 1")

    assert start.record().stretches == (Stretch("data", 5, 3, "reader 1"),)


def test_without_a_start_a_phase_is_not_recorded() -> None:
    with phase("data"):
        pass

    assert phases.current() is None
    assert phases.end() is None


def test_a_line_names_the_phases_that_took_long_enough_to_be_seen() -> None:
    told = record(14.2, ("imports", 0, 2.1), ("probe", 2.1, 0.01), ("weights", 2.2, 11.0))

    assert told.line() == "14.2 s: imports 2.1, weights 11.0, other 1.1"
    assert record(0.01).line() == "0.0 s"


def test_a_record_as_json_has_phases_and_a_timeline() -> None:
    assert record(3.00049, ("data", 1, 2)).as_json() == {
        "began": "2026-01-02T00:00:00.000+00:00",
        "seconds": 3.0,
        "phases": {"data": 2},
        "other": 1.0,
        "timeline": [{"phase": "data", "started": 1, "seconds": 2, "thread": "main"}],
    }


def test_a_process_began_before_it_asks() -> None:
    assert process_began() <= time.monotonic()


@pytest.mark.parametrize("content", [None, "", "1 (a b) S", "1 (a) S " + "x " * 30])
def test_where_the_system_does_not_tell_a_process_began_now(
    tmp_path: Path, clock: Clock, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/stat").write_text(content)

    assert process_began(tmp_path) == clock.now


def test_a_process_began_when_its_ticks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    before = " ".join("0" for _ in range(19))
    (tmp_path / "proc/self/stat").write_text(f"7 (a ) b) {before} 4200 0 0")
    monkeypatch.setattr(phases, "sysconf", lambda name: 100)
    monkeypatch.setattr(phases, "clock_gettime", lambda clock: 50.0)
    monkeypatch.setattr(phases, "monotonic", lambda: 30.0)

    assert process_began(tmp_path) == 22.0


def test_a_start_may_be_kept_apart_from_that_of_the_process() -> None:
    start = Start()
    with start.phase("data"):
        pass

    assert list(start.record().totals()) == ["data"]
    assert phases.current() is None
