"""Progress of a run, on a terminal and without one: its start, its jobs, and how fast it is."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
)
from rich.spinner import Spinner
from rich.text import Text

from tlora_fx.cli.terminal import EVERY_SECONDS, Console
from tlora_fx.errors import first_of
from tlora_fx.host import phases
from tlora_fx.inspect.wording import plural
from tlora_fx.runtime.callbacks import TrainerCallback

if TYPE_CHECKING:
    from tlora_fx.runtime.data.samples import DataReport
    from tlora_fx.runtime.job_evaluation import EvaluationReport
    from tlora_fx.runtime.job_run import JobRun, RoundReport, SampleReport, StepReport

#: Rounds that say how fast the run is now.
RECENT = 20
#: Jobs whose data was read alike are named up to so many.
NAMED = 3


class Pace:
    """How fast rounds are, from the second on: the first one compiles, and says nothing of others.

    A round takes the median of the last ones, so that one which compiles or captures does not
    count. What passes between rounds, for evaluations and checkpoints, is added in the mean.
    """

    def __init__(self) -> None:
        self._recent: deque[RoundReport] = deque(maxlen=RECENT)
        self._number = 0
        self._rounds = self._tokens = self._rows = self._replayed = 0
        self._seconds = self._between = 0.0
        self._ended = math.nan

    def add(self, report: RoundReport, now: float) -> None:
        """Take a round in; once, though each of its jobs reports it.

        now    by a monotonic clock
        """
        if report.number == self._number:
            return
        if self._number:
            self._recent.append(report)
            self._rounds += 1
            self._tokens += report.tokens
            self._rows += report.rows
            self._replayed += report.rows_replayed
            self._seconds += report.seconds
            self._between += max(0.0, now - self._ended - report.seconds)
        self._number, self._ended = report.number, now

    @property
    def round_seconds(self) -> float | None:
        """Seconds from round to round; None while there is no steady one."""
        if not self._rounds:
            return None
        return median(each.seconds for each in self._recent) + self._between / self._rounds

    def left(self, steps: int) -> timedelta | None:
        """Time that so many steps take; None while there is no steady round."""
        seconds = self.round_seconds
        return None if seconds is None else timedelta(seconds=round(seconds * steps))

    def speed(self) -> str:
        """Tokens a second, now and in the mean, and the share of rows that ran as CUDA graphs."""
        now, mean = self.now(), self.mean()
        if now is None or mean is None:
            return ""
        speed = f"{_number(now)} tokens/s (mean {_number(mean)})"
        replayed = f", {self._replayed / self._rows:.0%} of rows replayed" if self._rows else ""
        return speed + replayed

    def now(self) -> float | None:
        """Tokens a second of the last rounds."""
        return _rate(
            sum(each.tokens for each in self._recent), sum(each.seconds for each in self._recent)
        )

    def mean(self) -> float | None:
        """Tokens a second of all steady rounds."""
        return _rate(self._tokens, self._seconds)


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


class Bars(TrainerCallback):
    """A progress bar a job, and a line below, on a terminal.

    Where there is none: a line every `every_seconds`, and one at each job's end. Until the first
    round is done, lines say what the start is doing.
    """

    def __init__(self, console: Console, every_seconds: float = EVERY_SECONDS) -> None:
        self.console = console
        self._every_seconds = every_seconds
        self._steps: dict[str, tuple[int, int]] = {}
        self._losses: dict[str, float] = {}
        self._told: tuple[float, dict[str, int]] = (time.monotonic(), {})
        self.pace = Pace()
        self._on = threading.Event()
        self._trained = threading.Event()
        self._teller: threading.Thread | None = None
        self._spinner = Spinner("dots")
        self.tasks: dict[str, TaskID] = {}
        self.progress = _Lines(
            self._below,
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:>8}"),
            TextColumn("{task.fields[left]:>8}"),
            console=console,
            disable=not console.is_terminal,
        )

    def start(self) -> None:
        """Begin to say what is being done."""
        if self._on.is_set():
            return
        self._on.set()
        if self.console.is_terminal:
            self.progress.start()
            return
        self._say(_doing())
        self._teller = threading.Thread(target=self._tell_start, daemon=True)
        self._teller.start()

    def stop(self) -> None:
        """Say no more; what was said stays."""
        if not self._on.is_set():
            return
        self._on.clear()
        self._hush()
        self.progress.stop()

    def __enter__(self) -> Bars:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def started(self, runs: Sequence[JobRun]) -> None:
        for job in runs:
            if job.status == "running":
                self._steps[job.job.name] = (job.step, job.data.steps)
            self.tasks[job.job.name] = self.progress.add_task(
                job.job.name, total=job.data.steps, completed=job.step, loss="–", left=""
            )
        self._told = (time.monotonic(), {name: step for name, (step, _) in self._steps.items()})

    def stepped(self, report: StepReport) -> None:
        self._end_start(report.round)
        _, last = self._steps.get(report.job, (0, report.step))
        left = self.pace.left(last - report.step)
        self.progress.update(
            self.tasks[report.job], completed=report.step, loss=f"{report.loss:.4f}",
            left="" if left is None else str(left),
        )  # fmt: skip
        self._steps[report.job] = (report.step, last)
        self._losses[report.job] = report.loss
        if not self.console.is_terminal:
            self._tell()

    def evaluated(self, report: EvaluationReport) -> None:
        if not self.console.is_terminal:
            shown = (name for name in report.metrics if name != "eval_runtime")
            values = ", ".join(f"{name} {report.metrics[name]:.4g}" for name in shown)
            best = ", the best so far" if report.is_best else ""
            self._say(f"{report.job}: step {report.step}, {values}{best}")

    def sampled(self, report: SampleReport) -> None:
        for prompt, said in report.texts:
            self._say(f"{report.job}: step {report.step}, '{prompt}' → '{said}'")

    def ended(self, run: JobRun) -> None:
        self._steps.pop(run.job.name, None)
        if run.status == "failed":
            how = "failed at " if run.reason.startswith("step ") else "failed: "
            self.warned(f"job '{run.job.name}' {how}{run.reason}")
        elif run.reason:
            self._say(f"{run.job.name}: {run.reason}")
        elif not self.console.is_terminal:
            steps = plural(run.step, "step")
            self._say(f"{run.job.name}: done after {steps}, loss {run.loss:.4f}")

    def warned(self, text: str) -> None:
        self.progress.console.print(
            f"warning: {text}", style="yellow", markup=False, soft_wrap=True
        )

    def noted(self, text: str) -> None:
        self._say(text)

    def read(self, reports: Mapping[str, DataReport]) -> None:
        """Say how the data of jobs was read, once of jobs of which all of it is the same."""
        names: dict[tuple[str, ...], list[str]] = {}
        for name, report in reports.items():
            names.setdefault(tuple(report.lines()), []).append(name)
        for lines, jobs in names.items():
            shown = first_of(jobs, len(jobs) if len(jobs) <= NAMED else 1)
            for line in lines:
                self._say(f"{shown}: {line}")

    def _say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _below(self) -> RenderableType | None:
        """The line below the bars."""
        if self._trained.is_set():
            speed = self.pace.speed()
            return Text(speed) if speed else None
        self._spinner.update(text=_doing_since())
        return self._spinner

    def _end_start(self, round_: RoundReport | None) -> None:
        """Take a round in; the first one is the end of the start."""
        if round_ is None:
            return
        self.pace.add(round_, time.monotonic())
        if not self._trained.is_set():
            self._hush()
            if round_.start is not None:
                self._say(f"first step after {round_.start.line()}")

    def _hush(self) -> None:
        """Say no more of the start."""
        self._trained.set()
        if self._teller is not None:
            self._teller.join()

    def _tell_start(self) -> None:
        """What the start is doing, every few seconds."""
        while not self._trained.wait(self._every_seconds):
            # The first round ends the start; it may just have.
            if phases.current() is not None:
                self._say(_doing_since())

    def _tell(self) -> None:
        """Where the job stands that has most before it, every few seconds."""
        now, (before, steps) = time.monotonic(), self._told
        if now - before < self._every_seconds:
            return
        name, (step, last) = max(self._steps.items(), key=lambda job: job[1][1] - job[1][0])
        if step <= steps.get(name, 0):
            return
        others = len(self._steps) - 1
        more = f" and {others} more" if others else ""
        text = f"{name}{more}: step {step} of {last}, loss {self._losses[name]:.4f}"
        seconds, left = self.pace.round_seconds, self.pace.left(last - step)
        if seconds is not None:
            text += f", {left} left, {seconds:.2g} s a step"
        if speed := self.pace.speed():
            text += f", {speed}"
        self._say(text)
        self._told = (now, {name: step for name, (step, _) in self._steps.items()})


class _Lines(Progress):
    """Progress bars with a line below them.

    below    makes the line each time that it is drawn; None where there is none
    """

    def __init__(
        self, below: Callable[[], RenderableType | None], *columns: ProgressColumn, **options: Any
    ) -> None:
        self._below = below
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Bars, and the line."""
        yield from super().get_renderables()
        if (line := self._below()) is not None:
            yield line


def _doing() -> str:
    """What the start is doing now."""
    start = phases.current()
    running = [] if start is None else start.running()
    return ", ".join(phases.TITLES.get(name, name) for name in running) or "starting"


def _doing_since() -> str:
    """The seconds since the start began, and those of each phase that it is in."""
    start = phases.current()
    if start is None:
        return _doing()
    record = start.record()
    took = record.totals()
    running = [
        f"{phases.TITLES.get(name, name)} ({took.get(name, 0.0):.0f} s)" for name in start.running()
    ]
    return f"{record.seconds:.0f} s so far: {', '.join(running) or 'starting'}"
