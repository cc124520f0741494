"""Which part of a model one process holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal pieces of a tensor along a dimension."""

    dimension: int
    index: int
    count: int

    def of(self, full: Tensor) -> Tensor:
        """The piece, a view."""
        size = full.shape[self.dimension] // self.count
        return full.narrow(self.dimension, self.index * size, size)

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor, from a piece's."""
        return tuple(
            size * self.count if place == self.dimension else size
            for place, size in enumerate(shape)
        )


@dataclass(frozen=True, slots=True)
class Part:
    """What of a model a process holds; by default all of it.

    held      module paths, each with all that lies under it; None for every module
    tp_rank   which piece of sharded tensors
    tp_size   how many pieces there are
    """

    held: frozenset[str] | None = None
    tp_rank: int = 0
    tp_size: int = 1

    def holds(self, path: str) -> bool:
        """Whether a module or tensor lies in what is held."""
        if self.held is None:
            return True
        parts = path.split(".")
        return any(".".join(parts[:end]) in self.held for end in range(1, len(parts) + 1))

    def shard(self, cut: tuple[int, int] | None) -> Shard | None:
        """This process's piece of a tensor that a graph says is cut so."""
        return None if cut is None else Shard(cut[0], self.tp_rank, cut[1])
