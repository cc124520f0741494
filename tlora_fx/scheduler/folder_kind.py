"""The command that a run's folder belongs to: `run` or `serve`.

Each goes on with its own folders alone. `run` would train a service's jobs without its users, their
quotas and its log, and `serve` would train a run's jobs for nobody and read its job files no more.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from tlora_fx.errors import RunFolderError
from tlora_fx.runtime.run_folder import SERVICE_INBOX
from tlora_fx.scheduler.history import open_ledger


def require_folder_of_run(folder: Path) -> None:
    """Refuse the folder of a service; raises RunFolderError, LedgerError, NewerFormat."""
    kind = FolderKind.of(folder)
    if kind.of_service and not kind.of_run:
        raise RunFolderError(
            "the output folder is a service's",
            folder=folder,
            expected="a new folder, or one that `tlora-fx run` made",
            help=f"go on with its jobs by `tlora-fx serve -o {folder}`, or choose another folder "
            "with -o",
        )


def require_folder_of_service(folder: Path) -> None:
    """Refuse the folder of a run without a service; raises as `require_folder_of_run`."""
    kind = FolderKind.of(folder)
    if kind.of_run and not kind.of_service:
        raise RunFolderError(
            "the output folder is a run's, and no service's",
            folder=folder,
            expected="a new folder, or one that `tlora-fx serve` or `tokens add` made",
            help=f"go on with its jobs by `tlora-fx run JOBS -o {folder}`, or choose another "
            "folder with -o",
        )


@dataclass(frozen=True, slots=True)
class FolderKind:
    """Whether a run, a service, or both have begun in a folder.

    Jobs that no user owns are a run's, and jobs that a user owns are a service's. A folder may have
    both, since older versions of `run` went on with a service's folder. A service's inbox, tables
    and users decide only where no job does: older versions of `tokens` made them in a run's folder.
    """

    of_run: bool
    of_service: bool

    @classmethod
    def of(cls, folder: Path) -> FolderKind:
        """The kind of a folder; raises LedgerError, NewerFormat."""
        inbox = (folder / SERVICE_INBOX).is_dir()
        with open_ledger(folder) as base:
            if base is None:
                return cls(of_run=False, of_service=inbox)
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = {name for (name,) in base.execute(query)}
            if not tables:  # nobody has begun there
                return cls(of_run=False, of_service=inbox)
            owns = _has_rows(base, tables, "owned") or _has_rows(base, tables, "submissions")
            others = "WHERE NOT EXISTS (SELECT 1 FROM owned WHERE owned.name = jobs.name)"
            if _has_rows(base, tables, "jobs", others if "owned" in tables else ""):
                return cls(of_run=True, of_service=owns)
        # A backup may hold the ledger and no inbox.
        of_service = owns or inbox or "submissions" in tables
        return cls(not of_service, of_service)


def _has_rows(base: sqlite3.Connection, tables: set[str], table: str, where: str = "") -> bool:
    """Whether a ledger has a table with such a row."""
    query = f"SELECT 1 FROM {table} {where} LIMIT 1"  # noqa: S608  (names of ours)
    return table in tables and base.execute(query).fetchone() is not None
