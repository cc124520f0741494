"""Find the data of a job, and read its rows: of files, of a folder, or of a hub's data set.

A row that cannot be read is an error that names file and line, or is counted when the job skips bad
rows.
"""

from __future__ import annotations

import glob
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from tlora_fx.config.job import DataSpec, Job, is_written_as_path
from tlora_fx.config.paths import is_file, is_folder, is_pattern, is_there
from tlora_fx.errors import DataFileError
from tlora_fx.runtime.data.columnar import (
    hub_rows,
    is_saved,
    parquet_rows,
    saved_files,
    saved_rows,
    saved_table,
)
from tlora_fx.runtime.data.text_files import (
    COMPRESSED,
    DataRow,
    Reader,
    csv_rows,
    json_rows,
    jsonl_rows,
    suffix_of,
    text_rows,
)

_OTHER_SUFFIXES = (*COMPRESSED, ".zip", ".arrow", ".xlsx", ".md")
_READERS: Mapping[str, Reader] = {
    ".jsonl": jsonl_rows,
    ".ndjson": jsonl_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
    ".txt": text_rows,
}


def require_data(spec: DataSpec, job: str) -> None:
    """Refuse data in a file that is not there; raises DataFileError. A hub id is not looked up."""
    if is_local(spec.path) and not is_pattern(spec.path) and not is_there(spec.path):
        raise DataFileError("the data file does not exist", path=spec.path, job=job)


def read_rows(spec: DataSpec, job: str, limit: int | None = None) -> Iterator[DataRow]:
    """All rows of the data of `job`, in file order; blank lines are no rows.

    Files of a pattern follow each other in the order of their names.

    limit   rows are asked for one by one, and no more than this
    raises  DataFileError
    """
    if not is_local(spec.path):
        return islice(hub_rows(spec, job), limit)
    return islice(_local_rows(_readers(spec, job), job), limit)


def require_files(job: Job) -> None:
    """Refuse data files that are not there, or of a type that is not read; raises DataFileError."""
    for spec in (*job.data.parts, evaluated(job)):
        if spec is not None and is_local(spec.path):
            _readers(spec, job.name)


def data_files(spec: DataSpec, job: str) -> list[Path]:
    """The files that hold the rows of a job's data, in their order; none for a hub id.

    raises   DataFileError
    """
    if not is_local(spec.path):
        return []
    files = []
    for path, reader in _readers(spec, job):
        files += saved_files(path, job) if reader is saved_rows else [path]
    return files


def evaluated(job: Job) -> DataSpec | None:
    """The data that a job is evaluated on, where it is not held out.

    raises   DataFileError
    """
    if not isinstance(job.eval_split, str):
        return job.eval_data
    if is_local(job.data.path) and not is_folder(job.data.path):
        raise DataFileError(
            f"a file has no split '{job.eval_split}'",
            path=job.data.path,
            job=job.name,
            help="name the file to evaluate under eval_data, or hold out a part: eval_split: 0.1",
        )
    return job.data.model_copy(update={"split": job.eval_split})


def is_local(path: str) -> bool:
    """Whether the path of a job's data is one on this machine, and no hub id."""
    known = path.lower().endswith((*_READERS, *_OTHER_SUFFIXES))
    return known or is_written_as_path(path) or is_pattern(path) or is_there(path)


def _readers(spec: DataSpec, job: str) -> list[tuple[Path, Reader]]:
    """The files or the folder of a data set, each with what reads its rows."""
    path = Path(spec.path)
    if is_pattern(spec.path):
        matches = sorted(map(Path, glob.glob(spec.path, recursive=True)))  # noqa: PTH207  (absolute patterns too)
        files = [each for each in matches if is_file(each)]
        if not files:
            raise DataFileError("no data file has such a name", path=path, job=job)
        return [(each, _reader(each, job)) for each in files]
    if is_folder(path):
        if not is_saved(path):
            raise DataFileError(
                "the data is a folder",
                path=path,
                job=job,
                expected="a file, or a folder that save_to_disk of datasets wrote",
                help=f"name a file in it, or many by a pattern: {path}/*.jsonl",
            )
        return [(saved_table(path, spec.split, job), saved_rows)]
    if not is_file(path):
        raise DataFileError("the data file does not exist", path=path, job=job)
    return [(path, _reader(path, job))]


def _reader(path: Path, job: str) -> Reader:
    suffix = suffix_of(path)
    reader = _READERS.get(suffix)
    is_compressed = path.suffix.lower() in COMPRESSED
    if reader is None or (is_compressed and reader is parquet_rows):
        raise DataFileError(
            f"files of type '{suffix if not is_compressed else suffix + path.suffix}' are not read",
            path=path,
            job=job,
            expected=f"{' '.join(_READERS)}; text also with {' or '.join(COMPRESSED)}",
            help="write one JSON object a line into a .jsonl file",
        )
    return reader


def _local_rows(readers: list[tuple[Path, Reader]], job: str) -> Iterator[DataRow]:
    for path, reader in readers:
        try:
            yield from reader(path, job)
        except (OSError, EOFError, zlib.error) as error:
            what = "the data file cannot be read"
            words = getattr(error, "strerror", None) or error
            raise DataFileError(what, path=path, job=job, found=words) from error
