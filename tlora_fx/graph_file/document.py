"""A job's or a group's graphs as one document, in memory and in a folder.

A document is plain data and the constants of model code. Jobs of equal structure share one graph
in it, as they do in a group. In a folder it is `graph.json`, with `constants.safetensors` beside.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from tlora_fx.durable import replace_file
from tlora_fx.errors import GraphFileNotReadable, GraphInvalid, GraphNotStorable
from tlora_fx.graph_file.codec import Decoder, Encoder, OriginData, SizeData
from tlora_fx.graph_file.nodes import GraphData, graph_data, graph_of
from tlora_fx.ir.graph import AdapterSite, Block, Form, GroupGraph, JobGraph
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.version import __version__

# Format 1 named functions and classes by modules that have moved since.
FORMAT: Literal[2] = 2
GRAPH = "graph.json"
CONSTANTS = "constants.safetensors"
Note = tuple[str, str]


@dataclass(slots=True)
class SavedBlock:
    """A block."""

    name: str
    instances: list[str]
    graph: GraphData


@dataclass(slots=True)
class SavedStructure:
    """Root, blocks and names of constants that equal jobs share."""

    root: GraphData
    blocks: list[SavedBlock]
    constants: list[str]


@dataclass(slots=True)
class SavedJob:
    """A job, or the base alone.

    plan        as `Encoder` writes it
    structure   index of its structure
    """

    name: str
    form: Form
    sites: list[AdapterSite]
    notes: list[Note]
    plan: Any
    structure: int


@dataclass(slots=True)
class SavedGroup:
    """What a group has besides its base and jobs; `own` is the index of its own structure."""

    exact: bool
    compute: str
    notes: list[Note]
    own: int


@dataclass(slots=True)
class SavedGraphs:
    """All that `graph.json` says.

    jobs          the job; of a group the base, then its jobs
    group         None where the document holds one job
    origins       of nodes, each after those that it was made from
    modes         of each fake mode its symbols by name
    left_out      tags that could not be kept: "job 'a': add_1: hint (my_package.Hint)"
    fingerprint   of code and tags, when the document was made
    versions      of what wrote it
    """

    format: Literal[2]
    jobs: list[SavedJob]
    group: SavedGroup | None
    structures: list[SavedStructure]
    origins: list[OriginData]
    modes: list[dict[str, SizeData]]
    left_out: list[str]
    fingerprint: tuple[str, str]
    versions: dict[str, str] = field(
        default_factory=lambda: {"tlora-fx": __version__, "torch": str(torch.__version__)}
    )


@cache
def _adapter() -> TypeAdapter[SavedGraphs]:
    return TypeAdapter(SavedGraphs)


@dataclass(slots=True)
class Document:
    """Graphs as data, and values lifted out of model code by "structure/name"."""

    data: SavedGraphs
    constants: dict[str, torch.Tensor]


def to_document(graphs: JobGraph | GroupGraph) -> Document:
    """Graphs as data, which later passes leave alone.

    raises    GraphNotStorable, naming the node
    """
    writer = _Writer()
    group = None
    if isinstance(graphs, GroupGraph):
        jobs = [writer.job(job) for job in (graphs.base, *graphs.jobs)]
        own = writer.structure(graphs, "group")
        group = SavedGroup(graphs.exact, graphs.compute, list(graphs.notes), own)
    else:
        jobs = [writer.job(graphs)]
    known = fingerprint(graphs)
    data = SavedGraphs(
        FORMAT,
        jobs,
        group,
        writer.structures,
        writer.encoder.origins,
        writer.encoder.modes.symbols,
        writer.left_out,
        (known.code, known.tags),
    )
    return Document(data, writer.constants)


def from_document(document: Document) -> JobGraph | GroupGraph:
    """The graphs of a document, as they were when it was made.

    raises    GraphFileNotReadable
    """
    try:
        graphs = _Reader(document).graphs()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, GraphInvalid) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    except (ImportError, StopIteration, RecursionError, RuntimeError, AssertionError) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    found = fingerprint(graphs)
    if (found.code, found.tags) != document.data.fingerprint:
        raise _damaged("the graphs have another fingerprint than when they were written")
    return graphs


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
    replace_file(folder / CONSTANTS, tensors)
    replace_file(folder / GRAPH, _adapter().dump_json(document.data))


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
        data = json.loads(path.read_text(encoding="utf-8"))
        constants = safetensors.torch.load((folder / CONSTANTS).read_bytes())
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise GraphFileNotReadable(
            "the graph file cannot be read",
            file=path,
            found=f"{type(error).__name__}: {error}",
            help="the file is damaged; write it anew",
        ) from error
    return Document(read_data(data), constants)


def read_data(data: Any) -> SavedGraphs:
    """What the JSON of `graph.json` says.

    raises    GraphFileNotReadable
    """
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise GraphFileNotReadable(
            "the graph file is of another format",
            expected=FORMAT,
            found=found,
            help="read it with the version that wrote it, or write it anew",
        )
    try:
        return _adapter().validate_python(data)
    except (ValidationError, RecursionError) as error:
        raise _damaged(str(error)) from error


def _damaged(found: str) -> GraphFileNotReadable:
    return GraphFileNotReadable(
        "the graph file does not hold together",
        found=found,
        help="the file is damaged, or another version wrote it",
    )


@dataclass(slots=True)
class _Writer:
    encoder: Encoder = field(default_factory=Encoder)
    structures: list[SavedStructure] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def job(self, job: JobGraph) -> SavedJob:
        """One job; its structure is written once for all jobs that share it."""
        plan = self.encoder.encode(job.plan, _no_node)
        structure = self.structure(job, f"job '{job.name}'" if job.name else "base")
        sites = list(job.sites.values())
        return SavedJob(job.name, job.form, sites, list(job.notes), plan, structure)

    def structure(self, graphs: JobGraph | GroupGraph, subject: str) -> int:
        """The index of root, blocks and constants."""
        key = (id(graphs.root), id(graphs.blocks), id(graphs.constants))
        if key in self.known:
            return self.known[key]
        index = self.known[key] = len(self.structures)
        left_out: list[str] = []
        root = graph_data(graphs.root, self.encoder, left_out)
        blocks = [
            SavedBlock(
                block.name,
                list(block.instances),
                graph_data(block.graph, self.encoder, left_out),
            )
            for block in graphs.blocks.values()
        ]
        self.structures.append(SavedStructure(root, blocks, list(graphs.constants)))
        for name, value in graphs.constants.items():
            self.constants[f"{index}/{name}"] = value
        self.left_out.extend(f"{subject}: {tag}" for tag in left_out)
        return index


def _no_node(node: Any) -> Any:
    raise AssertionError(f"a node in a plan: {node}")


class _Reader:
    def __init__(self, document: Document) -> None:
        self.data = document.data
        self.constants = document.constants
        self.decoder = Decoder(self.data.modes, self.data.origins)
        self.structures = [
            self._structure(index, item) for index, item in enumerate(self.data.structures)
        ]

    def graphs(self) -> JobGraph | GroupGraph:
        """What the document holds."""
        first, *jobs = map(self._job, self.data.jobs)
        saved = self.data.group
        if saved is None:
            return first
        group = GroupGraph(first, jobs, saved.exact, saved.compute)
        own = self.structures[saved.own]
        group.root, group.blocks, group.constants = own["root"], own["blocks"], own["constants"]
        group.notes = list(saved.notes)
        return group

    def _job(self, job: SavedJob) -> JobGraph:
        return JobGraph(
            job.name,
            form=job.form,
            plan=self.decoder.decode(job.plan, _unexpected),
            sites={site.path: site for site in job.sites},
            notes=list(job.notes),
            **self.structures[job.structure],
        )

    def _structure(self, index: int, saved: SavedStructure) -> dict[str, Any]:
        blocks = {
            block.name: Block(
                block.name, graph_of(block.graph, self.decoder), tuple(block.instances)
            )
            for block in saved.blocks
        }
        constants = {name: self.constants[f"{index}/{name}"] for name in saved.constants}
        return {
            "root": graph_of(saved.root, self.decoder),
            "blocks": blocks,
            "constants": constants,
        }


def _unexpected(kind: str, index: int) -> Any:
    raise KeyError(f"{kind} {index} outside of a graph")
