"""Whether a model, a checkpoint and jobs belong together."""

from __future__ import annotations

from collections.abc import Sequence

from tlora_fx.config.job import Job
from tlora_fx.errors import ResumeMismatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.checkpoint import Checkpoint

#: What may change of a job between a run and its resuming; the base counts by its fingerprint.
FREE = frozenset({"max_steps", "num_train_epochs", "save_steps", "base", "schedule"})


def identity(model: SuperModel, jobs: Sequence[Job]) -> dict[str, object]:
    """What must be equal for a run to go on, JSON-able."""
    described = {job.name: job.model_dump(mode="json", exclude=set(FREE)) for job in jobs}
    return {"jobs": described, "base": model.backbone.fingerprint()}


def demand_same_run(checkpoint: Checkpoint, identity: dict[str, object]) -> None:
    """Refuse a checkpoint of another run.

    raises    ResumeMismatch
    """
    for key, value in identity.items():
        before = checkpoint.run.get(key)
        if before != value:
            expected, found = _first_difference(before, value)
            raise ResumeMismatch(
                "the checkpoint belongs to other jobs or another base",
                folder=checkpoint.path,
                field=key,
                expected=expected,
                found=found,
                help="resume with the job file that the run was started with; "
                "only max_steps and save_steps may change",
            )


def demand_same_jobs(compiled: Sequence[Job], given: Sequence[Job]) -> None:
    """Refuse to train other jobs than a model was compiled for.

    raises    ResumeMismatch
    """
    if [job.name for job in compiled] != [job.name for job in given]:
        raise ResumeMismatch(
            "the model was compiled for other jobs",
            expected=", ".join(job.name for job in compiled),
            found=", ".join(job.name for job in given),
            help="compile the jobs that you train",
        )
    for one, two in zip(compiled, given, strict=True):
        mine, theirs = _what_is_compiled(one), _what_is_compiled(two)
        if mine != theirs:
            expected, found = _first_difference(mine, theirs)
            raise ResumeMismatch(
                f"the model was compiled for another job '{one.name}'",
                job=one.name,
                expected=expected,
                found=found,
                help="compile the jobs that you train",
            )


def _what_is_compiled(job: Job) -> dict[str, object]:
    """What of a job is in the model."""
    return {
        "base": job.base.model_dump(),
        "lora": job.lora_fields,
        "adapter_dtype": job.adapter_dtype,
        "adapter_compute": job.adapter_compute,
    }


def _first_difference(one: object, two: object) -> tuple[object, object]:
    """Where two nested mappings part."""
    while isinstance(one, dict) and isinstance(two, dict):
        key = next((k for k in {**one, **two} if one.get(k) != two.get(k)), None)
        if key is None:
            break
        inner = one.get(key), two.get(key)
        if not all(isinstance(value, dict) for value in inner):
            return f"{key}: {inner[0]}", f"{key}: {inner[1]}"
        one, two = inner
    return one, two
