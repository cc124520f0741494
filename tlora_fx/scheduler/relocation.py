"""A run's folder that was moved, or restored from a backup: paths in its ledger follow it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path

#: Below a run's folder: its groups, whose checkpoints are in GROUPS/NUMBER/train, and the
#: submissions to its service.
GROUPS, INBOX = "groups", "service/inbox"
#: Columns that hold a path, and those that hold JSON with paths anywhere in it.
PATHS = (("files", "path"), ("origins", "path"))
JSON = (("jobs", "spec"), ("submissions", "document"))


def relocate(base: sqlite3.Connection, folder: Path) -> None:
    """Let paths below the run's folder begin with the folder where the ledger lies now.

    base     of the ledger, in a transaction; its fact `folder` says where it lay. A ledger of an
             older version has none: the files of its submissions tell the folder
    folder   where the ledger lies
    raises   sqlite3.Error
    """
    new = str(folder.absolute())
    query = "SELECT value FROM facts WHERE name = 'folder' AND typeof(value) = 'text'"
    row = base.execute(query).fetchone()
    old = row[0] if row else _folder_of_submissions(base)
    if row is None or old != new:
        base.execute("INSERT OR REPLACE INTO facts VALUES ('folder', ?)", (new,))
    if old is None or old == new:
        return
    there = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
    for table, column in PATHS:
        _replace_start(base, table, column, old, new)
    for table, column in JSON:
        if table in there:
            _replace_in_json(base, table, column, old, new)
    if "submissions" in there:
        _count_as_read(base, new)
    _relocate_commits(base, folder.absolute() / GROUPS)


def _folder_of_submissions(base: sqlite3.Connection) -> str | None:
    """Folder of a service's run by the paths of files that it read; None where it read none."""
    query = "SELECT path FROM files WHERE typeof(path) = 'text' AND path LIKE ?"
    row = base.execute(query, (f"%/{INBOX}/%",)).fetchone()
    return None if row is None else row[0].rpartition(f"/{INBOX}/")[0]


def _replace_start(base: sqlite3.Connection, table: str, column: str, old: str, new: str) -> None:
    base.execute(
        f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608  (names of ours)
        f"WHERE substr({column}, 1, ?) = ?",
        (new, len(old) + 1, len(old) + 1, f"{old}/"),
    )


def _replace_in_json(base: sqlite3.Connection, table: str, column: str, old: str, new: str) -> None:
    # A string of JSON begins with a quotation mark, and may have its other characters escaped.
    for ascii_only in (True, False):
        before, after = (
            json.dumps(path, ensure_ascii=ascii_only)[:-1] + "/" for path in (old, new)
        )
        base.execute(
            f"UPDATE {table} SET {column} = replace({column}, ?, ?) "  # noqa: S608  (names of ours)
            f"WHERE instr({column}, ?)",
            (before, after, before),
        )


def _count_as_read(base: sqlite3.Connection, folder: str) -> None:
    """Submissions that were read stay so, although their files have other content now."""
    query = "SELECT number, document FROM submissions WHERE typeof(document) = 'text'"
    rows = base.execute(query).fetchall()
    base.executemany(
        "UPDATE files SET sha256 = ? WHERE path = ?",
        [
            (hashlib.sha256(text.encode()).hexdigest(), f"{folder}/{INBOX}/{number:06d}.yaml")
            for number, text in rows
        ],
    )


def _relocate_commits(base: sqlite3.Connection, groups: Path) -> None:
    """Let jobs go on from checkpoints below this folder of groups.

    A commit's path may be relative to where the command was started: its end alone counts.
    """
    query = "SELECT name, path FROM jobs WHERE path != '' AND typeof(path) = 'text'"
    rows = base.execute(query).fetchall()
    base.executemany(
        "UPDATE jobs SET path = ? WHERE name = ?",
        [
            (str(groups.joinpath(*parts[-2:])), name)
            for name, path in rows
            if (parts := Path(path).parts)[-3:-2] == (GROUPS,)
        ],
    )
