"""Which jobs are pressed, and the order in which jobs are taken.

The paper uses one name for two quantities. Here a slowdown (`bounds`) admits a job to a group,
and lateness orders jobs: rho = (elapsed + remaining) / (total alone), queueing included. Urgency
is rho over the bound, in three classes, so that sorting by urgency leaves room for a second key.
"""

from __future__ import annotations

from enum import IntEnum

from tlora_fx.scheduler.state import ActiveJob

NEAR = 0.8


class Urgency(IntEnum):
    """How near a job is to its bound."""

    OK = 0
    NEAR = 1
    VIOLATING = 2


def urgency(job: ActiveJob, now: float, seconds: float | None = None) -> Urgency:
    """The class of a job's lateness over its bound.

    seconds   of a step as it runs now; None: as alone
    """
    pace = job.solo_seconds if seconds is None else seconds
    part = job.lateness(now, pace) / job.request.max_slowdown
    if part < NEAR:
        return Urgency.OK
    return Urgency.NEAR if part < 1 else Urgency.VIOLATING


def arrival(job: ActiveJob) -> tuple[float, str]:
    """A key by which jobs stand in order of submission, ties by name."""
    return job.request.submitted, job.request.name


def pressed_first(job: ActiveJob, now: float) -> tuple[bool, float, float, str]:
    """A key by which creditors come first, then the latest jobs, ties by submission and name.

    A short job grows late sooner than a long one, and no job stays behind for ever.
    """
    return job.credit <= 0, -job.lateness(now, job.solo_seconds), *arrival(job)
