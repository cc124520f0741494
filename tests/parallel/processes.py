"""Run a function in several processes that form one gloo group.

They are forked from a server that has imported everything (warm.py): importing takes longer than
most of what they do.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import multiprocessing

from tests import forked, traced_once

TIMEOUT = timedelta(seconds=600)
# What the server imports before it forks.
SERVED = ["tests.parallel.warm"]


def forkserver_context() -> Any:
    """The context whose processes are forked from a server that has imported everything."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SERVED)
    forked.ensure_forkserver()
    return context


def run_processes(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    gpus: bool = False,
    own_hashes: bool = False,
) -> list[Any]:
    """Call `function(*arguments)` in each of `count` processes of one group.

    function   found by its name: at the top of a module
    gpus       each process has a GPU of its own, and the group NCCL beside gloo
    own_hashes each process has its own order of sets, as under torchrun; takes longer
    returns    what each process returned, by rank; whatever can be pickled
    raises     RuntimeError with the traceback of the first rank that failed
    """
    # CUDA does not survive a fork, so processes with GPUs import for themselves.
    context: Any = (
        multiprocessing.get_context("spawn") if gpus or own_hashes else forkserver_context()
    )
    results = context.SimpleQueue()
    # The store is this process's, as under torchrun: rank 0 may end while others still begin.
    store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    given = (count, store.port, dict(os.environ), function, arguments, results, gpus)
    processes = [context.Process(target=_run, args=(rank, *given)) for rank in range(count)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    failed: list[str] = []
    for _ in processes:
        while results.empty() and not any(process.exitcode for process in processes):
            time.sleep(0.01)
        if results.empty():
            failed.append("a process ended without a word; see what it printed")
            break
        rank, value, error = results.get()
        found[rank] = pickle.loads(value)
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
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Any,
    gpus: bool,
) -> None:
    # The server has the variables of the time when it began.
    os.environ.clear()
    os.environ |= environment | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(1)
    traced_once.install(fused=True)
    try:
        if gpus:
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        torch.distributed.init_process_group(backend, timeout=TIMEOUT)
        # As bytes: torch would hand over tensors in shared memory, of which there may be little, by
        # way of a process that may have ended before anybody asks for them.
        value = pickle.dumps(function(*arguments))
    except BaseException:  # noqa: BLE001  (told to the parent)
        results.put((rank, pickle.dumps(None), traceback.format_exc()))
        os._exit(1)
    results.put((rank, value, ""))
    torch.distributed.destroy_process_group()
