"""The instrument that compares losses and gradients after each pass with those before it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from torch import Tensor

from tlora_fx.errors import NumericsBroken
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.model.backbone import Backbone
from tlora_fx.numerics.compare import Difference, bound_of, finite, identical, worst
from tlora_fx.numerics.evaluate import State, StepOutcome, evaluate
from tlora_fx.numerics.first_divergence import (
    FirstDivergence,
    StepTrace,
    find_first_divergence,
)
from tlora_fx.numerics.interpreter import CannotRun
from tlora_fx.numerics.memory import bytes_needed
from tlora_fx.numerics.rows import ProbeRows
from tlora_fx.numerics.state import copy_state, layer_calls, layers_to_run
from tlora_fx.numerics.tensors import Seeded, Unchecked, buffers_of
from tlora_fx.pipeline import Done, Event, Instrument, Pipeline, Runner

log = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Result:
    """What was found of one pass on one set of graphs.

    verdict   "exact", "within bound, 3.1e-7", "other numbers, as declared: 2.0e-1",
              or "not checked: reason"
    """

    name: str
    subject: str
    verdict: str

    def __str__(self) -> str:
        return f"{self.name} on {self.subject}: {self.verdict}"


class Numerics(Instrument):
    """Runs graphs before and after each pass on a small seeded row, and compares the outcome.

    memory_bytes   a pass whose graphs need more is not checked
    tokens         of each job; None: 12, for more than 8 jobs 6
    seed           of weights and tokens
    out            where the results are printed when all passes ran; None: to the log
    results        of every pass on every set of graphs, in order
    """

    def __init__(
        self,
        memory_bytes: int = 4 * GIB,
        tokens: int | None = None,
        seed: int = 0,
        out: TextIO | None = None,
    ) -> None:
        self.memory_bytes, self.tokens, self.seed = memory_bytes, tokens, seed
        self.out = out
        self.results: list[Result] = []
        self._tensors = Seeded(seed, {})
        self._held: State | None = None
        self._last: tuple[State, frozenset[str], StepOutcome] | None = None

    def know(self, backbone: Backbone) -> None:
        """Take the base's buffers as they are, such as rotary frequencies; weights are drawn."""
        self.take(buffers_of(backbone))

    def take(self, buffers: Mapping[str, Tensor]) -> None:
        """Take buffers as they are, by canonical name."""
        self._tensors = Seeded(self.seed, buffers)

    def report(self) -> list[str]:
        """The results, a line each."""
        return [f"numerics  {result}" for result in self.results]

    def started(self, pipeline: Pipeline) -> None:
        """Forget what was found in another form."""
        self.results = []
        self._held = self._last = None

    def before(self, event: Event) -> None:
        """Keep the graphs as the pass finds them."""
        self._held = copy_state(event.graphs)

    def after(self, done: Done) -> None:
        """Compare.

        raises    NumericsBroken where the pass does not keep its word
        """
        held, self._held = self._held, None
        verdict = "exact"
        if done.changed == "code":
            try:
                assert held is not None
                verdict = self._compare(held, done)
            except NumericsBroken:
                raise
            except Unchecked as reason:
                self._last = None
                verdict = f"not checked: {reason}"
            except Exception as error:  # noqa: BLE001  (what the checker cannot do is no pass's fault)
                self._last = None
                verdict = f"not checked: {type(error).__name__}: {error}"
        self.results.append(Result(done.item.name, done.subject, verdict))

    def failed(self, event: Event, error: Exception) -> None:
        """Let go of everything."""
        self._held = self._last = None
        self._tensors.clear()

    def finished(self, group: GroupGraph) -> None:
        """Let go of everything but the results."""
        for line in self.report():
            if self.out is None:
                log.info(line)
            else:
                self.out.write(line + "\n")
        self._held = self._last = None
        self._tensors.clear()

    def _compare(self, held: State, done: Done) -> str:
        called, calls = layer_calls(held), layer_calls(done.graphs)
        if called and calls != called:
            raise Unchecked("other layers run, or in another order: one of each cannot tell")
        layers = layers_to_run(held) | layers_to_run(done.graphs)
        rows = self._rows(held)
        self._require_memory([held, done.graphs], layers, rows)
        before = self._before(held, done, layers, rows)
        after = self._after(done, layers, rows)
        self._last = (done.graphs, layers, after)
        if identical(before, after):
            return "exact"
        largest = worst(before, after)
        word, bound = done.item.preserves_numerics, bound_of(held)
        if word == "no":
            return f"other numbers, as declared: {largest.relative:.1e}"
        if word == "bound" and largest.relative <= bound:
            return f"within bound, {largest.relative:.1e}"
        limit = bound if word == "bound" else None
        divergence = self._first_divergence(held, done, layers, rows, limit)
        raise _broken(done, largest, limit, divergence)

    def _rows(self, state: State) -> ProbeRows:
        names = state.job_names if isinstance(state, GroupGraph) else [state.name]
        return ProbeRows(names, state.form, self.seed, self.tokens, state.vocabulary)

    def _require_memory(self, states: list[State], layers: frozenset[str], rows: ProbeRows) -> None:
        needed = bytes_needed(states, layers, rows)
        if needed > self.memory_bytes:
            raise Unchecked(
                f"needs {needed / GIB:.1f} GiB, limit {self.memory_bytes / GIB:.1f} GiB"
            )

    def _before(
        self, held: State, done: Done, layers: frozenset[str], rows: ProbeRows
    ) -> StepOutcome:
        """The outcome before a pass: that after the last one, where the same layers ran."""
        if self._last is not None and self._last[0] is done.graphs and self._last[1] == layers:
            outcome = self._last[2]
        else:
            outcome = self._run(held, layers, rows)
        if not finite(outcome):
            raise Unchecked("losses or gradients before it are not finite")
        return outcome

    def _after(self, done: Done, layers: frozenset[str], rows: ProbeRows) -> StepOutcome:
        try:
            return evaluate(done.graphs, layers, rows, self._tensors)
        except CannotRun as error:
            if not error.refused or done.item.preserves_numerics == "no":
                raise Unchecked(str(error)) from error
            raise NumericsBroken(
                f"the graphs cannot run after pass '{done.item.name}'",
                graphs=done.subject,
                node=error.node.format_node(),
                layer=error.place.layer or None,
                source=error.node.meta.get("source") or None,
                found=error.__cause__,
                help="before the pass they run: this is a defect of the pass",
            ) from error

    def _run(self, state: State, layers: frozenset[str], rows: ProbeRows) -> StepOutcome:
        try:
            return evaluate(state, layers, rows, self._tensors)
        except CannotRun as error:
            raise Unchecked(str(error)) from error

    def _first_divergence(
        self,
        held: State,
        done: Done,
        layers: frozenset[str],
        rows: ProbeRows,
        bound: float | None,
    ) -> FirstDivergence | None:
        """Run both sides again, every value kept."""
        before, after = StepTrace(held), StepTrace(done.graphs)
        evaluate(held, layers, rows, self._tensors, before.watches())
        evaluate(done.graphs, layers, rows, self._tensors, after.watches())
        return find_first_divergence(before, after, rows, held.form, done.item.name, bound)


def watch_numerics(runner: Runner, backbone: Backbone) -> None:
    """Let a runner's `Numerics` know the base."""
    for instrument in runner.instruments:
        if isinstance(instrument, Numerics):
            instrument.know(backbone)


def _broken(
    done: Done, found: Difference, limit: float | None, divergence: FirstDivergence | None
) -> NumericsBroken:
    word = "exact" if limit is None else "bound"
    facts: dict[str, object] = {
        "graphs": done.subject,
        "job": found.job or None,
        "expected": "the same bits" if limit is None else f"{found.what} within {limit:.0e}",
        "found": f"{found.what} differs by {found.relative:.1e}",
    }
    if divergence is None:
        facts["node"] = "none that can be told: no value that survives the pass differs"
    else:
        node = divergence.step.node
        facts["node"] = node.format_node()
        if divergence.gradient_of is not None:
            facts["parts"] = f"in the backward: the gradient of %{divergence.gradient_of.node.name}"
        facts["layer"] = divergence.step.place.layer or None
        facts["source"] = node.meta.get("source") or None
        facts["made by"] = divergence.step.origin.made_by
    return NumericsBroken(
        f"pass '{done.item.name}' declares preserves_numerics = \"{word}\" and does not keep it",
        help="mend the pass where values first part, or declare what it keeps",
        **facts,
    )
