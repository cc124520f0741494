"""Interface of executors, which run groups for the loop, and their events.

The simulated executor and the local one keep this; the loop knows no other. Every verb is
idempotent on (group.jobs, epoch): asked twice, it does what it did, and nothing more. An epoch is a
number that no other formation of a group has had and that grows with each; what an executor tells
of an epoch that is over may come late and is to be ignored.

    reserve → launch → Started, Progress, Committed, Finished … → drain → Drained → release
                                                              or → Failed            release
                                                              or → change → Drained → release
                                                                            Started of it      …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.state import Group, JobRequest


@dataclass(frozen=True, slots=True)
class ExecutorEvent:
    """Something that happened, at a time in seconds on the clock of the executor."""

    time: float


@dataclass(frozen=True, slots=True)
class GroupEvent(ExecutorEvent):
    """Something that happened to a group."""

    epoch: int


@dataclass(frozen=True, slots=True)
class GroupStarted(GroupEvent):
    """The group begins its first step; time since `launch` was the cost of the switch.

    paused   of a group that took over from another: seconds for which its jobs stood still. None:
             it was formed anew
    """

    paused: float | None = None


@dataclass(frozen=True, slots=True)
class Progress(GroupEvent):
    """Optimizer steps done in all, by job, not yet safe; they may be fractions in simulation."""

    steps: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Committed(GroupEvent):
    """Steps that a crash cannot take away any more.

    path    where the committed states lie; empty in simulation
    rungs   evaluation losses of jobs that are where they are compared with others, by job
    """

    steps: Mapping[str, float]
    path: str = ""
    rungs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished(GroupEvent):
    """A job did its last step, and that is committed; its group goes on without it."""

    job: str
    steps: float


@dataclass(frozen=True, slots=True)
class Failed(GroupEvent):
    """A job is at fault and ends, or a whole group ended and its jobs return to the queue.

    Where the job at fault took its group with it, one `Failed` of each kind is told.

    job        the job at fault, which will not be run again; None: the group ended
    steps      where its jobs go on from, by job: their last commits. A job that is missing there
               goes on from its last commit before this epoch
    killed     its processes said nothing and were killed, such as by the kernel for want of memory
    blameless  its processes died with what had started them, or of a full disk, or files could not
               be read: no job of it had a part in that
    absent     jobs whose base or data cannot be read now, each with the reason
    """

    job: str | None
    reason: str
    steps: Mapping[str, float] = field(default_factory=dict)
    killed: bool = False
    blameless: bool = False
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drained(GroupEvent):
    """The group has stopped; all that it did is committed.

    It was asked to, or its last job has finished: such a group ends by itself.

    successor  the epoch that goes on in its place, without having stopped; None: nobody does
    absent     jobs that should have joined the successor and are not in it, since their base or
               data cannot be read now, each with the reason
    """

    steps: Mapping[str, float]
    successor: int | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Warned(GroupEvent):
    """Something went wrong in a group, such as a checkpoint on a full disk, and it goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Noted(ExecutorEvent):
    """Event that a user may want to know of, and nobody has to act upon."""

    text: str


@dataclass(frozen=True, slots=True)
class NodeLost(ExecutorEvent):
    """A node went away; of each group that stood on it a `Failed` follows."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeBack(ExecutorEvent):
    """A node is there again."""

    node: int


@dataclass(frozen=True, slots=True)
class GroupLaunch:
    """A formation of a group, as an executor is asked to run it.

    jobs         of the group
    steps_done   by job; what it goes on from
    layout       how it is spread over its GPUs; None: as the executor finds best
    """

    group: Group
    epoch: int
    jobs: Sequence[JobRequest]
    steps_done: Mapping[str, float] = field(default_factory=dict)
    layout: Layout | None = None


class Executor(Protocol):
    """Executor of groups."""

    def inventory(self) -> Cluster:
        """The GPUs, and which nodes are lost now."""

    def reserve(self, group: Group, epoch: int) -> None:
        """Hold the group's place for it.

        raises   PlaceTaken where one of its GPUs is another epoch's or is not there
        """

    def launch(self, launch: GroupLaunch) -> None:
        """Start a group on the place that it has reserved.

        raises       PlaceTaken where nothing is reserved for this epoch
        """

    def can_change(self, group: Group, epoch: int, successor: Group) -> bool:
        """Whether a running group may become another one on its place without stopping."""

    def change(self, group: Group, epoch: int, successor: GroupLaunch) -> None:
        """Change a running group into its successor: jobs leave and join, the others train on.

        It is another epoch from then on. `Drained` of the old one tells when, and that all its jobs
        are committed; `GroupStarted` of the new one follows. Jobs whose files cannot be read stay
        out of it. Where this proves impossible, it is formed anew, on the same place. Where the old
        one fails, nothing is told of it.
        """

    def events(self) -> list[ExecutorEvent]:
        """Events since the last call, in order of time."""

    def drain(self, group: Group, epoch: int) -> None:
        """Ask the group to commit and to stop; `Drained` tells when, nothing where it has ended."""

    def release(self, group: Group, epoch: int) -> None:
        """Give the group's place back; a group that still runs is killed."""
