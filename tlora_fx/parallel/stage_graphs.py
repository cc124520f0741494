"""Stages of a pipeline as CUDA graphs: one for a forward, one for its backward.

While a micro-batch waits for its gradient, its process is at others. Each that is under way has a
slot, with memory that no other slot uses; all that come to a slot have the same memory in turn.
Forms are captured at the end of a round, when nothing is under way on this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.model.batch import PackedBatch, padded_by, size_of
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.dora import lengths_kept
from tlora_fx.ops.kernels.pack_together import noting, serving
from tlora_fx.parallel.capturing import add_together, may_add_together
from tlora_fx.parallel.cuda_graphs import CapturedRow, GraphCache, GraphKey


class StageGraphs(GraphCache["CapturedStage"]):
    """The graphs of a process's stages; see `GraphCache`."""

    runs = "stages"

    def __init__(
        self,
        model: SuperModel,
        stages: Sequence[Stage],
        device: torch.device,
        largest_row: int,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, device, largest_row, group=group, lengths={})
        self.stages = stages
        self._wanted: dict[GraphKey, CapturedStage] = {}
        self._rows: list[PackedBatch] = []
        self._weights = torch.empty(0)
        self._slots: dict[tuple[int, int], int] = {}

    def begin(self, rows: Sequence[PackedBatch], weights: Tensor) -> None:
        """A round begins.

        rows      its micro-batches, on the CPU
        weights   [J] on the device
        """
        self._rows = [padded_by(self.ladder, row) if len(row.target_rows) else row for row in rows]
        self._weights = weights
        self._slots.clear()
        for graph in self._wanted.values():
            # Of a round that failed.
            graph.release()
        self._wanted.clear()

    def forward(
        self, index: int, number: int, hidden: Tensor | None, as_it_is: Callable[[], Tensor]
    ) -> Tensor:
        """Run a stage's forward of a micro-batch, as a graph where it has one.

        index      of the stage, among those of this process
        number     of the micro-batch in its round
        as_it_is   what runs it without a graph
        """
        row, stage = self._rows[number], self.stages[index]
        self.rows_run += 1
        slot = self._slot(index, number)
        if not self._may_capture(row):
            return as_it_is()
        key = GraphKey(index, slot, size_of(row))
        graph = self._loaded(key, row, self._weights)
        if graph is not None:
            return graph(hidden)
        if key in self._wanted or not self._is_worth(key):
            return as_it_is()
        graph = CapturedStage(
            self.model, row, self._weights, self.device, self._lengths, stage, hidden
        )
        self._wanted[key] = graph
        return graph.first(hidden)

    def done(self, index: int, number: int) -> None:
        """A stage's backward of a micro-batch has been started: its slot is free for the next."""
        self._slots.pop((index, number), None)

    def end(self) -> None:
        """Capture what has come again in this round.

        raises    PlanNotRunnable where a capture that fails leaves other processes halfway
        """
        wanted, self._wanted = self._wanted, {}
        for key, graph in wanted.items():
            if self.refused:
                graph.release()
            else:
                self._keep(key, graph, graph.kept)

    def _slot(self, index: int, number: int) -> int:
        """The lowest that is free; what has no backward is under way no longer than its forward."""
        taken = set(self._slots.values())
        slot = next(slot for slot in count() if slot not in taken)
        if self.stages[index].learns:
            self._slots[index, number] = slot
        self._under_way = max(self._under_way, len(self._slots))
        return slot


class Stage(Protocol):
    """Interface of a stage that `StageGraphs` captures.

    learns       whether it has a backward
    needs_grad   whether that goes on below
    """

    learns: bool
    needs_grad: bool

    def __call__(self, hidden: Tensor | None, row: PackedBatch) -> Tensor:
        """Run its forward; hidden is None in the first stage."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that the stage reads."""


@dataclass(eq=False)
class CapturedStage(CapturedRow):
    """One form's tensors in one slot, and what a stage launches for it, forwards and backwards.

    stage    runs its forward
    hidden   what it is given, of this shape; None in the first stage
    kept     bytes that its forward keeps for its backward
    """

    stage: Stage
    hidden: InitVar[Tensor | None]

    def __post_init__(self, hidden: Tensor | None) -> None:
        super().__post_init__()
        self.kept = 0
        self._hidden = None if hidden is None else torch.empty_like(hidden)
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._forward: torch.cuda.CUDAGraph | None = None
        self._backward: torch.cuda.CUDAGraph | None = None
        self._out = self._dy = torch.empty(0)
        self._dx: Tensor | None = None

    def first(self, hidden: Tensor | None) -> Tensor:
        """Run the forward as it is, on this graph's row, and note what a capture needs."""
        before = torch.cuda.memory_allocated(self.device)
        with noting(self._packing), lengths_kept(self.lengths):
            out = self.stage(hidden, self.row).contiguous()
        self.kept = max(0, torch.cuda.memory_allocated(self.device) - before)
        return out

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """See `CapturedRow.capture`."""
        needs_grad = self._hidden is not None and self.stage.needs_grad
        if self._hidden is not None:
            self._hidden.requires_grad_(needs_grad)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._packing.settle(self.device)
        # Its kernel is compiled before the capture, which can load none.
        self._packing.start()
        with (
            torch.cuda.graph(forward, pool=pool, stream=stream),
            serving(self._packing),
            lengths_kept(self.lengths),
            self.model.weighing(self.weights),
        ):
            out = self.stage(self._hidden, self.row)
        self._forward, self._out = forward, out.detach()
        if not self.stage.learns:
            return
        self._dy = torch.empty_like(self._out)
        with (
            torch.cuda.graph(backward, pool=pool, stream=stream),
            lengths_kept(self.lengths),
            self.model.weighing(self.weights),
        ):
            self._dx = self._add_gradients(out, self._hidden if needs_grad else None)
        self._backward = backward

    def _add_gradients(self, out: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Add to the gradients of what the stage trains; that of what it was given."""
        leaves = [leaf for leaf in self.stage.parameters() if leaf.requires_grad]
        leaves = [leaf for leaf in leaves if not leaf.is_meta]
        if any(leaf.grad is None for leaf in leaves):
            raise RuntimeError("a parameter has no gradient that a graph could add to")
        inputs = [*leaves, *([] if hidden is None else [hidden])]
        if may_add_together(leaves, self.kept):
            found = torch.autograd.grad(out, inputs, self._dy, allow_unused=True)
            add_together(leaves, found[: len(leaves)])
            return None if hidden is None else found[-1]
        torch.autograd.backward(out, self._dy, inputs=inputs)
        if hidden is None:
            return None
        dx, hidden.grad = hidden.grad, None
        return dx

    def release(self) -> None:
        """See `CapturedRow.release`."""
        self._forward = self._backward = None
        super().release()

    def __call__(self, hidden: Tensor | None) -> Tensor:
        """Run the forward for the row that was loaded; its gradient runs the backward."""
        if not self.stage.learns:
            return self.replay(hidden)
        out: Tensor = _Replayed.apply(self, self._anchor, hidden)  # type: ignore[no-untyped-call]
        return out

    def replay(self, hidden: Tensor | None) -> Tensor:
        """Run the forward; a copy of what it computes."""
        assert self._forward is not None, "captured before"
        if hidden is not None and self._hidden is not None:
            self._hidden.detach().copy_(hidden.detach())
        self._forward.replay()
        return self._out.clone()

    def replay_backward(self, dy: Tensor) -> Tensor | None:
        """Run the backward, which adds to gradients; a copy of what goes on below."""
        assert self._backward is not None, "captured before"
        self._dy.copy_(dy)
        self._backward.replay()
        return None if self._dx is None else self._dx.clone()


class _Replayed(torch.autograd.Function):
    """A stage's graphs, to autograd."""

    @staticmethod
    def forward(ctx: Any, graph: CapturedStage, anchor: Tensor, hidden: Tensor | None) -> Tensor:
        ctx.graph = graph
        return graph.replay(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, ctx.graph.replay_backward(*grads)
