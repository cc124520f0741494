"""Running a round so that what fails in one job, or for want of memory, leaves the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import clear_frames

import torch
from torch import Tensor

from tlora_fx.config.job import Job
from tlora_fx.errors import OutOfMemory
from tlora_fx.runtime.data.batching import MicroBatches

#: What torch's allocators of the CPU say, in a plain RuntimeError.
_CPU = ("can't allocate memory", "not enough memory", "failed to allocate", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is full, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(said in text for said in _CPU)


def out_of_memory(jobs: Sequence[Job], active: Iterable[int], error: Exception) -> OutOfMemory:
    """The error where no job of a round fits into memory, not even alone."""
    names = [jobs[index].name for index in active]
    return OutOfMemory(
        "there is no memory for a step of any job, not even alone",
        job=", ".join(names),
        found=str(error).partition("\n")[0] or type(error).__name__,
        help="give shorter samples (max_length), smaller batches, or a device with more memory",
    )


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a round.

    losses    [J] on the device
    indices   of the jobs that ran
    errors    what failed in others, by job
    largest   tokens of the largest row that ran, where there was no memory for all jobs' together
    """

    losses: Tensor
    indices: Iterable[int]
    errors: Mapping[int, Exception] = field(default_factory=dict)
    largest: int = 0


def run_isolated(
    together: Callable[[], Tensor],
    alone: Callable[[int], tuple[Tensor, int]],
    free_memory: Callable[[Iterable[int]], None],
    jobs: Sequence[Job],
    batches: Mapping[int, MicroBatches],
) -> Ran:
    """Run all jobs' rows; where that fails, each job's by themselves: what fails there is at fault.

    together    runs all; the losses, [J]
    alone       runs a job's; its losses among zeros, [J], and the tokens of its largest row
    free_memory   forgets what failed rows of jobs have left
    raises      the failure itself where it is nobody's, OutOfMemory where no job fits
    """
    try:
        return Ran(together(), batches)
    except Exception as error:
        if len(batches) == 1 and not is_out_of_memory(error):
            raise
        failure = _let_go(error) if is_out_of_memory(error) else error
    # Out of the `except`: until here the exception keeps the tensors of the row that failed.
    free_memory(batches)
    losses: dict[int, Tensor] = {}
    errors: dict[int, Exception] = {}
    largest = 0
    for index in batches:
        try:
            losses[index], tokens = alone(index)
            largest = max(largest, tokens)
        except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
            errors[index] = _let_go(error)
        if index in errors:
            free_memory([index])
    full = is_out_of_memory(failure)
    if not losses and full:
        raise out_of_memory(jobs, batches, failure)
    if not losses or not (errors or full):
        raise failure
    return Ran(torch.stack(list(losses.values())).sum(0), losses, errors, 0 if errors else largest)


def _let_go(error: Exception) -> Exception:
    """An exception that holds no frames.

    A checkpoint in the middle of its forward takes what others save, until its frame is gone.
    """
    clear_frames(error.__traceback__)
    return error.with_traceback(None)
