"""`tlora-fx opt`: run a pipeline on graphs of a file; reads it before it imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tlora_fx.cli.options import (
    DisablePass,
    DumpChanged,
    Load,
    PrintAfter,
    PrintAfterChange,
    Statistics,
    Strict,
    Time,
    VerifyPasses,
    instruments_of,
)
from tlora_fx.cli.terminal import echo
from tlora_fx.config.pipeline_text import require_readable
from tlora_fx.errors import TloraError

if TYPE_CHECKING:
    from tlora_fx.graph_file import Document
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
    disable_pass: DisablePass = None,
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
    print_after_change: PrintAfterChange = False,
    dump_changed: DumpChanged = None,
    split_input_file: Annotated[
        bool,
        typer.Option(
            "--split-input-file",
            help="The file holds several graphs, parted by lines `// -----`; each is run by "
            "itself, and results are parted in the same way.",
        ),
    ] = False,
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

    from tlora_fx.graph_file import SEPARATOR, Document, graph_text, save_document
    from tlora_fx.passes import find_passes
    from tlora_fx.pipeline import Runner, load_extension, parse_pipeline
    from tlora_fx.tools.opt import run_on

    find_passes()
    for extension in load or ():
        load_extension(extension)
    instruments = instruments_of(
        time, print_after, dump_changed, verify, strict, pass_statistics, print_after_change
    )
    written, failed = [], False
    documents = _documents(read, graphs, split_input_file)
    for index, document in enumerate(documents):
        if index and form != "nothing":
            echo(SEPARATOR)
        try:
            subject = _read(document)
            passes = parse_pipeline(pipeline, subject.facts)
            passes = passes.without(disable_pass or (), subject.facts)
            run_on(subject, Runner(passes, instruments, verify or "structure", held=subject.facts))
        except TloraError as error:
            _tell_or_raise(error, alone=len(documents) == 1)
            failed = True
        else:
            written += [graph_text(subject)] if output is not None else []
            _print(subject, form)
    if failed:
        raise typer.Exit(1)
    if output is not None:
        save_document(Document(f"{SEPARATOR}\n".join(written)), output)


def _tell_or_raise(error: TloraError, *, alone: bool) -> None:
    """Print an error of one of several graphs: the others run all the same."""
    if alone:
        raise error
    echo("\n  ".join([str(error), *getattr(error, "__notes__", ())]), err=True)


def _print(graphs: JobGraph | GroupGraph, form: Form) -> None:
    from tlora_fx.graph_file import graph_text
    from tlora_fx.inspect.instruments import state_source

    if form == "graph":
        echo(graph_text(graphs), nl=False)
    elif form == "code":
        echo(state_source(graphs))


def _documents(text: str | None, name: str, split: bool) -> list[Document]:
    """The graphs' texts: one, or several where the file is split."""
    from tlora_fx.graph_file import Document, load_document, split_document

    document = load_document(Path(name)) if text is None else Document(text, "stdin")
    return split_document(document) if split else [document]


def _read(document: Document) -> JobGraph | GroupGraph:
    """The graphs; says so where they had to be verified."""
    from tlora_fx.graph_file import from_document

    graphs = from_document(document)
    if document.is_edited:
        echo(f"{document.file} was changed since it was written: verified", err=True)
    return graphs
