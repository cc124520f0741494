"""Passes and the pipeline that runs them.

A pass is a frozen dataclass whose fields are its options. It works on one `JobGraph` or on the
`GroupGraph`. A pipeline is a list of passes with a text form that round-trips:
`drop-export-noise,fuse-backbone{max-jobs=8},lower-adapters`. After each pass the graphs are
linted and their shapes propagated.
"""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tlora_fx.errors import GraphInvalid, PipelineError, TloraError, nearest
from tlora_fx.graph import GroupGraph, JobGraph
from tlora_fx.shapes import propagate

REGISTRY: dict[str, type[Pass]] = {}
_PASS_TEXT = re.compile(r"\s*([a-z0-9-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_SPLITS = re.compile(r"[\s{},=\x7f]")
P = TypeVar("P", bound="type[Pass]")


@dataclass(frozen=True, slots=True)
class Pass(ABC):
    """What all passes share: a name, and what must have run before."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()

    def __str__(self) -> str:
        """The pass in the text form of pipelines, options at their default left out."""
        options = [
            f"{f.name.replace('_', '-')}={_show(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return self.name + ("{" + " ".join(options) + "}" if options else "")


class JobPass(Pass):
    """A pass over one job's graph, once for each structure."""

    __slots__ = ()

    @abstractmethod
    def run(self, graph: JobGraph) -> None:
        """Rewrite the graph in place."""


class GroupPass(Pass):
    """A pass over the graphs of all jobs, or over the Shared Super-Model."""

    __slots__ = ()

    @abstractmethod
    def run(self, group: GroupGraph) -> None:
        """Rewrite the group in place."""


def register(cls: P) -> P:
    """Class decorator: make a pass known by its name."""
    REGISTRY[cls.name] = cls
    return cls


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes in order; job passes come before group passes."""

    passes: tuple[Pass, ...]

    def __str__(self) -> str:
        return ",".join(str(item) for item in self.passes)

    @property
    def job_passes(self) -> tuple[JobPass, ...]:
        """What runs on each structure."""
        return tuple(item for item in self.passes if isinstance(item, JobPass))

    @property
    def group_passes(self) -> tuple[GroupPass, ...]:
        """What runs on the group."""
        return tuple(item for item in self.passes if isinstance(item, GroupPass))

    def run_job(self, graph: JobGraph) -> None:
        """Run the job passes on one graph, checking it after each."""
        for item in self.job_passes:
            _run_checked(item, graph)

    def run_group(self, group: GroupGraph) -> None:
        """Run the group passes, checking all graphs after each."""
        for item in self.group_passes:
            _run_checked(item, group)


def parse_pipeline(text: str) -> Pipeline:
    """Read the text form of a pipeline.

    raises    PipelineError for unknown passes and options, and for passes in a wrong order
    """
    passes: list[Pass] = []
    place = 0
    while place < len(text.rstrip()):
        match = _PASS_TEXT.match(text, place)
        if match is None:
            raise PipelineError(
                "the pipeline cannot be read",
                at=text[place:],
                expected="name{option=value option=value},name,...",
                help="separate passes by commas, options by spaces",
            )
        passes.append(_make(match[1], match[2] or ""))
        place = match.end()
    return checked(passes)


def checked(passes: Iterable[Pass]) -> Pipeline:
    """A pipeline whose passes find what they require.

    raises    PipelineError
    """
    pipeline = Pipeline(tuple(passes))
    done: set[str] = set()
    group_seen = False
    for item in pipeline.passes:
        missing = item.requires - done
        if missing:
            raise PipelineError(
                f"pass '{item.name}' stands before what it requires",
                expected=", ".join(sorted(missing)),
                found=str(pipeline),
                help=f"put {', '.join(sorted(missing))} before {item.name}",
            )
        if group_seen and isinstance(item, JobPass):
            raise PipelineError(
                f"job pass '{item.name}' stands after a group pass",
                found=str(pipeline),
                help="job passes come first",
            )
        group_seen = group_seen or isinstance(item, GroupPass)
        done |= {item.name, *item.provides}
    return pipeline


def _make(name: str, options: str) -> Pass:
    if name not in REGISTRY:
        raise PipelineError(
            f"there is no pass '{name}'",
            nearest=nearest(name, REGISTRY),
            help="known passes: " + ", ".join(sorted(REGISTRY)),
        )
    cls = REGISTRY[name]
    known = {f.name.replace("_", "-"): f.name for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in options.split():
        option, _, value = item.partition("=")
        if option not in known:
            raise PipelineError(
                f"pass '{name}' has no option '{option}'",
                nearest=nearest(option, known),
                help="its options: " + (", ".join(known) or "none"),
            )
        values[known[option]] = _typed(cls, known[option], option, _read(value))
    return cls(**values)


def _typed(cls: type[Pass], field: str, option: str, value: object) -> object:
    hint = get_type_hints(cls)[field]
    try:
        return TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        raise PipelineError(
            f"wrong value of option '{option}' of pass '{cls.name}'",
            expected=getattr(hint, "__name__", hint),
            found=value,
            help=error.errors()[0]["msg"],
        ) from None


def _read(text: str) -> object:
    """An option's value: JSON, or a bare word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _show(value: object) -> str:
    """A value as `_read` reads it, without blanks, braces or commas outside of escapes."""
    if isinstance(value, str) and _BARE.fullmatch(value) and _read(value) == value:
        return value
    text = json.dumps(value, separators=(",", ":"))
    if isinstance(value, str):
        text = _SPLITS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text


def _run_checked(item: Any, graphs: Any) -> None:
    try:
        item.run(graphs)
        for graph in graphs.graphs():
            graph.lint()
        for block in graphs.blocks.values():
            propagate(block.graph)
        if len(graphs.root.nodes):
            propagate(graphs.root, graphs.blocks)
    except TloraError as error:
        error.add_note(f"in pass {item.name}")
        raise
    except RuntimeError as error:
        raise GraphInvalid(
            f"pass '{item.name}' left a graph that does not hold together",
            found=error,
            help="this is a defect of the pass",
        ) from error
