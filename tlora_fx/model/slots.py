"""Rows of a bank that each slot of an open super-model owns, while jobs come and go.

Operators read one table of offsets, and slot j owns rows offsets[j]:offsets[j + 1]. So offsets
rise, and rows that nobody uses must belong to somebody: to vacant slots between two jobs, or to the
job before them. They are zeros, which change no number. Rows behind the last job belong to nobody.

A job's rows begin where a vector may, whatever stands before them. The last job leaves rows free
before it, as far as that costs nothing, so that few have to move for those who come into slots
before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

# Numbers of rows that a job takes are multiples of this.
VECTOR = 8
# Kernels pad ranks to this: a slot with so many rows costs no more than one with fewer.
PADDED = 16


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

    def with_job(self, slot: int, rank: int, moves: int = 0) -> RowTable | None:
        """The table with a job in a vacant slot, once so many others have moved; None: full.

        moves   those next to the slot, which move away from it; all, where there are fewer
        """
        return _moved(self, slot, rank, moves) if moves else _with_job(self, slot, rank)

    def without(self, slot: int) -> RowTable:
        """The table after a job has left; nobody moves."""
        ranks = _put(self.ranks, slot, 0)
        last = max((j for j, rank in enumerate(ranks) if rank), default=-1)
        end = self.offsets[last] + rounded(ranks[last]) if last >= 0 else 0
        offsets = (*self.offsets[: last + 1], *(end,) * (len(ranks) - last))
        return replace(self, offsets=offsets, ranks=ranks)

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
    if need > table.largest:
        return None
    if after == len(ranks):
        return _last(table, slot, rank, before, low)
    spare = offsets[after] - low - need
    if spare < 0:
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


def _last(table: RowTable, slot: int, rank: int, before: int, low: int) -> RowTable | None:
    """The table with a job behind all others, at its slot's part of the bank where it can be."""
    count, need = len(table.ranks), rounded(rank)
    most = min(table.largest, PADDED) // VECTOR * VECTOR
    slack = [max(0, most - rounded(table.ranks[before]))] if before >= 0 else []
    slack += [most] * (slot - before - 1)
    part = slot * table.total // count // VECTOR * VECTOR
    start = min(max(low, part), low + sum(slack), table.total - need)
    if start < low:
        return None
    gap, points = start - low, [low]
    for free_rows in slack:
        points.append(points[-1] + min(gap, free_rows))
        gap -= points[-1] - points[-2]
    # The job before owns the first piece of the gap.
    points = points[1:] if before >= 0 else points
    laid = (*table.offsets[: before + 1], *points, *(start + need,) * (count - slot))
    return replace(table, offsets=laid, ranks=_put(table.ranks, slot, rank))


@lru_cache(maxsize=4096)
def _moved(table: RowTable, slot: int, rank: int, moves: int) -> RowTable | None:
    if not rank:
        return table
    below = [j for j in range(slot) if table.ranks[j]]
    above = [j for j in range(slot + 1, len(table.ranks)) if table.ranks[j]]
    moves = min(moves, len(below) + len(above))
    for down in range(max(0, moves - len(above)), min(moves, len(below)) + 1):
        up = moves - down
        low = below[-down - 1] if down < len(below) else -1
        high = above[up] if up < len(above) else len(table.ranks)
        found = _relaid(table, slot, rank, low, high)
        if found is not None:
            return found
    return None


def _relaid(table: RowTable, slot: int, rank: int, low: int, high: int) -> RowTable | None:
    """The table with a job more, for which those between two others move.

    low, high   who stays; -1 and J are the ends of the bank
    """
    ranks, first = _put(table.ranks, slot, rank), max(low, 0)
    sizes = [rounded(each) for each in ranks[first:high]]
    stop = table.offsets[high] if high < len(ranks) else table.total
    spare = stop - table.offsets[first] - sum(sizes)
    if spare < 0 or rounded(rank) > table.largest:
        return None
    if high < len(ranks):
        for index, size in enumerate(sizes):
            sizes[index] = min(size + spare, table.largest)
            spare -= sizes[index] - size
        if spare:
            return None
    laid = accumulate(sizes, initial=table.offsets[first])
    offsets = (*table.offsets[:first], *laid, *table.offsets[high + 1 :])
    return replace(table, offsets=offsets, ranks=ranks)


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
