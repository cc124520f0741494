"""`tlora-fx results`: the results of a run's jobs as one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.arguments.options import RunFolderPath


def run(
    folder: RunFolderPath,
    csv: Annotated[Path | None, typer.Option(help="CSV file to write the table to.")] = None,
    plain: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Print a table of a run's jobs: hyperparameters, losses, tokens, time and adapter.

    It has the hyperparameters that differ between the jobs. The run may still go on.
    """
    from tlora_fx.cli.report import specs_of_run, write
    from tlora_fx.runtime.reports.results_table import (
        as_csv,
        as_json,
        as_text,
        result_row,
        results_table,
    )
    from tlora_fx.runtime.reports.run_view import read_run

    rows = [result_row(view) for view in read_run(folder)]
    table = results_table(rows, specs_of_run(folder))
    if csv is not None:
        write(csv, as_csv(table), "the table", "choose another file with --csv")
    typer.echo(json.dumps(as_json(table), indent=1) if plain else as_text(table))
