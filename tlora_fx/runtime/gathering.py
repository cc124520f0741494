"""A job's state put together from all processes, and cut again for each.

Checkpoints and adapter folders hold whole tensors under PEFT's names, whatever plan made them. The
leader writes them; replicas hold the same, so only the processes of the first one send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.part import Shard
from tlora_fx.runtime.adapters import saved_name
from tlora_fx.runtime.checkpoint import JobState

Shards = Mapping[str, Shard | None]


class _Sent(NamedTuple):
    """A tensor that a process sends: its type, and which piece of the whole it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard | None


class Gathering:
    """Moves the states of jobs between the leader and the processes of a mesh."""

    def __init__(self, model: SuperModel, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self.apart = mesh.shape.tp > 1 or mesh.shape.pp > 1

    def whole(self, job: str, state: JobState) -> JobState:
        """The state with whole tensors on the leader; on others what they hold.

        Every process calls this at once.
        """
        if not self.apart:
            return state
        adapter = self._gathered(state.adapter, self._adapter_shards(job))
        optimizer = self._gathered(state.optimizer, self._optimizer_shards(job, state.optimizer))
        told = self._values(dict(state.optimizer_values))
        return replace(state, adapter=adapter, optimizer=optimizer, optimizer_values=told)

    def whole_adapter(self, job: str, adapter: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """An adapter with whole tensors on the leader; on others what they hold."""
        return self._gathered(adapter, self._adapter_shards(job)) if self.apart else adapter

    def own(self, job: str, state: JobState) -> JobState:
        """What of a whole state this process holds."""
        if not self.apart:
            return state
        shards, parameters = self.model.shards(job), self.model.job_parameters(job)
        adapter = _cut(state.adapter, self._adapter_shards(job))
        cuts: dict[str, Shard | None] = {}
        for name, tensor in state.optimizer.items():
            parameter = _parameter(name)
            if parameter in shards:
                shard, local = shards[parameter], tuple(parameters[parameter].shape)
                # Moments are as large as what they belong to; counters are not cut.
                whole = shard is not None and tuple(tensor.shape) != shard.full_shape(local)
                cuts[name] = None if whole else shard
        values = dict(state.optimizer_values)
        values["state"] = {
            name: value
            for name, value in values.get("state", {}).items()
            if _parameter(name) in shards
        }
        optimizer = _cut(state.optimizer, cuts)
        return replace(state, adapter=adapter, optimizer=optimizer, optimizer_values=values)

    def _adapter_shards(self, job: str) -> Shards:
        return {saved_name(name): shard for name, shard in self.model.shards(job).items()}

    def _optimizer_shards(self, job: str, tensors: Mapping[str, Tensor]) -> Shards:
        shards, parameters = self.model.shards(job), self.model.job_parameters(job)
        return {
            name: shards[_parameter(name)]
            if tensor.shape == parameters[_parameter(name)].shape
            else None
            for name, tensor in tensors.items()
        }

    def _values(self, values: dict[str, Any]) -> dict[str, Any]:
        told: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(told, values["state"], group=self.mesh.world)
        merged = {name: value for own in told for name, value in own.items()}
        return {**values, "state": merged}

    def _gathered(self, tensors: Mapping[str, Tensor], shards: Shards) -> Mapping[str, Tensor]:
        """Every process's tensors put together, on the leader."""
        mine = [
            _Sent(name, tuple(tensor.shape), tensor.dtype, shards[name])
            for name, tensor in tensors.items()
        ]
        sends = self.mesh.dp_rank == 0
        told: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(told, mine if sends else [], group=self.mesh.world)
        if not self.mesh.leader:
            if mine and sends:
                dist.send(_bytes_of([tensors[one.name] for one in mine]), 0, self.mesh.world)
            return tensors
        pieces: dict[str, dict[int, Tensor]] = {}
        cuts: dict[str, Shard | None] = {}
        for rank, listed in enumerate(told):
            own = [tensors[one.name] for one in mine] if rank == 0 else self._received(rank, listed)
            for one, tensor in zip(listed, own, strict=True):
                index = 0 if one.shard is None else one.shard.index
                pieces.setdefault(one.name, {}).setdefault(index, tensor.cpu())
                cuts[one.name] = one.shard
        return {name: _joined(pieces[name], cuts[name]) for name in sorted(pieces)}

    def _received(self, rank: int, listed: list[_Sent]) -> list[Tensor]:
        if not listed:
            return []
        sizes = [one.dtype.itemsize * torch.Size(one.shape).numel() for one in listed]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.recv(flat, rank, self.mesh.world)
        pieces = torch.split(flat, sizes)
        return [
            piece.clone().view(one.dtype).reshape(one.shape)
            for piece, one in zip(pieces, listed, strict=True)
        ]


def _parameter(name: str) -> str:
    """The parameter that a tensor of an optimizer belongs to: "exp_avg/NAME"."""
    return name.partition("/")[2]


def _bytes_of(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors])


def _joined(pieces: Mapping[int, Tensor], shard: Shard | None) -> Tensor:
    if shard is None:
        return pieces[0]
    assert sorted(pieces) == list(range(shard.count)), sorted(pieces)
    return shard.joined([pieces[index] for index in range(shard.count)])


def _cut(tensors: Mapping[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    """This process's pieces of whole tensors; what it does not hold is left out."""
    return {
        name: tensors[name] if shard is None else shard.of(tensors[name]).contiguous()
        for name, shard in shards.items()
        if name in tensors
    }
