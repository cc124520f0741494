"""Whether the jobs' longest samples have room on the GPU at hand, by what was measured there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlora_fx.config.job import Job
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.load import Round, round_of_batches
from tlora_fx.cost.memory import demand_fits
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import profile_for
from tlora_fx.errors import JobTooLong, TloraError
from tlora_fx.model.batch import repeating_length
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.auto import device_name
from tlora_fx.planners.cost import CostModel
from tlora_fx.runtime.data import JobData


def demand_room(
    model: SuperModel,
    plan: Plan,
    data: Mapping[str, JobData],
    max_row_tokens: int,
    profile: Profile | None = None,
) -> None:
    """Refuse jobs whose longest samples a plan has no memory for, before any weight is loaded.

    Only what was measured on such a GPU is believed: without a profile nothing is refused.

    profile   of the device; None: what is known of the one at hand
    raises    JobTooLong, naming the job and the largest length that fits
    """
    try:
        facts = facts_of(model)
        known = profile or profile_for(facts, device_name(), allow_estimated=False)
        demand_fits(CostModel(facts, known), plan, longest_round(model.jobs, data, max_row_tokens))
    except JobTooLong:
        raise
    except TloraError:
        return  # not measured, or not a model that a profile describes


def longest_round(jobs: Sequence[Job], data: Mapping[str, JobData], max_row_tokens: int) -> Round:
    """A round in which every job brings its longest samples."""
    batches = []
    for job in jobs:
        lengths = sorted((len(one.input_ids) for one in data[job.name].samples), reverse=True)
        size = job.per_device_train_batch_size
        count = min(job.gradient_accumulation_steps, -(-len(lengths) // size))
        batches.append([tuple(lengths[n * size : (n + 1) * size]) for n in range(count)])
    return round_of_batches(batches, max_row_tokens)


def longest_row(
    jobs: Sequence[Job], data: Mapping[str, JobData], max_row_tokens: int, parts: int
) -> int:
    """Tokens that no row of the jobs exceeds, however their samples meet.

    parts   into how many a round is cut at least, which joins micro-batches first
    """
    each = [_largest_batches(job, data[job.name]) for job in jobs]
    single = [sizes[0] for sizes in each if sizes]
    bound = max(max(single, default=0), min(max_row_tokens, sum(single)))
    if parts > 1:
        longest = (len(one.input_ids) for own in data.values() for one in own.samples)
        whole = sum(map(sum, each))
        bound = max(bound, min(max(max_row_tokens, max(longest, default=0)), whole))
    return repeating_length(bound)


def _largest_batches(job: Job, data: JobData) -> list[int]:
    """Tokens of a step's micro-batches if a job's longest samples meet, the largest first."""
    lengths = sorted((len(one.input_ids) for one in data.samples), reverse=True)
    size = job.per_device_train_batch_size
    count = min(job.gradient_accumulation_steps, -(-len(lengths) // size))
    return [sum(lengths[n * size : (n + 1) * size]) for n in range(count)]
