"""Keep what every pass of a compilation left: the stages that `passes/` and the page show."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlora_fx.inspect.node_entries import Known, Part, join, make_part, whose
from tlora_fx.inspect.program import Stage
from tlora_fx.ir.graph import TRACE, GroupGraph, JobGraph
from tlora_fx.ir.verifier import owners
from tlora_fx.pipeline import Done, Instrument, Pipeline


@dataclass(slots=True)
class _State:
    """What one pass left, as far as it was seen: graphs by whose they are."""

    seconds: float = 0.0
    changed: bool = False
    parts: dict[str, Part] = field(default_factory=dict)


class Recorder(Instrument):
    """Records the data of every node after every pass.

    When the driver begins again, in another form or with less folding, what was recorded before is
    dropped: the stages are those of the attempt that was kept. What the job file calls the base
    they do not know; `dump` writes it into them.
    """

    def __init__(self) -> None:
        """Make a recorder that has seen nothing."""
        self._known = Known()
        self.started(Pipeline(()))

    @property
    def stages(self) -> list[Stage]:
        """What was traced, and what each pass left, in order."""
        names = [TRACE, *(item.name for item in self._pipeline.passes)]
        texts = [TRACE, *(str(item) for item in self._pipeline.passes)]
        found = []
        for place, state in sorted(self._states.items()):
            parts = list(state.parts.values())
            program = join(parts, names[place], "", self._form, self._jobs)
            found.append(Stage(place, texts[place], state.changed, state.seconds, program))
        return found

    def started(self, pipeline: Pipeline) -> None:
        """Forget what an earlier attempt left."""
        self._pipeline = pipeline
        self._states: dict[int, _State] = {}
        self._form = "packed"
        self._jobs: list[str] = []

    def traced(self, subject: str, graphs: JobGraph) -> None:
        """Keep a graph as the tracer made it."""
        self._form = graphs.form
        if graphs.name and graphs.name not in self._jobs:
            self._jobs.append(graphs.name)
        self._states.setdefault(0, _State()).parts[subject] = make_part(graphs, self._known)

    def after(self, done: Done) -> None:
        """Keep what a pass left; where it changed nothing, what the one before it left."""
        state = self._states.setdefault(done.place, _State())
        state.seconds += done.seconds
        state.changed |= bool(done.changed)
        if isinstance(done.graphs, GroupGraph):
            self._jobs = done.graphs.job_names
        before = self._states.get(done.place - 1, _State()).parts
        for subject, graphs in _subjects(done):
            kept = before.get(subject) if not done.changed else None
            state.parts[subject] = kept or make_part(graphs, self._known)


def _subjects(done: Done) -> list[tuple[str, JobGraph | GroupGraph]]:
    """Whose graphs a pass rewrote; of a group that is not fused those of its base and jobs."""
    if isinstance(done.graphs, JobGraph):
        return [(done.subject, done.graphs)]
    return [(whose(owner), owner) for owner in owners(done.graphs)]
