"""A job's or a group's graphs as one document, and back.

A document is plain data and the constants of model code. Jobs of equal structure share one graph
in it, as they do in a group.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from tlora_fx.errors import GraphFileNotReadable, GraphInvalid
from tlora_fx.graph_file.codec import Decoder, Encoder
from tlora_fx.graph_file.nodes import graph_data, graph_of
from tlora_fx.ir.graph import AdapterSite, Block, GroupGraph, JobGraph
from tlora_fx.ir.verifier import fingerprint

FORMAT = 1


@dataclass(slots=True)
class Document:
    """Graphs as data.

    data        what JSON can hold
    constants   values lifted out of model code, by "structure/name"
    """

    data: dict[str, Any]
    constants: dict[str, torch.Tensor]

    @property
    def left_out(self) -> list[str]:
        """Tags that could not be kept, such as "job 'a': add_1: hint (my_package.Hint)".

        raises    GraphFileNotReadable
        """
        found = self.data.get("left_out")
        if isinstance(found, list) and all(isinstance(tag, str) for tag in found):
            return list(found)
        raise _damaged(f"left_out is {found!r}"[:200])


def to_document(graphs: JobGraph | GroupGraph) -> Document:
    """Graphs as data, which later passes leave alone.

    raises    GraphNotStorable, naming the node
    """
    writer = _Writer()
    if isinstance(graphs, GroupGraph):
        data = {
            "kind": "group",
            "base": writer.job(graphs.base),
            "jobs": [writer.job(job) for job in graphs.jobs],
            "exact": graphs.exact,
            "compute": graphs.compute,
            "notes": graphs.notes,
            "own": writer.structure(graphs, "group"),
        }
    else:
        data = {"kind": "job", "job": writer.job(graphs)}
    found = fingerprint(graphs)
    return Document(
        {
            "format": FORMAT,
            **data,
            "structures": writer.structures,
            "origins": writer.encoder.origins,
            "modes": writer.encoder.modes.symbols,
            "left_out": writer.left_out,
            "fingerprint": [found.code, found.tags],
        },
        writer.constants,
    )


def from_document(document: Document) -> JobGraph | GroupGraph:
    """The graphs of a document, as they were when it was made.

    raises    GraphFileNotReadable
    """
    data = document.data
    if data.get("format") != FORMAT:
        raise GraphFileNotReadable(
            "the graph file is of another format",
            expected=FORMAT,
            found=data.get("format"),
            help="read it with the version that wrote it, or write it anew",
        )
    try:
        graphs = _Reader(document).graphs()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, GraphInvalid) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    except (ImportError, StopIteration, RecursionError, RuntimeError, AssertionError) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    found = fingerprint(graphs)
    if [found.code, found.tags] != data.get("fingerprint"):
        raise _damaged("the graphs have another fingerprint than when they were written")
    return graphs


def _damaged(found: str) -> GraphFileNotReadable:
    return GraphFileNotReadable(
        "the graph file does not hold together",
        found=found,
        help="the file is damaged, or another version wrote it",
    )


@dataclass(slots=True)
class _Writer:
    encoder: Encoder = field(default_factory=Encoder)
    structures: list[Any] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def job(self, job: JobGraph) -> dict[str, Any]:
        """One job; its structure is written once for all jobs that share it."""
        sites = [list(dataclasses.astuple(site)) for site in job.sites.values()]
        return {
            "name": job.name,
            "form": job.form,
            "sites": sites,
            "notes": job.notes,
            "plan": self.encoder.encode(job.plan, _no_node),
            "structure": self.structure(job, f"job '{job.name}'" if job.name else "base"),
        }

    def structure(self, graphs: JobGraph | GroupGraph, subject: str) -> int:
        """The place of root, blocks and constants."""
        key = (id(graphs.root), id(graphs.blocks), id(graphs.constants))
        if key in self.known:
            return self.known[key]
        place = self.known[key] = len(self.structures)
        left_out: list[str] = []
        self.structures.append(
            {
                "root": graph_data(graphs.root, self.encoder, left_out),
                "blocks": [
                    {
                        "name": block.name,
                        "instances": list(block.instances),
                        "graph": graph_data(block.graph, self.encoder, left_out),
                    }
                    for block in graphs.blocks.values()
                ],
                "constants": list(graphs.constants),
            }
        )
        for name, value in graphs.constants.items():
            self.constants[f"{place}/{name}"] = value
        self.left_out.extend(f"{subject}: {tag}" for tag in left_out)
        return place


def _no_node(node: Any) -> Any:
    raise AssertionError(f"a node in a plan: {node}")


class _Reader:
    def __init__(self, document: Document) -> None:
        self.data = document.data
        self.constants = document.constants
        self.decoder = Decoder(self.data["modes"], self.data["origins"])
        self.structures = [
            self._structure(place, item) for place, item in enumerate(self.data["structures"])
        ]

    def graphs(self) -> JobGraph | GroupGraph:
        """What the document holds."""
        data = self.data
        if data["kind"] == "job":
            return self._job(data["job"])
        if data["kind"] != "group":
            raise ValueError(f"kind {data['kind']!r}, expected 'job' or 'group'")
        jobs = [self._job(item) for item in data["jobs"]]
        group = GroupGraph(self._job(data["base"]), jobs, data["exact"], data["compute"])
        own = self.structures[data["own"]]
        group.root, group.blocks, group.constants = own["root"], own["blocks"], own["constants"]
        group.notes = _notes(data)
        return group

    def _job(self, item: dict[str, Any]) -> JobGraph:
        sites = [AdapterSite(*site) for site in item["sites"]]
        plan = self.decoder.decode(item["plan"], _unexpected)
        return JobGraph(
            item["name"],
            form=item["form"],
            plan=plan,
            sites={site.path: site for site in sites},
            notes=_notes(item),
            **self.structures[item["structure"]],
        )

    def _structure(self, place: int, item: dict[str, Any]) -> dict[str, Any]:
        blocks = {
            block["name"]: Block(
                block["name"], graph_of(block["graph"], self.decoder), tuple(block["instances"])
            )
            for block in item["blocks"]
        }
        root = graph_of(item["root"], self.decoder)
        constants = {name: self.constants[f"{place}/{name}"] for name in item["constants"]}
        return {"root": root, "blocks": blocks, "constants": constants}


def _notes(item: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, note) for name, note in item["notes"]]


def _unexpected(kind: str, place: int) -> Any:
    raise KeyError(f"{kind} {place} outside of a graph")
