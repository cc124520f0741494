"""Checkpoints that a crash, a full disk or a flipped bit cannot take away.

A checkpoint is a new folder, written under a temporary name, every file fsynced and listed with
its checksum in a manifest, then renamed; the file `latest` is replaced last:

    checkpoints/latest                     names of the kept checkpoints, newest first
    checkpoints/step-000123/manifest.json  format, version that wrote it, and the checksum of
                                      every other file
                           /state.json     the run, and each job's counters, cursor and status
                           /jobs/NAME/adapter_model.safetensors, optimizer.safetensors,
                                      best_model.safetensors

A checksum is the file's SHA-256. Files of more than 16 MiB are hashed in pieces of that size, by
several threads: theirs is `pieces:`, and the SHA-256 of the pieces' digests, concatenated.

Where only some jobs have changed, the others' files are links to those of the checkpoint before.
Only safetensors and JSON are read back, never a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from torch import Tensor

from tlora_fx.errors import CheckpointError
from tlora_fx.host.durable import link_or_copy, replace_file, sync_folder, write_synced
from tlora_fx.host.formats import require_known, stamp
from tlora_fx.runtime.checkpoints.tensor_file import as_file, file_tensors, fill, tensor_bytes

#: Older formats are read too: in the first, every checksum is a file's SHA-256.
FORMAT = 2
BEST = "best_model.safetensors"
KEPT = 2
#: Bytes of a large file that are hashed as one, in every checkpoint of this format.
PIECE = 1 << 24
PIECES = "pieces:"
#: Pieces that are read and hashed at a time, and files that are written.
THREADS = 8
WRITTEN = 4
_NAME = re.compile(r"step-(\d{6,})(?:\.(\d+))?")
_JOB_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


#: Files by name: their content, or a file that has it.
Companions = Mapping[str, bytes | Path]
_FILE = re.compile(
    rf"state\.json|jobs/{_JOB_NAME.pattern}/(adapter_model|optimizer|best_model)\.safetensors"
)


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was passed over, or one could not be tidied away."""


@dataclass(frozen=True, slots=True)
class JobState:
    """All that one job needs to go on.

    adapter            tensors under the names of PEFT's adapter_model.safetensors, unsharded
    optimizer          `JobOptimizer.state_tensors()`
    optimizer_values   `JobOptimizer.state_values()`, JSON-able
    step, micro_step   optimizer steps done, and micro-batches done, in all
    tokens             tokens seen in all
    cursor             where the job's data goes on, JSON-able
    status, reason     `failed` has a reason, and so has what stopped early
    evaluation         `JobEvaluation.state()`, JSON-able
    best               the adapter of the best step, as `adapter`; empty where nobody asked for it
    companions         files beside the adapter, for people and PEFT; nothing reads them back
    """

    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer_values: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    micro_step: int = 0
    tokens: int = 0
    cursor: Mapping[str, Any] = field(default_factory=dict)
    status: Literal["running", "done", "failed"] = "running"
    reason: str = ""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Tensor] = field(default_factory=dict)
    companions: Companions = field(default_factory=dict)

    def detached(self) -> JobState:
        """The state in tensors that no further step reaches, where they are."""
        return replace(self, optimizer=_cloned(self.optimizer), best=_cloned(self.best))

    def snapshot(self) -> JobState:
        """The state in main memory, where no further step reaches it.

        Of what `JobRun.state` gives, only the optimizer's tensors are not copies yet.
        """
        own = replace(self.with_own_values(), optimizer=as_file(self.optimizer))
        return own.in_main_memory()

    def with_own_values(self) -> JobState:
        """The state, of which no step reaches what is no tensor."""
        values, evaluation = deepcopy(self.optimizer_values), deepcopy(self.evaluation)
        return replace(self, optimizer_values=values, evaluation=evaluation)

    def in_main_memory(self) -> JobState:
        """The state with its tensors there; where all are there already nothing is copied."""
        adapter, optimizer, best = (
            tensors if all(each.device.type == "cpu" for each in tensors.values())
            else as_file(tensors)
            for tensors in (self.adapter, self.optimizer, self.best)
        )  # fmt: skip
        return replace(self, adapter=adapter, optimizer=optimizer, best=best)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send bytes of tensors to other processes: pickle would send a whole file for each."""
        files = {name: bytes(tensor_bytes(getattr(self, name))) for name in TENSORS}
        rest = {each.name: getattr(self, each.name) for each in fields(self)}
        return _unpickled, (files, {name: rest[name] for name in rest if name not in TENSORS})


#: What of a job's state is tensors, and what is in files of its own.
TENSORS = ("adapter", "optimizer", "best")
FILES = (*TENSORS, "companions")


def _unpickled(files: Mapping[str, bytes], rest: Mapping[str, Any]) -> JobState:
    given: dict[str, Any] = dict(rest)
    given |= {name: file_tensors(memoryview(bytearray(files[name]))) for name in files}
    return JobState(**given)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read back and proved whole."""

    path: Path
    step: int
    jobs: dict[str, JobState]
    run: dict[str, Any]


class _Damaged(Exception):
    """Why one checkpoint is not whole."""


class CheckpointStore:
    """The checkpoints of one run, below `folder`/checkpoints; one process writes them.

    folder   the run's output folder; made when the first checkpoint is saved
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder) / "checkpoints"
        self._damaged: set[str] = set()
        self._kept: list[str] = []

    def save(
        self,
        step: int,
        jobs: Mapping[str, JobState],
        run: Mapping[str, Any],
        *,
        unchanged: Collection[str] = (),
        elsewhere: Mapping[str, Path] | None = None,
    ) -> Path:
        """Write a checkpoint and point to it; it is to stay, and two that link to no other.

        Others stay until `tidy`.

        step        a label of six digits or more, for people; the order of saving is what counts
        jobs        states by job name, which becomes a folder name
        run         what belongs to the whole run, JSON-able
        unchanged   further jobs, which stay as the newest checkpoint has them: see `holds`
        elsewhere   by job, the checkpoint of another run that holds its state, for links to its
                    files; they are written where that is gone
        returns     the checkpoint's folder
        raises      CheckpointError when the disk refuses; the checkpoints before stay pointed to
        """
        _check_names(jobs)
        fresh = finished = None
        self._kept = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            before = [name for name in self._names() if self._is_there(name)]
            self._tidy(before)
            fresh = Path(tempfile.mkdtemp(prefix=f"step-{step:06d}.tmp-", dir=self.folder))
            earlier = _Earlier.of(self.folder, before, unchanged)
            _write(fresh, step, jobs, run, earlier, elsewhere or {})
            finished = fresh.rename(self._free_name(step))
            sync_folder(self.folder)
            apart = [name for name in (finished.name, *before) if not self._links(name)]
            kept = list(dict.fromkeys([finished.name, *apart[:KEPT]]))
            replace_file(self.folder / "latest", "".join(f"{n}\n" for n in kept).encode())
        except BaseException as error:
            for folder in filter(None, (fresh, finished)):
                if folder.name not in self._listed():
                    shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise self._refused(step, error) from error
            raise
        self._kept = kept
        return finished

    def tidy(self) -> None:
        """Remove checkpoints that need not stay beside the one that was written last."""
        if self._kept:
            self._tidy(self._kept)

    def holds(self) -> frozenset[str]:
        """The jobs whose files the newest checkpoint has, which may stay unchanged in the next."""
        name = next(filter(self._is_there, self._names()), None)
        try:
            files = _manifest(self.folder / name)["sha256"] if name is not None else {}
        except _Damaged:
            return frozenset()
        return frozenset(filter(None, map(_job_of, files)))

    def _links(self, name: str) -> bool:
        """Whether a checkpoint has files of another one; what cannot be read has none."""
        try:
            return bool(_manifest(self.folder / name).get("links"))
        except _Damaged:
            return False

    def load(self, only: frozenset[str] | None = None) -> Checkpoint | None:
        """The newest whole checkpoint, or None where none was ever finished.

        Warns of each damaged one that it passes over. Its run may write others meanwhile.

        only     names of jobs: the files of others are neither read nor checked
        raises   CheckpointError when checkpoints exist and none is whole; NewerFormat when one was
                 written by a newer tlora-fx
        """
        names = self._names()
        reasons: list[str] = []
        for name in names:
            try:
                checkpoint = _read(self.folder / name, only)
            except _Damaged as damage:
                if self._names() != names:
                    # Its run has written a newer one meanwhile, and tidied this one away.
                    return self.load(only)
                self._damaged.add(name)
                reasons.append(f"{name}: {damage}")
                continue
            if reasons:
                passed_over = "; ".join(reasons)
                message = f"damaged checkpoint passed over ({passed_over}); going on from {name}"
                warnings.warn(message, CheckpointWarning, stacklevel=2)
            return checkpoint
        if reasons:
            raise CheckpointError(
                "no checkpoint is whole",
                folder=self.folder,
                found="\n".join(reasons),
                help="restore one from a backup, or train into a new folder",
            )
        return None

    def counters(self) -> dict[str, dict[str, Any]]:
        """Steps, status and all else but tensors of each job, in the newest checkpoint.

        Its tensors are not read, so that this is quick; nothing where no checkpoint is readable.
        """
        return self._told("jobs")

    def run(self) -> dict[str, Any]:
        """Run's own part of the newest readable checkpoint; empty where there is none."""
        return self._told("run")

    def _told(self, of: str) -> dict[str, Any]:
        for name in self._names():
            try:
                return dict(_state_in(self.folder / name)[of])
            except (_Damaged, ValueError, KeyError, TypeError, RecursionError):
                continue
        return {}

    def _names(self) -> list[str]:
        """Names to try, best first: what `latest` lists, then every other finished folder.

        A folder that nothing lists is as whole as its checksums say: a `latest` that names what is
        not there, or a copy of an older one, takes nothing away.
        """
        listed = self._listed()
        finished = [p.name for p in self.folder.glob("step-*") if _NAME.fullmatch(p.name)]
        return listed + sorted(set(finished) - set(listed), key=_age, reverse=True)

    def _is_there(self, name: str) -> bool:
        return name not in self._damaged and (self.folder / name).is_dir()

    def _listed(self) -> list[str]:
        """What `latest` lists, or nothing when it is missing or is not a list of checkpoints."""
        try:
            names = (self.folder / "latest").read_text("utf-8").split()
        except (OSError, UnicodeDecodeError):
            return []
        return names if all(_NAME.fullmatch(name) for name in names) else []

    def _refused(self, step: int, error: OSError) -> CheckpointError:
        help = "the checkpoint before is whole; free space and go on with --resume"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written",
            folder=self.folder,
            reason=error,
            help=help if self._listed() else "free space: there is no checkpoint yet",
        )

    def _free_name(self, step: int) -> Path:
        """A folder name not in use: a resumed run may come to the same step again."""
        path = self.folder / f"step-{step:06d}"
        again = 1
        while path.exists():
            again += 1
            path = self.folder / f"step-{step:06d}.{again}"
        return path

    def _tidy(self, kept: list[str]) -> None:
        """Remove what killed processes left and what is no longer kept."""
        for path in self.folder.glob("step-*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
            if path.name not in kept and path.exists():
                message = f"an old checkpoint could not be removed: {path}"
                warnings.warn(message, CheckpointWarning, stacklevel=3)


def _age(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _check_names(jobs: Mapping[str, JobState]) -> None:
    for name in jobs:
        if not _JOB_NAME.fullmatch(name):
            raise CheckpointError(
                "a job's name cannot name a folder",
                job=repr(name),
                help="use letters, digits, '.', '_' and '-', at most 100, without '..'",
            )


@dataclass(frozen=True, slots=True)
class _Earlier:
    """Jobs that stay as an earlier checkpoint has them.

    sums       of their files
    counters   as its `state.json` has them, by job
    """

    folder: Path
    sums: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, names: list[str], jobs: Collection[str]) -> _Earlier:
        """State of the newest checkpoint; raises OSError where that cannot be read."""
        if not jobs:
            return cls(folder)
        newest = folder / names[0] if names else folder
        try:
            every = _state_in(newest)["jobs"]
            sums = _manifest(newest)["sha256"]
            return cls(
                newest,
                {file: sums[file] for file in sums if _job_of(file) in jobs},
                {name: every[name] for name in jobs},
            )
        except (_Damaged, KeyError) as error:
            raise OSError(f"the checkpoint before lacks what is unchanged: {error}") from error

    def link(self, folder: Path) -> None:
        """Put the jobs' files, and those beside them, into a new checkpoint's folder."""
        for name in self.counters:
            for path in sorted((self.folder / "jobs" / name).rglob("*")):
                target = folder / path.relative_to(self.folder)
                if path.is_file():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(path, target)
            sync_folder(folder / "jobs" / name)


def _linked(folder: Path, name: str, job: JobState, source: Path) -> dict[str, str]:
    """Link a job's files of another run's checkpoint; their checksums, none where that is gone."""
    try:
        sums = _manifest(source)["sha256"]
        there = _state_in(source)["jobs"][name]
        if (there["step"], there["tokens"]) != (job.step, job.tokens):
            return {}
        own = {file: sums[file] for file in sums if _job_of(file) == name}
        for file in own:
            link_or_copy(source / file, folder / file)
    except (_Damaged, OSError, ValueError, KeyError, TypeError):
        for path in (folder / "jobs" / name).glob("*.safetensors"):
            path.unlink()
        return {}
    return own


def _write(
    folder: Path,
    step: int,
    jobs: Mapping[str, JobState],
    run: Mapping[str, Any],
    earlier: _Earlier,
    elsewhere: Mapping[str, Path],
) -> None:
    """Fill and fsync a checkpoint folder, the manifest last."""
    sums, links = dict(earlier.sums), set(earlier.counters)
    (folder / "jobs").mkdir()
    earlier.link(folder)
    with _Files(folder, sums) as files:
        for name, job in jobs.items():
            (folder / "jobs" / name).mkdir()
            _accompany(folder / "jobs" / name, job.companions)
            source = elsewhere.get(name)
            if source is not None and (own := _linked(folder, name, job, source)):
                sums |= own
                links |= {name} if source.parent == folder.parent else set()
                continue
            files.put(f"jobs/{name}/adapter_model.safetensors", tensor_bytes(job.adapter))
            files.put(f"jobs/{name}/optimizer.safetensors", tensor_bytes(job.optimizer))
            if job.best:
                files.put(f"jobs/{name}/{BEST}", tensor_bytes(job.best))
        counters = {name: _counters(job) for name, job in jobs.items()}
        state = {"step": step, "jobs": {**earlier.counters, **counters}, "run": dict(run)}
        files.put("state.json", _json(state))
    for name in jobs:
        sync_folder(folder / "jobs" / name)
    manifest: dict[str, Any] = {**stamp(FORMAT), "sha256": sums}
    if links:
        manifest["links"] = sorted(links)
    write_synced(folder / "manifest.json", _json(manifest))
    sync_folder(folder / "jobs")
    sync_folder(folder)


class _Files:
    """Writes files and adds up their checksums, some at a time."""

    def __init__(self, folder: Path, sums: dict[str, str]) -> None:
        self.folder, self.sums = folder, sums
        self._files: deque[tuple[str, list[Future[bytes]], Future[None]]] = deque()

    def __enter__(self) -> _Files:
        return self

    def put(self, name: str, data: bytes | memoryview) -> None:
        """One more; raises OSError, of a file before it. The rest are heard of at the end."""
        if len(self._files) == WRITTEN:
            self._settle()
        written = _pool().submit(write_synced, self.folder / name, data)
        view = memoryview(data)
        # An empty file has one piece, too.
        starts = range(0, max(1, len(view)), PIECE)
        pieces = [_pool().submit(_sum, view[at : at + PIECE]) for at in starts]
        self._files.append((name, pieces, written))

    def _settle(self) -> None:
        name, pieces, written = self._files.popleft()
        self.sums[name] = _checksum([piece.result() for piece in pieces])
        written.result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while kind is None and self._files:
                self._settle()
        finally:
            wait([written for _, _, written in self._files])


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: starting one takes milliseconds where another thread computes."""
    return ThreadPoolExecutor(THREADS, "checkpoint")


os.register_at_fork(after_in_child=_pool.cache_clear)


def _sum(piece: bytes | memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _checksum(sums: Sequence[bytes]) -> str:
    """Of a file, by the sums of its pieces."""
    return sums[0].hex() if len(sums) == 1 else PIECES + _sum(b"".join(sums)).hex()


def _accompany(folder: Path, companions: Companions) -> None:
    """Put files beside an adapter; the manifest does not list them."""
    for name, content in companions.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            link_or_copy(content, path)


def _counters(job: JobState) -> dict[str, Any]:
    """All but the tensors, as JSON takes it."""
    names = [each.name for each in fields(job) if each.name not in FILES]
    values = {name: getattr(job, name) for name in names}
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


class _Counters(BaseModel):
    """What `state.json` says of a job."""

    model_config = ConfigDict(extra="forbid")

    step: NonNegativeInt = 0
    micro_step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    cursor: dict[str, Any] = Field(default={})
    status: Literal["running", "done", "failed"] = "running"
    reason: str = ""
    optimizer_values: dict[str, Any] = Field(default={})
    evaluation: dict[str, Any] = Field(default={})


def _read(folder: Path, only: frozenset[str] | None) -> Checkpoint:
    """Read a checkpoint; raises _Damaged with the reason when it is not whole."""
    files = _checked_files(folder, only)
    try:
        state = json.loads(bytes(files["state.json"]))
        jobs = {
            name: JobState(
                adapter=file_tensors(files[f"jobs/{name}/adapter_model.safetensors"]),
                optimizer=file_tensors(files[f"jobs/{name}/optimizer.safetensors"]),
                best=_loaded(files.get(f"jobs/{name}/{BEST}")),
                **_Counters.model_validate(counters).model_dump(),
            )
            for name, counters in state["jobs"].items()
            if only is None or name in only
        }
        return Checkpoint(folder, int(state["step"]), jobs, dict(state["run"]))
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError,
        safetensors.SafetensorError,
    ) as error:  # fmt: skip
        raise _Damaged(f"unreadable content ({error})") from error


def _loaded(content: memoryview | None) -> dict[str, Tensor]:
    return {} if content is None else file_tensors(content)


def _job_of(file: str) -> str:
    """The job that a file of a checkpoint belongs to; "" where it is of all."""
    first, _, rest = file.partition("/")
    return rest.partition("/")[0] if first == "jobs" else ""


def _manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; raises _Damaged, NewerFormat."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        written_in = int(manifest["format"])
        if not all(isinstance(total, str) for total in manifest["sha256"].values()):
            raise TypeError("a checksum is no text")
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise _Damaged(f"its manifest cannot be read ({error})") from error
    version = str(manifest.get("version", ""))
    require_known("the checkpoint", folder, written_in, known=FORMAT, version=version)
    if written_in < 1:
        raise _Damaged(f"its manifest says format {written_in}, which no checkpoint has")
    return manifest


def _checked_files(folder: Path, only: frozenset[str] | None) -> dict[str, memoryview]:
    """The content of the manifest's files, of some jobs or of all, each proved by its checksum."""
    sums = _manifest(folder)["sha256"]
    wanted = []
    for name in sums:
        if not _FILE.fullmatch(name):
            raise _Damaged(f"its manifest lists {name!r}, which no checkpoint has")
        job = _job_of(name)
        if only is None or not job or job in only:
            wanted.append(name)
    return _proved(folder, {name: sums[name] for name in wanted})


def _state_in(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its run and its jobs."""
    content = bytes(_checked_files(folder, frozenset())["state.json"])
    return dict(json.loads(content))


def _proved(folder: Path, sums: Mapping[str, str]) -> dict[str, memoryview]:
    """The content of files; raises _Damaged where one has another checksum."""
    contents: dict[str, memoryview] = {}
    found: dict[str, list[Future[bytes]]] = {}
    for name, expected in sums.items():
        try:
            size = (folder / name).stat().st_size
            # A bytearray would be filled with zeros first.
            contents[name] = content = torch.empty(size, dtype=torch.uint8).numpy().data
        except (OSError, RuntimeError, MemoryError) as error:
            raise _Damaged(f"{name} cannot be read ({error})") from error
        each = PIECE if expected.startswith(PIECES) else max(1, size)
        found[name] = [
            _pool().submit(_read_piece, folder / name, content[at : at + each], at)
            for at in range(0, max(1, size), each)
        ]
    try:
        for name, pieces in found.items():
            try:
                total = _checksum([piece.result() for piece in pieces])
            except OSError as error:
                raise _Damaged(f"{name} cannot be read ({error})") from error
            if total != sums[name]:
                raise _Damaged(f"{name} does not match its checksum")
    finally:
        for piece in [piece for pieces in found.values() for piece in pieces]:
            piece.cancel()
    return contents


def _read_piece(path: Path, into: memoryview, at: int) -> bytes:
    """Fill a piece from its place in a file, and hash it."""
    fill(path, into, at)
    return _sum(into)


# Jobs that a run takes over from earlier ones, and hands on to later ones.


@dataclass(frozen=True, slots=True)
class ResumeSources:
    """Sources that make a run one piece of a longer one.

    jobs           folder of the jobs' own folders, which outlive the run; checkpoints are the run's
    sources        by job, the output folder of the run whose newest checkpoint it goes on from; a
                   job that is missing here starts anew
    save_seconds   a checkpoint is due so long after the last one, whatever `save_steps` says
    """

    jobs: Path
    sources: Mapping[str, Path] = field(default_factory=dict)
    save_seconds: float = float("inf")

    def checkpoints(self) -> dict[str, Checkpoint]:
        """Checkpoint that each job goes on from, by job.

        raises    CheckpointError where one cannot be read back whole
        """
        wanted: dict[Path, list[str]] = {}
        for name, folder in self.sources.items():
            wanted.setdefault(folder, []).append(name)
        checkpoints: dict[str, Checkpoint] = {}
        for folder, names in wanted.items():
            checkpoint = CheckpointStore(folder).load(frozenset(names))
            missing = [n for n in names if checkpoint is None or n not in checkpoint.jobs]
            if checkpoint is None or missing:
                raise CheckpointError(
                    "a job's committed state is gone",
                    job=", ".join(missing),
                    folder=folder,
                    help="restore it from a backup; without it the job would start anew",
                )
            checkpoints |= dict.fromkeys(names, checkpoint)
        return checkpoints


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, made by as few launches as possible."""
    if not tensors:
        return {}
    copies = torch._foreach_mul(list(tensors.values()), 1)
    return dict(zip(tensors, copies, strict=True))
