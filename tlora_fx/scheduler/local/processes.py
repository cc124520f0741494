"""The fork server and its workers, from the parent's side."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tlora_fx.host.memory import free_bytes, total_bytes
from tlora_fx.runtime.workers.protocol import (
    CROWDED,
    FORK_SERVER_DIED,
    LOST,
    NEEDS_NEW_PROCESS,
    OUT_OF_MEMORY,
)

WORKER = "tlora_fx.runtime.workers.training"


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A worker, as a server is asked to start it.

    order         file of what it is to do
    log           file that it prints into
    environment   besides that of its server
    module        what it runs instead of the server's own module. Such a guest saves nothing: it
                  leads a session, which is killed as a whole when the parent has gone, and gives
                  way to others
    stays         what the worker keeps when its order is done: the next order of the same kind and
                  place goes to it. "": it ends
    place         GPUs on which no other works; idle ones keep their memory there while it suffices
    needs         bytes of each of these, or of main memory; None: nobody knows, and its GPUs are
                  cleared
    rank          among the workers of an order, which stay together: the first one starts when all
                  are asked for
    size          how many they are
    """

    order: str
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    stays: str = ""
    place: tuple[int, ...] = ()
    needs: float | None = None
    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class IdleNews:
    """News of an idle worker.

    kind    kind of model that it keeps
    held    bytes of its device, or of main memory on a CPU
    stays   beside the order's process; otherwise it was ended
    order   order that needed memory; 0: none, there was too little for all
    """

    kind: str
    held: int
    stays: bool
    order: int


class ForkServer:
    """Starts workers, and hears when they end.

    module        module that workers run; see `forkserver`
    held          a file descriptor that the server and all workers inherit; what is locked by it
                  stays locked until the last of them has ended
    """

    def __init__(
        self,
        log: Path,
        *,
        module: str = WORKER,
        held: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module, self._log, self._held = module, log, held
        self._environment = dict(environment or {})
        self._ended: dict[int, int] = {}
        self._running: set[int] = set()
        self._news: list[IdleNews] = []
        self._heard = b""
        self._next = 1
        self._ready = False
        self._lifeline: int | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the server, so that it imports while there is nothing else to do yet."""
        if self._server is not None and self._server.poll() is None:
            return
        self.close()
        reading, self._lifeline = os.pipe()
        kept = [reading] + ([] if self._held is None else [self._held])
        command = [sys.executable, "-m", "tlora_fx.scheduler.local.processes"]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(  # noqa: S603  (our own module)
                [*command, self._module, str(reading)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=kept,
                env={**os.environ, **self._environment},
                bufsize=0,
                # Ctrl-C is for the parent, which drains its groups in order.
                start_new_session=True,
            )
        os.close(reading)
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._heard, self._ready = b"", False

    @property
    def ready(self) -> bool:
        """Whether it has imported everything, so that workers begin at once."""
        self._hear()
        return self._ready

    def start(self, start: WorkerStart) -> int:
        """Start a worker; its number, which is the order's where workers stay."""
        self.begin()
        number, self._next = self._next, self._next + 1
        self._running.add(number)
        self._ask({"start": number, **asdict(start)})
        return number

    def signal(self, worker: int, number: int) -> None:
        """Send a worker a signal; nothing happens where it has ended."""
        if worker in self._running:
            self._ask({"signal": worker, "number": number})

    def free_memory(self, worker: int, needs: float | None) -> None:
        """Free memory for a worker that needs so many bytes from now on; None: nobody knows."""
        if worker in self._running:
            self._ask({"free_memory": worker, "needs": needs})

    def news(self) -> list[IdleNews]:
        """News of idle workers since the last call."""
        self._hear()
        news, self._news = self._news, []
        return news

    def code(self, worker: int) -> int | None:
        """Exit code of a worker, negative for a signal, or `FORK_SERVER_DIED`; None: it runs."""
        self._hear()
        return self._ended.get(worker)

    def close(self) -> None:
        """Ask all workers to stop, and wait until they have ended; what hangs is killed."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._server is not None:
            try:
                self._server.wait(STOP_SECONDS + 2 * LATE_SECONDS)
            except subprocess.TimeoutExpired:
                # By its death each of its workers dies.
                self._server.kill()
                self._server.wait()
            for pipe in (self._server.stdin, self._server.stdout):
                if pipe is not None:
                    pipe.close()
            self._server = None
        self._lose()

    def _ask(self, what: dict[str, Any]) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(json.dumps(what).encode() + b"\n")
        except BrokenPipeError:
            self._lose()

    def _hear(self) -> None:
        if self._server is None or self._server.stdout is None:
            return
        gone = self._server.poll() is not None
        while content := self._server.stdout.read(65536):
            self._heard += content
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "ready" in told:
                self._ready = True
                continue
            if "kind" in told:
                self._news.append(IdleNews(**told))
                continue
            self._running.discard(told["ended"])
            self._ended[told["ended"]] = told["code"]
        if gone:
            self._lose()

    def _lose(self) -> None:
        """The server is gone, and by its death each of its workers.

        The workers of a server that has not imported everything count as killed: where it never
        comes so far, no job is tried forever.
        """
        code = FORK_SERVER_DIED if self._ready else LOST
        self._ended |= dict.fromkeys(self._running, code)
        self._running.clear()


# A process that has imported all that a worker needs, and forks workers.
#
# Importing torch, transformers and PEFT takes ten seconds; a fork takes a tenth of one. The server
# itself never touches a GPU (they are hidden from it while it imports, and asked for by NVML
# only), so its children may.
#
#     python -m tlora_fx.scheduler.local.processes MODULE LIFELINE [ORDER]
#
# MODULE has `warm()` and `main(order: Path) -> bool`, which is false where it cannot do with a
# fork: then it is run again in a fresh process, which is what naming an ORDER does. LIFELINE is a
# file descriptor that is readable at its end when the parent has died: then each worker is asked
# to stop, as by SIGTERM, and the server ends. Requests and answers are JSON lines on stdin and
# stdout:
#
#     (when all is imported)                                           {"ready": true}
#     {"start": 7, "order": "…", "log": "…", …}, as of WorkerStart  →   {"ended": 7, "code": 0}
#     to end one: {"signal": 7, "number": 15}
#
# A start may name another "module": such a guest leads a session and so a process group, which a
# signal reaches as a whole, and is killed as soon as the parent has died.
#
# A worker whose start names what "stays" does not end with its order where its module's `stays()`
# is true: it waits for the next order of that kind, and says what it holds and what is free on its
# device then, which its module's `memory()` knows. To its parent the order has ended as if the
# process had. The workers of one order wait for the next one together, each in its rank: where one
# of them has ended, the others go. Where those that stayed end as NEEDS_NEW_PROCESS, new ones carry
# out their order, once all have ended.
#
# Idle workers are ended, the oldest first, until an order's process has the bytes that it needs:
# what was free on its GPU when a worker became idle there last, and what those held that have ended
# since. On a CPU it is main memory, of which a part stays free. A process that has none all the
# same ends as OUT_OF_MEMORY: then the idle ones of its place go, and its kind is kept apart from
# then on.

POLL_SECONDS = 0.05
#: Groups whose workers are kept on a GPU, or on the CPU; and the part of main memory below which
#: none is.
MAX_IDLE = 4
MIN_FREE = 0.2
#: That a worker may take to stop; its thread ends it then.
STOP_SECONDS = 60.0
#: After that the server kills a worker whose threads do not run any more.
LATE_SECONDS = 5.0
#: By how much guests are nicer than others, and tries to say so of a session.
GUEST_NICENESS = 5
NICENESS_TRIES = 5
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Import, then serve until the parent is gone."""
    name, lifeline, *order = sys.argv[1:]
    if order:
        _work(import_module(name), int(lifeline), Path(order[0]))
    # Asking the driver itself would forbid CUDA to every fork.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    before = {variable: os.environ.get(variable) for variable in hidden}
    os.environ.update(hidden)
    module = import_module(name)
    module.warm()
    for variable, value in before.items():
        os.environ.pop(variable)
        if value is not None:
            os.environ[variable] = value
    forget_no_device()
    # Forks share what is imported: nobody looks through it for garbage.
    gc.collect()
    gc.freeze()
    os.write(1, b'{"ready": true}\n')
    _Server(module, int(lifeline)).serve()


def forget_no_device() -> None:
    """Make torch ask anew whether Triton has a device: whoever asked so far was told of none.

    Libraries such as torchao ask as they are imported, and torch keeps the answer.
    """
    module = sys.modules.get("torch.utils._triton")
    for value in list(vars(module).values()) if module else ():
        if clear := getattr(value, "cache_clear", None):
            clear()


class _Server:
    """Answers the parent.

    children   what each worker that is at an order was asked, by process; "again" where it stayed
               for it
    gathering  what was asked of workers of an order that wait for the others, by order
    free       bytes by GPU that an order's process may have, beside the idle workers there
    apart      kinds that had no memory beside idle workers
    """

    def __init__(self, module: ModuleType, lifeline: int) -> None:
        self.module, self.lifeline = module, lifeline
        self.children: dict[int, dict[str, Any]] = {}
        self.gathering: dict[str, list[dict[str, Any]]] = {}
        self.guests: set[int] = set()
        self.residents: dict[int, _Resident] = {}
        self.free: dict[int, int] = {}
        self.apart: set[str] = set()
        self.heard = b""

    def serve(self) -> None:
        """Answer until the parent is gone and every worker has ended."""
        orphaned: float | None = None
        while orphaned is None or self.children or self.residents:
            said = {resident.says: pid for pid, resident in self.residents.items()}
            wanted = [] if orphaned is not None else [0, self.lifeline, *said]
            ready, _, _ = select.select(wanted, [], [], POLL_SECONDS)
            for pipe in said.keys() & set(ready):
                self.rest(said[pipe])
            if self.lifeline in ready or (0 in ready and not self.hear()):
                # The workers have seen the same end of the lifeline.
                orphaned = time.monotonic()
                self.kill(self.guests & self.children.keys())
                self.kill(self.residents.keys() - self.children.keys())
            if orphaned is not None and time.monotonic() - orphaned > STOP_SECONDS + LATE_SECONDS:
                self.kill(self.children)
            self.reap(told=orphaned is None)

    def kill(self, workers: Iterable[int]) -> None:
        for pid in workers:
            self.send(pid, signal.SIGKILL)

    def send(self, pid: int, number: int) -> None:
        """Signal a worker; a guest with all that it has started."""
        if pid in self.guests:
            # It may not lead its group yet.
            with suppress(ProcessLookupError):
                os.killpg(pid, number)
        os.kill(pid, number)

    def hear(self) -> bool:
        content = os.read(0, 65536)
        *lines, self.heard = (self.heard + content).split(b"\n")
        for line in lines:
            self.do(json.loads(line))
        return bool(content)

    def do(self, asked: dict[str, Any]) -> None:
        if "start" in asked:
            self.start(asked)
            return
        for pid, order in self.children.items():
            if order["start"] == asked.get("signal"):
                order["signalled"] = asked["number"]
                self.send(pid, asked["number"])
            if order["start"] == asked.get("free_memory"):
                order["needs"] = asked["needs"]
                self.free_memory(order, self.residents.get(pid))
        for path, waiting in list(self.gathering.items()):
            for order in list(waiting):
                if order["start"] == asked.get("free_memory"):
                    order["needs"] = asked["needs"]
                if order["start"] == asked.get("signal"):
                    # It has no process that could hear it.
                    waiting.remove(order)
                    self.tell(order["start"], _code_of(asked["number"]))
            if not waiting:
                del self.gathering[path]

    def start(self, asked: dict[str, Any]) -> None:
        """Hand an order to the worker that waits for such, or to a new one."""
        if asked.get("module"):
            self.reap(told=True)
            self.trim()
            self.fork(asked, 0)
            return
        waiting = self.gathering.setdefault(asked["order"], [])
        waiting.append(asked)
        if len(waiting) < asked["size"]:
            return
        del self.gathering[asked["order"]]
        # One that has died in the meantime hears no order.
        self.reap(told=True)
        orders = sorted(waiting, key=lambda order: order["rank"])
        pids = self.waiting_for(orders)
        for pid, order in zip(pids, orders, strict=False):
            self.residents[pid].idle, self.children[pid] = False, order | {"again": True}
        for pid, order in zip(pids, orders, strict=False):
            resident = self.residents[pid]
            self.settle(order, resident)
            with suppress(BrokenPipeError):
                os.write(resident.hears, json.dumps(order).encode() + b"\n")
            # Where it has just died, that is how the order ends.
        for order in orders if not pids else []:
            self.settle(order)
            self.fork(order, orders[0]["start"])

    def waiting_for(self, orders: Sequence[Mapping[str, Any]]) -> list[int]:
        """The idle workers of such an order, by rank; none where one is missing."""
        wanted = [(order["stays"], frozenset(order["place"])) for order in orders]
        for _, first in self.idle():
            team = self.team(first)
            there = [(each.kind, each.place) for _, each in team if each.idle]
            if first.kind and there == wanted:
                return [pid for pid, _ in team]
        return []

    def team(self, worker: _Resident) -> list[tuple[int, _Resident]]:
        """The workers that stay together with one, by rank."""
        found = [(pid, each) for pid, each in self.residents.items() if each.team == worker.team]
        return sorted(found, key=lambda entry: entry[1].rank)

    def fork(self, asked: dict[str, Any], team: int) -> None:
        """Give an order to a new worker.

        team   id by which the workers of an order know each other, where they stay
        """
        kind, place = asked["stays"], frozenset(asked["place"])
        pipes = _pipes() if kind else ()
        pid = os.fork()
        if pid == 0:
            _become_worker(self.module, self.lifeline, asked, pipes)
        self.children[pid] = asked
        if asked.get("module"):
            self.guests.add(pid)
        if pipes:
            hears, says, *others = pipes
            for pipe in others:
                os.close(pipe)
            self.residents[pid] = _Resident(
                kind, place, hears, says, team=team, rank=asked["rank"], size=asked["size"]
            )

    def idle(self) -> list[tuple[int, _Resident]]:
        """Workers that wait for an order, the oldest first."""
        found = [(pid, resident) for pid, resident in self.residents.items() if resident.idle]
        return sorted(found, key=lambda entry: entry[1].since)

    def beside(self, place: frozenset[int]) -> list[tuple[int, _Resident]]:
        """Idle workers that hold what an order's process could use: on a CPU all of them."""
        return [(pid, worker) for pid, worker in self.idle() if worker.place & place or not place]

    def settle(self, asked: dict[str, Any], mine: _Resident | None = None) -> None:
        """Free memory for an order's process, and say who stays beside it."""
        self.free_memory(asked, mine)
        for _, worker in self.beside(frozenset(asked["place"])):
            self.tell_of(worker, stays=True, order=asked["start"])

    def free_memory(self, asked: dict[str, Any], mine: _Resident | None = None) -> None:
        """End idle workers until an order's process fits beside the others.

        mine   the process where it was idle itself: it needs what it held no second time
        """
        place, held = frozenset(asked["place"]), mine.held if mine else 0
        needs = None if asked["stays"] in self.apart else asked["needs"]
        for pid, worker in self.beside(place) if place else []:
            if any(needs is None or needs > self.free[g] + held for g in worker.place & place):
                self.dismiss(pid, asked["start"])
        self.trim(asked["start"], 0 if place or needs is None else needs - held)

    def rest(self, pid: int) -> None:
        """A worker has done its order and waits for another."""
        worker = self.residents.get(pid)
        if worker is None:
            # It was ended as it had just died.
            return
        said = os.read(worker.says, 4096)
        if not said:
            # It has ended, or become another program: no order reaches it.
            self.forget(pid)
            return
        worker.held, free = json.loads(said)
        worker.idle, worker.since = True, time.monotonic()
        self.free |= dict.fromkeys(worker.place, free)
        self.tell(self.children.pop(pid)["start"], 0)
        same = {each.team: other for other, each in self.idle() if each.place == worker.place}
        for other in list(same.values())[:-MAX_IDLE]:
            self.dismiss(other)
        if len(self.team(worker)) < worker.size:
            self.dismiss(pid)
        self.trim()

    def trim(self, order: int = 0, needs: float = 0) -> None:
        """End the oldest idle workers where main memory runs short, by what an order needs."""
        for pid, _ in self.idle():
            if (free_bytes() - needs) / total_bytes() >= MIN_FREE:
                return
            self.dismiss(pid, order)

    def dismiss(self, pid: int, order: int = 0) -> None:
        """End a worker that waits, and those that wait with it; what they hold is free then."""
        worker = self.residents.get(pid)
        if worker is None:
            # It went with another one.
            return
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.tell_of(worker, stays=False, order=order)
        self.forget(pid, order)

    def forget(self, pid: int, order: int = 0) -> None:
        """A worker has ended: those that wait with it are of no use any more."""
        worker = self.residents.pop(pid, None)
        if worker is None:
            return
        os.close(worker.hears)
        os.close(worker.says)
        for gpu in worker.place & self.free.keys():
            self.free[gpu] += worker.held
        for other, left in self.team(worker):
            if left.idle:
                self.dismiss(other, order)

    def tell(self, number: int, code: int) -> None:
        self.say({"ended": number, "code": code})

    def tell_of(self, worker: _Resident, *, stays: bool, order: int) -> None:
        self.say(asdict(IdleNews(worker.kind, worker.held, stays, order)))

    def say(self, what: dict[str, Any]) -> None:
        """Answer the parent; one that has died hears nothing, and workers still write."""
        with suppress(BrokenPipeError):
            os.write(1, json.dumps(what).encode() + b"\n")

    def reap(self, *, told: bool) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            asked = self.children.pop(pid, None)
            self.guests.discard(pid)
            self.forget(pid)
            if told and asked is not None:
                code = os.waitstatus_to_exitcode(status)
                if code == NEEDS_NEW_PROCESS and asked.pop("again", False):
                    if number := asked.get("signalled"):
                        self.tell(asked["start"], _code_of(number))
                    else:
                        self.start(asked)
                    continue
                self.tell(
                    asked["start"], self.end_idle_beside(asked) if code == OUT_OF_MEMORY else code
                )

    def end_idle_beside(self, asked: dict[str, Any]) -> int:
        """A process had no memory: end the idle workers beside it; its exit code."""
        crowd = self.beside(frozenset(asked["place"]))
        for pid, _ in crowd:
            self.dismiss(pid, asked["start"])
        if not crowd:
            return OUT_OF_MEMORY
        self.apart |= {asked["stays"]} - {""}
        return CROWDED


@dataclass(slots=True)
class _Resident:
    """A worker that does not end with its order.

    hears, says   file descriptors: orders for it; for each that it has done, what it holds and
                  what is free
    since         when it began to wait
    held          bytes then
    team          id that workers share which stay together
    rank, size    among them
    """

    kind: str
    place: frozenset[int]
    hears: int
    says: int
    idle: bool = False
    since: float = 0.0
    held: int = 0
    team: int = 0
    rank: int = 0
    size: int = 1


def _code_of(number: int) -> int:
    """The exit code of a worker that was signalled before it trained."""
    return 128 + number if number == signal.SIGTERM else -number


def _pipes() -> tuple[int, int, int, int]:
    """The server's ends, to write orders and to read what is done; then the worker's."""
    orders, hears = os.pipe()
    says, done = os.pipe()
    return hears, says, orders, done


def _become_worker(
    module: ModuleType, lifeline: int, asked: dict[str, Any], pipes: tuple[int, ...] = ()
) -> None:
    """In the child: train, and never return.

    pipes    as of `_pipes`, of a worker that stays
    """
    try:
        if asked.get("module"):
            # A session is a process group too.
            os.setsid()
        for pipe in pipes[:2]:
            os.close(pipe)
        _take_up(asked)
    except BaseException:  # noqa: BLE001  (the child must not go on as a second server)
        traceback.print_exc()
        os._exit(1)
    _work(module, lifeline, Path(asked["order"]), asked.get("module", ""), pipes[2:])


def _take_up(asked: dict[str, Any]) -> None:
    """Print into an order's log, in its environment."""
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    for opened in (log, nothing):
        os.close(opened)
    os.environ.update(asked["environment"])


def _work(
    module: ModuleType, lifeline: int, order: Path, guest: str = "", pipes: tuple[int, ...] = ()
) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if guest:
            _give_way()
            import_module(guest).main(order)
            raise SystemExit(0)
        signal.signal(signal.SIGTERM, _stop)
        threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
        if not module.main(order):
            os.set_inheritable(lifeline, True)
            here = [sys.executable, "-m", __spec__.name, module.__name__, str(lifeline), str(order)]
            os.execv(sys.executable, here)  # noqa: S606  (our own module)
        # Whose parent has died gets no other order.
        while pipes and not select.select([lifeline], [], [], 0)[0] and module.stays():
            module.main(_next_order(pipes, module.memory()))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:  # noqa: BLE001  (the child must not go on as a second server)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _give_way() -> None:
    """Let what trains, and who answers, go first: nobody waits for a guest.

    Where Linux shares CPUs among sessions (autogroup), the niceness of a process counts inside its
    session only. Then the session's own niceness is set.
    """
    os.nice(GUEST_NICENESS)
    # Those without privileges may say so only each tenth of a second, all together.
    for _ in range(NICENESS_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(GUEST_NICENESS), "ascii")
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return


def _next_order(pipes: tuple[int, ...], memory: tuple[int, int]) -> Path:
    """Say that an order is done, and wait for the next one.

    pipes    the worker's ends
    memory   bytes that it holds, and that are free
    """
    orders, done = pipes
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(done, json.dumps(memory).encode())
    line = b""
    while not line.endswith(b"\n"):
        content = os.read(orders, 65536)
        if not content:
            raise SystemExit(0)
        line += content
    asked = json.loads(line)
    _take_up(asked)
    return Path(asked["order"])


def _stop(number: int, frame: FrameType | None) -> None:
    """Before training begins there is nothing to save.

    No exception is raised: the code that imports, reads or traces may take it for its own.
    """
    os._exit(128 + number)


def _end_with(lifeline: int) -> None:
    """Stop when the parent has died: with a checkpoint if that comes in time."""
    select.select([lifeline], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(STOP_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
