"""The last answer holds while nothing has changed."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_fx.cost.cluster import Cluster
from tlora_fx.scheduler.bounds import broken
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.state import Decision, State


@dataclass(slots=True)
class Unchanged:
    """What was answered last, and to what."""

    _jobs: tuple[str, ...] = ()
    _groups: tuple[Group, ...] = ()
    _cluster: Cluster | None = None
    _last: Decision | None = None

    def answer(self, state: State) -> Decision | None:
        """The last decision if it holds; None where anything has changed."""
        if self._last is None or state.cluster != self._cluster:
            return None
        same = tuple(state.jobs) == self._jobs and _keys(state.groups) == _keys(self._groups)
        if not same or any(self._breaks(state, group) for group in state.groups):
            return None
        return self._last

    def keep(self, state: State, decision: Decision) -> None:
        """Remember."""
        self._jobs, self._groups = tuple(state.jobs), decision.groups
        self._cluster, self._last = state.cluster, decision

    def _breaks(self, state: State, group: Group) -> bool:
        jobs = [state.jobs[name] for name in group.jobs]
        return bool(broken(jobs, group.seconds, state.now))


def _keys(groups: tuple[Group, ...]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    return sorted((group.jobs, group.place) for group in groups)
