"""Which part of a model one process holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_fx.ir.graph import Pieces


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal pieces of a tensor along a dimension.

    runs   sizes in the whole tensor of what lies one after the other along the dimension and is cut
           each by itself: a piece has a part of every run, in their order; () for a single run
    """

    dimension: int
    index: int
    count: int
    runs: tuple[int, ...] = ()

    def of(self, full: Tensor) -> Tensor:
        """The piece: a view of a single run, a new tensor of parts of several."""
        sizes = list(self.runs) or full.shape[self.dimension]
        runs = torch.split(full, sizes, self.dimension)
        parts = [run.tensor_split(self.count, self.dimension)[self.index] for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor of all pieces, by their index."""
        sizes = [size // self.count for size in self.runs] or pieces[0].shape[self.dimension]
        parts = [torch.split(piece, sizes, self.dimension) for piece in pieces]
        return torch.cat([part for run in zip(*parts, strict=True) for part in run], self.dimension)

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

    def shard(self, cut: Pieces | None) -> Shard | None:
        """This process's piece of a tensor that a graph says is cut so."""
        if cut is None:
            return None
        dimension, count, runs = cut
        return Shard(dimension, self.tp_rank, count, runs)
