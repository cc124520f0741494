"""`tlora-fx schedule`: save a moment of a run, and ask why the scheduler decided as it did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tlora_fx.errors import StateFileError

NEWEST = "state.json"

group = typer.Typer(
    help="Save a moment of a run, and ask why the scheduler decided as it did.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@group.command("state")
def state(
    run: Annotated[Path, typer.Argument(help="Folder of `tlora-fx run`, also while it runs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File for the state.")],
) -> None:
    """Save what the policy of a run saw at its last decision."""
    from tlora_fx.durable import replace_file

    found = _newest(run)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, found.read_bytes())
    typer.echo(f"written   {output}")


@group.command("explain")
def explain(
    saved: Annotated[Path, typer.Argument(help="A saved state, or the folder of a run.")],
    job: Annotated[str, typer.Option("--job", help="Name of the job.")],
) -> None:
    """Say why a job is grouped as it is, with whom it was compared, and what else would have cost.

    The policy decides upon the state once more, as it did then, and writes down its reasons.
    """
    from tlora_fx.scheduler.explain import explain as told
    from tlora_fx.scheduler.moment_file import load_moment

    moment = load_moment(_newest(saved) if saved.is_dir() else saved)
    decision = moment.policy.decide(moment.state, explain=True)
    text = told(moment.state, decision, job)
    Console(soft_wrap=True, highlight=False).print(str(text), markup=False)


def _newest(run: Path) -> Path:
    found = run / NEWEST
    if not found.is_file():
        raise StateFileError(
            "there is no saved state",
            folder=run,
            help="a run writes one at each decision; name the folder that it was given by -o",
        )
    return found
