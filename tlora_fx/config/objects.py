"""Objects that Python code hands to a job, as the fields of a job file.

A LoraConfig of PEFT becomes our `lora`, a Dataset or a list of rows our `data`, a model our `base`.
Objects are known by what they have: neither PEFT, nor torch, nor datasets is imported for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from tlora_fx.config.fields import IDENTITY, OPTIMIZER_MODULES, OPTIMIZERS, default_of
from tlora_fx.config.validation import refuse

#: Keys of a data set, by which a list of data sets is told from a list of rows.
DATA_SET_KEYS = frozenset({
    "path", "name", "split", "streaming", "columns", "format", "loss_on", "skip_bad_rows",
    "append_eos", "weight", "more", "rows",
})  # fmt: skip


def job_fields(name: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a job from the arguments of `Job(...)`.

    name    given by its position
    """
    fields = dict(arguments) if name is None else {"name": name, **arguments}
    if "lora" in fields:
        fields["lora"] = lora_fields(fields["lora"])
    for key in ("data", "eval_data"):
        if key in fields:
            fields[key] = data_fields(fields[key])
    if "optim" in fields:
        fields["optim"] = _optimizer_name(fields["optim"])
    if "lr_scheduler" in fields and "lr_scheduler_type" not in fields:
        fields["lr_scheduler_type"] = fields.pop("lr_scheduler")
    tokenizer = fields.pop("tokenizer", None)
    if "base" in fields:
        fields["base"] = base_fields(fields["base"])
        if tokenizer is not None:
            fields["base"] = _with_tokenizer(fields["base"], tokenizer)
    return fields


def lora_fields(value: Any) -> Any:
    """Fields of `lora` from a rank, or from a config of PEFT; all else as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"r": value}
    if not (dataclasses.is_dataclass(value) and hasattr(value, "peft_type")):
        return value
    fields = _changed_fields(value)
    kind = str(getattr(value.peft_type, "value", value.peft_type))
    # PEFT writes the others itself, when it wraps a model or saves an adapter.
    fields = {key: x for key, x in fields.items() if key not in IDENTITY or key == "task_type"}
    return fields if kind == "LORA" else {**fields, "peft_type": kind}


def _changed_fields(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that have not their default, as a job file has them."""
    return {
        field.name: _plain(value)
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != default_of(field)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _changed_fields(value)
    return value


def _optimizer_name(value: Any) -> Any:
    """The name of a class of torch.optim, where job files have one; all else as it is."""
    named = {name: kind for kind, (name, _) in OPTIMIZERS.items() if kind not in OPTIMIZER_MODULES}
    if isinstance(value, type) and value.__module__.startswith("torch.optim"):
        return named.get(value.__name__, value)
    return value


def data_fields(value: Any) -> Any:
    """Fields of `data` from a path, rows, a data set of `datasets`, or a list of data sets."""
    if value is None or isinstance(value, Mapping) or hasattr(value, "model_fields_set"):
        return {"rows": value} if is_of_datasets(value) or _is_columns(value) else value
    if isinstance(value, str | Path):
        return {"path": value}
    if isinstance(value, list | tuple) and value and all(map(_is_data_set, value)):
        return [data_fields(each) for each in value]
    return {"rows": value}


def _is_columns(value: Any) -> bool:
    """Whether a mapping holds columns of rows, not the fields of a data set."""
    listed = isinstance(value, Mapping) and bool(value) and not DATA_SET_KEYS & set(value)
    return listed and all(isinstance(column, list) for column in value.values())


def _is_data_set(value: Any) -> bool:
    """Whether an item of a list is a data set, not a row of one."""
    if isinstance(value, Mapping):
        return bool({"path", "rows"} & set(value)) and set(value) <= DATA_SET_KEYS
    return isinstance(value, str | Path) or hasattr(value, "model_fields_set") or _is_table(value)


def is_of_datasets(value: object) -> bool:
    """Whether an object is of a class of the library `datasets`."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(value).__mro__)


def _is_table(value: object) -> bool:
    return is_of_datasets(value) and not isinstance(value, Mapping)


def is_stream(value: object) -> bool:
    """Whether rows are an IterableDataset, of which nobody knows how long it is."""
    return _is_table(value) and not hasattr(value, "__len__")


def base_fields(value: Any) -> Any:
    """Fields of `base` from a path, a hub id, or a model; all else as it is."""
    if isinstance(value, str | Path):
        return {"model": value}
    return {"module": value} if is_module(value) else value


def is_module(value: object) -> bool:
    """Whether an object is an nn.Module."""
    return callable(getattr(value, "named_parameters", None))


def _with_tokenizer(base: Any, tokenizer: Any) -> Any:
    if isinstance(base, Mapping):
        return {**base, "tokenizer": tokenizer}
    if not hasattr(base, "model_fields_set"):
        return base
    given = {name: getattr(base, name) for name in base.model_fields_set}
    return {**given, "tokenizer": tokenizer}


def dtype_name(module: Any) -> str | None:
    """The dtype of a module's first parameter of numbers; None where it has none."""
    floats = (p for p in module.parameters() if p.is_floating_point())
    return next((str(p.dtype).removeprefix("torch.") for p in floats), None)


def classifier_fields(module: Any) -> dict[str, Any]:
    """The fields of `base` that a model of transformers for classes of sequences says itself."""
    if not type(module).__name__.endswith("ForSequenceClassification"):
        return {}
    names = [name for _, name in sorted(module.config.id2label.items())]
    drawn = all(name == f"LABEL_{index}" for index, name in enumerate(names))
    fields = {"task": "SEQ_CLS", "labels": len(names) if drawn else names}
    kind = getattr(module.config, "problem_type", None)
    return fields if kind is None else {**fields, "problem_type": kind}


def name_of(module: object) -> str | None:
    """Hub id or folder from which transformers has loaded a model; None where it tells none."""
    config = getattr(module, "config", None)
    name = getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
    return name if isinstance(name, str) and name else None


def require_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse what hears of no run; raises PydanticCustomError."""
    for callback in callbacks:
        if isinstance(callback, type) or not callable(getattr(callback, "stepped", None)):
            found = getattr(callback, "__qualname__", type(callback).__qualname__)
            what = f"a callback is no object of tlora_fx.TrainerCallback: {found}"
            raise refuse(what, help="derive its class from that one: docs/callbacks.md")
