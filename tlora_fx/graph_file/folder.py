"""Graph files on disk: `graph.json`, and `constants.safetensors` beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from tlora_fx.durable import replace_file
from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file.document import Document, from_document, to_document
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.version import __version__

GRAPH = "graph.json"
CONSTANTS = "constants.safetensors"


def save_graphs(graphs: JobGraph | GroupGraph, folder: str | Path) -> None:
    """Write graphs into a folder, which is made where it is missing.

    raises    GraphNotStorable for what a file cannot keep, OSError
    """
    save_document(to_document(graphs), Path(folder))


def load_graphs(folder: str | Path) -> JobGraph | GroupGraph:
    """Read what `save_graphs` wrote: the same names, tags, origins and fingerprint.

    raises    GraphFileNotReadable
    """
    return from_document(load_document(Path(folder)))


def save_document(document: Document, folder: Path) -> None:
    """Write a document into a folder; the old file stays whole where that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    # Tensors that share memory cannot stand in one file.
    constants = {name: value.clone().contiguous() for name, value in document.constants.items()}
    try:
        tensors = safetensors.torch.save(constants)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise GraphNotStorable(
            "a constant of the model cannot be written",
            found=error,
            help="please report it, with the model",
        ) from error
    versions = {"tlora-fx": __version__, "torch": str(torch.__version__)}
    text = json.dumps({"versions": versions, **document.data}, separators=(",", ":"))
    replace_file(folder / CONSTANTS, tensors)
    replace_file(folder / GRAPH, text.encode())


def load_document(folder: Path) -> Document:
    """Read a document.

    raises    GraphFileNotReadable
    """
    path = folder / GRAPH
    if not path.is_file():
        raise GraphFileNotReadable(
            "the folder holds no graphs",
            expected=path,
            help="name a folder that save_graphs, a replay or a bisection wrote",
        )
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        constants = safetensors.torch.load((folder / CONSTANTS).read_bytes())
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise GraphFileNotReadable(
            "the graph file cannot be read",
            file=path,
            found=f"{type(error).__name__}: {error}",
            help="the file is damaged; write it anew",
        ) from error
    if not isinstance(data, dict):
        raise GraphFileNotReadable(
            "the graph file cannot be read",
            file=path,
            expected="an object",
            found=type(data).__name__,
            help="the file is damaged; write it anew",
        )
    return Document(data, constants)
