"""How slow a job may become for its neighbours' sake."""

from __future__ import annotations

from collections.abc import Iterable

from tlora_fx.scheduler.state import ActiveJob

#: Two predictions that differ by less than this part are one.
ROUNDING = 1e-9


def slowdown(job: ActiveJob, seconds: float) -> float:
    """Delta: a step's seconds over those of the job alone on the GPUs that it asked for."""
    return seconds / job.solo_seconds


def limit_seconds(job: ActiveJob, now: float, *, lending: bool = False) -> float:
    """The longest step that a job bears in a group of two or more, in seconds.

    It is the job's slowdown bound. A deadline that the job alone would keep tightens it; one that
    is lost anyhow does not.

    lending   up to the slowdown that it consented to lend, instead of its bound
    """
    request = job.request
    bound = max(request.max_slowdown, request.lends) if lending else request.max_slowdown
    limit = bound * job.solo_seconds
    if request.deadline is None or job.steps_left <= 0:
        return limit
    room = (request.deadline - now) / job.steps_left
    return min(limit, room) if room >= job.solo_seconds else limit


def keeps(jobs: Iterable[ActiveJob], seconds: float, now: float, *, lending: bool = False) -> bool:
    """Whether every one of these jobs bears a group's step of so many seconds."""
    bound = seconds * (1 - ROUNDING)
    return all(bound <= limit_seconds(job, now, lending=lending) for job in jobs)


def broken(jobs: Iterable[ActiveJob], seconds: float, now: float) -> list[ActiveJob]:
    """The jobs that a group of two or more slows down too much, consent included."""
    members = list(jobs)
    if len(members) < 2:
        return []
    return [job for job in members if not keeps((job,), seconds, now, lending=True)]
