"""Patterns over the nodes of a graph.

A pattern with a name captures its value under it, and messages call the value by it. A name that
stands twice must be the same value twice. Plain values stand for themselves.

`walk` yields every way in which a pattern fits. Most patterns fit in at most one way, which `step`
returns; that is several times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import fx

from tlora_fx.errors import PatternWrong, nearest
from tlora_fx.ir.graph import REQUIRED, TensorRef, is_call, parameters_of, shape_of
from tlora_fx.ir.shapes import shape_text

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)
Captures = Mapping[str, Any]


class ArgumentPosition(NamedTuple):
    """Position of a value: an argument of a call that a pattern describes."""

    call: Pattern
    argument: str


Position: TypeAlias = ArgumentPosition | None


class Condition(NamedTuple):
    """One condition, on one value. Told only when somebody asks: most are never read."""

    pattern: Pattern
    value: Any
    position: Position

    def holds(self) -> str:
        """The condition as a sentence."""
        return f"{subject(self.pattern, self.position)} {self.pattern.is_what()}"

    def fails(self) -> str:
        """Value that was found instead of the pattern, as a sentence."""
        return self.pattern.is_not(subject(self.pattern, self.position), self.value)


class SearchState(NamedTuple):
    """State of a search: never changed, so that the search can go back.

    last      the last of them, behind it those before
    nodes     the calls and stored tensors that the pattern describes, the last first
    """

    captures: Mapping[str, Any]
    reached: int = 0
    last: tuple[tuple[Pattern, Any, Position], Any] | None = None
    nodes: tuple[fx.Node, Any] | None = None

    def through(self, node: fx.Node) -> SearchState:
        """The same, with one more node that the pattern describes."""
        captures, reached, last, nodes = self
        return SearchState(captures, reached, last, (node, nodes))

    def conditions(self) -> tuple[Condition, ...]:
        """Conditions that held, in order."""
        return tuple(Condition(*condition) for condition in _linked(self.last))[::-1]

    def described(self) -> tuple[fx.Node, ...]:
        """The nodes that the pattern describes, in order, each once."""
        return tuple(dict.fromkeys(list(_linked(self.nodes))[::-1]))


@dataclass(slots=True)
class PatternSearch:
    """The failure that came after the most conditions; of equals the first."""

    failed: Condition | None = None
    state: SearchState = field(default_factory=lambda: SearchState({}, -1))

    def fail(self, state: SearchState, pattern: Pattern, value: Any, position: Position) -> None:
        """A condition did not hold."""
        if state.reached > self.state.reached:
            self.failed, self.state = Condition(pattern, value, position), state


def subject(pattern: Pattern, position: Position) -> str:
    """Name of a value in sentences."""
    if pattern.name:
        return f"its {pattern.name}"
    if position is None:
        return "it"
    owner = f"its {position.call.name}" if position.call.name else "it"
    return f"the {position.argument} of {owner}"


def _linked(last: tuple[Any, Any] | None) -> Iterator[Any]:
    while last is not None:
        item, last = last
        yield item


@dataclass(slots=True, eq=False)
class Pattern:
    """Base of all patterns.

    name        what its value is captured as and called in messages, "" for neither
    """

    branching: ClassVar[bool] = False

    name: str = field(default="", kw_only=True)

    def walk(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> Iterator[SearchState]:
        """Every way in which the pattern fits a value; failures are told to the search."""
        fitted = self.step(value, state, search, position)
        if fitted is not None:
            yield fitted

    def step(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> SearchState | None:
        """The one way in which the pattern fits a value."""
        if not self.fits(value):
            search.fail(state, self, value, position)
            return None
        captures, count, last, nodes = state
        if not self.name:
            return SearchState(captures, count + 1, ((self, value, position), last), nodes)
        if self.name in captures:
            return _same(self, value, state, search, position)
        named = {**captures, self.name: value}
        return SearchState(named, count + 1, ((self, value, position), last), nodes)

    def fits(self, value: Any) -> bool:
        """Whether the pattern fits a value, captures and arguments aside."""
        raise NotImplementedError

    def is_what(self) -> str:
        """The condition, after its subject: "is a stored tensor"."""
        raise NotImplementedError

    def is_not(self, subject: str, value: Any) -> str:
        """Sentence that says which value was found in place of the wanted one."""
        return f"{subject} is {describe(value)}; what is wanted {self.is_what()}"

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
        named: dict[str, Pattern] = {}
        stack = list(self.parts())
        while stack:
            part = stack.pop(0)
            if part.name and part.parts():
                named.setdefault(part.name, part)
            stack = [*part.parts(), *stack]
        lines = [f"{name} = {part.shown()}" for name, part in named.items()]
        return "\n".join([self.shown(), *lines])


class Anything(Pattern):
    """Any value; a name that is known must be the same value."""

    __slots__ = ()

    def step(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> SearchState | None:
        """Captures; only a known name is a condition."""
        if not self.name:
            return state
        if self.name in state.captures:
            return _same(self, value, state, search, position)
        captures, count, last, nodes = state
        return SearchState({**captures, self.name: value}, count, last, nodes)


@dataclass(slots=True, eq=False)
class Same(Pattern):
    """The value that was captured before, or given, under a name."""

    known: str = ""

    def is_what(self) -> str:
        return f"is the {self.known}"

    def is_not(self, subject: str, value: Any) -> str:
        actual = value.name if isinstance(value, fx.Node) else repr(value)
        return f"{subject} is {actual}, not the {self.known}"


def _same(
    pattern: Pattern, value: Any, state: SearchState, search: PatternSearch, position: Position
) -> SearchState | None:
    """Nodes are the same by identity, all else by type and content."""
    captures, count, last, nodes = state
    known, condition = captures[pattern.name], Same(pattern.name)
    equal = type(value) is type(known) and not isinstance(value, fx.Node) and value == known
    if value is known or equal:
        return SearchState(captures, count + 1, ((condition, value, position), last), nodes)
    search.fail(state, condition, value, position)
    return None


@dataclass(slots=True, eq=False)
class Stored(Pattern):
    """A tensor that the graph reads by name.

    owner    whose it is ("base", "job", "constant", "buffer"), "" for any
    """

    owner: str = ""

    def step(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> SearchState | None:
        fitted = Pattern.step(self, value, state, search, position)
        return None if fitted is None else fitted.through(value)

    def fits(self, value: Any) -> bool:
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return False
        ref = value.meta.get("tensor")
        return not self.owner or (isinstance(ref, TensorRef) and ref.owner == self.owner)

    def is_what(self) -> str:
        return f"is a stored tensor of the {self.owner}" if self.owner else "is a stored tensor"

    def is_not(self, subject: str, value: Any) -> str:
        if isinstance(value, fx.Node) and value.op == "get_attr":
            return f"{subject} is {value.target}, not one of the {self.owner}"
        return f"{subject} is computed, not stored ({describe(value)})"


@dataclass(slots=True, eq=False)
class Constant(Pattern):
    """A plain Python value that stands in the graph.

    kinds    its types; bool is no int
    test     what else must hold of it, None for nothing
    """

    kinds: tuple[type, ...] = (int, float)
    test: Callable[[Any], bool] | None = None

    def fits(self, value: Any) -> bool:
        return type(value) in self.kinds and (self.test is None or self.test(value))

    def is_what(self) -> str:
        kinds = " or ".join(kind.__name__ for kind in self.kinds)
        return f"is a constant {kinds}" + (" that passes its test" if self.test else "")

    def is_not(self, subject: str, value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"{subject} is computed ({describe(value)})"
        return f"{subject} is {value!r}"


@dataclass(slots=True, eq=False)
class Literal(Pattern):
    """One plain value."""

    value: Any = None

    def fits(self, value: Any) -> bool:
        if value is self.value:
            return True
        return type(value) in {int, float, str, torch.dtype} and bool(value == self.value)

    def is_what(self) -> str:
        return f"is {self.value!r}"

    def is_not(self, subject: str, value: Any) -> str:
        return f"{subject} is {describe(value)}, not {self.value!r}"

    def shown(self) -> str:
        return repr(self.value)


@dataclass(slots=True, eq=False)
class Default(Literal):
    """An argument that a pattern leaves out, which then is at its default."""

    argument: str = ""

    def step(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> SearchState | None:
        """A condition only where it fails."""
        if self.fits(value):
            return state
        search.fail(state, self, value, position)
        return None

    def is_what(self) -> str:
        return f"is left out, or {self.value!r}"

    def is_not(self, subject: str, value: Any) -> str:
        whose = subject.partition(" of ")[2] or subject
        if self.value is None:
            return f"{whose} has a {self.argument}"
        return f"{whose} has {self.argument} = {describe(value)}, not {self.value!r}"


def walk_all(
    pairs: Sequence[tuple[Pattern, Any, Position]],
    state: SearchState,
    search: PatternSearch,
    at: int = 0,
) -> Iterator[SearchState]:
    """Every way in which patterns fit values one by one."""
    while at < len(pairs):
        pattern, value, position = pairs[at]
        at += 1
        if pattern.branching:
            for way in pattern.walk(value, state, search, position):
                yield from walk_all(pairs, way, search, at)
            return
        fitted = pattern.step(value, state, search, position)
        if fitted is None:
            return
        state = fitted
    yield state


def inside(part: Pattern) -> str:
    """A pattern as a part of another's line."""
    return part.name if part.name and part.parts() else part.shown()


def describe(value: Any) -> str:
    """A value in a sentence: what a node calls, or the value."""
    if isinstance(value, fx.Node):
        return f"the input {value.target}" if value.op == "placeholder" else str(value.target)
    return "nothing" if value is None else repr(value)


class _Slot(NamedTuple):
    """An argument that has a condition: its number among the positional ones, and its default."""

    position: ArgumentPosition
    number: int
    default: Any
    pattern: Pattern


@dataclass(slots=True, eq=False)
class Call(Pattern):
    """A call of one of several operators.

    opened      arguments that are not described may be anything; else they are at their default
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
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> Iterator[SearchState]:
        fitted = self.step(value, state, search, position)
        if fitted is None:
            return
        fitted = fitted.through(value)
        args, kwargs = value.args, value.kwargs
        pairs = []
        for at, number, default, pattern in self.slots[value.target]:
            if number < len(args):
                pairs.append((pattern, args[number], at))
            else:
                pairs.append((pattern, kwargs.get(at.argument, default), at))
        yield from walk_all(pairs, fitted, search)
        if self.commutes:
            (first, left, here), (second, right, there), *rest = pairs
            yield from walk_all(
                [(first, right, there), (second, left, here), *rest], fitted, search
            )

    def fits(self, value: Any) -> bool:
        return (
            isinstance(value, fx.Node)
            and value.op == "call_function"
            and value.target in self.slots
        )

    def is_what(self) -> str:
        return f"is {' or '.join(map(str, self.operators))}"

    def is_not(self, subject: str, value: Any) -> str:
        return f"{subject} is {describe(value)}, not {' or '.join(map(str, self.operators))}"

    def targets(self) -> frozenset[Any] | None:
        return frozenset(self.operators)

    def _slots_of(self, target: Any) -> list[_Slot]:
        known = parameters_of(target)
        if known is None:
            known = {str(index): REQUIRED for index in range(len(self.given))}
        wanted = {**dict(zip(known, self.given, strict=False)), **dict(self.named)}
        self._require_known(target, wanted, known)
        slots = []
        for index, (argument, default) in enumerate(known.items()):
            pattern = wanted.get(argument)
            if pattern is None and not self.opened:
                pattern = Default(default, argument)
            keeps = self.commutes and index < 2
            if pattern is not None and (keeps or type(pattern) is not Anything or pattern.name):
                slots.append(_Slot(ArgumentPosition(self, argument), index, default, pattern))
        return slots

    def _require_known(
        self, target: Any, wanted: dict[str, Pattern], known: dict[str, Any]
    ) -> None:
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
        return (*self.given, *(pattern for _, pattern in self.named))

    def shown(self) -> str:
        shown = [*map(inside, self.given), *(f"{key}={inside(item)}" for key, item in self.named)]
        called = "|".join(dict.fromkeys(_short(target) for target in self.operators))
        return f"{called}({', '.join([*shown, *(['…'] if self.opened else [])])})"


def _short(target: Any) -> str:
    return str(getattr(target, "__name__", target)).partition(".")[0]


@dataclass(slots=True, eq=False)
class Sequenced(Pattern):
    """A list of patterns, for operators that take lists."""

    branching: ClassVar[bool] = True

    items: tuple[Pattern, ...] = ()

    def walk(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> Iterator[SearchState]:
        if not isinstance(value, (list, tuple)) or len(value) != len(self.items):
            search.fail(state, self, value, position)
            return
        pairs = [(item, part, position) for item, part in zip(self.items, value, strict=True)]
        yield from walk_all(pairs, state, search)

    def is_what(self) -> str:
        return f"is a list of {len(self.items)}"

    def parts(self) -> tuple[Pattern, ...]:
        return self.items

    def shown(self) -> str:
        return f"[{', '.join(map(inside, self.items))}]"


@dataclass(slots=True, eq=False)
class Cast(Pattern):
    """Any number of casts of a value."""

    branching: ClassVar[bool] = True

    inner: Pattern = field(default_factory=Anything)

    def walk(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> Iterator[SearchState]:
        while isinstance(value, fx.Node) and is_call(value, *CASTS):
            state = state.through(value)
            value = value.args[0]
        return self.inner.walk(value, state, search, position)

    def parts(self) -> tuple[Pattern, ...]:
        return (self.inner,)

    def shown(self) -> str:
        return f"cast*({inside(self.inner)})"


@dataclass(slots=True, eq=False)
class Either(Pattern):
    """One of several patterns; where none fits, the one that came nearest is told."""

    branching: ClassVar[bool] = True

    choices: tuple[Pattern, ...] = ()

    def walk(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> Iterator[SearchState]:
        for choice in self.choices:
            yield from choice.walk(value, state, search, position)

    def targets(self) -> frozenset[Any] | None:
        each = [choice.targets() for choice in self.choices]
        known = [targets for targets in each if targets is not None]
        return frozenset().union(*known) if len(known) == len(each) else None

    def parts(self) -> tuple[Pattern, ...]:
        return self.choices

    def shown(self) -> str:
        return f"({' | '.join(map(inside, self.choices))})"


@dataclass(slots=True, eq=False)
class Conditioned(Pattern):
    """A pattern of which something more must hold."""

    branching: ClassVar[bool] = True

    inner: Pattern = field(default_factory=Anything)

    def walk(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> Iterator[SearchState]:
        for way in self.inner.walk(value, state, search, position):
            captures, count, last, nodes = way
            held = self.held(value, captures)
            if held is None:
                search.fail(way, self, value, position)
            else:
                yield SearchState(held, count + 1, ((self, value, position), last), nodes)

    def held(self, value: Any, captures: Captures) -> Captures | None:
        """The captures where it holds, None where it does not."""
        raise NotImplementedError

    def targets(self) -> frozenset[Any] | None:
        return self.inner.targets()

    def parts(self) -> tuple[Pattern, ...]:
        return (self.inner,)

    def shown(self) -> str:
        return f"{inside(self.inner)} that {self.is_what()}"


@dataclass(slots=True, eq=False)
class Where(Conditioned):
    """A pattern of whose captures something more must hold."""

    says: str = ""
    test: Callable[[Captures], bool] = bool

    def walk(
        self, value: Any, state: SearchState, search: PatternSearch, position: Position
    ) -> Iterator[SearchState]:
        # The sentence says of itself what it is about.
        return Conditioned.walk(self, value, state, search, None)

    def held(self, value: Any, captures: Captures) -> Captures | None:
        return captures if self.test(captures) else None

    def is_what(self) -> str:
        return f"is one where {self.says}"

    def is_not(self, subject: str, value: Any) -> str:
        return f"it does not hold that {self.says}"

    def shown(self) -> str:
        return f"{inside(self.inner)} where {self.says}"


@dataclass(slots=True, eq=False)
class Having(Conditioned):
    """A pattern at a node of which something more must hold.

    says     the condition, after its subject: "is read once"
    test     whether it holds of the node
    tells    what is there instead: "is read 3 times"
    """

    says: str = ""
    test: Callable[[fx.Node], bool] = bool
    tells: Callable[[fx.Node], str] = str

    def held(self, value: Any, captures: Captures) -> Captures | None:
        return captures if isinstance(value, fx.Node) and self.test(value) else None

    def is_what(self) -> str:
        return self.says

    def is_not(self, subject: str, value: Any) -> str:
        found = self.tells(value) if isinstance(value, fx.Node) else f"is {describe(value)}"
        return f"{subject} {found}; what is wanted {self.says}"


@dataclass(slots=True, eq=False)
class Shaped(Conditioned):
    """A pattern at a tensor of a shape.

    sizes    a number, None for any size, or a name: one size wherever the name stands
    opened   more dimensions may stand before these
    """

    sizes: tuple[int | str | None, ...] = ()
    opened: bool = False

    def held(self, value: Any, captures: Captures) -> Captures | None:
        """Captures with the sizes that have names; None where the shape is another."""
        shape = shape_of(value) if isinstance(value, fx.Node) else None
        if shape is None or len(shape) < len(self.sizes):
            return None
        if len(shape) > len(self.sizes) and not self.opened:
            return None
        named = dict(captures)
        for wanted, size in zip(self.sizes, shape[len(shape) - len(self.sizes) :], strict=True):
            if isinstance(wanted, str):
                # Symbols of a row are compared as what they stand for, never by a guard.
                if str(named.setdefault(wanted, size)) != str(size):
                    return None
            elif wanted is not None and not (isinstance(size, int) and size == wanted):
                return None
        return named

    def is_what(self) -> str:
        sizes = ["…"] * self.opened + ["_" if size is None else str(size) for size in self.sizes]
        return f"has the shape [{', '.join(sizes)}]"

    def is_not(self, subject: str, value: Any) -> str:
        shape = shape_of(value) if isinstance(value, fx.Node) else None
        found = "is no tensor" if shape is None else f"has the shape {shape_text(shape)}"
        return f"{subject} {found}; what is wanted {self.is_what()}"
