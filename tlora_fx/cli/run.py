"""`tlora-fx run`: train the jobs of a folder on this machine, grouped anew at each horizon."""

from __future__ import annotations

import errno
import importlib.util
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from tlora_fx.cli.options import (
    AddPass,
    Load,
    PipelineText,
    TrustRemoteCode,
    pipeline_of,
    require_pipeline,
    seconds,
    takes_options,
)
from tlora_fx.cli.terminal import Console
from tlora_fx.errors import JobFolderError, RayNotInstalled, RunRefused
from tlora_fx.scheduler.formations import Callback, Formation
from tlora_fx.scheduler.loop import Loop, LoopOptions
from tlora_fx.scheduler.state import ActiveJob, ChangeCosts, JobRequest
from tlora_fx.scheduler.store import JobRecord, Ledger

if TYPE_CHECKING:
    from tlora_fx.cost.hardware import Cluster
    from tlora_fx.scheduler.local.admission import AdmissionLimits
    from tlora_fx.scheduler.service import Estimates, RunOptions, SchedulerService


TURN_SECONDS = 0.05
SHOW_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RunCommandOptions:
    """Options of the command line."""

    jobs: Annotated[Path, typer.Argument(help="Folder of job files (YAML), or one file.")]
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Output folder for adapters, metrics and checkpoints; runs/DATE-TIME if not "
            "given.",
        ),
    ] = None
    policy: Annotated[
        str,
        typer.Option(
            help="Scheduling policy, which decides which jobs train together: tlora, "
            "megatron:backfill=true, ..."
        ),
    ] = "tlora"
    horizon: Annotated[
        str, typer.Option(help="Time between scheduling decisions, such as 60s or 5m.")
    ] = "60s"
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of GPUs to use (with Ray, on each node). On the CPU, number of slots to "
            "divide it into. If not given, all GPUs, or the CPU as one slot.",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="Kind of device to train on: cpu or cuda; if not given, cuda if there is a GPU."
        ),
    ] = None
    executor: Annotated[
        str,
        typer.Option(help="Where groups of jobs run: local (this machine) or ray (a Ray cluster)."),
    ] = "local"
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the head node of a Ray cluster; if not given, the cluster that "
            "runs on this machine."
        ),
    ] = None
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="Profile file of a base model, written by `tlora-fx profile`; repeatable."
        ),
    ] = None
    until_empty: Annotated[
        bool,
        typer.Option(
            "--until-empty",
            help="Exit as soon as every job has ended, without waiting for new job files.",
        ),
    ] = False
    forever: Annotated[
        bool,
        typer.Option(
            "--forever",
            help="Do not exit when every job has ended: wait for more job files until Ctrl-C.",
        ),
    ] = False
    save_every: Annotated[
        str, typer.Option(help="Time between checkpoints of a group, such as 60s or 5m.")
    ] = "60s"
    max_row_tokens: Annotated[
        int, typer.Option(min=2, help="Maximum tokens in one forward pass.")
    ] = 16384
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile the layers with torch.compile; groups take longer to start."
        ),
    ] = False
    prepare_seconds: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds that reading and checking a job may take; a job that takes longer is "
            "refused.",
        ),
    ] = 120.0
    prepare_memory: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Memory that reading and checking a job may take, in GiB; a quarter of the "
            "machine's memory if not given.",
        ),
    ] = None
    stall: Annotated[
        str | None,
        typer.Option(
            help="Kill a group that makes no progress for this long, such as 10m; if not given, "
            "for 20 times its longest step, and 5 minutes at least (30 with --compile)."
        ),
    ] = None
    trust_remote_code: TrustRemoteCode = False
    grace: Annotated[
        str, typer.Option(help="How long groups may take to stop after Ctrl-C, such as 60s.")
    ] = "60s"
    pipeline: PipelineText = None
    add_pass: AddPass = None
    load: Load = None
    callback: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own callback for events of each group, a tlora_fx.TrainerCallback, as "
            "FILE.py:CLASS; repeatable."
        ),
    ] = None
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Continue jobs even if their data or base model have changed."
        ),
    ] = False

    def service(self, kind: str, estimates: Estimates) -> RunOptions:
        """Service options of the run that the command line asks for, on kind "cpu" or "cuda"."""
        from tlora_fx.scheduler.local.executor import LocalOptions
        from tlora_fx.scheduler.local.watchdog import COMPILING_SECONDS, STEP_SECONDS, StallLimits
        from tlora_fx.scheduler.service import RunOptions

        horizon = seconds(self.horizon, "--horizon")
        saving = seconds(self.save_every, "--save-every")
        stall = StallLimits(
            None if self.stall is None else seconds(self.stall, "--stall"),
            min_seconds=COMPILING_SECONDS if self.compiled else STEP_SECONDS,
        )
        return RunOptions(
            LoopOptions(horizon, switch_seconds=10.0, changes=ChangeCosts()),
            linger=None if self.forever else 0.0 if self.until_empty else horizon,
            layout_of=estimates.layout_of,
            admission=self._admission(),
            grace_seconds=seconds(self.grace, "--grace"),
            local=LocalOptions(
                kind,
                saving,
                self.max_row_tokens,
                self.compiled,
                stall=stall,
                pipeline=self._pipeline(),
                extensions=tuple(map(_absolute, self.load or ())),
                accept_changes=self.accept_changes,
                callbacks=tuple(map(_absolute, self.callback or ())),
                memory_of=estimates.memory_of,
            ),
        )

    def _pipeline(self) -> str | None:
        """The passes that workers run, None for the default; raises PipelineError, PluginBroken."""
        if not (self.pipeline or self.add_pass or self.load):
            return None
        return str(pipeline_of(self.pipeline, self.add_pass, self.load))

    def _admission(self) -> AdmissionLimits:
        from tlora_fx.scheduler.local.admission import AdmissionLimits

        memory = self.prepare_memory
        return AdmissionLimits(
            self.prepare_seconds,
            None if memory is None else int(memory * (1 << 30)),
            self.trust_remote_code,
        )


def _absolute(name: str) -> str:
    """A file's name, or what stands in it, as workers in other folders find it."""
    source, colon, attribute = name.partition(".py")
    return f"{Path(source).absolute()}{colon}{attribute}" if colon else name


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

    from tlora_fx.scheduler.service import Estimates, opened

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


EXECUTORS = ("local", "ray")


def require_executor(options: RunCommandOptions) -> None:
    """Refuse names of executors that there are not, and Ray where it is not installed."""
    if options.executor not in EXECUTORS:
        raise RunRefused(
            "there is no such executor",
            expected=" or ".join(EXECUTORS),
            found=options.executor,
            help="leave --executor out to run on this machine",
        )
    if options.executor != "ray":
        if options.ray_address is not None:
            raise RunRefused(
                "--ray-address is of another executor",
                expected="--executor ray",
                found=f"--executor {options.executor}",
            )
    elif importlib.util.find_spec("ray") is None:
        raise RayNotInstalled(
            "--executor ray needs Ray, which is not installed here",
            help="pip install 'tlora-fx[ray]', on every node alike",
        )


def _require_right(options: RunCommandOptions) -> None:
    """Refuse a folder that is not there, profiles and times that cannot be read, one wrong file."""
    require_executor(options)
    require_pipeline(options.pipeline, options.add_pass, options.load)

    from tlora_fx.config.job_file import load_job_file
    from tlora_fx.cost.profile import Profile
    from tlora_fx.runtime import early_checks as early
    from tlora_fx.runtime.run_folder import LEDGER, RUN_COMMAND_FILES, require_new

    early.require_folder(options.jobs)
    for name in ("horizon", "save_every", "stall", "grace"):
        if (text := getattr(options, name)) is not None:
            seconds(text, f"--{name.replace('_', '-')}")
    for path in options.profile or ():
        Profile.load(path)
    begun = options.output is not None and (options.output / LEDGER).exists()
    if options.output is not None and not begun:
        require_new(options.output, among=RUN_COMMAND_FILES)
    if options.until_empty and not begun and not early.job_files(options.jobs):
        raise _empty(options.jobs)
    if options.jobs.is_file():
        jobs = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code).jobs
        early.require_data(jobs)
        early.require_base(jobs)
        early.require_hub(jobs)


def _empty(folder: Path) -> JobFolderError:
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return JobFolderError(
        "there is no job to run: the folder holds no job files",
        folder=folder,
        expected="files that end in .yaml or .yml",
        found=", ".join(there[:5]) or "an empty folder",
        help="put job files into it; with --forever a run waits for them",
    )


def placed(
    options: RunCommandOptions,
) -> tuple[Cluster, str, Callable[[RunOptions], RunOptions]]:
    """Cluster of the run, "cuda" or "cpu", and a function that adapts the run's options to it.

    raises   RunRefused, RayUnreachable
    """
    if options.executor == "ray":
        from tlora_fx.scheduler.ray.cluster import RayCluster
        from tlora_fx.scheduler.ray.executor import on_ray

        nodes = RayCluster.join(options.ray_address, options.device, options.slots)
        return nodes.cluster, nodes.kind, partial(on_ray, nodes)

    from tlora_fx.scheduler.service import machine

    cluster, kind = machine(options.device, options.slots)
    return cluster, kind, lambda service: service


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


class StopSignals:
    """Ctrl-C, SIGTERM or SIGHUP drains all groups; a second one leaves them to themselves."""

    def __init__(self, running: SchedulerService) -> None:
        self.running = running

    def __enter__(self) -> None:
        from tlora_fx.runtime.interrupts import stop_signals

        self.before = {number: signal.signal(number, self._hear) for number in stop_signals()}

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        from tlora_fx.runtime.interrupts import leave_terminal

        if number == signal.SIGHUP:
            leave_terminal()
        elif self.running.stopping:
            raise KeyboardInterrupt
        self.running.stop()


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
    from tlora_fx.runtime.interrupts import leave_terminal

    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal()


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
                self._live.update(table(ledger.jobs(), loop))

    def say(self, text: str, style: str | None = None) -> None:
        """A line that stays."""
        with _even_if_hung_up():
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

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
        self.say(f"{time:8.1f} s  {text}", "yellow")

    def parked(self, time: float, request: JobRequest, reason: str) -> None:
        self.say(f"{request.name} waits for the next start: {reason}", "yellow")

    def cancelled(self, time: float, name: str) -> None:
        self.say(f"{time:8.1f} s  {name} is cancelled: its job file was removed", "yellow")

    def kept(self, time: float, name: str) -> None:
        text = f"{name} goes on: its job file was removed, and it has begun"
        self.say(f"{time:8.1f} s  {text}", "yellow")

    def launched(self, time: float, formation: Formation) -> None:
        if formation.origin is not None:
            changes = [f"{name} joins" for name in formation.came]
            changes += [f"{name} leaves" for name in formation.went]
            what = ", ".join(changes)
            self.say(
                f"{time:8.1f} s  group {formation.origin} goes on as {formation.epoch}: {what}"
            )
            return
        jobs = ", ".join(formation.group.jobs)
        self.say(f"{time:8.1f} s  group {formation.epoch} on {_place(formation)}: {jobs}")

    def warned(self, time: float, formation: Formation, text: str) -> None:
        self.say(f"{time:8.1f} s  group {formation.epoch} goes on, but: {text}", "yellow")

    def noted(self, time: float, text: str) -> None:
        self.say(f"{time:8.1f} s  {text}")

    def left(self, time: float, formation: Formation, job: ActiveJob, reason: str) -> None:
        done, of = round(job.steps_done), job.request.steps
        how = f"done after {done} steps" if done >= of else f"ended early, at step {done} of {of}"
        how = f"failed: {reason}" if reason else how
        self.say(f"{time:8.1f} s  {job.name} {how}", "red" if reason else "green")

    def ended(self, time: float, formation: Formation, how: str) -> None:
        if how == "failed":
            why = f": {formation.failure}" if formation.failure else ""
            text = (
                f"group {formation.epoch} failed{why}; its jobs go on from their last checkpoints"
            )
            self.say(f"{time:8.1f} s  {text}", "yellow")

    def gave_up(self, time: float, job: ActiveJob, reason: str) -> None:
        self.say(f"{time:8.1f} s  {job.name} is given up: {reason}", "red")


def table(records: Iterable[JobRecord], loop: Loop) -> Table:
    """Jobs, groups, steps, slowdown and state; those that have ended last."""
    output_table = Table(box=None, pad_edge=False)
    for title in ("job", "state", "group", "steps", "of", "slowdown"):
        right = title in ("steps", "of", "slowdown")
        output_table.add_column(title, justify="right" if right else "left")
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
    output_table = Table(box=None, pad_edge=False)
    for title in ("job", "status", "steps", "queued s", "run s", "adapter"):
        right = title in ("steps", "queued s", "run s")
        output_table.add_column(title, justify="right" if right else "left")
    for record in records:
        submitted = record.request.submitted
        started, ended = record.first_started, record.ended
        queued = "" if started is None else f"{started - submitted:.1f}"
        ran = "" if started is None or ended is None else f"{ended - started:.1f}"
        folder = str(output / record.name) if record.status == "done" else ""
        status = "stopped" if stopped and record.is_active else record.status
        output_table.add_row(record.name, status, f"{record.steps:.0f}", queued, ran, folder)
    return output_table
