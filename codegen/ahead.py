"""Compile the kernels of a computation in other processes, before it runs.

Triton compiles a kernel when it is first started, and a model that is new starts dozens, one after
another. So a computation is gone through twice. The first time its kernels are asked for, and none
that is new is started; what they would have written is then not there, so all that is computed
meanwhile must be thrown away, and nothing may be taken for written. That is so for all threads of
the process, for backwards have one of their own. The second time each kernel is waited for where it
is started, and everything else goes on meanwhile.

Processes compile, for threads would take turns with this one's Python. They are those of Inductor.
What they have compiled lies in Triton's cache, and a note beside it that a computation was asked
for: a later process asks no more.

source   `JITFunction.preload` and `knobs.runtime.jit_cache_hook` of Triton 3.6 and 3.7
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from traceback import clear_frames
from typing import Any

from tlora_fx.codegen.importing import GENERATED, TRITON_CACHE, import_generated
from tlora_fx.host.memory import usable_cpus
from tlora_fx.host.phases import phase
from tlora_fx.host.sources import own_source

logger = logging.getLogger(__name__)
# By which users say how many processes compile.
_COUNT = "TORCHINDUCTOR_COMPILE_THREADS"
#: Seconds after which a kernel is compiled where it is started, whatever its process does.
MAX_SECONDS = 120


class Ahead:
    """Kernels that are compiled ahead of their first start.

    is_on   whether launchers start nothing now
    """

    def __init__(self) -> None:
        self.is_on = False
        self._pool: Any = None
        self._starting: Thread | None = None
        self._asked: dict[object, Future[None]] = {}
        # By their addresses, which others take over once they are gone.
        self._done: dict[str, weakref.WeakValueDictionary[int, Any]] = {}

    def start(self, device: Any, beside: int = 1) -> None:
        """Start in the background what compiles for a GPU, once: it takes some seconds.

        device   a torch.device; nothing is started for a CPU
        beside   processes of this machine that train together, which divide its CPUs
        """
        if device.type != "cuda" or self._starting is not None:
            return
        if find_spec("triton") is not None:
            # A thread that imports what another one does may wait for it for ever.
            for name in ("torch._inductor.async_compile", "triton.runtime.driver"):
                importlib.import_module(name)
            self._starting = Thread(target=self._start, args=(device, beside), daemon=True)
            self._starting.start()

    def _start(self, device: Any, beside: int) -> None:
        import torch
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        try:
            # Inductor's processes, and this one from its first kernel on, would have another
            # assembler than Triton's, and Triton keeps what each has made apart.
            os.environ.setdefault("TRITON_PTXAS_PATH", knobs.nvidia.ptxas.path)
            self._pool = _processes(beside)
            # Before torch's own end of them, which waits for some seconds.
            atexit.register(_end, self._pool)
            with torch.cuda.device(device):
                # Triton compiles some code of its own where it is asked first.
                driver.active.get_current_target()
            # It reads all of Triton, and Inductor's caches are keyed by it, too.
            triton_key()
        except Exception as error:  # noqa: BLE001  (whoever starts a kernel meets it)
            logger.info("nothing is compiled ahead: %s: %s", type(error).__name__, error)

    @property
    def processes(self) -> Any:
        """Pool of processes that compile, once it is there; None where there is none."""
        if self._starting is not None:
            self._starting.join()
        return self._pool

    def try_once(
        self,
        kind: str,
        subject: object,
        run: Callable[[], object],
        decided_by: Callable[[], object] | None = None,
    ) -> None:
        """Ask for the kernels of a computation, once for each object and kind of computation.

        What goes wrong is told in the log alone: the computation itself comes next, and meets it
        where it is no matter of being ahead.

        decided_by   all that decides which kernels they are, but for Triton and our sources; an
                     earlier process may have asked for the same
        """
        done = self._done.setdefault(kind, weakref.WeakValueDictionary())
        if id(subject) in done:
            return
        done[id(subject)] = subject
        import torch

        with phase("kernels"):
            note = None if decided_by is None else _note((kind, decided_by()))
            if note is not None and note.exists():
                return
            self.start(torch.device("cuda", torch.cuda.current_device()))
            if self.processes is None:
                return
            try:
                with self.asking():
                    run()
            except Exception as error:  # noqa: BLE001  (whatever it is, nothing was needed of it)
                # Its frames hold what was computed.
                clear_frames(error.__traceback__)
                logger.info("not compiled ahead: %s: %s", type(error).__name__, error)
                return
            if note is not None:
                asked = [*self._asked.values()]
                Thread(
                    target=_write_once_done, args=(note, asked), name="note", daemon=True
                ).start()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask for the kernels that would be started within it, and start none of ours."""
        from triton import knobs

        assert not self.is_on, "one computation at a time"
        if knobs.runtime.jit_cache_hook not in (None, self._hook):
            raise RuntimeError("knobs.runtime.jit_cache_hook of Triton is somebody else's")
        knobs.runtime.jit_cache_hook = self._hook
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def _hook(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Before Triton compiles a form of a function: whether it is not to."""
        form = id(fn.jit_function), compile["device"], key
        future = self._asked.get(form)
        if self.is_on:
            if future is None and self.processes is not None:
                self._asked[form] = self._submit(fn, compile["specialization_data"])
            return True
        if future is not None:
            with phase("kernels"):
                self._wait(future)
            self._asked.pop(form, None)
        return False

    def _wait(self, future: Future[None]) -> None:
        """Wait for a form; where it does not come, Triton compiles it, and tells what is wrong."""
        try:
            future.result(MAX_SECONDS)
        except TimeoutError:
            logger.warning(
                "processes that compile kernels gave no answer within %s s: kernels are compiled "
                "where they are started",
                MAX_SECONDS,
            )
            self._asked.clear()
        except CancelledError:
            logger.warning("the processes that compile kernels have ended")
        except Exception as error:  # noqa: BLE001  (whatever a process says)
            logger.info("not compiled ahead: %s: %s", type(error).__name__, error)

    def _submit(self, fn: Any, form: str) -> Future[None]:
        from triton import knobs
        from triton.runtime import driver

        target = driver.active.get_current_target()
        function = fn.jit_function.fn
        submitted: Future[None] = self.processes.submit(
            compile_form,
            (function.__module__, function.__code__.co_filename, function.__name__),
            form,
            (target.backend, target.arch, target.warp_size),
            knobs.cache.dir,
        )
        return submitted


def _processes(beside: int) -> Any:
    """Inductor's processes; None where it has none, as on a single CPU."""
    from torch._inductor import async_compile, config

    if _COUNT not in os.environ:
        # Inductor does not know how many CPUs a container may use.
        own = usable_cpus()
        if len(os.sched_getaffinity(0)) == os.cpu_count():
            # Nobody has given each process CPUs of its own.
            own = max(min(own, 2), own // beside)
        config.compile_threads = min(async_compile.get_compile_threads(), own)
    count = async_compile.get_compile_threads()
    if count <= 1:
        return None
    pool = async_compile.AsyncCompile.process_pool()
    for _ in range(count):
        pool.submit(get_ready)
    return pool


def _note(decided_by: object) -> Path:
    """The file that says that kernels lie in the cache; it goes when somebody empties that."""
    from triton import knobs
    from triton.runtime.cache import triton_key

    decided = repr((decided_by, triton_key(), own_source("codegen", "ops")))
    return Path(knobs.cache.dir) / "tlora-fx" / hashlib.sha256(decided.encode()).hexdigest()


def _write_once_done(note: Path, asked: list[Future[None]]) -> None:
    with suppress(Exception):  # then the next process asks again
        for future in asked:
            future.result()
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _end(pool: Any) -> None:
    """Do not wait for processes to end: they do once the pipe to them closes, as this one ends."""
    pool.running = False  # torch takes it for one that has been ended


def get_ready() -> None:
    """Import what compiles."""
    importlib.import_module("triton.compiler")


def compile_form(
    where: tuple[str, str, str], form: str, target: tuple[str, Any, int], cache: str
) -> None:
    """Compile a form of a `@triton.jit` function for a GPU that this process does not use.

    where    module, file and name of the function
    form     what Triton calls its specialization data
    target   backend, architecture and warp size of the GPU
    cache    folder of what Triton has compiled
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    os.environ[TRITON_CACHE] = cache
    driver.set_active(_Elsewhere(GPUTarget(*target)))
    compiled = _function(*where).preload(form)
    with suppress(Exception):  # then it is made where the kernel is started
        _make_launcher(compiled)


class _Elsewhere:
    """Triton's driver of a GPU of another process."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """Target to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """A number for all GPUs of one architecture."""
        return int(self.target.arch)


def _function(module: str, file: str, name: str) -> Any:
    if module.startswith(GENERATED):
        return getattr(import_generated(Path(file)), name)
    return getattr(importlib.import_module(module), name)


def _make_launcher(compiled: Any) -> None:
    """Make the C code that starts a kernel; from Triton 3.7 on there is one for all kernels."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)


ahead = Ahead()
