"""`tlora-fx run` behind its command line: a folder of job files, the loop, and this machine.

Killed at any point and started again over the same folder, a run goes on: what was submitted is in
the ledger, what was trained is in checkpoints, and the groups are formed anew.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from tlora_fx.config.job_file import read_bounded
from tlora_fx.cost.estimator import Estimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.errors import (
    JobFolderError,
    LedgerError,
    RunRefused,
    StateFileError,
    StorageFailed,
    TloraError,
)
from tlora_fx.host.storage import missing_bytes
from tlora_fx.runtime.launching.early_checks import job_files, require_folder
from tlora_fx.runtime.run_folder import LEDGER, RunFolder
from tlora_fx.scheduler.formations import Callback, Formation, LayoutOf
from tlora_fx.scheduler.halving import RungComparison
from tlora_fx.scheduler.history import JobRecord
from tlora_fx.scheduler.local.admission import (
    ADMISSION,
    Admission,
    AdmissionLimits,
    Answer,
    FileRead,
    JobPrepared,
    JobRefused,
    JobRestored,
    ProcessDied,
)
from tlora_fx.scheduler.local.admission_worker import reason_of
from tlora_fx.scheduler.local.executor import LocalExecutor, LocalOptions, cpu_threads
from tlora_fx.scheduler.local.processes import WORKER, ForkServer
from tlora_fx.scheduler.local.recovery import HeldFolder, held, recover, run_seconds, sources
from tlora_fx.scheduler.loop import Loop, LoopOptions
from tlora_fx.scheduler.snapshot_file import Snapshot, save_snapshot
from tlora_fx.scheduler.state import (
    ChangeCosts,
    Decision,
    JobRequest,
    Policy,
    SchedulerState,
)
from tlora_fx.scheduler.store import RESERVED, WAITS_FOR_FILES, Ledger

TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class SubmittedFile:
    """A file that is to be read.

    mistake   why it cannot be
    """

    path: Path
    sha256: str
    mistake: str = ""


@dataclass(slots=True)
class JobFolder:
    """The job files of a folder, or one file.

    A file counts as written when it is the same at two looks one after the other. One that changes
    later is read again: new jobs are taken, and what is known stays as it was. What was settled of
    a file is remembered in the ledger, so that a run that goes on does it no second time. A file is
    opened here and no more: its content is for a process that may be killed.

    known     what is known of a job of a name; None: nobody has submitted one
    retries   a file that could not be read is read again by the next process
    removes   a file is removed once all its jobs are in the ledger: a look costs no more, however
              many files have come
    """

    path: Path
    ledger: Ledger
    known: Callable[[str], Mapping[str, Any] | None]
    retries: bool = True
    removes: bool = False
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _read: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_folder(self.path)

    def look(self, busy: Collection[Path] = ()) -> list[SubmittedFile]:
        """Files that are new since the last look; files that others are still at have time."""
        stamps = {path: _stamp(path) for path in job_files(self.path)}
        now = {path: stamp for path, stamp in stamps.items() if stamp is not None}
        before, self._seen = self._seen, now
        files = []
        for path, stamp in list(now.items()):
            if before.get(path) == stamp != self._read.get(path) and path not in busy:
                self._read[path] = stamp
                files += self._take(path)
        return files

    @property
    def waiting(self) -> bool:
        """Whether a file was seen that is not read yet."""
        return any(self._read.get(path) != stamp for path, stamp in self._seen.items())

    def _take(self, path: Path) -> list[SubmittedFile]:
        content = ""
        try:
            content = hashlib.sha256(read_bounded(path)).hexdigest()
            read, told = self.ledger.file(key_of(path))
            if read == content and (told == TAKEN or not self.retries):
                self._remove(path)
                return []
            str(path).encode()
        except UnicodeEncodeError:
            return [SubmittedFile(path, content, "the name of the file is not UTF-8")]
        except (OSError, TloraError) as error:
            return [SubmittedFile(path, content, reason_of(error))]
        return [SubmittedFile(path, content)]

    def fresh(self, jobs: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """The jobs that nobody has submitted before."""
        return tuple(job for job in jobs if self.known(job["name"]) is None)

    def settle(self, file: SubmittedFile) -> None:
        """Remember a file, once all its jobs are in the ledger."""
        self.ledger.note_file(key_of(file.path), file.sha256, file.mistake or TAKEN)
        self._remove(file.path)

    def _remove(self, path: Path) -> None:
        if self.removes:
            with suppress(OSError):
                path.unlink(missing_ok=True)
                self._read.pop(path, None)
                self._seen.pop(path, None)

    def forget(self, path: Path) -> None:
        """A file is gone: one of its name that comes later is read anew."""
        self._read.pop(path, None)
        self.ledger.forget_file(key_of(path))

    def differing(self, path: Path, jobs: Sequence[Mapping[str, Any]]) -> str:
        """Message for jobs of a file that are known otherwise."""
        others = [job["name"] for job in jobs if self.known(job["name"]) not in (None, job)]
        if not others:
            return ""
        return str(
            JobFolderError(
                "a job of this name was submitted before, and is another",
                file=path,
                job=", ".join(others),
                help="give it another name: what was submitted stays as it was",
            )
        )


def key_of(path: Path) -> str:
    """A path as the ledger holds it; names that are no UTF-8 with their bytes spelled out."""
    return str(path.absolute()).encode("utf-8", "backslashreplace").decode()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@dataclass(frozen=True, slots=True)
class Submitters:
    """Who has submitted what; users take turns in having their jobs prepared.

    of_file   user whose job file a path is; "": nobody's
    of_job    user of a job that a run goes on with, by its name; "": nobody's
    wants     whether a job of a file is still wanted: a file may be read after one of its jobs was
              cancelled or removed
    """

    of_file: Callable[[Path], str] = lambda path: ""
    of_job: Callable[[str], str] = lambda name: ""
    wants: Callable[[Path, str], bool] = lambda path, name: True


LOOK_SECONDS = 1.0
#: Seconds between the writes by which running groups are charged for their GPUs; a scheduler that
#: is killed leaves at most so many uncharged.
HEARTBEAT_SECONDS = 10.0
#: Jobs that come together are decided upon together, if their files' others take no longer.
GATHER_SECONDS = 5.0
#: Pause before the files of a job that waits for them are looked at again; it doubles each time.
FILES_SECONDS, MAX_FILES_SECONDS = 2.0, 60.0
#: Groups whose forming and changes were measured that count, the newest.
MEASUREMENTS = 1000


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run.

    loop        its costs hold until groups were formed or have changed: then they are the medians
                of what that took
    linger      seconds that the folder stays without a new file before a run without work ends;
                None: never
    retries     a refused job is tried again when its file changes, or when the run is started again
    removes_files   a job file is removed once all its jobs are in the ledger; otherwise its user
                removes it, which cancels those of its jobs that have not begun
    grace_seconds   that groups have to stop when the run is told to; then they are killed
    executor    makes what runs groups, from the arguments of `LocalExecutor`
    layout_of   how a group is spread over its GPUs; None: over all of them, by rows
    submitters  the users of a service; a run has none
    """

    loop: LoopOptions = field(
        default_factory=lambda: LoopOptions(switch_seconds=10.0, changes=ChangeCosts())
    )
    linger: float | None = 60.0
    grace_seconds: float = 60.0
    learns: bool = True
    retries: bool = True
    removes_files: bool = False
    layout_of: LayoutOf | None = None
    submitters: Submitters = Submitters()
    worker: str = WORKER
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    admission_worker: str = ADMISSION
    executor: Callable[..., LocalExecutor] = LocalExecutor
    local: LocalOptions = field(default_factory=LocalOptions)


def _newest() -> deque[float]:
    return deque(maxlen=MEASUREMENTS)


@dataclass
class MeasuredCosts:
    """Measured seconds of forming and changing groups, the newest of each."""

    formed: deque[float] = field(default_factory=_newest)
    joined: deque[float] = field(default_factory=_newest)
    left: deque[float] = field(default_factory=_newest)
    moved: deque[float] = field(default_factory=_newest)
    _known: set[int] = field(default_factory=set)

    def take(self, formations: Iterable[Formation]) -> bool:
        """Note groups that have begun since; whether any has."""
        begun = [formation for formation in formations if formation.started is not None]
        new = [formation for formation in begun if formation.epoch not in self._known]
        for formation in new:
            self._note(formation)
        self._known = {formation.epoch for formation in begun}
        return bool(new)

    def _note(self, formation: Formation) -> None:
        assert formation.started is not None
        if formation.origin is None:
            self.formed.append(formation.started - formation.time)
        elif formation.paused is not None:
            (self.joined if formation.came else self.left).append(formation.paused)
            if any(formation.committed[name] for name in formation.came):
                self.moved.append(formation.started - formation.asked)

    def tell(self, loop: Loop) -> None:
        """Give policies the medians."""
        if self.formed:
            loop.switch_seconds = median(self.formed)
        if loop.changes is not None:
            before = loop.changes
            join, leave, move = (
                median(seen) if seen else usual
                for seen, usual in (
                    (self.joined, before.join), (self.left, before.leave), (self.moved, before.move)
                )
            )  # fmt: skip
            loop.changes = replace(before, join=join, leave=leave, move=move)


class LearningEstimator(Protocol):
    """Estimator of jobs that learns."""

    def learn(self, job: str, base: str, shape: ModelFacts | None) -> None:
        """Know what is needed of a job's base; raises TloraError where nobody can."""


@contextmanager
def opened(
    jobs: Path,
    output: Path,
    cluster: Cluster,
    policy: Policy,
    estimator: Estimator,
    estimates: LearningEstimator,
    callback: Callback,
    options: RunOptions,
) -> Iterator[SchedulerService]:
    """Begin a run, or go on with it; at the end every group is drained.

    raises    RunFolderError, WorkerLost, LedgerError, JobFolderError
    """
    require_folder(jobs)
    with held(output) as folder:
        ledger = Ledger(output / LEDGER)
        now = run_seconds(ledger)
        recover(ledger, output, now)
        if options.retries:
            ledger.retry()
        specs = {record.name: record.spec for record in ledger.active_jobs()}
        threads = cpu_threads(cluster.gpus) if options.local.device == "cpu" else {}
        server = ForkServer(
            output / "workers.log", module=options.worker, held=folder.workers, environment=threads
        )
        executor = options.executor(
            output, cluster, specs, server, options=options.local, sources=sources(ledger),
            started=time.time() - now, commits=ledger.record,
        )  # fmt: skip
        admission = Admission(output, server, options.admission, options.admission_worker)
        try:
            loop = Loop(
                Recorded(policy, output / "state.json"),
                estimator,
                executor,
                ledger,
                options=options.loop,
                callback=callback,
                layout_of=options.layout_of,
            )
            running = SchedulerService(
                jobs, loop, executor, ledger, admission, estimates, callback, options, specs,
                folder,
            )  # fmt: skip
            running.go_on()
            yield running
        finally:
            admission.close()
            executor.close()
            ledger.close()


@dataclass(slots=True)
class OpenFile:
    """A file of which not all jobs are in the ledger yet.

    left   jobs of the file that are not yet submitted; None: it is not read yet
    """

    file: SubmittedFile
    left: set[str] | None = None


@dataclass(slots=True)
class AbsentFiles:
    """Files of a job that cannot be read.

    steps   of the job when that was noticed
    pause   seconds until they are looked at again
    due     monotonic second when that is; None: they are being looked at, or can be read again
    """

    steps: float
    pause: float
    due: float | None


@dataclass(slots=True)
class SchedulerService:
    """A run that is open; `turn` it until it is over.

    jobs             folder of job files, or one file
    specs            by name, what the runner of an active job must know
    before_advance   called in each turn once all news are heard, before anything is decided
    """

    jobs: Path
    loop: Loop
    executor: LocalExecutor
    ledger: Ledger
    admission: Admission
    estimates: LearningEstimator
    callback: Callback
    options: RunOptions
    specs: dict[str, Mapping[str, Any]]
    folder: HeldFolder
    stopping: bool = False
    before_advance: Callable[[], None] = lambda: None
    files: JobFolder = field(init=False)
    _rungs: RungComparison = field(init=False)
    _looked: float = float("-inf")
    _heartbeat: float = field(default_factory=time.monotonic)
    _busy: float = 0.0
    _lingers: bool = False
    _measured: MeasuredCosts = field(default_factory=MeasuredCosts)
    _open: dict[Path, OpenFile] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _missing: set[str] = field(default_factory=set)
    # Jobs of an earlier process: those of which it is not known yet whether they can go on, and
    # those that can and are not submitted yet, by their places in the ledger.
    _left: dict[str, tuple[int, JobRecord]] = field(default_factory=dict)
    _restored: dict[int, JobRecord] = field(default_factory=dict)
    # Of those, jobs that wait for their files; one that got them back stays while it may lose them
    # at once again.
    _absent: dict[str, AbsentFiles] = field(default_factory=dict)
    _places: Iterator[int] = field(default_factory=count)
    _gathered: list[JobPrepared] = field(default_factory=list)
    _gathering: float = 0.0
    _holds: bool = False

    def __post_init__(self) -> None:
        options = self.options
        self.files = JobFolder(
            self.jobs, self.ledger, self._known, options.retries, options.removes_files
        )
        self._rungs = RungComparison(
            self.ledger, self.loop, self.executor, RunFolder(self.folder.path), self.specs,
            options.submitters.of_job,
        )  # fmt: skip

    def go_on(self) -> None:
        """Take up what an earlier process left, each job once it is known that it can go on."""
        self._busy = self.executor.now()
        self.ledger.take_up()
        left, count = self.ledger.active_jobs(), self.ledger.job_count()
        if count:
            self.callback.resumed(count, count - len(left))
            self._restate_active("queued")
        self._left = {record.name: (next(self._places), record) for record in left}
        for record in left:
            if record.reason.startswith(WAITS_FOR_FILES):
                self._absent[record.name] = AbsentFiles(record.steps, FILES_SECONDS, None)
                reason = record.reason.removeprefix(WAITS_FOR_FILES)
                self.callback.missed_files(self._busy, record.request, reason)
        if not self.options.removes_files:
            self._origins = self.ledger.origins()
        for record in self.ledger.refused_jobs() if self.options.retries else ():
            if record.name in self._origins:
                # What was missing then may be there now.
                self.ledger.forget_file(self._origins[record.name])
        self._check_left(left)

    def _check_left(self, records: Sequence[JobRecord]) -> None:
        """Have it seen whether jobs of `_left` can go on."""
        accept = self.options.local.accept_changes
        sources = {r.name: r.path for r in records if r.path and not accept}
        by_user: dict[str, list[Mapping[str, Any]]] = {}
        for record in records:
            user = self.options.submitters.of_job(record.name)
            by_user.setdefault(user, []).append(record.spec)
        for user, specs in by_user.items():
            self.admission.restore(specs, sources, user)

    def turn(self) -> bool:
        """Look for jobs, hear of groups, decide what is due; False when the run is over.

        A run that is not asked to stop does nothing while its disk is nearly full.

        raises   RunFolderError where the output folder is gone; LedgerError; StorageFailed
        """
        try:
            goes_on = self._waits_for_room() or self._turn()
        except (LedgerError, OSError) as error:
            # Whatever could not be written: that the folder is gone says more.
            self.folder.require_there()
            if isinstance(error, LedgerError):
                raise
            raise StorageFailed(
                "a file of the run cannot be read or written",
                file=error.filename or "of the run's folder",
                reason=error.strerror or error,
                help="free space or mend the disk, then start the run again with the same -o",
            ) from error
        if self.stopping and not goes_on:
            self._restate_active("stopped")
        return goes_on

    def _turn(self) -> bool:
        now = self.executor.now()
        looks = time.monotonic() - self._looked >= LOOK_SECONDS
        if looks:
            self._looked = time.monotonic()
            self.folder.require_there()
        if looks and not self.stopping:
            for file in self.files.look(self._open):
                self._take(file)
                self._busy = now
            # A file that has another name now is read before anything is cancelled, and of a job
            # that is still checked nobody knows yet whether it goes on.
            waiting = self._open or self.files.waiting or self._left.keys() - self._absent.keys()
            if not (self.options.removes_files or waiting):
                self._look_for_removed(now)
        for answer in self.admission.answers():
            self._hear(answer)
        if not self.stopping:
            self._look_for_files()
            self._submit_gathered(now)
            self._rungs.look(self._coming, now)
        if self.stopping and not self.loop.stopping:
            self.admission.close()
            self.loop.drain_all(now)
            self.executor.hurry(self.options.grace_seconds)
        self.before_advance()
        self.loop.advance(self.executor.now())
        self._set_aside(now)
        self._beat()
        self._measure()
        return not self.loop.quiet if self.stopping else self._waits(now)

    def _waits(self, now: float) -> bool:
        """Whether there is work, or another file may still come."""
        gathered = self._gathered or self._restored or self._left.keys() & self._absent.keys()
        if not self.loop.idle or self.files.waiting or self.admission.busy or gathered:
            self._busy, self._lingers = now, False
        elif self.options.linger and not self._lingers:
            self._lingers = True
            end = f"the run ends in {self.options.linger:g} s unless a new job file comes"
            self.callback.noted(now, f"no job is left: {end} (--until-empty ends it at once)")
        return self.options.linger is None or now - self._busy <= self.options.linger

    def _coming(self) -> set[str] | None:
        """Jobs that have not ended and can go on; None while a file is not read."""
        if self.files.waiting or any(file.left is None for file in self._open.values()):
            return None
        active = {name for name, how in self.loop.ended.items() if not how}
        prepared = {answer.spec["name"] for answer in self._gathered}
        restored = {record.name for record in self._restored.values()}
        reading = {name for file in self._open.values() for name in file.left or ()}
        return active | prepared | restored | reading | self._left.keys()

    def _waits_for_room(self) -> bool:
        """Whether nothing may be done until somebody frees space; raises OSError."""
        missing = 0 if self.stopping else missing_bytes(self.folder.path)
        if bool(missing) is self._holds:
            return self._holds
        self._holds = bool(missing)
        text = "there is room on the disk again: the run goes on"
        if missing:
            text = (
                "the disk is nearly full: nothing is submitted, started or recorded until "
                f"{-(-missing >> 20)} MiB are freed; what trains waits once nothing more fits"
            )
        else:
            self.ledger.skip_time()
            self.executor.excuse()
            self.admission.excuse()
        with suppress(LedgerError, OSError):
            self.callback.noted(self.executor.now(), text)
        return self._holds

    def _beat(self) -> None:
        """Write a heartbeat into the ledger, if it is time to."""
        if time.monotonic() - self._heartbeat >= HEARTBEAT_SECONDS:
            self._heartbeat = time.monotonic()
            self.ledger.heartbeat()

    def _measure(self) -> None:
        if self.options.learns and self._measured.take(self.loop.running.values()):
            self._measured.tell(self.loop)

    def stop(self) -> None:
        """Have every group drained from the next turn on; a signal handler may call this."""
        self.stopping = True

    def _take(self, file: SubmittedFile) -> None:
        """Have a file read, or say why it cannot be."""
        if file.mistake:
            self.callback.read_file(file.path.name, [], file.mistake)
            self.files.settle(file)
            return
        self._open[file.path] = OpenFile(file)
        self.admission.read(file.path, self.options.submitters.of_file(file.path))

    def _hear(self, answer: Answer) -> None:
        now = self.executor.now()
        match answer:
            case FileRead():
                self._read(answer, now)
            case JobPrepared() if self._is_expected(answer.spec):
                self._gather(now)
                self._gathered.append(answer)
            case JobRestored():
                self._restore(answer, now)
            case JobRefused(again=True):
                self._park(answer.spec["name"], answer.reason, now)
            case JobRefused() if self._is_expected(answer.spec):
                self._refuse(answer.spec, answer.reason, now)
                self._submitted(answer.spec["name"])
            case ProcessDied():
                file = "" if answer.path is None else answer.path.name
                jobs = [] if answer.spec is None else [answer.spec["name"]]
                self.callback.retried(now, file, jobs, answer.reason, answer.seconds)

    def _is_expected(self, spec: Mapping[str, Any]) -> bool:
        """Whether a job that was prepared is still wanted; `withdraw` may have been faster."""
        return self.specs.get(spec["name"]) is spec

    def _read(self, answer: FileRead, now: float) -> None:
        """A file's jobs are prepared, all but those that are known or cannot be called so."""
        submitters = self.options.submitters
        wanted = (job for job in answer.jobs if submitters.wants(answer.path, job["name"]))
        answer = replace(answer, jobs=tuple(wanted))
        self._follow(answer)
        fresh = self.files.fresh(answer.jobs)
        mistake = answer.mistake or self.files.differing(answer.path, answer.jobs)
        self.callback.read_file(answer.path.name, [job["name"] for job in fresh], mistake)
        for job in fresh:
            # What a removed job of this name has left here is nothing of this one.
            self.forget(job["name"])
        self.specs.update({job["name"]: job for job in fresh})
        if not self.options.removes_files:
            self._origins.update({job["name"]: key_of(answer.path) for job in fresh})
        for job in fresh:
            if job["name"] in RESERVED:
                self._refuse(job, _reserved(job["name"]), now)
        jobs = [job for job in fresh if job["name"] not in RESERVED]
        for job in jobs:
            self._say(job["name"], "queued")
        known = self._open[answer.path]
        known.file = replace(known.file, mistake=mistake)
        known.left = {job["name"] for job in jobs}
        self.admission.prepare(jobs, now, submitters.of_file(answer.path))
        self._settle(answer.path)

    def _known(self, name: str) -> Mapping[str, Any] | None:
        """Spec of a job that is in the ledger, or on its way there; None: there is none."""
        unknown = ("cancelled", "refused") if self.options.retries else ("cancelled",)
        spec = self.ledger.spec(name, besides=unknown)
        if spec is None and any(name in (file.left or ()) for file in self._open.values()):
            return self.specs.get(name)
        return spec

    def forget(self, name: str) -> None:
        """Keep nothing of a job in memory, where it has ended: the ledger has what is to be known.

        A job of this name that comes later is another one.
        """
        if self.loop.ended.get(name) != "":
            self.loop.ended.pop(name, None)
            self.specs.pop(name, None)
            self._absent.pop(name, None)
            # One that was refused after it had begun may go on from its checkpoint.
            if self.ledger.spec(name, besides=("cancelled",)) is None:
                self.executor.forget(name)

    def _follow(self, answer: FileRead) -> None:
        """Jobs whose file was renamed come from here now."""
        for job in answer.jobs:
            name, path = job["name"], key_of(answer.path)
            before = self._origins.get(name)
            moved = before not in (None, path) and _is_removed(Path(str(before)))
            if moved and self._known(name) == job:
                self._origins[name] = path
                self.ledger.move(name, path)

    def _gather(self, now: float) -> None:
        """A job comes that waits for others."""
        if not self._gathered and not self._restored:
            self._gathering = now

    def _submit_gathered(self, now: float) -> None:
        """Submit what was prepared, once nothing more is about to come or it has waited enough."""
        most = min(GATHER_SECONDS, self.options.loop.horizon)
        if self.admission.busy and now - self._gathering < most:
            return
        restored, self._restored = self._restored, {}
        for _, record in sorted(restored.items()):
            self._resubmit(record)
        gathered, self._gathered = self._gathered, []
        for answer in gathered:
            self._prepared(answer, now)
            self._submitted(answer.spec["name"])

    def _prepared(self, answer: JobPrepared, now: float) -> None:
        """Submit a job, or say why it will never run."""
        request, name = answer.request, answer.spec["name"]
        try:
            self.estimates.learn(name, request.base, answer.shape)
            # First the ledger, with all that a worker needs: the loop knows the request alone.
            self.ledger.submit(request, answer.spec, self._origins.get(name, ""))
            if self.loop.submit(request) is not None:
                self._forget_refused(name)
        except LedgerError:
            raise
        except Exception as error:  # noqa: BLE001  (a job must not end the run of others)
            self._refuse(answer.spec, reason_of(error), now)

    def _refuse(self, spec: Mapping[str, Any], reason: str, now: float) -> None:
        request = JobRequest(spec["name"], "", Demand(), 0, 0, submitted=now)
        self.ledger.refuse(request, reason, spec, self._origins.get(request.name, ""))
        self._forget_refused(request.name)
        self._say(request.name, "refused", reason=reason)
        self.callback.refused(now, request, reason)

    def _forget_refused(self, name: str) -> None:
        """A job that was refused may come again, when its file changes."""
        if self.options.retries:
            self.specs.pop(name, None)

    def _say(self, job: str, status: str, **more: str) -> None:
        """Write how a job stands into its folder, until a group does; a full disk stops no run."""
        if job not in RESERVED:
            with suppress(OSError, TloraError):
                folder = RunFolder(self.folder.path)
                folder.write_status(job, {"status": status, "step": 0} | more)

    def _restate_active(self, status: str) -> None:
        """Say how jobs that have not ended stand, if no group trains."""
        for record in self.ledger.active_jobs():
            self._restate(record.name, status)

    def _restate(self, job: str, status: str) -> None:
        """Say anew how a job of which something was said stands; a full disk stops no run."""
        with suppress(OSError, TloraError):
            RunFolder(self.folder.path).restate(job, status)

    def _submitted(self, name: str) -> None:
        """What is to be known of a job is in the ledger."""
        for path, known in list(self._open.items()):
            if known.left is not None:
                known.left.discard(name)
                self._settle(path)

    def _settle(self, path: Path) -> None:
        if not self._open[path].left:
            self.files.settle(self._open.pop(path).file)

    def _restore(self, answer: JobRestored, now: float) -> None:
        """A job of an earlier process can go on; one that was cancelled meanwhile does not."""
        if (left := self._left.get(answer.spec["name"])) is None:
            return
        place, record = left
        try:
            self.estimates.learn(record.name, record.request.base, answer.shape)
        except Exception as error:  # noqa: BLE001  (its base may be back at the next start)
            self._park(record.name, reason_of(error), now)
            return
        del self._left[record.name]
        if record.name in self._absent:
            self.ledger.take_up(record.name)
            self.callback.found_files(now, record.request)
        self._gather(now)
        self._restored[place] = record

    def _set_aside(self, now: float) -> None:
        """Take jobs out of the loop whose files cannot be read, until that is possible again."""
        if not self.loop.absent or self.stopping:
            return
        reasons = dict(self.loop.absent)
        for record in self.ledger.active_jobs():
            reason = reasons.get(record.name)
            if reason is None or (job := self.loop.set_aside(record.name)) is None:
                continue
            before, pause = self._absent.get(record.name), FILES_SECONDS
            if before is not None and before.steps == record.steps:
                pause = min(2 * before.pause, MAX_FILES_SECONDS)
            self._absent[record.name] = AbsentFiles(record.steps, pause, time.monotonic() + pause)
            # The ledger has the credit of the last decision.
            self._left[record.name] = next(self._places), replace(record, credit=job.credit)
            self.ledger.set_credit({record.name: job.credit})
            self.ledger.leave(record.name, reason, WAITS_FOR_FILES)
            self._restate(record.name, "queued")
            self.callback.missed_files(now, record.request, reason)

    def _look_for_files(self) -> None:
        """Have the files of those jobs looked at that have waited long enough."""
        for name, absent in self._absent.items():
            if absent.due is not None and absent.due <= time.monotonic():
                absent.due = None
                if left := self._left.get(name):
                    self._check_left([left[1]])

    def _park(self, name: str, reason: str, now: float) -> None:
        if name in self._left and (absent := self._absent.get(name)):
            absent.pause = min(2 * absent.pause, MAX_FILES_SECONDS)
            absent.due = time.monotonic() + absent.pause
            self.ledger.leave(name, reason, WAITS_FOR_FILES)
            return
        if (left := self._left.pop(name, None)) is not None:
            self.ledger.leave(name, reason)
            self.callback.parked(now, left[1].request, reason)

    def _resubmit(self, record: JobRecord) -> None:
        """Submit a job that goes on."""
        request, steps, credit = record.request, record.steps, record.credit
        refused = self.loop.submit(request, steps_done=steps, credit=credit) is not None
        if refused and record.first_started is None:
            self._forget_refused(record.name)

    def cancel(self, name: str, reason: str, now: float, *, begun: bool = False) -> bool:
        """Take back a job that is in no group; whether it was.

        begun    also one that was in a group before
        raises   LedgerError
        """
        if not self.ledger.cancel(name, reason, now, begun=begun):
            return False
        self.loop.cancel(name)
        self._left.pop(name, None)
        self._absent.pop(name, None)
        self._restored = {p: left for p, left in self._restored.items() if left.name != name}
        self._restate(name, "cancelled")
        self.callback.cancelled(now, name)
        return True

    def withdraw(self, name: str, reason: str, now: float) -> None:
        """Take back a job of which the ledger knows nothing yet: it is not prepared any more.

        Where its file is not read yet, `Submitters.wants` has to leave it out then.

        raises   LedgerError
        """
        spec = self.specs.get(name, {})
        # First the ledger, as everywhere: a run that is killed here prepares the others alone.
        self.ledger.withdraw(JobRequest(name, "", Demand(), 0, 0, submitted=now), reason, spec, now)
        if spec:
            self.admission.withdraw(spec)
        self.specs.pop(name, None)
        self._gathered = [answer for answer in self._gathered if answer.spec["name"] != name]
        self._submitted(name)
        self._restate(name, "cancelled")
        self.callback.cancelled(now, name)

    def _look_for_removed(self, now: float) -> None:
        """Cancel the jobs of removed files that have not begun, and tell of the others, once."""
        missing = {path for path in set(self._origins.values()) if _is_removed(Path(path))}
        # An editor may remove a file for a moment.
        for path in missing & self._missing:
            names = [name for name, origin in self._origins.items() if origin == path]
            for name in names:
                if self.specs.get(name) is not None and self._withdraw(name, now):
                    self.specs.pop(name)
                del self._origins[name]
            self.files.forget(Path(path))
        self._missing = missing

    def _withdraw(self, name: str, now: float) -> bool:
        """Cancel a job that has not begun; one that has is told of."""
        if self.cancel(name, "its job file was removed before it began", now):
            return True
        # The loop does not know one that waits for its files.
        if self.loop.ended.get(name, "" if name in self._absent else None) == "":
            self.callback.kept(now, name)
        return False


def _is_removed(path: Path) -> bool:
    """Whether a file is gone, and its folder is not."""
    return not os.path.lexists(path) and path.parent.is_dir()


def _reserved(name: str) -> str:
    return str(
        RunRefused(
            f"a job cannot be called '{name}' here",
            job=name,
            help="rename the job: the run keeps its own files under that name",
        )
    )


class Recorded:
    """A policy whose every state is written into a file before it decides."""

    def __init__(self, policy: Policy, path: Path) -> None:
        self.policy, self.path, self.name = policy, path, policy.name

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        """Decide as the policy does."""
        # Estimators of other people need no file form.
        with suppress(StateFileError):
            save_snapshot(self.path, Snapshot(state, self.policy))
        return self.policy.decide(state, explain=explain)
