"""`tlora-fx reduce`: shrink a graph file on which something fails."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.arguments.options import Load, option, takes_options
from tlora_fx.cli.terminal import echo, writing_graphs
from tlora_fx.config.pipeline_text import require_graph_file


@takes_options
def run(
    graphs: Annotated[
        Path, typer.Argument(help="Graph file (.tfx) on which something fails, or its folder.")
    ],
    check: str = option(
        ...,
        "Command that exits with 0 if the failure is still there; {} stands for the graph file, "
        "which is appended if there is no {}.",
    ),
    output: Path | None = option(
        None, "Graph file to write; NAME.reduced.tfx if not given.", "-o", "--output"
    ),
    load: Load = None,
) -> None:
    """Shrink a graph file while a failure stays.

    Takes out jobs, layers, adapter sites, outputs, nodes and inputs, and keeps what the failure
    needs. The --check command is run on each smaller file that the parser and the verifier accept.
    It exits with 0 if the failure is still there, and with 1 to 125 if it is gone. 126 and above
    stop the reduction. The smallest file so far is kept if the command is interrupted.
    """
    require_graph_file(graphs)

    from tlora_fx.graph_file import SUFFIX, Document, load_document, save_document
    from tlora_fx.passes import find_passes
    from tlora_fx.pipeline import load_extension
    from tlora_fx.tools.reduce import Command, Reducer

    find_passes()
    for extension in load or ():
        load_extension(extension)
    document = load_document(graphs)
    smallest = output or graphs.with_suffix(f".reduced{SUFFIX}")

    def keep(text: str) -> None:
        with writing_graphs(smallest):
            save_document(Document(text), smallest)

    with tempfile.TemporaryDirectory(prefix="tlora-fx-reduce-") as folder:
        reducer = Reducer(
            Command(check, Path(folder) / f"candidate{SUFFIX}"),
            keep=keep,
            say=lambda line: echo(line, err=True),
        )
        text = reducer.reduce(document.text)
    keep(text)
    lines = (len(one.splitlines()) for one in (document.text, text))
    before, after = lines
    echo(f"written   {smallest}: {after} of {before} lines, {reducer.runs} runs of the check")
