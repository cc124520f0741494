"""The difference of two programs on a screen: what it comes to, then module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tlora_fx.inspect.diff import Change, Difference, Sums
from tlora_fx.inspect.legend import Line, wrapped
from tlora_fx.inspect.marks import Marks
from tlora_fx.inspect.program import NodeEntry
from tlora_fx.inspect.text import flop_text
from tlora_fx.inspect.wording import cut, layers_label, plural, scaled

WIDTH = 120
SIGNS = {"removed": "−", "added": "+", "changed": "~"}
# What may tell a node that stayed from what it was.
FACTS = ("target", "role", "jobs", "shape", "dtype")
# A change is told once for a graph where it is the same in so many modules.
WIDE = 3
NAMED = 3
TITLES = ("", "before", "after", "difference")


def difference_lines(found: Difference, width: int = WIDTH) -> list[Line]:
    """All of it; no line is wider."""
    counts = Counter(change.what for change in found.changes)
    told = ", ".join(f"{number} {what}" for what, number in counts.items())
    lines: list[Line] = [[(cut(f"{found.first} → {found.second}", width), "title")], []]
    lines += _sums(found.before, found.after)
    kept = f"{plural(found.kept, 'node')} kept; changes: {told or 'none'}"
    lines += [[], [(cut(kept, width), "dim")]]
    marks = Marks(found.jobs)
    for graph, changes in _grouped(found.changes, lambda change: change.graph).items():
        lines += [[], [(cut(_title(graph, changes[0].layers), width), "title")]]
        lines += _graph_lines(changes, marks, width)
    return lines


def _title(graph: str, layers: Sequence[str]) -> str:
    """A graph's name; layers go by their paths."""
    owner = graph.rpartition(", ")[0]
    return ", ".join(filter(None, (owner, layers_label(layers)))) if layers else graph


def _graph_lines(changes: Sequence[Change], marks: Marks, width: int) -> Iterator[Line]:
    """What changed in the same way in many modules once, then each module."""
    modules = {change.module for change in changes}
    if len(modules) >= WIDE and {change.what for change in changes} in ({"removed"}, {"added"}):
        nodes = [node for change in changes for node in (*change.before, *change.after)]
        yield from _side(changes[0].what, nodes, marks, width, named=False)
        return
    facts = {id(change): _fact(change) for change in changes if change.what == "changed"}
    alike = _grouped([c for c in changes if id(c) in facts], lambda c: facts[id(c)])
    wide = {fact: same for fact, same in alike.items() if len({c.module for c in same}) >= WIDE}
    if wide:
        yield [("  (in many modules)", "")]
    for fact, same in wide.items():
        yield from _changed(fact, same, width)
    rest = [change for change in changes if facts.get(id(change)) not in wide]
    for module, members in _grouped(rest, lambda change: change.module).items():
        yield [(cut(f"  {module or '(between modules)'}", width), "")]
        yield from _module_lines(members, marks, width)


def _module_lines(changes: Sequence[Change], marks: Marks, width: int) -> Iterator[Line]:
    """What is gone, what is new, and what changed in place."""
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
    found: dict[str, list[Change]] = {}
    for change in changes:
        found.setdefault(by(change), []).append(change)
    return found


def _sums(before: Sums, after: Sums) -> Iterator[Line]:
    rows = [TITLES, *_sum_rows(before, after)]
    sizes = [max(len(row[place]) for row in rows) for place in range(len(TITLES))]
    for number, row in enumerate(rows):
        cells = [f"{row[0]:<{sizes[0]}}"]
        cells += [f"{cell:>{size}}" for cell, size in zip(row[1:], sizes[1:], strict=True)]
        yield [("   ".join(cells), "" if number else "title")]


def _sum_rows(before: Sums, after: Sums) -> Iterator[tuple[str, ...]]:
    flops = [_flop(sums) for sums in (before, after)]
    yield ("FLOP/token", *flops, _flop_difference(before, after))
    one, two = before.bytes, after.bytes
    yield ("bytes", scaled(one, "B"), scaled(two, "B"), _signed(two - one, "B"))
    for name, one, two in (
        ("launches", before.launches, after.launches),
        ("operators", before.nodes, after.nodes),
    ):
        yield (name, f"{one:,}", f"{two:,}", _counted(two - one))


def _flop(sums: Sums) -> str:
    return flop_text(sums.flop_per_token, sums.flop_per_length, sums.flop_per_row)


def _flop_difference(before: Sums, after: Sums) -> str:
    if before.flop_per_token is None or after.flop_per_token is None:
        return "?"
    parts = [
        _signed(after.flop_per_token - before.flop_per_token),
        _signed(after.flop_per_length - before.flop_per_length) + "·L",
        _signed(after.flop_per_row - before.flop_per_row) + " once",
    ]
    return " ".join(part for part in parts if part[0] != "0") or "0"


def _signed(number: float, unit: str = "") -> str:
    """A difference; what is no more than rounding is none."""
    if abs(number) < 1e-3:
        return "0"
    return ("+" if number > 0 else "−") + scaled(abs(number), unit)


def _counted(number: int) -> str:
    """A difference of counts: "+12", "−3", "0"."""
    return f"{number:+,}".replace("-", "−") if number else "0"


def _side(
    what: str, nodes: Sequence[NodeEntry], marks: Marks, width: int, *, named: bool = True
) -> Iterator[Line]:
    """What is gone, or what is new, in one line: operators, whom they serve, what they cost.

    named    operators are told apart
    """
    calls = [node for node in nodes if node.kind != "tensor"]
    shown = Counter(_called(node) for node in calls)
    words = [f"{name} ×{times}" if times > 1 else name for name, times in shown.items()]
    words = words if named else [plural(len(calls), "operator")]
    tensors = len(nodes) - len(calls)
    words += [plural(tensors, "tensor")] if tensors else []
    line: Line = [(f"{word},", what) for word in words[:-1]] + [(words[-1], what)]
    line += [(word, "dim") for part in _facts(nodes, marks) for word in f"· {part}".split()]
    first, *rest = wrapped(line, 6, width)
    yield [(f"    {SIGNS[what]} ", what), *first]
    yield from rest


def _facts(nodes: Sequence[NodeEntry], marks: Marks) -> Iterator[str]:
    """Whom nodes serve, where it is not all jobs, and what they cost."""
    jobs = list(dict.fromkeys(name for node in nodes for name in node.jobs))
    if jobs and all(node.role == "adapter" for node in nodes):
        yield f"for {marks.told(jobs)}"
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
    for room in ("aten.", "tlora_fx.", "operator."):
        if node.target.startswith(room):
            return node.target.removeprefix(room).partition(".")[0]
    return node.target


def _fact(change: Change) -> str:
    """What tells a node from what it was; whom shared nodes serve follows from their role."""
    before, after = change.before[0], change.after[0]
    names = [name for name in FACTS if getattr(before, name) != getattr(after, name)]
    told = [
        f"{name} {_told(getattr(before, name))} → {_told(getattr(after, name))}"
        for name in names
        if name != "jobs" or "role" not in names
    ]
    return "; ".join(told) or "costs something else"


def _changed(fact: str, same: Sequence[Change], width: int) -> Iterator[Line]:
    """Nodes that changed in the same way."""
    names = list(dict.fromkeys(change.after[0].id for change in same))
    told = ", ".join(names) if len(names) <= NAMED else plural(len(same), "node")
    yield [(cut(f"    {SIGNS['changed']} {told}: {fact}", width), "changed")]


def _told(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value) or "none"
