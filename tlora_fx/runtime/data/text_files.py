"""Read the rows of one text file: JSON lines, a list in JSON, CSV, or lines of text.

A row that cannot be read is given with the reason, so that a job may skip it. `datasets` would
refuse the whole file.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from tlora_fx.errors import DataFileError

#: Compressed text, by what its file's name ends with behind the text's own suffix.
COMPRESSED = (".gz", ".zst")
#: No field of a CSV file is longer.
_FIELD_BYTES = 1 << 27
#: What separates columns, by the suffix of a table.
_SEPARATORS: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}
_SEPARATOR_NAMES: Mapping[str, str] = {
    ";": "semicolons", "\t": "tabs", ",": "commas", "|": "vertical bars",
}  # fmt: skip


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


def suffix_of(path: Path) -> str:
    """The suffix that tells what a file holds: of "a.jsonl.gz" it is ".jsonl"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def open_bytes(path: Path) -> BinaryIO:
    """A file's bytes, decompressed where its name says that they are compressed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(path))
    if suffix == ".zst":
        import pyarrow

        return cast("BinaryIO", io.BufferedReader(pyarrow.input_stream(str(path), "zstd")))
    return path.open("rb")


def _lines(path: Path, job: str) -> Iterator[tuple[str, bytes]]:
    """Each line of a text file that is not blank, and where it is.

    raises   DataFileError for UTF-16
    """
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                _require_bytes_of_text(line, path, job)
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield f"{path}:{number}", text


def jsonl_rows(path: Path, job: str) -> Iterator[DataRow]:
    """The object of each line that is not blank."""
    for where, line in _lines(path, job):
        try:
            # A column behind the line's end would be counted from the next line on.
            value = json.loads(line.decode("utf-8").rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            yield DataRow(where, None, f"no JSON: {_reason(error)}{_other_shape(line)}")
        else:
            row = row_of(where, value)
            bad = row.fields is None
            yield row._replace(reason=row.reason + _other_shape(line)) if bad else row


def _other_shape(line: bytes) -> str:
    """What to do where a line that is no row begins JSON of another shape."""
    begin = line.strip()
    if begin == b"{":
        return "; an object stands in one line: jq -c . FILE"
    # A list of objects, or the first line of one.
    return "; a file of one list is named .json" if re.match(rb"\[\s*(\{|$)", begin) else ""


def text_rows(path: Path, job: str) -> Iterator[DataRow]:
    """Each line that is not blank, as the column text."""
    for where, line in _lines(path, job):
        try:
            yield DataRow(where, {"text": line.decode("utf-8").rstrip("\r\n")})
        except UnicodeDecodeError as error:
            yield DataRow(where, None, _reason(error))


def json_rows(path: Path, job: str) -> Iterator[DataRow]:
    """The objects of one list."""
    with open_bytes(path) as file:
        content = file.read()
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
        yield row_of(f"{path}: row {number}", item)


def csv_rows(path: Path, job: str) -> Iterator[DataRow]:
    """Rows under a line of names; every value is text, as it stands."""
    delimiter = _SEPARATORS[suffix_of(path)]
    with open_bytes(path) as file:
        _require_bytes_of_text(file.read(1 << 16), path, job)
    with (
        _long_fields(),
        open_bytes(path) as content,
        io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as file,
    ):
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
            encoding = _guess(error.object)
            found = f"byte 0x{error.object[error.start]:02x}; perhaps {encoding}"
            raise _not_utf8(path, job, found, encoding) from None


def _csv_row(where: str, names: list[str], cells: list[str]) -> DataRow:
    if len(cells) != len(names):
        reason = f"{len(cells)} fields under {len(names)} names"
        help = (
            separated_otherwise(where, names) or "quote a field that holds a comma or a line break"
        )
        return DataRow(where, None, f"{reason}: {help}")
    return DataRow(where, dict(zip(names, cells, strict=True)))


def separated_otherwise(where: str, names: Sequence[str]) -> str:
    """Advice for a table whose columns are separated by another character; empty if not so.

    where   of a row: the file and the line
    names   its columns, as they were read
    """
    suffix = suffix_of(Path(where.rpartition(":")[0]))
    expected = _SEPARATORS.get(suffix)
    if expected is None or len(names) != 1:
        return ""
    others = [separator for separator in _SEPARATOR_NAMES if separator != expected]
    used = max(others, key=names[0].count)
    if used not in names[0]:
        return ""
    right = next((name for name, mark in _SEPARATORS.items() if mark == used), "")
    help = f"name it {right}" if right else f"save it with {_SEPARATOR_NAMES[expected]}"
    return f"the file is separated by {_SEPARATOR_NAMES[used]}: {help}"


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


def row_of(where: str, value: object) -> DataRow:
    """A value as a row; a bad one where it is no object."""
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
        found = "UTF-16" if marked else "zero bytes"
        raise _not_utf8(path, job, found, "utf-16" if marked else "")


def _not_utf8(path: Path, job: str, found: str, encoding: str) -> DataFileError:
    conversion = f"iconv -f {encoding} -t utf-8 {path.name} > utf8-{path.name}"
    return DataFileError(
        "the data file is not UTF-8",
        path=path,
        job=job,
        found=found,
        help=conversion if encoding else "is it a file of another type?",
    )


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
