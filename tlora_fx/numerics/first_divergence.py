"""The node at which the values of two states first part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tlora_fx.ir.graph import Form, is_call
from tlora_fx.numerics.compare import relative
from tlora_fx.numerics.rows import ProbeRows
from tlora_fx.numerics.trace import Index, Step, StepTrace

WRITE = torch.ops.tlora_fx.segment_write.default
# Where nothing differs by the bound itself, sums have made small differences large.
FINER = 30
What = Literal["value", "gradient"]


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """Where values part.

    step          the node's run after the pass
    gradient_of   where values agree: the node whose value has another gradient
    """

    step: Step
    gradient_of: Step | None = None


def find_parting(
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
        self.index = Index(before)
        self.rows, self.form, self.limit = rows, form, limit
        self.by_job = before.parts != after.parts
        self._verdicts: dict[tuple[Step, What], bool | None] = {}

    def agrees(self, step: Step, what: What) -> bool | None:
        """Whether a step gives what its counterpart gave; None where it has none."""
        key = (step, what)
        if key not in self._verdicts:
            found = [self._compared(step, job, [twin], what) for job, twin in self._twins(step)]
            known = [verdict for verdict in found if verdict is not None]
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
        made = [source for source in self.order if source in between and _is_new(source, made_by)]
        doubtful = [source for source in made if self._replaces(source) is not True]
        wrong = [source for source in doubtful if self._replaces(source) is False]
        return wrong[0] if wrong else doubtful[-1] if doubtful else step

    def _replaces(self, step: Step) -> bool | None:
        """Whether a new node gives what the last of its sources gave that has its shape."""
        found = []
        for job in self._jobs(step):
            twins = [
                t for origin in step.origin.sources if (t := self._find(step, job, origin.key))
            ]
            twins.sort(key=self.index.order.__getitem__, reverse=True)
            found.append(self._compared(step, job, twins, "value"))
        known = [verdict for verdict in found if verdict is not None]
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
        found = self.index.find(job, step.place, key)
        if found is None and self.by_job and key.startswith("base/"):
            return self.index.find_base(job, step.place, key)
        return found

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
            for dim, (one, two) in enumerate(zip(before.shape, after.shape, strict=True)):
                before, after = (
                    before.narrow(dim, 0, min(one, two)),
                    after.narrow(dim, 0, min(one, two)),
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
