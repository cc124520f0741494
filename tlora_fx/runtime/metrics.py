"""A job's metrics: one JSON line for each optimizer step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from tlora_fx.durable import replace_file
from tlora_fx.errors import MetricsError

FIELDS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "seconds")


class MetricsLog:
    """Appends a job's steps to a file, each line flushed as soon as it is written.

    path   made, with its folder, by the first `append`
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None

    def append(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        tokens: int,
        seconds: float,
    ) -> None:
        """Add one line; numbers that are not finite are written as null, as JSON has none.

        step, tokens   optimizer steps and tokens of the job so far
        seconds        wall time of this step
        raises         MetricsError when the disk refuses
        """
        values = (step, loss, grad_norm, learning_rate, tokens, seconds)
        record = {
            name: value if math.isfinite(value) else None
            for name, value in zip(FIELDS, values, strict=True)
        }
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab")
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error

    def truncate_after(self, step: int) -> None:
        """Keep the whole lines up to a step, drop later and torn ones: what a resumed run needs."""
        self.close()
        try:
            if not self.path.exists():
                return
            content = self.path.read_bytes()
            kept = b"".join(
                line for line in content.splitlines(keepends=True) if _is_kept(line, step)
            )
            if kept != content:
                replace_file(self.path, kept)
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _refused(self, error: OSError) -> MetricsError:
        return MetricsError(
            "a metrics file could not be written or read",
            file=self.path,
            reason=error,
            help="free space or mend the permissions, then go on with --resume",
        )


class NoMetrics(MetricsLog):
    """A log that keeps nothing, for processes that leave writing to another."""

    def append(self, **values: float) -> None:
        """Keep nothing."""

    def truncate_after(self, step: int) -> None:
        """There is nothing to drop."""


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, in order; a torn last line is left out."""
    lines = Path(path).read_bytes().splitlines(keepends=True)
    return [record for record in map(_parsed, lines) if record is not None]


def _is_kept(line: bytes, step: int) -> bool:
    record = _parsed(line)
    return record is not None and record["step"] <= step


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None when the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record
