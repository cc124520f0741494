"""`tlora-fx bisect`: find the pass, and the rewrite inside it, that breaks a check."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tlora_fx.cli.arguments.options import JobFilePath, PipelineOptions, option, takes_options
from tlora_fx.cli.terminal import echo
from tlora_fx.config.job_file import JobFile, load_job_file
from tlora_fx.errors import DumpNotWritable, errors_as

if TYPE_CHECKING:
    from tlora_fx.pipeline import Pipeline
    from tlora_fx.tools.bisect import BisectionResult

NUMERICS = "numerics"


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectOptions(PipelineOptions):
    """Options of the command line."""

    jobs: JobFilePath
    check: str = option(
        ...,
        "Command that judges the graphs after a pass; {} stands for their folder. Or numerics, to "
        "compare losses and gradients.",
    )
    keep: Path | None = option(None, "Folder in which to keep the graphs that were judged.")
    verbose: bool = option(False, "Show the output of the --check command.", "-v", "--verbose")


@takes_options
def run(options: BisectOptions) -> None:
    """Find the pass, and the rewrite inside it, after which a check fails.

    The --check command gets a folder with the graphs after a pass: graph.tfx (read it with
    tlora_fx.graph_file.load_graphs), program.py (their code) and program.json (the data of every
    node). The environment variable TLORA_FX_STATE names the same folder. The command exits with 0
    if the graphs are good, with 1 to 124 if they are bad, and with 125 if it cannot tell. 126 and
    above stop the bisection. With --check numerics, losses and gradients are compared with those of
    the traced graphs. Bisect itself exits with 0 if it found the pass, and with 1 if it did not.
    """
    options.require_passes()
    passes = options.passes()
    given = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code)
    if options.keep is not None:
        with errors_as(
            DumpNotWritable, "the folder in which to keep graphs cannot be written",
            folder=options.keep, help="name another by --keep",
        ):  # fmt: skip
            options.keep.mkdir(parents=True, exist_ok=True)
        finding = _bisect(given, options.check, passes, options.keep, options.verbose)
    else:
        with tempfile.TemporaryDirectory(prefix="tlora-fx-bisect-") as folder:
            finding = _bisect(given, options.check, passes, Path(folder), options.verbose)
    for line in finding.lines:
        echo(line)
    if not finding.place:
        raise typer.Exit(1)


def _bisect(
    jobs: JobFile, check: str, passes: Pipeline, folder: Path, verbose: bool
) -> BisectionResult:
    from tlora_fx.compiler import prepare
    from tlora_fx.tools.bisect import Bisector, CommandCheck, NumericsCheck, trace_states

    def say(line: str, output: str) -> None:
        echo(line, err=True)
        if verbose:
            for printed in output.splitlines():
                echo(f"    | {printed}", err=True)

    say("compiling once, to see in which form", "")
    given = prepare(jobs)
    states = trace_states(given, passes)
    judge = NumericsCheck(given.backbone) if check == NUMERICS else CommandCheck(check)
    bisector = Bisector(
        states,
        lambda place: trace_states(given, passes, limits={place: 0}),
        judge,
        folder,
        given.backbone.title,
        say,
    )
    return bisector.find()
