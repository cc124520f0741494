"""What a worker is asked to train: a file, written before the worker is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tlora_fx.durable import replace_file


@dataclass(frozen=True, slots=True)
class Order:
    """One formation of a group, for its worker.

    epoch            of the formation
    jobs             `Job.model_dump(mode="json")` of each, in the group's order
    sources          by job, the run folder whose newest checkpoint it goes on from
    output           run folder of the group: its checkpoints
    job_folders      folder of the jobs' own folders
    told             file that the worker appends its lines to
    device           "cpu" or "cuda"
    gpus             that the processes have, one each
    mesh             such as "dp=2"
    shard_base       the base is sharded over dp
    save_seconds     a checkpoint is due so long after the last one
    max_row_tokens   of one forward
    compiled         layers are compiled by torch.compile
    """

    epoch: int
    jobs: tuple[Mapping[str, Any], ...]
    sources: Mapping[str, str]
    output: str
    job_folders: str
    told: str
    device: str = "cpu"
    gpus: tuple[int, ...] = (0,)
    mesh: str = ""
    shard_base: bool = False
    save_seconds: float = 60.0
    max_row_tokens: int = 16384
    compiled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Leave the order where its worker finds it."""
        replace_file(path, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """The order in a file."""
        fields = json.loads(path.read_bytes())
        return cls(**{**fields, "jobs": tuple(fields["jobs"]), "gpus": tuple(fields["gpus"])})
