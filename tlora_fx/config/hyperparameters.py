"""Hyperparameters of a job as people compare them: names are those of the job file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticUndefined

from tlora_fx.config.fields import LoraSpec
from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import kind_of

#: Shown of every job, in this order; the others where they are not the default.
MAIN = (
    "learning_rate", "lr_scheduler_type", "optim", "per_device_train_batch_size",
    "gradient_accumulation_steps", "max_length", "max_steps", "num_train_epochs", "seed",
)  # fmt: skip
#: Not compared: what a job is, reads and reports. `lora` is shown field by field.
OTHERS = frozenset({
    "name", "base", "data", "eval_data", "lora", "sample_prompts", "report_to", "schedule",
    "halving",
})  # fmt: skip
#: A job without evaluation data has no other strategy.
DEFAULTS = {name: field.default for name, field in Job.model_fields.items()} | {
    "eval_strategy": "no"
}


def with_defaults(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a job in a job file, with the defaults of the fields that it leaves out."""
    known = {name: value for name, value in DEFAULTS.items() if value is not PydanticUndefined}
    return {**known, **entry}


def rank_of(spec: Mapping[str, Any]) -> int | None:
    """Rank `r` of a job's adapter; None where the job file does not tell.

    spec   of the job, as `Job.model_dump(mode="json")` gives it
    """
    lora = spec.get("lora")
    if not isinstance(lora, Mapping):
        return None
    rank = lora.get("r", LoraSpec.model_fields["r"].default if kind_of(lora) == "LORA" else None)
    return rank if isinstance(rank, int) else None


def learning_rate_of(spec: Mapping[str, Any]) -> float | None:
    """Learning rate of a job, which its schedule scales; None where the spec does not tell."""
    rate = spec.get("learning_rate")
    return float(rate) if isinstance(rate, int | float) else None


def hyperparameters(spec: Mapping[str, Any]) -> dict[str, str]:
    """The hyperparameters that tell jobs apart, as text.

    spec   of the job, as `Job.model_dump(mode="json")` gives it
    """
    lora = spec.get("lora")
    rank = rank_of(spec)
    shown = {} if rank is None else {"lora.r": rank}
    if isinstance(lora, Mapping):
        shown |= {f"lora.{name}": value for name, value in lora.items()}
    shown |= {name: spec[name] for name in MAIN if spec.get(name) is not None}
    for name, value in spec.items():
        if name not in OTHERS and name not in MAIN and value != DEFAULTS.get(name):
            shown[name] = value
    return {name: shown_value(value) for name, value in shown.items()}


def differing(specs: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """The fields in which jobs differ, of each job: their values by dotted path, such as lora.r.

    What a job has no such field of has None. The name is left out, and so is the base, which jobs
    share.

    specs   of jobs, as `Job.model_dump(mode="json")` gives them; None where one is not known
    """
    flat = [None if spec is None else dict(_flat(spec)) for spec in specs]
    known = [fields for fields in flat if fields is not None]
    names = dict.fromkeys(name for fields in known for name in fields)
    differ = [
        name for name in names if any(fields.get(name) != known[0].get(name) for fields in known)
    ]
    return [{name: (fields or {}).get(name) for name in differ} for fields in flat]


def _flat(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of a job by dotted path, with their defaults; empty mappings are left out."""
    rank = rank_of(spec)
    if rank is not None:
        yield "lora.r", rank
    for name, value in with_defaults(spec).items():
        if name not in ("name", "base"):
            yield from _leaves(name, value)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}", inner)


def shown_value(value: object) -> str:
    """A hyperparameter as people read it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
