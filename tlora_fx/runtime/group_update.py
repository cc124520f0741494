"""One update for all jobs of a round, by kernels that nobody on the host waits for.

Where every job of a round has torch.optim's fused Adam or AdamW on one GPU, norms, clipping and
the step of all of them take three launches, and what they came to is read a round later. Elsewhere
each job's own optimizer does its step (`optimizer.JobOptimizer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_fx.runtime.optimizer import AdamState, JobOptimizer

#: Where parameters, gradients and moments begin, in bytes.
_ALIGNED = 16
#: Kinds of devices that have the kernels.
KERNELS = frozenset({"cuda"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round came to for one job.

    loss       mean over its targets
    norm       of its gradients, before clipping
    updated    not where loss or norm are not finite, in this round or one before
    """

    loss: float
    norm: float
    updated: bool


class PendingOutcomes:
    """The outcomes of a round that may still run."""

    def __init__(self, facts: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._facts = facts
        if facts.is_cuda:
            self._facts = torch.empty(facts.shape, dtype=facts.dtype, pin_memory=True)
            self._facts.copy_(facts, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(facts.device))

    def read(self) -> list[Outcome]:
        """Each job's, after the round has ended."""
        if self._event is not None:
            self._event.synchronize()
        return [Outcome(loss, norm, bool(sound)) for loss, norm, sound, _ in self._facts.tolist()]


class GroupUpdate:
    """Updates the same jobs round after round.

    optimizers   of the jobs
    states       theirs, laid open
    places       each job's index in a round's losses
    """

    def __init__(
        self, optimizers: Sequence[JobOptimizer], states: Sequence[AdamState], places: Sequence[int]
    ) -> None:
        self.optimizers, self.states, self.places = list(optimizers), list(states), list(places)
        device = states[0].gradients.tensors[0].device
        self.dtype = states[0].gradients.tensors[0].dtype
        table, firsts = _chunks(states)
        self._table, self._firsts = table.to(device), firsts.to(device)
        self._places = torch.tensor(self.places, dtype=torch.int32, device=device)
        self._alive = torch.ones(len(states), dtype=torch.int32, device=device)

    @staticmethod
    def of(optimizers: Sequence[JobOptimizer], places: Sequence[int]) -> GroupUpdate | None:
        """What updates these jobs at once; None where each is to do its own step."""
        states = [optimizer.adam() for optimizer in optimizers]
        known = [state for state in states if state is not None]
        if not known or len(known) < len(states) or not _is_one_kernel(known):
            return None
        return GroupUpdate(optimizers, known, places)

    def holds(self) -> bool:
        """Whether all tensors are still those that it knows."""
        return all(state.gradients.holds() for state in self.states)

    def launch(self, losses: Tensor) -> PendingOutcomes:
        """Update all jobs from their gradients, and zero these; each optimizer is to note it.

        losses   [J] of the round, on the device
        """
        rows = [_given(*each) for each in zip(self.optimizers, self.states, strict=True)]
        given = torch.tensor(rows, dtype=torch.float64).to(losses.device, non_blocking=True)
        return PendingOutcomes(self._run(losses, given))

    def _run(self, losses: Tensor, given: Tensor) -> Tensor:
        from tlora_fx.ops.kernels.adam import adam

        return adam(self._table, self._firsts, self._places, losses, given, self._alive, self.dtype)


def _given(optimizer: JobOptimizer, state: AdamState) -> list[float]:
    """What the kernels are told of a job, as `ops.kernels.adam` has it."""
    options, update = state.options, optimizer.updates + 1
    rate, decay = options["lr"], options["weight_decay"]
    beta1, beta2 = options["betas"]
    decoupled = options["decoupled_weight_decay"]
    return [
        state.max_norm,
        rate / (1 - beta1**update),
        rate * decay if decoupled else 0.0,
        0.0 if decoupled else decay,
        *(beta1, 1 - beta1, beta2, 1 - beta2),
        options["eps"],
        (1 - beta2**update) ** 0.5,
    ]


def _is_one_kernel(states: Sequence[AdamState]) -> bool:
    """Whether one launch serves all of these: a GPU, a dtype, and memory without gaps."""
    kinds = {(each.device, each.dtype) for state in states for each in _tensors(state)}
    if len(kinds) > 1 or not {device.type for device, _ in kinds} <= KERNELS:
        return False
    runs = (run for state in states for run in _runs(state))
    return all(
        each.stride() == run[0].stride() and not each.data_ptr() % _ALIGNED and _is_whole(each)
        for run in runs
        for each in run
    )


def _is_whole(tensor: Tensor) -> bool:
    """Whether its elements fill one run of memory."""
    return tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())


def _tensors(state: AdamState) -> list[Tensor]:
    return [*state.gradients.params, *state.gradients.tensors, *state.firsts, *state.seconds]


def _runs(state: AdamState) -> zip[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Parameter, gradient and moments, which have one layout."""
    gradients = state.gradients
    return zip(gradients.params, gradients.tensors, state.firsts, state.seconds, strict=True)


def _chunks(states: Sequence[AdamState]) -> tuple[Tensor, Tensor]:
    """The kernels' table, int64 [C, 6], and where each job's chunks begin, int32 [K + 1]."""
    from tlora_fx.ops.kernels.adam import CHUNK

    runs = torch.tensor(
        [
            [*(each.data_ptr() for each in run), run[0].numel(), run[0].element_size(), place]
            for place, state in enumerate(states)
            for run in _runs(state)
        ]
    )
    counts = (runs[:, 4] + CHUNK - 1) // CHUNK
    rows = runs.repeat_interleave(counts, dim=0)
    first_of_run = torch.cumsum(counts, 0) - counts
    within = torch.arange(len(rows)) - first_of_run.repeat_interleave(counts)
    rows[:, :4] += (within * CHUNK * rows[:, 5])[:, None]
    elements = torch.clamp(rows[:, 4] - within * CHUNK, max=CHUNK)
    table = torch.cat([rows[:, :4], elements[:, None], rows[:, 6:]], dim=1).contiguous()
    firsts = torch.searchsorted(rows[:, 6].contiguous(), torch.arange(len(states) + 1))
    return table, firsts.to(torch.int32)
