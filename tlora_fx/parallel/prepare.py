"""Run the graph passes that a plan needs on a compiled model."""

from __future__ import annotations

from tlora_fx.cost.mesh_fits import cut_obstacles, every_mesh
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import MeshDoesNotFit, PlanNotRunnable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.passes import find_passes
from tlora_fx.pipeline import Pipeline, Runner, parse_pass
from tlora_fx.pipeline.instrument import Event

# Who says in a group's notes that it was prepared.
NOTED_BY = "planners"


def planned_passes(plan: Plan) -> list[str]:
    """The passes of a plan, in order, each as pipelines write it.

    Nano-batches are none of them: their number may change while a model trains (`NanoModel`).
    """
    texts = []
    if plan.mesh.tp > 1:
        texts.append(f"shard-tensor{{size={plan.mesh.tp}}}")
    if plan.recompute:
        budget = plan.recompute_budget
        texts.append("recompute-layers" + (f"{{budget={budget}}}" if budget else ""))
    return texts


def prepared(model: SuperModel, plan: Plan) -> SuperModel:
    """The model as a plan runs it, without weights.

    model     as `compile` made it; its graphs are rewritten in place
    returns   another model over the same graphs, compiled as the given one is, or the same one
              where the plan needs no pass or where it ran under this plan before
    raises    PlanNotForModel, PlanNotRunnable; TloraError of a pass
    """
    if model.applied is not None and model.applied.plan == plan:
        return model
    plan.require_model(model)
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
    runner = Runner(Pipeline(()))
    for number, text in enumerate(texts, 1):
        runner.run_one(Event(number, parse_pass(text), "group", model.group))
    model.group.notes.append((NOTED_BY, f"prepared for {plan.planner} on {plan.mesh}"))
    planned = SuperModel(model.group, model.backbone, model.jobs, model.resolve)
    if model.compiled_with is not None:
        planned.compile(**model.compiled_with)
    return planned


# Whether a mesh can run a model, and which meshes of the same size could.


def obstacles(model: SuperModel, shape: MeshShape) -> list[str]:
    """Reasons why a mesh cannot run a model, a sentence each; none where it can."""
    reasons = cut_obstacles(shape, len(model.layer_order()), model.backbone.config)
    twice = model.jobs_with_tied_tokens() if shape.pp > 1 else []
    if twice:
        reasons.append(
            f"pp={shape.pp} parts the embedding from its head, and job '{twice[0]}' trains "
            "the same tokens in both"
        )
    return reasons


def fitting_meshes(model: SuperModel, processes: int) -> list[MeshShape]:
    """All meshes of so many processes that can run a model."""
    return [shape for shape in every_mesh(processes) if not obstacles(model, shape)]


def require_fits(model: SuperModel, shape: MeshShape) -> None:
    """Refuse a mesh that cannot run a model.

    raises    MeshDoesNotFit, with the meshes of the same size that can
    """
    reasons = obstacles(model, shape)
    if reasons:
        others = ", ".join(f"({mesh})" for mesh in fitting_meshes(model, shape.size))
        raise MeshDoesNotFit(
            f"a mesh of {shape} cannot run this model",
            base=model.backbone.title,
            found="\n".join(reasons),
            help=f"these meshes of {shape.size} can: {others}",
        )
