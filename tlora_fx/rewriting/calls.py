"""The pattern of a call, whose arguments are described by patterns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import fx

from tlora_fx.errors import PatternWrong, nearest
from tlora_fx.rewriting.patterns import Anything, Default, Pattern, inside, told, walk_all
from tlora_fx.rewriting.schemas import REQUIRED, parameters_of
from tlora_fx.rewriting.search import Place, Search, State


class _Slot(NamedTuple):
    """An argument that has a condition: its place among the positional ones, and its default."""

    place: Place
    position: int
    default: Any
    pattern: Pattern


@dataclass(slots=True, eq=False)
class Call(Pattern):
    """A call of one of several operators.

    operators   the operators
    given       patterns of arguments, by position
    named       patterns of arguments, by name
    opened      arguments that are not described may be anything; else they are at their default
    commutes    the first two arguments may stand in either order
    slots       for each operator the arguments that have a condition
    """

    branching: ClassVar[bool] = True

    operators: tuple[Any, ...] = ()
    given: tuple[Pattern, ...] = ()
    named: tuple[tuple[str, Pattern], ...] = ()
    opened: bool = False
    commutes: bool = False
    slots: dict[Any, list[_Slot]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Look up the arguments of every operator.

        raises    PatternWrong for an argument that an operator does not have
        """
        self.slots.update({target: self._slots_of(target) for target in self.operators})

    def walk(
        self, value: Any, state: State, search: Search, place: Place | None
    ) -> Iterator[State]:
        """The operator, then argument by argument."""
        found = self.step(value, state, search, place)
        if found is None:
            return
        found = found.through(value)
        args, kwargs = value.args, value.kwargs
        pairs = []
        for at, position, default, pattern in self.slots[value.target]:
            if position < len(args):
                pairs.append((pattern, args[position], at))
            else:
                pairs.append((pattern, kwargs.get(at.argument, default), at))
        yield from walk_all(pairs, found, search)
        if self.commutes:
            (one, left, here), (two, right, there), *rest = pairs
            yield from walk_all([(one, right, there), (two, left, here), *rest], found, search)

    def fits(self, value: Any) -> bool:
        """Whether it calls one of the operators."""
        return (
            isinstance(value, fx.Node)
            and value.op == "call_function"
            and value.target in self.slots
        )

    def is_what(self) -> str:
        """The condition."""
        return f"is {' or '.join(map(str, self.operators))}"

    def is_not(self, subject: str, value: Any) -> str:
        """Another operator."""
        return f"{subject} is {told(value)}, not {' or '.join(map(str, self.operators))}"

    def targets(self) -> frozenset[Any] | None:
        """Its operators."""
        return frozenset(self.operators)

    def _slots_of(self, target: Any) -> list[_Slot]:
        known = parameters_of(target)
        if known is None:
            known = {str(place): REQUIRED for place in range(len(self.given))}
        wanted = {**dict(zip(known, self.given, strict=False)), **dict(self.named)}
        self._demand_known(target, wanted, known)
        found = []
        for position, (argument, default) in enumerate(known.items()):
            pattern = wanted.get(argument)
            if pattern is None and not self.opened:
                pattern = Default(default, argument)
            keeps = self.commutes and position < 2
            if pattern is not None and (keeps or type(pattern) is not Anything or pattern.name):
                found.append(_Slot(Place(self, argument), position, default, pattern))
        return found

    def _demand_known(self, target: Any, wanted: dict[str, Pattern], known: dict[str, Any]) -> None:
        unknown = [name for name in wanted if name not in known]
        if not unknown and len(self.given) <= len(known):
            return
        raise PatternWrong(
            "a pattern describes an argument that its operator does not have",
            operator=target,
            found=unknown[0] if unknown else f"{len(self.given)} arguments",
            nearest=nearest(unknown[0], known) if unknown else None,
            expected=", ".join(known),
            help="name the arguments as the operator's schema does",
        )

    def parts(self) -> tuple[Pattern, ...]:
        """The patterns of its arguments."""
        return (*self.given, *(pattern for _, pattern in self.named))

    def shown(self) -> str:
        """As a call."""
        shown = [*map(inside, self.given), *(f"{key}={inside(item)}" for key, item in self.named)]
        called = "|".join(dict.fromkeys(_short(target) for target in self.operators))
        return f"{called}({', '.join([*shown, *(['…'] if self.opened else [])])})"


def _short(target: Any) -> str:
    return str(getattr(target, "__name__", target)).partition(".")[0]
