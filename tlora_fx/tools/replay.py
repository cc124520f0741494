"""Keep the graphs before a pass that fails, and run it on them again, alone: `tlora-fx replay`."""

from __future__ import annotations

import importlib
import json
import platform
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from tlora_fx.compiler import Prepared, fuse, resolve_pipeline
from tlora_fx.errors import ReplayNotReadable, TloraError, errors_as
from tlora_fx.graph_file import from_document, load_document, save_document, to_document
from tlora_fx.host.durable import replace_file
from tlora_fx.host.version import __version__
from tlora_fx.inspect.instruments import state_source
from tlora_fx.inspect.wording import plural
from tlora_fx.ir.graph import GroupGraph, JobGraph, placeholders
from tlora_fx.numerics import Numerics
from tlora_fx.numerics.tensors import buffers_of
from tlora_fx.passes import find_passes
from tlora_fx.pipeline import (
    Event,
    GroupPass,
    Halted,
    Instrument,
    JobPass,
    Pipeline,
    Runner,
    Verify,
    pass_names,
)
from tlora_fx.pipeline.registry import PASSES

# Format 1 held graphs that named modules which have moved since.
FORMAT = 2
RECORD = "replay.json"
GRAPHS = "graph"
BUFFERS = "buffers.safetensors"
PACKAGES = ("torch", "transformers", "peft")
OURS = "tlora_fx."
# The options of the numerical check that decide its row and weights.
NUMERICS = ("memory_bytes", "tokens", "seed")


@dataclass(frozen=True, slots=True)
class ForeignPass:
    """A pass of another package.

    package    the distribution and its version, "" where it is not known
    """

    name: str
    module: str
    package: str


@dataclass(frozen=True, slots=True)
class RecordedFailure:
    """A pass that failed.

    place       of the pass in it, counted from 1
    subject     the graphs that it ran on: "base", "job NAME" or "group"
    numerics    options of the numerical check: rows, seed, memory
    """

    pipeline: str
    place: int
    name: str
    subject: str
    verify: Verify
    code: str
    versions: dict[str, str]
    foreign: tuple[ForeignPass, ...]
    numerics: dict[str, int | None]
    format: int = FORMAT

    def __str__(self) -> str:
        return f"pass {self.place} '{self.name}' on {self.subject}"

    def other_versions(self) -> list[str]:
        """Packages that are installed in another version than when the pass failed."""
        now = versions()
        return [
            f"{name} is {now.get(name, 'missing')}, was {was}"
            for name, was in self.versions.items()
            if now.get(name) != was
        ]

    def save(self, folder: Path) -> None:
        """Write the record; raises OSError."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        replace_file(folder / RECORD, text.encode())


def load_replay(folder: Path) -> RecordedFailure:
    """Read the record of a replay folder; raises ReplayNotReadable."""
    path = folder / RECORD
    if not path.is_file():
        raise ReplayNotReadable(
            "the folder is no replay folder",
            expected=path,
            help="name the folder that the error's last line names",
        )
    with errors_as(
        ReplayNotReadable, "the replay folder cannot be read",
        OSError, ValueError, RecursionError, ValidationError,
        file=path, help="the file is damaged; compile again to write it anew",
    ):  # fmt: skip
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        number = data.get("format") if isinstance(data, dict) else None
        if number != FORMAT:
            raise ReplayNotReadable(
                "the replay folder is of another format",
                file=path,
                expected=FORMAT,
                found=number,
                help="replay it with the version that wrote it",
            )
        return TypeAdapter(RecordedFailure).validate_python(data)


def versions() -> dict[str, str]:
    """The versions on which a failure may depend."""
    installed = {"tlora-fx": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "missing"
    return installed


def run_replay(folder: Path) -> TloraError | None:
    """Run the pass of a replay folder alone.

    returns   the error that it raises or that its checks raise; None where it fails no more
    raises    ReplayNotReadable, GraphFileNotReadable, PipelineError or PluginBroken where the pass
              cannot be run
    """
    record = load_replay(folder)
    find_passes()
    for foreign in record.foreign:
        _import(foreign)
    pipeline = resolve_pipeline(record.pipeline)
    event = _event(record, pipeline, from_document(load_document(folder / GRAPHS)), folder)
    runner = Runner(pipeline, _instruments(record, folder), record.verify)
    runner.start()
    try:
        runner.run_one(event)
    except TloraError as error:
        return error
    return None


def named_modules(folder: Path) -> list[str]:
    """The modules of others that replaying a folder would import, which runs their code.

    Of passes that no entry point names, and of functions that make the stored forms of tensors.

    raises    ReplayNotReadable, GraphFileNotReadable
    """
    record = load_replay(folder)
    find_passes()
    known = pass_names()
    names = {foreign.module for foreign in record.foreign if foreign.name not in known}
    forms = load_document(folder / GRAPHS).stored_forms
    names |= {form.partition(":")[0] for form in forms}
    return sorted(name for name in names if not f"{name}.".startswith(OURS))


def left_out(folder: Path) -> list[str]:
    """Tags that the folder's graphs lack, because a file cannot keep them, each kind once.

    returns   such as "hint (my_package.Hint), of 96 nodes"
    raises    GraphFileNotReadable
    """
    kinds = Counter(tag.rpartition(": ")[2] for tag in load_document(folder / GRAPHS).left_out)
    return [f"{kind}, of {plural(times, 'node')}" for kind, times in kinds.items()]


def _event(
    record: RecordedFailure, pipeline: Pipeline, graphs: JobGraph | GroupGraph, folder: Path
) -> Event:
    passes = pipeline.passes
    item = passes[record.place - 1] if 0 < record.place <= len(passes) else None
    fits = (isinstance(item, JobPass) and isinstance(graphs, JobGraph)) or (
        isinstance(item, GroupPass) and isinstance(graphs, GroupGraph)
    )
    if item is None or item.name != record.name or not fits:
        raise ReplayNotReadable(
            "the replay folder does not hold together",
            file=folder / RECORD,
            expected=f"pass {record.place} of the pipeline is '{record.name}', and takes the "
            f"graphs of {GRAPHS}/",
            found=f"{record.pipeline}, and the graphs of {record.subject}",
            help="compile again to write it anew",
        )
    return Event(record.place, item, record.subject, graphs)


def _instruments(record: RecordedFailure, folder: Path) -> list[Instrument]:
    if record.verify != "numerics":
        return []
    with errors_as(
        ReplayNotReadable, "the numbers of the replay folder cannot be read",
        OSError, TypeError, SafetensorError, named=True,
        file=folder / BUFFERS, help="compile again to write it anew",
    ):  # fmt: skip
        numerics = Numerics(**record.numerics)  # type: ignore[arg-type]
        numerics.take(safetensors.torch.load((folder / BUFFERS).read_bytes()))
    return [numerics]


def _import(foreign: ForeignPass) -> None:
    """Make a pass known that no entry point names: a module registered it when it was imported."""
    if foreign.name in pass_names():
        return
    try:
        importlib.import_module(foreign.module)
    except Exception as error:  # noqa: BLE001  (whatever a stranger's module raises is its reason)
        reason = f"{type(error).__name__}: {error}"
    else:
        if foreign.name in pass_names():
            return
        reason = f"importing {foreign.module} does not register it"
    raise ReplayNotReadable(
        f"the pass '{foreign.name}' is not there",
        package=foreign.package or None,
        module=foreign.module,
        found=reason,
        help="install the package, or put its module on PYTHONPATH",
    )


def keep_replay(folder: Path, prepared: Prepared, runner: Runner, error: TloraError) -> None:
    """Write a replay folder for an error, which gets a note of what came of it; never raises.

    Graphs are not copied before every pass, which would cost time. Where one fails, the jobs are
    compiled again and halted just before it.

    folder    where to; a name beside it where something else lies there
    """
    try:
        event = _before(prepared, runner)
        if event is None:
            error.add_note("no replay folder is written: it was no pass that failed, or it ran now")
            return
        target = _free(folder)
        write_replay(target, prepared, event, runner, error)
    except (Exception, KeyboardInterrupt) as trouble:  # noqa: BLE001  (the error is what counts)
        error.add_note(
            f"no replay folder could be written: {str(trouble) or type(trouble).__name__}"
        )
    else:
        error.add_note(f"to run this pass again, alone: tlora-fx replay {target}")


def write_replay(
    folder: Path, prepared: Prepared, event: Event, runner: Runner, error: TloraError
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
        buffers = {name: value.clone() for name, value in buffers_of(prepared.backbone).items()}
        (folder / BUFFERS).write_bytes(safetensors.torch.save(buffers))
    texts = {
        "before.py": state_source(event.graphs),
        "pipeline.txt": f"{runner.pipeline}\nfailing: {failing}\n",
        "inputs.json": json.dumps(_inputs(event.graphs), indent=2) + "\n",
        "error.txt": "".join(traceback.format_exception(error)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    record = RecordedFailure(
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
    record.save(folder)


def _before(prepared: Prepared, runner: Runner) -> Event | None:
    if runner.failed is None:
        return None
    limits, number = dict(runner.limits), runner.failed[0]
    again = Runner(runner.pipeline, (), runner.verify, limits=limits, halt_at=number)
    try:
        with suppress(TloraError):
            fuse(prepared, again)
    except Halted as halted:
        return halted.event
    return None


def _free(folder: Path) -> Path:
    """The folder where it is empty or a replay folder, else the first free name beside it."""
    candidate, number = folder, 1
    while candidate.exists():
        empty = candidate.is_dir() and not any(candidate.iterdir())
        if empty or (candidate / RECORD).is_file():
            break
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _foreign(pipeline: Pipeline) -> tuple[ForeignPass, ...]:
    offered = {entry.name: entry.dist for entry in entry_points(group=PASSES)}
    passes = []
    for item in pipeline.passes:
        module = type(item).__module__
        if not module.startswith(OURS):
            package = offered.get(item.name)
            known = f"{package.name} {package.version}" if package is not None else ""
            passes.append(ForeignPass(item.name, module, known))
    return tuple(dict.fromkeys(passes))


def _numerics(runner: Runner) -> dict[str, int | None]:
    """What decides the row and the weights that numbers were checked with."""
    for instrument in runner.instruments:
        if isinstance(instrument, Numerics):
            return {name: getattr(instrument, name) for name in NUMERICS}
    return {}


def _inputs(graphs: JobGraph | GroupGraph) -> dict[str, Any]:
    """What the graphs take: shapes with the names of sizes, and what these were while tracing."""
    owner = graphs.base if isinstance(graphs, GroupGraph) and not graphs.fused else graphs
    inputs: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, node in placeholders(owner.root).items():
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            symbols: list[Any] = [size for size in value.shape if not isinstance(size, int)]
            shape = [size if isinstance(size, int) else str(size) for size in value.shape]
            inputs[name] = {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}
            sizes |= {str(size): int(size.node.hint) for size in symbols}
    return {"inputs": inputs, "sizes": sizes}
