"""A job's or a group's graphs as one document, in memory and in a folder.

A document is plain data and the constants of model code. Jobs of equal structure share one graph
in it, as they do in a group. In a folder it is `graph.json`, with `constants.safetensors` beside;
a file `.tfx` holds both. Either way a node is a line of its own.
"""

from __future__ import annotations

import base64
import builtins
import json
import math
import operator
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import fx

from tlora_fx.durable import replace_file
from tlora_fx.errors import GraphFileNotReadable, GraphInvalid, GraphNotStorable
from tlora_fx.graph_file.codec import Decoder, Encoder, OriginData, SizeData
from tlora_fx.ir.graph import AdapterSite, Block, Form, GroupGraph, JobGraph
from tlora_fx.ir.shapes import RUN, remember_runs
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.version import __version__

# Format 1 named functions and classes by modules that have moved since.
FORMAT: Literal[2] = 2
GRAPH = "graph.json"
#: Of files that hold graphs and constants together.
SUFFIX = ".tfx"
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

    sites       or the index of an earlier job that has the same ones
    plan        as `Encoder` writes it
    """

    name: str
    form: Form
    sites: list[AdapterSite] | int
    notes: list[Note]
    plan: Any
    structure: int
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class SavedGroup:
    """What a group has besides its base and jobs; `own` is the index of its own structure."""

    exact: bool
    compute: str
    notes: list[Note]
    own: int
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class SavedGraphs:
    """All that `graph.json` says.

    jobs          the job; of a group the base, then its jobs
    group         None where the document holds one job
    origins       of nodes, each after those that it was made from
    modes         of each fake mode its symbols by name
    left_out      tags that could not be kept: "job 'a': add_1: hint (my_package.Hint)"
    fingerprint   of code and tags, when the document was made
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
    """Graphs as data, which later passes leave alone; raises GraphNotStorable, naming the node."""
    writer = _Writer()
    group = None
    if isinstance(graphs, GroupGraph):
        jobs = [writer.job(job) for job in (graphs.base, *graphs.jobs)]
        own = writer.structure(graphs, "group")
        group = SavedGroup(
            graphs.exact, graphs.compute, list(graphs.notes), own, dict(graphs.facts)
        )
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
    """The graphs of a document, as they were when it was made; raises GraphFileNotReadable."""
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


def save_graphs(graphs: JobGraph | GroupGraph, path: str | Path) -> None:
    """Write graphs into a file, by its suffix `.tfx`, or a folder, which is made if it is missing.

    raises    GraphNotStorable for what a file cannot keep, OSError
    """
    path = Path(path)
    if path.suffix == SUFFIX:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, graph_text(graphs).encode())
    else:
        save_document(to_document(graphs), path)


def load_graphs(path: str | Path) -> JobGraph | GroupGraph:
    """Read what `save_graphs` wrote: the same names, tags, facts, origins and fingerprint.

    raises    GraphFileNotReadable
    """
    return from_document(load_document(Path(path)))


def graph_text(graphs: JobGraph | GroupGraph) -> str:
    """Graphs as the text of a graph file, a node a line; raises GraphNotStorable."""
    document = to_document(graphs)
    return _text(document, {name: _value_out(v) for name, v in document.constants.items()})


def graphs_of_text(text: str, file: str | Path = "text") -> JobGraph | GroupGraph:
    """The graphs of a graph file's text.

    file      what errors call it
    raises    GraphFileNotReadable
    """
    return from_document(_document_of(text, file))


# Of a document, lists whose items stand on lines of their own, and what holds such lists.
_LISTS = frozenset({"jobs", "structures", "origins", "modes", "blocks", "nodes", "erased"})
_OPENED = frozenset({"", "structures", "blocks", "root", "graph", "values"})


def _text(document: Document, values: dict[str, Any] | None = None) -> str:
    """A document as JSON, a node, an origin and a job a line."""
    data = _adapter().dump_python(document.data, mode="json")
    return _lined(data | ({} if values is None else {"values": values}), "") + "\n"


def _lined(data: Any, key: str) -> str:
    if isinstance(data, list) and key in _LISTS:
        items = [_lined(item, key) for item in data]
        return "[\n" + ",\n".join(items) + "\n]" if items else "[]"
    if isinstance(data, dict) and key in _OPENED:
        pairs = [f"{json.dumps(name)}: {_lined(value, name)}" for name, value in data.items()]
        return "{\n" + ",\n".join(pairs) + "\n}" if pairs else "{}"
    return json.dumps(data, separators=(",", ":"))


def _value_out(value: torch.Tensor) -> Any:
    """A constant as its type, shape, and bytes in base64."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    kind = str(value.dtype).removeprefix("torch.")
    return [kind, list(value.shape), base64.b64encode(flat.numpy().tobytes()).decode()]


def _value_in(data: Any) -> torch.Tensor:
    kind, shape, text = data
    content = bytearray(base64.b64decode(text))
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
    return flat.view(getattr(torch, kind)).reshape(shape)


def _document_of(text: str, file: str | Path) -> Document:
    try:
        data = json.loads(text)
        values = data.pop("values", None) if isinstance(data, dict) else None
        constants = {name: _value_in(value) for name, value in (values or {}).items()}
    except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise GraphFileNotReadable(
            "the graph file cannot be read",
            file=file,
            found=f"{type(error).__name__}: {error}",
            help="the file is damaged; write it anew",
        ) from error
    return Document(read_data(data), constants)


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
    replace_file(folder / GRAPH, _text(document).encode())


def load_document(folder: Path) -> Document:
    """Read a document of a folder, or of a file; raises GraphFileNotReadable."""
    if folder.suffix == SUFFIX and folder.is_file():
        try:
            return _document_of(folder.read_text(encoding="utf-8"), folder)
        except (OSError, UnicodeDecodeError) as error:
            raise GraphFileNotReadable(
                "the graph file cannot be read", file=folder, found=error, help="write it anew"
            ) from error
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
    """What the JSON of `graph.json` says; raises GraphFileNotReadable."""
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
    known_sites: dict[tuple[AdapterSite, ...], int] = field(default_factory=dict)
    jobs: int = 0

    def job(self, job: JobGraph) -> SavedJob:
        """One job; its structure is written once for all jobs that share it."""
        plan = self.encoder.encode(job.plan, _no_node)
        structure = self.structure(job, f"job '{job.name}'" if job.name else "base")
        sites = self.sites(list(job.sites.values()))
        facts = dict(job.facts)
        return SavedJob(job.name, job.form, sites, list(job.notes), plan, structure, facts)

    def sites(self, sites: list[AdapterSite]) -> list[AdapterSite] | int:
        """A job's sites, or the index of the first job that has the same."""
        index = self.known_sites.setdefault(tuple(sites), self.jobs)
        self.jobs += 1
        return sites if index == self.jobs - 1 else index

    def structure(self, graphs: JobGraph | GroupGraph, subject: str) -> int:
        key = (id(graphs.root), id(graphs.blocks), id(graphs.constants))
        if key in self.known:
            return self.known[key]
        index = self.known[key] = len(self.structures)
        left_out: list[str] = []
        root = graph_data(graphs.root, self.encoder, left_out)
        blocks = [
            SavedBlock(
                block.name, list(block.instances), graph_data(block.graph, self.encoder, left_out)
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
        first, *jobs = map(self._job, self.data.jobs)
        saved = self.data.group
        if saved is None:
            return first
        group = GroupGraph(first, jobs, saved.exact, saved.compute)
        own = self.structures[saved.own]
        group.root, group.blocks, group.constants = own["root"], own["blocks"], own["constants"]
        group.notes, group.facts = list(saved.notes), dict(saved.facts)
        return group

    def _job(self, job: SavedJob) -> JobGraph:
        sites = job.sites
        if isinstance(sites, int):
            sites = self.data.jobs[sites].sites
            assert not isinstance(sites, int)
        return JobGraph(
            job.name,
            form=job.form,
            plan=self.decoder.decode(job.plan, _unexpected),
            sites={site.path: site for site in sites},
            notes=list(job.notes),
            facts=dict(job.facts),
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


VALUE = "val"
# Methods would be looked up by name on whatever comes; traced graphs have none.
OPS = ("placeholder", "get_attr", "call_function", "call_module", "output")
# Paths of tensors and layers: they become attributes of the generated code.
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*")
OPERATORS = "torch.ops."
# Operators that reach beyond their tensors: interpreters, profilers, other processes, files.
REFUSED_SPACES = ("prim", "debugprims", "profiler", "c10d", "symm_mem")
# Text arguments of these names tell an operator which file to read or write.
FILE_ARGUMENTS = ("file", "filename", "file_name", "path", "filepath", "file_path")
# What graphs call on sizes besides operators: nothing here reads a file or runs code.
BUILTINS = ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum")
# These make callables, call them, or change what they are given.
REFUSED = ("attrgetter", "itemgetter", "methodcaller", "call", "setitem", "delitem")


@dataclass(slots=True)
class NodeData:
    """A node; arguments and tags as `Encoder` writes them."""

    op: str
    name: str
    target: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GraphData:
    """A graph.

    erased          nodes that a pass erased, of which tags still tell
    names, counts   names that were given and taken back, so that later passes make the same ones
    """

    nodes: list[NodeData]
    erased: list[NodeData]
    names: list[str]
    counts: dict[str, int]


def graph_data(graph: fx.Graph, encoder: Encoder, left_out: list[str]) -> GraphData:
    """A graph as data.

    left_out    tags that cannot be kept are added here: "add_1: hint (my_package.Hint)"
    raises      GraphNotStorable, naming the node
    """
    return _GraphWriter(graph, encoder, left_out).data()


class _GraphWriter:
    def __init__(self, graph: fx.Graph, encoder: Encoder, left_out: list[str]) -> None:
        self.graph, self.encoder, self.left_out = graph, encoder, left_out
        self.indices = {node: index for index, node in enumerate(graph.nodes)}
        self.erased: dict[fx.Node, int] = {}
        self.erased_data: list[NodeData] = []

    def data(self) -> GraphData:
        nodes = [self._node(node) for node in self.graph.nodes]
        names = self.graph._graph_namespace
        live = {node.name for node in self.graph.nodes}
        known = sorted(names._used_names - live)
        return GraphData(nodes, self.erased_data, known, dict(names._base_count))

    def _node(self, node: fx.Node) -> NodeData:
        data = NodeData(node.op, node.name, _target_out(node))
        try:
            data.args = self.encoder.encode(list(node.args), self._argument)
            if node.kwargs:
                data.kwargs = self.encoder.encode(dict(node.kwargs), self._argument)
        except GraphNotStorable as error:
            error.add_note(f"in the arguments of {node.name}")
            raise
        data.meta = self._meta(node)
        return data

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        tags: dict[str, Any] = {}
        for tag, value in node.meta.items():
            if tag == RUN:
                continue
            try:
                tags[tag] = self.encoder.encode(value, self._mentioned)
            except GraphNotStorable as error:
                if tag == VALUE:
                    error.add_note(f"in the value of {node.name}")
                    raise
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                self.left_out.append(f"{node.name}: {tag} ({kind})")
        return tags

    def _argument(self, node: fx.Node) -> Any:
        if node not in self.indices:
            raise GraphNotStorable(
                "a node reads a node of another graph", found=node.name, help="lint the graph"
            )
        return {"node": self.indices[node]}

    def _mentioned(self, node: fx.Node) -> Any:
        """A node in a tag: one of the graph, or one that a pass erased and still tells of."""
        if node in self.indices:
            return {"node": self.indices[node]}
        if node not in self.erased:
            data = NodeData(node.op, node.name, _target_out(node))
            self.erased[node] = len(self.erased_data)
            self.erased_data.append(data)
            data.meta = self._meta(node)
        return {"erased": self.erased[node]}


def _target_out(node: fx.Node) -> str:
    """What a node calls or names."""
    if node.op == "call_function":
        return target_text(node.target, node.name)
    if not _fits(node.op, node.target):
        raise GraphNotStorable(
            "a graph holds a node that a graph file cannot keep",
            node=node.name,
            found=f"{node.op} {node.target}",
            expected=f"one of {', '.join(OPS)}, of a plain name",
            help="call operators, and name inputs and tensors plainly",
        )
    return str(node.target)


def _fits(op: Any, target: Any) -> bool:
    """Whether a node is of a kind that graph files keep; operators are judged by their names."""
    if op not in OPS or not isinstance(target, str):
        return False
    if op == "placeholder":
        return target.isidentifier()
    return op not in ("get_attr", "call_module") or _PATH.fullmatch(target) is not None


def graph_of(data: GraphData, decoder: Decoder) -> fx.Graph:
    """The graph of its data, with its values."""
    graph = _GraphReader(data, decoder).graph
    if len(graph.nodes):
        remember_runs(graph)
    return graph


class _GraphReader:
    def __init__(self, data: GraphData, decoder: Decoder) -> None:
        self.decoder = decoder
        self.graph, scrap = fx.Graph(), fx.Graph()
        self.nodes: list[fx.Node] = []
        for item in data.nodes:
            self.nodes.append(self._make(self.graph, item))
        self.erased = [self._make(scrap, item) for item in data.erased]
        pairs = zip([*self.nodes, *self.erased], [*data.nodes, *data.erased], strict=True)
        for node, item in pairs:
            for tag, value in item.meta.items():
                node.meta[tag] = decoder.decode(value, self._find)
        names = self.graph._graph_namespace
        names._used_names.update(data.names)
        names._base_count.clear()
        names._base_count.update(data.counts)

    def _make(self, graph: fx.Graph, item: NodeData) -> fx.Node:
        if not _fits(item.op, item.target):
            raise GraphFileNotReadable(
                "the graph file holds a node that no graph of ours has",
                node=item.name,
                expected=f"one of {', '.join(OPS)}, of a plain name",
                found=f"{item.op} {item.target}",
                help="the file is damaged, or something else wrote it",
            )
        args = tuple(self.decoder.decode(item.args, self._find))
        kwargs = self.decoder.decode(item.kwargs, self._find) or {}
        target = target_of(item.target) if item.op == "call_function" else item.target
        node = graph.create_node(item.op, target, args, kwargs, item.name)
        if graph is self.graph and node.name != item.name:
            raise GraphFileNotReadable(
                "two nodes of the graph file have one name",
                found=item.name,
                help="the file is damaged",
            )
        return node

    def _find(self, kind: str, index: int) -> fx.Node:
        return (self.nodes if kind == "node" else self.erased)[index]


def target_text(target: Any, node: str) -> str:
    """An operator as text: "torch.ops.aten.linear.default", "operator.getitem".

    raises    GraphNotStorable for what is no operator
    """
    if isinstance(target, torch._ops.OpOverload) and _is_pure(target):
        return OPERATORS + str(target)
    name = getattr(target, "__name__", "")
    for text in (f"{home}.{name}" for home in ("operator", "math", "builtins", "torch")):
        if _plain_function(text) is target:
            return text
    raise GraphNotStorable(
        "a graph calls something that a graph file cannot name",
        node=node,
        found=target,
        expected="an operator of torch.ops that opens no files, or one of operator or math",
        help="register it with torch.library.custom_op and call the operator",
    )


def target_of(text: str) -> Callable[..., Any]:
    """The operator of a text.

    raises    GraphFileNotReadable for what is no operator, or is not there
    """
    target = _overload(text) if text.startswith(OPERATORS) else _plain_function(text)
    if target is None:
        raise GraphFileNotReadable(
            "the graph calls an operator that is not there",
            found=text,
            help="install and import the package that registers it; operators that open files, "
            f"and those of {', '.join(REFUSED_SPACES)}, are never called"
            if text.startswith(OPERATORS)
            else "graph files name operators of torch.ops, operator and math only",
        )
    return target


def _overload(text: str) -> Callable[..., Any] | None:
    names = text.removeprefix(OPERATORS).split(".")
    if len(names) != 3:
        return None
    space, name, overload = names
    try:
        overloaded = getattr(getattr(getattr(torch.ops, space), name), overload)
    except (AttributeError, RuntimeError):
        return None
    return (
        overloaded
        if isinstance(overloaded, torch._ops.OpOverload) and _is_pure(overloaded)
        else None
    )


def _is_pure(operation: torch._ops.OpOverload) -> bool:
    """Whether an operator keeps to the tensors that it is given, as far as its schema tells."""
    named = {item.name for item in operation._schema.arguments if "str" in str(item.type)}
    return operation.namespace not in REFUSED_SPACES and not named.intersection(FILE_ARGUMENTS)


def _plain_function(text: str) -> Callable[..., Any] | None:
    """A function of operator, math or builtins that works on numbers, or torch's on sizes."""
    home, _, name = text.partition(".")
    homes: dict[str, types.ModuleType] = {"operator": operator, "math": math}
    function: Any = None
    if home in homes and not name.startswith("_") and name not in REFUSED:
        function = getattr(homes[home], name, None)
    elif home == "builtins" and name in BUILTINS:
        function = getattr(builtins, name)
    elif home == "torch" and name.startswith("sym_"):
        function = getattr(torch, name, None)
    return function if callable(function) else None
