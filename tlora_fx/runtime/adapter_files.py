"""PEFT adapter folders: written so that `PeftModel.from_pretrained` loads them, read safely."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tlora_fx.config.adapter_folder import CONFIG, WEIGHTS, read_adapter_config
from tlora_fx.durable import sync_folder, write_synced
from tlora_fx.errors import AdapterFolderError

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What a PEFT adapter folder holds.

    fields    its LoraConfig fields, validated as a job's `lora` is
    tensors   under the names of its safetensors file
    """

    fields: dict[str, Any]
    tensors: dict[str, Tensor]


def write_adapter(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    config: LoraConfig,
    base_name: str | None = None,
) -> None:
    """Write or replace a PEFT adapter folder; other files in it stay.

    tensors     by the names of PEFT's `get_peft_model_state_dict`; views are copied
    config      written by PEFT's own code, with inference mode on, as PEFT does
    base_name   hub id or folder of the base, kept when None
    raises      AdapterFolderError when the disk refuses; an adapter written before stays whole
    """
    target = Path(folder)
    fresh: Path | None = None
    try:
        target.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".adapter.tmp-", dir=target))
        _saved_config(config, base_name).save_pretrained(str(fresh))
        write_synced(fresh / CONFIG, (fresh / CONFIG).read_bytes())
        write_synced(fresh / WEIGHTS, tensor_bytes(tensors))
        # The weights come last: a folder that has them is complete.
        for name in (CONFIG, WEIGHTS):
            (fresh / name).replace(target / name)
        sync_folder(target)
    except OSError as error:
        raise AdapterFolderError(
            "an adapter could not be written",
            folder=target,
            reason=error,
            help="free space or mend the permissions, then go on with --resume",
        ) from error
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


def read_adapter(folder: Path | str) -> AdapterFolder:
    """Read a PEFT adapter folder, from safetensors only.

    raises   AdapterFolderError when a file is missing or damaged, the weights are only a pickle,
             or the adapter is none that tlora-fx trains
    """
    source = Path(folder)
    fields = read_adapter_config(source)
    try:
        tensors = safetensors.torch.load_file(source / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterFolderError(
            f"{WEIGHTS} cannot be read",
            folder=source,
            found=error,
            help="save the adapter again with PEFT's save_pretrained",
        ) from error
    return AdapterFolder(fields, tensors)


def _saved_config(config: LoraConfig, base_name: str | None) -> LoraConfig:
    saved = copy.deepcopy(config)
    saved.inference_mode = True
    if base_name is not None:
        saved.base_model_name_or_path = base_name
    # Sets come out in an order that changes from run to run.
    for name in ("target_modules", "exclude_modules"):
        if isinstance(getattr(saved, name), set):
            setattr(saved, name, sorted(getattr(saved, name)))
    return saved


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file; tensors may be views of one storage, on any device."""
    # safetensors refuses tensors that share storage, so each is copied.
    whole = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return safetensors.torch.save(whole, metadata={"format": "pt"})
