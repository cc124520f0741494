"""Weights gathered by copies out of other processes' memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tlora_fx.planners.peer_copies import PeerGather, SideStreams, _shards

SIZES = (3, 8, 5)


def _bytes(rank: int) -> list[torch.Tensor]:
    """A process's shards of three parameters."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in SIZES]


@pytest.mark.parametrize("rank", range(3))
def test_a_gather_fills_every_neighbours_part(rank: int) -> None:
    """As the all-gather that it stands for, whose own part the caller has filled."""
    peers = [_bytes(each) for each in range(3)]
    gather = PeerGather(peers, rank, SideStreams())
    total = sum(SIZES)
    output = gather.allocate((3 * total,), dtype=torch.uint8, device=torch.device("cpu"))
    output.view(3, -1)[rank] = torch.cat(peers[rank])
    group: Any = None

    gather(output, output.view(3, -1)[rank], group)

    assert torch.equal(output, torch.cat([torch.cat(own) for own in peers]))


def test_an_order_that_is_not_the_callers_is_noticed() -> None:
    """Parameters that lie otherwise than they were offered are an error, not wrong weights."""
    peers = [_bytes(0), _bytes(1)]
    gather = PeerGather(peers, 0, SideStreams())
    output = torch.zeros(2 * sum(SIZES), dtype=torch.uint8)
    group: Any = None

    with pytest.raises(AssertionError):
        gather(output, output[: sum(SIZES)], group)


def test_a_module_without_shards_offers_none() -> None:
    """Plain parameters are no shards."""
    assert _shards(nn.Linear(2, 2)) == []
