"""`tlora-fx opt`: run a pipeline on graphs of a file; reads it before it imports torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tlora_fx.cli.arguments.options import Load, WatchOptions, option, takes_options
from tlora_fx.cli.terminal import echo, writing_graphs
from tlora_fx.config.pipeline_text import require_graph_file, require_readable
from tlora_fx.errors import TloraError

if TYPE_CHECKING:
    from tlora_fx.graph_file import Document
    from tlora_fx.ir.graph import GroupGraph, JobGraph

STANDARD = "-"
Form = Literal["code", "graph", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptOptions(WatchOptions):
    """Options of the command line."""

    graphs: Annotated[
        str,
        typer.Argument(
            metavar="[GRAPH]", help="Graph file (.tfx), or a folder that holds one; - for stdin."
        ),
    ] = STANDARD
    pipeline: str = option("", "Compiler passes to run; if not given, none.")
    load: Load = None
    output: Path | None = option(None, "Graph file to write the result to.", "-o", "--output")
    form: Form = option(
        "code", "What to print of the result: its code, the graph file, or nothing.", "--print"
    )
    split_input_file: bool = option(
        False,
        "The file holds several graphs, parted by lines `// -----`; each is run by itself, and "
        "results are parted in the same way.",
    )


@takes_options
def run(options: OptOptions) -> None:
    """Run compiler passes on the graphs of a file, and print the result.

    `compile` writes such a file, graph.tfx; so does `save_graphs` in Python, and a replay folder
    holds one. Nothing is traced; neither the base model nor weights are needed. A pass may require
    passes that ran earlier: the file records which facts hold for its graphs.
    """
    # Files that are loaded bring passes of their own.
    if not options.load:
        require_readable(options.pipeline)
    read = _standard_input(options.graphs)

    from tlora_fx.graph_file import SEPARATOR, Document, graph_text, save_document
    from tlora_fx.passes import find_passes
    from tlora_fx.pipeline import Runner, load_extension, parse_pipeline
    from tlora_fx.pipeline.facts import held_facts
    from tlora_fx.tools.opt import run_on

    find_passes()
    for extension in options.load or ():
        load_extension(extension)
    instruments, verify = options.instruments(), options.verify or "structure"
    written, failed = [], False
    documents = _documents(read, options.graphs, options.split_input_file)
    for index, document in enumerate(documents):
        if index and options.form != "nothing":
            echo(SEPARATOR)
        try:
            subject = _read(document)
            held = held_facts(subject)
            passes = parse_pipeline(options.pipeline, held)
            passes = passes.without(options.disable_pass or (), held)
            run_on(subject, Runner(passes, instruments, verify, held=held))
        except TloraError as error:
            # Of several graphs the others run all the same.
            if len(documents) == 1:
                raise
            echo(error.with_notes(), err=True)
            failed = True
        else:
            written += [graph_text(subject)] if options.output is not None else []
            _print(subject, options.form)
    if failed:
        raise typer.Exit(1)
    if options.output is not None:
        with writing_graphs(options.output):
            save_document(Document(f"{SEPARATOR}\n".join(written)), options.output)


def _standard_input(name: str) -> str | None:
    """What stdin holds where a file is not named; raises GraphFileNotReadable for one that is."""
    if name == STANDARD:
        return sys.stdin.read()
    require_graph_file(Path(name))
    return None


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
