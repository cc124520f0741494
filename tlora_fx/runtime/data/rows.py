"""Read the rows of a job's data: JSONL, JSON, CSV, Parquet, lines of text, or a hub's data set.

A row that cannot be read is an error that names file and line, or is counted when the job skips bad
rows. So text is read here; `datasets`, which reads the rest, refuses a file for one bad row.
"""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tlora_fx.config.hub import why_offline
from tlora_fx.config.job import DataSpec, Job, is_written_as_path
from tlora_fx.config.paths import is_file, is_folder, is_there
from tlora_fx.errors import DataFileError

_OTHER_SUFFIXES = (".gz", ".zst", ".zip", ".arrow", ".xlsx", ".md")
#: No field of a CSV file is longer.
_FIELD_BYTES = 1 << 27


class DataRow(NamedTuple):
    """One row of the data.

    where   file and line (from 1), or file and row (from 1), for messages
    fields  the row's columns, or None when it is bad
    reason  why it is bad
    """

    where: str
    fields: Mapping[str, Any] | None
    reason: str = ""


Reader = Callable[[Path, str], Iterator[DataRow]]


def require_data(spec: DataSpec, job: str) -> None:
    """Refuse data in a file that is not there; raises DataFileError. A hub id is not looked up."""
    path = Path(spec.path)
    if is_local(spec.path) and not is_file(path):
        raise DataFileError("the data file does not exist", path=path, job=job)


def read_rows(spec: DataSpec, job: str, limit: int | None = None) -> Iterator[DataRow]:
    """All rows of the data of `job`, in file order; blank lines are no rows.

    limit   rows are asked for one by one, and no more than this
    raises  DataFileError
    """
    if not is_local(spec.path):
        return islice(_hub_rows(spec, job), limit)
    path, reader = _reader(spec, job)
    return islice(_opened(reader, path, job), limit)


def require_files(job: Job) -> None:
    """Refuse data files that are not there, or of a type that is not read; raises DataFileError."""
    for spec in (job.data, evaluated(job)):
        if spec is not None and is_local(spec.path):
            _reader(spec, job.name)


def evaluated(job: Job) -> DataSpec | None:
    """The data that a job is evaluated on, where it is not held out.

    raises   DataFileError
    """
    if not isinstance(job.eval_split, str):
        return job.eval_data
    if is_local(job.data.path):
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
    return known or is_written_as_path(path) or is_there(path)


def _reader(spec: DataSpec, job: str) -> tuple[Path, Reader]:
    """The file of a data set, and what reads its rows."""
    path = Path(spec.path)
    if is_folder(path):
        raise DataFileError("the data is a folder", path=path, job=job, help="name a file in it")
    if not is_file(path):
        raise DataFileError("the data file does not exist", path=path, job=job)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataFileError(
            f"files of type '{path.suffix}' are not read",
            path=path,
            job=job,
            expected=" ".join(_READERS),
            help="write one JSON object a line into a .jsonl file",
        )
    return path, reader


def _opened(reader: Reader, path: Path, job: str) -> Iterator[DataRow]:
    try:
        yield from reader(path, job)
    except OSError as error:
        what = "the data file cannot be read"
        raise DataFileError(what, path=path, job=job, found=error.strerror or error) from error


def _lines(path: Path, job: str) -> Iterator[tuple[str, bytes]]:
    """Each line of a text file that is not blank, and where it is.

    raises   DataFileError for UTF-16
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                _require_bytes_of_text(line, path, job)
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield f"{path}:{number}", text


def _jsonl_rows(path: Path, job: str) -> Iterator[DataRow]:
    for where, line in _lines(path, job):
        try:
            # A column behind the line's end would be counted from the next line on.
            value = json.loads(line.decode("utf-8").rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            yield DataRow(where, None, f"no JSON: {_reason(error)}")
        else:
            yield _row(where, value)


def _text_rows(path: Path, job: str) -> Iterator[DataRow]:
    for where, line in _lines(path, job):
        try:
            yield DataRow(where, {"text": line.decode("utf-8").rstrip("\r\n")})
        except UnicodeDecodeError as error:
            yield DataRow(where, None, _reason(error))


def _json_rows(path: Path, job: str) -> Iterator[DataRow]:
    content = path.read_bytes()
    _require_bytes_of_text(content, path, job)
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        at = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        what = "the data file is no JSON"
        help = "one object a line? name it .jsonl" if "Extra data" in str(error) else ""
        raise DataFileError(what, path=at, job=job, found=_reason(error), help=help) from None
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


def _csv_rows(path: Path, job: str) -> Iterator[DataRow]:
    """Rows under a line of names; every value is text, as it stands."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open("rb") as file:
        _require_bytes_of_text(file.read(1 << 16), path, job)
    with _long_fields(), path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            names = next(table, [])
            _require_names(names, path, job)
            line = table.line_num + 1
            for cells in table:
                if cells:
                    yield _csv_row(f"{path}:{line}", names, cells)
                line = table.line_num + 1
        except csv.Error as error:
            at = f"{path}:{table.line_num}"
            what = "the data file is no CSV that can be read"
            help = 'double a quote inside a quoted field: ""'
            raise DataFileError(what, path=at, job=job, found=error, help=help) from None
        except UnicodeDecodeError as error:
            raise _not_utf8(path, job, error) from None


def _csv_row(where: str, names: list[str], cells: list[str]) -> DataRow:
    if len(cells) != len(names):
        reason = f"{len(cells)} fields under {len(names)} names"
        return DataRow(where, None, f"{reason}: quote a field that holds a comma or a line break")
    return DataRow(where, dict(zip(names, cells, strict=True)))


def _require_names(names: list[str], path: Path, job: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataFileError(
            f"the first line names the column '{twice}' twice",
            path=f"{path}:1",
            job=job,
            help="give each column a name of its own",
        )


@contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(_FIELD_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_rows(path: Path, job: str) -> Iterator[DataRow]:
    file = glob.escape(str(path))
    with TemporaryDirectory() as cache:
        try:
            yield from _loaded(
                path, "parquet", data_files=file, split="train", streaming=True, cache_dir=cache
            )
        except ValueError as error:
            what = "the data file is no Parquet that can be read"
            raise DataFileError(what, path=path, job=job, found=error) from None


_READERS: Mapping[str, Reader] = {
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
    ".txt": _text_rows,
}


def _hub_rows(spec: DataSpec, job: str) -> Iterator[DataRow]:
    """Rows of a data set of the hub; a stream may break off at any row."""
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


def _loaded(title: Path | str, source: str, **options: Any) -> Iterator[DataRow]:
    """The rows of what `datasets` loads under a name."""
    import datasets

    table = datasets.load_dataset(source, **options)
    return (_row(f"{title}: row {number}", fields) for number, fields in enumerate(table, 1))


def _row(where: str, value: object) -> DataRow:
    if isinstance(value, dict):
        return DataRow(where, value)
    return DataRow(where, None, f"the row is no object but {type(value).__name__}")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}; if it is {_guess(error.object)}, convert the file"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


# Text that is not UTF-8.


def _require_bytes_of_text(first: bytes, path: Path, job: str) -> None:
    """Refuse UTF-16, which spreadsheets write; all else is found out where it fails to decode."""
    marked = first.startswith((b"\xff\xfe", b"\xfe\xff"))
    if marked or first[:64].count(0) > 8:
        raise DataFileError(
            "the data file is not UTF-8",
            path=path,
            job=job,
            found="UTF-16" if marked else "zero bytes",
            help=_conversion(path, "utf-16") if marked else "is it a file of another type?",
        )


def _not_utf8(path: Path, job: str, error: UnicodeDecodeError) -> DataFileError:
    encoding = _guess(error.object)
    return DataFileError(
        "the data file is not UTF-8",
        path=path,
        job=job,
        found=f"byte 0x{error.object[error.start]:02x}; perhaps {encoding}",
        help=_conversion(path, encoding),
    )


def _conversion(path: Path, encoding: str) -> str:
    return f"iconv -f {encoding} -t utf-8 {path.name} > utf8-{path.name}"


def _guess(content: bytes) -> str:
    """The encoding that bytes which are not UTF-8 most likely have."""
    for encoding in ("shift_jis", "gb18030"):
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        wide = sum("\u3040" <= letter <= "\u9fff" for letter in text)
        if wide * 4 > len(text):
            return encoding
    return "cp1252"
