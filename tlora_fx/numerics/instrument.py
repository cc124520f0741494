"""The instrument that compares losses and gradients after each pass with those before it.

Of a fused graph it also asks that jobs are apart: where some have other tokens, the others keep
every bit of their losses and gradients.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

import torch
from torch import Tensor, fx

from tlora_fx.cost.hardware import GIB
from tlora_fx.errors import NotIsolated, NumericsBroken
from tlora_fx.ir.graph import HEAD, Form, GroupGraph, JobGraph, Origin, is_call, origin_of
from tlora_fx.model.backbone import Backbone
from tlora_fx.numerics.evaluate import (
    Difference,
    State,
    StepOutcome,
    bound_of,
    evaluate,
    finite,
    identical,
    pairs_of,
    relative,
    worst,
)
from tlora_fx.numerics.interpreter import CannotRun, ValueCallback
from tlora_fx.numerics.memory import bytes_needed
from tlora_fx.numerics.reading import GraphLocation
from tlora_fx.numerics.rows import ProbeRows, halves
from tlora_fx.numerics.state import copy_state, layer_calls, layers_to_run
from tlora_fx.numerics.tensors import Seeded, Unchecked, buffers_of
from tlora_fx.pipeline import Done, Event, Instrument, Pipeline, Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of the check of one pass on one set of graphs.

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

    A fused graph runs on other tokens of some jobs, too: the others' outcome must not change.

    tokens         of each job; None: 12, for more than 8 jobs 6
    out            where the results are printed when all passes ran; None: to the log
    strict         refuse passes whose graphs cannot be compared
    """

    def __init__(
        self,
        memory_bytes: int = 4 * GIB,
        tokens: int | None = None,
        seed: int = 0,
        out: TextIO | None = None,
        strict: bool = False,
    ) -> None:
        self.strict = strict
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
        self.results = []
        self._held = self._last = None

    def before(self, event: Event) -> None:
        self._held = copy_state(event.graphs)

    def after(self, done: Done) -> None:
        """Compare; raises NumericsBroken where the pass does not keep its word."""
        held, self._held = self._held, None
        verdict, reason = "exact", ""
        if done.changed == "code":
            try:
                assert held is not None
                verdict = self._compare(held, done)
            except (NumericsBroken, NotIsolated):
                raise
            except Unchecked as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  (what the checker cannot do is no pass's fault)
                reason = f"{type(error).__name__}: {error}"
        if reason:
            self._last = None
            verdict = f"not checked: {reason}"
            if self.strict:
                raise NumericsBroken(
                    f"the numbers after pass '{done.item.name}' were not compared",
                    graphs=done.subject,
                    reason=reason,
                    help="leave --strict out, where this is to pass",
                )
        self.results.append(Result(done.item.name, done.subject, verdict))

    def failed(self, event: Event, error: Exception) -> None:
        self._held = self._last = None
        self._tensors.clear()

    def finished(self, graphs: JobGraph | GroupGraph) -> None:
        for line in self.report():
            if self.out is None:
                logger.info(line)
            else:
                self.out.write(line + "\n")
        self._held = self._last = None
        self._tensors.clear()

    def _compare(self, held: State, done: Done) -> str:
        layers = layers_to_run(held) | layers_to_run(done.graphs)
        called, calls = layer_calls(held), layer_calls(done.graphs)
        if called and calls != called:
            # Other layers run, or in another order: one of each structure cannot tell.
            layers = frozenset((*called, *calls))
        names = held.job_names if isinstance(held, GroupGraph) else [held.name]
        rows = ProbeRows(names, held.form, self.seed, self.tokens, held.vocabulary)
        needed = bytes_needed([held, done.graphs], layers, rows)
        if needed > self.memory_bytes:
            limit_gib = self.memory_bytes / GIB
            raise Unchecked(f"needs {needed / GIB:.1f} GiB, limit {limit_gib:.1f} GiB")
        check = _Check(held, done, layers, rows, self._tensors)
        # The outcome before a pass is that after the last one, where the same layers ran.
        last = self._last
        known = last is not None and last[0] is done.graphs and last[1] == layers
        before = check.before(last[2] if last is not None and known else None)
        after = check.after()
        self._last = (done.graphs, layers, after)
        verdict = check.verdict(before, after)
        check.require_apart(after)
        return verdict


@dataclass(frozen=True, slots=True)
class _Check:
    """The comparison of graphs after a pass with those before it, on a few rows.

    held    the graphs as the pass found them
    """

    held: State
    done: Done
    layers: frozenset[str]
    rows: ProbeRows
    tensors: Seeded

    def before(self, known: StepOutcome | None) -> StepOutcome:
        """The outcome before the pass; raises Unchecked."""
        try:
            outcome = known or self._run(self.held)
        except CannotRun as error:
            raise Unchecked(str(error)) from error
        if not finite(outcome):
            raise Unchecked("losses or gradients before it are not finite")
        return outcome

    def after(self) -> StepOutcome:
        """The outcome behind the pass; raises Unchecked, NumericsBroken."""
        try:
            return self._run(self.done.graphs)
        except CannotRun as error:
            if not error.refused or self.done.item.preserves_numerics == "no":
                raise Unchecked(str(error)) from error
            raise NumericsBroken(
                f"the graphs cannot run after pass '{self.done.item.name}'",
                graphs=self.done.subject,
                node=error.node.format_node(),
                layer=error.place.layer or None,
                source=error.node.meta.get("source") or None,
                found=error.__cause__,
                help="before the pass they run: this is a defect of the pass",
            ) from error

    def verdict(self, before: StepOutcome, after: StepOutcome) -> str:
        """Effect of the pass on the numbers; raises NumericsBroken."""
        if identical(before, after):
            return "exact"
        largest = worst(before, after)
        word, bound = self.done.item.preserves_numerics, bound_of(self.held)
        if word == "no":
            return f"other numbers, as declared: {largest.relative:.1e}"
        if word == "bound" and largest.relative <= bound:
            return f"within bound, {largest.relative:.1e}"
        limit = bound if word == "bound" else None
        raise _broken(self.done, largest, limit, self._first_divergence(limit))

    def require_apart(self, outcome: StepOutcome) -> None:
        """Give some jobs other tokens: the others keep every bit; raises NotIsolated."""
        group = self.done.graphs
        if not isinstance(group, GroupGraph) or not group.fused or not finite(outcome):
            return
        for changed in halves(self.rows.names):
            others = self.rows.with_other_tokens(changed)
            for job, what, was, now in pairs_of(outcome, self._run(group, others)):
                if job and job not in changed and not torch.equal(was, now):
                    traces = self._trace(group), self._trace(group, others)
                    step = first_unlike(*traces, self.rows, job)
                    raise _not_apart(self.done, job, what, changed, step)

    def _first_divergence(self, bound: float | None) -> FirstDivergence | None:
        traces = self._trace(self.held), self._trace(self.done.graphs)
        return find_first_divergence(*traces, self.rows, self.held.form, self.done.item.name, bound)

    def _run(
        self,
        state: State,
        rows: ProbeRows | None = None,
        watch: Mapping[str, ValueCallback] | None = None,
    ) -> StepOutcome:
        return evaluate(state, self.layers, rows or self.rows, self.tensors, watch)

    def _trace(self, state: State, rows: ProbeRows | None = None) -> StepTrace:
        trace = StepTrace(state)
        self._run(state, rows, trace.watches())
        return trace


def watch_numerics(runner: Runner, backbone: Backbone) -> None:
    """Tell a runner's `Numerics` the base."""
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
        facts |= _facts_of(divergence.step)
        if divergence.gradient_of is not None:
            facts["parts"] = f"in the backward: the gradient of %{divergence.gradient_of.node.name}"
    return NumericsBroken(
        f"pass '{done.item.name}' declares preserves_numerics = \"{word}\" and does not keep it",
        help="mend the pass where values first part, or declare what it keeps",
        **facts,
    )


def _not_apart(
    done: Done, job: str, what: str, changed: list[str], step: Step | None
) -> NotIsolated:
    facts = {"node": "none that can be told"} if step is None else _facts_of(step)
    return NotIsolated(
        f"pass '{done.item.name}' lets jobs see each other",
        graphs=done.subject,
        **facts,
        expected=f"the same bits for job '{job}', whatever the tokens of other jobs",
        found=f"another {what}, where jobs {', '.join(changed)} have other tokens",
        help="this is a defect of the pass: it mixes the row's tokens",
    )


def _facts_of(step: Step) -> dict[str, object]:
    return {
        "node": step.node.format_node(),
        "layer": step.place.layer or None,
        "source": step.node.meta.get("source") or None,
        "made by": step.origin.made_by,
    }


WRITE = torch.ops.tlora_fx.segment_write.default
# Where nothing differs by the bound itself, sums have made small differences large.
FINER = 30
What = Literal["value", "gradient"]


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """Location where values diverge.

    gradient_of   where values agree: the node whose value has another gradient
    """

    step: Step
    gradient_of: Step | None = None


def find_first_divergence(
    before: StepTrace,
    after: StepTrace,
    rows: ProbeRows,
    form: Form,
    made_by: str,
    bound: float | None,
) -> FirstDivergence | None:
    """The first node whose inputs agree with those before a pass, and whose value does not.

    Where all values agree that survive the pass, the last node whose gradient differs.

    bound     largest relative difference that is none, None: bits count
    """
    limits = [0.0] if bound is None else [bound, bound / FINER]
    for limit in limits:
        comparison = _Comparison(before, after, rows, form, limit)
        for step in after.steps:
            if comparison.agrees(step, "value") is False:
                return FirstDivergence(comparison.suspect(step, made_by))
        for step in reversed(after.steps):
            if comparison.agrees(step, "gradient") is False:
                return FirstDivergence(_reader_at_fault(step, after, made_by), step)
    return None


def _reader_at_fault(step: Step, after: StepTrace, made_by: str) -> Step:
    """The pass's own node among those that read a value with a wrong gradient, else the value's."""
    for reader in after.steps:
        if step in reader.inputs and _is_new(reader, made_by):
            return reader
    return step


def _is_new(step: Step, made_by: str) -> bool:
    return step.node.op == "call_function" and step.origin.made_by == made_by


def first_unlike(before: StepTrace, after: StepTrace, rows: ProbeRows, job: str) -> Step | None:
    """The first step of two runs of one group that gives a job something else."""
    number = rows.names.index(job)
    start, stop = rows.segments[number : number + 2]
    for was, now in zip(before.steps, after.steps, strict=True):
        own = now.role == "adapter" and now.node.meta.get("jobs") == (job,)
        for slot, (old, new) in enumerate(zip(was.values, now.values, strict=True)):
            axis = _axis(now, slot)
            if own and not is_call(now.node, WRITE):
                same = torch.equal(old, new)
            elif axis is not None and -new.dim() <= axis < new.dim() and new.shape[axis] >= stop:
                parts = (value.narrow(axis, start, stop - start) for value in (old, new))
                same = torch.equal(*parts)
            else:
                continue
            if not same:
                return now
    return None


class _Comparison:
    def __init__(
        self, before: StepTrace, after: StepTrace, rows: ProbeRows, form: Form, limit: float
    ) -> None:
        self.head, self.order = after.head, after.steps
        self.index = StepIndex(before)
        self.rows, self.form, self.limit = rows, form, limit
        self.by_job = before.parts != after.parts
        self._verdicts: dict[tuple[Step, What], bool | None] = {}

    def agrees(self, step: Step, what: What) -> bool | None:
        """Whether a step gives what its counterpart gave; None where it has none."""
        key = (step, what)
        if key not in self._verdicts:
            verdicts = [self._compared(step, job, [twin], what) for job, twin in self._twins(step)]
            known = [verdict for verdict in verdicts if verdict is not None]
            self._verdicts[key] = all(known) if known else None
        return self._verdicts[key]

    def suspect(self, step: Step, made_by: str) -> Step:
        """The node at fault for a step whose known inputs agree: it, or one between them."""
        between: dict[Step, None] = {}
        stack = list(step.inputs)
        while stack:
            source = stack.pop()
            if source not in between and self.agrees(source, "value") is None:
                between[source] = None
                stack.extend(source.inputs)
        new = [source for source in self.order if source in between and _is_new(source, made_by)]
        doubtful = [source for source in new if self._replaces(source) is not True]
        wrong = [source for source in doubtful if self._replaces(source) is False]
        return wrong[0] if wrong else doubtful[-1] if doubtful else step

    def _replaces(self, step: Step) -> bool | None:
        """Whether a new node gives what the last of its sources gave that has its shape."""
        verdicts = []
        for job in self._jobs(step):
            twins = [
                t for origin in step.origin.sources if (t := self._find(step, job, origin.key))
            ]
            twins.sort(key=self.index.order.__getitem__, reverse=True)
            verdicts.append(self._compared(step, job, twins, "value"))
        known = [verdict for verdict in verdicts if verdict is not None]
        return all(known) if known else None

    def _twins(self, step: Step) -> Iterator[tuple[str, Step]]:
        """The counterparts of a step: the same node, or the one that it is a copy of."""
        origin = step.origin
        sources = origin.sources
        same = step.node.op == "get_attr" or [s.target for s in sources] == [origin.target]
        copied = sources[0].key if len(sources) == 1 and same else ""
        for job in self._jobs(step):
            twin = self._find(step, job, origin.key) or (
                self._find(step, job, copied) if copied else None
            )
            if twin is not None:
                yield job, twin

    def _jobs(self, step: Step) -> list[str]:
        if not self.by_job:
            return [step.part]
        if step.node.op == "placeholder":
            return []  # tables of a row of all jobs are others than those of a job's own
        jobs: list[str] = list(step.node.meta.get("jobs") or ())
        return jobs if step.role == "adapter" and len(jobs) == 1 else self.rows.names

    def _find(self, step: Step, job: str, key: str) -> Step | None:
        twin = self.index.find(job, step.place, key)
        if twin is None and self.by_job and key.startswith("base/"):
            return self.index.find_base(job, step.place, key)
        return twin

    def _compared(self, step: Step, job: str, twins: list[Step], what: What) -> bool | None:
        """Whether a step agrees with the first of these that has its shape."""
        for twin in twins:
            verdicts = []
            for slot, (mine, theirs) in enumerate(_given(step, twin, what)):
                part = self._part(step, job, mine, slot)
                was, now = self._alike(step, theirs, part)
                if was.shape == now.shape:
                    verdicts.append(self._same(was, now))
            if verdicts:
                return all(verdicts)
        return None

    def _same(self, before: Tensor, after: Tensor) -> bool:
        if before.dtype == after.dtype and torch.equal(before, after):
            return True
        return self.limit > 0 and relative(before, after) <= self.limit

    def _part(self, step: Step, job: str, value: Tensor, slot: int) -> Tensor:
        """One job's part of a value of the whole row, where the job ran alone before."""
        if not self.by_job:
            return value
        axis = _axis(step, slot)
        if axis is None or not -value.dim() <= axis < value.dim():
            return value
        number = self.rows.names.index(job)
        start, stop = self.rows.segments[number : number + 2]
        return value.narrow(axis, start, stop - start) if value.shape[axis] >= stop else value

    def _alike(self, step: Step, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Two values over the same tokens: padding cut, rows without a target left out."""
        if before.shape == after.shape or before.dim() < 2:
            return before, after
        if step.place.graph is self.head:
            wanted = self.rows.together().target_rows
            if before.shape[:2].numel() > int(wanted.max()) and after.shape[:2].numel() == len(
                wanted
            ):
                return before.flatten(0, 1)[wanted], after.flatten(0, 1)
        if self.form == "batch" and before.dim() == after.dim():
            for dim, (was, now) in enumerate(zip(before.shape, after.shape, strict=True)):
                before, after = (
                    before.narrow(dim, 0, min(was, now)),
                    after.narrow(dim, 0, min(was, now)),
                )
        return before, after


def _given(step: Step, twin: Step, what: What) -> Iterator[tuple[Tensor, Tensor]]:
    """Values or gradients of two steps; a gradient that one of them lacks is zero."""
    if what == "value":
        yield from zip(step.values, twin.values, strict=False)
        return
    pairs = zip(step.values, step.gradients, twin.values, twin.gradients, strict=False)
    for mine, gradient, theirs, other in pairs:
        if gradient is not None or other is not None:
            yield (
                torch.zeros_like(mine) if gradient is None else gradient,
                torch.zeros_like(theirs) if other is None else other,
            )


def _axis(step: Step, slot: int) -> int | None:
    """The dimension of a value that holds the row, None where it holds a job's segment or none."""
    if is_call(step.node, WRITE):
        return int(step.node.args[4])  # type: ignore[arg-type]
    if step.role == "adapter":
        return None
    axis = step.node.meta.get("axis")
    if isinstance(axis, (tuple, list)):
        axis = axis[slot] if slot < len(axis) else None
    return axis if isinstance(axis, int) else None


@dataclass(slots=True, eq=False)
class Step:
    """One node that ran.

    part        the job whose graphs run alone, "" for a fused group
    gradients   theirs, None where there are none
    """

    part: str
    place: GraphLocation
    node: fx.Node
    values: list[Tensor]
    inputs: list[Step]
    gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def origin(self) -> Origin:
        """Origin of the node."""
        origin = origin_of(self.node)
        assert origin is not None
        return origin

    @property
    def role(self) -> str:
        """The node's role, "" before it is known."""
        return str(self.node.meta.get("role") or "")


class StepTrace:
    """The steps of one run of a state."""

    def __init__(self, state: State) -> None:
        self.steps: list[Step] = []
        self.head = state.blocks[HEAD].graph if HEAD in state.blocks else None
        self._known: dict[tuple[str, str, fx.Node], Step] = {}
        # By identity; the tensor is kept so that no other gets its number.
        self._makers: dict[int, tuple[Tensor, Step]] = {}
        jobs = [state] if isinstance(state, JobGraph) else [] if state.fused else state.jobs
        self.parts = [job.name for job in jobs] or [""]

    def watches(self) -> dict[str, ValueCallback]:
        """Callbacks for `evaluate`, by part."""
        return {part: self._watch(part) for part in self.parts}

    def _watch(self, part: str) -> ValueCallback:
        def take(node: fx.Node, place: GraphLocation, value: Any) -> None:
            key = (part, place.layer, node)
            # The head runs once a chunk, and again in the backward: its first run counts.
            if key in self._known or origin_of(node) is None:
                return
            items = value if isinstance(value, (tuple, list)) else [value]
            live = [item for item in items if isinstance(item, Tensor)]
            inputs = self._inputs(key, live)
            step = Step(part, place, node, [item.detach().clone() for item in live], inputs)
            for item in live:
                self._makers.setdefault(id(item), (item, step))
            step.gradients = [None] * len(live)
            for slot, item in enumerate(live):
                if item.requires_grad:
                    item.register_hook(_keeper(step, slot))  # type: ignore[no-untyped-call]
            self.steps.append(step)
            self._known[key] = step

        return take

    def _inputs(self, key: tuple[str, str, fx.Node], live: list[Tensor]) -> list[Step]:
        """What a step reads; for an input of a layer, what the root calls the layer with."""
        part, layer, node = key
        if node.op == "placeholder":
            makers = (self._makers.get(id(item)) for item in live)
            return [maker[1] for maker in makers if maker is not None]
        steps = (self._known.get((part, layer, source)) for source in node.all_input_nodes)
        return [step for step in steps if step is not None]


def _keeper(step: Step, slot: int) -> Any:
    def keep(gradient: Tensor) -> None:
        step.gradients[slot] = gradient.detach().clone()

    return keep


class StepIndex:
    """Steps by part, layer and key of their origin; the backbone's also by the base's key."""

    def __init__(self, trace: StepTrace) -> None:
        self.order = {step: index for index, step in enumerate(trace.steps)}
        self._by_key: dict[tuple[str, str, str], Step] = {}
        self._by_base: dict[tuple[str, str, str], Step] = {}
        for step in trace.steps:
            where = (step.part, step.place.layer)
            key = step.origin.key
            self._by_key[*where, key] = step
            if step.role == "backbone":
                plain = _plain(key)
                # Inside PEFT's wrapper the base's own node is the one of its base layer.
                if (*where, plain) not in self._by_base or ".base_layer" in key:
                    self._by_base[*where, plain] = step

    def find(self, part: str, place: GraphLocation, key: str) -> Step | None:
        """The step of a node at a place; a layer's in a graph without layers, too."""
        moved = key
        if place.layer != place.first:
            moved = re.sub(rf"/{re.escape(place.first)}(?=[.:])", f"/{place.layer}", key)
        for where in ((place.layer, key), ("", moved), ("", key)):
            if (found := self._by_key.get((part, *where))) is not None:
                return found
        return None

    def find_base(self, part: str, place: GraphLocation, key: str) -> Step | None:
        """The step of a job's own graphs that repeats a node of the base."""
        return self._by_base.get((part, place.layer, _plain(key)))


def _plain(key: str) -> str:
    """A key without whose graph it is from and without PEFT's wrapper."""
    return key.partition("/")[2].replace(".base_layer", "")
