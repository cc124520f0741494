"""Measure what processes take to talk: run under torchrun, by all processes at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_fx.cost.hardware import Tier
from tlora_fx.cost.profile import CollectivePoint, Operation

SIZES = (2**16, 2**20, 2**23, 2**26, 2**28)
ON_CPU = SIZES[:3]
REPEATS = 5


def collective_points(
    device: torch.device, per_node: int, rounds: int = 5
) -> list[CollectivePoint]:
    """All-reduce, all-gather and send over all processes, half of them, and two, by size.

    per_node   processes of a node: what stays inside one is told apart from what does not
    returns    the same on every process: medians of the slowest
    """
    world = dist.get_world_size()
    found: list[CollectivePoint] = []
    for size in sorted({2, max(2, world // 2), world}):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            tier: Tier = "node" if size <= per_node else "network"
            found.extend(_points(device, group, size, tier, rounds))
        dist.barrier()
    return found


def _points(
    device: torch.device, group: dist.ProcessGroup | None, size: int, tier: Tier, rounds: int
) -> list[CollectivePoint]:
    made = []
    for payload in SIZES if device.type == "cuda" else ON_CPU:
        works = _works(device, group, size, payload)
        for operation, work in works.items():
            parts = 2 if operation == "send" else 1
            times = [_block(work, device, parts) for _ in range(rounds + 1)][1:]
            middle = statistics.median(times)
            slowest = torch.tensor([middle], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            noise = statistics.median(abs(one - middle) for one in times) / middle
            made.append(
                CollectivePoint(
                    operation=operation,
                    tier=tier,
                    processes=size,
                    payload_bytes=payload,
                    ms=float(slowest),
                    noise=noise,
                )
            )
    return made


def _works(
    device: torch.device, group: dist.ProcessGroup | None, size: int, payload: int
) -> dict[Operation, Callable[[], object]]:
    whole = torch.zeros(payload // 2 // size * size, dtype=torch.bfloat16, device=device)
    piece = torch.zeros(whole.numel() // size, dtype=torch.bfloat16, device=device)
    found: dict[Operation, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, piece, group=group),
    }
    if size == 2:
        found["send"] = lambda: _send(whole, group)
    return found


def _send(value: Tensor, group: dist.ProcessGroup | None) -> None:
    """From the first process to the second, and back: two sends."""
    rank = dist.get_rank(group)
    for sender in (0, 1):
        if rank == sender:
            dist.send(value, 1 - rank, group=group)
        else:
            dist.recv(value, 1 - rank, group=group)


def _block(work: Callable[[], object], device: torch.device, parts: int = 1) -> float:
    """Milliseconds of one; `parts`: how many each call holds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3 / REPEATS / parts
