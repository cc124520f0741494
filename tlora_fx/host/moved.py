"""Public names that moved: they are found under their old name for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

#: Modules that pages of 0.1.0 named, and where their names stand now.
MODULES = {
    "tlora_fx.batch": "tlora_fx.model.batch",
    "tlora_fx.driver": "tlora_fx.compiler",
    "tlora_fx.graph": "tlora_fx.ir.graph",
    "tlora_fx.inspect.recorder": "tlora_fx.inspect.program",
    "tlora_fx.runtime.weights": "tlora_fx.runtime.adapters.files",
    "tlora_fx.scheduler.bases": "tlora_fx.cost.load",
    "tlora_fx.scheduler.cluster": "tlora_fx.cost.hardware",
    "tlora_fx.scheduler.demand": "tlora_fx.cost.load",
    "tlora_fx.scheduler.estimator": "tlora_fx.cost.estimator",
    "tlora_fx.scheduler.estimator_explain": "tlora_fx.cost.estimator",
    "tlora_fx.scheduler.estimator_profiles": "tlora_fx.cost.profile_sources",
    "tlora_fx.scheduler.placement": "tlora_fx.scheduler.search.placement",
    "tlora_fx.shapes": "tlora_fx.ir.shapes",
    "tlora_fx.stored": "tlora_fx.ir.storage",
}


def moved_to(old: str, new: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that was a module before.

    old   the package's name
    new   the module in which its names stand now
    """

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}", name=name)
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


class _Moved(MetaPathFinder, Loader):
    """Finds the modules that are gone, after all that are there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = moved_to(module.__name__, MODULES[module.__name__])  # type: ignore[method-assign]


def find_moved_modules() -> None:
    """Make modules importable that have moved, once a process."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
