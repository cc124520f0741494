"""Compile the kernels of a computation beside one another, before it runs.

Triton compiles a kernel when it is first started, and a model that is new starts dozens, one after
another. While kernels are compiled ahead, launchers give those that are new to threads and start
none. What kernels would have written is then not there: all that is computed meanwhile must be
thrown away, and nothing may be taken for written. That is so for all threads of the process, for
backwards have one of their own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from traceback import clear_frames
from typing import Any

from tlora_fx.host.memory import usable_cpus
from tlora_fx.host.phases import phase

logger = logging.getLogger(__name__)
#: Threads: most of a compilation is outside of Python.
MOST = 16


class _Like:
    """Stands for a tensor of which Triton looks at the type and the address."""

    __slots__ = ("address", "dtype")

    def __init__(self, tensor: Any) -> None:
        self.dtype = tensor.dtype
        self.address: int = tensor.data_ptr()

    def data_ptr(self) -> int:
        """Address of the tensor."""
        return self.address


class Ahead:
    """Kernels that are compiled ahead in this process.

    is_on   whether launchers start nothing now
    """

    def __init__(self) -> None:
        self.is_on = False
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[object, Future[None]] = {}
        # By their addresses, which others take over once they are gone.
        self._done: dict[str, weakref.WeakValueDictionary[int, Any]] = {}

    def try_once(self, kind: str, subject: object, run: Callable[[], object]) -> None:
        """Compile what a computation starts, once for each object and kind of computation.

        What goes wrong is told in the log alone: the computation itself comes next, and meets it
        where it is no matter of being ahead.
        """
        done = self._done.setdefault(kind, weakref.WeakValueDictionary())
        if id(subject) in done:
            return
        done[id(subject)] = subject
        try:
            with phase("kernels"), self.compiling():
                run()
        except Exception as error:  # noqa: BLE001  (whatever it is, nothing was needed of it)
            # Its frames hold what was computed.
            clear_frames(error.__traceback__)
            logger.info("not compiled ahead: %s: %s", type(error).__name__, error)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile what is started within it; at its end all of it is there."""
        assert not self.is_on, "one computation at a time"
        workers = min(MOST, usable_cpus())
        self._pool = ThreadPoolExecutor(workers, "compile-ahead")
        self.is_on, whole = True, False
        try:
            yield
            whole = True
        finally:
            self.is_on = False
            self._pool.shutdown(cancel_futures=not whole)
            asked, self._pool, self._asked = self._asked, None, {}
            for future in asked.values():
                # Whoever starts the kernel is told, with what it was started with.
                if not future.cancelled() and (error := future.exception()):
                    logger.info("not compiled ahead: %s: %s", type(error).__name__, error)

    def ask(
        self, function: Any, key: object, device: int, arguments: Sequence[Any],
        meta: dict[str, int],
    ) -> None:  # fmt: skip
        """Compile a `@triton.jit` function's form for arguments like these, on one of the threads.

        key   of the form
        """
        known = id(function), key
        if known in self._asked or self._pool is None:
            return
        likes = [_Like(value) if hasattr(value, "is_cuda") else value for value in arguments]
        _ = function.cache_key  # is computed once, and is no work for two threads
        self._asked[known] = self._pool.submit(partial(_compile, function, device, likes, meta))


def _compile(function: Any, device: int, likes: Sequence[Any], meta: dict[str, int]) -> None:
    import torch

    # Each thread has a current device of its own.
    with torch.cuda.device(device):
        compiled = function.warmup(*likes, grid=(1,), **meta)
        # What starts it is compiled where it is asked for first, by the C compiler.
        _ = compiled.run


ahead = Ahead()
