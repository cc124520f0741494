"""Graphs as text: a node a line, in Python's syntax, which `parser` reads back as it was.

The grammar stands in docs/graph-files.md.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from keyword import iskeyword
from operator import itemgetter
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tlora_fx.errors import GraphNotStorable
from tlora_fx.graph_file.operators import OPERATORS, OPS, fits, target_text
from tlora_fx.graph_file.values import ValuePrinter
from tlora_fx.graph_file.words import (
    ABSENT,
    CONSTANTS,
    FORMAT,
    OBJECTS,
    PASSES,
    ROLES,
    keyword,
    keywords,
    quoted,
    text_digest,
)
from tlora_fx.host.version import __version__
from tlora_fx.ir.graph import AdapterSite, Block, GroupGraph, JobGraph, LayerPlan, Origin, TensorRef
from tlora_fx.ir.shapes import RUN
from tlora_fx.ir.verifier import fingerprint

VALUE = "val"
# Tags that have a place of their own on a node's line.
PLACED = (VALUE, "path", "source", "tensor", "role", "jobs", "origin", RUN)
_IN_LAYER = re.compile(r"(?P<head>.+?)\.(?P<number>0|[1-9][0-9]*)(\.(?P<tail>.*))?")
# What is written while a job's graphs are.
_Lines = list[str]


class Printer:
    """Writes graphs; what many lines name is gathered for tables at the end of the text.

    left_out    tags that cannot be kept: "job 'a': add_1: hint (my_package.Hint)"
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self.jobs: _Lines = []
        self.graphs: _Lines = []
        self.plans: dict[str, int] = {}
        self.sizes = ValuePrinter()
        self.sources: dict[str, int] = {}
        self.origins = _Origins()
        self._structures: dict[tuple[int, ...], int] = {}
        self._names: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._sites: dict[tuple[AdapterSite, ...], str] = {}

    def text(self, graphs: JobGraph | GroupGraph, tables: bool = True) -> str:
        """The whole text, or without its tables; raises GraphNotStorable, naming the node."""
        if not isinstance(graphs, (JobGraph, GroupGraph)):
            raise GraphNotStorable(
                "a graph file holds the graphs of a job or of a group",
                expected="a JobGraph or a GroupGraph",
                found=type(graphs).__name__,
                help="of a compiled model, give its `group`",
            )
        if isinstance(graphs, GroupGraph):
            self._names[_key(graphs)] = tuple(graphs.job_names)
            for job in (graphs.base, *graphs.jobs):
                self._job(job)
            self._group(graphs)
        else:
            self._job(graphs)
        if not tables:
            return "\n".join([*self.jobs, *self.graphs]) + "\n"
        known = fingerprint(graphs)
        first = f'graphs({FORMAT}, tlora_fx="{__version__}", torch="{torch.__version__}")'
        tail = [
            *(f"left_out({quoted(tag)})" for tag in self.left_out),
            *(f"plan({number}, {plan})" for plan, number in self.plans.items()),
            *self.sizes.lines(),
            *(f"source({number}, {quoted(line)})" for line, number in self.sources.items()),
            *self.origins.lines(),
        ]
        rest = "\n".join([*self.jobs, *self.graphs, *tail]) + "\n"
        prints = f'fingerprint("{known.code}", "{known.tags}", text="{text_digest(rest)}")'
        return f"{first}\n{prints}\n{rest}"

    def _job(self, job: JobGraph) -> None:
        kept = list(job.sites.values())
        same = self._sites.setdefault(tuple(kept), job.name)
        self._names.setdefault(_key(job), (job.name,))
        number = self._structure(job, f"job '{job.name}'" if job.name else "base")
        facts = {
            "form": quoted(job.form),
            "plan": None if job.plan is None else self._plan(job.plan),
            "facts": _facts(job.facts) if job.facts else None,
            "repeated": repr(sorted(job.repeated)) if job.repeated else None,
            "sites": quoted(same) if kept and same != job.name else None,
        }
        self.jobs.append(f"job({quoted(job.name)}, {number}{keywords(facts)})")
        if same == job.name:
            self.jobs.extend(_site_lines(kept))
        self.jobs.extend(_notes(job.notes))

    def _group(self, group: GroupGraph) -> None:
        number = self._structure(group, "group")
        facts = {
            "exact": repr(group.exact),
            "compute": quoted(group.compute),
            "open": None if group.open is None else Literals(None, None).show(group.open),
            "facts": _facts(group.facts) if group.facts else None,
        }
        self.jobs.append(f"group({number}{keywords(facts)})")
        self.jobs.extend(_notes(group.notes))

    def _plan(self, plan: LayerPlan) -> int:
        return self.plans.setdefault(_plan_text(plan), len(self.plans))

    def _structure(self, graphs: JobGraph | GroupGraph, subject: str) -> int:
        """The number of a structure, which is written once for all jobs that share it."""
        key = _key(graphs)
        if key in self._structures:
            return self._structures[key]
        number = self._structures[key] = len(self._structures)
        mode, jobs = self.sizes.usual(graphs), self._names[key]
        self.graphs.append(f"with graph({number}{keywords({'mode': mode})}):")
        for name, value in graphs.constants.items():
            self.graphs.append(f" constant({quoted(name)}, {_constant(value)})")
        self._block("root()", graphs.root, subject, jobs, mode)
        for block in graphs.blocks.values():
            self._block(_block_head(block), block.graph, subject, jobs, mode)
        return number

    def _block(
        self, head: str, graph: fx.Graph, subject: str, jobs: tuple[str, ...], mode: int | None
    ) -> None:
        writer = _GraphPrinter(self, graph, jobs, mode)
        lines = [writer.line(node) for node in graph.nodes]
        self.graphs.append(f" with {head}:")
        self.graphs.extend(f"  {line}" for line in lines or ["pass"])
        if writer.gone:
            self.graphs.append(" with erased():")
            self.graphs.extend(f"  {line}" for line in writer.gone)
        self.left_out.extend(f"{subject}: {tag}" for tag in writer.left_out)

    def source(self, line: object) -> str:
        """A line of model code, by its number; "" as it is."""
        return str(self.sources.setdefault(str(line), len(self.sources))) if line else '""'


def _key(graphs: JobGraph | GroupGraph) -> tuple[int, ...]:
    """The same for all who share graphs."""
    return id(graphs.root), id(graphs.blocks), id(graphs.constants)


class _GraphPrinter:
    """Writes the nodes of one graph; those that tags still tell of are `gone`."""

    def __init__(
        self, printer: Printer, graph: fx.Graph, jobs: tuple[str, ...], mode: int | None
    ) -> None:
        self.printer, self.jobs, self.mode = printer, jobs, mode
        self.nodes = set(graph.nodes)
        self.left_out: list[str] = []
        self.gone: _Lines = []
        self._gone: dict[fx.Node, int] = {}
        self.arguments = Literals(self._argument, self._value_call)
        self.literals = Literals(self._mentioned, self._value_call)

    def line(self, node: fx.Node) -> str:
        """A node: its name, value, operator with arguments, and tags."""
        try:
            call = self._call(node)
        except GraphNotStorable as error:
            error.add_note(f"in the arguments of {node.name}")
            raise
        return self._statement(node, call)

    def _statement(self, node: fx.Node, call: str) -> str:
        value = ": absent" if node.op == "call_function" else ""
        if VALUE in node.meta:
            try:
                value = f": {self._value(node.meta[VALUE])}"
            except GraphNotStorable as error:
                error.add_note(f"in the value of {node.name}")
                raise
        tags = self._tags(node)
        return f"{node.name}{value} = {call}{f' @ {tags}' if tags else ''}"

    def _call(self, node: fx.Node) -> str:
        target: Any = node.target
        if node.op != "call_function" and not fits(node.op, target):
            raise GraphNotStorable(
                "a graph holds a node that a graph file cannot keep",
                node=node.name,
                found=f"{node.op} {target}",
                expected=f"one of {', '.join(OPS)}, of a plain name",
                help="call operators, and name inputs and tensors plainly",
            )
        show = self.arguments.show
        words = [show(value) for value in node.args]
        words += [keyword(name, show(value)) for name, value in node.kwargs.items()]
        if node.op == "placeholder":
            own = [] if target == node.name and not words else [quoted(target)]
            return f"input({', '.join([*own, *words])})"
        if node.op == "output":
            return f"returns({', '.join(words)})"
        if node.op == "call_module":
            return f"layer({', '.join([quoted(target), *words])})"
        if node.op == "get_attr":
            return self._tensor(node)
        name = target_text(target, node.name).removeprefix(OPERATORS)
        if all(part.isidentifier() and not iskeyword(part) for part in name.split(".")):
            return f"{name}({', '.join(words)})"
        return f"call({', '.join([quoted(name), *words])})"

    def _tensor(self, node: fx.Node) -> str:
        ref, target = node.meta.get("tensor"), quoted(str(node.target))
        if not isinstance(ref, TensorRef):
            return f"attribute({target})"
        value = node.meta.get(VALUE)
        alike = isinstance(value, torch.Tensor) and (*ref.shape, ref.dtype) == (
            *value.shape, value.dtype,
        )  # fmt: skip
        facts = {
            "name": None if ref.name == node.target else quoted(ref.name),
            "shape": None if alike else repr(ref.shape),
            "dtype": None if alike else str(ref.dtype),
            "form": quoted(ref.form) if ref.form else None,
            "originals": self.literals.show(ref.originals) if ref.originals else None,
            "shard": None if ref.shard is None else repr(ref.shard),
        }
        return f"{ref.owner}({target}{keywords(facts)})"

    def _tags(self, node: fx.Node) -> str:
        meta = node.meta
        words = []
        if "path" in meta:
            words.append(self.literals.show(meta["path"]))
        if "source" in meta:
            source = self.printer.source(meta["source"])
            words.append(source if words else f"source={source}")
        role = meta.get("role")
        if "role" in meta and role not in ROLES:
            words.append(f"role={self.literals.show(role)}")
        words += self._jobs(meta, role)
        for tag, value in meta.items():
            if tag not in PLACED or (tag == "tensor" and not _placed(node)):
                try:
                    words.append(keyword(tag, self.literals.show(value)))
                except GraphNotStorable:
                    kind = f"{type(value).__module__}.{type(value).__qualname__}"
                    self.left_out.append(f"{node.name}: {tag} ({kind})")
        if isinstance(meta.get("origin"), Origin):
            words.append(f"of={self.printer.origins.number(meta['origin'])}")
        name = role if role in ROLES else "tags"
        return f"{name}({', '.join(words)})" if words or role in ROLES else ""

    def _jobs(self, meta: dict[str, Any], role: Any) -> Iterator[str]:
        """The jobs that a node serves, where they are others than its role says."""
        usual = {"shared": self.jobs, "backbone": (), "table": (), "loss": ()}.get(role, ABSENT)
        jobs = meta.get("jobs", ABSENT)
        if jobs is ABSENT and usual is not ABSENT:
            yield "jobs=absent"
        elif jobs is not ABSENT and jobs != usual:
            yield f"jobs={'all' if jobs == self.jobs else self.literals.show(jobs)}"

    def _value(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._value(item) for item in value)
            return (
                f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
            )
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            return self.printer.sizes.value(value, self.mode)
        return self.literals.show(value)

    def _value_call(self, value: Any) -> str:
        return f"value({self._value(value)})"

    def _argument(self, node: fx.Node) -> str:
        if node not in self.nodes:
            raise GraphNotStorable(
                "a node reads a node of another graph", found=node.name, help="lint the graph"
            )
        return node.name

    def _mentioned(self, node: fx.Node) -> str:
        """A node in a tag: one of the graph, or one that a pass erased and still tells of."""
        if node in self.nodes:
            return node.name
        if node not in self._gone:
            self._gone[node] = len(self._gone)
            place = len(self.gone)
            self.gone.append("")
            target = str(node.target)
            if node.op == "call_function":
                target = target_text(node.target, node.name)
            self.gone[place] = self._statement(node, f"gone({quoted(node.op)}, {quoted(target)})")
        return f"gone[{self._gone[node]}]"


def _placed(node: fx.Node) -> bool:
    """Whether a node's tensor stands in its call."""
    return node.op == "get_attr" and isinstance(node.meta["tensor"], TensorRef)


class Literals:
    """Writes arguments and tags.

    node     writes a node
    value    writes a fake tensor or a size
    """

    def __init__(self, node: Any, value: Any) -> None:
        self.node, self.value = node, value

    def show(self, value: Any) -> str:
        """A value as an expression; raises GraphNotStorable for what has none."""
        if value is None or value is ... or type(value) in (bool, int):
            return repr(value) if value is not ... else "..."
        if type(value) is str:
            return quoted(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else _infinite(value)
        if isinstance(value, fx.Node):
            return str(self.node(value))
        if isinstance(value, (list, tuple, dict, slice)):
            return self._container(value)
        return self._object(value)

    def _container(self, value: Any) -> str:
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.show, (value.start, value.stop, value.step)))})"
        if isinstance(value, dict):
            pairs = (f"{self.show(key)}: {self.show(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        items = ", ".join(map(self.show, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"

    def _object(self, value: Any) -> str:
        if isinstance(value, CONSTANTS):
            return str(value)
        if isinstance(value, torch.device):
            return f"device({quoted(str(value))})"
        if isinstance(value, complex):
            return f"complex({self.show(value.real)}, {self.show(value.imag)})"
        is_meta = isinstance(value, torch.Tensor) and value.is_meta
        if is_meta or isinstance(value, (FakeTensor, torch.SymInt)):
            return str(self.value(value))
        cls = type(value)
        known = OBJECTS.get(cls.__name__) is cls
        name = cls.__name__ if known else f"{cls.__module__}:{cls.__qualname__}"
        if dataclasses.is_dataclass(value) and (known or name.startswith(PASSES)):
            names = [item.name for item in dataclasses.fields(value)]
            fields = ", ".join(f"{name}={self.show(getattr(value, name))}" for name in names)
            return f"{name}({fields})" if known else f"object({quoted(name)}, {fields})"
        raise GraphNotStorable(
            "a graph holds a value that a graph file cannot keep",
            kind=f"{cls.__module__}.{cls.__qualname__}",
            found=repr(value)[:200],
            help="hold numbers, text, tuples and nodes in arguments and tags",
        )


class _Origins:
    """Where nodes come from, as tables: owners, births that several jobs have, and origins."""

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}
        self.births: dict[tuple[str, str, str], int] = {}
        self.rows: list[str] = []
        self._numbers: dict[Origin, int] = {}

    def number(self, origin: Origin) -> int:
        """The number of an origin; what it was made from comes before it."""
        stack = [origin]
        while stack:
            last = stack[-1]
            unknown = [source for source in last.sources if source not in self._numbers]
            if unknown:
                stack.extend(reversed(unknown))
                continue
            stack.pop()
            if last not in self._numbers:
                self._numbers[last] = len(self.rows)
                self.rows.append(self._row(last))
        return self._numbers[origin]

    def _row(self, origin: Origin) -> str:
        owner, _, rest = origin.key.partition("/")
        birth = (rest, origin.made_by, origin.target)
        head = [
            str(self.owners.setdefault(owner, len(self.owners))),
            str(self.births.setdefault(birth, len(self.births))),
        ]
        sources = [self._numbers[source] for source in origin.sources]
        return f"o[{', '.join([*head, *_runs(sources)])}]"

    def lines(self) -> Iterator[str]:
        """The tables."""
        yield from (f"owner({number}, {quoted(o)})" for o, number in self.owners.items())
        for birth, number in self.births.items():
            yield f"birth({number}, {', '.join(map(quoted, birth))})"
        yield from self.rows


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Numbers in short: "3", "5:9" for 5 to 8."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}:{run[-1] + 1}"


def _infinite(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _facts(facts: dict[str, str]) -> str:
    """Facts with the pass that provides each; a pass that is a fact itself is named once."""
    pairs = ((quoted(fact), quoted(by)) for fact, by in facts.items())
    return f"[{', '.join(fact if fact == by else f'({fact}, {by})' for fact, by in pairs)}]"


def _notes(notes: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f"note({quoted(by)}, {quoted(text)})" for by, text in notes)


def _constant(value: torch.Tensor) -> str:
    """A constant as its type, shape, and bytes in base64."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content = base64.b64encode(flat.numpy().tobytes()).decode()
    return f"{value.dtype}, {list(value.shape)}, {quoted(content)}"


def _layers(layers: Sequence[str]) -> str:
    """Paths of layers: "model.layers", 0, 32 for those from 0 to 31, else one after the other."""
    head = layers[0].rpartition(".")[0] if layers else ""
    first = layers[0].rpartition(".")[2] if layers else ""
    if first.isdecimal():
        start = int(first)
        if [f"{head}.{start + index}" for index in range(len(layers))] == list(layers):
            return f"{quoted(head)}, {start}, {start + len(layers)}"
    return ", ".join(map(quoted, layers))


def _block_head(block: Block) -> str:
    more = ", recompute=True" if block.recompute else ""
    more += f", budget={block.budget}" if block.budget < 1 else ""
    pairs = ", ".join(f"({quoted(text)}, {quoted(module)})" for text, module in block.joint)
    more += f", joint=[{pairs}]" if pairs else ""
    return f"block({quoted(block.name)}, {_layers(block.instances)}{more})"


def _plan_text(plan: LayerPlan) -> str:
    """A plan: its layers, and for each the place of the one that stands for it."""
    places = {layer: index for index, layer in enumerate(plan.layers)}
    stands = list(plan.representative.items())
    usual = [layer for layer, _ in stands] == list(plan.layers)
    if usual and all(first in places for _, first in stands) and len(places) == len(plan.layers):
        table = repr([places[first] for _, first in stands])
    else:
        table = f"{{{', '.join(f'{quoted(a)}: {quoted(b)}' for a, b in stands)}}}"
    return f"({_layers(plan.layers)}{',' * (len(plan.layers) == 1)}), {table}, {plan.whole}"


def _site_lines(sites: Sequence[AdapterSite]) -> Iterator[str]:
    """A job's sites: a line for a run of layers with equal ones."""
    packs = [
        (head, number, _site_table([(tail, site) for _, _, tail, site in group]))
        for (head, number), group in groupby(map(_placed_site, sites), key=itemgetter(0, 1))
    ]
    placed = ((*pack, pack[1] - place) for place, pack in enumerate(packs))
    for (head, table, _), run in groupby(placed, key=itemgetter(0, 2, 3)):
        numbers = [number for _, number, _, _ in run]
        layers = f"{quoted(head)}, {numbers[0]}, {numbers[-1] + 1}, " if head else ""
        yield f"sites({layers}{table})"


def _placed_site(site: AdapterSite) -> tuple[str, int, str, AdapterSite]:
    """A site with its layer's list, the layer's number, and its path in the layer."""
    found = _IN_LAYER.fullmatch(site.path)
    if found is None:
        return "", -1, site.path, site
    return found["head"], int(found["number"]), found["tail"] or "", site


def _numbers_shown(numbers: tuple[Any, ...]) -> int:
    """How many numbers of a site are not its defaults, rank, scaling and dropout always."""
    return 5 if numbers[4] else 4 if numbers[3] != "lora" else 3


def _site_table(entries: list[tuple[str, AdapterSite]]) -> str:
    """Sites of one layer with equal numbers together."""
    groups = groupby(entries, key=lambda entry: dataclasses.astuple(entry[1])[1:])
    show = Literals(None, None).show
    parts = []
    for numbers, group in groups:
        tails = ", ".join(quoted(tail) for tail, _ in group)
        shown = ", ".join(map(show, numbers[: _numbers_shown(numbers)]))
        parts.append(f"([{tails}], {shown})")
    return ", ".join(parts)
