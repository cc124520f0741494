"""What must not be forgotten of a run: jobs, commits, groups and decisions, in SQLite.

Each transition is one transaction, and the disk holds it before the call returns (WAL,
synchronous=FULL). Killed at any point and opened again, the ledger tells what was submitted, what
is done, and from which committed state each other job goes on.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import TypeAdapter, ValidationError

from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.demand import Demand
from tlora_fx.cost.estimator import Estimator, Layout, ProfileEstimator
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.synthetic import SyntheticEstimator
from tlora_fx.durable import replace_file
from tlora_fx.errors import LedgerError, StateFileError
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    ExecutorEvent,
    Failed,
    Finished,
    GroupStarted,
)
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import ActiveJob, Decision, Group, JobRequest, Policy, SchedulerState

# The rows of the ledger, as they are read back.


Status = Literal["queued", "running", "done", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job, as far as it is certain.

    request         as it was submitted
    spec            what came with it
    status          `running` where the process that wrote it may have died since
    reason          why it failed or was refused
    steps           that are committed
    epoch, path     the formation whose commit that was, and where its state lies
    credit          GPU-seconds given (positive) or taken
    first_started   seconds; None: not yet
    ended           seconds; None: not yet
    """

    COLUMNS: ClassVar[str] = (
        "request, spec, status, reason, steps, epoch, path, credit, first_started, ended"
    )

    request: JobRequest
    spec: Mapping[str, Any]
    status: Status
    reason: str
    steps: float
    epoch: int | None
    path: str
    credit: float
    first_started: float | None
    ended: float | None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.request.name

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """From a row with these columns."""
        request, spec, *others = row
        return cls(request_of_json(request), json.loads(spec), *others)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """A formation of a group.

    jobs       in their order
    place      its GPUs
    layout     how it was spread over them, as text
    seconds    predicted, of one step
    launched   seconds
    started    when its first step began; None: never, or not known
    ended      None: it runs, or nobody saw its end
    how        it ended: "drained", "killed", "failed: ..."
    """

    COLUMNS: ClassVar[str] = "epoch, jobs, gpus, layout, seconds, launched, started, ended, how"

    epoch: int
    jobs: tuple[str, ...]
    place: tuple[int, ...]
    layout: str
    seconds: float
    launched: float
    started: float | None
    ended: float | None
    how: str

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """From a row with these columns."""
        epoch, jobs, place, *others = row
        return cls(epoch, tuple(json.loads(jobs)), tuple(json.loads(place)), *others)


def decision_of_json(groups: str, waiting: str) -> Decision:
    """The decision that two texts are of, without its reasons."""
    made = [
        Group(**{**group, "jobs": tuple(group["jobs"]), "place": tuple(group["place"])})
        for group in json.loads(groups)
    ]
    return Decision(tuple(made), tuple(json.loads(waiting)))


def request_json(request: JobRequest) -> str:
    """A request as text."""
    return json.dumps({**asdict(request), "demand": request.demand._asdict()})


def request_of_json(text: str) -> JobRequest:
    """The request that a text is of."""
    fields = json.loads(text)
    return JobRequest(**{**fields, "demand": Demand(**fields["demand"])})


FORMAT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    place INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, request TEXT NOT NULL,
    spec TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    steps REAL NOT NULL DEFAULT 0, epoch INTEGER, path TEXT NOT NULL DEFAULT '',
    credit REAL NOT NULL DEFAULT 0, first_started REAL, ended REAL);
CREATE TABLE IF NOT EXISTS epochs (
    epoch INTEGER PRIMARY KEY, jobs TEXT NOT NULL, gpus TEXT NOT NULL, layout TEXT NOT NULL,
    seconds REAL NOT NULL, launched REAL NOT NULL, started REAL, ended REAL,
    how TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS decisions (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, groups TEXT NOT NULL, waiting TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, sha256 TEXT NOT NULL, told TEXT NOT NULL);
"""


class Ledger:
    """The ledger of one run; one process writes it.

    path     its file, or ":memory:"
    raises   LedgerError where it cannot be opened, or was written by another version
    """

    def __init__(self, path: Path | str = ":memory:") -> None:
        self.path = str(path)
        try:
            self._base = sqlite3.connect(self.path, isolation_level=None)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.executescript(_TABLES)
        except sqlite3.Error as error:
            raise LedgerError(
                "the run's ledger cannot be opened",
                file=self.path,
                reason=error,
                help="choose another folder with -o, or mend the disk",
            ) from error
        written_by = int(self.fact("format", str(FORMAT)))
        if written_by != FORMAT:
            raise LedgerError(
                "the run's ledger has another format",
                file=self.path,
                expected=FORMAT,
                found=written_by,
                help="go on with the version of tlora-fx that began the run",
            )

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def fact(self, name: str, otherwise: str) -> str:
        """A fact of the run; where it is not there yet, `otherwise` becomes it."""
        with self._transition() as base:
            base.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, otherwise))
            [value] = base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(value)

    def submit(self, request: JobRequest, spec: Mapping[str, Any] | None = None) -> None:
        """A job is queued; nothing happens where it is known already.

        spec   what else whoever runs it must know, JSON-able
        """
        self._enter(request, spec, "queued", "")

    def refuse(
        self, request: JobRequest, reason: str, spec: Mapping[str, Any] | None = None
    ) -> None:
        """A job will never run; nothing happens where it is known already, and done or failed."""
        self._enter(request, spec, "refused", reason)
        with self._transition() as base:
            base.execute(
                "UPDATE jobs SET status = 'refused', reason = ? WHERE name = ? "
                "AND status IN ('queued', 'running')",
                (reason, request.name),
            )

    def _enter(
        self, request: JobRequest, spec: Mapping[str, Any] | None, status: str, reason: str
    ) -> None:
        row = (request.name, request_json(request), json.dumps(spec or {}), status, reason)
        with self._transition() as base:
            base.execute(
                "INSERT OR IGNORE INTO jobs (name, request, spec, status, reason) "
                "VALUES (?, ?, ?, ?, ?)",
                row,
            )

    def decide(
        self, time: float, decision: Decision, credit: Mapping[str, float] | None = None
    ) -> None:
        """What was decided, and the credit of jobs from then on."""
        groups = json.dumps([asdict(group) for group in decision.groups])
        with self._transition() as base:
            base.execute(
                "INSERT INTO decisions (time, groups, waiting) VALUES (?, ?, ?)",
                (time, groups, json.dumps(decision.waiting)),
            )
            base.executemany(
                "UPDATE jobs SET credit = ? WHERE name = ?",
                [(amount, name) for name, amount in (credit or {}).items()],
            )

    def launch(self, group: Group, epoch: int, layout: Layout | None, time: float) -> None:
        """A group is launched: written down before it is, so that no epoch is used twice."""
        row = (epoch, json.dumps(group.jobs), json.dumps(group.place), str(layout or ""))
        with self._transition() as base:
            base.execute(
                "INSERT OR IGNORE INTO epochs (epoch, jobs, gpus, layout, seconds, launched) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*row, group.seconds, time),
            )
            base.executemany(
                "UPDATE jobs SET status = 'running', first_started = coalesce(first_started, ?) "
                "WHERE name = ? AND status IN ('queued', 'running')",
                [(time, name) for name in group.jobs],
            )

    def tell(self, event: ExecutorEvent) -> None:
        """Write down what an executor told; progress that is not committed leaves no trace."""
        with self._transition() as base:
            match event:
                case GroupStarted():
                    base.execute(
                        "UPDATE epochs SET started = ? WHERE epoch = ? AND started IS NULL",
                        (event.time, event.epoch),
                    )
                case Committed():
                    _commit(base, event.epoch, event.steps, event.path)
                case Finished():
                    _commit(base, event.epoch, {event.job: event.steps}, "")
                    _settle(base, event.job, "done", "", event.time)
                case Failed(job=None):
                    _commit(base, event.epoch, event.steps, "")
                    _end(base, event.epoch, f"failed: {event.reason}", event.time)
                case Failed(job=str()):
                    _settle(base, str(event.job), "failed", event.reason, event.time)
                case Drained():
                    _commit(base, event.epoch, event.steps, "")
                    _end(base, event.epoch, "drained", event.time)

    def end(self, epoch: int, how: str, time: float) -> None:
        """A group ended otherwise than by draining or failing, such as by being killed."""
        with self._transition() as base:
            _end(base, epoch, how, time)

    def give_up(self, job: str, reason: str, time: float) -> None:
        """A job will not be run again."""
        with self._transition() as base:
            _settle(base, job, "failed", reason, time)

    def jobs(self) -> list[JobRecord]:
        """All jobs, in the order in which they were submitted."""
        rows = self._base.execute(f"SELECT {JobRecord.COLUMNS} FROM jobs ORDER BY place")  # noqa: S608
        return [JobRecord.of(row) for row in rows]

    def epochs(self) -> list[EpochRecord]:
        """All formations of groups, in their order."""
        rows = self._base.execute(f"SELECT {EpochRecord.COLUMNS} FROM epochs ORDER BY epoch")  # noqa: S608
        return [EpochRecord.of(row) for row in rows]

    def next_epoch(self) -> int:
        """A number that no formation has had."""
        [last] = self._base.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()
        return int(last) + 1

    def decisions(self) -> list[tuple[float, Decision]]:
        """What was decided when; without reasons."""
        rows = self._base.execute("SELECT time, groups, waiting FROM decisions ORDER BY number")
        return [(time, decision_of_json(groups, waiting)) for time, groups, waiting in rows]

    def note_file(self, path: str, sha256: str, told: str) -> None:
        """Remember what was said of a job file."""
        with self._transition() as base:
            base.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (path, sha256, told))

    def files(self) -> dict[str, tuple[str, str]]:
        """By path, the SHA-256 of what was read of a job file and what was said of it."""
        rows = self._base.execute("SELECT path, sha256, told FROM files")
        return {path: (sha256, told) for path, sha256, told in rows}

    @contextmanager
    def _transition(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it happens, or nothing."""
        try:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(
                "the run's ledger cannot be written",
                file=self.path,
                reason=error,
                help="free space or mend the disk, then start the run again with the same -o",
            ) from error


def _commit(base: sqlite3.Connection, epoch: int, steps: Mapping[str, float], path: str) -> None:
    """Commits only go forward: what came late of an older epoch changes nothing."""
    for name, done in steps.items():
        base.execute(
            "UPDATE jobs SET steps = ?, epoch = ?, path = CASE WHEN ? = '' THEN path ELSE ? END "
            "WHERE name = ? AND steps <= ? AND coalesce(epoch, 0) <= ?",
            (done, epoch, path, path, name, done, epoch),
        )


def _settle(base: sqlite3.Connection, job: str, status: str, reason: str, time: float) -> None:
    base.execute(
        "UPDATE jobs SET status = ?, reason = ?, ended = ? WHERE name = ? "
        "AND status IN ('queued', 'running')",
        (status, reason, time, job),
    )


def _end(base: sqlite3.Connection, epoch: int, how: str, time: float) -> None:
    base.execute(
        "UPDATE epochs SET ended = ?, how = ? WHERE epoch = ? AND ended IS NULL",
        (time, how, epoch),
    )
    [jobs] = base.execute("SELECT jobs FROM epochs WHERE epoch = ?", (epoch,)).fetchone() or ("[]",)
    base.executemany(
        "UPDATE jobs SET status = 'queued' WHERE name = ? AND status = 'running'",
        [(name,) for name in json.loads(jobs)],
    )


# A run's past, read from its ledger: what became of each job, and what was decided about it.
#
# Reading disturbs nobody; the run may go on meanwhile.


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


# A moment of a cluster as text, for `tlora-fx schedule explain` and for reports of mistakes.
#
# The estimator is not in it, only its name: whoever reads the file says what that name stands for.


FORMAT_state_file = "tlora-fx state 1"


def state_to_json(state: SchedulerState, estimator: str) -> str:
    """A state as JSON.

    estimator   what finds the estimator again, such as the path of a profile
    """
    cluster = dataclasses.asdict(state.cluster) | {"lost": sorted(state.cluster.lost)}
    found = {
        "format": FORMAT_state_file,
        "estimator": estimator,
        "now": state.now,
        "horizon": state.horizon,
        "switch_seconds": state.switch_seconds,
        "cluster": cluster,
        "jobs": [_job_fields(job) for job in state.jobs.values()],
        "groups": [dataclasses.asdict(group) for group in state.groups],
    }
    return json.dumps(found, indent=2) + "\n"


def state_from_json(text: str, estimator_of: Callable[[str], Estimator]) -> SchedulerState:
    """A state from what `state_to_json` wrote.

    estimator_of   the estimator of a name
    raises         StateFileError
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StateFileError("this is no file of a state", found=error) from None
    if not isinstance(found, Mapping) or found.get("format") != FORMAT_state_file:
        kind = found.get("format") if isinstance(found, Mapping) else type(found).__name__
        raise StateFileError("this is no file of a state", expected=FORMAT_state_file, found=kind)
    try:
        jobs = [_job(fields) for fields in found["jobs"]]
        cluster = found["cluster"]
        return SchedulerState(
            float(found["now"]),
            Cluster(**(cluster | {"lost": frozenset(cluster["lost"])})),
            estimator_of(found["estimator"]),
            {job.name: job for job in jobs},
            tuple(_group(fields) for fields in found["groups"]),
            float(found["horizon"]),
            float(found["switch_seconds"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateFileError(
            "the file of a state is not whole",
            found=f"{type(error).__name__}: {error}",
            help="write it again with the same version of tlora-fx",
        ) from None


def request_to_fields(request: JobRequest) -> dict[str, Any]:
    """A request as what JSON can hold."""
    fields = {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}
    return fields | {"demand": request.demand._asdict()}


def request_from_fields(fields: Mapping[str, Any]) -> JobRequest:
    """A request from `request_to_fields`.

    raises   KeyError, TypeError
    """
    return JobRequest(**(dict(fields) | {"demand": Demand(**fields["demand"])}))


def _job_fields(job: ActiveJob) -> dict[str, Any]:
    return {
        "request": request_to_fields(job.request),
        "solo_seconds": job.solo_seconds,
        "steps_done": job.steps_done,
        "credit": job.credit,
    }


def _job(fields: Mapping[str, Any]) -> ActiveJob:
    request = request_from_fields(fields["request"])
    done, credit = float(fields["steps_done"]), float(fields["credit"])
    return ActiveJob(request, float(fields["solo_seconds"]), done, credit)


def _group(fields: Mapping[str, Any]) -> Group:
    return Group(
        **(dict(fields) | {"jobs": tuple(fields["jobs"]), "place": tuple(fields["place"])})
    )


# A moment of a run as a file: a state, the policy that decides, and what it expects of times.
#
# The profiles lie in it too, so that a decision can be asked about on another machine, and later.


FORMAT_moment_file = "tlora-fx moment 1"
NO_STATE = "this is no saved state of the scheduler"
HOW_TO_SAVE = "`tlora-fx schedule state RUN -o STATE.json` writes one; or name a run's folder"
#: Of a file that is none, so many names of fields are told.
FIELDS = 8
_FACTS = TypeAdapter(ModelFacts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state, and the policy that decides upon it."""

    state: SchedulerState
    policy: Policy


def save_moment(path: Path, moment: Snapshot) -> None:
    """Write a moment.

    raises   StateFileError for an estimator that has no file form
    """
    kind, estimator = _estimator_fields(moment.state.estimator)
    written = {
        "format": FORMAT_moment_file,
        "policy": {"name": moment.policy.name, "options": policy_options(moment.policy)},
        "estimator": estimator,
        "state": json.loads(state_to_json(moment.state, kind)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(written, indent=1).encode() + b"\n")


def add_history(path: Path, rows: Mapping[str, Any]) -> None:
    """Put the past of a run into a moment's file.

    rows     of `rows_of_run`
    raises   StateFileError
    """
    load_moment(path)
    written = json.loads(path.read_bytes()) | {"history": rows}
    replace_file(path, json.dumps(written, indent=1).encode() + b"\n")


def load_history(path: Path) -> History | None:
    """The past that was put into a moment's file; None: none was.

    raises   StateFileError
    """
    try:
        rows = json.loads(path.read_bytes()).get("history")
        return None if rows is None else History.of_rows(rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_state(path, error) from error


def load_moment(path: Path) -> Snapshot:
    """Read a moment back.

    raises   StateFileError; UnknownPolicy where another package's policy is missing
    """
    try:
        written = json.loads(path.read_bytes())
        _require_format(path, written)
        cluster = written["state"]["cluster"]
        cluster = Cluster(**(cluster | {"lost": frozenset(cluster["lost"])}))
        state = state_from_json(
            json.dumps(written["state"]),
            lambda kind: _estimator(kind, written["estimator"], cluster),
        )
        policy = find_policy(written["policy"]["name"], **written["policy"]["options"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise _no_state(path, error) from error
    return Snapshot(state, policy)


def _require_format(path: Path, written: object) -> None:
    """Refuse what is no state at all, and a state of another version.

    raises   StateFileError
    """
    fields = list(written) if isinstance(written, dict) else []
    if not isinstance(written, dict) or "format" not in written:
        raise StateFileError(
            NO_STATE,
            file=path,
            expected=f"a JSON object whose format is '{FORMAT_moment_file}'",
            found=f"an object with {', '.join(fields[:FIELDS])}" if fields else "nothing of it",
            help=HOW_TO_SAVE,
        )
    if written["format"] != FORMAT_moment_file:
        raise StateFileError(
            "the file has another format",
            file=path,
            expected=FORMAT_moment_file,
            found=written["format"],
            help="read it with the version of tlora-fx that wrote it",
        )


def _no_state(path: Path, error: Exception) -> StateFileError:
    if isinstance(error, FileNotFoundError):
        return StateFileError("there is no such file", file=path, help=HOW_TO_SAVE)
    lacks = f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else error
    return StateFileError(NO_STATE, file=path, reason=lacks, help=HOW_TO_SAVE)


def policy_options(policy: Policy) -> dict[str, Any]:
    """The options of a policy that a file can hold: numbers, words, flags."""
    if not is_dataclass(policy):
        return {}
    values = {one.name: getattr(policy, one.name) for one in fields(policy) if one.init}
    plain = bool | int | float | str
    return {name: value for name, value in values.items() if isinstance(value, plain)}


def _estimator_fields(estimator: Estimator) -> tuple[str, dict[str, Any]]:
    if isinstance(estimator, ProfileEstimator):
        return "profile", {
            "profiles": {name: p.model_dump(mode="json") for name, p in estimator.profiles.items()},
            "shapes": {
                name: _FACTS.dump_python(facts, mode="json")
                for name, facts in estimator.shapes.items()
            },
            "options": _options(estimator, {"profiles", "cluster", "shapes", "evaluations"}),
        }
    if isinstance(estimator, SyntheticEstimator):
        return "synthetic", {"options": _options(estimator, {"cluster", "evaluations"})}
    raise StateFileError(
        "this estimator cannot be written into a file",
        found=type(estimator).__name__,
        expected="ProfileEstimator or SyntheticEstimator",
    )


def _options(estimator: ProfileEstimator | SyntheticEstimator, but: set[str]) -> dict[str, Any]:
    names = {one.name for one in fields(estimator) if one.init} - but
    return {name: getattr(estimator, name) for name in sorted(names)}


def _estimator(kind: str, written: Mapping[str, Any], cluster: Cluster) -> Estimator:
    given = written["options"].items()
    options: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in given
    }
    if kind == "synthetic":
        return SyntheticEstimator(cluster=cluster, **options)
    return ProfileEstimator(
        {name: Profile.model_validate(one) for name, one in written["profiles"].items()},
        cluster,
        {name: _FACTS.validate_python(one) for name, one in written["shapes"].items()},
        **options,
    )
