"""Each job's gradient norm, where processes hold whole jobs or parts of their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.runtime.job_run import JobRun


@torch.no_grad()
def gradient_norms(runs: Sequence[JobRun], model: SuperModel, mesh: Mesh) -> dict[int, float]:
    """The 2-norm over all gradients of each job, by job index; the same on every process.

    What is cut over tp counts on each process of it, what is whole there once; stages hold
    different parameters, and replicas the same. One all-reduce serves all jobs.
    """
    if mesh.shape.tp == 1 and mesh.shape.pp == 1:
        return _whole_norms(runs, mesh.device)
    squares = torch.zeros(len(model.jobs), dtype=torch.float64, device=mesh.device)
    for run in runs if mesh.dp_rank == 0 else ():
        shards = model.shards(run.job.name)
        counted = [
            parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
            for name, parameter in run.parameters.items()
            if parameter.grad is not None and (shards[name] is not None or mesh.tp_rank == 0)
        ]
        if counted:
            norms = torch.stack(list(torch._foreach_norm(counted)))
            squares[run.index] = norms.double().square().sum()
    dist.all_reduce(squares, group=mesh.world)
    told = squares.tolist()
    return {run.index: math.sqrt(told[run.index]) for run in runs}


def _whole_norms(runs: Sequence[JobRun], device: torch.device) -> dict[int, float]:
    """All norms with one wait for the device; float64 holds each as it is."""
    if not runs:
        return {}
    norms = [run.optimizer.measured_norm().to(device, torch.float64) for run in runs]
    told = torch.stack(norms).tolist()
    return {run.index: norm for run, norm in zip(runs, told, strict=True)}
