"""Parts that a compiled model needs where it is loaded: its jobs, and the modules it calls."""

from __future__ import annotations

import importlib
import json
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from torch import fx
from torch._library.custom_ops import OPDEFS
from torch.export import ExportedProgram

from tlora_fx.config.job import Job
from tlora_fx.errors import FolderNotLoadable, errors_as
from tlora_fx.host.version import __version__
from tlora_fx.ir.graph import GroupGraph, TensorRef

_REGISTERED = re.compile(r"registered at (\S+\.py):\d+")
#: Modules by the files that were asked for.
_modules: dict[str, str] = {}
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
    """Contents of `model.json`.

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
        with errors_as(
            FolderNotLoadable, "the folder holds no compiled model", OSError, ValidationError,
            file=path, help="name a folder that `tlora-fx compile` wrote from jobs on a named base",
        ):  # fmt: skip
            return cls.model_validate_json(path.read_bytes())


def saved_model(group: GroupGraph, jobs: Iterable[Job]) -> SavedModel:
    """Parts that loading a model takes."""
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
    homes: dict[torch._ops.OpOverload, str] = {}
    for graph in graphs:
        for node in graph.nodes:
            ref, target = node.meta.get("tensor"), node.target
            if isinstance(target, torch._ops.OpOverload):
                if target not in homes:
                    homes[target] = _home(target)
                calls.setdefault(homes[target], set()).add(_called(target))
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
    return _module_at(match[1])


def _module_at(file: str) -> str:
    """The module of a file, "" where it has none; each model asks for the same few."""
    known = _modules.get(file, "")
    if getattr(sys.modules.get(known), "__file__", None) != file:
        files = ((getattr(module, "__file__", None), key) for key, module in [*sys.modules.items()])
        known = _modules[file] = next((key for path, key in files if path == file), "")
    return known


def _is_foreign(module: str) -> bool:
    return not f"{module}.".startswith((OURS, "torch."))


def dumped(saved: SavedModel) -> str:
    """The text of `model.json`."""
    return json.dumps(saved.model_dump(mode="json"), indent=1) + "\n"


# Exported programs, in files that say what they call.
NEEDS = "tlora_fx.json"


def save_program(program: ExportedProgram, path: str | Path) -> None:
    """Write what `SuperModel.export` made, with the modules that it takes to load it.

    raises    OSError
    """
    graphs = [module.graph for module in program.graph_module.modules()
              if isinstance(module, fx.GraphModule)]  # fmt: skip
    needs = [item.model_dump(mode="json") for item in requirements(graphs)]
    torch.export.save(program, path, extra_files={NEEDS: json.dumps(needs)})


def load_program(path: str | Path) -> ExportedProgram:
    """Read what `save_program` wrote; the modules that it calls are imported, by name or file.

    raises    FolderNotLoadable for a module that is not there, and for other files
    """
    import tlora_fx.ops  # noqa: F401  (registers the operators)

    unreadable = errors_as(
        FolderNotLoadable, "the file holds no exported model",
        OSError, zipfile.BadZipFile, StopIteration, ValidationError, named=True,
        file=path, help="name a file that save_program wrote",
    )  # fmt: skip
    with unreadable, zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith(f"/{NEEDS}"))
        needs = TypeAdapter(list[Requirement]).validate_json(archive.read(name))
    for item in needs:
        bring(item)
    return torch.export.load(path)


def bring(item: Requirement) -> None:
    """Import what a model calls: by its name, else the file that it was, whose folder is searched.

    raises    FolderNotLoadable
    """
    file = Path(item.file) if item.file else None
    folders = [""] if file is None or not file.is_file() else ["", str(file.parent)]
    for folder in folders:
        if folder and folder not in sys.path:
            sys.path.append(folder)
        try:
            importlib.import_module(item.module)
            return
        except ModuleNotFoundError as error:
            failed = error
    raise FolderNotLoadable(
        f"the model calls what module '{item.module}' brings, and it is not there",
        calls=", ".join(item.calls),
        expected=item.file or item.module,
        found=failed,
        help="install it, or name its file: tlora_fx.load(folder, extensions=[...])",
    ) from failed
