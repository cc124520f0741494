"""What one optimizer step of a job asks of hardware, in numbers that add up over a group.

A group's step does one step of each of its jobs, so a group's demand is the sum of its jobs'; its
time and memory are functions of that sum. What depends on the base alone (layers, widths) is the
estimator's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Demand(NamedTuple):
    """One optimizer step of a job, or the sum over a group.

    jobs          how many jobs: 1, or the group's size
    samples       sequences of the whole step, accumulation included
    tokens        of all samples
    squares       sum of squared lengths, what attention grows with
    targets       tokens with a loss
    adapters      adapters of one layer, summed over its sites: 7 for all linears of a Llama layer
    rank          sum of the ranks of these adapters, each times its site's (in + out) columns
    site_tokens   tokens times (in + out) columns, summed over a layer's adapted sites
    rank_tokens   tokens times rank times (in + out) columns, summed over a layer's adapters
    tensors       trained tensors of all layers
    parameters    trained numbers of all layers
    launched      jobs whose operators no CUDA graph can hold: 1, or 0; one of them keeps a group's
                  rows from running as graphs
    """

    jobs: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    targets: float = 0.0
    adapters: float = 0.0
    rank: float = 0.0
    site_tokens: float = 0.0
    rank_tokens: float = 0.0
    tensors: float = 0.0
    parameters: float = 0.0
    launched: float = 0.0

    def plus(self, other: Demand) -> Demand:
        """Both together."""
        return Demand(*(a + b for a, b in zip(self, other, strict=True)))

    def row(self) -> Array:
        """As a row of a matrix of demands [12]."""
        return np.array(self, dtype=np.float64)

    @classmethod
    def total(cls, demands: Iterable[Demand]) -> Self:
        """The sum of some; zero where there are none."""
        rows = [demand.row() for demand in demands]
        return cls(*map(float, np.sum(rows, axis=0))) if rows else cls()


#: The column of each field in a matrix of demands.
COLUMN = {name: place for place, name in enumerate(Demand._fields)}
