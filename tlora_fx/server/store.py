"""Submissions to a service, and its jobs: what is wanted of them, and what becomes of them.

What is wanted of a job ("run", "pause", "cancel") is a state and no message: a service that was
killed finds it again.

Nothing that is done often looks at what has ended. The scheduler's look settles each job that has
ended: it writes down the job's last state and counts it. From then on indexes leave it out of
whatever concerns jobs that may still train. In the same way GPU-hours of ended groups are added up.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlora_fx.config.hyperparameters import with_defaults
from tlora_fx.errors import JobUnknown, QuotaReached, RequestConflict
from tlora_fx.scheduler.store import GOES_ON, RESERVED
from tlora_fx.server.ledger import FOLDER, LOCAL, ServiceLedger, User, act, operator

Wanted = Literal["run", "pause", "cancel"]
#: Before what an event of a group tells in detail: users who have not all of its jobs see no more.
BUT, REASON = ", but: ", ". Reason: "
#: What may be the name of a job in a text.
_NAME = re.compile(r"[\w.-]+")

#: Groups that run, and all those whose processes they took over, each with the one that runs.
_AT_WORK = f"""
WITH RECURSIVE at_work (epoch, jobs, last) AS (
    SELECT epoch, jobs, epoch FROM epochs WHERE ended IS NULL
    UNION SELECT epochs.epoch, epochs.jobs, at_work.last FROM at_work
        JOIN epochs ON epochs.how = '{GOES_ON}' || at_work.epoch)
"""  # noqa: S608  (a constant of ours)

#: Of each job of the service: what it is, what the ledger says, and what was said of its file.
_JOBS = """
SELECT owned.rowid, owned.name, owned.user, owned.submission, owned.priority, owned.wanted,
    submissions.time, jobs.status, jobs.reason, jobs.steps, jobs.request, jobs.first_started,
    jobs.ended, files.told
FROM owned CROSS JOIN submissions ON submissions.number = owned.submission
LEFT JOIN jobs ON jobs.name = owned.name
LEFT JOIN files ON files.path = ? || printf('%06d.yaml', owned.submission)
"""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job file that was taken.

    document   the file that the scheduler reads, absolute paths and full names in it
    """

    number: int
    jobs: tuple[str, ...]
    document: str
    folder: str
    replayed: bool = False


#: What `OwnedJob.state` may be.
STATES = (
    "received", "queued", "running", "pausing", "paused", "cancelling", "done", "failed", "refused",
    "cancelled",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OwnedJob:
    """A job of the service, as the ledger has it; times are seconds of the run's clock.

    number      place in the order of submission; no two jobs ever have the same
    submitted   time of day
    status      None: its file was not read yet
    told        what was said of its file, "" where it was not read yet
    """

    number: int
    name: str
    user: str
    submission: int
    priority: int
    wanted: Wanted
    submitted: float
    status: str | None
    reason: str | None
    steps: float | None
    request: str | None
    first_started: float | None
    ended: float | None
    told: str | None

    @property
    def total(self) -> int:
        """Steps that it has in all; 0 where nobody knows yet."""
        return int(json.loads(self.request)["steps"]) if self.request else 0

    @property
    def state(self) -> str:
        """State of the job, as users are told."""
        status = self.status
        if status is None:
            refused = self.told not in (None, "", "taken")
            wanted = {"cancel": "cancelling", "pause": "paused", "run": "received"}[self.wanted]
            return "refused" if refused else wanted
        if status in ("queued", "running"):
            stopping = {"cancel": "cancelling", "pause": "pausing"}.get(self.wanted, status)
            return "paused" if (status, stopping) == ("queued", "pausing") else stopping
        # It was asked to end where it was, and did.
        ended_early = status == "done" and self.wanted == "cancel" and self.steps != self.total
        return "cancelled" if ended_early else status

    @property
    def active(self) -> bool:
        """Whether it may still be trained."""
        return self.state not in ("done", "failed", "refused", "cancelled")


@dataclass(frozen=True, slots=True)
class ReplacedJob:
    """A refused or cancelled job whose name another job has now.

    number      as of `OwnedJob`
    submitted   time of day; `ended` too
    """

    number: int
    name: str
    user: str
    submission: int
    state: str
    reason: str
    steps: float
    submitted: float
    ended: float

    @property
    def folder(self) -> str:
        """Where what it has left lies, below the run's folder; it may have left nothing."""
        return replaced_folder(self.number, self.name)


@dataclass(frozen=True, slots=True)
class Page:
    """Which jobs of a list are wanted, in order of submission.

    after    those behind this number; None: from the first
    before   those before this number, the newest first; None: see `after`
    limit    at most so many; fewer are there only at the end of the list
    state    those in this state; None: in any
    ended    those that have ended, or those that have not; None: both
    """

    after: int | None = None
    before: int | None = None
    limit: int = 1000
    state: str | None = None
    ended: bool | None = None

    def has(self, job: OwnedJob) -> bool:
        """Whether a job is in the list, whatever its number."""
        return self.state in (None, job.state) and self.ended in (None, not job.active)


class ServiceStore(ServiceLedger):
    """Submissions and jobs of a service; any thread may call it."""

    # Submissions.

    def replayed(self, user: User, key: str, sha256: str) -> Submission | None:
        """The submission that had this key; raises RequestConflict where it was another."""
        rows = self.rows(
            "SELECT number, sha256, document, folder FROM submissions WHERE user = ? AND key = ?",
            user.name,
            key,
        )
        for number, before, document, folder in rows:
            if before != sha256:
                help = "give each submission its own key"
                raise RequestConflict("another submission had this key", key=key, help=help)
            names = self.rows(
                "SELECT name, rowid FROM owned WHERE submission = ? UNION ALL "
                "SELECT name, job FROM removed WHERE submission = ? ORDER BY 2",
                number,
                number,
            )
            jobs = tuple(name for name, _ in names)
            return Submission(number, jobs, document, folder, replayed=True)
        return None

    def submit(
        self, user: User, key: str, sha256: str, names: Sequence[str], document: str,
        folder: str, priority: int,
    ) -> Submission:  # fmt: skip
        """Take a submission, once for each key.

        names      full names of its jobs
        document   what the scheduler is to read
        raises     RequestConflict, QuotaReached

        Jobs of these names that were refused or cancelled are removed. What they have trained is
        moved to `service/replaced`.
        """
        with self._transition(user.name, "submit", ", ".join(names)) as base:
            known = self.replayed(user, key, sha256)
            if known is not None:
                return known
            replaced = self._require_free(names)
            self.require_quota(user, len(names), priority)
            for job in replaced:
                self._remove(job, replaced=True)
            for name in names:
                if self._owner(name) is not None:
                    # A group may have written there after a job of this name was removed.
                    self._discard(self.folder.parent / name)
            number, last = self._next_numbers(len(names))
            base.execute(
                "INSERT INTO submissions (number, user, key, sha256, time, folder, document) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (number, user.name, key, sha256, self.now(), folder, document),
            )
            base.executemany(
                "INSERT INTO owned (rowid, name, user, submission, priority) "
                "VALUES (?, ?, ?, ?, ?)",
                [
                    (place, name, user.name, number, priority)
                    for place, name in enumerate(names, start=last + 1)
                ],
            )
        return Submission(number, tuple(names), document, folder)

    def unread_submissions(self) -> list[Submission]:
        """Submissions that the scheduler has not taken in whole."""
        rows = self.rows(
            "SELECT number, document, folder FROM submissions WHERE number IN "
            "(SELECT submission FROM owned WHERE final IS NULL) AND NOT EXISTS "
            "(SELECT 1 FROM files WHERE path = ? || printf('%06d.yaml', number))",
            self._prefix,
        )
        return [Submission(number, (), document, folder) for number, document, folder in rows]

    def described(self, number: int) -> dict[str, dict[str, Any]]:
        """Jobs of a submission as its document describes them, with defaults, by full name."""
        rows = self.rows("SELECT document FROM submissions WHERE number = ?", number)
        jobs = [job for (text,) in rows if text for job in json.loads(text)["jobs"]]
        return {job["name"]: with_defaults(job) for job in jobs}

    def submission_folders(self) -> set[str]:
        """Names of the folders of submissions."""
        return {name for (name,) in self.rows("SELECT folder FROM submissions")}

    def drop_folders(self, long_ago: float) -> list[str]:
        """Forget the folders of submissions whose jobs ended before a time of day; their names."""
        self.settle()
        with self._transition() as base:
            rows = self.rows(
                "SELECT number, folder FROM submissions WHERE folder != '' AND NOT EXISTS "
                "(SELECT 1 FROM owned WHERE submission = number AND "
                "(final IS NULL OR max(over, submissions.time) > ?))",
                long_ago,
            )
            base.executemany(
                "UPDATE submissions SET folder = '' WHERE number = ?",
                [(number,) for number, _ in rows],
            )
        return [folder for _, folder in rows]

    def file_of(self, number: int) -> Path:
        """File where the scheduler finds a submission."""
        return self.inbox / f"{number:06d}.yaml"

    def wants(self, path: Path, name: str) -> bool:
        """Whether a job that the scheduler finds in a file was neither removed nor cancelled."""
        number = path.stem.lstrip("0")
        query = "SELECT 1 FROM owned WHERE name = ? AND submission = ? AND wanted != 'cancel'"
        return bool(self.rows(query, name, number))

    def names_of_file(self, path: Path) -> list[str]:
        """Jobs of a submission that the scheduler finds in a file, besides removed ones."""
        number = path.stem.lstrip("0")
        rows = self.rows("SELECT name FROM owned WHERE submission = ? ORDER BY rowid", number)
        return [name for (name,) in rows]

    def user_of_file(self, path: Path) -> str:
        """User of a submission that the scheduler finds in a file; "" where nobody has a token."""
        rows = self.rows("SELECT user FROM submissions WHERE number = ?", path.stem.lstrip("0"))
        return next((user for (user,) in rows if user != LOCAL), "")

    def user_of_job(self, name: str) -> str:
        """User of a job; "" where nobody has a token."""
        rows = self.rows("SELECT user FROM owned WHERE name = ?", name)
        return next((user for (user,) in rows if user != LOCAL), "")

    # Jobs.

    def jobs(self, name: str | None = None) -> list[OwnedJob]:
        """All jobs, or one, in order of submission."""
        return self._jobs("owned.name = ?", name) if name else self._jobs("true")

    def open_jobs(self) -> list[OwnedJob]:
        """Jobs that were not settled: all that may still train, and those that have just ended."""
        return self._jobs("owned.final IS NULL")

    def standing(self) -> tuple[list[OwnedJob], dict[tuple[str, str], int]]:
        """`open_jobs`, and how many others there are, by user and state, at one moment."""
        with self._snapshot():
            rows = self.rows("SELECT user, state, jobs FROM totals")
            return self.open_jobs(), {(user, state): jobs for user, state, jobs in rows}

    def page(self, user: User, page: Page) -> list[OwnedJob]:
        """Jobs of a user, of all users for an administrator; see `Page`.

        Jobs that come meanwhile have higher numbers: pages one after the other have each job that
        is there all the time once.
        """
        newest_first = page.before is not None
        where, values = "true", list[object]()
        if not user.admin:
            where, values = "owned.user = ?", [user.name]
        if newest_first:
            where, values = f"{where} AND owned.rowid < ?", [*values, page.before]
        elif page.after is not None:
            where, values = f"{where} AND owned.rowid > ?", [*values, page.after]
        with self._snapshot():
            jobs = self._jobs(f"owned.final IS NULL AND {where}", *values)
            jobs = [job for job in jobs if page.has(job)]
            if page.ended is not False:
                settled = "owned.final IS NOT NULL" if page.state is None else "owned.final = ?"
                state = [] if page.state is None else [page.state]
                order = "DESC" if newest_first else "ASC"
                jobs += self._jobs(
                    f"{settled} AND {where}", *state, *values, order=order, limit=page.limit
                )
        return sorted(jobs, key=lambda job: job.number, reverse=newest_first)[: page.limit]

    def settle(self) -> list[OwnedJob]:
        """Write down the last state of jobs that have ended, and of groups; the other jobs."""
        jobs = self.open_jobs()
        ended = [job for job in jobs if not job.active]
        [(uncounted,)] = self.rows(
            "SELECT EXISTS (SELECT 1 FROM epochs WHERE counted = 0 AND ended IS NOT NULL)"
        )
        if ended or uncounted:
            with self._transition():
                for job in ended:
                    self._settle(job)
                self._count_groups()
        return [job for job in jobs if job.active]

    def _settle(self, job: OwnedJob) -> None:
        over = self.now() if job.ended is None else self.started + job.ended
        changed = self.rows(
            "UPDATE owned SET final = ?, over = ? WHERE name = ? AND final IS NULL RETURNING 1",
            job.state,
            over,
            job.name,
        )
        if changed:
            self._add_total(job.user, job.state, 1)

    def _jobs(
        self, where: str, *values: object, order: str = "ASC", limit: int = -1
    ) -> list[OwnedJob]:
        query = f"{_JOBS}WHERE {where} ORDER BY owned.rowid {order} LIMIT ?"
        return [OwnedJob(*row) for row in self.rows(query, self._prefix, *values, limit)]

    @property
    def _prefix(self) -> str:
        return f"{self.inbox.absolute()}/"

    def owners(self, names: Iterable[str]) -> dict[str, str]:
        """Users of those of some jobs that are there, by job."""
        query = "SELECT name, user FROM owned WHERE name IN (SELECT value FROM json_each(?))"
        return dict(self.rows(query, json.dumps(list(names))))

    def summaries(self, names: Iterable[str]) -> dict[str, str]:
        """Summaries of the metrics of ended jobs, by job."""
        query = "SELECT name, metrics FROM summaries WHERE name IN (SELECT value FROM json_each(?))"
        return dict(self.rows(query, json.dumps(list(names))))

    def keep_summaries(self, metrics: Mapping[int, str]) -> None:
        """Keep what is shown of the metrics of ended jobs, by number of the job.

        Their files are not read again. Nothing is kept of a job that was removed.
        """
        with self._transition() as base:
            base.executemany(
                "INSERT OR REPLACE INTO summaries SELECT name, ? FROM owned WHERE rowid = ?",
                [(text, number) for number, text in metrics.items()],
            )

    def job(self, user: User, name: str) -> OwnedJob:
        """A job of a user's own, by its full name or without the user's; raises JobUnknown."""
        for full in dict.fromkeys((name, full_name(user.name, name))):
            for job in self.jobs(full):
                if job.name == full and (user.admin or job.user == user.name):
                    return job
        raise JobUnknown(f"there is no job '{name}'", help="`tlora-fx client ls` lists yours")

    def want(self, user: User, name: str, wanted: Wanted) -> OwnedJob:
        """Say what shall become of a job of a user's own; the job as it is then.

        raises   JobUnknown; RequestConflict where it has ended, or that was said before
        """
        job = self.job(user, name)
        verb = "resume" if wanted == "run" else wanted
        with self._transition(user.name, verb, job.name) as base:
            [now] = self.jobs(job.name)
            if not now.active or now.wanted == "cancel":
                raise RequestConflict(
                    f"a job that is {now.state} cannot be asked to {verb}",
                    job=now.name,
                    help=f"`tlora-fx client status {now.name}` says how it stands",
                )
            if now.wanted == wanted:
                raise RequestConflict(f"the job is {now.state}: no {verb} is needed", job=now.name)
            base.execute("UPDATE owned SET wanted = ? WHERE name = ?", (wanted, job.name))
        [changed] = self.jobs(job.name)
        return changed

    def remove(self, user: User, name: str) -> OwnedJob:
        """Remove a job of a user's own that has ended; its folder goes into the trash.

        A row of `removed` stays, and so do the GPU-hours that it used. Its name may be used again
        once no process knows the job, and the key of its submission once all jobs of that are
        removed.

        raises   JobUnknown; RequestConflict where it has not ended
        """
        job = self.job(user, name)
        with self._transition(user.name, "rm", job.name):
            [job] = self.jobs(job.name)
            if job.active:
                raise RequestConflict(
                    f"a job that is {job.state} cannot be removed",
                    job=job.name,
                    help=f"cancel it first: `tlora-fx client cancel {job.name}`",
                )
            if job.told is None:
                raise RequestConflict(
                    "other jobs of its submission are still being prepared",
                    job=job.name,
                    help="remove it once they are",
                )
            self._remove(job)
        return job

    def old_jobs(self, long_ago: float, most: int) -> list[OwnedJob]:
        """Jobs that ended before a time of day, at most so many, the oldest first to go."""
        self.settle()
        return self._jobs(
            "owned.rowid IN (SELECT rowid FROM owned WHERE final IS NOT NULL AND over < ? "
            "ORDER BY over LIMIT ?) AND files.told IS NOT NULL",
            long_ago,
            most,
        )

    def remove_old(self, jobs: Iterable[OwnedJob]) -> None:
        """Remove jobs of `old_jobs`; those that were removed meanwhile are left out."""
        with self._transition() as base:
            for old in jobs:
                for job in self._jobs("owned.rowid = ?", old.number):
                    self._remove(job)
                    act(base, operator(), "rm", job.name)

    def _remove(self, job: OwnedJob, *, replaced: bool = False) -> None:
        """Remove a job that has ended, in a transaction.

        replaced   another job has its name from now on: what it has trained is kept in
                   `service/replaced`, and the key of its submission stays used; otherwise all that
                   it has left goes into the trash
        """
        self._settle(job)
        [(state, over)] = self.rows("SELECT final, over FROM owned WHERE name = ?", job.name)
        self.rows(
            "INSERT INTO removed (job, submission, name, user, state, reason, steps, submitted, "
            "ended, time, replaced) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            job.number, job.submission, job.name, job.user, state, job.reason or "",
            job.steps or 0.0, job.submitted, over, self.now(), replaced,
        )  # fmt: skip
        self._add_total(job.user, state, -1)
        for table in ("owned", "jobs", "origins", "summaries"):
            self.rows(f"DELETE FROM {table} WHERE name = ?", job.name)  # noqa: S608  (ours)
        for table in ("members", "decided", "failures"):
            self.rows(f"DELETE FROM {table} WHERE job = ?", job.name)  # noqa: S608  (ours)
        there = self.folder.parent / job.name
        aside = self.folder.parent / replaced_folder(job.number, job.name)
        if replaced and job.first_started is not None and there.is_dir() and not aside.exists():
            there.rename(aside)
        self._discard(there)
        if not replaced:
            self._remove_submission(job.submission)

    def _discard(self, folder: Path) -> None:
        """Move a folder into the trash, if it is there and not one of the run's own."""
        if folder.is_dir() and folder.name not in RESERVED:
            folder.rename(self.folder / "trash" / secrets.token_hex(8))

    def _remove_submission(self, number: int) -> None:
        """Remove a submission, if all its jobs are removed and none of them counts as replaced."""
        left = self.rows(
            "SELECT 1 FROM owned WHERE submission = ? UNION ALL "
            "SELECT 1 FROM removed WHERE submission = ? AND replaced = 1",
            number,
            number,
        )
        if left:
            return
        for (folder,) in self.rows(
            "DELETE FROM submissions WHERE number = ? RETURNING folder", number
        ):
            if folder:
                self._discard(self.folder / "submitted" / folder)
        self.rows("DELETE FROM files WHERE path = ?", str(self.file_of(number).absolute()))

    def old_replaced(self, long_ago: float, most: int) -> list[ReplacedJob]:
        """Replaced jobs that ended before a time of day, and are still kept; at most so many."""
        rows = self.rows(
            "SELECT job, name, user, submission, state, reason, steps, submitted, ended "
            "FROM removed WHERE replaced = 1 AND ended < ? ORDER BY ended LIMIT ?",
            long_ago,
            most,
        )
        return [ReplacedJob(*row) for row in rows]

    def drop_replaced(self, jobs: Iterable[ReplacedJob]) -> None:
        """Keep no longer what replaced jobs have left."""
        with self._transition():
            for job in jobs:
                self.rows("UPDATE removed SET replaced = 0 WHERE job = ?", job.number)
                self._discard(self.folder.parent / job.folder)
                self._remove_submission(job.submission)

    def forget_past(self, long_ago: float) -> list[int]:
        """Forget groups, decisions and events from before a time of day; epochs of the groups.

        The newest of each stays, since the next one is numbered by it. So do groups whose processes
        still run in another group: the names of their jobs are taken.
        """
        self.settle()
        seconds = long_ago - self.started
        with self._transition():
            epochs = self.rows(
                f"{_AT_WORK} DELETE FROM epochs WHERE counted = 1 AND ended < ? "  # noqa: S608  (ours)
                "AND epoch < (SELECT max(epoch) FROM epochs) "
                "AND epoch NOT IN (SELECT epoch FROM at_work) RETURNING epoch",
                seconds,
            )
            self.rows(
                "DELETE FROM decisions WHERE time < ? "
                "AND number < (SELECT max(number) FROM decisions)",
                seconds,
            )
            self.rows(
                "DELETE FROM events WHERE time < ? AND number < (SELECT max(number) FROM events)",
                long_ago,
            )
        return [epoch for (epoch,) in epochs]

    def names_of_others(self, user: User, text: str) -> list[str]:
        """Names of other users' jobs that a text has, removed jobs included."""
        words = set(_NAME.findall(text))
        # A name may stand at the end of a sentence.
        words |= {word.rstrip(".,:;") for word in words}
        owners = {word: self._owner(word) for word in words}
        return [word for word, owner in owners.items() if owner not in (None, user.name)]

    def gpu_hours(self, user: str) -> float:
        """GPU-hours of a user's jobs up to the scheduler's last heartbeat.

        A group's GPU-hours are divided evenly among its jobs. Time in which no scheduler was alive
        does not count.
        """
        used = self.rows("SELECT gpu_seconds FROM used WHERE user = ?", user)
        seconds = sum(float(each) for (each,) in used)
        return (seconds + sum(g.get(user, 0.0) for *_, g in self._uncounted_groups())) / 3600

    def _require_free(self, names: Sequence[str]) -> list[OwnedJob]:
        """Refuse names that other jobs have; the jobs that are to give theirs back.

        Those were refused or cancelled, and no process knows them any more. In the same way, the
        name of a removed job is free once no process knows that job.

        raises   RequestConflict
        """
        at_work, replaced = self._names_at_work(), []
        for name in names:
            before = next(iter(self.jobs(name)), None)
            known = self.rows("SELECT 1 FROM jobs WHERE name = ? COLLATE NOCASE", name)
            ended = before is not None and before.state in ("refused", "cancelled")
            if not ended and (before is not None or known):
                raise RequestConflict(
                    f"there is a job '{name if before is None else before.name}' already",
                    found=None if before is None else before.state,
                    help="give each job a name of its own; the name of a job that was refused, "
                    "cancelled or removed is free",
                )
            if name.lower() in at_work:
                was = "was removed" if before is None else f"is {before.state}"
                raise RequestConflict(
                    f"job '{name}' {was}, but its group still runs",
                    group=at_work[name.lower()],
                    help="submit again when that group has ended, or choose another name",
                )
            if before is not None:
                replaced.append(before)
        return replaced

    def require_quota(
        self, user: User, jobs: int, priority: int, names: Sequence[str] = ()
    ) -> None:
        """Refuse so many jobs more, or a priority, beyond a user's limits.

        names    full names of those jobs, as far as they are known
        raises   QuotaReached; RequestConflict where the jobs are there already, which says more
        """
        try:
            self._require_quota(user, jobs, priority)
        except QuotaReached:
            self._require_free(names)
            raise

    def _require_quota(self, user: User, jobs: int, priority: int) -> None:
        if priority > user.priority:
            raise QuotaReached(
                "the priority is above the user's limit",
                expected=f"at most {user.priority}",
                found=priority,
                help="submit with a lower --priority; an administrator raises the limit with "
                "`tlora-fx tokens add NAME --priority P`",
            )
        if user.jobs is not None:
            mine = self._jobs("owned.final IS NULL AND owned.user = ?", user.name)
            active = sum(job.active for job in mine)
            if active + jobs > user.jobs:
                raise QuotaReached(
                    "too many jobs at a time",
                    expected=f"at most {user.jobs} that have not ended",
                    found=f"{active} and {jobs} more",
                )
        if user.gpu_hours is not None:
            user.require_hours(self.gpu_hours(user.name))

    def _uncounted_groups(self) -> list[tuple[int, bool, dict[str, float]]]:
        """Groups that `used` does not have: epoch, whether it has ended, GPU-seconds by user."""
        rows = self.rows(
            "SELECT epoch, jobs, gpus, held, ended IS NOT NULL FROM epochs WHERE counted = 0"
        )
        groups = []
        for epoch, jobs, gpus, held, ended in rows:
            names = json.loads(jobs)
            shares: dict[str, float] = {}
            for name in names:
                user = self._owner(name)
                if user is not None:
                    share = held * len(json.loads(gpus)) / len(names)
                    shares[user] = shares.get(user, 0.0) + share
            groups.append((epoch, bool(ended), shares))
        return groups

    def _count_groups(self) -> None:
        """Add the GPU-seconds of groups that have ended to their users'."""
        for epoch, ended, shares in self._uncounted_groups():
            for user, seconds in shares.items() if ended else ():
                self.rows(
                    "INSERT INTO used VALUES (?, ?) ON CONFLICT (user) DO UPDATE "
                    "SET gpu_seconds = gpu_seconds + excluded.gpu_seconds",
                    user,
                    seconds,
                )
            if ended:
                self.rows("UPDATE epochs SET counted = 1 WHERE epoch = ?", epoch)

    def _next_numbers(self, jobs: int) -> tuple[int, int]:
        """The number of a new submission, and the one before its first job's.

        Numbers of what was removed are not used again: a page or a file that names one stays right.
        """
        [(submission, last)] = self.rows(
            "UPDATE numbers SET "
            "submission = 1 + max(submission, (SELECT coalesce(max(number), 0) FROM submissions)), "
            "job = ? + max(job, (SELECT coalesce(max(rowid), 0) FROM owned)) "
            "RETURNING submission, job",
            jobs,
        )
        return int(submission), int(last) - jobs

    def _add_total(self, user: str, state: str, jobs: int) -> None:
        self.rows(
            "INSERT INTO totals VALUES (?, ?, ?) ON CONFLICT (user, state) DO UPDATE "
            "SET jobs = jobs + excluded.jobs",
            user,
            state,
            jobs,
        )

    def _owner(self, name: str) -> str | None:
        """User of a job, removed ones included."""
        removed = "SELECT user FROM removed WHERE name = ? ORDER BY number DESC LIMIT 1"
        rows = self.rows("SELECT user FROM owned WHERE name = ?", name) or self.rows(removed, name)
        return next((str(user) for (user,) in rows), None)

    def _names_at_work(self) -> dict[str, int]:
        """Jobs that processes know, in small letters, and the group that runs in those processes.

        They are the jobs of the groups that run, and of groups whose processes those took over.
        """
        query = f"{_AT_WORK} SELECT value, last FROM at_work, json_each(jobs)"  # noqa: S608  (ours)
        return {str(name).lower(): int(last) for name, last in self.rows(query)}


def full_name(user: str, job: str) -> str:
    """Name of a user's job in the run."""
    return job if user == LOCAL else f"{user}.{job}"


def replaced_folder(number: int, job: str) -> str:
    """Folder, below the run's, of what a replaced job has left."""
    return f"{FOLDER}/replaced/{number:06d}.{job}"
