"""Rows of trace files: columns that must be there, numbers that must be numbers."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from tlora_fx.errors import TraceColumnMissing, TraceFileError
from tlora_fx.simulator.traces import Dropped, TraceJob

Row = Mapping[str, Any]


class WrongRow(Exception):
    """A row that says what no job can be; its text is the reason."""


def number(row: Row, column: str) -> float:
    """A finite number of a row."""
    given = row.get(column)
    try:
        value = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WrongRow(f"{column} is not a number") from None
    if not math.isfinite(value):
        raise WrongRow(f"{column} is not a finite number")
    return value


def whole(row: Row, column: str) -> int:
    """A whole number of a row; "8.0" is one."""
    value = number(row, column)
    if value != int(value):
        raise WrongRow(f"{column} is not a whole number")
    return int(value)


def moment(row: Row, column: str) -> datetime:
    """A date with time, as ISO text or in seconds since 1970."""
    given = str(row.get(column) or "").strip()
    try:
        return datetime.fromtimestamp(float(given), UTC)
    except (ValueError, OverflowError, OSError):
        pass
    try:
        found = datetime.fromisoformat(given)
    except ValueError:
        raise WrongRow(f"{column} is no date") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def duration(row: Row, column: str) -> float:
    """Seconds, not negative."""
    value = number(row, column)
    if value < 0:
        raise WrongRow(f"negative {column}")
    return value


def gpus(count: int) -> int:
    """A job's GPUs; 0 is a job of CPUs alone, which a choice leaves out."""
    if count < 0:
        raise WrongRow("negative number of GPUs")
    return count


def jobs_of(
    rows: Iterable[tuple[int, Row]], one: Callable[[Row], TraceJob], dropped: Dropped
) -> Iterator[TraceJob]:
    """The jobs of numbered rows; what is wrong is counted and left out."""
    seen: set[str] = set()
    for line, row in rows:
        try:
            job = one(row)
            if job.name in seen:
                raise WrongRow("a name that stands twice")
        except WrongRow as reason:
            dropped.add(str(reason), f"line {line}")
        else:
            seen.add(job.name)
            yield job


def header_of(path: Path) -> list[str]:
    """The columns of a file: of a CSV's first line, or the keys of the first JSON object."""
    with opened(path) as file:
        first = file.readline().strip()
    if first.startswith("{"):
        return list(_object(first, 1, path))
    return [name.strip() for name in first.split(",") if name.strip()]


def demand_columns(path: Path, header: Iterable[str], needed: Iterable[str], format: str) -> None:
    """Refuse a file that lacks a needed column.

    raises    TraceColumnMissing, with all that are missing
    """
    there = set(header)
    missing = [name for name in needed if name not in there]
    if missing:
        raise TraceColumnMissing(
            f"a trace of format {format} without {', '.join(missing)}",
            file=path,
            expected=", ".join(needed),
            found=", ".join(header),
            help="add the columns, or say --format if this is another kind of trace",
        )


def rows_of(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a CSV file, or of a file of JSON lines, each with the number of its line."""
    with opened(path) as file:
        if file.read(1) == "{":
            file.seek(0)
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield line, _object(text, line, path)
            return
        file.seek(0)
        reader = csv.DictReader(file, skipinitialspace=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        try:
            for row in reader:
                yield reader.line_num, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise TraceFileError("a trace that is no CSV", file=path, found=error) from None


def opened(path: Path) -> IO[str]:
    """The file as text; a byte-order mark is skipped."""
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except FileNotFoundError:
        raise TraceFileError(
            "there is no such trace",
            file=path,
            help="name a file, or leave --trace out for a synthetic trace",
        ) from None
    except OSError as error:
        raise TraceFileError(
            "the trace cannot be read",
            file=path,
            found=error.strerror or error,
            help="name a file that you may read",
        ) from None


def _object(text: str, line: int, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise TraceFileError(
            "a line that is no JSON object", file=path, line=line, found=error
        ) from None
    if not isinstance(found, dict):
        raise TraceFileError("a line that is no JSON object", file=path, line=line, found=text)
    return found
