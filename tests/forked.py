"""Workers of pytest, forked from one process that has imported all tests and what they import.

Else each worker imports for itself, and so does the server that it forks processes from (tests/
parallel/processes.py): twice twenty seconds of processor time a worker. Where processes would start
an interpreter they start CLIENT instead. It hands its words, variables and open files to the
process that has imported everything, whose fork goes on as if it were that interpreter.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import gc
import json
import os
import select
import socket
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any

#: Names the script that stands for an interpreter; unset where processes import for themselves.
VARIABLE = "TLORA_FX_TEST_PYTHON"
# Descriptors from here on are free for a moment, whatever numbers a process wants.
FREE = 500

CLIENT = """#!{python} -IS
import array, json, os, socket, sys

files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if os.path.exists(f"/proc/self/fd/{{file}}")]
request = {{"words": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "files": files}}
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
text = json.dumps(request).encode()
rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
link.sendmsg([len(text).to_bytes(8, "little")], [rights])
link.sendall(text)
for file in files:
    os.close(file)
os._exit(*link.recv(1) or [1])
"""


@contextmanager
def interpreter() -> Iterator[None]:
    """Let multiprocessing start its server from a fork that has imported everything."""
    client = os.environ.get(VARIABLE)
    resource_tracker.ensure_running()
    before = spawn.get_executable()
    if client:
        spawn.set_executable(client)
    try:
        yield
    finally:
        spawn.set_executable(before)


def ensure_forkserver() -> None:
    """Start the server of multiprocessing that this process forks others from."""
    with interpreter():
        forkserver.ensure_running()


class Server:
    """The process that workers are forked from, as its parent sees it."""

    def __init__(self, folder: Path, imports: Callable[[], object]) -> None:
        """Fork it.

        folder    where its socket and CLIENT lie
        imports   called there before the first fork
        """
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "forks"))
        listener.listen(64)
        self.client = folder / "python"
        self.client.write_text(CLIENT.format(python=sys.executable, address=f"{folder}/forks"))
        self.client.chmod(0o700)
        ended, self._alive = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._alive)
            try:
                _serve(listener, ended, imports)
            except BaseException:  # noqa: BLE001  (nobody else tells it)
                traceback.print_exc()
            finally:
                os._exit(0)
        listener.close()
        os.close(ended)

    def close(self) -> None:
        """Let it end behind its last fork."""
        os.close(self._alive)
        os.waitpid(self.pid, 0)


def _serve(listener: socket.socket, ended: int, imports: Callable[[], object]) -> None:
    atexit._clear()
    gc.disable()  # imports leave little garbage; looking for it takes a tenth of their time
    imports()
    gc.unfreeze()  # what is frozen is not listed
    # A folder that a library has made, such as wandb, is for all forks: none takes it away.
    for each in gc.get_objects():
        if type(each) is tempfile.TemporaryDirectory:
            atexit.unregister(each.cleanup)
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        ready, _, _ = select.select([listener, ended], [], [])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if ended in ready:
            break
        link, _ = listener.accept()
        text, files = _receive(link)
        if text and not os.fork():
            listener.close()
            os.close(ended)
            _become(link, json.loads(text), files)
        link.close()
        for file in files:
            os.close(file)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """A request and its open files; an empty one where a client ended before it had sent all."""
    files = array.array("i")
    text = b""
    with suppress(ConnectionError):
        head, ancillary, _, _ = link.recvmsg(8, socket.CMSG_SPACE(64 * 4))
        for _, _, content in ancillary:
            files.frombytes(content)
        left = int.from_bytes(head, "little")
        while len(text) < left:
            piece = link.recv(left - len(text))
            if not piece:
                return b"", list(files)
            text += piece
    return text, list(files)


def _become(link: socket.socket, request: dict[str, Any], files: list[int]) -> None:
    """Be an interpreter with those words; its exit code goes through the link."""
    code = 1
    own, *kept = (
        fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FREE) for file in (link.fileno(), *files)
    )
    link.close()
    pid, leave = os.getpid(), os._exit

    def tell(code: int) -> None:
        if os.getpid() == pid:
            os.write(own, bytes([code % 256]))
        leave(code)

    os._exit = tell  # type: ignore[assignment]
    for file in files:
        os.close(file)
    for file, number in zip(kept, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    try:
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, 1, closefd=False)  # noqa: SIM115
            for number, mode in enumerate("rww")
        )
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        words = request["words"]
        place = words.index("-c")
        sys.argv = ["-c", *words[place + 2 :]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[place + 1], "<string>", "exec"), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (told as an interpreter would)
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
