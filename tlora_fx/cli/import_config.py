"""`tlora-fx import`: a job file made of another tool's config file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tlora_fx.cli.arguments.options import option, takes_options
from tlora_fx.cli.terminal import echo
from tlora_fx.config.imports import import_config
from tlora_fx.config.paths import is_there
from tlora_fx.errors import ImportRefused, errors_as
from tlora_fx.host.durable import write_output

#: Longest line of what is told, in characters.
WIDTH = 100


@takes_options
def run(
    config: Annotated[Path, typer.Argument(help="Config file (YAML) of the other tool.")],
    output: Path | None = option(
        None,
        "Job file to write; it must not exist. If not given, the job file is printed.",
        "-o",
        "--output",
    ),
    tool: Literal["axolotl", "llama-factory", "trl"] | None = option(
        None,
        "Tool that the config file is for. If not given, it is recognised by the keys.",
        "--from",
    ),
    strict: bool = option(
        False,
        "Write no job file, and exit with 1, if the job would train otherwise than the other tool.",
    ),
) -> None:
    """Make a job file of an Axolotl, LLaMA-Factory or TRL config.

    Each key of the config file is carried into the job file, or is listed with the reason: first
    the keys for which the job trains otherwise, then those without which it trains the same. The
    list is printed, and stands in the job file as a comment. If no right job file can be made,
    prints the mistakes, each with its key, and exits with 1. Start the command in the folder in
    which the other tool is started: relative paths begin there.
    """
    if output is not None and is_there(output):
        raise ImportRefused("the job file would be overwritten", file=output, help="name a new one")
    if output is not None and not is_there(output.parent):
        raise ImportRefused("there is no such folder", file=output.parent, help="make it first")
    made = import_config(config, output or Path("jobs.yaml"), tool)
    told = "\n".join(made.lines(WIDTH))
    if told:
        echo(told, err=True)
    if strict and made.changes:
        what = "no job file is written: the job would train otherwise (--strict)"
        keys = ", ".join(dict.fromkeys(item.key for item in made.changes))
        raise ImportRefused(what, file=config, keys=keys)
    if output is None:
        echo(made.text().rstrip("\n"))
        return
    with errors_as(ImportRefused, "the job file cannot be written", file=output):
        write_output(output, made.text().encode())
    echo(f"{output} is written: {made.tool}, job {made.document['jobs'][0]['name']}", err=True)
