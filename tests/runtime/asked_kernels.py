"""Which kernels a process asks for before it starts them (see `codegen/ahead.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tlora_fx.codegen.ahead import Ahead


@contextmanager
def noted_kernels() -> Iterator[dict[str, list[Any]]]:
    """Fills what it yields, as it ends: forms that were asked for, and those that were not.

    A form that the process has started before is neither.
    """
    asked: set[tuple[str, ...]] = set()
    started: set[tuple[str, ...]] = set()
    found: dict[str, list[Any]] = {}
    hook = Ahead._hook

    def noted(own: Ahead, *, key: Any, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        (asked if own.is_on else started).add((fn.module, fn.name, str(key)))
        return hook(own, key=key, fn=fn, compile=compile, **rest)

    with mock.patch.object(Ahead, "_hook", noted):
        yield found
    found |= {"asked for": sorted(asked), "not asked for": sorted(started - asked)}
