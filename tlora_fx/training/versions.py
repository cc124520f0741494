"""Immutable versions of adapters on disk: PEFT folders, with what training needs beside them.

    adapter_config.json, adapter_model.safetensors   as PEFT has them
    optimizer.safetensors                            moments, where training may go on from it
    state.json                                       format, counters, and the optimizer's numbers

A folder is written under another name and then renamed, so that one that is there is whole. What
only the trainer reads, a snapshot, is one file with all of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from tlora_fx.errors import CheckpointError
from tlora_fx.host.durable import replace_file, sync_folder, write_synced
from tlora_fx.host.formats import require_known_stamp, stamp
from tlora_fx.model.backbone import Backbone
from tlora_fx.runtime.adapters.files import write_adapter
from tlora_fx.runtime.checkpoints.store import JobState
from tlora_fx.runtime.checkpoints.tensor_file import tensor_bytes
from tlora_fx.runtime.member import Member
from tlora_fx.tracing.adapters import written_config

FORMAT = 1
STATE, OPTIMIZER, ADAPTER = "state.json", "optimizer.safetensors", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Version:
    """What a folder holds.

    config   of the adapter, as `Engine.job` takes it
    state    None where it is for sampling alone
    """

    config: Mapping[str, Any]
    adapter: Mapping[str, Tensor]
    state: JobState | None = None


def write_version(
    folder: Path, member: Member, config: Mapping[str, Any], backbone: Backbone, base: str,
    *, whole: bool,
) -> int:  # fmt: skip
    """Write a member as it is; a folder of that name is replaced.

    config    as of `Version`
    base      its name, for PEFT
    whole     with the optimizer's state
    returns   bytes of its files
    raises    OSError, AdapterFolderError
    """
    state = member.state()
    fresh = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    write_adapter(fresh, state.adapter, written_config(member.job, backbone), base)
    content = _content(config, state) if whole else {**stamp(FORMAT), "config": dict(config)}
    if whole:
        write_synced(fresh / OPTIMIZER, tensor_bytes(state.optimizer))
    write_synced(fresh / STATE, json.dumps(content).encode())
    sync_folder(fresh)
    size = sum(file.stat().st_size for file in fresh.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    sync_folder(folder.parent)
    return size


def read_version(folder: Path) -> Version:
    """What `write_version` wrote; raises CheckpointError, NewerFormat."""
    with _reading(folder):
        content = json.loads((folder / STATE).read_bytes())
        require_known_stamp("the version", folder, content, known=FORMAT)
        adapter = load_file(folder / ADAPTER)
        if "optimizer" not in content:
            return Version(content["config"], adapter)
        return _version(content, adapter, load_file(folder / OPTIMIZER))


def write_snapshot(file: Path, member: Member, config: Mapping[str, Any]) -> None:
    """Write all that a member needs to go on as one file, which is there whole or not at all.

    config   as of `Version`
    raises   OSError
    """
    state = member.state()
    content = json.dumps(_content(config, state)).encode()
    tensors = {f"adapter/{name}": each for name, each in state.adapter.items()}
    tensors |= {f"optimizer/{name}": each for name, each in state.optimizer.items()}
    tensors[STATE] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, bytes(tensor_bytes(tensors)))


def read_snapshot(file: Path) -> Version:
    """What `write_snapshot` wrote; raises CheckpointError, NewerFormat."""
    with _reading(file):
        tensors = load_file(file)
        content = json.loads(tensors.pop(STATE).numpy().tobytes())
        require_known_stamp("the snapshot", file, content, known=FORMAT)
        parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "optimizer": {}}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        return _version(content, parts["adapter"], parts["optimizer"])


def _content(config: Mapping[str, Any], state: JobState) -> dict[str, Any]:
    return {
        **stamp(FORMAT), "config": dict(config), "optimizer": state.optimizer_values,
        "step": state.step, "tokens": state.tokens,
    }  # fmt: skip


def _version(
    content: Mapping[str, Any], adapter: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> Version:
    step, tokens = content["step"], content["tokens"]
    state = JobState(adapter, moments, content["optimizer"], step, 0, tokens)
    return Version(content["config"], adapter, state)


@contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Inside, what cannot be read is a CheckpointError."""
    try:
        yield
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            "a version of a model cannot be read",
            path=place,
            reason=error,
            help="it was deleted, or the disk is damaged: load another one",
        ) from error
