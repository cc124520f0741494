"""`tlora-fx schedule`: save a snapshot of a run, and ask why the scheduler decided as it did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.arguments.options import command_group, option, takes_options
from tlora_fx.cli.terminal import Console
from tlora_fx.errors import StateFileError, errors_as
from tlora_fx.host.durable import write_output
from tlora_fx.runtime.run_folder import LEDGER
from tlora_fx.scheduler.explain import explained
from tlora_fx.scheduler.history import History, rows_of_run
from tlora_fx.scheduler.snapshot_file import add_history, load_history, load_snapshot

NEWEST = "state.json"

group = command_group("Save a snapshot of the scheduler, or explain its decisions.")


@group.command("state")
def state(
    run: Annotated[
        Path, typer.Argument(help="Output folder of `tlora-fx run`; the run may still go on.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write the snapshot to.")],
) -> None:
    """Save a snapshot of the scheduler to a file.

    It holds what the policy of a run saw at its last decision, and what became of all jobs.
    """
    found = _newest(run)
    with errors_as(StateFileError, "the run's state cannot be read", file=found):
        content = found.read_bytes()
    rows = rows_of_run(run)
    help = "choose another file with -o"
    with errors_as(StateFileError, "the snapshot cannot be written", file=output, help=help):
        write_output(output, content)
        if rows is not None:
            add_history(output, rows)
    typer.echo(f"written   {output}")


@group.command("explain")
@takes_options
def explain(
    saved: Annotated[
        Path,
        typer.Argument(help="Snapshot that `schedule state` wrote, or the output folder of a run."),
    ],
    job: Annotated[str, typer.Option("--job", help="Name of the job to explain.")],
    terms: bool = option(False, "Also print the parts of the estimated time and memory of a step."),
) -> None:
    """Explain why a job is in its group, or why it waits.

    Also prints with which other jobs it was compared, and what other groups would have cost. The
    policy decides once more on the same state and records its reasons. For a job that has ended,
    the last decision about it is explained. For a job that was refused, the reason is given.
    """
    if not saved.exists():
        raise StateFileError(
            "there is no run or snapshot to explain",
            file=saved,
            help="name the folder that `tlora-fx run` was given by -o, or a file of `schedule "
            "state`",
        )
    if saved.is_dir():
        history = History.of_run(saved)
        undecided = history is not None and not history.decisions
        snapshot = None if undecided else load_snapshot(_newest(saved))
    else:
        snapshot, history = load_snapshot(saved), load_history(saved)
    text = explained(snapshot, history, job, terms=terms)
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


def _newest(run: Path) -> Path:
    found = run / NEWEST
    if found.is_file():
        return found
    if (run / LEDGER).is_file():
        raise StateFileError(
            "the run has decided nothing yet",
            folder=run,
            help="a job can be asked about all the same: `tlora-fx schedule explain RUN --job x`",
        )
    raise StateFileError(
        "there is no saved state",
        folder=run,
        help="a run writes one at each decision; name the folder that it was given by -o",
    )
