"""What became of each job of a replay, in columns: half a million jobs take some 50 MB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tlora_fx.scheduler.request import JobRequest
from tlora_fx.simulator.metrics import Distribution, Floats, SizeClass, thirds

Flags = NDArray[np.bool_]

#: What became of a job.
OPEN, DONE, FAILED, REFUSED = range(4)


@dataclass(slots=True)
class JobTable:
    """One row a job, in order of submission; seconds, nan where a thing never happened.

    names              of the jobs
    index              row of each name
    outcome            OPEN, DONE, FAILED or REFUSED
    submitted          when
    started            when it was first in a group
    ended              when it was done or given up
    run_seconds        in groups, switches included
    step_seconds       of them, in which steps were done
    grouped_seconds    of them, in groups of two or more
    solo_seconds       of a step alone
    steps              asked for
    steps_done         optimizer steps that count
    gpus               asked for
    formations         groups that it was in
    violated           it was in a group of two or more, slower than it allows
    lent               likewise, with its consent
    """

    names: tuple[str, ...]
    index: dict[str, int]
    outcome: NDArray[np.int8]
    submitted: Floats
    started: Floats
    ended: Floats
    run_seconds: Floats
    step_seconds: Floats
    grouped_seconds: Floats
    solo_seconds: Floats
    steps: Floats
    steps_done: Floats
    gpus: Floats
    formations: NDArray[np.int32]
    violated: Flags
    lent: Flags

    @classmethod
    def of(cls, requests: Sequence[JobRequest]) -> Self:
        """Before anything has happened."""
        n = len(requests)
        names = tuple(request.name for request in requests)
        return cls(
            names,
            {name: row for row, name in enumerate(names)},
            np.zeros(n, dtype=np.int8),
            np.array([request.submitted for request in requests], dtype=np.float64),
            np.full(n, np.nan),
            np.full(n, np.nan),
            np.zeros(n),
            np.zeros(n),
            np.zeros(n),
            np.full(n, np.nan),
            np.array([request.steps for request in requests], dtype=np.float64),
            np.zeros(n),
            np.array([request.gpus for request in requests], dtype=np.float64),
            np.zeros(n, dtype=np.int32),
            np.zeros(n, dtype=np.bool_),
            np.zeros(n, dtype=np.bool_),
        )

    @property
    def done(self) -> Flags:
        """Which jobs finished."""
        found: Flags = self.outcome == DONE
        return found

    def count(self, outcome: int) -> int:
        """How many jobs came to that."""
        return int(np.count_nonzero(self.outcome == outcome))

    def completion_seconds(self) -> Floats:
        """From submission to the end, of finished jobs."""
        found: Floats = (self.ended - self.submitted)[self.done]
        return found

    def distributions(self) -> dict[str, Distribution]:
        """Of finished jobs, by the names that `Summary` has for them."""
        done = self.done
        completion, run = self.completion_seconds(), self.run_seconds[done]
        alone = (self.steps * self.solo_seconds)[done]
        return {
            "completion_seconds": Distribution.of(completion),
            "queue_seconds": Distribution.of(np.maximum(0.0, completion - run)),
            "run_seconds": Distribution.of(run),
            "slowdown": Distribution.of(self.step_seconds[done] / alone),
            "stretch": Distribution.of(completion / alone),
        }

    def violating_share(self) -> float:
        """Of the jobs that ran, those that were ever slower than they allow."""
        ran = np.isfinite(self.started)
        return float(np.mean(self.violated[ran])) if ran.any() else 0.0

    def grouped_share(self) -> float:
        """Of the finished jobs, those that ever shared a group."""
        done = self.done
        return float(np.mean(self.grouped_seconds[done] > 0)) if done.any() else 0.0

    def by_size(self, names: Sequence[str]) -> tuple[SizeClass, ...]:
        """Thirds of the finished jobs by the GPU-seconds of one step alone."""
        rows = np.flatnonzero(self.done)
        third = thirds((self.gpus * self.solo_seconds)[rows])
        found = []
        for place, name in enumerate(names):
            own = rows[third == place]
            grouped, run = self.grouped_seconds[own], self.run_seconds[own].sum()
            share = float(np.mean(grouped > 0)) if len(own) else 0.0
            time_share = float(grouped.sum() / run) if run else 0.0
            found.append(SizeClass(name, len(own), share, time_share))
        return tuple(found)
