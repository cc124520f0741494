"""Where nodes come from: which pass made a node, and from which nodes.

Every node carries an `Origin` in `node.meta["origin"]`. It stays the same while the node survives,
also where a pass copies the node into another graph. A pass that makes a node of others says so
with `derive`; what it does not say, `record` fills in after the pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

ORIGIN = "origin"
MADE_FROM = "made_from"
TRACE = "trace"


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The birth of a node.

    key        unique among the nodes of a graph and its blocks, such as
               "base/model.layers.0.mlp.up_proj:linear", "job a/...:linear#2"
    made_by    "trace", or the name of a pass
    target     what the node called
    sources    what it was made from
    """

    key: str
    made_by: str
    target: str
    sources: tuple[Origin, ...] = ()


def origin_of(node: fx.Node) -> Origin | None:
    """The origin of a node, None before it was recorded."""
    found: Origin | None = node.meta.get(ORIGIN)
    return found


def derive(node: fx.Node, *sources: fx.Node) -> fx.Node:
    """Say that a node was made from others; returns the node."""
    node.meta[MADE_FROM] = tuple(sources)
    return node


def ancestry(origin: Origin) -> Iterator[Origin]:
    """All origins behind one, nearest first, each once."""
    seen = {id(origin)}
    stack = list(reversed(origin.sources))
    while stack:
        found = stack.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            stack.extend(reversed(found.sources))


def record(graphs: Iterable[tuple[str, fx.Graph]], made_by: str, owner: str) -> None:
    """Give every node an origin of its own.

    graphs     name of each graph (a block's, "" for the root) and the graph
    made_by    the pass that ran, or "trace"
    owner      "base", "job NAME" or "group"
    """
    taken: set[str] = set()
    fresh: list[tuple[str, fx.Node]] = []
    for where, graph in graphs:
        for node in graph.nodes:
            origin = node.meta.get(ORIGIN)
            if origin is None or origin.key in taken or _is_new(node, origin):
                fresh.append((where, node))
            else:
                taken.add(origin.key)
    for where, node in fresh:
        sources = tuple(dict.fromkeys(_sources(node)))
        before = {item.key for source in sources for item in (source, *ancestry(source))}
        key = _key(node, owner, "" if made_by == TRACE else where, taken, before)
        taken.add(key)
        node.meta[ORIGIN] = Origin(key, made_by, str(node.target), sources)
    for _, node in fresh:
        node.meta.pop(MADE_FROM, None)


def _sources(node: fx.Node) -> Iterator[Origin]:
    """What a new node was made from; through nodes that the same pass made and dropped again."""
    if MADE_FROM not in node.meta:
        before = origin_of(node)
        yield from () if before is None else (before,)
        return
    for source in node.meta[MADE_FROM]:
        known = origin_of(source)
        if known is not None:
            yield known
        else:
            yield from _sources(source)


def _is_new(node: fx.Node, origin: Origin) -> bool:
    """Whether the pass said what it made the node from, or made it call something else."""
    return MADE_FROM in node.meta or (
        node.op == "call_function" and str(node.target) != origin.target
    )


def _key(node: fx.Node, owner: str, where: str, taken: set[str], before: set[str]) -> str:
    """A key that no node of the graphs has, nor any that this one was made from."""
    jobs: tuple[str, ...] = tuple(node.meta.get("jobs") or ())
    if owner == "group" and node.meta.get("role") == "adapter" and len(jobs) == 1:
        owner = f"job {jobs[0]}"
    target: Any = node.target
    called = str(target)
    if node.op == "call_function":
        called = str(getattr(target, "__name__", target)).partition(".")[0]
    place = ".".join(part for part in (where, str(node.meta.get("path") or "")) if part)
    plain = re.sub(r"\s+", " ", f"{owner}/{place}:{called}")
    key, number = plain, 1
    while key in taken or key in before:
        number += 1
        key = f"{plain}#{number}"
    return key
