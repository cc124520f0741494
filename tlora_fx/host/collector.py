"""Python's collection of garbage in a process that is started for one command.

A start makes millions of objects that stay: modules, graphs, compiled code. Collections that look
at all of them again and again take an eighth of a start's CPU time, and taking all of them apart
takes seconds behind the command's end.
"""

from __future__ import annotations

import gc

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


def leave() -> None:
    """The process ends: what there is goes with it, and is not taken apart first."""
    gc.freeze()
