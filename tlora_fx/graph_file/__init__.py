"""Graphs as text, in a file or a folder: a node a line, and read back as they were.

What is read back has the fingerprint of what was written, the same node names, tags and origins,
and further passes run on it as on the original. Nothing in a file is executed: operators are
looked up by name among those that graphs may call.
"""

from tlora_fx.graph_file.document import (
    SUFFIX,
    Document,
    from_document,
    graph_text,
    graphs_of_text,
    load_document,
    load_graphs,
    save_document,
    save_graphs,
    to_document,
)

__all__ = [
    "SUFFIX",
    "Document",
    "from_document",
    "graph_text",
    "graphs_of_text",
    "load_document",
    "load_graphs",
    "save_document",
    "save_graphs",
    "to_document",
]
