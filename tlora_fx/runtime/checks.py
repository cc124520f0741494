"""Checks of jobs, data and base against each other, before any weight is loaded."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from tlora_fx.config.adapter_folder import ignored_fields
from tlora_fx.config.functions import UserFunction
from tlora_fx.config.job import Job
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.load import Round, round_of_batches
from tlora_fx.cost.memory import require_fits
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import profile_for
from tlora_fx.cost.step_time import CostModel
from tlora_fx.errors import (
    DataDoesNotFit,
    JobTooLong,
    ResumeMismatch,
    TloraError,
)
from tlora_fx.host.phases import phase
from tlora_fx.inspect.wording import plural
from tlora_fx.model.backbone import Backbone, longest_sequence, text_config
from tlora_fx.model.row_ladder import repeating_length
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.numerics.probe import ProbeResult
from tlora_fx.numerics.probe_cache import probe_loaded_once
from tlora_fx.planners.auto import device_name
from tlora_fx.planners.recompute_budgets import price_budget
from tlora_fx.runtime.clocks import JobClocks
from tlora_fx.runtime.data.batching import Cutting, try_function
from tlora_fx.runtime.data.loss_inputs import loss_of
from tlora_fx.runtime.data.samples import JobData, load_job_data
from tlora_fx.runtime.data.tables import largest_id, lengths_of
from tlora_fx.runtime.data.tokenizer import load_tokenizer
from tlora_fx.runtime.identity import value_differences
from tlora_fx.runtime.user_code import find_function
from tlora_fx.tracing.own_loss import sample_rows
from tlora_fx.tracing.trace_cache import require_common_loss

logger = logging.getLogger(__name__)


@phase("data")
def load_all_data(jobs: Sequence[Job], clocks: JobClocks | None = None) -> dict[str, JobData]:
    """Every job's samples, by job name.

    clocks    what time it is for each job, where a chat template asks for it; None: all start now
    raises    DataError, naming file, line and job; TokenizerNotLoadable; MetricFunctionError;
              JobError where a function is not at hand
    """
    for job in jobs:
        if job.compute_metrics is not None:
            find_function(job.compute_metrics, job.name)
        loss_of(job)
    tokenizer = load_tokenizer(jobs[0].base)
    clocks = clocks or JobClocks()
    return {job.name: load_job_data(job, tokenizer, clocks.of(job.name)) for job in jobs}


def check_fits(backbone: Backbone, data: Mapping[str, JobData], classes: int | None = None) -> None:
    """Whether every token has an embedding, every target a logit and every sequence a position.

    classes   of a compiled base, how many logits a token has
    raises    DataDoesNotFit, naming the job
    """
    vocabulary = getattr(text_config(backbone.model), "vocab_size", None)
    for name, job_data in data.items():
        parts = [part for part in (job_data.samples, job_data.evaluation) if part]
        # All tokens of a table are a bound, which is known; those of samples are looked at one by
        # one only where it does not do.
        largest = bound = max(map(largest_id, parts))
        if vocabulary is not None and bound >= vocabulary:
            largest = max(max(sample.input_ids) for sample in chain(*parts))
        if vocabulary is not None and largest >= vocabulary:
            raise DataDoesNotFit(
                f"job '{name}' has tokens that the base does not know",
                job=name,
                expected=f"token ids below {vocabulary}",
                found=largest,
                help="give the tokenizer that belongs to the base, or give the base rows for new "
                "tokens: resize_token_embeddings of transformers, and save it with the tokenizer",
            )
        logits = None if backbone.spec.is_classifier else classes
        target = largest
        if logits is not None and target >= logits:
            target = max(max(sample.labels) for sample in chain(*parts))
        if logits is not None and target >= logits:
            raise DataDoesNotFit(
                f"job '{name}' has targets for which the base has no logits",
                job=name,
                expected=f"targets below {logits}",
                found=target,
                help="give a causal language model, with logits for every token of the tokenizer",
            )
    _require_positions(data, longest_sequence(backbone.model))


def _require_positions(data: Mapping[str, JobData], positions: int | None) -> None:
    """Refuse samples that are longer than what the base takes, of all jobs at once."""
    if positions is None:
        return
    found = [
        (name, f"{name}{part}: {too_long}")
        for name, job_data in data.items()
        for part, samples in (("", job_data.samples), (", evaluation", job_data.evaluation))
        if samples and (too_long := _longer(lengths_of(samples), positions))
    ]
    if found:
        raise DataDoesNotFit(
            "samples are too long for the base",
            job=", ".join(dict(found)),
            expected=f"at most {positions} tokens",
            found="\n".join(text for _, text in found),
            help=f"set max_length: {positions} or less in the job, or take these samples out",
        )


def _longer(lengths: np.ndarray, positions: int) -> str:
    """How many samples are too long, and which; nothing where none is."""
    indices = np.flatnonzero(lengths > positions)
    if not len(indices):
        return ""
    some = ", ".join(f"sample {at + 1} with {lengths[at]:,}" for at in indices[:3].tolist())
    more = ", …" if len(indices) > 3 else ""
    return (
        f"{len(indices):,} of {plural(len(lengths), 'sample')}, up to {lengths.max():,} tokens "
        f"({some}{more})"
    )


def try_functions(
    data: Mapping[str, JobData], classes: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Call each function as loss on the first micro-batch, and on the first rows to evaluate.

    classes   how many logits a token has
    dtype     of the base
    device    that trains
    raises    LossFunctionError, naming the job
    """
    for own in data.values():
        if isinstance(own.job.loss, UserFunction):
            evaluated = own.evaluation[: own.job.per_device_eval_batch_size]
            parts = (("to train on", own.step(0)[0]), ("to evaluate", evaluated))
            for rows, samples in parts:
                if len(samples):
                    try_function(own.job, samples, classes, dtype, device, rows)


def unusual(jobs: Sequence[Job], data: Mapping[str, JobData], max_row_tokens: int) -> Iterator[str]:
    """Warnings of what is accepted, and is most likely not meant; a line each, for all its jobs."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        for text in _unusual_in(job, data[job.name], max_row_tokens):
            names.setdefault(text, []).append(job.name)
    for text, own in names.items():
        shown = ", ".join(f"'{name}'" for name in own[:NAMED])
        more = f" and {len(own) - NAMED} more" if len(own) > NAMED else ""
        yield f"job{'s' * (len(own) > 1)} {shown}{more}: {text}"


def _unusual_in(job: Job, data: JobData, max_row_tokens: int) -> Iterator[str]:
    if not 0 < job.learning_rate <= MAX_RATE:
        why = "nothing is trained" if not job.learning_rate else "adapters take 1e-5 to 1e-2"
        yield f"learning_rate {job.learning_rate:g}: {why}"
    ignored = [] if job.adapter is None else ignored_fields(job.adapter)
    if ignored:
        yield f"fields of its adapter folder are unknown and empty: {', '.join(ignored)}"
    if job.eval_steps is not None and job.eval_strategy == "no":
        yield "eval_steps without eval_data or eval_split: no evaluation"
    warmup = job.warmup(data.steps)
    if warmup >= data.steps and job.lr_scheduler_type != "constant":
        yield f"{warmup} steps of warmup, and {data.steps} in all: learning_rate is never reached"
    longest = int(max(data.lengths, default=0))
    if longest > max_row_tokens:
        yield (
            f"a sample has {longest} tokens, more than --max-row-tokens {max_row_tokens}: its "
            "micro-batches have rows of their own"
        )
        return
    size = min(job.per_device_train_batch_size, len(data.lengths))
    typical = round(size * float(np.mean(data.lengths))) if size else 0
    if typical > max_row_tokens:
        yield (
            f"a micro-batch has about {typical:,} tokens, more than --max-row-tokens "
            f"{max_row_tokens}, and one device takes it as one row: a smaller "
            "per_device_train_batch_size with more gradient_accumulation_steps needs less memory "
            "for the same steps"
        )


#: Jobs of which a warning is the same are named up to so many.
NAMED = 3
#: Of rates above, no optimizer makes an adapter.
MAX_RATE = 1.0


# Whether a model and jobs belong together.


def require_same_jobs(compiled: Sequence[Job], jobs: Sequence[Job]) -> None:
    """Refuse to train other jobs than a model was compiled for.

    raises    ResumeMismatch
    """
    if [job.name for job in compiled] != [job.name for job in jobs]:
        raise ResumeMismatch(
            "the model was compiled for other jobs",
            expected=", ".join(job.name for job in compiled),
            found=", ".join(job.name for job in jobs),
            help="compile the jobs that you train",
        )
    for compiled_job, job in zip(compiled, jobs, strict=True):
        before, now = _what_is_compiled(compiled_job), _what_is_compiled(job)
        if before != now:
            name, expected, found = next(value_differences(before, now))
            raise ResumeMismatch(
                f"the model was compiled for another job '{job.name}'",
                job=job.name,
                expected=f"{name}: {expected}",
                found=f"{name}: {found}",
                help="compile the jobs that you train",
            )


def _what_is_compiled(job: Job) -> dict[str, object]:
    """What of a job is in the model."""
    return {
        "base": job.base.model_dump(),
        "lora": job.lora_fields,
        "adapter_dtype": job.adapter_dtype,
        "adapter_compute": job.adapter_compute,
        "neftune_noise_alpha": job.neftune_noise_alpha or 0.0,
    }


# Whether the base's own loss is the one that jobs train by, on their own samples.


def check_own_loss(backbone: Backbone, data: Mapping[str, JobData], vocabulary: int) -> str | None:
    """Compare the base's own loss with the jobs', on samples of those that name no loss.

    vocabulary    how many logits a token has
    returns       what could not be compared, if anything
    raises        OwnLossDiffers
    """
    silent = {name: each for name, each in data.items() if each.job.assumes_common_loss}
    samples = [
        (sample.input_ids, sample.labels)
        for each in silent.values()
        for sample in islice(each.samples, max(1, _SAMPLES // len(silent)))
    ]
    rows = sample_rows(samples, vocabulary)
    return require_common_loss(backbone, rows, [*silent]) if rows else None


# Whether the fused graph computes what the base computes alone, on the weights at hand.

# Samples whose token ids are counted, and ids that are tried.
_SAMPLES, _IDS = 256, 64
#: By the graph and the base: the longest sequence that was tried, and how that went.
_probed: dict[Hashable, tuple[int, ProbeResult]] = {}


def probe_base(
    model: SuperModel,
    data: Mapping[str, JobData],
    base: Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
) -> ProbeResult:
    """Try a model that has its weights, whole, on its device; once a process for each graph.

    base      tensors by canonical name of a model whose weights no process will hold whole, before
              it is loaded; None: the model has them
    device    where it is tried; by default where the model is
    raises    FusedDiffers
    """
    place = device or next(model.parameters()).device
    longest = max((int(lengths_of(each.samples).max()) for each in data.values()), default=0)
    key = (model.source, model.backbone.fingerprint(), str(place))
    tried, probed = _probed.get(key, (-1, ProbeResult()))
    if longest > tried:
        parts = model.group, model.backbone, model.jobs
        value = model.base_tensor_or_value if base is None else lambda name: base[name].to(place)
        try:
            ids = [_frequent_ids(data[job.name]) if job.name in data else () for job in model.jobs]
            probed = probe_loaded_once(*parts, value, longest, ids=ids, device=place)
        except TloraError:
            raise
        except Exception as error:  # noqa: BLE001  (such as no memory for it: no fault of the model)
            probed = ProbeResult(skipped=f"{type(error).__name__}: {error}")
        _probed[key] = longest, probed
        logger.info("%s", probed)
    return probed


def _frequent_ids(data: JobData) -> list[int]:
    """The token ids that most of a job's first samples hold."""
    first = islice(data.samples, _SAMPLES)
    held = Counter(token for sample in first for token in set(sample.input_ids))
    return [token for token, _ in held.most_common(_IDS)]


# Whether the jobs' longest samples fit on the GPU at hand, by what was measured there.


def check_memory(
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
        cost, work = CostModel(facts, known), longest_round(model.jobs, data, max_row_tokens)
        price_budget(cost, model.group, plan, work)
        require_fits(cost, plan, work)
    except JobTooLong:
        raise
    except TloraError:
        return  # not measured, or not a model that a profile describes


def longest_round(jobs: Sequence[Job], data: Mapping[str, JobData], max_row_tokens: int) -> Round:
    """A round in which every job brings its longest samples."""
    return round_of_batches([_largest_batches(job, data[job.name]) for job in jobs], max_row_tokens)


def typical_round(jobs: Sequence[Job], data: Mapping[str, JobData], max_row_tokens: int) -> Round:
    """A round in which every job brings samples of all its lengths, as many as in a step."""
    return round_of_batches([_typical_batches(job, data[job.name]) for job in jobs], max_row_tokens)


def longest_row(
    jobs: Sequence[Job], data: Mapping[str, JobData], cutting: Cutting, parts: int
) -> int:
    """Tokens that no row of the jobs exceeds, however their samples meet.

    cutting   how rows may be cut
    parts     into how many a round is cut at least; cut between sequences, all of its rows are
              joined first
    """
    batches = [_largest_batches(job, data[job.name]) for job in jobs]
    if parts == 1 or cutting.whole:
        single = [sum(own[0]) for own in batches if own]
        bound = max(max(single, default=0), min(cutting.max_row_tokens, sum(single)))
        return repeating_length(bound)
    longest = max((int(lengths_of(each.samples).max()) for each in data.values()), default=0)
    whole = sum(cutting.cost(length) for own in batches for batch in own for length in batch)
    # Of parts of about equal cost, the dearest has one sequence too many at most.
    bound = math.ceil(whole / parts + cutting.cost(longest))
    return repeating_length(min(max(cutting.max_row_tokens, longest), bound))


def _largest_batches(job: Job, data: JobData) -> list[tuple[int, ...]]:
    """Sequences of a step's micro-batches if a job's longest samples meet, the largest first."""
    size, count = _batches_of(job, data)
    sequences = _sequences(data, np.argsort(-data.lengths, kind="stable")[: count * size].tolist())
    return [tuple(chain(*sequences[n * size : (n + 1) * size])) for n in range(count)]


def _typical_batches(job: Job, data: JobData) -> list[tuple[int, ...]]:
    """Sequences of a step's micro-batches, of evenly spread lengths."""
    size, count = _batches_of(job, data)
    ordered = np.argsort(data.lengths, kind="stable")
    taken = min(count * size, len(ordered))
    middles = (2 * np.arange(taken) + 1) * len(ordered) // (2 * taken)
    sequences = _sequences(data, ordered[middles].tolist())
    return [tuple(chain(*sequences[n::count])) for n in range(count)]


def _batches_of(job: Job, data: JobData) -> tuple[int, int]:
    """Samples of a micro-batch, and micro-batches of a step."""
    size = job.per_device_train_batch_size
    return size, min(job.gradient_accumulation_steps, -(-data.count // size))


def _sequences(data: JobData, samples: Sequence[int]) -> list[list[int]]:
    """Lengths of the sequences of some samples."""
    lengths = lengths_of(data.samples)
    units = [(at,) if data.units is None else data.units[at] for at in samples]
    return [[int(lengths[index]) for index in unit] for unit in units]
