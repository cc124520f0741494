"""What a compiled model needs where it is loaded: its jobs, and the modules that it calls."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import fx
from torch._library.custom_ops import OPDEFS

from tlora_fx.config.job import Job
from tlora_fx.errors import FolderNotLoadable
from tlora_fx.ir.graph import GroupGraph, TensorRef
from tlora_fx.version import __version__

_REGISTERED = re.compile(r"registered at (\S+\.py):\d+")
#: What `import tlora_fx.ops` brings.
OURS = "tlora_fx."


class Requirement(BaseModel):
    """A module of somebody else's that a model calls.

    module    as Python imports it
    file      where it was when the model was compiled, "" where it is none
    calls     what the model calls of it, such as "mine::scaled"
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    module: str
    file: str
    calls: tuple[str, ...]


class SavedModel(BaseModel):
    """What `model.json` says.

    jobs    as `Job.model_dump(mode="json")` writes them, with whole paths
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    FILE: ClassVar[str] = "model.json"

    format: Literal[1] = 1
    versions: dict[str, str]
    requires: tuple[Requirement, ...]
    jobs: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> SavedModel:
        """Read a file; raises FolderNotLoadable."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise FolderNotLoadable(
                "the folder holds no compiled model",
                file=path,
                found=error,
                help="name a folder that `tlora-fx compile` wrote from jobs on a named base",
            ) from error


def saved_model(group: GroupGraph, jobs: Iterable[Job]) -> SavedModel:
    """What loading a model takes."""
    versions = {"tlora-fx": __version__, "torch": str(torch.__version__)}
    described = tuple(_whole_paths(job.model_dump(mode="json")) for job in jobs)
    needed = requirements(group.graphs())
    return SavedModel(versions=versions, requires=needed, jobs=described)


def _whole_paths(job: dict[str, Any]) -> dict[str, Any]:
    """A job whose paths do not depend on the folder that a process stands in."""
    base = dict(job["base"])
    for key in ("model", "config", "tokenizer"):
        if base.get(key) and Path(base[key]).exists():
            base[key] = str(Path(base[key]).resolve())
    return {**job, "base": base}


def requirements(graphs: Iterable[fx.Graph]) -> tuple[Requirement, ...]:
    """The modules of others that register a model's operators, or make its stored forms."""
    calls: dict[str, set[str]] = {}
    for graph in graphs:
        for node in graph.nodes:
            ref, target = node.meta.get("tensor"), node.target
            if isinstance(target, torch._ops.OpOverload):
                home = _home(target)
                calls.setdefault(home, set()).add(_called(target))
            if isinstance(ref, TensorRef) and ref.form:
                module, _, function = ref.form.partition(":")
                calls.setdefault(module, set()).add(function)
    foreign = {name: sorted(used) for name, used in calls.items() if name and _is_foreign(name)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in foreign}
    return tuple(
        Requirement(module=name, file=files[name], calls=tuple(foreign[name]))
        for name in sorted(foreign)
    )


def _called(target: torch._ops.OpOverload) -> str:
    """An operator as it is registered: "mine::scaled"."""
    return str(target).rpartition(".")[0].replace(".", "::", 1)


def _home(target: torch._ops.OpOverload) -> str:
    """The Python module that registered an operator, "" for one of torch's own."""
    name = _called(target)
    if name in OPDEFS:
        return str(OPDEFS[name]._init_fn.__module__)
    match = _REGISTERED.search(torch._C._dispatch_dump(name))
    if match is None:
        return ""
    files = ((getattr(module, "__file__", None), key) for key, module in [*sys.modules.items()])
    return next((key for file, key in files if file == match[1]), "")


def _is_foreign(module: str) -> bool:
    return not f"{module}.".startswith((OURS, "torch."))


def dumped(saved: SavedModel) -> str:
    """The text of `model.json`."""
    return json.dumps(saved.model_dump(mode="json"), indent=1) + "\n"
