"""`tlora-fx train`: train all jobs of a file together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as Remaining

if TYPE_CHECKING:
    from tlora_fx.runtime.job_run import JobRun, StepReport


def run(
    jobs: Annotated[Path, typer.Argument(help="Job file (YAML).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for what comes out.")],
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    pipeline: Annotated[str | None, typer.Option(help="Passes instead of the default.")] = None,
    max_row_tokens: Annotated[int, typer.Option(min=2, help="Tokens of one forward.")] = 16384,
) -> None:
    """Train all jobs of a file together, each to its own last step.

    Leaves one PEFT adapter folder, metrics.jsonl and status.json a job, and checkpoints.
    """
    from tlora_fx.jobfile import load_job_file

    console = Console(stderr=True)
    given = load_job_file(jobs)
    with console.status("compiling and loading the data"):
        from tlora_fx.driver import compile
        from tlora_fx.runtime.prepare import load_all_data
        from tlora_fx.runtime.trainer import Trainer

        data = load_all_data(given.jobs)
        model = compile(given, pipeline, replay=Path("tlora-fx-replay"))
    for name, own in data.items():
        for line in own.report.lines():
            console.print(f"{name}: {line}", highlight=False, markup=False)
    with _Bars(console) as bars:
        trainer = Trainer(
            model,
            output=output,
            device=device,
            resume=resume,
            data=data,
            max_row_tokens=max_row_tokens,
            watch=bars,
        )
        runs = trainer.run()
    _tell(runs, output)
    if any(job.status == "failed" for job in runs):
        sys.exit(1)


class _Bars:
    """A progress bar a job, on a terminal; a line a job at its end where there is none."""

    def __init__(self, console: Console) -> None:
        self.console = console
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

    def __enter__(self) -> _Bars:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def started(self, runs: Sequence[JobRun]) -> None:
        """One bar a job, from where it goes on."""
        for job in runs:
            self.tasks[job.job.name] = self.progress.add_task(
                job.job.name, total=job.data.steps, completed=job.step, loss="–"
            )

    def stepped(self, report: StepReport) -> None:
        """Move the job's bar."""
        self.progress.update(
            self.tasks[report.job], completed=report.step, loss=f"{report.loss:.4f}"
        )

    def ended(self, run: JobRun) -> None:
        """Say how a job ended."""
        if run.status == "failed":
            self.warned(f"job '{run.job.name}' failed at {run.reason}")
        elif not self.console.is_terminal:
            self.console.print(f"{run.job.name}: done after {run.step} steps, loss {run.loss:.4f}")

    def warned(self, text: str) -> None:
        """Print a warning above the bars."""
        self.progress.console.print(f"warning: {text}", style="yellow", markup=False)


def _tell(runs: Sequence[JobRun], output: Path) -> None:
    """Where everything lies."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("job", "status", "steps", "tokens", "last loss", "adapter"):
        table.add_column(title, justify="right" if title in ("steps", "tokens") else "left")
    for job in runs:
        table.add_row(
            job.job.name,
            job.status,
            str(job.step),
            str(job.tokens),
            f"{job.loss:.4f}",
            str(output / job.job.name),
        )
    Console(soft_wrap=True).print(table)
