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
            apart = [table.with_job(slot, rank, moves) for moves in range(1, slots)]
            fits = table.used + rounded(rank) <= total
            assert any(apart) == fits
            assert not apart or (apart[-1] is not None) == fits
            for moves, shifted in enumerate(apart, 1):
                placed = (shifted or table).offsets
                moved = [
                    slot for slot, used in enumerate(table.ranks)
                    if used and table.offsets[slot] != placed[slot]
                ]  # fmt: skip
                assert len(moved) <= moves
            table = next(filter(None, apart), table)
            before = table
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
    assert table.grown(6, 80).with_job(5, 16).offsets == (0, 8, 24, 40, 56, 64, 80)


def test_as_few_jobs_move_as_make_room():
    """One moves by the rows that lack, and the others stay."""
    table = RowTable.empty(5, 48, 16)
    for slot, rank in ((0, 8), (1, 8), (2, 8), (3, 8), (4, 16)):
        table = table.with_job(slot, rank)
    table = table.without(0).without(2)

    assert table.with_job(2, 16) is None
    assert table.with_job(2, 16, 1).offsets == (0, 0, 8, 24, 32, 48)


def test_room_is_left_before_a_job_where_it_costs_nothing():
    """A slot owns what kernels pad a rank to; a larger job comes into it, and nobody moves."""
    table = RowTable.empty(3, 48, 16)
    for slot in range(3):
        table = table.with_job(slot, 4)

    assert table.offsets == (0, 16, 32, 40)
    assert table.without(0).with_job(0, 16).offsets == (0, 16, 32, 40)
