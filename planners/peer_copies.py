"""Gather frozen weights by copying them from other processes' memory, without a collective.

Shards of a frozen base never change, so a process may read its neighbours' at any time: nobody
waits for anybody, and copy engines move the bytes while every multiprocessor computes. Processes of
one host whose devices reach each other do so; elsewhere FSDP2 gathers by its own collective.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tlora_fx.planners.mesh import Mesh

VARIABLE = "TLORA_FX_PEER_COPIES"


class SideStreams:
    """Streams on which copies run beside what computes."""

    def __init__(self) -> None:
        self._seen: dict[int, torch.cuda.Stream] = {}

    def note(self, device: torch.device) -> None:
        """Remember the current stream of a device, where it has streams."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        self._seen[stream.cuda_stream] = stream

    def join(self) -> None:
        """Let the current stream, which is captured, wait for all that are captured with it."""
        own = torch.cuda.current_stream()
        for stream in self._seen.values():
            if stream != own and _is_capturing(stream):
                own.wait_stream(stream)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def copy_from_peers(modules: Sequence[nn.Module], mesh: Mesh) -> SideStreams | None:
    """Let sharded modules gather by copies; every process of dp calls it with the same modules.

    returns   the streams on which they will; None where they do not: a device is out of reach, or
              the variable says "off"
    """
    assert mesh.dp is not None
    shards = [_shards(module) for module in modules]
    if mesh.device.type != "cuda" or os.environ.get(VARIABLE) == "off":
        return None
    told: list[Any] = [None] * dist.get_world_size(mesh.dp)
    # Shards were written on streams of their own processes.
    torch.cuda.synchronize(mesh.device)
    dist.all_gather_object(told, _offer(shards, mesh.device), group=mesh.dp)
    opened = _opened(told, mesh)
    agreed: list[Any] = [None] * len(told)
    dist.all_gather_object(agreed, opened is not None, group=mesh.dp)
    if opened is None or not all(agreed):
        return None
    streams = SideStreams()
    for place, module in enumerate(modules):
        peers = [shards[place] if own is None else own[place] for own in opened]
        assert isinstance(module, FSDPModule)
        gather: Any = PeerGather(peers, dist.get_rank(mesh.dp), streams)
        module.set_custom_all_gather(gather)
    return streams


class PeerGather:
    """What FSDP2 asks for in place of an all-gather.

    peers     for each process the bytes of its shards of one module, parameter by parameter
    rank      this process among them
    streams   where it notes on which it works
    """

    def __init__(self, peers: Sequence[Sequence[Tensor]], rank: int, streams: SideStreams) -> None:
        self.peers, self.rank, self.streams = peers, rank, streams
        self._checked = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of any kind will do."""
        self.streams.note(device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill every process's part of the output on the current stream; our own is there."""
        self.streams.note(output_tensor.device)
        count = len(self.peers)
        parts = output_tensor.view(torch.uint8).view(count, -1)
        if not self._checked:
            self._check(parts[self.rank])
        # Each process begins with another neighbour, so that no link has to serve all at once.
        for step in range(1, count):
            peer = (self.rank + step) % count
            sizes = [shard.numel() for shard in self.peers[peer]]
            places = torch.split(parts[peer], sizes)
            for place, shard in zip(places, self.peers[peer], strict=True):
                place.copy_(shard, non_blocking=True)

    def _check(self, own: Tensor) -> None:
        """FSDP2 lays parameters out in the order in which they were offered."""
        assert torch.equal(own, torch.cat(list(self.peers[self.rank])))
        self._checked = True


def _shards(module: nn.Module) -> list[Tensor]:
    """The bytes of this process's shards of a module, in the order in which FSDP2 lays them out."""
    leaves = {id(leaf): leaf for leaf in _sharded_leaves(module)}
    # The storage holds a shard with its padding, as it is gathered.
    storages = [leaf.to_local().untyped_storage() for leaf in leaves.values()]
    return [torch.empty(0, dtype=torch.uint8, device=own.device).set_(own) for own in storages]


def _sharded_leaves(module: nn.Module) -> Iterator[DTensor]:
    """Inner modules come first; those that are sharded by themselves are left out."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _sharded_leaves(child)
    yield from (leaf for leaf in module.parameters(recurse=False) if isinstance(leaf, DTensor))


def _offer(shards: Sequence[Sequence[Tensor]], device: torch.device) -> Any:
    """What another process needs to open these shards; None where they cannot be opened."""
    try:
        handles = [[_handle(one) for one in own] for own in shards]
    except RuntimeError:
        return None
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), handles


def _handle(tensor: Tensor) -> Any:
    storage: Any = tensor.untyped_storage()
    return storage._share_cuda_()


def _opened(told: Sequence[Any], mesh: Mesh) -> list[list[list[Tensor]] | None] | None:
    """Every neighbour's shards in this process's address space; None in our own place."""
    own = dist.get_rank(mesh.dp)
    if any(one is None or one[0] != told[own][0] for one in told):
        return None
    if len({one[1] for one in told}) < len(told):
        return None
    try:
        with torch.cuda.device(mesh.device):
            return [
                None if rank == own else [[_open(handle, mesh.device) for handle in module]
                                          for module in handles]
                for rank, (_, _, handles) in enumerate(told)
            ]  # fmt: skip
    except RuntimeError:
        return None


def _open(handle: tuple[Any, ...], device: torch.device) -> Tensor:
    """Another device's memory, as if it were this one's: the driver knows where it lies."""
    _, memory, size, offset, counter, counter_offset, event, _ = handle
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(
        device.index, memory, size, offset, counter, counter_offset, event, False
    )
    # Both processes keep their model to the end of the run: nobody need wait for our release.
    kind._release_ipc_counter(counter, counter_offset, device=device.index)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
