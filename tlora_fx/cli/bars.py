"""Progress of the jobs of a run, on a terminal and without one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as Remaining

from tlora_fx.cli.terminal import EVERY_SECONDS, Console
from tlora_fx.runtime.callbacks import TrainerCallback

if TYPE_CHECKING:
    from tlora_fx.runtime.job_evaluation import EvaluationReport
    from tlora_fx.runtime.job_run import JobRun, SampleReport, StepReport


class Bars(TrainerCallback):
    """A progress bar a job, on a terminal.

    Where there is none: a line every `every_seconds`, and one at each job's end.
    """

    def __init__(self, console: Console, every_seconds: float = EVERY_SECONDS) -> None:
        self.console = console
        self._every_seconds = every_seconds
        self._steps: dict[str, tuple[int, int]] = {}
        self._losses: dict[str, float] = {}
        self._told: tuple[float, dict[str, int]] = (time.monotonic(), {})
        self._warm = False
        self.tasks: dict[str, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:>8}"),
            Remaining(compact=True),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def started(self, runs: Sequence[JobRun]) -> None:
        for job in runs:
            if job.status == "running":
                self._steps[job.job.name] = (job.step, job.data.steps)
            self.tasks[job.job.name] = self.progress.add_task(
                job.job.name, total=job.data.steps, completed=job.step, loss="–"
            )
        self._told = (time.monotonic(), {name: step for name, (step, _) in self._steps.items()})

    def stepped(self, report: StepReport) -> None:
        self.progress.update(
            self.tasks[report.job], completed=report.step, loss=f"{report.loss:.4f}"
        )
        _, last = self._steps.get(report.job, (0, report.step))
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
            self.warned(f"job '{run.job.name}' failed at {run.reason}")
        elif run.reason:
            self._say(f"{run.job.name}: {run.reason}")
        elif not self.console.is_terminal:
            self._say(f"{run.job.name}: done after {run.step} steps, loss {run.loss:.4f}")

    def warned(self, text: str) -> None:
        self.progress.console.print(f"warning: {text}", style="yellow", markup=False)

    def noted(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _tell(self) -> None:
        """Where the job stands that has most before it, every few seconds."""
        now, (before, steps) = time.monotonic(), self._told
        if now - before < self._every_seconds:
            return
        name, (step, last) = max(self._steps.items(), key=lambda job: job[1][1] - job[1][0])
        done = step - steps.get(name, 0)
        if done <= 0:
            return
        others = len(self._steps) - 1
        more = f" and {others} more" if others else ""
        pace = (now - before) / done
        text = f"{name}{more}: step {step} of {last}, loss {self._losses[name]:.4f}"
        if self._warm:
            # First steps compile: how long they take says nothing of the others.
            left = timedelta(seconds=round(pace * (last - step)))
            text += f", {left} left, {pace:.2g} s a step"
        self._warm = True
        self._say(text)
        self._told = (now, {name: step for name, (step, _) in self._steps.items()})
