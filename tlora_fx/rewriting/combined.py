"""Patterns made of others: lists, choices, what stands behind casts, and further conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.ir.graph import is_call
from tlora_fx.rewriting.patterns import Anything, Pattern, inside, walk_all
from tlora_fx.rewriting.search import Place, Search, State

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)
Captures = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Sequenced(Pattern):
    """A list of patterns, for operators that take lists."""

    branching: ClassVar[bool] = True

    items: tuple[Pattern, ...] = ()

    def walk(
        self, value: Any, state: State, search: Search, place: Place | None
    ) -> Iterator[State]:
        """As many values, each by its own pattern."""
        if not isinstance(value, (list, tuple)) or len(value) != len(self.items):
            search.fail(state, self, value, place)
            return
        pairs = [(item, part, place) for item, part in zip(self.items, value, strict=True)]
        yield from walk_all(pairs, state, search)

    def is_what(self) -> str:
        """The condition."""
        return f"is a list of {len(self.items)}"

    def parts(self) -> tuple[Pattern, ...]:
        """Its items."""
        return self.items

    def shown(self) -> str:
        """As a list."""
        return f"[{', '.join(map(inside, self.items))}]"


@dataclass(slots=True, eq=False)
class Cast(Pattern):
    """What stands behind any number of casts."""

    branching: ClassVar[bool] = True

    inner: Pattern = field(default_factory=Anything)

    def walk(
        self, value: Any, state: State, search: Search, place: Place | None
    ) -> Iterator[State]:
        """See through to what is cast."""
        while isinstance(value, fx.Node) and is_call(value, *CASTS):
            state = state.through(value)
            value = value.args[0]
        return self.inner.walk(value, state, search, place)

    def parts(self) -> tuple[Pattern, ...]:
        """What is behind the casts."""
        return (self.inner,)

    def shown(self) -> str:
        """With the sign of casts."""
        return f"cast*({inside(self.inner)})"


@dataclass(slots=True, eq=False)
class Either(Pattern):
    """One of several patterns; where none fits, the one that came nearest is told."""

    branching: ClassVar[bool] = True

    choices: tuple[Pattern, ...] = ()

    def walk(
        self, value: Any, state: State, search: Search, place: Place | None
    ) -> Iterator[State]:
        """Each in turn."""
        for choice in self.choices:
            yield from choice.walk(value, state, search, place)

    def targets(self) -> frozenset[Any] | None:
        """Those of any choice."""
        found = [choice.targets() for choice in self.choices]
        known = [targets for targets in found if targets is not None]
        return frozenset().union(*known) if len(known) == len(found) else None

    def parts(self) -> tuple[Pattern, ...]:
        """Its choices."""
        return self.choices

    def shown(self) -> str:
        """All choices."""
        return f"({' | '.join(map(inside, self.choices))})"


@dataclass(slots=True, eq=False)
class Where(Pattern):
    """A pattern of which something more must hold.

    says    the condition as a sentence
    test    whether it holds, of what is captured by then
    """

    branching: ClassVar[bool] = True

    inner: Pattern = field(default_factory=Anything)
    says: str = ""
    test: Callable[[Captures], bool] = bool

    def walk(
        self, value: Any, state: State, search: Search, place: Place | None
    ) -> Iterator[State]:
        """The pattern's ways for which the condition holds."""
        for found in self.inner.walk(value, state, search, place):
            captures, count, last, nodes = found
            if self.test(captures):
                yield State(captures, count + 1, ((self, value, None), last), nodes)
            else:
                search.fail(found, self, value, None)

    def is_what(self) -> str:
        """The condition."""
        return f"is one where {self.says}"

    def is_not(self, subject: str, value: Any) -> str:
        """The condition fails."""
        return f"it does not hold that {self.says}"

    def targets(self) -> frozenset[Any] | None:
        """Those of the pattern."""
        return self.inner.targets()

    def parts(self) -> tuple[Pattern, ...]:
        """What it adds a condition to."""
        return (self.inner,)

    def shown(self) -> str:
        """With its condition."""
        return f"{inside(self.inner)} where {self.says}"
