"""What a case of `distributed.py` has found so far: a run that is killed leaves it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.distributed_models import slowest
from benchmarks.results_file import write


class Progress:
    """Prints each row when it is measured, and keeps the result file up to date.

    found           the whole result file
    leader          whether this process prints and writes
    limit_seconds   of a case; what would end later is left out. 0: no limit
    """

    def __init__(
        self, path: Path, found: dict[str, Any], *, leader: bool, limit_seconds: float = 0.0
    ) -> None:
        self.path, self.found, self.leader = path, found, leader
        self.limit_seconds = limit_seconds
        self.name, self.rows = "", 0
        self._started = time.perf_counter()

    def begin(self, name: str) -> None:
        """A case begins."""
        self.name, self.rows = name, 0
        self._started = time.perf_counter()
        self.found["cases"][name] = {}

    @property
    def seconds(self) -> float:
        """Since the case began."""
        return time.perf_counter() - self._started

    def row(self, row: Mapping[str, Any]) -> None:
        """Print what was measured."""
        self.rows += 1
        if self.leader:
            told = {key: _short(value) for key, value in row.items()}
            print(f"{self.name} {self.seconds:.0f} s: {told}", flush=True)

    def keep(self, told: Mapping[str, Any]) -> None:
        """Write what the case has found, with the time that it took until now."""
        case = self.found["cases"][self.name]
        case |= {**told, "seconds": round(self.seconds, 1)}
        if self.leader:
            write(self.path, self.found)

    def has_time_for(self, seconds: float) -> bool:
        """Whether so much more would end within the limit; the same on all processes."""
        late = slowest(self.seconds + seconds) > self.limit_seconds
        return not (self.limit_seconds and late)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
