"""`tlora-fx replay`: run a pass that failed once more, alone."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[Path, typer.Argument(help="Replay folder that a failed pass left.")],
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where the pass raised, too.")
    ] = False,
) -> None:
    """Run a pass that failed once more, alone, under the checks that it failed.

    Prints the same error and exits with 1, or says that it no longer fails and exits with 0.
    """
    from tlora_fx.tools.replay import load_replay

    replay = load_replay(folder)
    typer.echo(f"{replay}, alone, with verify={replay.verify}", err=True)
    for other in replay.other_versions():
        typer.echo(f"warning: another version: {other}", err=True)

    from tlora_fx.tools.replay import left_out, run_replay

    for tag in left_out(folder):
        typer.echo(f"warning: a graph file cannot keep this tag: {tag}", err=True)
    error = run_replay(folder)
    if error is None:
        typer.echo(f"{replay} no longer fails; it raised error[{replay.code}]")
        return
    if show_traceback:
        typer.echo("".join(traceback.format_exception(error.__cause__ or error)), err=True)
    if error.code != replay.code:
        error.add_note(f"it is another error than before, which was error[{replay.code}]")
    raise error
