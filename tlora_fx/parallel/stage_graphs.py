"""Stages of a pipeline as CUDA graphs: one for a forward, one for its backward.

While a micro-batch waits for its gradient, its process is at others. Each that is under way has a
slot, with memory that no other slot uses; all that come to a slot have the same memory in turn.
Forms are captured at the end of a round, when nothing is under way on this process.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from traceback import clear_frames
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.errors import TloraError
from tlora_fx.model.batch import PackedBatch, repeating_form
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.dora import Lengths, lengths_kept
from tlora_fx.ops.kernels import release
from tlora_fx.ops.kernels.pack_together import Packing, noting, serving
from tlora_fx.parallel.cuda_graphs import (
    ACTIVATION_MARGIN,
    MAX_GRAPHS,
    RESERVED_BYTES,
    WARMUP_ROWS,
    GraphKey,
    add_together,
    agreed,
    broken,
    copied,
    forget_capture,
    free_gpu_bytes,
    may_add_together,
    overwrite,
)

logger = logging.getLogger("tlora_fx.planners")


class StageGraphs:
    """The graphs of a process's stages.

    largest_row   as of `RowGraphs`
    group         processes that run each stage together, with sums over them in between
    refused, skipped_no_memory, captured   as of `RowGraphs`
    """

    def __init__(
        self,
        model: SuperModel,
        stages: Sequence[Stage],
        device: torch.device,
        largest_row: int,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.stages, self.device = model, stages, device
        self.largest_row, self.group = largest_row, group
        self.refused = ""
        self.most = CAPTURED_TOKENS * (1 if group is None else dist.get_world_size(group))
        self.skipped_no_memory = self.captured = 0
        self._graphs: OrderedDict[Position, CapturedStage] = OrderedDict()
        self._wanted: dict[Position, CapturedStage] = {}
        self._keys: Counter[tuple[int, GraphKey]] = Counter()
        self._came: Counter[Position] = Counter()
        self._rows: list[PackedBatch] = []
        self._weights = torch.empty(0)
        self._slots: dict[tuple[int, int], int] = {}
        self._under_way = 1
        self._pools: dict[int, Any] = {}
        self._stream: torch.cuda.Stream | None = None
        self._lengths: Lengths = {}

    @property
    def keys(self) -> list[GraphKey]:
        """Keys that have a graph, once for each stage and slot."""
        return [position.key for position in self._graphs]

    def begin(self, rows: Sequence[PackedBatch], weights: Tensor) -> None:
        """A round begins.

        rows      its micro-batches, on the CPU
        weights   [J] on the device
        """
        self._rows, self._weights = [_repeating(row) for row in rows], weights
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
        slot = self._slot(index, number)
        small = row.input_ids.numel() <= self.most and len(row.target_rows)
        if self.refused or not self.largest_row or not small:
            return as_it_is()
        position = Position(index, slot, GraphKey.of(row))
        self._keys[index, position.key] += 1
        self._came[position] += 1
        graph = self._graphs.get(position)
        if graph is not None and not self.model.adapted_sites <= graph.adapted_sites:
            # A job has come to a site whose kernels are not in it.
            self._graphs.pop(position).release()
            graph = None
        if graph is not None:
            self._graphs.move_to_end(position)
            graph.load(row, self._weights)
            return graph(hidden)
        if position in self._wanted or not self._is_worth(position):
            return as_it_is()
        graph = CapturedStage(self.model, stage, row, self._weights, hidden, self.device)
        self._wanted[position] = graph
        return graph.first(hidden, self._lengths)

    def done(self, index: int, number: int) -> None:
        """A stage's backward of a micro-batch has been started: its slot is free for the next."""
        self._slots.pop((index, number), None)

    def end(self) -> None:
        """Capture what has come again in this round.

        raises    PlanNotRunnable where a capture that fails leaves other processes halfway
        """
        wanted, self._wanted = self._wanted, {}
        for position, graph in wanted.items():
            if self.refused:
                graph.release()
            elif not self._fits_memory(graph.kept, position.key.tokens):
                self._leave(position, graph)
            else:
                self._capture(position, graph)

    def clear(self) -> None:
        """Free all graphs and their memory, and forget which rows came."""
        while self._graphs:
            self._graphs.popitem(last=False)[1].release()
        self._keys.clear()
        self._came.clear()
        self._lengths.clear()

    def _slot(self, index: int, number: int) -> int:
        """The lowest that is free; what has no backward is under way no longer than its forward."""
        taken = set(self._slots.values())
        slot = next(slot for slot in count() if slot not in taken)
        if self.stages[index].learns:
            self._slots[index, number] = slot
        self._under_way = max(self._under_way, len(self._slots))
        return slot

    def _is_worth(self, position: Position) -> bool:
        """Whether a form has come again, and has a place, or one that a much rarer one takes."""
        if self._keys[position.stage, position.key] <= WARMUP_ROWS:
            return False
        there = self._there(position)
        return len(there) < MAX_GRAPHS or self._came[position] > 2 * self._came[there[0]]

    def _there(self, position: Position) -> list[Position]:
        """What has a graph of the same stage and slot, the one that was not used longest first."""
        return [other for other in self._graphs if other[:2] == position[:2]]

    def _leave(self, position: Position, graph: CapturedStage) -> None:
        """There is no memory for a graph now."""
        self.skipped_no_memory += 1
        self._keys[position.stage, position.key] = 0
        graph.release()

    def _capture(self, position: Position, graph: CapturedStage) -> None:
        outer = torch.cuda.current_stream(self.device)
        if all(other.slot != position.slot for other in self._graphs):
            # torch forgets a pool of which no graph is left.
            self._pools[position.slot] = torch.cuda.graph_pool_handle()
        pool = self._pools[position.slot]
        try:
            with torch.cuda.device(self.device):
                self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                graph.capture(pool, self._stream, self._lengths)
        except (RuntimeError, TloraError) as error:
            if self.group is not None:
                raise broken(error) from error
            clear_frames(error.__traceback__)
            forget_capture(self.device, outer, pool)
            self._leave(position, graph)
            if not isinstance(error, torch.cuda.OutOfMemoryError) and "of memory" not in str(error):
                self.refused = f"{type(error).__name__}: {error}"
                self.clear()
                logger.warning("stages are not run as CUDA graphs: %s", self.refused)
            return
        self._graphs[position] = graph
        self.captured += 1
        there = self._there(position)
        if len(there) > MAX_GRAPHS:
            self._graphs.pop(there[0]).release()
        logger.debug("captured stage %s", position)

    def _fits_memory(self, kept: int, tokens: int) -> bool:
        """As of `RowGraphs`, beside as many of the largest rows as were under way at once."""
        rows = ACTIVATION_MARGIN * kept * (1 + self._under_way * self.largest_row / tokens)
        return agreed(rows + RESERVED_BYTES < free_gpu_bytes(self.device), self.group, self.device)


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


class Position(NamedTuple):
    """Position of a graph: the stage of its process, and the slot."""

    stage: int
    slot: int
    key: GraphKey


class CapturedStage:
    """One form's tensors in one slot, and what a stage launches for it, forwards and backwards.

    row, weights, adapted_sites   as of `RowGraph`
    kept                   bytes that its forward keeps for its backward
    """

    def __init__(
        self,
        model: SuperModel,
        stage: Stage,
        row: PackedBatch,
        weights: Tensor,
        hidden: Tensor | None,
        device: torch.device,
    ) -> None:
        self.model, self.stage, self.device = model, stage, device
        self.row = copied(row).to(device)
        self.weights = weights.clone()
        self.adapted_sites = model.adapted_sites
        self.kept = 0
        self._hidden = None if hidden is None else torch.empty_like(hidden)
        self._packing = Packing()
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._forward: torch.cuda.CUDAGraph | None = None
        self._backward: torch.cuda.CUDAGraph | None = None
        self._out = self._dy = torch.empty(0)
        self._dx: Tensor | None = None

    def load(self, row: PackedBatch, weights: Tensor) -> None:
        """Overwrite the row by another one of its form."""
        overwrite(self.row, row)
        self.weights.copy_(weights, non_blocking=True)

    def first(self, hidden: Tensor | None, lengths: Lengths) -> Tensor:
        """Run the forward as it is, on this graph's row, and note what a capture needs."""
        before = torch.cuda.memory_allocated(self.device)
        with noting(self._packing), lengths_kept(lengths):
            out = self.stage(hidden, self.row).contiguous()
        self.kept = max(0, torch.cuda.memory_allocated(self.device) - before)
        return out

    def capture(self, pool: Any, stream: torch.cuda.Stream, lengths: Lengths) -> None:
        """Note what forward and backward launch; nothing is run.

        pool      of memory, that of its slot
        stream    of the model's device, which is current
        raises    RuntimeError or TloraError where the stage does what no graph can hold
        """
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
            lengths_kept(lengths),
            self.model.weighing(self.weights),
        ):
            out = self.stage(self._hidden, self.row)
        self._forward, self._out = forward, out.detach()
        if not self.stage.learns:
            return
        self._dy = torch.empty_like(self._out)
        with (
            torch.cuda.graph(backward, pool=pool, stream=stream),
            lengths_kept(lengths),
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
        """Free what the graphs read on the device; they are not replayed any more."""
        self._forward = self._backward = None
        release(self.row.segments, self.row.keys, self.row.target_segments)

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


def _repeating(row: PackedBatch) -> PackedBatch:
    """The row in a form that comes again, where it has one."""
    return repeating_form(row) if len(row.target_rows) else row
