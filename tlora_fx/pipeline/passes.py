"""Base classes of passes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from pydantic_core import PydanticSerializationError, to_jsonable_python
from torch import fx

from tlora_fx.config.fields import default_of
from tlora_fx.errors import PipelineError
from tlora_fx.ir.graph import GroupGraph, JobGraph

Numerics = Literal["exact", "bound", "no"]
_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_SPLITS = re.compile(r"[\s{},=\x7f]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
NAME = re.compile(r"[a-z0-9-]+")


@dataclass(frozen=True, slots=True)
class Pass(ABC):
    """Base of all passes: a name, what must have run before, and what they keep.

    requires             names of passes, or of facts that passes provide
    provides             facts that hold after it, besides its own name
    preserves            facts of other passes that hold after it where they held before
    statistics           what it counts with `count`: a name, and what that is a number of
    preserves_numerics   losses and gradients after it: "exact", the same bits; "bound", the same up
                         to the rounding of the graph's dtypes; "no", others
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    preserves: ClassVar[frozenset[str]] = frozenset()
    statistics: ClassVar[Mapping[str, str]] = MappingProxyType({})
    preserves_numerics: ClassVar[Numerics] = "bound"

    def recheck(self, graphs: JobGraph | GroupGraph, by: str) -> bool:
        """Whether what this pass provides still holds after another one changed the graphs.

        by         name of the pass that did
        returns    False where it cannot be told: the fact then lapses, unless `by` preserves it
        raises     TloraError that names `by`, where it must hold and does not
        """
        return False

    def rests_on(self, graphs: JobGraph | GroupGraph) -> Iterable[fx.Node] | None:
        """The nodes on which its facts rest: they lapse when one of these changes; None: all."""
        return None

    def __str__(self) -> str:
        """The pass in the text form of pipelines, options at their default left out."""
        options = [
            f"{f.name.replace('_', '-')}={show_value(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != default_of(f)
        ]
        return self.name + ("{" + " ".join(options) + "}" if options else "")


class JobPass(Pass):
    """A pass over one job's graph, once for each structure."""

    __slots__ = ()

    @abstractmethod
    def run(self, graph: JobGraph) -> bool | None:
        """Rewrite the graph in place.

        returns   whether the graph's code changed, or None to leave that to the pipeline; a claim
                  that does not hold is an error
        """


class GroupPass(Pass):
    """A pass over the graphs of all jobs, or over the Shared Super-Model."""

    __slots__ = ()

    @abstractmethod
    def run(self, group: GroupGraph) -> bool | None:
        """Rewrite the group in place; returns as `JobPass.run` does."""


@dataclass(frozen=True, slots=True)
class PassOption:
    """An option of a pass, as the text form spells it.

    kind       its type, such as "int"
    default    as the text form shows it, "" where it must be given
    """

    name: str
    kind: str
    default: str
    help: str


def options_of(cls: type[Pass]) -> list[PassOption]:
    """The options of a pass, in order, with what its docstring says of them."""
    hints = get_type_hints(cls)
    return [
        PassOption(
            field.name.replace("_", "-"),
            kind_of(hints[field.name]),
            "" if (value := default_of(field)) is dataclasses.MISSING else show_value(value),
            _help_of(cls, field.name),
        )
        for field in dataclasses.fields(cls)
    ]


def show_value(value: object) -> str:
    """An option's value as the text form has it: a bare word, or JSON without blanks and braces.

    raises    PipelineError for a value that has no such form, such as a dict
    """
    if isinstance(value, str) and _BARE.fullmatch(value) and read_value(value) == value:
        return value
    try:
        text = json.dumps(to_jsonable_python(value), separators=(",", ":"))
    except (PydanticSerializationError, ValueError) as error:
        raise _no_text(value, str(error)) from None
    text = _QUOTED.sub(_escaped, text)
    if "{" in text:
        raise _no_text(value, "options of options cannot be written")
    return text


def _escaped(quoted: re.Match[str]) -> str:
    """A JSON string whose characters do not split a pipeline's text."""
    return _SPLITS.sub(lambda split: f"\\u{ord(split[0]):04x}", quoted[0])


def _no_text(value: object, why: str) -> PipelineError:
    return PipelineError(
        "an option's value has no text form",
        found=repr(value)[:100],
        reason=why,
        help="use numbers, texts, paths, and tuples or sets of them",
    )


def read_value(text: str) -> object:
    """An option's value: JSON, or a bare word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def kind_of(hint: Any) -> str:
    """An option's type as users read it."""
    if get_origin(hint) is Literal:
        return " | ".join(get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _help_of(cls: type[Pass], field: str) -> str:
    """What a docstring says of a field: "field   text", gone on with on deeper lines."""
    lines = (inspect.getdoc(cls) or "").splitlines()
    parts: list[str] = []
    for line in lines:
        start = re.match(rf"{field}\s{{2,}}(\S.*)", line)
        if start:
            parts = [start[1]]
        elif parts and line.startswith(" "):
            parts.append(line.strip())
        elif parts:
            break
    return " ".join(parts)
