"""Choose a plan: all ways to cut a model over so many GPUs, costed by a profile.

Only what `apply` runs is offered. What cannot run, or does not fit into memory, is kept with its
reason, so that a user sees why it was not chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GIB
from tlora_fx.cost.load import Round, round_of_jobs
from tlora_fx.cost.memory import Memory, fits, memory_of, require_fits, usable_bytes
from tlora_fx.cost.mesh_fits import every_mesh
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.plan import Estimate, MeshShape, Plan, Schedule, model_fingerprint
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import profile_for
from tlora_fx.cost.step_time import GPUS_PER_NODE, SQUARE, CostModel, StepTime, layers_ms, step_time
from tlora_fx.errors import NoPlanFits, ProfileMissing, TloraError, UnknownGpu
from tlora_fx.ir.graph import HEAD
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import require_shardable, require_whole_pairs
from tlora_fx.parallel.prepare import obstacles
from tlora_fx.parallel.prepare import require_fits as require_mesh_fits
from tlora_fx.parallel.stages import legal_cuts
from tlora_fx.planners.protocol import Planner, PlannerOptions
from tlora_fx.planners.recompute_budgets import BUDGETS, BudgetPrices
from tlora_fx.planners.stage_cuts import cut_layers

#: Micro-batches of a replica, times the stages of its pipeline.
MICRO_BATCHES = (1, 2, 4, 8)
#: GPipe takes as long as 1F1B and more memory.
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved")
INTERLEAVED_STAGES = 2
CPU = "cpu"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that was looked at.

    time, memory   None where it cannot run
    reason         why it was dropped, "" where it was not
    """

    plan: Plan
    time: StepTime | None = None
    memory: Memory | None = None
    reason: str = ""

    @property
    def runs(self) -> bool:
        """Whether it can be chosen."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """Result of a search over all plans.

    candidates   those that run, best first, then those that do not
    tokens       of a round
    sequences    of a round
    """

    candidates: tuple[Candidate, ...]
    tokens: int
    cost: CostModel
    sequences: int

    @property
    def running(self) -> list[Candidate]:
        """Candidates that run, best first."""
        return [candidate for candidate in self.candidates if candidate.runs]

    @property
    def dropped(self) -> list[Candidate]:
        """Candidates that do not run."""
        return [candidate for candidate in self.candidates if not candidate.runs]

    def best(self) -> Plan:
        """The plan with the shortest step, with its estimate; raises NoPlanFits."""
        if not self.running:
            reasons = dict.fromkeys(f"{c.plan.mesh}: {c.reason}" for c in self.dropped)
            raise NoPlanFits(
                "no plan for this model and these GPUs can run",
                base=self.cost.facts.title,
                found="\n".join(list(reasons)[:12]),
                help="use more GPUs, shorter samples or smaller batches",
            )
        return self.running[0].plan

    def smallest(self) -> Plan | None:
        """The plan with the least memory of those that only lack memory."""
        short = [one for one in self.dropped if one.memory is not None]
        smallest = min(short, key=lambda one: one.memory.total if one.memory else 0.0, default=None)
        return smallest.plan if smallest is not None else None


class Auto(Planner):
    """The fastest plan that fits, by measured times of layers."""

    name: ClassVar[str] = "auto"

    class Options(PlannerOptions):
        """Target of the search: the processes, and the memory of one.

        round             of the jobs; None: what their fields say
        longest           round that needs the most memory; None: `round`
        allow_estimated   profiles that were scaled from another GPU's count too
        """

        round: Round | None = None
        longest: Round | None = None
        allow_estimated: bool = False

    def make(
        self, model: SuperModel, shape: MeshShape | None, options: Options, profile: Any
    ) -> Plan:
        """The best plan of `processes` GPUs, or of a mesh.

        profile   a Profile, or what `profile_for` takes; None: that of the device at hand
        raises    ProfileMissing, MeshDoesNotFit, JobTooLong, NoPlanFits
        """
        if shape is not None:
            require_mesh_fits(model, shape)
        if not isinstance(profile, Profile):
            facts, estimated = facts_of(model), options.allow_estimated
            profile = (
                profile_for(facts, profile, allow_estimated=estimated)
                if profile
                else profile_here(facts, allow_estimated=estimated)
            )
        work = options.round or round_of_jobs(model.jobs, max_row_tokens=options.max_row_tokens)
        processes, meshes = (shape.size, [shape]) if shape else (options.processes, None)
        longest = options.longest
        plans = search(model, profile, work, processes, options.gpus_per_node, meshes, longest)
        smallest = plans.smallest()
        if not plans.running and smallest is not None and profile.source == "calibrated":
            # Its memory is estimated, so nothing is refused for it.
            return smallest
        require_memory(plans, longest or work)
        return plans.best()

    def holds_whole_base(self, plan: Plan) -> bool:
        """Whether the plan has replicas alone, and no base that is sharded over them."""
        return _holds_whole_layers(plan)


def device_name() -> str:
    """The GPU at hand, as the driver names it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else CPU


def profile_here(facts: ModelFacts, *, allow_estimated: bool) -> Profile:
    """The profile to plan with on the device at hand; a CPU has no data sheet.

    raises    ProfileMissing, UnknownGpu
    """
    name = device_name()
    try:
        return profile_for(facts, name, allow_estimated=allow_estimated)
    except UnknownGpu as error:
        if name != CPU:
            raise
        raise ProfileMissing(
            "there is no measured profile of this model on this CPU",
            base=facts.title,
            help="name a plan: --plan replicated, tensor, fsdp or pipeline; or measure one with "
            "`tlora-fx profile jobs.yaml`",
        ) from error


def search(
    model: SuperModel,
    profile: Profile,
    work: Round,
    processes: int,
    gpus_per_node: int = GPUS_PER_NODE,
    meshes: Sequence[MeshShape] | None = None,
    longest: Round | None = None,
    nano_batches: Sequence[int] = (),
) -> PlanSearch:
    """Look at all plans of so many processes.

    meshes         those to look at; None: all of that size
    longest        the round that needs the most memory; None: `work`
    nano_batches   numbers of them to look at beside one, where rows can be cut so
    """
    largest = longest or work
    cost = CostModel(facts_of(model), profile, gpus_per_node)
    prices = BudgetPrices(model.group, work, compiled=profile.compiled)
    fingerprint, legal = model_fingerprint(model), _legal(model)
    candidates: list[Candidate] = []
    for mesh in meshes or every_mesh(processes):
        reason = _obstacle(model, mesh, gpus_per_node)
        if reason:
            bare = Plan(planner=Auto.name).model_copy(update={"mesh": mesh})
            candidates.append(Candidate(bare, reason=reason))
            continue
        for variant in variants(cost, mesh, work, legal):
            plan = variant.model_copy(update={"model": fingerprint})
            candidate = _judged(model, cost, plan, work, largest)
            candidates.append(candidate)
            for count in nano_batches if _cuts_rows(model, plan) else ():
                cut = plan.model_copy(update={"nano_batches": count})
                candidates.append(_judged(model, cost, cut, work, largest))
            if candidate.memory is not None and not candidate.runs:
                again = recomputing(cost, plan, work, legal)
                whole = _judged(model, cost, again, work, largest)
                candidates.append(whole)
                if whole.runs:
                    # What fits with layers' inputs alone may fit with more.
                    budgets = (
                        _judged(model, cost, one, work, largest)
                        for one in _budgeted(cost, plan, prices, work, legal)
                    )
                    candidates += filter(None, [next((one for one in budgets if one.runs), None)])
    ordered = tuple(_estimated(candidate, cost) for candidate in sorted(candidates, key=_order))
    return PlanSearch(ordered, work.load.total, cost, work.load.sequences)


def _cuts_rows(model: SuperModel, plan: Plan) -> bool:
    """Whether nano-batches can hide what processes say to each other in a row."""
    layers = model.group.form == "packed" and model.group.blocks.keys() - {HEAD}
    return bool(layers) and plan.mesh.tp > 1 and plan.mesh.pp == 1 and not plan.shard_base


def variants(cost: CostModel, mesh: MeshShape, work: Round, legal: Sequence[int]) -> Iterator[Plan]:
    """All plans on one mesh that differ in time or memory, none of them recomputing.

    legal   layers where a stage may begin
    """
    for factor in MICRO_BATCHES:
        parts = factor * mesh.pp * mesh.dp
        if factor > 1 and parts > work.load.sequences:
            return
        first = Plan(
            planner=Auto.name,
            mesh=MeshShape(dp=mesh.dp, tp=mesh.tp),
            micro_batches=factor * mesh.pp,
        )
        yield from _staged(cost, first, mesh, work, legal) if mesh.pp > 1 else _sharded(first)


def recomputing(
    cost: CostModel, plan: Plan, work: Round, legal: Sequence[int], budget: float = 0.0
) -> Plan:
    """The same plan with layers computed again in the backward, which moves its cuts.

    budget   share of what layers keep that is kept all the same
    """
    again = plan.model_copy(update={"recompute": True, "recompute_budget": budget})
    if plan.mesh.pp == 1:
        return again
    whole = again.model_copy(update={"mesh": MeshShape(dp=plan.mesh.dp, tp=plan.mesh.tp)})
    cuts = balanced_stages(cost, whole, plan.mesh.pp, plan.stages, work, legal)
    return again.model_copy(update={"cuts": cuts})


def _holds_whole_layers(plan: Plan) -> bool:
    return plan.mesh.size == plan.mesh.dp and not plan.shard_base


def _budgeted(
    cost: CostModel, plan: Plan, prices: BudgetPrices, work: Round, legal: Sequence[int]
) -> Iterator[Plan]:
    """The same plan keeping a share of what layers keep, the cheapest share first."""
    for budget in BUDGETS:
        key = budget, plan.mesh.tp
        try:
            cost.prices[key] = prices.price(*key)
        except TloraError as error:
            logger.info("recompute budgets are not looked at: %s", error)
            return
        yield recomputing(cost, plan, work, legal, budget)


def _sharded(first: Plan) -> Iterator[Plan]:
    """A plan, and the same with its base sharded over replicas."""
    yield first
    if first.mesh.dp > 1:
        for kept in (False, True):
            yield first.model_copy(update={"shard_base": True, "keep_gathered": kept})


def _staged(
    cost: CostModel, first: Plan, mesh: MeshShape, work: Round, legal: Sequence[int]
) -> Iterator[Plan]:
    """The same plan as a pipeline, under each pipeline schedule, its base sharded or not."""
    for schedule in SCHEDULES:
        stages = mesh.pp * (INTERLEAVED_STAGES if schedule == "interleaved" else 1)
        if stages <= len(legal) + 1:
            cuts = balanced_stages(cost, first, mesh.pp, stages, work, legal)
            staged = {"mesh": mesh, "cuts": cuts, "schedule": schedule}
            yield from _sharded(first.model_copy(update=staged))


def balanced_stages(
    cost: CostModel, plan: Plan, pp: int, stages: int, work: Round, legal: Sequence[int]
) -> tuple[int, ...]:
    """Cuts whose dearest stage is as cheap as can be, embedding and loss counted at the ends.

    plan   without stages, on the replicas and parts of each process of a stage
    """
    loads = work.parts(plan.mesh.dp * pp, SQUARE * cost.facts.hidden)
    load = max(loads, key=lambda load: load.total)
    return tuple(cut_layers(layers_ms(cost, plan, load), stages, legal))


def require_memory(plans: PlanSearch, work: Round) -> None:
    """Name the job that is too long, where every plan that could run lacks memory.

    raises    JobTooLong
    """
    if not plans.running and (smallest := plans.smallest()) is not None:
        require_fits(plans.cost, smallest, work)


def _legal(model: SuperModel) -> list[int]:
    """Layers where a stage may begin; none where a model cannot be cut at all."""
    try:
        return sorted(legal_cuts(model))
    except TloraError:
        return []


def _obstacle(model: SuperModel, mesh: MeshShape, gpus_per_node: int) -> str:
    if mesh.tp > gpus_per_node or gpus_per_node % mesh.tp:
        return f"tp={mesh.tp} does not stay inside a node of {gpus_per_node}"
    return "; ".join(obstacles(model, mesh))


def _judged(
    model: SuperModel, cost: CostModel, plan: Plan, work: Round, longest: Round
) -> Candidate:
    """Time and memory of a plan, or why it cannot run."""
    try:
        if plan.shard_base:
            require_shardable(model, plan)
        if plan.nano_batches > 1:
            require_whole_pairs(model.jobs, plan, cuts=True)
        time, memory = step_time(cost, plan, work), memory_of(cost, plan, longest)
    except TloraError as error:
        return Candidate(plan, reason=error.facts.get("reason") or error.what)
    if fits(cost, memory):
        return Candidate(plan, time, memory)
    needs, has = memory.total / GIB, usable_bytes(cost.profile) / GIB
    return Candidate(plan, time, memory, f"needs {needs:.1f} GiB of {has:.1f}")


def _order(candidate: Candidate) -> tuple[bool, float, int, str]:
    """Best first; of equal ones the simplest; what does not run last."""
    seconds = candidate.time.seconds if candidate.time and candidate.runs else 0.0
    # Sums of equal times differ in their last bits.
    seconds = float(f"{seconds:.9g}")
    mesh = candidate.plan.mesh
    kinds = sum(size > 1 for size in (mesh.pp, mesh.dp, mesh.tp)) + candidate.plan.shard_base
    return not candidate.runs, seconds, kinds, str(candidate.plan)


def _estimated(candidate: Candidate, cost: CostModel) -> Candidate:
    """The candidate with its estimate in its plan."""
    if candidate.time is None or candidate.memory is None:
        return candidate
    # A plan rests on estimates where a layer was not measured as it is cut. Links by a data sheet
    # alone do not count: the estimate names them beside the profile.
    profile, tp = cost.profile, candidate.plan.mesh.tp
    measured = (profile.layer(layer.structure, tp) is not None for layer in cost.facts.layers)
    estimated = profile.estimated or not all(measured)
    by_sheet = cost.collectives.estimated and candidate.plan.mesh.size > 1 and not estimated
    estimate = Estimate(
        step_seconds=candidate.time.seconds,
        memory_bytes=round(candidate.memory.total),
        profile=cost.profile.name + ("; links by data sheet" if by_sheet else ""),
        estimated=estimated,
    )
    return replace(candidate, plan=candidate.plan.model_copy(update={"estimate": estimate}))
