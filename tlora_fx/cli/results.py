"""`tlora-fx results`: the results of a run's jobs as one table."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from tlora_fx.cli.arguments.options import RunFolderPath, option, takes_options
from tlora_fx.cli.terminal import write_file
from tlora_fx.runtime.reports.results_table import (
    as_csv,
    as_json,
    as_text,
    result_row,
    results_table,
)
from tlora_fx.runtime.reports.run_view import read_run
from tlora_fx.scheduler.history import specs_of_run

#: Stands for the standard output.
STANDARD = Path("-")


@takes_options
def run(
    folder: RunFolderPath,
    csv: Path | None = option(None, "CSV file to write the table to; '-' prints the table as CSV."),
    plain: bool = option(False, "Print the table as JSON.", "--json"),
) -> None:
    """Print a table of a run's jobs: hyperparameters, losses, tokens, time and adapter.

    It has the hyperparameters that differ between the jobs. The run may still go on.
    """
    rows = [result_row(view) for view in read_run(folder)]
    table = results_table(rows, specs_of_run(folder))
    if csv == STANDARD:
        typer.echo(as_csv(table), nl=False)
        return
    if csv is not None:
        write_file(csv, as_csv(table), "the table", "choose another file with --csv")
    typer.echo(json.dumps(as_json(table), indent=1) if plain else as_text(table))
