"""Optimizer steps of the jobs of a group: by kernels for many jobs at once, or job by job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.codegen.ahead import ahead
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.runtime.distributed import counted, gradient_norms, gradient_squares
from tlora_fx.runtime.member import Member
from tlora_fx.runtime.optim.group_update import GroupUpdate, PendingOutcomes
from tlora_fx.runtime.optim.optimizer import JobOptimizer


@dataclass(frozen=True, slots=True)
class Split:
    """Split of the members of a step by how they are updated.

    together   at once, by kernels
    apart      each by its own optimizer
    update     of those together; None where there are none
    """

    together: Sequence[Member]
    apart: Sequence[Member]
    update: GroupUpdate | None


class GroupUpdater:
    """Updates members from their gradients, wherever processes hold parts of them."""

    def __init__(self, model: SuperModel, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self._optimizers: list[JobOptimizer] = []
        self._update: GroupUpdate | None = None

    def forget(self) -> None:
        """Forget optimizers: their tensors may have moved, or train on after a failed step."""
        self._optimizers, self._update = [], None

    def compile_ahead(self, members: Sequence[Member], losses: Tensor) -> None:
        """Have the kernels compiled, the first time, that update these at once on a GPU.

        losses    [J], of the dtype of a round's losses
        """
        device = self.mesh.device
        plain = [each.optimizer for each in members if each.optimizer.is_plain_adam]
        if device.type != "cuda" or self._in_parts or not plain:
            return
        from tlora_fx.ops.kernels.adam import ask_for_adam

        dtype = next(iter(plain[0].trained.values())).dtype
        ahead.try_once("update", self, lambda: ask_for_adam(dtype, losses.dtype, device))

    def split(self, members: Sequence[Member]) -> Split:
        """Split members into those that kernels update at once, and those with an own optimizer."""
        update = self._update_of(members)
        fused = frozenset(() if update is None else update.places)
        together = [member for member in members if member.index in fused]
        return Split(together, [each for each in members if each.index not in fused], update)

    def launch(
        self, split: Split, losses: Tensor
    ) -> tuple[PendingOutcomes | None, dict[int, float]]:
        """Start the update of those that go together, and measure the gradients of the others.

        losses    [J] on the device
        returns   what will come of those together, in their order, None where there are none; and
                  the gradient norms of the others by index
        """
        squares = self._squares(split.update, split.apart)
        pending = None if split.update is None else split.update.launch(losses, squares)
        # Norms are waited for, so not where nobody needs them.
        apart = split.apart
        return pending, gradient_norms(apart, self.mesh.device, squares) if apart else {}

    def _squares(self, update: GroupUpdate | None, apart: Sequence[Member]) -> Tensor | None:
        """The sum of squares of each job's gradients; None where each process has whole jobs.

        One all-reduce serves all jobs, whoever updates them on which process.
        """
        if not self._in_parts:
            return None
        squares = gradient_squares(apart, self.model, self.mesh)
        if update is not None:
            update.measure(squares)
        dist.all_reduce(squares, group=self.mesh.world)
        return squares

    def _update_of(self, members: Sequence[Member]) -> GroupUpdate | None:
        """What updates those of these jobs that kernels serve at once; kept while it fits."""
        optimizers = [member.optimizer for member in members]
        if self._optimizers != optimizers or (self._update and not self._update.holds()):
            self._optimizers = optimizers
            places = [member.index for member in members]
            self._update = GroupUpdate.of(optimizers, places, self._counts(members))
        return self._update

    @property
    def _in_parts(self) -> bool:
        """Whether processes hold parts of jobs."""
        return self.mesh.shape.tp > 1 or self.mesh.shape.pp > 1

    def _counts(self, members: Sequence[Member]) -> Callable[[nn.Parameter], bool] | None:
        """What says whether a parameter counts here in its job's norm, where not all do."""
        if not self._in_parts:
            return None
        here = {id(each) for member in members for each in counted(member, self.model, self.mesh)}
        return lambda parameter: id(parameter) in here
