"""What the processes of a run tell each other, so that none goes on alone.

All goes over the host's group, so that nothing waits for the GPU.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from tlora_fx.config.job import Job
from tlora_fx.errors import NotElementwise, RankFailed, RanksParted, TloraError
from tlora_fx.model.batch import PackedBatch
from tlora_fx.parallel.mesh import Mesh

T = TypeVar("T")
# Optimizers that read whole matrices; all others treat each number by itself.
WHOLE_MATRICES = frozenset({"adafactor"})


class Note(NamedTuple):
    """What each process says before a round.

    table         hash of the round's rows
    asked         the process was asked to stop
    choice        a number that the leader decides for all, such as nano-batches
    step_micros   wall time of the process's last round
    due           a checkpoint is due on this process
    """

    table: int
    asked: int = 0
    choice: int = 1
    step_micros: int = 0
    due: int = 0


class Agreed(NamedTuple):
    """What all processes have agreed on.

    asked         some process was asked to stop
    choice        the leader's
    step_micros   of the slowest process
    due           a checkpoint is due on the leader
    """

    asked: bool
    choice: int
    step_micros: int
    due: bool = False


class Ranks:
    """The processes of a mesh, from one of them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def agree(self, note: Note) -> Agreed:
        """Tell all processes of the round to come, and hear of theirs.

        raises    RanksParted, on every process, where one has other rows
        """
        if self.mesh.world is None:
            return Agreed(bool(note.asked), note.choice, note.step_micros, bool(note.due))
        mine = torch.tensor(note, dtype=torch.int64)
        told = [torch.empty_like(mine) for _ in range(self.mesh.size)]
        dist.all_gather(told, mine, group=self.mesh.world)
        notes = [Note(*row.tolist()) for row in told]
        _demand_one_table([each.table for each in notes])
        return Agreed(
            any(each.asked for each in notes),
            notes[0].choice,
            max(each.step_micros for each in notes),
            bool(notes[0].due),
        )

    def together(self, action: Callable[[], T]) -> T:
        """Do what may fail on some processes only; if it does, it fails on all.

        raises    the process's own TloraError; RankFailed where another process has one
        """
        error: TloraError | None = None
        try:
            made = action()
        except TloraError as own:
            error = own
        told = self.tell_all("" if error is None else str(error))
        failed = [rank for rank, text in enumerate(told) if text]
        if error is None and failed:
            error = RankFailed(
                f"process {failed[0]} cannot go on",
                rank=", ".join(map(str, failed)),
                reason=told[failed[0]],
                help="mend it there, and start all processes again",
            )
        if error is not None:
            # Every process raises: it is enough that one tells.
            error.__dict__["shared"] = True
            raise error
        return made

    def tell_all(self, value: T) -> list[T]:
        """What every process says, by rank."""
        if self.mesh.world is None:
            return [value]
        told: list[T | None] = [None] * self.mesh.size
        dist.all_gather_object(told, value, group=self.mesh.world)
        return told  # type: ignore[return-value]

    def from_leader(self, value: T) -> T:
        """The leader's value, on every process."""
        if self.mesh.world is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.mesh.world, device=torch.device("cpu"))
        return box[0]


def table_hash(rows: Sequence[PackedBatch]) -> int:
    """A hash of a round's rows, below 2^63."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        for tensor in row.tensors().values():
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def demand_elementwise(jobs: Sequence[Job], mesh: Mesh) -> None:
    """Refuse optimizers that need whole matrices where processes hold pieces of them.

    raises    NotElementwise
    """
    if mesh.shape.tp == 1:
        return
    for job in jobs:
        if job.optim in WHOLE_MATRICES:
            raise NotElementwise(
                f"job '{job.name}' has an optimizer that reads whole matrices",
                job=job.name,
                found=f"optim: {job.optim}, on a mesh of {mesh.shape}",
                help="choose a plan with tp=1, or an optimizer such as adamw",
            )


def _demand_one_table(tables: Sequence[int]) -> None:
    (common, count), *others = Counter(tables).most_common()
    if not others:
        return
    apart = [rank for rank, table in enumerate(tables) if table != common]
    raise RanksParted(
        "processes would train on different rows",
        expected=f"the same rows as {count} of {len(tables)} processes",
        found=f"others on rank {', '.join(map(str, apart))}",
        help="check that all processes read the same files and run the same version",
    )
