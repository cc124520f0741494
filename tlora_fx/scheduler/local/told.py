"""The lines that a worker tells: appended to a file, read while it grows.

A file outlives both ends: a worker whose parent is gone writes on undisturbed, and a line that a
kill has torn has no end and is never read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Teller:
    """Appends lines, for a worker.

    every_seconds   progress is told at most so often
    """

    def __init__(self, path: Path | str, every_seconds: float = 0.2) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115  (open while it trains)
        self._every = every_seconds
        self._told_at = 0.0

    def tell(self, kind: str, **facts: Any) -> None:
        """Append one line, with the time of day."""
        line = json.dumps({"kind": kind, "time": time.time(), **facts})
        self._file.write(line.encode() + b"\n")

    def progress(self, steps: Mapping[str, int]) -> None:
        """Tell the steps done, unless that was told a moment ago."""
        now = time.monotonic()
        if now - self._told_at >= self._every:
            self._told_at = now
            self.tell("progress", steps=dict(steps))


class Listener:
    """Reads the lines of a file as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def lines(self) -> list[dict[str, Any]]:
        """What was told since the last call; a line without its end waits."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
