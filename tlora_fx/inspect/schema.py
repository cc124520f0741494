"""The data that every view of a Shared Super-Model is made of, and its JSON.

`ssm.json` holds a `Listing`: a row a module. `program.json` holds a `Program`: an entry a node.
`passes/NN-NAME.json` hold a `PassStage` each: the program that a pass left. Text, pages, graphs,
differences and searches are rendered from these alone, so none of them needs torch. Within one
`schema` number fields are only ever added, each with a default, and readers pass over what they do
not know; a field that changes its meaning, or leaves, raises the number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from tlora_fx.errors import DumpNotReadable, DumpNotWritable, errors_as
from tlora_fx.host.durable import write_output

SCHEMA: Literal[1] = 1
STAGES_FOLDER = "passes"


def to_json(data: Any) -> str:
    """Entries as text, their fields in order."""
    return json.dumps(to_jsonable_python(data), indent=1, ensure_ascii=False) + "\n"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class JsonDocument:
    """Base of classes that fill a JSON file of their own, called FILE in the folder of a dump."""

    __slots__ = ()
    FILE: ClassVar[str] = ""

    def to_json(self) -> str:
        """The document as text, its fields in order."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a document back; fields that this version does not know are passed over.

        raises    pydantic.ValidationError, a ValueError, for what is no such document of this
                  schema
        """
        kind: Any = cls
        document: Self = _adapter(kind).validate_json(text, strict=True)
        return document

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a document from its file, or from the folder of a dump; raises DumpNotReadable."""
        path = path / cls.FILE if path.is_dir() else path
        try:
            return cls.from_json(read_text(path, "there is no compiled model here"))
        except ValueError as error:
            raise DumpNotReadable(
                "this is no compiled model that this version reads",
                file=path,
                found=_first_mistake(error),
                help="write it anew with: tlora-fx compile jobs.yaml -o FOLDER",
            ) from error


def read_text(path: Path, missing: str) -> str:
    """The text of a file of a dump.

    missing    what to say where there is none
    raises     DumpNotReadable, and UnicodeDecodeError for what is no text
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DumpNotReadable(
            missing,
            file=path,
            found=error.strerror,
            help="write one with: tlora-fx compile jobs.yaml -o FOLDER",
        ) from error


def write_file(path: Path, text: str, what: str) -> None:
    """Write a view into a file, which is replaced at once; its folder is made.

    what      what cannot be written where it fails, such as "the page"
    raises    DumpNotWritable
    """
    help = "name another file, or free disk space"
    with errors_as(DumpNotWritable, f"{what} cannot be written", file=path, help=help):
        write_output(path, text.encode())


def _first_mistake(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    mistake = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, mistake["loc"])), mistake["msg"])))


@dataclass(frozen=True, slots=True)
class BaseEntry:
    """The frozen base.

    title          as the job file names it
    dtype          of its parameters, such as "bfloat16"
    layers         paths of all layers, in the order in which they run
    """

    title: str
    architecture: str
    dtype: str
    layers: list[str]


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job and its adapters.

    ranks, scalings, dropouts   what its sites have, each value once, ascending
    kinds                       "lora", "dora", "embedding", "saved" (a trained copy), ...
    targets                     last names of the modules that it adapts
    sites, lowered              its sites, and how many of them run in a shared operator
    """

    name: str
    ranks: list[int]
    scalings: list[float]
    dropouts: list[float]
    kinds: list[str]
    targets: list[str]
    sites: int
    lowered: int
    parameters: int


@dataclass(frozen=True, slots=True)
class BranchEntry:
    """Branch of one job at one row of the listing.

    ranks            of the layers that the row stands for, each value once
    kind             as in JobEntry
    lowered          it runs in the row's operator, with the other jobs
    as_it_is         why it does not
    parameters       that it trains in one layer, mean over the layers
    flop_per_token   of the job's own tokens, mean over the layers; None where unknown
    """

    job: str
    ranks: list[int]
    kind: str
    lowered: bool
    as_it_is: str | None
    parameters: float
    flop_per_token: float | None


@dataclass(frozen=True, slots=True)
class RowEntry:
    """One module of a layer, or of the root.

    module            path; relative to the layer inside a block, "" for the layer itself
    operator          the operator that matters, or the arithmetic in short
    shape, dtype      of its result; T tokens, or B lines of S tokens, J jobs
    flop_per_token    forward, shared work and the branches of all jobs at equal shares of tokens;
                      two a multiply-add, one an element of other arithmetic; None where unknown
    flop_per_length   forward, per token and token of its sequence (attention)
    flop_per_row      forward, once a row whatever its length (DoRA's norms)
    weight_bytes      frozen tensors that it reads, for one layer
    adapter_bytes     what all jobs train here, for one layer, mean over the layers
    role              "shared" or "loss"
    source            the line of model code that it comes from
    """

    module: str
    operator: str
    detail: str
    shape: list[int | str]
    dtype: str
    flop_per_token: float | None
    flop_per_length: float
    flop_per_row: float
    weight_bytes: int
    adapter_bytes: float
    role: str
    nodes: int
    source: str
    branches: list[BranchEntry]


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A run of rows: code that equal layers share, or a part of the root.

    name      of the class in ssm.py
    layers    paths of the layers that it stands for, empty for parts of the root
    folded    the layers share one class
    why       what tells this structure apart from the first one, "" for the first
    """

    name: str
    layers: list[str]
    folded: bool
    why: str
    rows: list[RowEntry]


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """One attention operator.

    window    tokens that a token sees, -1 for all before it
    """

    layers: list[str]
    heads: int
    key_value_heads: int
    head_dim: int
    causal: bool
    window: int
    softcap: float
    sinks: bool
    dropout: float


@dataclass(frozen=True, slots=True)
class DropoutEntry:
    """A dropout that draws the masks of its job; those of lowered adapters are in JobEntry."""

    layers: list[str]
    module: str
    rate: float
    jobs: list[str]


@dataclass(frozen=True, slots=True)
class NoteEntry:
    """A sentence that a pass wants reported."""

    by: str
    text: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the whole model.

    sites             modules of the base at which any job trains something
    lowered           those that run in a shared operator
    shared_nodes      operators that run once for all jobs, all layers counted
    flop_per_token    forward, None where a part is unknown
    training_...      forward and backward, products of matrices and attention only; None where a
                      part is unknown, and in what versions before 0.2 wrote
    """

    shared_parameters: int
    shared_bytes: int
    adapter_parameters: int
    adapter_bytes: int
    sites: int
    adapters: int
    lowered: int
    shared_nodes: int
    branch_nodes: int
    flop_per_token: float | None
    flop_per_length: float
    training_flop_per_token: float | None = None
    training_flop_per_length: float | None = None


@dataclass(frozen=True, slots=True)
class Listing(JsonDocument):
    """A Shared Super-Model as plain data.

    schema    number of this layout
    version   of the tlora-fx that wrote it
    form      "packed" (all tokens in one line) or "batch" (padded lines)
    """

    FILE: ClassVar[str] = "ssm.json"

    schema: Literal[1]
    version: str
    base: BaseEntry
    form: str
    adapter_dtype: str
    jobs: list[JobEntry]
    blocks: list[BlockEntry]
    attention: list[AttentionEntry]
    dropouts: list[DropoutEntry]
    totals: Totals
    notes: list[NoteEntry]


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
    flop_per_...      forward, as in RowEntry
    bytes             of the tensor, for kind "tensor": one layer's
    launches          operators that run when it runs: 1 for calls that compute, else 0
    module            path; relative to the layer inside a block
    role              "backbone", "adapter", "shared", "table", "loss", or "" before tag-roles
    site              module that its adapter sits on, "" for all else
    source            the line of model code that it comes from
    made_by           "trace", or the pass that made it
    made_from         keys of the nodes that it was made from; those of `Program.history`
    note              why it was not lowered, "" for all else
    notes             what passes noted of it, by name
    ranks             of each job's adapter here, in the order of `jobs`: those of all layers, each
                      value once, none where a job trains a copy; empty where nothing is adapted
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
    notes: dict[str, str | float | bool] = field(default_factory=dict)
    ranks: list[list[int]] = field(default_factory=list)

    @property
    def ranks_texts(self) -> list[str]:
        """Ranks of each job: "16", "8–16" where layers differ, "full" where it trains a copy."""
        return ["–".join(map(str, _ends(ranks))) or "full" for ranks in self.ranks]

    @property
    def notes_text(self) -> str:
        """Notes of the node, in one line."""
        noted = [f"{name}: {value}" for name, value in self.notes.items()]
        return "; ".join(filter(None, (self.note, *noted)))

    @property
    def value_text(self) -> str:
        """Shape and dtype of the value: "[1, T, 128] f32", "" where it is no tensor."""
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}" if self.dtype else ""


def _ends(ranks: list[int]) -> list[int]:
    """The smallest and the largest, once where they are one."""
    return sorted({min(ranks), max(ranks)}) if ranks else []


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """One graph: the root, or code that equal layers share.

    name     "root", or the block's name
    owner    "base", "job NAME", or "group" once the jobs are fused
    layers   paths of the layers that run it, empty for the root
    """

    name: str
    owner: str
    layers: list[str]
    nodes: list[NodeEntry]

    @property
    def numbered_layers(self) -> list[str]:
        """The layers that run the graph; none for root and head, whose modules have full paths."""
        return [layer for layer in self.layers if layer.rpartition(".")[2].isdigit()]

    def title(self, separator: str = ", ") -> str:
        """Title of the graph among those of all owners."""
        return self.name if self.owner == "group" else f"{self.owner}{separator}{self.name}"


@dataclass(frozen=True, slots=True)
class JointNode:
    """A value of a joint graph.

    target        operator; "item" for one result of an operator that has several
    inputs        ids of what it reads
    arguments     of the call, as text; what it reads is %
    shape         of its tensors: "[1, 512, 32], [512, 4]"
    flop, bytes   for the row of its JointEntry
    fate          "forward"; "kept" from there, or computed "again"; "backward"
    """

    id: str
    target: str
    inputs: list[str]
    arguments: str
    shape: str
    flop: float
    bytes: int
    fate: str


@dataclass(frozen=True, slots=True)
class JointEntry:
    """The joint graph of forward and backward of a block that has passes over it, or a budget.

    row       what it was traced for: "2 jobs, 2 sequences of 128 tokens each"
    passes    as pipelines write them
    budget    share of the bytes that may be kept
    nodes     as passes leave them, with what the budget makes of them
    traced    as no pass changed them, with all kept that the backward reads
    """

    block: str
    layers: list[str]
    row: str
    passes: list[str]
    budget: float
    nodes: list[JointNode]
    traced: list[JointNode]


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A node that is gone, from which others were made.

    made_from    keys of the nodes that it was made from
    """

    target: str
    made_by: str
    made_from: list[str]


@dataclass(frozen=True, slots=True)
class Program(JsonDocument):
    """All graphs of one state: after a pass, or of a compiled model.

    base      as the job file names it
    state     "trace", or the name of the pass that ran last
    form      "packed" or "batch"
    history   nodes that are gone, by key
    joint     joint graphs of blocks that have passes over them, or a budget
    """

    FILE: ClassVar[str] = "program.json"

    schema: Literal[1]
    version: str
    base: str
    state: str
    form: str
    jobs: list[str]
    graphs: list[GraphEntry]
    history: dict[str, Ancestor]
    joint: list[JointEntry] = field(default_factory=list)

    def nodes(self) -> Iterator[tuple[GraphEntry, NodeEntry]]:
        """Every node with its graph, in the order in which they run."""
        return ((graph, node) for graph in self.graphs for node in graph.nodes)

    def made_from(self, key: str) -> list[str]:
        """Keys of what a node that is gone was made from."""
        past = self.history.get(key)
        return past.made_from if past is not None else []


@dataclass(frozen=True, slots=True)
class PassStage(JsonDocument):
    """State that one pass of a pipeline left.

    place      of the pass in the pipeline, 0 for what was traced
    text       the pass in the text form of pipelines, "trace" at place 0
    seconds    that it took, over all graphs
    """

    place: int
    text: str
    changed: bool
    seconds: float
    program: Program

    def of_base(self, base: str) -> PassStage:
        """The same stage, with what the job file calls the base."""
        return replace(self, program=replace(self.program, base=base))
