"""`tlora-fx stop`: a job that need not go on to its last step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.terminal import Console


def run(
    folder: Annotated[Path, typer.Argument(help="The -o folder of `tlora-fx run` or `train`.")],
    jobs: Annotated[list[str], typer.Argument(help="Names of its jobs.")],
) -> None:
    """End jobs of a run where they are, with the adapters that they have; the others go on.

    A job ends after the step that it is at, or as soon as its group is formed.
    """
    from tlora_fx.runtime.run_folder import ask_to_stop

    for job in jobs:
        ask_to_stop(folder, job)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"asked to stop: {', '.join(jobs)}", markup=False)
