"""Read rows that `datasets` keeps in columns: Parquet, data sets of the hub, folders it wrote.

Columns of objects have one set of keys for all rows. Arrow fills what a row's object lacks with
null, which is dropped again: a template would write it. Nulls in lists, in columns of JSON, and of
whole columns stay.

source   TRL, which drops them from the rows of every data set
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tlora_fx.config.hub import why_offline
from tlora_fx.config.job import DataSpec
from tlora_fx.config.paths import is_file
from tlora_fx.errors import DataFileError
from tlora_fx.runtime.data.text_files import DataRow, row_of

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
