"""Forward and backward of rows as CUDA graphs: one start in place of thousands.

A small row takes the host longer to launch than the GPU to compute. A graph holds what one row of
a form launched, with the sizes and addresses of then, so each form has its own tensors, which are
overwritten, and a graph. Forms are few (see `repeating_form`); a form is captured when it comes for
the second time. Weights and gradients stay where they are, so optimizers know nothing of it.

An operator that reads a table of jobs on the host refuses to be captured; such a model, and rows
that are large enough to keep the GPU busy, run as they are.

Copies that gather a sharded base become part of a graph, and so do sums over processes: those make
their graphs together.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from traceback import clear_frames
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.errors import PlanNotRunnable, TloraError
from tlora_fx.model.batch import PackedBatch, repeating_form
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.dora import Lengths, Norms, lengths_kept, norms_at_once
from tlora_fx.ops.kernels import refresh, release
from tlora_fx.ops.kernels.pack_together import Packing, noting, serving
from tlora_fx.ops.kernels.select import cut_by_jobs
from tlora_fx.parallel.peer_copies import SideStreams

logger = logging.getLogger("tlora_fx.planners")
MAX_GRAPHS = 48
# Rows of a form before it is captured: lengths that never come again are many.
WARMUP_ROWS = 1
# What a row needs beyond the activations that its forward keeps.
ACTIVATION_MARGIN, RESERVED_BYTES = 1.3, 2**28
# How norms are computed that are asked for.
NormCalls = dict[tuple[object, ...], Callable[[], Tensor]]


class GraphKey(NamedTuple):
    """Key of a graph: the sizes of a row, and the longest sequence that it may hold."""

    tokens: int
    sequences: int
    longest: int
    targets: int

    @classmethod
    def of(cls, row: PackedBatch) -> GraphKey:
        """The form of a row."""
        sizes = row.input_ids.numel(), len(row.cu_seqlens) - 1
        return cls(*sizes, int(row.max_seqlen), len(row.target_rows))


class RowGraphs:
    """The graphs of a model in one process.

    largest_row   tokens of the largest row that may come: its memory stays free; 0: rows are run
                  as they are
    group         processes that run each row together, with sums over them in between
    gathering     streams on which a sharded base is gathered
    gathered      bytes that gathered weights take at once
    stays         whether weights keep their places: what follows from them is kept then
    refused       why no row is captured, or ""
    most          tokens of the largest row that is captured: processes that cut its work among
                  them have less to do each, and as much to launch
    skipped_no_memory      how often there was no memory for a graph
    captured      how many graphs were made
    norms         of rows too large to be captured; None where weights do not keep their places
    """

    def __init__(
        self,
        model: SuperModel,
        device: torch.device,
        largest_row: int,
        *,
        group: dist.ProcessGroup | None = None,
        gathering: SideStreams | None = None,
        gathered: int = 0,
        stays: bool = True,
    ) -> None:
        self.model, self.device, self.largest_row = model, device, largest_row
        self.group, self.gathering, self.gathered = group, gathering, gathered
        self.refused = ""
        self.most = CAPTURED_TOKENS * (1 if group is None else dist.get_world_size(group))
        self.skipped_no_memory = 0
        self.captured = 0
        self._graphs: OrderedDict[GraphKey, RowGraph] = OrderedDict()
        self._seen: Counter[GraphKey] = Counter()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._lengths: Lengths | None = {} if stays else None
        self.norms = NormGraph(device, self._lengths) if self._lengths is not None else None

    @property
    def keys(self) -> list[GraphKey]:
        """Keys that have a graph."""
        return list(self._graphs)

    def run(self, row: PackedBatch, weights: Tensor) -> Tensor | None:
        """Forward and backward of a row, as a graph or on the way to one.

        row       on the CPU
        weights   [J] on the device
        returns   [J] weighted loss sums; None where the row is to be run as it is
        """
        if self.refused or not self.largest_row or not len(row.target_rows):
            return None
        if row.input_ids.numel() > self.most:
            return None
        row = repeating_form(row)
        key = GraphKey.of(row)
        self._seen[key] += 1
        graph = self._graphs.get(key)
        if graph is not None and not self.model.adapted_sites <= graph.adapted_sites:
            # A job has come to a site whose kernels are not in it.
            self._graphs.pop(key).release()
            graph = None
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.load(row, weights)
            return graph.replay()
        if self._seen[key] <= WARMUP_ROWS or not self._is_worth(key):
            return None
        return self._first(key, row, weights)

    @contextmanager
    def launching(self, row: PackedBatch) -> Iterator[None]:
        """Run a row launch by launch within this context, with the kept weights of graphs."""
        too_large = not self.refused and row.input_ids.numel() > self.most
        with (
            cut_by_jobs(too_large or bool(self.refused)),
            lengths_kept(self._lengths),
            norms_at_once(self.norms if too_large else None),
        ):
            yield

    def clear(self) -> None:
        """Free all graphs and their memory, and forget which rows came."""
        while self._graphs:
            self._evict()
        self._seen.clear()
        if self.norms is not None:
            self.norms.clear()
        if self._lengths is not None:
            self._lengths.clear()

    def _is_worth(self, key: GraphKey) -> bool:
        """Whether there is a place for a graph, or one that is taken by a much rarer form."""
        if len(self._graphs) < MAX_GRAPHS:
            return True
        return self._seen[key] > 2 * self._seen[next(iter(self._graphs))]

    def _evict(self) -> None:
        _, graph = self._graphs.popitem(last=False)
        graph.release()

    def _first(self, key: GraphKey, row: PackedBatch, weights: Tensor) -> Tensor:
        """Run a row as it is, on the tensors of its graph to be, and capture it for the next."""
        graph = RowGraph(self.model, row, weights, self.device, self._lengths)
        losses, kept = graph.run()
        if self._fits_memory(kept, key.tokens):
            self._capture(key, graph)
        else:
            self._refuse(key, graph)
        return losses

    def _refuse(self, key: GraphKey, graph: RowGraph) -> None:
        """Leave a form for now: there is no memory for its graph."""
        self._seen[key] = 0
        self.skipped_no_memory += 1
        graph.release()
        logger.info("no memory for a CUDA graph of %s", key)

    def _capture(self, key: GraphKey, graph: RowGraph) -> None:
        """Make a graph, or know from now on that there can be none.

        raises    PlanNotRunnable where a capture that fails leaves other processes waiting, or
                  FSDP2 in the middle of a gather
        """
        outer = torch.cuda.current_stream(self.device)
        try:
            self._make(graph)
        except (RuntimeError, TloraError) as error:
            if self.group is not None or self.gathering is not None:
                raise broken(error) from error
            # Nothing was run: whatever the model does, it goes on as without graphs. A checkpoint
            # in the middle of its forward would take what others save until its frame is gone.
            clear_frames(error.__traceback__)
            forget_capture(self.device, outer, self._pool)
            self._fail(key, graph, error)
            return
        self._graphs[key] = graph
        self.captured += 1
        if len(self._graphs) > MAX_GRAPHS:
            self._evict()
        logger.debug("captured rows of %s", key)

    def _make(self, graph: RowGraph) -> None:
        if not self._graphs:
            # torch forgets a pool of which no graph is left, and takes it for none that it knows.
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device):
            # Memory is used again by graphs that were captured on the same stream.
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            graph.capture(self._pool, self._stream, self.gathering)

    def _fail(self, key: GraphKey, graph: RowGraph, error: Exception) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error):
            self._refuse(key, graph)
            return
        self.refused = f"{type(error).__name__}: {error}"
        graph.release()
        self.clear()
        logger.warning("rows are not run as CUDA graphs: %s", self.refused)

    def _fits_memory(self, kept: int, tokens: int) -> bool:
        """Whether a row's activations fit twice, and those of the largest row beside them.

        Processes that run rows together all have it, or none.
        """
        rows = ACTIVATION_MARGIN * kept * (1 + self.largest_row / tokens)
        fits = rows + 2 * self.gathered + RESERVED_BYTES < free_gpu_bytes(self.device)
        return agreed(fits, self.group, self.device)


class RowGraph:
    """One form's tensors, and what a row of it launches.

    row       a row of the form on the device, its tables on the CPU; overwritten by the next
    weights   [J] likewise
    adapted_sites    sites whose kernels are in it
    lengths   what is kept of weights, if anything; see `lengths_kept`
    """

    def __init__(
        self,
        model: SuperModel,
        row: PackedBatch,
        weights: Tensor,
        device: torch.device,
        lengths: Lengths | None,
    ) -> None:
        self.model = model
        self.row = copied(row).to(device)
        self.weights = weights.clone()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._packing = Packing()
        self._lengths = lengths
        self.adapted_sites = model.adapted_sites
        self._losses, self._kept = torch.empty(0), 0

    def load(self, row: PackedBatch, weights: Tensor) -> None:
        """Overwrite the row by another one of its form."""
        overwrite(self.row, row)
        self.weights.copy_(weights, non_blocking=True)

    def run(self) -> tuple[Tensor, int]:
        """Run forward and backward as they are.

        returns   [J] weighted loss sums, free of what computed them: a capture must find no
                  gradient's accumulator of another stream alive; and the bytes that the forward
                  kept for the backward
        """
        device = self.weights.device
        before = torch.cuda.memory_allocated(device)
        with noting(self._packing), lengths_kept(self._lengths):
            losses = self.model.weighted(self.row, self.weights)
            self._kept = max(0, torch.cuda.memory_allocated(device) - before)
            add_gradients(losses, self.model, self._kept)
        return losses.detach(), self._kept

    def capture(self, pool: Any, stream: torch.cuda.Stream, gathering: SideStreams | None) -> None:
        """Note what forward and backward launch; nothing is run.

        pool        of memory, shared by graphs that never run at once
        stream      of the model's device, which is current
        gathering   streams that the model uses beside it
        raises      RuntimeError or TloraError where the model does what no graph can hold
        """
        graph = torch.cuda.CUDAGraph()
        self._packing.settle(self.weights.device)
        # Its kernel is compiled before the capture, which can load none.
        self._packing.start()
        with (
            torch.cuda.graph(graph, pool=pool, stream=stream),
            serving(self._packing),
            lengths_kept(self._lengths),
        ):
            losses = self.model.weighted(self.row, self.weights)
            add_gradients(losses, self.model, self._kept)
            if gathering is not None:
                gathering.join()
        self._graph, self._losses = graph, losses.detach()

    def release(self) -> None:
        """Free what the graph read on the device; it is not replayed any more."""
        self._graph = None
        release(self.row.segments, self.row.keys, self.row.target_segments)

    def replay(self) -> Tensor:
        """Run the row as it was loaded; [J], a copy."""
        assert self._graph is not None, "captured before"
        self._graph.replay()
        return self._losses.clone()


class NormGraph:
    """The norms of DoRA that rows too large for a graph ask for, by one CUDA graph a round.

    A norm takes three kernels of some microseconds, and launching those of all sites takes longer
    than they run. Norms follow from weights and adapters alone: what two rounds in succession asked
    for is captured, and computed at the start of those that follow.

    lengths   what is kept of weights
    """

    def __init__(self, device: torch.device, lengths: Lengths) -> None:
        self.device = device
        self._lengths = lengths
        self._asked: NormCalls = {}
        self._before: set[tuple[object, ...]] = set()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._norms = Norms()
        self._refused = False

    @property
    def held(self) -> int:
        """Number of norms that the graph computes."""
        return len(self._norms)

    def note(self, key: tuple[object, ...], compute: Callable[[], Tensor]) -> None:
        """See `ops.dora.NormsAtOnce`."""
        self._asked.setdefault(key, compute)

    def give(self, kept: Norms) -> None:
        """See `ops.dora.NormsAtOnce`."""
        asked, self._asked = self._asked, {}
        again, self._before = asked.keys() == self._before, set(asked)
        if asked.keys() != self._norms.keys():
            self._graph, self._norms = None, Norms()
            if again and not self._refused:
                self._capture(asked)
        if self._graph is not None:
            self._graph.replay()
            kept.update(self._norms)

    def clear(self) -> None:
        """Free the graph, and what it reads."""
        self._asked.clear()
        self._before.clear()
        self._graph, self._norms, self._refused = None, Norms(), False

    def _capture(self, asked: NormCalls) -> None:
        """Make the graph, know from now on that there can be none, or lack memory for it now."""
        try:
            self._graph, found = self._record(asked)
        except (RuntimeError, TloraError) as error:
            clear_frames(error.__traceback__)
            if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error):
                self._before.clear()
            else:
                self._refused = True
            told = logging.WARNING if self._refused else logging.INFO
            logger.log(told, "norms are not computed at once: %s: %s", type(error).__name__, error)
            return
        for (key, compute), norms in zip(asked.items(), found, strict=True):
            self._norms[key] = norms, compute

    def _record(self, asked: NormCalls) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        """The graph that computes what is asked for, and where it leaves that."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        outer = torch.cuda.current_stream(self.device)
        with torch.cuda.device(self.device), lengths_kept(self._lengths), torch.no_grad():
            # What is kept of weights, and the kernels, are there before the capture.
            needed = sum(compute().nbytes for compute in asked.values())
            if 2 * needed + RESERVED_BYTES > free_gpu_bytes(self.device):
                raise torch.cuda.OutOfMemoryError(f"out of memory: {needed} bytes of norms")
            try:
                with torch.cuda.graph(graph, pool=pool):
                    found = [compute() for compute in asked.values()]
            except (RuntimeError, TloraError):
                forget_capture(self.device, outer, pool)
                raise
        return graph, found


def agreed(mine: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether it holds on every process of a group."""
    if group is None:
        return mine
    least = torch.tensor(int(mine), device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return bool(least.item())


def free_gpu_bytes(device: torch.device) -> int:
    """Bytes of a GPU that new tensors can have."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def add_gradients(losses: Tensor, model: nn.Module, kept: int) -> None:
    """Do `losses.sum().backward()`, with one sum over all parameters in place of one for each.

    Of a Llama layer's fourteen banks that would be as many kernels, each of a few microseconds.
    What is summed stays until the end, in the place of activations that are gone by then.

    losses   [J]; nothing is done where they depend on no parameter
    kept     bytes of those activations: larger gradients are added one by one
    """
    if not losses.requires_grad:
        return
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    if not may_add_together(leaves, kept):
        losses.sum().backward()  # type: ignore[no-untyped-call]
        return
    add_together(leaves, torch.autograd.grad(losses.sum(), leaves, allow_unused=True))


def may_add_together(leaves: Sequence[Tensor], kept: int) -> bool:
    """Whether gradients of these leaves fit where activations were, and each has one already."""
    large = sum(leaf.nbytes for leaf in leaves) > kept
    return not large and not any(leaf.grad is None or _is_watched(leaf) for leaf in leaves)


def add_together(leaves: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Add to the gradients of leaves what was found, where anything was."""
    pairs = [(leaf.grad, new) for leaf, new in zip(leaves, found, strict=True) if new is not None]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))


def _is_watched(leaf: Tensor) -> bool:
    """Whether somebody waits for the moment at which a gradient has been added."""
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def overwrite(own: PackedBatch, row: PackedBatch) -> None:
    """Overwrite the row of a graph by another one with the same key, on the CPU."""
    for name, tensor in row.tensors().items():
        getattr(own, name).copy_(tensor, non_blocking=True)
    refresh(own.segments, own.keys, own.target_segments)


def copied(row: PackedBatch) -> PackedBatch:
    """The row in tensors of its own."""
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in row.tensors().items()}
    return replace(row, **copies)


def broken(error: Exception) -> PlanNotRunnable:
    """Error for a capture that failed and left other processes halfway."""
    return PlanNotRunnable(
        "a row could not be captured as a CUDA graph",
        found=f"{type(error).__name__}: {error}",
        reason="its gathers or its sums over processes were interrupted",
        help="train without graphs: --no-cuda-graphs, or TrainerOptions(cuda_graphs=False)",
    )


def forget_capture(device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """Restore streams, memory and random numbers after a capture that failed.

    torch leaves the stream of a capture, and tells its allocator and its generator of the end, only
    where it ends well.

    stream   which was the current one before the capture
    pool     in which the capture allocated
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # where the allocator was told
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator: Any = torch.cuda.default_generators[index]
    fresh: Any = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh)
