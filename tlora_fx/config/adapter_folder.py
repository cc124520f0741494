"""Read the configuration of a PEFT adapter folder that a job continues.

A folder is somebody else's file: its configuration is read as JSON and held against the same
table as a job's own `lora`, and its weights count only as safetensors, never as a pickle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tlora_fx.config.fields import IDENTITY, REFUSED, changes_base
from tlora_fx.config.other_kinds import (
    adapter_mapping,
    adapter_spec,
    kind_of,
    other_kind_names,
    peft_fields,
)
from tlora_fx.config.paths import is_file, is_folder
from tlora_fx.config.validation import collecting, mistakes_in
from tlora_fx.errors import AdapterFolderError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
EVA = "eva"


def read_adapter_config(folder: Path, task: str = "CAUSAL_LM") -> dict[str, Any]:
    """The adapter fields of an adapter folder, validated as a job's `lora` is.

    task    what its base does, in PEFT's words

    raises  AdapterFolderError when a file is missing or unreadable, or its fields are refused
    """
    require_adapter_files(folder)
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = f"{CONFIG} cannot be read"
        raise AdapterFolderError(what, folder=folder, found=error) from None
    if not isinstance(config, dict):
        raise AdapterFolderError(f"{CONFIG} is no JSON object", folder=folder)
    kinds = ("LORA", *other_kind_names())
    for key, expected in (("peft_type", kinds), ("task_type", (task,))):
        if config.get(key) not in (None, *expected):
            raise AdapterFolderError(
                f"the adapter's {key} is not {' or '.join(expected)}",
                folder=folder,
                found=config[key],
            )
    fields = _fields(config)
    left_out = _ignored(fields)
    if fields.get("init_lora_weights") == EVA:
        # Its A came from data, and is in the folder; the base is whole.
        left_out += ["init_lora_weights", "eva_config"]
    if fields.get("target_parameters") == []:
        left_out.append("target_parameters")
    fields = {key: value for key, value in fields.items() if key not in left_out}
    lines = []
    with collecting():
        try:
            mapping = adapter_mapping(fields)
        except ValidationError as error:
            lines = [mistake.line() for mistake in mistakes_in(error, adapter_spec(fields))]
    if not lines:
        _require_whole_base(mapping, folder)
        return mapping
    raise AdapterFolderError(
        f"{CONFIG} has fields that tlora-fx refuses", folder=folder, found="\n".join(lines)
    )


def ignored_fields(folder: Path) -> list[str]:
    """The fields of an adapter folder that no version of PEFT here knows, and that say nothing.

    Other versions of PEFT wrote them, as null, false or empty.

    folder   one that `read_adapter_config` reads
    """
    return _ignored(_fields(json.loads((folder / CONFIG).read_bytes())))


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    """What of a folder's configuration a job's `lora` has too."""
    fields = {key: value for key, value in config.items() if key not in IDENTITY}
    return fields if kind_of(config) == "LORA" else {**fields, "peft_type": kind_of(config)}


def _ignored(fields: dict[str, Any]) -> list[str]:
    """Empty fields of which neither our tables nor the installed PEFT know anything."""
    spec = adapter_spec(fields)
    known = {*IDENTITY, *REFUSED, *spec.model_fields, *getattr(spec, "refused", ())}
    empty = [key for key, value in fields.items() if key not in known and _is_empty(value)]
    return [key for key in empty if key not in peft_fields(kind_of(fields))] if empty else []


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _require_whole_base(fields: dict[str, Any], folder: Path) -> None:
    init = fields.get("init_lora_weights")
    if changes_base(init):
        raise AdapterFolderError(
            f"the adapter belongs beside what '{init}' left of its base",
            folder=folder,
            help="save it by PEFT's save_pretrained with path_initial_model_for_weight_conversion, "
            "as an adapter of the base itself",
        )


def require_adapter_files(folder: Path) -> None:
    """Refuse a folder without the files of an adapter; raises AdapterFolderError."""
    if not is_folder(folder):
        raise AdapterFolderError("the adapter folder does not exist", folder=folder)
    if not is_file(folder / CONFIG):
        what = f"the adapter folder has no {CONFIG}"
        raise AdapterFolderError(what, folder=folder, help="name a folder that PEFT saved")
    if is_file(folder / WEIGHTS):
        return
    if is_file(folder / PICKLE):
        raise AdapterFolderError(
            f"the adapter folder has only {PICKLE}, a pickle, which can run code when it is read",
            folder=folder,
            expected=WEIGHTS,
            help="load it with PEFT where you trust it, and save it with safe_serialization=True",
        )
    raise AdapterFolderError(f"the adapter folder has no {WEIGHTS}", folder=folder)
