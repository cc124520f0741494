"""Rows of single tokens as CUDA graphs: one start in place of the thousands of launches of a token.

A row is filled up to one of few sizes, by sequences of one token that nobody reads, and each size
has a graph. Pages, block tables and the numbers that draw stay in place and are overwritten. What
is drawn is part of the graph, so a token waits for the host once.

Graphs and pages outlive a call of `Sampler.sample`: adapters stay where they are when they train.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor

from tlora_fx.errors import TloraError
from tlora_fx.model.batch import SMALLEST, PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.kernels import release
from tlora_fx.ops.kernels.pack_together import Packing, noting, serving
from tlora_fx.ops.paged_attention import KeyValuePages, RowPages
from tlora_fx.parallel.capturing import copied, forget_capture, is_out_of_memory, overwrite
from tlora_fx.runtime.sampling.draw import DrawOptions, draw_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row of which each sequence gets a token.

    row       on the CPU
    pages     where its tokens are kept, and what they see; on the CPU
    numbers   float64 [n], by which the tokens are drawn; on the CPU
    """

    row: PackedBatch
    pages: RowPages
    numbers: Tensor

    def to(self, device: torch.device) -> TokenRow:
        """The same on a device."""
        numbers = self.numbers.to(device, non_blocking=True)
        return TokenRow(self.row.to(device), self.pages.to(device), numbers)


def draw_row(
    model: SuperModel, cache: KeyValuePages, given: TokenRow, options: DrawOptions
) -> tuple[Tensor, Tensor]:
    """A token of each sequence, int64 [n], and its log-probability, [n].

    given   on the model's device
    """
    start = 0

    def draw(logits: Tensor) -> Tensor:
        nonlocal start
        start += len(logits)
        return draw_tokens(logits, given.numbers[start - len(logits) : start], options)

    with cache.row(given.pages):
        return model.draw(given.row, draw)


def size_for(sequences: int) -> int:
    """Sequences of the row that so many are filled up to: a power of two."""
    return max(SMALLEST, 1 << (sequences - 1).bit_length())


class TokenGraph:
    """The graph of rows of one size.

    launch   draws the tokens of a row on the device
    """

    def __init__(
        self,
        given: TokenRow,
        device: torch.device,
        launch: Callable[[TokenRow], tuple[Tensor, Tensor]],
    ) -> None:
        pages = given.pages.cloned()
        self._given = TokenRow(copied(given.row), pages, given.numbers.clone()).to(device)
        self._launch, self._device = launch, device
        self._packing = Packing()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._drawn: tuple[Tensor, Tensor] | None = None

    def run(self) -> tuple[Tensor, Tensor]:
        """Launch the row that is in it, and note what its graph packs."""
        with noting(self._packing):
            return self._launch(self._given)

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Note what is launched; nothing is run.

        raises   RuntimeError or TloraError where the model does what no graph can hold
        """
        graph = torch.cuda.CUDAGraph()
        self._packing.settle(self._device)
        self._packing.start()
        with torch.cuda.graph(graph, pool=pool, stream=stream), serving(self._packing):
            self._drawn = self._launch(self._given)
        self._graph = graph

    def replay(self, given: TokenRow) -> tuple[Tensor, Tensor]:
        """Draw the tokens of another row; they are overwritten by the next."""
        assert self._graph is not None, "captured before"
        assert self._drawn is not None, "captured before"
        overwrite(self._given.row, given.row)
        self._given.pages.overwrite(given.pages)
        self._given.numbers.copy_(given.numbers, non_blocking=True)
        self._graph.replay()
        return self._drawn

    def release(self) -> None:
        """Release tensors that the graph read on the device; it is not replayed any more."""
        self._graph = None
        row = self._given.row
        release(row.segments, row.keys, row.target_segments)


@dataclass(eq=False, repr=False)
class TokenGraphs:
    """The graphs of a model's rows of single tokens, by size, over one set of pages.

    width      pages of a sequence at most
    replayed   rows that ran as graphs
    refused    why no row is captured, or ""
    """

    model: SuperModel
    device: torch.device
    cache: KeyValuePages
    options: DrawOptions
    width: int
    replayed: int = 0
    refused: str = ""
    _graphs: dict[int, TokenGraph] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    _pool: Any = None
    _stream: torch.cuda.Stream | None = None
    _places: tuple[object, ...] = ()

    def fits(self, pages: int, width: int, options: DrawOptions) -> bool:
        """Whether these graphs, and what they hold, serve another call."""
        same = self.options == options and self._places == self._where()
        return same and not self.refused and pages <= self.cache.pages and width <= self.width

    def __post_init__(self) -> None:
        self._places = self._where()

    def _where(self) -> tuple[object, ...]:
        """Where everything stands that a graph reads, and which code runs."""
        model = self.model
        places = tuple(each.data_ptr() for each in model.parameters())
        return places, model.adapted_sites, model.is_compiled

    def draw(self, given: TokenRow) -> tuple[Tensor, Tensor]:
        """A token of each sequence and its log-probability, on the device until the next row.

        A size is captured when it comes for the second time.

        given   on the CPU, of one of the sizes
        """
        size = len(given.numbers)
        graph = self._graphs.get(size)
        if graph is not None:
            self.replayed += 1
            return graph.replay(given)
        if self.refused or size not in self._seen:
            self._seen.add(size)
            return self._launch(given.to(self.device))
        graph = TokenGraph(given, self.device, self._launch)
        drawn = graph.run()
        self._keep(size, graph)
        return drawn

    def release(self) -> None:
        """Free all graphs."""
        while self._graphs:
            self._graphs.popitem()[1].release()

    def _launch(self, given: TokenRow) -> tuple[Tensor, Tensor]:
        return draw_row(self.model, self.cache, given, self.options)

    def _keep(self, size: int, graph: TokenGraph) -> None:
        outer = torch.cuda.current_stream(self.device)
        if not self._graphs:
            # torch forgets a pool of which no graph is left.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(self.device):
                self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                graph.capture(self._pool, self._stream)
        except (RuntimeError, TloraError) as error:
            # Nothing was run: tokens are launched, of this size or from now on.
            clear_frames(error.__traceback__)
            forget_capture(self.device, outer, self._pool)
            if is_out_of_memory(error):
                self._seen.discard(size)
                graph.release()
                logger.info("no memory for a CUDA graph of %d completions", size)
                return
            self.refused = f"{type(error).__name__}: {error}"
            graph.release()
            self.release()
            logger.warning("tokens are not drawn by CUDA graphs: %s", self.refused)
            return
        self._graphs[size] = graph
