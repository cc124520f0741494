"""The adapters of all sites of a row, packed by one launch at its start.

`pack` runs at every site, for adapters change between rows. Of a row that is captured as a CUDA
graph all sites are known: it was run before. What they pack then is noted, and the graph begins
with one launch for all of it, where four a Llama layer would each wait for the one before.

Ranks and slots are read from the sites' tables on the device, so that jobs come and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tlora_fx.codegen.kernels.pack import STRIP
from tlora_fx.ops.kernels.support import Site


@dataclass(frozen=True, slots=True)
class Work:
    """Packing of one site: addresses, and where its adapters stand behind the weight.

    reads    of a, b, ranks, slots
    writes   of a and b as they are packed, and of their flags
    blocks   of packed rows
    tail     address of the weight, elements from one of its rows to the next, rows below it and
             columns beside it where its adapters begin, and how many are theirs; None where they
             do not stand there
    """

    site: Site
    jobs: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    blocks: int
    tail: tuple[int, int, int, int, int] | None

    @property
    def targets(self) -> list[object]:
        """Memory that no other packing may write."""
        address, _, below, beside, _ = self.tail or (0, 0, 0, 0, 0)
        return [self.writes[0], *([(address, below, beside)] if self.tail else [])]

    @property
    def form(self) -> tuple[Any, ...]:
        """Properties that all sites of one launch share."""
        site = self.site
        return site.adapter_dtype, site.dtype, site.rank_block, site.job_capacity, self.jobs

    def strips(self) -> Iterator[list[int]]:
        """The table's rows: as the kernel reads them."""
        site, (a, b, ranks, slots), (a_packed, b_packed, flags) = self.site, self.reads, self.writes
        counts = [-(-columns // STRIP) for columns in (site.inner, site.outer)]
        upright, place = site.layout == "out_in", 0
        ends = self.blocks + (self.tail[-1] // site.rank_block if self.tail else 0)
        for source, target, width, count, in_rows in (
            (a, a_packed, site.inner, counts[0], upright),
            (b, b_packed, site.outer, counts[1], not upright),
        ):
            tail, stride = self._tail(in_rows)
            for strip in range(count):
                yield [
                    source, target, flags + 4 * place, sum(counts), ranks, slots, self.blocks, ends,
                    width, strip * STRIP, tail, stride, int(in_rows),
                ]  # fmt: skip
                place += 1

    def _tail(self, in_rows: bool) -> tuple[int, int]:
        """Address of the first number behind the weight, and the step of its rows."""
        if self.tail is None:
            return 0, 0
        address, stride, below, beside, _ = self.tail
        size = getattr(torch, self.site.dtype).itemsize
        return address + size * (below * stride if in_rows else beside), stride


@dataclass(slots=True, eq=False)
class Packing:
    """All works of a row, and the tables of their launches.

    works    as they were noted
    served   those that a launch of `start` does
    """

    works: list[Work] = field(default_factory=list)
    served: frozenset[Work] = frozenset()
    tables: list[tuple[tuple[Any, ...], Tensor, int]] = field(default_factory=list)

    def settle(self, device: torch.device) -> None:
        """Make the tables; a site that shares what it writes with another packs for itself."""
        works = list(dict.fromkeys(self.works))
        self.tables.clear()
        claims = Counter(target for work in works for target in work.targets)
        alone = [work for work in works if all(claims[target] == 1 for target in work.targets)]
        alone.sort(key=lambda work: repr(work.form))
        for form, group in groupby(alone, key=lambda work: work.form):
            rows = [strip for work in group for strip in work.strips()]
            table = torch.tensor(rows, dtype=torch.int64).to(device)
            self.tables.append((form, table, max(row[7] for row in rows)))
        self.served = frozenset(alone)

    def start(self) -> None:
        """Pack all sites."""
        if self.tables:
            from tlora_fx.ops.kernels.pack_strips import pack_strips
        for (stored, compute, block, capacity, jobs), table, blocks in self.tables:
            pack_strips(table, blocks, jobs, stored, compute, block, capacity)


# Of the process: autograd runs backwards, and layers again, in threads of its own.
_noting: list[Packing] = []
_serving: list[Packing] = []


@contextmanager
def noting(packing: Packing) -> Iterator[None]:
    """Note what sites pack meanwhile."""
    with _held(_noting, packing):
        yield


@contextmanager
def serving(packing: Packing) -> Iterator[None]:
    """Pack what was noted, at once; meanwhile its sites pack nothing."""
    packing.start()
    with served(packing):
        yield


@contextmanager
def served(packing: Packing) -> Iterator[None]:
    """Within it the noted sites are packed already, and pack nothing themselves."""
    with _held(_serving, packing):
        yield


@contextmanager
def _held(stack: list[Packing], packing: Packing) -> Iterator[None]:
    stack.append(packing)
    try:
        yield
    finally:
        stack.pop()


def is_noting() -> bool:
    """Whether somebody asks what sites pack."""
    return bool(_noting)


def note(work: Work) -> None:
    """Tell all packings that take notes what a site packs."""
    for packing in _noting:
        packing.works.append(work)


def is_serving() -> bool:
    """Whether some sites are packed already."""
    return bool(_serving)


def is_served(work: Work) -> bool:
    """Whether the site of a work is packed already."""
    return any(work in packing.served for packing in _serving)
