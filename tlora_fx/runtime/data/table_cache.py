"""Encoded data: the tokens of all rows of a job's data, kept between runs and shared by jobs.

Jobs share a table when their data, their tokenizer and what decides the tokens of a row are the
same. Tables lie in `data` of the cache folder, each under a hash of all that decides it: the digest
of the file, the tokenizer, the job's settings, our own code and the versions of the libraries.
TLORA_FX_DATA_CACHE is the largest size of that folder in GiB; with 0 nothing is kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from weakref import WeakValueDictionary

import pyarrow as pa

from tlora_fx.errors import DataFileError
from tlora_fx.host import environment
from tlora_fx.host.paths import cache_folder
from tlora_fx.host.sources import own_source
from tlora_fx.runtime.data.layout import SampleLayout
from tlora_fx.runtime.data.tables import BadRow, RowCounts, TokenTable, write_batches

logger = logging.getLogger(__name__)

FORMAT = 1
LIBRARIES = ("transformers", "tokenizers", "jinja2")
_open: WeakValueDictionary[str, TokenTable] = WeakValueDictionary()


Encode = Callable[[RowCounts], Iterable[pa.RecordBatch]]


def encode_once(
    keys: Sequence[str], encode: Encode, usable: Callable[[TokenTable], bool]
) -> TokenTable:
    """The table under one of the keys, else a new one, which is kept under the first.

    keys      none where nobody knows what decides the data
    encode    makes the batches of a table, and counts what became of the data's rows
    usable    whether a table that is there serves
    """
    if not keys:
        return _temporary(encode)
    with _locked(keys[0]) as is_writable:
        for key in keys:
            known = _open.get(key) or (_read(key) if is_writable else None)
            if known is not None and usable(known):
                _open[key] = known
                return known
        if is_writable:
            try:
                table = _built(keys[0], encode)
            except OSError as error:
                logger.warning("tokens cannot be kept in %s: %s", tables_folder(), error)
                table = _temporary(encode)
        else:
            table = _temporary(encode)
        _open[keys[0]] = table
        return table


def max_bytes() -> int:
    """How large all tables together may be; raises EnvironmentVariableWrong."""
    return environment.max_bytes(environment.DATA_CACHE)


def tables_folder() -> Path:
    """Where tables lie."""
    return cache_folder() / "data"


def table_key(*parts: object) -> str:
    """A hash of what decides a table, our own code and the libraries' versions among it."""
    code = own_source("runtime/data", "runtime/chats", "config")
    text = repr((FORMAT, code, [version(name) for name in LIBRARIES], parts))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _read(key: str) -> TokenTable | None:
    """The table in the folder under a key; None where none is that can be read."""
    folder = tables_folder() / key
    try:
        counts = json.loads((folder / "rows.json").read_text("utf-8"))
        counts["first_bad"] = [BadRow(*row) for row in counts["first_bad"]]
        if counts["layout"] is not None:
            seen = counts["layout"].pop("seen")
            counts["layout"] = SampleLayout(**counts["layout"], seen=seen and frozenset(seen))
        table = TokenTable(folder / "tokens.arrow", RowCounts(**counts), folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        logger.info("encoded data cannot be read from %s: %s", folder, error)
        return None
    with suppress(OSError):
        os.utime(folder)  # the oldest go first
    return table


def _built(key: str, encode: Encode) -> TokenTable:
    """A new table in the folder; raises OSError."""
    home = tables_folder()
    written, counts = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=home)), RowCounts()
    try:
        write_batches(written / "tokens.arrow", encode(counts))
        (written / "rows.json").write_text(json.dumps(asdict(counts), default=sorted), "utf-8")
        shutil.rmtree(home / key, ignore_errors=True)
        written.rename(home / key)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    table = TokenTable(home / key / "tokens.arrow", counts, home / key)
    _remove_oldest(home, keep=home / key)
    return table


def _temporary(encode: Encode) -> TokenTable:
    """A table whose file is gone when nothing maps it any more; raises DataFileError."""
    counts = RowCounts()
    try:
        with tempfile.TemporaryDirectory(prefix="tlora-fx-data-") as folder:
            path = Path(folder) / "tokens.arrow"
            write_batches(path, encode(counts))
            return TokenTable(path, counts)
    except OSError as error:
        raise DataFileError(
            "the tokens of the data cannot be written",
            path=tempfile.gettempdir(),
            found=error.strerror or error,
            help="free space there, or name another folder by TMPDIR",
        ) from error


@contextmanager
def _locked(key: str) -> Iterator[bool]:
    """One process encodes, others wait and read; whether the folder can be written."""
    home = tables_folder()
    if max_bytes() <= 0:
        yield False
        return
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / f".{key}.lock").open("w")
    except OSError as error:
        logger.warning("tokens cannot be kept in %s: %s", home, error)
        yield False
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


def _remove_oldest(home: Path, *, keep: Path) -> None:
    """Remove the tables that were used longest ago, until the rest fits, and what was left half."""
    tables, yesterday = [], time.time() - 86_400
    for folder in home.iterdir():
        with suppress(OSError):
            if folder.name.startswith("."):
                if folder.stat().st_mtime < yesterday:
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.unlink(missing_ok=True)
            elif folder.is_dir():
                size = sum(file.stat().st_size for file in folder.iterdir())
                tables.append((folder != keep, folder.stat().st_mtime_ns, size, folder))
    excess = sum(size for _, _, size, _ in tables) - max_bytes()
    for removable, _, size, folder in sorted(tables):
        if excess > 0 and removable:
            # Processes that have mapped its file keep what they have.
            shutil.rmtree(folder, ignore_errors=True)
            (home / f".{folder.name}.lock").unlink(missing_ok=True)
            excess -= size
