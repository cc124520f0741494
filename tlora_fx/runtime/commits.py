"""Checkpoints that are written beside training.

Between two rounds all that a checkpoint holds is copied to main memory, and a thread makes files of
it while the next rounds run. It is told of on the trainer's own thread, between two rounds, once
the disk holds it. One is written at a time: the next one waits for it, and so does whatever else is
told of jobs that come, go or end. So the order is that of a run that waits for each checkpoint.

Collectives that put states together come before: the thread writes files, on the leader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_fx.errors import CheckpointError, MetricsError
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.checkpoints.store import CheckpointStore, JobState
from tlora_fx.runtime.elastic import Roster
from tlora_fx.runtime.job_run import JobRun
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
    ) -> None:
        """Begin to write a checkpoint, as `CheckpointStore.save` does; no other may be in progress.

        states    that nothing changes any more
        elsewhere see `CheckpointStore.save`
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
        self._hear_of_tidying()
        written_to = self._thread.submit(
            self._write, logs, step, states, described, unchanged, elsewhere
        )
        # Files of gigabytes are some time in going: who waits for the checkpoint need not wait.
        self._tidied.append(self._thread.submit(self.store.tidy))
        self._commit = _Commit(
            written_to,
            [run for run in written if run.job.name in inside],
            written,
            [run.metrics for run in runs if run.left],
            self.roster.ended(),
        )

    def _write(
        self,
        logs: Sequence[MetricsLog],
        step: int,
        states: Mapping[str, JobState],
        described: Mapping[str, Any],
        unchanged: Collection[str],
        elsewhere: Mapping[str, Path],
    ) -> Path:
        for log in logs:
            log.sync()
        return self.store.save(step, states, described, unchanged=unchanged, elsewhere=elsewhere)

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
