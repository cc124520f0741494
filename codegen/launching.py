"""Start a kernel without asking Triton again what it knows.

Triton looks at every argument of every launch to find the compiled form, which takes longer than
many of our kernels run. All that can differ between launches of one of our kernels is which
integers and addresses are divisible by 16; once a form is known it is started directly.

What a thread starts can be written on its tape, to be started again with other addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from tlora_fx.codegen.ahead import ahead

_INT32 = 1 << 31

# Takes a stream and arguments.
Start = Callable[[int, Sequence[Any]], object]


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch.

    start        starts it again
    arguments    what it was started with
    by_address   whether tensors may be given by their addresses
    """

    start: Start
    arguments: tuple[Any, ...]
    by_address: bool


class Tape(threading.local):
    """The launches of this thread, in their order, while `started` is a list."""

    started: list[KernelLaunch] | None = None

    @contextmanager
    def away(self) -> Iterator[list[KernelLaunch] | None]:
        """Write nothing down for a while; gives what is written on."""
        entries, self.started = self.started, None
        try:
            yield entries
        finally:
            self.started = entries


tape = Tape()


class Launcher:
    """Stands for a `@triton.jit` function: `launcher[grid](*arguments, **META)`.

    function   the `@triton.jit` function itself
    """

    def __init__(self, function: Any) -> None:
        # The text of kernels can be made, and this module imported, without torch.
        import torch

        self.function = function
        self._current_device = torch.cuda.current_device
        self._stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
        self.params = parameters = function.params
        self._integers = [p.num for p in parameters if not p.do_not_specialize]
        self._addresses = [
            p.num
            for p in parameters
            if not (p.do_not_specialize or p.do_not_specialize_on_alignment)
        ]
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._asked: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._start, grid)

    def _start(self, grid: tuple[int, ...], *arguments: Any, **meta: int) -> None:
        device = self._current_device()
        key = (device, *self._facts(arguments))
        compiled = self._compiled.get(key)
        if ahead.is_on:
            if compiled is None and key not in self._asked:
                self._asked.add(key)
                self.function.warmup(*arguments, grid=grid, **meta)
            return
        whole = (*grid, 1, 1)[:3]
        if compiled is None:
            compiled = self._compiled[key] = self.function[grid](*arguments, **meta)
        else:
            _start(compiled, whole, self._stream(device), arguments)
        if tape.started is not None:
            again = partial(_start, compiled, whole)
            tape.started.append(KernelLaunch(again, arguments, by_address=True))

    def _facts(self, arguments: tuple[Any, ...]) -> list[int]:
        """What Triton compiles an argument's form for: 0 to 3 for integers, 4 or 5 for tensors."""
        facts = []
        for index in self._integers:
            value = arguments[index]
            if type(value) is int:
                facts.append((value == 1) + 2 * (value % 16 == 0) + 6 * (abs(value) >= _INT32))
        for index in self._addresses:
            address = getattr(arguments[index], "data_ptr", None)
            if address is not None:
                facts.append(4 + (address() % 16 == 0))
        return facts


class Interpreted:
    """The same of a function that Triton interprets: nothing is faster, all is written down."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._start, grid)

    def _start(self, grid: tuple[int, ...], *arguments: Any, **meta: int) -> None:
        if ahead.is_on:
            return

        def again(_: int, arguments: Sequence[Any]) -> None:
            self.function[grid](*arguments, **meta)

        with tape.away() as entries:
            again(0, arguments)
        if entries is not None:
            entries.append(KernelLaunch(again, arguments, by_address=False))


def _start(compiled: Any, grid: tuple[int, ...], stream: int, arguments: Sequence[Any]) -> None:
    """Start a compiled form as Triton itself does; profilers that ask are told."""
    enter, leave = _hooks()
    if enter.calls or leave.calls:
        compiled[grid](*arguments, stream=stream)
    else:
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )


@cache
def _hooks() -> tuple[Any, ...]:
    """What is called around launches; looking them up takes as long as a launch."""
    from triton import knobs

    return knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
