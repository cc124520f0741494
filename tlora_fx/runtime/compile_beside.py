"""Compile a model's layers in another process, which fills the caches that torch keeps on disk.

The other process builds the same model with few of its layers (`parallel.shallow`) and random
weights, and runs one row forward and backward. Whoever compiles the whole model afterwards finds
the code in the caches. It reads what to do from its standard input, writes nothing but the caches,
and ends when the process that started it does.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tlora_fx.ops  # noqa: F401  (registers the operators that graph files name)
from tlora_fx.compiler import prepare
from tlora_fx.config.job import Job
from tlora_fx.cost.plan import Plan
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.saved import SavedModel, bring, saved_model
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.dora import norms_kept
from tlora_fx.parallel.apply import apply
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.parallel.shallow import fill_at_random, shallow
from tlora_fx.passes import find_passes

# Other work of the machine comes first, training too.
NICENESS = 10


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """What another process is to compile.

    graphs      the fused group, as the text of a graph file
    saved       jobs, and the modules that the graphs call
    row         on the CPU: sizes of a row as training has it
    devices     each gets code of its own
    evaluates   forwards without a backward are compiled too
    threads     of torch on a CPU, which compiled code depends on
    matmul      torch's precision of float32 products, likewise
    """

    graphs: str
    saved: dict[str, Any]
    row: PackedBatch
    devices: tuple[str, ...]
    evaluates: bool
    threads: int
    matmul: str

    @classmethod
    def of(cls, model: SuperModel, row: PackedBatch, devices: Sequence[str]) -> CompileRequest:
        """The request for a model under this process's settings; raises GraphNotStorable."""
        return cls(
            graph_text(model.group),
            saved_model(model.group, model.jobs).model_dump(mode="json"),
            row,
            tuple(devices),
            any(job.eval_strategy != "no" for job in model.jobs),
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
        given = prepare([Job.model_validate(job) for job in saved.jobs])
        return SuperModel(group, given.backbone, given.jobs)


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
    if request.evaluates:
        runner.evaluate([request.row])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
