"""Which rows of a bank each slot of an open super-model owns, while jobs come and go.

Operators read one table of offsets, and slot j owns rows offsets[j]:offsets[j + 1]. So offsets
rise, and rows that nobody uses must belong to somebody: to vacant slots between two jobs, or to the
job before them. They are zeros, which change no number. Rows behind the last job belong to nobody.

A job's rows begin where a vector may, whatever stands before them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

# Numbers of rows that a job takes are multiples of this.
VECTOR = 8


def rounded(rank: int) -> int:
    """Rows that a job of this rank takes."""
    return -(-rank // VECTOR) * VECTOR


@dataclass(frozen=True)
class RowTable:
    """The rows of one bank.

    offsets   J + 1; slot j owns rows offsets[j]:offsets[j + 1], its job the first ranks[j] of them
    ranks     J; 0 where a slot has no adapter here
    total     R, the bank's rows
    largest   the most that one slot may own
    """

    offsets: tuple[int, ...]
    ranks: tuple[int, ...]
    total: int
    largest: int

    @staticmethod
    def empty(slots: int, total: int, largest: int) -> RowTable:
        """A bank of which no slot owns a row."""
        return RowTable((0,) * (slots + 1), (0,) * slots, total, largest)

    @property
    def used(self) -> int:
        """Rows that jobs need."""
        return sum(map(rounded, self.ranks))

    def with_job(self, slot: int, rank: int) -> RowTable | None:
        """The table with a job in a vacant slot, all others where they are; None: no room there."""
        return _with_job(self, slot, rank)

    def without(self, slot: int) -> RowTable:
        """The table after a job has left; nobody moves."""
        ranks = _put(self.ranks, slot, 0)
        last = max((j for j, rank in enumerate(ranks) if rank), default=-1)
        end = self.offsets[last] + rounded(ranks[last]) if last >= 0 else 0
        offsets = (*self.offsets[: last + 1], *(end,) * (len(ranks) - last))
        return replace(self, offsets=offsets, ranks=ranks)

    def compacted(self, slot: int, rank: int) -> RowTable | None:
        """The table with a job more and no gaps; None: the bank has too few rows."""
        ranks = _put(self.ranks, slot, rank)
        offsets = (0, *accumulate(map(rounded, ranks)))
        fits = offsets[-1] <= self.total and rank <= self.largest
        return replace(self, offsets=offsets, ranks=ranks) if fits else None

    def grown(self, slots: int, total: int) -> RowTable:
        """The table of a larger bank, everybody where they are."""
        more = slots - len(self.ranks)
        offsets = (*self.offsets, *(self.offsets[-1],) * more)
        return replace(self, offsets=offsets, ranks=(*self.ranks, *(0,) * more), total=total)


# Banks of equal layers hold equal tables.
@lru_cache(maxsize=4096)
def _with_job(table: RowTable, slot: int, rank: int) -> RowTable | None:
    if not rank:
        return table
    ranks, offsets, need = table.ranks, table.offsets, rounded(rank)
    before = max((j for j in range(slot) if ranks[j]), default=-1)
    after = next((j for j in range(slot + 1, len(ranks)) if ranks[j]), len(ranks))
    low = offsets[before] + rounded(ranks[before]) if before >= 0 else 0
    high = offsets[after] if after < len(ranks) else low + need
    spare = high - low - need
    if spare < 0 or need > table.largest or high > table.total:
        return None
    # What is left over goes to vacant slots behind, then to the job itself, then to those before.
    sizes = {}
    for index in (*range(slot + 1, after), slot, *range(before + 1, slot)):
        own = need if index == slot else 0
        taken = min(spare, table.largest - own)
        sizes[index], spare = own + taken, spare - taken
    if spare:
        return None
    starts = accumulate((sizes[index] for index in range(before + 1, after)), initial=low)
    laid = (*offsets[: before + 1], *starts, *offsets[after + 1 :])
    return replace(table, offsets=laid, ranks=_put(ranks, slot, rank))


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
