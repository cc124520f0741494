"""One job while it trains: its data, optimizer, metrics and counters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from tlora_fx.config.adapter_folder import CONFIG
from tlora_fx.config.halving import HALVED
from tlora_fx.config.job import DataSpec, Job
from tlora_fx.errors import MetricFunctionError, RunFolderError, TloraError, errors_as
from tlora_fx.host.durable import link_or_copy, replace_file
from tlora_fx.host.phases import StartRecord
from tlora_fx.host.storage import os_errors, until_there_is_room
from tlora_fx.model.backbone import Backbone
from tlora_fx.model.objectives import Objective, Scores
from tlora_fx.runtime.adapters.files import (
    adapter_tensors,
    config_bytes,
    load_adapter,
    write_adapter,
)
from tlora_fx.runtime.adapters.model_card import model_card
from tlora_fx.runtime.checkpoints.store import JobState
from tlora_fx.runtime.data.batching import MicroBatches, count_tokens, objective_of
from tlora_fx.runtime.data.samples import DataReport, JobData
from tlora_fx.runtime.data.tables import lengths_of
from tlora_fx.runtime.job_evaluation import EvaluationReport, JobEvaluation, Metrics
from tlora_fx.runtime.member import Member
from tlora_fx.runtime.optim.group_update import Outcome
from tlora_fx.runtime.run_folder import DATA, JOB, RunFolder, without_endless
from tlora_fx.tracing.adapters import written_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Status = Literal["running", "done", "failed", "paused"]
#: How the reason of a job begins that was ended before its last step because a user asked for it.
STOPPED = "stopped as asked"


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Result of one round: one optimizer step of every job that trained in it.

    number         of the round, among those of this process
    tokens         of all jobs
    seconds        wall time, without evaluations and checkpoints
    rows           rows that this process ran, under a pipeline forwards of its stages; 0 where none
                   may run as a CUDA graph
    rows_replayed  those of them that ran as a CUDA graph
    start          what the start took that this round was the end of; None of later rounds
    """

    number: int
    tokens: int
    seconds: float
    rows: int = 0
    rows_replayed: int = 0
    start: StartRecord | None = None

    def rate(self, tokens: int) -> float:
        """Tokens a second of this round; NaN where it took no time."""
        return tokens / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one optimizer step of one job.

    step           optimizer steps done, this one included
    loss           mean over the step's target tokens
    grad_norm      of the job's own gradients, before clipping
    learning_rate  that the step used
    tokens         of the job so far
    seconds        wall time of the round
    step_tokens    of this step
    round          the step's round
    metrics        numbers that a function as loss reported, each the mean over micro-batches
    """

    job: str
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    step_tokens: int = 0
    round: RoundReport | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleReport:
    """Answers of a job to its `sample_prompts` after a step.

    texts   a pair for each prompt that could be asked: it, and what the job says
    """

    job: str
    step: int
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class StepAhead:
    """A step that was launched before anybody knows what it came to.

    step     that it is
    before   tokens of the job before it
    tokens   of the job, this step's included
    rate     that it uses
    metrics  of each micro-batch what a function as loss reported, on its way to the host
    """

    step: int
    before: int
    tokens: int
    rate: float
    metrics: Sequence[Mapping[str, Any]] = ()


def described(error: Exception) -> str:
    """An exception in one line."""
    if not isinstance(error, TloraError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    facts = ", ".join(f"{name} {value}" for name, value in error.facts.items())
    return " ".join(f"{error.what} ({facts})".split())


def status_after(state: JobState, job: Job, data: JobData) -> Status:
    """Status of a job that goes on from a state, with the steps that it has now."""
    if state.status == "failed":
        return "failed"
    evaluation = JobEvaluation(job, data)
    evaluation.restore(state.evaluation)
    if state.status == "done" and (evaluation.stops or state.reason.startswith((STOPPED, HALVED))):
        return "done"
    return "running" if state.step < data.steps else "done"


class JobRun(Member):
    """A member of a group with its data, metrics, evaluation and folder.

    fault      why it cannot go on, until all processes know and it has failed
    still      steps in a row without any gradient
    origin     the checkpoint that it joined from and its state there, until another holds it too
    goes_on    it failed by no fault of its own, as on a full disk: a resumed run trains it on
    """

    def __init__(
        self,
        index: int,
        job: Job,
        data: JobData,
        parameters: Mapping[str, torch.nn.Parameter],
        scalings: Mapping[str, float],
        folder: RunFolder,
        backbone: Backbone,
    ) -> None:
        super().__init__(index, job, parameters, scalings, data.steps)
        self.data, self.folder, self.backbone = data, folder, backbone
        self.metrics = folder.metrics(job.name)
        self.loss = math.nan
        self.status: Status = "running"
        self.reason = ""
        self.evaluation = JobEvaluation(job, data)
        self.best: dict[str, Tensor] = {}
        self._config: bytes | None = None
        self._tokenizer_files: Mapping[str, Path] = {}
        self.fault = ""
        self.origin: tuple[Path, JobState] | None = None
        self.goes_on = False
        self.still = 0
        self.scores = Scores()

    def objectives(self, batches: MicroBatches) -> list[Objective] | None:
        """The losses of a step's micro-batches, which the run hears of; None where they are plain.

        batches   what `batches` gave
        """
        if self.job.named_loss is None:
            return None
        self.scores = Scores()
        made = (objective_of(self.job, samples, self.scores) for samples in batches)
        return [each for each in made if each is not None]

    def _coming_metrics(self) -> list[Mapping[str, Any]]:
        """What the step's losses have reported of each micro-batch.

        Numbers of a GPU are on their way: they are there once the update that follows is known.
        """
        return [
            {
                name: value.to("cpu", non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in own.items()
            }
            for own in self.scores.metrics.values()
        ]

    def batches(self) -> MicroBatches:
        """The micro-batches of the step that the job is at."""
        return self.data.step(self.step)

    def finish_step(
        self, loss: float, batches: MicroBatches, round_: RoundReport, norm: float
    ) -> StepReport | None:
        """Update the adapter from the gathered gradients.

        loss      mean over the step's targets
        round_    the step's round, with its seconds until now
        norm      of the job's gradients
        returns   None when loss or gradients are not finite: the job has failed, and its adapter
                  stays as the last good step left it
        """
        # A NaN or infinite loss, or gradient, ends the job; its neighbours train on.
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._fail_as_not_finite(self.step + 1, loss, norm)
            return None
        ahead = self._ahead(batches, [*self.scores.metrics.values()])
        report = self._report(ahead, loss, norm, round_)
        # Before the update: where the line cannot be written, the job is whole at the step before.
        self._append(report)
        self.optimizer.step(norm)
        self.optimizer.zero_grad()
        self.step, self.tokens = report.step, report.tokens
        self._take_in(report)
        return report

    def _ahead(self, batches: MicroBatches, metrics: list[Mapping[str, Any]]) -> StepAhead:
        tokens, rate = self.tokens + count_tokens(batches), self.optimizer.learning_rate
        return StepAhead(self.step + 1, self.tokens, tokens, rate, metrics)

    def _report(
        self, ahead: StepAhead, loss: float, norm: float, round_: RoundReport
    ) -> StepReport:
        return StepReport(
            self.job.name, ahead.step, loss, norm, ahead.rate, ahead.tokens, round_.seconds,
            ahead.tokens - ahead.before, round_, _means(ahead.metrics),
        )  # fmt: skip

    def _take_in(self, report: StepReport) -> None:
        """Judge the job by a step that is done."""
        self.loss = report.loss
        self.still = self.still + 1 if report.grad_norm == 0 else 0
        self.evaluation.add_loss(report.loss)
        if report.step >= self.data.steps:
            self.status = "done"

    def _append(self, report: StepReport) -> None:
        own = {"metrics": without_endless(report.metrics)} if report.metrics else {}
        self.metrics.append(
            step=report.step, loss=report.loss, grad_norm=report.grad_norm,
            learning_rate=report.learning_rate, tokens=report.tokens, seconds=report.seconds,
            more=_speed(report) | own,
        )  # fmt: skip

    def _fail_as_not_finite(self, step: int, loss: float, norm: float) -> None:
        """End the job: the loss, or the gradient, of this step is NaN or infinite."""
        self.fail(
            f"step {step}: loss {loss:.6g}, gradient norm {norm:.6g}; the adapter is kept as step "
            f"{step - 1} left it"
        )

    def start_step(self, batches: MicroBatches) -> StepAhead:
        """Count a step whose update is about to be launched; `end_step` says what came of it."""
        ahead = self._ahead(batches, self._coming_metrics())
        self.step, self.tokens = ahead.step, ahead.tokens
        return ahead

    def end_step(
        self, ahead: StepAhead, outcome: Outcome, round_: RoundReport
    ) -> StepReport | None:
        """Take in what a step came to, up to one step later.

        Where its line of metrics cannot be written, the step is done all the same.

        returns   None when the job has failed: the adapter is as the last good step left it, and so
                  are the counters
        """
        if not outcome.updated:
            self.optimizer.noted(-1)
            if self.status != "failed":
                self.step, self.tokens = ahead.step - 1, ahead.before
                self._fail_as_not_finite(ahead.step, outcome.loss, outcome.norm)
            return None
        report = self._report(ahead, outcome.loss, outcome.norm, round_)
        self._take_in(report)
        # Last: other processes, which write no file, are as far.
        self._append(report)
        return report

    @property
    def needs_round_end(self) -> bool:
        """Whether something follows at once from the step that the job is at."""
        save = self.step % self.job.save_steps == 0
        return save or self.step >= self.data.steps or self.is_evaluated or self.is_sampled

    @property
    def is_evaluated(self) -> bool:
        """Whether the step that the job has just done is one to evaluate it at."""
        return self.status != "failed" and self.evaluation.is_due(self.step)

    @property
    def is_sampled(self) -> bool:
        """Whether the job answers its prompts after the step that it has just done."""
        if self.status == "failed" or self.fault or not self.job.sample_prompts:
            return False
        every = self.job.sample_steps
        due = self.evaluation.is_due(self.step) if every is None else self.step % every == 0
        return due or self.status == "done"

    def take_evaluation(self, measured: Metrics) -> EvaluationReport | None:
        """Judge an evaluation: keep the best adapter, and stop early where the job asks for it.

        returns   None where the metric for the best step is missing: the job has failed
        """
        try:
            report = self.evaluation.take(self.step, measured)
        except MetricFunctionError as error:
            self.status, self.reason = "failed", str(error)
            return None
        self.metrics.append_evaluation(self.step, report.metrics)
        if report.is_best and self.job.load_best_model_at_end:
            adapter = adapter_tensors(self.parameters)
            self.best = {name: tensor.cpu() for name, tensor in adapter.items()}
        if self.evaluation.stops and self.status == "running":
            self.status, self.reason = "done", self.evaluation.why_stopped
        return report

    def final_adapter(self) -> Mapping[str, Tensor]:
        """Adapter that the job leaves: its best step's where it keeps one, else the last."""
        if self.best and (self.status == "done" or self.is_at_rung):
            return self.best
        return super().final_adapter()

    @property
    def is_at_rung(self) -> bool:
        """Whether the job is where it is compared with others: it may end there."""
        return self.status in ("running", "paused") and self.step in self.evaluation.rung_losses

    def load_best(self) -> None:
        """Load the best step's values into the parameters, where the job keeps it and is done."""
        if self.best and self.status == "done":
            load_adapter(self.parameters, self.best, "the best step")

    def fail(self, reason: str) -> None:
        """End the job; its adapter stays as it is."""
        self.status, self.reason, self.fault = "failed", reason, ""
        if not self.left:
            self.optimizer.zero_grad()

    def suspect(self, error: Exception, step: int | None = None) -> None:
        """Remember the first exception; it ends the job as soon as all processes know of it.

        step   that met it, where the job may be further by now
        """
        self.fault = self.fault or f"step {step or self.step + 1}: {described(error)}"

    def stop(self) -> None:
        """End the job where it is, because somebody asked for it: its adapter is what it is."""
        self.status, self.reason = "done", f"{STOPPED} after step {self.step}"

    def halve(self, why: str) -> None:
        """End the job where it is, because others of its halving are better."""
        self.status, self.reason = "done", why

    def pause(self) -> None:
        """Train no more for now; a run that goes on with the job trains it on."""
        self.status = "paused"

    def depart(self) -> None:
        """Free all tensors, the best step's and those it came with among them."""
        super().depart()
        self.best, self.origin = {}, None

    def state(self) -> JobState:
        """All that the job needs to go on."""
        return replace(
            super().state(),
            status="running" if self.goes_on or self.status == "paused" else self.status,
            reason="" if self.goes_on else self.reason,
            evaluation=self.evaluation.state(),
            best=self.best,
        )

    def snapshot(self, state: JobState | None = None) -> JobRun:
        """The run as it stands, without its tensors: counters and words that go no further.

        state    where its checkpoint has it, if that is not where it stands
        """
        run = copy(self)
        if state is not None:
            run.step, run.tokens = state.step, state.tokens
        run.parameters, run.best, run.evaluation = {}, {}, copy(self.evaluation)
        run.scores = Scores()
        vars(run).pop("optimizer", None)
        return run

    def restore(self, state: JobState, source: str) -> None:
        """Go on from a checkpoint; metrics after it are dropped."""
        super().restore(state, source)
        self.recount(state)

    def recount(self, state: JobState) -> None:
        """Take over a state's counters; metrics after it are dropped."""
        self.step, self.tokens = state.step, state.tokens
        self.status = status_after(state, self.job, self.data)
        self.reason = "" if self.status == "running" else state.reason
        self.metrics.truncate_after(self.step)
        self.loss = self.metrics.last_loss()
        self.evaluation.restore(state.evaluation)
        if self.job.load_best_model_at_end and self.evaluation.best_step is not None:
            self.best = dict(state.best)

    def begin(self, tokenizer_files: Mapping[str, Path] | None = None) -> Mapping[str, Path]:
        """Leave in the job's folder what is known before its first step: job, tokenizer, status.

        tokenizer_files   of another job of the same base, to be linked
        returns           the job's own
        raises            RunFolderError when the disk refuses
        """
        if not self.folder.writes:
            return {}
        folder = self.folder.job(self.job.name)
        with errors_as(
            RunFolderError, "a job's folder cannot be written",
            folder=folder, help="free space, or choose another folder with -o",
        ):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)
            self._tokenizer_files = save_tokenizer(self.data.tokenizer, folder, tokenizer_files)
            replace_file(folder / DATA, json.dumps(described_data(self.data), indent=1).encode())
            replace_file(folder / JOB, self._described())
        self.write_status()
        return self._tokenizer_files

    def companions(self, base: str | None) -> dict[str, bytes | Path]:
        """Files beside the job's adapter: PEFT's config, tokenizer, job, and model card.

        base   hub id or folder of the base
        """
        if self._config is None:
            self._config = config_bytes(written_config(self.job, self.backbone), base)
        card = model_card(
            self.job, self.data, base, step=self.step, tokens=self.tokens, loss=self.loss,
            evaluation=self.evaluation.summary(),
        )  # fmt: skip
        own = {CONFIG: self._config, JOB: self._described(), "README.md": card.encode()}
        return {**own, **self._tokenizer_files}

    def _described(self) -> bytes:
        """The job as JSON, with the format of its data that was found."""
        read = _as_read(self.job.data, self.data.report)
        written = self.job.model_copy(update={"data": read, "base": self.job.base.as_written()})
        return (written.model_dump_json(indent=1) + "\n").encode()

    def write(self, adapter: Mapping[str, Tensor], base: str | None) -> None:
        """Leave the job's PEFT adapter folder and its status.

        adapter   whole tensors by the names of PEFT's files
        base      hub id or folder of the base
        """
        if not self.folder.writes:
            return
        folder = self.folder.job(self.job.name)
        config = written_config(self.job, self.backbone)
        until_there_is_room(lambda: write_adapter(folder, adapter, config, base))
        for name, content in self.companions(base).items():
            if isinstance(content, bytes) and name != CONFIG:
                replace_file(folder / name, content)
        self.write_status()

    def write_status(self, status: str = "") -> None:
        """Say in the job's folder how it stands.

        status    as people are told, where that is not the job's own
        """
        told: dict[str, object] = {
            "status": status or self.status,
            "step": self.step,
            "steps": self.data.steps,
        }
        told |= {"tokens": self.tokens} | ({"reason": self.reason} if self.reason else {})
        self.folder.write_status(self.job.name, told | self.evaluation.summary())


def _means(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each number over the micro-batches that report it."""
    names = dict.fromkeys(name for own in metrics for name in own)
    found = {name: [float(own[name]) for own in metrics if name in own] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def _speed(report: StepReport) -> dict[str, object]:
    """What a step's line says of speed: tokens a second, rows as graphs, and what a start took."""
    if (round_ := report.round) is None:
        return {}
    speed: dict[str, object] = {
        "tokens_per_second": round_.rate(report.step_tokens),
        "round_tokens_per_second": round_.rate(round_.tokens),
    }
    if round_.rows:
        speed |= {"rows": round_.rows, "rows_replayed": round_.rows_replayed}
    if round_.start is not None:
        start = round_.start.as_json()
        speed |= {"start_seconds": start["seconds"], "phases": start["phases"]}
    return speed


def _as_read(data: DataSpec, report: DataReport) -> DataSpec:
    """The data of a job with the format that was found, that of each of several data sets."""
    reports = [part.report for part in report.parts] or [report]
    if len(reports) != len(data.parts):
        return data
    first, *more = (
        part.model_copy(update={"format": own.format or part.format})
        for part, own in zip(data.parts, reports, strict=True)
    )
    return first.model_copy(update={"more": tuple(more)})


def described_data(data: JobData) -> dict[str, object]:
    """Description of a job's data: their number, and how many have at most 8, 16, ... tokens."""
    most = np.exp2(np.ceil(np.log2(np.maximum(lengths_of(data.samples), 8)))).astype(np.int64)
    found, counts = np.unique(most, return_counts=True)
    lengths = {str(bound): int(count) for bound, count in zip(found, counts, strict=True)}
    kinds = {"samples": len(data.samples), "evaluated": len(data.evaluation)}
    return {**kinds, "format": data.report.format, "lengths": lengths}


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None, folder: Path, others: Mapping[str, Path] | None
) -> dict[str, Path]:
    """Save a tokenizer with its chat template into a folder, unless one is there.

    others    the same tokenizer's files elsewhere, to be linked
    returns   its files, by their names in the folder; none where there is no tokenizer
    raises    OSError
    """
    if tokenizer is None:
        return {}
    if others:
        for name, path in others.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / name).exists():
                link_or_copy(path, folder / name)
        return {name: folder / name for name in others}
    with os_errors(folder):
        saved = [Path(path) for path in tokenizer.save_pretrained(str(folder))]
    return {str(path.relative_to(folder)): path for path in saved if path.is_file()}
