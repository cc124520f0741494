"""Run the graph passes that a plan needs on a compiled model."""

from __future__ import annotations

from tlora_fx.compiler import find_passes
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.pipeline import Pipeline, Runner, Verify, parse_pass
from tlora_fx.pipeline.instrument import Event

# Who says in a group's notes that it was prepared.
NOTED_BY = "planners"


def planned_passes(plan: Plan) -> list[str]:
    """The passes of a plan, in order, each as pipelines write it.

    Nano-batches are none of them: their number may change while a model trains (nano_model.py).
    """
    texts = []
    if plan.mesh.tp > 1:
        texts.append(f"shard-tensor{{size={plan.mesh.tp}}}")
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
