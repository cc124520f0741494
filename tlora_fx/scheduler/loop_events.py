"""What an executor tells, taken into the loop's account."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    Event,
    Failed,
    Finished,
    GroupEvent,
    NodeBack,
    NodeLost,
    Progress,
    Started,
    Warned,
)
from tlora_fx.scheduler.loop_runs import Run

if TYPE_CHECKING:
    from tlora_fx.scheduler.loop import Loop


class Prompt(Protocol):
    """An executor that can tell progress at any moment; it is asked before each decision."""

    def progress(self) -> list[Progress]:
        """Of all that runs, now."""


class Events:
    """Takes events into a loop's jobs, runs and queue."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        ask = getattr(loop.executor, "progress", None)
        self._prompt = cast(Prompt, loop.executor) if callable(ask) else None

    def pull(self) -> None:
        """Bring the progress of all runs up to date, where the executor can."""
        if self._prompt:
            for event in self._prompt.progress():
                run = self.loop.formations.runs.get(event.epoch)
                if run is not None:
                    run.advanced(event.steps)

    def take(self, now: float) -> bool:
        """Take what has happened; whether anything has."""
        events = self.loop.executor.events()
        if any(isinstance(event, Failed) for event in events):
            self.pull()
        for event in events:
            if self.loop.ledger and not isinstance(event, Progress):
                self.loop.ledger.tell(event)
            if isinstance(event, GroupEvent):
                run = self.loop.formations.runs.get(event.epoch)
                if run is not None:
                    self._of_run(event, run)
            else:
                self._of_node(event, now)
        return bool(events)

    def _of_run(self, event: GroupEvent, run: Run) -> None:
        """News of a run that is not over."""
        match event:
            case Finished():
                self._finished(event, run)
            case Progress():
                run.advanced(event.steps)
            case Committed():
                self._committed(event.steps, run)
            case Started():
                run.started = event.time
            case Warned():
                self.loop.watch.warned(event.time, run, event.text)
            case Drained():
                self._drained(event, run)
            case Failed(job=None):
                self._failed(event, run)
            case Failed():
                self._at_fault(event, run)

    def _committed(self, steps: Mapping[str, float], run: Run) -> None:
        run.committed.update({name: done for name, done in steps.items() if name in run.jobs})
        run.advanced(steps)
        self.loop.trouble.committed(steps)

    def _drained(self, event: Drained, run: Run) -> None:
        self.loop.credits.settle(run, event.time)
        self._committed(event.steps, run)
        for name, steps in event.steps.items():
            if name in run.jobs:
                run.jobs[name].steps_done = steps
        self.loop.formations.end(run, "drained", event.time)

    def _finished(self, event: Finished, run: Run) -> None:
        job = run.jobs.get(event.job)
        if job is None:
            return
        job.steps_done = float(job.request.steps)
        self._leaves(run, event.job, "", event.time)

    def _at_fault(self, event: Failed, run: Run) -> None:
        """One job ends; its neighbours go on."""
        name = str(event.job)
        if name in run.jobs:
            run.jobs[name].steps_done = event.steps.get(name, run.committed[name])
            self._leaves(run, name, event.reason or "failed", event.time)

    def _leaves(self, run: Run, name: str, reason: str, time: float) -> None:
        """A job ended within its run."""
        loop = self.loop
        job = run.jobs[name]
        loop.credits.settle(run, time)
        loop.watch.left(time, run, job, reason)
        loop.formations.freed(name)
        self._ends(name, reason)
        others = [other.request for key, other in run.jobs.items() if key != name]
        if others:
            step = loop.times.of(others, run.launched.place, loop.cluster)
            run.without(name, step.seconds)
            loop.formations.touched()
        else:
            del run.jobs[name]
            loop.formations.end(run, "finished", time)

    def _ends(self, name: str, reason: str) -> None:
        """A job is not active any more."""
        loop = self.loop
        loop.window.remove(name)
        loop.window.fill()
        loop.trouble.forget(name)
        loop.credits.close(name)
        loop.ended[name] = f"failed: {reason}" if reason else "done"
        loop.formations.drop(lambda group: name in group.jobs)
        loop.changed = loop.prompted = True

    def _failed(self, event: Failed, run: Run) -> None:
        """A whole run ended: its jobs go on from their last commits."""
        loop = self.loop
        loop.credits.settle(run, event.time)
        for name, job in run.jobs.items():
            job.steps_done = event.steps.get(name, run.committed[name])
        self.loop.trouble.committed(event.steps)
        loop.formations.end(run, "failed", event.time)
        loop.changed = loop.prompted = True
        if any(loop.cluster.node(gpu) in loop.cluster.lost for gpu in run.launched.place):
            return
        for job in loop.trouble.failed(run.jobs.values()):
            reason = f"its group failed {loop.trouble.tries} times alone: {event.reason}"
            if loop.ledger:
                loop.ledger.give_up(job.name, reason, event.time)
            loop.watch.gave_up(event.time, job, reason)
            self._ends(job.name, reason)

    def _of_node(self, event: Event, now: float) -> None:
        loop = self.loop
        if not isinstance(event, NodeLost | NodeBack):
            return
        loop.cluster = loop.executor.inventory()
        loop.changed = loop.prompted = True
        if isinstance(event, NodeLost):
            cluster, node = loop.cluster, event.node
            for run in loop.formations.runs.values():
                if any(cluster.node(gpu) == node for gpu in run.launched.place):
                    run.leaving = True
            loop.formations.drop(lambda group: any(cluster.node(g) == node for g in group.place))
            loop.formations.touched()
        loop.watch.capacity(now, loop.cluster.capacity())
