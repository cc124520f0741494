"""Evaluations and samples of the jobs of a run, and what follows from them for each job.

Jobs are measured on data that they do not train on, in rows that they share. Nothing drops and
nothing has a gradient. Neither dropout's keys nor any counter of training moves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from tlora_fx.config.job import Job
from tlora_fx.errors import MetricFunctionError
from tlora_fx.model.batch import IGNORED, PackedBatch
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.data.batching import Row, RowBucketer, cut_round, rows_of_round
from tlora_fx.runtime.data.labels import decoded
from tlora_fx.runtime.data.samples import JobData, Sample
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.generation import PromptAnswerer
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.job_evaluation import Metrics
from tlora_fx.runtime.job_run import JobRun
from tlora_fx.runtime.round_end import CallbackErrors
from tlora_fx.runtime.user_code import find_function, told_with_line


class Measurements:
    """Evaluates jobs of a group together and lets them answer their prompts, on the leader.

    group   is prepared
    ranks   its processes
    """

    def __init__(self, group: GroupStep, ranks: Ranks, callback: TrainerCallback) -> None:
        self.group, self.callback = group, callback
        self.evaluator = Evaluator(group, ranks, callback.warned)
        self.sampler = PromptAnswerer(group.plan, group.model) if group.mesh.leader else None

    def warn(self, jobs: Sequence[Job]) -> None:
        """Say before training which prompts stay without an answer."""
        if self.sampler is not None:
            self.sampler.warn(jobs, self.callback)

    def evaluate(self, runs: Sequence[JobRun]) -> CallbackErrors:
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
                _blame(run, error)
                # A job that failed here may go on from where it is.
                run.goes_on = not self.group.gathering.apart
        return outside

    def sample(self, runs: Sequence[JobRun]) -> None:
        """Generate answers to the jobs' prompts, on the leader; a failure costs them alone."""
        if self.sampler is not None and runs and not self.sampler.tell(runs, self.callback):
            self.group.free_memory()

    def _measured(self, runs: Sequence[JobRun]) -> Mapping[int, Metrics]:
        """The evaluations of jobs; where one process fails at all of them, each job's by itself."""
        try:
            return self.evaluator.measure({run.index: run.data for run in runs})
        except Exception:
            if self.group.mesh.size > 1:
                raise
        self.group.free_memory()
        measured: dict[int, Metrics] = {}
        for run in runs:
            try:
                measured |= self.evaluator.measure({run.index: run.data})
            except Exception as error:  # noqa: BLE001  (whatever it is, the neighbours go on)
                _blame(run, error)
        return measured


def _blame(run: JobRun, error: Exception) -> None:
    """End a job for an exception: now where it has ended anyway, else when all know."""
    run.suspect(error)
    if run.status != "running":
        run.fail(run.fault)


class Evaluator:
    """Measures jobs of a group on their evaluation data, those of one step together.

    group   is prepared
    ranks   its processes
    warn    is told of a metric function that fails
    """

    def __init__(self, group: GroupStep, ranks: Ranks, warn: Callable[[str], None]) -> None:
        assert group.runner is not None
        self.model, self.runner, self.ranks = group.model, group.runner, ranks
        # A multiple of so many rows is run at a time.
        self.parts, self.cutting, self.warn = group.plan.parts, group.cutting, warn
        # What training has padded is counted apart.
        self.rows = RowBucketer(group.model.group.form == "packed")

    def measure(self, data: Mapping[int, JobData]) -> dict[int, dict[str, float]]:
        """Each job's metrics; the same on every process, all of which call this at once.

        data   by job index, of the jobs that are evaluated now
        """
        started = time.perf_counter()
        given = {index: each for index, each in data.items() if each.evaluation}
        sums = np.zeros(len(self.model.jobs))
        predicted: dict[int, list[np.ndarray]] = {index: [] for index in given}
        for rows in self._rounds(given):
            scores = self.runner.evaluate(rows)
            sums += scores.losses.cpu().numpy()
            tokens = self._everywhere(scores.predicted)
            # Each job gets what was predicted for it; its sequences come in order.
            for index, row in enumerate(rows):
                bounds = row.target_segments.tolist()
                for job, parts in predicted.items():
                    parts.append(tokens[index][bounds[job] : bounds[job + 1]])
        measured: dict[int, dict[str, float]] = {index: {} for index in data}
        if self.ranks.mesh.leader:
            for index, each in given.items():
                of_job = np.concatenate(predicted[index])
                measured[index] = self._metrics(each, float(sums[index]), of_job)
            seconds = time.perf_counter() - started
            for index in given:
                measured[index]["eval_runtime"] = seconds
        return self.ranks.from_leader(measured)

    def _rounds(self, data: Mapping[int, JobData]) -> Iterator[list[PackedBatch]]:
        """Rows of all jobs' batches, a few at a time."""
        jobs = self.model.jobs
        batches = {index: _Batches(each) for index, each in data.items()}
        steps = dict.fromkeys(data, 0)
        rows: Iterator[Row] = rows_of_round(jobs, batches, steps, self.cutting.max_row_tokens)
        if self.parts > 1:
            rows = iter(cut_round(rows, self.parts, self.cutting))
        while piece := list(islice(rows, self.parts)):
            yield self.rows.made(piece)

    def _everywhere(self, predicted: Mapping[int, Any]) -> dict[int, np.ndarray]:
        """What all processes predicted, by row."""
        mine = {index: tokens.numpy() for index, tokens in predicted.items()}
        return {
            index: tokens
            for process in self.ranks.tell_all(mine)
            for index, tokens in process.items()
        }

    def _metrics(self, data: JobData, loss_sum: float, tokens: np.ndarray) -> dict[str, float]:
        if data.job.is_preference:
            samples = len(data.evaluation) // data.job.sequences_per_sample
            measured = {"eval_loss": loss_sum / samples}
            if data.job.method == "reward":
                chosen, rejected = decoded(tokens, data.job.base).reshape(-1, 2).T
                measured["eval_accuracy"] = float(np.mean(chosen > rejected))
            return measured
        if data.job.base.is_classifier:
            return self._label_metrics(data, loss_sum, tokens)
        of_samples = [_targets(sample) for sample in data.evaluation]
        counts, targets = np.array([*map(len, of_samples)]), np.concatenate(of_samples)
        owner = np.repeat(np.arange(len(counts)), counts)
        wrong = np.bincount(owner, weights=tokens != targets, minlength=len(counts))
        measured = {
            "eval_loss": loss_sum / len(targets),
            "eval_mean_token_accuracy": float(np.mean(tokens == targets)),
            "eval_exact_match": float(np.mean(wrong[counts > 0] == 0)),
        }
        if data.job.compute_metrics is not None:
            try:
                measured |= own_metrics(data, np.split(tokens, np.cumsum(counts)[:-1]))
            except MetricFunctionError as error:
                self.warn(str(error))
        return measured

    def _label_metrics(self, data: JobData, loss_sum: float, codes: np.ndarray) -> dict[str, float]:
        """A classifier's metrics; `codes` are its predictions."""
        every = (label for sample in data.evaluation for label in sample.labels)
        labels = np.array([label for label in every if label != IGNORED], dtype=np.int64)
        measured = {"eval_loss": loss_sum / len(labels)}
        base = data.job.base
        if base.objective != "regression":
            measured["eval_accuracy"] = float(np.mean(codes == labels))
        if data.job.compute_metrics is not None:
            try:
                measured |= values_of(data, decoded(codes, base), decoded(labels, base))
            except MetricFunctionError as error:
                self.warn(str(error))
        return measured


class _Batches(Sequence[Sequence[Sample]]):
    """The samples that a job is evaluated on, in batches; each is read when it is asked for."""

    def __init__(self, data: JobData) -> None:
        self.samples = data.evaluation
        self.size = data.job.per_device_eval_batch_size * data.job.sequences_per_sample

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / self.size)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.samples[index * self.size : (index + 1) * self.size]


def _targets(sample: Sample) -> np.ndarray:
    return np.array([label for label in sample.labels[1:] if label != IGNORED], dtype=np.int64)


# A job's own metrics.


def own_metrics(data: JobData, predicted: Sequence[np.ndarray]) -> dict[str, float]:
    """Metrics from the function of `compute_metrics`, under names that begin with eval_.

    It takes transformers' EvalPrediction. Its predictions are the most likely next tokens, int64
    [samples, longest]: [i, t] is for label_ids[i, t + 1], and -100 where that is -100.

    predicted   for each sample, the most likely token at each of its targets
    raises      MetricFunctionError
    """
    longest = max(len(sample.labels) for sample in data.evaluation)
    labels = np.full((len(data.evaluation), longest), IGNORED, dtype=np.int64)
    tokens = labels.copy()
    for row, (sample, own) in enumerate(zip(data.evaluation, predicted, strict=True)):
        labels[row, : len(sample.labels)] = sample.labels
        # The first label has no token before it that could predict it.
        tokens[row, :-1][labels[row, 1:] != IGNORED] = own
    return values_of(data, tokens, labels)


def values_of(data: JobData, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Metrics from the function of `compute_metrics`, of predictions and labels.

    raises      MetricFunctionError
    """
    from transformers import EvalPrediction

    name = data.job.compute_metrics
    assert name is not None
    function = find_function(name, data.job.name)
    try:
        values = function(EvalPrediction(predictions=predictions, label_ids=labels))
        return {
            key if key.startswith("eval_") else f"eval_{key}": float(value)
            for key, value in values.items()
        }
    except Exception as error:
        raise MetricFunctionError(
            "a metric function failed",
            job=data.job.name,
            function=name,
            found=told_with_line(error, function),
            help="it takes transformers' EvalPrediction and returns a dict of numbers",
        ) from error
