"""Losses and gradients of graphs at any stage of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
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

State = JobGraph | GroupGraph


@dataclass(slots=True)
class StepOutcome:
    """What jobs get from one step.

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

    layers    which layers run
    watch     by the job whose graphs run alone, "" for a fused group: told every value
    raises    CannotRun, Unchecked
    """
    outcome = StepOutcome()
    with torch.enable_grad():
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
    """One step of the jobs of a row."""
    result = interpreter.run()
    row = interpreter.setting.row
    losses = result if result.dim() == 1 else token_losses(result, row)
    outcome.losses.update(zip(names, losses.detach(), strict=True))
    reader = interpreter.reader
    leaves = dict(reader.leaves)
    leaves.update({("", name): vector for name, vector in reader.vectors.items()})
    leaves = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
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
