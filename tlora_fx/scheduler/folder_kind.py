"""The command that a run's folder belongs to: `run` or `serve`.

Each goes on with its own folders alone. `run` would train a service's jobs without its users, their
quotas and its log, and `serve` would train a run's jobs for nobody and read its job files no more.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from tlora_fx.errors import RunFolderError
from tlora_fx.runtime.run_folder import LEDGER, SERVICE_INBOX

#: A table of the ledger that a service alone has: a backup may hold the ledger and no more.
_TABLE = "submissions"


def require_folder_of_run(folder: Path) -> None:
    """Refuse the folder of a service; raises RunFolderError."""
    if is_of_service(folder):
        raise RunFolderError(
            "the output folder is a service's",
            folder=folder,
            expected="a new folder, or one that `tlora-fx run` made",
            help=f"go on with its jobs by `tlora-fx serve -o {folder}`, or choose another folder "
            "with -o",
        )


def require_folder_of_service(folder: Path) -> None:
    """Refuse the folder of a run without a service; raises RunFolderError."""
    if (folder / LEDGER).exists() and not is_of_service(folder):
        raise RunFolderError(
            "the output folder is a run's, and no service's",
            folder=folder,
            expected="a new folder, or one that `tlora-fx serve` or `tokens add` made",
            help=f"go on with its jobs by `tlora-fx run JOBS -o {folder}`, or choose another "
            "folder with -o",
        )


def is_of_service(folder: Path) -> bool:
    """Whether a service has begun in a folder."""
    return (folder / SERVICE_INBOX).is_dir() or _has_table(folder / LEDGER)


def _has_table(ledger: Path) -> bool:
    """Whether a ledger has the tables of a service; one that cannot be read has none."""
    if not ledger.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as base:
            query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
            return base.execute(query, (_TABLE,)).fetchone() is not None
    except sqlite3.Error:
        return False
