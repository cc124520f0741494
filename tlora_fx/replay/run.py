"""Run a pass that failed once more, alone, under the checks that it failed."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from tlora_fx.compiler import find_passes, resolve_pipeline
from tlora_fx.errors import ReplayNotReadable, TloraError
from tlora_fx.graph_file import from_document, load_document
from tlora_fx.inspect.wording import plural
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.numerics import Numerics
from tlora_fx.pipeline import Event, GroupPass, Instrument, JobPass, Pipeline, Runner, pass_names
from tlora_fx.tools.replay import BUFFERS, GRAPHS, RECORD, ForeignPass, Replay, load_replay


def run_replay(folder: Path) -> TloraError | None:
    """Run the pass of a replay folder alone.

    returns   the error that it raises or that its checks raise; None where it fails no more
    raises    ReplayNotReadable, GraphFileNotReadable, PipelineError or PluginBroken where the pass
              cannot be run
    """
    replay = load_replay(folder)
    find_passes()
    for foreign in replay.foreign:
        _import(foreign)
    pipeline = resolve_pipeline(replay.pipeline)
    event = _event(replay, pipeline, from_document(load_document(folder / GRAPHS)), folder)
    runner = Runner(pipeline, _instruments(replay, folder), replay.verify)
    runner.start()
    try:
        runner.run_one(event)
    except TloraError as error:
        return error
    return None


def left_out(folder: Path) -> list[str]:
    """Tags that the folder's graphs lack, because a file cannot keep them, each kind once.

    returns   such as "hint (my_package.Hint), of 96 nodes"
    raises    GraphFileNotReadable
    """
    kinds = Counter(tag.rpartition(": ")[2] for tag in load_document(folder / GRAPHS).left_out)
    return [f"{kind}, of {plural(times, 'node')}" for kind, times in kinds.items()]


def _event(
    replay: Replay, pipeline: Pipeline, graphs: JobGraph | GroupGraph, folder: Path
) -> Event:
    passes = pipeline.passes
    item = passes[replay.place - 1] if 0 < replay.place <= len(passes) else None
    fits = (isinstance(item, JobPass) and isinstance(graphs, JobGraph)) or (
        isinstance(item, GroupPass) and isinstance(graphs, GroupGraph)
    )
    if item is None or item.name != replay.name or not fits:
        raise ReplayNotReadable(
            "the replay folder does not hold together",
            file=folder / RECORD,
            expected=f"pass {replay.place} of the pipeline is '{replay.name}', and takes the "
            f"graphs of {GRAPHS}/",
            found=f"{replay.pipeline}, and the graphs of {replay.subject}",
            help="compile again to write it anew",
        )
    return Event(replay.place, item, replay.subject, graphs)


def _instruments(replay: Replay, folder: Path) -> list[Instrument]:
    if replay.verify != "numerics":
        return []
    try:
        numerics = Numerics(**replay.numerics)  # type: ignore[arg-type]
        numerics.take(safetensors.torch.load((folder / BUFFERS).read_bytes()))
    except (OSError, TypeError, SafetensorError) as error:
        raise ReplayNotReadable(
            "the numbers of the replay folder cannot be read",
            file=folder / BUFFERS,
            found=f"{type(error).__name__}: {error}",
            help="compile again to write it anew",
        ) from error
    return [numerics]


def _import(foreign: ForeignPass) -> None:
    """Make a pass known that no entry point names: a module registered it when it was imported.

    raises    ReplayNotReadable
    """
    if foreign.name in pass_names():
        return
    try:
        importlib.import_module(foreign.module)
    except Exception as error:  # noqa: BLE001  (whatever a stranger's module raises is its reason)
        found = f"{type(error).__name__}: {error}"
    else:
        if foreign.name in pass_names():
            return
        found = f"importing {foreign.module} does not register it"
    raise ReplayNotReadable(
        f"the pass '{foreign.name}' is not there",
        package=foreign.package or None,
        module=foreign.module,
        found=found,
        help="install the package, or put its module on PYTHONPATH",
    )
