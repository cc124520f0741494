"""Cutting rows into nano-batches and joining them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.errors import NanoBatchesWrong
from tlora_fx.ops.nano_batches import cut_sequences, remember_starts

ops = torch.ops.tlora_fx
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def starts_of(lengths):
    return [0, *accumulate(lengths)]


def table(*values):
    return torch.tensor(values, dtype=torch.int32)


@given(LENGTHS, st.integers(1, 8), st.integers(0, 100))
def test_each_run_costs_at_most_a_sequence_more_than_its_share(lengths, count, linear):
    """Runs are whole sequences, none is empty while there are enough, and costs are balanced."""
    cuts = cut_sequences(starts_of(lengths), count, linear)

    costs = [length * (linear + length) for length in lengths]
    runs = [sum(costs[low:high]) for low, high in pairwise(cuts)]
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(lengths), count + 1)
    assert sum(high > low for low, high in pairwise(cuts)) == min(count, len(lengths))
    if len(lengths) >= count:
        assert max(runs) <= sum(costs) / count + max(costs)


def test_tables_of_a_nano_batch_are_its_part_of_the_row_s():
    """Sequences of 3, 1, 4 and 2 tokens; the first job has two of them, the second has none."""
    cuts, *own = ops.nano_tables(table(0, 3, 4, 8, 10), table(0, 4, 4, 10), 2, 0)

    assert cuts.tolist() == [0, 4, 10]
    assert [value.tolist() for value in own] == [
        [0, 3, 4], 3, [0, 4, 4, 4],
        [0, 4, 6], 4, [0, 0, 0, 6],
    ]  # fmt: skip


def test_more_nano_batches_than_sequences_leave_empty_ones():
    """The last ones have no token, and tables that say so."""
    cuts, *own = ops.nano_tables(table(0, 5), table(0, 5), 3, 10)

    assert cuts.tolist() == [0, 5, 5, 5]
    assert [value.tolist() for value in own[3:6]] == [[0], 0, [0, 0]]


def test_what_was_remembered_is_not_read():
    """Starts that the host knows stand for those on the device."""
    seqlens = table(0, 9, 9, 9)
    remember_starts(seqlens, table(0, 2, 4, 9))

    cuts, *_ = ops.nano_tables(seqlens, table(0, 9), 3, 0)

    assert cuts.tolist() == [0, 2, 4, 9]


@given(LENGTHS, st.integers(1, 5))
def test_joining_undoes_splitting(lengths, count):
    """In the forward and in the backward."""
    row = torch.randn(1, sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    cuts, *_ = ops.nano_tables(table(*starts_of(lengths)), table(0, sum(lengths)), count, 7)
    weight = torch.randn_like(row)

    joined = ops.nano_join([2 * part for part in ops.nano_split(row, cuts, 1)], cuts, row, 1)
    (joined * weight).sum().backward()

    assert torch.equal(joined, 2 * row)
    assert torch.equal(row.grad, 2 * weight)


def test_operators_follow_torch_s_rules():
    """Schemas, fakes and gradients, by torch.library.opcheck."""
    row = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)
    cuts = table(0, 2, 6)
    parts = [part.detach().requires_grad_() for part in ops.nano_split(row, cuts, 1)]

    torch.library.opcheck(ops.nano_split.default, (row, cuts, 1))
    torch.library.opcheck(ops.nano_join.default, (parts, cuts, row.detach(), 1))
    torch.library.opcheck(ops.nano_tables.default, (table(0, 2, 6), table(0, 6), 2, 5))


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.nano_split(torch.zeros(1, 6), table(0, 2, 5), 1),
        lambda: ops.nano_split(torch.zeros(1, 6), table(0, 4, 2, 6), 1),
        lambda: ops.nano_join([torch.zeros(1, 6)], table(0, 3, 6), torch.zeros(1, 6), 1),
        lambda: ops.nano_tables(table(0, 6), table(0, 6), 0, 5),
    ],
    ids=["short", "falling", "parts", "count"],
)
def test_tables_of_another_row_are_refused(call):
    """With an error that names both."""
    with pytest.raises(NanoBatchesWrong):
        call()
