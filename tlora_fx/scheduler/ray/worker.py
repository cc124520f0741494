"""Actor of a Ray cluster: a process that carries out orders of groups.

It imports nothing of the driver's side, so that a node has it soon.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import ray

from tlora_fx.host.version import __version__
from tlora_fx.scheduler.lease import is_granted

HEAR_SECONDS = 0.1


class Worker:
    """A process that carries out orders, one after the other.

    It trains in the main thread, where signals are heard; a thread of its own listens.

    module     module that carries an order out, as of `ForkServer`
    version    version of tlora-fx where the run is
    folder     where the run works, for paths that are not absolute
    """

    def __init__(self, module: str, version: str, folder: str) -> None:
        if version != __version__:
            raise RuntimeError(f"the run is tlora-fx {version}, this node has {__version__}")
        with suppress(OSError):
            os.chdir(folder)
        self.module = import_module(module)
        self.module.warm()

    def address(self) -> tuple[str, int]:
        """Where the others of its group find its store, which is there from now on."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = ray.util.get_node_ip_address()
        # As this process joins its group, torch finds the store by its port.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return host, self._store.port

    def work(
        self,
        order: str,
        log: str,
        environment: Mapping[str, str],
        address: tuple[str, int] | None = None,
    ) -> tuple[int, bool]:
        """Carry out an order: its exit code, and whether something is kept for the next one.

        environment   besides that of the process
        address       address of the first process of the group
        """
        _take_up(Path(log), environment, address)
        before = signal.signal(signal.SIGTERM, _stop)
        listener = _Listener(Path(order).parent, Path(log).with_suffix(".asked"))
        code, kept = 1, False
        try:
            with listener:
                self.module.main(Path(order))
                code, kept = 0, self.module.stays()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        except BaseException:  # noqa: BLE001  (it is told by the code, and in the log)
            traceback.print_exc()
        finally:
            signal.signal(signal.SIGTERM, before)
            sys.stdout.flush()
            sys.stderr.flush()
        return code, kept


def _take_up(log: Path, environment: Mapping[str, str], address: tuple[str, int] | None) -> None:
    """Print into an order's log, in its environment."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    os.environ.update(environment)
    if address is not None:
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    if "OMP_NUM_THREADS" in environment and "torch" in sys.modules:
        # It was another when torch was imported.
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _stop(number: int, frame: object) -> None:
    """Before training begins there is nothing to save."""
    sys.exit(128 + number)


class _Listener:
    """A thread that signals its own process as it is asked to, and ends it with its lease."""

    def __init__(self, group: Path, asked: Path) -> None:
        self.group, self.asked = group, asked
        self._over = threading.Event()
        self._heard = 0
        self._thread = threading.Thread(target=self._listen, daemon=True, name="lease")

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._over.wait(HEAR_SECONDS):
            if not is_granted(self.group):
                os.kill(os.getpid(), signal.SIGKILL)
            with suppress(FileNotFoundError):
                lines = self.asked.read_bytes().splitlines()
                for number in lines[self._heard :]:
                    os.kill(os.getpid(), int(number))
                self._heard = len(lines)
