"""When the layers of a run are compiled: before its first round, or while rounds run.

Compiling takes longer than many rounds. So another process compiles for torch's caches
(`CompileProcess`), the first rounds run as they are, and compiled layers take over at a round that
all processes agree on. The run's folder holds the number of that round before it runs, and a run
that is resumed compiles at the same round: its losses and adapters are those of a run that never
stopped. A loop of one's own, and the trainer of the Tinker API, do the same by `CompiledLayers`.

The other process builds the same model with few of its layers (`parallel.shallow`) and random
weights, and runs one row forward and backward. Whoever compiles the whole model afterwards finds
the code in the caches. It reads what to do from its standard input, writes nothing but the caches,
and ends when the process that started it does.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

import tlora_fx.ops  # noqa: F401  (registers the operators that graph files name)
from tlora_fx.compiler import prepare
from tlora_fx.config.job import Job
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import GraphNotStorable
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.host.version import __version__
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.saved import SavedModel, bring, saved_model
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.dora import norms_kept
from tlora_fx.ops.kernels.select import is_strict
from tlora_fx.parallel.apply import apply, shards
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.parallel.shallow import fill_at_random, shallow, shallow_bytes, why_not_shallow
from tlora_fx.passes import find_passes
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.run_folder import RunFolder
from tlora_fx.tracing.adapters import resolve_sites

# Other work of the machine comes first, training too.
NICENESS = 10


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """Request to another process to compile layers.

    graphs      the fused group, as the text of a graph file
    saved       jobs, and the modules that the graphs call
    row         on the CPU: sizes of a row as training has it
    devices     each gets code of its own
    forwards    forwards without a backward are compiled too
    threads     of torch on a CPU, which compiled code depends on
    matmul      torch's precision of float32 products, likewise
    """

    graphs: str
    saved: dict[str, Any]
    row: PackedBatch
    devices: tuple[str, ...]
    forwards: bool
    threads: int
    matmul: str

    @classmethod
    def of(
        cls, model: SuperModel, row: PackedBatch, devices: Sequence[str], *, forwards: bool = False
    ) -> CompileRequest:
        """The request for a model under this process's settings; raises GraphNotStorable.

        forwards   also where no job evaluates
        """
        return cls(
            graph_text(model.group),
            saved_model(model.group, model.jobs).model_dump(mode="json"),
            row,
            tuple(devices),
            forwards or any(job.eval_strategy != "no" for job in model.jobs),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
        )

    def model(self) -> SuperModel:
        """The whole model, without weights."""
        saved = SavedModel.model_validate(self.saved)
        for item in saved.requires:
            bring(item)
        find_passes()
        group = graphs_of_text(self.graphs)
        assert isinstance(group, GroupGraph), "a fused model"
        if group.open is None:
            given = prepare([Job.model_validate(job) for job in saved.jobs])
            return SuperModel(group, given.backbone, given.jobs)
        # No job can be called as a slot is that no job is in.
        named = [{**job, "name": f"slot-{slot}"} for slot, job in enumerate(saved.jobs)]
        given = prepare([Job.model_validate(job) for job in named])
        jobs = [
            job.model_copy(update={"name": name})
            for job, name in zip(given.jobs, group.job_names, strict=True)
        ]
        resolve = partial(resolve_sites, backbone=given.backbone)
        model = SuperModel(group, given.backbone, jobs, resolve)
        if not model.members:
            # Kernels of sites without adapters are not launched, and so not kept by Triton.
            model.admit(given.jobs[0])
        return model


class CompileProcess:
    """A process that compiles."""

    def __init__(self, request: CompileRequest) -> None:
        # Unlike a pipe, a file takes what nobody reads.
        self._told = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self._process = subprocess.Popen(  # noqa: S603  our own command
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=self._told,
            stderr=self._told,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the training process
        )
        content = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        threading.Thread(target=self._send, args=(content,), daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """0 once all is compiled, None while it works, anything else where it failed."""
        return self._process.poll()

    def reason(self) -> str:
        """Why it failed, in a line."""
        self._told.seek(0)
        lines = self._told.read().decode(errors="replace").strip().splitlines()
        code = self.returncode or 0
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{ended}: {lines[-1].strip()}" if lines else ended

    def end(self) -> None:
        """End the process, also one that is at work."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._told.close()

    def _send(self, content: bytes) -> None:
        """Send the request, and leave the pipe open: its end ends the other process."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(content)
            self._process.stdin.flush()


def _environment() -> Mapping[str, str]:
    path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def serve() -> None:
    """Compile what standard input asks for."""
    # The object ends before the input does: what is read into the buffer is all that is sent.
    request: CompileRequest = pickle.load(sys.stdin.buffer)  # noqa: S301  from who started this
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.nice(NICENESS)
    torch.set_num_threads(request.threads)
    if torch.get_float32_matmul_precision() != request.matmul:
        # To set what is set already is another key of torch's caches.
        torch.set_float32_matmul_precision(request.matmul)
    for device in request.devices:
        torch._dynamo.reset()
        compile_few_layers(request, torch.device(device))


def _end_with_parent() -> None:
    """Wait until nobody holds the other end of standard input, and exit."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def numbered(device: torch.device) -> str:
    """A device's name; of a CUDA device without a number, the one that this process uses."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


def compile_few_layers(request: CompileRequest, device: torch.device) -> None:
    """Run a row through a compiled model of few layers, on one device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = shallow(request.model())
    plan = Plan(planner="single")
    mesh = open_mesh(plan.mesh, device)
    fill_at_random(model, device)
    model.compile()
    runner = apply(model, plan, mesh)
    weights = torch.ones(len(model.jobs), dtype=torch.float64, device=device)
    with norms_kept():
        runner.run([request.row], weights)
    if request.forwards:
        runner.evaluate([request.row])
    if device.type == "cuda":
        torch.cuda.synchronize(device)


#: What a process tells of its compilation: that it failed, that there is nothing to tell, and that
#: it needs no more time.
FAILED, WORKING, READY = 0, 1, 2
#: Memory of a GPU that a process takes beside the weights that it holds.
PROCESS_BYTES = 3 * 2**30
#: Memory of a GPU that training takes at least beside its base.
TRAINING_BYTES = 4 * 2**30
#: Tokens of the row that is compiled with; a longer one needs more memory, and no other code.
EXAMPLE_TOKENS = 4096


class TakeOverRecord(Protocol):
    """Where it stands after how many rounds compiled layers took over; the leader asks it."""

    def read(self) -> int | None:
        """Rounds that had run then; None where they have not taken over."""

    def write(self, rounds: int) -> None:
        """Keep it; a kill of any process loses nothing on return."""


@dataclass(frozen=True, slots=True)
class FolderRecord:
    """A record in a run's folder.

    resume   the folder holds a run that goes on
    raises   RunFolderError
    """

    folder: RunFolder
    resume: bool

    def read(self) -> int | None:
        """See `TakeOverRecord`."""
        return self.folder.compiled_round() if self.resume else None

    def write(self, rounds: int) -> None:
        """See `TakeOverRecord`."""
        versions = {"torch": str(torch.__version__), "tlora-fx": __version__}
        self.folder.write_compiled({"round": rounds, **versions})


class Compilation:
    """Compiles the layers of a trainer's run.

    record       None: nothing is kept
    waits        layers are compiled before the first round, as somebody asked
    forwards     forwards without a backward are compiled even where no job evaluates
    fixed_slots  banks of an open model do not grow
    unit         what is counted, for messages
    instead      what to do where the other process fails, for messages
    """

    def __init__(
        self,
        group: GroupStep,
        record: TakeOverRecord | None,
        ranks: Ranks,
        callback: TrainerCallback,
        *,
        waits: bool,
        forwards: bool = False,
        fixed_slots: bool = False,
        unit: str = "round",
        instead: str = "without --no-wait-for-compile the training process compiles them",
    ) -> None:
        self.group, self.record, self.ranks, self.callback = group, record, ranks, callback
        self._waits, self._forwards, self._fixed_slots = waits, forwards, fixed_slots
        self._unit, self._instead = unit, instead
        self._round: int | None = None
        self._beside = False
        self._process: CompileProcess | None = None

    def begin(self, row: Callable[[], PackedBatch], rounds: int) -> None:
        """Decide when layers are compiled, and start to compile.

        row       makes one as training has it, on the CPU
        rounds    that are done, as the leader knows
        raises    what the record raises
        """
        if not self.group.options.compiled or self.group.model.is_compiled:
            self.record = None
            return
        kept = self.ranks.together(self._kept, Exception)
        self._round, rounds = self.ranks.from_leader((kept, rounds))
        if self._waits if self._round is None else self._round <= rounds:
            return
        if self._round is None and (why := self._begin_beside(row)):
            self.callback.noted(f"layers are compiled before the first {self._unit}: {why}")
            return
        self.group.options = replace(self.group.options, wait_for_compile=False)

    def recorded_takeover(self, rounds: int) -> int:
        """After how many rounds layers took over that are compiled already, by the record.

        A record without it says from then on that they did now.

        rounds    done so far
        raises    what the record raises
        """
        kept = self.ranks.from_leader(self.ranks.together(self._kept, Exception))
        if kept is None:
            self._keep(rounds)
        return rounds if kept is None else kept

    def _kept(self) -> int | None:
        """What the record holds, on the leader."""
        reads = self.record is not None and self.group.mesh.leader
        return self.record.read() if reads and self.record is not None else None

    def restored(self, rounds: int) -> None:
        """Keep the round of a run that has compiled before it.

        rounds    done so far
        """
        if self.record is not None and self._round is None and not self._beside:
            self._keep(rounds)

    @property
    def state(self) -> int:
        """FAILED, WORKING or READY, of this process."""
        if not self._beside:
            return WORKING
        if self._process is None:
            return READY
        code = self._process.returncode
        return WORKING if code is None else READY if code == 0 else FAILED

    @property
    def after(self) -> int | None:
        """Rounds that had run when compiled layers took over, or will have; None: not known."""
        return self._round

    @property
    def is_pending(self) -> bool:
        """Whether compiled layers are still to take over."""
        compiled = self.group.model.is_compiled
        return self._beside or (self._round is not None and not compiled)

    def is_due(self, agreed: int, rounds: int) -> bool:
        """Whether compiled layers take over before the next round.

        agreed    the least state of all processes
        rounds    done so far
        """
        if self._beside and agreed == FAILED:
            self._give_up()
        if self._beside:
            return agreed == READY
        due = self._round is not None and rounds >= self._round
        return due and not self.group.model.is_compiled and self.group.options.compiled

    def take_over(self, rounds: int, first: Callable[[], None] = lambda: None) -> None:
        """Hand the next round to compiled layers, once the disk holds which one that is.

        rounds    done so far, whose results are there
        first     runs on compiled layers before that is kept
        raises    what the record or `first` raises
        """
        self.close()
        self.group.compile()
        first()
        if self._round is None:
            self._keep(rounds)
            self.callback.noted(f"layers are compiled from {self._unit} {rounds + 1} on")

    def close(self) -> None:
        """End the other process, if there is one."""
        self._beside = False
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _keep(self, rounds: int) -> None:
        self._round = rounds
        if (record := self.record) is not None:
            # Somebody's own record fails as it likes.
            self.ranks.together(
                lambda: record.write(rounds) if self.group.mesh.leader else None, Exception
            )

    def _give_up(self) -> None:
        """Train on without compiled layers, and tell why; all processes do it at once."""
        failed = self.state == FAILED and self._process is not None
        reasons = self.ranks.tell_all(self._process.reason() if failed and self._process else "")
        self.close()
        why = next(filter(None, reasons), "")
        self.callback.warned(
            f"layers stay as they are, because the process that compiles them ended with {why}; "
            f"{self._instead}"
        )

    def _begin_beside(self, row: Callable[[], PackedBatch]) -> str:
        """Start to compile beside training; why that cannot be on some process, "" where it can."""
        mesh, why = self.group.mesh, why_at_once(self.group, fixed_slots=self._fixed_slots)
        everyone = self.ranks.tell_all((socket.gethostname(), numbered(mesh.device)))
        here = everyone[mesh.rank][0]
        if not why and [host for host, _ in everyone].index(here) == mesh.rank:
            # Code is made for one device; it is the first process of a host that makes all of it.
            devices = dict.fromkeys(device for host, device in everyone if host == here)
            try:
                request = CompileRequest.of(
                    self.group.model, row(), list(devices), forwards=self._forwards
                )
                self._process = CompileProcess(request)
            except (GraphNotStorable, OSError) as error:
                why = str(error)
        if reason := next(filter(None, self.ranks.tell_all(why)), ""):
            self.close()
            return reason
        self._beside = True
        # What the take-over needs of torch takes seconds to import.
        compiler = ("torch._inductor.compile_fx",)
        threading.Thread(target=importlib.import_module, args=compiler, daemon=True).start()
        return ""


def why_at_once(group: GroupStep, *, fixed_slots: bool = False) -> str:
    """Why the layers of a group cannot be compiled beside training, "" where they can.

    fixed_slots   banks of an open model do not grow
    """
    model, plan = group.model, group.plan
    off = os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1"
    keeps_code = not off and os.environ.get("TORCHINDUCTOR_FX_GRAPH_CACHE") != "0"
    reasons = {
        "strict mode": is_strict(),
        "jobs come and go": model.is_open and not fixed_slots,
        "the base is a module that this process alone has": model.backbone.spec.module is not None,
        "the plan cuts matrices into pieces": plan.mesh.tp > 1,
        "the plan shards the base": shards(plan),
        "the plan cuts rows into nano-batches": plan.nano_batches > 1,
        "torch's caches are switched off": not keeps_code,
    }
    if why := next((why for why, holds in reasons.items() if holds), "") or why_not_shallow(model):
        return why
    if group.mesh.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(group.mesh.device)
        if _needed_bytes(model) > free:
            return "the GPU has no memory for a second process"
    return ""


def _needed_bytes(model: SuperModel) -> int:
    """Memory of a GPU that training and the other process need."""
    base = 0 if model.ready else sum(each.nbytes for each in model.base_shapes().values())
    return base + TRAINING_BYTES + shallow_bytes(model) + PROCESS_BYTES


def example_row(group: GroupStep, data: Mapping[str, JobData]) -> PackedBatch:
    """A row of the jobs' first steps, on the CPU: the largest that is not too long."""
    model = group.model
    batches = {
        index: data[model.jobs[index].name].step(0) for index in sorted(model.members.values())
    }
    rows = sorted(group.example_rows(batches), key=lambda row: row.input_ids.numel())
    fitting = [row for row in rows if row.input_ids.numel() <= EXAMPLE_TOKENS]
    return (fitting or rows[:1])[-1]
