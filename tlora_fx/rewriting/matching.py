"""Match patterns: what fits, with its captures, or what came nearest and why it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from tlora_fx.pipeline import RuleStatistics, watched_rules
from tlora_fx.rewriting.patterns import Condition, Pattern, PatternSearch, SearchState


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern that fits.

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
        """Value that was found instead of the pattern, as one sentence."""
        return self.failure.fails()

    def __bool__(self) -> Literal[False]:
        return False


def match(
    pattern: Pattern, node: Any, given: Mapping[str, Any] | None = None, rule: str = ""
) -> Match | Miss:
    """Match a pattern at a node.

    given     captures that are known before, such as the value that a call must read
    rule      what statistics call it, instead of the pattern
    returns   a Match, which is true, or a Miss, which is false
    """
    rules = watched_rules()
    if rules is None:
        return _match(pattern, node, given)
    counted = rules.setdefault(rule or title(pattern), RuleStatistics())
    with counted.timed():
        result = _match(pattern, node, given)
    counted.tries += 1
    if isinstance(result, Match):
        counted.matches += 1
    else:
        counted.misses[result.failed] += 1
    return result


def title(pattern: Pattern) -> str:
    """Name of a pattern in statistics."""
    return pattern.name or pattern.shown()


def _match(pattern: Pattern, node: Any, given: Mapping[str, Any] | None) -> Match | Miss:
    search, start = PatternSearch(), SearchState(dict(given or {}))
    for state in pattern.walk(node, start, search, None):
        return Match(pattern, node, state.captures, state.described(), state.conditions())
    # A pattern of somebody's own may fit nothing and tell the search of no failure.
    failed = search.failed or Condition(pattern, node, None)
    before = search.state.described()
    at = failed.value if isinstance(failed.value, fx.Node) else None
    if at is None and before:
        at = before[-1]
    return Miss(pattern, search.state.conditions(), failed, at)


def nearest_match(
    choices: Sequence[Pattern], node: Any, given: Mapping[str, Any] | None = None
) -> Match | Miss:
    """The first of several patterns that fits, or the Miss that came nearest."""
    misses = []
    for pattern in choices:
        result = match(pattern, node, given)
        if isinstance(result, Match):
            return result
        misses.append(result)
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
        result = match(pattern, node, given)
        if isinstance(result, Match):
            yield result
