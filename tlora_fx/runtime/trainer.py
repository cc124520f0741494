"""Train all jobs of a Shared Super-Model together, each to its own last step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tlora_fx.batch import pack, pad
from tlora_fx.driver import Jobs, as_jobs
from tlora_fx.errors import CheckpointError, ResumeMismatch
from tlora_fx.job import Job
from tlora_fx.runtime.adapters import start_adapters
from tlora_fx.runtime.checkpoint import CheckpointStore
from tlora_fx.runtime.data import JobData
from tlora_fx.runtime.interrupt import Interrupts
from tlora_fx.runtime.job_run import JobRun, StepReport
from tlora_fx.runtime.prepare import check_fits, load_all_data
from tlora_fx.runtime.probe import probe_batch_form
from tlora_fx.runtime.rounds import MicroBatches, rows_of_round
from tlora_fx.runtime.run_folder import RunFolder
from tlora_fx.runtime.weights import base_tensors
from tlora_fx.supermodel import SuperModel


class Watcher(Protocol):
    """What hears of a run while it goes on; every method may do nothing."""

    def started(self, runs: Sequence[JobRun]) -> None:
        """Training begins, or goes on."""

    def stepped(self, report: StepReport) -> None:
        """A job did an optimizer step."""

    def ended(self, run: JobRun) -> None:
        """A job is done, or has failed."""

    def warned(self, text: str) -> None:
        """Something went wrong that does not stop the run."""


class Silent:
    """A watcher that keeps quiet."""

    def started(self, runs: Sequence[JobRun]) -> None:
        """Say nothing."""

    def stepped(self, report: StepReport) -> None:
        """Say nothing."""

    def ended(self, run: JobRun) -> None:
        """Say nothing."""

    def warned(self, text: str) -> None:
        """Say nothing."""


class Trainer:
    """Trains the jobs of a model.

    model            what `tlora_fx.compile` made
    jobs             the same jobs
    output           folder for adapters, metrics and checkpoints; by default a new one in runs/
    device           by default the GPU where there is one
    resume           go on from the newest checkpoint in `output`
    data             samples by job name, instead of what the jobs' `data` names
    max_row_tokens   rows are closed before they grow beyond this
    watch            hears of every step
    """

    def __init__(
        self,
        model: SuperModel,
        jobs: Jobs | None = None,
        *,
        output: Path | str | None = None,
        device: torch.device | str | None = None,
        resume: bool = False,
        data: Mapping[str, JobData] | None = None,
        max_row_tokens: int = 16384,
        watch: Watcher | None = None,
    ) -> None:
        self.model = model
        self.jobs = list(model.jobs) if jobs is None else as_jobs(jobs)
        _demand_same_jobs(model.jobs, self.jobs)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self.folder = RunFolder(output or Path("runs") / stamp)
        self.device = torch.device(device or default_device())
        self.resume = resume
        self.max_row_tokens = max_row_tokens
        self.watch: Watcher = watch or Silent()
        self.store = CheckpointStore(self.folder.path)
        self.runs: list[JobRun] = []
        self.rounds = 0
        self._data = data

    def run(self) -> list[JobRun]:
        """Train until every job is done, has failed, or the user interrupts.

        returns   the jobs as they ended; `status` and `reason` tell how
        raises    TloraError before training for what is wrong with data, base or folder;
                  KeyboardInterrupt after a checkpoint when the user stopped the run
        """
        data = self._data or load_all_data(self.jobs)
        check_fits(self.model.backbone, data)
        with self.folder.held(self.resume), Interrupts() as interrupts:
            self.prepare(data)
            self.watch.started(self.runs)
            while self._active() and not interrupts.asked:
                self._round()
            self._save(last=True)
        if interrupts.asked:
            raise KeyboardInterrupt(f"stopped after a checkpoint in {self.store.folder}")
        return self.runs

    def prepare(self, data: Mapping[str, JobData]) -> None:
        """Load the base, start or restore the adapters, and make each job's optimizer."""
        if not self.model.ready:
            self.model.materialize(base_tensors(self.model.backbone, self.device), self.device)
        start_adapters(self.model)
        if self.model.group.form == "batch":
            probe_batch_form(self.model)
        self.runs = [
            JobRun(i, job, data[job.name], self.model.job_parameters(job.name), self.folder)
            for i, job in enumerate(self.jobs)
        ]
        for run in self.runs:
            run.optimizer.zero_grad()
        if self.resume:
            self._restore()

    def gradients(self, batches: Mapping[int, MicroBatches]) -> dict[int, float]:
        """One forward and backward of all rows of a round; gradients add up in the parameters.

        batches   by job index
        returns   each job's mean loss over its targets of the whole optimizer step
        """
        counts = torch.zeros(len(self.jobs), dtype=torch.float64)
        for index, micro_batches in batches.items():
            counts[index] = self.runs[index].targets(micro_batches)
        weights = torch.where(counts > 0, 1 / counts.clamp(min=1), 0).to(self.device)
        steps = {index: self.runs[index].step for index in batches}
        total: Tensor | None = None
        form = pack if self.model.group.form == "packed" else pad
        for tokens in rows_of_round(self.jobs, batches, steps, self.max_row_tokens):
            losses = self.model(form(tokens).to(self.device)) * weights
            losses.sum().backward()
            total = losses.detach() if total is None else total + losses.detach()
        told = total.tolist() if total is not None else []
        return {index: told[index] for index in batches}

    def _active(self) -> list[JobRun]:
        return [run for run in self.runs if run.status == "running"]

    def _round(self) -> None:
        """Every running job does one optimizer step."""
        started = time.perf_counter()
        active = self._active()
        batches = {run.index: run.batches() for run in active}
        losses = self.gradients(batches)
        self.rounds += 1
        due = False
        for run in active:
            seconds = time.perf_counter() - started
            report = run.finish_step(losses[run.index], batches[run.index], seconds)
            if report is not None:
                self.watch.stepped(report)
            if run.status != "running":
                run.write(self._base_name())
                self.watch.ended(run)
            due = due or run.status != "running" or run.step % run.job.save_steps == 0
        if due and self._active():
            self._save(last=False)

    def _save(self, *, last: bool) -> None:
        """Write a checkpoint; while training goes on, a full disk only costs this one.

        raises    CheckpointError at the end of a run
        """
        states = {run.job.name: run.state() for run in self.runs}
        described = {"rounds": self.rounds, **self._identity()}
        try:
            self.store.save(self.rounds, states, described)
        except CheckpointError as error:
            if last:
                raise
            self.watch.warned(str(error))

    def _restore(self) -> None:
        checkpoint = self.store.load()
        if checkpoint is None:
            self.watch.warned("there is no checkpoint yet: every job starts anew")
            for run in self.runs:
                run.metrics.truncate_after(0)
            return
        mine = self._identity()
        for key, value in mine.items():
            if checkpoint.run.get(key) != value:
                raise ResumeMismatch(
                    "the checkpoint belongs to other jobs or another base",
                    folder=checkpoint.path,
                    field=key,
                    expected=_first_difference(checkpoint.run.get(key), value)[0],
                    found=_first_difference(checkpoint.run.get(key), value)[1],
                    help="resume with the job file that the run was started with; "
                    "only max_steps and save_steps may change",
                )
        self.rounds = int(checkpoint.run["rounds"])
        for run in self.runs:
            run.restore(checkpoint.jobs[run.job.name], str(checkpoint.path))
            if run.status != "running":
                run.write(self._base_name())

    def _identity(self) -> dict[str, object]:
        """What must be equal for a run to go on."""
        free = {"max_steps", "num_train_epochs", "save_steps", "base"}
        jobs = {job.name: job.model_dump(mode="json", exclude=free) for job in self.jobs}
        return {"jobs": jobs, "base": self.model.backbone.fingerprint()}

    def _base_name(self) -> str | None:
        spec = self.model.backbone.spec
        return spec.model or (str(spec.config) if spec.config else None)


def default_device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _demand_same_jobs(compiled: Sequence[Job], given: Sequence[Job]) -> None:
    if [job.name for job in compiled] != [job.name for job in given]:
        raise ResumeMismatch(
            "the model was compiled for other jobs",
            expected=", ".join(job.name for job in compiled),
            found=", ".join(job.name for job in given),
            help="compile the jobs that you train",
        )
    for one, two in zip(compiled, given, strict=True):
        mine, theirs = _what_is_compiled(one), _what_is_compiled(two)
        if mine != theirs:
            expected, found = _first_difference(mine, theirs)
            raise ResumeMismatch(
                f"the model was compiled for another job '{one.name}'",
                job=one.name,
                expected=expected,
                found=found,
                help="compile the jobs that you train",
            )


def _what_is_compiled(job: Job) -> dict[str, object]:
    """What of a job is in the model."""
    return {
        "base": job.base.model_dump(),
        "lora": job.lora_fields,
        "adapter_dtype": job.adapter_dtype,
        "adapter_compute": job.adapter_compute,
    }


def _first_difference(one: object, two: object) -> tuple[object, object]:
    """Where two nested mappings part."""
    while isinstance(one, dict) and isinstance(two, dict):
        key = next((k for k in {**one, **two} if one.get(k) != two.get(k)), None)
        if key is None:
            break
        inner = one.get(key), two.get(key)
        if not all(isinstance(value, dict) for value in inner):
            return f"{key}: {inner[0]}", f"{key}: {inner[1]}"
        one, two = inner
    return one, two
