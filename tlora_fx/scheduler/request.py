"""What the scheduler is told of a job."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_fx.cost.demand import Demand

MAX_SLOWDOWN = 1.5


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as it was submitted; it never changes.

    name           unique
    base           jobs of one base, dtype and adapter arithmetic may share a group
    demand         one optimizer step
    gpus           GPUs that it asked for, and would have alone
    steps          optimizer steps until it is done
    submitted      seconds
    max_slowdown   in a group of two or more it is at most this much slower than alone
    deadline       seconds; None: none
    lends          the slowdown that it consents to, where others gain by it; at least max_slowdown
    longest        tokens of its longest sample
    """

    name: str
    base: str
    demand: Demand
    gpus: int
    steps: int
    submitted: float = 0.0
    max_slowdown: float = MAX_SLOWDOWN
    deadline: float | None = None
    lends: float = 0.0
    longest: int = 0
