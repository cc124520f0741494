"""`tlora-fx replay`: run a pass that failed once more, alone."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.arguments.options import Load, option, takes_options
from tlora_fx.cli.terminal import echo
from tlora_fx.errors import ReplayNotReadable


@takes_options
def run(
    folder: Annotated[
        Path, typer.Argument(help="Replay folder that a failed compiler pass wrote.")
    ],
    show_traceback: bool = option(
        False, "Also print the Python traceback of the failure.", "--traceback"
    ),
    yes: bool = option(
        False, "Import the Python modules that the folder names, without asking first."
    ),
    load: Load = None,
) -> None:
    """Run a failed compiler pass again, alone, with the checks that it failed.

    If it still fails, prints the error and exits with 1. If not, says so and exits with 0.
    """
    record = folder / "replay.json"
    if not record.is_file():
        raise ReplayNotReadable(
            "the folder is no replay folder",
            expected=record,
            help="name the folder that the error's last line names",
        )
    from tlora_fx.pipeline import load_extension
    from tlora_fx.tools.replay import load_replay

    for extension in load or ():
        load_extension(extension)
    replay = load_replay(folder)
    echo(f"{replay}, alone, with verify={replay.verify}", err=True)
    for other in replay.other_versions():
        echo(f"warning: another version: {other}", err=True)

    from tlora_fx.tools.replay import left_out, named_modules, run_replay

    if not yes:
        _require_consent(named_modules(folder))

    for tag in left_out(folder):
        echo(f"warning: a graph file cannot keep this tag: {tag}", err=True)
    error = run_replay(folder)
    if error is None:
        echo(f"{replay} no longer fails; it raised error[{replay.code}]")
        return
    if show_traceback:
        echo("".join(traceback.format_exception(error.__cause__ or error)), err=True)
    if error.code != replay.code:
        error.add_note(f"it is another error than before, which was error[{replay.code}]")
    raise error


def _require_consent(modules: list[str]) -> None:
    """Ask whether what a folder names may be imported, which runs its code."""
    if not modules:
        return
    from tlora_fx.errors import ReplayNotTrusted

    names = ", ".join(modules)
    if sys.stdin.isatty() and typer.confirm(f"The folder names {names}. Import?", err=True):
        return
    raise ReplayNotTrusted(
        "the folder names modules that are no part of tlora-fx",
        found=names,
        help="importing runs their code: if you trust it, say --yes",
    )
