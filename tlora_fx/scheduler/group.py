"""Jobs that train together, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that share one base and one set of GPUs.

    jobs      names, in the order in which they joined
    gpus      how many GPUs it holds
    place     which ones; empty until it is placed
    seconds   predicted, of one step of all its jobs
    formed    when these jobs came together on these GPUs, in seconds; what dwelling counts from
    """

    jobs: tuple[str, ...]
    gpus: int
    place: tuple[int, ...] = ()
    seconds: float = 0.0
    formed: float = 0.0

    def same_as(self, other: Group) -> bool:
        """Whether going from one to the other moves nothing."""
        return set(self.jobs) == set(other.jobs) and set(self.place) == set(other.place)
