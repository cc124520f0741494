"""Train a sweep over a job from Python: `tlora_fx.sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tlora_fx.api.results import Results
from tlora_fx.api.train import train
from tlora_fx.config.job import Job
from tlora_fx.config.overlay import laid_over
from tlora_fx.config.sweep import SweptJob, blocked_path, expand, nested
from tlora_fx.config.validation import Mistake, Spec, called, job_error


def sweep(
    job: Job,
    parameters: Mapping[str, Any],
    *,
    method: Literal["grid", "random"] = "grid",
    count: int | None = None,
    seed: int = 0,
    halving: Mapping[str, Any] | None = None,
    **options: Any,
) -> Results:
    """Train a job with several values of its fields, all together on its base.

    The jobs, and their names, are those of a `sweep` in a job file.

    job          which fields that are not swept are taken from
    parameters   values of each field, by its dotted path such as lora.r: a list, or for random also
                 {"min": ..., "max": ..., "distribution": "uniform" or "log_uniform"}
    method       grid: every combination of the values; random: `count` drawn combinations
    count        number of jobs of a random sweep
    seed         seed of a random sweep: the same seed draws the same values
    halving      end the weak jobs early: {"min_steps": ..., "factor": ...}
    options      those of `tlora_fx.train`, such as output
    returns      results by job name
    raises       JobError for what is wrong with the sweep or one of its jobs; all that
                 `tlora_fx.train` raises
    """
    how = {"method": method, "count": count, "seed": seed, "halving": halving}
    return train(sweep_jobs(job, parameters, **how), **options)


def sweep_jobs(job: Job, parameters: Mapping[str, Any], **how: Any) -> list[Job]:
    """The jobs that `sweep` trains; raises JobError.

    how    the other fields of a `sweep` in a job file
    """
    if not isinstance(job, Job):
        mistake = Mistake(("job",), "it is no tlora_fx.Job", "a Job", type(job).__name__)
        raise _error(None, [mistake])
    if not isinstance(parameters, Mapping):
        what, found = "it is no mapping", type(parameters).__name__
        mistake = Mistake(("parameters",), what, "values by field", found)
        raise _error(job, [mistake])
    written = {"parameters": dict(parameters), **how}
    swept, mistakes = expand(job.name, written)
    if mistakes:
        raise _error(job, mistakes)
    return [_swept(job, each) for each in swept]


def _swept(job: Job, swept: SweptJob) -> Job:
    """The job with other values and another name."""
    over = nested(swept.values)
    fields = _fields(job, over) | {"callbacks": job.callbacks}
    blocked = blocked_path(fields, swept.values)
    if blocked is not None:
        path, at = blocked
        what = f"'{path}' leads through '{at}', which has no fields"
        mistake = Mistake(("parameters", path), what, help=f"sweep over '{at}' itself")
        raise _error(job, [mistake])
    return Job(**laid_over(fields, over) | swept.others | {"name": swept.name})


def _fields(spec: Spec, over: Mapping[str, Any]) -> dict[str, Any]:
    """What a spec was made with; the specs in it whose fields change, likewise."""
    given = {name: getattr(spec, name) for name in spec.model_fields_set}
    for name, value in given.items():
        inner = over.get(name)
        if isinstance(value, Spec) and isinstance(inner, Mapping):
            given[name] = _fields(value, inner)
    return given


def _error(job: Job | None, mistakes: list[Mistake]) -> Exception:
    with called("sweep"):
        return job_error(mistakes, job=None if job is None else job.name)
