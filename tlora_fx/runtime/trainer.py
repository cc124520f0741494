"""Train all jobs of a Shared Super-Model together, each to its own last step."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tlora_fx.compiler import Jobs, as_jobs
from tlora_fx.config.job import Job
from tlora_fx.cost.load import MAX_ROW_TOKENS
from tlora_fx.cost.plan import Plan
from tlora_fx.host import phases
from tlora_fx.host.phases import StartRecord, phase
from tlora_fx.host.quiet_import import ImportInThread
from tlora_fx.ir.graph import IDLE
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.objectives import Objective
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.numerics.probe import ProbeResult
from tlora_fx.parallel.apply import (
    require_nano,
    require_shardable,
    require_whole_pairs,
)
from tlora_fx.parallel.cuda_graphs import RowGraphs
from tlora_fx.parallel.mesh import FIRST_STEP, limit_waits
from tlora_fx.parallel.prepare import require_fits
from tlora_fx.parallel.stage_graphs import StageGraphs
from tlora_fx.planners.protocol import planner_of
from tlora_fx.runtime.callbacks import EachInTurn, JobCallbacks, TrainerCallback
from tlora_fx.runtime.checkpoints.store import Checkpoint, ResumeSources
from tlora_fx.runtime.checks import (
    check_fits,
    check_own_loss,
    load_all_data,
    probe_base,
    require_same_jobs,
    try_functions,
)
from tlora_fx.runtime.controllers import NanoBatches
from tlora_fx.runtime.data.batching import (
    MicroBatches,
)
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.data_starts import agreed_starts, require_data_starts
from tlora_fx.runtime.distributed import (
    Ranks,
    RoundNotice,
    require_elementwise,
    table_hash,
)
from tlora_fx.runtime.group_step import GroupStep, StepOptions
from tlora_fx.runtime.job_run import JobRun
from tlora_fx.runtime.launching.cpu_threads import on_few_threads
from tlora_fx.runtime.launching.interrupts import Interrupts
from tlora_fx.runtime.launching.torch_modes import in_default_modes
from tlora_fx.runtime.optim.trainable import require_trainable
from tlora_fx.runtime.reports.job_reports import JobReports
from tlora_fx.runtime.reports.trackers import Trackers
from tlora_fx.runtime.round_end import CallbackErrors, RoundEnd
from tlora_fx.runtime.rounds.compilation import Compilation, FolderRecord, example_row
from tlora_fx.runtime.rounds.elastic import Roster
from tlora_fx.runtime.rounds.evaluation import Measurements
from tlora_fx.runtime.rounds.halving import Halving
from tlora_fx.runtime.rounds.row_schedule import RowSchedule
from tlora_fx.runtime.rounds.run_checkpoints import RunCheckpoints
from tlora_fx.runtime.run_folder import RunFolder

GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Options of how rows run.

    max_row_tokens   rows are closed before they grow beyond this
    compiled         layers are compiled by torch.compile
    cuda_graphs      on a GPU small rows run as CUDA graphs where that is possible (see
                     `parallel.cuda_graphs`); never in strict mode
    nano_batches     chooses into how many nano-batches rows are cut, round after round
    longest_wait     after the first round no process waits longer for another
    accept_changes   go on although data, base or jobs are not what the checkpoint was made with
    whole_base       compare every byte of the base's weights, not some blocks of each tensor
    keeps            captured rows stay with an open model, for its next trainer
    wait_for_compile   the first round waits for compiled layers; False: they are compiled in
                     another process while the first rounds run, where that can be (see
                     `runtime.rounds.compilation`)
    """

    max_row_tokens: int = MAX_ROW_TOKENS
    compiled: bool = False
    cuda_graphs: bool = True
    nano_batches: NanoBatches | None = None
    longest_wait: timedelta = FIRST_STEP
    accept_changes: bool = False
    whole_base: bool = False
    keeps: bool = False
    wait_for_compile: bool = True


class Trainer:
    """Trains the jobs of a model.

    model      what `tlora_fx.compile` made
    jobs       the same jobs
    output     folder for adapters, metrics and checkpoints; by default a new one in runs/
    device     by default the GPU where there is one
    resume     go on from the newest checkpoint in `output`; or the run is a piece of a longer one:
               where its jobs come from and write to
    data       samples by job name, instead of what the jobs' `data` names
    plan       how the model runs on a mesh; by default on one device. Where there are several
               processes, each makes a trainer with the same arguments; the leader writes for all
    callback   hears of every step, on the leader
    options    how rows run
    looks      is called now and then while one process waits for its GPU; it may ask for changes
    """

    measurements: Measurements

    def __init__(
        self,
        model: SuperModel,
        jobs: Jobs | None = None,
        *,
        output: Path | str | None = None,
        device: torch.device | str | None = None,
        resume: bool | ResumeSources = False,
        data: Mapping[str, JobData] | None = None,
        plan: Plan | None = None,
        callback: TrainerCallback | None = None,
        options: TrainerOptions = TrainerOptions(),
    ) -> None:
        self.plan = plan or Plan(planner="single")
        self.may_grow = planner_of(self.plan).may_grow(self.plan)
        nano = options.nano_batches
        require_nano(self.plan, nano is not None or self.plan.nano_batches > 1)
        rows = StepOptions(options.max_row_tokens, options.compiled, options.cuda_graphs)
        self.group = GroupStep(model, self.plan, device, rows)
        self.model, self.mesh = self.group.model, self.group.mesh
        self.device = self.mesh.device
        members = [model.jobs[index] for index in model.members.values()]
        self.jobs = members if jobs is None else as_jobs(jobs)
        require_same_jobs(members, self.jobs)
        self.options = options
        self.carried = resume if isinstance(resume, ResumeSources) else None
        job_folders = self.carried.jobs if self.carried else None
        self.folder = RunFolder(output or new_folder(), job_folders, writes=self.mesh.leader)
        self.callback = (self.mesh.leader and callback) or TrainerCallback()
        self.trackers = Trackers(self.folder.jobs.resolve().name, self.callback.warned)
        if self.mesh.leader:
            self.callback = with_jobs_own(self.callback, self.jobs, self.trackers)
        self.ranks = Ranks(self.mesh)
        self.roster = Roster(self.group, self.folder)
        self.schedule = RowSchedule(self.group, nano, self.folder)
        self.halving = Halving(self.folder.path, writes=self.mesh.leader, warn=self.callback.warned)
        self.reports = JobReports(self.model, self.group.gathering, self.callback)
        self.checkpoints = RunCheckpoints(
            self.roster, self.folder, self.reports, self.ranks,
            resume=resume is True, carried=self.carried,
            accept=options.accept_changes, whole_base=options.whole_base,
        )  # fmt: skip
        self.commits = self.checkpoints.commits
        record = FolderRecord(self.folder, resume is True) if self.carried is None else None
        self.compilation = Compilation(
            self.group, record, self.ranks, self.callback,
            waits=options.wait_for_compile or self.carried is not None or nano is not None,
        )  # fmt: skip
        self.rounds = 0
        self.change_seconds = 0.0
        self._peft = ImportInThread("peft")
        self._to_tell: list[JobRun] = []
        self._data = data
        self._limited = False
        self._end = RoundEnd(
            self.group.updater, self.reports.stepped, goes_on=not self.group.gathering.apart,
            meanwhile=self._meanwhile, started=self._started,
        )  # fmt: skip
        self.looks: Callable[[], None] = lambda: None

    @property
    def runs(self) -> list[JobRun]:
        """Every job that was ever in."""
        return self.roster.runs

    @in_default_modes
    @on_few_threads
    def run(self) -> list[JobRun]:
        """Train until every job is done, has failed, or the user interrupts.

        returns   the jobs as they ended; `status` and `reason` tell how
        raises    TloraError before training for what is wrong with data, base or folder;
                  KeyboardInterrupt after a checkpoint when the user stopped the run
        """
        if phases.current() is None:
            phases.begin()
        with ExitStack() as stack:
            stack.callback(phases.end)
            data = self.ranks.together(lambda: self._checked(stack))
            grace = GRACE_SECONDS if self.mesh.size > 1 else None
            interrupts = stack.enter_context(Interrupts(grace))
            stack.callback(self._let_go)
            stack.push(lambda _, error, __: self.commits.close(error))
            if ended := self.checkpoints.ended_runs(self.jobs, data):
                self.runs.extend(ended)
                return self.runs
            self.folder.begin([job.name for job in self.jobs])
            stack.callback(self.compilation.close)
            row = partial(example_row, self.group, data)
            self.compilation.begin(row, self.checkpoints.rounds)
            self.prepare(data)
            self.compilation.restored(self.rounds)
            self.callback.started(self.runs)
            stack.enter_context(phase("first step"))
            stopped = False
            while not stopped and self._goes_on():
                stopped = not self._round(interrupts)
            self._tell_of_changes()
            self._save(last=True)
            for run in self.roster.inside():
                run.load_best()
                if stopped and self.carried is None and run.status == "running":
                    run.write_status("stopped")
        # Who asks while the last step ends has nothing to go on with.
        if (stopped or interrupts.asked) and (self.model.is_open or self.roster.training()):
            raise KeyboardInterrupt(f"stopped after a checkpoint, {self.commits.saved}")
        return self.runs

    def _let_go(self) -> None:
        """Free what graphs hold, which processes may share; give trackers time for the rest."""
        if self.graphs is not None and not (self.options.keeps and self.model.is_open):
            self.graphs.clear()
        for run in self.runs:
            run.metrics.close()
        self.trackers.close()

    def _checked(self, stack: ExitStack) -> Mapping[str, JobData]:
        """The data, after all checks that need no weights; the folder is then held."""
        data = self._data or load_all_data(self.jobs, self.checkpoints.clocks())
        require_runnable(self.group, self.jobs, data, cuts=self.schedule.nano is not None)
        stack.enter_context(self.folder.held(self.checkpoints.resume))
        if self.mesh.leader:
            warn_before_training(self.model, data, self.callback.warned)
            with phase("checkpoint"):
                self.checkpoints.find(self.jobs, data)
        return data

    @property
    def graphs(self) -> RowGraphs | StageGraphs | None:
        """Rows or stages as CUDA graphs, where they may run so; None before training."""
        return self.group.graphs

    def prepare(self, data: Mapping[str, JobData]) -> None:
        """Load the base, start or restore the adapters, and make each job's optimizer."""
        known, tell = self.checkpoints.known(), self.callback.noted
        self.group.prepare(
            probe=lambda base: try_base(self.group, self.ranks, data, base, self.callback.warned),
            starts=lambda: agreed_starts(self.model, self.ranks, data, known, tell),
            largest_row=self.schedule.longest_row(self.jobs, data),
            member=lambda job: self.roster.add(job, data[job.name]),
        )
        self.measurements = Measurements(self.group, self.ranks, self.callback)
        self.measurements.warn(self.jobs)
        with phase("checkpoint"):
            self.rounds = self.checkpoints.restore()
            if any(job.halving is not None for job in self.jobs):
                self.halving.begin(self.ranks.from_leader(self.halving.read()))
        self.checkpoints.describe_again(self.jobs, data)
        self.checkpoints.start_clock()
        self.roster.watch_rows(self.group.row_tokens)
        self.schedule.choose_sizes(self.roster.training(), self.rounds)
        self.schedule.count_rows()  # what an open model ran before is not this trainer's
        self.ranks.together(lambda: self.reports.begin(self.runs))

    def gradients(self, batches: Mapping[int, MicroBatches]) -> dict[int, float]:
        """One forward and backward of all rows of a round; gradients add up in the parameters.

        A row that fails may have added some of its gradients.

        batches   by job index
        returns   each job's mean loss over its targets of the whole optimizer step
        """
        losses = self.group.run_rows(self.group.rows_of(batches), batches).tolist()
        return {index: losses[index] for index in batches}

    # Jobs come and go between rounds.

    def admit(
        self,
        job: Job,
        data: JobData | None = None,
        *,
        resume: Path | str | Checkpoint | None = None,
    ) -> None:
        """Queue a job to join before the next round that has a free slot; first come, first in.

        One that `pause` took out goes on where it was.

        data      its samples, instead of what the job's `data` names
        resume    output folder of a run whose newest checkpoint the job goes on from, or that
                  checkpoint, which takes long to read
        raises    NotAdmitted, TloraError for what is wrong with its targets, data or optimizer;
                  nothing is changed then
        """
        self.roster.request_join(
            job, data, resume,
            mesh=self.mesh, accept=self.options.accept_changes,
            described=self.checkpoints.described, may_grow=self.may_grow,
        )  # fmt: skip

    def release(self, name: str) -> None:
        """End a job before the next round, with the adapter that it has; its rows are free then.

        raises    NotAdmitted where it does not train
        """
        self.roster.request_leave(name, "release")

    def pause(self, name: str) -> None:
        """Pause a job before the next round; `admit` lets it go on, as does a resumed run.

        raises    NotAdmitted where it does not train
        """
        self.roster.request_leave(name, "pause")

    def _goes_on(self) -> bool:
        """Whether a job trains, or one comes."""
        waits = self.model.is_open and bool(self.ranks.from_leader(len(self.roster.changes)))
        return waits or bool(self.roster.training())

    def _change(self) -> None:
        """Let jobs leave and join, on all processes; who finds no free slot waits."""
        begun = time.perf_counter()
        self._catch_up()
        self.group.updater.forget()
        self.roster.note_rows()
        changes = self.ranks.from_leader(self.roster.changes)
        for name, how in changes.leaving.items():
            run = next((run for run in self.roster.training() if run.job.name == name), None)
            if run is None:
                continue  # it ended by itself in the round in which it was asked to leave
            run.stop() if how == "release" else run.pause()
            if self.model.is_open:
                self.roster.leave(run)
                self._to_tell.append(run)
            else:
                self._conclude(run)
                self.checkpoints.make_due()
        changes.leaving.clear()
        if self.model.is_open:
            self.roster.retire()
        joined = self.roster.join_in_turn(
            changes.pending_joins, may_grow=self.may_grow, warn=self.callback.warned
        )
        for run, admission in joined:
            self._joined(run, grown=admission.grown)
        self.roster.changes = changes
        self.roster.watch_rows(self.group.row_tokens)
        self.schedule.choose_sizes(self.roster.training(), self.rounds)
        self.change_seconds = time.perf_counter() - begun

    def _joined(self, run: JobRun, *, grown: bool) -> None:
        """What a run knows of its jobs, with one more."""
        self.jobs = [each.job for each in self.roster.inside()]
        self.checkpoints.describe_joined(run)
        self.schedule.resize(self.jobs, {run.job.name: run.data for run in self.roster.inside()})
        if grown:
            self.callback.noted(self.model.group.notes[-1][1])
        self._to_tell.append(run)

    def _tell_of_changes(self) -> set[str]:
        """Write down who has come and gone, once others do not wait for it; returns who."""
        changed, self._to_tell = self._to_tell, []
        if changed:
            self.commits.settle()
        for run in changed:
            self.reports.change(run, self.roster.final_adapter(run) if run.left else None)
        return {run.job.name for run in changed}

    def _round(self, interrupts: Interrupts) -> bool:
        """Every running job does one optimizer step; False when somebody asked to stop instead."""
        self._peft.require()
        self.commits.look()
        self._end.begin()
        batches = self.roster.next_batches()
        losses_of = {index: self.roster.at(index).objectives(own) for index, own in batches.items()}
        objectives = {index: own for index, own in losses_of.items() if own is not None}
        rows = self.group.rows_of(batches, objectives)
        table = table_hash(rows) if self.mesh.size > 1 else 0
        micros = int(self._end.seconds * 1e6)
        active = self.roster.training()
        fault = next((run.index + 1 for run in active if run.fault), 0)
        waits = self.mesh.size > 1 and self._end.waits(active)
        note = RoundNotice(
            table, int(interrupts.asked), self.schedule.count, micros,
            int(self.checkpoints.is_due()), fault, int(self.roster.is_due()), int(waits),
            self.compilation.state,
        )  # fmt: skip
        agreed = self.ranks.agree(note)
        if agreed.fault or agreed.asked:
            self._catch_up()
        if agreed.fault:
            self._end_faulty(self.roster.at(agreed.fault - 1))
            return True
        if agreed.asked:
            interrupts.settle()
            return False
        if agreed.changes:
            self._change()
            return True
        if self.compilation.is_due(agreed.compilation, self.rounds):
            self._take_over()
            return True
        self.schedule.cut(agreed.choice, agreed.step_micros, rows)
        self.schedule.capture(active, self.rounds, code_changes=self.compilation.is_pending)
        losses, ran = self._run(rows, batches, objectives)
        self.rounds += 1
        self._finish(losses, ran, due=bool(agreed.due), waits=bool(agreed.waits))
        if not self._limited:
            limit_waits(self.mesh, self.options.longest_wait)
            self._limited = True
        return True

    def _take_over(self) -> None:
        """Let compiled layers run the next round, for which no process gives up on another."""
        # Jobs may have ended in the round that was launched last.
        self._catch_up()
        self.compilation.take_over(self.rounds)
        limit_waits(self.mesh, FIRST_STEP)
        self._limited = False

    def _meanwhile(self) -> None:
        """What need not wait for the round that the GPU is at."""
        self.commits.look()
        self.looks()

    def _end_faulty(self, run: JobRun) -> None:
        """End a job, on every process, for what any of them has met."""
        reasons = self.ranks.tell_all(run.fault)
        run.fail(next(filter(None, reasons)))
        self._conclude(run)
        if self.roster.training():
            self._save(last=False)

    def _run(
        self,
        rows: Sequence[PackedBatch],
        batches: Mapping[int, MicroBatches],
        objectives: Mapping[int, Sequence[Objective]],
    ) -> tuple[Tensor, dict[int, MicroBatches]]:
        """Forward and backward of a round; the losses, and the batches of the jobs that ran."""
        ran = self.group.run(batches, rows=rows, objectives=objectives)
        for index, reason in ran.errors.items():
            self.roster.at(index).suspect(reason)
        if ran.largest:
            self.roster.watch_rows(self.group.row_tokens)
            self.callback.warned(
                f"no memory for the rows of all jobs together: from now on of {ran.largest} tokens"
            )
        return ran.losses, {index: batches[index] for index in ran.indices}

    def update(self, losses: Mapping[int, float], batches: Mapping[int, MicroBatches]) -> None:
        """An optimizer step of each job, from what `gradients` gathered in the parameters.

        losses    what `gradients` returned
        """
        known = torch.zeros(len(self.model.jobs), dtype=torch.float64)
        for index, loss in losses.items():
            known[index] = loss
        runs = [self.roster.at(index) for index in batches]
        self._end.step(known.to(self.device), runs, batches)
        self._end.collect()

    def _finish(
        self, losses: Tensor, batches: Mapping[int, MicroBatches], *, due: bool, waits: bool
    ) -> None:
        """Update the jobs that ran; what that came to is looked at now, or a round later."""
        active = [self.roster.at(index) for index in batches]
        rows = self.schedule.count_rows()
        outside = self._end.step(losses, active, batches, waits=waits, rows=rows)
        if (
            due
            or self._to_tell
            or any(run.status != "running" or run.needs_round_end for run in active)
        ):
            outside |= self._end.collect()
        self._judge(active, outside, due=due)

    def _started(self, start: StartRecord) -> None:
        """The first round is done: write down what the start took."""
        write_start(self.folder, start, self.callback.warned)
        # Adapters are written with PEFT's configs. A start that finds its caches filled has not
        # imported it, and while rounds run there is time for it.
        self._peft.start()

    def _catch_up(self) -> None:
        """Look at the round that was launched last, and at what follows from it."""
        if launched := self._end.ahead:
            self._judge(launched, self._end.collect(), due=False)

    def _judge(self, active: Sequence[JobRun], outside: CallbackErrors, *, due: bool) -> None:
        """What follows from a round: evaluations, jobs that end, a checkpoint.

        due       a checkpoint of all jobs is; one of those that come, go or end always is
        """
        due_now = [run.index for run in active if run.is_evaluated and not run.fault]
        if any(run.job.eval_strategy != "no" for run in active):
            # A fault that one process alone has met must not part them.
            due_now = self.ranks.from_leader(due_now)
        if not self._end.ahead:
            outside = outside | self.measurements.evaluate(list(map(self.roster.at, due_now)))
            self._compare(due_now)
            self.measurements.sample([run for run in active if run.is_sampled])
        changed = self._tell_of_changes()
        for run in active:
            if run.status != "running":
                if run.fault:
                    # Met at the step that ended it, such as a line that no disk took.
                    self.callback.warned(f"job '{run.job.name}': {run.fault}")
                    run.fault = ""
                self._conclude(run)
                changed.add(run.job.name)
            due = due or run.step % run.job.save_steps == 0
        if outside and len(outside) == len(active):
            # A full disk or a callback that never works is no job's fault.
            raise next(iter(outside.values()))
        if (due or changed) and self.roster.training():
            self._save(last=False, only=None if due else changed)

    def _compare(self, evaluated: Sequence[int]) -> None:
        """End the weak jobs at a rung; jobs of a service pause there, and it compares them."""
        if self.carried is None:
            for text in self.halving.judge(self.runs):
                self.callback.noted(text)
            return
        for run in map(self.roster.at, evaluated):
            if run.status == "running" and run.is_at_rung:
                self.pause(run.job.name)

    def _conclude(self, run: JobRun) -> None:
        """A job has ended: leave its adapter, and say so."""
        self.commits.settle()
        self.reports.conclude(run)
        if self.roster.training():
            self.schedule.choose_sizes(self.roster.training(), self.rounds)

    def _save(self, *, last: bool, only: Container[str] | None = None) -> None:
        """Write a checkpoint; see `RunCheckpoints.save`."""
        self._catch_up()
        self.checkpoints.save(self.rounds, last=last, only=only)


def with_jobs_own(
    callback: TrainerCallback, jobs: Sequence[Job], trackers: Trackers
) -> TrainerCallback:
    """A callback that tells trackers first, then callbacks of the jobs, and then the given one."""
    return EachInTurn(trackers, JobCallbacks(jobs, callback.warned), callback)


def new_folder() -> Path:
    """A folder in runs/, named by the time; only the leader's is used."""
    return Path("runs") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def require_runnable(
    group: GroupStep, jobs: Sequence[Job], data: Mapping[str, JobData], *, cuts: bool = False
) -> None:
    """Check that a group can train its jobs on their data, before any weight is loaded.

    cuts      rows are cut into nano-batches, however many the plan names
    raises    TloraError
    """
    model, plan = group.model, group.plan
    check_fits(model.backbone, data, model.group.vocabulary)
    try_functions(data, model.group.vocabulary, model.backbone.dtype, group.mesh.device)
    require_fits(model, plan.mesh)
    require_shardable(model, plan)
    require_whole_pairs(model.jobs, plan, cuts=cuts)
    require_elementwise(jobs, group.mesh)
    require_data_starts(model, jobs, plan)
    for job in jobs:
        require_trainable(job, data[job.name].steps)


def warn_before_training(
    model: SuperModel, data: Mapping[str, JobData], warn: Callable[[str], None]
) -> None:
    """Compare the base's own loss with the jobs'; say where that cannot be done, or adapters idle.

    raises   OwnLossDiffers
    """
    with phase("probe"):
        if note := check_own_loss(model.backbone, data, model.group.vocabulary):
            warn(note)
    for by, text in model.group.notes:
        if by == IDLE:
            warn(text)


def write_start(folder: RunFolder, start: StartRecord, warn: Callable[[str], None]) -> None:
    """Write down what a start took; a disk that does not take it stops no training."""
    try:
        folder.write_start(start)
    except OSError as error:
        warn(f"what the start took could not be written: {error}")


@phase("probe")
def try_base(
    group: GroupStep,
    ranks: Ranks,
    data: Mapping[str, JobData],
    base: Mapping[str, Tensor] | None,
    warn: Callable[[str], None],
) -> None:
    """Compare a fused graph with the base alone; where that cannot be done, say so.

    base     what a model of which processes hold pieces is about to be loaded from; where those are
             pieces of matrices, what `compile` tried is all that is known. None: it is whole
    raises   FusedDiffers
    """
    model, mesh = group.model, group.mesh
    if base is None:
        found = probe_base(model, data)
    elif group.plan.mesh.tp == 1:

        def tried() -> ProbeResult:
            return probe_base(model, data, base, mesh.device) if mesh.leader else ProbeResult()

        found = ranks.together(tried)
    else:
        why = next((why for name, why in model.group.notes if name == "probe"), "")
        found = ProbeResult(skipped=why)
    if found.skipped:
        warn(f"the base was not tried against itself: {found.skipped}")
    if found.rounding:
        warn(
            f"a rounding may change much in this base: beside the base alone {found.rounding}, and "
            "float32 agrees"
        )
