"""Turn what a user sends into a job file in the scheduler's folder.

A job file is checked as everywhere. Before anything that it names is looked at, every path in it
has to lie in a folder that jobs may read: one that the service was started with, or the folder of
the submission itself, into which its uploads are put.

    RUN/service/uploads/USER/SHA256    what was uploaded
               /submitted/NAME/        a submission: jobs.yaml as it was sent, and uploads
               /inbox/000012.yaml      what the scheduler reads
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import posixpath
import re
import secrets
import shlex
import shutil
import threading
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlora_fx.config.base_files import cached_folder, require_base_there
from tlora_fx.config.base_spec import is_written_as_path
from tlora_fx.config.hub import is_hub_id, is_set_offline
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.config.job_file import (
    DATA_SUFFIXES,
    SHARED,
    load_job_file,
    read_yaml,
)
from tlora_fx.config.paths import is_pattern, is_there, with_home
from tlora_fx.config.sweep import entries_of_values
from tlora_fx.errors import (
    QuotaReached,
    RequestConflict,
    RequestRefused,
    StorageFailed,
    SubmissionRefused,
    TloraError,
    UploadRefused,
)
from tlora_fx.host.durable import link_or_copy
from tlora_fx.host.storage import missing_bytes
from tlora_fx.runtime.data.rows import is_local
from tlora_fx.runtime.launching.early_checks import require_distinct_names
from tlora_fx.server.archives import archive
from tlora_fx.server.file_patterns import is_open, look_up, may_enter
from tlora_fx.server.ledger import FOLDER, User
from tlora_fx.server.store import OwnedJob, ReplacedJob, ServiceStore, Submission, full_name

logger = logging.getLogger(__name__)

JOB_FILE = "jobs.yaml"
#: Of an uploaded file, where nobody says otherwise: it holds the adapter of rank 64 of all linears
#: of a base of 8B, in float32.
UPLOAD_BYTES = 1 << 30
#: Old jobs that are removed in one transaction.
REMOVED_AT_A_TIME = 100
#: For which the files that a submission names by patterns are looked up.
LOOK_SECONDS = 10.0
#: Submissions of a user whose patterns are looked up at a time; each holds a thread of those that
#: answer.
MAX_LOOKS = 4
#: Keys below `base`, and below a job or the defaults, that may hold a path.
_BASE_PATHS = ("model", "tokenizer", "config")
_JOB_PATHS = ("adapter",)
_DATA = ("data", "eval_data")
#: Letters and digits of any script, spaces inside; nothing hidden, and no way up. Marks of letters
#: stand as dots here.
_UPLOAD_NAME = re.compile(r"{part}(/{part})*".format(part=r"[\w-](?:[\w. -]*[\w.-])?"))
#: Unicode categories of the marks that belong to the letter before them.
_MARKS = frozenset({"Mn", "Mc"})
#: Of a name in UTF-8, which a folder of a submission stands before.
MAX_UPLOAD_NAME = 200
#: Bytes of the name of a file or folder that file systems take.
MAX_FILE_NAME = 255


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Limits of what users may send, and of what their jobs may read.

    roots             folders in which bases, data and adapters lie; none: uploads and the hub alone
    upload_bytes      of one file
    stored_bytes      of all files of a user
    keep_seconds      for which an upload stays that no job needs; None: for ever
    keep_job_seconds  for which a job stays that has ended; None: for ever
    archive           a folder that gets a tar file of each job removed after that; None: none does
    trust_remote_code   jobs may run code of their own where they ask for it
    """

    roots: tuple[Path, ...] = ()
    upload_bytes: int = UPLOAD_BYTES
    stored_bytes: int = 10 << 30
    keep_seconds: float | None = None
    keep_job_seconds: float | None = None
    archive: Path | None = None
    trust_remote_code: bool = False


class Intake:
    """Intake of uploads and submissions.

    require_measured   raises TloraError for a base that cannot be trained for want of a profile
    """

    def __init__(
        self, store: ServiceStore, limits: IntakeLimits,
        require_measured: Callable[[BaseSpec], None] = lambda base: None,
    ) -> None:  # fmt: skip
        self.store, self.limits, self._require_measured = store, limits, require_measured
        self._roots = tuple(root.resolve() for root in limits.roots)
        self._run = store.folder.parent.resolve()
        # By number, submissions whose job file is not written yet, and who may write them.
        self._late: dict[int, Submission] = {}
        self._handing_over = threading.Lock()
        self._looks: Counter[str] = Counter()
        self._counting_looks = threading.Lock()
        # Of each upload that is being sent its user, SHA-256 and bytes so far.
        self._arriving: dict[Path, tuple[str, str, int]] = {}

    def restore(self) -> None:
        """Put back what a killed service did not come to, and remove what nobody was told of."""
        known = self.store.submission_folders()
        for path in (self.store.folder / "submitted").iterdir():
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)
        for submission in self.store.unread_submissions():
            path = self.store.file_of(submission.number)
            if not path.exists() or path.read_bytes() != submission.document.encode():
                self._late[submission.number] = submission
        self.hand_over()
        # Adapters that an earlier version was sending when it was killed.
        left = [*self.store.folder.glob("tmp*.tar"), *self.store.folder.glob("uploads/*/*.part")]
        for path in left:
            path.unlink(missing_ok=True)
        self.empty_trash()

    def empty_trash(self) -> None:
        """Remove the folders of what was removed; what cannot be now is tried again."""
        for path in (self.store.folder / "trash").iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def _remove_old(self, keep_seconds: float) -> None:
        """Remove jobs that ended long ago, and what tells of groups of that time."""
        long_ago, folder = self.store.now() - keep_seconds, self.store.folder.parent
        while jobs := self.store.old_jobs(long_ago, REMOVED_AT_A_TIME):
            for job in jobs:
                self._archive(folder / job.name, job)
            self.store.remove_old(jobs)
            self.empty_trash()
        while replaced := self.store.old_replaced(long_ago, REMOVED_AT_A_TIME):
            for each in replaced:
                self._archive(folder / each.folder, each)
            self.store.drop_replaced(replaced)
            self.empty_trash()
        for epoch in self.store.forget_past(long_ago):
            shutil.rmtree(folder / "groups" / f"{epoch:06d}", ignore_errors=True)

    def _archive(self, folder: Path, job: OwnedJob | ReplacedJob) -> None:
        if self.limits.archive is not None:
            archive(self.limits.archive, folder, job)

    def collect(self) -> None:
        """Remove jobs that ended long ago, uploads that were sent long ago, and theirs of old jobs.

        What a submission named is in its own folder too, until the last of its jobs has ended.
        """
        if self.limits.keep_job_seconds is not None:
            self._remove_old(self.limits.keep_job_seconds)
        self.empty_trash()
        if self.limits.keep_seconds is None:
            return
        long_ago = self.store.now() - self.limits.keep_seconds
        for path in (self.store.folder / "uploads").glob("*/*"):
            # What is being sent has its time yet from the machine's clock.
            if path.suffix != ".part" and path.stat().st_mtime < long_ago:
                path.unlink(missing_ok=True)
        for name in self.store.drop_folders(long_ago):
            shutil.rmtree(self.store.folder / "submitted" / name, ignore_errors=True)

    async def upload(self, user: User, sha256: str, content: AsyncIterator[bytes]) -> int:
        """Keep a file until a submission names its SHA-256; its size in bytes.

        raises   UploadRefused, RequestRefused, QuotaReached, StorageFailed; nothing is kept then
        """
        self.require_room()
        folder = self.store.folder / "uploads" / user.name
        folder.mkdir(mode=0o700, exist_ok=True)
        stored = _stored_bytes(folder, besides=sha256)
        part, size, digest = folder / f"{secrets.token_hex(8)}.part", 0, hashlib.sha256()
        try:
            with part.open("wb") as file:
                async for chunk in content:
                    size += len(chunk)
                    self._arriving[part] = user.name, sha256, size
                    digest.update(chunk)
                    if size > self.limits.upload_bytes:
                        raise UploadRefused(
                            "the file is too large",
                            expected=f"at most {self.limits.upload_bytes} bytes",
                            help="put it where the workers see it, and name its path",
                        )
                    self._require_stored(stored + self._arriving_bytes(user))
                    self.require_room()
                    file.write(chunk)
            if digest.hexdigest() != sha256:
                raise RequestRefused(
                    "the file is not what its SHA-256 says",
                    expected=sha256,
                    found=digest.hexdigest(),
                    help="it changed while it was read or sent: send it again",
                )
            # Others of the user's may have been kept since it began.
            self._require_stored(_stored_bytes(folder, besides=sha256) + size)
            # Its age is told by the clock that `collect` reads.
            os.utime(part, (self.store.now(),) * 2)
            part.rename(folder / sha256)
        finally:
            self._arriving.pop(part, None)
            part.unlink(missing_ok=True)
        return size

    def _arriving_bytes(self, user: User) -> int:
        """Bytes of the uploads that a user is sending; of a file that is sent again, those once."""
        largest: Counter[str] = Counter()
        for name, sha256, size in self._arriving.values():
            if name == user.name:
                largest[sha256] = max(largest[sha256], size)
        return largest.total()

    def _require_stored(self, size: int) -> None:
        """Refuse an upload with which a user has too many bytes; raises QuotaReached."""
        if size > self.limits.stored_bytes:
            raise QuotaReached(
                "no space is left for your uploads",
                expected=f"at most {self.limits.stored_bytes} bytes of all of them",
                found=f"at least {size} bytes with this one",
                help="name a file that the service can read (--root), or ask the operator to "
                "raise --max-stored or to remove old uploads by --keep-uploads",
            )

    def submit(
        self, user: User, key: str, job_file: str, files: Mapping[str, str], priority: int
    ) -> Submission:
        """Take a job file with its uploads, by name the SHA-256 of each; once for each key.

        raises   TloraError, and nothing has changed then
        """
        whole = json.dumps([job_file, sorted(files.items()), priority])
        sha256 = hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()
        known = self.store.replayed(user, key, sha256)
        if known is not None:
            return known
        self.require_room()
        folder = self.store.folder / "submitted" / secrets.token_hex(12)
        try:
            jobs = self._read(user, folder, job_file, files, priority)
            names = [full_name(user.name, job.name) for job in jobs]
            document = self._document(folder, jobs, names)
            submission = self.store.submit(
                user, key, sha256, names, document, folder.name, priority
            )
        except (QuotaReached, RequestConflict):
            shutil.rmtree(folder, ignore_errors=True)
            # What fills the quota or has the names may be this submission, sent twice at a time.
            known = self.store.replayed(user, key, sha256)
            if known is None:
                raise
            return known
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if submission.replayed:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self._late[submission.number] = submission
            self.hand_over()
        return submission

    def require_room(self) -> None:
        """Refuse what would fill the disk, of which what trains needs the rest.

        raises   StorageFailed
        """
        if missing := missing_bytes(self.store.folder):
            raise StorageFailed(
                "the service's disk is nearly full; nothing has changed",
                reason=f"{-(-missing >> 20)} MiB too few are free",
                help="send the request again later; the operator must free space",
            )

    def hand_over(self) -> None:
        """Give the scheduler the job files of submissions that it does not have yet, in order.

        A submission is accepted once the ledger has it. A file that cannot be written now, such as
        on a full disk, is written later, and before those of later submissions.
        """
        with self._handing_over:
            for number in sorted(self._late):
                try:
                    self._write(self._late[number])
                except OSError as error:
                    logger.error(
                        "the job files of %d submissions, from %d on, wait for a disk that takes "
                        "them: %s", len(self._late), number, error.strerror,
                        extra={"event": "error"},
                    )  # fmt: skip
                    return
                del self._late[number]

    def _write(self, submission: Submission) -> None:
        path = self.store.file_of(submission.number)
        part = path.with_suffix(".part")
        part.write_bytes(submission.document.encode())
        part.replace(path)

    def _read(
        self, user: User, folder: Path, job_file: str, files: Mapping[str, str], priority: int
    ) -> Sequence[Job]:
        """The jobs of what was sent, in a folder of its own.

        What the store would refuse is refused as soon as more is known of the number of jobs: what
        is checked of each takes a millisecond.
        """
        folder.mkdir(mode=0o700)
        path = folder / JOB_FILE
        try:
            path.write_bytes(job_file.encode())
        except UnicodeEncodeError as error:
            raise SubmissionRefused("the job file is not UTF-8", found=error.reason) from None
        try:
            top = read_yaml(path).value
            for name, target in _targets(top, files).items():
                self.place(user, folder / target, name, files[name])
            count, names = _entries(top)
            self.store.require_quota(
                user, count, priority, [full_name(user.name, n) for n in names]
            )
            patterns = self._require_inside(user, folder, top)
            matched = self._matched(user, folder, patterns)
            jobs = load_job_file(path, trust_remote_code=self.limits.trust_remote_code).jobs
            names = [full_name(user.name, job.name) for job in jobs]
            self.store.require_quota(user, len(jobs), priority, names)
            require_distinct_names(jobs)
            self._require_data(folder, top, files, matched)
            _require_base(jobs[0].base)
            self._require_measured(jobs[0].base)
            return jobs
        except (QuotaReached, RequestConflict):
            raise
        except TloraError as error:
            # The user knows nothing of our folders.
            facts = {name: _without(folder, text) for name, text in error.facts.items()}
            raise SubmissionRefused(
                _without(folder, error.what), help=error.help, **facts
            ) from error

    def place(self, user: User, target: Path, name: str, sha256: str) -> None:
        """Put what a user has uploaded and called by a name at a path; raises SubmissionRefused."""
        if name == JOB_FILE or not is_upload_name(name):
            raise SubmissionRefused(
                "a file cannot be called so",
                found=name,
                expected="a path below the job file, of letters, digits, spaces, '.', '_', '-' and "
                f"'/', at most {MAX_UPLOAD_NAME} bytes",
                help="give the job file another name for it, and upload it with --upload NAME=FILE",
            )
        source = self.store.folder / "uploads" / user.name / sha256
        if not source.is_file():
            raise SubmissionRefused(
                "a file was not uploaded", found=f"{name}: {sha256}", help="PUT it, then submit"
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(source, target)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise SubmissionRefused(
                "two files cannot have these names", found=name, help="rename one of them"
            ) from None

    def _require_inside(self, user: User, folder: Path, top: object) -> dict[str, tuple[str, str]]:
        """Refuse paths that jobs may not read, before anything looks at them.

        returns   by pattern, where it stands and its text: what they name is not looked up here
        """
        patterns = {}
        for where, text in _paths(top):
            if "://" in text or "\0" in text:
                raise SubmissionRefused("a job reads files and the hub alone", **{where: text})
            named = is_written_as_path(text) or text.endswith(DATA_SUFFIXES) or ".." in text
            named = named or is_pattern(text)
            named = named or where.endswith(("adapter", "config", "compute_metrics"))
            here = is_there(folder / text)
            paths = [folder / with_home(text)] if named or here else []
            # What is no path here may be one where the service was started. A data file never is.
            elsewhere = is_there(text) and not (here or text.endswith(DATA_SUFFIXES))
            paths += [Path(text)] if elsewhere else []
            inside = all(self._is_inside(user, folder, path) for path in paths)
            inside = inside and not (is_pattern(text) and self._may_enter(user, folder, text))
            if inside and is_pattern(text):
                patterns[str(folder / with_home(text))] = where, text
            if where.startswith("base") and named and not (here or with_home(text).is_absolute()):
                raise SubmissionRefused(
                    "the base is not there",
                    **{where: text},
                    expected="the id of a base on the hub, or a folder that the service was "
                    "started with (--root), by its whole path",
                    help="ask the operator where the base lies on the service's machine",
                )
            if not inside:
                raise self._outside(where, text)
        return patterns

    def _outside(self, where: str, text: str) -> SubmissionRefused:
        return SubmissionRefused(
            "a job may not read this path",
            **{where: text},
            expected=", ".join(map(str, self.limits.roots)) or "an upload, or a hub id",
            help="upload the file, or have the service started with --root FOLDER",
        )

    def _matched(
        self, user: User, folder: Path, patterns: Mapping[str, tuple[str, str]]
    ) -> set[str]:
        """Patterns that name files; refuse those that name a link to another place.

        patterns   as of `_require_inside`
        raises     SubmissionRefused; QuotaReached
        """
        if not patterns:
            return set()
        folders = [str(each) for each in (folder.resolve(), *self._roots)]
        closed = [] if user.admin else [str(self._run)]
        with self._look_of(user):
            looked = look_up(list(patterns), folders, closed, LOOK_SECONDS)
        if looked is None:
            where, text = next(iter(patterns.values()))
            raise SubmissionRefused(
                "it takes too long to find the files of its patterns",
                **{where: text},
                expected=f"at most {LOOK_SECONDS:g} s for all of them",
                help="name a folder that has fewer files below it, and `**` once",
            )
        for (where, text), matches in zip(patterns.values(), looked, strict=True):
            if not matches.inside:
                raise self._outside(where, text)
        return {path for path, matches in zip(patterns, looked, strict=True) if matches.some}

    @contextmanager
    def _look_of(self, user: User) -> Iterator[None]:
        """Count a look-up of a user's; raises QuotaReached where there are too many."""
        with self._counting_looks:
            if self._looks[user.name] >= MAX_LOOKS:
                raise QuotaReached(
                    "too many submissions with patterns of files at a time",
                    expected=f"at most {MAX_LOOKS}",
                    help="submit again when the others are answered",
                )
            self._looks[user.name] += 1
        try:
            yield
        finally:
            with self._counting_looks:
                self._looks[user.name] -= 1

    def _require_data(
        self, folder: Path, top: object, files: Mapping[str, str], matched: set[str]
    ) -> None:
        """Refuse data files that are not there; what is in them is read by another process.

        matched   patterns that name files
        """
        for where, text in _paths(top):
            path = str(folder / with_home(text))
            if not where.endswith(".path") or not is_local(text) or is_there(path):
                continue
            if path in matched:
                continue
            raise _absent_data(where, text, sorted(files))

    def _is_inside(self, user: User, folder: Path, path: Path) -> bool:
        """Whether a job of a user may read a path.

        A root may hold the run's folder, in which others have uploads and adapters: of that, users
        read what their own jobs have left.
        """
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError):
            return False
        folders = [str(each) for each in (folder.resolve(), *self._roots)]
        closed = [] if user.admin else [str(self._run)]
        if is_open(str(real), folders, closed):
            return True
        own = closed and real.is_relative_to(self._run) and is_open(str(real), folders, [])
        job = next(iter(real.relative_to(self._run).parts), "") if own else ""
        return self.store.user_of_job(job) == user.name

    def _may_enter(self, user: User, folder: Path, pattern: str) -> bool:
        """Whether a pattern may name files of the run, of which others put there more later.

        Workers look again for what it names, whenever the job starts.
        """
        path = (folder / with_home(pattern)).resolve()
        own = path.is_relative_to(folder.resolve())
        return not (user.admin or own) and may_enter(str(path), str(self._run))

    def _document(self, folder: Path, jobs: Sequence[Job], names: Sequence[str]) -> str:
        """The same jobs with absolute paths and full names, as a file anywhere."""
        if any(name.lower() == FOLDER or len(name) > 100 for name in names):
            raise SubmissionRefused(
                "a job cannot be called so here",
                found=", ".join(names),
                help="choose a shorter name, or another",
            )
        base = jobs[0].base.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        shared = {key: getattr(jobs[0], key) for key in SHARED}
        entries = [
            job.model_dump(mode="json", exclude_unset=True, exclude={"base", *SHARED})
            | {"name": name}
            for job, name in zip(jobs, names, strict=True)
        ]
        again = folder / "document.yaml"
        try:
            whole = {"base": base, **shared, "jobs": entries}
            document = json.dumps(whole, allow_nan=False, ensure_ascii=False, indent=1)
            again.write_text(document + "\n", "utf-8")
            read = load_job_file(again, trust_remote_code=self.limits.trust_remote_code).jobs
        except (TloraError, ValueError) as error:
            raise SubmissionRefused(
                "the job file holds what cannot be written down again",
                found=str(error).splitlines()[0],
                help="leave out infinite numbers, and characters that nobody sees",
            ) from None
        again.unlink()
        for job, other, name in zip(jobs, read, names, strict=True):
            if job.model_copy(update={"name": name}) != other:
                raise SubmissionRefused(
                    "a job does not read the same when it is written down again", job=job.name
                )
        return document + "\n"


def _absent_data(where: str, text: str, uploads: Sequence[str]) -> SubmissionRefused:
    if with_home(text).is_absolute():
        return SubmissionRefused(
            "a data file is not there",
            **{where: text},
            expected="a file on the service's machine",
            help="correct the path, or name the file relative to the job file and send it: "
            "tlora-fx client submit JOBS.yaml --upload NAME=FILE",
        )
    return SubmissionRefused(
        "a data file is not there",
        **{where: text},
        expected="an upload of this name",
        found=", ".join(uploads) or "no upload",
        help="send it with the job file: tlora-fx client submit JOBS.yaml --upload "
        f"{shlex.quote(text)}",
    )


def _targets(top: object, names: Collection[str]) -> dict[str, str]:
    """Where each upload lies below a job file: by its name, the name in the job file's accents.

    A letter with an accent may be one character (NFC) or two (NFD): macOS sends names of files in
    two, and editors write one. A name that the job file has exactly is left alone, and so is one
    whose other spelling another upload has, or no file system takes.
    """
    texts = dict.fromkeys(posixpath.normpath(text) for _, text in _paths(top))
    spelled = {unicodedata.normalize("NFC", text): text for text in texts}
    # A pattern names files of its own spelling.
    usual: list[Literal["NFC", "NFD"]] = ["NFC", "NFD"]
    whole = "\n".join(texts)
    form = next((form for form in usual if unicodedata.is_normalized(form, whole)), None)

    taken = set(names)
    targets = {}
    for name in names:
        target = name if form is None else unicodedata.normalize(form, name)
        target = spelled.get(unicodedata.normalize("NFC", name), target)
        longest = max(len(part.encode("utf-8", "surrogatepass")) for part in target.split("/"))
        if name in texts or target in taken or longest > MAX_FILE_NAME:
            target = name
        taken.add(target)
        targets[name] = target
    return targets


def is_upload_name(name: str) -> bool:
    """Whether an uploaded file may be called so."""
    fits = len(name.encode("utf-8", "surrogatepass")) <= MAX_UPLOAD_NAME
    # \w has no accents and vowel signs that are characters of their own. Like a dot, such a mark
    # stands anywhere but first.
    plain = "".join("." if unicodedata.category(char) in _MARKS else char for char in name)
    return fits and _UPLOAD_NAME.fullmatch(plain) is not None


def _require_base(base: BaseSpec) -> None:
    """Refuse a base that is not there; its files are read by another process."""
    require_base_there(base)
    for name in (base.model, base.tokenizer):
        if is_hub_id(name) and is_set_offline() and cached_folder(str(name)) is None:
            raise SubmissionRefused(
                "the base is not on the service's machine, which is offline",
                **{"base.model": name},
                help="name a folder that the service was started with, by its whole path",
            )


def _stored_bytes(folder: Path, *, besides: str) -> int:
    """Bytes of the whole uploads in a user's folder, besides one that is sent again."""
    return sum(
        path.stat().st_size
        for path in folder.iterdir()
        if path.suffix != ".part" and path.name != besides
    )


def _entries(top: object) -> tuple[int, list[str]]:
    """Jobs of a job file at least, and names of them; a sweep is more than one job."""
    jobs = _at(top, "jobs")
    entries = jobs if isinstance(jobs, list) else []
    names = [_at(entry, "name") for entry in entries if _at(entry, "sweep") is None]
    return max(1, len(entries)), [name for name in names if isinstance(name, str)]


def _paths(top: object) -> Iterator[tuple[str, str]]:
    """What may be a path in a job file, and where it stands, such as `jobs[0].data.path`.

    What is no mapping has its own mistakes.
    """
    if not isinstance(top, dict):
        return
    jobs = top.get("jobs")
    sections = [("defaults", top.get("defaults"))]
    sections += [
        (f"jobs[{i}]", job) for i, job in enumerate(jobs if isinstance(jobs, list) else ())
    ]
    sections += [
        (f"{where}.sweep", entry)
        for where, section in list(sections)
        for entry in entries_of_values(section)
    ]
    for key in _BASE_PATHS:
        yield from _text(f"base.{key}", _at(top.get("base"), key))
    for where, section in sections:
        for key in _JOB_PATHS:
            yield from _text(f"{where}.{key}", _at(section, key))
        for key in _DATA:
            yield from _data_paths(f"{where}.{key}", _at(section, key))
        function = _at(section, "compute_metrics")
        if isinstance(function, str) and ".py" in function:
            yield f"{where}.compute_metrics", function.rpartition(":")[0] or function
    # A base may be named by one word.
    yield from _text("base", top.get("base"))


def _data_paths(where: str, data: object) -> Iterator[tuple[str, str]]:
    """Paths of a data set, of a list of them, and of those that one has beside it."""
    if isinstance(data, list):
        for index, each in enumerate(data):
            yield from _data_paths(f"{where}[{index}]", each)
    elif isinstance(data, dict):
        yield from _text(f"{where}.path", data.get("path"))
        yield from _data_paths(f"{where}.more", data.get("more"))


def _at(section: object, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else None


def _text(where: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value:
        yield where, value


def _without(folder: Path, text: str) -> str:
    for written in (str(folder.absolute()), str(folder)):
        text = text.replace(f"{written}/", "").replace(written, "the submission")
    return text
