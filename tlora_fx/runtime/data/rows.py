"""Find the data of a job, and read its rows: of files, of a folder, or of a hub's data set.

A row that cannot be read is an error that names file and line, or is counted when the job skips bad
rows.

`datasets` keeps rows in columns: Parquet, data sets of the hub, folders it wrote. Columns of
objects have one set of keys for all rows. Arrow fills what a row's object lacks with null, which is
dropped again: a template would write it. Nulls in lists, in columns of JSON, and of whole columns
stay.

source   TRL, which drops them from the rows of every data set
"""

from __future__ import annotations

import glob
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tlora_fx.config.base_spec import is_written_as_path
from tlora_fx.config.hub import why_offline
from tlora_fx.config.job import DataSpec, Job
from tlora_fx.config.paths import is_file, is_folder, is_pattern, is_there
from tlora_fx.errors import DataFileError, errors_as, nearest
from tlora_fx.runtime.data.text_files import (
    COMPRESSED,
    DataRow,
    Reader,
    csv_rows,
    json_rows,
    jsonl_rows,
    row_of,
    suffix_of,
    text_rows,
)

_OTHER_SUFFIXES = (*COMPRESSED, ".zip", ".arrow", ".xlsx", ".md")


def require_data(spec: DataSpec, job: str) -> None:
    """Refuse data in a file that is not there; raises DataFileError. A hub id is not looked up."""
    if (
        spec.rows is None
        and is_local(spec.path)
        and not is_pattern(spec.path)
        and not is_there(spec.path)
    ):
        raise _missing(Path(spec.path), job)


#: What to do about a data file that was read, and holds nothing.
NO_ROWS_HELP = "write samples into it, one a row, or name another file"


def _missing(path: Path, job: str) -> DataFileError:
    """The error of a file that is not there, with the one beside it that was meant."""
    try:
        near = nearest(path.name, [each.name for each in path.parent.iterdir()])
    except OSError:
        near = None
    return DataFileError(
        "the data file does not exist",
        path=path,
        job=job,
        help=f"did you mean '{near}'?"
        if near
        else "a path that does not begin with / starts at the job file's folder",
    )


def read_rows(spec: DataSpec, job: str, limit: int | None = None) -> Iterator[DataRow]:
    """All rows of the data of `job`, in file order; blank lines are no rows.

    Files of a pattern follow each other in the order of their names.

    limit   rows are asked for one by one, and no more than this
    raises  DataFileError
    """
    if spec.rows is not None:
        _require_no_split(spec, job)
        return islice(_handed_rows(spec, job), limit)
    if not is_local(spec.path):
        return islice(hub_rows(spec, job), limit)
    return islice(_local_rows(_readers(spec, job), job), limit)


def require_files(job: Job) -> None:
    """Refuse data files that are not there, or of a type that is not read; raises DataFileError."""
    for spec in (*job.data.parts, evaluated(job)):
        if spec is not None and spec.rows is None and is_local(spec.path):
            _readers(spec, job.name)


def data_files(spec: DataSpec, job: str) -> list[Path]:
    """The files that hold the rows of a job's data, in their order; none for a hub id or rows.

    raises   DataFileError
    """
    if spec.rows is not None or not is_local(spec.path):
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
    if job.data.rows is not None or (is_local(job.data.path) and not is_folder(job.data.path)):
        raise DataFileError(
            f"a file has no split '{job.eval_split}'"
            if job.data.rows is None
            else f"rows have no split '{job.eval_split}'",
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
    if is_pattern(spec.path) or not is_folder(path):
        _require_no_split(spec, job)
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
        raise _missing(path, job)
    return [(path, _reader(path, job))]


def _require_no_split(spec: DataSpec, job: str) -> None:
    """Refuse a split of what is read whole; raises DataFileError."""
    if spec.split != "train":
        what = "a file has" if spec.rows is None else "rows have"
        raise DataFileError(
            f"{what} no split '{spec.split}'",
            path=spec.path,
            job=job,
            expected="the name of a split only for a data set of the hub, or for a folder that "
            "save_to_disk of datasets wrote",
            help="leave split out, and name a file of the samples that you want",
        )


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
    if reader is parquet_rows:
        _require_parquet(path, job)
    return reader


def _require_parquet(path: Path, job: str) -> None:
    """Refuse a file that does not begin and end as Parquet does; raises DataFileError."""
    unreadable = errors_as(DataFileError, "the data file cannot be read", path=path, job=job)
    with unreadable, path.open("rb") as file:
        first, size = file.read(len(_PARQUET)), file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_PARQUET)))
        last = file.read()
    if (first, last) != (_PARQUET, _PARQUET):
        raise DataFileError(
            "the data file is no Parquet that can be read",
            path=path,
            job=job,
            expected=f"{_PARQUET.decode()} at its beginning and at its end",
            found="an empty file" if not size else f"{first!r} and {last!r}",
            help="write it again, or give it the suffix of what it holds, such as .jsonl",
        )


def _local_rows(readers: list[tuple[Path, Reader]], job: str) -> Iterator[DataRow]:
    for path, reader in readers:
        try:
            yield from reader(path, job)
        except (OSError, EOFError, zlib.error) as error:
            what = "the data file cannot be read"
            words = getattr(error, "strerror", None) or error
            help = ""
            if path.suffix.lower() in COMPRESSED:
                help = "copy or write it again; if it is not compressed, "
                help += f"take {path.suffix} off its name"
            raise DataFileError(what, path=path, job=job, found=words, help=help) from error


def _handed_rows(spec: DataSpec, job: str) -> Iterator[DataRow]:
    """Rows that Python code has handed over; raises DataFileError for those of a broken stream."""
    if isinstance(spec.rows, list | tuple):
        for number, value in enumerate(spec.rows, 1):
            yield row_of(f"{spec.path}: row {number}", value)
        return
    try:
        # Of which no column is a tensor.
        yield from _rows(spec.path, spec.rows.with_format(None))
    except Exception as error:  # whatever a stream's own code raises
        what = "the data cannot be read"
        words = f"{type(error).__name__}: {error}"
        raise DataFileError(what, path=spec.path, job=job, found=words) from error


#: The bytes with which a Parquet file begins and ends.
_PARQUET = b"PAR1"
#: Files that `datasets` writes into a folder: of one table, and of one for each split.
_TABLE, _SPLITS = "state.json", "dataset_dict.json"
#: What reading a damaged folder raises inside `datasets`.
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError)


def parquet_rows(path: Path, job: str) -> Iterator[DataRow]:
    """The rows of a Parquet file; raises DataFileError."""
    file = glob.escape(str(path))
    with TemporaryDirectory() as cache:
        try:
            yield from _loaded(
                path, "parquet", data_files=file, split="train", streaming=True, cache_dir=cache
            )
        except ValueError as error:
            what = "the data file is no Parquet that can be read"
            raise DataFileError(what, path=path, job=job, found=error) from None


def hub_rows(spec: DataSpec, job: str) -> Iterator[DataRow]:
    """Rows of a data set of the hub; a stream may break off at any row; raises DataFileError."""
    options: dict[str, Any] = {"streaming": True} if spec.streaming else {}
    if spec.name is not None:
        options["name"] = spec.name
    offline = why_offline()
    try:
        yield from _loaded(spec.path, spec.path, split=spec.split, **options)
    except (OSError, ValueError, RuntimeError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataFileError(
            f"the data set '{spec.path}' cannot be loaded",
            job=job,
            split=spec.split,
            found=f"not cached, and the hub is not reached ({offline}): {words}"
            if offline
            else words,
            help="name a file of it that is here, or mend the connection"
            if offline
            else "check the id and the split; a local file is written with its suffix",
        ) from error


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote a folder."""
    return is_file(folder / _TABLE) or is_file(folder / _SPLITS)


def saved_table(folder: Path, split: str, job: str) -> Path:
    """The folder of one split inside a folder that `save_to_disk` wrote; raises DataFileError."""
    if is_file(folder / _TABLE):
        if split != "train":
            raise DataFileError(
                f"the data is one table and has no split '{split}'", path=folder, job=job
            )
        return folder
    splits: Any = _json(folder / _SPLITS, job).get("splits")
    known = [str(name) for name in splits] if isinstance(splits, list) else []
    inside = split in known and Path(split).name == split
    if not inside or not is_file(folder / split / _TABLE):
        raise DataFileError(
            f"the data has no split '{split}'",
            path=folder,
            job=job,
            found=", ".join(known),
            help="set split in the job's data",
        )
    return folder / split


def saved_files(table: Path, job: str) -> list[Path]:
    """The files that hold the rows of a table, all in its folder; raises DataFileError."""
    listed = _json(table / _TABLE, job).get("_data_files")
    files = listed if isinstance(listed, list) else []
    names = [str(each.get("filename")) for each in files if isinstance(each, dict)]
    if not names or not all(Path(name).name == name for name in names):
        what = "the data folder lists no files of its own"
        raise DataFileError(what, path=table / _TABLE, job=job, found=listed)
    return [table / name for name in names]


def saved_rows(table: Path, job: str) -> Iterator[DataRow]:
    """The rows of one table of `save_to_disk`; raises DataFileError."""
    import datasets

    saved_files(table, job)
    try:
        rows: Any = datasets.load_from_disk(str(table))
        # What a damaged file says of lengths would be read from beyond its memory.
        rows.data.validate(full=True)
        yield from _rows(table, rows)
    except _DAMAGED as error:
        what = "the data folder cannot be read"
        words = f"{type(error).__name__}: {error}"
        raise DataFileError(what, path=table, job=job, found=words) from None


def _json(path: Path, job: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = "a file of the data folder cannot be read"
        raise DataFileError(what, path=path, job=job, found=error) from None
    return value if isinstance(value, dict) else {}


def _loaded(title: Path | str, source: str, **options: Any) -> Iterator[DataRow]:
    """The rows of what `datasets` loads under a name."""
    import datasets

    return _rows(title, datasets.load_dataset(source, **options))


def _rows(title: Path | str, table: Any) -> Iterator[DataRow]:
    features = getattr(table, "features", None) or {}
    for number, fields in enumerate(table, 1):
        yield row_of(f"{title}: row {number}", _without_fillers(fields, features))


def _without_fillers(fields: object, features: Mapping[str, Any]) -> object:
    if not isinstance(fields, dict):
        return fields
    return {name: _unfilled(value, features.get(name)) for name, value in fields.items()}


def _unfilled(value: Any, feature: Any) -> Any:
    """A value without the nulls of the objects in it.

    feature   the column's type; None where it is not known
    """
    if not isinstance(value, dict | list) or _is_json(feature):
        return value
    if isinstance(value, dict):
        inner = feature if isinstance(feature, Mapping) else {}
        return {k: _unfilled(v, inner.get(k)) for k, v in value.items() if v is not None}
    item = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return [_unfilled(each, item) if isinstance(each, dict | list) else each for each in value]


def _is_json(feature: Any) -> bool:
    import datasets

    kind = getattr(datasets, "Json", None)
    return kind is not None and isinstance(feature, kind)


_READERS: Mapping[str, Reader] = {
    ".jsonl": jsonl_rows,
    ".ndjson": jsonl_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
    ".txt": text_rows,
}
