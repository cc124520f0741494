"""What commands print while they work, and tables, where there is no terminal."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from tlora_fx.cli import bars as bars_module
from tlora_fx.cli.bars import Bars, Pace
from tlora_fx.cli.terminal import Console, Working, print_whole
from tlora_fx.host import phases
from tlora_fx.host.phases import StartRecord, Stretch, phase
from tlora_fx.runtime.data.samples import DataReport
from tlora_fx.runtime.job_run import RoundReport


def plain(width=80):
    """A console that writes into a text, as into a pipe."""
    return Console(file=io.StringIO(), width=width, highlight=False)


def told(console):
    return console.file.getvalue().splitlines()


@pytest.fixture
def still(monkeypatch):
    """To bars no time passes but what a round is said to take, however busy the machine is."""
    monkeypatch.setattr("tlora_fx.cli.bars.time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr("tlora_fx.host.phases.monotonic", lambda: 100.0)


def run_of(name, steps, done=0):
    """A job as bars see it."""
    return SimpleNamespace(
        job=SimpleNamespace(name=name),
        data=SimpleNamespace(steps=steps),
        step=done,
        status="running",
        loss=1.5,
        reason="",
    )


def report(name, step, **more):
    """The report of a step, in a round of the same number that takes half a second."""
    round_ = RoundReport(step, 1000, 0.5, **more)
    return SimpleNamespace(job=name, step=step, loss=1.5, round=round_)


def repeats(what, line):
    """Whether a line says how long something takes so far; a busy machine may be slow."""
    return re.fullmatch(rf"{what}: \d+ s so far", line) is not None


def test_what_takes_long_is_told_again_and_again():
    """The first line at once, later ones with the seconds; none after the end."""
    console = plain()
    with Working(console, "measuring", every_seconds=0.01) as working:
        assert told(console)[0] == "measuring"
        end = time.monotonic() + 600
        while len(told(console)) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        working.now("comparing")
        while not repeats("comparing", told(console)[-1]) and time.monotonic() < end:
            time.sleep(0.01)
    count = len(told(console))
    time.sleep(0.05)

    assert repeats("measuring", told(console)[1])
    assert repeats("comparing", told(console)[-1])
    assert len(told(console)) == count


@pytest.mark.usefixtures("still")
def test_training_says_how_far_it_is():
    """The job with most before it stands for all; the first round foretells nothing."""
    console = plain()
    with Bars(console, every_seconds=0.0) as bars:
        bars.started([run_of("long", 60, done=10), run_of("short", 12, done=10)])
        bars.stepped(report("long", 11))
        bars.stepped(report("short", 11))
        bars.ended(run_of("short", 12, done=12))
        bars.stepped(report("long", 12))

    first, ended, last = told(console)[-3:]
    assert first == "long and 1 more: step 11 of 60, loss 1.5000"
    assert ended == "short: done after 12 steps, loss 1.5000"
    assert last == (
        "long: step 12 of 60, loss 1.5000, 0:00:24 left, 0.5 s a step, 2,000 tokens/s (mean 2,000)"
    )


@pytest.mark.usefixtures("still")
def test_training_does_not_say_so_at_every_step():
    """Only every few seconds."""
    console = plain()
    with Bars(console) as bars:
        bars.started([run_of("one", 60)])
        for step in range(1, 20):
            bars.stepped(report("one", step))

    assert told(console) == ["starting"]


def reading(console):
    """The lines that say how long the data are being read."""
    whole = r"\d+ s so far: reading the data \(\d+ s\)"
    return [line for line in told(console) if re.fullmatch(whole, line)]


def test_a_start_says_what_it_is_doing():
    """Again and again, until the first round, which says what the start took."""
    console = plain(200)
    phases.begin()
    with Bars(console, every_seconds=0.01) as bars:
        with phase("data"):
            end = time.monotonic() + 600
            while len(reading(console)) < 2 and time.monotonic() < end:
                time.sleep(0.01)
        bars.started([run_of("one", 60)])
        record = StartRecord(datetime.now(UTC), 3.0, (Stretch("data", 0.0, 2.0, "main"),))
        bars.stepped(report("one", 1, start=record))
        bars.stepped(report("one", 2))
    phases.end()

    lines = told(console)
    assert lines[0] == "starting"
    assert len(reading(console)) >= 2
    assert lines.count("first step after 3.0 s: data 2.0, other 1.0") == 1


def test_a_line_is_one_line_in_a_narrow_pipe():
    """Who reads a log line by line gets whole ones, warnings too."""
    console = plain(40)
    with Bars(console) as bars:
        bars.warned("a sample has 9,000 tokens, more than --max-row-tokens 64")
        bars.noted("read as prompt-completion (prompt, completion); trained on completions")

    assert told(console)[-2:] == [
        "warning: a sample has 9,000 tokens, more than --max-row-tokens 64",
        "read as prompt-completion (prompt, completion); trained on completions",
    ]


@pytest.mark.usefixtures("still")
def test_on_a_terminal_a_line_below_the_bars_says_the_same():
    """What the start does, then how fast rounds are, and when the run ends."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True, highlight=False)
    phases.begin()
    with Bars(console) as bars, phase("weights"):
        bars.started([run_of("one", 60)])
        bars.progress.refresh()
        starting = console.file.getvalue()
        bars.stepped(report("one", 1))
        bars.stepped(report("one", 2, rows=4, rows_replayed=3))
        bars.progress.refresh()
    phases.end()

    assert "0 s so far: loading the weights (0 s)" in starting
    assert "2,000 tokens/s (mean 2,000), 75% of rows replayed" in console.file.getvalue()
    assert "0:00:29" in console.file.getvalue()


def round_of(number, seconds, tokens=100):
    return RoundReport(number, tokens, seconds)


def test_the_first_round_says_nothing_of_the_pace():
    """It compiles."""
    pace = Pace()
    pace.add(round_of(1, 90.0), 90.0)
    assert (pace.left(10), pace.speed()) == (None, "")

    pace.add(round_of(2, 2.0), 92.0)
    assert pace.left(10) == timedelta(seconds=20)
    assert pace.speed() == "50 tokens/s (mean 50)"


def test_a_round_that_compiles_later_does_not_count_for_the_time_left():
    """It is the median of rounds that counts; the mean of tokens a second has it."""
    pace, now = Pace(), 0.0
    for number, seconds in enumerate([9.0, 1.0, 1.0, 30.0, 1.0, 1.0], 1):
        now += seconds
        pace.add(round_of(number, seconds), now)

    assert pace.left(100) == timedelta(seconds=100)
    assert pace.mean() == 500 / 34


def test_what_passes_between_rounds_counts_for_the_time_left():
    """Such as evaluations, each its share."""
    pace = Pace()
    pace.add(round_of(1, 1.0), 1.0)
    pace.add(round_of(2, 1.0), 2.0)
    pace.add(round_of(3, 1.0), 7.0)

    assert pace.left(10) == timedelta(seconds=30)


def test_a_round_that_all_its_jobs_report_counts_once():
    """Each step's report has its round."""
    pace = Pace()
    for now in (1.0, 1.0, 2.0, 2.0):
        pace.add(round_of(int(now), 1.0), now)

    assert pace.mean() == 100


@given(
    st.lists(st.lists(st.integers(0, 10**12), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(10, 200),
)
def test_tables_are_never_cut(rows, width):
    """Whatever the width: each row is one line with every number."""
    table = Table(*"abcdef", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    console = plain(width)

    print_whole(console, table)

    head, *lines = told(console)
    assert head.split() == list("abcdef")
    assert [[int(word) for word in line.split()] for line in lines] == rows


def test_text_of_strangers_moves_no_cursor():
    """In a line and in a table; the console's own colours stay."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    table = Table()
    table.add_column("a\x1b[2Jb")
    table.add_row("c\x9b1A\u202ed")
    console.print("e\x1b]0;title\x07f", style="red", markup=False, highlight=False)
    console.print(table)

    text = console.file.getvalue()
    assert "a\\x1b[2Jb" in text
    assert "c\\x9b1A\\u202ed" in text
    assert "e\\x1b]0;title\\x07f" in text
    assert "\x1b[31m" in text
    assert not {"\x07", "\x9b", "\u202e"} & set(text)


def test_jobs_whose_data_was_read_alike_share_their_lines():
    """Eight jobs on one file are no reason for eight times the same."""
    out = io.StringIO()
    alike = DataReport(rows=9, samples=9, tokens=90, target_tokens=30, layout="read as text")
    reports = {f"a{n}": alike for n in range(5)} | {
        "b": replace(alike, truncated=2),
        "c": replace(alike, truncated=3),
        "d": replace(alike, truncated=3),
    }
    Bars(Console(file=out)).read(reports)

    assert out.getvalue().splitlines() == [
        "a0 and 4 more: 9 samples, 90 tokens, 30 trained",
        "a0 and 4 more: read as text",
        "b: 9 samples, 90 tokens, 30 trained",
        "b: 2 of 9 samples truncated to max_length",
        "b: read as text",
        "c, d: 9 samples, 90 tokens, 30 trained",
        "c, d: 3 of 9 samples truncated to max_length",
        "c, d: read as text",
    ]


def test_a_start_tells_the_seconds_of_its_phase_apart(monkeypatch):
    """A phase that has just begun is not what all the seconds before it went to."""
    now = [0.0]
    monkeypatch.setattr(phases, "monotonic", lambda: now[0])
    phases.begin()
    try:
        with phase("imports"):
            now[0] = 13.0
        with phase("tracing"):
            now[0] = 16.0
            text = bars_module._doing_since()
    finally:
        phases.end()

    assert text == "16 s so far: tracing and fusing the jobs (3 s)"
