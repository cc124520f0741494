"""Forward and backward of rows as CUDA graphs: one start in place of thousands.

A small row takes the host longer to launch than the GPU to compute. A graph holds what one row of
a size launched, with the sizes and addresses of then, so each size has its own tensors, which are
overwritten, and a graph. Weights and gradients stay where they are, so optimizers know nothing of
it.

Rows of a mix of jobs are padded to the few steps of its ladder. Once each step has run as it is,
all are captured at once, the largest first, so that the others take its memory (`capture_steps`).
Rows that no step holds are padded to one of more sizes (see `repeating_form`), each of which is
captured when it comes for the second time.

An operator that reads a table of jobs on the host refuses to be captured; such a model, and rows
that are large enough to keep the GPU busy, run as they are.

Copies that gather a sharded base become part of a graph, and so do sums over processes: those make
their graphs together.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.errors import PlanNotRunnable, TloraError
from tlora_fx.model.batch import PackedBatch, example_row, padded_by, size_of
from tlora_fx.model.loss import segments_of_chunks
from tlora_fx.model.preference import with_base
from tlora_fx.model.row_ladder import RowLadder, RowSize
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.dora import Lengths, Norms, lengths_kept, norms_at_once
from tlora_fx.ops.kernels import release
from tlora_fx.ops.kernels.pack_together import Packing, noting, served, serving
from tlora_fx.ops.kernels.select import cut_by_jobs
from tlora_fx.parallel.capturing import (
    add_gradients,
    copied,
    forget_capture,
    free_gpu_bytes,
    is_out_of_memory,
    overwrite,
    throw_gradients_away,
)
from tlora_fx.parallel.peer_copies import SideStreams

logger = logging.getLogger(__name__)
MAX_GRAPHS = 48
#: Rows that tell how large those are that come.
RECENT_ROWS = 256
# Rows of a form before it is captured: lengths that never come again are many.
WARMUP_ROWS = 1
# What a row needs beyond the activations that its forward keeps.
ACTIVATION_MARGIN, RESERVED_BYTES = 1.3, 2**28
# How norms are computed that are asked for.
NormCalls = dict[tuple[object, ...], Callable[[], Tensor]]


class GraphKey(NamedTuple):
    """The key of a captured CUDA graph.

    stage   index among the pipeline stages of the process; 0 where it runs whole rows
    slot    index among the rows that are under way at a time; 0 where it runs whole rows
    rows    the sizes of the rows that it replays
    kind    of the rows' losses (see `kind_of`); the jobs of a row that is scored for what pairs are
            compared with
    """

    stage: int
    slot: int
    rows: RowSize
    kind: int | tuple[int, ...] = 0


@dataclass(eq=False)
class CapturedRow:
    """One form's tensors, and what is launched for a row of it.

    row             a row of the form on the device, its tables on the CPU; overwritten by the next
    terms           losses of the row that is in it, with who asks for their log-probabilities
    weights         [J] likewise
    adapted_sites   sites whose kernels are in it
    lengths         what is kept of weights, if anything; see `lengths_kept`
    """

    model: SuperModel
    row: PackedBatch
    weights: Tensor
    device: torch.device
    lengths: Lengths | None

    def __post_init__(self) -> None:
        self.terms = self.row.terms
        self.row = copied(self.row).to(self.device)
        self.weights = self.weights.clone()
        self.adapted_sites = self.model.adapted_sites
        self._packing = Packing()

    def load(self, row: PackedBatch, weights: Tensor) -> None:
        """Overwrite the row by another one of its form."""
        overwrite(self.row, row)
        self.terms = row.terms
        if row.pairs:
            pairs = tuple(own.to(self.device) for own in row.pairs)
            compared = None if row.compared is None else row.compared.to(self.device)
            self.row = replace(self.row, pairs=pairs, compared=compared)
        self.weights.copy_(weights, non_blocking=True)

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Note what is launched; nothing is run.

        pool      of memory, shared by graphs that never run at once
        stream    of the model's device, which is current
        raises    RuntimeError or TloraError where the model does what no graph can hold
        """
        raise NotImplementedError

    def release(self) -> None:
        """Release tensors that the graph read on the device; it is not replayed any more."""
        own = self.row.target_segments
        release(self.row.segments, self.row.keys, own, *segments_of_chunks(own))


Captured = TypeVar("Captured", bound=CapturedRow)


class GraphCache(Generic[Captured]):
    """The graphs of a model in one process, by `GraphKey`.

    largest_row   tokens of the largest row that may come: its memory stays free; 0: rows are run
                  as they are
    retries       a row that finds no memory has the graphs freed, and runs again: memory stays
                  free for the largest of the rows that came lately alone
    ladder        steps that rows are padded to
    group         processes that run each row together, with sums over them in between
    gathering     streams on which a sharded base is gathered
    gathered      bytes that gathered weights take at once
    lengths       what is kept of weights; None where weights do not keep their places
    refused       why no row is captured, or ""
    most          tokens of the largest row that is captured: processes that cut its work among
                  them have less to do each, and as much to launch
    skipped_no_memory      how often there was no memory for a graph
    captured      how many graphs were made
    rows_run      rows, or forwards of stages, that this process has run
    rows_replayed those of them that ran as a graph
    """

    runs: ClassVar[str]

    def __init__(
        self,
        model: SuperModel,
        device: torch.device,
        largest_row: int,
        *,
        group: dist.ProcessGroup | None = None,
        gathering: SideStreams | None = None,
        gathered: int = 0,
        lengths: Lengths | None = None,
    ) -> None:
        self.model, self.device, self.largest_row = model, device, largest_row
        self.group, self.gathering, self.gathered = group, gathering, gathered
        self.retries = False
        self.refused = ""
        self.ladder = RowLadder()
        self.most = CAPTURED_TOKENS * (1 if group is None else dist.get_world_size(group))
        self.skipped_no_memory = self.captured = 0
        self.rows_run = self.rows_replayed = 0
        self._graphs: OrderedDict[GraphKey, Captured] = OrderedDict()
        self._seen: Counter[GraphKey] = Counter()
        self._came: Counter[GraphKey] = Counter()
        self._lately: deque[int] = deque(maxlen=RECENT_ROWS)
        self._under_way = 1
        self._pools: dict[int, Any] = {}
        # Bytes that the largest row of each slot's graphs keeps in their pool.
        self._held: dict[int, int] = {}
        self._stream: torch.cuda.Stream | None = None
        self._lengths = lengths

    @property
    def beside(self) -> int:
        """Tokens of the row whose memory stays free beside the graphs."""
        return max(self._lately) if self.retries and self._lately else self.largest_row

    @property
    def keys(self) -> list[RowSize]:
        """Those that have a graph, once for each stage and slot."""
        return [key.rows for key in self._graphs]

    def clear(self) -> None:
        """Release all graphs and their memory, and forget which rows came."""
        while self._graphs:
            self._graphs.popitem(last=False)[1].release()
        self._seen.clear()
        self._came.clear()
        self._held.clear()
        if self._lengths is not None:
            self._lengths.clear()

    def use(self, ladder: RowLadder) -> None:
        """Pad rows to the steps of another ladder from now on.

        Graphs of the last one are freed, but of an open model: jobs that come and go change its
        ladder, and whoever joins may have the rows of somebody who has left.
        """
        if ladder != self.ladder:
            if not self.model.is_open:
                self.forget()
            self.ladder = ladder

    def forget(self) -> None:
        """Free all graphs, for rows run other code, or have other sizes, from now on."""
        if self._graphs:
            # The last round may still read them.
            torch.cuda.synchronize(self.device)
        self.clear()

    def _may_capture(self, row: PackedBatch) -> bool:
        may = not self.refused and self.largest_row > 0 and len(row.target_rows) > 0
        # What compares sequences runs between two graphs: other processes would have to wait.
        together = self.group is not None or self.gathering is not None
        return may and row.input_ids.numel() <= self.most and not (row.pairs and together)

    def _loaded(self, key: GraphKey, row: PackedBatch, weights: Tensor) -> Captured | None:
        """The graph of a key, with this row in it; None where there is none."""
        self._seen[key._replace(slot=0)] += 1
        self._came[key] += 1
        graph = self._graphs.get(key)
        if graph is None:
            return None
        if not self.model.adapted_sites <= graph.adapted_sites:
            # A job has come to a site whose kernels are not in it.
            self._graphs.pop(key).release()
            return None
        self._graphs.move_to_end(key)
        graph.load(row, weights)
        self.rows_replayed += not isinstance(key.kind, tuple)
        return graph

    def _is_worth(self, key: GraphKey) -> bool:
        """Whether a form has come again, and has a place, or one that a much rarer one takes."""
        if self._seen[key._replace(slot=0)] <= WARMUP_ROWS:
            return False
        there = self._there(key)
        return len(there) < MAX_GRAPHS or self._came[key] > 2 * self._came[there[0]]

    def _there(self, key: GraphKey) -> list[GraphKey]:
        """What has a graph of the same stage and slot, the one that was not used longest first."""
        return [other for other in self._graphs if other[:2] == key[:2]]

    def _keep(self, key: GraphKey, graph: Captured, kept: int, beside: int | None = None) -> None:
        """Capture a graph whose row has been run, if there is memory for it.

        kept      bytes that the row's forward kept for its backward
        beside    tokens of a row for which memory stays free; by default of the property's
        raises    PlanNotRunnable where a capture that fails leaves other processes waiting, or
                  FSDP2 in the middle of a gather
        """
        beside = self.beside if beside is None else beside
        taken = self._held.get(key.slot, 0)
        if not self._fits_memory(kept, max(0, kept - taken), key.rows.tokens, beside):
            self._leave(key, graph)
            return
        outer = torch.cuda.current_stream(self.device)
        if all(other.slot != key.slot for other in self._graphs):
            # torch forgets a pool of which no graph is left, and takes it for none that it knows.
            self._pools[key.slot] = torch.cuda.graph_pool_handle()
        pool = self._pools[key.slot]
        try:
            with torch.cuda.device(self.device):
                # Memory is used again by graphs that were captured on the same stream.
                self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                graph.capture(pool, self._stream)
        except (RuntimeError, TloraError) as error:
            if self.group is not None or self.gathering is not None:
                raise broken(error) from error
            # Nothing was run: whatever the model does, it goes on as without graphs. A checkpoint
            # in the middle of its forward would take what others save until its frame is gone.
            clear_frames(error.__traceback__)
            forget_capture(self.device, outer, pool)
            self._fail(key, graph, error)
            return
        self._graphs[key] = graph
        self._held[key.slot] = max(kept, taken)
        self.captured += 1
        there = self._there(key)
        if len(there) > MAX_GRAPHS:
            self._graphs.pop(there[0]).release()
        logger.debug("captured %s of %s", self.runs, key)

    def _leave(self, key: GraphKey, graph: Captured) -> None:
        """Leave a form for now: there is no memory for its graph."""
        self._seen[key._replace(slot=0)] = 0
        self.skipped_no_memory += 1
        graph.release()
        logger.info("no memory for a CUDA graph of %s", key)

    def _fail(self, key: GraphKey, graph: Captured, error: Exception) -> None:
        if is_out_of_memory(error):
            self._leave(key, graph)
            return
        self.refused = f"{type(error).__name__}: {error}"
        graph.release()
        self.clear()
        logger.warning("%s are not run as CUDA graphs: %s", self.runs, self.refused)

    def _fits_memory(self, kept: int, needed: int, tokens: int, beside: int) -> bool:
        """Whether a graph fits, beside the rows that are under way.

        Processes that run rows together all have it, or none.

        kept, tokens   of the graph's row
        needed         bytes of what it keeps for which its pool has no memory yet
        beside         tokens of the largest of the rows that are under way
        """
        rows = ACTIVATION_MARGIN * (needed + kept * self._under_way * beside / tokens)
        fits = rows + 2 * self.gathered + RESERVED_BYTES < free_gpu_bytes(self.device)
        return agreed(fits, self.group, self.device)


class RowGraphs(GraphCache["RowGraph"]):
    """The graphs of whole rows; see `GraphCache`.

    stays   whether weights keep their places: what follows from them is kept then
    norms   of rows too large to be captured; None where weights do not keep their places
    """

    runs = "rows"

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
        super().__init__(
            model, device, largest_row,
            group=group, gathering=gathering, gathered=gathered, lengths={} if stays else None,
        )  # fmt: skip
        self.norms = NormGraph(device, self._lengths) if self._lengths is not None else None
        self._waiting: dict[RowSize, RowGraph] = {}
        self._settled = False

    def run(self, row: PackedBatch, weights: Tensor) -> Tensor | None:
        """Forward and backward of a row, as a graph or on the way to one.

        row       on the CPU
        weights   [J] on the device
        returns   [J] weighted loss sums; None where the row is to be run as it is
        """
        self._lately.append(row.input_ids.numel())
        if not self._may_capture(row):
            return None
        row = padded_by(self.ladder, row)
        key = GraphKey(0, 0, size_of(row), kind_of(row))
        graph = self._loaded(key, row, weights)
        if graph is not None:
            return graph.replay()
        if row.is_plain and key.rows in self.ladder.steps and self._waits:
            return self._run_first(key.rows, row, weights)
        if not self._is_worth(key):
            return None
        made = ComparingRowGraph if row.pairs else RowGraph
        graph = made(self.model, row, weights, self.device, self._lengths, self.gathering)
        losses, kept = graph.run()
        self._keep(key, graph, kept)
        return losses

    def with_reference(self, row: PackedBatch, weights: Tensor) -> PackedBatch:
        """The row whose pairs know what they are compared with, where a graph can say it.

        row   on the CPU; what it is compared with is left in it where that is to be run as it is
        """
        compared = row.compared
        if compared is None or not (self._may_capture(row) and self._may_capture(compared)):
            return row
        compared = padded_by(self.ladder, compared)
        jobs = tuple(own.job for own in row.pairs)
        key = GraphKey(0, 0, size_of(compared), jobs)
        graph = self._loaded(key, compared, weights)
        if graph is not None:
            losses = graph.replay()
        elif self._is_worth(key):
            graph = ScoringGraph(
                self.model, compared, weights, self.device, self._lengths, self.gathering, jobs
            )
            losses, kept = graph.run()
            self._keep(key, graph, kept)
        else:
            return row
        pairs = with_base(row.pairs, losses, compared.target_segments)
        return replace(row, pairs=pairs, compared=None)

    @property
    def _waits(self) -> bool:
        """Whether rows of the ladder wait for `capture_steps`.

        Jobs of an open model change the ladder whenever they come and go: its rows are captured
        one by one, when they come again.
        """
        return not self._settled and not self.model.is_open

    def _run_first(self, step: RowSize, row: PackedBatch, weights: Tensor) -> Tensor:
        """Run a row of a step of the ladder as it is, and note what its graph needs."""
        graph = self._waiting.get(step)
        if graph is None:
            graph = self._waiting[step] = RowGraph(
                self.model, row, weights, self.device, self._lengths, self.gathering
            )
        else:
            graph.load(row, weights)
        return graph.run()[0]

    def forget(self) -> None:
        """See `GraphCache.forget`; the steps are captured by the next `capture_steps`."""
        super().forget()
        self._settled = False

    def capture_steps(self, beside: int) -> None:
        """Capture the steps of the ladder for which there is memory, the largest first.

        Once a ladder, between rounds. Steps that no row has come to run on a row of no meaning,
        whose gradients are thrown away.

        beside   tokens of a row for which memory stays free beside the graphs
        """
        if self.refused or not self._waits or self.largest_row == 0:
            return
        self._settled = True
        steps = [step for step in self.ladder.steps if step.tokens <= self.most]
        weights = torch.zeros(len(self.model.jobs), dtype=torch.float64, device=self.device)
        for step in steps:
            if step not in self._waiting:
                row = example_row(step, len(self.model.jobs))
                graph = RowGraph(
                    self.model, row, weights, self.device, self._lengths, self.gathering
                )
                graph.run(adds=False)
                self._waiting[step] = graph
        waiting, self._waiting = self._waiting, {}
        # What rows took is free for the graphs, which keep it.
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        for step in sorted(waiting, reverse=True):
            graph = waiting.pop(step)
            if self.refused:
                graph.release()
            else:
                self._keep(GraphKey(0, 0, step), graph, graph.kept, beside)

    def forms(self, row: PackedBatch) -> Iterator[PackedBatch]:
        """Rows whose kernels will be started: this one in its form, and the ladder's other steps.

        row   on the CPU, as all that are given
        """
        formed = self.formed(row)
        yield formed
        if self._is_step(formed):
            for step in self.ladder.steps:
                if step.tokens <= self.most and step != size_of(formed):
                    yield example_row(step, len(self.model.jobs))

    @contextmanager
    def asking(self, formed: PackedBatch) -> Iterator[None]:
        """Run nothing of a row within this context but what asks for its kernels.

        They are those that `run` starts, or that are launched where it returns None.

        formed   of `forms`
        """
        kept: Lengths | None = None if self._lengths is None else {}
        if self._is_step(formed):
            with noting(Packing()), lengths_kept(kept):
                yield
        else:
            too_large = formed.input_ids.numel() > self.most
            with cut_by_jobs(too_large or bool(self.refused)), lengths_kept(kept):
                yield

    def _is_step(self, formed: PackedBatch) -> bool:
        return formed.is_plain and size_of(formed) in self.ladder.steps and self._waits

    def formed(self, row: PackedBatch) -> PackedBatch:
        """The row as a graph would run it: launched, its kernels do the same."""
        return padded_by(self.ladder, row) if self._may_capture(row) else row

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
        """See `GraphCache.clear`; norms go too."""
        super().clear()
        for graph in self._waiting.values():
            graph.release()
        self._waiting.clear()
        if self.norms is not None:
            self.norms.clear()


@dataclass(eq=False)
class RowGraph(CapturedRow):
    """A graph of a whole row's forward and backward.

    gathering   streams that the model uses beside its own
    """

    gathering: SideStreams | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._losses, self.kept = torch.empty(0), 0
        self._logprobs: Tensor | None = None

    def run(self, *, adds: bool = True) -> tuple[Tensor, int]:
        """Run forward and backward as they are.

        adds      gradients are added to those that there are; else they are thrown away
        returns   [J] weighted loss sums, free of what computed them: a capture must find no
                  gradient's accumulator of another stream alive; and the bytes that the forward
                  kept for the backward
        """
        # What it is compared with runs by other adapters: nothing of that is noted.
        row = self._compared()
        before = torch.cuda.memory_allocated(self.device)
        with noting(self._packing), lengths_kept(self.lengths):
            losses = self.model.weighted(row, self.weights)
            self.kept = max(0, torch.cuda.memory_allocated(self.device) - before)
            if adds:
                add_gradients(losses, self.model, self.kept)
            else:
                throw_gradients_away(losses, self.model, self.kept)
        self._tell(None if self.row.terms is None else self.row.terms.logprobs)
        return losses.detach(), self.kept

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """See `CapturedRow.capture`."""
        self._packing.settle(self.device)
        # Its kernel is compiled before the capture, which can load none.
        self._packing.start()
        self._graph = self._noted(self._launch, pool, stream, serving(self._packing))

    def _noted(
        self,
        launch: Callable[[], None],
        pool: Any,
        stream: torch.cuda.Stream,
        packed: AbstractContextManager[None],
    ) -> torch.cuda.CUDAGraph:
        """A graph of what is launched."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream), packed, lengths_kept(self.lengths):
            launch()
        return graph

    def _launch(self) -> None:
        """Launch what the graph holds; it leaves losses and log-probabilities in tensors of its."""
        losses = self.model.weighted(self.row, self.weights)
        add_gradients(losses, self.model, self.kept)
        if self.gathering is not None:
            self.gathering.join()
        self._losses = losses.detach()
        self._logprobs = None if self.row.terms is None else self.row.terms.logprobs

    def _compared(self) -> PackedBatch:
        """The row, whose pairs know the losses of what they are compared with."""
        with lengths_kept(self.lengths):
            return self.model.with_reference(self.row)

    def _tell(self, logprobs: Tensor | None) -> None:
        """Give jobs the log-probabilities of the row that is in the graph."""
        if self.terms is not None and logprobs is not None:
            self.terms.keep(logprobs)

    def release(self) -> None:
        """See `CapturedRow.release`."""
        self._graph = None
        super().release()

    def replay(self) -> Tensor:
        """Run the row as it was loaded; [J], a copy."""
        assert self._graph is not None, "captured before"
        self._graph.replay()
        self._tell(None if self._logprobs is None else self._logprobs.clone())
        return self._losses.clone()


@dataclass(eq=False)
class ComparingRowGraph(RowGraph):
    """Two graphs of a row in which jobs have losses of whole sequences: forward and backward.

    The first leaves the loss of each target row, and the second takes what their gradients are.
    What compares sequences runs between them as it is: it may be a function of the user's.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._backward: torch.cuda.CUDAGraph | None = None
        self._forwarded: Tensor | None = None
        self._token_losses = self._gradients = torch.empty(0)

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """See `CapturedRow.capture`."""
        super().capture(pool, stream)
        self._gradients = torch.zeros_like(self._token_losses)
        packed = served(self._packing)
        self._backward = self._noted(self._launch_backward, pool, stream, packed)

    def _launch(self) -> None:
        with self.model.weighing(self.weights):
            self._forwarded = self.model.token_losses(self.row)
        self._token_losses = self._forwarded.detach()
        self._logprobs = None if self.row.terms is None else self.row.terms.logprobs

    def _launch_backward(self) -> None:
        forwarded, self._forwarded = self._forwarded, None
        assert forwarded is not None, "the forward was launched before"
        add_gradients(forwarded * self._gradients, self.model, self.kept)

    def release(self) -> None:
        """See `CapturedRow.release`."""
        self._backward = None
        super().release()

    def replay(self) -> Tensor:
        """Run the row as it was loaded; [J]."""
        assert self._graph is not None, "captured before"
        assert self._backward is not None, "captured before"
        row = self._compared()
        self._graph.replay()
        self._tell(None if self._logprobs is None else self._logprobs.clone())
        # A function may keep what it is given: the next row overwrites what is in the graph.
        losses = self._token_losses.clone().requires_grad_()
        sums = self.model.sums_of(row, losses) * self.weights
        self._gradients.copy_(torch.autograd.grad(sums.sum(), losses)[0])
        self._backward.replay()
        return sums.detach()


@dataclass(eq=False)
class ScoringGraph(RowGraph):
    """A graph of the losses of a row's targets by what some jobs are compared with.

    jobs   those, by index
    """

    jobs: tuple[int, ...]

    def run(self, *, adds: bool = True) -> tuple[Tensor, int]:
        """The losses, [N]; nothing is kept for a backward."""
        with lengths_kept(self.lengths):
            return self.model.score(self.row, self.jobs), 0

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """See `CapturedRow.capture`; sites pack for themselves, for the adapters change in it."""
        self._graph = self._noted(self._launch, pool, stream, nullcontext())

    def _launch(self) -> None:
        self._losses = self.model.score(self.row, self.jobs)


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
            if is_out_of_memory(error):
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


def kind_of(row: PackedBatch) -> int:
    """The kind of a row's losses: those of one kind are computed by the same launches.

    They are cross entropy, those of `TokenTerms`, and these with smoothed labels; each beside
    losses of whole sequences, or without.
    """
    return (0 if row.terms is None else 1 + row.terms.smooths) + 3 * bool(row.pairs)


def broken(error: Exception) -> PlanNotRunnable:
    """Error for a capture that failed and left other processes halfway."""
    return PlanNotRunnable(
        "a row could not be captured as a CUDA graph",
        found=f"{type(error).__name__}: {error}",
        reason="its gathers or its sums over processes were interrupted",
        help="train without graphs: --no-cuda-graphs, or TrainerOptions(cuda_graphs=False)",
    )
