"""`tlora-fx run`: train the jobs of a folder on this machine, grouped anew at each horizon."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

from tlora_fx.cli.arguments.options import takes_options
from tlora_fx.cli.arguments.run_options import (
    TURN_SECONDS,
    RunCommandOptions,
    StopSignals,
    placed,
    require_executor,
    require_output_and_times,
)
from tlora_fx.cli.terminal import Console, bare_table, without_columns
from tlora_fx.errors import JobFolderError
from tlora_fx.inspect.wording import plural
from tlora_fx.scheduler.folder_kind import require_folder_of_run
from tlora_fx.scheduler.formations import Callback, Formation
from tlora_fx.scheduler.history import JobRecord
from tlora_fx.scheduler.loop import Loop
from tlora_fx.scheduler.state import ActiveJob, JobRequest
from tlora_fx.scheduler.store import Ledger

if TYPE_CHECKING:
    from tlora_fx.scheduler.service import SchedulerService


SHOW_SECONDS = 0.5


@takes_options
def run(options: RunCommandOptions) -> None:
    """Train the jobs of a folder, and decide anew at each horizon which jobs train together.

    You may add job files to the folder at any time. The run ends when every job has ended and no
    new file has come for one horizon. After Ctrl-C or a crash, start it again with the same -o to
    continue.
    """
    from tlora_fx.runtime.callbacks import callback_named
    from tlora_fx.scheduler.policies import policy_of

    # Importing torch takes seconds; what can be said before them is.
    policy = policy_of(options.policy)
    _require_right(options)

    from tlora_fx.scheduler.estimates import Estimates
    from tlora_fx.scheduler.service import opened

    for name in options.callback or ():
        callback_named(name)
    cluster, kind, adapted = placed(options)
    estimates = Estimates(cluster, tuple(options.profile or ()))
    service = adapted(options.service(kind, estimates))
    output = options.output or Path("runs") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    page = Page(Console(stderr=True))
    page.say(f"{output}: {cluster.gpus} × {cluster.gpu}, policy {policy.name}")
    for text in estimates.threads() if options.executor == "local" else ():
        page.say(f"warning: {text}", "yellow")
    with opened(
        options.jobs, output, cluster, policy, estimates.estimator, estimates, page, service
    ) as running:
        stopped = _until_over(running, page)
        records = running.ledger.jobs()
    if not (records or stopped or page.mistaken):
        raise _empty(options.jobs)
    _end(records, output, stopped=stopped, mistaken=bool(page.mistaken))


def _require_right(options: RunCommandOptions) -> None:
    """Refuse a folder that is not there, profiles and times that cannot be read, one wrong file."""
    require_executor(options)
    options.require_passes()

    from tlora_fx.config.job_file import load_job_file
    from tlora_fx.runtime.launching import early_checks as early

    early.require_folder(options.jobs)
    begun = require_output_and_times(options, require_folder_of_run)
    if options.until_empty and not begun and not early.job_files(options.jobs):
        raise _empty(options.jobs)
    if options.jobs.is_file():
        jobs = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code).jobs
        early.require_data_and_base(jobs)


def _empty(folder: Path) -> JobFolderError:
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return JobFolderError(
        "there is no job to run: the folder holds no job files",
        folder=folder,
        expected="files that end in .yaml or .yml",
        found=", ".join(there[:5]) or "an empty folder",
        help="put job files into it; with --forever a run waits for them",
    )


def _until_over(running: SchedulerService, page: Page) -> bool:
    """Turn a run until it is over; whether it was stopped."""
    signals = StopSignals(running)
    shown = float("-inf")
    with signals, page:
        while running.turn():
            if time.monotonic() - shown >= SHOW_SECONDS:
                page.show(running.loop, running.ledger)
                shown = time.monotonic()
            time.sleep(TURN_SECONDS)
    return running.stopping


def _end(records: list[JobRecord], output: Path, *, stopped: bool, mistaken: bool) -> None:
    """Say what came out; the exit code is that of `train`."""
    Console(soft_wrap=True).print(summary(records, output, stopped=stopped))
    if stopped:
        raise KeyboardInterrupt(f"every group is safe; go on with -o {output}")
    if mistaken or any(record.status in ("failed", "refused") for record in records):
        sys.exit(1)


@contextmanager
def _even_if_hung_up() -> Iterator[None]:
    """Inside, a terminal may be closed: that is an error before SIGHUP is heard."""
    from tlora_fx.runtime.launching.interrupts import leave_terminal

    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal()


#: Columns that a narrow terminal has no room for, those that matter least first.
OPTIONAL_COLUMNS = ("slowdown", "group", "of", "state")
#: Jobs that are shown at most; the others are counted.
SHOWN = 30


class Page(Callback):
    """Shows a run on a terminal; prints a line for each thing that happens where there is none."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.mistaken: set[str] = set()
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
            with _even_if_hung_up():
                shown = table(ledger.jobs(), loop)
                self._live.update(without_columns(shown, self.console.width, OPTIONAL_COLUMNS))

    def say(self, text: str, style: str | None = None) -> None:
        """A line that stays."""
        with _even_if_hung_up():
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _say_at(self, time: float, text: str, style: str | None = None) -> None:
        self.say(f"{time:8.1f} s  {text}", style)

    def resumed(self, jobs: int, done: int) -> None:
        self.say(f"going on: {jobs} submitted before, {done} of them ended")

    def read_file(self, name: str, jobs: Sequence[str], mistake: str) -> None:
        self.mistaken.discard(name)
        if jobs:
            self.say(f"{name}: {', '.join(jobs)}")
        if mistake:
            self.mistaken.add(name)
            self.say(f"{name} is left out as far as it is wrong:", "yellow")
            self.say(mistake, "yellow")

    def refused(self, time: float, request: JobRequest, reason: str) -> None:
        self.say(f"{request.name} cannot run: {reason}", "red")

    def retried(
        self, time: float, file: str, jobs: Sequence[str], reason: str, seconds: float
    ) -> None:
        what = f"{file} is read" if file else f"{', '.join(jobs)} is prepared"
        text = f"{what} again in {seconds:g} s, because its process died ({reason})"
        self._say_at(time, text, "yellow")

    def parked(self, time: float, request: JobRequest, reason: str) -> None:
        self.say(f"{request.name} waits for the next start: {reason}", "yellow")

    def missed_files(self, time: float, request: JobRequest, reason: str) -> None:
        self._say_at(time, f"{request.name} waits for its files: {reason}", "yellow")

    def found_files(self, time: float, request: JobRequest) -> None:
        self._say_at(time, f"{request.name} goes on: its files can be read again")

    def compared(self, time: float, ended: Sequence[str], text: str) -> None:
        self._say_at(time, text, "green")

    def cancelled(self, time: float, name: str) -> None:
        self._say_at(time, f"{name} is cancelled: its job file was removed", "yellow")

    def kept(self, time: float, name: str) -> None:
        self._say_at(time, f"{name} goes on: its job file was removed, and it has begun", "yellow")

    def launched(self, time: float, formation: Formation) -> None:
        if formation.origin is not None:
            joins = [f"{name} joins" for name in formation.came]
            changes = [*joins, *(f"{name} leaves" for name in formation.went)]
            # Who should have joined may have been kept away by its files, which is told too.
            what = ", ".join(changes) or f"{', '.join(formation.group.jobs)} as before"
            self._say_at(time, f"group {formation.origin} goes on as {formation.epoch}: {what}")
            return
        jobs = ", ".join(formation.group.jobs)
        self._say_at(time, f"group {formation.epoch} on {_place(formation)}: {jobs}")

    def warned(self, time: float, formation: Formation, text: str) -> None:
        self._say_at(time, f"group {formation.epoch} goes on, but: {text}", "yellow")

    def noted(self, time: float, text: str) -> None:
        self._say_at(time, text)

    def left(self, time: float, formation: Formation, job: ActiveJob, reason: str) -> None:
        done, of = round(job.steps_done), job.request.steps
        whole = f"done after {plural(done, 'step')}"
        how = whole if done >= of else f"ended early, at step {done} of {of}"
        how = f"failed: {reason}" if reason else how
        self._say_at(time, f"{job.name} {how}", "red" if reason else "green")

    def ended(self, time: float, formation: Formation, how: str) -> None:
        if how == "failed":
            why = f": {formation.failure}" if formation.failure else ""
            text = (
                f"group {formation.epoch} failed{why}; its jobs go on from their last checkpoints"
            )
            self._say_at(time, text, "yellow")

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        self._say_at(time, f"{job.name} is given up: {reason}", "red")


def table(records: Iterable[JobRecord], loop: Loop) -> Table:
    """Jobs, groups, steps, slowdown and state; those that have ended last."""
    numbers = ("steps", "of", "slowdown")
    output_table = bare_table("job", "state", "group", *numbers, right=numbers)
    formations = {name: formation for formation in loop.running.values() for name in formation.jobs}
    for formation in loop.running.values():
        if formation.successor is not None:
            formations = dict.fromkeys(formation.successor.jobs, formation.successor) | formations
    order = {"running": 0, "queued": 1, "failed": 2, "refused": 3, "cancelled": 4, "done": 5}
    rows = sorted(records, key=lambda record: order[record.status])
    for record in rows[:SHOWN]:
        output_table.add_row(*_row(record, formations.get(record.name)))
    if len(rows) > SHOWN:
        output_table.add_row(f"and {len(rows) - SHOWN} more")
    return output_table


def _row(record: JobRecord, formation: Formation | None) -> tuple[str, ...]:
    done, group, slowdown, state = record.steps, "", "", str(record.status)
    if formation is not None and record.status == "running":
        job = formation.jobs[record.name]
        done = job.steps_done
        group = f"{formation.epoch} on {_place(formation)}"
        slowdown = f"{formation.group.seconds / job.solo_seconds:.2f}" if job.solo_seconds else ""
        state = "joins" if formation.origin is not None else "starts"
        state = "trains" if formation.started is not None else state
        if formation.successor is not None and record.name not in formation.successor.jobs:
            state = "leaves"
        state = "stopping" if formation.leaving else state
    steps = "" if record.status == "refused" else str(record.request.steps)
    return record.name, state, group, f"{done:.0f}", steps, slowdown


def _place(formation: Formation) -> str:
    return ",".join(map(str, formation.group.place))


def summary(records: Iterable[JobRecord], output: Path, *, stopped: bool = False) -> Table:
    """Table of results; jobs that have not ended are `stopped` with their run."""
    numbers = ("steps", "queued s", "run s")
    output_table = bare_table("job", "status", *numbers, "adapter", right=numbers)
    for record in records:
        submitted = record.request.submitted
        started, ended = record.first_started, record.ended
        queued = "" if started is None else f"{started - submitted:.1f}"
        ran = "" if started is None or ended is None else f"{ended - started:.1f}"
        folder = str(output / record.name) if record.status == "done" else ""
        status = "stopped" if stopped and record.is_active else record.status
        output_table.add_row(record.name, status, f"{record.steps:.0f}", queued, ran, folder)
    return output_table
