"""What every plan runs as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tlora_fx.model.batch import PackedBatch


class StepRunner(Protocol):
    """Runs forward and backward of whole rounds under one plan.

    Runners of whole rows also have `nano_batches`, a number that may change between rounds.
    """

    def run(self, rows: Sequence[PackedBatch], weights: Tensor) -> Tensor:
        """One round: forward, backward, and each job's loss.

        Afterwards the gradients of this process's parameters hold the whole round's: summed over
        replicas, and over tp where a replicated half of an adapter needs it.

        rows      the whole round's rows on the CPU, the same on every process; their number is a
                  multiple of dp * micro_batches. Replica d runs rows d, d + dp, d + 2 dp, ...
        weights   [J] on the process's device: what a job's loss sum is multiplied with
        returns   [J] each job's weighted loss sum over the round, the same on every process
        """
