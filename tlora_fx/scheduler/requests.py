"""Requests to the scheduler, made of job files.

What a step of a job asks for is read from the job alone, compiled without weights; that is kept by
base and targets, so that jobs that differ in rank, batch or data cost nothing more; processes that
name a folder share it. torch is loaded when the first base is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tlora_fx.config.base_files import config_file
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.cost.load import Demand, work_of_lengths
from tlora_fx.cost.model_facts import LayerFacts, ModelFacts
from tlora_fx.errors import StepsUnknown
from tlora_fx.host.durable import replace_shared_file
from tlora_fx.host.memory import total_bytes
from tlora_fx.host.quiet_import import quiet_import
from tlora_fx.host.sources import own_source
from tlora_fx.scheduler.state import JobRequest

#: LoRA fields that change no shape, or only scale all of them with the rank.
_SCALING = frozenset({"r", "lora_alpha", "alpha_pattern", "lora_dropout", "use_rslora",
                      "init_lora_weights", "eva_config", "corda_config"})  # fmt: skip
#: Fields with which a rank does not scale everything.
_WITHOUT_RANK = ("rank_pattern", "use_dora", "bias", "lora_bias", "modules_to_save",
                 "trainable_token_indices")  # fmt: skip
DEFAULT_RANK = 8
FACTS = TypeAdapter(ModelFacts)
#: Files of facts that a run which goes on keeps, the newest; each has some KiB.
FACTS_KEPT = 1000
_compiled: dict[str, ModelFacts] = {}
_kept_in: list[Path] = []


def keep_facts(folder: Path) -> None:
    """Keep what is compiled in a folder from now on, for other processes that do the same."""
    folder.mkdir(parents=True, exist_ok=True)
    _kept_in[:] = [folder]
    _compiled.clear()


def forget_old_facts(folder: Path) -> None:
    """Remove all but the newest `FACTS_KEPT` files of a folder that may not be there."""
    with suppress(OSError):
        newest = sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime_ns)
        for path in newest[FACTS_KEPT:]:
            path.unlink(missing_ok=True)


def base_of(job: Job) -> str:
    """Key of jobs that may share a group: base, dtype and adapter arithmetic."""
    base = job.base
    source = base.model or (str(base.config) if base.config else type(base.module).__name__)
    words = [_short(source), base.dtype]
    if job.adapter_dtype != "float32":
        words.append(f"adapters-{job.adapter_dtype}")
    if job.adapter_compute != "base":
        words.append(f"compute-{job.adapter_compute}")
    return "-".join((*words, _digest(_base_fields(base))))


def request_of(
    job: Job,
    *,
    lengths: Sequence[int] | np.ndarray | None = None,
    evaluated: Sequence[int] | np.ndarray = (),
    submitted: float = 0.0,
    facts: ModelFacts | None = None,
) -> JobRequest:
    """Request of a job to the scheduler.

    lengths     tokens of each of its samples; None: all are as long as `max_length` allows
    evaluated   tokens of each sequence that it is evaluated on
    submitted   seconds
    facts       facts of the job compiled alone; None: it is compiled, or was
    raises      StepsUnknown where the job counts epochs and `lengths` are not given, and what
                compiling raises
    """
    known = facts or facts_of_job(job)
    longest = job.max_length * job.sequences_per_sample
    each = np.minimum([longest] if lengths is None or not len(lengths) else lengths, longest)
    spec, samples = job.schedule, job.per_device_train_batch_size * job.gradient_accumulation_steps
    count = None if lengths is None else len(lengths) or None
    demand = demand_of_facts(known, samples, each.tolist())
    return JobRequest(
        name=job.name,
        base=base_of(job),
        demand=demand.plus(measuring_of(job, count, evaluated)),
        gpus=spec.gpus,
        steps=steps_of(job, count),
        submitted=submitted,
        max_slowdown=spec.max_slowdown,
        deadline=None if spec.deadline is None else submitted + spec.deadline,
        max_slowdown_opt_in=spec.max_slowdown_opt_in or 0.0,
        longest=int(each.max()),
    )


def steps_of(job: Job, samples: int | None) -> int:
    """Optimizer steps of a job, as its data counts them.

    samples   how many there are; None where nobody knows
    raises    StepsUnknown
    """
    if job.max_steps is not None:
        return job.max_steps
    if samples is None:
        raise StepsUnknown(
            "a job counts epochs, and the number of its samples is not known",
            job=job.name,
            found=f"num_train_epochs={job.num_train_epochs}",
            help="set max_steps, or give the lengths of its samples",
        )
    return math.ceil((job.num_train_epochs or 1.0) * _epoch_steps(job, samples))


def _epoch_steps(job: Job, samples: int) -> int:
    """Optimizer steps in which each of so many samples is taken once."""
    micro_batches = math.ceil(samples / job.per_device_train_batch_size)
    return math.ceil(micro_batches / job.gradient_accumulation_steps)


def measuring_of(
    job: Job, samples: int | None, evaluated: Sequence[int] | np.ndarray = ()
) -> Demand:
    """Demand of a step's share of a job's evaluations, and of answers to its prompts.

    What a function of `compute_metrics` takes is not known.

    samples     that it trains on; None where nobody knows: an epoch is then all its steps
    evaluated   tokens of each sequence that it is evaluated on
    raises      StepsUnknown
    """
    steps = steps_of(job, samples)
    epoch = steps if samples is None else _epoch_steps(job, samples)

    def share(every: int) -> float:
        """Times that something is done every so many steps and after the last, over all steps."""
        return math.ceil(steps / every) / steps

    evaluations = 0.0 if job.eval_strategy == "no" else share(job.eval_steps or epoch)
    answers = share(job.sample_steps) if job.sample_steps else evaluations or share(steps)
    rows = -(-len(evaluated) // (job.per_device_eval_batch_size * job.sequences_per_sample))
    return Demand(
        evaluation_rows=evaluations * rows,
        evaluation_tokens=evaluations * float(np.sum(evaluated)),
        decoding_steps=answers * job.sample_max_new_tokens if job.sample_prompts else 0.0,
    )


def demand_of_facts(facts: ModelFacts, samples: int, lengths: Sequence[int]) -> Demand:
    """Demand of one step of a job.

    lengths   lengths of all its samples; a step has as many as the mean says
    """
    work = work_of_lengths(samples, lengths)
    sites = [site for layer in facts.layers for site in layer.sites if site.ranks[0]]
    layers = max(len(facts.layers), 1)
    columns = sum(site.width for site in sites) / layers
    rank = sum(site.width * site.ranks[0] for site in sites) / layers
    return Demand(
        **work,
        adapters=len(sites) / layers,
        rank=rank,
        site_tokens=work["tokens"] * columns,
        rank_tokens=work["tokens"] * rank,
        tensors=float(facts.tensors[0]),
        parameters=float(facts.trained[0]),
        launched=float(not facts.captures),
    )


def facts_of_job(job: Job) -> ModelFacts:
    """The facts of a job compiled alone, without weights.

    raises    errors of compiling: the base cannot be loaded, its targets are unknown, ...
    """
    lora_fields = job.lora_fields
    rank = int(lora_fields.get("r", DEFAULT_RANK)) * (2 if job.changes_base else 1)
    scales = job.is_lora and not any(
        lora_fields.get(name) not in (None, False, "none", {}) for name in _WITHOUT_RANK
    )
    shape = {
        name: value for name, value in lora_fields.items() if name not in _SCALING or not scales
    }
    dtypes = [job.adapter_dtype, job.adapter_compute]
    # Bases that differ in the numbers of their random weights are of one shape.
    base = {name: value for name, value in _base_fields(job.base).items() if name != "seed"}
    fields = {"base": base, "lora": shape, "dtypes": dtypes}
    key = _digest(fields)
    if key not in _compiled:
        _compiled[key] = _kept_facts(job, fields)
    facts = _ranked(_compiled[key], job.name, rank) if scales else _compiled[key]
    if 4 * facts.trained[0] > total_bytes():
        # No machine has room for such a rank: compiling it says where, and what would do.
        return _facts_by_compiling(job)
    return facts


def _kept_facts(job: Job, fields: Mapping[str, object]) -> ModelFacts:
    """A job's facts: those that a process has left in the folder, or by compiling it."""
    path = None
    if _kept_in and job.base.module is None:
        decided = {**fields, "content": _content_of(job.base), "code": _code()}
        path = _kept_in[0] / f"{_digest(decided, 64)}.json"
        with suppress(OSError, ValidationError):
            return FACTS.validate_json(path.read_bytes())
    facts = _facts_by_compiling(job)
    if path is not None:
        with suppress(OSError):
            replace_shared_file(path, FACTS.dump_json(facts))
    return facts


def _content_of(base: BaseSpec) -> list[str]:
    """Hashes of a base's config, which may be edited or come anew, and of code that it brings."""
    config = config_file(base)
    if config is None:
        return []
    code = sorted(config.parent.rglob("*.py")) if base.trust_remote_code else []
    files = [file for file in (config, *code) if file.is_file()]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@functools.cache
def _code() -> list[str]:
    """What compiles: this package as it is, and its libraries."""
    return [own_source(), *(version(name) for name in ("torch", "transformers", "peft"))]


def _facts_by_compiling(job: Job) -> ModelFacts:
    quiet_import("peft")
    from tlora_fx.compiler import compile
    from tlora_fx.cost.facts import facts_of

    return facts_of(compile([job]))


def shape_of(job: Job) -> ModelFacts:
    """The facts of a job's base, as estimators take them: no jobs, and all linears free.

    What keeps rows from running as CUDA graphs each job's demand says, whosoever it is.
    """
    facts = facts_of_job(job)
    layers = tuple(
        replace(layer, sites=(), trained=(), tail_bytes=0) for layer in facts.layers
    )  # fmt: skip
    return replace(
        facts, layers=layers, jobs=(), root_trained=(), tensors=(), states=(), launched=()
    )


def _ranked(facts: ModelFacts, name: str, rank: int) -> ModelFacts:
    """The facts of the same job with another rank: whatever it trains is proportional to it."""
    before = max((site.ranks[0] for layer in facts.layers for site in layer.sites), default=rank)

    def layer(layer_facts: LayerFacts) -> LayerFacts:
        sites = tuple(
            replace(site, ranks=(rank,) if site.ranks[0] else (0,)) for site in layer_facts.sites
        )
        return replace(layer_facts, sites=sites, trained=(layer_facts.trained[0] * rank // before,))

    return replace(
        facts,
        jobs=(name,),
        layers=tuple(map(layer, facts.layers)),
        root_trained=(facts.root_trained[0] * rank // before,),
    )


def _base_fields(base: BaseSpec) -> Mapping[str, object]:
    """What tells two bases apart."""
    fields: dict[str, object] = base.model_dump(mode="json", exclude={"tokenizer"})
    return fields if base.module is None else {**fields, "module": id(base.module)}


def _digest(fields: Mapping[str, object], digits: int = 8) -> str:
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _short(source: str) -> str:
    """The last part of a hub id or a path that says something."""
    path = Path(source).resolve() if source.startswith((".", "/", "~")) else Path(source)
    return (path.parent if path.suffix == ".json" else path).name.lower() or "base"
