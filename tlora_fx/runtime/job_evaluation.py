"""Decisions from a job's evaluations: its best step, and whether it stops early.

When a job is evaluated, what is better, and how long it waits are as in transformers' Trainer and
EarlyStoppingCallback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tlora_fx.config.job import TRAIN_LOSS, Job
from tlora_fx.errors import MetricFunctionError
from tlora_fx.runtime.data.samples import JobData

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Result of one evaluation of one job.

    step      optimizer steps done
    metrics   by name: eval_loss, eval_mean_token_accuracy and eval_exact_match where there is data,
              what the job's own function adds, train_loss (the mean over the steps since the last
              evaluation), and eval_runtime in seconds, which all jobs of the evaluation shared
    is_best   no step before was better
    """

    job: str
    step: int
    metrics: Metrics
    is_best: bool


@dataclass(slots=True)
class JobEvaluation:
    """Progress of a job's evaluations.

    best_step, best_value   so far, by the job's metric; None before the first evaluation
    failed                  evaluations since one was better than the best by the threshold
    last                    the newest metrics
    rung_losses             evaluation loss at each rung of the job's halving, by step; infinite
                            where it is not finite
    """

    job: Job
    data: JobData
    best_step: int | None = None
    best_value: float | None = None
    failed: int = 0
    last: dict[str, float] = field(default_factory=dict)
    rung_losses: dict[int, float] = field(default_factory=dict)
    _loss_sum: float = 0.0
    _loss_steps: int = 0

    def is_due(self, step: int) -> bool:
        """Whether the job is evaluated when it has done so many steps; after the last one it is."""
        if self.job.eval_strategy == "no":
            return False
        every = self.job.eval_steps or self.data.steps_per_epoch
        return step % every == 0 or step == self.data.steps or step in self.rungs

    @property
    def rungs(self) -> list[int]:
        """The steps at which the job is compared with others; none without halving."""
        return [] if self.job.halving is None else self.job.halving.rungs(self.data.steps)

    def add_loss(self, loss: float) -> None:
        """Note the training loss of a step."""
        self._loss_sum += loss
        self._loss_steps += 1

    def take(self, step: int, measured: Metrics) -> EvaluationReport:
        """Judge an evaluation.

        measured   what `Evaluator.measure` gave
        raises     MetricFunctionError where the metric for the best step is none of them
        """
        losses = {TRAIN_LOSS: self._loss_sum / self._loss_steps} if self._loss_steps else {}
        self._loss_sum, self._loss_steps = 0.0, 0
        self.last = {**measured, **losses}
        if step in self.rungs:
            loss = measured.get("eval_loss", math.inf)
            self.rung_losses[step] = loss if math.isfinite(loss) else math.inf
        is_best = self._compare(step)
        return EvaluationReport(self.job.name, step, self.last, is_best)

    def _compare(self, step: int) -> bool:
        job, name = self.job, self.job.best_metric
        if name not in self.last:
            raise MetricFunctionError(
                f"an evaluation has no metric '{name}'",
                job=job.name,
                expected="the one that metric_for_best_model names",
                found=", ".join(sorted(self.last)),
                help="let the function of compute_metrics return it, or name another",
            )
        value, best = self.last[name], self.best_value
        gain = math.inf if math.isfinite(value) else math.nan
        if best is not None:
            gain = value - best if job.best_is_greatest else best - value
        # As of transformers' EarlyStoppingCallback, which compares with the best before.
        self.failed = 0 if gain > job.early_stopping_threshold else self.failed + 1
        if not gain > 0:
            return False
        self.best_step, self.best_value = step, value
        return True

    @property
    def stops(self) -> bool:
        """Whether the job has waited long enough for something better."""
        patience = self.job.early_stopping_patience
        return patience is not None and self.failed >= patience

    @property
    def why_stopped(self) -> str:
        """Message for the user when the job stops."""
        best = "a number"
        if self.best_value is not None:
            best = f"{self.best_value:.6g} at step {self.best_step}"
        waited = f"for {self.failed} evaluation{'s' if self.failed > 1 else ''}"
        told = f"stopped early: {waited} {self.job.best_metric} was not better"
        if threshold := self.job.early_stopping_threshold:
            return f"{told} by more than {threshold:g}; the best is {best}"
        return f"{told} than {best}"

    def state(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        if self.job.eval_strategy == "no":
            return {}
        return {
            "metric": self.job.best_metric,
            "best_step": self.best_step,
            "best_value": self.best_value,
            "failed": self.failed,
            "last": self.last,
            "loss_sum": self._loss_sum,
            "loss_steps": self._loss_steps,
            "keeps_best": self.job.load_best_model_at_end,
            "rungs": [
                [step, loss if math.isfinite(loss) else None]
                for step, loss in self.rung_losses.items()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` said; what was best by another metric says nothing now."""
        if not state:
            return
        self.last = dict(state["last"])
        self._loss_sum, self._loss_steps = state["loss_sum"], state["loss_steps"]
        rungs = state.get("rungs", ())
        self.rung_losses = {step: math.inf if loss is None else loss for step, loss in rungs}
        if state["metric"] == self.job.best_metric:
            self.best_step, self.best_value = state["best_step"], state["best_value"]
            self.failed = state["failed"]

    def summary(self) -> dict[str, Any]:
        """Evaluations in a job's status."""
        if not self.last:
            return {}
        names = {"metric_for_best_model": self.job.best_metric, "best_step": self.best_step}
        return {"evaluation": {**names, "best_value": self.best_value, "last": self.last}}
