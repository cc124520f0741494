"""`tlora-fx run` behind its command line: a folder of job files, the loop, and this machine.

Killed at any point and started again over the same folder, a run goes on: what was submitted is in
the ledger, what was trained is in checkpoints, and the groups are formed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from tlora_fx.config.job import Job
from tlora_fx.config.job_file import load_job_file, require_readable
from tlora_fx.cost.estimator import Estimator, Layout, ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import covers, profiles_for, require_profile
from tlora_fx.errors import (
    JobFolderError,
    ProfileMismatch,
    ProfileMissing,
    RunRefused,
    StateFileError,
    TloraError,
    UnknownGpu,
)
from tlora_fx.model.backbone import Backbone, load_backbone
from tlora_fx.runtime.checks import check_fits, load_tokenizer
from tlora_fx.runtime.data import load_job_data
from tlora_fx.scheduler.formations import Callback, LayoutOf
from tlora_fx.scheduler.local.executor import (
    RESERVED,
    LocalExecutor,
    LocalOptions,
    cpu_threads,
    held,
    recover,
    sources,
)
from tlora_fx.scheduler.local.processes import WORKER, ForkServer
from tlora_fx.scheduler.loop import Loop, LoopOptions
from tlora_fx.scheduler.requests import base_of, facts_of_job, request_of, shape_of
from tlora_fx.scheduler.state import Decision, Group, JobRequest, Policy, SchedulerState
from tlora_fx.scheduler.store import JobRecord, Ledger, Snapshot, save_snapshot


def machine(device: str | None, slots: int | None) -> tuple[Cluster, str]:
    """This machine as a cluster of one node, and "cuda" or "cpu".

    device   None: the GPUs where there are some
    slots    GPUs to use, or parts of the CPU; None: all GPUs, or the CPU as a whole
    raises   RunRefused where there are fewer
    """
    import torch

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise RunRefused(
            "groups run on the CPU or on CUDA devices",
            expected="cpu or cuda",
            found=kind,
            help="leave --device out, and say how many GPUs to use with --slots",
        )
    there = torch.cuda.device_count() if kind == "cuda" else len(os.sched_getaffinity(0))
    wanted = slots or (there if kind == "cuda" else 1)
    if wanted > there or not there:
        raise RunRefused(
            f"this machine has {there} {'GPUs' if kind == 'cuda' else 'cores'}",
            expected=f"--slots of at most {there}",
            found=wanted,
        )
    gpu = torch.cuda.get_device_name(0) if kind == "cuda" else "cpu"
    return Cluster(wanted, gpus_per_node=wanted, nodes_per_rack=1, gpu=gpu), kind


@dataclass
class Estimates:
    """An estimator that learns of bases as their jobs come.

    files      profiles that the user names; others are looked for among the known ones
    raises     ProfileFileError; ProfileMismatch for a profile of other hardware, or one that was
               not measured
    """

    cluster: Cluster
    files: Sequence[Path] = ()
    estimator: ProfileEstimator = field(init=False)
    _given: list[Profile] = field(init=False)
    _backbones: dict[str, Backbone] = field(default_factory=dict)
    _unmeasured_for: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._given = [Profile.load(path) for path in self.files]
        for profile in self._given:
            require_profile(profile.name, profile, self.cluster.gpu, allow_estimated=False)
        self.estimator = ProfileEstimator({}, self.cluster)

    def request(self, job: Job, now: float) -> JobRequest:
        """What the loop is told of a job, once all is checked that needs no weights.

        raises   TloraError: its data, its base or its targets are wrong, or nothing was measured
        """
        facts = facts_of_job(job)
        self.learn(job)
        data = load_job_data(job, load_tokenizer(job.base))
        check_fits(self._backbones[base_of(job)], {job.name: data})
        lengths = [len(sample.input_ids) for sample in data.samples]
        return request_of(job, lengths=lengths, submitted=now, facts=facts)

    def learn(self, job: Job) -> None:
        """Find the profile of a job's base.

        raises   ProfileMismatch, BaseUnknown, and what compiling raises
        """
        base = base_of(job)
        if base not in self._backbones:
            shape = shape_of(job)
            try:
                profile = self._profile(base, shape)
            except ProfileMismatch:
                self._unmeasured_for.setdefault(base, job.name)
                raise
            self.estimator.add(base, profile, shape)
            self._backbones[base] = load_backbone(job.base)

    def layout_of(self, group: Group, requests: Sequence[JobRequest]) -> Layout | None:
        """The layout that the estimator expects to be fastest."""
        if len(group.place) == 1:
            return None
        demand = Demand.total(request.demand for request in requests)
        tier = self.cluster.tier(group.place)
        return self.estimator.explain(requests[0].base, demand, len(group.place), tier).layout

    def threads(self) -> list[str]:
        """What profiles of a CPU were measured with another number of cores than a slot has."""
        if self.cluster.gpu != "cpu":
            return []
        cores = max(1, len(os.sched_getaffinity(0)) // self.cluster.gpus)
        return [
            f"{profile.name} was measured on {profile.hardware.processors} cores, a slot has "
            f"{cores}: measure it with OMP_NUM_THREADS={cores}"
            for profile in self._given
            if profile.hardware.processors != cores
        ]

    def _profile(self, base: str, shape: ModelFacts) -> Profile:
        covering = [profile for profile in self._given if covers(profile, shape)]
        try:
            profiles = profiles_for(
                [base],
                self.cluster.gpu,
                shapes={base: shape},
                given={base: covering[0]} if covering else None,
            )
        except (UnknownGpu, ProfileMissing, ProfileMismatch) as error:
            # Nothing can be scaled to hardware without a data sheet, such as a CPU; and what was
            # scaled is no ground to refuse or slow down somebody's job.
            raise self._unmeasured(base, error.facts.get("found")) from None
        return profiles[base]

    def _unmeasured(self, base: str, nearest: str | None) -> ProfileMismatch:
        """The whole mistake for the first job of a base, a line for the others."""
        where = f"on this machine's {self.cluster.gpu}"
        if base in self._unmeasured_for:
            return ProfileMismatch(
                f"base '{base}' was not measured {where}, as told of '{self._unmeasured_for[base]}'"
            )
        others = ", ".join(profile.name for profile in self._given)
        there = f"profiles of other bases: {others}" if others else nearest or "no profile"
        shorter = " --tokens 64,256,1024 --lengths 32" if self.cluster.gpu == "cpu" else ""
        return ProfileMismatch(
            f"base '{base}' was not measured {where}",
            found=there,
            help=f"measure it with `tlora-fx profile JOBS.yaml --eager{shorter}`, then start anew "
            "with --profile FILE",
        )


SUFFIXES = (".yaml", ".yml")
TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class SubmittedFile:
    """A file that was read.

    jobs      those that nobody had submitted before
    mistake   what is wrong with the file, or with jobs of it that are left out
    """

    path: Path
    sha256: str
    jobs: tuple[Job, ...] = ()
    mistake: str = ""


@dataclass(slots=True)
class JobFolder:
    """The job files of a folder, or one file.

    A file counts as written when it is the same at two looks one after the other. One that changes
    later is read again: new jobs are taken, and what is known stays as it was. What was settled of
    a file is remembered in the ledger, so that a run that goes on does it no second time.

    specs   by name, what is known of each job
    """

    path: Path
    ledger: Ledger
    specs: dict[str, Mapping[str, Any]]
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _read: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_folder(self.path)

    def look(self) -> Iterator[SubmittedFile]:
        """What is new since the last look; a file is read when the one before it was dealt with."""
        stamps = {path: _stamp(path) for path in self._files()}
        now = {path: stamp for path, stamp in stamps.items() if stamp is not None}
        before, self._seen = self._seen, now
        for path, stamp in now.items():
            if before.get(path) == stamp != self._read.get(path):
                self._read[path] = stamp
                yield from self._take(path)

    @property
    def waiting(self) -> bool:
        """Whether a file was seen that is not read yet."""
        return any(self._read.get(path) != stamp for path, stamp in self._seen.items())

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        try:
            listed = sorted(self.path.iterdir())
        except OSError:
            return []  # it is gone: what was submitted goes on
        return [p for p in listed if p.suffix in SUFFIXES and not p.name.startswith(".")]

    def _take(self, path: Path) -> list[SubmittedFile]:
        content = ""
        try:
            require_readable(path)
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            known = self.ledger.files().get(str(path.absolute()))
            if known is not None and known[0] == content:
                return []
            jobs = load_job_file(path).jobs
        except Exception as error:  # noqa: BLE001  (a file must not end the run of others)
            return [SubmittedFile(path, content, mistake=_reason(error))]
        fresh = tuple(job for job in jobs if job.name not in self.specs)
        return [SubmittedFile(path, content, fresh, self._differing(path, jobs))]

    def settle(self, file: SubmittedFile) -> None:
        """Remember a file, once all its jobs are in the ledger."""
        self.ledger.note_file(str(file.path.absolute()), file.sha256, file.mistake or TAKEN)

    def _differing(self, path: Path, jobs: tuple[Job, ...]) -> str:
        """What is said of jobs that are known otherwise."""
        others = [
            job.name
            for job in jobs
            if job.name in self.specs and job.model_dump(mode="json") != self.specs[job.name]
        ]
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


def _reason(error: Exception) -> str:
    """What is said of a file or a job that raised: our own error's text, or what Python says."""
    text = str(error) if isinstance(error, TloraError) else f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace").decode()


def require_folder(path: Path) -> None:
    """Refuse a folder that is not there; raises JobFolderError."""
    if not path.exists():
        raise JobFolderError(
            "there is no folder of job files",
            folder=path,
            help="make it, and put job files into it at any time",
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is run.

    loop        its `switch_seconds` hold until some groups were formed: then it is the median of
                what they took
    linger      seconds that the folder stays without a new file before a run without work ends;
                None: never
    layout_of   how a group is spread over its GPUs; None: over all of them, by rows
    """

    loop: LoopOptions = field(default_factory=lambda: LoopOptions(switch_seconds=10.0))
    linger: float | None = 60.0
    learns: bool = True
    layout_of: LayoutOf | None = None
    worker: str = WORKER
    local: LocalOptions = field(default_factory=LocalOptions)


class Preparing(Protocol):
    """What makes requests of jobs; both raise TloraError where a job cannot be trained."""

    def request(self, job: Job, now: float) -> JobRequest:
        """Of a job that comes at a second of the run."""

    def learn(self, job: Job) -> None:
        """Know what is needed of a job whose request was made by an earlier process."""


@contextmanager
def opened(
    jobs: Path,
    output: Path,
    cluster: Cluster,
    policy: Policy,
    estimator: Estimator,
    prepare: Preparing,
    callback: Callback,
    options: RunOptions,
) -> Iterator[SchedulerService]:
    """Begin a run, or go on with it; at the end every group is drained.

    raises    RunFolderError, WorkerLost, LedgerError, JobFolderError
    """
    require_folder(jobs)
    with held(output) as lock:
        ledger = Ledger(output / "ledger.sqlite")
        started = float(ledger.fact("started", repr(time.time())))
        recover(ledger, output, time.time() - started)
        records = ledger.jobs()
        specs = {record.name: record.spec for record in records}
        threads = cpu_threads(cluster.gpus) if options.local.device == "cpu" else {}
        server = ForkServer(
            output / "workers.log", module=options.worker, held=lock, environment=threads
        )
        executor = LocalExecutor(
            output, cluster, specs, server, options=options.local, sources=sources(ledger),
            started=started, commits=ledger.record,
        )  # fmt: skip
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
            files = JobFolder(jobs, ledger, specs)
            running = SchedulerService(
                files, loop, executor, ledger, prepare, callback, options, specs
            )
            running.go_on(records)
            yield running
        finally:
            executor.close()
            ledger.close()


@dataclass(slots=True)
class SchedulerService:
    """A run that is open; `turn` it until it is over."""

    files: JobFolder
    loop: Loop
    executor: LocalExecutor
    ledger: Ledger
    prepare: Preparing
    callback: Callback
    options: RunOptions
    specs: dict[str, Mapping[str, Any]]
    stopping: bool = False
    _looked: float = float("-inf")
    _busy: float = 0.0
    _switches: dict[int, float] = field(default_factory=dict)

    def go_on(self, records: list[JobRecord]) -> None:
        """Submit what an earlier process left."""
        self._busy = self.executor.now()
        left = [record for record in records if record.status in ("queued", "running")]
        if records:
            self.callback.resumed(len(records), len(records) - len(left))
        for record in left:
            try:
                self.prepare.learn(Job.model_validate(record.spec))
            except Exception as error:  # noqa: BLE001  (its base may be back at the next start)
                self.callback.parked(self._busy, record.request, _reason(error))
                continue
            self.loop.submit(record.request, steps_done=record.steps, credit=record.credit)

    def turn(self) -> bool:
        """Look for jobs, hear of groups, decide what is due; False when the run is over."""
        now = self.executor.now()
        if not self.stopping and time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            for file in self.files.look():
                self._take(file)
                self._busy = now
        if self.stopping and not self.loop.stopping:
            self.loop.drain_all(now)
        self.loop.advance(self.executor.now())
        self._measure()
        if self.stopping:
            return not self.loop.quiet
        if not self.loop.idle or self.files.waiting:
            self._busy = now
        return self.options.linger is None or now - self._busy <= self.options.linger

    def _measure(self) -> None:
        for epoch, run in self.loop.runs.items() if self.options.learns else ():
            if run.started is not None and epoch not in self._switches:
                self._switches[epoch] = run.started - run.time
                self.loop.switch_seconds = median(self._switches.values())

    def stop(self) -> None:
        """Have every group drained from the next turn on; a signal handler may call this."""
        self.stopping = True

    def _take(self, file: SubmittedFile) -> None:
        """Submit a file's jobs; the file is settled when all of them are in the ledger."""
        names = [job.name for job in file.jobs]
        self.callback.read_file(file.path.name, names, file.mistake)
        for job in file.jobs:
            self.submit(job)
        self.files.settle(file)

    def submit(self, job: Job) -> None:
        """Submit a job, or say why it will never run."""
        now = self.executor.now()
        spec: Mapping[str, Any] = {}
        try:
            spec = job.model_dump(mode="json")
            json.dumps(spec, ensure_ascii=False).encode()
            self.specs[job.name] = spec
            if job.name in RESERVED:
                raise RunRefused(
                    f"a job cannot be called '{job.name}' here",
                    job=job.name,
                    help="rename the job: the run keeps its own files under that name",
                )
            request = self.prepare.request(job, now)
        except Exception as error:  # noqa: BLE001  (a job must not end the run of others)
            self.specs.setdefault(job.name, {})
            request = JobRequest(job.name, "", Demand(), 0, 0, submitted=now)
            self.ledger.refuse(request, _reason(error), self.specs[job.name])
            self.callback.refused(now, request, _reason(error))
            return
        # First the ledger, with all that a worker needs: the loop knows the request alone.
        self.ledger.submit(request, spec)
        self.loop.submit(request)


class Recorded:
    """A policy whose every state is written into a file before it decides."""

    def __init__(self, policy: Policy, path: Path) -> None:
        self.policy, self.path, self.name = policy, path, policy.name

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        """What the policy decides."""
        # Estimators of other people need no file form.
        with suppress(StateFileError):
            save_snapshot(self.path, Snapshot(state, self.policy))
        return self.policy.decide(state, explain=explain)
