"""Graphs as text, in a file or a folder: a node a line, and read back as they were.

What is read back has the fingerprint of what was written, the same node names, tags and origins,
and further passes run on it as on the original. Nothing in a file is executed: operators are
looked up by name among those that graphs may call.

A document is the text of graphs: what a file holds, and what a bisection keeps of a state. Jobs of
equal structure share one graph in it, as they do in a group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tlora_fx.config.pipeline_text import require_graph_file
from tlora_fx.errors import GraphFileNotReadable, errors_as
from tlora_fx.graph_file.parser import is_as_written, left_out, parse, stored_forms
from tlora_fx.graph_file.printer import Printer
from tlora_fx.host.durable import write_output
from tlora_fx.ir.graph import GroupGraph, JobGraph

__all__ = [
    "SEPARATOR",
    "SUFFIX",
    "Document",
    "from_document",
    "graph_text",
    "graphs_of_text",
    "load_document",
    "load_graphs",
    "save_document",
    "save_graphs",
    "split_document",
    "to_document",
]


#: Of graph files.
SUFFIX = ".tfx"
#: The graph file of a folder.
GRAPH = f"graph{SUFFIX}"
#: A line between several graphs of one file.
SEPARATOR = "// -----"
_SEPARATED = re.compile(rf"^{SEPARATOR}[ \t]*(?:\n|\Z)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Document:
    """Graphs as text, which later passes leave alone.

    file    what errors call it
    line    of the file at which the text begins
    """

    text: str
    file: str = "text"
    line: int = 1

    @property
    def is_edited(self) -> bool:
        """Whether the text is another one than was written; it is then verified when it is read."""
        return not is_as_written(self.text)

    @property
    def left_out(self) -> list[str]:
        """Tags that could not be kept: "job 'a': add_1: hint (my_package.Hint)"."""
        return left_out(self.text)

    @property
    def stored_forms(self) -> set[str]:
        """Functions, "module:name", that make stored forms of tensors."""
        return stored_forms(self.text)


def to_document(graphs: JobGraph | GroupGraph) -> Document:
    """Graphs as text; raises GraphNotStorable, naming the node."""
    return Document(Printer().text(graphs))


def from_document(document: Document) -> JobGraph | GroupGraph:
    """The graphs of a document, as they were when it was made; raises GraphFileNotReadable."""
    return parse(document.text, document.file, document.line)


def split_document(document: Document) -> list[Document]:
    """The documents of a file that holds several graphs, parted by lines `// -----`."""
    parts, line = [], document.line
    for text in _SEPARATED.split(document.text):
        parts.append(Document(text, document.file, line))
        line += text.count("\n") + 1
    return parts


def graph_text(graphs: JobGraph | GroupGraph, *, tables: bool = True) -> str:
    """Graphs as the text of a graph file, a node a line.

    tables    False: jobs and nodes alone, to be looked at or checked; such a text is not read back
    raises    GraphNotStorable
    """
    return Printer().text(graphs, tables)


def graphs_of_text(text: str, file: str | Path = "text") -> JobGraph | GroupGraph:
    """The graphs of a graph file's text.

    file      what errors call it
    raises    GraphFileNotReadable, naming the line
    """
    return parse(text, file)


def save_graphs(graphs: JobGraph | GroupGraph, path: str | Path) -> None:
    """Write graphs into a file, by its suffix `.tfx`, or as `graph.tfx` into a folder.

    Folders that are missing are made; an older file stays whole until the new one is.

    raises    GraphNotStorable for what a file cannot keep, OSError
    """
    save_document(to_document(graphs), Path(path))


def load_graphs(path: str | Path) -> JobGraph | GroupGraph:
    """Read what `save_graphs` wrote: the same names, tags, facts, origins and fingerprint.

    raises    GraphFileNotReadable
    """
    return from_document(load_document(Path(path)))


def save_document(document: Document, path: Path) -> None:
    """Write a document into a file or folder; raises OSError."""
    file = _file(path)
    write_output(file, document.text.encode())


def load_document(path: Path) -> Document:
    """Read a document of a file or folder; raises GraphFileNotReadable."""
    require_graph_file(path)
    file = _file(path)
    with errors_as(
        GraphFileNotReadable, "the graph file cannot be read", OSError, UnicodeDecodeError,
        file=file, help="write it anew",
    ):  # fmt: skip
        return Document(file.read_text(encoding="utf-8"), str(file))


def _file(path: Path) -> Path:
    return path if path.suffix == SUFFIX else path / GRAPH
