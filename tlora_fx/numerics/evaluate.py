"""Losses and gradients of graphs at any stage of the pipeline, and how far they lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_fx.ir.graph import AdapterSite, GroupGraph, JobGraph
from tlora_fx.model.batch import PackedBatch
from tlora_fx.numerics.interpreter import Interpreter, Setting, ValueCallback
from tlora_fx.numerics.rows import ProbeRows
from tlora_fx.numerics.tensors import Seeded
from tlora_fx.ops.kernels.select import strict

State = JobGraph | GroupGraph


@dataclass(slots=True)
class StepOutcome:
    """Results of one step for the jobs.

    losses       each job's sum of token losses
    gradients    by job and name of the tensor, without PEFT's prefix; a base alone has those of its
                 vectors, under the job ""
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[tuple[str, str], Tensor] = field(default_factory=dict)


def evaluate(
    state: State,
    layers: frozenset[str],
    rows: ProbeRows,
    tensors: Seeded,
    watch: Mapping[str, ValueCallback] | None = None,
) -> StepOutcome:
    """Run graphs forward and backward.

    watch     by the job whose graphs run alone, "" for a fused group: told every value
    raises    CannotRun, Unchecked
    """
    outcome = StepOutcome()
    # An expert's product in other modes keeps a token's bits only among as many tokens.
    with strict(), torch.enable_grad():
        if isinstance(state, GroupGraph) and state.fused:
            setting = Setting(rows.together(), rows.names, layers, (watch or {}).get(""))
            _step(Interpreter(state, setting, tensors, {}), rows.names, outcome)
            return outcome
        traced_with: dict[int, Mapping[str, AdapterSite]] = {}
        for job in state.jobs if isinstance(state, GroupGraph) else [state]:
            first = traced_with.setdefault(id(job.root), job.sites)
            setting = Setting(rows.alone(job.name), [job.name], layers, (watch or {}).get(job.name))
            _step(Interpreter(job, setting, tensors, first), [job.name], outcome)
    return outcome


def _step(interpreter: Interpreter, names: list[str], outcome: StepOutcome) -> None:
    result = interpreter.run()
    row = interpreter.setting.row
    losses = result if result.dim() == 1 else token_losses(result, row)
    outcome.losses.update(zip(names, losses.detach(), strict=True))
    reader = interpreter.reader
    leaves = dict(reader.leaves)
    leaves.update({("", name): vector for name, vector in reader.vectors.items()})
    if not leaves or not losses.requires_grad:
        return
    gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
    for (key, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        outcome.gradients[key] = torch.zeros_like(leaf) if gradient is None else gradient


def token_losses(logits: Tensor, row: PackedBatch) -> Tensor:
    """Each job's sum of token losses [J], from the logits of a whole row."""
    flat = logits.reshape(-1, logits.shape[-1]).index_select(0, row.target_rows)
    wide = flat.to(torch.promote_types(torch.float32, flat.dtype))
    losses = F.cross_entropy(wide, row.targets, reduction="none")
    bounds = row.target_segments.tolist()
    return torch.stack([losses[start:stop].sum() for start, stop in pairwise(bounds)])


# The largest relative difference that passes, by the narrowest dtype in which graphs compute.
# In float32 sums run in another order. In half precision PEFT multiplies adapters in float32 and a
# lowered adapter in the base's dtype: each product is rounded to 2**-9 (bfloat16) or 2**-12.
BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
# A gradient far smaller than the job's largest one is noise: it counts as this part of that.
FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of one number or tensor of a job from what it was.

    what      "loss", or "gradient of NAME"
    relative  norm of the difference over the norm before, infinite for NaN
    """

    job: str
    what: str
    relative: float


def bound_of(*states: JobGraph | GroupGraph) -> float:
    """Greatest difference that passes for these graphs."""
    kinds = {kind for state in states for kind in _dtypes(state)}
    return max((BOUNDS[kind] for kind in kinds if kind in BOUNDS), default=BOUNDS[torch.float32])


def _dtypes(state: JobGraph | GroupGraph) -> Iterator[torch.dtype]:
    parts = [state]
    if isinstance(state, GroupGraph) and not state.fused:
        parts = [*state.jobs]
    for part in parts:
        for graph in part.graphs():
            for node in graph.nodes:
                value = node.meta.get("val")
                if node.op == "call_function" and isinstance(value, Tensor):
                    yield value.dtype


def finite(outcome: StepOutcome) -> bool:
    """Whether all losses and gradients are numbers."""
    values = [*outcome.losses.values(), *outcome.gradients.values()]
    return all(bool(torch.isfinite(value).all()) for value in values)


def identical(before: StepOutcome, after: StepOutcome) -> bool:
    """Whether everything is the same to the bit."""
    pairs = pairs_of(before, after)
    return all(was.dtype == now.dtype and torch.equal(was, now) for _, _, was, now in pairs)


def worst(before: StepOutcome, after: StepOutcome) -> Difference:
    """The largest relative difference of any loss or gradient."""
    largest = {
        job: max((float(g.double().norm()) for (j, _), g in before.gradients.items() if j == job),
                 default=0.0)
        for job in before.losses
    }  # fmt: skip
    differences = [
        Difference(job, what, relative(was, now, FLOOR * largest.get(job, 0.0)))
        for job, what, was, now in pairs_of(before, after)
    ]
    return max(differences, key=lambda difference: difference.relative)


def relative(before: Tensor, after: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm before, which counts as `floor` at least."""
    if before.shape != after.shape:
        return math.inf
    difference = float(torch.linalg.vector_norm(after.double() - before.double()))
    size = max(float(torch.linalg.vector_norm(before.double())), floor)
    if math.isnan(difference) or math.isnan(size):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


def pairs_of(before: StepOutcome, after: StepOutcome) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Job, what, before, after; a gradient that one side lacks is zero there."""
    for job, loss in before.losses.items():
        yield job, "loss", loss, after.losses[job]
    for key in dict.fromkeys([*before.gradients, *after.gradients]):
        was, now = before.gradients.get(key), after.gradients.get(key)
        known = was if was is not None else now
        assert known is not None
        zero = torch.zeros_like(known)
        yield (
            key[0],
            f"gradient of {key[1]}",
            zero if was is None else was,
            zero if now is None else now,
        )
