"""The states of a compilation: the traced graphs after the first passes of a pipeline.

Jobs are compiled once, to see in which form and how far folded. What was traced then is kept as a
document, and every state is made from it: no state is traced for itself, so none is in another
form than the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tlora_fx.graph_file import Document, from_document, to_document
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.ladder import Prepared, fuse
from tlora_fx.pipeline import (
    Event,
    GroupPass,
    Instrument,
    JobPass,
    Pipeline,
    Runner,
    Verify,
)


@dataclass(frozen=True, slots=True)
class State:
    """The graphs after some passes.

    place       how many passes ran
    rewrites    what the last of them rewrote, or would have, held back ones too
    """

    place: int
    group: GroupGraph
    rewrites: tuple[str, ...] = ()


@dataclass(slots=True)
class States:
    """Makes states; the nearest one before is kept.

    pipeline    the passes
    start       the traced graphs
    verify      what is checked after each pass
    """

    pipeline: Pipeline
    start: Document
    verify: Verify = "structure"
    _kept: dict[int, tuple[Document, tuple[str, ...]]] = field(default_factory=dict)

    def after(self, place: int, limit: int | None = None) -> State:
        """The graphs after this many passes.

        limit     rewrites that the last of them may make, None for all
        raises    TloraError, where a pass fails
        """
        limits = {} if limit is None else {place: limit}
        runner = Runner(self.pipeline, (), self.verify, limits=limits)
        last = place if limit is None else place - 1
        begun = max((known for known in self._kept if known <= last), default=0)
        document, told = self._kept.get(begun, (self.start, ()))
        group = from_document(document)
        assert isinstance(group, GroupGraph)
        for number in range(begun + 1, place + 1):
            run_everywhere(runner, number, group)
        if place in runner.rewrites:
            told = tuple(runner.rewrites[place].told)
        elif begun < place:
            told = ()
        if limit is None and begun < place:
            self._kept[place] = (to_document(group), told)
        return State(place, group, told)


class _Traced(Instrument):
    """Keeps the traced graphs of the last attempt."""

    def __init__(self) -> None:
        self.kept: list[tuple[JobGraph, Document]] = []

    def started(self, pipeline: Pipeline) -> None:
        """A new attempt has graphs of its own."""
        self.kept = []

    def traced(self, subject: str, graphs: JobGraph) -> None:
        """Copy before any pass rewrites."""
        self.kept.append((graphs, to_document(graphs)))


def trace_states(
    given: Prepared,
    pipeline: Pipeline,
    verify: Verify = "structure",
    limits: dict[int, int] | None = None,
) -> States:
    """Compile once, and keep what was traced.

    limits    rewrites allowed by place: graphs that a pass may leave as they are need to be traced
              with every job's own numbers
    raises    TloraError, where compiling fails
    """
    traced = _Traced()
    group = fuse(given, Runner(pipeline, [traced], verify, limits=limits))
    copies: dict[int, JobGraph] = {}
    for live, document in traced.kept:
        copy = from_document(document)
        assert isinstance(copy, JobGraph)
        copies[id(live.root)] = copy
    base = copies[id(group.base.root)]
    jobs = [copies[id(job.root)].for_job(job.name, job.sites) for job in group.jobs]
    start = GroupGraph(base, jobs, group.exact, group.compute)
    return States(pipeline, to_document(start), verify)


def run_everywhere(runner: Runner, place: int, group: GroupGraph) -> None:
    """Run the pass at a place on all graphs that it is for, in the order in which the driver does.

    raises    TloraError, where it fails
    """
    item = runner.pipeline.passes[place - 1]
    if isinstance(item, GroupPass):
        runner.run_one(Event(place, item, "group", group))
        return
    assert isinstance(item, JobPass)
    structures: dict[int, list[JobGraph]] = {}
    for graph in (group.base, *group.jobs):
        structures.setdefault(id(graph.root), []).append(graph)
    for first, *others in structures.values():
        runner.run_one(Event(place, item, f"job {first.name}" if first.name else "base", first))
        for other in others:
            other.root, other.blocks = first.root, first.blocks
            other.plan, other.constants = first.plan, first.constants
