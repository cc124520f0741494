"""Train all jobs of a Shared Super-Model together, each to its own last step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlora_fx.compiler import Jobs, as_jobs
from tlora_fx.config.job import Job
from tlora_fx.cost.load import MAX_ROW_TOKENS
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import NotAdmitted
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.numerics.probe import Probed
from tlora_fx.ops.dora import norms_kept
from tlora_fx.ops.kernels.select import is_strict
from tlora_fx.parallel.apply import (
    Applied,
    ReducingRunner,
    RowRunner,
    apply,
    load,
    mesh_for,
    require_nano,
    require_shardable,
    require_whole_pairs,
)
from tlora_fx.parallel.cuda_graphs import RowGraphs
from tlora_fx.parallel.mesh import FIRST_STEP, limit_waits
from tlora_fx.parallel.prepare import prepared, require_fits
from tlora_fx.parallel.stage_graphs import StageGraphs
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters
from tlora_fx.runtime.callbacks import EachInTurn, TrainerCallback
from tlora_fx.runtime.checkpoints.store import Checkpoint, CheckpointStore, JobState, ResumeSources
from tlora_fx.runtime.checks import (
    check_fits,
    load_all_data,
    longest_row,
    probe_base,
    probe_ends,
    require_same_jobs,
)
from tlora_fx.runtime.commits import Commits
from tlora_fx.runtime.controllers import NanoBatches
from tlora_fx.runtime.data.batching import (
    Cutting,
    MicroBatches,
    RowBucketer,
    cut_round,
    rows_of_round,
)
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.data_starts import agreed_starts, require_data_starts
from tlora_fx.runtime.distributed import (
    Ranks,
    RoundNotice,
    StateGatherer,
    require_elementwise,
    table_hash,
)
from tlora_fx.runtime.elastic import Roster
from tlora_fx.runtime.evaluation import Evaluator
from tlora_fx.runtime.generation import Sampler
from tlora_fx.runtime.identity import describe_jobs, describe_run, require_same_run
from tlora_fx.runtime.interrupts import Interrupts
from tlora_fx.runtime.isolation import run_isolated
from tlora_fx.runtime.job_evaluation import Metrics
from tlora_fx.runtime.job_run import JobRun, StepReport, described, status_after
from tlora_fx.runtime.optim.rank_allocation import regularise
from tlora_fx.runtime.optim.trainable import require_trainable
from tlora_fx.runtime.round_end import CallbackErrors, RoundEnd
from tlora_fx.runtime.run_folder import RunFolder
from tlora_fx.runtime.trackers import Trackers

GRACE_SECONDS = 10.0
#: Steps without any gradient after which a user is told.
STILL_STEPS = 10


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How rows run.

    max_row_tokens   rows are closed before they grow beyond this
    compiled         layers are compiled by torch.compile; the first rounds take longer
    cuda_graphs      on a GPU small rows run as CUDA graphs where that is possible (see
                     `parallel.cuda_graphs`); never in strict mode
    nano_batches     chooses into how many nano-batches rows are cut, round after round
    longest_wait     after the first round no process waits longer for another
    accept_changes   go on although data, base or jobs are not what the checkpoint was made with
    whole_base       compare every byte of the base's weights, not some blocks of each tensor
    keeps            captured rows stay with an open model, for its next trainer
    """

    max_row_tokens: int = MAX_ROW_TOKENS
    compiled: bool = False
    cuda_graphs: bool = True
    nano_batches: NanoBatches | None = None
    longest_wait: timedelta = FIRST_STEP
    accept_changes: bool = False
    whole_base: bool = False
    keeps: bool = False


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
        nano = options.nano_batches
        require_nano(self.plan, nano is not None or self.plan.nano_batches > 1)
        self.model = prepared(model, self.plan)
        members = [model.jobs[index] for index in model.members.values()]
        self.jobs = members if jobs is None else as_jobs(jobs)
        require_same_jobs(members, self.jobs)
        self.options = options
        self.mesh = mesh_for(self.model, self.plan, device or default_device())
        self.device = self.mesh.device
        self.resume = resume is True
        self.carried = resume if isinstance(resume, ResumeSources) else None
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        # Without a path every process would name another folder; only the leader's is used.
        job_folders = self.carried.jobs if self.carried else None
        path = output or Path("runs") / stamp
        self.folder = RunFolder(path, job_folders, writes=self.mesh.leader)
        self.callback = (self.mesh.leader and callback) or TrainerCallback()
        self.trackers = Trackers(self.folder.jobs.resolve().name, self.callback.warned)
        if self.mesh.leader:
            self.callback = EachInTurn(self.trackers, self.callback)
        self.ranks = Ranks(self.mesh)
        self.gathering = StateGatherer(self.model, self.mesh)
        self.store = CheckpointStore(self.folder.path)
        self.roster = Roster(self.model, self.folder, self.gathering)
        self.commits = Commits(self.store, self.folder, self.roster, self.callback)
        self.rounds = 0
        self.change_seconds = self.save_seconds = 0.0
        self._to_tell: list[JobRun] = []
        # Numbers of strict mode follow from the lengths that users give.
        lengthened = self.device.type == "cuda" and not is_strict()
        self.rows = RowBucketer(model.group.form == "packed", lengthened)
        self._data = data
        self._described: dict[str, Any] = {}
        self._checkpoint: Checkpoint | None = None
        self._sources: dict[str, Checkpoint] = {}
        self._runner: RowRunner | ReducingRunner | None = None
        self._cuda_graphs = options.cuda_graphs and lengthened
        self._evaluator: Evaluator | None = None
        self._sampler: Sampler | None = None
        self._nano = nano
        self._choice = self.plan.nano_batches if nano is None else nano.count
        self._row_tokens = options.max_row_tokens
        self._cutting = Cutting.of(self.model, options.max_row_tokens)
        self._limited = False
        self._tokens = 0
        goes_on = not self.gathering.apart
        self._end = RoundEnd(
            self.model, self.mesh, self._tell, goes_on=goes_on, meanwhile=self._meanwhile
        )
        self.looks: Callable[[], None] = lambda: None
        self._saved_at = time.monotonic()

    @property
    def runs(self) -> list[JobRun]:
        """Every job that was ever in."""
        return self.roster.runs

    def run(self) -> list[JobRun]:
        """Train until every job is done, has failed, or the user interrupts.

        returns   the jobs as they ended; `status` and `reason` tell how
        raises    TloraError before training for what is wrong with data, base or folder;
                  KeyboardInterrupt after a checkpoint when the user stopped the run
        """
        with ExitStack() as stack:
            data = self.ranks.together(lambda: self._checked(stack))
            grace = GRACE_SECONDS if self.mesh.size > 1 else None
            interrupts = stack.enter_context(Interrupts(grace))
            stack.callback(self._let_go)
            stack.push(lambda _, error, __: self.commits.close(error))
            if self._ended_before(data):
                return self.runs
            self.folder.begin([job.name for job in self.jobs])
            self.prepare(data)
            self.callback.started(self.runs)
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
        if (stopped or interrupts.asked) and (self.model.is_open or self._active()):
            raise KeyboardInterrupt(f"stopped after a checkpoint, {self.commits.saved}")
        return self.runs

    def _let_go(self) -> None:
        """Graphs keep memory, and what processes share, which part after training.

        Trackers get some time for what they have not taken yet.
        """
        if self.graphs is not None and not (self.options.keeps and self.model.is_open):
            self.graphs.clear()
        self.trackers.close()

    def _checked(self, stack: ExitStack) -> Mapping[str, JobData]:
        """The data, after all checks that need no weights; the folder is then held."""
        data = self._data or load_all_data(self.jobs)
        check_fits(self.model.backbone, data, self.model.group.vocabulary)
        require_fits(self.model, self.plan.mesh)
        require_shardable(self.model, self.plan)
        require_whole_pairs(self.model, self.plan, cuts=self._nano is not None)
        require_elementwise(self.jobs, self.mesh)
        require_data_starts(self.model, self.jobs, self.plan)
        for job in self.jobs:
            require_trainable(job, data[job.name].steps)
        stack.enter_context(self.folder.held(self.resume))
        if self.mesh.leader:
            self._find_checkpoints(data)
        return data

    def _find_checkpoints(self, data: Mapping[str, JobData]) -> None:
        """Read what the jobs go on from, on the leader, before any weight is loaded.

        raises    ResumeMismatch, RunFolderError, CheckpointError, BaseNotLoadable
        """
        self._describe(data)
        accept, changes = self.options.accept_changes, []
        if self.resume:
            self._checkpoint = self.store.load()
            if self._checkpoint is None:
                self.folder.require_own([job.name for job in self.jobs])
            else:
                changes = require_same_run(
                    self._checkpoint, self._described, self.jobs, accept=accept
                )
        if self.carried is not None:
            self._sources = self.carried.checkpoints()
        for name, checkpoint in self._sources.items():
            changes += require_same_run(
                checkpoint, self._described, self.jobs, accept=accept, only=name
            )
        for change in dict.fromkeys(changes):
            self.callback.noted(f"changed since the checkpoint: {change}")

    def _describe(self, data: Mapping[str, JobData]) -> None:
        self._described = describe_run(self.model, self.jobs, data, whole=self.options.whole_base)

    def _ended_before(self, data: Mapping[str, JobData]) -> bool:
        """Whether nothing is left to train; the jobs are then as the checkpoint has them."""
        states = self._checkpoint.jobs if self._checkpoint is not None else {}
        ended = bool(states) and all(
            status_after(states[job.name], job, data[job.name]) != "running" for job in self.jobs
        )
        if not self.ranks.from_leader(ended):
            return False
        checkpoint = self.ranks.from_leader(self._checkpoint)
        assert checkpoint is not None
        for index, job in enumerate(self.jobs):
            state = checkpoint.jobs[job.name]
            run = JobRun(index, job, data[job.name], {}, self.folder)
            run.recount(state)
            run.write(run.best or state.adapter, self._base_name())
            self.runs.append(run)
        self.callback.noted(f"every job had ended by {checkpoint.path}: there is nothing to train")
        return True

    @property
    def graphs(self) -> RowGraphs | StageGraphs | None:
        """Rows or stages as CUDA graphs, where they may run so; None before training."""
        return None if self._runner is None else self._runner.graphs

    def prepare(self, data: Mapping[str, JobData]) -> None:
        """Load the base, start or restore the adapters, and make each job's optimizer."""
        pieces = self.plan.planner not in ("single", "replicated")
        if not self.model.ready:
            base = base_tensors(self.model.backbone, self.device)
            if pieces:
                self._probe(data, base)
            load(self.model, self.plan, self.mesh, base)
        if not pieces:
            self._probe(data)
        known = {*(self._checkpoint.jobs if self._checkpoint else ()), *self._sources}
        tell = self.callback.noted
        start_adapters(self.model, agreed_starts(self.model, self.ranks, data, known, tell))
        if self.options.compiled and not self.model.is_compiled:
            self.model.compile()
        largest = longest_row(self.jobs, data, self.options.max_row_tokens, self.plan.parts)
        largest_captured = largest if self._cuda_graphs else 0
        self._runner = apply(self.model, self.plan, self.mesh, largest_row=largest_captured)
        parts, warn = self.plan.parts, self.callback.warned
        self._evaluator = Evaluator(
            self.model, self._runner, self.ranks, parts, self._cutting, warn
        )
        if self.mesh.leader:
            self._sampler = Sampler(self.plan, self.model)
            self._sampler.warn(self.jobs, self.callback)
        for job in self.jobs:
            self.roster.add(job, data[job.name])
        if self.carried is not None:
            self._carry()
        if self.resume:
            self._restore()
        of_hub = self.model.backbone.spec.model is not None
        if self._described and of_hub and not self._described["base"]["tensors"]:
            self._describe(data)  # its files are on this machine by now
        self._saved_at = time.monotonic()
        self.roster.watch_rows(self._row_tokens)
        self.ranks.together(self._begin)

    def _begin(self) -> None:
        """Fill the jobs' folders with what is known before the first step."""
        files: Mapping[str, Path] = {}
        for run in self.runs:
            files = run.begin(self._base_name(), files)

    def _probe(self, data: Mapping[str, JobData], base: Mapping[str, Tensor] | None = None) -> None:
        """Try the model against the base alone; where that cannot be done, say so.

        base    what a model of which processes hold pieces is about to be loaded from; where those
                are pieces of matrices, what `compile` tried is all that is known. None: it is whole
        """
        if base is None:
            skipped = probe_base(self.model, data).skipped
        elif self.plan.mesh.tp == 1:
            ours = self.ranks.together(
                lambda: (
                    probe_ends(self.model, data, base, self.device)
                    if self.mesh.leader
                    else Probed()
                )
            )
            skipped = ours.skipped
        else:
            skipped = next((why for name, why in self.model.group.notes if name == "probe"), "")
        if skipped:
            self.callback.warned(f"the base was not tried against itself: {skipped}")

    def gradients(self, batches: Mapping[int, MicroBatches]) -> dict[int, float]:
        """One forward and backward of all rows of a round; gradients add up in the parameters.

        batches   by job index
        returns   each job's mean loss over its targets of the whole optimizer step
        """
        losses = self._run_rows(self._rows(batches), batches).tolist()
        return {index: losses[index] for index in batches}

    def _rows(self, batches: Mapping[int, MicroBatches]) -> list[PackedBatch]:
        """The rows of a round, the same on every process."""
        steps = {index: self.roster.at(index).step for index in batches}
        rows = rows_of_round(self.model.jobs, batches, steps, self._row_tokens)
        return self.rows.made(cut_round(rows, self.plan.parts, self._cutting))

    def _run_rows(self, rows: Sequence[PackedBatch], batches: Mapping[int, MicroBatches]) -> Tensor:
        """Forward and backward; the mean losses, [J] on the device, which may still compute."""
        assert self._runner is not None
        counts = torch.zeros(len(self.model.jobs), dtype=torch.float64)
        for index, micro_batches in batches.items():
            counts[index] = self.roster.at(index).targets(micro_batches)
        weights = torch.where(counts > 0, 1 / counts.clamp(min=1), 0)
        weights = weights.to(self.device, non_blocking=True)
        with norms_kept():
            losses = self._runner.run(rows, weights) if batches else weights
        for run in map(self.roster.at, batches):
            regularise(run.job, run.parameters)
        return losses

    # Jobs come and go between rounds.

    def admit(
        self,
        job: Job,
        data: JobData | None = None,
        *,
        resume: Path | str | Checkpoint | None = None,
    ) -> None:
        """Let a job join before the next round that has room for it; jobs wait in their order.

        One that `pause` took out goes on where it was.

        data      its samples, instead of what the job's `data` names
        resume    output folder of a run whose newest checkpoint the job goes on from, or that
                  checkpoint, which takes long to read
        raises    NotAdmitted, TloraError for what is wrong with its targets, data or optimizer;
                  nothing is changed then
        """
        self.roster.request_join(
            job, data, resume,
            mesh=self.mesh, accept=self.options.accept_changes, described=self._described,
            may_grow=self.plan.planner == "single",
        )  # fmt: skip

    def release(self, name: str) -> None:
        """End a job before the next round, with the adapter that it has; its rows are free then.

        raises    NotAdmitted where it does not train
        """
        self.roster.request_leave(name, "release")

    def pause(self, name: str) -> None:
        """Let a job leave before the next round; `admit` lets it go on, as does a resumed run.

        raises    NotAdmitted where it does not train
        """
        self.roster.request_leave(name, "pause")

    def _goes_on(self) -> bool:
        """Whether a job trains, or one comes."""
        waits = self.model.is_open and bool(self.ranks.from_leader(len(self.roster.changes)))
        return waits or bool(self._active())

    def _change(self) -> None:
        """Let jobs leave and join, on all processes; who finds no room waits."""
        begun = time.perf_counter()
        self._catch_up()
        self._end.forget()
        self.roster.note_rows()
        changes = self.ranks.from_leader(self.roster.changes)
        for name, how in changes.leaving.items():
            run = next((run for run in self._active() if run.job.name == name), None)
            if run is None:
                continue  # it ended by itself in the round in which it was asked to leave
            run.stop() if how == "release" else run.pause()
            if self.model.is_open:
                self.roster.leave(run)
                self._to_tell.append(run)
            else:
                self._conclude(run)
                self._saved_at = float("-inf")
        changes.leaving.clear()
        if self.model.is_open:
            self.roster.retire()
        may_grow = self.plan.planner == "single"
        while changes.pending_joins:
            joining = changes.pending_joins[0]
            try:
                run, admission = self.roster.join(joining, may_grow=may_grow)
            except NotAdmitted as error:
                if self._active():
                    break
                self.callback.warned(str(error))
                changes.pending_joins.popleft()
                continue
            changes.pending_joins.popleft()
            self._joined(run, grown=admission.grown)
        self.roster.changes = changes
        self.roster.watch_rows(self._row_tokens)
        self.change_seconds = time.perf_counter() - begun

    def _joined(self, run: JobRun, *, grown: bool) -> None:
        """What a run knows of its jobs, with one more."""
        self.jobs = [each.job for each in self.roster.inside()]
        more = describe_jobs([run.job], {run.job.name: run.data})
        for kind, entries in more.items():
            self._described[kind] = {**self._described.get(kind, {}), **entries}
        if self.graphs is not None:
            data = {each.job.name: each.data for each in self.roster.inside()}
            tokens = self.options.max_row_tokens
            longest = longest_row(self.jobs, data, tokens, self.plan.parts)
            self.graphs.largest_row = longest if self._cuda_graphs else 0
            if grown:
                self.graphs.clear()
        if grown:
            assert self._runner is not None
            # Alone, rows run by the new banks as they did by the old ones.
            self.model.applied = Applied(self.plan, self.mesh, self._runner)
            self.callback.noted(self.model.group.notes[-1][1])
        self._to_tell.append(run)

    def _tell_of_changes(self) -> set[str]:
        """Write down who has come and gone, once others do not wait for it; returns who."""
        changed, self._to_tell = self._to_tell, []
        if changed:
            self.commits.settle()
        for run in changed:
            if not run.left:
                run.begin(self._base_name())
                self._announce(run, self.callback.joined)
                continue
            adapter = self.roster.final_adapter(run)
            if adapter is None:
                run.write_status()
            else:
                self._write(run, adapter)
            self._announce(run, self.callback.ended)
        return {run.job.name for run in changed}

    def _active(self) -> list[JobRun]:
        return [run for run in self.runs if run.status == "running"]

    def _round(self, interrupts: Interrupts) -> bool:
        """Every running job does one optimizer step; False when somebody asked to stop instead."""
        self.commits.look()
        self._end.begin()
        batches = self._batches()
        rows = self._rows(batches)
        table = table_hash(rows) if self.mesh.size > 1 else 0
        micros = int(self._end.seconds * 1e6)
        active = self._active()
        fault = next((run.index + 1 for run in active if run.fault), 0)
        waits = self.mesh.size > 1 and self._end.waits(active)
        note = RoundNotice(
            table, int(interrupts.asked), self._choice, micros, int(self._save_due()), fault,
            int(self.roster.is_due()), int(waits),
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
        self._choose(agreed, rows)
        losses, ran = self._run_isolated(rows, batches)
        self.rounds += 1
        ran_batches = {index: batches[index] for index in ran}
        self._finish(losses, ran_batches, due=bool(agreed.due), waits=bool(agreed.waits))
        if not self._limited:
            limit_waits(self.mesh, self.options.longest_wait)
            self._limited = True
        return True

    def _meanwhile(self) -> None:
        """What need not wait for the round that the GPU is at."""
        self.commits.look()
        self.looks()

    def _batches(self) -> dict[int, MicroBatches]:
        """What every running job's next step takes; a job that cannot say has a fault."""
        batches: dict[int, MicroBatches] = {}
        for run in self._active():
            try:
                batches[run.index] = run.batches()
            except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
                run.suspect(error)
        return batches

    def _end_faulty(self, run: JobRun) -> None:
        """End a job, on every process, for what any of them has met."""
        reasons = self.ranks.tell_all(run.fault)
        run.fail(next(filter(None, reasons)))
        self._conclude(run)
        if self._active():
            self._save(last=False)

    def _run_isolated(
        self, rows: Sequence[PackedBatch], batches: Mapping[int, MicroBatches]
    ) -> tuple[Tensor, Iterable[int]]:
        """As `_run_rows`, and the jobs that ran; the job at fault is left out where one fails.

        Only where one process trains: others would wait for what this one does not send.
        """
        if self.mesh.size > 1:
            return self._run_rows(rows, batches), batches

        def alone(index: int) -> tuple[Tensor, int]:
            own = {index: batches[index]}
            rows = self._rows(own)
            return self._run_rows(rows, own), max(row.input_ids.numel() for row in rows)

        together = partial(self._run_rows, rows, batches)
        ran = run_isolated(together, alone, self._free_memory, self.model.jobs, batches)
        for index, reason in ran.errors.items():
            self.roster.at(index).suspect(reason)
        if ran.largest:
            self._row_tokens = min(self._row_tokens, ran.largest)
            self.roster.watch_rows(self._row_tokens)
            self.callback.warned(
                f"no memory for the rows of all jobs together: from now on of {ran.largest} tokens"
            )
        return ran.losses, ran.indices

    def _free_memory(self, jobs: Iterable[int]) -> None:
        """Forget what a failed row has left: gradients of its jobs, and memory."""
        for index in jobs:
            self.roster.at(index).optimizer.zero_grad()
        if self.graphs is not None and self.mesh.size == 1:
            # Processes that capture together forget together, or not at all.
            self.graphs.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _choose(self, agreed: RoundNotice, rows: Sequence[PackedBatch]) -> None:
        """Cut this round's rows as the leader said; it says what the next round's shall be."""
        if self._nano is None or self._runner is None:
            return
        self._runner.nano_batches = agreed.choice
        if agreed.step_micros and self.mesh.leader:
            self._choice = self._nano.decide(agreed.step_micros / 1e6, self._tokens)
            self.folder.write_decisions(self._nano.records())
        self._tokens = sum(row.input_ids.numel() for row in rows)

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
        outside = self._end.step(losses, active, batches, waits=waits)
        if (
            due
            or self._to_tell
            or any(run.status != "running" or self._is_looked_at(run) for run in active)
        ):
            outside |= self._end.collect()
        self._judge(active, outside, due=due)

    def _catch_up(self) -> None:
        """Look at the round that was launched last, and at what follows from it."""
        if launched := self._end.ahead:
            self._judge(launched, self._end.collect(), due=False)

    def _is_looked_at(self, run: JobRun) -> bool:
        """Whether something follows at once from the step that a job is at."""
        save = run.step % run.job.save_steps == 0
        return save or run.step >= run.data.steps or run.is_evaluated or run.is_sampled

    def _judge(self, active: Sequence[JobRun], outside: CallbackErrors, *, due: bool) -> None:
        """What follows from a round: evaluations, jobs that end, a checkpoint.

        due       a checkpoint of all jobs is; one of those that come, go or end always is
        """
        due_now = [run.index for run in active if run.is_evaluated and not run.fault]
        if any(run.job.eval_strategy != "no" for run in active):
            # A fault that one process alone has met must not part them.
            due_now = self.ranks.from_leader(due_now)
        if not self._end.ahead:
            outside = outside | self._evaluate([self.roster.at(index) for index in due_now])
            self._sample([run for run in active if run.is_sampled])
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
        if (due or changed) and self._active():
            self._save(last=False, only=None if due else changed)

    def _evaluate(self, runs: Sequence[JobRun]) -> CallbackErrors:
        """Evaluate jobs together; some may stop early. Returns what ends a job, by job."""
        if not runs:
            return {}
        outside: CallbackErrors = {}
        self.callback.evaluating()
        measured = self._measured(runs)
        for run in runs:
            if run.index not in measured:
                continue
            try:
                report = run.take_evaluation(measured[run.index])
                if report is not None:
                    self.callback.evaluated(report)
            except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
                outside[run.index] = error
                self._blame(run, error)
                run.goes_on = not self.gathering.apart
        return outside

    def _measured(self, runs: Sequence[JobRun]) -> Mapping[int, Metrics]:
        """The evaluations of jobs; where one process fails at all of them, each job's by itself."""
        assert self._evaluator is not None
        try:
            return self._evaluator.measure({run.index: run.data for run in runs})
        except Exception:
            if self.mesh.size > 1:
                raise
        self._free_memory([])
        measured: dict[int, Metrics] = {}
        for run in runs:
            try:
                measured |= self._evaluator.measure({run.index: run.data})
            except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
                self._blame(run, error)
        return measured

    def _sample(self, runs: Sequence[JobRun]) -> None:
        """Let jobs answer their prompts, on the leader; what fails costs the answers alone."""
        if self._sampler is not None and runs and not self._sampler.tell(runs, self.callback):
            self._free_memory([])

    def _blame(self, run: JobRun, error: Exception) -> None:
        """End a job for an exception: now where it has ended anyway, else when all know."""
        run.suspect(error)
        if run.status != "running":
            run.fail(run.fault)

    def _tell(self, run: JobRun, report: StepReport) -> CallbackErrors:
        """Report a step; what the callback raises ends the job, unless it has ended by itself."""
        if run.still == STILL_STEPS:
            text = f"no gradient for {STILL_STEPS} steps: it learns nothing"
            self.callback.warned(f"job '{run.job.name}': {text}")
        try:
            self.callback.stepped(report)
        except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
            if run.status == "running":
                run.suspect(error)
                run.goes_on = True
            else:
                self._warn_of(run, error)
            return {run.index: error}
        return {}

    def _conclude(self, run: JobRun) -> None:
        """A job has ended: leave its adapter, and say so."""
        self.commits.settle()
        self._write(run, self.gathering.whole_adapter(run.job.name, run.final_adapter()))
        self._announce(run, self.callback.ended)

    def _announce(self, run: JobRun, hear: Callable[[JobRun], None]) -> None:
        try:
            hear(run)
        except Exception as error:  # noqa: BLE001  (it is so, whoever heard of it)
            self._warn_of(run, error)

    def _warn_of(self, run: JobRun, error: Exception) -> None:
        self.callback.warned(f"job '{run.job.name}': a callback failed: {described(error)}")

    def _write(self, run: JobRun, adapter: Mapping[str, Tensor]) -> None:
        """Leave a job's adapter folder; where it is not whole or not written, the job has failed.

        adapter   put together from all processes
        """
        broken = [name for name, tensor in adapter.items() if not tensor.isfinite().all()]
        if run.status == "done" and broken:
            run.fail(f"step {run.step}: it left numbers in {broken[0]} that are not finite")
        try:
            run.write(adapter, self._base_name())
        except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
            run.goes_on = run.status == "done"
            run.fail(f"its adapter is not written: {described(error)}")

    def _save_due(self) -> bool:
        """Whether the last checkpoint is too long ago for a piece of a longer run."""
        longest = float("inf") if self.carried is None else self.carried.save_seconds
        return time.monotonic() - self._saved_at >= longest

    def _save(self, *, last: bool, only: Container[str] | None = None) -> None:
        """Write a checkpoint, the last one now and others beside training (see `Commits`).

        only      jobs that are written; others stay as they were, where they were written before
        raises    RunFolderError where the folder is gone; CheckpointError, MetricsError at the end
                  of a run
        """
        self._catch_up()
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
            self._saved_at = time.monotonic()
        states = {
            run.job.name: self.gathering.whole(run.job.name, run.state())
            for run in inside
            if run.job.name not in origins
        }
        for run in inside:
            run.origin = None
        if not self.mesh.leader:
            return
        states = {name: state.snapshot() for name, state in states.items()}
        states |= {name: state for name, (_, state) in origins.items()}
        for run in inside:
            companions = run.companions(self._base_name())
            states[run.job.name] = replace(states[run.job.name], companions=companions)
        states |= self.roster.in_main_memory(left)
        described = {"rounds": self.rounds, **self._described}
        elsewhere = {name: path for name, (path, _) in origins.items()}
        self.commits.begin(self.rounds, states, described, unchanged, elsewhere)
        if last:
            self.commits.settle(last=True)
        self.save_seconds = time.perf_counter() - begun

    def _carry(self) -> None:
        """Take jobs over from the runs that they come from."""
        found = {name: each.jobs[name] for name, each in self._sources.items()}
        states = self.ranks.from_leader(found)
        self._take_over(states, {name: str(each.path) for name, each in self._sources.items()})

    def _take_over(self, states: Mapping[str, JobState], sources: Mapping[str, str]) -> None:
        """Let jobs go on from their states; one without a state starts anew."""
        for run in self.runs:
            name = run.job.name
            if name in states:
                source = sources.get(name, "the leader's checkpoint")
                run.restore(self.gathering.own(name, states[name]), source)
            else:
                run.metrics.truncate_after(0)
            if run.status != "running":
                self._write(run, self.gathering.whole_adapter(name, run.final_adapter()))

    def _restore(self) -> None:
        checkpoint = self.ranks.from_leader(self._checkpoint)
        if checkpoint is None:
            self.callback.warned("there is no checkpoint yet: every job starts anew")
            self._take_over({}, {})
            return
        self.rounds = int(checkpoint.run["rounds"])
        self._take_over(checkpoint.jobs, dict.fromkeys(checkpoint.jobs, str(checkpoint.path)))
        steps = ", ".join(f"{run.job.name} {run.step} of {run.data.steps}" for run in self.runs)
        self.callback.noted(f"going on from {checkpoint.path}; steps done: {steps}")

    def _base_name(self) -> str | None:
        spec = self.model.backbone.spec
        return spec.model or (str(spec.config) if spec.config else None)


def default_device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
