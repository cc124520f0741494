"""`tlora-fx watch`: the curves of a run's jobs on the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.live import Live
from rich.table import Table

from tlora_fx.cli.arguments.options import RunFolderPath, option, seconds, takes_options
from tlora_fx.cli.terminal import Console, bare_table, print_whole, without_columns
from tlora_fx.runtime.reports.run_view import JobView, read_run, thinned

BLOCKS = "▁▂▃▄▅▆▇█"
#: Characters of a curve, and of all that stands beside it but the jobs' names.
CURVE, BESIDE = 24, 64
#: Columns that a narrow terminal has no room for, those that matter least first.
OPTIONAL_COLUMNS = ("best", "tokens/s", "left", "losses", "eval loss", "status")
#: How jobs stand that nobody trains any more.
ENDED = ("done", "failed", "stopped", "refused", "cancelled")


@takes_options
def run(
    folder: RunFolderPath,
    every: str = option("1s", "Time between two updates, such as 1s."),
    once: bool = option(False, "Print the current state once and exit."),
) -> None:
    """Show the losses of a run's jobs while they train, until all have ended.

    Ctrl-C stops watching; the run goes on. If the output is no terminal, the current state is
    printed once.
    """
    pause = seconds(every, "--every")
    console = Console()
    jobs = read_run(folder)
    if once or not console.is_terminal:
        print_whole(console, table(jobs))
        return
    with Live(table(jobs, console.width), console=console, auto_refresh=False) as live:
        try:
            while not all(job.state in ENDED for job in jobs):
                time.sleep(pause)
                # Jobs may come, as in a folder of `tlora-fx run`.
                known = {job.name: job for job in jobs}
                jobs = [known.get(job.name, job) for job in read_run(folder)]
                for job in jobs:
                    job.refresh()
                live.update(table(jobs, console.width), refresh=True)
        except KeyboardInterrupt:
            return


def table(jobs: Sequence[JobView], width: int = 200) -> Table:
    """A row a job: where it is, its losses from the first to the last, and how long it takes.

    width   of the terminal: where it is narrow, curves are short, and columns are left out
    """
    names = max(len(job.name) for job in jobs)
    wide = max(8, min(CURVE, width - names - BESIDE))
    numbers = ("step", "loss", "eval loss", "best", "tokens/s", "left")
    shown = bare_table("job", "status", "step", "losses", *numbers[1:], right=numbers)
    for job in jobs:
        shown.add_row(*_row(job, wide))
    return without_columns(shown, width, OPTIONAL_COLUMNS)


def _row(job: JobView, wide: int) -> tuple[str, ...]:
    losses = [loss for _, loss in job.losses()]
    evaluated = [loss for _, loss in job.evaluated()]
    pace, left = job.pace(), job.last_step - job.step
    best = job.status.get("evaluation", {}).get("best_step")
    waits = job.state in ("running", "starting") and pace is not None and left > 0
    return (
        job.name,
        job.state,
        f"{job.step}/{job.last_step or '?'}",
        curve(losses, wide),
        f"{losses[-1]:.4f}" if losses else "",
        f"{evaluated[-1]:.4f}" if evaluated else "",
        f"at {best}" if best is not None else "",
        f"{pace[1]:.0f}" if pace else "",
        str(timedelta(seconds=round(pace[0] * left))) if waits and pace else "",
    )


def curve(values: Sequence[float], width: int = CURVE) -> str:
    """Values as blocks of eight heights, each the mean of equally many."""
    means = [mean for _, mean in thinned([(0.0, value) for value in values], width)]
    if not means:
        return ""
    low, high = min(means), max(means)
    part = (len(BLOCKS) - 1) / ((high - low) or 1.0)
    return "".join(BLOCKS[round((mean - low) * part)] for mean in means)
