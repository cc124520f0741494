"""Start the processes of `--gpus N`: forks of the command, from before it imports torch.

The command's own process stays behind. It passes signals on, ends all processes when one fails, and
prints the one error that says why.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import LaunchError, ProcessLost, printable
from tlora_fx.host.environment import START_FOLDER
from tlora_fx.host.gpus import visible_gpus
from tlora_fx.host.memory import usable_cpus
from tlora_fx.runtime.launching.interrupts import (
    Terminated,
    forget_terminated,
    leave_terminal,
    stop_signals,
)

POLL_SECONDS = 0.05
#: After the first failure the other processes may take so long to end by themselves.
TELL_SECONDS = 3.0
INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1

#: "error" of the process itself; "echoed": it repeats another process's error; "lost": another
#: process had gone; "interrupted" by the user; "exit": it ended as it was meant to.
EndKind = Literal["error", "echoed", "lost", "interrupted", "exit"]
#: Kinds that say what failed, the most telling one first.
FAILURES: tuple[EndKind, ...] = ("error", "echoed", "lost")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process of the run ended, in its own words.

    kind   what ended it
    text   what there is to tell a user
    """

    kind: EndKind
    text: str = ""

    def write(self, folder: Path, rank: int) -> None:
        """Leave it for the process that waits; one that is cut off counts as none."""
        path = folder / f"ending-{rank}"
        path.with_suffix(".new").write_text(json.dumps(asdict(self)), "utf-8")
        path.with_suffix(".new").replace(path)

    @staticmethod
    def read(folder: Path, rank: int) -> Ending | None:
        """Ending that a process left, None where it left none."""
        try:
            return Ending(**json.loads((folder / f"ending-{rank}").read_text("utf-8")))
        except FileNotFoundError:
            return None


# Where torchrun looks for the error that a process ended with.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def leave_for_torchrun(text: str) -> None:
    """Leave the error that ends this process where torchrun's summary takes it from."""
    if path := os.environ.get(ERROR_FILE):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        content = {"message": {"message": text, "extraInfo": extra}}
        Path(path).write_text(json.dumps(content), "utf-8")


# How many processes.


def process_count(
    gpus: str, device: str | None, environment: Mapping[str, str] = os.environ
) -> int:
    """Number of processes that `--gpus` asks for.

    gpus      a number above 0, or "all"
    device    of `--device`
    raises    LaunchError where the machine has fewer GPUs, and under torchrun
    """
    if "RANK" in environment:
        raise LaunchError(
            "--gpus starts processes, and torchrun has started this one already",
            found=f"--gpus {gpus}, RANK={environment['RANK']}",
            help="leave out --gpus or torchrun",
        )
    on_cpu = device == "cpu"
    there = 0 if on_cpu else visible_gpus(environment)
    if gpus.isdecimal() and int(gpus) > 0 and (on_cpu or int(gpus) <= there):
        return int(gpus)
    if gpus == "all" and there:
        return there
    if not on_cpu and gpus != "all" and not (gpus.isdecimal() and int(gpus)):
        raise LaunchError(
            "--gpus is no number of GPUs",
            expected="a number such as 4, or all",
            found=f"--gpus {gpus}",
            help="leave out --gpus to train in one process",
        )
    if on_cpu:
        raise LaunchError(
            "--gpus needs a number on a CPU",
            expected="a number of processes",
            found=f"--gpus {gpus}",
            help="--gpus 2 --device cpu trains in two processes on a CPU",
        )
    seen = "1 GPU" if there == 1 else f"{there} GPUs"
    raise LaunchError(
        "this machine has fewer GPUs" if there else "this machine has no GPU that can be seen",
        expected=f"a number from 1 to {there}, or all" if there else "a machine with GPUs",
        found=f"--gpus {gpus}, {seen}",
        help="see nvidia-smi and CUDA_VISIBLE_DEVICES; leave out --gpus to train on a CPU"
        if not there
        else f"--gpus {there} uses all of them",
    )


def without_option(arguments: Sequence[str], name: str) -> list[str]:
    """Words of a command line without an option and its value."""
    kept = [word for word in arguments if not word.startswith(f"{name}=")]
    while name in kept:
        index = kept.index(name)
        del kept[index : index + 2]
    return kept


def require_size(shape: MeshShape, processes: int, plan: str, *, under_torchrun: bool) -> None:
    """Refuse a mesh that has another size than there are processes.

    plan              the plan's name, or its file
    under_torchrun    torchrun has started the processes
    raises            LaunchError, with the command that starts as many
    """
    if shape.size == processes:
        return
    arguments = sys.argv[1:]
    if arguments[:1] in (["train"], ["prepare"]) and not under_torchrun:
        command = shlex.join(["tlora-fx", *without_option(arguments, "--gpus")])
        command += f" --gpus {shape.size}" * (shape.size > 1)
    else:
        torchrun = ["torchrun", "--nproc-per-node", str(shape.size), "-m", "tlora_fx"]
        command = shlex.join([*torchrun, *arguments])
    raise LaunchError(
        f"the plan '{plan}' needs {shape.size} process{'es' * (shape.size > 1)}",
        expected=f"{shape.size} ({shape})",
        found=f"{processes}",
        help=command,
    )


# Starting them, and waiting for them.


def start_processes(count: int, going_on: Callable[[], str]) -> None:
    """Fork so many processes; this returns in each of them, with torchrun's variables set.

    The calling process waits until all have ended, and then exits as they did.

    going_on    what helps where a process was lost
    raises      in the calling process: SystemExit; ProcessLost, where a process was killed;
                KeyboardInterrupt, where the user stopped the run; Terminated, where SIGTERM
                came before anything was trained
    """
    folder, parent = Path(tempfile.mkdtemp(prefix="tlora-fx-start-")), os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    group = _Processes(folder)
    with group.passing_signals_on():
        for rank in range(count):
            if not group.fork(rank):
                _become(rank, count, folder, parent, os.environ)
                return
        group.wait()
    try:
        group.conclude(going_on)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _become(
    rank: int, count: int, folder: Path, parent: int, environment: MutableMapping[str, str]
) -> None:
    """In a fork: be one process of the run, which ends when the parent does."""
    # Ctrl-C is for the parent alone: each process shall hear of it once.
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // count)))
    environment.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            # The first process chooses one.
            "MASTER_PORT": "0",
            START_FOLDER: str(folder),
        }
    )


class _Processes:
    """The processes of a run, from the one that waits for them.

    running   their numbers, by rank
    ended     exit codes by rank, negative for a signal, in the order of their ends
    asked     signals that the user has sent
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._parent = folder, os.getpid()
        self.running: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.asked: list[int] = []

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Inside, signals that ask to stop go to all processes."""
        before = {number: signal.signal(number, self._hear) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if os.getpid() != self._parent:
                # The kernel's SIGTERM after the parent's death ends what hangs, too.
                forget_terminated()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, before)

    def fork(self, rank: int) -> bool:
        """Start one process, unless the user has asked to stop.

        returns   False in the new process, which hears signals once it leaves the context
        """
        # A signal that came between a fork and the note of its number would miss that process.
        stops = stop_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        if not self.asked:
            pid = os.fork()
            if not pid:
                return False
            self.running[rank] = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        return True

    def wait(self) -> None:
        """Wait until all have ended; once one has failed, the others are given little time."""
        end: float | None = None
        while self.running:
            self._reap()
            if end is None and self.failed() is not None:
                end = time.monotonic() + TELL_SECONDS
            if end is not None and time.monotonic() > end:
                self._signal(signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def failed(self) -> int | None:
        """Rank of the process that failed first, if one has."""
        return next((rank for rank in self.ended if self._has_failed(rank)), None)

    def _has_failed(self, rank: int) -> bool:
        code, ending = self.ended[rank], Ending.read(self._folder, rank)
        if ending is not None:
            return ending.kind in FAILURES
        # The user's signal ends one that does not train yet.
        return code != 0 and not (self.asked and code < 0)

    def conclude(self, going_on: Callable[[], str]) -> None:
        """Say what ended the run, and exit; see `start_processes`."""
        endings = {rank: Ending.read(self._folder, rank) for rank in sorted(self.ended)}
        first = self.failed()
        if first is not None and self.ended[first] < 0:
            number = -self.ended[first]
            raise ProcessLost(
                "a process of the run was killed",
                rank=first,
                found=signal.Signals(number).name,
                help=going_on(),
            )
        if first is not None:
            self._tell(endings)
            sys.exit(1)
        stops = [one.text for one in endings.values() if one and one.kind == "interrupted"]
        if not stops and signal.SIGTERM in self.asked:
            raise Terminated
        if stops or self.asked:
            raise KeyboardInterrupt(stops[0] if stops else "")
        sys.exit(max(abs(code) for code in self.ended.values()))

    def _tell(self, endings: Mapping[int, Ending | None]) -> None:
        """Print one error: that of the process in which it arose, as far as that can be seen."""
        failures = [
            (FAILURES.index(one.kind), rank, one.text)
            for rank, one in endings.items()
            if one is not None and one.kind in FAILURES
        ]
        if failures:
            _, rank, text = min(failures)
            sys.stderr.write(printable(text if rank == 0 else f"rank {rank}: {text}") + "\n")

    def _reap(self) -> None:
        for rank, pid in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.running[rank]
                self.ended[rank] = os.waitstatus_to_exitcode(status)

    def _signal(self, number: int) -> None:
        for pid in self.running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)
        if number == signal.SIGHUP:
            leave_terminal()
        # Of SIGINT a process that still imports would make a traceback.
        self._signal(signal.SIGTERM if number == signal.SIGINT else number)
