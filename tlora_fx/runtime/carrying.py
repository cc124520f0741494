"""Jobs that a run takes over from earlier ones, and hands on to later ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tlora_fx.errors import CheckpointError
from tlora_fx.runtime.checkpoint import CheckpointStore, JobState


@dataclass(frozen=True, slots=True)
class Carried:
    """What makes a run one piece of a longer one.

    jobs           folder of the jobs' own folders, which outlive the run; checkpoints are the run's
    sources        by job, the output folder of the run whose newest checkpoint it goes on from; a
                   job that is missing here starts anew
    save_seconds   a checkpoint is due so long after the last one, whatever `save_steps` says
    """

    jobs: Path
    sources: Mapping[str, Path] = field(default_factory=dict)
    save_seconds: float = float("inf")

    def states(self) -> dict[str, JobState]:
        """The states that jobs go on from.

        raises    CheckpointError where one cannot be read back whole
        """
        wanted: dict[Path, list[str]] = {}
        for name, folder in self.sources.items():
            wanted.setdefault(folder, []).append(name)
        found: dict[str, JobState] = {}
        for folder, names in wanted.items():
            checkpoint = CheckpointStore(folder).load(frozenset(names))
            states = {} if checkpoint is None else checkpoint.jobs
            missing = [name for name in names if name not in states]
            if missing:
                raise CheckpointError(
                    "a job's committed state is gone",
                    job=", ".join(missing),
                    folder=folder,
                    help="restore it from a backup; without it the job would start anew",
                )
            found |= states
        return found
