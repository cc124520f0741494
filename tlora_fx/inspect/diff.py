"""Differences of two programs: nodes are lined up by their provenance.

A node that both have under one key is kept, or changed where it calls something else or reads
other nodes. A node that only the second has replaces those of the first that it was made from, back
to the trace; what is left over was added or removed. So a pass, two passes, two pipelines and two
job files are compared in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tlora_fx.host.version import __version__
from tlora_fx.inspect.joint_diff import JointDiff, joint_differences, joint_lines
from tlora_fx.inspect.marks import Marks
from tlora_fx.inspect.schema import SCHEMA, GraphEntry, JsonDocument, NodeEntry, Program
from tlora_fx.inspect.wording import (
    SIGNS,
    Line,
    compared,
    cut,
    flop_text,
    labelled,
    layers_label,
    number_row,
    plural,
    scaled,
    signed,
    words,
)

# What is a change of a node that keeps its key; its name and what passes noted are none.
COMPARED = (
    "target", "shape", "dtype", "role", "jobs", "flop_per_token", "flop_per_length", "bytes",
)  # fmt: skip
WIDTH = 120
# What is shown of a node that stayed and changed.
FACTS = ("target", "role", "jobs", "shape", "dtype")
# A change that is the same in so many modules of a graph is shown once.
MANY = 3
MAX_NAMES = 3
_Placed = tuple[GraphEntry, NodeEntry]


@dataclass(frozen=True, slots=True)
class Sums:
    """A whole program, every layer counted.

    nodes              calls of operators
    launches           those that compute
    flop_per_token     forward, None where a part is unknown
    flop_per_length    forward, per token and token of its sequence
    flop_per_row       forward, once a row
    bytes              of all tensors that are read, each once a layer
    """

    nodes: int
    launches: int
    flop_per_token: float | None
    flop_per_length: float
    flop_per_row: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """Change of some nodes of one module.

    what      "added", "removed", "changed" or "replaced"
    graph     where it is now, or where it was
    """

    what: str
    graph: str
    layers: list[str]
    module: str
    before: list[NodeEntry]
    after: list[NodeEntry]


@dataclass(frozen=True, slots=True)
class ProgramDiff(JsonDocument):
    """Two programs, lined up."""

    schema: int
    version: str
    first: str
    second: str
    jobs: list[str]
    before: Sums
    after: Sums
    kept: int
    changes: list[Change]
    joint: list[JointDiff] = field(default_factory=list)


def difference(first: Program, second: Program, names: tuple[str, str]) -> ProgramDiff:
    """Line two programs up; names say what they are called."""
    aligned = _Aligned(first, second)
    changes = [*aligned.replaced(), *aligned.changed, *aligned.left_over()]
    # In the order in which they run; what only the first has comes behind.
    modules = [(g.title(), _module(n)) for p in (second, first) for g, n in p.nodes()]
    order = {module: index for index, module in enumerate(dict.fromkeys(modules))}
    changes.sort(key=lambda change: order[change.graph, change.module])
    jobs = list(dict.fromkeys([*first.jobs, *second.jobs]))
    joint = joint_differences(first.joint, second.joint)
    return ProgramDiff(
        SCHEMA, __version__, *names, jobs, sums(first), sums(second), aligned.kept, changes, joint
    )


def sums(program: Program) -> Sums:
    """The totals of a program."""
    nodes = [(max(1, len(graph.layers)), node) for graph, node in program.nodes()]
    known = all(node.flop_per_token is not None for _, node in nodes)
    return Sums(
        nodes=sum(times for times, node in nodes if node.kind == "call"),
        launches=sum(times * node.launches for times, node in nodes),
        flop_per_token=sum(n * (node.flop_per_token or 0) for n, node in nodes) if known else None,
        flop_per_length=sum(times * node.flop_per_length for times, node in nodes),
        flop_per_row=sum(times * node.flop_per_row for times, node in nodes),
        bytes=sum(times * node.bytes for times, node in nodes),
    )


class _Aligned:
    def __init__(self, first: Program, second: Program) -> None:
        self.second = second
        before, after = _by_key(first), _by_key(second)
        self.before = {key: placed for key, placed in before.items() if key not in after}
        self.after = {key: placed for key, placed in after.items() if key not in before}
        both = [(before[key], after[key]) for key in before if key in after]
        self.changed = [
            _change("changed", [old], [new]) for old, new in both if not _same(old[1], new[1])
        ]
        self.kept = len(both) - len(self.changed)

    def replaced(self) -> Iterator[Change]:
        """New nodes with what they were made from; nodes that share a source come together."""
        groups: list[tuple[set[str], list[_Placed]]] = []
        for key, placed in self.after.items():
            sources = set(self._sources(key))
            if not sources:
                continue
            apart = []
            members = [placed]
            for others, nodes in groups:
                if others & sources:
                    sources |= others
                    members = nodes + members
                else:
                    apart.append((others, nodes))
            groups = [*apart, (sources, members)]
        for sources, members in groups:
            gone = [placed for key, placed in self.before.items() if key in sources]
            yield _change("replaced", gone, members)
            for key in sources:
                self.before.pop(key, None)
            for _, node in members:
                self.after.pop(node.key, None)

    def left_over(self) -> Iterator[Change]:
        """Nodes that only one of the programs has, by module."""
        for what, nodes in (("removed", self.before), ("added", self.after)):
            modules: dict[tuple[str, str], list[_Placed]] = {}
            for graph, node in nodes.values():
                key = (graph.title(), _module(node))
                modules.setdefault(key, []).append((graph, node))
            for members in modules.values():
                gone, new = (members, []) if what == "removed" else ([], members)
                yield _change(what, gone, new)

    def _sources(self, key: str) -> Iterator[str]:
        """Keys of the first program's lost nodes that a node was made from, back to the trace."""
        seen = {key}
        stack = list(self.after[key][1].made_from)
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self.before:
                yield source
            alive = self.after.get(source)
            stack += alive[1].made_from if alive else self.second.made_from(source)


def _by_key(program: Program) -> dict[str, _Placed]:
    """Nodes that call or read something; one that has no key of its own goes by its name."""
    placed: dict[str, _Placed] = {}
    for graph, node in program.nodes():
        if node.kind in ("call", "tensor", "layer"):
            key = node.key or f"{graph.owner}/{graph.name}:{node.id}"
            placed.setdefault(key, (graph, node))
    return placed


def _same(old: NodeEntry, new: NodeEntry) -> bool:
    same_target = old.target == new.target
    if old.kind == "tensor":
        # Inside a block a tensor's name begins below the layer.
        same_target = old.target.endswith(new.target) or new.target.endswith(old.target)
    return same_target and all(getattr(old, name) == getattr(new, name) for name in COMPARED)


def _change(what: str, gone: list[_Placed], new: list[_Placed]) -> Change:
    graph, node = (new or gone)[0]
    before, after = [node for _, node in gone], [node for _, node in new]
    return Change(what, graph.title(), graph.numbered_layers, _module(node), before, after)


def _module(node: NodeEntry) -> str:
    """Where a node belongs; calls of layers belong together."""
    if node.kind == "layer" and node.module.rpartition(".")[2].isdigit():
        return node.module.rpartition(".")[0]
    return node.site or node.module


def difference_lines(diff: ProgramDiff, width: int = WIDTH) -> list[Line]:
    """Lines that show the whole difference; no line is wider than `width`."""
    counts = Counter(change.what for change in diff.changes)
    counted = ", ".join(f"{number} {what}" for what, number in counts.items())
    lines: list[Line] = [[(cut(f"{diff.first} → {diff.second}", width), "title")], []]
    lines += compared(list(_sum_rows(diff.before, diff.after)))
    kept = f"{plural(diff.kept, 'node')} kept; changes: {counted or 'none'}"
    lines += [[], [(cut(kept, width), "dim")]]
    marks = Marks(diff.jobs)
    for graph, changes in _grouped(diff.changes, lambda change: change.graph).items():
        layers = changes[0].layers
        owner = graph.rpartition(", ")[0]
        title = ", ".join(filter(None, (owner, layers_label(layers)))) if layers else graph
        lines += [[], [(cut(title, width), "title")]]
        lines += _graph_lines(changes, marks, width)
    for joint in diff.joint:
        lines += [[], *joint_lines(joint, width)]
    return lines


def _graph_lines(changes: Sequence[Change], marks: Marks, width: int) -> Iterator[Line]:
    """What changed in the same way in many modules once, then each module."""
    modules = {change.module for change in changes}
    if len(modules) >= MANY and {change.what for change in changes} in (
        {"removed"},
        {"added"},
    ):
        nodes = [node for change in changes for node in (*change.before, *change.after)]
        yield from _side(changes[0].what, nodes, marks, width, named=False)
        return
    facts = {id(change): _fact(change) for change in changes if change.what == "changed"}
    alike = _grouped([c for c in changes if id(c) in facts], lambda c: facts[id(c)])
    wide = {fact: same for fact, same in alike.items() if len({c.module for c in same}) >= MANY}
    if wide:
        yield [("  (in many modules)", "")]
    for fact, same in wide.items():
        yield from _changed(fact, same, width)
    rest = [change for change in changes if facts.get(id(change)) not in wide]
    for module, members in _grouped(rest, lambda change: change.module).items():
        yield [(cut(f"  {module or '(between modules)'}", width), "")]
        yield from _module_lines(members, marks, width)


def _module_lines(changes: Sequence[Change], marks: Marks, width: int) -> Iterator[Line]:
    moved = [change for change in changes if change.what != "changed"]
    gone = [node for change in moved for node in change.before]
    new = [node for change in moved for node in change.after]
    if gone:
        yield from _side("removed", gone, marks, width)
    if new:
        yield from _side("added", new, marks, width)
    changed = [change for change in changes if change.what == "changed"]
    for fact, same in _grouped(changed, _fact).items():
        yield from _changed(fact, same, width)


def _grouped(changes: Sequence[Change], by: Callable[[Change], str]) -> dict[str, list[Change]]:
    groups: dict[str, list[Change]] = {}
    for change in changes:
        groups.setdefault(by(change), []).append(change)
    return groups


def _sum_rows(before: Sums, after: Sums) -> Iterator[tuple[str, ...]]:
    flops = [_flop(sums) for sums in (before, after)]
    yield ("FLOP/token", *flops, _flop_difference(before, after))
    read = [scaled(sums.bytes, "B") for sums in (before, after)]
    yield ("bytes", *read, signed(after.bytes - before.bytes, "B"))
    yield number_row("launches", before.launches, after.launches)
    yield number_row("operators", before.nodes, after.nodes)


def _flop(sums: Sums) -> str:
    return flop_text(sums.flop_per_token, sums.flop_per_length, sums.flop_per_row)


def _flop_difference(before: Sums, after: Sums) -> str:
    if before.flop_per_token is None or after.flop_per_token is None:
        return "?"
    parts = [
        signed(after.flop_per_token - before.flop_per_token),
        signed(after.flop_per_length - before.flop_per_length) + "·L",
        signed(after.flop_per_row - before.flop_per_row) + " once",
    ]
    return " ".join(part for part in parts if part[0] != "0") or "0"


def _side(
    what: str, nodes: Sequence[NodeEntry], marks: Marks, width: int, *, named: bool = True
) -> Iterator[Line]:
    """What is gone, or what is new, in one line: operators, whom they serve, what they cost."""
    calls = [node for node in nodes if node.kind != "tensor"]
    shown = Counter(_called(node) for node in calls)
    names = [f"{name} ×{times}" if times > 1 else name for name, times in shown.items()]
    names = names if named else [plural(len(calls), "operator")]
    tensors = len(nodes) - len(calls)
    names += [plural(tensors, "tensor")] if tensors else []
    line: Line = [(f"{name},", what) for name in names[:-1]] + [(names[-1], what)]
    line += [word for part in _facts(nodes, marks) for word in words(f"· {part}")]
    yield from labelled((f"    {SIGNS[what]} ", what), line, 6, width)


def _facts(nodes: Sequence[NodeEntry], marks: Marks) -> Iterator[str]:
    jobs = list(dict.fromkeys(name for node in nodes for name in node.jobs))
    if jobs and all(node.role == "adapter" for node in nodes):
        yield f"for {marks.names(jobs)}"
    unknown = any(node.flop_per_token is None for node in nodes)
    cost = flop_text(
        None if unknown else sum(node.flop_per_token or 0 for node in nodes),
        sum(node.flop_per_length for node in nodes),
        sum(node.flop_per_row for node in nodes),
    )
    if cost != "–":
        yield cost


def _called(node: NodeEntry) -> str:
    if node.kind == "layer":
        return "layer" if node.target.rpartition(".")[2].isdigit() else node.target
    namespace, _, name = node.target.partition(".")
    return name.partition(".")[0] if namespace in ("aten", "tlora_fx", "operator") else node.target


def _fact(change: Change) -> str:
    """What tells a node from what it was; whom shared nodes serve follows from their role."""
    before, after = change.before[0], change.after[0]
    names = [name for name in FACTS if getattr(before, name) != getattr(after, name)]
    texts = [
        f"{name} {_value(getattr(before, name))} → {_value(getattr(after, name))}"
        for name in names
        if name != "jobs" or "role" not in names
    ]
    return "; ".join(texts) or "costs something else"


def _changed(fact: str, same: Sequence[Change], width: int) -> Iterator[Line]:
    names = list(dict.fromkeys(change.after[0].id for change in same))
    nodes = ", ".join(names) if len(names) <= MAX_NAMES else plural(len(same), "node")
    yield [(cut(f"    {SIGNS['changed']} {nodes}: {fact}", width), "changed")]


def _value(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value) or "none"
