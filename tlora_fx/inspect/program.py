"""The data of every node, from which the views that show single nodes are made: `program.json`.

`ssm.json` (schema.py) has a row a module; this has an entry a node. Within one `schema` number
fields are only ever added.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tlora_fx.inspect.read_back import build, from_json, to_json
from tlora_fx.inspect.schema import read_dump

SCHEMA = 1
FILE = "program.json"
FOLDER = "passes"


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """One node of a graph.

    id                unique in its graph: the node's name in the code
    key               its provenance, the same in every state of the graph that it survives in
    kind              "input", "tensor", "call", "layer" or "output"
    target            operator ("aten.linear.default"), tensor name, layer path or input name
    inputs            ids of the nodes that it reads, each once, in order of first use
    code              the statement as in ssm.py; "" for inputs and tensors
    shape, dtype      of its value; T tokens, or B lines of S tokens; "" where it is no tensor
    flop_per_token    forward, at equal shares of tokens for all jobs; None where unknown
    flop_per_length   forward, per token and token of its sequence (attention)
    flop_per_row      forward, once a row whatever its length
    bytes             of the tensor, for kind "tensor": one layer's
    launches          operators that run when it runs: 1 for calls that compute, else 0
    module            path; relative to the layer inside a block
    role              "backbone", "adapter", "shared", "table", "loss", or "" before tag-roles
    jobs              whom it serves
    site              module that its adapter sits on, "" for all else
    source            the line of model code that it comes from
    made_by           "trace", or the pass that made it
    made_from         keys of the nodes that it was made from; those of `Program.history`
    note              why it was not lowered, "" for all else
    """

    id: str
    key: str
    kind: str
    target: str
    inputs: list[str]
    code: str
    shape: list[int | str]
    dtype: str
    flop_per_token: float | None
    flop_per_length: float
    flop_per_row: float
    bytes: int
    launches: int
    module: str
    role: str
    jobs: list[str]
    site: str
    source: str
    made_by: str
    made_from: list[str]
    note: str


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """One graph: the root, or code that equal layers share.

    name     "root", or the block's name
    owner    "base", "job NAME", or "group" once the jobs are fused
    layers   paths of the layers that run it, empty for the root
    nodes    in the order in which they run
    """

    name: str
    owner: str
    layers: list[str]
    nodes: list[NodeEntry]


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A node that is gone, from which others were made.

    target       what it called
    made_by      "trace", or the pass that made it
    made_from    keys of the nodes that it was made from
    """

    target: str
    made_by: str
    made_from: list[str]


@dataclass(frozen=True, slots=True)
class Program:
    """All graphs of one state: after a pass, or of a compiled model.

    schema    number of this layout
    version   of the tlora-fx that wrote it
    base      as the job file names it
    state     "trace", or the name of the pass that ran last
    form      "packed" or "batch"
    jobs      in the order of every table
    history   nodes that are gone, by key
    """

    schema: int
    version: str
    base: str
    state: str
    form: str
    jobs: list[str]
    graphs: list[GraphEntry]
    history: dict[str, Ancestor]

    def to_json(self) -> str:
        """The program as text."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Read a program back; fields that this version does not know are passed over.

        raises    ValueError, KeyError or TypeError for what is no program of this schema
        """
        return from_json(cls, text, SCHEMA)


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pass of a pipeline left.

    place      of the pass in the pipeline, 0 for what was traced
    text       the pass in the text form of pipelines, "trace" at place 0
    changed    whether the pass changed any graph
    seconds    that it took, over all graphs
    program    all graphs after it
    """

    place: int
    text: str
    changed: bool
    seconds: float
    program: Program

    def to_json(self) -> str:
        """The stage as text."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Stage:
        """Read a stage back.

        raises    ValueError, KeyError or TypeError for what is no stage of this schema
        """
        data = json.loads(text)
        if data["program"]["schema"] != SCHEMA:
            raise ValueError(f"schema {data['program']['schema']}, expected {SCHEMA}")
        made: Stage = build(cls, data)
        return made


def named(stage: Stage, base: str) -> Stage:
    """The same stage, with what the job file calls the base."""
    return replace(stage, program=replace(stage.program, base=base))


def load_program(folder: Path) -> Program:
    """The node-level data in a dump folder.

    raises    DumpNotReadable
    """
    return read_dump(folder / FILE, Program.from_json)


def load_stages(folder: Path) -> list[Stage]:
    """What every pass left, as far as the folder of a dump holds it, in order.

    raises    DumpNotReadable
    """
    files = sorted((folder / FOLDER).glob("[0-9]*.json"))
    return [read_dump(file, Stage.from_json) for file in files]
