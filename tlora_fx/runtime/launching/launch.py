"""Processes that torchrun or `--gpus` has started: joining them, and choosing a plan for all."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.errors import (
    LaunchError,
    ProcessLost,
    RankFailed,
    RanksDiffer,
    TloraError,
)
from tlora_fx.host.environment import START_FOLDER
from tlora_fx.host.version import __version__
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import FIRST_STEP, Mesh
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.distributed import Ranks, device_named
from tlora_fx.runtime.launching.early_checks import require_plan_file
from tlora_fx.runtime.launching.local_launch import (
    INTERRUPTED,
    Ending,
    leave_for_torchrun,
    require_size,
)

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# torchrun counts how often it has started the processes again.
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
FIRST_TELLS_SECONDS = 2.0
#: By which users say how torch allocates memory of a GPU.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: More than what torch takes out of segments for small tensors.
SEGMENT_BYTES = 2 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """Rank of this process among those that were started together.

    rank, size    among all
    local_rank    among those of one machine
    per_machine   how many run on this machine
    restarts      how often torchrun has started the processes again after one had died
    folder        where processes that `--gpus` has started meet, and leave their errors
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    per_machine: int = 1
    restarts: int = 0
    folder: Path | None = None

    @property
    def again(self) -> bool:
        """Whether the processes go on with what earlier ones have begun."""
        return self.restarts > 0

    @staticmethod
    def found(environment: Mapping[str, str] = os.environ) -> Launch:
        """Launch by torchrun's environment; a single process where there is no torchrun.

        raises    LaunchError where it says only a part
        """
        there = [name for name in VARIABLES if name in environment]
        if "RANK" not in there and "WORLD_SIZE" not in there:
            return Launch()
        try:
            rank, local, size = (int(environment[name]) for name in VARIABLES[:3])
        except (KeyError, ValueError) as error:
            raise LaunchError(
                "the environment names some of torchrun's variables only",
                expected=", ".join(VARIABLES),
                found=", ".join(there) or "none",
                reason=error,
                help="start with torchrun, or unset RANK and WORLD_SIZE",
            ) from error
        per_machine = int(environment.get("LOCAL_WORLD_SIZE", size))
        restarts = int(environment.get(RESTARTS, "0"))
        folder = environment.get(START_FOLDER)
        return Launch(rank, size, local, per_machine, restarts, Path(folder) if folder else None)

    def device(self, name: str | None) -> torch.device:
        """This process's device: of GPUs, each process of a machine has its own.

        raises    DeviceUnknown
        """
        device = device_named(name)
        if device.type == "cuda" and self.size > 1:
            device = device_named(f"cuda:{self.local_rank}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device


def join(launch: Launch, device: torch.device, folder: Path | None = None) -> Mesh:
    """Join the other processes, where that is not done; for one process nothing is opened.

    folder    where the first process tells the others its port, if MASTER_PORT is 0
    returns   all processes as replicas, for what comes before there is a plan
    raises    RanksDiffer, on every process, where versions differ
    """
    if launch.size == 1:
        return Mesh.alone(device)
    if dist.is_initialized():
        return _everyone(launch, device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_store(launch, folder or launch.folder),
        rank=launch.rank,
        world_size=launch.size,
        timeout=FIRST_STEP,
    )
    mesh = _everyone(launch, device)
    _require_same_versions(Ranks(mesh))
    _peers[:] = Ranks(mesh).tell_all(Peer.here())
    return mesh


def _store(launch: Launch, folder: Path | None) -> Store:
    """The store in which processes find each other's addresses."""
    store: Store
    if os.environ.get("MASTER_PORT") != "0":
        store, _, _ = next(iter(rendezvous("env://", timeout=FIRST_STEP)))
        # torchrun's store outlives the processes: addresses of dead ones must not be found in it.
        alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        return PrefixStore(f"start{launch.restarts}", store) if alone else store
    assert folder is not None
    told = FileStore(str(folder / "port"))
    told.set_timeout(FIRST_STEP)
    leads = launch.rank == 0
    port = 0 if leads else int(told.get("port"))
    host = os.environ["MASTER_ADDR"]
    store = TCPStore(host, port, launch.size, leads, FIRST_STEP, wait_for_workers=False)
    if leads:
        told.set("port", str(store.port))
    return store


def _everyone(launch: Launch, device: torch.device) -> Mesh:
    shape = MeshShape(dp=launch.size)
    return Mesh(shape, device, launch.rank, dp_rank=launch.rank, world=dist.group.WORLD)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process of the run.

    place     the machine since its start, and the space in which numbers of processes count
    started   by the kernel's clock: another process may have the number later
    """

    place: str
    pid: int
    started: str

    @staticmethod
    def here() -> Peer:
        """This process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        space = Path("/proc/self/ns/pid").stat().st_ino
        return Peer(f"{boot} {space}", os.getpid(), _started(os.getpid()))

    def kill(self) -> None:
        """End it, if it is there, on this machine, and not this process itself."""
        here = Peer.here()
        if self.place == here.place and self.pid != here.pid:
            with suppress(OSError, IndexError):
                if _started(self.pid) == self.started:
                    os.kill(self.pid, signal.SIGKILL)


#: All processes of the run that this one has joined.
_peers: list[Peer] = []


def _started(pid: int) -> str:
    # Behind the name of the program, which may hold spaces.
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19]


def leave() -> None:
    """Part from the other processes, when all is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_plan(
    name: str,
    model: SuperModel,
    launch: Launch,
    shape: MeshShape | None,
    options: Mapping[str, Any] | None = None,
    profile: Profile | None = None,
) -> Plan:
    """The plan that a name or a file means, for the processes that there are.

    name      of a planner, or a plan's file
    shape     the mesh; of a file it must be the file's own
    options   of the planner
    profile   by which the planner chooses
    raises    UnknownPlanner, PlanFileError, PlanNotForModel, LaunchError, PlanNotRunnable
    """
    if shape is not None:
        _require_size(shape, launch, name)
    require_plan_file(name)
    if Path(name).suffix == ".json" or Path(name).is_file():
        plan = Plan.load(name)
        if shape not in (None, plan.mesh):
            raise LaunchError(
                f"the plan '{name}' is for another mesh",
                expected=plan.mesh,
                found=shape,
                help="leave the mesh out, or name a planner that makes a plan for it",
            )
    else:
        known = {"processes": launch.size, "gpus_per_node": launch.per_machine}
        given = {**(options or {}), **known}
        plan = find_planner(name).plan(model, shape, profile, options=given)
    plan.require_model(model)
    _require_size(plan.mesh, launch, name)
    return plan


def _require_size(shape: MeshShape, launch: Launch, name: str) -> None:
    under_torchrun = launch.size > 1 and launch.folder is None
    require_size(shape, launch.size, name, under_torchrun=under_torchrun)


def _require_same_versions(ranks: Ranks) -> None:
    mine = {"torch": str(torch.__version__), "tlora-fx": __version__}
    by_rank = ranks.tell_all(mine)
    for name in mine:
        versions = [versions[name] for versions in by_rank]
        apart = next((rank for rank, v in enumerate(versions) if v != versions[0]), None)
        if apart is not None:
            raise RanksDiffer(
                f"processes have different versions of {name}",
                expected=f"{versions[0]} (rank 0)",
                found=f"{versions[apart]} (rank {apart})",
                help="start all processes from the same installation",
            )


def let_segments_grow(device: torch.device, launch: Launch) -> None:
    """Ask torch's allocator to grow its segments, unless the user says how it allocates.

    Rows of many lengths otherwise leave it with segments that later rows do not fit into. Processes
    that copy shards out of each other's memory need segments of the usual kind. Some drivers, such
    as those of WSL, refuse such segments when the first one is allocated, so one is.

    device   nothing of this process may lie there yet
    source   "Optimizing memory usage" in torch's notes on CUDA
    """
    said = any(os.environ.get(name) for name in ALLOCATOR_VARIABLES)
    if device.type != "cuda" or launch.size > 1 or said:
        return
    try:
        _set_allocator("expandable_segments:True")
        torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device=device)
    except Exception as error:  # noqa: BLE001  (then memory is allocated as torch does by itself)
        logger.info("segments do not grow: %s: %s", type(error).__name__, error)
        with suppress(Exception):
            _set_allocator("expandable_segments:False")


def _set_allocator(settings: str) -> None:
    with warnings.catch_warnings():
        # Newer versions want another name, which older ones do not have.
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(settings)


def memory_bytes(device: torch.device, ranks: Ranks) -> int | None:
    """Memory of the smallest device, None where that does not limit."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    return min(ranks.tell_all(total)) or None


def exits_at_once(
    action: Callable[[], None],
    launch: Launch,
    going_on: Callable[[], str] | None = None,
    stay: Callable[[], bool] = lambda: False,
) -> None:
    """Run what all processes run; where it fails on one, that process ends at once.

    A process that waits for others while the interpreter closes would keep torchrun from ending
    them. What all processes have met is told by the first alone.

    going_on   what helps where another process was lost
    stay       whether all of them stay together for what they run next; asked when all went well
    """
    if launch.size == 1:
        action()
        return
    try:
        action()
        if not stay():
            leave()
    except BaseException as error:  # noqa: BLE001  (whatever it is, the others must not wait)
        if is_loss(error):
            error = _lost(error, going_on)
        code = _exit_code(error)
        if launch.folder is not None:
            # The process that has started all tells one error, and ends the others.
            with suppress(OSError):
                _ending(error).write(launch.folder, launch.rank)
        else:
            _tell(error, launch.rank)
        sys.stdout.flush()
        sys.stderr.flush()
        if launch.folder is None:
            _wait_to_end(error, launch.rank)
        os._exit(code)


def _wait_to_end(error: BaseException, rank: int) -> None:
    """Let torchrun end the processes in the right order."""
    if rank > 0 and (is_shared(error) or isinstance(error, SystemExit)):
        # torchrun ends all others when one ends: the first shall have told by then.
        time.sleep(FIRST_TELLS_SECONDS)
    elif isinstance(error, ProcessLost):
        # It names the process that was killed only where it has not seen another end before.
        time.sleep(FIRST_TELLS_SECONDS)
        # One that hangs hears no signal, and torchrun would wait half a minute for it.
        for peer in _peers:
            peer.kill()


def is_shared(error: BaseException) -> bool:
    """Whether every process of the run has met this error."""
    return bool(getattr(error, "shared", False))


def is_loss(error: BaseException) -> bool:
    """Whether this is what a process meets when another one has gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _lost(error: BaseException, going_on: Callable[[], str] | None) -> ProcessLost:
    """The same in words; the place in the library's sources says nothing to a user."""
    first = str(error).partition("\n")[0]
    return ProcessLost(
        "lost the connection to another process",
        found=re.sub(r"^\[\S+:\d+\]\s*", "", first).partition(". ")[0],
        help=going_on() if going_on is not None else "look for what ended it, then start again",
    )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _ending(error: BaseException) -> Ending:
    """What the process that has started this one is told."""
    if isinstance(error, SystemExit):
        return Ending("exit")
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", str(error))
    if isinstance(error, ProcessLost):
        return Ending("lost", _text(error))
    return Ending("echoed" if isinstance(error, RankFailed) else "error", _text(error))


def _text(error: BaseException) -> str:
    if not isinstance(error, TloraError):
        return "".join(traceback.format_exception(error)).rstrip()
    return error.with_notes()


def _tell(error: BaseException, rank: int) -> None:
    """Print an error where it is to be told, and leave it for torchrun's summary."""
    if isinstance(error, SystemExit):
        return
    if isinstance(error, KeyboardInterrupt):
        if rank == 0:
            sys.stderr.write(f"interrupted: {error}\n" if str(error) else "interrupted\n")
        return
    text = _text(error)
    leave_for_torchrun(text)
    if rank == 0 or not is_shared(error):
        known = isinstance(error, TloraError) and rank == 0
        sys.stderr.write(f"{text}\n" if known else f"rank {rank}: {text}\n")
