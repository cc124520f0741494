"""Pieces of tensors: what each process takes, and how they come together again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.ir.storage import LocalShard, Shard

COUNTS = st.integers(1, 4)
PARTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def columns_of(runs, count, index):
    """The columns of a piece, found one by one."""
    found, first = [], 0
    for size in runs:
        inside = range(first, first + size)
        found += [column for column in inside if (column - first) * count // size == index]
        first += size
    return found


@given(parts=PARTS, count=COUNTS, turned=st.booleans())
def test_a_piece_has_its_part_of_each_run(parts, count, turned):
    """In the order of the runs, along either dimension; all pieces join to the whole."""
    runs = tuple(part * count for part in parts)
    full = torch.arange(3 * sum(runs)).reshape(3, -1)
    shards = [Shard(1, index, count, runs) for index in range(count)]
    pieces = [full[:, columns_of(runs, count, index)] for index in range(count)]
    if turned:
        full, pieces = full.t(), [piece.t() for piece in pieces]
        shards = [Shard(0, index, count, runs) for index in range(count)]

    for shard, piece in zip(shards, pieces, strict=True):
        assert torch.equal(shard.of(full), piece)
        assert shard.full_shape(tuple(piece.shape)) == tuple(full.shape)
    assert torch.equal(shards[-1].joined(pieces), full)


@given(size=st.integers(1, 5), count=COUNTS)
def test_without_runs_a_piece_is_one(size, count):
    """As of a single run; a view of the whole."""
    full = torch.arange(2 * size * count).reshape(-1, 2)
    for index in range(count):
        shard = Shard(0, index, count)
        assert torch.equal(shard.of(full), Shard(0, index, count, (size * count,)).of(full))
        assert shard.of(full).untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    pieces = [Shard(0, index, count).of(full) for index in range(count)]
    assert torch.equal(Shard(0, 0, count).joined(pieces), full)


def test_a_part_says_which_piece_it_takes():
    """Of what a graph says is cut; nothing of what is whole."""
    part = LocalShard(None, 1)

    assert part.shard((0, 2, (4, 2))) == Shard(0, 1, 2, (4, 2))
    assert part.shard((1, 2, ())) == Shard(1, 1, 2)
    assert part.shard(None) is None
