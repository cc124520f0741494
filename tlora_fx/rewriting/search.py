"""The state of a search for a pattern: captures, conditions that held, the nearest failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

if TYPE_CHECKING:
    from tlora_fx.rewriting.patterns import Pattern


class Place(NamedTuple):
    """Where a value stands: an argument of a call that a pattern describes."""

    call: Pattern
    argument: str


class Condition(NamedTuple):
    """One condition, on one value. Told only when somebody asks: most are never read."""

    pattern: Pattern
    value: Any
    place: Place | None

    def holds(self) -> str:
        """The condition as a sentence."""
        return f"{subject(self.pattern, self.place)} {self.pattern.is_what()}"

    def fails(self) -> str:
        """What is there instead, as a sentence."""
        return self.pattern.is_not(subject(self.pattern, self.place), self.value)


class State(NamedTuple):
    """How far a search came: never changed, so that the search can go back.

    reached   conditions that held
    last      the last of them, behind it those before
    nodes     the calls and stored tensors that the pattern describes, the last first
    """

    captures: Mapping[str, Any]
    reached: int = 0
    last: tuple[tuple[Pattern, Any, Place | None], Any] | None = None
    nodes: tuple[fx.Node, Any] | None = None

    def through(self, node: fx.Node) -> State:
        """The same, with one more node that the pattern describes."""
        captures, reached, last, nodes = self
        return State(captures, reached, last, (node, nodes))

    def conditions(self) -> tuple[Condition, ...]:
        """Those that held, in order."""
        return tuple(Condition(*found) for found in _linked(self.last))[::-1]

    def described(self) -> tuple[fx.Node, ...]:
        """The nodes that the pattern describes, in order, each once."""
        return tuple(dict.fromkeys(list(_linked(self.nodes))[::-1]))


@dataclass(slots=True)
class Search:
    """The failure that came after the most conditions; of equals the first."""

    failed: Condition | None = None
    state: State = field(default_factory=lambda: State({}, -1))

    def fail(self, state: State, pattern: Pattern, value: Any, place: Place | None) -> None:
        """A condition did not hold."""
        if state.reached > self.state.reached:
            self.failed, self.state = Condition(pattern, value, place), state


def subject(pattern: Pattern, place: Place | None) -> str:
    """What a sentence calls a value."""
    if pattern.name:
        return f"its {pattern.name}"
    if place is None:
        return "it"
    owner = f"its {place.call.name}" if place.call.name else "it"
    return f"the {place.argument} of {owner}"


def _linked(last: tuple[Any, Any] | None) -> Iterator[Any]:
    while last is not None:
        found, last = last
        yield found
