"""What says that there is no memory left, and what is said of it to a user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tlora_fx.config.job import Job
from tlora_fx.errors import OutOfMemory

#: What torch's allocators of the CPU say, in a plain RuntimeError.
_CPU = ("can't allocate memory", "not enough memory", "failed to allocate", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is full, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(said in text for said in _CPU)


def out_of_memory(jobs: Sequence[Job], active: Iterable[int], error: Exception) -> OutOfMemory:
    """The mistake where no job of a round has room, not even alone."""
    names = [jobs[index].name for index in active]
    return OutOfMemory(
        "there is no memory for a step of any job, not even alone",
        job=", ".join(names),
        found=str(error).partition("\n")[0] or type(error).__name__,
        help="give shorter samples (max_length), smaller batches, or a device with more memory",
    )
