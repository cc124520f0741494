"""Public names that moved: they are found under their old name for one release, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved_to(old: str, new: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that was a module before.

    old   the package's name
    new   the module in which its names stand now
    """

    def find(name: str) -> Any:
        try:
            value = getattr(import_module(new), name)
        except AttributeError:
            raise AttributeError(f"module {old!r} has no attribute {name!r}", name=name) from None
        warnings.warn(
            f"{old}.{name} is {new}.{name} since 0.2.0; the old name goes with 0.3.0",
            DeprecationWarning,
            stacklevel=2,
        )
        return value

    return find
