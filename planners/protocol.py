"""Interface of planners, and the options that all of them take.

A planner is a class with a name and a model of its options. Other packages offer theirs in the
entry-point group `tlora_fx.planners`.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PositiveInt,
    ValidationError,
    model_validator,
)

from tlora_fx.config.plugins import Plugin, load_plugin, plugin_names, plugins_of
from tlora_fx.cost.load import MAX_ROW_TOKENS
from tlora_fx.cost.plan import TAKEN_OUT, MeshShape, Plan
from tlora_fx.cost.step_time import GPUS_PER_NODE
from tlora_fx.errors import (
    PlanNotRunnable,
    PluginBroken,
    TloraError,
    UnknownPlanner,
    failed_at,
    nearest,
)
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh

if TYPE_CHECKING:
    from tlora_fx.parallel.apply import StepRunner

logger = logging.getLogger(__name__)

#: Where our planners stand, and the group of entry points of others.
PLANNERS = "tlora_fx.planners"


class PlannerOptions(BaseModel):
    """Options of every planner: the processes it plans for; each planner adds its own.

    processes        GPUs to plan for, where no mesh is given
    gpus_per_node    of these
    memory_bytes     of one device; None where it is not known
    max_row_tokens   of the longest row
    raises           PlanNotRunnable, naming the option
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    processes: PositiveInt = 1
    gpus_per_node: PositiveInt = GPUS_PER_NODE
    memory_bytes: int | None = None
    max_row_tokens: PositiveInt = MAX_ROW_TOKENS

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_by_name(cls, options: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(options)
        except ValidationError as error:
            raise _refusal(cls, error) from error


def _refusal(options: type[PlannerOptions], error: ValidationError) -> PlanNotRunnable:
    """The first mistake in a planner's options."""
    mistake = error.errors()[0]
    name, value = ".".join(map(str, mistake["loc"])), mistake["input"]
    if mistake["type"] == "extra_forbidden":
        known = list(options.model_fields)
        return PlanNotRunnable(
            f"the planner has no option '{name}'",
            reason=TAKEN_OUT.get(name),
            nearest=nearest(name, known),
            help="its options: " + ", ".join(known),
        )
    return PlanNotRunnable(
        f"the planner's option '{name}' cannot be {value!r}",
        reason=TAKEN_OUT.get(value) if isinstance(value, str) else None,
        found=mistake["msg"],
        help="give another value, or leave the option out",
    )


class Planner:
    """Decides how a model is cut over processes; one of these overrides `make`."""

    name: ClassVar[str]
    Options: ClassVar[type[PlannerOptions]] = PlannerOptions

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        options: PlannerOptions | Mapping[str, Any] | None = None,
    ) -> Plan:
        """A plan for a model on a mesh; the same for the same arguments, on every process.

        model     compiled; weights are not needed
        shape     the mesh, or None where the planner is to choose it (`processes` in options)
        profile   measured times of layers, where the planner uses them
        options   an instance of `Options`, or its fields
        raises    MeshDoesNotFit, PlanNotRunnable; PluginBroken for a foreign planner that fails
        """
        valid = self.Options.model_validate(options or {})
        if type(self).__module__.startswith(f"{PLANNERS}."):
            return self.make(model, shape, valid, profile)
        try:
            plan = self.make(model, shape, valid, profile)
        except TloraError:
            raise
        except Exception as error:
            raise PluginBroken(
                f"planner '{self.name}' raised {type(error).__name__}",
                at=failed_at(error),
                found=error,
                help="this is a mistake of the planner",
            ) from error
        if not isinstance(plan, Plan):
            raise PluginBroken(
                f"planner '{self.name}' made no plan",
                expected="a tlora_fx.cost.plan.Plan",
                found=repr(plan)[:100],
                help="this is a mistake of the planner",
            )
        return plan

    def make(self, model: SuperModel, shape: MeshShape | None, options: Any, profile: Any) -> Plan:
        """Make a plan; the same for the same arguments, on every process.

        model     compiled; weights are not needed
        shape     the mesh, or None where the planner is to choose it (`processes` in options)
        options   an instance of `Options`, validated
        profile   measured times of layers, or None
        raises    MeshDoesNotFit, PlanNotRunnable
        """
        raise NotImplementedError

    def holds_whole_base(self, plan: Plan) -> bool:
        """Whether each process holds the whole base under a plan of this planner.

        If so, samples are drawn while jobs train, and the base is checked with the weights that the
        processes hold. False is right for any plan: no samples are drawn, and the base is checked
        before its weights are spread.
        """
        return False

    def may_grow(self, plan: Plan) -> bool:
        """Whether banks of adapters may double under a plan of this planner, for a job that joins.

        False is right for any plan: a job then waits until a slot is free.
        """
        return False

    def apply(self, model: SuperModel, plan: Plan, mesh: Mesh) -> StepRunner:
        """Make a model ready to run under a plan; all planners share one way."""
        from tlora_fx.parallel.apply import apply

        return apply(model, plan, mesh)


def find_planner(name: str) -> Planner:
    """The planner of this name.

    raises    UnknownPlanner where there is none, PluginBroken where it cannot be imported
    """
    if builtin := _own_planners().get(name):
        return builtin()
    offered = [entry for entry in entry_points(group=PLANNERS) if entry.name == name]
    if not offered:
        known = planner_names()
        raise UnknownPlanner(
            f"there is no planner '{name}'",
            nearest=nearest(name, known),
            help="known planners: " + ", ".join(known),
        )
    plugin = load_planner(offered[0])
    if plugin.found is None:
        raise plugin.error(f"planner '{name}'")
    planner: Planner = plugin.found()
    return planner


def plugin_planners() -> list[Plugin]:
    """The planners of other packages, broken ones too, by name."""
    return plugins_of(PLANNERS, load_planner)


def load_planner(entry: EntryPoint) -> Plugin:
    """Import what an entry point names; never raises."""
    plugin = load_plugin(entry)
    if plugin.found is None or issubclass(plugin.found, Planner):
        return plugin
    return replace(plugin, found=None, broken=f"{plugin.target} is no Planner")


def planner_of(plan: Plan) -> Planner:
    """The planner that made a plan; where it is not there or broken, one with the safe answers."""
    try:
        return find_planner(plan.planner)
    except (UnknownPlanner, PluginBroken) as error:
        logger.warning("the planner '%s' cannot be asked about its plan: %s", plan.planner, error)
        return Planner()


def planner_names() -> list[str]:
    """Names of all planners."""
    return plugin_names(PLANNERS, _own_planners())


def _own_planners() -> dict[str, type[Planner]]:
    """The planners of this package, by name."""
    modules = pkgutil.iter_modules(import_module(PLANNERS).__path__)
    kinds = (kind for entry in modules for kind in _planners_in(f"{PLANNERS}.{entry.name}"))
    return {kind.name: kind for kind in kinds}


def _planners_in(module: str) -> list[type[Planner]]:
    """The planners that a module defines."""
    classes = [value for value in vars(import_module(module)).values() if inspect.isclass(value)]
    return [
        kind
        for kind in classes
        if kind.__module__ == module and issubclass(kind, Planner) and kind is not Planner
    ]
