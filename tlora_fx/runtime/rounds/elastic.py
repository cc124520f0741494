"""Membership of a run: jobs that join, leave and pause while others train on.

A change is asked for at any time and happens between two rounds, on all processes at the same one.
What a job needs to go on leaves the model with it, and comes back with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tlora_fx.config.job import Job
from tlora_fx.errors import JobsDiffer, NotAdmitted
from tlora_fx.host import memory
from tlora_fx.model.elastic import ALONE, Admission
from tlora_fx.parallel.apply import require_whole_pairs
from tlora_fx.parallel.capturing import free_gpu_bytes
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.runtime.adapters.files import start_adapter
from tlora_fx.runtime.adapters.starts import needs_data
from tlora_fx.runtime.checkpoints.store import Checkpoint, JobState, ResumeSources
from tlora_fx.runtime.checks import check_fits, check_own_loss, load_all_data, try_functions
from tlora_fx.runtime.data.batching import MicroBatches
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.data_starts import data_start, require_data_starts
from tlora_fx.runtime.distributed import require_elementwise
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.identity import describe_jobs, describe_run, require_same_run
from tlora_fx.runtime.job_run import JobRun
from tlora_fx.runtime.optim.trainable import require_trainable
from tlora_fx.runtime.run_folder import RunFolder

Leaving = Literal["release", "pause"]


@dataclass(frozen=True, slots=True)
class PendingJoin:
    """A job that waits to join.

    state    what it goes on from, None where it starts anew
    source   where that was read
    path     the checkpoint that holds it, where one does
    start    what its data decides of its start, where that is known
    needed   bytes that it will take, rows and larger banks not counted
    growth   bytes that larger banks take, where those that are have no free rows
    """

    job: Job
    data: JobData
    state: JobState | None = None
    source: str = ""
    path: Path | None = None
    start: Mapping[str, Tensor] | None = None
    needed: int = 0
    growth: int = 0


@dataclass(slots=True)
class Changes:
    """Changes that happen before the next round.

    pending_joins  jobs in the order in which they join; one without a free slot waits, and so do
                   those behind it
    leaving        by job, whether it ends where it is or goes on some other time
    """

    pending_joins: deque[PendingJoin] = field(default_factory=deque)
    leaving: dict[str, Leaving] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pending_joins) + len(self.leaving)


class Roster:
    """The jobs of a trainer: in the model, waiting to join, and gone.

    runs      every job that was ever in, in the order in which they came
    changes   asked for, on the leader
    """

    def __init__(self, group: GroupStep, folder: RunFolder) -> None:
        self.group, self.model, self.folder = group, group.model, folder
        self.gathering = group.gathering
        self.runs: list[JobRun] = []
        self.changes = Changes()
        self._inside: dict[int, JobRun] = {}
        self._gone: dict[str, JobState] = {}
        self._blocked = False
        self._most_tokens = 0
        # Tokens of the largest row that was seen, and the bytes that it took.
        self._largest = (0, 0)

    def at(self, index: int) -> JobRun:
        """The job that is in a slot."""
        return self._inside[index]

    def inside(self) -> list[JobRun]:
        """The jobs whose rows are in the model, ended ones among them."""
        return list(self._inside.values())

    def training(self) -> list[JobRun]:
        """The jobs that train, in the order in which they came."""
        return [run for run in self.runs if run.status == "running"]

    def next_batches(self) -> dict[int, MicroBatches]:
        """Batches of the next step of training jobs, by slot; a job that has none has a fault."""
        batches: dict[int, MicroBatches] = {}
        for run in self.training():
            try:
                batches[run.index] = run.batches()
            except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
                run.suspect(error)
        return batches

    def is_due(self) -> bool:
        """Whether a change may happen now: a job without a free slot waits for another's end."""
        training = [run.job.name for run in self.inside() if run.status == "running"]
        self.changes.leaving |= dict.fromkeys(self.folder.take_stops(training), "release")
        ended = any(run.status != "running" for run in self.inside())
        waits = bool(self.changes.pending_joins) and (ended or not self._blocked)
        return waits or bool(self.changes.leaving)

    def add(self, job: Job, data: JobData) -> JobRun:
        """A run for a job that is in the model."""
        index = self.model.members[job.name]
        parameters = self.model.job_parameters(job.name)
        scalings = self.model.job_scalings(job.name)
        run = JobRun(index, job, data, parameters, scalings, self.folder, self.model.backbone)
        self.group.add(run)
        self.runs.append(run)
        self._inside[index] = run
        return run

    def request_join(
        self,
        job: Job,
        data: JobData | None,
        resume: Path | str | Checkpoint | None,
        *,
        mesh: Mesh,
        accept: bool,
        described: Mapping[str, Any],
        may_grow: bool,
    ) -> None:
        """Queue a job to join, where nothing but free memory may keep it out.

        data        its samples; None: they are read
        resume      output folder of the run whose newest checkpoint it goes on from, or that
        accept      go on although its data or settings are not as they were
        described   the run that it joins, as its checkpoints say
        may_grow    banks may double
        raises      NotAdmitted, JobsDiffer, PlanNotRunnable, TloraError, of a start that cannot be
                    made too
        """
        self.model.require_fits(job)
        self._require_new(job)
        data = load_all_data([job])[job.name] if data is None else data
        self._require_learnt(job, data, mesh)
        needed = self.model.bytes_needed(job, may_grow=False)
        # Those who wait will be there first, and may leave no free slot; banks grow once for all.
        others = self.changes.pending_joins
        whole = self.model.bytes_needed(job, may_grow=may_grow, crowded=bool(others))
        growth = whole - needed
        together = needed + sum(other.needed for other in others)
        together += max([growth, *(other.growth for other in others)])
        tokens = [_step_tokens(*each) for each in ((job, data), *((o.job, o.data) for o in others))]
        require_memory(job, together + self._row_bytes(sum(tokens)), mesh.device, len(others))
        state, source, path = self._gone.get(job.name), "this run", None
        if resume is not None:
            checkpoint = resume
            if not isinstance(checkpoint, Checkpoint):
                sources = ResumeSources(self.folder.jobs, {job.name: Path(checkpoint)})
                checkpoint = sources.checkpoints()[job.name]
            samples = {job.name: data}
            now = (
                {**described, **describe_jobs([job], samples)}
                if "base" in described
                else describe_run(self.model, [job], samples)
            )
            require_same_run(checkpoint, now, [job], accept=accept, only=job.name)
            state, source = checkpoint.jobs[job.name], str(checkpoint.path)
            path = checkpoint.path
        # Here a start that fails is its own job's failure, not that of the run.
        wanted = state is None and needs_data(job) and self.model.ready
        start = data_start(self.model, job, data) if wanted else None
        joining = PendingJoin(job, data, state, source, path, start, needed, growth)
        self.changes.pending_joins.append(joining)

    def _require_learnt(self, job: Job, data: JobData, mesh: Mesh) -> None:
        """Refuse a job that cannot learn from its data here, as a start does."""
        samples = {job.name: data}
        backbone, vocabulary = self.model.backbone, self.model.group.vocabulary
        check_fits(backbone, samples, vocabulary)
        try_functions(samples, vocabulary, backbone.dtype, mesh.device)
        check_own_loss(backbone, samples, vocabulary)
        runner = self.group.runner
        cuts = runner is not None and runner.nano_batches > 1
        require_whole_pairs([job], self.group.plan, cuts=cuts)
        require_elementwise([job], mesh)
        require_data_starts(self.model, [job])
        require_trainable(job, data.steps)

    def watch_rows(self, most_tokens: int) -> None:
        """Measure from now on the memory that rows take, each of so many tokens at most."""
        self._most_tokens = most_tokens
        if self.gathering.mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.gathering.mesh.device)

    def note_rows(self) -> None:
        """Learn what the rows of those who are inside took, before that changes."""
        device, tokens = self.gathering.mesh.device, self._tokens()
        if device.type != "cuda" or not tokens or tokens < self._largest[0]:
            return
        taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        # Less than smaller rows took: none of these has run yet.
        if taken > self._largest[1]:
            self._largest = tokens, taken

    def _tokens(self, more: int = 0) -> int:
        """Of the largest row of those who are inside, and so many more; 0 before rows are seen."""
        tokens = sum(_step_tokens(run.job, run.data) for run in self.inside()) + more
        return min(tokens, self._most_tokens)

    def _row_bytes(self, more: int) -> int:
        """What rows take with so many tokens more, by what the largest so far took; on a GPU."""
        self.note_rows()
        tokens, taken = self._largest
        return taken * self._tokens(more) // max(1, tokens)

    def _require_new(self, job: Job) -> None:
        waits = job.name in [joining.job.name for joining in self.changes.pending_joins]
        ended = any(run.job.name == job.name and run.status != "paused" for run in self.runs)
        if waits or ended:
            raise JobsDiffer(
                "two jobs of one run have one name",
                found=f"{job.name}, which {'waits to join' if waits else 'was here before'}",
                help="rename one",
            )

    def request_leave(self, name: str, how: Leaving) -> None:
        """Request that a job in training leaves before the next round.

        raises    NotAdmitted where it does not train
        """
        training = [run.job.name for run in self.inside() if run.status == "running"]
        if name not in training:
            found = ", ".join(training) or "none"
            raise NotAdmitted("no such job trains here", job=name, expected=found)
        self.changes.leaving[name] = how

    def cancel_join(self, names: Iterable[str]) -> None:
        """Remove jobs from those that wait to join."""
        gone = set(names)
        waiting = [
            joining for joining in self.changes.pending_joins if joining.job.name not in gone
        ]
        self.changes.pending_joins = deque(waiting)

    def without_free_slots(self) -> list[str]:
        """Jobs that asked to join and found no free slot."""
        return [joining.job.name for joining in self.changes.pending_joins] if self._blocked else []

    def forget(self, names: Iterable[str]) -> None:
        """Keep no states of jobs that have left, and go on elsewhere."""
        for name in names:
            self._gone.pop(name, None)

    def retire(self) -> list[str]:
        """Take the rows back of jobs that have ended; returns their names."""
        ended = [run for run in self.inside() if run.status != "running"]
        for run in ended:
            self.leave(run)
        return [run.job.name for run in ended]

    def leave(self, run: JobRun) -> None:
        """Release a job's rows; all that it needs to go on is kept."""
        state = self.group.let_go(run)
        if self.folder.writes:
            self._gone[run.job.name] = state
        del self._inside[run.index]
        self._blocked = False

    def join_in_turn(
        self, pending: deque[PendingJoin], *, may_grow: bool, warn: Callable[[str], None]
    ) -> Iterator[tuple[JobRun, Admission]]:
        """Admit jobs, first come, first in; each is taken out of `pending` as it joins.

        One without a free slot waits for the end of a job that trains, and so do those behind it.
        Where none trains it is refused.

        warn    is told of those that are refused
        """
        while pending:
            try:
                joined = self.join(pending[0], may_grow=may_grow)
            except NotAdmitted as error:
                if self.training():
                    return
                warn(str(error))
                pending.popleft()
                continue
            pending.popleft()
            yield joined

    def join(self, joining: PendingJoin, *, may_grow: bool) -> tuple[JobRun, Admission]:
        """Admit a job into the model, as it starts or as it left.

        raises    NotAdmitted where no slot is free now; nothing is changed then
        """
        job, state = joining.job, joining.state
        try:
            admission = self.group.take_in(job, may_grow=may_grow)
        except NotAdmitted:
            self._blocked = True
            raise
        self.runs = [run for run in self.runs if run.job.name != job.name]
        run = self.add(job, joining.data)
        self._gone.pop(job.name, None)
        if state is None:
            start = joining.start
            if start is None and needs_data(job):
                start = data_start(self.model, job, joining.data)
            start_adapter(self.model, job, start)
            run.metrics.truncate_after(0)
        else:
            if job.has_adapter_reference:
                start_adapter(self.model, job)
            run.restore(self.gathering.own(job.name, state), joining.source)
            if joining.path is not None:
                run.origin = joining.path, state.with_own_values()
        return run, admission

    def states(self) -> dict[str, JobState]:
        """Whole states of jobs that have left, by name: all paused ones, the last ended ones.

        The leader alone keeps them.
        """
        return dict(self._gone)

    def in_main_memory(self, names: Iterable[str]) -> dict[str, JobState]:
        """The states of some that have left; from now on they are kept there."""
        moved = {name: self._gone[name].in_main_memory() for name in names}
        self._gone |= moved
        return moved

    def final_adapter(self, run: JobRun) -> Mapping[str, Tensor] | None:
        """The adapter that a job leaves which has left; None of one that pauses before a rung."""
        state = self._gone.get(run.job.name)
        pauses = run.status == "paused" and not run.is_at_rung
        return None if state is None or pauses else state.best or state.adapter

    def ended(self) -> list[str]:
        """Names of jobs that have left because they ended, in the order in which they did."""
        return [name for name, state in self._gone.items() if state.status != "running"]

    def saved(self, ended: Sequence[str]) -> None:
        """A checkpoint holds these states: of jobs that ended long ago no more is kept."""
        self.forget(ended[: -len(self.model.jobs)])


def require_memory(job: Job, needed: int, device: torch.device, others: int = 0) -> None:
    """Refuse a job that would take more memory than there is, before anything is written.

    needed    bytes, those of others who wait to join among them
    others    how many wait
    raises    NotAdmitted
    """
    free = free_bytes(device)
    if needed > free:
        raise NotAdmitted(
            f"there is no memory for job '{job.name}' in the running model",
            expected=f"{needed / 2**20:,.0f} MiB"
            + f", with {others} that wait to join" * (others > 0),
            found=f"{free / 2**20:,.0f} MiB are free on {device}",
            help=f"wait until a job has ended, give it a lower rank, or {ALONE}",
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors can have."""
    return free_gpu_bytes(device) if device.type == "cuda" else memory.free_bytes()


def _step_tokens(job: Job, data: JobData) -> int:
    return job.per_device_train_batch_size * int(max(data.lengths, default=0))
