"""The text of graphs read back: Python's own parser reads it, and nothing in it is executed."""

from __future__ import annotations

import ast
import base64
import dataclasses
import gc
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tlora_fx.errors import GraphFileNotReadable, GraphInvalid, TagsBroken
from tlora_fx.graph_file.operators import OPERATORS, OPS, fits, target_of
from tlora_fx.graph_file.values import ValueReader
from tlora_fx.graph_file.words import (
    ABSENT,
    CONSTANTS,
    FORMAT,
    OBJECTS,
    PASSES,
    ROLES,
    called,
    strange,
    text_digest,
)
from tlora_fx.ir.graph import (
    AdapterSite,
    Block,
    GroupGraph,
    JobGraph,
    LayerPlan,
    OpenSlots,
    Origin,
    TensorRef,
)
from tlora_fx.ir.names import hold_names
from tlora_fx.ir.shapes import give_value, propagate, remember_runs, type_text
from tlora_fx.ir.verifier import adapted, check_tags, check_tensors, fingerprint, owners

#: Nodes whose values operators give.
RUN_OPS = ("call_function", "call_module")
# Layers that one line may name: a damaged number must not fill the memory.
MAX_LAYERS = 100_000
_WRITTEN = re.compile(r'fingerprint\("\w+", "\w+", text="(?P<digest>\w+)"\)')
# Line and column, both from 1.
Place = tuple[int, int]
STRANGE = (
    ArithmeticError, AssertionError, AttributeError, GraphInvalid, ImportError, IndexError,
    KeyError, MemoryError, RecursionError, RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip


def parse(text: str, file: object = "text", line: int = 1) -> JobGraph | GroupGraph:
    """The graphs of a text, with the names, values, tags and origins that it was written from.

    What was changed since it was written is verified: operators take what they are given, values
    have the types that stand there, tags hold, and all sites of jobs have their adapters.

    file      what errors call it
    line      of the file at which the text begins
    raises    GraphFileNotReadable, naming line and column
    """
    reader = _Reader(is_edited=not is_as_written(text))
    try:
        with _without_collection():
            return reader.graphs(_statements("\n" * (line - 1) + text))
    except GraphFileNotReadable as error:
        raise _placed(error, file, reader.place) from error
    except STRANGE as error:
        found = f"{type(error).__name__}: {error}"
        raise _placed(_damaged(found), file, reader.place) from error


def is_as_written(text: str) -> bool:
    """Whether nothing was changed since the text was written."""
    _, _, below = text.partition("\n")
    line, _, rest = below.partition("\n")
    found = _WRITTEN.fullmatch(line)
    return found is not None and found["digest"] == text_digest(rest)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Look for no garbage: a tree of a text makes many objects, and none in circles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def left_out(text: str) -> list[str]:
    """Tags that could not be kept when a text was written; raises GraphFileNotReadable."""
    calls = (item.value for item in _statements(text) if isinstance(item, ast.Expr))
    named = (call for call in calls if isinstance(call, ast.Call) and called(call) == "left_out")
    return [str(ast.literal_eval(call.args[0])) for call in named]


def stored_forms(text: str) -> set[str]:
    """The functions of stored forms that a text names; raises GraphFileNotReadable."""
    named: list[ast.expr] = []
    for item in (item for top in _statements(text) for item in ast.walk(top)):
        if isinstance(item, ast.keyword) and item.arg == "form":
            named.append(item.value)
        elif isinstance(item, ast.Dict):
            pairs = zip(item.keys, item.values, strict=True)
            named += [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "form"]
    texts = [item.value for item in named if isinstance(item, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and ":" in text}


def _statements(text: str) -> list[ast.stmt]:
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        # Python says nowhere where a null byte is.
        before, null, _ = text.partition("\0")
        nowhere = error.lineno is None and null
        raise GraphFileNotReadable(
            "the graph file cannot be read",
            line=before.count("\n") + 1 if nowhere else error.lineno,
            column=len(before) - before.rfind("\n") if nowhere else error.offset,
            found=f"{error.msg}: {(error.text or '').strip()[:80]}",
            help="it holds several graphs: tlora-fx opt --split-input-file reads them"
            if (error.text or "").startswith("// ---")
            else "the file is damaged; write it anew",
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise GraphFileNotReadable(
            "the graph file cannot be read", found=error, help="the file is damaged"
        ) from error
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    known = isinstance(first, ast.Call) and called(first) == "graphs" and bool(first.args)
    number = ast.unparse(first.args[0]) if known else None  # type: ignore[union-attr]
    if number != str(FORMAT):
        raise GraphFileNotReadable(
            "the graph file is of another format",
            line=body[0].lineno if body else None,
            column=body[0].col_offset + 1 if body else None,
            expected=FORMAT,
            found=number,
            help="read it with the version that wrote it, or write it anew",
        )
    return body[1:]


def _placed(error: GraphFileNotReadable, file: object, place: Place | None) -> GraphFileNotReadable:
    """The error with the file, and line and column where one was being read."""
    where = {} if place is None else {"line": place[0], "column": place[1]}
    facts = {"file": file, **where, **error.facts}
    return GraphFileNotReadable(error.what, help=error.help, **facts)


def _damaged(found: str) -> GraphFileNotReadable:
    return GraphFileNotReadable(
        "the graph file does not hold together",
        found=found,
        help="the file is damaged, or another version wrote it",
    )


@dataclass(slots=True)
class _Structure:
    """Root, blocks and constants that equal jobs share."""

    root: fx.Graph = field(default_factory=fx.Graph)
    blocks: dict[str, Block] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)


class _Reader:
    """Reads the tables first, then graphs, then who has which.

    is_edited   whether the text is another one than was written
    place       what is being read, for errors
    places      of nodes, by the name that errors call them
    """

    def __init__(self, *, is_edited: bool = True) -> None:
        self.is_edited = is_edited
        self.place: Place | None = None
        self.places: dict[str, Place] = {}
        self.plans: dict[int, LayerPlan] = {}
        self.sources: dict[int, str] = {}
        self.owners: dict[int, str] = {}
        self.births: dict[int, tuple[str, str, str]] = {}
        self.origins: list[Origin] = []
        self.values = ValueReader()
        self.structures: dict[int, _Structure] = {}
        self.jobs: list[JobGraph] = []
        self.group: GroupGraph | None = None
        self.known: tuple[str, ...] | None = None
        self.known_at: Place | None = None
        self._plain = _Literals(self, None)
        self._operators: dict[str, Any] = {}

    def graphs(self, statements: list[ast.stmt]) -> JobGraph | GroupGraph:
        """All graphs; a fingerprint that stands in the text must be theirs."""
        calls, graphs = self._tables(statements)
        names = self._names(calls)
        for item in graphs:
            self._structure(item, names)
        for call in calls:
            self.at(call)
            self._entry(call)
        self.place = None
        if not self.jobs or (self.group is None and len(self.jobs) > 1):
            raise _damaged("the file names no job, or several without a group")
        result = self.group or self.jobs[0]
        if not self.is_edited:
            return result
        found = fingerprint(result)
        if self.known is not None and (found.code, found.tags) != self.known:
            self.place = self.known_at
            raise GraphFileNotReadable(
                "the graphs have another fingerprint than when they were written",
                help="the file is damaged; where you edited it, delete the line 'fingerprint'",
            )
        verify_tags(result, self.at_node)
        return result

    def at_node(self, name: str) -> None:
        """Note that a node is looked at: "q_proj", in a block "block.q_proj"."""
        anywhere = (place for key, place in self.places.items() if key.endswith(f".{name}"))
        self.place = self.places.get(name) or next(anywhere, None)

    def at(self, item: ast.expr | ast.stmt) -> None:
        """Note that this is read next."""
        self.place = item.lineno, item.col_offset + 1

    def operator(self, name: str) -> Any:
        """The operator that a line calls: "aten.linear.default", "operator.getitem"."""
        if name not in self._operators:
            text = OPERATORS + name if name.count(".") == 2 else name
            self._operators[name] = target_of(text)
        return self._operators[name]

    def _tables(self, statements: list[ast.stmt]) -> tuple[list[ast.Call], list[ast.With]]:
        """Read what lines refer to by number; returns the other calls, and the graphs."""
        calls, graphs = [], []
        for item in statements:
            self.at(item)
            if isinstance(item, ast.With):
                graphs.append(item)
            elif isinstance(item, ast.Expr) and isinstance(item.value, ast.Subscript):
                self._origin(item.value)
            elif isinstance(item, ast.Expr) and isinstance(item.value, ast.Call):
                if not self._table(called(item.value), item.value):
                    calls.append(item.value)
            else:
                raise strange(item)
        return calls, graphs

    def _table(self, name: str, call: ast.Call) -> bool:
        if name not in ("mode", "plan", "source", "owner", "birth", "fingerprint", "left_out"):
            return False
        args, kwargs = self._plain.arguments(call)
        if name == "mode":
            self.values.add(args[0], kwargs)
        elif name == "plan":
            self.plans[args[0]] = _plan(*args[1:])
        elif name == "source":
            self.sources[args[0]] = _text(args[1])
        elif name == "owner":
            self.owners[args[0]] = _text(args[1])
        elif name == "birth":
            self.births[args[0]] = tuple(map(_text, args[1:]))  # type: ignore[assignment]
        elif name == "fingerprint":
            self.known, self.known_at = tuple(args), self.place
        return True

    def _origin(self, item: ast.Subscript) -> None:
        """A row of the table of origins: owner, birth, and what it was made from."""
        words = item.slice.elts if isinstance(item.slice, ast.Tuple) else [item.slice]
        if not isinstance(item.value, ast.Name) or item.value.id != "o":
            raise strange(item)
        owner, birth, *rest = words
        key, made_by, target = self.births[self._number(birth)]
        sources: list[Origin] = []
        for word in rest:
            if isinstance(word, ast.Slice):
                start, stop = self._number(word.lower), self._number(word.upper)
                sources += [self.origins[index] for index in range(start, stop)]
            else:
                sources.append(self.origins[self._number(word)])
        full = f"{self.owners[self._number(owner)]}/{key}"
        self.origins.append(Origin(full, made_by, target, tuple(sources)))

    def _number(self, item: ast.expr | None) -> int:
        if isinstance(item, ast.Constant) and type(item.value) is int:
            return item.value
        raise strange(item or ast.Constant(None))

    def _names(self, calls: list[ast.Call]) -> dict[int, tuple[str, ...]]:
        """For each structure the jobs that `all` stands for in it."""
        names: dict[int, tuple[str, ...]] = {}
        every: list[str] = []
        for call in calls:
            if called(call) == "job":
                name, number = (self._plain.read(arg) for arg in call.args[:2])
                names.setdefault(number, (name,))
                every.append(name)
            elif called(call) == "group":
                names[self._plain.read(call.args[0])] = tuple(every[1:])
        return names

    def _structure(self, item: ast.With, names: dict[int, tuple[str, ...]]) -> None:
        call = _head(item, "graph")
        args, kwargs = self._plain.arguments(call)
        structure = self.structures[args[0]] = _Structure()
        readers: list[_GraphReader] = []
        for inner in item.body:
            self.at(inner)
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
                (name, kind, shape, content), _ = self._plain.arguments(inner.value)
                structure.constants[name] = _constant(kind, shape, content)
                continue
            head = _head(inner, "root", "block", "erased")
            body = inner.body  # type: ignore[attr-defined]
            if called(head) == "erased":
                readers[-1].erased = body
                continue
            name, layers, more = "", list[Any](), dict[str, Any]()
            if called(head) == "block":
                (name, *layers), more = self._plain.arguments(head)
            prefix, jobs = name and f"{name}.", names.get(args[0], ())
            reader = _GraphReader(self, jobs, kwargs.get("mode"), body, prefix)
            readers.append(reader)
            if not name:
                structure.root = reader.graph
                continue
            structure.blocks[name] = Block(
                name,
                reader.graph,
                _layers(layers),
                bool(more.get("recompute")),
                float(more.get("budget", 1.0)),
                tuple((_text(text), _text(module)) for text, module in more.get("joint", ())),
            )
        for reader in readers:
            reader.read()
        # A layer's call has what its block gives, so the root comes last.
        for reader in reversed(readers):
            reader.settle(structure.blocks if reader is readers[0] else {})

    def _entry(self, call: ast.Call) -> None:
        """A line on a job or the group, or on the one before it."""
        name = called(call)
        args, kwargs = self._plain.arguments(call)
        if name == "job":
            self._job(args[0], self.structures[args[1]], **kwargs)
        elif name == "group":
            self._group(self.structures[args[0]], **kwargs)
        elif name == "sites":
            self.jobs[-1].sites.update((site.path, site) for site in _sites(args))
        elif name == "note":
            (self.group or self.jobs[-1]).notes.append((_text(args[0]), _text(args[1])))
        else:
            raise strange(call)

    def _job(
        self,
        name: str,
        structure: _Structure,
        form: Any = "packed",
        plan: int | None = None,
        facts: Any = (),
        repeated: Any = (),
        sites: str | None = None,
    ) -> None:
        if form not in ("packed", "batch") or not isinstance(name, str):
            raise _damaged(f"a job {name!r} of form {form!r}")
        same = next((job.sites for job in self.jobs if job.name == sites), {})
        self.jobs.append(
            JobGraph(
                name,
                structure.root,
                form,
                None if plan is None else self.plans[plan],
                structure.blocks,
                dict(same),
                structure.constants,
                repeated=frozenset(repeated),
                facts=_facts(facts),
            )
        )

    def _group(
        self,
        own: _Structure,
        exact: bool = False,
        compute: str = "base",
        facts: Any = (),
        **slots: OpenSlots,
    ) -> None:
        base, *jobs = self.jobs
        self.group = GroupGraph(base, jobs, exact, compute, **slots)  # type: ignore[arg-type]
        self.group.root, self.group.blocks = own.root, own.blocks
        self.group.constants = own.constants
        self.group.facts = _facts(facts)


def _head(item: ast.stmt, *names: str) -> ast.Call:
    """The call of `with call():`."""
    if isinstance(item, ast.With) and len(item.items) == 1:
        call = item.items[0].context_expr
        if isinstance(call, ast.Call) and called(call) in names:
            return call
    raise strange(item)


@dataclass
class _GraphReader:
    """Reads the nodes of one graph.

    jobs      what `all` stands for
    mode      the number of the fake mode of most values
    prefix    of the names of its nodes in errors
    erased    nodes that tags still tell of, by their number
    """

    reader: _Reader
    jobs: tuple[str, ...]
    mode: int | None
    body: list[ast.stmt]
    prefix: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    erased: list[ast.stmt] = field(default_factory=list)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    gone: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.literals = _Literals(self.reader, self)

    def read(self) -> None:
        """Make the nodes, then give them tags, which may mention any of them."""
        made: list[tuple[fx.Node, ast.Call]] = []
        scrap = fx.Graph()
        for body, graph in ((self.body, self.graph), (self.erased, scrap)):
            for item in body:
                self.reader.at(item)
                if isinstance(item, ast.Pass):
                    continue
                node, tags = self._statement(item, graph)
                if graph is scrap:
                    self.gone.append(node)
                self.reader.places[self.prefix + node.name] = item.lineno, item.col_offset + 1
                if tags is not None:
                    made.append((node, tags))
        for node, tags in made:
            self.reader.at(tags)
            self._tag(node, tags)
        hold_names(self.graph)

    def settle(self, blocks: dict[str, Block]) -> None:
        """Take values for those of their operators, of an edited text after running these."""
        if not self.nodes:
            return
        if not self.reader.is_edited:
            remember_runs(self.graph)
            return
        at = self.reader.at_node
        verify_values(self.graph, blocks, lambda node: at(self.prefix + node.name))

    def _statement(self, item: ast.stmt, graph: fx.Graph) -> tuple[fx.Node, ast.Call | None]:
        """`name: value = call @ tags`; an operator without a value is run for one."""
        note = item.annotation if isinstance(item, ast.AnnAssign) else None
        named = item.target if isinstance(item, ast.AnnAssign) else None
        if isinstance(item, ast.Assign) and len(item.targets) == 1:
            named = item.targets[0]  # type: ignore[assignment]
        call: ast.expr | None = getattr(item, "value", None)
        tags: ast.expr | None = None
        if isinstance(call, ast.BinOp) and isinstance(call.op, ast.MatMult):
            tags, call = call.right, call.left
        if not isinstance(named, ast.Name) or not isinstance(call, ast.Call):
            raise strange(item)
        if not isinstance(tags, (ast.Call, type(None))):
            raise strange(item)
        absent = isinstance(note, ast.Name) and note.id == "absent"
        value = ABSENT if note is None or absent else self.value(note)
        node = self._node(graph, named.id, call, value)
        if value is not ABSENT:
            node.meta["val"] = value
        elif note is None and node.op == "call_function" and graph is self.graph:
            give_value(node, self.reader.values.modes[self.mode or 0])
        return node, tags

    def value(self, note: ast.expr) -> Any:
        """Value behind a name's colon."""
        if isinstance(note, ast.Tuple):
            return tuple(map(self.value, note.elts))
        if isinstance(note, ast.List):
            return list(map(self.value, note.elts))
        if isinstance(note, ast.Subscript) or (
            isinstance(note, ast.Call) and called(note) in ("tensor", "size")
        ):
            return self.reader.values.read(note, self.mode)
        return self.literals.read(note)

    def _node(self, graph: fx.Graph, name: str, call: ast.Call, value: Any) -> fx.Node:
        kind = called(call)
        args, kwargs = self.literals.arguments(call)
        ref: TensorRef | None = None
        if kind == "input":
            op, target = "placeholder", args.pop(0) if args else name
        elif kind == "returns":
            op, target = "output", "output"
        elif kind == "layer":
            op, target = "call_module", args.pop(0)
        elif kind == "gone":
            op, target = args
            args = []
        elif kind in ("attribute", "base", "job", "constant", "buffer"):
            op, target = "get_attr", args.pop(0)
            ref = None if kind == "attribute" else _ref(kind, target, value, **kwargs)
            kwargs = {}
        else:
            op, target = "call_function", args.pop(0) if kind == "call" else kind
        node = self._made(graph, op, target, tuple(args), kwargs)
        if graph is self.graph and name in self.nodes:
            raise GraphFileNotReadable(
                "two nodes of the graph file have one name", found=name, help="rename one"
            )
        node.name = name
        if graph is self.graph:
            self.nodes[name] = node
        if ref is not None:
            node.meta["tensor"] = ref
        return node

    def _made(
        self, graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        if not fits(op, target):
            raise GraphFileNotReadable(
                "the graph file holds a node that no graph of ours has",
                expected=f"one of {', '.join(OPS)}, of a plain name",
                found=f"{op} {target}",
                help="the file is damaged, or something else wrote it",
            )
        if op == "call_function":
            target = self.reader.operator(target)
        return graph.create_node(op, target, args, kwargs)

    def _tag(self, node: fx.Node, call: ast.Call) -> None:
        role, meta = called(call), node.meta
        args, kwargs = self.literals.arguments(call)
        meta.update(zip(("path", "source"), args, strict=False))
        if role in ROLES:
            meta["role"] = role
            usual = {"shared": self.jobs, "backbone": (), "table": (), "loss": ()}
            if role in usual:
                meta["jobs"] = usual[role]
        elif role != "tags":
            raise strange(call)
        number = kwargs.pop("of", None)
        if number is not None:
            meta["origin"] = self.reader.origins[number]
        meta.update(kwargs)
        if type(meta.get("source")) is int:
            meta["source"] = self.reader.sources[meta["source"]]
        if meta.get("jobs", None) is ABSENT:
            del meta["jobs"]
        if not all(isinstance(meta.get(tag), (str, type(None))) for tag in ("path", "source")):
            raise strange(call)


def _ref(owner: Any, target: str, value: Any, **facts: Any) -> TensorRef:
    """The tensor that a node reads; what is not said of it is as the node's value."""
    if value is not ABSENT:
        facts = {"shape": tuple(value.shape), "dtype": value.dtype, **facts}
    return TensorRef(owner, **{"name": target, **facts})


class _Literals:
    """Reads arguments and tags; graph None where no node may be among them."""

    def __init__(self, reader: _Reader, graph: _GraphReader | None) -> None:
        self.reader, self.graph = reader, graph

    def arguments(self, call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """Arguments and keyword arguments of a call."""
        kwargs: dict[str, Any] = {}
        for word in call.keywords:
            if word.arg is None:
                kwargs.update(self.read(word.value))
            else:
                kwargs[word.arg] = self.read(word.value)
        return [self.read(arg) for arg in call.args], kwargs

    def read(self, item: ast.expr) -> Any:
        """The value of an expression; raises GraphFileNotReadable for what no text says."""
        if isinstance(item, ast.Constant):
            if isinstance(item.value, (bytes, complex)):
                raise strange(item)
            return item.value
        if isinstance(item, ast.Name):
            return self._named(item)
        if isinstance(item, ast.Tuple):
            return tuple(map(self.read, item.elts))
        if isinstance(item, ast.List):
            return list(map(self.read, item.elts))
        return self._call(item) if isinstance(item, ast.Call) else self._other(item)

    def _named(self, item: ast.Name) -> Any:
        if item.id in ("inf", "nan"):
            return float(item.id)
        if item.id == "absent":
            return ABSENT
        if self.graph is None:
            raise strange(item)
        if item.id == "all":
            return self.graph.jobs
        if item.id not in self.graph.nodes:
            raise GraphFileNotReadable(
                "a node reads another that does not stand before it",
                found=item.id,
                help="check the name, or move the node",
            )
        return self.graph.nodes[item.id]

    def _other(self, item: ast.expr) -> Any:
        if isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.USub):
            return -self.read(item.operand)
        if isinstance(item, ast.Dict) and None not in item.keys:
            pairs = zip(item.keys, item.values, strict=True)
            return {self.read(key): self.read(value) for key, value in pairs if key is not None}
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name):
            constant = getattr(torch, item.attr, None) if item.value.id == "torch" else None
            if isinstance(constant, CONSTANTS):
                return constant
        if isinstance(item, ast.Subscript) and ast.unparse(item.value) == "gone":
            assert self.graph is not None
            return self.graph.gone[self.read(item.slice)]
        raise strange(item)

    def _call(self, call: ast.Call) -> Any:
        name = called(call)
        if name == "value":
            if self.graph is None:
                raise strange(call)
            return self.graph.value(call.args[0])
        args, kwargs = self.arguments(call)
        simple: dict[str, Callable[..., Any]] = {
            "slice": slice, "complex": complex, "device": torch.device
        }  # fmt: skip
        if name in simple:
            return simple[name](*args)
        if name in OBJECTS:
            return OBJECTS[name](**kwargs)
        if name == "object":
            return _class(args[0])(**kwargs)
        raise strange(call)


def _class(name: str) -> type[Any]:
    """A class that passes leave on nodes."""
    module, _, cls = name.partition(":")
    known = getattr(importlib.import_module(module), cls, None) if name.startswith(PASSES) else None
    if isinstance(known, type) and dataclasses.is_dataclass(known):
        return known
    raise GraphFileNotReadable(
        "the graph file holds a value of no known kind",
        found=name,
        help="the file is damaged, or another version wrote it",
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _damaged(f"{value!r} where a text is expected")
    return value


def _facts(facts: Any) -> dict[str, str]:
    pairs = ((fact, fact) if isinstance(fact, str) else fact for fact in facts)
    return {_text(name): _text(by) for name, by in pairs}


def _constant(dtype: torch.dtype, shape: list[int], content: str) -> torch.Tensor:
    data = bytearray(base64.b64decode(content, validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
    return flat.view(dtype).reshape(shape)


def _layers(words: Any) -> tuple[str, ...]:
    """Paths of layers, which may be a run of numbers."""
    if len(words) == 3 and type(words[1]) is int:
        head, start, stop = words
        if stop - start > MAX_LAYERS:
            raise _damaged(f"{stop - start} layers, of at most {MAX_LAYERS}")
        return tuple(f"{head}.{number}" for number in range(start, stop))
    return tuple(map(_text, words))


def _plan(layers: Any, stands: Any, whole: bool) -> LayerPlan:
    paths = _layers(layers)
    if isinstance(stands, list):
        stands = {path: paths[place] for path, place in zip(paths, stands, strict=True)}
    return LayerPlan(paths, stands, whole)


def _sites(words: list[Any]) -> Iterator[AdapterSite]:
    """A job's sites in a run of layers, or outside of layers."""
    layers: tuple[str, ...] = ("",)
    if words and isinstance(words[0], str):
        layers, words = _layers(words[:3]), words[3:]
    for layer in layers:
        for tails, *numbers in words:
            for tail in tails:
                path = ".".join(filter(None, (layer, tail)))
                yield AdapterSite(path, *numbers)


# Verify graphs of a text that was edited: nothing in it is taken on trust.


def verify_values(
    graph: fx.Graph, blocks: dict[str, Block], at: Callable[[fx.Node], object]
) -> None:
    """Run all operators on the values that stand in the text; theirs must be what stands there.

    blocks    whose layers the graph calls
    at        is called with the node that is looked at
    raises    GraphFileNotReadable
    """
    given = [node for node in graph.nodes if node.op in RUN_OPS and "val" in node.meta]
    stated = {node: type_text(node.meta["val"]) for node in given}
    try:
        propagate(graph, blocks, at)
    except GraphInvalid as error:
        raise GraphFileNotReadable(
            f"in the graph file {error.what}",
            help="correct the operator, or what it is given",
            **error.facts,
        ) from error
    for node, said in stated.items():
        if said != (found := type_text(node.meta["val"])):
            at(node)
            raise GraphFileNotReadable(
                "the graph file says another type of a value than its operator gives",
                node=node.name,
                expected=found,
                found=said,
                help="correct the line, or leave the type out: NAME = OPERATOR(...)",
            )


def verify_tags(graphs: JobGraph | GroupGraph, at: Callable[[str], object]) -> None:
    """Check tags, and that all sites of jobs have their adapters.

    at        is called with the name of the node that is looked at: "q_proj", "block.q_proj"
    raises    GraphFileNotReadable
    """
    try:
        check_tags(graphs)
    except TagsBroken as error:
        at(str(error.facts.get("node")))
        raise GraphFileNotReadable(
            "in the graph file a node's tags do not hold",
            help="correct what stands behind @; docs/graph-files.md says what tags there are",
            **error.facts,
        ) from error
    try:
        check_tensors(graphs)
    except GraphInvalid as error:
        at(str(error.facts.get("node")))
        raise GraphFileNotReadable(f"in the graph file {error.what}", **error.facts) from error
    every = (graph for owner in owners(graphs) for graph in owner.graphs())
    if not any("site" in node.meta for graph in every for node in graph.nodes):
        return
    whole = adapted(graphs)
    for job in graphs.jobs if isinstance(graphs, GroupGraph) else [graphs]:
        lost = [path for path in job.sites if (job.name, path) not in whole]
        if lost:
            raise GraphFileNotReadable(
                "the graph file lacks adapters of a job",
                job=job.name,
                expected=f"nodes of an adapter at {lost[0]} that reach what the graph returns",
                help="write the nodes, or take the site out of the job's lines",
            )
