"""Gather frozen weights by copying them from other processes' memory, without a collective.

Shards of a frozen base never change, so a process may read its neighbours' at any time: nobody
waits for anybody, and copy engines move the bytes while every multiprocessor computes. They arrive
where layers read them; FSDP2 would gather into a buffer and copy from there. Processes of one host
whose devices reach each other do so; elsewhere FSDP2 gathers by its own collective.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.host.environment import wants_peer_copies
from tlora_fx.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)
# Copies under way at once (two H200: two are faster than one, more are not), and bytes of one.
LANES, PIECE = 2, 2**25
# FSDP2 asks for the signature of what a shard brings along at every gather.
_OF_ONE = Signature([Parameter("mesh", Parameter.POSITIONAL_OR_KEYWORD)])


class SideStreams:
    """Streams on which copies run beside what computes, and the one that computes."""

    def __init__(self) -> None:
        self._seen: dict[int, torch.cuda.Stream] = {}
        self._main: torch.cuda.Stream | None = None
        self._lanes: list[torch.cuda.Stream] = []

    def begin(self, device: torch.device) -> None:
        """Remember the current stream as the one that computes, where a device has streams."""
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)

    def note(self, device: torch.device) -> None:
        """Remember the current stream of a device, where it has streams."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        self._seen[stream.cuda_stream] = stream

    def allocating(self) -> AbstractContextManager[Any]:
        """Memory that is asked for within is the computing stream's, and free for this one.

        What computes lets go of it when it has read it, and takes it again in its own order.
        """
        if self._main is None:
            return nullcontext()
        own = torch.cuda.current_stream()
        if own != self._main:
            own.wait_stream(self._main)
        return torch.cuda.stream(self._main)

    @contextmanager
    def lanes(self, device: torch.device) -> Iterator[list[AbstractContextManager[Any]]]:
        """Streams that work side by side on what the current one has come to, which waits for them.

        One on a device without streams.
        """
        if device.type != "cuda":
            yield [nullcontext()]
            return
        own = torch.cuda.current_stream(device)
        while len(self._lanes) < LANES - 1:
            self._lanes.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        for lane in self._lanes:
            lane.wait_stream(own)
        yield [torch.cuda.stream(lane) for lane in (own, *self._lanes)]
        for lane in self._lanes:
            own.wait_stream(lane)

    def join(self) -> None:
        """Make the current stream, which is captured, wait for all that are captured with it."""
        own = torch.cuda.current_stream()
        for stream in self._seen.values():
            if stream != own and _is_capturing(stream):
                own.wait_stream(stream)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def copy_from_peers(modules: Sequence[nn.Module], mesh: Mesh) -> SideStreams | None:
    """Make sharded modules gather by copies; every process of dp calls it with the same modules.

    returns   the streams on which they will; None where they do not: a device is out of reach, or
              the variable says "off"
    """
    assert mesh.dp is not None
    leaves = [_sharded_leaves(module) for module in modules]
    if not _may_reach(mesh.device) or not wants_peer_copies():
        return None
    offers: list[Any] = [None] * dist.get_world_size(mesh.dp)
    shards = [[_bytes(leaf) for leaf in own] for own in leaves]
    if mesh.device.type == "cuda":
        # Shards were written on streams of their own processes.
        torch.cuda.synchronize(mesh.device)
    dist.all_gather_object(offers, _offer(shards, mesh.device), group=mesh.dp)
    opened = _opened(offers, mesh)
    agreed: list[Any] = [None] * len(offers)
    dist.all_gather_object(agreed, opened is not None, group=mesh.dp)
    if opened is None or not all(agreed):
        return None
    streams = SideStreams()
    streams.begin(mesh.device)
    rank = dist.get_rank(mesh.dp)
    for index, module in enumerate(modules):
        peers = [shards[index] if own is None else own[index] for own in opened]
        sharded: Any = module
        gather: Any = PeerGather(leaves[index], peers, rank, streams)
        sharded.set_custom_all_gather(gather)
    return streams


class PeerGather:
    """Gather of one module that FSDP2 calls in place of an all-gather.

    Each shard brings along what FSDP2's extensions of gathers ask for (`fsdp_pre_all_gather`,
    `fsdp_post_all_gather`): it hands in one byte for its shard, and is told where the whole
    parameter lies, which has been filled meanwhile.

    leaves    the module's sharded parameters
    peers     for each process the bytes of its shards of them
    rank      this process among them
    streams   where it notes on which it works
    """

    def __init__(
        self,
        leaves: Sequence[DTensor],
        peers: Sequence[Sequence[Tensor]],
        rank: int,
        streams: SideStreams,
    ) -> None:
        self.streams = streams
        sizes = [[own[index].numel() for own in peers] for index in range(len(leaves))]
        self._wholes = [Whole(leaf, own) for leaf, own in zip(leaves, sizes, strict=True)]
        # Each process begins with another neighbour, so that no link has to serve all at once; its
        # own shards come last.
        order = [(rank + step + 1) % len(peers) for step in range(len(peers))]
        copies = [
            pair
            for peer in order
            for whole, shard in zip(self._wholes, peers[peer], strict=True)
            for pair in zip(whole.parts[peer], torch.split(shard, PIECE), strict=True)
        ]
        self._copies = sorted(copies, key=lambda pair: -pair[1].numel())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer with a byte for each shard."""
        self.streams.note(device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill the whole parameters on the current stream."""
        # Shards that were exchanged since are not what was offered.
        assert input_tensor.numel() == len(self._wholes), (input_tensor.numel(), len(self._wholes))
        self.streams.note(output_tensor.device)
        with self.streams.allocating():
            for whole in self._wholes:
                whole.take()
        with self.streams.lanes(output_tensor.device) as lanes:
            for index, lane in enumerate(lanes):
                with lane:
                    for part, shard in self._copies[index :: len(lanes)]:
                        part.copy_(shard, non_blocking=True)


class Whole:
    """One parameter as layers read it: its memory, which is taken and let go of again and again.

    leaf    this process's shard; it brings this along from now on
    sizes   bytes of each process's shard, with padding
    parts   for each process the bytes of its shard within the whole, in pieces
    """

    def __init__(self, leaf: DTensor, sizes: Sequence[int]) -> None:
        self.bytes = sum(sizes)
        local: Any = leaf._local_tensor
        self._flat = torch.empty(
            self.bytes // local.element_size(), dtype=local.dtype, device=local.device
        )
        # Of the same memory, and not of the same version: autograd keeps the whole for a backward.
        every = torch.empty(0, dtype=torch.uint8, device=local.device)
        every.set_(self._flat.untyped_storage())
        self.parts = [torch.split(part, PIECE) for part in torch.split(every, list(sizes))]
        self._flat.untyped_storage().resize_(0)
        self._token = torch.zeros(1, dtype=torch.uint8, device=local.device)
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._before(), self._after

    def take(self) -> None:
        """Have memory; FSDP2 lets go of it."""
        storage = self._flat.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.bytes)

    def _before(self) -> Any:
        def before(mesh: Any) -> tuple[tuple[Tensor], None]:
            return (self._token,), None

        signed: Any = before
        signed.__signature__ = _OF_ONE
        return signed

    def _after(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The whole parameter, flat, and what is to be let go of; None where FSDP2 knows it."""
        return (self._flat, (self._flat,)) if out is None else None


def _may_reach(device: torch.device) -> bool:
    return device.type == "cuda"


def _bytes(leaf: DTensor) -> Tensor:
    """A shard's bytes, with its padding, as it is gathered."""
    local: Any = leaf._local_tensor
    return torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())


def _sharded_leaves(module: nn.Module) -> list[DTensor]:
    """Each once; those of inner modules that are sharded by themselves are left out."""
    return list({id(leaf): leaf for leaf in _walked(module)}.values())


def _walked(module: nn.Module) -> Iterator[DTensor]:
    # It takes half a second to import, which processes that shard nothing need not spend.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _walked(child)
    yield from (leaf for leaf in module.parameters(recurse=False) if isinstance(leaf, DTensor))


def _offer(shards: Sequence[Sequence[Tensor]], device: torch.device) -> Any:
    """What another process needs to open these shards; None where they cannot be opened."""
    try:
        handles = [[_handle(shard) for shard in module] for module in shards]
    except RuntimeError as error:
        logger.warning("weights are gathered by collectives: they cannot be shared: %s", error)
        return None
    return socket.gethostname(), _identity(device), handles


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _handle(tensor: Tensor) -> Any:
    storage: Any = tensor.untyped_storage()
    return storage._share_cuda_()


def _opened(offers: Sequence[Any], mesh: Mesh) -> list[list[list[Tensor]] | None] | None:
    """Every neighbour's shards in this process's address space; None in our own place."""
    own = dist.get_rank(mesh.dp)
    if None in offers or any(offer[0] != offers[own][0] for offer in offers):
        return None
    if len({device for _, device, _ in offers}) < len(offers):
        return None
    try:
        return [
            None if rank == own else [[_open(handle, mesh.device) for handle in module]
                                      for module in handles]
            for rank, (_, _, handles) in enumerate(offers)
        ]  # fmt: skip
    except RuntimeError as error:
        logger.warning("weights are gathered by collectives: neighbours' do not open: %s", error)
        return None


def _open(handle: tuple[Any, ...], device: torch.device) -> Tensor:
    """Another device's memory, as if it were this one's: the driver knows where it lies."""
    _, memory, size, offset, counter, counter_offset, event, _ = handle
    kind: Any = torch.UntypedStorage
    with torch.cuda.device(device):
        storage = kind._new_shared_cuda(
            device.index, memory, size, offset, counter, counter_offset, event, False
        )
        # Both processes keep their model to the end of the run: nobody need wait for our release.
        kind._release_ipc_counter(counter, counter_offset, device=device.index)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
