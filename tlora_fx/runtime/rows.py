"""Read the rows of a job's data: JSONL, JSON, Parquet, or a data set of the hub.

A row that cannot be read is an error that names file and line, or is counted when the job skips
bad rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tlora_fx.config.job import DataSpec, is_written_as_path
from tlora_fx.errors import DataFileError, MalformedRowError, MissingPackageError

SUFFIXES = (".jsonl", ".json", ".parquet")
_OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".arrow", ".jsonlines", ".ndjson")


class Row(NamedTuple):
    """One row of the data.

    where   file and line (from 1), or file and row (from 1), for messages
    fields  the row's columns, or None when it is bad
    reason  why it is bad
    """

    where: str
    fields: Mapping[str, Any] | None
    reason: str = ""


def read_rows(spec: DataSpec, job: str) -> Iterator[Row]:
    """All rows of the data of `job`, in file order; blank lines of JSONL are no rows.

    raises  DataFileError, MissingPackageError
    """
    path = Path(spec.path)
    if not _is_file(spec.path):
        return _hub_rows(spec, job)
    if path.is_dir():
        raise DataFileError("the data is a folder", path=path, job=job, help="name a file in it")
    if not path.is_file():
        raise DataFileError("the data file does not exist", path=path, job=job)
    readers: Mapping[str, Callable[[Path, str], Iterator[Row]]] = {
        ".jsonl": _jsonl_rows,
        ".json": _json_rows,
        ".parquet": _parquet_rows,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataFileError(
            f"files of type '{path.suffix}' are not read",
            path=path,
            job=job,
            expected=" ".join(SUFFIXES),
        )
    return _opened(reader, path, job)


def _is_file(path: str) -> bool:
    known = path.lower().endswith(SUFFIXES + _OTHER_SUFFIXES)
    return known or is_written_as_path(path) or Path(path).exists()


def _opened(reader: Callable[[Path, str], Iterator[Row]], path: Path, job: str) -> Iterator[Row]:
    try:
        yield from reader(path, job)
    except OSError as error:
        what = "the data file cannot be read"
        raise DataFileError(what, path=path, job=job, found=error.strerror or error) from error


def _jsonl_rows(path: Path, job: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                value = json.loads(text.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                yield Row(where, None, f"no JSON: {_json_reason(error)}")
            else:
                yield _row(where, value)


def _json_rows(path: Path, job: str) -> Iterator[Row]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        at = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        what = "the data file is no JSON"
        raise DataFileError(what, path=at, job=job, found=_json_reason(error)) from None
    if not isinstance(value, list):
        raise DataFileError(
            "the data file holds no list of rows",
            path=path,
            job=job,
            found=type(value).__name__,
            help="write [{...}, {...}], or one object a line into a .jsonl file",
        )
    for number, item in enumerate(value, 1):
        yield _row(f"{path}: row {number}", item)


def _parquet_rows(path: Path, job: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingPackageError(
            "reading Parquet needs the package pyarrow",
            path=path,
            job=job,
            help="pip install pyarrow, or convert the file to JSONL",
        ) from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield _row(f"{path}: row {number}", fields)
    except pyarrow.ArrowException as error:
        what = "the data file is no Parquet that can be read"
        raise DataFileError(what, path=path, job=job, found=error) from None


def _hub_rows(spec: DataSpec, job: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise MissingPackageError(
            f"reading '{spec.path}' from the hub needs the package datasets",
            job=job,
            help="pip install datasets, or name a local .jsonl, .json or .parquet file",
        ) from None
    try:
        table = datasets.load_dataset(spec.path, split=spec.split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataFileError(
            f"the data set '{spec.path}' cannot be loaded",
            job=job,
            split=spec.split,
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            help="check the id and the split; a local file is written with its suffix",
        ) from error
    return (_row(f"{spec.path}: row {number}", fields) for number, fields in enumerate(table, 1))


def _row(where: str, value: object) -> Row:
    if isinstance(value, dict):
        return Row(where, value)
    return Row(where, None, f"the row is no object but {type(value).__name__}")


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


@dataclass(slots=True)
class BadRows:
    """What to do with bad rows: raise, or count them and keep the first reasons."""

    job: str
    skip: bool
    count: int = 0
    first: tuple[str, ...] = ()

    def add(self, where: str, reason: str) -> None:
        """Count a bad row.

        raises  MalformedRowError unless the job skips bad rows
        """
        if not self.skip:
            help = "mend the row, or set skip_bad_rows: true in the job's data"
            what = "a row of the data cannot be used"
            raise MalformedRowError(what, file=where, job=self.job, found=reason, help=help)
        self.count += 1
        if len(self.first) < 5:
            self.first = (*self.first, f"{where}: {reason}")
