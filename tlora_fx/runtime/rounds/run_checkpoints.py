"""Checkpoints of a run: the one that it goes on from, and those that it leaves.

Checkpoints are written beside training. Between two rounds all that a checkpoint holds is copied to
main memory, and a thread makes files of it while the next rounds run. It is told of on the
trainer's own thread, between two rounds, once the disk holds it. One is written at a time: the next
one waits for it, and so does whatever else is told of jobs that come, go or end. So the order is
that of a run that waits for each checkpoint.

Collectives that put states together come before: the thread writes files, on the leader.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlora_fx.config.job import Job
from tlora_fx.errors import CheckpointError, MetricsError
from tlora_fx.host.storage import until_there_is_room
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.checkpoints.store import Checkpoint, CheckpointStore, JobState, ResumeSources
from tlora_fx.runtime.clocks import JobClocks, clocks_in, kept_clocks
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.identity import describe_jobs, describe_run, require_same_run
from tlora_fx.runtime.job_run import JobRun, status_after
from tlora_fx.runtime.reports.job_reports import JobReports
from tlora_fx.runtime.rounds.elastic import Roster
from tlora_fx.runtime.run_folder import MetricsLog, RunFolder


@dataclass(frozen=True, slots=True)
class _Commit:
    """A checkpoint that is being written.

    path      its folder, once the disk holds it
    inside    jobs in it that were in the model, as they stood
    written   all jobs that it holds anew, as they stood
    left      metrics that nobody writes any more
    ended     jobs whose last state it holds
    """

    path: Future[Path]
    inside: Sequence[JobRun]
    written: Sequence[JobRun]
    left: Sequence[MetricsLog]
    ended: Sequence[str]


class Commits:
    """The checkpoints of a trainer, on the leader.

    roster    whose jobs they hold
    callback  hears of each
    saved     folder of the newest that was told
    missed    jobs of checkpoints that could not be written: the next one holds them anew
    """

    def __init__(
        self,
        store: CheckpointStore,
        folder: RunFolder,
        roster: Roster,
        callback: TrainerCallback,
    ) -> None:
        self.store, self.folder, self.roster = store, folder, roster
        self.callback = callback
        self.saved: Path | None = None
        self.missed: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "commits")
        self._commit: _Commit | None = None
        self._tidied: list[Future[None]] = []

    def begin(
        self,
        step: int,
        states: Mapping[str, JobState],
        described: Mapping[str, Any],
        unchanged: Collection[str],
        elsewhere: Mapping[str, Path],
        *,
        last: bool = False,
    ) -> None:
        """Begin to write a checkpoint, as `CheckpointStore.save` does; no other may be under way.

        states    that nothing changes any more
        elsewhere see `CheckpointStore.save`
        last      it may wait for a full disk, as `storage` says; others are left out then
        raises    RunFolderError where the folder is gone
        """
        assert self._commit is None, "two checkpoints at once"
        self.folder.require_there()
        inside = {run.job.name for run in self.roster.inside()}
        runs = self.roster.runs
        written = [
            run.snapshot(states.get(run.job.name)) for run in runs if run.job.name not in unchanged
        ]
        logs = [run.metrics for run in runs]

        def write() -> Path:
            for log in logs:
                log.sync()
            return self.store.save(
                step, states, described, unchanged=unchanged, elsewhere=elsewhere
            )

        self._hear_of_tidying()
        path = self._thread.submit(lambda: until_there_is_room(write) if last else write())
        # Files of gigabytes are some time in going: who waits for the checkpoint need not wait.
        self._tidied.append(self._thread.submit(self.store.tidy))
        self._commit = _Commit(
            path,
            [run for run in written if run.job.name in inside],
            written,
            [run.metrics for run in runs if run.left],
            self.roster.ended(),
        )

    @property
    def writes(self) -> bool:
        """Whether a checkpoint is being written, or was and is not told of."""
        return self._commit is not None

    def look(self) -> None:
        """Tell of the checkpoint that is being written, if the disk holds it by now."""
        if self._commit is not None and self._commit.path.done():
            self.settle()

    def settle(self, *, last: bool = False) -> None:
        """Wait for the checkpoint that is being written, where one is, and tell of it.

        A full disk costs this checkpoint alone, and a warning, unless it is the last one.

        raises    CheckpointError, MetricsError of the last one; RunFolderError
        """
        commit = self._commit
        if commit is None:
            return
        if not (last or commit.path.done()):
            self.callback.saving()
        wait([commit.path])
        self._commit = None
        names = {run.job.name for run in commit.written}
        self.missed |= names
        try:
            path = commit.path.result()
        except (CheckpointError, MetricsError) as error:
            if last:
                raise
            self.callback.warned(str(error))
            return
        self.folder.require_there()
        self.saved = path
        self.missed -= names
        for log in commit.left:
            log.close()
        self.roster.saved(commit.ended)
        for run in commit.inside:
            run.write_status()
        self.callback.saved(path, commit.written)

    def close(self, error: BaseException | None) -> None:
        """Wait for the checkpoint that is being written, and tell of it; no other one follows.

        error    what ends the run, and is to be heard of rather than what goes wrong here
        raises   as `settle`
        """
        try:
            self.settle()
        except Exception as other:
            if error is None:
                raise
            self.callback.warned(str(other))
        finally:
            self._thread.shutdown()
            self._hear_of_tidying()

    def _hear_of_tidying(self) -> None:
        """Tell why older checkpoints stay, where they do; nobody waits for those that still go."""
        ended = [tidied for tidied in self._tidied if tidied.done()]
        self._tidied = [tidied for tidied in self._tidied if tidied not in ended]
        for error in filter(None, (tidied.exception() for tidied in ended)):
            self.callback.warned(f"older checkpoints stay: {error}")


class RunCheckpoints:
    """Finds, restores and writes the checkpoints of a run.

    resume        go on from the newest one in the run's folder
    carried       the run is a piece of a longer one: where its jobs come from
    accept        go on although data, base or jobs are not what a checkpoint was made with
    whole_base    compare every byte of the base's weights, not some blocks of each tensor

    store         of the run's folder
    commits       those that are being written
    described     the run, as its checkpoints say it
    save_seconds  that the last one kept training waiting
    """

    def __init__(
        self,
        roster: Roster,
        folder: RunFolder,
        reports: JobReports,
        ranks: Ranks,
        *,
        resume: bool,
        carried: ResumeSources | None,
        accept: bool,
        whole_base: bool,
    ) -> None:
        self.roster, self.folder, self.reports, self.ranks = roster, folder, reports, ranks
        self.resume, self.carried = resume, carried
        self.accept, self.whole_base = accept, whole_base
        self.store = CheckpointStore(folder.path)
        self.commits = Commits(self.store, folder, roster, self.callback)
        self.described: dict[str, Any] = {}
        self.save_seconds = 0.0
        self._checkpoint: Checkpoint | None = None
        self._sources: dict[str, Checkpoint] = {}
        self._saved_at = time.monotonic()

    @property
    def callback(self) -> TrainerCallback:
        """Hears of them."""
        return self.reports.callback

    # Before training.

    def find(self, jobs: Sequence[Job], data: Mapping[str, JobData]) -> None:
        """Read what the jobs go on from, on the leader, before any weight is loaded.

        raises    ResumeMismatch, RunFolderError, CheckpointError, BaseNotLoadable
        """
        self.describe(jobs, data)
        changes: list[str] = []
        if self.resume:
            self._checkpoint = self.store.load()
            if self._checkpoint is None:
                self.folder.require_own([job.name for job in jobs])
            else:
                changes = require_same_run(
                    self._checkpoint, self.described, jobs, accept=self.accept
                )
        if self.carried is not None:
            self._sources = self.carried.checkpoints()
        for name, checkpoint in self._sources.items():
            changes += require_same_run(
                checkpoint, self.described, jobs, accept=self.accept, only=name
            )
        for change in dict.fromkeys(changes):
            self.callback.noted(f"changed since the checkpoint: {change}")

    def clocks(self) -> JobClocks:
        """The time of each job, the same on all processes."""
        kept = clocks_in(self.folder.path) if self.resume else {}
        if self.carried is not None:
            kept = kept_clocks(self.carried.sources)
        return self.ranks.from_leader(JobClocks(kept=kept))

    def describe(self, jobs: Sequence[Job], data: Mapping[str, JobData]) -> None:
        """Note what the run is, so that only the same run goes on from its checkpoints."""
        self.described = describe_run(self.roster.model, jobs, data, whole=self.whole_base)

    def describe_again(self, jobs: Sequence[Job], data: Mapping[str, JobData]) -> None:
        """Describe a base of the Hub whose files were not on this machine before it was loaded."""
        of_hub = self.roster.model.backbone.spec.model is not None
        if self.described and of_hub and not self.described["base"]["tensors"]:
            self.describe(jobs, data)

    def describe_joined(self, run: JobRun) -> None:
        """Note one more job."""
        more = describe_jobs([run.job], {run.job.name: run.data})
        for kind, entries in more.items():
            self.described[kind] = {**self.described.get(kind, {}), **entries}

    def known(self) -> set[str]:
        """The jobs that have a state to go on from."""
        return {*(self._checkpoint.jobs if self._checkpoint else ()), *self._sources}

    @property
    def rounds(self) -> int:
        """Rounds that were done before, on the leader."""
        return 0 if self._checkpoint is None else int(self._checkpoint.run["rounds"])

    def ended_runs(self, jobs: Sequence[Job], data: Mapping[str, JobData]) -> list[JobRun]:
        """The jobs as the checkpoint has them, if nothing is left to train; else none."""
        states = self._checkpoint.jobs if self._checkpoint is not None else {}
        ended = bool(states) and all(
            status_after(states[job.name], job, data[job.name]) != "running" for job in jobs
        )
        if not self.ranks.from_leader(ended):
            return []
        checkpoint = self.ranks.from_leader(self._checkpoint)
        assert checkpoint is not None
        runs = []
        for index, job in enumerate(jobs):
            state = checkpoint.jobs[job.name]
            backbone = self.reports.model.backbone
            run = JobRun(index, job, data[job.name], {}, {}, self.folder, backbone)
            run.recount(state)
            run.write(run.best or state.adapter, self.reports.base_name())
            runs.append(run)
        self.callback.noted(f"every job had ended by {checkpoint.path}: there is nothing to train")
        return runs

    def restore(self) -> int:
        """Restore all jobs where they were; returns the rounds that were done."""
        if self.carried is not None:
            states = {name: each.jobs[name] for name, each in self._sources.items()}
            sources = {name: str(each.path) for name, each in self._sources.items()}
            self._take_over(self.ranks.from_leader(states), sources)
        if not self.resume:
            return 0
        checkpoint = self.ranks.from_leader(self._checkpoint)
        if checkpoint is None:
            self.callback.warned("there is no checkpoint yet: every job starts anew")
            self._take_over({}, {})
            return 0
        self._take_over(checkpoint.jobs, dict.fromkeys(checkpoint.jobs, str(checkpoint.path)))
        runs = self.roster.runs
        steps = ", ".join(f"{run.job.name} {run.step} of {run.data.steps}" for run in runs)
        self.callback.noted(f"going on from {checkpoint.path}; steps done: {steps}")
        return int(checkpoint.run["rounds"])

    def _take_over(self, states: Mapping[str, JobState], sources: Mapping[str, str]) -> None:
        """Let jobs go on from their states; one without a state starts anew."""
        gathering = self.roster.gathering
        for run in self.roster.runs:
            name = run.job.name
            if name in states:
                source = sources.get(name, "the leader's checkpoint")
                run.restore(gathering.own(name, states[name]), source)
            else:
                run.metrics.truncate_after(0)
            if run.status != "running":
                self.reports.write(run, gathering.whole_adapter(name, run.final_adapter()))

    # While training.

    def is_due(self) -> bool:
        """Whether the last one is too long ago for a piece of a longer run."""
        longest = float("inf") if self.carried is None else self.carried.save_seconds
        return time.monotonic() - self._saved_at >= longest

    def start_clock(self) -> None:
        """Count from now until one is due."""
        self._saved_at = time.monotonic()

    def make_due(self) -> None:
        """Make a checkpoint due before the next round."""
        self._saved_at = float("-inf")

    def save(self, rounds: int, *, last: bool, only: Container[str] | None = None) -> None:
        """Write a checkpoint, the last one now and others beside training (see `Commits`).

        rounds    done so far
        only      jobs that are written; others stay as they were, where they were written before
        raises    RunFolderError where the folder is gone; CheckpointError, MetricsError at the end
                  of a run
        """
        begun = time.perf_counter()
        self.commits.settle()
        self.callback.saving()
        inside, left = self.roster.inside(), list(self.roster.states())
        unchanged: frozenset[str] = frozenset()
        origins: dict[str, tuple[Path, JobState]] = {}
        if only is not None:
            names = [*left, *(run.job.name for run in inside)]
            unchanged = self.ranks.from_leader(
                frozenset(name for name in names if name not in only)
                & self.store.holds() - self.commits.missed
            )
            inside = [run for run in inside if run.job.name not in unchanged]
            left = [name for name in left if name not in unchanged]
            # One that came from a checkpoint is held as it came, though it has made a step since.
            origins = {
                run.job.name: run.origin
                for run in inside
                if run.origin is not None and run.status == run.origin[1].status == "running"
            }
        else:
            self.start_clock()
        states = {
            run.job.name: self.roster.gathering.whole(run.job.name, run.state())
            for run in inside
            if run.job.name not in origins
        }
        for run in inside:
            run.origin = None
        if not self.ranks.mesh.leader:
            return
        states = {name: state.snapshot() for name, state in states.items()}
        states |= {name: state for name, (_, state) in origins.items()}
        for run in inside:
            companions = run.companions(self.reports.base_name())
            states[run.job.name] = replace(states[run.job.name], companions=companions)
        states |= self.roster.in_main_memory(left)
        described = {"rounds": rounds, **self.described}
        elsewhere = {name: path for name, (path, _) in origins.items()}
        self.commits.begin(rounds, states, described, unchanged, elsewhere, last=last)
        if last:
            self.commits.settle(last=True)
        self.save_seconds = time.perf_counter() - begun
