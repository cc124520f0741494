"""The processes of a run: where each stands, and its groups.

Ranks count along tp first, then dp, then pp, so that the processes that communicate most stand
closest. Every group carries tensors of the device and of the host: collectives of host tensors go
over gloo wherever the device has a library of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tlora_fx.cost.plan import DIMENSIONS, MeshShape

Group = dist.ProcessGroup | None
FIRST_STEP = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Coordinates of one process among all.

    shape                       how many processes stand along each dimension
    device                      the process's own
    rank                        among all processes
    pp_rank, dp_rank, tp_rank   its index along each dimension
    pp, dp, tp                  the groups along one dimension through this process; None where
                                the process is alone in it
    dp_tp                       all processes of its stage
    world                       all processes
    device_mesh                 the same for torch, with dimensions "pp", "dp" and "tp"
    """

    shape: MeshShape
    device: torch.device
    rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    tp_rank: int = 0
    pp: Group = None
    dp: Group = None
    tp: Group = None
    dp_tp: Group = None
    world: Group = None
    device_mesh: DeviceMesh | None = None

    @staticmethod
    def alone(device: torch.device | str) -> Mesh:
        """The mesh of a single process, which has no group."""
        return Mesh(MeshShape(), torch.device(device))

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.shape.size

    @property
    def leader(self) -> bool:
        """Whether this process writes for all."""
        return self.rank == 0


def open_mesh(shape: MeshShape, device: torch.device | str) -> Mesh:
    """The mesh of the processes of the default group.

    shape   as many processes as the default group has; for one process no group is needed
    """
    device = torch.device(device)
    if shape.size == 1:
        return Mesh.alone(device)
    assert dist.get_world_size() == shape.size, (dist.get_world_size(), shape)
    sizes = (shape.pp, shape.dp, shape.tp)
    torch_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
    coordinates = torch_mesh.get_coordinate()
    assert coordinates is not None
    groups = {
        name: torch_mesh.get_group(name) if size > 1 else None
        for name, size in zip(DIMENSIONS, sizes, strict=True)
    }
    pp_rank, dp_rank, tp_rank = coordinates
    return Mesh(
        shape, device, dist.get_rank(), pp_rank, dp_rank, tp_rank,
        pp=groups["pp"], dp=groups["dp"], tp=groups["tp"],
        dp_tp=_stage_group(shape, groups), world=dist.group.WORLD, device_mesh=torch_mesh,
    )  # fmt: skip


def _stage_group(shape: MeshShape, groups: dict[str, Group]) -> Group:
    """The group of all processes of this process's stage."""
    if shape.dp == 1 or shape.tp == 1:
        return groups["tp"] if shape.dp == 1 else groups["dp"]
    if shape.pp == 1:
        return dist.group.WORLD
    stage = shape.dp * shape.tp
    ranks = [list(range(first, first + stage)) for first in range(0, shape.size, stage)]
    # Every process takes part in making every group.
    by_stage: list[dist.ProcessGroup] = [dist.new_group(stage_ranks) for stage_ranks in ranks]
    return by_stage[dist.get_rank() // stage]


def limit_waits(mesh: Mesh, timeout: timedelta) -> None:
    """Limit how long collectives wait for another process from now on."""
    groups = {id(group): group for group in (mesh.pp, mesh.dp, mesh.tp, mesh.dp_tp, mesh.world)}
    for group in groups.values():
        if group is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
