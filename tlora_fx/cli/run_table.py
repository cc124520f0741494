"""The live table of `tlora-fx run`, and its lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tlora_fx.scheduler.ledger_rows import JobRecord
from tlora_fx.scheduler.loop import Loop
from tlora_fx.scheduler.loop_runs import Run
from tlora_fx.scheduler.loop_watch import NoWatch
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.running_files import Found
from tlora_fx.scheduler.state import ActiveJob
from tlora_fx.scheduler.store import Ledger

#: Jobs that are shown at most; the others are counted.
SHOWN = 30


class Page(NoWatch):
    """Shows a run on a terminal; prints a line for each thing that happens where there is none."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Page:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def show(self, loop: Loop, ledger: Ledger) -> None:
        """Draw the table anew."""
        if self.console.is_terminal:
            self._live.update(table(ledger.jobs(), loop))

    def say(self, text: str, style: str | None = None) -> None:
        """A line that stays."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def went_on(self, jobs: int, done: int) -> None:
        """The run goes on with what an earlier process began."""
        self.say(f"going on with {jobs} jobs, of which {done} have ended")

    def took(self, found: Found) -> None:
        """A job file was read, or is bad."""
        if found.jobs:
            self.say(f"{found.path.name}: {', '.join(job.name for job in found.jobs)}")
        if found.mistake:
            self.say(f"{found.path.name} is left out as far as it is wrong:", "yellow")
            self.say(found.mistake, "yellow")

    def refused(self, time: float, request: JobRequest, reason: str) -> None:
        """A job will never run."""
        self.say(f"{request.name} cannot run: {reason}", "red")

    def launched(self, time: float, run: Run) -> None:
        """A group was formed."""
        jobs = ", ".join(run.group.jobs)
        self.say(f"{time:8.1f} s  group {run.epoch} on {_place(run)}: {jobs}")

    def warned(self, time: float, run: Run, text: str) -> None:
        """Something went wrong in a group, and it goes on."""
        self.say(f"{time:8.1f} s  group {run.epoch} goes on, but: {text}", "yellow")

    def left(self, time: float, run: Run, job: ActiveJob, reason: str) -> None:
        """A job ended."""
        how = f"failed: {reason}" if reason else f"done after {job.request.steps} steps"
        self.say(f"{time:8.1f} s  {job.name} {how}", "red" if reason else "green")

    def ended(self, time: float, run: Run, how: str) -> None:
        """A group is over."""
        if how == "failed":
            self.say(f"{time:8.1f} s  group {run.epoch} failed; its jobs wait", "yellow")

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        """A job will not be run again."""
        self.say(f"{time:8.1f} s  {job.name} is given up: {reason}", "red")


def table(records: Iterable[JobRecord], loop: Loop) -> Table:
    """Jobs, groups, steps, slowdown and state; those that have ended last."""
    made = Table(box=None, pad_edge=False)
    for title in ("job", "state", "group", "steps", "of", "slowdown"):
        right = title in ("steps", "of", "slowdown")
        made.add_column(title, justify="right" if right else "left")
    runs = {name: run for run in loop.runs.values() for name in run.jobs}
    order = {"running": 0, "queued": 1, "failed": 2, "refused": 3, "done": 4}
    rows = sorted(records, key=lambda record: order[record.status])
    for record in rows[:SHOWN]:
        made.add_row(*_row(record, runs.get(record.name)))
    if len(rows) > SHOWN:
        made.add_row(f"and {len(rows) - SHOWN} more")
    return made


def _row(record: JobRecord, run: Run | None) -> tuple[str, ...]:
    done, group, slowdown, state = record.steps, "", "", str(record.status)
    if run is not None and record.status == "running":
        job = run.jobs[record.name]
        done = job.steps_done
        group = f"{run.epoch} on {_place(run)}"
        slowdown = f"{run.group.seconds / job.solo_seconds:.2f}" if job.solo_seconds else ""
        state = "stopping" if run.leaving else "trains" if run.started is not None else "starts"
    steps = "" if record.status == "refused" else str(record.request.steps)
    return record.name, state, group, f"{done:.0f}", steps, slowdown


def _place(run: Run) -> str:
    return ",".join(map(str, run.group.place))


def summary(records: Iterable[JobRecord], output: Path) -> Table:
    """What came out."""
    made = Table(box=None, pad_edge=False)
    for title in ("job", "status", "steps", "queued s", "run s", "adapter"):
        right = title in ("steps", "queued s", "run s")
        made.add_column(title, justify="right" if right else "left")
    for record in records:
        submitted = record.request.submitted
        started, ended = record.first_started, record.ended
        queued = "" if started is None else f"{started - submitted:.1f}"
        ran = "" if started is None or ended is None else f"{ended - started:.1f}"
        folder = str(output / record.name) if record.status == "done" else ""
        made.add_row(record.name, record.status, f"{record.steps:.0f}", queued, ran, folder)
    return made
