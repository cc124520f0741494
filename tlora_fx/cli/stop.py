"""`tlora-fx stop`: a job that need not go on to its last step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.terminal import Console


def run(
    folder: Annotated[
        Path, typer.Argument(help="Output folder (-o) of `tlora-fx run` or `train`.")
    ],
    jobs: Annotated[list[str], typer.Argument(help="Names of the jobs to stop.")],
) -> None:
    """Stop jobs of a run early and keep their adapters; the other jobs go on.

    A job stops after its current step. A job that waits stops as soon as its group is formed.
    """
    from tlora_fx.runtime.run_folder import ask_to_stop, is_free

    for job in jobs:
        ask_to_stop(folder, job)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"asked to stop: {', '.join(jobs)}", markup=False)
    if is_free(folder):
        idle = f"nothing trains in {folder} now: they stop once the run goes on"
        console.print(idle, markup=False)
