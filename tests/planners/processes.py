"""Run a function in several processes that form one gloo group."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import multiprocessing

TIMEOUT = timedelta(seconds=120)


def run_processes(
    count: int, function: Callable[..., Any], *arguments: Any, gpus: bool = False
) -> list[Any]:
    """Call `function(*arguments)` in each of `count` processes of one group.

    function   found by its name: at the top of a module
    gpus       each process has a GPU of its own, and the group NCCL beside gloo
    returns    what each process returned, by rank; whatever can be pickled
    raises     RuntimeError with the traceback of the first rank that failed
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    port = _free_port()
    given = (count, port, function, arguments, results, gpus)
    processes = [context.Process(target=_run, args=(rank, *given)) for rank in range(count)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    failed: list[str] = []
    for _ in processes:
        rank, value, error = results.get()
        found[rank] = value
        if error:
            failed.append(f"rank {rank}:\n{error}")
            break
    for process in processes:
        process.join(0.1 if failed else 30)
        if process.is_alive():
            process.kill()
    if failed:
        raise RuntimeError(failed[0])
    return [found[rank] for rank in range(count)]


def _run(
    rank: int,
    count: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Any,
    gpus: bool,
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
    }  # fmt: skip
    torch.set_num_threads(1)
    try:
        if gpus:
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        torch.distributed.init_process_group(backend, timeout=TIMEOUT)
        value = function(*arguments)
    except BaseException:  # noqa: BLE001  (told to the parent)
        results.put((rank, None, traceback.format_exc()))
        os._exit(1)
    results.put((rank, value, ""))
    torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
