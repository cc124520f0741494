"""Storage of all adapters of a site.

Each job's A and B, and their gradients, are views of one leaf a site, so that one operator serves
all jobs while each job's optimizer sees parameters of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlora_fx.ir.graph import AdapterSite, Pieces
from tlora_fx.model.slots import RowTable
from tlora_fx.ops.kernels import refresh, release

Cut = Pieces | None
# Columns that one draw of a mask decides, and the bits of a site's id.
COLUMNS = 8
MASK = (1 << 32) - 1


class AdapterBank(nn.Module):
    """The adapters of J jobs on one frozen linear.

    a        [R, in], rows ranks[j]:ranks[j+1] are job j's A; rows behind the last belong to nobody
    b        [R, out], the same rows are job j's B transposed
    ranks    int32 [J + 1] on the CPU; a job without an adapter has no rows
    scales   float64 [J] on the CPU, what the job's branch is multiplied with
    rates    float64 [J] on the CPU, dropout
    site     int64 [] on the CPU, the site's id in dropout masks; its upper 32 bits are the first
             column block of x where x is a piece of the site's input
    shards   how a and b are cut where processes hold pieces of them
    table    which rows are whose in an open bank, whose jobs come and go; None: they stay
    """

    ranks: Tensor
    scales: Tensor
    rates: Tensor
    site: Tensor

    def __init__(
        self,
        sites: Sequence[AdapterSite | None],
        shape: tuple[int, int],
        dtype: torch.dtype,
        site_id: int,
        rows: int | None = None,
        shards: tuple[Cut, Cut] = (None, None),
    ) -> None:
        """Make an empty bank on the meta device.

        sites    each job's adapter here, None for jobs without one
        shape    (in, out) of the frozen linear, of this process's piece
        rows     R, at least the sum of all ranks, which is the default
        shards   which of a and b are pieces
        """
        super().__init__()
        self.shards = shards
        self.table: RowTable | None = None
        sizes = [0 if site is None else site.rank for site in sites]
        offsets = [sum(sizes[:end]) for end in range(len(sizes) + 1)]
        scales = [0.0 if site is None else site.scaling for site in sites]
        rates = [0.0 if site is None else site.dropout for site in sites]
        rows = offsets[-1] if rows is None else rows
        assert rows >= offsets[-1]
        self.a = nn.Parameter(torch.empty(rows, shape[0], dtype=dtype, device="meta"))
        self.b = nn.Parameter(torch.empty(rows, shape[1], dtype=dtype, device="meta"))
        self.register_buffer("ranks", torch.tensor(offsets, dtype=torch.int32), persistent=False)
        self.register_buffer("scales", torch.tensor(scales, dtype=torch.float64), persistent=False)
        self.register_buffer("rates", torch.tensor(rates, dtype=torch.float64), persistent=False)
        self.register_buffer("site", torch.tensor(site_id, dtype=torch.int64), persistent=False)

    def extra_repr(self) -> str:
        """Sizes and each job's rank, as `print(model)` shows them."""
        spans = [self._rows_of(job) for job in range(len(self.scales))]
        ranks = [stop - start for start, stop in spans]
        return f"in_features={self.a.shape[1]}, out_features={self.b.shape[1]}, ranks={ranks}"

    def materialize(self, device: torch.device) -> None:
        """Give A, B and their gradients zeroed memory on a device."""
        for name in ("a", "b"):
            empty = getattr(self, name)
            leaf = nn.Parameter(torch.zeros_like(empty, device=device))
            leaf.grad = torch.zeros_like(leaf)
            setattr(self, name, leaf)

    def offset_columns(self, piece: int) -> None:
        """Count dropout's columns from where this process's piece of x begins.

        piece    its index; pieces are multiples of 8 columns, which are one block of a mask
        """
        first = piece * self.a.shape[1] // COLUMNS
        self.site = (self.site & MASK) | (first << 32)

    def serves(self, job: int) -> bool:
        """Whether a job has an adapter here."""
        start, stop = self._rows_of(job)
        return stop > start

    def _rows_of(self, job: int) -> tuple[int, int]:
        if self.table is not None:
            start = self.table.offsets[job]
            return start, start + self.table.ranks[job]
        start, stop = self.ranks[job : job + 2].tolist()
        return start, stop

    def open(self, largest: int) -> None:
        """Open the bank for jobs that come and go; nobody has an adapter yet.

        largest   rank that a job may have
        """
        self.table = RowTable.empty(len(self.scales), self.a.shape[0], largest)

    @torch.no_grad()
    def lay(self, table: RowTable, slot: int, site: AdapterSite | None) -> list[Tensor]:
        """Give slots the rows of a table, after the job of one of them has come or gone.

        Jobs that move take values and gradients along; what nobody uses holds zeros. Tables are
        written in place; `refresh_tables` brings them to a device, where captured graphs read them.

        site      the adapter of the slot's job, None where it has none
        returns   rows to be filled with zeros, which is quicker for all banks at once
        """
        assert self.table is not None
        before, self.table = self.table, table
        left = [] if self.a.is_meta else self._move(before, table)
        self.ranks.copy_(_as_tensor(table.offsets))
        self.scales[slot] = 0.0 if site is None else site.scaling
        self.rates[slot] = 0.0 if site is None else site.dropout
        return left

    def _move(self, before: RowTable, after: RowTable) -> list[Tensor]:
        """Bring the rows of jobs that move; returns those that jobs leave, where nobody moves."""
        spans = {
            slot: (slice(start, start + rank), slice(end, end + rank) if left else None)
            for slot, (start, rank) in enumerate(zip(before.offsets, before.ranks, strict=False))
            for end, left in [(after.offsets[slot], after.ranks[slot])]
            if rank and (start != end or not left)
        }
        left = []
        for leaf in (self.a.data, self.b.data, self.a.grad, self.b.grad) if spans else ():
            assert leaf is not None
            if all(new is None for _, new in spans.values()):
                left += [leaf[old] for old, _ in spans.values()]
                continue
            rows = [(leaf[old].clone(), new) for old, new in spans.values() if new is not None]
            for old, _ in spans.values():
                leaf[old] = 0
            for values, new in rows:
                leaf[new] = values
        return left

    @torch.no_grad()
    def grow(self, slots: int, rows: int) -> None:
        """Add slots and rows; everybody stays where they are.

        The tensors are others afterwards: what reads them is compiled and captured again.
        """
        assert self.table is not None
        release(self.ranks, self.scales, self.rates)
        self.table = self.table.grown(slots, rows)
        more = slots - len(self.scales)
        self.ranks = torch.tensor(self.table.offsets, dtype=torch.int32)
        self.scales, self.rates = (F.pad(table, (0, more)) for table in (self.scales, self.rates))
        for name in ("a", "b"):
            old = getattr(self, name)
            padding = (0, 0, 0, rows - old.shape[0])
            leaf = nn.Parameter(F.pad(old.data, padding), old.requires_grad)
            leaf.grad = None if old.grad is None else F.pad(old.grad, padding)
            setattr(self, name, leaf)

    def job_parameters(self, job: int) -> tuple[nn.Parameter, nn.Parameter]:
        """One job's A [r, in] and B [out, r] with their gradients, all views of the bank."""
        start, stop = self._rows_of(job)
        views = []
        for leaf, turned in ((self.a, False), (self.b, True)):
            assert leaf.grad is not None
            value, grad = leaf.data[start:stop], leaf.grad[start:stop]
            view = nn.Parameter(value.t() if turned else value)
            view.grad = grad.t() if turned else grad
            views.append(view)
        return views[0], views[1]


def refresh_tables(banks: Iterable[AdapterBank]) -> None:
    """Bring the tables of banks that `lay` has changed to the devices that read them, together."""
    refresh(*(table for bank in banks for table in (bank.ranks, bank.scales, bank.rates)))


# Banks of equal layers hold equal tables; nobody writes into what this returns.
@lru_cache(maxsize=256)
def _as_tensor(offsets: tuple[int, ...]) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)
