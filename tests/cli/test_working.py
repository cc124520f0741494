"""What commands print while they work, and tables, where there is no terminal."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from tlora_fx.cli.bars import Bars
from tlora_fx.cli.terminal import Console, Working, print_whole


def plain(width=80):
    """A console that writes into a text, as into a pipe."""
    return Console(file=io.StringIO(), width=width, highlight=False)


def told(console):
    return console.file.getvalue().splitlines()


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


def report(name, step):
    return SimpleNamespace(job=name, step=step, loss=1.5)


def test_what_takes_long_is_told_again_and_again():
    """The first line at once, later ones with the seconds; none after the end."""
    console = plain()
    with Working(console, "measuring", every_seconds=0.01) as working:
        assert told(console)[0] == "measuring"
        end = time.monotonic() + 60
        while len(told(console)) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        working.now("comparing")
        while told(console)[-1] != "comparing: 0 s so far" and time.monotonic() < end:
            time.sleep(0.01)
    count = len(told(console))
    time.sleep(0.05)

    assert told(console)[1] == "measuring: 0 s so far"
    assert len(told(console)) == count


def test_training_says_how_far_it_is():
    """The job with most before it stands for all; first steps compile, and foretell nothing."""
    console = plain()
    with Bars(console, every_seconds=0.0) as bars:
        bars.started([run_of("long", 60, done=10), run_of("short", 12, done=10)])
        bars.stepped(report("long", 11))
        bars.stepped(report("short", 11))
        bars.ended(run_of("short", 12, done=12))
        bars.stepped(report("long", 12))

    first, ended, last = told(console)
    assert first == "long and 1 more: step 11 of 60, loss 1.5000"
    assert ended == "short: done after 12 steps, loss 1.5000"
    assert last.startswith("long: step 12 of 60, ")
    assert last.endswith(" s a step")


def test_training_does_not_say_so_at_every_step():
    """Only every ten seconds."""
    console = plain()
    with Bars(console) as bars:
        bars.started([run_of("one", 60)])
        for step in range(1, 20):
            bars.stepped(report("one", step))

    assert told(console) == []


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
