"""Every job alone, the one with the least work left first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tlora_fx.scheduler.search.placement import Placer
from tlora_fx.scheduler.state import ActiveJob, Decision, Group, SchedulerState


@dataclass(slots=True)
class ShortestFirst:
    """Start what ends soonest; what runs stays.

    most_gpus   jobs that ask for more wait until nobody else does
    """

    name: ClassVar[str] = "shortest-first"
    fused: ClassVar[bool] = True

    most_gpus: int = 8

    def decide(self, state: SchedulerState, *, explain: bool = False) -> Decision:
        """The groups from now to the next decision."""
        placer = Placer(state.cluster)
        groups = []
        for group in state.groups:
            if group.jobs[0] in state.jobs and placer.has(group.place):
                placer.take(group.place)
                groups.append(group)
        running = {name for group in groups for name in group.jobs}
        waiting = []
        for job in sorted(state.jobs.values(), key=self._order):
            if job.name in running:
                continue
            place = placer.find(job.request.gpus)
            if place is None:
                waiting.append(job.name)
                continue
            placer.take(place)
            groups.append(Group((job.name,), len(place), place, job.solo_seconds, state.now))
        return Decision(tuple(groups), tuple(waiting))

    def _order(self, job: ActiveJob) -> tuple[bool, float, str]:
        seconds_left = job.steps_left * job.solo_seconds
        return job.request.gpus > self.most_gpus, seconds_left, job.name
