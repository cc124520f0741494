"""Rows of a bank while jobs come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.model.slots import RowTable, rounded

SIZES = st.integers(1, 6).map(lambda count: 8 * count)


@given(
    slots=st.integers(1, 7),
    total=SIZES,
    largest=SIZES,
    changes=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 48)), max_size=40),
)
def test_rows_of_jobs_never_meet_and_nobody_moves_without_need(slots, total, largest, changes):
    """Offsets rise, begin on vectors and bound what a slot owns; only a lack of rows refuses."""
    table = RowTable.empty(slots, total, largest)
    for number, wanted in changes:
        slot, rank, before = number % slots, min(wanted, largest), table
        if table.ranks[slot]:
            table = table.without(slot)
        elif (found := table.with_job(slot, rank)) is not None:
            table = found
        else:
            packed = table.compacted(slot, rank)
            assert (packed is None) == (table.used + rounded(rank) > total)
            table, before = packed or table, packed or table
        spans = list(zip(table.offsets, table.offsets[1:], table.ranks, strict=False))
        assert table.offsets[0] == 0
        assert table.offsets[-1] <= total
        for index, (start, stop, used) in enumerate(spans):
            assert 0 <= used <= stop - start <= largest
            assert not used or start % 8 == 0
            if before.ranks[index] and used:
                assert start == before.offsets[index]


def test_a_gap_is_used_again_before_anyone_moves():
    """Rows that a job has left serve the next one, of the same size or smaller."""
    table = RowTable.empty(4, 40, 16)
    for slot, rank in ((0, 8), (1, 12), (2, 3)):
        table = table.with_job(slot, rank)
    table = table.without(1).with_job(1, 5)

    assert table.offsets == (0, 8, 24, 32, 32)
    assert table.grown(6, 80).with_job(5, 16).offsets == (0, 8, 24, 32, 32, 32, 48)
