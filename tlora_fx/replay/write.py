"""Write a replay folder for a pass that failed.

Graphs are not copied before every pass, which would cost time. Where one fails, the jobs are
compiled again and halted just before it.
"""

from __future__ import annotations

import json
import traceback
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import safetensors.torch

from tlora_fx.errors import TloraError
from tlora_fx.graph_file import Document, save_document, to_document
from tlora_fx.inspect.instruments import state_source
from tlora_fx.ladder import Prepared, fuse
from tlora_fx.numerics import Numerics
from tlora_fx.numerics.tensors import buffers_of
from tlora_fx.pipeline import Event, Halted, Pipeline, Runner
from tlora_fx.pipeline.registry import PASSES
from tlora_fx.tools.replay import BUFFERS, GRAPHS, RECORD, ForeignPass, Replay, versions

OURS = "tlora_fx."
NUMERICS = ("memory_bytes", "tokens", "seed")


def keep_replay(folder: Path, given: Prepared, runner: Runner, error: TloraError) -> None:
    """Write a replay folder for an error, which gets a note of what came of it; never raises.

    folder    where to; a name beside it where something else lies there
    runner    that met the error
    """
    try:
        event = _before(given, runner)
        if event is None:
            error.add_note("no replay folder is written: it was no pass that failed, or it ran now")
            return
        free = _free(folder)
        write_replay(free, given, event, runner, error)
    except (Exception, KeyboardInterrupt) as trouble:  # noqa: BLE001  (the error is what counts)
        error.add_note(
            f"no replay folder could be written: {str(trouble) or type(trouble).__name__}"
        )
    else:
        error.add_note(f"to run this pass again, alone: tlora-fx replay {free}")


def write_replay(
    folder: Path, given: Prepared, event: Event, runner: Runner, error: TloraError
) -> None:
    """Write the graphs before a pass, and all that running it again needs.

    raises    GraphNotStorable, OSError
    """
    document = to_document(event.graphs)
    folder.mkdir(parents=True, exist_ok=True)
    # What is complete has a record: it goes first and comes last.
    (folder / RECORD).unlink(missing_ok=True)
    save_document(document, folder / GRAPHS)
    failing = f"{event.place} {event.item} on {event.subject}"
    if runner.verify == "numerics":
        buffers = {name: value.clone() for name, value in buffers_of(given.backbone).items()}
        (folder / BUFFERS).write_bytes(safetensors.torch.save(buffers))
    told = {
        "before.py": state_source(event.graphs),
        "pipeline.txt": f"{runner.pipeline}\nfailing: {failing}\n",
        "inputs.json": json.dumps(_inputs(document), indent=2) + "\n",
        "error.txt": "".join(traceback.format_exception(error)),
    }
    for name, text in told.items():
        (folder / name).write_text(text, encoding="utf-8")
    replay = Replay(
        str(runner.pipeline),
        event.place,
        event.item.name,
        event.subject,
        runner.verify,
        error.code,
        versions(),
        _foreign(runner.pipeline),
        _numerics(runner),
    )
    replay.save(folder)


def _before(given: Prepared, runner: Runner) -> Event | None:
    """The failing pass and its graphs as they were; None where it does not come to that again."""
    if runner.failed is None:
        return None
    number, _ = runner.failed
    again = Runner(
        runner.pipeline, (), runner.verify, limits=dict(runner.limits), halt_at=number
    )  # fmt: skip
    try:
        fuse(given, again)
    except Halted as halted:
        return halted.event
    except TloraError:
        return None
    return None


def _free(folder: Path) -> Path:
    """The folder where it is empty or a replay folder, else the first free name beside it."""
    candidate, number = folder, 1
    while candidate.exists() and not _may_be_written(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _may_be_written(folder: Path) -> bool:
    return folder.is_dir() and ((folder / RECORD).is_file() or not any(folder.iterdir()))


def _foreign(pipeline: Pipeline) -> tuple[ForeignPass, ...]:
    offered = {entry.name: entry.dist for entry in entry_points(group=PASSES)}
    found = []
    for item in pipeline.passes:
        module = type(item).__module__
        if not module.startswith(OURS):
            package = offered.get(item.name)
            known = f"{package.name} {package.version}" if package is not None else ""
            found.append(ForeignPass(item.name, module, known))
    return tuple(dict.fromkeys(found))


def _numerics(runner: Runner) -> dict[str, int | None]:
    """What decides the row and the weights that numbers were checked with."""
    for instrument in runner.instruments:
        if isinstance(instrument, Numerics):
            return {name: getattr(instrument, name) for name in NUMERICS}
    return {}


def _inputs(document: Document) -> dict[str, Any]:
    """What the graphs take: shapes with the names of sizes, and what these were while tracing."""
    data = document.data
    owner = data["job"] if data["kind"] == "job" else data["base"]
    place = owner["structure"]
    if data["kind"] == "group" and data["structures"][data["own"]]["root"]["nodes"]:
        place = data["own"]
    inputs: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for node in data["structures"][place]["root"]["nodes"]:
        value = (node["meta"].get("val") or {}).get("value")
        if node["op"] == "placeholder" and value is not None:
            inputs[node["target"]] = {"shape": value["shape"], "dtype": value["dtype"]}
            known = data["modes"][value["mode"]] if value["mode"] is not None else {}
            sizes |= {name: known[name]["hint"] for name in value["shape"] if name in known}
    return {"inputs": inputs, "sizes": sizes}
