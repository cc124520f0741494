"""Patterns over the nodes of a graph.

A pattern with a name captures its value under it, and messages call the value by it. A name that
stands twice must be the same value twice. Plain values stand for themselves.

`walk` yields every way in which a pattern fits. Most patterns fit in at most one way, which `step`
returns; that is several times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.ir.graph import TensorRef
from tlora_fx.rewriting.search import Place, Search, State


@dataclass(slots=True, eq=False)
class Pattern:
    """What all patterns share.

    name        what its value is captured as and called in messages, "" for neither
    branching   whether it may fit in several ways
    """

    branching: ClassVar[bool] = False

    name: str = field(default="", kw_only=True)

    def walk(
        self, value: Any, state: State, search: Search, place: Place | None
    ) -> Iterator[State]:
        """Every way in which the pattern fits a value; failures are told to the search."""
        found = self.step(value, state, search, place)
        if found is not None:
            yield found

    def step(self, value: Any, state: State, search: Search, place: Place | None) -> State | None:
        """The one way in which the pattern fits a value."""
        if not self.fits(value):
            search.fail(state, self, value, place)
            return None
        captures, count, last, nodes = state
        if not self.name:
            return State(captures, count + 1, ((self, value, place), last), nodes)
        if self.name in captures:
            return _same(self, value, state, search, place)
        named = {**captures, self.name: value}
        return State(named, count + 1, ((self, value, place), last), nodes)

    def fits(self, value: Any) -> bool:
        """Whether the pattern fits a value, captures and arguments aside."""
        raise NotImplementedError

    def is_what(self) -> str:
        """The condition, after its subject: "is a stored tensor"."""
        raise NotImplementedError

    def is_not(self, subject: str, value: Any) -> str:
        """What is there instead."""
        return f"{subject} is {told(value)}; what is wanted {self.is_what()}"

    def targets(self) -> frozenset[Any] | None:
        """The operators that its root may call, None for any node."""
        return None

    def parts(self) -> tuple[Pattern, ...]:
        """The patterns that it is made of."""
        return ()

    def shown(self) -> str:
        """Itself in one line, named parts by their name."""
        return self.name or "…"

    def __str__(self) -> str:
        """A line for itself, and one for each part that has a name and parts of its own."""
        found: dict[str, Pattern] = {}
        stack = list(self.parts())
        while stack:
            part = stack.pop(0)
            if part.name and part.parts():
                found.setdefault(part.name, part)
            stack = [*part.parts(), *stack]
        lines = [f"{name} = {part.shown()}" for name, part in found.items()]
        return "\n".join([self.shown(), *lines])


class Anything(Pattern):
    """Any value; a name that is known must be the same value."""

    __slots__ = ()

    def step(self, value: Any, state: State, search: Search, place: Place | None) -> State | None:
        """Captures; only a known name is a condition."""
        if not self.name:
            return state
        if self.name in state.captures:
            return _same(self, value, state, search, place)
        captures, count, last, nodes = state
        return State({**captures, self.name: value}, count, last, nodes)


@dataclass(slots=True, eq=False)
class Same(Pattern):
    """The value that was captured before, or given, under a name."""

    known: str = ""

    def is_what(self) -> str:
        """The condition."""
        return f"is the {self.known}"

    def is_not(self, subject: str, value: Any) -> str:
        """Another value."""
        found = value.name if isinstance(value, fx.Node) else repr(value)
        return f"{subject} is {found}, not the {self.known}"


def _same(
    pattern: Pattern, value: Any, state: State, search: Search, place: Place | None
) -> State | None:
    """Nodes are the same by identity, all else by type and content."""
    captures, count, last, nodes = state
    known, condition = captures[pattern.name], Same(pattern.name)
    equal = type(value) is type(known) and not isinstance(value, fx.Node) and value == known
    if value is known or equal:
        return State(captures, count + 1, ((condition, value, place), last), nodes)
    search.fail(state, condition, value, place)
    return None


@dataclass(slots=True, eq=False)
class Stored(Pattern):
    """A tensor that the graph reads by name.

    owner    whose it is ("base", "job", "constant", "buffer"), "" for any
    """

    owner: str = ""

    def step(self, value: Any, state: State, search: Search, place: Place | None) -> State | None:
        """A stored tensor is one of the nodes that the pattern describes."""
        found = Pattern.step(self, value, state, search, place)
        return None if found is None else found.through(value)

    def fits(self, value: Any) -> bool:
        """Whether it is a get_attr node of this owner."""
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return False
        ref = value.meta.get("tensor")
        return not self.owner or (isinstance(ref, TensorRef) and ref.owner == self.owner)

    def is_what(self) -> str:
        """The condition."""
        return f"is a stored tensor of the {self.owner}" if self.owner else "is a stored tensor"

    def is_not(self, subject: str, value: Any) -> str:
        """Computed, or another's."""
        if isinstance(value, fx.Node) and value.op == "get_attr":
            return f"{subject} is {value.target}, not one of the {self.owner}"
        return f"{subject} is computed, not stored ({told(value)})"


@dataclass(slots=True, eq=False)
class Constant(Pattern):
    """A plain Python value that stands in the graph.

    kinds    its types; bool is no int
    test     what else must hold of it, None for nothing
    """

    kinds: tuple[type, ...] = (int, float)
    test: Callable[[Any], bool] | None = None

    def fits(self, value: Any) -> bool:
        """Whether it is of a kind, and passes the test."""
        return type(value) in self.kinds and (self.test is None or self.test(value))

    def is_what(self) -> str:
        """The condition."""
        kinds = " or ".join(kind.__name__ for kind in self.kinds)
        return f"is a constant {kinds}" + (" that passes its test" if self.test else "")

    def is_not(self, subject: str, value: Any) -> str:
        """Computed, or another value."""
        if isinstance(value, fx.Node):
            return f"{subject} is computed ({told(value)})"
        return f"{subject} is {value!r}"


@dataclass(slots=True, eq=False)
class Literal(Pattern):
    """One plain value."""

    value: Any = None

    def fits(self, value: Any) -> bool:
        """Whether it is that value."""
        if value is self.value:
            return True
        return type(value) in {int, float, str, torch.dtype} and bool(value == self.value)

    def is_what(self) -> str:
        """The condition."""
        return f"is {self.value!r}"

    def is_not(self, subject: str, value: Any) -> str:
        """The value that it is."""
        return f"{subject} is {told(value)}, not {self.value!r}"

    def shown(self) -> str:
        """The value."""
        return repr(self.value)


@dataclass(slots=True, eq=False)
class Default(Literal):
    """An argument that a pattern leaves out, which then is at its default."""

    argument: str = ""

    def step(self, value: Any, state: State, search: Search, place: Place | None) -> State | None:
        """A condition only where it fails."""
        if self.fits(value):
            return state
        search.fail(state, self, value, place)
        return None

    def is_what(self) -> str:
        """The condition."""
        return f"is left out, or {self.value!r}"

    def is_not(self, subject: str, value: Any) -> str:
        """The argument is given."""
        whose = subject.partition(" of ")[2] or subject
        if self.value is None:
            return f"{whose} has a {self.argument}"
        return f"{whose} has {self.argument} = {told(value)}, not {self.value!r}"


def walk_all(
    pairs: Sequence[tuple[Pattern, Any, Place | None]],
    state: State,
    search: Search,
    at: int = 0,
) -> Iterator[State]:
    """Every way in which patterns fit values one by one."""
    while at < len(pairs):
        pattern, value, place = pairs[at]
        at += 1
        if pattern.branching:
            for found in pattern.walk(value, state, search, place):
                yield from walk_all(pairs, found, search, at)
            return
        one = pattern.step(value, state, search, place)
        if one is None:
            return
        state = one
    yield state


def inside(part: Pattern) -> str:
    """A pattern as a part of another's line."""
    return part.name if part.name and part.parts() else part.shown()


def told(value: Any) -> str:
    """A value in a sentence: what a node calls, or the value."""
    if isinstance(value, fx.Node):
        return f"the input {value.target}" if value.op == "placeholder" else str(value.target)
    return "nothing" if value is None else repr(value)
