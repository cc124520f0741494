"""The node at which the values of two states first diverge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from tlora_fx.ir.graph import HEAD, Form, JobGraph, Origin, is_call, origin_of
from tlora_fx.numerics.compare import relative
from tlora_fx.numerics.evaluate import State
from tlora_fx.numerics.interpreter import ValueCallback
from tlora_fx.numerics.reading import GraphLocation
from tlora_fx.numerics.rows import ProbeRows

WRITE = torch.ops.tlora_fx.segment_write.default
# Where nothing differs by the bound itself, sums have made small differences large.
FINER = 30
What = Literal["value", "gradient"]


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """Where values diverge.

    step          the node's run after the pass
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

    made_by   the pass
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


class _Comparison:
    """Compares steps after a pass with their counterparts before it."""

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
        if self._in_head(step):
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

    def _in_head(self, step: Step) -> bool:
        return step.place.graph is self.head


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


# Every value of one run, in order, with its gradient.


@dataclass(slots=True, eq=False)
class Step:
    """One node that ran.

    part        the job whose graphs run alone, "" for a fused group
    values      what it gave: one tensor, or several
    gradients   theirs, None where there are none
    inputs      the steps that it read
    """

    part: str
    place: GraphLocation
    node: fx.Node
    values: list[Tensor]
    inputs: list[Step]
    gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def origin(self) -> Origin:
        """Where the node comes from."""
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
        """What `evaluate` is to tell."""
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
