"""Run the graph passes that a plan needs on a compiled model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_fx.driver import find_passes
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.pipeline import Pipeline, Runner, Verify, parse_pass
from tlora_fx.pipeline.instrument import Event
from tlora_fx.planners.feasible import fitting_meshes
from tlora_fx.planners.plan import MeshShape, Plan
from tlora_fx.supermodel import SuperModel

# Who says in a group's notes that it was prepared.
NOTED_BY = "planners"


def planned_passes(plan: Plan) -> list[str]:
    """The passes of a plan, in order, each as pipelines write it.

    Nano-batches are none of them: their number may change while a model trains (nano_model.py).
    """
    texts = []
    if plan.mesh.tp > 1:
        texts.append(f"shard-tensor{{size={plan.mesh.tp}}}")
        if plan.sequence_parallel:
            texts.append(f"shard-sequence{{size={plan.mesh.tp}}}")
    if plan.recompute:
        texts.append("recompute-layers")
    return texts


def prepared(model: SuperModel, plan: Plan, *, verify: Verify = "structure") -> SuperModel:
    """The model as a plan runs it, without weights.

    model     as `compile` made it; its graphs are rewritten in place
    returns   another model over the same graphs, compiled as the given one is, or the same one
              where the plan needs no pass
    raises    PlanNotForModel, PlanNotRunnable; TloraError of a pass
    """
    plan.demand_for(model)
    demand_sequence(model, plan)
    texts = planned_passes(plan)
    if not texts:
        return model
    if model.ready or any(name == NOTED_BY for name, _ in model.group.notes):
        raise PlanNotRunnable(
            "a plan rewrites the graphs of a model that is as it was compiled",
            plan=f"{plan.planner} on {plan.mesh}",
            found="a model with weights" if model.ready else "a model prepared for a plan",
            help="compile the jobs again",
        )
    find_passes()
    runner = Runner(Pipeline(()), verify=verify)
    for place, text in enumerate(texts, 1):
        runner.run_one(Event(place, parse_pass(text), "group", model.group))
    model.group.notes.append((NOTED_BY, f"prepared for {plan.planner} on {plan.mesh}"))
    made = SuperModel(model.group, model.backbone, model.jobs)
    if model.compiled_with is not None:
        made.compile(**model.compiled_with)
    return made


def demand_sequence(model: SuperModel, plan: Plan) -> None:
    """Refuse to cut rows along their tokens where nothing would run such rows.

    raises    PlanNotRunnable, with what would
    """
    if not plan.sequence_parallel:
        return
    why, instead = "", "leave sequence_parallel out"
    if model.group.form != "packed":
        why = "the base runs padded batches, not packed rows"
    elif plan.mesh.tp == 1:
        why = "pieces of rows lie on the processes of tp, and the mesh has tp=1"
        instead += _meshes_with_tp(model, plan.mesh.size)
    elif plan.nano_batches > 1:
        why = "nano-batches are runs of whole sequences"
        instead += ", or plan 1 nano-batch"
    if why:
        raise PlanNotRunnable(
            "hidden states cannot be cut along the row's tokens",
            plan=f"{plan.planner} on {plan.mesh}",
            reason=why,
            help=instead,
        )


def refuse_sequence(planner: str, options: Mapping[str, Any]) -> None:
    """Refuse to cut rows along their tokens under a planner that cuts no matrices.

    options   as of its `plan`
    raises    PlanNotRunnable
    """
    if options.get("sequence_parallel"):
        raise PlanNotRunnable(
            f"the plan '{planner}' cannot cut rows along their tokens",
            reason="pieces of rows lie on the processes that hold pieces of matrices",
            found="sequence_parallel",
            help="choose tensor, or auto, or pipeline with a mesh that has tp",
        )


def any_with_tp(model: SuperModel, processes: int) -> MeshShape:
    """A mesh of so many processes that cuts a model's matrices; replicas where there is none."""
    found = (mesh for mesh in fitting_meshes(model, processes) if mesh.tp > 1 and mesh.pp == 1)
    return next(found, MeshShape(dp=processes))


def _meshes_with_tp(model: SuperModel, processes: int) -> str:
    """What else would do: the meshes of so many processes that have tp."""
    found = [f"({mesh})" for mesh in fitting_meshes(model, processes) if mesh.tp > 1]
    if found:
        return f", or use a mesh of {', '.join(found)}"
    return f"; no mesh of {processes} processes with tp fits this model"
