"""Python's collection of garbage where many objects are made that stay.

A start makes millions of objects that stay: modules, graphs, compiled code. Collections that look
at all of them again and again take an eighth of a start's CPU time, and taking all of them apart
takes seconds behind the command's end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Between collections of a start: allocations, and collections of younger objects.
THRESHOLDS = 100_000, 50, 100
_before: tuple[int, int, int] | None = None


def begin() -> None:
    """Collect rarely until `settle`."""
    global _before  # noqa: PLW0603  (a process has one collector)
    _before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)


def settle() -> None:
    """The start is over: what it has left stays. Does nothing where none has begun."""
    global _before  # noqa: PLW0603
    if _before is None:
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_before)
    _before = None


@contextmanager
def rarely() -> Iterator[None]:
    """Collect rarely inside, as a start does, and as before behind it; may stand in itself.

    A process that collects more rarely, or never, goes on to do so.
    """
    before = gc.get_threshold()
    if 0 < before[0] < THRESHOLDS[0]:
        gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def leave() -> None:
    """The process ends: what there is goes with it, and is not taken apart first."""
    gc.freeze()
