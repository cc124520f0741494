"""The live table of `tlora-fx run`: what it says of jobs that train, wait and have ended."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from tests.scheduler.run_folder import run, write_job
from tlora_fx.cli.run import Page, summary, table


def printed(renderable) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    return console.file.getvalue()


def test_the_table_says_where_each_job_is(tmp_path):
    """Its group, steps and slowdown while it trains; its state before and after."""
    for name in ("quick", "groups"):
        write_job(tmp_path / "jobs", name, steps=5)
    seen = []

    def look(running):
        states = {record.name: record.status for record in running.ledger.jobs()}
        if states.get("quick") == "done" and not (tmp_path / "jobs" / "long.yaml").exists():
            for name in ("long", "also-long"):
                write_job(tmp_path / "jobs", name, steps=100_000)
        if running.loop.running and "long" in states:
            seen.append(printed(table(running.ledger.jobs(), running.loop)))
            records = running.ledger.jobs()
            seen.extend(
                printed(summary(records, tmp_path / "run", stopped=it)) for it in (False, True)
            )
        return bool(seen)

    run(tmp_path / "jobs", tmp_path / "run", until=look, linger=120.0)

    rows = {line.split()[0]: line.split()[1:] for line in seen[0].splitlines()}
    assert rows["quick"] == ["done", "5", "5"]
    assert rows["groups"][0] == "refused"
    assert rows["long"][0] in ("trains", "starts", "stopping", "queued")
    training = [row for row in rows.values() if row[0] == "trains"]
    assert all(row[2] == "on" and float(row[-1]) > 0 for row in training)
    assert str(tmp_path / "run" / "quick") in seen[1]
    ends = [{line.split()[0]: line.split()[1] for line in text.splitlines()} for text in seen[1:]]
    assert ends[0]["long"] in ("running", "queued")
    assert (ends[1]["long"], ends[1]["quick"]) == ("stopped", "done")


def test_the_table_says_who_joins_and_who_leaves():
    """While a group becomes another one; who stays trains on."""
    jobs = dict.fromkeys(
        ("stays", "leaves", "joins"), SimpleNamespace(steps_done=3, solo_seconds=0)
    )
    plain = {"group": SimpleNamespace(place=(0,)), "leaving": False}
    successor = SimpleNamespace(
        epoch=2, jobs={name: jobs[name] for name in ("stays", "joins")}, origin=1, started=None,
        successor=None, **plain,
    )  # fmt: skip
    run = SimpleNamespace(
        epoch=1, jobs={name: jobs[name] for name in ("stays", "leaves")}, origin=None, started=1.0,
        successor=successor, **plain,
    )  # fmt: skip
    records = [
        SimpleNamespace(name=name, status="running", steps=3, request=SimpleNamespace(steps=9))
        for name in jobs
    ]

    lines = printed(table(records, SimpleNamespace(running={1: run}))).splitlines()

    states = {line.split()[0]: line.split()[1:3] for line in lines[1:]}
    assert states == {"stays": ["trains", "1"], "leaves": ["leaves", "1"], "joins": ["joins", "2"]}


def test_a_terminal_shows_the_table_and_keeps_the_lines(tmp_path):
    """The table goes at the end; what happened stays."""
    write_job(tmp_path / "jobs", "a", 30)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    page = Page(console)
    with page:
        run(tmp_path / "jobs", tmp_path / "run", page,
            lambda running: page.show(running.loop, running.ledger))  # fmt: skip

    told = console.file.getvalue()
    assert "group 1 on" in told
    assert "a done after 30 steps" in told
    assert "slowdown" in told


def test_a_group_that_goes_on_without_who_should_have_joined_says_who_trains():
    """The one whose files are away has a line of its own."""
    output = io.StringIO()
    page = Page(Console(file=output))
    for came in ((), ("b",)):
        page.launched(
            3.0,
            SimpleNamespace(
                origin=1, epoch=2, came=came, went=(), group=SimpleNamespace(jobs=("a", *came))
            ),
        )

    lines = [line.strip() for line in output.getvalue().splitlines()]
    assert lines == [
        "3.0 s  group 1 goes on as 2: a as before",
        "3.0 s  group 1 goes on as 2: b joins",
    ]
