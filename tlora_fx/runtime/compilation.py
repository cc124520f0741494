"""When the layers of a run are compiled: before its first round, or while rounds run.

Compiling takes longer than many rounds. So another process compiles for torch's caches
(`compile_beside`), the first rounds run as they are, and compiled layers take over at a round that
all processes agree on. The run's folder holds the number of that round before it runs, and a run
that is resumed compiles at the same round: its losses and adapters are those of a run that never
stopped.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace

import torch

from tlora_fx.cost.plan import Plan
from tlora_fx.errors import GraphNotStorable
from tlora_fx.host.version import __version__
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.kernels.select import is_strict
from tlora_fx.parallel.apply import shards
from tlora_fx.parallel.shallow import shallow_bytes, why_not_shallow
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.compile_beside import CompileProcess, CompileRequest
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.run_folder import RunFolder

#: What a process tells of its compilation: that it failed, that there is nothing to tell, and that
#: it needs no more time.
FAILED, WORKING, READY = 0, 1, 2
#: Memory of a GPU that a process takes beside the weights that it holds.
PROCESS_BYTES = 3 * 2**30
#: Memory of a GPU that training takes at least beside its base.
TRAINING_BYTES = 4 * 2**30
#: Tokens of the row that is compiled with; a longer one needs more memory, and no other code.
EXAMPLE_TOKENS = 4096


class Compilation:
    """Compiles the layers of a trainer's run.

    waits    layers are compiled before the first round, as somebody asked
    keeps    the round is kept in the run's folder
    resume   the folder holds a run that goes on
    """

    def __init__(
        self,
        group: GroupStep,
        folder: RunFolder,
        ranks: Ranks,
        callback: TrainerCallback,
        *,
        waits: bool,
        keeps: bool,
        resume: bool,
    ) -> None:
        self.group, self.folder, self.ranks, self.callback = group, folder, ranks, callback
        self._waits, self._keeps, self._resume = waits, keeps, resume
        self._round: int | None = None
        self._beside = False
        self._process: CompileProcess | None = None

    def begin(self, data: Mapping[str, JobData], rounds: int) -> None:
        """Decide when layers are compiled, and start to compile; before weights are loaded.

        rounds    that are done, as the leader knows
        raises    RunFolderError
        """
        if not self.group.options.compiled or self.group.model.is_compiled:
            self._keeps = False
            return
        kept = self.ranks.together(self._kept)
        self._round, rounds = self.ranks.from_leader((kept, rounds))
        if self._waits if self._round is None else self._round <= rounds:
            return
        if self._round is None and (why := self._begin_beside(data)):
            self.callback.noted(f"layers are compiled before the first round: {why}")
            return
        self.group.options = replace(self.group.options, wait_for_compile=False)

    def _kept(self) -> int | None:
        """What the run's folder holds, on the leader."""
        reads = self._keeps and self._resume and self.group.mesh.leader
        return self.folder.compiled_round() if reads else None

    def restored(self, rounds: int) -> None:
        """Keep the round of a run that has compiled before it.

        rounds    done so far
        """
        if self._keeps and self._round is None and not self._beside:
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

    def take_over(self, rounds: int) -> None:
        """Let compiled layers run the next round, once the disk holds which one that is.

        rounds    done so far, whose results are there
        raises    RunFolderError
        """
        if self._round is None:
            self._keep(rounds)
            self.callback.noted(f"layers are compiled from round {rounds + 1} on")
        self.close()
        self.group.compile()

    def close(self) -> None:
        """End the other process, if there is one."""
        self._beside = False
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _keep(self, rounds: int) -> None:
        self._round = rounds
        if self._keeps:
            record = {"round": rounds, "torch": str(torch.__version__), "tlora-fx": __version__}
            self.ranks.together(lambda: self.folder.write_compiled(record))

    def _give_up(self) -> None:
        """Train on without compiled layers, and tell why; all processes do it at once."""
        failed = self.state == FAILED and self._process is not None
        reasons = self.ranks.tell_all(self._process.reason() if failed and self._process else "")
        self.close()
        why = next(filter(None, reasons), "")
        self.callback.warned(
            f"layers stay as they are, because the process that compiles them ended with {why}; "
            "without --no-wait-for-compile the training process compiles them"
        )

    def _begin_beside(self, data: Mapping[str, JobData]) -> str:
        """Start to compile beside training; why that cannot be on some process, "" where it can."""
        mesh, why = self.group.mesh, why_at_once(self.group)
        everyone = self.ranks.tell_all((socket.gethostname(), str(mesh.device)))
        here = everyone[mesh.rank][0]
        if not why and [host for host, _ in everyone].index(here) == mesh.rank:
            # Code is made for one device; it is the first process of a host that makes all of it.
            devices = dict.fromkeys(device for host, device in everyone if host == here)
            try:
                row = example_row(self.group, data)
                self._process = CompileProcess(
                    CompileRequest.of(self.group.model, row, list(devices))
                )
            except (GraphNotStorable, OSError) as error:
                why = str(error)
        if reason := next(filter(None, self.ranks.tell_all(why)), ""):
            self.close()
            return reason
        self._beside = True
        # What the take-over needs of torch takes seconds to import.
        threading.Thread(target=_import_compiler, daemon=True).start()
        return ""


def _import_compiler() -> None:
    importlib.import_module("torch._inductor.compile_fx")


def why_at_once(group: GroupStep) -> str:
    """Why the layers of a group cannot be compiled beside training, "" where they can.

    group    before its weights are loaded
    """
    model, plan = group.model, group.plan
    if is_strict():
        return "strict mode"
    if model.is_open:
        return "jobs come and go"
    if model.backbone.spec.module is not None:
        return "the base is a module that this process alone has"
    if why := _why_of_plan(plan):
        return why
    if not _keeps_code():
        return "torch's caches are switched off"
    if why := why_not_shallow(model):
        return why
    if group.mesh.device.type == "cuda" and _needed_bytes(model) > _free_bytes(group.mesh.device):
        return "the GPU has no memory for a second process"
    return ""


def _why_of_plan(plan: Plan) -> str:
    if plan.mesh.tp > 1:
        return "the plan cuts matrices into pieces"
    if shards(plan):
        return "the plan shards the base"
    if plan.nano_batches > 1:
        return "the plan cuts rows into nano-batches"
    return ""


def _keeps_code() -> bool:
    """Whether torch keeps compiled code on disk."""
    off = os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1"
    return not off and os.environ.get("TORCHINDUCTOR_FX_GRAPH_CACHE") != "0"


def _needed_bytes(model: SuperModel) -> int:
    """Memory of a GPU that training and the other process need."""
    base = 0 if model.ready else sum(each.nbytes for each in model.base_shapes().values())
    return base + TRAINING_BYTES + shallow_bytes(model) + PROCESS_BYTES


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


def example_row(group: GroupStep, data: Mapping[str, JobData]) -> PackedBatch:
    """A row of the jobs' first steps, on the CPU: the largest that is not too long."""
    model = group.model
    batches = {
        index: data[model.jobs[index].name].step(0) for index in sorted(model.members.values())
    }
    rows = sorted(group.example_rows(batches), key=lambda row: row.input_ids.numel())
    fitting = [row for row in rows if row.input_ids.numel() <= EXAMPLE_TOKENS]
    return (fitting or rows[:1])[-1]
