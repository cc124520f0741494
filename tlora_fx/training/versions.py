"""Immutable versions of adapters on disk: PEFT folders, with what training needs beside them.

    adapter_config.json, adapter_model.safetensors   as PEFT has them
    optimizer.safetensors                            moments, where training may go on from it
    gradients.safetensors                            those that no step had used, where there were
    state.json                                       format, counters, and the optimizer's numbers

One without a name is for samplers alone, and has no config of PEFT's. One that a user has sent has
that user's first two files, and `state.json` says how to read them.

A folder is written under another name and then renamed, so that one that is there is whole. What
only the trainer reads, a snapshot, is one file with all of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from tlora_fx.config.job import Job
from tlora_fx.errors import CheckpointError
from tlora_fx.host.durable import sync_folder, write_synced
from tlora_fx.host.formats import require_known_stamp, stamp
from tlora_fx.model.backbone import Backbone
from tlora_fx.runtime.adapters.files import write_adapter
from tlora_fx.runtime.checkpoints.store import JobState
from tlora_fx.runtime.checkpoints.tensor_file import as_file, read_tensors, tensor_bytes
from tlora_fx.runtime.group_step import Gathered
from tlora_fx.tracing.adapters import written_config
from tlora_fx.training.folders import FORMAT, STATE

ADAPTER = "adapter_model.safetensors"
OPTIMIZER, GRADIENTS = "optimizer.safetensors", "gradients.safetensors"


@dataclass(frozen=True, slots=True)
class Version:
    """An adapter, and what training needs to go on from it.

    config     of the adapter, as `Engine.job` takes it
    state      None where it is for sampling alone
    gathered   gradients that no step had used
    """

    config: Mapping[str, Any]
    adapter: Mapping[str, Tensor]
    state: JobState | None = None
    gathered: Gathered = field(default_factory=Gathered)

    def in_main_memory(self) -> Version:
        """Copies there, which no step reaches."""
        assert self.state is not None
        state = self.state.with_own_values()
        state = replace(state, adapter=as_file(state.adapter), optimizer=as_file(state.optimizer))
        gathered = replace(self.gathered, gradients=as_file(self.gathered.gradients))
        return Version(self.config, state.adapter, state, gathered)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        moments = {} if self.state is None else self.state.optimizer
        parts = (self.adapter, moments, self.gathered.gradients)
        return sum(each.nbytes for tensors in parts for each in tensors.values())


def write_version(folder: Path, version: Version, job: Job, backbone: Backbone, base: str) -> int:
    """Write a version; a folder of that name is replaced.

    job       whose adapter it is
    base      its name, for PEFT
    returns   bytes of its files
    raises    OSError, AdapterFolderError
    """
    fresh = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    write_adapter(fresh, version.adapter, written_config(job, backbone), base)
    if version.state is not None:
        write_synced(fresh / OPTIMIZER, tensor_bytes(version.state.optimizer))
    if version.gathered.batches:
        write_synced(fresh / GRADIENTS, tensor_bytes(version.gathered.gradients))
    write_synced(fresh / STATE, json.dumps(_content(version)).encode())
    sync_folder(fresh)
    size = sum(file.stat().st_size for file in fresh.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    sync_folder(folder.parent)
    return size


def write_unsynced(folder: Path, version: Version) -> None:
    """Write a version that samplers alone read, and do not wait for the disk.

    A kill leaves it whole. After a power failure it may be cut, which `read_version` sees.

    raises   OSError
    """
    fresh = folder.with_name(f".{folder.name}.tmp")
    for old in (fresh, folder):
        shutil.rmtree(old, ignore_errors=True)
    fresh.mkdir(parents=True)
    (fresh / ADAPTER).write_bytes(tensor_bytes(version.adapter))
    (fresh / STATE).write_text(json.dumps(_content(version)))
    fresh.rename(folder)


def read_version(folder: Path) -> Version:
    """Content that `write_version` wrote; raises CheckpointError, NewerFormat."""
    with _reading(folder):
        content = json.loads((folder / STATE).read_bytes())
        require_known_stamp("the version", folder, content, known=FORMAT)
        adapter = _fitted(load_file(folder / ADAPTER), content)
        if "optimizer" not in content:
            return Version(content["config"], adapter)
        gradients = load_file(folder / GRADIENTS) if "gathered" in content else {}
        return _version(content, adapter, load_file(folder / OPTIMIZER), gradients)


def _fitted(adapter: dict[str, Tensor], content: Mapping[str, Any]) -> dict[str, Tensor]:
    """An adapter that a user has sent, for the sites and the scaling of models here."""
    if (scale := content.get("scale", 1.0)) != 1.0:
        for name in [name for name in adapter if ".lora_B." in name]:
            each = adapter[name]
            adapter[name] = each.to(torch.promote_types(each.dtype, torch.float32)) * scale
    # Where A and B are zeros no gradient comes, so that they stay zeros.
    return adapter | {name: torch.zeros(shape) for name, shape in content.get("absent", {}).items()}


def snapshot_bytes(version: Version) -> memoryview:
    """The content of a file with all that a model needs to go on; a copy, which no step reaches."""
    assert version.state is not None
    content = json.dumps(_content(version)).encode()
    tensors = {
        f"{part}/{name}": each
        for part, own in (
            ("adapter", version.adapter),
            ("optimizer", version.state.optimizer),
            ("gradients", version.gathered.gradients),
        )
        for name, each in own.items()
    }
    tensors[STATE] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return tensor_bytes(tensors)


def read_snapshot(file: Path) -> Version:
    """Content of a file of `snapshot_bytes`; raises CheckpointError, NewerFormat."""
    with _reading(file):
        tensors = read_tensors(file)
        content = json.loads(tensors.pop(STATE).numpy().tobytes())
        require_known_stamp("the snapshot", file, content, known=FORMAT)
        parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "optimizer": {}, "gradients": {}}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        return _version(content, **parts)


def _content(version: Version) -> dict[str, Any]:
    content: dict[str, Any] = {**stamp(FORMAT), "config": dict(version.config)}
    if (state := version.state) is not None:
        content |= {"optimizer": state.optimizer_values, "step": state.step, "tokens": state.tokens}
    if (own := version.gathered).batches:
        content["gathered"] = {"loss": own.loss, "tokens": own.tokens, "batches": own.batches}
    return content


def _version(
    content: Mapping[str, Any], adapter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> Version:  # fmt: skip
    step, tokens = content["step"], content["tokens"]
    state = JobState(adapter, optimizer, content["optimizer"], step, 0, tokens)
    gathered = Gathered(**content.get("gathered", {}), gradients=gradients)
    return Version(content["config"], adapter, state, gathered)


@contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Inside, what cannot be read is a CheckpointError."""
    try:
        yield
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError,
        safetensors.SafetensorError,
    ) as error:  # fmt: skip
        raise CheckpointError(
            "a version of a model cannot be read",
            path=place,
            reason=error,
            help="it was deleted, or the disk is damaged: load another one",
        ) from error
