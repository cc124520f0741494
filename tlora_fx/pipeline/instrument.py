"""Instruments of a pipeline run: they are told before and after each pass on each graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.pipeline.passes import Pass
from tlora_fx.pipeline.rewrites import RuleStatistics
from tlora_fx.pipeline.text import Pipeline

Change = Literal["code", "tags", ""]


@dataclass(frozen=True, slots=True)
class Event:
    """A pass on one set of graphs.

    place      of the pass in the pipeline, counted from 1
    subject    "base", "job NAME" or "group"
    graphs     what it rewrites in place: whoever keeps them, copies them
    """

    place: int
    item: Pass
    subject: str
    graphs: JobGraph | GroupGraph

    def __str__(self) -> str:
        return f"{self.item.name} on {self.subject}"


@dataclass(frozen=True, slots=True)
class Done(Event):
    """A pass that ran.

    check_seconds    of shapes and checks, before and after it
    changed          "code", "tags" where only tags changed, "" where nothing did
    rewrites         that it asked for
    statistics       what it counted, by the names that it declares
    shape_seconds    the part of check_seconds in which values were propagated
    shapes           operators that ran for that
    nodes            in its graphs, before and after it
    rules            what became of its rules, by name; for an instrument that `watches_rules`
    """

    seconds: float
    check_seconds: float
    changed: Change
    rewrites: int = 0
    statistics: Mapping[str, int] = field(default_factory=dict)
    shape_seconds: float = 0.0
    shapes: int = 0
    nodes: tuple[int, int] = (0, 0)
    rules: Mapping[str, RuleStatistics] = field(default_factory=dict)


class Instrument:
    """Watches; every method may be left out.

    watches_rules    passes count for it what becomes of their rules
    """

    watches_rules: ClassVar[bool] = False

    def started(self, pipeline: Pipeline) -> None:
        """Compiling begins, or begins again in another form: forget what was seen."""

    def entered(self, phase: str) -> None:
        """A phase of compiling began, such as "trace base"; phases nest."""

    def left(self, phase: str) -> None:
        """The phase that began last is over, or an error ended it."""

    def traced(self, subject: str, graphs: JobGraph) -> None:
        """A graph came from the tracer."""

    def before(self, event: Event) -> None:
        """A pass is about to run."""

    def after(self, done: Done) -> None:
        """A pass ran, and its graphs hold together; may raise a TloraError to refuse them."""

    def failed(self, event: Event, error: Exception) -> None:
        """A pass raised, or left graphs that do not hold together."""

    def finished(self, graphs: JobGraph | GroupGraph) -> None:
        """All passes ran: on a group, or with `opt` on what a graph file holds."""
