"""A run's past, read from its ledger: what became of each job, and what was decided about it.

Reading disturbs nobody; the run may go on meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_fx.errors import LedgerError
from tlora_fx.scheduler.ledger_rows import EpochRecord, JobRecord, decision_of_json
from tlora_fx.scheduler.state import Decision
from tlora_fx.scheduler.store import FORMAT

LEDGER = "ledger.sqlite"
#: What came with a job is for whoever runs it, and is not carried along.
_JOBS = JobRecord.COLUMNS.replace("spec", "'{}'", 1)
_QUERIES = {
    "jobs": f"SELECT {_JOBS} FROM jobs ORDER BY place",  # noqa: S608
    "epochs": f"SELECT {EpochRecord.COLUMNS} FROM epochs ORDER BY epoch",  # noqa: S608
    "decisions": "SELECT time, groups, waiting FROM decisions ORDER BY number",
}


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided at a moment; without reasons.

    time       seconds
    """

    time: float
    decision: Decision

    @property
    def jobs(self) -> list[str]:
        """All that were active then."""
        return [name for group in self.decision.groups for name in group.jobs] + list(
            self.decision.waiting
        )


@dataclass(frozen=True, slots=True)
class History:
    """What a ledger tells.

    jobs        as they are now
    epochs      all formations of groups
    decisions   the newest, and for each job the last one that it had a part in, in order of time
    """

    jobs: Mapping[str, JobRecord]
    epochs: tuple[EpochRecord, ...] = ()
    decisions: tuple[Decided, ...] = ()

    @classmethod
    def of_run(cls, folder: Path) -> History | None:
        """Of a run's folder; None where it has no ledger.

        raises   LedgerError
        """
        path = folder / LEDGER
        return cls.of_rows(_read(path)) if path.is_file() else None

    @classmethod
    def of_rows(cls, rows: Mapping[str, Iterable[Sequence[Any]]]) -> History:
        """From rows of the ledger's tables.

        raises   KeyError, TypeError, ValueError where they are none
        """
        jobs = [JobRecord.of(row) for row in rows["jobs"]]
        epochs = tuple(EpochRecord.of(row) for row in rows["epochs"])
        decisions = [
            Decided(time, decision_of_json(groups, waiting))
            for time, groups, waiting in rows["decisions"]
        ]
        return cls({job.name: job for job in jobs}, epochs, tuple(_last(decisions)))

    def last(self, job: str) -> Decided | None:
        """The last decision about a job."""
        return next((one for one in reversed(self.decisions) if job in one.jobs), None)

    def at(self, time: float) -> Decision | None:
        """What was decided at a moment."""
        return next((one.decision for one in self.decisions if one.time == time), None)

    def formations(self, job: str) -> list[EpochRecord]:
        """The groups that a job was in."""
        return [epoch for epoch in self.epochs if job in epoch.jobs]


def rows_of_run(folder: Path) -> dict[str, list[list[Any]]] | None:
    """The rows of a run's ledger that tell its past, as JSON can hold them; None: it has none.

    raises   LedgerError
    """
    path = folder / LEDGER
    if not path.is_file():
        return None
    rows = _read(path)
    found = [Decided(row[0], decision_of_json(row[1], row[2])) for row in rows["decisions"]]
    kept = {one.time for one in _last(found)}
    return rows | {"decisions": [row for row in rows["decisions"] if row[0] in kept]}


def _last(decisions: Sequence[Decided]) -> list[Decided]:
    """The newest decision, and the last one about each job."""
    last = {name: one for one in decisions for name in one.jobs}
    wanted = {id(one) for one in (*last.values(), *decisions[-1:])}
    return [one for one in decisions if id(one) in wanted]


def _read(path: Path) -> dict[str, list[list[Any]]]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            [written_by] = base.execute("SELECT value FROM facts WHERE name = 'format'").fetchone()
            if int(written_by) != FORMAT:
                raise LedgerError(
                    "the run's ledger has another format",
                    file=path,
                    expected=FORMAT,
                    found=written_by,
                    help="read it with the version of tlora-fx that wrote it",
                )
            base.execute("BEGIN")
            return {
                name: [list(row) for row in base.execute(query)] for name, query in _QUERIES.items()
            }
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise LedgerError(
            "the run's ledger cannot be read",
            file=path,
            reason=f"{type(error).__name__}: {error}",
            help="name the folder that `tlora-fx run` was given by -o",
        ) from error
