"""The time that a job's chat template is told, where it asks for it.

A template that prints the date makes other samples each day. A job keeps the time of its first
start: a checkpoint has it, and whoever goes on from that goes on with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tlora_fx.runtime.checkpoints.store import CheckpointStore


@dataclass(frozen=True, slots=True)
class JobClocks:
    """The time of each job, in its own clock.

    now     for a job that starts, the same on all processes of a run
    kept    by job, the time of its first start
    """

    now: datetime = field(default_factory=lambda: datetime.now().astimezone())
    kept: Mapping[str, datetime] = field(default_factory=dict)

    def of(self, job: str) -> datetime:
        """The time that a job's chat template is told."""
        return self.kept.get(job, self.now)


def clocks_of(run: Mapping[str, Any]) -> dict[str, datetime]:
    """The times of the jobs of a run, from what its checkpoint says of it."""
    clocks = {}
    for job, time in dict(run.get("clocks") or {}).items():
        with suppress(TypeError, ValueError):
            clocks[str(job)] = datetime.fromisoformat(time)
    return clocks


def kept_clocks(sources: Mapping[str, Path]) -> dict[str, datetime]:
    """The times of jobs that go on.

    sources   by job, the output folder of the run whose newest checkpoint it goes on from
    """
    of_folder = {folder: clocks_of(CheckpointStore(folder).run()) for folder in sources.values()}
    return {
        job: of_folder[folder][job] for job, folder in sources.items() if job in of_folder[folder]
    }


def clocks_in(folder: Path) -> dict[str, datetime]:
    """The times of all jobs of the run in a folder; none where it has no checkpoint."""
    return clocks_of(CheckpointStore(folder).run())
