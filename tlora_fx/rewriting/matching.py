"""Match patterns: what fits, with its captures, or what came nearest and why it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from tlora_fx.rewriting import combined, patterns
from tlora_fx.rewriting.calls import Call
from tlora_fx.rewriting.patterns import Pattern
from tlora_fx.rewriting.search import Condition, Search, State

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern that fits.

    pattern      what fits
    node         the node at its root
    captures     values by name, those that were given too
    nodes        the calls and stored tensors that the pattern describes, the root first
    conditions   what held, in order
    """

    pattern: Pattern
    node: fx.Node
    captures: Mapping[str, Any]
    nodes: tuple[fx.Node, ...]
    conditions: tuple[Condition, ...]

    @property
    def held(self) -> tuple[str, ...]:
        """The conditions in words."""
        return tuple(condition.holds() for condition in self.conditions)

    def __bool__(self) -> Literal[True]:
        return True

    def __getitem__(self, name: str) -> Any:
        return self.captures[name]


@dataclass(frozen=True, slots=True)
class Miss:
    """A pattern that does not fit, and how near it came.

    conditions   what held, in order
    failure      the condition that did not
    node         where: the node that it is about, or the last one before it
    """

    pattern: Pattern
    conditions: tuple[Condition, ...]
    failure: Condition
    node: fx.Node | None

    @property
    def held(self) -> tuple[str, ...]:
        """The conditions that held, in words."""
        return tuple(condition.holds() for condition in self.conditions)

    @property
    def failed(self) -> str:
        """The condition that did not hold, in words."""
        return self.failure.holds()

    @property
    def why(self) -> str:
        """What is there instead, as one sentence."""
        return self.failure.fails()

    def __bool__(self) -> Literal[False]:
        return False


def match(pattern: Pattern, node: Any, given: Mapping[str, Any] | None = None) -> Match | Miss:
    """Match a pattern at a node.

    given     captures that are known before, such as the value that a call must read
    returns   a Match, which is true, or a Miss, which is false
    """
    search, start = Search(), State(dict(given or {}))
    for state in pattern.walk(node, start, search, None):
        return _found(pattern, node, state)
    return _missed(pattern, search)


def nearest_match(
    choices: Sequence[Pattern], node: Any, given: Mapping[str, Any] | None = None
) -> Match | Miss:
    """The first of several patterns that fits, or the Miss that came nearest."""
    misses = []
    for pattern in choices:
        found = match(pattern, node, given)
        if isinstance(found, Match):
            return found
        misses.append(found)
    return max(misses, key=lambda miss: len(miss.conditions))


def find(
    graph: fx.Graph, pattern: Pattern, given: Mapping[str, Any] | None = None
) -> Iterator[Match]:
    """All matches in a graph, in its order; the graph may be rewritten while they are found.

    A node that an earlier match's rewrite has erased, or one that has no readers, is passed over.
    """
    targets = pattern.targets()
    for node in list(graph.nodes):
        if targets is not None and (node.op != "call_function" or node.target not in targets):
            continue
        if node._erased or not node.users:
            continue
        found = match(pattern, node, given)
        if isinstance(found, Match):
            yield found


def call(
    operators: Any,
    *given: Any,
    name: str = "",
    commutes: bool = False,
    **named: Any,
) -> Pattern:
    """A call of an operator, or of one of a tuple of them.

    given, named   patterns or plain values, by the schema's positions and names; `...` as the
                   last one leaves the others open, without it they are at their default
    commutes       the first two arguments may stand in either order
    raises         PatternWrong for an argument that an operator does not have
    """
    wanted = tuple(operators) if isinstance(operators, tuple) else (operators,)
    opened = bool(given) and given[-1] is ...
    return Call(
        wanted,
        tuple(_pattern(item) for item in given[: len(given) - opened]),
        tuple((key, _pattern(item)) for key, item in named.items()),
        opened,
        commutes,
        name=name,
    )


def add(one: Any, two: Any, name: str = "") -> Pattern:
    """A sum in either order, unscaled."""
    return call(aten.add.Tensor, one, two, name=name, commutes=True)


def mul(one: Any, two: Any, name: str = "") -> Pattern:
    """A product in either order, element by element."""
    return call(aten.mul.Tensor, one, two, name=name, commutes=True)


def anything(name: str = "") -> Pattern:
    """Any value; a name that stands twice must be the same value."""
    return patterns.Anything(name=name)


def stored(name: str = "", owner: str = "") -> Pattern:
    """A tensor that the graph reads by name; of an owner ("base", "job", …) where one is given."""
    return patterns.Stored(owner, name=name)


def constant(name: str = "", *kinds: type, test: Callable[[Any], bool] | None = None) -> Pattern:
    """A plain value in the graph: a number, where no types are given."""
    return patterns.Constant(kinds or (int, float), test, name=name)


def either(*choices: Any) -> Pattern:
    """One of several patterns or values; the first that fits counts."""
    return combined.Either(tuple(_pattern(choice) for choice in choices))


def uncast(inner: Any) -> Pattern:
    """What stands behind any number of casts."""
    return combined.Cast(_pattern(inner))


def where(says: str, test: Callable[[Mapping[str, Any]], bool], inner: Any) -> Pattern:
    """A pattern of which something more holds.

    says    the condition as a sentence: "its rank is 8 or more"
    test    whether it holds, of the captures so far
    """
    return combined.Where(_pattern(inner), says, test)


def _pattern(item: Any) -> Pattern:
    if isinstance(item, Pattern):
        return item
    if isinstance(item, (list, tuple)):
        return combined.Sequenced(tuple(_pattern(inner) for inner in item))
    return patterns.Literal(item)


def _found(pattern: Pattern, node: fx.Node, state: State) -> Match:
    nodes, conditions = state.described(), state.conditions()
    return Match(pattern, node, state.captures, nodes, conditions)


def _missed(pattern: Pattern, search: Search) -> Miss:
    failed = search.failed
    assert failed is not None
    before = search.state.described()
    at = failed.value if isinstance(failed.value, fx.Node) else None
    if at is None and before:
        at = before[-1]
    return Miss(pattern, search.state.conditions(), failed, at)
