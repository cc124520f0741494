"""What every planner offers.

A planner is a class with a name. Other packages offer theirs in the entry-point group
`tlora_fx.planners`.
"""

from __future__ import annotations

import inspect
import pkgutil
from abc import ABC, abstractmethod
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import PluginBroken, UnknownPlanner, nearest
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.parallel.runner import StepRunner
from tlora_fx.pipeline.registry import PLANNERS, load_plugin

PACKAGE = "tlora_fx.planners"


class Planner(ABC):
    """Decides how a model is cut over processes."""

    name: ClassVar[str]

    @abstractmethod
    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """A plan for a model on a mesh; the same for the same arguments, on every process.

        model     compiled; weights are not needed
        shape     the mesh, or None where the planner is to choose it (`processes` in options)
        profile   measured times of layers, where the planner uses them
        raises    MeshDoesNotFit, PlanNotRunnable
        """

    def apply(self, model: SuperModel, plan: Plan, mesh: Mesh) -> StepRunner:
        """Make a model ready to run under a plan; all planners share one way."""
        from tlora_fx.parallel.apply import apply

        return apply(model, plan, mesh)


def find_planner(name: str) -> Planner:
    """The planner of this name.

    raises    UnknownPlanner where there is none, PluginBroken where it cannot be imported
    """
    if own := _own_planners().get(name):
        return own()
    offered = [entry for entry in entry_points(group=PLANNERS) if entry.name == name]
    if not offered:
        known = planner_names()
        raise UnknownPlanner(
            f"there is no planner '{name}'",
            nearest=nearest(name, known),
            help="known planners: " + ", ".join(known),
        )
    plugin = load_plugin(offered[0])
    wrong = plugin.broken
    if not wrong and not (plugin.found and issubclass(plugin.found, Planner)):
        wrong = f"{plugin.target} is no Planner"
    if wrong or plugin.found is None:
        raise PluginBroken(
            f"planner '{name}' is broken",
            package=plugin.package or None,
            entry=plugin.target,
            found=wrong,
            help="mend or uninstall that package",
        )
    found: Planner = plugin.found()
    return found


def planner_names() -> list[str]:
    """All names of planners."""
    return sorted({*_own_planners(), *(entry.name for entry in entry_points(group=PLANNERS))})


def _own_planners() -> dict[str, type[Planner]]:
    """The planners of this package, by name."""
    modules = pkgutil.iter_modules(import_module(PACKAGE).__path__)
    own = [kind for entry in modules for kind in _planners_in(f"{PACKAGE}.{entry.name}")]
    return {kind.name: kind for kind in own}


def _planners_in(module: str) -> list[type[Planner]]:
    """The planners that a module defines."""
    classes = [value for value in vars(import_module(module)).values() if inspect.isclass(value)]
    return [
        kind
        for kind in classes
        if kind.__module__ == module and issubclass(kind, Planner) and not inspect.isabstract(kind)
    ]
