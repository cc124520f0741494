"""What `tlora-fx profile` does with its options: one process, or all of a torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tlora_fx.config.job import Job
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import own_file
from tlora_fx.errors import ProfileFileError
from tlora_fx.runtime.devices import device_named
from tlora_fx.runtime.profiler import Asked, profile_jobs
from tlora_fx.runtime.profiling_collectives import collective_points


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of the command."""

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    tp: tuple[int, ...]
    rounds: int
    compiled: bool
    device: str | None
    command: str

    def asked(self, device: torch.device) -> Asked:
        """The same for a device."""
        return Asked(device, self.tokens, self.lengths, self.tp, self.rounds, self.compiled)


def profile_file(
    jobs: Sequence[Job], wanted: Wanted, output: Path | None, *, add: bool
) -> tuple[Profile | None, Path | None]:
    """Measure, and write the file.

    returns   what was written, and where; nothing on all processes but the first
    raises    ProfileFileError, NotProfilable
    """
    device = _device(wanted.device)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not alone:
        _join(device)
    try:
        if not alone and dist.get_rank() > 0:
            dist.barrier()
            collective_points(device, _per_node(), wanted.rounds)
            return None, None
        found = profile_jobs(jobs, wanted.asked(device), wanted.command)
        if not alone:
            dist.barrier()
            points = collective_points(device, _per_node(), wanted.rounds)
            found = found.model_copy(update={"collectives": points})
    finally:
        if not alone:
            dist.destroy_process_group()
    path = output or own_file(found.shape.title, found.hardware.gpu)
    if add and path.exists():
        found = joined(Profile.load(path), found, path)
    found.save(path)
    return found, path


def joined(old: Profile, new: Profile, path: Path) -> Profile:
    """Two profiles of one model on one device; what both have is the new one's.

    raises    ProfileFileError where they are of different models or devices
    """
    for what in ("shape", "hardware", "compiled"):
        mine, theirs = getattr(new, what), getattr(old, what)
        if mine != theirs:
            raise ProfileFileError(
                "only measurements of one model on one device belong into one file",
                file=path,
                expected=f"{what}: {theirs}",
                found=f"{what}: {mine}",
                help="write another file, or leave --add out",
            )
    keys = {(layer.structure, layer.tp) for layer in new.layers}
    kept = [layer for layer in old.layers if (layer.structure, layer.tp) not in keys]
    whole = new if any(layer.tp == 1 for layer in new.layers) else old
    return whole.model_copy(
        update={
            "layers": sorted([*kept, *new.layers], key=lambda one: (one.tp, one.structure)),
            "collectives": new.collectives or old.collectives,
            "versions": new.versions,
            "date": new.date,
            "command": f"{old.command}; {new.command}",
        }
    )


def _device(name: str | None) -> torch.device:
    """The named one; of GPUs, each process of a machine has its own."""
    device, place = device_named(name), os.environ.get("LOCAL_RANK")
    return torch.device("cuda", int(place)) if place and device.type == "cuda" else device


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def _per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
