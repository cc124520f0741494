"""Lay what a job says over the defaults, and what a sweep says over the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: A job's own choice replaces what the defaults chose instead of it.
_EITHER = (
    ("lora", "adapter"),
    ("max_steps", "num_train_epochs"),
    ("warmup_steps", "warmup_ratio"),
    ("eval_data", "eval_split"),
)


def laid_over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`: nested mappings are merged, and a choice replaces its rival."""
    return _merge(_without_rivals(under, over), over)


def _without_rivals(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(under)
    for pair in _EITHER:
        for mine, other in (pair, pair[::-1]):
            if _chooses(over, mine) and not _chooses(kept, mine) and not _chooses(over, other):
                kept.pop(other, None)
    return kept


def _chooses(fields: Mapping[str, Any], key: str) -> bool:
    """Whether a field says something: null does not, nor `max_steps: -1`."""
    return fields.get(key) is not None and not (key == "max_steps" and fields[key] == -1)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, nested mappings too."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(below, value)
        elif key == "data" and isinstance(below, Mapping) and isinstance(value, list):
            merged[key] = [_merge(below, v) if isinstance(v, Mapping) else v for v in value]
        else:
            merged[key] = value
    return merged
