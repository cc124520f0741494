"""Whether gradients reached every adapter that had something to learn from, in the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from tlora_fx.errors import NoGradient
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.planners.reduction import trained_leaves


class FirstStep:
    """Watches the first step of a run over several processes.

    A schedule or a pass that loses a gradient would otherwise train on without a word.
    """

    def __init__(self, model: SuperModel, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        reached: set[int] = set()

        def reach(leaf: nn.Parameter) -> None:
            # No more than this is kept by the leaves, of a model that never runs too.
            reached.add(id(leaf))

        self._reached = reached
        self._handles: list[RemovableHandle] = [
            leaf.register_post_accumulate_grad_hook(reach)  # type: ignore[no-untyped-call]
            for leaf in trained_leaves(model)
        ]

    def demand(self, rows: Sequence[PackedBatch]) -> None:
        """Refuse a step in which an adapter got no gradient; called after its backward.

        rows     of the whole round
        raises   NoGradient, on every process
        """
        for handle in self._handles:
            handle.remove()
        mine = self._missed(_jobs_with_targets(rows))
        told: list[list[str]] = [[] for _ in range(self.mesh.size)]
        if self.mesh.world is not None:
            dist.all_gather_object(told, mine, group=self.mesh.world)
        else:
            told = [mine]
        for rank, missed in enumerate(told):
            if missed:
                more = f"\nand {len(missed) - 5} more" if missed[5:] else ""
                raise NoGradient(
                    "no gradient reached an adapter in the first step",
                    rank=rank,
                    found="\n".join(missed[:5]) + more,
                    help="please report this, with the job file and the plan",
                )

    def _missed(self, jobs: set[int]) -> list[str]:
        """Sites, with their jobs, that no gradient reached."""
        names = self.model.group.job_names
        missed: list[str] = []
        late = {id(leaf) for leaf in trained_leaves(self.model)} - self._reached
        for path, bank in self.model.banks.items():
            own = [names[job] for job in sorted(jobs) if bank.serves(job)]
            if own and late & {id(bank.a), id(bank.b)}:
                missed.append(f"{path}: {', '.join(own)}")
        for job in sorted(jobs):
            for name, parameter in self.model.job_parameters(names[job]).items():
                if id(parameter) in late:
                    missed.append(f"{name}: {names[job]}")
        return missed


def _jobs_with_targets(rows: Sequence[PackedBatch]) -> set[int]:
    found: set[int] = set()
    for row in rows:
        ends = row.target_segments.tolist()
        found |= {job for job in range(len(ends) - 1) if ends[job + 1] > ends[job]}
    return found
