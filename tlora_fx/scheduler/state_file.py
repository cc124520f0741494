"""A moment of a cluster as text, for `tlora-fx schedule explain` and for reports of mistakes.

The estimator is not in it, only its name: whoever reads the file says what that name stands for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.demand import Demand
from tlora_fx.errors import StateFileError
from tlora_fx.scheduler.estimating import Estimator
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.state import ActiveJob, State

FORMAT = "tlora-fx state 1"


def state_to_json(state: State, estimator: str) -> str:
    """A state as JSON.

    estimator   what finds the estimator again, such as the path of a profile
    """
    cluster = dataclasses.asdict(state.cluster) | {"lost": sorted(state.cluster.lost)}
    found = {
        "format": FORMAT,
        "estimator": estimator,
        "now": state.now,
        "horizon": state.horizon,
        "switch_seconds": state.switch_seconds,
        "cluster": cluster,
        "jobs": [_job_fields(job) for job in state.jobs.values()],
        "groups": [dataclasses.asdict(group) for group in state.groups],
    }
    return json.dumps(found, indent=2) + "\n"


def state_from_json(text: str, estimator_of: Callable[[str], Estimator]) -> State:
    """A state from what `state_to_json` wrote.

    estimator_of   the estimator of a name
    raises         StateFileError
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StateFileError("this is no file of a state", found=error) from None
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        kind = found.get("format") if isinstance(found, Mapping) else type(found).__name__
        raise StateFileError("this is no file of a state", expected=FORMAT, found=kind)
    try:
        jobs = [_job(fields) for fields in found["jobs"]]
        cluster = found["cluster"]
        return State(
            float(found["now"]),
            Cluster(**(cluster | {"lost": frozenset(cluster["lost"])})),
            estimator_of(found["estimator"]),
            {job.name: job for job in jobs},
            tuple(_group(fields) for fields in found["groups"]),
            float(found["horizon"]),
            float(found["switch_seconds"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateFileError(
            "the file of a state is not whole",
            found=f"{type(error).__name__}: {error}",
            help="write it again with the same version of tlora-fx",
        ) from None


def request_to_fields(request: JobRequest) -> dict[str, Any]:
    """A request as what JSON can hold."""
    fields = {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}
    return fields | {"demand": request.demand._asdict()}


def request_from_fields(fields: Mapping[str, Any]) -> JobRequest:
    """A request from `request_to_fields`.

    raises   KeyError, TypeError
    """
    return JobRequest(**(dict(fields) | {"demand": Demand(**fields["demand"])}))


def _job_fields(job: ActiveJob) -> dict[str, Any]:
    return {
        "request": request_to_fields(job.request),
        "solo_seconds": job.solo_seconds,
        "steps_done": job.steps_done,
        "credit": job.credit,
    }


def _job(fields: Mapping[str, Any]) -> ActiveJob:
    request = request_from_fields(fields["request"])
    done, credit = float(fields["steps_done"]), float(fields["credit"])
    return ActiveJob(request, float(fields["solo_seconds"]), done, credit)


def _group(fields: Mapping[str, Any]) -> Group:
    return Group(
        **(dict(fields) | {"jobs": tuple(fields["jobs"]), "place": tuple(fields["place"])})
    )
