"""Report jobs to the trackers of their `report_to`, each job as a run of its own.

What happens in training is put into a queue, and a thread for each tracker hands it to the
tracker's own library. Nothing there can hold a step up or end it: what fails is told once, as a
warning, and what a tracker does not take in time is left out.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from tlora_fx.config.job import TRAIN_LOSS, Job
from tlora_fx.host.durable import replace_file
from tlora_fx.host.version import __version__
from tlora_fx.runtime.callbacks import TrainerCallback

if TYPE_CHECKING:
    from tlora_fx.runtime.job_evaluation import EvaluationReport
    from tlora_fx.runtime.job_run import JobRun, SampleReport, StepReport

PROJECT = "tlora-fx"
#: A job's identity at its trackers, in its folder: a resumed run goes on with the same runs.
IDENTITY = "tracker.json"
#: Events that wait for a tracker at most; what comes then is left out.
WAITING = 100_000
#: Seconds that trackers have at the end for what they have not taken yet.
CLOSING_SECONDS = 30.0

Texts = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TrackedJob:
    """A job as a tracker knows it.

    group      the name of the run's folder
    folder     the job's own
    identity   the same again when the run is resumed
    step       steps done so far
    """

    job: Job
    group: str
    folder: Path
    identity: str
    step: int

    def settings(self) -> dict[str, Any]:
        """Settings by the job's user, as JSON."""
        return self.job.model_dump(mode="json", exclude_none=True) | {"tlora_fx": __version__}


class Tracker(Protocol):
    """A job's run at one tracker, used by one thread."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step, by names such as train/loss and eval/loss."""

    def texts(self, step: int, texts: Texts) -> None:
        """Take what the job says to prompts after a step."""

    def close(self, status: str) -> None:
        """The job is done or has failed; or it was stopped, or pauses, and may go on later."""


class Trackers(TrainerCallback):
    """Hears of a run, and reports it.

    group   the name that the jobs' runs have in common
    warn    is told, in the thread that trains, of what fails
    """

    def __init__(self, group: str, warn: Callable[[str], None]) -> None:
        self.group, self._warn = group, warn
        self._threads: dict[str, _TrackerThread] = {}
        self._reported: dict[str, list[str]] = {}

    def started(self, runs: Sequence[JobRun]) -> None:
        for run in runs:
            self.joined(run)

    def joined(self, run: JobRun) -> None:
        if run.status == "running" and run.job.report_to:
            self._begin(run)
        self._tell()

    def stepped(self, report: StepReport) -> None:
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/learning_rate": report.learning_rate,
            "train/tokens": report.tokens,
            "train/seconds": report.seconds,
            **{f"train/{name}": value for name, value in report.metrics.items()},
        }
        self._put(report.job, "log", report.step, values)

    def evaluated(self, report: EvaluationReport) -> None:
        self._put(report.job, "log", report.step, dict(_slashed(report.metrics)))

    def sampled(self, report: SampleReport) -> None:
        self._put(report.job, "texts", report.step, report.texts)

    def ended(self, run: JobRun) -> None:
        self._put(run.job.name, "close", run.status)
        self._reported.pop(run.job.name, None)

    def close(self) -> None:
        """Training is over: give trackers some time for what waits; jobs that run have stopped."""
        for name in list(self._reported):
            self._put(name, "close", "stopped")
        until = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads.values():
            thread.end(until)
        self._tell()
        self._threads.clear()
        self._reported.clear()

    def _begin(self, run: JobRun) -> None:
        folder = run.folder.job(run.job.name)
        tracked = TrackedJob(run.job, self.group, folder, _identity(folder), run.step)
        self._reported[run.job.name] = list(run.job.report_to)
        for name in run.job.report_to:
            if name not in self._threads:
                self._threads[name] = _TrackerThread(name)
            self._threads[name].put(run.job.name, "open", tracked)

    def _put(self, job: str, event: str, *facts: Any) -> None:
        for name in self._reported.get(job, ()):
            self._threads[name].put(job, event, *facts)
        self._tell()

    def _tell(self) -> None:
        for thread in self._threads.values():
            while thread.warnings:
                self._warn(thread.warnings.popleft())


@dataclass
class _TrackerThread:
    """Hands events to one tracker's library, in their order."""

    name: str
    warnings: deque[str] = field(default_factory=deque)
    # Its `put` waits for no lock, so a busy thread does not hold up the one that trains.
    _queue: SimpleQueue[tuple[str, str, tuple[Any, ...]]] = field(default_factory=SimpleQueue)
    _open: dict[str, Tracker] = field(default_factory=dict)
    _left_out: int = 0

    def __post_init__(self) -> None:
        # A daemon: a library that hangs does not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    def put(self, job: str, event: str, *facts: Any) -> None:
        if self._queue.qsize() < WAITING:
            self._queue.put((job, event, facts))
            return
        self._left_out += 1
        if self._left_out == 1:
            self.warnings.append(f"{self.name} is slower than training: events are left out")

    def end(self, until: float) -> None:
        """Wait until all is handed on, but no longer."""
        self._queue.put(("", "end", ()))
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._queue.qsize()
            self.warnings.append(f"{self.name} did not take the last {waiting} events in time")

    def _work(self) -> None:
        while True:
            job, event, facts = self._queue.get()
            if event == "end":
                return
            try:
                self._hand_on(job, event, facts)
            except Exception as error:  # noqa: BLE001  (whatever it is, training goes on)
                self._open.pop(job, None)
                self.warnings.append(f"{self.name} hears no more of job '{job}': {_why(error)}")

    def _hand_on(self, job: str, event: str, facts: tuple[Any, ...]) -> None:
        if event == "open":
            self._open[job] = OPENERS[self.name](*facts)
            return
        tracker = self._open.get(job)
        if tracker is None:
            return
        if event == "close":
            del self._open[job]
        getattr(tracker, event)(*facts)


def _why(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"{error} (pip install 'tlora-fx[trackers]')"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _slashed(metrics: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    """Names as transformers reports them: eval/loss for eval_loss."""
    for name, value in metrics.items():
        if name == TRAIN_LOSS:
            yield "train/mean_loss", value
        else:
            yield name.replace("eval_", "eval/", 1), value


def _identity(folder: Path) -> str:
    """The job's identity at its trackers, drawn at its first start."""
    path = folder / IDENTITY
    try:
        return str(json.loads(path.read_bytes())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        drawn = uuid.uuid4().hex[:8]
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({"id": drawn}).encode())
        return drawn


# The trackers, by their own libraries. Their environment variables say project and place.


class _TensorBoard:
    """Event files in the job's folder, under tensorboard/."""

    def __init__(self, tracked: TrackedJob) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        purge = {"purge_step": tracked.step + 1} if tracked.step else {}
        self.writer = make(str(tracked.folder / "tensorboard"), flush_secs=10, **purge)
        if not tracked.step:
            settings = json.dumps(tracked.settings(), indent=1)
            self.writer.add_text("settings", f"```json\n{settings}\n```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def texts(self, step: int, texts: Texts) -> None:
        for number, (prompt, said) in enumerate(texts):
            self.writer.add_text(f"samples/{number}", f"**{prompt}**{said}", step)

    def close(self, status: str) -> None:
        self.writer.close()


class _WandB:
    """A run of Weights & Biases; without a key it is kept offline in the job's folder."""

    def __init__(self, tracked: TrackedJob) -> None:
        import wandb

        self.wandb: Any = wandb
        # In another mode it would ask on the terminal.
        mode: Any = os.environ.get("WANDB_MODE") or (None if wandb.api.api_key else "offline")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=tracked.group,
            name=tracked.job.name,
            id=tracked.identity,
            resume="allow",
            dir=str(tracked.folder),
            config=tracked.settings(),
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("train/global_step")
        self.run.define_metric("*", step_metric="train/global_step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "train/global_step": step})

    def texts(self, step: int, texts: Texts) -> None:
        table = self.wandb.Table(columns=["prompt", "completion"], data=[list(t) for t in texts])
        self.run.log({"samples": table, "train/global_step": step})

    def close(self, status: str) -> None:
        self.run.finish(exit_code=int(status == "failed"))


class _Trackio:
    """A run of Trackio, by default in its folder on this machine."""

    def __init__(self, tracked: TrackedJob) -> None:
        import trackio

        self.trackio: Any = trackio

        def opened() -> Any:
            return trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=f"{tracked.job.name}-{tracked.identity}",
                group=tracked.group,
                config=tracked.settings(),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

        # It prints on stdout, which is the command's.
        for module in (trackio, sys.modules["trackio.run"], sys.modules["trackio.utils"]):
            vars(module)["print"] = lambda *_, **__: None
        # It ends the run before in the same context.
        self.run = Context().run(opened)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def texts(self, step: int, texts: Texts) -> None:
        table = self.trackio.Table(columns=["prompt", "completion"], data=[list(t) for t in texts])
        self.run.log({"samples": table}, step=step)

    def close(self, status: str) -> None:
        self.run.finish()


class _MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says."""

    STATUS: Mapping[str, str] = {"done": "FINISHED", "failed": "FAILED"}
    TAG = "tlora_fx.id"

    def __init__(self, tracked: TrackedJob) -> None:
        from mlflow import MlflowClient

        self.client: Any = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        before = self.client.search_runs(
            [experiment], filter_string=f"tags.`{self.TAG}` = '{tracked.identity}'"
        )
        if before:
            self.run_id = before[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return
        tags = {self.TAG: tracked.identity, "group": tracked.group}
        run = self.client.create_run(experiment, run_name=tracked.job.name, tags=tags)
        self.run_id = run.info.run_id
        from mlflow.entities import Param

        # A server takes a hundred at a time, of so many characters.
        settings = [Param(key, str(value)[:500]) for key, value in tracked.settings().items()]
        for start in range(0, len(settings), 100):
            self.client.log_batch(self.run_id, params=settings[start : start + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, step) for name, value in values.items() if math.isfinite(value)
        ]
        self.client.log_batch(self.run_id, metrics=metrics)

    def texts(self, step: int, texts: Texts) -> None:
        rows = [{"prompt": prompt, "completion": said} for prompt, said in texts]
        text = json.dumps(rows, ensure_ascii=False, indent=1)
        self.client.log_text(self.run_id, text, f"samples/step-{step}.json")

    def close(self, status: str) -> None:
        self.client.set_terminated(self.run_id, self.STATUS.get(status, "KILLED"))


OPENERS: Mapping[str, Callable[[TrackedJob], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
    "mlflow": _MLflow,
}
