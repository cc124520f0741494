"""One update for all jobs of a round, by kernels that nobody on the host waits for.

Norms, clipping and the step of all jobs of a round that have torch.optim's fused Adam or AdamW on
one GPU take three launches. Every other job's own optimizer does its step
(`optimizer.JobOptimizer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tlora_fx.runtime.optim.optimizer import AdamState, JobOptimizer

#: Where parameters, gradients and moments begin, in bytes.
_ALIGNED = 16
#: Between two looks at a round that still runs.
TURN_SECONDS = 0.0005
#: Kinds of devices that have the kernels.
KERNELS = frozenset({"cuda"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round for one job.

    loss       mean over its targets
    norm       norm of its gradients, before clipping
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

    def read(self, meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        """Each job's, after the round has ended.

        meanwhile   is called now and then for as long as that takes
        """
        if self._event is not None:
            while meanwhile is not None and not self._event.query():  # type: ignore[no-untyped-call]
                meanwhile()
                time.sleep(TURN_SECONDS)
            self._event.synchronize()
        return [Outcome(loss, norm, bool(sound)) for loss, norm, sound, _ in self._facts.tolist()]


class GroupUpdate:
    """Updates the same jobs round after round.

    optimizers   optimizers of the jobs
    states       theirs, laid open
    own          each job's part of the kernels' table
    places       each job's index in a round's losses
    counts       whether a parameter counts in its job's norm here, where processes hold parts of
                 jobs; None: all do
    """

    def __init__(
        self,
        optimizers: Sequence[JobOptimizer],
        states: Sequence[AdamState],
        own: Sequence[JobChunks],
        places: Sequence[int],
        counts: Callable[[nn.Parameter], bool] | None = None,
    ) -> None:
        self.optimizers, self.states, self.places = list(optimizers), list(states), list(places)
        self.dtype, device = own[0].dtype, own[0].device
        jobs = torch.arange(len(own)).repeat_interleave(
            torch.tensor([len(each.chunks) for each in own])
        )
        # What is told of a job's first group of parameters stands in its row, the rest behind.
        further = torch.tensor([len(state.options) - 1 for state in states])
        behind = len(own) + torch.cumsum(further, 0) - further - 1
        chunks = torch.cat([each.chunks for each in own])
        groups = torch.where(chunks[:, 5] > 0, behind[jobs] + chunks[:, 5], jobs)
        table = torch.cat([chunks[:, :5], jobs[:, None], groups[:, None]], dim=1)
        firsts = torch.searchsorted(jobs, torch.arange(len(own) + 1)).to(torch.int32)
        self._table = table.to(device, non_blocking=True)
        self._firsts = firsts.to(device, non_blocking=True)
        indices = torch.tensor(self.places, dtype=torch.int32)
        self._places = indices.to(device, non_blocking=True)
        self._alive = torch.ones(len(own), dtype=torch.int32, device=device)
        self._counted: Tensor | None = None
        if counts is not None:
            params = [param for state in states for param in state.gradients.params]
            mine = torch.tensor([counts(param) for param in params], dtype=torch.int32)
            runs = torch.cat([each.runs for each in own])
            self._counted = mine.repeat_interleave(runs).to(device, non_blocking=True)

    @staticmethod
    def of(
        optimizers: Sequence[JobOptimizer],
        places: Sequence[int],
        counts: Callable[[nn.Parameter], bool] | None = None,
    ) -> GroupUpdate | None:
        """Update at once of those of these jobs that kernels serve; None where they serve none.

        Of jobs of several dtypes or devices those of the first one are served.
        """
        served: list[tuple[JobOptimizer, AdamState, JobChunks, int]] = []
        for optimizer, place in zip(optimizers, places, strict=True):
            state = optimizer.adam()
            own = None if state is None else _chunks_of(optimizer, state)
            if state is None or own is None:
                continue
            if not served or (own.device, own.dtype) == (served[0][2].device, served[0][2].dtype):
                served.append((optimizer, state, own, place))
        if not served:
            return None
        chosen, states, chunks, indices = zip(*served, strict=True)
        return GroupUpdate(chosen, states, chunks, indices, counts)

    def holds(self) -> bool:
        """Whether all tensors are still those that it knows."""
        return all(state.gradients.holds() for state in self.states)

    def measure(self, squares: Tensor) -> None:
        """Write the sum of squares of each job's gradients that count here.

        squares   float64 [J], on the device; other jobs' stay
        """
        from tlora_fx.ops.kernels.adam import squares_into

        assert self._counted is not None, "made for jobs that are whole here"
        squares_into(squares, self._table, self._firsts, self._places, self._counted, self.dtype)

    def launch(self, losses: Tensor, squares: Tensor | None = None) -> PendingOutcomes:
        """Update all jobs from their gradients, and zero these; each optimizer is to note it.

        losses    [J] of the round, on the device
        squares   float64 [J], what all processes have measured, added up; None: nobody else has a
                  part of these jobs
        """
        pairs = list(zip(self.optimizers, self.states, strict=True))
        rows = [_given(optimizer, state.options[0]) for optimizer, state in pairs]
        rows += [_given(optimizer, own) for optimizer, state in pairs for own in state.options[1:]]
        given = torch.tensor(rows, dtype=torch.float64).to(losses.device, non_blocking=True)
        return PendingOutcomes(self._run(losses, given, squares))

    def _run(self, losses: Tensor, given: Tensor, squares: Tensor | None) -> Tensor:
        from tlora_fx.ops.kernels.adam import adam

        return adam(
            self._table, self._firsts, self._places, losses, given, self._alive, self.dtype, squares
        )


def _given(optimizer: JobOptimizer, options: Mapping[str, Any]) -> list[float]:
    """What the kernels are told of a job's group of parameters, as `ops.kernels.adam` has it."""
    update = optimizer.updates + 1
    rate, decay = options["lr"], options["weight_decay"]
    beta1, beta2 = options["betas"]
    decoupled = options["decoupled_weight_decay"]
    return [
        optimizer.max_norm,
        rate / (1 - beta1**update),
        rate * decay if decoupled else 0.0,
        0.0 if decoupled else decay,
        *(beta1, 1 - beta1, beta2, 1 - beta2),
        options["eps"],
        (1 - beta2**update) ** 0.5,
    ]


@dataclass(frozen=True, slots=True)
class JobChunks:
    """One job's part of the kernels' table.

    addresses   of all that it lists: while they are the same, so is it
    chunks      int64 [c, 6] on the CPU: what `ops.kernels.adam` has before the job, and the index
                of the group of parameters among the job's
    runs        int64 [p] on the CPU: chunks of each parameter, in their order
    """

    addresses: list[int]
    chunks: Tensor
    runs: Tensor
    device: torch.device
    dtype: torch.dtype


# Who joins a group, or leaves it, costs no table of those who stay.
_known: WeakKeyDictionary[JobOptimizer, JobChunks] = WeakKeyDictionary()


def _chunks_of(optimizer: JobOptimizer, state: AdamState) -> JobChunks | None:
    """A job's chunks; None where kernels do not serve it: no GPU, dtypes that differ, or gaps."""
    gradients = state.gradients
    tensors = [*gradients.params, *gradients.tensors, *state.firsts, *state.seconds]
    addresses = [each.data_ptr() for each in tensors]
    known = _known.get(optimizer)
    if known is not None and known.addresses == addresses:
        return known
    kinds = {(each.device, each.dtype) for each in tensors}
    ((device, dtype),) = kinds if len(kinds) == 1 else {(torch.device("meta"), torch.float32)}
    if device.type not in KERNELS or any(address % _ALIGNED for address in addresses):
        return None
    from tlora_fx.ops.kernels.adam import CHUNK

    runs = list(zip(gradients.params, gradients.tensors, state.firsts, state.seconds, strict=True))
    if not all(
        each.stride() == run[0].stride() and _is_whole(each) for run in runs for each in run
    ):
        return None
    sizes = torch.tensor([run[0].numel() for run in runs])
    counts = (sizes + CHUNK - 1) // CHUNK
    addressed = torch.tensor(addresses).view(4, -1).t()
    chunks = _cut(addressed, sizes, counts, torch.tensor(state.groups), dtype.itemsize)
    _known[optimizer] = JobChunks(addresses, chunks, counts, device, dtype)
    return _known[optimizer]


def _is_whole(tensor: Tensor) -> bool:
    """Whether its elements fill one run of memory."""
    return tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())


def _cut(addresses: Tensor, sizes: Tensor, counts: Tensor, groups: Tensor, itemsize: int) -> Tensor:
    """Chunks [c, 6] of runs of so many elements, [n], at addresses [n, 4], in groups [n].

    counts   [n], of chunks
    """
    from tlora_fx.ops.kernels.adam import CHUNK

    first_of_run = torch.cumsum(counts, 0) - counts
    within = torch.arange(int(counts.sum())) - first_of_run.repeat_interleave(counts)
    starts = addresses.repeat_interleave(counts, dim=0) + (within * CHUNK * itemsize)[:, None]
    elements = (sizes.repeat_interleave(counts) - within * CHUNK).clamp(max=CHUNK)
    owners = groups.repeat_interleave(counts)
    return torch.cat([starts, elements[:, None], owners[:, None]], dim=1)
