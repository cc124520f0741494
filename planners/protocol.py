"""What every planner offers, and what every plan runs as.

A planner is a class with a name; its file has the same name. Other packages offer theirs in the
entry-point group `tlora_fx.planners`.
"""

from __future__ import annotations

import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import PluginBroken, UnknownPlanner, nearest
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.pipeline.registry import PLANNERS, load_plugin

PACKAGE = "tlora_fx.planners"


class StepRunner(Protocol):
    """Runs forward and backward of whole rounds under one plan.

    Runners of whole rows also have `nano_batches`, a number that may change between rounds.
    """

    def run(self, rows: Sequence[PackedBatch], weights: Tensor) -> Tensor:
        """One round: forward, backward, and each job's loss.

        Afterwards the gradients of this process's parameters hold the whole round's: summed over
        replicas, and over tp where a replicated half of an adapter needs it.

        rows      the whole round's rows on the CPU, the same on every process; their number is a
                  multiple of dp * micro_batches. Replica d runs rows d, d + dp, d + 2 dp, ...
        weights   [J] on the process's device: what a job's loss sum is multiplied with
        returns   [J] each job's weighted loss sum over the round, the same on every process
        """


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
    modules = [entry.name for entry in pkgutil.iter_modules(import_module(PACKAGE).__path__)]
    if name.replace("-", "_") in modules and (own := _planner_in(name.replace("-", "_"))):
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
    """The planners of this package."""
    modules = pkgutil.iter_modules(import_module(PACKAGE).__path__)
    found = filter(None, (_planner_in(entry.name) for entry in modules))
    return {planner.name: planner for planner in found}


def _planner_in(file: str) -> type[Planner] | None:
    """The planner whose file has this name, None where the file holds something else."""
    module = import_module(f"{PACKAGE}.{file}")
    for value in vars(module).values():
        own = inspect.isclass(value) and value.__module__ == module.__name__
        if own and issubclass(value, Planner) and not inspect.isabstract(value):
            return value if value.name.replace("-", "_") == file else None
    return None
