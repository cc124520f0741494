"""A model from the folder that `tlora-fx compile` wrote: nothing is traced again."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

import tlora_fx.ops  # noqa: F401  (registers the operators that graph files name)
from tlora_fx.compiler import prepare
from tlora_fx.config.job import Job
from tlora_fx.errors import FolderNotLoadable, errors_as
from tlora_fx.graph_file import load_graphs
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.model.backbone import Backbone
from tlora_fx.model.saved import SavedModel, bring
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.passes import find_passes
from tlora_fx.pipeline import load_extension
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters
from tlora_fx.runtime.adapters.starts import needs_data
from tlora_fx.runtime.checks import load_all_data
from tlora_fx.runtime.data_starts import data_starts, require_data_starts

SOURCE = "ssm.py"


def load(
    folder: str | Path,
    weights: str | Path | Mapping[str, Tensor] | None = None,
    *,
    device: torch.device | str = "cpu",
    extensions: Sequence[str | Path] = (),
) -> SuperModel:
    """The model of a compiled folder, with weights and fresh adapters: it runs and trains.

    Its code is the folder's ssm.py, also where somebody edited it; tensors are found by their
    paths. Open only folders that you trust: ssm.py and the modules that it imports are run. Jobs
    that start from their data read it.

    weights      the base's tensors by path, or a checkpoint's folder or hub id; by default what
                 the jobs name
    extensions   files or modules to import first, such as those of custom operators
    raises       FolderNotLoadable, GraphFileNotReadable, BaseNotLoadable, PluginBroken; of starts
                 from data DataError, TokenizerNotLoadable, StartNotComputed
    """
    folder = Path(folder)
    saved = SavedModel.read(folder / SavedModel.FILE)
    for extension in extensions:
        load_extension(extension)
    for item in saved.requires:
        bring(item)
    find_passes()
    graphs = load_graphs(folder)
    if not isinstance(graphs, GroupGraph) or not graphs.fused:
        raise FolderNotLoadable(
            "the folder's graphs are no fused model",
            folder=folder,
            help="compile without --stop-after",
        )
    checkpoint = None if isinstance(weights, Mapping) else weights
    given = prepare(_jobs(saved, folder, checkpoint))
    model = _built(folder, graphs, given.backbone, given.jobs)
    tensors = weights if isinstance(weights, Mapping) else base_tensors(model.backbone, device)
    model.materialize(tensors, device)
    from_data = [job for job in given.jobs if needs_data(job)]
    require_data_starts(model, from_data)
    start_adapters(model, data_starts(model, load_all_data(from_data) if from_data else {}))
    return model


def _jobs(saved: SavedModel, folder: Path, checkpoint: str | Path | None) -> list[Job]:
    """The jobs; on another checkpoint where one is named."""
    with errors_as(
        FolderNotLoadable, "a job of the compiled model cannot be read", ValidationError,
        file=folder / SavedModel.FILE,
        help="a base whose files moved is named by weights=..., else compile again",
    ):  # fmt: skip
        jobs = [Job.model_validate(item) for item in saved.jobs]
    if checkpoint is None:
        return jobs
    other = {"model": os.fspath(checkpoint), "config": None}
    return [job.model_copy(update={"base": job.base.model_copy(update=other)}) for job in jobs]


def _built(folder: Path, group: GroupGraph, backbone: Backbone, jobs: Sequence[Job]) -> SuperModel:
    """The modules of the folder's code."""
    file = folder / SOURCE
    try:
        text = file.read_text(encoding="utf-8")
        return SuperModel(group, backbone, jobs, source=text)
    except Exception as error:
        lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__)
                 if entry.filename.startswith("<tlora_fx ssm")]  # fmt: skip
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        raise FolderNotLoadable(
            "the code of the compiled model does not run",
            file=file,
            line=line,
            found=f"{type(error).__name__}: {error}",
            help="mend the edited line, or compile again",
        ) from error
