"""`tlora-fx opt`: run a pipeline on graphs of a file; reads it before it imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tlora_fx.cli.options import (
    DumpChanged,
    Load,
    PrintAfter,
    Statistics,
    Strict,
    Time,
    VerifyPasses,
    instruments_of,
)
from tlora_fx.cli.terminal import echo
from tlora_fx.config.pipeline_text import require_readable

if TYPE_CHECKING:
    from tlora_fx.ir.graph import GroupGraph, JobGraph

STANDARD = "-"
Form = Literal["code", "graph", "nothing"]


def run(
    graphs: Annotated[
        str,
        typer.Argument(
            metavar="[GRAPH]", help="Graph file (.tfx), or a folder that holds one; - for stdin."
        ),
    ] = STANDARD,
    pipeline: Annotated[
        str, typer.Option("--pipeline", help="Compiler passes to run; if not given, none.")
    ] = "",
    load: Load = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Graph file to write the result to.")
    ] = None,
    form: Annotated[
        Form,
        typer.Option(
            "--print", help="What to print of the result: its code, the graph file, or nothing."
        ),
    ] = "code",
    verify: VerifyPasses = None,
    strict: Strict = False,
    time: Time = False,
    pass_statistics: Statistics = False,
    print_after: PrintAfter = None,
    dump_changed: DumpChanged = None,
) -> None:
    """Run compiler passes on the graphs of a file, and print the result.

    `compile` writes such a file, graph.tfx; so does `save_graphs` in Python, and a replay folder
    holds one. Nothing is traced; neither the base model nor weights are needed. A pass may require
    passes that ran earlier: the file records which facts hold for its graphs.
    """
    # Files that are loaded bring passes of their own.
    if not load:
        require_readable(pipeline)
    read = sys.stdin.read() if graphs == STANDARD else None

    from tlora_fx.graph_file import graph_text, save_graphs
    from tlora_fx.inspect.instruments import state_source
    from tlora_fx.passes import find_passes
    from tlora_fx.pipeline import Runner, load_extension, parse_pipeline
    from tlora_fx.tools.opt import run_on

    find_passes()
    for extension in load or ():
        load_extension(extension)
    subject = _graphs(read, graphs)
    instruments = instruments_of(time, print_after, dump_changed, verify, strict, pass_statistics)
    passes = parse_pipeline(pipeline, subject.facts)
    run_on(subject, Runner(passes, instruments, verify or "structure", held=subject.facts))
    if output is not None:
        save_graphs(subject, output)
    if form == "graph":
        echo(graph_text(subject), nl=False)
    elif form == "code":
        echo(state_source(subject))


def _graphs(text: str | None, name: str) -> JobGraph | GroupGraph:
    """The graphs; says so where they had to be verified."""
    from tlora_fx.graph_file import Document, from_document, load_document

    document = load_document(Path(name)) if text is None else Document(text, "stdin")
    graphs = from_document(document)
    if document.is_edited:
        echo(f"{document.file} was changed since it was written: verified", err=True)
    return graphs
