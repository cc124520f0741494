"""A check of its own: losses and gradients of a state against those of the traced graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tlora_fx.bisect.search import Verdict
from tlora_fx.bisect.states import State
from tlora_fx.graph_file import Document, from_document
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.model.backbone import Backbone
from tlora_fx.numerics.compare import bound_of, finite, worst
from tlora_fx.numerics.evaluate import Outcome, evaluate
from tlora_fx.numerics.interpreter import CannotRun
from tlora_fx.numerics.memory import bytes_needed
from tlora_fx.numerics.rows import Rows
from tlora_fx.numerics.tensors import Seeded, Unchecked, buffers_of
from tlora_fx.tools.bisect import Check, Judged

GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the traced graphs compute.

    layers    the traced layers, and which jobs were traced with them
    """

    start: GroupGraph
    outcome: Outcome
    layers: dict[frozenset[str], list[str]]
    rows: Rows


class NumericsCheck(Check):
    """Good where losses and gradients are those of the traced graphs, up to rounding.

    backbone       whose buffers are taken as they are; weights are drawn
    memory_bytes   a state that needs more cannot be judged
    """

    def __init__(self, backbone: Backbone, seed: int = 0, memory_bytes: int = 4 * GIB) -> None:
        self.seed, self.memory_bytes = seed, memory_bytes
        self.tensors = Seeded(seed, buffers_of(backbone))
        self._start: GroupGraph | None = None
        self._known: _Reference | None = None

    def begin(self, start: Document) -> None:
        """Compare with these graphs from now on."""
        group = from_document(start)
        assert isinstance(group, GroupGraph)
        self._start, self._known = group, None

    def judge(self, state: State, folder: Path) -> Judged:
        """Run both on a small seeded row."""
        try:
            known = self._reference()
            found = max(
                (self._difference(known, state.group, layers) for layers in known.layers),
                default=0.0,
            )
        except Unchecked as reason:
            return Judged("skip", str(reason))
        except CannotRun as error:
            return Judged("bad" if error.refused else "skip", str(error))
        limit = bound_of(known.start, state.group) * max(1, state.place)
        verdict: Verdict = "good" if found <= limit else "bad"
        return Judged(verdict, f"largest difference {found:.1e}, limit {limit:.0e}")

    def _difference(self, known: _Reference, group: GroupGraph, layers: frozenset[str]) -> float:
        jobs = known.layers[layers]
        needed = bytes_needed([known.start, group], layers, known.rows)
        if needed > self.memory_bytes:
            raise Unchecked(
                f"needs {needed / GIB:.1f} GiB, limit {self.memory_bytes / GIB:.1f} GiB"
            )
        outcome = evaluate(group, layers, known.rows, self.tensors)
        return worst(_of(known.outcome, jobs), _of(outcome, jobs)).relative

    def _reference(self) -> _Reference:
        if self._known is None:
            group = self._start
            assert group is not None
            rows = Rows(group.job_names, group.form, self.seed, None, group.vocabulary)
            layers: dict[frozenset[str], list[str]] = {}
            for job in group.jobs:
                traced = job.plan.traced() if job.plan is not None else ()
                layers.setdefault(frozenset(traced), []).append(job.name)
            # Traced graphs are flat: they run whole, whatever layers are named.
            outcome = evaluate(group, frozenset(), rows, self.tensors)
            if not finite(outcome):
                raise Unchecked("losses or gradients of the traced graphs are not finite")
            self._known = _Reference(group, outcome, layers, rows)
        return self._known


def _of(outcome: Outcome, jobs: list[str]) -> Outcome:
    """What some jobs got."""
    losses = {job: loss for job, loss in outcome.losses.items() if job in jobs}
    own = {key: value for key, value in outcome.gradients.items() if key[0] in jobs}
    return Outcome(losses, own)
