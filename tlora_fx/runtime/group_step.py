"""Steps of the jobs that share one base: rows, gradients, optimizers and membership.

`Trainer` steps by it, and so does a loop of one's own. It knows nothing of data files, folders,
statuses or evaluation: who calls brings batches, and decides what a failure means for a job.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol, SupportsIndex
from weakref import WeakSet

import torch
from torch import Tensor

from tlora_fx.config.job import Job
from tlora_fx.cost.load import MAX_ROW_TOKENS
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import NotFinite, StepMisuse, SuperModelMisuse
from tlora_fx.host.phases import phase
from tlora_fx.model.backbone import text_config
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.elastic import Admission
from tlora_fx.model.late_tensors import LoadedTensors
from tlora_fx.model.objectives import Objective, Scores
from tlora_fx.model.row_ladder import RowLadder
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.dora import norms_kept
from tlora_fx.ops.kernels.select import is_strict
from tlora_fx.parallel.apply import AppliedPlan, ReducingRunner, RowRunner, apply, load, mesh_for
from tlora_fx.parallel.cuda_graphs import RowGraphs
from tlora_fx.parallel.prepare import prepared
from tlora_fx.parallel.stage_graphs import StageGraphs
from tlora_fx.parallel.uploads import UploadedTensors
from tlora_fx.planners.protocol import planner_of
from tlora_fx.runtime.adapters.files import base_tensors, start_adapter, start_adapters
from tlora_fx.runtime.checkpoints.store import JobState
from tlora_fx.runtime.checkpoints.tensor_file import moved
from tlora_fx.runtime.checks import probe_base
from tlora_fx.runtime.data.batching import (
    Cutting,
    MicroBatches,
    RowBucketer,
    count_row_tokens,
    count_terms,
    cut_round,
    ladder_of,
    rows_of_round,
)
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.distributed import StateGatherer, require_device
from tlora_fx.runtime.group_updater import GroupUpdater
from tlora_fx.runtime.isolation import RoundResult, is_out_of_memory, run_isolated
from tlora_fx.runtime.launching.cpu_threads import on_few_threads, settle_threads
from tlora_fx.runtime.launching.torch_modes import in_default_modes
from tlora_fx.runtime.member import Member
from tlora_fx.runtime.optim.rank_allocation import regularise
from tlora_fx.runtime.step_batches import (
    Batch,
    StepOutput,
    logprobs_of,
    require_base_beside,
    require_batch,
)

logger = logging.getLogger(__name__)
DataStarts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """Result of one optimizer step of one job.

    step            optimizer steps done, this one included where it was done
    grad_norm       2-norm over the job's gradients, before clipping
    learning_rate   that the step used
    updated         whether the adapter changed: not where `grad_norm` is not finite; the gathered
                    gradients are dropped either way
    """

    step: int
    grad_norm: float
    learning_rate: float
    updated: bool


@dataclass(slots=True)
class Gathered:
    """Gradients and counts that a job has gathered since its last optimizer step.

    gradients   by the parameter's name, copies, where they were asked for
    """

    loss: float = 0.0
    tokens: int = 0
    batches: int = 0
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


class Keeper(Protocol):
    """Interface of objects that keep memory of the device between calls."""

    def release(self) -> None:
        """Free it; the next call takes what it needs anew."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of how rows run.

    max_row_tokens   a row is closed before it grows beyond this
    compiled         layers are compiled by torch.compile; the first steps take longer
    cuda_graphs      on a GPU, rows that come again run as CUDA graphs; never in strict mode
    wait_for_compile   layers are compiled by the first step; False: after `GroupStep.compile`
    """

    max_row_tokens: int = MAX_ROW_TOKENS
    compiled: bool = False
    cuda_graphs: bool = True
    wait_for_compile: bool = True


@dataclass(eq=False)
class GroupStep:
    """Steps the jobs of a Shared Super-Model, each when its caller wants.

    model     what `tlora_fx.compile` made; with `open=OpenSlots(...)` jobs may join later
    plan      how it runs on a mesh; by default on one device. Where there are several processes,
              each makes the same calls
    device    by default the GPU where there is one
    options   how rows run
    steps     by job, optimizer steps from which its schedule takes its length; by default the
              job's `max_steps`

    members   by slot, the jobs that train
    runner    runs rows; None before `prepare`
    """

    model: SuperModel
    plan: Plan = field(default_factory=lambda: Plan(planner="single"))
    device: torch.device | str | None = None
    options: StepOptions = StepOptions()
    steps: Mapping[str, int] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict, init=False)
    runner: RowRunner | ReducingRunner | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_device(self.device)
        # torch.compile wraps a model.
        if not isinstance(getattr(self.model, "_orig_mod", self.model), SuperModel):
            raise SuperModelMisuse(
                "what trains is no Shared Super-Model",
                expected="what tlora_fx.compile(jobs) returned",
                found=type(self.model).__name__,
            )
        self.model = prepared(self.model, self.plan)
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.mesh = mesh_for(self.model, self.plan, device)
        self.device = self.mesh.device
        self.gathering = StateGatherer(self.model, self.mesh)
        self.updater = GroupUpdater(self.model, self.mesh)
        # Numbers of strict mode follow from the lengths that users give.
        lengthened = self.mesh.device.type == "cuda" and not is_strict()
        self.bucketer = RowBucketer(
            self.model.group.form == "packed", lengthened, self.plan.mesh.dp
        )
        self.captures = self.options.cuda_graphs and lengthened
        self.row_tokens = self.options.max_row_tokens
        self.cutting = Cutting.of(self.model, self.options.max_row_tokens)
        #: What else keeps memory between calls, and is asked to release it where a row needs it.
        self.keepers: WeakSet[Keeper] = WeakSet()
        self._gathered: dict[int, Gathered] = {}
        self._parked: dict[str, JobState] = {}

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise StepMisuse(
            "a GroupStep cannot be copied or pickled: it updates its model's own tensors",
            help="copy the weights, step.model.state_dict(), or the adapters, "
            "step.member(name).final_adapter()",
        )

    # Weights.

    @in_default_modes
    @on_few_threads
    def prepare(
        self,
        *,
        probe: Callable[[Mapping[str, Tensor] | None], None] | None = None,
        starts: Callable[[], DataStarts] | None = None,
        largest_row: int | None = None,
        member: Callable[[Job], Member] | None = None,
    ) -> None:
        """Load the base, start the adapters, make optimizers; called once, at the latest by a step.

        probe         compares the fused graph with the base alone, whose tensors it is given where
                      processes will hold pieces of it; by default once a graph and process
        starts        what is computed from jobs' data for their first adapters
        largest_row   tokens of the largest row that may come, whose memory stays free; by default
                      of one that is as long as rows may be, or, where one process runs, of the
                      largest that came lately
        member        makes a job's member
        raises        StepMisuse, FusedDiffers, BaseNotLoadable, AdapterFolderError, PlanNotRunnable
        """
        if member is None:
            for job in (self.model.jobs[index] for index in self.model.members.values()):
                self._steps_of(job)
        probe = probe or self._probe
        settle_threads(self.model.backbone.model, self.mesh.device)
        in_pieces = not planner_of(self.plan).holds_whole_base(self.plan)
        if not self.model.ready:
            with phase("weights"):
                base = base_tensors(self.model.backbone, self.mesh.device)
                if in_pieces:
                    probe(base)
                with ExitStack() as stack:
                    held = isinstance(base, (dict, LoadedTensors))
                    if self.mesh.device.type == "cuda" and held and not in_pieces:
                        names, device = self.model.base_names(), self.mesh.device
                        base = stack.enter_context(UploadedTensors(base, device, names))
                    load(self.model, self.plan, self.mesh, base)
        if not in_pieces:
            probe(None)
        with phase("adapters"):
            start_adapters(self.model, {} if starts is None else starts())
        if self.options.compiled and not self.model.is_compiled:
            with phase("layers"):
                waits = self.options.wait_for_compile
                (self.model.compile if waits else self.model.extend_weights)()
        largest = self.row_tokens if largest_row is None else largest_row
        captured = largest if self.captures else 0
        self.runner = apply(self.model, self.plan, self.mesh, largest_row=captured)
        if self.graphs is not None:
            self.graphs.retries = largest_row is None and self.mesh.size == 1
        for index in self.model.members.values():
            job = self.model.jobs[index]
            self.add(self._member(job) if member is None else member(job))

    def _probe(self, base: Mapping[str, Tensor] | None) -> None:
        if base is None:
            probe_base(self.model, {})

    def _member(self, job: Job) -> Member:
        parameters = self.model.job_parameters(job.name)
        scalings = self.model.job_scalings(job.name)
        index, steps = self.model.members[job.name], self._steps_of(job)
        return Member(index, job, parameters, scalings, steps)

    def _steps_of(self, job: Job) -> int:
        steps = self.steps.get(job.name, job.max_steps or 0)
        if not steps:
            raise StepMisuse(
                "nothing says how many steps a job's schedule takes",
                job=job.name,
                help=f"set max_steps in the job, or GroupStep(steps={{'{job.name}': N}})",
            )
        return steps

    def compile(self) -> None:
        """Compile the layers by the next step; captured rows, which hold other code, are let go.

        Where there are several processes, each calls it between the same two steps.
        """
        self._ready()
        assert self.runner is not None
        if self.graphs is not None:
            self.graphs.forget()
        self.model.compile()
        if self.model.is_open:
            # The runner stays that of the model's next trainer.
            self.model.applied = AppliedPlan(self.plan, self.mesh, self.runner)

    @in_default_modes
    @on_few_threads
    def run_first(self, row: PackedBatch) -> None:
        """Run a row that nobody trains on, so that what runs for the first time has run.

        A forward and backward, and a forward alone; what jobs have gathered stays.

        row   on the CPU
        """
        self._ready()
        assert self.runner is not None
        names = [member.job.name for member in self.members.values()]
        before = {name: self.gathered(name) for name in names}
        weights = torch.ones(len(self.model.jobs), dtype=torch.float64, device=self.mesh.device)
        try:
            with norms_kept():
                self.runner.run([row], weights)
            self.runner.evaluate([row])
        finally:
            for name, gathered in before.items():
                self.put_back(name, gathered)

    def uncompile(self) -> None:
        """Run layers as they were before `compile`, from the next step on."""
        if self.graphs is not None:
            self.graphs.forget()
        self.model.uncompile()

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside, rows run as before `compile`, and none as a CUDA graph."""
        graphs = self.graphs
        largest = 0 if graphs is None else graphs.largest_row
        if graphs is not None:
            graphs.largest_row = 0
        try:
            with self.model.uncompiled():
                yield
        finally:
            if graphs is not None:
                graphs.largest_row = largest

    @property
    def graphs(self) -> RowGraphs | StageGraphs | None:
        """Rows or stages as CUDA graphs, where they may run so; None before `prepare`."""
        return None if self.runner is None else self.runner.graphs

    # Gradients and optimizer steps of a loop of one's own.

    @in_default_modes
    @on_few_threads
    def accumulate(self, batches: Mapping[str, Batch | MicroBatches]) -> dict[str, StepOutput]:
        """Forward and backward of these jobs' batches; gradients add up until `apply`.

        batches   by job name; jobs that are left out keep what they have gathered
        returns   by job name, in the order given. Where a job's rows fail, or its loss is not
                  finite, that job's output has the error, its gradients are as before the call,
                  and its neighbours' outputs stand
        raises    StepMisuse for a job that does not train here, under autocast, and for a batch
                  that `Batch` does not allow: without tokens, with token ids that the base does not
                  have, with a loss that is not there or samples that do not fit it; the failure
                  itself where it is no single job's, as OutOfMemory: all gradients are as before
                  the call then
        """
        _require_dict(batches)
        self._ready()
        members = {name: self.member(name) for name in batches}
        given = {
            member.index: (batch if isinstance(batch, Batch) else Batch(batch)).of(member.job)
            for member, batch in zip(members.values(), batches.values(), strict=True)
        }
        self._require(given)
        micro = {index: batch.micro_batches for index, batch in given.items()}
        terms = {
            i: count_terms(self.members[i].job, each, given[i].loss) for i, each in micro.items()
        }
        normalizers = {index: batch.divisor(terms[index]) for index, batch in given.items()}
        scores = {index: Scores() for index, batch in given.items() if batch.loss is not None}
        objectives = self._objectives(given, scores)
        before = {index: self.gathered(self.members[index].job.name) for index in given}

        def forget(indices: Iterable[int]) -> None:
            for index in indices:
                self.put_back(self.members[index].job.name, before[index])
            self.free_memory()

        try:
            ran = self.run(micro, normalizers, objectives=objectives, forget=forget)
        except Exception as failure:
            forget(given)
            if len(given) > 1 or is_out_of_memory(failure):
                raise
            [index] = given
            losses = torch.full((len(self.model.jobs),), math.nan)
            ran = RoundResult(losses, given, {index: failure.with_traceback(None)})
        values = ran.losses.tolist()
        outputs: dict[str, StepOutput] = {}
        for index, batch in given.items():
            job = self.members[index].job
            error, loss = ran.errors.get(index), values[index]
            if error is None and not math.isfinite(loss):
                self.put_back(job.name, before[index])
                error = NotFinite("a batch's loss is not finite", job=job.name, found=loss)
            tokens = count_row_tokens(job, batch.micro_batches, batch.loss)
            output = StepOutput(math.nan if error else loss, tokens, terms[index], error)
            if error is None:
                output = self._gather(index, batch, output, scores.get(index))
            outputs[job.name] = output
        return outputs

    def _gather(
        self, index: int, batch: Batch, output: StepOutput, scores: Scores | None
    ) -> StepOutput:
        """Note a batch whose gradients stay; its output, with what its own loss has found."""
        own = self._gathered.setdefault(index, Gathered())
        own.loss, own.tokens = own.loss + output.loss, own.tokens + output.tokens
        own.batches += 1
        if scores is None:
            return output
        shift = self.members[index].job.label_shift
        metrics = tuple(
            {name: float(value) for name, value in scores.metrics[first].items()}
            for first in sorted(scores.metrics)
        )
        logprobs = logprobs_of(scores, batch.micro_batches, shift)
        return replace(output, logprobs=logprobs, metrics=metrics)

    @in_default_modes
    @on_few_threads
    def score(
        self, batches: Mapping[str, MicroBatches], *, by_base: bool = False
    ) -> dict[str, tuple[Tensor, ...]]:
        """Log-probabilities of these jobs' target tokens; gradients and dropout take no part.

        batches   by job name
        by_base   those of the base alone, or of the adapter that a job compares pairs with
        returns   by job name, of each sample those of its target tokens, [n] each
        raises    StepMisuse as `accumulate` does
        """
        _require_dict(batches)
        self._ready()
        given = {
            self.member(name).index: Batch(micro, loss="cross_entropy")
            for name, micro in batches.items()
        }
        scores = {index: Scores() for index in given}
        self._require(given)
        for index in given if by_base else ():
            require_base_beside(self.members[index].job)
        objectives = self._objectives(given, scores)
        micro = {index: batch.micro_batches for index, batch in given.items()}
        for row in self.rows_of(micro, objectives):
            assert row.terms is not None
            moved = row.to(self.mesh.device)
            with norms_kept():
                losses = self.model.score(moved, [*given] if by_base else ())
            row.terms.keep(-losses)
        return {
            self.members[index].job.name: logprobs_of(
                scores[index], batch.micro_batches, self.members[index].job.label_shift
            )
            for index, batch in given.items()
        }

    def _require(self, given: Mapping[int, Batch]) -> None:
        assert self.runner is not None
        alone = self.mesh.size == 1 and self.runner.nano_batches == 1
        vocabulary, backbone = self.model.group.vocabulary, self.model.backbone
        if backbone.spec.is_classifier:
            # It has a logit for each label, and not for each token.
            vocabulary = text_config(backbone.model).vocab_size
        for index, batch in given.items():
            require_batch(self.members[index].job, batch, vocabulary, alone=alone)

    def _objectives(
        self, given: Mapping[int, Batch], scores: Mapping[int, Scores]
    ) -> dict[int, list[Objective]]:
        return {
            index: given[index].objectives(own, self.members[index].job.label_shift)
            for index, own in scores.items()
        }

    @in_default_modes
    @on_few_threads
    def apply(self, hyperparameters: Mapping[str, Mapping[str, float]]) -> dict[str, StepUpdate]:
        """One optimizer step of each of these jobs, from what they have gathered.

        hyperparameters   by job name: `lr` for this step alone, by default the schedule's;
                          `weight_decay`, `eps`, `beta1`, `beta2` and `max_grad_norm` from now on
        returns           by job name, in the order given
        raises            StepMisuse for a job that does not train here or has gathered nothing,
                          OptimizerError for hyperparameters that its optimizer does not have;
                          nothing is changed then
        """
        _require_dict(hyperparameters)
        self._ready()
        members = [self.member(name) for name in hyperparameters]
        for member in members:
            if member.index not in self._gathered:
                raise StepMisuse(
                    "a job has gathered no gradients since its last step",
                    job=member.job.name,
                    help="call accumulate with a batch of the job first",
                )
            member.optimizer.require_options(hyperparameters[member.job.name])
        losses = torch.zeros(len(self.model.jobs), dtype=torch.float64)
        for member in members:
            member.optimizer.override(hyperparameters[member.job.name])
            losses[member.index] = self._gathered[member.index].loss
        rates = {member.index: member.optimizer.learning_rate for member in members}
        norms = self._update(members, losses.to(self.mesh.device))
        updates: dict[str, StepUpdate] = {}
        for member in members:
            norm, updated = norms[member.index], math.isfinite(norms[member.index])
            gathered = self._gathered.pop(member.index)
            if updated:
                member.step, member.tokens = member.step + 1, member.tokens + gathered.tokens
            member.optimizer.zero_grad()
            updates[member.job.name] = StepUpdate(member.step, norm, rates[member.index], updated)
        if not all(update.updated for update in updates.values()):
            # Kernels leave out a job whose step failed until they are told anew.
            self.updater.forget()
        return updates

    def _update(self, members: Sequence[Member], losses: Tensor) -> dict[int, float]:
        """Update from gradients; the norms before clipping, not finite where nothing changed."""
        split = self.updater.split(members)
        pending, norms = self.updater.launch(split, losses)
        for member in split.together:
            member.optimizer.noted()
        outcomes = [] if pending is None else pending.read()
        for member, outcome in zip(split.together, outcomes, strict=True):
            norms[member.index] = outcome.norm if outcome.updated else math.nan
            if not outcome.updated:
                member.optimizer.noted(-1)
                member.optimizer.keep_to_schedule()
        for member in split.apart:
            if math.isfinite(norms[member.index]):
                member.optimizer.step(norms[member.index])
            else:
                member.optimizer.keep_to_schedule()
        return norms

    # Rows.

    def expect(self, data: Mapping[int, JobData]) -> None:
        """Choose the few sizes that rows are padded to from now on, by the rows to come.

        Where rows are not padded, or cannot be captured, nothing changes.

        data    of the jobs that train, by slot
        """
        graphs = self.graphs
        if graphs is None or graphs.refused or not self.captures:
            return
        ladder = RowLadder()
        if not any(job.has_own_loss for job in self.model.jobs):
            parts, abreast = self.plan.parts, self.bucketer.abreast
            shared = self.plan.mesh.tp
            ladder = ladder_of(self.model.jobs, data, self.cutting, parts, abreast, shared)
        self.bucketer.ladder = ladder
        graphs.use(ladder)
        if self.mesh.size == 1 and ladder.steps:
            # A longer row that finds no memory frees the graphs.
            graphs.largest_row = max(step.tokens for step in ladder.steps)

    def capture(self) -> None:
        """Capture the rows of all sizes that were chosen, so that later ones run as CUDA graphs."""
        if isinstance(self.graphs, RowGraphs):
            # One process that finds no memory for a row frees the graphs, several do not.
            self.graphs.capture_steps(0 if self.mesh.size == 1 else self.graphs.largest_row)

    def rows_of(
        self,
        batches: Mapping[int, MicroBatches],
        objectives: Mapping[int, Sequence[Objective]] | None = None,
    ) -> list[PackedBatch]:
        """The rows of some jobs' micro-batches, by slot; the same on every process.

        objectives   by slot, losses of a loop of one's own, of each micro-batch
        """
        steps = {index: self.members[index].step for index in batches}
        offsets = {
            index: self._gathered[index].tokens for index in batches if index in self._gathered
        }
        rows = rows_of_round(self.model.jobs, batches, steps, self.row_tokens, offsets, objectives)
        return self.bucketer.made(cut_round(rows, self.plan.parts, self.cutting))

    def example_rows(self, batches: Mapping[int, MicroBatches]) -> list[PackedBatch]:
        """Rows that `rows_of` makes of jobs' first steps; there need be no members yet."""
        steps = dict.fromkeys(batches, 0)
        rows = rows_of_round(self.model.jobs, batches, steps, self.row_tokens)
        # Another one, for they are not counted.
        return replace(self.bucketer).made(cut_round(rows, self.plan.parts, self.cutting))

    def run_rows(
        self,
        rows: Sequence[PackedBatch],
        batches: Mapping[int, MicroBatches],
        normalizers: Mapping[int, float] | None = None,
    ) -> Tensor:
        """Forward and backward of rows; gradients add up in the parameters.

        rows          what `rows_of` made of the batches
        normalizers   by slot; by default the terms of each job's batch
        returns       losses over normalizers, [J] on the device, which may still compute
        """
        assert self.runner is not None
        counts = torch.zeros(len(self.model.jobs), dtype=torch.float64)
        for index, micro_batches in batches.items():
            terms = count_terms(self.members[index].job, micro_batches)
            counts[index] = terms if normalizers is None else normalizers[index]
        weights = torch.where(counts > 0, 1 / counts.clamp(min=1e-30), 0)
        weights = weights.to(self.mesh.device, non_blocking=True)
        self.updater.compile_ahead([self.members[index] for index in batches], weights)
        with norms_kept():
            losses = self.runner.run(rows, weights) if batches else weights
        for index in batches:
            if index not in self._gathered:
                regularise(self.members[index].job, self.members[index].parameters)
        return losses

    def run(
        self,
        batches: Mapping[int, MicroBatches],
        normalizers: Mapping[int, float] | None = None,
        *,
        rows: Sequence[PackedBatch] | None = None,
        objectives: Mapping[int, Sequence[Objective]] | None = None,
        forget: Callable[[Iterable[int]], None] | None = None,
    ) -> RoundResult:
        """Run batches as `run_rows` does; jobs at fault are left out where one process runs.

        Only where one process trains: others would wait for what this one does not send.

        rows      of the batches, where they are made already
        objectives   by slot, as of `rows_of`
        forget    undoes what a failed row has left of some jobs; by default their gradients are
                  zeroed
        returns   what ran, and why the others did not. Where there was no memory for all jobs
                  together, later rows have at most the tokens that there was memory for
        raises    the failure itself where it is nobody's, OutOfMemory where no job fits
        """
        rows = self.rows_of(batches, objectives) if rows is None else rows
        if self.mesh.size > 1:
            return RoundResult(self.run_rows(rows, batches, normalizers), batches)

        def alone(index: int) -> tuple[Tensor, int]:
            own = {index: batches[index]}
            rows = self.rows_of(
                own, {i: each for i, each in (objectives or {}).items() if i == index}
            )
            return self.run_rows(rows, own, normalizers), max(r.input_ids.numel() for r in rows)

        def together() -> Tensor:
            try:
                return self.run_rows(rows, batches, normalizers)
            except Exception as error:
                if not (is_out_of_memory(error) and self.graphs is not None and self.graphs.keys):
                    raise
            # Captured rows keep memory that this one has no use for.
            logger.warning("no memory for a row: captured rows are freed, and it runs again")
            (forget or self.drop)(batches)
            return self.run_rows(rows, batches, normalizers)

        ran = run_isolated(together, alone, forget or self.drop, self.model.jobs, batches)
        if ran.largest:
            self.row_tokens = min(self.row_tokens, ran.largest)
        return ran

    def drop(self, indices: Iterable[int]) -> None:
        """Zero the gradients of some jobs, and free what a failed row has left."""
        for index in indices:
            self.members[index].optimizer.zero_grad()
            self._gathered.pop(index, None)
        self.free_memory()

    def free_memory(self) -> None:
        """Free captured rows, what samplers keep, and cached memory."""
        if self.graphs is not None and self.mesh.size == 1:
            # Processes that capture together forget together, or not at all.
            self.graphs.clear()
        for keeper in list(self.keepers):
            keeper.release()
        gc.collect()
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()

    def gathered(self, name: str) -> Gathered:
        """State that a job has gathered, to go back to by `put_back`; raises StepMisuse."""
        member = self.member(name)
        if member.index not in self._gathered:
            return Gathered()
        gradients = {name: each.clone() for name, each in _gradients_of(member).items()}
        return replace(self._gathered[member.index], gradients=gradients)

    @torch.no_grad()
    def put_back(self, name: str, gathered: Gathered) -> None:
        """Set what a job has gathered to a state of `gathered`, taken here or before it left."""
        member = self.member(name)
        member.optimizer.zero_grad()
        self._gathered.pop(member.index, None)
        if gathered.batches:
            self._gathered[member.index] = replace(gathered, gradients={})
            given = moved(gathered.gradients, self.mesh.device)
            own = _gradients_of(member)
            torch._foreach_copy_([*own.values()], [given[name] for name in own])

    def has_gathered(self, name: str) -> bool:
        """Whether a job has gradients that no step has used; raises StepMisuse."""
        return self.member(name).index in self._gathered

    # Membership.

    def member(self, name: str) -> Member:
        """The job of this name; raises StepMisuse where it does not train here.

        The first call prepares, as a step does.
        """
        self._ready()
        for member in self.members.values():
            if member.job.name == name:
                return member
        raise StepMisuse(
            "no such job trains in this group",
            job=name,
            expected=", ".join(member.job.name for member in self.members.values()) or "none",
        )

    def add(self, member: Member) -> Member:
        """Add a member whose rows are in the model already."""
        member.optimizer.zero_grad()
        self.members[member.index] = member
        return member

    @in_default_modes
    def admit(
        self, job: Job, state: JobState | None = None, *, may_grow: bool = True
    ) -> tuple[Member, Admission]:
        """Admit a job; nothing is traced, compiled or loaded again.

        state      what it goes on from; None: it starts anew
        may_grow   banks may double where no slot is free
        raises     NotAdmitted where it does not fit, StepMisuse where nothing says how long its
                   schedule is, OptimizerError where its optimizer does not take its arguments,
                   AdapterFolderError and CheckpointError where what it goes on from is not its
                   own; the job is not in the group then
        """
        self._ready()
        self._steps_of(job)
        admission = self.take_in(job, may_grow=may_grow)
        try:
            member = self.add(self._member(job))
        except BaseException:
            self.model.release(job.name)
            raise
        try:
            if state is None or job.has_adapter_reference:
                start_adapter(self.model, job)
            if state is not None:
                member.restore(self.gathering.own(job.name, state), "its state")
        except BaseException:
            self._remove(member)
            raise
        return member, admission

    def take_in(self, job: Job, *, may_grow: bool) -> Admission:
        """Give a job rows in the model, and move those who have to make way.

        raises   NotAdmitted where there are none; nothing is changed then
        """
        admission = self.model.admit(job, may_grow=may_grow)
        for member in self.members.values():
            if member.job.name in admission.moved or admission.grown:
                member.rebind(self.model.job_parameters(member.job.name))
        self.updater.forget()
        if admission.grown:
            if self.graphs is not None:
                self.graphs.clear()
            assert self.runner is not None
            # Alone, rows run by the new banks as they did by the old ones.
            self.model.applied = AppliedPlan(self.plan, self.mesh, self.runner)
        return admission

    @in_default_modes
    def release(self, name: str) -> JobState:
        """Release a job; its rows are free then.

        returns   its last state, whole on the leader; gathered gradients are dropped
        """
        return self.let_go(self.member(name))

    @in_default_modes
    def park(self, name: str) -> None:
        """Park a job; its state waits in main memory for `restore`.

        raises   StepMisuse where it has gathered gradients that no step has used
        """
        member = self.member(name)
        if member.index in self._gathered:
            raise StepMisuse(
                "a job with gathered gradients cannot be parked",
                job=name,
                help="call apply for it first, or drop them with `drop([index])`",
            )
        self._parked[name] = self.let_go(member).with_own_values().in_main_memory()

    @in_default_modes
    def restore(self, job: Job) -> Member:
        """Restore a parked job where it was; raises StepMisuse where it is not parked."""
        if job.name not in self._parked:
            raise StepMisuse(
                "no such job is parked",
                job=job.name,
                expected=", ".join(self._parked) or "none",
            )
        member, _ = self.admit(job, self._parked[job.name])
        del self._parked[job.name]
        return member

    def let_go(self, member: Member) -> JobState:
        """Free a member's rows; returns its state, whole on the leader, in tensors of its own."""
        name = member.job.name
        state = self.gathering.whole(name, member.state())
        if self.mesh.leader:
            # On the device: copies to main memory would keep the others waiting.
            state = state.detached()
        self._remove(member)
        return state

    def _remove(self, member: Member) -> None:
        """Free a member's rows."""
        member.depart()
        del self.members[member.index]
        self._gathered.pop(member.index, None)
        self.model.release(member.job.name)
        self.updater.forget()

    def _ready(self) -> None:
        if self.runner is None:
            self.prepare()


def _gradients_of(member: Member) -> dict[str, Tensor]:
    trained = member.optimizer.trained.items()
    return {name: each.grad for name, each in trained if each.grad is not None}


def _require_dict(given: object) -> None:
    """Refuse what is no dict by the jobs' names; raises StepMisuse."""
    if not isinstance(given, Mapping):
        raise StepMisuse(
            "a call takes a dict by the jobs' names",
            found=type(given).__name__,
            help="such as accumulate({'a': [[sample]]}) and apply({'a': {}})",
        )
