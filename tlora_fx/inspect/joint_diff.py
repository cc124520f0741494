"""Differences of joint graphs. Needs no torch.

Values have no provenance here, and every trace numbers them anew: graphs are lined up by the
longest runs of equal calls, and equal operators between two runs by their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import chain

from tlora_fx.inspect.schema import JointEntry, JointNode
from tlora_fx.inspect.wording import (
    SIGNS,
    Line,
    compared,
    cut,
    labelled,
    layers_label,
    number_row,
    plural,
    scaled,
    signed,
)

MAX_NAMES = 3
_Pair = tuple[JointNode, JointNode]


@dataclass(frozen=True, slots=True)
class JointSums:
    """Work and memory of a layer in one row.

    operators     calls, those of the backward too
    kept_bytes    kept from the forward to the backward
    again         calls of the forward that the backward makes again
    again_flop    what they cost
    """

    operators: int
    kept_bytes: int
    again: int
    again_flop: float


@dataclass(frozen=True, slots=True)
class JointChange:
    """A value that only one of two joint graphs has, or that is not the same in both.

    what      "added", "removed", "changed", or what became of it: "kept → again"
    before    where it changed, what it read has the ids of now
    """

    what: str
    before: JointNode | None
    after: JointNode | None

    @property
    def node(self) -> JointNode:
        """The value as it is now, or as it was."""
        node = self.after or self.before
        assert node is not None
        return node


@dataclass(frozen=True, slots=True)
class JointDiff:
    """Two joint graphs of a block, lined up.

    row       that both were traced for, as in JointEntry
    alone     one side has no passes over it and no budget: it is the graph as traced
    """

    block: str
    layers: list[str]
    row: str
    alone: bool
    before: JointSums
    after: JointSums
    changes: list[JointChange]


def joint_differences(first: Sequence[JointEntry], second: Sequence[JointEntry]) -> list[JointDiff]:
    """Joint graphs that differ, by their blocks; where one side has none, from what was traced."""
    old, new = ({entry.block: entry for entry in side} for side in (first, second))
    diffs = []
    for block in dict.fromkeys([*old, *new]):
        entry = new.get(block) or old[block]
        before = old[block].nodes if block in old else entry.traced
        after = new[block].nodes if block in new else entry.traced
        changes = list(_changes(before, after))
        if changes:
            alone = (block in old) != (block in new)
            counted = _sums(before), _sums(after)
            diffs.append(JointDiff(block, entry.layers, entry.row, alone, *counted, changes))
    return diffs


def _sums(nodes: Sequence[JointNode]) -> JointSums:
    calls = [node for node in nodes if node.target != "item"]
    again = [node for node in calls if node.fate == "again"]
    return JointSums(
        operators=len(calls),
        kept_bytes=sum(node.bytes for node in nodes if node.fate == "kept"),
        again=len(again),
        again_flop=sum(node.flop for node in again),
    )


def _changes(before: Sequence[JointNode], after: Sequence[JointNode]) -> Iterator[JointChange]:
    pairs, removed, added = _aligned(before, after)
    names = {old.id: new.id for old, new in pairs}
    yield from (JointChange("removed", node, None) for node in removed)
    yield from (JointChange("added", None, node) for node in added)
    for old, new in pairs:
        inputs = [names.get(name, name) for name in old.inputs]
        if (old.target, old.arguments, old.shape, inputs) != (
            new.target, new.arguments, new.shape, new.inputs,
        ):  # fmt: skip
            yield JointChange("changed", replace(old, inputs=inputs), new)
        elif old.fate != new.fate:
            yield JointChange(f"{old.fate} → {new.fate}", old, new)


def _aligned(
    before: Sequence[JointNode], after: Sequence[JointNode]
) -> tuple[list[_Pair], list[JointNode], list[JointNode]]:
    """Values that are one, those that only the first has, and those that only the second has."""
    old, new = ([(n.target, n.arguments, n.shape) for n in nodes] for nodes in (before, after))
    pairs: list[_Pair] = []
    removed: list[JointNode] = []
    added: list[JointNode] = []
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for what, low, high, start, end in matcher.get_opcodes():
        if what == "equal":
            pairs += zip(before[low:high], after[start:end], strict=True)
            continue
        rest = list(after[start:end])
        for node in before[low:high]:
            same = next((one for one in rest if one.target == node.target), None)
            if same is None:
                removed.append(node)
            else:
                pairs.append((node, same))
                rest.remove(same)
        added += rest
    return pairs, removed, added


def joint_lines(diff: JointDiff, width: int) -> list[Line]:
    """Lines that show one difference; no line is wider than `width`."""
    numbered = [layer for layer in diff.layers if layer.rpartition(".")[2].isdigit()]
    label = layers_label(numbered) if numbered else diff.block
    beside = ", one side as traced" if diff.alone else ""
    title = f"joint graph of {label}{beside}; a row of {diff.row}"
    old, new = diff.before, diff.after
    kept = [scaled(sums.kept_bytes, "B") for sums in (old, new)]
    again = [scaled(sums.again_flop, "FLOP") for sums in (old, new)]
    rows = [
        ("kept", *kept, signed(new.kept_bytes - old.kept_bytes, "B")),
        ("again", *again, signed(new.again_flop - old.again_flop, "FLOP")),
        number_row("operators again", old.again, new.again),
        number_row("operators", old.operators, new.operators),
    ]
    lines: list[Line] = [[(cut(title, width), "title")], *compared(rows)]
    whats = list(dict.fromkeys(change.what for change in diff.changes))
    return lines + list(
        chain.from_iterable(
            _lines(what, [c for c in diff.changes if c.what == what], width) for what in whats
        )
    )


def _lines(what: str, changes: Sequence[JointChange], width: int) -> Iterator[Line]:
    """Changes of one kind in one line; of what reads or calls something else a line each."""
    style = what if what in SIGNS else "changed"
    label = f"  {SIGNS[style]} "
    if what == "changed":
        for change in changes:
            yield [(cut(f"{label}{change.node.id}: {_change(change)}", width), style)]
        return
    calls = [change.node for change in changes]
    fact = "" if what in SIGNS else f"{what}: "
    shown = Counter(_short(node) for node in calls)
    names = [f"{name} ×{times}" if times > 1 else name for name, times in shown.items()]
    if len(calls) <= MAX_NAMES and what in SIGNS:
        names = [f"{node.id} ({_short(node)} {node.shape})" for node in calls]
    total = scaled(sum(node.bytes for node in calls), "B")
    words = [f"{name}," for name in names[:-1]] + names[-1:] + ["·", total]
    line: Line = [(word, style) for word in f"{fact}{plural(len(calls), 'value')}:".split()]
    yield from labelled((label, style), line + [(word, style) for word in words], 4, width)


def _change(change: JointChange) -> str:
    """What tells a value from what it was."""
    old, new = change.before, change.after
    assert old is not None
    assert new is not None
    parts = [
        f"{name} {was} → {now}"
        for name, was, now in (
            ("calls", old.target, new.target),
            ("arguments", old.arguments, new.arguments),
            ("shape", old.shape, new.shape),
        )
        if was != now
    ]
    return "; ".join(parts) or f"reads {', '.join(new.inputs)} instead of {', '.join(old.inputs)}"


def _short(node: JointNode) -> str:
    namespace, _, name = node.target.partition(".")
    return name.partition(".")[0] if namespace in ("aten", "tlora_fx") else node.target
