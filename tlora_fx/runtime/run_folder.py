"""A run's output folder: one process at a time, nothing of an earlier run overwritten."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tlora_fx.config.paths import is_there
from tlora_fx.errors import MetricsError, RunFolderError, errors_as, nearest
from tlora_fx.host.durable import replace_file, sync_folder
from tlora_fx.host.formats import read_object, require_known_stamp, stamp
from tlora_fx.host.paths import why_unwritable
from tlora_fx.host.phases import StartRecord
from tlora_fx.host.storage import append, until_there_is_room

# A job's metrics: one JSON line for each optimizer step, and one for each evaluation.

FIELDS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "seconds")


class MetricsLog:
    """Appends a job's steps to a file, each line whole and at once.

    path     made, with its folder, by the first `append`
    writes   False: nothing is kept
    """

    def __init__(self, path: Path | str, *, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self._file: IO[bytes] | None = None

    def append(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        tokens: int,
        seconds: float,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one line; numbers that are not finite are written as null, as JSON has none.

        step, tokens   optimizer steps and tokens of the job so far
        seconds        wall time of this step
        more           further fields, which stand behind these
        raises         MetricsError when the disk refuses
        """
        values = (step, loss, grad_norm, learning_rate, tokens, seconds)
        self._append({**dict(zip(FIELDS, values, strict=True)), **(more or {})})

    def append_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of an evaluation, as `append` does.

        step      optimizer steps of the job so far; the line of that step stands before
        """
        self._append({"step": step, **metrics})

    def append_samples(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Add the line of samples, as `append` does.

        texts   pairs of a prompt and what the job says to it
        """
        samples = [{"prompt": prompt, "completion": said} for prompt, said in texts]
        self._append({"step": step, "samples": samples})

    def _append(self, values: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        line = json.dumps(without_endless(values)).encode() + b"\n"
        with self._told():
            until_there_is_room(lambda: append(self._opened(), line))

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        return self._file

    def sync(self) -> None:
        """Wait until the disk holds every line; raises MetricsError when it refuses."""
        if self._file is None:
            return
        with self._told():
            os.fsync(self._file.fileno())
            sync_folder(self.path.parent)

    def truncate_after(self, step: int) -> None:
        """Keep the whole lines up to a step, drop later and torn ones: what a resumed run needs."""
        self.close()
        with self._told():
            if not self.writes or not self.path.exists():
                return
            content = self.path.read_bytes()
            kept = b"".join(
                line for line in content.splitlines(keepends=True) if _is_kept(line, step)
            )
            if kept != content:
                replace_file(self.path, kept)

    def last_loss(self) -> float:
        """The loss of the last whole line; NaN where there is none."""
        try:
            records = read_metrics(self.path)
        except OSError:
            return math.nan
        losses = [record["loss"] for record in records if "loss" in record]
        return losses[-1] if losses and isinstance(losses[-1], float) else math.nan

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise MetricsError where the disk refuses."""
        try:
            yield
        except OSError as error:
            raise MetricsError(
                "a metrics file could not be written or read",
                file=self.path,
                reason=error,
                help="free space or mend the permissions, then go on with --resume",
            ) from error


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, in order; a torn last line is left out."""
    return parsed_metrics(Path(path).read_bytes())


def parsed_metrics(content: bytes) -> list[dict[str, Any]]:
    """The whole lines of a metrics file's content."""
    lines = content.splitlines(keepends=True)
    return [record for record in map(_parsed, lines) if record is not None]


def without_endless(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for JSON, which has neither NaN nor infinity: null instead."""
    endless = {k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**values, **dict.fromkeys(endless)}


def _is_kept(line: bytes, step: int) -> bool:
    record = _parsed(line)
    return record is not None and record["step"] <= step


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None when the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record


#: The plan that `auto` has chosen, what it was chosen by, and the one that it proposes instead.
PLAN, PROFILE, PROPOSAL = "plan.json", "profile.json", "proposed-plan.json"
RESERVED = {"checkpoints", "run.json", "start.json", "compiled.json", PLAN, PROFILE, PROPOSAL}
METRICS = "metrics.jsonl"
#: What a job's data are, once they are read.
DATA = "data.json"
#: Of a folder that a run makes: logs and adapters tell what they were trained on.
PRIVATE = 0o700
LOCK = ".lock"
LOCK_TRIES, LOCK_SECONDS = 3, 0.05
STATUS = "status.json"
#: Where somebody asks that a job end before its last step.
STOP = "stop"
STARTING: dict[str, Any] = {"status": "starting", "step": 0}
#: Formats of status.json and run.json. Files without a format are of the first.
STATUS_FORMAT = RUN_FORMAT = 1
#: Beside an adapter: the job that it belongs to, its base included.
JOB = "job.json"
RECORD = "run.json"
#: What the newest start of a run took, phase by phase.
START = "start.json"
#: From which round on a run's layers are compiled.
COMPILED = "compiled.json"


class RunFolder:
    """Folder of a run: a folder for each job, and the checkpoints.

    path     of the run
    jobs     where the jobs' own folders are, if not in `path`
    writes   False in a process that leaves writing to another: it holds and writes nothing
    """

    def __init__(
        self, path: Path | str, jobs: Path | str | None = None, *, writes: bool = True
    ) -> None:
        self.path, self.writes = Path(path), writes
        self.jobs = self.path if jobs is None else Path(jobs)
        self._held: os.stat_result | None = None

    def job(self, name: str) -> Path:
        """A job's own folder; raises RunFolderError for a name that the run needs itself."""
        if name in RESERVED:
            raise RunFolderError(
                f"a job cannot be called '{name}' here",
                folder=self.path,
                help="rename the job: the run keeps files of its own under that name",
            )
        return self.jobs / name

    @contextmanager
    def held(self, resume: bool) -> Iterator[None]:
        """Hold the folder for one process.

        resume    go on with what is there; otherwise the folder must be new or empty
        raises    RunFolderError when another process holds it, or it is in use already
        """
        if not self.writes:
            yield
            return
        with _adopted(self.path) as lock:
            if not resume:
                require_new(self.path)
            self._held = os.fstat(lock.fileno())
            try:
                yield
            finally:
                self._held = None

    def require_there(self) -> None:
        """Refuse to go on where the held folder was removed, or another took its place.

        raises    RunFolderError
        """
        if self._held is not None:
            help = "what was trained since the last copy is lost; train again with another -o"
            require_same_lock(self.path, self._held, help)

    def begin(self, jobs: Sequence[str]) -> None:
        """Write down whose run this is, before there is a checkpoint."""
        if self.writes:
            content = json.dumps({**stamp(RUN_FORMAT), "jobs": list(jobs)}, indent=1) + "\n"
            replace_file(self.path / RECORD, content.encode())

    def write_compiled(self, record: Mapping[str, Any]) -> None:
        """Keep from which round on layers are compiled; the disk holds it on return.

        record    its `round` is how many rounds ran before
        raises    RunFolderError
        """
        if not self.writes:
            return
        with errors_as(
            RunFolderError, "the run's folder cannot hold from which round on layers are compiled",
            file=self.path / COMPILED,
            help="free space or mend the permissions, then go on with --resume",
        ):  # fmt: skip
            replace_file(self.path / COMPILED, (json.dumps(record) + "\n").encode())

    def compiled_round(self) -> int | None:
        """How many rounds ran before layers were compiled; None where that is not kept.

        raises    RunFolderError for a file that was damaged
        """
        try:
            content = (self.path / COMPILED).read_bytes()
        except OSError:
            return None
        try:
            return int(json.loads(content)["round"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                "the file that tells from which round on layers are compiled cannot be read",
                file=self.path / COMPILED,
                found=content[:80],
                help="remove it: layers are then compiled from another round on",
            ) from error

    def require_own(self, jobs: Sequence[str]) -> None:
        """Refuse to go on without a checkpoint in a folder that holds something else.

        raises    RunFolderError, NewerFormat
        """
        try:
            record = json.loads((self.path / RECORD).read_bytes())
            require_known_stamp("the run", self.path / RECORD, record, known=RUN_FORMAT)
            begun = record["jobs"]
        except (OSError, ValueError, KeyError, TypeError):
            begun = None
        used = _used(self.path)
        if not used or begun == list(jobs):
            return
        found = f"a run of {', '.join(map(str, begun))}" if begun else ", ".join(used[:5])
        raise RunFolderError(
            "the output folder holds no run of these jobs to go on with",
            folder=self.path,
            expected=f"a run of {', '.join(jobs)}",
            found=found,
            help="name the run's folder with -o, or leave --resume out and name a new folder",
        )

    def take_stops(self, jobs: Iterable[str]) -> list[str]:
        """Take the requests to stop some jobs; each is returned once."""
        asked = [name for name in jobs if self.writes and (self.job(name) / STOP).exists()]
        for name in asked:
            (self.job(name) / STOP).unlink(missing_ok=True)
        return asked

    def metrics(self, job: str) -> MetricsLog:
        """A job's metrics file."""
        return MetricsLog(self.job(job) / METRICS, writes=self.writes)

    def write_status(self, job: str, status: dict[str, Any]) -> None:
        """Say in the job's folder how it stands."""
        if not self.writes:
            return
        folder = self.job(job)
        folder.mkdir(parents=True, exist_ok=True)
        content = {**status, **stamp(STATUS_FORMAT)}
        replace_file(folder / STATUS, (json.dumps(content, indent=2) + "\n").encode())

    def restate(self, job: str, status: str, **more: str) -> None:
        """Say anew how a job stands, where something was said of it; the rest of that stays."""
        if (told := read_object(self.job(job) / STATUS)) is not None:
            self.write_status(job, {**told, "status": status, **more})

    def announce(self, jobs: Sequence[str]) -> None:
        """Say that jobs start, before anything is loaded; a folder that holds no more is new.

        raises    RunFolderError when the disk refuses
        """
        if not jobs:
            return
        try:
            self.path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            for job in jobs:
                (self.job(job) / STOP).unlink(missing_ok=True)  # of a start before
                self.write_status(job, STARTING)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def withdraw(self, jobs: Sequence[str]) -> None:
        """Take back what `announce` left of jobs that came to nothing, empty folders too."""
        for job in jobs:
            folder = self.job(job)
            with suppress(OSError, ValueError):
                told = json.loads((folder / STATUS).read_bytes())
                if told == {**STARTING, **stamp(STATUS_FORMAT)} and _is_announced(folder):
                    (folder / STATUS).unlink()
                    (folder / STOP).unlink(missing_ok=True)
            with suppress(OSError):  # a full disk may have kept the status out
                folder.rmdir()
        with suppress(OSError):
            self.path.rmdir()

    def write_start(self, start: StartRecord) -> None:
        """Write down what the start took; one of a run that goes on takes the place of the last.

        raises    OSError
        """
        if self.writes:
            content = json.dumps(start.as_json(), indent=1) + "\n"
            replace_file(self.path / START, content.encode())

    def write_decisions(self, decisions: Sequence[dict[str, Any]]) -> None:
        """Add lines to decisions.jsonl: what a controller of nano-batches chose."""
        if decisions and self.writes:
            with (self.path / "decisions.jsonl").open("a") as file:
                file.writelines(json.dumps(decision) + "\n" for decision in decisions)


def ask_to_stop(path: Path, job: str) -> None:
    """Ask that a job of a run end after the step that it is at, whoever trains it.

    raises    RunFolderError where there is no such job, or it has ended; NewerFormat
    """
    folders = {entry.parent.name: entry for entry in path.glob(f"*/{STATUS}")}
    if not folders:
        raise RunFolderError(
            "there is no run in this folder",
            folder=path,
            expected="the -o folder of `tlora-fx run` or `train`",
            found="no job" if path.is_dir() else "no folder of that name",
        )
    if job not in folders:
        raise RunFolderError(
            "the run has no such job",
            folder=path,
            expected=", ".join(sorted(folders)),
            found=job,
            nearest=nearest(job, folders),
            help="name the run's -o folder and one of its jobs",
        )
    try:
        told = json.loads(folders[job].read_bytes())
        require_known_stamp("the job's status", folders[job], told, known=STATUS_FORMAT)
        status = str(told["status"])
        if status not in ("done", "failed"):
            replace_file(path / job / STOP, b"")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            "a job cannot be asked to stop",
            folder=path / job,
            found=f"{type(error).__name__}: {error}",
            help="mend the permissions of the folder, or stop the whole run",
        ) from error
    if status in ("done", "failed"):
        raise RunFolderError(
            "the job has ended already",
            folder=path / job,
            found=status,
            help="its adapter is in that folder",
        )


#: What `tlora-fx run` keeps of its jobs.
LEDGER = "ledger.sqlite"
#: What it and `serve` may have left before they kept anything.
RUN_COMMAND_FILES = frozenset({".workers.lock", "service"})
#: What a service makes before its ledger; no job's folder holds such a folder.
SERVICE_INBOX = Path("service", "inbox")


def unwritable(path: Path, found: object) -> RunFolderError:
    """Error for an output folder that cannot be written."""
    return RunFolderError(
        "the output folder cannot be written",
        folder=path,
        found=found,
        help="choose another folder with -o",
    )


def busy(path: Path) -> RunFolderError:
    """Error for an output folder that another process holds."""
    return RunFolderError(
        "another process is running in the output folder",
        folder=path,
        help="wait for it, or choose another folder with -o",
    )


def require_free(path: Path) -> None:
    """Refuse a folder that another process holds now; the caller does not hold it afterwards.

    raises    RunFolderError
    """
    try:
        lock = (path / LOCK).open("rb")
    except OSError:
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise busy(path) from error
        except OSError:
            return  # what cannot be locked is refused where it is held


#: Locks that this process holds by `hold_early`, until a run takes them over.
_EARLY: list[IO[str]] = []


@contextmanager
def hold_early(path: Path, resume: bool) -> Iterator[None]:
    """Hold a folder from before its run is loaded; `RunFolder.held` in here goes on with it.

    A folder in which nothing came to be is removed again, if it was not there before.

    resume    as of `held`
    raises    RunFolderError, as `held`
    """
    fresh = not path.exists()
    with _locked(path) as lock:
        _EARLY.append(lock)
        try:
            if not resume:
                require_new(path)
            yield
        finally:
            if lock in _EARLY:
                _EARLY.remove(lock)
            with suppress(OSError):
                if fresh and [entry.name for entry in path.iterdir()] == [LOCK]:
                    (path / LOCK).unlink()
                    path.rmdir()


@contextmanager
def _adopted(path: Path) -> Iterator[IO[str]]:
    """The lock that `hold_early` has of a folder, for one run at a time; else as `_locked`."""
    early = next((lock for lock in _EARLY if _is_of(lock, path)), None)
    if early is None:
        with _locked(path) as lock:
            yield lock
        return
    _EARLY.remove(early)
    try:
        yield early
    finally:
        _EARLY.append(early)


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Inside, this process alone has the folder's lock; raises RunFolderError."""
    for tries in range(1, LOCK_TRIES + 1):
        try:
            path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            lock = (path / LOCK).open("a")
        except OSError as error:
            if isinstance(error, FileNotFoundError) and tries < LOCK_TRIES:
                continue  # whoever had it has removed the folder
            raise unwritable(path, error) from error
        with lock:
            _lock(lock, path)
            if _is_of(lock, path):
                yield lock
                return
    raise busy(path)


def _is_of(lock: IO[str], path: Path) -> bool:
    """Whether a lock is the one that lies in a folder."""
    with suppress(OSError):
        return os.path.samestat((path / LOCK).stat(), os.fstat(lock.fileno()))
    return False


def _lock(lock: IO[str], path: Path) -> None:
    """Take a folder's lock; `require_free` of another process has it for moments.

    raises    RunFolderError
    """
    for left in range(LOCK_TRIES - 1, -1, -1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not left:
                raise busy(path) from error
            time.sleep(LOCK_SECONDS)
        else:
            return


def is_free(path: Path) -> bool:
    """Whether no process holds a folder now."""
    try:
        require_free(path)
    except RunFolderError:
        return False
    return True


def require_same_lock(path: Path, held: os.stat_result, help: str) -> None:
    """Refuse a folder whose lock is gone, or is another than the one that is held.

    raises    RunFolderError
    """
    with suppress(OSError):
        if os.path.samestat((path / LOCK).stat(), held):
            return
    raise RunFolderError(
        "the output folder was removed or replaced while it was in use", folder=path, help=help
    )


def require_new(path: Path, *, among: Collection[str] = ()) -> None:
    """Refuse a folder that has something in it, or that cannot be written; none is made.

    among     names that may be there
    raises    RunFolderError
    """
    if why := why_unwritable(path):
        raise unwritable(path, why)
    used = [name for name in _used(path) if name not in among]
    if used:
        help = "choose another folder with -o"
        if LEDGER in used:
            command = "serve" if (path / SERVICE_INBOX).is_dir() else "run"
            help = f"`tlora-fx {command}` made it, and goes on with it; else {help}"
        elif RECORD in used:
            help = f"`tlora-fx train` made it, and goes on with it by --resume; else {help}"
        raise RunFolderError(
            "the output folder holds something already",
            folder=path,
            found=", ".join(used[:5]),
            help=help,
        )


def require_no_run(path: Path) -> None:
    """Refuse the folder of a run for files of another kind, whatever state the run is in.

    A folder that only looks alike is none: others keep checkpoints under that name too.

    raises    RunFolderError
    """
    own = [name for name in (LEDGER, RECORD) if is_there(path / name)]
    if own:
        raise RunFolderError(
            "the output folder is the folder of a run",
            folder=path,
            found=own[0],
            help="choose another folder with -o",
        )
    require_free(path)


def require_begun(path: Path) -> None:
    """Refuse to go on in a folder that is not there, is empty, or cannot be written.

    raises    RunFolderError
    """
    if not _used(path):
        found = "no folder of that name"
        if path.is_dir():
            begun = any(map(_is_announced, path.iterdir()))
            found = "a run that came to no step" if begun else "an empty folder"
        raise RunFolderError(
            "there is no run to go on with",
            folder=path,
            found=found,
            help="name the run's folder with -o, or leave --resume out to start a run there",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise unwritable(path, "it may not be written to, or is read-only")


def _used(path: Path) -> list[str]:
    """What is in a folder, but for our lock and what a run that came to no step has left.

    raises    RunFolderError where that may not be read
    """
    try:
        entries = path.iterdir() if path.is_dir() else ()
        return sorted(
            entry.name for entry in entries if entry.name != LOCK and not _is_announced(entry)
        )
    except PermissionError as error:
        raise unwritable(path, error) from error


def _is_announced(entry: Path) -> bool:
    """Whether a folder holds no more than what a job that came to no step has left."""
    return entry.is_dir() and {STATUS} <= {path.name for path in entry.iterdir()} <= {STATUS, STOP}


def how_to_go_on(path: Path) -> str:
    """Help text for a run that has lost processes: what to do, and from where it goes on then."""
    try:
        names = (path / "checkpoints" / "latest").read_text("utf-8").split()
    except (OSError, UnicodeDecodeError):
        names = []
    if names:
        return f"start again with --resume: the last checkpoint is {names[0]}"
    return "start again with --resume; there is no checkpoint yet, so every job starts anew"
