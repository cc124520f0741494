"""`tlora-fx run` behind its command line: a folder of job files, the loop, and this machine.

Killed at any point and started again over the same folder, a run goes on: what was submitted is in
the ledger, what was trained is in checkpoints, and the groups are formed anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from tlora_fx.config.job import Job
from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.demand import Demand
from tlora_fx.errors import RunRefused, StateFileError, TloraError
from tlora_fx.scheduler.estimating import Estimator
from tlora_fx.scheduler.formations import LayoutOf
from tlora_fx.scheduler.ledger_rows import JobRecord
from tlora_fx.scheduler.local.executor import LocalExecutor, LocalOptions, cpu_threads
from tlora_fx.scheduler.local.processes import WORKER, ForkServer
from tlora_fx.scheduler.local.recovery import RESERVED, held, recover, sources
from tlora_fx.scheduler.loop import Loop
from tlora_fx.scheduler.loop_watch import Watch
from tlora_fx.scheduler.moment_file import Moment, save_moment
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.running_files import Found, JobFolder, demand_folder
from tlora_fx.scheduler.state import Decision, Policy, State
from tlora_fx.scheduler.store import Ledger

LOOK_SECONDS = 1.0


class Listening(Watch, Protocol):
    """What hears of a run: of its loop, and of its folder."""

    def went_on(self, jobs: int, done: int) -> None:
        """The run goes on with what an earlier process began."""

    def took(self, found: Found) -> None:
        """A job file was read, or is bad."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is run.

    horizon           seconds between decisions
    switch_seconds    that forming a group is expected to cost, until some were formed: then it is
                      the median of what they took
    runnable          most jobs that the policy sees at once
    linger            seconds that the folder stays without a new file before a run without work
                      ends; None: never
    learns            whether it learns what forming a group costs
    layout_of         how a group is spread over its GPUs; None: over all of them, by rows
    worker            module of the workers
    """

    horizon: float = 60.0
    switch_seconds: float = 10.0
    runnable: int = 128
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
    listen: Listening,
    options: RunOptions,
) -> Iterator[Running]:
    """Begin a run, or go on with it; at the end every group is drained.

    jobs      folder of job files, or one file
    output    folder of the run
    raises    RunFolderError, WorkerLost, LedgerError, JobFolderError
    """
    demand_folder(jobs)
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
            started=started, commits=ledger.tell,
        )  # fmt: skip
        try:
            loop = Loop(
                Recorded(policy, output / "state.json"),
                estimator,
                executor,
                ledger,
                horizon=options.horizon,
                switch_seconds=options.switch_seconds,
                runnable=options.runnable,
                watch=listen,
                layout_of=options.layout_of,
            )
            files = JobFolder(jobs, ledger, specs)
            running = Running(files, loop, executor, ledger, prepare, listen, options, specs)
            running.go_on(records)
            yield running
        finally:
            executor.close()
            ledger.close()


@dataclass(slots=True)
class Running:
    """A run that is open; `turn` it until it is over."""

    files: JobFolder
    loop: Loop
    executor: LocalExecutor
    ledger: Ledger
    prepare: Preparing
    listen: Listening
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
            self.listen.went_on(len(records), len(records) - len(left))
        for record in left:
            self.prepare.learn(Job.model_validate(record.spec))
            self.loop.submit(record.request, steps_done=record.steps, credit=record.credit)

    def turn(self) -> bool:
        """Look for jobs, hear of groups, decide what is due; False when the run is over."""
        now = self.executor.now()
        if not self.stopping and time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            for found in self.files.look():
                self._take(found)
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
        """Learn what forming a group costs."""
        for epoch, run in self.loop.runs.items() if self.options.learns else ():
            if run.started is not None and epoch not in self._switches:
                self._switches[epoch] = run.started - run.time
                self.loop.switch_seconds = median(self._switches.values())

    def stop(self) -> None:
        """Have every group drained from the next turn on; `turn` until that is done.

        A signal handler may call this.
        """
        self.stopping = True

    def _take(self, found: Found) -> None:
        """Submit a file's jobs; the file is settled when all of them are in the ledger."""
        self.listen.took(found)
        for job in found.jobs:
            self.submit(job)
        self.files.settle(found)

    def submit(self, job: Job) -> None:
        """Submit a job, or say why it will never run."""
        now = self.executor.now()
        spec = job.model_dump(mode="json")
        self.specs[job.name] = spec
        try:
            _demand_name(job)
            request = self.prepare.request(job, now)
        except TloraError as error:
            request = JobRequest(job.name, "", Demand(), 0, 0, submitted=now)
            self.ledger.refuse(request, str(error), spec)
            self.listen.refused(now, request, str(error))
            return
        # First the ledger, with all that a worker needs: the loop knows the request alone.
        self.ledger.submit(request, spec)
        self.loop.submit(request)


class Recorded:
    """A policy whose every state is written into a file before it decides."""

    def __init__(self, policy: Policy, path: Path) -> None:
        self.policy, self.path, self.name = policy, path, policy.name

    def decide(self, state: State, *, explain: bool = False) -> Decision:
        """What the policy decides."""
        # Estimators of other people need no file form.
        with suppress(StateFileError):
            save_moment(self.path, Moment(state, self.policy))
        return self.policy.decide(state, explain=explain)


def _demand_name(job: Job) -> None:
    if job.name in RESERVED:
        raise RunRefused(
            f"a job cannot be called '{job.name}' here",
            job=job.name,
            help="rename the job: the run keeps its own files under that name",
        )
